"""Background prefetch and global arrays."""

import gc
import json
import threading
import time
import traceback
import weakref

import jax
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.partitioning import PjitPartitioner


class _Counter(data.HostIterator):
  """Batches whose rows hold their number; fails at `fail_at`."""

  def __init__(self, fail_at=None, delay=0.0):
    self.position = 0
    self.closed = False
    self._fail_at = fail_at
    self._delay = delay

  @property
  def element_spec(self):
    return {'x': jax.ShapeDtypeStruct((16, 2), np.int32)}

  def __next__(self):
    assert not self.closed
    time.sleep(self._delay)
    if self.position == self._fail_at:
      self._give_up()
    self.position += 1
    rows = np.arange(16, dtype=np.int32) + 100 * self.position
    return {'x': np.stack([rows, rows], axis=1)}

  def _give_up(self):
    raise DataError('out of numbers')

  def get_state(self, undelivered=()):
    assert [int(b['x'][0, 0]) for b in undelivered] == [
      100 * (self.position - len(undelivered) + 1 + i) for i in range(len(undelivered))
    ]
    return {'position': str(self.position - len(undelivered)).encode()}

  def set_state(self, state):
    self.position = int(state['position'])

  def close(self):
    self.closed = True


@pytest.fixture(scope='module')
def partitioner():
  return PjitPartitioner(num_partitions=2)


def _threads():
  return [thread for thread in threading.enumerate() if thread.name == 't5x_lite-data']


def _number(batch):
  return int(batch['x'][0, 0]) // 100


def test_batches_are_global_and_sharded(partitioner):
  with data.GlobalBatches(_Counter(), partitioner) as batches:
    batch = next(batches)
    assert batches.element_spec['x'].shape == (16, 2)
  x = batch['x']
  assert isinstance(x, jax.Array) and x.shape == (16, 2) and x.dtype == np.int32
  assert x.sharding.spec == PartitionSpec('data') and x.sharding.mesh == partitioner.mesh
  assert x.addressable_shards[0].data.shape == (4, 2)
  np.testing.assert_array_equal(x[:, 0], np.arange(16) + 100)


def _place(state):
  """Returns the number of batches before a position; the reader may have told an earlier one, and batches to skip."""
  skipped = json.loads(state.get('skipped_batches.json', b'{"num_batches": 0}'))
  return int(state['position']) + skipped['num_batches']


def test_fewer_batches_than_were_used_are_an_error(partitioner):
  class Ending(_Counter):
    def _give_up(self):
      raise StopIteration

  skip = json.dumps({'version': 1, 'num_batches': 3, 'batch_size': 16}).encode()
  with data.GlobalBatches(_Counter(), partitioner) as batches:
    state = {**batches.get_state(), 'skipped_batches.json': skip}
  for fail_at, kind in ((2, DataError), (3, StopIteration)):
    with data.GlobalBatches(Ending(fail_at=fail_at), partitioner) as batches:
      batches.set_state(state)
      with pytest.raises(kind) as caught:
        batches.take(60)
      assert batches.has_ended == (kind is StopIteration)
  assert kind is StopIteration and not caught.value.args
  with data.GlobalBatches(Ending(fail_at=2), partitioner) as batches:
    batches.set_state(state)
    with pytest.raises(DataError, match='ended after 2 batches, but the run has used 3: .*fewer'):
      batches.take(60)


def test_the_end_is_known_without_taking_a_batch(partitioner):
  class Ending(_Counter):
    def _give_up(self):
      raise StopIteration

  source = Ending(fail_at=2, delay=0.05)
  with data.GlobalBatches(source, partitioner, prefetch=1) as batches:
    assert not batches.knows_next(0) and not batches.has_ended and not batches.ends_together
    for number in (1, 2):
      assert batches.knows_next(60) and batches.knows_next(0) and not batches.has_ended
      assert _number(batches.take(60)) == number
    state = batches.get_state()
    assert (
      batches.knows_next(60)
      and batches.has_ended
      and _place(state) == _place(batches.get_state()) == 2
    )
    for _ in range(2):
      with pytest.raises(StopIteration):
        batches.take(60)
    batches.set_state({'position': b'1'})
    assert not batches.has_ended and _number(batches.take(60)) == 2
  with data.GlobalBatches(_Counter(fail_at=0), partitioner) as failing:
    assert failing.knows_next(60) and not failing.has_ended  # `take` raises the error


