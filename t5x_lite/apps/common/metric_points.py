"""Metrics of runs as points of curves: reading, the names of runs, and the metrics that are shown first."""

import array
import collections
from collections.abc import Collection, Mapping, Sequence
import os
import re
from typing import Any, NamedTuple

import numpy as np

from t5x_lite import metrics as metrics_lib
from t5x_lite.apps.common import curves
from t5x_lite.apps.common import run_files
from t5x_lite.errors import DataError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted
from t5x_lite.trainer import summaries

# Shown first, in this order; the others follow by name. Rates, counts and optimizer metrics are only in the files.
_FIRST_METRICS = ('loss', 'accuracy', 'learning_rate')
_HIDDEN_PREFIXES = (
  'timing/',
  'non_padding_fraction/',
  'effective_batch_size/',
  'weight_',
  'loss_per_',
  'z_loss',
  'cross_ent_loss',
  'learning_rate/',
  'optimizer/',
)
_INFERENCE = 'inference_eval/'
# Value of `loss_normalizing_factor` to the unit of the loss.
_LOSS_UNITS = {
  'NUM_REAL_TARGET_TOKENS': 'nats per token',
  'NUM_TOTAL_TARGET_TOKENS': 'nats per target position',
  'AVERAGE_PER_SEQUENCE': 'nats per token, mean of sequences',
  'None': 'nats per batch',
}


class WriterMetrics(NamedTuple):
  """Metrics that one writer of a run has recorded.

  Attributes:
    points: metric to float64 [n, 2] of (step, value), in the order of the file.
    arrays: metric that is an array to its last step and its lists of numbers.
    wall_time: time of the last line, in seconds since 1970; NaN if unknown.
    damaged: 'FILE:LINE' of each invalid line, which is skipped.
    missing: what each line 'missing' says, see `summaries.missing_lines`.
  """

  points: Mapping[str, np.ndarray]
  arrays: Mapping[str, tuple[int, list]]
  wall_time: float
  damaged: Sequence[str]
  missing: Sequence[Mapping[str, Any]]


def read_run(model_dir: str | os.PathLike[str]) -> dict[str, WriterMetrics]:
  """Return the metrics of a run by writer; the run may still be training.

  Raises:
    DataError: the directory has no metrics.
  """
  found = {}
  for writer, path in summaries.metrics_files(model_dir).items():
    metrics = _read(path)
    if metrics.points:
      found[writer] = metrics
  if not found:
    raise DataError(summaries.no_metrics_message(model_dir))
  return found


def _read(path: files.Path) -> WriterMetrics:
  reader = run_files.MetricsReader(path)
  # Names to the numbers of the lines with these names, one line after the other: its place in the file, its step, and
  # its values. The lines of most files have the same names, and a file may have millions of values.
  blocks = collections.defaultdict(lambda: array.array('d'))
  arrays = {}
  wall_time = np.nan
  for place, line in enumerate(reader.read()):
    block = blocks[tuple(line.numbers)]
    block.extend((place, line.step))
    block.extend(line.numbers.values())
    for name, values in line.arrays.items():
      arrays[name] = line.step, values
    if line.wall_time is not None:
      wall_time = line.wall_time
  return WriterMetrics(_points(blocks), arrays, wall_time, reader.damaged, reader.missing)


def _points(blocks: Mapping[tuple[str, ...], array.array]) -> dict[str, np.ndarray]:
  """Return the points of each metric, float64 [n, 2], in the order of their lines."""
  parts = collections.defaultdict(list)
  for names, block in blocks.items():
    rows = np.frombuffer(block).reshape(-1, 2 + len(names))
    for column, name in enumerate(names, start=2):
      parts[name].append((rows, column))
  points = {}
  for name, found in parts.items():
    placed = np.concatenate([rows[:, [0, 1, column]] for rows, column in found])
    points[name] = placed[np.argsort(placed[:, 0]), 1:]
  return points


def run_names(model_dirs: Sequence[str | os.PathLike[str]]) -> list[str]:
  """Return the name of each directory, with as many parent folders as make different directories distinct."""
  paths = [files.path(model_dir).resolve() for model_dir in model_dirs]
  for length in range(1, max(len(path.parts) for path in paths) + 1):
    names = ['/'.join(path.parts[-length:]) for path in paths]
    if len(set(names)) == len(set(paths)):
      break
  return names


def loss_unit(model_dirs: Sequence[str | os.PathLike[str]]) -> str:
  """Return the unit of the loss, which depends on the recorded `loss_normalizing_factor`; 'nats' if runs differ."""
  units = set()
  for model_dir in model_dirs:
    path = files.path(model_dir) / 'config.gin'
    if path.is_file():
      text = untrusted.read_regular(path).decode('utf-8', errors='replace')
    else:
      text = ''
    values = re.findall(r'\.loss_normalizing_factor = (?:\\\s+)?(\S+)', text)
    macros = dict(re.findall(r'^(\w+) = (\S+)', text, re.MULTILINE))
    if not values:
      units.add('nats')
    for value in values:
      value = value.removeprefix('%')
      value = macros.get(value, value).strip('\'"').upper().replace('NONE', 'None')
      units.add(_LOSS_UNITS.get(value, 'nats'))
  if len(units) == 1:
    return units.pop()
  return 'nats'


def default_metrics(runs: Mapping[str, curves.RunPoints]) -> list[str]:
  """Return loss, accuracy, learning rate and the metrics of inference; without any of them, the first four names."""
  known = set()
  inferred = set()
  for run in runs.values():
    for writer, points in run.items():
      known |= points.keys()
      if writer.startswith(_INFERENCE):
        inferred |= {name for name in points if not name.startswith('timing/')}
  chosen = [name for name in _FIRST_METRICS if name in known]
  chosen += sorted(inferred - set(_FIRST_METRICS))
  return chosen or sorted(known)[:4]


def metrics_in_order(names: Collection[str]) -> list[str]:
  """Return the names of metrics, the most important ones first."""
  first = [name for name in _FIRST_METRICS if name in names]
  return first + sorted(set(names) - set(first))


def is_hidden(name: str) -> bool:
  """Return whether a metric is not shown by default: bookkeeping, and metrics of single layers or parameters."""
  prefixes = (*_HIDDEN_PREFIXES, *metrics_lib.layer_prefixes())
  return name.startswith(prefixes) or name.count('/') > 1
