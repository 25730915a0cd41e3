"""T5X's checkpointer for upcycling: a sparse model starts from the dense blocks that an assignment map names.

`moe.upcycle` needs no assignment map, and also makes the optimizer's state and granular experts from the dense model.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from moe import expert_state
from moe import upcycling
from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import errors
from t5x_lite.checkpoints import builders
from t5x_lite.checkpoints.restoring import lazy_arrays


class UpcycleCheckpointer(checkpoints.Checkpointer):
  """Checkpointer that restores arrays of dense blocks as those of experts.

  Each array of an expert, '.../expert/...', for which `assignment_map` names an array of the dense model, is repeated
  for every expert. The map leaves out routers and optimizer state, which `fallback_to_scratch` initialises. Commands do
  the same if this class is `RestoreCheckpointConfig.checkpointer_cls`.
  """

  def __init__(
    self,
    train_state: Any,
    partitioner: Any,
    checkpoints_dir: str,
    num_experts: int,
    dataset_iterator: Any = None,
    *,
    keep: int | None = None,
    save_dtype: Any = np.float32,
    restore_dtype: Any = None,
    keep_dataset_checkpoints: int | None = None,
  ):
    """Store the arguments.

    Args:
      train_state: see `Checkpointer`.
      partitioner: see `Checkpointer`.
      checkpoints_dir: see `Checkpointer`.
      num_experts: number of experts of the sparse model.
      dataset_iterator: see `Checkpointer`.
      keep: see `Checkpointer`.
      save_dtype: see `Checkpointer`.
      restore_dtype: see `Checkpointer`.
      keep_dataset_checkpoints: see `Checkpointer`.

    Raises:
      ConfigError: an invalid option.
    """
    checks.check(
      'UpcycleCheckpointer', locals(), num_experts=checks.number(at_least=1, integer=True)
    )
    super().__init__(
      train_state,
      partitioner,
      checkpoints_dir,
      dataset_iterator,
      keep=keep,
      save_dtype=save_dtype,
      restore_dtype=restore_dtype,
      keep_dataset_checkpoints=keep_dataset_checkpoints,
    )
    self._num_experts = num_experts

  @property
  def builders(self) -> Sequence[builders.StateBuilder]:
    """See `Checkpointer.builders`."""
    return (_RepeatForExperts(self._num_experts),)


@dataclasses.dataclass(frozen=True)
class _RepeatForExperts(builders.StateBuilder):
  """Builder that repeats each parameter of an expert that has no dim for the experts."""

  num_experts: int

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return 'upcycling'

  def build(self, state: builders.BuiltState, target: builders.TargetState) -> builders.BuiltState:
    """See `StateBuilder.build`."""
    arrays = dict(state.arrays)
    for name, array in state.arrays.items():
      wanted = target.wanted.get(name)
      if wanted is None or not name.startswith(expert_state.TARGET):
        continue
      path = name.removeprefix(expert_state.TARGET)
      found = expert_state.split_path(path)
      if found is None or found[1] != expert_state.EXPERT:
        continue
      if array.ndim == len(wanted.shape) - 1:
        arrays[name] = self._repeated(path, array, tuple(wanted.shape))
    return state.replace(arrays=arrays)

  def _repeated(self, path: str, array: Any, shape: tuple[int, ...]) -> lazy_arrays.ComputedArray:
    dims = expert_state.dims_of(path, len(shape))
    num_experts = shape[dims.index('e')]
    if num_experts != self.num_experts:
      raise checks.invalid(
        'UpcycleCheckpointer',
        'num_experts',
        f'{num_experts}, the number in {path}',
        self.num_experts,
        'Set both to the same macro, such as %NUM_EXPERTS.',
      )

    def compute(dense: np.ndarray) -> np.ndarray:
      return np.ascontiguousarray(upcycling.repeat_for_experts(dense, dims, num_experts))

    blank_dense = np.broadcast_to(np.zeros((), array.dtype), array.shape)
    blank = upcycling.repeat_for_experts(blank_dense, dims, num_experts)
    if blank is None or blank.shape != shape:
      raise errors.CheckpointError(
        f'Cannot upcycle an array of shape {tuple(array.shape)} to {path} of shape {shape}. Give the checkpoint of a '
        'dense model of the same sizes.'
      )
    return lazy_arrays.ComputedArray(
      shape=shape, dtype=array.dtype, inputs=(array,), compute_fn=compute
    )
