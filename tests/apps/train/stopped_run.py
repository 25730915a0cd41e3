"""A run that is stopped, resumed, ended by an action and evaluated, in one process or in several that work together."""

import dataclasses

from t5x_lite import checkpoints
from t5x_lite.apps import evaluate
from t5x_lite.trainer.actions import EarlyStoppingAction
from tests.apps.train import toy_run

# Options of all parts of the run.
COMMON = {'save': {'period': 3}, 'stats_period': 2, 'eval_period': 3}
# Evaluations find the lengths of their data.
_EVALUATED = dataclasses.replace(toy_run.dataset('validation'), task_feature_lengths=None)
_EVALUATIONS = {'train_eval_dataset_cfg': _EVALUATED, 'infer_eval_dataset_cfg': _EVALUATED}


def train_and_evaluate(model_dir, partitioner):
  """Trains until step 8 and evaluates all checkpoints, in every process of `partitioner`."""
  toy_run.train(model_dir, 4, partitioner=partitioner, **_EVALUATIONS, **COMMON)
  always = EarlyStoppingAction(('letters', 'loss'), 'max', patience=2, atol=100.0)
  # Two evaluations of this second part, at 6 and 8, make the action ask to stop, which only the lead process sees.
  step, state = toy_run.train(
    model_dir,
    20,
    actions={'TRAIN_EVAL': [always]},
    partitioner=partitioner,
    **_EVALUATIONS,
    **{**COMMON, 'eval_period': 2},
  )
  assert step == int(state.step) == 8, step
  arguments = {
    'model': toy_run.model(),
    'dataset_cfg': _EVALUATED,
    'partitioner': partitioner,
    'restore_checkpoint_cfg': checkpoints.RestoreCheckpointConfig(str(model_dir), mode='all'),
    'output_dir': f'{model_dir}-eval',
  }
  results = evaluate.evaluate(**arguments)
  assert list(results) == [3, 4, 6, 8] and evaluate.evaluate(**arguments) == results
