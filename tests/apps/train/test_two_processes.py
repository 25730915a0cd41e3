"""Two processes run the train command together, over gloo on CPU: the result is that of one process."""

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import runtime
from t5x_lite.errors import ExitCode
from tests import processes
from tests.apps.train import stopped_run
from tests.apps.train import toy_run

_PROGRAM = '''
    import sys
    from t5x_lite import runtime
    process, model_dir = runtime.join(runtime.ClusterConfig()).process, sys.argv[1]
    from t5x_lite import data
    from t5x_lite import partitioning
    from t5x_lite.trainer import NonFinitePolicy
    from tests.apps.train import stopped_run, toy_run
    # Both the rows of a batch and the parameters are spread over the processes.
    partitioner = partitioning.PjitPartitioner(num_partitions=2)
    stopped_run.train_and_evaluate(model_dir, partitioner)

    def open_ending(*args, **kwargs):
      iterator = data.open_train_iterator(*args, **kwargs)

      class Ending(type(iterator)):
        """Data that ends after 5 batches in one process and after 4 in the other."""
        ends_together = False

        def __next__(self):
          if self._num_batches == (5, 4)[process]:
            raise StopIteration
          return super().__next__()

      iterator.__class__ = Ending
      return iterator

    for _ in range(2):
      step, _ = toy_run.train(
          model_dir + '-ended', 99, get_dataset_fn=open_ending, infer_eval_dataset_cfg=None, partitioner=partitioner,
          **{**stopped_run.COMMON, 'eval_period': None})
      print('ended at step', step, flush=True)
    # Both see that the loss is not finite, roll back to the same checkpoint, and end alike.
    diverging = {'learning_rate_fn': lambda step: 1e30,
                 'non_finite_policy': NonFinitePolicy(action='roll_back', max_roll_backs=1)}
    print('now diverging', file=sys.stderr)
    toy_run.train(model_dir, 20, trainer_kwargs=diverging, train_eval_dataset_cfg=None, infer_eval_dataset_cfg=None,
                  partitioner=partitioner, **{**stopped_run.COMMON, 'eval_period': None})
'''


def test_two_processes_equal_one(tmp_path):
  stopped_run.train_and_evaluate(tmp_path / 'one', toy_run.partitioner())
  outputs = processes.run(_PROGRAM, tmp_path / 'two', num_devices=2, status=ExitCode.NAN)
  for output in outputs:
    assert 'the loss of step 10 is not finite' in output
    assert 'resumes from step 8, the newest sound checkpoint' in output
    assert output.count('ended at step 4') == 2
  assert outputs[0].count('Ended at step 4 of 99: data_ended') == 2
  assert checkpoints.all_steps(tmp_path / 'two-ended') == [3, 4]
  assert [
    row['step'] for row in toy_run.lines(tmp_path / 'two-ended')['training_eval/letters']
  ] == [4]
  events = list(runtime.read_events(tmp_path / 'two-ended' / runtime.EVENTS_FILE))
  assert [(event.process, event.details['cause']) for event in events if event.kind == 'stop'] == [
    (0, 'data_ended')
  ] * 2
  outputs = [output.partition('now diverging')[0] for output in outputs]
  assert (tmp_path / 'two/checkpoint_9/UNSOUND').exists()
  # One process speaks for both.
  assert (
    'Final metrics' in outputs[0]
    and 'Final metrics' not in outputs[1]
    and 'step 8' not in outputs[1]
  )
  one, two = toy_run.lines(tmp_path / 'one'), toy_run.lines(tmp_path / 'two')
  assert one.keys() == two.keys()
  for name, rows in one.items():
    others = [row for row in two[name] if row['step'] <= 8]
    assert [row['step'] for row in rows] == [row['step'] for row in others]
    for a, b in zip(rows, others, strict=True):
      for key, value in a.items():
        assert b[key] == pytest.approx(value, rel=1e-3, abs=1e-6, nan_ok=True), (name, key)
  assert one['train'][0]['loss'] == pytest.approx(two['train'][0]['loss'], rel=1e-6)
  (a, position_a), (b, _) = toy_run.saved(tmp_path / 'one', 8), toy_run.saved(tmp_path / 'two', 8)
  np.testing.assert_allclose(a['target']['hidden'], b['target']['hidden'], atol=1e-3)
  assert position_a
  for step in (3, 4):
    path = f'inference_eval/letters/predictions-{step}.jsonl'
    expected = (tmp_path / 'one' / path).read_text()
    assert all(
      (tmp_path / f'{name}-eval' / path).read_text() == expected for name in ('one', 'two')
    )
  assert 'already evaluated' in outputs[0] and 'already evaluated' not in outputs[1]
  predictions = [
    (tmp_path / name / 'inference_eval/letters/predictions-3.jsonl').read_text()
    for name in ('one', 'two')
  ]
  assert predictions[0] == predictions[1]
