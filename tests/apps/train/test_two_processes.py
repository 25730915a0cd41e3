"""Two processes run the train command together, over gloo on CPU: the result is that of one process."""

import numpy as np
import pytest

from tests import processes
from tests.apps.train import toy_run

_PROGRAM = '''
    import sys
    import jax
    process, port, num_processes, model_dir = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if num_processes > 1:
      jax.config.update('jax_cpu_collectives_implementation', 'gloo')
      jax.distributed.initialize(f'localhost:{port}', num_processes=num_processes, process_id=process)
    from t5x_lite import partitioning
    from t5x_lite.actions import EarlyStoppingAction
    from tests.apps.train import toy_run
    # Both the rows of a batch and the parameters are spread over the processes.
    partitioner = partitioning.PjitPartitioner(num_partitions=2)
    common = {'partitioner': partitioner, 'save': {'period': 3}, 'stats_period': 2, 'eval_period': 3}
    toy_run.train(model_dir, 4, **common)
    always = EarlyStoppingAction(('letters', 'loss'), 'max', patience=2, atol=100.0)
    # Two evaluations of this second part, at 6 and 8, make the action ask to stop, which only the lead process sees.
    step, state = toy_run.train(model_dir, 20, actions={'TRAIN_EVAL': [always]}, **{**common, 'eval_period': 2})
    assert step == int(state.step) == 8, step
    from t5x_lite import checkpoints
    from t5x_lite.apps import evaluate
    arguments = {'model': toy_run.model(), 'dataset_cfg': toy_run.dataset('validation'), 'partitioner': partitioner,
                 'restore_checkpoint_cfg': checkpoints.RestoreCheckpointConfig(model_dir, mode='all'),
                 'output_dir': model_dir + '-eval'}
    results = evaluate.evaluate(**arguments)
    assert list(results) == [3, 4, 6, 8] and evaluate.evaluate(**arguments) == results
    # Both see that the loss is not finite, roll back to the same checkpoint, and end alike.
    if num_processes > 1:
      from t5x_lite.errors import NonFiniteMetricError
      from t5x_lite.trainer import NonFinitePolicy
      diverging = {'learning_rate_fn': lambda step: 1e30,
                   'non_finite_policy': NonFinitePolicy(action='roll_back', max_roll_backs=1)}
      print('now diverging', flush=True)
      try:
        toy_run.train(model_dir, 20, trainer_kwargs=diverging, train_eval_dataset_cfg=None, infer_eval_dataset_cfg=None,
                      **{**common, 'eval_period': None})
      except NonFiniteMetricError as error:
        print(error)
    print('process', process, 'is done')
'''


def _run(num_processes, folder, name):
  return processes.run(_PROGRAM, folder, num_processes, folder / name, num_devices=4 // num_processes,
                       num_processes=num_processes)


def test_two_processes_equal_one(tmp_path):
  _run(1, tmp_path, 'one')
  outputs = _run(2, tmp_path, 'two')
  for process, output in enumerate(outputs):
    assert 'the loss of step 10 is not finite' in output
    assert 'resumes from step 8, the newest sound checkpoint' in output
    assert f'process {process} is done' in output
  outputs = [output.partition('now diverging')[0] for output in outputs]
  assert (tmp_path / 'two/checkpoint_9/UNSOUND').exists()
  # One process speaks for both.
  assert 'Final metrics' in outputs[0] and 'Final metrics' not in outputs[1] and 'step 8' not in outputs[1]
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
    assert all((tmp_path / f'{name}-eval' / path).read_text() == expected for name in ('one', 'two'))
  assert 'already evaluated' in outputs[0] and 'already evaluated' not in outputs[1]
  predictions = [(tmp_path / name / 'inference_eval/letters/predictions-3.jsonl').read_text()
                 for name in ('one', 'two')]
  assert predictions[0] == predictions[1]
