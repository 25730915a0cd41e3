"""DatasetConfig, the builtin and synthetic sources, evaluation batches, and the checks before compute."""

import collections
import dataclasses
import pickle
import sys

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data import philox, streams
from t5x_lite.data.synthetic import SyntheticExamples
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.partitioning import DataLayout

_LENGTHS = {'inputs': 16, 'targets': 8}
_VOCABULARY = data.ByteVocabulary(extra_ids=125)


def _layout(shard=0, num_shards=1, batch_size=8):
  return DataLayout(batch_size=batch_size, shard_id=shard, num_shards=num_shards, is_first_host_in_replica_set=True)


def _task(name='digits', num=21, **kwargs):
  """Inputs '<i> xxx' of various lengths, target '<i>': every example tells its number."""
  texts = [(f'{i} ' + 'x' * (i * 5 % 7), str(i)) for i in range(num)]
  return data.text_task(name=name, texts_fn=lambda split: texts, splits=('train',), vocabulary=_VOCABULARY, **kwargs)


def _cfg(task=None, **kwargs):
  defaults = dict(task_feature_lengths=_LENGTHS, split='train', batch_size=8, shuffle=True, seed=1, source='builtin')
  return data.DatasetConfig(task or _task(), **{**defaults, **kwargs})


def _open(cfg, shard=0, num_shards=1):
  return data.open_train_iterator(cfg, _layout(shard, num_shards, cfg.batch_size))


def _take(iterator, num):
  return [next(iterator) for _ in range(num)]


def _assert_equal(first, second):
  assert set(first) == set(second)
  for name in first:
    assert first[name].dtype == second[name].dtype
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def _numbers(batch):
  return [int(_VOCABULARY.decode(row)) for row in batch['decoder_target_tokens']]


# --- Batches ---------------------------------------------------------------------


def test_features_of_one_example():
  batch = next(_open(_cfg(shuffle=False)))
  inputs = [*_VOCABULARY.encode('1 xxxxx'), 1]
  np.testing.assert_array_equal(batch['encoder_input_tokens'][1], inputs + [0] * (16 - len(inputs)))
  targets = [*_VOCABULARY.encode('1'), 1]
  np.testing.assert_array_equal(batch['decoder_target_tokens'][1], targets + [0] * 6)
  np.testing.assert_array_equal(batch['decoder_input_tokens'][1], [0, *targets, 0, 0, 0, 0, 0])
  np.testing.assert_array_equal(batch['decoder_loss_weights'][1], [1, 1] + [0] * 6)
  assert set(batch) == {'encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens', 'decoder_loss_weights'}


def test_long_features_are_trimmed_and_keep_their_end():
  batch = next(_open(_cfg(shuffle=False, task_feature_lengths={'inputs': 4, 'targets': 2})))
  np.testing.assert_array_equal(batch['encoder_input_tokens'][1], [*_VOCABULARY.encode('1 x'), 1])


def test_too_long_features_are_refused_on_request():
  class Long(data.ExampleTable):
    fingerprint = 'long'

    def __len__(self):
      return 1

    def examples(self, seed, numbers):
      return [{'inputs': np.ones(20, np.int32), 'targets': np.ones(1, np.int32)} for _ in numbers]

  task = data.BuiltinTask(name='long', splits=('train',), table_fn=lambda split, lengths: Long(),
                          vocabularies={'inputs': _VOCABULARY, 'targets': _VOCABULARY})
  assert next(_open(_cfg(task)))['encoder_input_tokens'].shape == (8, 16)
  with pytest.raises(DataError, match="20 ids of 'inputs', expected at most 16"):
    next(_open(_cfg(task, trim_output_features=False)))


@pytest.mark.parametrize('pack', [False, True])
def test_element_spec_is_the_global_batch(pack):
  iterator = _open(_cfg(pack=pack), 1, 2)
  spec = iterator.element_spec
  batch = next(iterator)
  assert set(spec) == set(batch)
  for name, array in batch.items():
    assert spec[name].shape == (2 * array.shape[0], *array.shape[1:]) and spec[name].dtype == array.dtype


