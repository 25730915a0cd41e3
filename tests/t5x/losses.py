"""Trains T5X and t5x_lite from one checkpoint on the same data, and compares losses and gradient norms.

    python -m tests.t5x.losses --t5x=PATH --python=INTERPRETER [--case=NAME] [--folder=FOLDER]

PATH is a checkout of T5X, INTERPRETER a Python with its packages (docs/from_t5x.md). For each case both programs read
one gin file in T5X's names, each with its own files below `t5x/`, as one process each. T5X starts from new parameters
and saves them; t5x_lite starts from this checkpoint. The numbers are those of the TensorBoard files of both.

Without `--t5x`, compares with the recordings of T5X in `tests/golden/t5x`. Prints a table; ends with status 1 if a
difference is above the limit of its case.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

import jax
import numpy as np

from tests import event_files
from tests import golden_data
from tests import golden_models

_ROOT = pathlib.Path(__file__).parents[2]
_STEPS = 20
_GIN = """\
from __gin__ import dynamic_registration

import __main__ as train_script
import seqio
from t5x import adafactor
from t5x import trainer
from t5x import utils
from t5x.examples.{architecture} import network

include 't5x/examples/{model}'
include 't5x/configs/runs/pretrain.gin'

MIXTURE_OR_TASK_NAME = 'letters'
MIXTURE_OR_TASK_MODULE = 'tests.t5x.letters'
TASK_FEATURE_LENGTHS = {{'inputs': 16, 'targets': 16}}
VOCABULARY = @seqio.ByteVocabulary()
TRAIN_STEPS = {steps}
BATCH_SIZE = 8
DROPOUT_RATE = 0.0
RANDOM_SEED = 0
USE_CACHED_TASKS = False
SHUFFLE_TRAIN_EXAMPLES = False

train_script.train:
  train_eval_dataset_cfg = None
  stats_period = 1
train/utils.DatasetConfig.pack = False
utils.RestoreCheckpointConfig.mode = 'specific'
utils.SaveCheckpointConfig.period = {steps}
utils.create_learning_rate_scheduler:
  factors = 'constant'
  base_learning_rate = 0.01
trainer.Trainer.weight_metrics_computer = @trainer.WeightMetricsComputer()
adafactor.Adafactor.min_dim_size_to_factor = 16

