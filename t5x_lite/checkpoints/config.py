"""Options of saving, keeping and restoring checkpoints.

The first fields of each class are those of T5X in T5X's order; further fields are keyword-only. Options without effect
are errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints.builders import base

RESTORE_MODES = ('specific', 'latest', 'all')
METRIC_MODES = ('max', 'min')


def _is_floating(dtype: Any) -> bool:
  try:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    return False


_COUNT = checks.number(at_least=1, integer=True)
_FLOAT_DTYPE = checks.Expectation("a floating dtype such as 'float32' or 'bfloat16'", _is_floating)
_STEPS = checks.Expectation('integers >= 0', lambda steps: all(type(step) is int and step >= 0 for step in steps or ()))
_FUNCTIONS = checks.Expectation('a sequence of functions', lambda fns: (
    isinstance(fns, Sequence) and not isinstance(fns, str) and all(map(callable, fns))))
_FUNCTIONS_OR_BUILDERS = checks.Expectation('a sequence of functions or builders', lambda fns: (
    isinstance(fns, Sequence) and not isinstance(fns, str)
    and all(callable(fn) or isinstance(fn, base.StateBuilder) for fn in fns)))
_NO_CLASS = checks.Expectation('None', lambda value: value is None, (
    'There is one manager and one format; for the best checkpoints set SaveCheckpointConfig.keep_best.'))
_PATHS = checks.Expectation('the path of a model directory or checkpoint, or several paths', lambda paths: (
    isinstance(paths, Sequence) and all(isinstance(path, str) and path for path in (
        [paths] if isinstance(paths, str) else paths))))
_BUILDERS = checks.Expectation(
    'a sequence of builders, those on shapes before those on arrays', lambda builders: (
        isinstance(builders, Sequence) and all(isinstance(builder, base.StateBuilder) for builder in builders)
        and [builder.INPUT for builder in builders] == sorted(
            (builder.INPUT for builder in builders), key=(base.SHAPES, base.ARRAYS).index)),
    'In gin, write @builders.NewVocabulary() with parentheses.')


@dataclasses.dataclass(frozen=True)
class SaveCheckpointConfig:
  """Options of saving and keeping checkpoints.

  A step is saved if `period` divides it or if it is in `checkpoint_steps`; the last step, and the step at which a
  signal stops the run, are always saved. A checkpoint is kept if `keep`, `keep_period` or `keep_best` selects it; the
  newest one and pinned ones are always kept. Without these three options all checkpoints are kept.

  Attributes:
    dtype: floating dtype in which `target` (the parameters) and `param_average` are stored; optimizer state keeps its
      dtypes. With a dtype narrower than that of the parameters, a resumed run is no longer bitwise exact.
    period: number of steps between two saves; None for no regular saves.
    checkpoint_steps: further steps at which to save, in any order.
    keep: number of newest checkpoints to keep.
    keep_dataset_checkpoints: number of newest checkpoints that keep their dataset state; None for all.
    save_dataset: whether to store the position of the data iterator, which an exact resume needs.
    checkpointer_cls: must be None; unlike in T5X, the checkpointer cannot be chosen.
    state_transformation_fns: functions `(state_dict, parameter_infos) -> (state_dict, parameter_infos)`, applied in
      order to the saved state.
    checkpoint_manager_cls: must be None; see `checkpointer_cls`.
    keep_period: also keep every checkpoint whose step is a multiple of this number.
    keep_best: also keep this number of checkpoints with the best `metric_name_to_monitor`.
    metric_name_to_monitor: full name of the metric for `keep_best`, e.g. 'inference_eval/my_task/exact_match'.
    metric_mode: 'max' if larger values are better, or 'min'.
    keep_checkpoints_without_metrics: whether `keep_best` keeps checkpoints whose metric is unknown.
    max_failures_in_a_row: number of consecutive failed saves that ends the run. Until then training continues and the
      next save tries again; a failure of the last save always ends the run.
    policies: further policies of when to save, e.g. `WhenBest` or `EveryNMinutes`; see `policies.SavePolicy`.
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
  policies: Sequence[Any] = ()

  def __post_init__(self):
    optional, has_metric = _COUNT.or_none(), self.metric_name_to_monitor is not None
    checks.check(
        'SaveCheckpointConfig', vars(self), dtype=_FLOAT_DTYPE, period=optional, checkpoint_steps=_STEPS, keep=optional,
        keep_dataset_checkpoints=optional if self.save_dataset else checks.Expectation(
            'None with save_dataset=False', lambda keep: keep is None, 'Omit it, or set save_dataset=True.'),
        checkpointer_cls=_NO_CLASS, state_transformation_fns=_FUNCTIONS, checkpoint_manager_cls=_NO_CLASS,
        keep_period=optional, keep_best=checks.Expectation(
            f'{_COUNT.text if has_metric else None} with metric_name_to_monitor={self.metric_name_to_monitor!r}',
            lambda keep: _COUNT.holds(keep) if has_metric else keep is None,
            "Set both, e.g. keep_best=3, metric_name_to_monitor='training_eval/task/accuracy'."),
        metric_mode=checks.one_of(METRIC_MODES), max_failures_in_a_row=_COUNT, policies=checks.Expectation(
            'a list of save policies', lambda policies: isinstance(policies, Sequence) and all(
                not isinstance(policy, type) and callable(getattr(policy, 'should_save', None))
                and callable(getattr(policy, 'next_step', None)) for policy in policies),
            'In gin, write [@checkpoints.WhenBest()] with parentheses.'))


