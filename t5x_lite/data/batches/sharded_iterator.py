"""Iterators of other packages as sources of a run, and T5X's functions for batches on devices."""

import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.data.batches import positions
from t5x_lite.data.batches.global_batches import GlobalBatches
from t5x_lite.data.batches.global_batches import to_global_arrays
from t5x_lite.data.interfaces import DataState
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.interfaces import HostIterator
from t5x_lite.errors import DataError
from t5x_lite.partitioning import DataLayout

_FILE = 'iterator'
_UNDELIVERED_FILE = 'undelivered.npz'


class DatasetIterator(HostIterator):
  """An iterator with clu's methods `save` and `restore`, of this process's rows of each global batch."""

  def __init__(self, iterator: Any, layout: DataLayout):
    """Args:
    iterator: iterator of batches, with `element_spec`; `save` and `restore` are needed to save its position.
    layout: the partitioner's layout.
    """
    self._iterator = iterator
    self._spec = {
      name: jax.ShapeDtypeStruct((layout.batch_size, *spec.shape[1:]), spec.dtype)
      for name, spec in iterator.element_spec.items()
    }
    self._waiting: collections.deque[HostBatch] = collections.deque()

  @property
  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """See base class."""
    return dict(self._spec)

  def __next__(self) -> HostBatch:
    if self._waiting:
      return self._waiting.popleft()
    return {name: np.asarray(rows) for name, rows in next(self._iterator).items()}

  def get_state(self, undelivered: Sequence[HostBatch] = ()) -> DataState:
    """See base class."""
    with tempfile.TemporaryDirectory(prefix='t5x_lite_data_') as folder:
      try:
        self._iterator.save(pathlib.Path(folder) / _FILE)
      except (AttributeError, NotImplementedError) as error:
        raise DataError(
          f'{type(self._iterator).__name__} cannot save its position: {error}. Return a tf.data.Dataset, '
          'or set SaveCheckpointConfig.save_dataset = False.'
        ) from error
      state = {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}
    return {
      **state,
      **positions.write_state({}),
      _UNDELIVERED_FILE: positions.pack_batches([*undelivered, *self._waiting]),
    }

  def set_state(self, state: DataState) -> None:
    """See base class."""
    positions.check_identity(positions.read_state(state)['identity'], {})
    with tempfile.TemporaryDirectory(prefix='t5x_lite_data_') as folder:
      for name, content in state.items():
        (pathlib.Path(folder) / name).write_bytes(content)
      self._iterator.restore(pathlib.Path(folder) / _FILE)
    self._waiting = collections.deque(positions.unpack_batches(state[_UNDELIVERED_FILE]))


def as_host_iterator(
  found: Any, layout: DataLayout, identity: Mapping[str, Any], *, may_end: bool
) -> HostIterator:
  """Return the iterator of a run's data for what T5X's `get_dataset_fn` may return.

  Args:
    found: a `HostIterator`, a `tf.data.Dataset`, or an iterator with clu's methods.
    layout: the partitioner's layout.
    identity: JSON values that determine the rows of a `tf.data.Dataset`; a saved position is of no use for others.
    may_end: whether a `tf.data.Dataset` may end.

  Raises:
    ConfigError: `found` is something else.
  """
  if isinstance(found, HostIterator):
    return found
  if hasattr(found, 'as_numpy_iterator') and hasattr(found, 'element_spec'):
    from t5x_lite.data.seqio import tf_data as seqio_tf_data

    return seqio_tf_data.TfDatasetIterator(
      found, layout, 'The training data', identity, may_end=may_end
    )
  if not isinstance(found, Iterator) or not hasattr(found, 'element_spec'):
    raise checks.invalid(
      '',
      'get_dataset_fn',
      'a function that returns a tf.data.Dataset, a data.HostIterator, or an '
      'iterator with `element_spec` like those of clu',
      found,
    )
  return DatasetIterator(found, layout)


class ShardedDatasetIterator(Iterator):
  """Iterator of global arrays, sharded over the partitioner's data axes, from an iterator of this process's rows."""

  def __init__(self, iterator: Any, partitioner: Any, global_shapes: Mapping[str, Sequence[int]]):
    """Args:
    iterator: iterator of batches with clu's methods.
    partitioner: object with `mesh` and `data_partition_spec`.
    global_shapes: feature name to the shape of the global batch.
    """
    self._iterator = iterator
    self._partitioner = partitioner
    self._spec = {
      name: jax.ShapeDtypeStruct(tuple(shape), iterator.element_spec[name].dtype)
      for name, shape in global_shapes.items()
    }

  def __next__(self) -> dict[str, jax.Array]:
    return to_global_arrays(next(self._iterator), self._partitioner, self._spec)

  def reset(self) -> None:
    """Reset the iterator to its start."""
    self._iterator.reset()

  @property
  def element_spec(self) -> Any:
    """Shapes and dtypes of this process's rows."""
    return self._iterator.element_spec

  def save(self, filename: Any) -> None:
    """Save the position to a file."""
    self._iterator.save(filename)

  def restore(self, filename: Any) -> None:
    """Restore the position from a file."""
    self._iterator.restore(filename)

  @property
  def iterator(self) -> Any:
    """The iterator, or TensorFlow's iterator in it if it has one."""
    return getattr(self._iterator, 'iterator', self._iterator)


def prepare_train_iter(
  train_iter: Any, *, partitioner: Any, checkpoint_cfg: Any, data_layout: DataLayout
) -> GlobalBatches:
  """Return global batches, prepared in the background, whose position can be saved.

  Args:
    train_iter: see `as_host_iterator`.
    partitioner: object with `mesh` and `data_partition_spec`.
    checkpoint_cfg: a `CheckpointConfig`, or None. If it saves the position in the data, a source that cannot save it
      raises now.
    data_layout: the partitioner's layout.

  Raises:
    ConfigError: `train_iter` is something else.
    DataError: the position is not available.
  """
  batches = GlobalBatches(as_host_iterator(train_iter, data_layout, {}, may_end=True), partitioner)
  with contextlib.ExitStack() as stack:
    stack.callback(batches.close)
    if (
      checkpoint_cfg is not None
      and checkpoint_cfg.save is not None
      and checkpoint_cfg.save.save_dataset
    ):
      batches.open()
    stack.pop_all()
  return batches


def get_zeros_batch_like_spec(
  batch_spec: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
  """Return a batch of zeros with the given shapes and dtypes, by feature name.

  >>> get_zeros_batch_like_spec({'x': jax.ShapeDtypeStruct((1, 2), jnp.int32)})['x'].tolist()
  [[0, 0]]
  """
  return {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in batch_spec.items()}


def get_zeros_batch_like_dataset(
  dataset: Any, batch_size: int | None = None
) -> dict[str, jax.Array]:
  """Return a batch of zeros with the `element_spec` of a dataset or an iterator.

  Args:
    dataset: a `tf.data.Dataset`, or another object with `element_spec`, of batches.
    batch_size: number of rows; None for that of `element_spec`.
  """
  checks.check(
    'get_zeros_batch_like_dataset',
    {'batch_size': batch_size},
    batch_size=checks.number(at_least=1, integer=True).or_none(),
  )
  spec = {}
  for name, leaf in dataset.element_spec.items():
    if batch_size is None:
      shape = tuple(leaf.shape)
    else:
      shape = (batch_size, *leaf.shape[1:])
    spec[name] = jax.ShapeDtypeStruct(shape, getattr(leaf.dtype, 'as_numpy_dtype', leaf.dtype))
  return get_zeros_batch_like_spec(spec)