network.{config}:
  vocab_size = 384
  dtype = 'float32'
  emb_dim = 32
  num_heads = 4
  head_dim = 8
  mlp_dim = 64
{layers}
{bindings}
"""


class Case(NamedTuple):
  """A training of both programs.

  Attributes:
    model: T5X's gin file, below `t5x/examples`.
    bindings: text that is added to the gin file.
    limit: largest relative difference that is accepted.
  """

  model: str
  bindings: str = ''
  limit: float = 1e-5


_T5_1_1 = 't5/t5_1_1/small.gin'
_SCALABLE = 'scalable_t5/t5_1_1/small.gin'
_DECODER_ONLY = 'decoder_only/models/base.gin'
_PACKED = 'train/utils.DatasetConfig.pack = True'
CASES: Mapping[str, Case] = {
  'T5 1.0': Case('t5/t5_1_0/small.gin'),
  'T5 1.1': Case(_T5_1_1),
  'mT5': Case('t5/mt5/small.gin'),
  'scalable T5 1.1, scanned layers': Case(_SCALABLE),
  'decoder-only': Case(_DECODER_ONLY),
  'T5 1.1, packed': Case(_T5_1_1, _PACKED),
  'scalable T5 1.1, packed': Case(_SCALABLE, _PACKED),
  'decoder-only, packed': Case(_DECODER_ONLY, _PACKED),
  'T5 1.1, 4 micro-batches': Case(_T5_1_1, 'trainer.Trainer.num_microbatches = 4'),
  'T5 1.1, label smoothing 0.1': Case(_T5_1_1, 'LABEL_SMOOTHING = 0.1'),
  'T5 1.1, z-loss 0.01': Case(_T5_1_1, 'Z_LOSS = 0.01'),
  'T5 1.1, LOSS_NORMALIZING_FACTOR = 128': Case(_T5_1_1, 'LOSS_NORMALIZING_FACTOR = 128.0'),
  "T5 1.1, 'NUM_REAL_TARGET_TOKENS'": Case(
    _T5_1_1, "LOSS_NORMALIZING_FACTOR = 'NUM_REAL_TARGET_TOKENS'"
  ),
  "T5 1.1, 'AVERAGE_PER_SEQUENCE', packed": Case(
    _T5_1_1, f"LOSS_NORMALIZING_FACTOR = 'AVERAGE_PER_SEQUENCE'\n{_PACKED}"
  ),
  'T5 1.1, bfloat16': Case(_T5_1_1, "network.T5Config.dtype = 'bfloat16'", 0.01),
  'scalable T5 1.1, bfloat16': Case(_SCALABLE, "network.T5Config.dtype = 'bfloat16'", 0.01),
}


class Differences(NamedTuple):
  """Largest relative differences of losses and gradient norms, None where no norms are recorded."""

  loss: float
  grad_norm: float | None = None


def largest_difference(ours: Mapping[str, float], theirs: Mapping[str, float]) -> float:
  """Return the largest relative difference of two records of one metric, NaN if a value is NaN.

  Args:
    ours: value by step, or by the name of what was computed.
    theirs: T5X's values, which the differences are divided by.

  Raises:
    ValueError: the records have different steps or names, or none at all.
  """
  if not theirs or ours.keys() != theirs.keys():
    raise ValueError(f'Expected values for {sorted(theirs)}, got {sorted(ours)}.')
  expected = np.array([theirs[key] for key in theirs], np.float64)
  found = np.array([ours[key] for key in theirs], np.float64)
  return float(np.max(np.abs(found - expected) / np.maximum(np.abs(expected), 1e-30)))


def gin_text(case: Case) -> str:
  """Return the gin file of a case, in T5X's names."""
  architecture = case.model.partition('/')[0]
  is_decoder_only = architecture == 'decoder_only'
  names = ('num_layers',) if is_decoder_only else ('num_encoder_layers', 'num_decoder_layers')
  return _GIN.format(
    architecture=architecture,
    model=case.model,
    config='TransformerConfig' if is_decoder_only else 'T5Config',
    layers='\n'.join(f'  {name} = 2' for name in names),
    bindings=case.bindings,
    steps=_STEPS,
  )


def _run(
  command: Sequence[str], cwd: pathlib.Path, model_dir: pathlib.Path
) -> dict[str, dict[int, float]]:
  """Train with a program in `model_dir`; return its scalars of training, by name and step."""
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(_ROOT), 'XLA_FLAGS': ''}
  flags = [f'--gin_file={model_dir.parent}/case.gin', f"--gin.MODEL_DIR='{model_dir}'"]
  ended = subprocess.run(
    [*command, *flags], cwd=cwd, env=environment, capture_output=True, text=True
  )
  if ended.returncode:
    raise RuntimeError(
      f'{command[:3]} ended with status {ended.returncode}:\n{ended.stderr[-3000:]}'
    )
  scalars = {}
  for step, metric, value in event_files.scalars(model_dir / 'train'):
    scalars.setdefault(metric, {})[step] = value
  return scalars


def train_both(name: str, checkout: pathlib.Path, python: str, runs: pathlib.Path) -> Differences:
  """Train a case with both programs; return their differences over all steps."""
  folder = runs / re.sub(r'\W+', '_', name)
  folder.mkdir(parents=True)
  case = CASES[name]
  (folder / 'case.gin').write_text(gin_text(case))
  # gin finds T5X's files in the current folder; in a package it finds only those with an __init__.py next to them.
  t5x = [python, f'{_ROOT}/tests/t5x/t5x_train.py', str(checkout)]
  theirs = _run(t5x, checkout, folder / 't5x')
  restored = f"--gin.utils.RestoreCheckpointConfig.path='{folder}/t5x/checkpoint_0'"
  t5x_lite = [sys.executable, '-m', 't5x_lite', 'train', restored]
  ours = _run(t5x_lite, folder, folder / 't5x_lite')
  if sorted(theirs['loss']) != list(range(1, _STEPS + 1)):
    raise RuntimeError(f'T5X wrote losses of the steps {sorted(theirs["loss"])}.')
  return Differences(
    largest_difference(ours['loss'], theirs['loss']),
    largest_difference(ours['weight_gradient_norm'], theirs['weight_gradient_norm']),
  )


