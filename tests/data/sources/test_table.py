"""Sources of tables: the builtin one and its iterator, and the checks before compute."""

import dataclasses
import importlib
import sys
import types

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.errors import ConfigError, DataError
from tests.data import builtin_cases as cases
from tests.data import registries


@pytest.mark.parametrize('pack', [False, True])
def test_element_spec_is_the_global_batch(pack):
  iterator = cases.open(cases.make_cfg(pack=pack), 1, 2)
  spec = iterator.element_spec
  batch = next(iterator)
  assert set(spec) == set(batch)
  for name, array in batch.items():
    assert (
      spec[name].shape == (2 * array.shape[0], *array.shape[1:]) and spec[name].dtype == array.dtype
    )


def test_shuffled_epochs_hold_each_example_once_in_new_orders():
  task = cases.make_task(num=24)
  batches = cases.take(cases.open(cases.make_cfg(task)), 9)
  epochs = [sum((cases.numbers(b) for b in batches[3 * e : 3 * e + 3]), []) for e in range(3)]
  assert [sorted(epoch) for epoch in epochs] == [list(range(24))] * 3
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != sorted(epochs[0])
  other = sum(map(cases.numbers, cases.take(cases.open(cases.make_cfg(task, seed=2)), 3)), [])
  assert sorted(other) == list(range(24)) and other != epochs[0]


def test_no_seed_means_zero():
  cases.assert_equal(
    next(cases.open(cases.make_cfg(seed=None))), next(cases.open(cases.make_cfg(seed=0)))
  )


