"""Sharding report of a run, in its log and `model-info.txt`, and the list of arrays in `trainer_state_tree.txt`."""

from collections.abc import Mapping

from absl import logging
import numpy as np

from t5x_lite import multihost
from t5x_lite import tree_utils
from t5x_lite.formatting import format_table
from t5x_lite.partitioning.partitioner import PjitPartitioner
from t5x_lite.storage import files
from t5x_lite.types import PyTree


def write_model_info(
  path: files.PathLike,
  train_state: PyTree,
  partitioner: PjitPartitioner,
  *,
  fold: bool = False,
  header: Mapping[str, str] | None = None,
) -> None:
  """Write the report of `train_state` (arrays or shapes) to a text file, from the lead process only.

  Args:
    path: file to write; its directory is created.
    train_state: the state.
    partitioner: partitioner that shards the state.
    fold: join the lines of equal arrays of different layers.
    header: further `name: value` lines for the top of the file.
  """
  if not multihost.is_lead():
    return
  text = partitioner.explain(train_state).to_text(fold=fold)
  if header:
    text = '\n'.join(f'{name}: {value}' for name, value in header.items()) + '\n\n' + text
  path = files.path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write(path, text, durable=False)


def write_state_tree(path: files.PathLike, state_dict: PyTree, axes: PyTree) -> None:
  """Write one line per array of a state: name, dtype, shape and PartitionSpec over mesh axes, separated by spaces.

  Args:
    path: file to write; its directory must exist.
    state_dict: state dict of a train state, with the names that checkpoints have; arrays or shapes.
    axes: PartitionSpecs of mesh axes, a tree of the same structure.
  """
  specs = tree_utils.flatten_dict(axes)
  rows = [
    (
      name,
      np.dtype(leaf.dtype).name,
      str(list(leaf.shape)),
      f'({", ".join(map(str, specs[name]))})',
    )
    for name, leaf in tree_utils.flatten_dict(state_dict).items()
  ]
  files.write(
    files.path(path),
    format_table([('name', 'dtype', 'shape', 'mesh axes'), *rows]) + '\n',
    durable=False,
  )


def log_model_info(
  log_file: str | None, full_train_state: PyTree, partitioner: PjitPartitioner
) -> None:
  """Log the report of a state, with equal layers joined, and write it in full to `log_file` if that is given.

  Args:
    log_file: path of the text file, or None.
    full_train_state: the state (arrays or `jax.ShapeDtypeStruct`s).
    partitioner: partitioner that shards the state.
  """
  if log_file is not None:
    write_model_info(log_file, full_train_state, partitioner)
  logging.info('%s', partitioner.explain(full_train_state).to_text())
