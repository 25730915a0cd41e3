"""Builders of the adapter of a model whose base a builder before them has restored."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.builders import base
from t5x_lite.checkpoints.builders.changing import in_layout_of_model
from t5x_lite.checkpoints.restoring import lazy_arrays
from t5x_lite.checkpoints.restoring import transforms


@dataclasses.dataclass(frozen=True)
class NewAdapter(base.StateBuilder):
  """Builder of a newly initialised adapter; all other parameters are those of the state so far.

  A state that has an adapter, such as that of a run with one, keeps it with its optimizer state. Otherwise the
  optimizer begins with the parameters. The step is kept.
  """

  KEEPS_BASE: ClassVar[bool] = True

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return 'a new adapter'

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    names = _adapter_names(target, 'NewAdapter')
    if any(transforms.is_of_adapter(name) for name in state.arrays):
      return state  # an incomplete adapter, or one of other shapes, does not fit
    kept = state.without(*base.FROM_PARAMS)
    return kept.replace(
      arrays={**kept.arrays, **{name: target.initial(name) for name in names}},
      initialized=kept.initialized | set(names),
    )


@dataclasses.dataclass(frozen=True)
class Adapter(base.StateBuilder):
  """Builder of the adapter of a stored run, with the other parameters that the run has trained.

  It replaces parameters of the same names. The optimizer begins with the parameters; the step is kept.

  Attributes:
    path: a checkpoint with an adapter, or a directory of such checkpoints, of which the newest sound one is taken; its
      base is not read. Or a folder of PEFT.
  """

  path: str

  KEEPS_BASE: ClassVar[bool] = True  # a run compares what it replaces with what it trains

  def __post_init__(self):
    checks.check('Adapter', vars(self), path=base.PATH)

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return f'the adapter of {self.path}'

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    names = _adapter_names(target, 'Adapter')
    source = self.open(target.wanted)
    if target.has_values:
      source.verify()
    also_trained = [base.PARAMS + path for path in source.metadata['adapter']['also_train']]
    stored = {
      name: array
      for name, array in lazy_arrays.stored(source).items()
      if name in also_trained or name.startswith(base.PARAMS) and transforms.is_of_adapter(name)
    }
    part = in_layout_of_model(base.BuiltState(arrays=stored), target)
    transforms.check_fit(
      {name: array for name, array in part.arrays.items() if transforms.is_of_adapter(name)},
      {name: target.wanted[name] for name in names},
      allow_surplus=False,
      allow_missing=False,
      where=source.path,
      what='adapter',
    )
    kept = state.without(*base.FROM_PARAMS)
    return kept.replace(arrays={**kept.arrays, **part.arrays})

  def open(self, model: Mapping[str, Any]) -> sources.StateSource:
    """Return the opened checkpoint or folder, without its base.

    Args:
      model: shape of each array of the model's state by name.

    Raises:
      CheckpointError: it has no adapter, or a folder of PEFT has one of another model.
    """
    # It imports the configuration, which has builders.
    from t5x_lite.checkpoints.restoring import choice

    if sources.is_adapter(self.path):
      return sources.open_peft(self.path, model, 'the base')
    source = sources.open_source(choice.newest_of(self.path)).own
    if 'adapter' not in source.metadata:
      raise errors.CheckpointError(
        f'`Adapter.path` must be a checkpoint with an adapter, got {source.path!r} without one. Use '
        'builders.NewAdapter, or give the path of a run with an adapter.'
      )
    return source


def initial_adapter(path: str | None = None) -> base.StateBuilder:
  """Return `Adapter(path)`, or `NewAdapter()` without a path."""
  if path is None:
    return NewAdapter()
  return Adapter(path)


def _adapter_names(target: base.TargetState, owner: str) -> list[str]:
  """Return the names of the adapter's parameters in the wanted state."""
  names = [
    name
    for name in target.wanted
    if name.startswith(base.PARAMS) and transforms.is_of_adapter(name)
  ]
  if not names:
    raise errors.ConfigError(
      f'`builders.{owner}` must be for a model with an adapter, got a model without one. Add '
      '--gin_file=adapters/lora.gin, accept `adapter` in a model class of your own and pass it on, or omit the builder.'
    )
  return names