def test_shuffled_epochs_hold_each_example_once_in_new_orders():
  task = _task(num=24)
  batches = _take(_open(_cfg(task)), 9)
  epochs = [sum((_numbers(b) for b in batches[3 * e:3 * e + 3]), []) for e in range(3)]
  assert [sorted(epoch) for epoch in epochs] == [list(range(24))] * 3
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != sorted(epochs[0])
  other = sum(map(_numbers, _take(_open(_cfg(task, seed=2)), 3)), [])
  assert sorted(other) == list(range(24)) and other != epochs[0]


def test_no_seed_means_zero():
  _assert_equal(next(_open(_cfg(seed=None))), next(_open(_cfg(seed=0))))


@pytest.mark.parametrize('name', ['python_keyword_cloze', 'python_docs_span_corruption', 'python_cloze_and_docs'])
@pytest.mark.parametrize('pack', [False, True])
def test_batches_do_not_depend_on_the_number_of_processes(name, pack):
  cfg = _cfg(name, pack=pack, task_feature_lengths={'inputs': 64, 'targets': 32}, split='validation')
  whole = _open(cfg)
  shards = [_open(cfg, i, 4) for i in range(4)]
  for _ in range(3):
    parts = _take_one_of_each(shards)
    _assert_equal(next(whole), {k: np.concatenate([part[k] for part in parts]) for k in parts[0]})
  # Saved by one of four, resumed by one of two, and compared with the one.
  halves = [_open(cfg, i, 2) for i in range(2)]
  for half in halves:
    half.set_state(shards[3].get_state())
  parts = _take_one_of_each(halves)
  _assert_equal(next(whole), {k: np.concatenate([part[k] for part in parts]) for k in parts[0]})


def _take_one_of_each(iterators):
  return [next(iterator) for iterator in iterators]


# --- Packing ----------------------------------------------------------------------


def _unpack(batch):
  """Returns the (inputs, targets) ids of every segment, after checking the packing features against each other."""
  for r in range(len(batch['encoder_input_tokens'])):
    row = {name: array[r] for name, array in batch.items()}
    for side, tokens in (('encoder', 'encoder_input_tokens'), ('decoder', 'decoder_target_tokens')):
      segments = row[f'{side}_segment_ids']
      assert ((segments > 0) == (row[tokens] > 0)).all()
      used = segments[segments > 0]
      assert (np.diff(used) >= 0).all() and set(used) == set(range(1, used.max() + 1))
      for s in set(used):
        np.testing.assert_array_equal(row[f'{side}_positions'][segments == s], np.arange((segments == s).sum()))
    assert row['encoder_segment_ids'].max() == row['decoder_segment_ids'].max()
    np.testing.assert_array_equal(row['decoder_loss_weights'], row['decoder_target_tokens'] > 0)
    for s in range(1, row['encoder_segment_ids'].max() + 1):
      inputs = row['encoder_input_tokens'][row['encoder_segment_ids'] == s]
      where = row['decoder_segment_ids'] == s
      targets = row['decoder_target_tokens'][where]
      np.testing.assert_array_equal(row['decoder_input_tokens'][where], [0, *targets[:-1]])
      yield inputs, targets


def test_packed_rows_hold_all_examples_in_order():
  packed = [pair for batch in _take(_open(_cfg(pack=True, shuffle=False)), 12) for pair in _unpack(batch)]
  single = _take(_open(_cfg(shuffle=False)), 40)
  expected = [(i[i > 0], t[t > 0]) for batch in single
              for i, t in zip(batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True)]
  assert len(packed) > 1.5 * 12 * 8
  for (inputs, targets), (expected_inputs, expected_targets) in zip(packed, expected, strict=False):
    np.testing.assert_array_equal(inputs, expected_inputs)
    np.testing.assert_array_equal(targets, expected_targets)


def test_rows_close_only_when_full():
  """The first example of the next row never fits in the row before, but where a group of examples ends."""
  rows = [list(_unpack(batch)) for batch in _take(_open(_cfg(pack=True, shuffle=False, batch_size=1)), 30)]
  taken = 0
  for row, following in zip(rows, rows[1:], strict=False):
    taken += len(row)
    fits = all(sum(len(pair[f]) for pair in row) + len(following[0][f]) <= length
               for f, length in enumerate(_LENGTHS.values()))
    assert not fits or taken % max(_LENGTHS.values()) == 0


