"""One table of data sources; each row keeps the contract of `data.DataSource` in every use that it supports."""

import dataclasses
import functools
import json
import platform
import types
from typing import Any

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data.sources import base
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.partitioning import DataLayout
from tests.data import registries
from tests.examples import sums_source

_BATCH_SIZE = 8
_NEEDS_PACKAGES = pytest.mark.skipif(
  (platform.system(), platform.machine()) != ('Linux', 'x86_64'),
  reason='the lock installs grain and seqio on Linux x86_64 only',
)


@dataclasses.dataclass(frozen=True)
class Row:
  """A source, its options, and its differences from other sources.

  Attributes:
    name: of the source.
    task: `mixture_or_task_name`, or a function that returns it.
    lengths: `task_feature_lengths`.
    unsupported: the uses that raise ConfigError, and a part of the message.
    cut_by_rows: whether the shards of a batch are parts of the batch that one process reads.
  """

  name: str
  task: Any
  lengths: dict[str, int]
  unsupported: dict[str, str] = dataclasses.field(default_factory=dict)
  cut_by_rows: bool = True

  def cfg(self, split='validation', **options):
    task = self.task() if callable(self.task) else self.task
    return data.DatasetConfig(
      task, self.lengths, split, _BATCH_SIZE, split == 'train', 0, source=self.name, **options
    )


@functools.cache
def _small_seqio_task():
  """Returns seqio's task of the same name on 100 examples, with a small shuffle buffer."""
  from t5x_lite.data.seqio import tasks as seqio_tasks  # registers the task

  seqio = seqio_tasks.seqio
  task = seqio.TaskRegistry.get('python_keyword_cloze')
  source = seqio.FunctionDataSource(
    lambda split, shuffle_files, seed=None: task.source.get_dataset(split, shuffle_files).take(100),
    splits=task.splits,
    num_input_examples=dict.fromkeys(task.splits, 100),
  )
  return task.replace(source=source, shuffle_buffer_size=32)


_CLOZE = {'inputs': 64, 'targets': 12}
_ROWS = [
  Row('seqio', _small_seqio_task, _CLOZE, cut_by_rows=False),
  Row('builtin', 'python_keyword_cloze', _CLOZE),
  Row('grain', 'python_keyword_cloze', _CLOZE),
  Row(
    'synthetic',
    'synthetic',
    {'inputs': 16, 'targets': 8},
    {
      'open_eval_tasks': 'supports evaluation by decoding',
      'read_task_texts': 'supports reading texts',
    },
  ),
  Row('sums', 'sums', sums_source.LENGTHS),
]
_SOURCE = pytest.mark.parametrize(
  'row',
  [
    pytest.param(row, id=row.name, marks=_NEEDS_PACKAGES if row.name in ('seqio', 'grain') else ())
    for row in _ROWS
  ],
)
_MODEL = types.SimpleNamespace(FEATURE_CONVERTER='encoder_decoder')


def _layout(shard_id=0, num_shards=1):
  return DataLayout(
    batch_size=_BATCH_SIZE,
    shard_id=shard_id,
    num_shards=num_shards,
    is_first_host_in_replica_set=True,
  )