@dataclasses.dataclass(frozen=True)
class RestoreCheckpointConfig:
  """Checkpoint to start from, and its conversion to the target state.

  Attributes:
    path: a model directory (modes 'latest' and 'all') or checkpoint directories (mode 'specific'); a sequence is
      searched in order, and an empty one restores nothing. Supported formats: t5x_lite, T5X (native or Orbax) and
      Hugging Face folders; see `checkpoints.open_source`. Optional with `builders`.
    mode: 'latest' restores the newest intact checkpoint below `path` (checkpoints of T5X cannot be verified),
      'specific' restores `path` itself, 'all' restores each checkpoint below `path` in order of step. If `path` is a
      Hugging Face folder, all modes restore this folder.
    assignment_map: (regular expression, replacement) pairs. A name of the *target* state that an expression matches in
      full is read from the stored name that the replacement expands to (`\\1` is the first group); with the replacement
      None the name is not restored. Ignored when a run resumes from its own directory.
    strict: whether stored arrays that are not in the target state are an error.
    fallback_to_scratch: whether arrays that are missing in the checkpoint are initialised, and stored arrays that are
      not in the target state are ignored. Training also initialises the rest if `builders` without a path build only
      parameters.
    dtype: floating dtype for the restored `target` and `param_average`; None for the dtypes of the target state, which
      training keeps. With 'bfloat16' a network of compute dtype float32 multiplies bfloat16 numbers, with sums in
      float32.
    restore_dataset: whether to return the stored position of the data iterator too.
    checkpointer_cls: must be None; unlike in T5X, the checkpointer cannot be chosen.
    state_transformation_fns: functions `(state_dict, target_state_dict, *, is_resuming) -> state_dict`, applied in
      order after `assignment_map`, on nested dicts of NumPy arrays; or builders.
    checkpoint_manager_cls: must be None; see `checkpointer_cls`.
    builders: further builders of the state, applied in order after all other options, such as
      `builders.NewVocabulary()`; see `checkpoints.StateBuilder`. Ignored when a run resumes from its own directory.
    use_param_average: restore the running average of the parameters, if the checkpoint has one, as the parameters. None
      is True in `eval`, `infer`, `chat`, `export` and notebooks, and False in training. Ignored when a run resumes from
      its own directory.
  """

  path: str | Sequence[str] | None = None
  mode: str = 'latest'
  assignment_map: Sequence[tuple[str, str | None]] | None = None
  strict: bool = True
  fallback_to_scratch: bool = False
  dtype: str | None = None
  restore_dataset: bool = True
  checkpointer_cls: Any = None
  state_transformation_fns: Sequence[Any] = ()
  checkpoint_manager_cls: Any = None
  _: dataclasses.KW_ONLY
  builders: Sequence[base.StateBuilder] = ()
  use_param_average: bool | None = None

  def __post_init__(self):
    checks.check(
        'RestoreCheckpointConfig', vars(self), builders=_BUILDERS,
        path=_PATHS.or_none() if self.builders else _PATHS, mode=checks.one_of(RESTORE_MODES),
        assignment_map=base.ASSIGNMENT_MAP, dtype=_FLOAT_DTYPE.or_none(), checkpointer_cls=_NO_CLASS,
        use_param_average=checks.instance((bool, type(None)), 'True, False or None'),
        state_transformation_fns=_FUNCTIONS_OR_BUILDERS, checkpoint_manager_cls=_NO_CLASS)
    for path in self.paths:
      discovery.check_path(path, 'RestoreCheckpointConfig.path', may_be_model=True)

  @property
  def paths(self) -> tuple[str, ...]:
    """`path` as a tuple, also if it is a single string."""
    return (self.path,) if isinstance(self.path, str) else tuple(self.path or ())


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Options of saving and of the start of a run.

  Attributes:
    save: a `SaveCheckpointConfig`; None saves nothing.
    restore: a `RestoreCheckpointConfig`; None starts from new parameters. The newest checkpoint of the run's own
      directory always comes first.
  """

  save: SaveCheckpointConfig | None = None
  restore: RestoreCheckpointConfig | None = None
