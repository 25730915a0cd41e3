"""Options of saving, keeping and restoring checkpoints, for the modules on which T5X's classes are built.

`config` derives the public configurations, whose documentation describes the fields.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import transforms
from t5x_lite.checkpoints.builders import base

RESTORE_MODES = ('specific', 'latest', 'all')
METRIC_MODES = ('max', 'min')


def _is_floating(dtype: Any) -> bool:
  try:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    return False


_COUNT = checks.number(at_least=1, integer=True)
FLOAT_DTYPE = checks.Expectation("a floating dtype such as 'float32' or 'bfloat16'", _is_floating)
_STEPS = checks.Expectation(
  'integers >= 0', lambda steps: all(type(step) is int and step >= 0 for step in steps or ())
)
FUNCTIONS = checks.Expectation(
  'a sequence of functions',
  lambda fns: isinstance(fns, Sequence) and not isinstance(fns, str) and all(map(callable, fns)),
)
_FUNCTIONS_OR_BUILDERS = checks.Expectation(
  'a sequence of functions or builders',
  lambda fns: (
    isinstance(fns, Sequence)
    and not isinstance(fns, str)
    and all(callable(fn) or isinstance(fn, base.StateBuilder) for fn in fns)
  ),
)
_PATHS = checks.Expectation(
  'the path of a model directory or checkpoint, or several paths',
  lambda paths: (
    isinstance(paths, Sequence)
    and all(
      isinstance(path, str) and path for path in ([paths] if isinstance(paths, str) else paths)
    )
  ),
  'For new parameters, set CheckpointConfig.restore = None.',
)
_FALLBACK = checks.Expectation(
  f'True, False or {base.PATTERNS.text}',
  lambda value: isinstance(value, bool) or base.PATTERNS.holds(value),
  base.PATTERNS.remedy,
)
_BUILDERS = checks.Expectation(
  'a sequence of builders, those on shapes before those on arrays',
  lambda builders: (
    isinstance(builders, Sequence)
    and all(isinstance(builder, base.StateBuilder) for builder in builders)
    and [builder.INPUT for builder in builders]
    == sorted((builder.INPUT for builder in builders), key=(base.SHAPES, base.ARRAYS).index)
  ),
  'In gin, write @builders.NewVocabulary() with parentheses.',
)


@dataclasses.dataclass(frozen=True)
class SaveOptions:
  """Options of saving and keeping checkpoints; see `config.SaveCheckpointConfig`."""

  dtype: str | None = 'float32'
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
    optional = _COUNT.or_none()
    has_metric = self.metric_name_to_monitor is not None
    checks.check(
      'SaveCheckpointConfig',
      vars(self),
      dtype=FLOAT_DTYPE.or_none(),
      period=optional,
      checkpoint_steps=_STEPS,
      keep=optional,
      state_transformation_fns=FUNCTIONS,
      keep_dataset_checkpoints=optional
      if self.save_dataset
      else checks.Expectation(
        'None with save_dataset=False',
        lambda keep: keep is None,
        'Omit it, or set save_dataset=True.',
      ),
      keep_period=optional,
      keep_best=checks.Expectation(
        f'{_COUNT.text if has_metric else None} with metric_name_to_monitor={self.metric_name_to_monitor!r}',
        lambda keep: _COUNT.holds(keep) if has_metric else keep is None,
        "Set both, e.g. keep_best=3, metric_name_to_monitor='training_eval/task/accuracy'.",
      ),
      metric_mode=checks.one_of(METRIC_MODES),
      max_failures_in_a_row=_COUNT,
      policies=checks.Expectation(
        'a list of save policies',
        lambda policies: (
          isinstance(policies, Sequence)
          and all(
            not isinstance(policy, type)
            and callable(getattr(policy, 'should_save', None))
            and callable(getattr(policy, 'next_step', None))
            for policy in policies
          )
        ),
        'In gin, write [@checkpoints.WhenBest()] with parentheses.',
      ),
    )


@dataclasses.dataclass(frozen=True)
class RestoreOptions:
  """Options of a restore; see `config.RestoreCheckpointConfig`."""

  path: str | Sequence[str] | None = None
  mode: str = 'latest'
  assignment_map: Sequence[tuple[str, str | None]] | None = None
  strict: bool = True
  fallback_to_scratch: bool | Sequence[str] = False
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
      'RestoreCheckpointConfig',
      vars(self),
      builders=_BUILDERS,
      path=_PATHS.or_none() if self.builders else _PATHS,
      mode=checks.one_of(RESTORE_MODES),
      assignment_map=base.ASSIGNMENT_MAP,
      dtype=FLOAT_DTYPE.or_none(),
      strict=checks.instance(bool, 'True or False'),
      fallback_to_scratch=_FALLBACK,
      use_param_average=checks.instance((bool, type(None)), 'True, False or None'),
      state_transformation_fns=_FUNCTIONS_OR_BUILDERS,
    )
    if self.dtype is not None:  # Recorded settings are JSON, and @jnp.bfloat16 is a class.
      object.__setattr__(self, 'dtype', jnp.dtype(self.dtype).name)
    if not isinstance(self.fallback_to_scratch, bool):
      object.__setattr__(self, 'fallback_to_scratch', tuple(self.fallback_to_scratch))
    # As in T5X, the functions include the assignment map, for callers that pass only the functions on.
    fns = [
      fn for fn in self.state_transformation_fns if not isinstance(fn, transforms.AssignmentMap)
    ]
    if self.assignment_map is not None:
      rules = tuple((pattern, replacement) for pattern, replacement in self.assignment_map)
      fns.insert(0, transforms.AssignmentMap(rules))
    object.__setattr__(self, 'state_transformation_fns', tuple(fns))
    for path in self.paths:
      discovery.check_path(path, 'RestoreCheckpointConfig.path', may_be_model=True)

  @property
  def paths(self) -> tuple[str, ...]:
    """`path` as a tuple, also if it is a single string."""
    if isinstance(self.path, str):
      return (self.path,)
    return tuple(self.path or ())