def _assert_equal(first, second):
  assert first.keys() == second.keys()
  for name in first:
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def _assert_is_part_of_batch(batch, spec, num_rows):
  assert {name: (rows.shape, rows.dtype) for name, rows in batch.items()} == {
    name: ((num_rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in spec.items()
  }
  assert all(leaf.shape[0] == _BATCH_SIZE for leaf in spec.values())


def _supports(row, method, call):
  """Returns whether a row supports a use; checks the error where it does not."""
  if method not in row.unsupported:
    return True
  with pytest.raises(ConfigError, match=row.unsupported[method]):
    call()
  return False


def test_every_registered_source_has_a_row():
  assert {row.name for row in _ROWS} == set(base.source_names())


@_SOURCE
def test_training_has_the_announced_batches_on_any_number_of_processes(row):
  iterator = data.open_train_iterator(row.cfg('train'), _layout())
  whole = next(iterator)
  _assert_is_part_of_batch(whole, iterator.element_spec, _BATCH_SIZE)
  for shard in range(2):
    part = next(data.open_train_iterator(row.cfg('train'), _layout(shard, 2)))
    _assert_is_part_of_batch(part, iterator.element_spec, _BATCH_SIZE // 2)
    if row.cut_by_rows:
      _assert_equal(part, {name: rows[shard * 4 : shard * 4 + 4] for name, rows in whole.items()})


@_SOURCE
@pytest.mark.parametrize('num_undelivered', [pytest.param(0, marks=pytest.mark.full), 2])
def test_training_resumes_exactly(row, num_undelivered):
  first = data.open_train_iterator(row.cfg('train'), _layout())
  taken = [next(first) for _ in range(5)]
  undelivered = taken[len(taken) - num_undelivered :]
  state = first.get_state(undelivered)
  assert all(isinstance(content, bytes) for content in state.values())
  expected = [*undelivered, next(first), next(first)]
  second = data.open_train_iterator(row.cfg('train'), _layout())
  second.set_state(state)
  for batch in expected:
    _assert_equal(next(second), batch)
  # Any position can be set, not only at the start.
  first.set_state(state)
  _assert_equal(next(first), expected[0])
  for iterator in (first, second):
    iterator.close()


@_SOURCE
def test_a_position_of_other_data_is_an_error(row):
  state = data.open_train_iterator(row.cfg('train'), _layout()).get_state()
  other = data.open_train_iterator(dataclasses.replace(row.cfg('train'), seed=1), _layout())
  with pytest.raises(DataError, match='seed: saved 0, now 1'):
    other.set_state(state)


@_SOURCE
def test_evaluation_shows_each_example_once_and_again(row):
  (batches,) = data.open_eval_iterators(row.cfg(), _layout()).values()
  found = list(batches)
  assert len(found) == len(batches) == -(-batches.num_examples // _BATCH_SIZE)
  for batch in (found[0], found[-1]):
    _assert_is_part_of_batch(batch, batches.element_spec, _BATCH_SIZE)
  _assert_equal(next(iter(batches)), found[0])
  num_examples = sum(int((batch['decoder_loss_weights'].sum(axis=1) > 0).sum()) for batch in found)
  assert num_examples == batches.num_examples
  (limited,) = data.open_eval_iterators(row.cfg(), _layout(), 1).values()
  assert len(limited) == 1
  shards = [data.open_eval_iterators(row.cfg(), _layout(shard, 2), 1) for shard in range(2)]
  parts = [next(iter(batches)) for shard in shards for batches in shard.values()]
  _assert_equal(
    {name: np.concatenate([part[name] for part in parts]) for name in found[0]}, found[0]
  )


@_SOURCE
@pytest.mark.parametrize('use_memory_cache', [pytest.param(True, marks=pytest.mark.full), False])
def test_evaluation_by_decoding_has_examples_and_targets(row, use_memory_cache):
  def open_tasks():
    return data.open_eval_tasks(
      row.cfg(use_memory_cache=use_memory_cache), _layout(), num_examples=11
    )

  if not _supports(row, 'open_eval_tasks', open_tasks):
    return
  (task,) = open_tasks()
  assert (
    len(task.examples) == 11
    and task.kinds == ['predict']
    and (task.rows is not None) == use_memory_cache
  )
  indices = [found for found, _ in task.batches]
  assert np.concatenate(indices).tolist() == [*range(11), *[-1] * 5]
  for _, batch in task.batches:
    _assert_is_part_of_batch(batch, task.element_spec, _BATCH_SIZE)
  targets = task.targets()
  assert task.metric_fns[0](targets, targets) == {'exact_match': 1.0}
  assert [
    task.output_vocabulary.decode([int(i) for i in example['targets']]) for example in task.examples
  ] == targets


@_SOURCE
def test_inference_reads_the_examples_from_anywhere(row):
  (source,) = data.open_example_sources(row.cfg(), _MODEL)
  json.dumps(source.identity)
  examples = [source.prepare(record) for record in source.records()]
  assert source.num_examples in (None, len(examples)) and source.num_skipped == 0
  (again,) = data.open_example_sources(row.cfg(), _MODEL)
  assert again.identity == source.identity
  rest = [again.prepare(record) for record in again.records(len(examples) - 3)]
  for first, second in zip(examples[-3:], rest, strict=True):
    _assert_equal(first.row, second.row)
  batch = source.convert(examples[:3], _BATCH_SIZE)
  _assert_is_part_of_batch(batch, source.element_spec(_BATCH_SIZE), _BATCH_SIZE)
  assert not any(rows[3:].any() for rows in batch.values())
  (evaluated,) = data.open_eval_iterators(row.cfg(), _layout(), 1).values()
  _assert_equal(
    {name: rows[:3] for name, rows in batch.items()},
    {name: rows[:3] for name, rows in next(iter(evaluated)).items()},
  )
  for opened in (source, again):
    opened.close()


@_SOURCE
def test_texts_of_each_feature(row):
  if _supports(row, 'read_task_texts', lambda: data.read_task_texts(row.cfg(), 3)):
    texts = data.read_task_texts(row.cfg(), 3)
    assert texts.keys() == row.lengths.keys()
    assert all(
      len(found) == 3 and all(isinstance(text, str) and text for text in found)
      for found in texts.values()
    )


@_SOURCE
def test_vocabularies_suit_the_ids(row):
  largest = max(
    int(rows.max()) for rows in next(data.open_train_iterator(row.cfg('train'), _layout())).values()
  )
  assert all(vocabulary.vocab_size > largest for vocabulary in data.get_vocabulary(row.cfg()))


@pytest.mark.parametrize('row', _ROWS, ids=lambda row: row.name)
def test_options_of_other_sources_are_errors(row):
  values = {
    'use_cached': True,
    'use_custom_packing_ops': True,
    'num_prefetch_threads': 3,
    'num_workers': 2,
    'num_epochs': 3,
    'earlier_sentinels': True,
  }
  assert values.keys() == base.SPECIAL_OPTIONS.keys()
  for option, value in values.items():
    # Whatever a source itself has to say of packing.
    options = {option: value, 'pack': option == 'use_custom_packing_ops'}
    if option in type(data.get_source(row.cfg())).options:
      assert getattr(row.cfg(**options), option) == value
    else:
      with pytest.raises(ConfigError, match=f"{option}.*works with source = '|pack"):
        row.cfg(**options).check()


def test_unknown_sources_are_named_with_the_registered_ones():
  with pytest.raises(
    ConfigError,
    match=f"source` must be one of {', '.join(map(repr, base.source_names()))}, got 'sum'. "
    "Did you mean 'sums'.*module that registers it",
  ):
    data.DatasetConfig('x', {'inputs': 4}, 'train', 1, False, 0, source='sum').check()
  with pytest.raises(ConfigError, match=r"source` must be one of .*got \['seqio'\]"):
    data.DatasetConfig('x', {'inputs': 4}, 'train', 1, False, 0, source=['seqio']).check()


class _Vocabularies(data.DataSource):
  """Supports no use."""

  def get_vocabulary(self):
    return None, None


@pytest.fixture
def registry(monkeypatch):
  """Registered sources of the package; registrations of a test are undone after it."""
  registries.isolate(monkeypatch)


def test_a_missing_method_is_named_in_the_error(registry):
  data.register_source('vocabularies')(_Vocabularies)
  cfg = data.DatasetConfig(
    'x', {'inputs': 4}, 'train', _BATCH_SIZE, False, 0, source='vocabularies'
  )
  for call, use in [
    (lambda: data.open_train_iterator(cfg, _layout()), 'training'),
    (lambda: data.open_eval_iterators(cfg, _layout()), 'evaluation with given targets'),
    (lambda: data.open_eval_tasks(cfg, _layout()), 'evaluation by decoding'),
    (lambda: data.open_example_sources(cfg, _MODEL), 'inference'),
    (lambda: data.read_task_texts(cfg), 'reading texts'),
  ]:
    with pytest.raises(
      ConfigError, match=f"supports {use}, got 'vocabularies'.*implement _Vocabularies.[a-z_]*"
    ):
      call()
  with pytest.raises(ConfigError, match='task_feature_lengths` must be a mapping .*got {}'):
    dataclasses.replace(cfg, task_feature_lengths={}).check()


def test_names_are_registered_once(registry):
  with pytest.raises(
    ConfigError, match="got 'seqio'. t5x_lite.data.sources.seqio.SeqioSource has this name"
  ):
    data.register_source('seqio')(_Vocabularies)
  with pytest.raises(ConfigError, match='`register_source.cls` must be a subclass of DataSource'):
    data.register_source('other')(dict)
  with pytest.raises(ConfigError, match='`register_source.name` must be a text, got None'):
    data.register_source(None)(_Vocabularies)
  again = type('SeqioSource', (data.SeqioSource,), {'__module__': data.SeqioSource.__module__})
  data.register_source('seqio')(again)
  assert isinstance(data.get_source(_ROWS[0].cfg()), again)


def test_the_module_of_a_configuration_may_register_its_source(registry, tmp_path, monkeypatch):
  (tmp_path / 'registers_a_source.py').write_text(
    'from t5x_lite import data\n'
    "@data.register_source('of_a_module')\n"
    'class Source(data.DataSource):\n'
    '  def get_vocabulary(self):\n'
    "    return 'input vocabulary', 'output vocabulary'\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  cfg = data.DatasetConfig(
    'x', {'inputs': 4}, 'train', 1, False, 0, source='of_a_module', module='registers_a_source'
  )
  assert data.get_vocabulary(cfg) == ('input vocabulary', 'output vocabulary')


class _WrongTypes(data.DataSource):
  """Every method returns something else than its contract says."""

  def get_vocabulary(self):
    return data.ByteVocabulary()

  def open_train_iterator(self, layout, feature_converter):
    return iter([])

  def open_eval_iterators(self, layout, eval_steps, feature_converter):
    return {'task': []}

  def open_eval_tasks(self, layout, feature_converter, num_examples):
    return {'task': None}

  def open_example_sources(self, feature_converter):
    return ['task']


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (
      lambda cfg: data.open_train_iterator(cfg, _layout()),
      r'open_train_iterator\(\)` must be a data.HostIterator',
    ),
    (
      lambda cfg: data.open_eval_iterators(cfg, _layout()),
      'must be a dict from task name to data.EvalBatches, got',
    ),
    (lambda cfg: data.open_eval_tasks(cfg, _layout()), 'must be a list of data.EvalTask, got'),
    (
      lambda cfg: data.open_example_sources(cfg, _MODEL),
      'must be a list of data.ExampleSource, got',
    ),
  ],
)
def test_a_source_that_returns_something_else_raises(registry, call, message):
  data.register_source('wrong')(_WrongTypes)
  with pytest.raises(ConfigError, match=f'^`_WrongTypes.*{message}'):
    call(data.DatasetConfig('x', {'inputs': 4}, 'train', _BATCH_SIZE, False, 0, source='wrong'))
  with pytest.raises(TypeError, match='cannot unpack non-iterable ByteVocabulary'):
    data.get_vocabulary(
      data.DatasetConfig('x', {'inputs': 4}, 'train', _BATCH_SIZE, False, 0, source='wrong')
    )
