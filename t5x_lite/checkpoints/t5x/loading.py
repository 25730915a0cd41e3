"""T5X's functions that find a checkpoint, tell its format, and load it without a model."""

from __future__ import annotations

from collections.abc import Sequence
import enum
import logging
import os
from typing import Any

from flax import serialization

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite.checkpoints import config
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.restoring import restore
from t5x_lite.checkpoints.restoring import transforms
from t5x_lite.checkpoints.sources import folder_of
from t5x_lite.checkpoints.sources import t5x_index
from t5x_lite.compat import names as t5x_names
from t5x_lite.storage import files
from t5x_lite.storage import plain_paths

_logger = logging.getLogger(__name__)
_FIRST_OF_TENSORFLOW = b'model_checkpoint_path'
_NOT_LAZY = checks.Expectation(
  'False',
  lambda lazy: not lazy,
  t5x_names.remedy('t5x.checkpoints', 'load_t5x_checkpoint.lazy_parameters=True'),
)


class CheckpointTypes(enum.Enum):
  """Formats of checkpoints that T5X distinguishes; those of t5x_lite are ORBAX."""

  ORBAX = 'ORBAX'
  T5X = 'T5X'
  T5X_TF = 'T5X_TF'


def check_not_lazy(owner: str, lazy_parameters: bool | None) -> None:
  """Raise ConfigError if `lazy_parameters` of the function `owner` is set."""
  checks.check(owner, {'lazy_parameters': lazy_parameters}, lazy_parameters=_NOT_LAZY)


def tensorflow_error(path: discovery.PathLike) -> errors.CheckpointError:
  """Return the error for a checkpoint of TensorFlow, with the alternative."""
  sentence = t5x_names.remedy('t5x.checkpoints', 'Checkpointer.restore_from_tf_checkpoint')
  return errors.CheckpointError(f'{os.fspath(path)!r} cannot be restored. {sentence}')


def find_checkpoint(path: discovery.PathLike, step: int | None = None) -> str:
  """Return the path of a checkpoint: of T5X's file `checkpoint` if it has one, otherwise of its folder.

  Args:
    path: a model directory, a checkpoint, or T5X's file in it.
    step: step in a model directory; None for the newest.

  Raises:
    CheckpointError: there is no checkpoint of a supported format.
  """
  root = files.path(folder_of(path))
  steps = discovery.all_steps_of_any_program(root)
  if step is not None or steps:
    root = files.path(discovery.get_checkpoint_dir(root, steps[-1] if step is None else step))
  source = sources.open_source(root)
  if source.format == sources.T5xNativeSource.format:
    return str(root / t5x_index.FILENAME)
  return str(root)


def load_t5x_checkpoint(
  path: discovery.PathLike,
  step: int | None = None,
  state_transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (),
  remap: bool = True,
  restore_dtype: Any = None,
  lazy_parameters: bool = False,
) -> dict[str, Any]:
  """Return all arrays of a checkpoint, of T5X, t5x_lite or Hugging Face, without a model.

  Args:
    path: see `find_checkpoint`.
    step: see `find_checkpoint`.
    state_transformation_fns: functions `(state_dict, {}) -> state_dict`, applied in order.
    remap: False forbids functions.
    restore_dtype: floating dtype of the parameters; None for the stored dtype.
    lazy_parameters: must be False.

  Returns:
    Nested dict of NumPy arrays: 'target' with the parameters, 'state' with the step and the optimizer's state.

  Raises:
    CheckpointDamagedError: a file is damaged.
    CheckpointError: there is no checkpoint.
    ConfigError: an unsupported option.
  """
  check_not_lazy('load_t5x_checkpoint', lazy_parameters)
  checks.check(
    'load_t5x_checkpoint',
    locals(),
    restore_dtype=config.FLOAT_DTYPE.or_none(),
    state_transformation_fns=config.FUNCTIONS,
  )
  checks.check(
    'load_t5x_checkpoint',
    locals(),
    state_transformation_fns=checks.Expectation(
      'empty with remap=False', lambda fns: remap or not fns, 'Set remap=True to apply them.'
    ),
  )
  state = restore.load(folder_of(find_checkpoint(path, step)), dtype=restore_dtype)
  for fn in state_transformation_fns:
    state = checks.call_custom(
      'load_t5x_checkpoint',
      'state_transformation_fns',
      'state_dict, target_state_dict',
      fn,
      state,
      {},
    )
  return state