def compare_network(name: str) -> Differences:
  """Return the differences of one pass of a recorded network, over all recorded normalizing factors."""
  golden, _, params, batch = golden_models.load(name)
  recorded = golden['losses_by_normalizing_factor']
  losses, norms = {}, {}
  for factor in recorded:
    model = golden_models.make_model(golden, golden_models.parse_factor(factor))
    loss_fn = functools.partial(model.loss_fn, batch=batch, dropout_rng=None)
    (loss, _), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
    losses[factor] = float(loss)
    norms[factor] = golden_models.global_norm(grads)
  return Differences(
    largest_difference(losses, {factor: values['loss'] for factor, values in recorded.items()}),
    largest_difference(
      norms, {factor: values['grad_global_norm'] for factor, values in recorded.items()}
    ),
  )


def compare_training(name: str) -> Differences:
  """Return the difference of the losses of a recorded training."""
  _, (losses, _, _) = golden_models.train(name)
  recorded = golden_data.load(f't5x/{name}')[1]['loss']
  return Differences(largest_difference(dict(enumerate(losses)), dict(enumerate(recorded))))


class Comparison(NamedTuple):
  """Row of the table: computes differences, which must not be above `limit`."""

  compare: Callable[[], Differences]
  limit: float


# A pass of a network, or 30 steps, in which rounding differences grow.
RECORDED: Mapping[str, Comparison] = {
  name: Comparison(functools.partial(compare_network, name), 1e-5)
  for name in (*golden_models.ENCODER_DECODERS, *golden_models.DECODER_ONLY)
} | {
  name: Comparison(functools.partial(compare_training, name), 1e-4)
  for name in golden_models.TRAININGS
}


def _text(difference: float | None) -> str:
  """Return a difference as '2e-7'."""
  return '' if difference is None else re.sub(r'e([-+])0', r'e\1', f'{difference:.0e}')


def print_table(comparisons: Mapping[str, Comparison]) -> int:
  """Compute and print rows one by one; return the number of those above their limit or not finite."""
  num_above = 0
  print('| case | losses | gradient norms |\n|---|---|---|')
  for name, comparison in comparisons.items():
    differences = comparison.compare()
    # A comparison with NaN is False.
    within = all(each <= comparison.limit for each in differences if each is not None)
    note = '' if within else f' (above the limit {_text(comparison.limit)})'
    num_above += not within
    loss, grad_norm = map(_text, differences)
    print(f'| {name}{note} | {loss} | {grad_norm} |', flush=True)
  return num_above


def main(arguments: Sequence[str] | None = None) -> int:
  """Print the table; return the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--t5x', help='checkout of T5X; without it, its recordings are compared')
  parser.add_argument('--python', help="path of the Python in T5X's environment")
  parser.add_argument('--case', action='append', help='name of a case, default all; repeatable')
  parser.add_argument('--folder', help='new folder for the runs, which are deleted by default')
  args = parser.parse_args(arguments)
  if bool(args.t5x) != bool(args.python):
    parser.error('--t5x and --python belong together.')
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(args.folder or temporary).resolve()
    comparisons = RECORDED
    if args.t5x:
      checkout = pathlib.Path(args.t5x).expanduser().resolve()
      if not (checkout / 't5x' / 'train.py').exists():
        parser.error(f'{checkout} is not a checkout of T5X: it has no t5x/train.py.')
      python = os.path.abspath(os.path.expanduser(args.python))
      comparisons = {
        name: Comparison(functools.partial(train_both, name, checkout, python, folder), case.limit)
        for name, case in CASES.items()
      }
      print(f'{_STEPS} steps of T5X and of t5x_lite, from one checkpoint:\n')
    else:
      print('No checkout of T5X: recordings of T5X in tests/golden/t5x, and t5x_lite:\n')
    unknown = set(args.case or ()) - comparisons.keys()
    if unknown:
      parser.error(f'--case must be one of {list(comparisons)}, got {sorted(unknown)}.')
    chosen = {name: comparisons[name] for name in args.case or comparisons}
    return min(print_table(chosen), 1)


if __name__ == '__main__':
  sys.exit(main())
