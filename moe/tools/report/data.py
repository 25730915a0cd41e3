"""What a run has recorded of its routing, as arrays over time; `moe.metrics` says what the names mean."""

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe import metrics as moe_metrics
from t5x_lite import summaries
from t5x_lite.errors import DataError, did_you_mean

_LAYER_METRIC = re.compile(rf'{moe_metrics.PREFIX}/(.+)/layers_(\d+)/([^/]+)')
# What holds "at the end" is the mean over this share of the run's periods, the last ones: a single one is noisy.
_END = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """The history of one sparse layer; S periods, E experts. What a period lacks is NaN.

  Attributes:
    stack: e.g. encoder.
    index: number of the layer in its stack.
    load: float64 [S, E], mean share of the choices that each expert got.
    series: name to float64 [S], for each number that was recorded.
    drops_by_position: float64 [S, parts of a sequence], share of the choices that were dropped; None: not recorded.
  """

  stack: str
  index: int
  load: np.ndarray
  series: Mapping[str, np.ndarray]
  drops_by_position: np.ndarray | None

  @property
  def name(self) -> str:
    """As in the names of metrics."""
    return f'{self.stack}/layers_{self.index}'

  @property
  def num_experts(self) -> int:
    """E."""
    return self.load.shape[1]

  @functools.cached_property
  def relative_load(self) -> np.ndarray:
    """float64 [S, E], load over an even share: 1 is balanced. NaN where nothing was routed."""
    total = self.load.sum(axis=1, keepdims=True)
    return self.load * self.num_experts / np.where(total > 0, total, np.nan)

  @functools.cached_property
  def num_dead(self) -> np.ndarray:
    """float64 [S], experts that got nothing in a whole period."""
    known = np.isfinite(self.relative_load).all(axis=1)
    return np.where(known, (self.relative_load == 0).sum(axis=1), np.nan)

  def over_time(self, name: str) -> np.ndarray | None:
    """Returns float64 [S] of a number by name, the derived ones included; None: it was not recorded."""
    return self.num_dead if name == 'num_dead' else self.series.get(name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
  """What one writer of a run has recorded.

  Attributes:
    run: the model directory.
    writer: train, or training_eval/<task>.
    steps: int64 [S], the last step of each period, ascending.
    layers: sparse layers, by stack.
    totals: name to float64 [S] of the run's other numbers, e.g. loss.
    wall_times: float64 [2], when the first and the last period were written, in seconds of the epoch.
  """

  run: pathlib.Path
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
    """Number of periods that count as the end."""
    return max(1, round(_END * len(self.steps)))

  @property
  def end(self) -> str:
    """Which steps count as the end, in words. Of the first period no more than its last step is known."""
    before = len(self.steps) - self.num_end - 1
    first, last = int(self.steps[before] + 1 if before >= 0 else self.steps[0]), int(self.steps[-1])
    return f'step {last}' if first == last else f'steps {first} to {last}'

  def at_end(self, values: np.ndarray) -> np.ndarray:
    """Returns the mean of [S, ...] over the end; periods that lack a number are left out, NaN if all do."""
    last = values[-self.num_end:]
    known = np.isfinite(last)
    total = np.where(known, last, 0.0).sum(axis=0)
    return np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), np.nan)


def read(model_dir: str | os.PathLike[str], writer: str = 'train') -> History:
  """Reads what a run has recorded so far; it may still be going on.

  Args:
    model_dir: the model directory.
    writer: whose numbers: `train`, or `training_eval/<task>`.

  Raises:
    DataError: no run, no such writer, or nothing about experts.
  """
  run = pathlib.Path(model_dir)
  files = summaries.metrics_files(run)
  if not files:
    what = 'holds no metrics yet' if run.is_dir() else 'is no directory'
    raise DataError(f'{str(model_dir)!r} {what}; expected the model directory of a run, in which train/'
                    f'{summaries.METRICS_FILE} stands.')
  if writer not in files:
    raise DataError(f'{str(model_dir)!r} has no writer {writer!r}.{did_you_mean(writer, files)}')
  rows = _merge(summaries.read_metrics(files[writer]), summaries.read_arrays(files[writer]))
  keys = {name: match.groups() for row in rows.values() for name in row
          if (match := _LAYER_METRIC.fullmatch(name)) is not None}
  with_load = sorted({(stack, int(index)) for stack, index, what in keys.values() if what == 'load'},
                     key=lambda key: (key[0] != 'encoder', key))
  if not with_load:
    raise DataError(_nothing_about_experts(model_dir, writer, files))
  # Other lines of the same file, if there are any, tell nothing of the routing.
  rows = {step: row for step, row in sorted(rows.items()) if any(name in keys for name in row)}
  return History(
      run=run, writer=writer, steps=np.array(list(rows), np.int64), totals=_totals(rows),
      layers=tuple(_layer(rows, stack, index, keys) for stack, index in with_load),
      wall_times=np.array([row['wall_time'] for row in rows.values() if 'wall_time' in row] or [np.nan])[[0, -1]])


def _merge(numbers: Sequence[Mapping[str, Any]], arrays: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
  """Returns step to what was written of it; a later line goes before an earlier one."""
  rows: dict[int, dict[str, Any]] = {}
  for row in (*numbers, *arrays):
    rows.setdefault(row['step'], {}).update(row)
  return rows


def _nothing_about_experts(model_dir, writer, files) -> str:
  others = []
  for name, path in files.items():
    if name != writer and any(_LAYER_METRIC.fullmatch(key) for row in summaries.read_arrays(path) for key in row):
      others.append(name)
  if others:
    return (f'{writer} of {str(model_dir)!r} holds no metrics of experts; the same run has some in '
            f'{" and ".join(others)}. Pass --writer {others[0]}.')
  return (f'{writer} of {str(model_dir)!r} holds no metrics of experts ({moe_metrics.PREFIX}/<stack>/layers_<i>/load): '
          'the model is dense, or not one of moe.models. Expected the run of a sparse model; `t5x_lite plot` draws the '
          'metrics of any.')


def _layer(rows, stack, index, keys) -> Layer:
  prefix = f'{moe_metrics.PREFIX}/{stack}/layers_{index}/'
  names = sorted({what for found_stack, found_index, what in keys.values()
                  if (found_stack, int(found_index)) == (stack, index)})
  columns = {what: [row.get(prefix + what) for row in rows.values()] for what in names}
  is_array = {what: any(isinstance(value, np.ndarray) for value in column) for what, column in columns.items()}
  arrays = {what: _stack_arrays(column) for what, column in columns.items() if is_array[what]}
  return Layer(
      stack=stack, index=index, load=arrays['load'], drops_by_position=arrays.get('drops_by_position'),
      series={what: _numbers(column) for what, column in columns.items() if not is_array[what]})


def _stack_arrays(column: Sequence[np.ndarray | None]) -> np.ndarray:
  """Returns [S, n] with n of the last array; others, and what is missing, are NaN."""
  size = next(value.size for value in reversed(column) if isinstance(value, np.ndarray))
  nothing = np.full(size, np.nan)
  return np.stack([value if isinstance(value, np.ndarray) and value.shape == (size,) else nothing
                   for value in column])


def _numbers(column: Sequence[float | None]) -> np.ndarray:
  return np.array([np.nan if value is None else value for value in column], np.float64)


def _totals(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, np.ndarray]:
  names = {name for row in rows.values() for name, value in row.items()
           if isinstance(value, (int, float)) and not _LAYER_METRIC.fullmatch(name)}
  return {name: _numbers([row.get(name) for row in rows.values()]) for name in sorted(names - {'step', 'wall_time'})}
