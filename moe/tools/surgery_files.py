"""Surgery on checkpoint files, and the recorded load of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import logging
import os
from typing import Any

import numpy as np

from moe.tools import surgery
from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints import discovery
from t5x_lite.formatting import printable
from t5x_lite.storage import files
from t5x_lite.trainer import summaries

_logger = logging.getLogger(__name__)

_PREFIX = 'experts/'
_LOAD = '/load'
# Parts of the state that are saved with the dtype SaveCheckpointConfig.dtype.
_CAST = ('target/', 'param_average/')


def find_checkpoint(path: str) -> str:
  """Return the path of a checkpoint, given the path itself, or a model directory for its newest complete checkpoint.

  Raises:
    CheckpointError: there is no checkpoint.
  """
  if discovery.is_checkpoint_dir_name(path) or not checkpoints.all_steps(path):
    return path  # Reading it raises an error if it is not a checkpoint.
  return checkpoints.get_checkpoint_dir(path, checkpoints.newest_sound_step(path))


def check_output(path: str) -> None:
  """Raise an error if the output folder exists, so that nothing is overwritten.

  Raises:
    CheckpointError: the folder exists.
    ConfigError: the path is neither local nor in an object store.
  """
  discovery.check_path(path, 'output')
  found = files.path(path)
  if found.exists() or found.is_symlink():
    raise errors.CheckpointError(f'{path!r} exists. Give the path of a new model directory.')


def rewrite(
  source: str, output: str, fn: Callable[[dict[str, Any]], Mapping[str, Any]], what: str
) -> str:
  """Apply `fn` to the state of a checkpoint and write the result, with the same step, to a new model directory.

  The write is atomic, like that of any checkpoint. The metadata is copied, and so is the position in the data if one
  process wrote it; the list 'surgery' of the metadata records the operations.

  Args:
    source: path of a checkpoint.
    output: path of the new model directory.
    fn: function from state dict to state dict.
    what: description of the operation, for the metadata.

  Returns:
    Path of the new checkpoint.

  Raises:
    CheckpointError: `output` exists; or an error of reading, `fn` or writing.
  """
  check_output(output)
  found = checkpoints.read_manifest(source)
  state = checkpoints.load(source)
  result = fn(state)
  flat = tree_utils.flatten_dict(result)
  if found is not None:
    step = found.step
    metadata = dict(found.metadata)
  else:
    step = int(np.asarray(flat['state/step']))
    metadata = {}
  operation = {'of': str(files.path(source).absolute()), 'what': what}
  metadata['surgery'] = [*metadata.get('surgery', []), operation]
  save_cfg = checkpoints.SaveCheckpointConfig(dtype=_float_dtype(flat))
  with checkpoints.CheckpointManager(output, save_cfg=save_cfg) as manager:
    manager.save(step, result, data_state=_data_state(source, found), metadata=metadata)
  return checkpoints.get_checkpoint_dir(output, step)


def recorded_load(run: str, layers: Mapping[str, int], last: int = 10) -> dict[str, np.ndarray]:
  """Return the mean load of the experts over the last lines of a run's training metrics.

  Args:
    run: model directory.
    layers: number of experts by path of layer, see `surgery.expert_layers`.
    last: number of lines, with loads, to average over.

  Returns:
    Path of layer -> float64 [experts]; for stacked layers the mean over the layers.

  Raises:
    CheckpointError: no recorded load, or loads of other layers or numbers of experts.
  """
  path = os.path.join(run, 'train', summaries.METRICS_FILE)
  if files.path(path).is_file():
    found = summaries.read_arrays(path)
  else:
    found = []
  with_load = [line for line in found if any(name.endswith(_LOAD) for name in line)]
  result = {}
  for layer, num_experts in layers.items():
    loads = []
    for line in with_load[-last:]:
      loads += [values for name, values in line.items() if _is_load_of(name, layer)]
    if not loads or any(np.shape(load) != (num_experts,) for load in loads):
      raise errors.CheckpointError(
        f'No recorded load of the {num_experts} experts of {layer} in {path!r}. Give the '
        'model directory of the run that wrote this checkpoint.'
      )
    result[layer] = np.mean(loads, axis=0)
  return result


def _is_load_of(name: str, layer: str) -> bool:
  """Return whether a metric is the load of a layer, or of one of the layers of a stack with stacked layers."""
  own = layer.rpartition('/')[0]
  if name == f'{_PREFIX}{own}{_LOAD}':
    return True
  stack = own.split('/')[0]
  is_stacked = own == f'{stack}/{stack}'
  return is_stacked and name.startswith(f'{_PREFIX}{stack}/') and name.endswith(_LOAD)


def _float_dtype(flat: Mapping[str, Any]) -> str:
  """Return the dtype in which to save parameters: the widest of their dtypes."""
  dtypes = {np.asarray(leaf).dtype for name, leaf in flat.items() if name.startswith(_CAST)}
  floating = [dtype for dtype in dtypes if dtype.kind not in 'iub']
  if len(floating) > 1:
    _logger.warning(
      'The parameters have the dtypes %s; all are saved in the widest.', sorted(map(str, floating))
    )
  widest = max(
    floating,
    key=lambda dtype: (dtype.itemsize, dtype.name == 'float32'),
    default=np.dtype(np.float32),
  )
  mixed_halves = len(floating) > 1 and widest.itemsize < 4
  if mixed_halves:
    return 'float32'
  return widest.name


def _data_state(source: str, found: checkpoints.Manifest | None) -> dict[str, bytes] | None:
  if found is None or not found.num_data_processes:
    return None
  if found.num_data_processes > 1:
    _logger.warning(
      'The position in the data is not copied, because %d processes wrote it.',
      found.num_data_processes,
    )
    return None
  from t5x_lite.checkpoints.restoring import restore

  return restore.read_data_state(source, found)


def describe(shapes: Mapping[str, Any]) -> str:
  """Return lines with the number of experts of each sparse layer."""
  layers = surgery.expert_layers(shapes)
  if not layers:
    return 'no experts'
  return '\n'.join(f'  {printable(layer)}: {number} experts' for layer, number in layers.items())
