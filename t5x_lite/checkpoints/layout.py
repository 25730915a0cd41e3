"""Restoring parameters of one layout into a model of the other."""

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


def check_other_layout_fits(path: discovery.PathLike, target: transforms.StateDict, config: StackConfig,
                            restore_cfg: config_lib.RestoreCheckpointConfig) -> None:
  """Refuses parameters of the other layout that would not fit once they are converted; reads no values.

  Parameters that `restore_cfg.assignment_map` renames are not considered.

  Args:
    path: of the checkpoint.
    target: the wanted state; see `restore.restore_checkpoint`.
    config: the model that it is wanted for.
    restore_cfg: see `restore.restore_checkpoint`.

  Raises:
    CheckpointError: they do not fit; the message names the arrays that differ.
    ConfigError: they make up no network that could be converted.
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
