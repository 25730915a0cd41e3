"""What a user binds to say when checkpoints are written, which are kept, and what a run starts from.

The first fields of each class are T5X's in T5X's order; what this package adds is keyword-only. A value that could not
be honoured is refused when the config is built, not ignored.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from t5x_lite import errors
from t5x_lite.checkpoints import discovery

RESTORE_MODES = ('specific', 'latest', 'all')
METRIC_MODES = ('max', 'min')


@dataclasses.dataclass(frozen=True)
class SaveCheckpointConfig:
  """When to save, in which dtype, and what to keep.

  A step is saved when `period` divides it or when it is in `checkpoint_steps` (either may be left out); a signal or
  the end of a run saves whatever these say. What is kept is the union of `keep`, `keep_period` and `keep_best`, and
  always the newest checkpoint and every pinned one; with none of the three given, everything is kept.

  Attributes:
    dtype: floating dtype in which `target` (the parameters) and `param_average` are stored; optimizer state keeps its
      own. With anything narrower than the parameters a resumed run is no longer bitwise exact.
    period: number of steps between saves; None for no regular saves.
    checkpoint_steps: further steps at which to save, in any order.
    keep: how many of the newest checkpoints to keep.
    keep_dataset_checkpoints: how many of the newest checkpoints keep their dataset state; None for all.
    save_dataset: store the position of the data iterator with the model, which an exact resume needs.
    checkpointer_cls: None; T5X's choice of a checkpointer has no counterpart here.
    state_transformation_fns: functions `(state_dict, parameter_infos) -> (state_dict, parameter_infos)` applied in
      order to what is saved.
    checkpoint_manager_cls: None; see `checkpointer_cls`.
    keep_period: also keep every checkpoint whose step is a multiple of this.
    keep_best: also keep this many checkpoints with the best `metric_name_to_monitor`.
    metric_name_to_monitor: full name of the metric for `keep_best`, e.g. 'inference_eval/my_task/exact_match'.
    metric_mode: 'max' or 'min': which value is better.
    keep_checkpoints_without_metrics: whether `keep_best` spares checkpoints for which the metric is not (yet) known.
    max_failures_in_a_row: training continues after a failed save, for instance on a full disk, and the next save tries
      again; the run ends when this many saves in a row, or the last one, have failed.
  """

  dtype: str = 'float32'
  period: int | None = None
  checkpoint_steps: Sequence[int] | None = None
  keep: int | None = None
  keep_dataset_checkpoints: int | None = None
  save_dataset: bool = True
  checkpointer_cls: Any = None
  state_transformation_fns: Sequence[Any] = ()
  checkpoint_manager_cls: Any = None
  _: dataclasses.KW_ONLY
  keep_period: int | None = None
  keep_best: int | None = None
  metric_name_to_monitor: str | None = None
  metric_mode: str = 'max'
  keep_checkpoints_without_metrics: bool = True
  max_failures_in_a_row: int = 3

  def __post_init__(self):
    where = 'SaveCheckpointConfig'
    _check_float_dtype(where, self.dtype)
    for name in ('period', 'keep', 'keep_dataset_checkpoints', 'keep_period', 'keep_best'):
      _check_positive(where, name, getattr(self, name))
    _check_positive(where, 'max_failures_in_a_row', self.max_failures_in_a_row)
    if self.max_failures_in_a_row is None:
      raise errors.ConfigError(f'{where}.max_failures_in_a_row: got None, expected a whole number above 0.')
    for step in self.checkpoint_steps or ():
      if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise errors.ConfigError(f'{where}.checkpoint_steps: got {step!r}, expected whole numbers from 0 up.')
    _check_callables(where, self.state_transformation_fns)
    _refuse_classes(where, self.checkpointer_cls, self.checkpoint_manager_cls)
    if self.metric_mode not in METRIC_MODES:
      raise errors.ConfigError(f'{where}.metric_mode: got {self.metric_mode!r}, expected one of {METRIC_MODES}.')
    if (self.keep_best is None) != (self.metric_name_to_monitor is None):
      raise errors.ConfigError(
          f'{where}: keep_best={self.keep_best!r} and metric_name_to_monitor={self.metric_name_to_monitor!r} have an '
          "effect only together; give both, such as keep_best=3, metric_name_to_monitor='training_eval/task/accuracy'.")
    if self.keep_dataset_checkpoints is not None and not self.save_dataset:
      raise errors.ConfigError(
          f'{where}: keep_dataset_checkpoints={self.keep_dataset_checkpoints} has no effect with save_dataset=False; '
          'leave it out, or set save_dataset=True.')


@dataclasses.dataclass(frozen=True)
class RestoreCheckpointConfig:
  """What to start from, and how to fit it to the state that is wanted.

  Attributes:
    path: a model directory (modes 'latest' and 'all') or checkpoint directories (mode 'specific'); a sequence is
      searched in order, and an empty one restores nothing. What lies there may be of this package, of T5X (its native
      form or Orbax's) or a Hugging Face folder, whatever it is called: see `checkpoints.open_source`.
    mode: 'latest' takes the newest sound checkpoint below `path` (of T5X's, which cannot be verified, the newest),
      'specific' takes `path` itself, 'all' takes each checkpoint below `path` in order of step. A Hugging Face folder
      is taken as it is in every mode.
    assignment_map: (regular expression, replacement) pairs. A name of the *wanted* state that an expression matches in
      full is read from the stored name that the replacement expands to (`\\1` stands for the first group), or is left
      out of the restore when the replacement is None. Ignored when a run resumes from its own directory.
    strict: whether stored arrays that the wanted state has no place for are an error.
    fallback_to_scratch: take arrays that the checkpoint lacks from a fresh initialisation, and let go of those that
      the wanted state has no place for.
    dtype: floating dtype for the restored `target` and `param_average`; None for the wanted state's own.
    restore_dataset: also return the stored position of the data iterator.
    checkpointer_cls: None; T5X's choice of a checkpointer has no counterpart here.
    state_transformation_fns: functions `(state_dict, target_state_dict, *, is_resuming) -> state_dict`, applied in
      order after `assignment_map`, on nested dicts of NumPy arrays.
    checkpoint_manager_cls: None; see `checkpointer_cls`.
  """

  path: str | Sequence[str]
  mode: str = 'latest'
  assignment_map: Sequence[tuple[str, str | None]] | None = None
  strict: bool = True
  fallback_to_scratch: bool = False
  dtype: str | None = None
  restore_dataset: bool = True
  checkpointer_cls: Any = None
  state_transformation_fns: Sequence[Any] = ()
  checkpoint_manager_cls: Any = None

  def __post_init__(self):
    where = 'RestoreCheckpointConfig'
    if not isinstance(self.path, Sequence) or not all(isinstance(path, str) and path for path in self.paths):
      raise errors.ConfigError(
          f'{where}.path: got {self.path!r}, expected the path of a model directory or of a checkpoint, or several.')
    for path in self.paths:
      discovery.check_local_path(path, f'{where}.path')
    if self.mode not in RESTORE_MODES:
      raise errors.ConfigError(
          f'{where}.mode: got {self.mode!r}, expected one of {RESTORE_MODES}.'
          + errors.did_you_mean(str(self.mode), RESTORE_MODES))
    if self.dtype is not None:
      _check_float_dtype(where, self.dtype)
    for rule in self.assignment_map or ():
      _check_rule(where, rule)
    _check_callables(where, self.state_transformation_fns)
    _refuse_classes(where, self.checkpointer_cls, self.checkpoint_manager_cls)

  @property
  def paths(self) -> tuple[str, ...]:
    """`path` as a tuple, whichever of its two forms was given."""
    return (self.path,) if isinstance(self.path, str) else tuple(self.path)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What a run saves and what it starts from.

  Attributes:
    save: a `SaveCheckpointConfig`; None saves nothing.
    restore: a `RestoreCheckpointConfig`; None starts from new parameters. The newest checkpoint of the run's own
      directory always comes first.
  """

  save: SaveCheckpointConfig | None = None
  restore: RestoreCheckpointConfig | None = None


def _check_float_dtype(where: str, dtype: Any) -> None:
  try:
    floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    floating = False
  if not floating:
    raise errors.ConfigError(
        f"{where}.dtype: got {dtype!r}, expected the name of a floating dtype such as 'float32' or 'bfloat16'.")


def _check_positive(where: str, name: str, value: Any) -> None:
  if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
    raise errors.ConfigError(f'{where}.{name}: got {value!r}, expected a whole number above 0, or None.')


def _check_callables(where: str, fns: Any) -> None:
  if isinstance(fns, str) or not isinstance(fns, Sequence) or not all(callable(fn) for fn in fns):
    raise errors.ConfigError(f'{where}.state_transformation_fns: got {fns!r}, expected a sequence of functions.')


def _check_rule(where: str, rule: Any) -> None:
  if (not isinstance(rule, Sequence) or isinstance(rule, str) or len(rule) != 2 or not isinstance(rule[0], str)
      or not isinstance(rule[1], str | None)):
    raise errors.ConfigError(
        f'{where}.assignment_map: got the rule {rule!r}, expected a pair (regular expression, replacement or None).')
  try:
    re.compile(rule[0])
  except re.error as e:
    raise errors.ConfigError(
        f'{where}.assignment_map: {rule[0]!r} is not a regular expression: {e}. Escape special characters.') from e


def _refuse_classes(where: str, checkpointer_cls: Any, checkpoint_manager_cls: Any) -> None:
  for name, value in (('checkpointer_cls', checkpointer_cls), ('checkpoint_manager_cls', checkpoint_manager_cls)):
    if value is not None:
      raise errors.ConfigError(
          f'{where}.{name}: got {value!r}, but there is one manager and one format here; leave it out. For the best '
          'checkpoints by metric set SaveCheckpointConfig.keep_best and metric_name_to_monitor.')
