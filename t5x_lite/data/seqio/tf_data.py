"""Iterator over a `tf.data.Dataset`, with an exact position.

The position is TensorFlow's checkpoint of the iterator (with shuffle buffers, packing, mixture draws and epochs), and
the prefetched batches that were not used.
"""

import collections
from collections.abc import Mapping, Sequence
import pathlib
import tempfile
from typing import Any

import jax

from t5x_lite.data.batches import positions
from t5x_lite.data.interfaces import DataState
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.interfaces import HostIterator
from t5x_lite.data.seqio.packages import element_specs
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import summary
from t5x_lite.data.seqio.packages import tf
from t5x_lite.errors import DataError, DataUnavailableError

_TF_PREFIX = 'tf_iterator'
_UNDELIVERED_FILE = 'undelivered.npz'
# Errors of file systems and networks, after which reading again may succeed. UnknownError includes exceptions of Python
# functions in the pipeline, such as OSError.
_TRANSIENT_ERRORS = (
  tf.errors.UnavailableError,
  tf.errors.DeadlineExceededError,
  tf.errors.AbortedError,
  tf.errors.NotFoundError,
  tf.errors.PermissionDeniedError,
  tf.errors.UnknownError,
)


def _lacks_part_of_pipeline(error: Any) -> bool:
  """Return True if a saved position lacks a part of the pipeline; a missing file is a NotFoundError too."""
  if not isinstance(error, tf.errors.NotFoundError):
    return False
  return 'from checkpoint: Iterator::' in error.message