# --- Mixtures -----------------------------------------------------------------------


@pytest.fixture
def mixture():
  tasks = [data.register_builtin_task(dataclasses.replace(_task(num=num), name=name))
           for name, num in (('test_few', 5), ('test_many', 1000))]
  mixture = data.register_builtin_mixture(data.BuiltinMixture(name='test_mix', rates={'test_few': 1, 'test_many': 3}))
  yield mixture
  from t5x_lite.data import builtin_tasks
  for entry in (*tasks, mixture):
    del builtin_tasks._REGISTRY[entry.name]


def test_mixture_draws_by_rates_and_keeps_each_tasks_order(mixture):
  numbers = sum(map(_numbers, _take(_open(_cfg(mixture, shuffle=False, batch_size=500)), 4)), [])
  # Up to 4 a number may come from either task; from 5 on it is the second one's.
  large = [n for n in numbers if n >= 5]
  assert abs(len(large) / len(numbers) - 0.75) < 0.05
  assert large == [n for n in range(5, 1000)] + [n for n in range(5, 1000)][:len(large) - 995]


def test_mixture_errors(mixture):
  with pytest.raises(ConfigError, match='taken by another'):
    data.register_builtin_mixture(mixture)
  with pytest.raises(ConfigError, match='expected a positive number'):
    data.BuiltinMixture(name='m', rates={'test_few': 0})
  with pytest.raises(ConfigError, match='positive number'):
    data.BuiltinMixture(name='m', rates={'test_few': 1, 'test_many': float('inf')})
  with pytest.raises(ConfigError, match='has no tasks'):
    data.BuiltinMixture(name='m', rates={})
  with pytest.raises(ConfigError, match='cannot draw'):
    _open(_cfg(data.BuiltinMixture(name='m', rates={'test_few': 1, 'test_many': 1e6})))
  with pytest.raises(DataError, match="'test_fwe'.*mean 'test_few'"):
    data.register_builtin_mixture(data.BuiltinMixture(name='m', rates={'test_fwe': 1}))


# --- Position ------------------------------------------------------------------------


@pytest.mark.parametrize('pack', [False, True])
def test_resumes_exactly(pack):
  cfg = _cfg('python_cloze_and_docs', pack=pack, task_feature_lengths={'inputs': 64, 'targets': 32})
  iterator = _open(cfg)
  before = _take(iterator, 5)
  state = iterator.get_state()
  assert sum(map(len, state.values())) < 2000
  undelivered_state = iterator.get_state(before[-2:])
  after = _take(iterator, 4)
  resumed = _open(cfg)
  resumed.set_state(state)
  for expected in after:
    _assert_equal(next(resumed), expected)
  resumed.set_state(undelivered_state)
  for expected in before[-2:] + after:
    _assert_equal(next(resumed), expected)


def test_resumes_with_another_batch_size():
  state_of_16 = _open(_cfg(batch_size=8))
  _take(state_of_16, 2)
  resumed = _open(_cfg(batch_size=4))
  resumed.set_state(state_of_16.get_state())
  assert _numbers(next(resumed)) == _numbers(next(state_of_16))[:4]


@pytest.mark.parametrize('change, named', [
    (dict(seed=2), 'seed: saved 1, now 2'), (dict(shuffle=False), 'shuffle'), (dict(pack=True), 'pack'),
    (dict(task_feature_lengths={'inputs': 12, 'targets': 8}), "'inputs': 16.*'inputs': 12"),
    (dict(task=_task('other')), 'mixture_or_task_name'), (dict(task=_task(num=20)), 'content'),
    (dict(task='synthetic', source='synthetic'), 'source')])
def test_other_data_is_refused_when_resuming(change, named):
  state = _open(_cfg()).get_state()
  with pytest.raises(DataError, match=f'{named}.*restore_dataset = False'):
    _open(_cfg(**change)).set_state(state)


def test_strange_states_are_refused():
  iterator = _open(_cfg())
  with pytest.raises(DataError, match="no 'data_state.json'"):
    iterator.set_state({'x': b''})
  with pytest.raises(DataError, match='version 2, expected 1'):
    iterator.set_state({'data_state.json': b'{"version": 2}'})
  with pytest.raises(ValueError, match='undelivered'):
    iterator.get_state([{}])


