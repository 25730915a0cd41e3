"""Options of saving, keeping and restoring checkpoints.

The first fields of each class are those of T5X in T5X's order; further fields are keyword-only. Options without effect
are errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, ClassVar, Protocol

import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints.builders import base
from t5x_lite.checkpoints.restoring import transforms
from t5x_lite.partitioning import BasePartitioner
from t5x_lite.train_state import TrainState

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


class CheckpointerConstructor(Protocol):
  """Function or class that makes a `Checkpointer`."""

  def __call__(
    self,
    train_state: TrainState,
    partitioner: BasePartitioner,
    checkpoints_dir: str,
    dataset_iterator: Any = None,
    *,
    keep: int | None = None,
    save_dtype: Any = np.float32,
    restore_dtype: Any = None,
    keep_dataset_checkpoints: int | None = None,
  ) -> Any:
    """Return the checkpointer; see `Checkpointer`."""
    ...


class CheckpointManagerConstructor(Protocol):
  """Function or class that makes an `OrbaxCheckpointManagerInterface`."""

  def __call__(
    self,
    directory: str,
    train_state: TrainState,
    partitioner: BasePartitioner,
    dataset_iterator: Any = None,
    save_dtype: Any = None,
    restore_dtype: Any = None,
    keep: int | None = None,
    period: int | None = None,
    force_keep_period: int | None = None,
    checkpoint_steps: Sequence[int] | None = None,
  ) -> Any:
    """Return the manager; see `OrbaxCheckpointManagerInterface`."""
    ...


class _ClassOfT5x:
  """Default of an option that is a class of T5X, under its name in signatures.

  These classes are built on the options. So the class is imported when a configuration is made.
  """

  def __init__(self, name: str):
    self.__name__ = name

  def get(self) -> type:
    """Return the class."""
    from t5x_lite import checkpoints

    return getattr(checkpoints, self.__name__)


_CHECKPOINTER: Any = _ClassOfT5x('Checkpointer')
_CHECKPOINT_MANAGER: Any = _ClassOfT5x('OrbaxCheckpointManagerInterface')
_DEFAULT_CLASSES = {
  'checkpointer_cls': _CHECKPOINTER,
  'checkpoint_manager_cls': _CHECKPOINT_MANAGER,
}


# Methods of T5X's `Checkpointer` and `SaveBestCheckpointer` that commands call, and the others.
CALLED = ('__init__', '_get_state_dict_for_save', 'restore', 'save')
NOT_CALLED = (
  '_create_lazy_awaitable_array',
  '_filter_out_force_keep_period_steps',
  '_get_checkpoint_dir',
  '_get_optimizer_state_dict',
  '_get_parameter_infos',
  '_read_state_from_tensorstore',
  '_remove_old_checkpoints',
  '_remove_old_dataset_checkpoints',
  '_restore_train_state',
  '_transform_state_and_infos',
  '_write_state_to_tensorstore',
  'all_dataset_checkpoint_steps',
  'all_steps',
  'convert_from_tf_checkpoint',
  'latest_step',
  'restore_from_tf_checkpoint',
)


class CheckpointerBase:
  """Base of T5X's classes `checkpointer_cls` and `checkpoint_manager_cls`.

  Commands save and restore without them, except by a subclass of `Checkpointer` with a constructor or methods of its
  own. They read `retention` and `builders` if a class overrides them, of an instance that is made with `PLACEHOLDERS`.

  Attributes:
    PLACEHOLDERS: the required arguments of the constructor, without a train state and a directory.
    keep: number of newest checkpoints to keep; None for all.
  """

  PLACEHOLDERS: ClassVar[Mapping[str, Any]] = {}
  keep: int | None = None

  @property
  def builders(self) -> Sequence[base.StateBuilder]:
    """Builders that change a restored state; commands add them to `RestoreCheckpointConfig.builders`."""
    return ()

  @property
  def retention(self) -> Mapping[str, Any]:
    """Options of `SaveCheckpointConfig` that decide which checkpoints are kept; commands set them."""
    return {'keep': self.keep}


@dataclasses.dataclass
class SaveCheckpointConfig(checks.MutableConfig):
  """Options of saving and keeping checkpoints.

  A step is saved if `period` divides it or if it is in `checkpoint_steps`; the last step, and the step at which a
  signal stops the run, are always saved. A checkpoint is kept if `keep`, `keep_period` or `keep_best` selects it; the
  newest one and pinned ones are always kept. Without these three options all checkpoints are kept.

  Attributes:
    dtype: floating dtype in which `target` (the parameters) and `param_average` are stored, None for theirs; optimizer
      state keeps its dtypes. With a dtype narrower than that of the parameters, a resumed run is no longer bitwise
      exact.
    period: number of steps between two saves; None for no regular saves.
    checkpoint_steps: further steps at which to save, in any order.
    keep: number of newest checkpoints to keep.
    keep_dataset_checkpoints: number of newest checkpoints that keep their dataset state; None for all.
    save_dataset: whether to store the position of the data iterator, which an exact resume needs.
    checkpointer_cls: a `Checkpointer` or subclass, whose `retention` sets the options of keeping: with
      `SaveBestCheckpointer`, `keep` counts the best checkpoints. `train` calls `save` and `_get_state_dict_for_save` of
      a subclass, and raises if it overrides other methods; `LegacyCheckpointManager` uses any class.
    state_transformation_fns: functions `(state_dict, parameter_infos) -> (state_dict, parameter_infos)`, applied in
      order to the saved state.
    checkpoint_manager_cls: an `OrbaxCheckpointManagerInterface` or subclass, used like `checkpointer_cls`.
    keep_period: also keep every checkpoint whose step is a multiple of this number.
    keep_best: also keep this number of checkpoints with the best `metric_name_to_monitor`.
    metric_name_to_monitor: full name of the metric for `keep_best`, e.g. 'inference_eval/my_task/exact_match'.
    metric_mode: 'max' if larger values are better, or 'min'.
    keep_checkpoints_without_metrics: whether `keep_best` keeps checkpoints whose metric is unknown.
    max_failures_in_a_row: number of consecutive failed saves that ends the run. Until then training continues and the
      next save tries again; a failure of the last save always ends the run.
    policies: further policies of when to save, e.g. `WhenBest` or `EveryNMinutes`; see `policies.SavePolicy`.
    save_base: whether checkpoints of a run with an adapter contain the base too. With False they hold the trained
      parameters, and restoring reads the others from the checkpoint that the run began with, `RestoreCheckpointConfig.
      path`, which must be kept. Without an adapter checkpoints contain all parameters.
  """

  dtype: str | None = 'float32'
  period: int | None = None
  checkpoint_steps: Sequence[int] | None = None
  keep: int | None = None
  keep_dataset_checkpoints: int | None = None
  save_dataset: bool = True
  checkpointer_cls: CheckpointerConstructor | None = _CHECKPOINTER
  state_transformation_fns: Sequence[Any] = ()
  checkpoint_manager_cls: CheckpointManagerConstructor | None = _CHECKPOINT_MANAGER
  _: dataclasses.KW_ONLY
  keep_period: int | None = None
  keep_best: int | None = None
  metric_name_to_monitor: str | None = None
  metric_mode: str = 'max'
  keep_checkpoints_without_metrics: bool = True
  max_failures_in_a_row: int = 3
  policies: Sequence[Any] = ()
  save_base: bool = False
  # Values that those of the class of an option have replaced; an assignment of `keep` brings them back.
  _replaced: Mapping[str, Any] | None = dataclasses.field(
    default=None, init=False, repr=False, compare=False
  )

  def __setattr__(self, name: str, value: Any) -> None:
    """Set a value; setting `keep` discards what the class of an option has set, see `_set_retention`."""
    if name == 'keep' and self._replaced is not None:
      vars(self).update(self._replaced, _replaced=None)
    super().__setattr__(name, value)

  def check(self) -> None:
    """See `MutableConfig`."""
    for option, constructor in _custom_classes(self, 'save').items():
      retention = _read_property(constructor, 'retention', keep=self.keep)
      self._set_retention(option, retention or {})
    optional = _COUNT.or_none()
    has_metric = self.metric_name_to_monitor is not None
    checks.check(
      'SaveCheckpointConfig',
      self._values(),
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
      save_base=checks.instance(bool, 'True or False'),
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

  def _set_retention(self, option: str, retention: Mapping[str, Any]) -> None:
    """Set the options of keeping to those of the class of an option."""
    keep_best = retention.get('keep_best')
    if keep_best is not None and self.keep_best not in (None, keep_best):
      raise checks.invalid(
        'SaveCheckpointConfig',
        'keep_best',
        f'None with this {option}',
        self.keep_best,
        'Set keep, the number of best checkpoints, and the options of the class.',
      )
    given = {name: each for name, each in retention.items() if each is not None or name == 'keep'}
    replaced = {name: getattr(self, name) for name in given if name != 'keep'}
    if given:
      vars(self).update(given, _replaced={**replaced, **(self._replaced or {})})


@dataclasses.dataclass
class RestoreCheckpointConfig(checks.MutableConfig):
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
      not in the target state are ignored. A list of regular expressions allows new values only for parameters whose
      names (without `target/`) one of them matches in full, such as `decoder/logits_dense/.*`, with their optimizer
      state. If another optimizer wrote the checkpoint, the entire state of the optimizer is new.
      Training also initialises the rest if `builders` without a path build only parameters.
    dtype: floating dtype for the restored `target` and `param_average`; None for the dtypes of the target state, which
      training keeps. With 'bfloat16' a network of compute dtype float32 multiplies bfloat16 numbers, with sums in
      float32.
    restore_dataset: whether to return the stored position of the data iterator too.
    checkpointer_cls: a `Checkpointer` or subclass, whose `builders` come before those of this configuration. `restore`
      of a subclass is called with T5X's arguments; commands raise if it overrides methods that they do not call.
    state_transformation_fns: functions `(state_dict, target_state_dict, *, is_resuming) -> state_dict`, applied in
      order after `assignment_map`, on nested dicts of NumPy arrays; or builders. As in T5X, a function for
      `assignment_map` is added as the first one.
    checkpoint_manager_cls: an `OrbaxCheckpointManagerInterface` or subclass, for `create_orbax_checkpoint_manager`.
    builders: further builders of the state, applied in order after all other options, such as
      `builders.NewVocabulary()`; see `checkpoints.StateBuilder`. Ignored when a run resumes from its own directory.
    use_param_average: restore the running average of the parameters, if the checkpoint has one, as the parameters. None
      is True in `eval`, `infer`, `chat`, `export` and notebooks, and False in training. Ignored when a run resumes from
      its own directory.
    base_path: path of the base of an adapter's checkpoint, if it is no longer where it was in training; commands that
      read a run set it to INITIAL_CHECKPOINT_PATH if this is given. For a run that resumes the default is `path`.
  """

  path: str | Sequence[str] | None = None
  mode: str = 'latest'
  assignment_map: Sequence[tuple[str, str | None]] | None = None
  strict: bool = True
  fallback_to_scratch: bool | Sequence[str] = False
  dtype: str | None = None
  restore_dataset: bool = True
  checkpointer_cls: CheckpointerConstructor | None = _CHECKPOINTER
  state_transformation_fns: Sequence[Any] = ()
  checkpoint_manager_cls: CheckpointManagerConstructor | None = _CHECKPOINT_MANAGER
  _: dataclasses.KW_ONLY
  builders: Sequence[base.StateBuilder] = ()
  use_param_average: bool | None = None
  base_path: str | None = None

  def check(self) -> None:
    """See `MutableConfig`."""
    custom = _custom_classes(self, 'restore')
    added = _read_property(custom.get('checkpointer_cls'), 'builders')
    if added:
      others = [each for each in self.builders if each not in added]
      self.builders = (*added, *others)
    checks.check(
      'RestoreCheckpointConfig',
      self._values(),
      builders=_BUILDERS,
      path=_PATHS.or_none() if self.builders else _PATHS,
      mode=checks.one_of(RESTORE_MODES),
      assignment_map=base.ASSIGNMENT_MAP,
      dtype=FLOAT_DTYPE.or_none(),
      strict=checks.instance(bool, 'True or False'),
      fallback_to_scratch=_FALLBACK,
      use_param_average=checks.instance((bool, type(None)), 'True, False or None'),
      base_path=base.PATH.or_none(),
      state_transformation_fns=_FUNCTIONS_OR_BUILDERS,
    )
    if self.dtype is not None:  # Recorded settings are JSON, and @jnp.bfloat16 is a class.
      self.dtype = jnp.dtype(self.dtype).name
    if not isinstance(self.fallback_to_scratch, bool):
      self.fallback_to_scratch = tuple(self.fallback_to_scratch)
    # As in T5X, the functions include the assignment map, for callers that pass only the functions on.
    fns = [
      fn for fn in self.state_transformation_fns if not isinstance(fn, transforms.AssignmentMap)
    ]
    if self.assignment_map is not None:
      rules = tuple((pattern, replacement) for pattern, replacement in self.assignment_map)
      fns.insert(0, transforms.AssignmentMap(rules))
    self.state_transformation_fns = tuple(fns)
    for path in self.paths:
      discovery.check_path(path, 'RestoreCheckpointConfig.path', may_be_model=True)

  @property
  def paths(self) -> tuple[str, ...]:
    """`path` as a tuple, also if it is a single string."""
    if isinstance(self.path, str):
      return (self.path,)
    return tuple(self.path or ())


