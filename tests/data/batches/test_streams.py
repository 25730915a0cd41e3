"""Positions in the data: exact resumption, other batch sizes, other data, large tables."""

import pickle

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data.batches import positions
from t5x_lite.data.batches import streams
from t5x_lite.data.sources.synthetic import SyntheticExamples
from t5x_lite.errors import DataError
from tests.data import builtin_cases as cases

# --- Position ------------------------------------------------------------------------


@pytest.mark.parametrize('pack', [False, True])
def test_resumes_exactly(pack):
  cfg = cases.make_cfg(
    'python_cloze_and_docs', pack=pack, task_feature_lengths={'inputs': 64, 'targets': 32}
  )
  iterator = cases.open(cfg)
  before = cases.take(iterator, 5)
  state = iterator.get_state()
  assert sum(map(len, state.values())) < 2000
  undelivered_state = iterator.get_state(before[-2:])
  after = cases.take(iterator, 4)
  resumed = cases.open(cfg)
  resumed.set_state(state)
  for expected in after:
    cases.assert_equal(next(resumed), expected)
  resumed.set_state(undelivered_state)
  for expected in before[-2:] + after:
    cases.assert_equal(next(resumed), expected)


def test_resumes_with_another_batch_size():
  state_of_16 = cases.open(cases.make_cfg(batch_size=8))
  cases.take(state_of_16, 2)
  resumed = cases.open(cases.make_cfg(batch_size=4))
  resumed.set_state(state_of_16.get_state())
  assert cases.numbers(next(resumed)) == cases.numbers(next(state_of_16))[:4]


@pytest.mark.parametrize(
  'change, named',
  [
    (dict(seed=2), 'seed: saved 1, now 2'),
    (dict(shuffle=False), 'shuffle'),
    (dict(pack=True), 'pack'),
    (dict(task_feature_lengths={'inputs': 12, 'targets': 8}), "'inputs': 16.*'inputs': 12"),
    (dict(task=cases.make_task('other')), 'mixture_or_task_name'),
    (dict(task=cases.make_task(num=20)), 'content'),
    (dict(task='synthetic', source='synthetic'), 'source'),
  ],
)
def test_other_data_is_rejected_when_resuming(change, named):
  state = cases.open(cases.make_cfg()).get_state()
  with pytest.raises(DataError, match=f'{named}.*restore_dataset = False'):
    cases.open(cases.make_cfg(**change)).set_state(state)


def test_strange_states_are_rejected():
  iterator = cases.open(cases.make_cfg())
  with pytest.raises(DataError, match="must have 'data_state.json' of version 1, got .'x'."):
    iterator.set_state({'x': b''})
  with pytest.raises(DataError, match='version 1, got .* of version 2'):
    iterator.set_state({'data_state.json': b'{"version": 2}'})
  with pytest.raises(IndexError, match='index out of range'):
    iterator.get_state([{}])


def test_large_tables_are_shuffled_position_by_position(monkeypatch):
  # No option: data of the real size would make the test slow.
  monkeypatch.setattr(streams, '_LARGEST_KEPT_ORDER', 1000)
  source = data.SyntheticSource(vocab_size=50, num_examples=20_003)
  table = SyntheticExamples(source, 'train', cases.LENGTHS)
  stream = streams.TaskStream('large', table, seed=1, shuffle=True)
  numbers = stream.numbers(np.arange(40_006))
  epochs = numbers.reshape(2, -1)
  for e in range(2):
    np.testing.assert_array_equal(np.sort(epochs[e]), e * len(table) + np.arange(len(table)))
  assert (epochs[0] != epochs[1] - len(table)).mean() > 0.99
  np.testing.assert_array_equal(
    stream.numbers(np.array([20_002, 20_003, 7])), numbers[[20_002, 20_003, 7]]
  )
  assert len(pickle.dumps(stream)) < 2000


# --- Mixtures ------------------------------------------------------------------------


class _Positions(streams.Stream):
  """Examples that tell whose they are and at which position."""

  def __init__(self, name, size=10):
    self._name = name
    self._size = size

  def num_examples(self, num_epochs):
    return num_epochs * self._size

  def examples(self, positions):
    return [{self._name: position} for position in positions.tolist()]


@pytest.mark.parametrize('seed', [0, 1])
def test_blocks_of_a_mixture_continue_each_stream(monkeypatch, seed):
  # No option: data of the real size would make the test slow.
  monkeypatch.setattr(streams, '_MIXTURE_BLOCK', 8)
  mixture = streams.MixtureStream('a_and_b', [_Positions('a'), _Positions('b')], [1.0, 3.0], seed)
  examples = mixture.examples(np.arange(24))
  for name, quota in (('a', 2), ('b', 6)):
    assert [example[name] for example in examples if name in example] == list(range(3 * quota))
    for block in range(3):
      assert sum(name in example for example in examples[8 * block : 8 * block + 8]) == quota
  assert mixture.examples(np.array([13, 2])) == [examples[13], examples[2]]


@pytest.mark.parametrize('sizes', [(3, 20), (100, 7), (4, 12), (6, 18)])
@pytest.mark.parametrize('num_epochs', [1, 3])
def test_a_mixture_ends_before_the_first_example_beyond_the_epochs_of_its_task(
  monkeypatch, sizes, num_epochs
):
  monkeypatch.setattr(streams, '_MIXTURE_BLOCK', 8)
  mixture = streams.MixtureStream(
    'mix', [_Positions(name, size) for name, size in zip('ab', sizes, strict=True)], [1.0, 3.0], 0
  )
  ends = dict(zip('ab', sizes, strict=True))
  examples = mixture.examples(np.arange(400))
  first = next(
    i
    for i, example in enumerate(examples)
    for name in example
    if example[name] == num_epochs * ends[name]
  )
  assert mixture.num_examples(num_epochs) == first


def test_a_position_in_data_of_another_source_names_the_flag():
  saved = {'source': 'seqio', 'seed': 0, 'rates': [1]}
  with pytest.raises(
    DataError, match="'seqio', and .*'grain'. Resume with --gin.DATA_SOURCE=seqio,"
  ) as raised:
    positions.check_identity(saved, {'source': 'grain', 'seed': 1})
  assert 'seed' not in str(raised.value) and 'rates' not in str(raised.value)
  with pytest.raises(DataError, match='seed: saved 0, now 1'):
    positions.check_identity(saved, {**saved, 'seed': 1})