# --- Synthetic -----------------------------------------------------------------------


def test_synthetic_ids():
  source = data.SyntheticSource(vocab_size=50, num_examples=10, shortest=0.5)
  cfg = _cfg(source, source='synthetic', task_feature_lengths={'inputs': 128, 'targets': 64})
  batch = next(_open(cfg))
  tokens = batch['encoder_input_tokens']
  lengths = (tokens > 0).sum(axis=1)
  assert tokens.shape == (8, 128) and lengths.min() >= 64 and lengths.max() <= 128 and len(set(lengths)) > 2
  assert set(np.unique(tokens)) == set(range(50))
  for row, length in zip(tokens, lengths, strict=True):
    assert row[length - 1] == 1 and (row[:length - 1] > 1).all()
  _assert_equal(batch, next(_open(cfg)))
  other = next(_open(dataclasses.replace(cfg, split='other')))
  assert (other['encoder_input_tokens'] != tokens).any()
  assert [v.vocab_size for v in data.get_vocabulary(cfg)] == [50, 50]
  full = next(_open(_cfg('synthetic', source='synthetic')))
  assert (full['encoder_input_tokens'] > 0).all() and full['encoder_input_tokens'].max() > 10000


def test_synthetic_features_of_any_shape():
  source = data.SyntheticSource(features={
      'image': data.SyntheticFeature(shape=(3, 4), dtype='float32', maximum=2.0),
      'label': data.SyntheticFeature(shape=(), dtype='int8', maximum=5)})
  cfg = _cfg(source, source='synthetic', task_feature_lengths={}, batch_size=64)
  iterator = _open(cfg, 0, 2)
  batch = next(iterator)
  assert batch['image'].shape == (32, 3, 4) and batch['image'].dtype == np.float32
  assert 0 <= batch['image'].min() < 0.1 and 1.9 < batch['image'].max() < 2
  assert batch['label'].dtype == np.int8 and set(batch['label']) == set(range(5))
  assert iterator.element_spec['image'].shape == (64, 3, 4)
  assert [len(b) for b in data.open_eval_iterators(cfg, _layout(batch_size=64), 3).values()] == [3]
  with pytest.raises(ConfigError, match='task_feature_lengths = {}'):
    _open(dataclasses.replace(cfg, task_feature_lengths=_LENGTHS))


@pytest.mark.parametrize('make', [
    lambda: data.SyntheticSource(vocab_size=2), lambda: data.SyntheticSource(shortest=0.0),
    lambda: data.SyntheticSource(num_examples=0), lambda: data.SyntheticFeature(shape=(), dtype='bool'),
    lambda: data.SyntheticFeature(shape=(), maximum=0), lambda: data.SyntheticFeature(shape=(), maximum=0.5),
    lambda: data.SyntheticFeature(shape=(), dtype='int8', maximum=129)])
def test_synthetic_errors(make):
  with pytest.raises(ConfigError, match='expected'):
    make()


# --- Evaluation --------------------------------------------------------------------------


def test_eval_iterators_show_each_example_once_and_fill_up():
  cfg = _cfg(shuffle=False)
  batches = data.open_eval_iterators(cfg, _layout())['digits']
  assert len(batches) == 3 and batches.num_examples == 21
  for _ in range(2):
    listed = list(batches)
    assert len(listed) == 3
    numbers = [n for b in listed for n in (int(_VOCABULARY.decode(row) or -1) for row in b['decoder_target_tokens'])]
    assert numbers == [*range(21), -1, -1, -1]
  assert not any(array[5:].any() for array in listed[2].values())
  assert {name: spec.shape for name, spec in batches.element_spec.items()} == {k: v.shape for k, v in listed[0].items()}
  assert len(list(data.open_eval_iterators(cfg, _layout(), 2)['digits'])) == 2
  shards = [list(data.open_eval_iterators(cfg, _layout(i, 2))['digits']) for i in range(2)]
  for k, expected in enumerate(listed):
    _assert_equal({n: np.concatenate([shard[k][n] for shard in shards]) for n in expected}, expected)