@dataclasses.dataclass
class CheckpointConfig(checks.MutableConfig):
  """Options of saving and of the start of a run.

  Attributes:
    save: a `SaveCheckpointConfig`; None saves nothing.
    restore: a `RestoreCheckpointConfig`; None starts from new parameters. The newest checkpoint of the run's own
      directory always comes first.
  """

  save: SaveCheckpointConfig | None = None
  restore: RestoreCheckpointConfig | None = None

  def check(self) -> None:
    """See `MutableConfig`."""
    for cfg in (self.save, self.restore):
      if cfg is not None:
        cfg.check()


def _custom_classes(
  cfg: SaveCheckpointConfig | RestoreCheckpointConfig, method: str
) -> dict[str, Any]:
  """Return the constructors that are not defaults by option, and replace the defaults by T5X's classes.

  Args:
    cfg: the configuration that is being made.
    method: name of a method that the instances must have.

  Raises:
    ConfigError: an option is not such a constructor.
  """

  def makes_one(constructor):
    made = _class_of(constructor)
    if made is None:
      return callable(constructor)
    return callable(getattr(made, method, None))

  expected = checks.Expectation(
    f'a class with the method {method}, or a function that makes an instance', makes_one
  )
  custom = {}
  for option, default in _DEFAULT_CLASSES.items():
    constructor = getattr(cfg, option)
    standard = default.get()
    if constructor is default:
      setattr(cfg, option, standard)
    elif constructor is not standard:
      custom[option] = constructor
  checks.check(type(cfg).__name__, custom, **dict.fromkeys(custom, expected.or_none()))
  return custom


