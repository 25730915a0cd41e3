"""A trace of chosen steps of a run."""

from tests.apps.train import toy_run


def test_a_trace_of_some_steps(tmp_path):
  toy_run.train(tmp_path, 6, profile_steps=(2, 4), infer_eval_dataset_cfg=None, train_eval_dataset_cfg=None)
  traces = [path for path in (tmp_path / 'train/plugins/profile').rglob('*') if path.is_file()]
  assert traces and any(b'train' in path.read_bytes() for path in traces)
  assert [row['step'] for row in toy_run.lines(tmp_path)['train']] == [2, 4, 6]