def test_eval_iterators_pack():
  batches = list(data.open_eval_iterators(_cfg(shuffle=False, pack=True), _layout(batch_size=8))['digits'])
  nonempty = [{name: array[batch['encoder_input_tokens'].any(axis=1)] for name, array in batch.items()}
              for batch in batches]
  assert [int(_VOCABULARY.decode(t)) for batch in nonempty for _, t in _unpack(batch)] == list(range(21))
  assert len(data.open_eval_iterators(_cfg(pack=True), _layout(), 1)['digits']) == 1


def test_eval_takes_a_mixture_task_by_task():
  cfg = _cfg('python_cloze_and_docs', split='validation', task_feature_lengths={'inputs': 64, 'targets': 32})
  assert set(data.open_eval_iterators(cfg, _layout(), 2)) == {'python_keyword_cloze', 'python_docs_span_corruption'}
  # Only one of them has a metric.
  assert [task.name for task in data.open_eval_tasks(cfg, _layout())] == ['python_keyword_cloze']


@pytest.mark.parametrize('use_memory_cache', [True, False])
def test_memory_cache(use_memory_cache):
  calls = collections.Counter()

  class Counting(data.StaticExamples):
    def examples(self, seed, numbers):
      calls['examples'] += 1
      return super().examples(seed, numbers)

  example = {'inputs': np.array([3, 1], np.int32), 'targets': np.array([4, 1], np.int32)}
  task = data.BuiltinTask(name='counting', splits=('train',), table_fn=lambda split, lengths: Counting([example], [{}]),
                          vocabularies={'inputs': _VOCABULARY, 'targets': _VOCABULARY})
  batches = data.open_eval_iterators(_cfg(task, use_memory_cache=use_memory_cache), _layout())['counting']
  passes = [list(batches) for _ in range(3)]
  _assert_equal(passes[0][0], passes[2][0])
  assert calls['examples'] == (1 if use_memory_cache else 4)


def test_eval_tasks():
  task = _task(metric_fns=[data.exact_match],
               postprocess_fn=lambda text, *, example, is_target: (text, len(example['inputs']), is_target))
  (opened,) = data.open_eval_tasks(_cfg(task, shuffle=False), _layout())
  indices, batches = zip(*opened.batches, strict=True)
  np.testing.assert_array_equal(np.concatenate(indices), [*range(21), -1, -1, -1])
  assert len(opened.batches) == 3 and indices[0].dtype == np.int32
  for i, batch in zip(indices, batches, strict=True):
    for index, row in zip(i, batch['encoder_input_tokens'], strict=True):
      assert index < 0 or _VOCABULARY.decode(row) == opened.examples[index]['inputs_pretokenized']
  assert opened.targets()[1] == ('1', len('1 xxxxx') + 1, True)
  assert opened.metric_fns[0](['a', 'b'], ['a', 'c']) == {'exact_match': 0.5}
  assert opened.output_vocabulary == _VOCABULARY and opened.element_spec['encoder_input_tokens'].shape == (8, 16)
  second = data.open_eval_tasks(_cfg(task, shuffle=False), _layout(1, 2))[0]
  np.testing.assert_array_equal(next(iter(second.batches))[0], [4, 5, 6, 7])
  with pytest.raises(ConfigError, match='pack = True'):
    data.open_eval_tasks(_cfg(task, pack=True), _layout())
  with pytest.raises(ConfigError, match='no texts to compare'):
    data.open_eval_tasks(_cfg('synthetic', source='synthetic'), _layout())


def test_exact_match():
  assert data.exact_match(['a', 'b', 'c', 'd'], ['a', 'x', 'c', 'd']) == {'exact_match': 0.75}
  assert data.exact_match([], []) == {'exact_match': 0.0}
  with pytest.raises(ValueError, match='1 targets and 2'):
    data.exact_match(['a'], ['a', 'b'])


# --- Checks before compute ------------------------------------------------------------------


@pytest.mark.parametrize('change, message', [
    (dict(source='seqoi'), "'seqoi'.*mean 'seqio'"),
    (dict(task_feature_lengths={'inputs': 0, 'targets': 8}), r"\['inputs'\] is 0"),
    (dict(task_feature_lengths={'inputs': 8.5, 'targets': 8}), 'expected an integer'),
    (dict(task_feature_lengths=None), 'expected a mapping'),
    (dict(batch_size=0), 'batch_size is 0'), (dict(batch_size=True), 'batch_size is True'),
    (dict(seed='1'), "seed is '1'"), (dict(seed=-1), 'seed is -1'), (dict(split=''), 'split'),
    (dict(shuffle='yes'), 'shuffle'), (dict(pack=1), 'pack is 1'),
    (dict(use_custom_packing_ops=True), 'pack is False'),
    (dict(use_custom_packing_ops=True, pack=True), "source = 'seqio' only"),
    (dict(use_cached=True), "source = 'seqio' only")])