def test_the_state_counts_delivered_batches(partitioner):
  source = _Counter()
  with data.GlobalBatches(source, partitioner, prefetch=4) as batches:
    assert batches.get_state() == {'position': b'0'}
    for k in range(1, 6):
      assert _number(next(batches)) == k
      assert batches.get_state() == {'position': str(k).encode()}
    deadline = time.time() + 10
    while source.position < 9 and time.time() < deadline:
      time.sleep(0.01)
    # The thread has run ahead by `prefetch` and no further, and the state does not show it.
    time.sleep(0.05)
    assert source.position == 9
    assert batches.get_state() == {'position': b'5'}
    batches.set_state({'position': b'2'})
    assert [_number(next(batches)) for _ in range(3)] == [3, 4, 5]


def test_state_is_exact_while_the_thread_works(partitioner):
  """States taken at any moment, also in the middle of a batch being made, name the batch handed out last."""
  with data.GlobalBatches(_Counter(delay=0.002), partitioner, prefetch=2) as batches:
    for k in range(1, 40):
      assert _number(next(batches)) == k
      time.sleep(0.001 * (k % 5))
      assert batches.get_state() == {'position': str(k).encode()}


def test_errors_reach_the_consumer_in_order_with_their_traceback(partitioner):
  batches = data.GlobalBatches(_Counter(fail_at=3), partitioner, prefetch=8)
  assert [_number(next(batches)) for _ in range(3)] == [1, 2, 3]
  for _ in range(2):
    with pytest.raises(DataError, match='out of numbers') as caught:
      next(batches)
    assert '_give_up' in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
  batches.set_state({'position': b'1'})
  assert [_number(next(batches)) for _ in range(2)] == [2, 3]
  batches.close()
  assert not _threads()


def test_close_ends_the_thread_and_the_source(partitioner):
  source = _Counter(delay=0.05)
  batches = data.GlobalBatches(source, partitioner)
  next(batches)
  assert len(_threads()) == 1
  batches.close()
  batches.close()
  assert not _threads() and source.closed
  with pytest.raises(RuntimeError, match='closed'):
    next(batches)


def test_a_batch_that_was_late_is_kept_by_its_user_alone(partitioner):
  with data.GlobalBatches(_Counter(delay=0.2), partitioner, prefetch=1) as batches:
    assert batches.take(0) is None
    array = weakref.ref(batches.take(60)['x'])
    assert batches.knows_next(60)
    gc.collect()
    assert array() is None


def test_a_forgotten_iterator_is_closed_when_collected(partitioner):
  source = _Counter()
  batches = data.GlobalBatches(source, partitioner)
  next(batches)
  del batches
  gc.collect()
  assert source.closed and not _threads()


def test_sources_of_users_do_not_handle_another_number_of_processes_by_default(partitioner):
  with data.GlobalBatches(_Counter(), partitioner) as batches:
    assert not batches.handles_process_count


def test_prefetch_is_checked(partitioner):
  with pytest.raises(ConfigError, match='prefetch` must be an integer in .*got 0'):
    data.GlobalBatches(_Counter(), partitioner, prefetch=0)


def test_builtin_source_behind_it(partitioner):
  cfg = data.DatasetConfig(
    'python_cloze_and_docs',
    {'inputs': 64, 'targets': 32},
    'train',
    16,
    True,
    0,
    pack=True,
    source='builtin',
  )
  layout = partitioner.get_data_layout(cfg.batch_size)
  plain = data.open_train_iterator(cfg, layout)
  with data.GlobalBatches(
    data.open_train_iterator(cfg, layout), partitioner, prefetch=3
  ) as batches:
    for _ in range(4):
      expected, batch = next(plain), next(batches)
      for name, rows in expected.items():
        np.testing.assert_array_equal(batch[name], rows)
    state = batches.get_state()
    following = next(batches)
  with data.GlobalBatches(data.open_train_iterator(cfg, layout), partitioner) as resumed:
    assert resumed.handles_process_count
    resumed.set_state(state)
    np.testing.assert_array_equal(
      next(resumed)['encoder_input_tokens'], following['encoder_input_tokens']
    )
