"""Conversion of the parameter layout at restore."""

from __future__ import annotations

import logging
import os
import re

from t5x_lite import tree_utils
from t5x_lite.checkpoints import config as config_lib
from t5x_lite.checkpoints import discovery, sources, transforms
from t5x_lite.networks import layout_plan, param_layouts
from t5x_lite.networks.t5_config import StackConfig

_logger = logging.getLogger(__name__)

_PARAMS = 'target/'


def param_layout_fns(
    path: discovery.PathLike, config: StackConfig) -> tuple[transforms.RestoreStateTransformationFn, ...]:
  """Return the transform that converts a checkpoint to the parameter layout of a model.

  Pass the result to `restore_checkpoint(..., transformation_fns=...)`. It is empty if the layouts are equal, so that
  arrays are restored directly to the devices.

  Args:
    path: path of the checkpoint; only its names are read.
    config: configuration of the model to restore.

  Returns:
    A tuple of one transform, or an empty tuple.
  """
  stored_layout = sources.layout_of(sources.open_source(path).shapes())
  if stored_layout in (None, config.param_layout):
    return ()  # The restore checks networks of unknown layout.
  _logger.info('Converting the parameters of %s from layout %s to %s.', path, stored_layout, config.param_layout)
  return (transforms.convert_param_trees(
      lambda tree: param_layouts.convert(tree, stored_layout, config.param_layout, config)),)


def check_other_layout_fits(path: discovery.PathLike, target: transforms.StateDict, config: StackConfig,
                            restore_cfg: config_lib.RestoreCheckpointConfig) -> None:
  """Raise if parameters of the other layout would not fit after their conversion; reads no values.

  Does nothing if `restore_cfg.assignment_map` renames parameters.

  Args:
    path: path of the checkpoint.
    target: the target state; see `restore.restore_checkpoint`.
    config: configuration of the model to restore.
    restore_cfg: see `restore.restore_checkpoint`.

  Raises:
    CheckpointError: the parameters do not fit; the message names the arrays that differ.
    ConfigError: the network cannot be converted.
  """
  stored = sources.open_source(path).shapes()
  wanted = {name: leaf for name, leaf in tree_utils.flatten_dict(target).items() if name.startswith(_PARAMS)}
  patterns = [pattern for pattern, _ in restore_cfg.assignment_map or ()]
  if any(re.fullmatch(pattern, name) for pattern in patterns for name in wanted):
    return
  if sources.layout_of(stored) in (None, config.param_layout):
    return
  planned = layout_plan.plan(
      {name.removeprefix(_PARAMS): leaf for name, leaf in stored.items() if name.startswith(_PARAMS)},
      config.param_layout, relpos_per_layer=config.relpos_per_layer, heads=config.num_heads)
  lenient = restore_cfg.fallback_to_scratch
  transforms.check_fit({f'{_PARAMS}{name}': leaf for name, leaf in planned.items()}, wanted,
                       allow_surplus=lenient or not restore_cfg.strict, allow_missing=lenient, where=os.fspath(path))
