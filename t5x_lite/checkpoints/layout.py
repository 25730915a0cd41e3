"""Restoring parameters of one layout into a model of the other."""

from __future__ import annotations

import logging

from t5x_lite.checkpoints import discovery, sources, transforms
from t5x_lite.networks import param_layouts
from t5x_lite.networks.t5_config import StackConfig

_logger = logging.getLogger(__name__)


def param_layout_fns(
    path: discovery.PathLike, config: StackConfig) -> tuple[transforms.RestoreStateTransformationFn, ...]:
  """Returns the transform that a checkpoint needs to fit a model, if its parameters have the other layout.

  Pass the result to `restore_checkpoint(..., transformation_fns=...)`. It is empty when the layouts agree, which keeps
  the restore on its direct way from disk to devices.

  Args:
    path: of the checkpoint; only its names are looked at.
    config: the model that the state is wanted for.

  Returns:
    One transform, or none.
  """
  stored_layout = sources.layout_of(sources.open_source(path).shapes())
  if stored_layout in (None, config.param_layout):
    return ()  # Whether a network that is none of ours fits is for the restore to say.
  _logger.info('Converting the parameters of %s from layout %s to %s.', path, stored_layout, config.param_layout)
  return (transforms.convert_param_trees(
      lambda tree: param_layouts.convert(tree, stored_layout, config.param_layout, config)),)
