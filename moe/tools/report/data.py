"""Recorded routing of a run as arrays over time; `moe.metrics` explains the names."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import os
import re
from typing import Any

import numpy as np

from moe import metrics as moe_metrics
from t5x_lite.errors import DataError, did_you_mean
from t5x_lite.storage import files
from t5x_lite.trainer import summaries

_LAYER_METRIC = re.compile(rf'{moe_metrics.PREFIX}/(.+)/layers_(\d+)/([^/]+)')
# Values "at the end" are means over this last part of the periods, because a single period is noisy.
_END = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """The history of one sparse layer; S periods, E experts. Missing values are NaN.

  Attributes:
    stack: e.g. encoder.
    index: index of the layer in its stack.
    load: float64 [S, E], mean share of the choices of each expert.
    series: name to float64 [S], for each recorded number.
    drops_by_position: float64 [S, parts of a sequence], share of dropped choices; None if not recorded.
  """

  stack: str
  index: int
  load: np.ndarray
  series: Mapping[str, np.ndarray]
  drops_by_position: np.ndarray | None

  @property
  def name(self) -> str:
    """Name of the layer in the names of metrics."""
    return f'{self.stack}/layers_{self.index}'

  @property
  def num_experts(self) -> int:
    """Number of experts."""
    return self.load.shape[1]

  @functools.cached_property
  def relative_load(self) -> np.ndarray:
    """float64 [S, E], load divided by an even share: 1 is balanced. NaN if no token was routed."""
    total = self.load.sum(axis=1, keepdims=True)
    return self.load * self.num_experts / np.where(total > 0, total, np.nan)

  @functools.cached_property
  def num_dead(self) -> np.ndarray:
    """float64 [S], number of experts without a token in the period."""
    known = np.isfinite(self.relative_load).all(axis=1)
    return np.where(known, (self.relative_load == 0).sum(axis=1), np.nan)

  def over_time(self, name: str) -> np.ndarray | None:
    """Return float64 [S] of a recorded or derived number; None if it was not recorded."""
    if name == 'num_dead':
      return self.num_dead
    return self.series.get(name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
  """The routing that one writer of a run has recorded.

  Attributes:
    run: the model directory.
    writer: train, or training_eval/<task>.
    steps: int64 [S], the last step of each period, ascending.
    layers: sparse layers, by stack.
    totals: name to float64 [S] of the run's other numbers, e.g. loss.
    wall_times: float64 [2], times of the first and the last write, in seconds since the epoch.
  """

  run: files.Path
  writer: str
  steps: np.ndarray
  layers: Sequence[Layer]
  totals: Mapping[str, np.ndarray]
  wall_times: np.ndarray

  @property
  def stacks(self) -> dict[str, list[Layer]]:
    """Stack to its layers."""
    found: dict[str, list[Layer]] = {}
    for layer in self.layers:
      found.setdefault(layer.stack, []).append(layer)
    return found

  @property
  def num_end(self) -> int:
    """Number of periods at the end."""
    return max(1, round(_END * len(self.steps)))

  @property
  def end(self) -> str:
    """The steps at the end, in words. Of the first period only the last step is known."""
    before = len(self.steps) - self.num_end - 1
    if before >= 0:
      first = int(self.steps[before]) + 1
    else:
      first = int(self.steps[0])
    last = int(self.steps[-1])
    if first == last:
      return f'step {last}'
    return f'steps {first} to {last}'

  def at_end(self, values: np.ndarray) -> np.ndarray:
    """Return the mean of [S, ...] over the periods at the end, without missing values; NaN if all are missing."""
    last = values[-self.num_end :]
    known = np.isfinite(last)
    total = np.where(known, last, 0.0).sum(axis=0)
    return np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), np.nan)


def read(model_dir: str | os.PathLike[str], writer: str = 'train') -> History:
  """Read the routing that a run has recorded so far; the run may still be training.

  Args:
    model_dir: the model directory.
    writer: `train`, or `training_eval/<task>`.

  Raises:
    DataError: the run, the writer or metrics of experts are missing.
  """
  run = files.path(model_dir)
  found = summaries.metrics_files(run)
  if not found:
    raise DataError(summaries.no_metrics_message(run))
  if writer not in found:
    raise DataError(
      f'`report.writer` must be a writer of {str(model_dir)!r}, got {writer!r}.'
      f'{did_you_mean(writer, found)}'
    )
  rows = _merge(summaries.read_metrics(found[writer]), summaries.read_arrays(found[writer]))
  keys = {}
  for row in rows.values():
    for name in row:
      match = _LAYER_METRIC.fullmatch(name)
      if match is not None:
        keys[name] = match.groups()
  with_load = {(stack, int(index)) for stack, index, what in keys.values() if what == 'load'}
  if not with_load:
    raise DataError(_nothing_about_experts(model_dir, writer, found))
  in_order = sorted(with_load, key=lambda key: (key[0] != 'encoder', key))
  # The file may have other lines, without routing.
  rows = {step: row for step, row in sorted(rows.items()) if any(name in keys for name in row)}
  wall_times = [row['wall_time'] for row in rows.values() if 'wall_time' in row]
  if not wall_times:
    wall_times = [np.nan]
  return History(
    run=run,
    writer=writer,
    steps=np.array(list(rows), np.int64),
    totals=_totals(rows),
    layers=tuple(_layer(rows, stack, index, keys) for stack, index in in_order),
    wall_times=np.array([wall_times[0], wall_times[-1]]),
  )


def _merge(
  numbers: Sequence[Mapping[str, Any]], arrays: Sequence[Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
  """Return step to its values; later lines replace the values of earlier ones."""
  rows: dict[int, dict[str, Any]] = {}
  for row in (*numbers, *arrays):
    rows.setdefault(row['step'], {}).update(row)
  return rows


def _nothing_about_experts(model_dir, writer, found) -> str:
  others = []
  for name, path in found.items():
    if name == writer:
      continue
    names = {key for row in summaries.read_arrays(path) for key in row}
    if any(map(_LAYER_METRIC.fullmatch, names)):
      others.append(name)
  if others:
    return (
      f'`report.writer` must be a writer with metrics of experts, got {writer} of {str(model_dir)!r}. '
      f'Pass --writer {others[0]}.'
    )
  return (
    f'`report.model_dir` must be the run of a sparse model, got {str(model_dir)!r} without metrics of experts '
    f'({moe_metrics.PREFIX}/<stack>/layers_<i>/load in {writer}/{summaries.METRICS_FILE}). For a dense model use '
    '`t5x_lite plot`.'
  )


def _layer(rows, stack, index, keys) -> Layer:
  prefix = f'{moe_metrics.PREFIX}/{stack}/layers_{index}/'
  names = set()
  for found_stack, found_index, what in keys.values():
    if (found_stack, int(found_index)) == (stack, index):
      names.add(what)
  arrays = {}
  series = {}
  for what in sorted(names):
    column = [row.get(prefix + what) for row in rows.values()]
    if any(isinstance(value, np.ndarray) for value in column):
      arrays[what] = _stack_arrays(column)
    else:
      series[what] = _numbers(column)
  return Layer(
    stack=stack,
    index=index,
    load=arrays['load'],
    drops_by_position=arrays.get('drops_by_position'),
    series=series,
  )


def _stack_arrays(column: Sequence[np.ndarray | None]) -> np.ndarray:
  """Return [S, n] with n of the last array; arrays of other sizes and missing arrays are NaN."""
  size = next(value.size for value in reversed(column) if isinstance(value, np.ndarray))
  result = np.full((len(column), size), np.nan)
  for row, value in zip(result, column, strict=True):
    if isinstance(value, np.ndarray) and value.shape == (size,):
      row[:] = value
  return result


def _numbers(column: Sequence[float | None]) -> np.ndarray:
  return np.array([np.nan if value is None else value for value in column], np.float64)


def _totals(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, np.ndarray]:
  names = set()
  for row in rows.values():
    for name, value in row.items():
      if isinstance(value, (int, float)) and not _LAYER_METRIC.fullmatch(name):
        names.add(name)
  totals = {}
  for name in sorted(names - {'step', 'wall_time'}):
    totals[name] = _numbers([row.get(name) for row in rows.values()])
  return totals