@pytest.mark.parametrize(
  'name', ['python_keyword_cloze', 'python_docs_span_corruption', 'python_cloze_and_docs']
)
@pytest.mark.parametrize('pack', [False, True])
def test_batches_do_not_depend_on_the_number_of_processes(name, pack):
  cfg = cases.make_cfg(
    name, pack=pack, task_feature_lengths={'inputs': 64, 'targets': 32}, split='validation'
  )
  whole = cases.open(cfg)
  shards = [cases.open(cfg, i, 4) for i in range(4)]
  for _ in range(3):
    parts = _take_one_of_each(shards)
    cases.assert_equal(
      next(whole), {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
    )
  # Saved by one of four, resumed by one of two, and compared with the one.
  halves = [cases.open(cfg, i, 2) for i in range(2)]
  for half in halves:
    half.set_state(shards[3].get_state())
  parts = _take_one_of_each(halves)
  cases.assert_equal(
    next(whole), {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
  )


def _take_one_of_each(iterators):
  return [next(iterator) for iterator in iterators]


def test_packed_rows_hold_all_examples_in_order():
  iterator = cases.open(cases.make_cfg(pack=True, shuffle=False))
  packed = [pair for batch in cases.take(iterator, 12) for pair in cases.unpack(batch)]
  single = cases.take(cases.open(cases.make_cfg(shuffle=False)), 40)
  expected = [
    (i[i > 0], t[t > 0])
    for batch in single
    for i, t in zip(batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True)
  ]
  assert len(packed) > 1.5 * 12 * 8
  for (inputs, targets), (expected_inputs, expected_targets) in zip(packed, expected, strict=False):
    np.testing.assert_array_equal(inputs, expected_inputs)
    np.testing.assert_array_equal(targets, expected_targets)


def test_rows_close_only_when_full():
  """The first example of the next row never fits in the row before, but where a group of examples ends."""
  iterator = cases.open(cases.make_cfg(pack=True, shuffle=False, batch_size=1))
  rows = [list(cases.unpack(batch)) for batch in cases.take(iterator, 30)]
  taken = 0
  for row, following in zip(rows, rows[1:], strict=False):
    taken += len(row)
    fits = all(
      sum(len(pair[f]) for pair in row) + len(following[0][f]) <= length
      for f, length in enumerate(cases.LENGTHS.values())
    )
    assert not fits or taken % max(cases.LENGTHS.values()) == 0


@pytest.mark.parametrize('pack', [False, True])
@pytest.mark.parametrize('batch_size, num_epochs', [(8, 1), (8, 3), (2, 2), (21, 1)])
def test_data_ends_after_its_epochs(pack, batch_size, num_epochs):
  """The batches are the first of the endless data, with all examples but those that do not fill a batch."""
  cfg = cases.make_cfg(pack=pack, batch_size=batch_size, num_epochs=num_epochs)
  batches, endless = list(cases.open(cfg)), cases.open(dataclasses.replace(cfg, num_epochs=None))
  num_examples = 21 * num_epochs  # of `make_task`
  if pack:
    # The last group may be smaller, so its rows may differ from those of the endless data.
    stream = cases.open(dataclasses.replace(cfg, pack=False, batch_size=1))
    num_left = num_examples - sum(len(list(cases.unpack(batch))) for batch in batches)
    assert len(list(stream)) == num_examples and 0 <= num_left < batch_size * max(
      cases.LENGTHS.values()
    )
    batches = batches[: num_examples // max(cases.LENGTHS.values()) // batch_size]
  else:
    assert len(batches) == num_examples // batch_size
  for batch in batches:
    cases.assert_equal(batch, next(endless))


def test_a_position_at_and_after_the_end(mixture):
  cfg = cases.make_cfg(num_epochs=1)
  iterator, twice = cases.open(cfg), cases.open(dataclasses.replace(cfg, num_epochs=2))
  assert len(list(iterator)) == 2 and next(iterator, None) is None
  # 16 of 21 examples were read; with another epoch the data continues there.
  twice.set_state(iterator.get_state())
  batches = list(twice)
  assert len(batches) == 3
  endless = cases.open(dataclasses.replace(cfg, num_epochs=None))
  for batch in cases.take(endless, 5)[2:]:
    cases.assert_equal(batch, batches.pop(0))
  iterator.set_state(twice.get_state())  # the data has become shorter
  assert next(iterator, None) is None and iterator.ends_together
  # The first task of the mixture has 5 examples, a quarter of the rows.
  assert 2 <= len(list(cases.open(cases.make_cfg(mixture, num_epochs=2, batch_size=8)))) <= 8


@pytest.mark.parametrize('open_fn', [data.open_eval_iterators, data.open_eval_tasks])
def test_evaluation_reads_each_example_once(open_fn):
  with pytest.raises(
    ConfigError, match='num_epochs` must be None for evaluation.*got 2. Each example is read once'
  ):
    open_fn(cases.make_cfg(num_epochs=2), cases.layout())


def test_mixture_draws_by_rates_and_keeps_each_tasks_order(mixture):
  iterator = cases.open(cases.make_cfg(mixture, shuffle=False, batch_size=500))
  numbers = sum(map(cases.numbers, cases.take(iterator, 4)), [])
  # Up to 4 a number may come from either task; from 5 on it is the second one's.
  large = [n for n in numbers if n >= 5]
  assert abs(len(large) / len(numbers) - 0.75) < 0.05
  assert large == list(range(5, 1000)) + list(range(5, 1000))[: len(large) - 995]


def test_eval_takes_a_mixture_task_by_task():
  cfg = cases.make_cfg(
    'python_cloze_and_docs', split='validation', task_feature_lengths={'inputs': 64, 'targets': 32}
  )
  assert set(data.open_eval_iterators(cfg, cases.layout(), 2)) == {
    'python_keyword_cloze',
    'python_docs_span_corruption',
  }
  # Only one of them has a metric.
  assert [task.name for task in data.open_eval_tasks(cfg, cases.layout())] == [
    'python_keyword_cloze'
  ]


def test_a_mixture_is_read_on_the_tasks_that_have_the_split(monkeypatch):
  registries.isolate(monkeypatch)
  with_both = dataclasses.replace(cases.make_task('both'), splits=('train', 'validation'))
  only_train = cases.make_task('only_train')
  for task in (with_both, only_train):
    data.register_builtin_task(dataclasses.replace(task, metric_fns=[data.exact_match]))
  data.register_builtin_mixture(
    data.BuiltinMixture(name='mixed', rates={'both': 1, 'only_train': 1})
  )
  cfg = cases.make_cfg('mixed', split='validation', shuffle=False)
  assert list(data.open_eval_iterators(cfg, cases.layout())) == ['both']
  assert [task.name for task in data.open_eval_tasks(cfg, cases.layout())] == ['both']
  model = types.SimpleNamespace(FEATURE_CONVERTER='encoder_decoder')
  assert [source.name for source in data.open_example_sources(cfg, model)] == ['both']
  measured = dataclasses.replace(cfg, task_feature_lengths=None)
  assert list(data.open_eval_iterators(measured, cases.layout())) == ['both']
  assert len(data.read_task_texts(cfg)['inputs']) == 21
  # Training on a part of a mixture would change its rates silently.
  with pytest.raises(DataError, match="'only_train' has no split 'validation'"):
    cases.open(cfg)
  missing = dataclasses.replace(cfg, split='test')
  with pytest.raises(
    DataError, match="'mixed' has no split 'test'. Known names: train, validation"
  ):
    data.open_eval_iterators(missing, cases.layout())


@pytest.mark.parametrize(
  'change, error, message',
  [
    (dict(task='python_keyword_close'), DataError, "mean 'python_keyword_cloze'"),
    (dict(split='trian'), DataError, "no split 'trian'.*mean 'train'"),
    (dict(task_feature_lengths={'inputs': 8}), ConfigError, "with the feature 'targets'"),
    (
      dict(task_feature_lengths={'inputs': 8, 'targets': 8, 'target': 8}),
      ConfigError,
      "'target'.*mean 'targets'",
    ),
    (dict(task=cases.make_task(num=0)), DataError, 'is empty'),
    (dict(task=object()), DataError, 'Unknown builtin task or mixture <object'),
    (
      dict(task='digits', source='synthetic'),
      ConfigError,
      "must be 'synthetic' or a SyntheticSource",
    ),
    (dict(module='no_such_module_here'), ConfigError, "no module 'no_such_module_here'"),
    (
      dict(task='python_docs_span_corruption', task_feature_lengths={'inputs': 128, 'targets': 20}),
      ConfigError,
      'targets` must be a number >= 29',
    ),
    (
      dict(task='python_docs_span_corruption', task_feature_lengths={'inputs': 3, 'targets': 20}),
      ConfigError,
      'inputs` must be a number >= 4',
    ),
  ],
)
def test_rejected_data(change, error, message):
  cfg = cases.make_cfg(**change)
  for open_fn in (data.open_train_iterator, data.open_eval_iterators, data.open_eval_tasks):
    if cfg.source == 'builtin' or open_fn is not data.open_eval_tasks:
      with pytest.raises(error, match=message):
        open_fn(cfg, cases.layout())


def test_module_registers_a_task(tmp_path, monkeypatch):
  (tmp_path / 'tasks_of_a_user.py').write_text(
    'from t5x_lite import data\n'
    "data.register_builtin_task(data.text_task(name='users_task', texts_fn=lambda split: [('a', 'b')],\n"
    "    splits=('train',), vocabulary=data.ByteVocabulary()))\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(DataError, match='DatasetConfig.module'):
    cases.open(cases.make_cfg('users_task'))
  batch = next(cases.open(cases.make_cfg('users_task', module='tasks_of_a_user')))
  assert data.ByteVocabulary().decode(batch['decoder_target_tokens'][7]) == 'b'
  assert 'users_task' in data.builtin_names()


def test_without_seqio_the_message_names_the_way_out(monkeypatch):
  seqio = importlib.import_module('t5x_lite.data.seqio')
  for name in [m for m in sys.modules if m.startswith('t5x_lite.data.seqio.')]:
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(seqio, name.rpartition('.')[2], raising=False)
  monkeypatch.setitem(sys.modules, 'seqio', None)
  with pytest.raises(
    ConfigError, match=r"pip install 'seqio>=.*'tensorflow>=.*--gin.DATA_SOURCE=builtin"
  ):
    cases.open(cases.make_cfg('python_keyword_cloze', source='seqio'))
