"""Global batches of iterators of other packages, and batches of zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite.errors import DataError
from t5x_lite.partitioning import PjitPartitioner
from tests.data import builtin_cases as cases


class _Rows:
  """Iterator with clu's methods over two batches, without a position."""

  element_spec = {'x': jax.ShapeDtypeStruct((8, 2), np.int32)}

  def __init__(self):
    self.calls, self._number = [], 0

  def __iter__(self):
    return self

  def __next__(self):
    self._number += 1
    if self._number > 2:
      raise StopIteration
    return {'x': np.full((8, 2), self._number, np.int32)}

  def reset(self):
    self._number = 0

  def save(self, filename):
    raise NotImplementedError(f'no {filename.name}')

  def restore(self, filename):
    self.calls.append(filename)


def test_sharded_batches_and_delegated_methods():
  partitioner = PjitPartitioner(num_partitions=1)
  rows = _Rows()
  iterator = data.ShardedDatasetIterator(rows, partitioner, {'x': (8, 2)})
  assert iterator.iterator is rows and iterator.element_spec is rows.element_spec
  batches = list(iterator)
  assert [int(batch['x'].max()) for batch in batches] == [1, 2]
  assert batches[0]['x'].sharding.spec == partitioner.data_partition_spec
  iterator.reset()
  assert int(next(iterator)['x'].max()) == 1
  iterator.restore('file')
  assert rows.calls == ['file']
  with pytest.raises(NotImplementedError):
    iterator.save(type('Name', (), {'name': 'position'}))


def test_prepared_batches_end_with_their_source_and_need_a_position_if_it_is_saved():
  options = {'partitioner': PjitPartitioner(num_partitions=1), 'data_layout': cases.layout()}
  with data.prepare_train_iter(_Rows(), checkpoint_cfg=None, **options) as batches:
    assert int(batches.peek()['x'].max()) == 1
    assert [int(batch['x'].max()) for batch in batches] == [1, 2]
    with pytest.raises(StopIteration):
      batches.peek()
  with pytest.raises(RuntimeError, match='closed'):
    batches.peek()
  saved = checkpoints.CheckpointConfig(
    save=checkpoints.SaveCheckpointConfig(period=1, save_dataset=True)
  )
  with pytest.raises(
    DataError, match='_Rows cannot save its position: no iterator. Return a tf.data.Dataset, or set'
  ):
    data.prepare_train_iter(_Rows(), checkpoint_cfg=saved, **options)
  with data.prepare_train_iter(
    cases.open(cases.make_cfg()), checkpoint_cfg=saved, **options
  ) as batches:
    cases.assert_equal(
      {name: np.asarray(rows) for name, rows in next(batches).items()},
      next(cases.open(cases.make_cfg())),
    )


def test_zeros():
  spec = {
    'x': jax.ShapeDtypeStruct((2, 3), jnp.int32),
    'y': jax.ShapeDtypeStruct((2,), jnp.bfloat16),
  }
  zeros = data.get_zeros_batch_like_spec(spec)
  assert {name: (array.shape, array.dtype) for name, array in zeros.items()} == {
    'x': ((2, 3), jnp.int32),
    'y': ((2,), jnp.bfloat16),
  }
  assert not any(array.any() for array in zeros.values())
  iterator = cases.open(cases.make_cfg())
  assert data.get_zeros_batch_like_dataset(iterator)['encoder_input_tokens'].shape == (8, 16)
  assert data.get_zeros_batch_like_dataset(iterator, 3)['encoder_input_tokens'].shape == (3, 16)
