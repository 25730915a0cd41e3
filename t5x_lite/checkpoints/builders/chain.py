"""Chains of builders: made from a `RestoreCheckpointConfig`, run on shapes, then on arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import logging
import os
from typing import Any

from t5x_lite import errors
from t5x_lite.checkpoints import config
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.builders import base
from t5x_lite.checkpoints.builders import changing
from t5x_lite.checkpoints.builders import reading
from t5x_lite.checkpoints.restoring import transforms
from t5x_lite.formatting import first_names

_logger = logging.getLogger(__name__)

Chain = tuple[base.StateBuilder, ...]


def chain_of(
  path: str | os.PathLike[str] | None,
  cfg: config.RestoreCheckpointConfig,
  *,
  transformation_fns: Sequence[base.StateBuilder | transforms.RestoreStateTransformationFn] = (),
  is_resuming: bool = False,
) -> Chain:
  """Return the builders of `cfg`.

  Args:
    path: the checkpoint that `cfg.path` and `cfg.mode` selected; None without one.
    cfg: the configuration.
    transformation_fns: further builders or functions with T5X's signature, before those of `cfg`.
    is_resuming: whether the checkpoint is the run's own, which is neither renamed nor changed by builders.
  """
  rules = () if is_resuming else tuple(cfg.assignment_map or ())
  chain: list[base.StateBuilder] = []
  if path is not None:
    chain.append(reading.Restore(os.fspath(path), rules, cfg.base_path))
  if _uses_average(path, cfg) and not is_resuming:
    chain.append(changing.ParamAverage())
  chain += [
    fn if isinstance(fn, base.StateBuilder) else changing.Transform(fn)
    for fn in (*transformation_fns, *cfg.state_transformation_fns)
    if not isinstance(fn, transforms.AssignmentMap)
  ]  # `Restore` has it, and reads only what it names
  return (*chain, *(() if is_resuming else cfg.builders))


def first_step(chain: Chain) -> int | None:
  """Return the step of the state that a chain builds; None if no builder sets it."""
  step = None
  for builder in chain:
    step = builder.first_step(step)
  return step


def describe(path: str | None, cfg: config.RestoreCheckpointConfig) -> str:
  """Return a text about the origin of a state for the log."""
  parts = [] if path is None else [path]
  if _uses_average(path, cfg):
    parts.append(changing.ParamAverage().description)
  parts += [builder.description for builder in cfg.builders]
  return ', then '.join(parts)


def identity(cfg: config.RestoreCheckpointConfig) -> dict[str, list[str]]:
  """Return what the builders of `cfg` add to the identity of results, as JSON values; {} without builders."""
  added = {}
  if cfg.use_param_average is not None:
    added['use_param_average'] = cfg.use_param_average
  if cfg.builders:
    added['builders'] = [f'{builder!r}: {builder.description}' for builder in cfg.builders]
  return added


def _uses_average(path: str | os.PathLike[str] | None, cfg: config.RestoreCheckpointConfig) -> bool:
  """Return whether the stored average of the parameters becomes the parameters."""
  if path is None or not cfg.use_param_average:
    return False
  try:
    return sources.has_param_average(sources.open_source(path).own)
  except errors.CheckpointError:  # The builder that reads it raises the error.
    return False


def run_on_shapes(chain: Chain, target: base.TargetState) -> tuple[base.BuiltState, frozenset[str]]:
  """Run the builders on shapes.

  Args:
    chain: builders; those on arrays are skipped.
    target: the wanted state.

  Returns:
    (the built state, prefixes of the parts of a state of which no array was built at some point of the chain).

  Raises:
    CheckpointError: a builder cannot build its part.
    ValuesNeededError: a function cannot be applied to shapes.
  """
  state = base.BuiltState()
  absent = set()
  for builder in chain:
    if builder.INPUT == base.ARRAYS:
      continue
    state = builder.build(state, target)
    # A function that drops a part does not ask for a new one.
    if not isinstance(builder, changing.Transform):
      absent |= {
        section
        for section in (*base.FROM_PARAMS, *base.FROM_SCRATCH)
        if not any(name.startswith(section) for name in state.arrays)
      }
  return state, frozenset(absent)


def run_on_arrays(
  chain: Chain, state: base.BuiltState, target: base.TargetState
) -> Mapping[str, Any]:
  """Run the builders on arrays, which get a complete state and return one like it.

  Returns:
    name -> array.

  Raises:
    CheckpointError: a builder returned other names, shapes or dtypes.
  """
  for builder in chain:
    if builder.INPUT != base.ARRAYS:
      continue
    before = base.shapes_of(state.arrays)
    state = builder.build(state, target)
    after = base.shapes_of(state.arrays)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
      raise errors.CheckpointError(
        f'A builder on arrays must keep names, shapes and dtypes, got other ones from {builder.description}: '
        f'{first_names([f"{name} was {before.get(name)} and is {after.get(name)}" for name in changed], 1)}.'
      )
    _logger.info('Applied %s to the complete state.', builder.description)
  return state.arrays
