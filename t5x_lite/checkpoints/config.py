"""Options of saving, keeping and restoring checkpoints.

The first fields of each class are those of T5X in T5X's order; further fields are keyword-only. Options without effect
are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from t5x_lite import checks
from t5x_lite.checkpoints import options
from t5x_lite.checkpoints.t5x import checkpointer
from t5x_lite.checkpoints.t5x import manager_interface

Checkpointer = checkpointer.Checkpointer
OrbaxCheckpointManagerInterface = manager_interface.OrbaxCheckpointManagerInterface

_CLASSES = {
  'checkpointer_cls': Checkpointer,
  'checkpoint_manager_cls': OrbaxCheckpointManagerInterface,
}


@dataclasses.dataclass(frozen=True)
class SaveCheckpointConfig(options.SaveOptions):
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
      `SaveBestCheckpointer`, `keep` counts the best checkpoints. Commands save by `CheckpointManager` and raise for
      classes with another `save`; `LegacyCheckpointManager` uses any class.
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
  """

  checkpointer_cls: checkpointer.CheckpointerConstructor | None = Checkpointer
  state_transformation_fns: Sequence[Any] = dataclasses.field(default_factory=tuple)
  # The class has T5X's order of arguments, which differs from that of T5X's protocol; they are passed by name.
  checkpoint_manager_cls: manager_interface.CheckpointManagerConstructor | None = (  # pyright: ignore[reportAssignmentType]
    OrbaxCheckpointManagerInterface
  )

  def __post_init__(self):
    _check_classes(self, 'save')
    for option in _CLASSES:
      made = _made_of(getattr(self, option), 'retention', keep=self.keep)
      retention = getattr(made, 'retention', {})
      keep_best = retention.get('keep_best')
      if keep_best is not None and self.keep_best not in (None, keep_best):
        raise checks.invalid(
          'SaveCheckpointConfig',
          'keep_best',
          f'None with this {option}',
          self.keep_best,
          'Set keep, the number of best checkpoints, and the options of the class.',
        )
      for name, value in retention.items():
        if value is not None or name == 'keep':
          object.__setattr__(self, name, value)
    super().__post_init__()


@dataclasses.dataclass(frozen=True)
class RestoreCheckpointConfig(options.RestoreOptions):
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
    checkpointer_cls: a `Checkpointer` or subclass, whose `builders` come before those of this configuration. Commands
      raise for classes with another `restore`; `TrainStateInitializer.from_checkpoints` and
      `LegacyCheckpointManager` call it.
    state_transformation_fns: functions `(state_dict, target_state_dict, *, is_resuming) -> state_dict`, applied in
      order after `assignment_map`, on nested dicts of NumPy arrays; or builders. As in T5X, a function for
      `assignment_map` is added as the first one.
    checkpoint_manager_cls: an `OrbaxCheckpointManagerInterface` or subclass, for `create_orbax_checkpoint_manager`.
    builders: further builders of the state, applied in order after all other options, such as
      `builders.NewVocabulary()`; see `checkpoints.StateBuilder`. Ignored when a run resumes from its own directory.
    use_param_average: restore the running average of the parameters, if the checkpoint has one, as the parameters. None
      is True in `eval`, `infer`, `chat`, `export` and notebooks, and False in training. Ignored when a run resumes from
      its own directory.
  """

  checkpointer_cls: checkpointer.CheckpointerConstructor | None = Checkpointer
  # The class has T5X's order of arguments, which differs from that of T5X's protocol; they are passed by name.
  checkpoint_manager_cls: manager_interface.CheckpointManagerConstructor | None = (  # pyright: ignore[reportAssignmentType]
    OrbaxCheckpointManagerInterface
  )

  def __post_init__(self):
    _check_classes(self, 'restore')
    added = getattr(_made_of(self.checkpointer_cls, 'builders'), 'builders', ())
    if added:
      others = [each for each in self.builders if each not in added]
      object.__setattr__(self, 'builders', (*added, *others))
    super().__post_init__()


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


def _check_classes(cfg: options.SaveOptions | options.RestoreOptions, method: str) -> None:

  def makes_one(constructor):
    made = _class_of(constructor)
    if made is None:
      return callable(constructor)
    return callable(getattr(made, method, None))

  expected = checks.Expectation(
    f'a class with the method {method}, or a function that makes an instance', makes_one
  )
  checks.check(
    type(cfg).__name__,
    vars(cfg),
    checkpointer_cls=expected.or_none(),
    checkpoint_manager_cls=expected.or_none(),
  )


def _class_of(constructor: Any) -> type | None:
  """Return the class of a constructor, also of one with bound arguments; None for functions."""
  while isinstance(constructor, functools.partial):
    constructor = constructor.func
  if isinstance(constructor, type):
    return constructor
  return None


def _made_of(constructor: Any, hook: str, **kwargs: Any) -> Any:
  """Return an instance to read a property that its class overrides, or None if the class does not override it."""
  made = _class_of(constructor)
  if made is None:
    return None
  if issubclass(made, Checkpointer):
    overrides = getattr(made, hook, None) is not getattr(Checkpointer, hook)
    if overrides:
      return constructor(train_state=None, partitioner=None, checkpoints_dir='', **kwargs)
  standard = OrbaxCheckpointManagerInterface
  if issubclass(made, standard) and constructor is not standard:
    return constructor(directory='', train_state=None, partitioner=None, **kwargs)
  return None


def is_standard(constructor: Any, *methods: str) -> bool:
  """Return True if a constructor makes T5X's class, or a subclass that does not override `methods`."""
  if constructor is None:
    return True
  made = _class_of(constructor)
  if made is None:
    return False
  for standard in _CLASSES.values():
    is_same = [getattr(made, name, None) is getattr(standard, name, None) for name in methods]
    if issubclass(made, standard) and all(is_same):
      return True
  return False


def check_standard(cfg: CheckpointConfig) -> None:
  """Raise if a command cannot use the classes of a configuration, because they save or restore by themselves.

  Raises:
    ConfigError: with the alternative.
  """
  remedies = {
    'save': 'Change saved states by `state_transformation_fns`, and choose steps by `policies`.',
    'restore': 'Write a builder, checkpoints.StateBuilder, for `RestoreCheckpointConfig.builders`.',
  }
  for part, method, hook in (
    (cfg.save, 'save', 'retention'),
    (cfg.restore, 'restore', 'builders'),
  ):
    if part is None:
      continue
    for option, standard in _CLASSES.items():
      constructor = getattr(part, option)
      if not is_standard(constructor, method):
        problem = f'whose `{method}` is that of {standard.__name__}'
      elif _has_unread_options(constructor, hook):
        problem = (
          f'with the constructor of {standard.__name__}, or with a property `{hook}` of its own'
        )
      else:
        continue
      raise checks.invalid(
        type(part).__name__, option, f'a class {problem}', constructor, remedies[method]
      )


def _has_unread_options(constructor: Any, hook: str) -> bool:
  """Return True for a `Checkpointer` whose own constructor may set options other than the property that is read."""
  made = _class_of(constructor)
  if made is None or not issubclass(made, Checkpointer):
    return False
  return _is_of_user(made.__init__) and not _is_of_user(getattr(made, hook).fget)


def _is_of_user(function: Any) -> bool:
  return function.__module__.partition('.')[0] not in ('t5x_lite', 'moe')
