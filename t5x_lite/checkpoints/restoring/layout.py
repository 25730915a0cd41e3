"""Conversion of the parameter layout at restore."""

from __future__ import annotations

from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.builders import changing
from t5x_lite.networks.t5_config import StackConfig


def param_layout_fns(
  path: discovery.PathLike, config: StackConfig
) -> tuple[changing.ConvertLayout, ...]:
  """Return the builder that converts a checkpoint to the parameter layout of a model.

  Pass the result to `restore_checkpoint(..., transformation_fns=...)`; `network=config` does the same. It is empty if
  the layouts are equal.

  Args:
    path: path of the checkpoint; only its names are read.
    config: configuration of the model to restore.

  Returns:
    A tuple of one builder, or an empty tuple.
  """
  stored_layout = sources.layout_of(sources.open_source(path).shapes())
  # The restore checks networks of unknown layout.
  if stored_layout in (None, config.param_layout):
    return ()
  return (changing.ConvertLayout(config),)
