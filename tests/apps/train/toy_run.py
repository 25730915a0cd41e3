"""A whole run of the toy model on 60 made-up examples, in this process or, as a program, in one that tests may kill.

python -m tests.apps.train.toy_run MODEL_DIR NAME=VALUE...
"""

import ast
import functools
import os
import pathlib
import sys
import time

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import schedules
from t5x_lite import trainer
from t5x_lite.apps.train import run as train_app
from t5x_lite.storage import files
from t5x_lite.trainer import actions
from t5x_lite.trainer import summaries
from tests.models import toy_model

LENGTH = 6
BATCH_SIZE = 8
_VOCABULARY = toy_model.ToyVocabulary()


def _table(split, lengths):
  del lengths
  rng = np.random.default_rng(['train', 'validation'].index(split))
  examples, texts = [], []
  for _ in range(60 if split == 'train' else 20):
    targets = np.append(rng.integers(2, toy_model.VOCAB_SIZE, rng.integers(1, LENGTH)), 1).astype(
      np.int32
    )
    examples.append({'inputs': targets[::-1].copy(), 'targets': targets})
    text = _VOCABULARY.decode(targets)
    texts.append({'inputs_pretokenized': text[::-1], 'targets_pretokenized': text})
  return data.StaticExamples(examples, texts)


TASK = data.BuiltinTask(
  name='letters',
  splits=('train', 'validation'),
  vocabularies={'inputs': _VOCABULARY, 'targets': _VOCABULARY},
  table_fn=_table,
  metric_fns=(data.exact_match,),
)


def dataset(split, *, batch_size=BATCH_SIZE, **kwargs):
  return data.DatasetConfig(
    TASK,
    {'inputs': LENGTH, 'targets': LENGTH},
    split,
    batch_size,
    split == 'train',
    0,
    source='builtin',
    **kwargs,
  )


@functools.cache
def model(optimizer_def=None):
  built = toy_model.ToyModel(
    toy_model.ToyNetwork(dropout_rate=0.1),
    _VOCABULARY,
    _VOCABULARY,
    optimizer_def or optimizers.adamw(),
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
  )
  return built


@functools.cache
def partitioner():
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  mesh = jax.sharding.Mesh(devices, ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  return partitioning.PjitPartitioner(mesh=mesh)


RATE = schedules.create_learning_rate_scheduler(
  'constant * linear_warmup', base_learning_rate=0.05, warmup_steps=4
)


def train(model_dir, total_steps=20, *, save=None, restore=None, trainer_kwargs=None, **kwargs):
  """Call the train app; any argument may be replaced."""
  arguments = {
    'model': model(),
    'train_dataset_cfg': dataset('train'),
    'train_eval_dataset_cfg': dataset('validation'),
    'infer_eval_dataset_cfg': dataset('validation'),
    'partitioner': kwargs.get('partitioner') or partitioner(),
    'checkpoint_cfg': checkpoints.CheckpointConfig(
      save=checkpoints.SaveCheckpointConfig(**(save or {'period': 6})), restore=restore
    ),
    'trainer_cls': functools.partial(
      trainer.Trainer, **{'learning_rate_fn': RATE, 'num_microbatches': 2, **(trainer_kwargs or {})}
    ),
    'eval_steps': None,
    'eval_period': 10,
    'stats_period': 4,
    **kwargs,
  }
  return train_app.train(model_dir=str(model_dir), total_steps=total_steps, **arguments)


def lines(model_dir):
  """Return the contents of a run's metrics files, without times."""
  return {
    name: [
      {k: v for k, v in row.items() if k != 'wall_time' and not k.startswith('timing/')}
      for row in summaries.read_metrics(path)
    ]
    for name, path in summaries.metrics_files(model_dir).items()
  }


def saved(model_dir, step):
  """Return the arrays and the position in the data of a checkpoint."""
  path = files.path(model_dir) / f'checkpoint_{step}'
  position = {p.name: p.read_bytes() for p in sorted(path.rglob('*.bin'))}
  return checkpoints.load(path), position


def assert_same_run(a, b, step, *, b_was_stopped=False):
  """Compare two runs bitwise: state, position in the data, metrics, predictions.

  Where `b_was_stopped` by signals, it has more rows of training metrics, at the steps at which it was stopped; the row
  after each covers the remaining steps of its period and is not compared.
  """
  (state_a, position_a), (state_b, position_b) = saved(a, step), saved(b, step)
  for x, y in zip(jax.tree.leaves(state_a), jax.tree.leaves(state_b), strict=True):
    np.testing.assert_array_equal(x, y)
  assert position_a == position_b and position_a
  lines_a, lines_b = lines(a), lines(b)
  if b_was_stopped:
    rows_a, rows_b = (
      {row['step']: row for row in found.pop('train')} for found in (lines_a, lines_b)
    )
    stops = set(rows_b) - set(rows_a)
    whole = [
      after
      for before, after in zip([0, *rows_a], rows_a, strict=False)
      if not any(before < stop < after for stop in stops)
    ]
    assert len(whole) > len(rows_a) // 2
    assert [rows_a[step] for step in whole] == [rows_b[step] for step in whole] and set(
      rows_a
    ) <= set(rows_b)
  assert lines_a == lines_b
  for path in sorted(pathlib.Path(a).rglob('predictions-*.jsonl')):
    assert path.read_bytes() == (files.path(b) / path.relative_to(a)).read_bytes()


class _Pause(actions.BaseAction):
  """Waits after each step: a run that has to last costs no processor time."""

  def __init__(self, seconds):
    self.seconds = seconds

  def run(self, train_state, metrics_by_task):
    time.sleep(self.seconds)


def main():
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  options = {k: ast.literal_eval(v) for k, v in (a.split('=', 1) for a in sys.argv[2:])}
  step_seconds = options.pop('step_seconds', 0.0)
  if step_seconds:
    options['actions'] = {'TRAIN': [_Pause(step_seconds)]}
  train(sys.argv[1], **options)


if __name__ == '__main__':
  main()