def test_refused_configurations(change, message):
  with pytest.raises(ConfigError, match=message):
    _cfg(**change)


@pytest.mark.parametrize('change, error, message', [
    (dict(task='python_keyword_close'), DataError, "mean 'python_keyword_cloze'"),
    (dict(split='trian'), DataError, "no split 'trian'.*mean 'train'"),
    (dict(task_feature_lengths={'inputs': 8}), ConfigError, "no length for 'targets'"),
    (dict(task_feature_lengths={'inputs': 8, 'targets': 8, 'target': 8}), ConfigError, "'target'.*mean 'targets'"),
    (dict(task=_task(num=0)), DataError, 'is empty'),
    (dict(task=object()), ConfigError, 'a object, expected a name'),
    (dict(task='digits', source='synthetic'), ConfigError, "expected 'synthetic'"),
    (dict(module='no_such_module_here'), ConfigError, "no module named 'no_such_module_here'"),
    (dict(task='python_docs_span_corruption', task_feature_lengths={'inputs': 128, 'targets': 20}), ConfigError,
     'expected at least 29'),
    (dict(task='python_docs_span_corruption', task_feature_lengths={'inputs': 3, 'targets': 20}), ConfigError,
     'at least 4')])
def test_refused_data(change, error, message):
  cfg = _cfg(**change)
  for open_fn in (data.open_train_iterator, data.open_eval_iterators, data.open_eval_tasks):
    if cfg.source == 'builtin' or open_fn is not data.open_eval_tasks:
      with pytest.raises(error, match=message):
        open_fn(cfg, _layout())


def test_refused_layouts_and_converters():
  with pytest.raises(ConfigError, match='batch_size is 8, but the layout is for batches of 16'):
    data.open_train_iterator(_cfg(), _layout(batch_size=16))
  with pytest.raises(ConfigError, match='8 does not divide over 3'):
    data.open_train_iterator(_cfg(), _layout(0, 3))
  with pytest.raises(ConfigError, match="'encoder_decode'.*mean 'encoder_decoder'"):
    data.open_train_iterator(_cfg(), _layout(), feature_converter='encoder_decode')
  with pytest.raises(ConfigError, match="needs DatasetConfig.source = 'seqio'"):
    data.open_train_iterator(_cfg(), _layout(), feature_converter=dict)
  with pytest.raises(ConfigError, match='eval_steps is 0'):
    data.open_eval_iterators(_cfg(), _layout(), 0)


def test_vocabularies_of_model_and_data_must_match():
  @dataclasses.dataclass
  class Model:
    input_vocabulary: object
    output_vocabulary: object

  cfg = _cfg()
  assert data.get_vocabulary(cfg) == (_VOCABULARY, _VOCABULARY)
  data.verify_matching_vocabs(cfg, Model(data.ByteVocabulary(extra_ids=125), _VOCABULARY))
  with pytest.raises(ConfigError, match=r'output vocabulary.*ByteVocabulary\(125\).*ByteVocabulary\(100\)'):
    data.verify_matching_vocabs(cfg, Model(_VOCABULARY, data.ByteVocabulary(100)))


