"""The position of a data iterator, saved and restored with a train state."""

import logging

from flax.linen import partitioning as flax_partitioning
import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import partitioning
from t5x_lite import train_state


class OurIterator:
  """An iterator with the methods of `data.HostIterator`."""

  position = 0

  def get_state(self):
    return {'position/0': b'%d' % self.position}

  def set_state(self, state):
    self.position = int(state['position/0'])


class CluIterator:
  """An iterator with the methods of `clu.data.DatasetIterator`, which writes two files."""

  position = 0

  def save(self, filename):
    for name in (f'{filename}.index', f'{filename}.data'):
      with open(name, 'w', encoding='utf-8') as file:
        file.write(str(self.position))

  def restore(self, filename):
    with (
      open(f'{filename}.index', encoding='utf-8') as index,
      open(f'{filename}.data', encoding='utf-8') as data,
    ):
      self.position = int(index.read())
      assert int(data.read()) == self.position


def make_state(step):
  return train_state.InferenceState.create(
    {
      'params': {'kernel': np.full((8, 4), step, np.float32)},
      'params_axes': {'kernel_axes': flax_partitioning.AxisMetadata(('embed', 'mlp'))},
    }
  ).replace_step(step)


@pytest.mark.parametrize('iterator_cls', [OurIterator, CluIterator])
@pytest.mark.parametrize('manager', [False, True])
def test_positions(tmp_path, caplog, iterator_cls, manager):
  partitioner = partitioning.PjitPartitioner(num_partitions=2)

  def open_with(iterator):
    if manager:
      return checkpoints.OrbaxCheckpointManagerInterface(
        tmp_path, make_state(0), partitioner, iterator
      )
    return checkpoints.Checkpointer(make_state(0), partitioner, tmp_path, iterator)

  iterator = iterator_cls()
  iterator.position = 5
  open_with(iterator).save(make_state(1))
  assert checkpoints.all_dataset_checkpoint_steps(tmp_path) == [1]
  other = iterator_cls()
  restored = open_with(other).restore(1)
  assert other.position == 5 and float(restored.params['kernel'][0, 0]) == 1
  open_with(None).save(make_state(2))
  with caplog.at_level(logging.WARNING):
    open_with(other).restore(2)
  assert other.position == 5 and 'checkpoint_2 has no position in the data' in caplog.text


def test_local_data():
  mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  array = jax.device_put(
    np.arange(8), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  )
  assert checkpoints.get_local_data(array).shape == (1,) and checkpoints.get_local_data(3) == 3
