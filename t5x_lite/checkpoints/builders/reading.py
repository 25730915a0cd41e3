"""Builders that read checkpoints: a restore, an average, and a part of another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import os
import re
from typing import Any
import zlib

import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import multihost
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.builders import base
from t5x_lite.checkpoints.builders.changing import in_layout_of_model
from t5x_lite.checkpoints.restoring import lazy_arrays
from t5x_lite.checkpoints.restoring import transforms
from t5x_lite.formatting import first_names
from t5x_lite.formatting import printable

_AVERAGED = (base.PARAMS, *base.FROM_SCRATCH)
_COUNT = checks.number(at_least=1, integer=True)
_PREFIX = checks.Expectation(
  "a path in the tree of parameters such as 'encoder', or '' for the entire tree",
  lambda prefix: isinstance(prefix, str) and (not prefix or all(prefix.split('/'))),
  "Names of parameters have no 'target/', no '/' at their ends and no '//'.",
)


@dataclasses.dataclass(frozen=True)
class Restore(base.StateBuilder):
  """Builder of the entire state of one checkpoint in any format; it replaces the state so far.

  `RestoreCheckpointConfig.path` begins a chain with this builder. The step is that of the checkpoint.

  Attributes:
    path: path of the checkpoint; see `checkpoints.open_source`.
    assignment_map: names to rename or drop; see `RestoreCheckpointConfig`.
    base_path: folder of the base of an adapter's checkpoint; None for the recorded one.
  """

  path: str
  assignment_map: Sequence[tuple[str, str | None]] = ()
  base_path: str | None = None

  def __post_init__(self):
    checks.check('Restore', vars(self), path=base.PATH, assignment_map=base.ASSIGNMENT_MAP)

  def first_step(self, step: int | None) -> int | None:
    """Return the step of the checkpoint; None if it is unknown or not restored."""
    for pattern, replacement in self.assignment_map or ():
      if re.fullmatch(pattern, base.STEP):
        if replacement is None:
          return None
        break
    return _step_of(self.path)

  @property
  def paths_of_model(self) -> tuple[str, ...]:
    """See `StateBuilder.paths_of_model`."""
    return (self.path,)

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return self.path

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    arrays = lazy_arrays.stored(target.open(self.path, self.base_path))
    if self.assignment_map:
      names = transforms.assignment(list(arrays), list(target.wanted), self.assignment_map)
      arrays = {name: arrays[stored_name] for name, stored_name in names.items()}
    return in_layout_of_model(base.BuiltState(step=self.first_step(None), arrays=arrays), target)


@dataclasses.dataclass(frozen=True)
class Average(base.StateBuilder):
  """Builder of the mean of the parameters of several checkpoints; it replaces the state so far.

  Floating-point parameters and mutable collections are averaged in float64; other numbers are those of the newest
  checkpoint. The step is that of the newest checkpoint, and the optimizer begins with the averaged parameters.

  Attributes:
    path: paths of checkpoints of the same model, or one run directory.
    last: number of newest checkpoints of the run directory; None for all of them.
  """

  path: str | Sequence[str]
  last: int | None = None

  def __post_init__(self):
    several = not isinstance(self.path, str)
    checks.check(
      'Average',
      vars(self),
      path=checks.Expectation(
        'a run directory, or paths of at least two checkpoints, all different',
        lambda path: (
          bool(path)
          and (
            isinstance(path, str)
            or (
              isinstance(path, Sequence)
              and len(path) > 1
              and all(map(base.PATH.holds, path))
              and len({os.path.normpath(each) for each in path}) == len(path)
            )
          )
        ),
        'Give each checkpoint once.',
      ),
      last=checks.Expectation('None with several paths', lambda last: last is None)
      if several
      else _COUNT.or_none(),
    )

  @functools.cached_property
  def paths_of_model(self) -> tuple[str, ...]:
    """Paths of the averaged checkpoints, chosen once, since a run may save others meanwhile.

    Raises:
      CheckpointError: the run directory has fewer checkpoints than `last`, or none.
    """
    if not isinstance(self.path, str):
      return tuple(self.path)
    found = [
      discovery.get_checkpoint_dir(self.path, step) for step in discovery.all_steps(self.path)
    ]
    found = [path for path in found if not discovery.is_marked_unsound(path)]
    if len(found) < (self.last or 1):
      raise errors.CheckpointError(
        f'`Average.path` must be a run directory with at least {self.last or 1} checkpoint(s), got {self.path!r} '
        f'with {len(found)}.{discovery.hint(self.path)}'
      )
    return tuple(found[-(self.last or 0) :])

  def first_step(self, step: int | None) -> int | None:
    """See `StateBuilder.first_step`."""
    return max(_step_of(path) or 0 for path in self.paths_of_model)

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    paths = self.paths_of_model
    return f'the average of {len(paths)} checkpoints ({", ".join(paths)})'

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    names = ' '.join(map(os.path.basename, self.paths_of_model))
    multihost.assert_equal(
      np.uint32(zlib.crc32(names.encode())), f'Processes see different checkpoints of {self.path}.'
    )
    opened = [target.open(path) for path in self.paths_of_model]
    newest = max(opened, key=lambda source: source.step or 0)
    states = [
      {
        name: array
        for name, array in lazy_arrays.stored(source).items()
        if name.startswith(_AVERAGED)
      }
      for source in opened
    ]
    _check_equal([source.path for source in opened], states)
    arrays = {}
    for name, array in lazy_arrays.stored(newest).items():
      if not name.startswith(_AVERAGED):
        continue
      inputs = tuple(arrays_of_one[name] for arrays_of_one in states)
      arrays[name] = (
        array
        if not jnp.issubdtype(array.dtype, jnp.floating)
        else lazy_arrays.ComputedArray(
          shape=array.shape, dtype=array.dtype, inputs=inputs, compute_fn=_mean
        )
      )
    averaged = base.BuiltState(arrays=arrays).at_step(newest.step or 0)
    return in_layout_of_model(averaged, target)


@dataclasses.dataclass(frozen=True)
class Subtree(base.StateBuilder):
  """Builder that moves the parameters below a prefix, of the state so far or of another model's checkpoint.

  Without `path`, the moved parameters replace the state so far, and the run begins at step 0. With `path`, they are
  added to the state so far, over parameters of the same names. In both cases the optimizer begins with the parameters.

  Attributes:
    prefix: path of the subtree in the tree of parameters, such as 'encoder'; '' for all parameters.
    into: path of the subtree in the parameters of this model; '' for its top.
    path: checkpoint of another model, in any format; None for the state so far.
  """

  prefix: str
  into: str = ''
  path: str | None = None

  def __post_init__(self):
    checks.check('Subtree', vars(self), prefix=_PREFIX, into=_PREFIX, path=base.PATH.or_none())

  def first_step(self, step: int | None) -> int | None:
    """See `StateBuilder.first_step`."""
    if self.path is None:
      return None
    return step

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return (
      f'the parameters {self.prefix or "(all)"}{f" of {self.path}" if self.path else ""} as '
      f'{self.into or "all parameters"}'
    )

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    if self.path is None:
      arrays = state.arrays
    else:
      arrays = lazy_arrays.stored(target.open(self.path))
    before, after = (
      f'{base.PARAMS}{prefix}/' if prefix else base.PARAMS for prefix in (self.prefix, self.into)
    )
    moved = {
      after + name.removeprefix(before): array
      for name, array in arrays.items()
      if name.startswith(before)
    }
    if not moved:
      tops = dict.fromkeys(name.split('/')[1] for name in arrays if name.startswith(base.PARAMS))
      raise errors.CheckpointError(
        f'`Subtree.prefix` must be the path of parameters in {self.path or "the state so far"}, got {self.prefix!r}. '
        f'At the top it has {", ".join(map(printable, tops)) or "no parameters"}.'
      )
    part = in_layout_of_model(base.BuiltState(arrays=moved), target)
    if self.path is None:
      return part
    kept = state.without(*base.FROM_PARAMS)
    return kept.replace(arrays={**kept.arrays, **part.arrays})


def _step_of(path: str) -> int | None:
  return sources.open_source(path).step


def _mean(*arrays: np.ndarray) -> np.ndarray:
  total = np.zeros(arrays[0].shape, np.float64)
  for array in arrays:
    total += array.astype(np.float64)
  return (total / len(arrays)).astype(arrays[0].dtype)


def _check_equal(paths: Sequence[str], states: Sequence[Mapping[str, Any]]) -> None:
  """Raise CheckpointError if the states differ in names or shapes."""
  for path, arrays in zip(paths[1:], states[1:], strict=True):
    first = states[0]
    problems = [
      (words, names)
      for words, names in (
        ('missing', [name for name in first if name not in arrays]),
        ('additional', [name for name in arrays if name not in first]),
        (
          'of another shape',
          [
            f'{name} {arrays[name].shape} instead of {first[name].shape}'
            for name in first
            if name in arrays and arrays[name].shape != first[name].shape
          ],
        ),
      )
      if names
    ]
    if problems:
      raise errors.CheckpointError(
        f'The checkpoints of `Average` must be of the same model, got {path!r}, in which, compared with '
        f'{paths[0]!r}, '
        + '; '.join(
          f'{len(names)} arrays are {words}: {first_names(names)}' for words, names in problems
        )
        + '.'
      )