def test_module_registers_a_task(tmp_path, monkeypatch):
  (tmp_path / 'tasks_of_a_user.py').write_text(
      'from t5x_lite import data\n'
      "data.register_builtin_task(data.text_task(name='users_task', texts_fn=lambda split: [('a', 'b')],\n"
      "    splits=('train',), vocabulary=data.ByteVocabulary()))\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(DataError, match='DatasetConfig.module'):
    _open(_cfg('users_task'))
  batch = next(_open(_cfg('users_task', module='tasks_of_a_user')))
  assert data.ByteVocabulary().decode(batch['decoder_target_tokens'][7]) == 'b'
  assert 'users_task' in data.builtin_names()


def test_without_seqio_the_message_names_the_way_out(monkeypatch):
  for name in [m for m in sys.modules if m.startswith('t5x_lite.data.seqio_')]:
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(data, name.rpartition('.')[2], raising=False)
  monkeypatch.setitem(sys.modules, 'seqio', None)
  with pytest.raises(ConfigError, match=r"--gin.DATA_SOURCE=builtin.*pip install 'seqio>=.*'tensorflow>="):
    _open(_cfg('python_keyword_cloze', source='seqio'))


# --- Random numbers ------------------------------------------------------------------------


def test_philox_known_answers():
  """The vectors that the authors of Philox published with Random123 (kat_vectors, philox4x32 10)."""
  ones = np.uint64(2**64 - 1)
  words = philox._philox_words(np.uint64(0), np.uint64(0), np.uint64(0))
  assert [hex(int(w)) for w in words] == ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
  words = philox._philox_words(ones, ones, ones)
  assert [hex(int(w)) for w in words] == ['0x408f276d', '0x41c83b0e', '0xa20bc7c6', '0x6d5451fd']


@pytest.mark.parametrize('size', [1, 2, 3, 7, 16, 1021, 65537])
def test_permuted_is_a_permutation(size):
  order = philox.permuted(philox.fold(3, size), size, np.arange(size))
  assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(size))


@pytest.mark.parametrize('size', [10**6, 2**32 + 5, 2**62 - 1])
def test_permuted_places_are_independent(size):
  """No drift, and no memory of the places before: neighbours correlate no more than those of independent draws."""
  first = philox.permuted(philox.fold(3, 'order', 0), size, np.arange(20_000)) / size
  second = philox.permuted(philox.fold(3, 'order', 1), size, np.arange(20_000)) / size
  assert len(set(first)) > 19_500 and 0 <= first.min() and first.max() < 1
  np.testing.assert_allclose(np.histogram(first, bins=10, range=(0, 1))[0], 2000, atol=200)
  for lag in (1, 2, 3, 4, 8):
    assert abs(np.corrcoef(first[:-lag], first[lag:])[0, 1]) < 0.03
  assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


def test_large_tables_are_shuffled_place_by_place(monkeypatch):
  monkeypatch.setattr(streams, '_LARGEST_KEPT_ORDER', 1000)
  source = data.SyntheticSource(vocab_size=50, num_examples=20_003)
  table = SyntheticExamples(source, 'train', _LENGTHS)
  stream = streams.TaskStream('large', table, seed=1, shuffle=True)
  numbers = stream.numbers(np.arange(40_006))
  epochs = numbers.reshape(2, -1)
  for e in range(2):
    np.testing.assert_array_equal(np.sort(epochs[e]), e * len(table) + np.arange(len(table)))
  assert (epochs[0] != epochs[1] - len(table)).mean() > 0.99
  np.testing.assert_array_equal(stream.numbers(np.array([20_002, 20_003, 7])), numbers[[20_002, 20_003, 7]])
  assert len(pickle.dumps(stream)) < 2000


def test_philox_derived():
  order = philox.permutation(philox.fold(3, 'order', 0), 1000)
  assert sorted(order.tolist()) == list(range(1000)) and (order != np.arange(1000)).any()
  values = philox.uniform(philox.as_seeds(np.arange(4), 7), 5000)
  assert values.shape == (4, 5000) and values.dtype == np.float32
  assert 0 <= values.min() and values.max() < 1
  np.testing.assert_allclose(values.mean(axis=1), 0.5, atol=0.02)
  assert len({tuple(philox.fold(*parts).tolist()) for parts in [(0, 1), (1, 0), ('01',), (0, 1, 0), ('0', '1')]}) == 5


def test_tasks_without_metrics_are_named(caplog):
  layout = DataLayout(batch_size=4, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)
  cfg = data.DatasetConfig('python_cloze_and_docs', {'inputs': 64, 'targets': 16}, 'validation', 4, False, 0, source='builtin')
  (task,) = data.open_eval_tasks(cfg, layout, num_examples=4)
  assert task.name == 'python_keyword_cloze'
  assert [record.getMessage() for record in caplog.records] == [
      'python_docs_span_corruption has no metrics: left out of the evaluation by decoding.']
