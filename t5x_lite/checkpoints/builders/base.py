"""Interface of builders: the state that passes through a chain, the wanted state, and the class of all builders."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import re
from typing import Any, ClassVar

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.restoring import lazy_arrays
from t5x_lite.networks.t5_config import StackConfig

# Inputs of builders; see `StateBuilder.INPUT`.
SHAPES = 'shapes'
ARRAYS = 'arrays'

PARAMS = 'target/'
STEP = 'state/step'
# Parts of a state that an optimizer or an average begins from the parameters.
FROM_PARAMS = ('state/param_states/', 'param_average/')
# Parts that come from a newly initialised state.
FROM_SCRATCH = ('flax_mutables/',)


def _assignment_problem(rules: Any) -> str:
  """Return the first problem of an assignment map as a sentence; '' if it is valid."""
  if rules is not None and (not isinstance(rules, Sequence) or isinstance(rules, str)):
    return f'{rules!r} is not a list.'
  for rule in rules or ():
    if (
      not isinstance(rule, Sequence)
      or isinstance(rule, str)
      or len(rule) != 2
      or not isinstance(rule[0], str)
      or not isinstance(rule[1], str | None)
    ):
      return f'The rule {rule!r} is not a pair.'
    try:
      re.compile(rule[0])
    except re.error as e:
      return f'{rule[0]!r} is not a regular expression: {e}.'
  return ''


ASSIGNMENT_MAP = checks.Expectation(
  'pairs of a regular expression and a replacement or None',
  lambda rules: not _assignment_problem(rules),
  _assignment_problem,
)


def _is_pattern(pattern: Any) -> bool:
  try:
    return isinstance(pattern, str) and bool(re.compile(pattern))
  except re.error:
    return False


PATH = checks.Expectation(
  'the path of a checkpoint', lambda path: isinstance(path, str) and bool(path)
)
PATTERNS = checks.Expectation(
  'a list of regular expressions',
  lambda patterns: (
    isinstance(patterns, Sequence)
    and not isinstance(patterns, str)
    and len(patterns) > 0
    and all(map(_is_pattern, patterns))
  ),
  "Names of parameters have no 'target/', and an expression must match a name in full.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltState:
  """State between two builders of a chain.

  Attributes:
    step: number of training steps of these parameters, the first step of the run; None if no builder has set it, which
      begins the run at step 0.
    arrays: '/'-joined name -> array or lazy array, as in the flattened `state_dict()` of a train state. Before a
      builder on arrays the names may be those of another model.
    initialized: names whose values come from the initialisation of the model instead of a builder.
  """

  step: int | None = None
  arrays: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  initialized: frozenset[str] = frozenset()

  @property
  def built(self) -> frozenset[str]:
    """Names of the arrays that builders have made."""
    return frozenset(self.arrays) - self.initialized

  def replace(self, **changes: Any) -> BuiltState:
    """Return a copy with other fields."""
    return dataclasses.replace(self, **changes)

  def at_step(self, step: int | None) -> BuiltState:
    """Return a copy with another step, also in `arrays`; None removes it."""
    arrays = {name: array for name, array in self.arrays.items() if name != STEP}
    return self.replace(
      step=step, arrays=arrays if step is None else arrays | {STEP: np.asarray(step, np.int32)}
    )

  def without(self, *sections: str) -> BuiltState:
    """Return a copy without the arrays whose names begin with one of `sections`."""
    return self.replace(
      arrays={name: array for name, array in self.arrays.items() if not name.startswith(sections)}
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TargetState:
  """State that the model wants, and what a builder may use to make it.

  Attributes:
    state_dict: nested dict of arrays or `jax.ShapeDtypeStruct`s.
    wanted: name -> shape and dtype of the result, in which parameters may have another dtype than in `state_dict`.
    network: configuration of the network, which decides the parameter layout; None keeps the layout.
    is_resuming: whether the run continues from its own checkpoint.
    has_values: False in a check, which reads no values.
  """

  state_dict: Mapping[str, Any]
  wanted: Mapping[str, jax.ShapeDtypeStruct]
  network: StackConfig | None = None
  is_resuming: bool = False
  has_values: bool = True

  @functools.cached_property
  def _opened(self) -> dict[str, tuple[sources.StateSource, bool]]:
    return {}

  def open(self, path: str, base_path: str | None = None) -> sources.StateSource:
    """Return the stored state at `path`, opened once, and verified if values will be read.

    All processes must call this together.

    Args:
      path: path of the checkpoint.
      base_path: see `sources.open_source`; it counts when the path is opened first.

    Raises:
      CheckpointDamagedError: a file differs from its hash.
      CheckpointError: there is no readable checkpoint.
    """
    if path not in self._opened:
      source = sources.open_source(path, base_path=base_path)
      self._opened[path] = (source, self.has_values and source.verify())
    return self._opened[path][0]

  def is_verified(self, path: str) -> bool:
    """Return True if `open` has compared all files of `path` with their hashes."""
    return self._opened[path][1]

  def initial(self, name: str) -> lazy_arrays.InitialArray:
    """Return the initial array `name` of the model, with the wanted shape and dtype."""
    leaf = self.wanted[name]
    return lazy_arrays.InitialArray(name=name, shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype))


class StateBuilder(abc.ABC):
  """One link of the chain that builds the first state of a run.

  Subclasses are frozen dataclasses: `repr` identifies a builder in the records of results.

  Attributes:
    INPUT: 'shapes' for a builder that runs before the model is initialised: it gets what the builders before it have
      built, as lazy arrays, and reads no values in `build`. 'arrays' for a builder that runs after it: it gets the
      complete state of the model on its devices, and returns arrays of the same names, shapes and dtypes.
    KEEPS_BASE: whether parameters that do not belong to an adapter keep their values, so that checkpoints of an adapter
      need not have them.
  """

  INPUT: ClassVar[str] = SHAPES
  KEEPS_BASE: ClassVar[bool] = False

  def first_step(self, step: int | None) -> int | None:
    """Return the step of the state that `build` returns, given the step that it gets; reads at most a number."""
    return step

  @property
  def needs_values(self) -> bool:
    """True if `build` cannot tell names and shapes without reading values."""
    return False

  @property
  def paths_of_model(self) -> tuple[str, ...]:
    """Checkpoints of the entire model that the builder reads."""
    return ()

  @property
  def description(self) -> str:
    """Short text for the log."""
    return type(self).__name__

  @abc.abstractmethod
  def build(self, state: BuiltState, target: TargetState) -> BuiltState:
    """Return the state with the arrays of this builder.

    Args:
      state: the state so far; empty at the beginning of a chain.
      target: the wanted state.

    Raises:
      CheckpointError: a checkpoint does not exist or does not fit.
    """


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
  """Return the shape and dtype of each array of a flat state."""
  return {
    name: jax.ShapeDtypeStruct(tuple(array.shape), array.dtype) for name, array in arrays.items()
  }


def matching_params(patterns: Sequence[str], wanted: Mapping[str, Any], option: str) -> list[str]:
  """Return the names of `wanted` parameters that a pattern matches in full.

  Raises:
    CheckpointError: no parameter matches.
  """
  params = [name.removeprefix(PARAMS) for name in wanted if name.startswith(PARAMS)]
  names = [
    f'{PARAMS}{name}' for name in params if any(re.fullmatch(pattern, name) for pattern in patterns)
  ]
  if not names:
    raise errors.CheckpointError(
      f'`{option}` must match names of parameters in full, such as {params[0]!r}, got '
      f'{list(patterns)}, which match none.'
    )
  return names