def _class_of(constructor: Any) -> type | None:
  """Return the class of a constructor, also of one with bound arguments; None for functions."""
  while isinstance(constructor, functools.partial):
    constructor = constructor.func
  if isinstance(constructor, type):
    return constructor
  return None


def _read_property(constructor: Any, name: str, **options: Any) -> Any:
  """Return a property of an instance of a constructor, or None if no class overrides the property."""
  made = _class_of(constructor)
  if made is None or not issubclass(made, CheckpointerBase):
    return None
  if getattr(made, name) is getattr(CheckpointerBase, name):
    return None
  return getattr(constructor(**made.PLACEHOLDERS, **options), name)


def is_standard(constructor: Any, *methods: str) -> bool:
  """Return True if a constructor makes T5X's class, or a subclass that does not override `methods`."""
  if constructor is None:
    return True
  made = _class_of(constructor)
  if made is None or not issubclass(made, CheckpointerBase):
    return False
  standard = next(each for each in made.__mro__ if not _is_of_user(each))
  return all(getattr(made, name, None) is getattr(standard, name, None) for name in methods)


def is_custom(constructor: Any, *methods: str) -> bool:
  """Return True for a subclass of T5X's `Checkpointer` with a constructor of a user, or that overrides `methods`."""
  made = _class_of(constructor)
  if made is None or not issubclass(made, CheckpointerBase):
    return False
  return _is_of_user(made.__init__) or not is_standard(made, *methods)