class TfDatasetIterator(HostIterator):
  """Iterator of the batches of a `tf.data.Dataset`, this process's rows of each global batch."""

  handles_process_count = True

  def __init__(
    self,
    dataset: tf.data.Dataset,
    layout: Any,
    description: str,
    identity: Mapping[str, Any],
    *,
    may_end: bool,
  ):
    """Args:
    dataset: dataset of batches, [rows of this process, ...] by feature name.
    layout: the partitioner's `DataLayout`.
    description: name of the data, for messages.
    identity: JSON values that determine the rows; part of a saved position.
    may_end: whether the end of the dataset is the end of the data; otherwise it is an error.
    """
    own = positions.shard_rows(layout)
    is_infinite = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    self.is_endless = not may_end or is_infinite
    # Shards may have different numbers of rows.
    self.ends_together = self.is_endless or layout.num_shards == 1
    self._may_end = may_end
    self._num_rows = own.stop - own.start
    self._description = description
    self._spec = {}
    for name, spec in element_specs(dataset).items():
      shape = (layout.batch_size, *spec.shape[1:])
      self._spec[name] = jax.ShapeDtypeStruct(shape, spec.dtype.as_numpy_dtype)
    with quiet():
      self._iterator: Any = iter(dataset)
    # Batches before TensorFlow's position: those of a restored state, or one that was read to start the pipeline.
    self._waiting: collections.deque[HostBatch] = collections.deque()
    # Whether the pipeline has started, so that saving its position shows whether that is possible.
    self._is_started = False
    self._num_batches = 0
    self._sharding = {'num_shards': layout.num_shards, 'shard_id': layout.shard_id}
    self._identity = dict(identity)

  @property
  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """See base class."""
    return dict(self._spec)

  def __next__(self) -> HostBatch:
    if self._waiting:
      batch = self._waiting.popleft()
    else:
      batch = self._read()
    self._num_batches += 1
    return batch

  def _read(self) -> HostBatch:
    self._is_started = True
    try:
      tensors = next(self._iterator)
      return {name: tensor.numpy() for name, tensor in tensors.items()}
    except StopIteration:
      if self._may_end:
        raise
      raise DataError(
        f'{self._description} is exhausted after {self._num_batches} batches of {self._num_rows} rows '
        'per process: its pipeline does not repeat. Train for fewer steps, or let it repeat.'
      ) from None
    except tf.errors.OpError as error:
      if isinstance(error, _TRANSIENT_ERRORS):
        kind = DataUnavailableError
      else:
        kind = DataError
      raise kind(f'{self._description} failed while reading: {summary(error)}') from error

  def get_state(self, undelivered: Sequence[HostBatch] = ()) -> DataState:
    """See base class."""
    if not self._is_started:
      # TensorFlow starts some pipelines, e.g. with a shuffle buffer, with the first batch; before that, saving does not
      # show whether the position can be saved.
      self._waiting.append(self._read())
    files = positions.write_state(
      self._identity, sharding=self._sharding, num_batches=self._num_batches - len(undelivered)
    )
    waiting = [*undelivered, *self._waiting]
    if waiting:
      files[_UNDELIVERED_FILE] = positions.pack_batches(waiting)
    with tempfile.TemporaryDirectory(prefix='t5x_lite_data_') as folder:
      try:
        with quiet():
          tf.train.Checkpoint(iterator=self._iterator).write(str(pathlib.Path(folder) / _TF_PREFIX))
      except tf.errors.OpError as error:
        is_disk = isinstance(
          error, (tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError)
        )
        if is_disk:
          remedy = (
            f'Free disk space in the temporary folder {folder!r}, or set TMPDIR to another folder.'
          )
        else:
          remedy = (
            'TensorFlow cannot save the position of from_generator, py_function and unseeded random numbers: build the '
            'pipeline from files or tensors, or set SaveCheckpointConfig.save_dataset = False, so that resumed runs '
            'restart the data.'
          )
        raise DataError(
          f'{self._description}: the position cannot be saved: {summary(error)} {remedy}'
        ) from error
      files.update({path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()})
    return files

  def set_state(self, state: DataState) -> None:
    """See base class."""
    saved = positions.read_state(state)
    if saved.get('sharding', self._sharding) != self._sharding:
      raise self._sharding_error(saved['sharding'])
    positions.check_identity(saved['identity'], self._identity)
    if _UNDELIVERED_FILE in state:
      waiting = positions.unpack_batches(state[_UNDELIVERED_FILE])
    else:
      waiting = []
    with tempfile.TemporaryDirectory(prefix='t5x_lite_data_') as folder:
      for name, content in state.items():
        if name.startswith(_TF_PREFIX):
          (pathlib.Path(folder) / name).write_bytes(content)
      try:
        with quiet():
          tf.train.Checkpoint(iterator=self._iterator).read(
            str(pathlib.Path(folder) / _TF_PREFIX)
          ).assert_consumed()
      except (tf.errors.OpError, AssertionError) as error:
        is_transient = isinstance(error, _TRANSIENT_ERRORS) and not _lacks_part_of_pipeline(error)
        reason = summary(error).partition(' Make sure the dataset definition')[0]
        if is_transient:
          kind = DataUnavailableError
          remedy = ''
        else:
          kind = DataError
          remedy = (
            '. The task, its preprocessors, or the version of TensorFlow have changed: undo the change, or '
            f'{positions.RESTART_REMEDY}.'
          )
        raise kind(
          f'{self._description} cannot be opened at the saved position: {reason}{remedy}'
        ) from error
    self._waiting = collections.deque(waiting)
    self._is_started = True
    self._num_batches = saved['num_batches']

  def _sharding_error(self, saved: dict[str, int]) -> DataError:
    if saved['num_shards'] == self._sharding['num_shards']:
      return DataError(
        f'This is the data position of shard {saved["shard_id"]} of {saved["num_shards"]}, but this '
        f'process reads shard {self._sharding["shard_id"]}: give each process its position.'
      )
    return DataError(
      f'The data position was saved with {saved["num_shards"]} data shards, this run has '
      f'{self._sharding["num_shards"]}, and the order of seqio pipelines depends on this number. Run with '
      f"{saved['num_shards']} shards again, or {positions.RESTART_REMEDY}; with DatasetConfig.source = 'builtin' the "
      'order does not depend on the number.'
    )

  def close(self) -> None:
    """See base class."""
    # TensorFlow stops the pipeline's threads when the iterator is collected.
    self._waiting.clear()
    self._iterator = iter(())