def detect_checkpoint_type(
  checkpoint_path: discovery.PathLike, expected: CheckpointTypes | None = None
) -> CheckpointTypes:
  """Return the format of a checkpoint, by its contents.

  Args:
    checkpoint_path: the checkpoint, or the path of T5X's file `checkpoint` in it, which need not exist.
    expected: format that the caller expects; another one is logged as a warning.

  Raises:
    CheckpointError: no checkpoint of these formats.
  """
  root = files.path(checkpoint_path)
  if root.name == t5x_index.FILENAME and not root.is_dir():
    root = root.parent
  else:
    root = root
  index = root / t5x_index.FILENAME
  found = sources.detect_format(root)
  if found in (sources.OwnSource.format, sources.OrbaxSource.format):
    result = CheckpointTypes.ORBAX
  elif found == sources.T5xNativeSource.format:
    result = CheckpointTypes.T5X
  elif index.is_file() and _begins_with(index, _FIRST_OF_TENSORFLOW):
    result = CheckpointTypes.T5X_TF
  else:
    sources.check_exists(root)
    raise errors.CheckpointError(
      f'{str(checkpoint_path)!r} must be a checkpoint of T5X or t5x_lite, got a folder of another format '
      f'({found or "unknown"}). checkpoints.detect_format names all formats.'
    )
  if expected is not None and result != expected:
    _logger.warning(
      '%s is a checkpoint of the format %s; expected %s.',
      checkpoint_path,
      result.value,
      expected.value,
    )
  return result


def get_restore_parameters(directory: discovery.PathLike, structure: Any) -> Any:
  """Return Orbax's description of each array to restore.

  Args:
    directory: folder of the arrays of an Orbax PyTree.
    structure: tree of the checkpoint: Orbax's metadata of arrays, values that are stored in the tree itself, and empty
      nodes.

  Returns:
    A tree like `structure` of `orbax.checkpoint.type_handlers.ParamInfo`; empty nodes stay.
  """
  from etils import epath
  import orbax.checkpoint as ocp

  handlers = ocp.type_handlers
  if files.is_remote(directory):
    root = epath.Path(directory)
  else:
    root = epath.Path(plain_paths.plain_path(directory))
  shared = {
    'parent_dir': root,
    'is_ocdbt_checkpoint': handlers.is_ocdbt_checkpoint(root),
    'ts_context': handlers.get_ts_context(),
  }
  names = ocp.tree.to_flat_dict(ocp.tree.get_param_names(structure), keep_empty_nodes=True)

  def info(key, leaf):
    if handlers.is_supported_empty_value(leaf):
      return leaf
    is_array = isinstance(leaf, ocp.metadata.tree.ValueMetadataEntry)
    return handlers.ParamInfo(
      name=names[key], skip_deserialize=leaf.skip_deserialize if is_array else True, **shared
    )

  flat = ocp.tree.to_flat_dict(structure, keep_empty_nodes=True)
  return ocp.tree.from_flat_dict(
    {key: info(key, leaf) for key, leaf in flat.items()}, target=structure
  )


def register_ts_spec_for_serialization() -> None:
  """Let `flax.serialization` put instances of `tensorstore.Spec` into state dicts, as JSON, and restore them."""
  import tensorstore as ts

  serialization.register_serialization_state(
    ts.Spec, lambda spec: spec.to_json(), lambda spec, state: ts.Spec(state), override=True
  )


def _begins_with(path: files.Path, content: bytes) -> bool:
  with path.open('rb') as file:
    return file.read(len(content)) == content