def check_supported(cfg: CheckpointConfig) -> None:
  """Raise if a command cannot use the classes of a configuration, because they override what it does not call.

  Raises:
    ConfigError: with the alternative.
  """
  if cfg.save is not None:
    _check_supported(
      cfg.save,
      'save',
      'Change saved states by `state_transformation_fns`, and choose steps by `policies`.',
    )
  if cfg.restore is not None:
    _check_supported(
      cfg.restore,
      'restore',
      'Write a builder, checkpoints.StateBuilder, for `RestoreCheckpointConfig.builders`.',
    )


def _check_supported(
  cfg: SaveCheckpointConfig | RestoreCheckpointConfig, method: str, remedy: str
) -> None:
  """Raise if a class of a configuration overrides methods that commands do not call.

  Args:
    cfg: the configuration.
    method: name of the method, 'save' or 'restore', of classes that commands do not call.
    remedy: end of the message.
  """
  for option, default in _DEFAULT_CLASSES.items():
    constructor = getattr(cfg, option)
    made = _class_of(constructor)
    problem = None
    if option == 'checkpointer_cls' and made is not None and issubclass(made, default.get()):
      others = [name for name in NOT_CALLED if not is_standard(made, name)]
      if others:
        problem = f'that overrides none of the methods {", ".join(others)}, which no command calls'
    elif not is_standard(constructor, method):
      problem = f'whose `{method}` is that of {default.__name__}'
    if problem is not None:
      raise checks.invalid(type(cfg).__name__, option, f'a class {problem}', constructor, remedy)


def _is_of_user(defined: Any) -> bool:
  """Return True if a function or class is not defined in this repository."""
  return defined.__module__.partition('.')[0] not in ('t5x_lite', 'moe')
