"""Tasks from files, and the source 'grain': the batches of the builtin source, whatever the number of readers."""

import contextlib
import dataclasses
import json
import platform
import threading

import jax
import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data.files import line_index
from t5x_lite.data.files import records
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.partitioning import PjitPartitioner
from tests.apps.train import toy_run
from tests.data.builtin_cases import assert_equal

if (platform.system(), platform.machine()) != ('Linux', 'x86_64'):
  pytest.importorskip('grain')  # Not available for all machines.

from tests.data import grain_cases as cases  # noqa: E402

# --- The builtin source gives the same --------------------------------------------------------------------------------


@pytest.mark.parametrize('format', cases.FORMATS)
@pytest.mark.parametrize(
  'shuffle, pack',
  [
    (False, True),
    (True, False),
    *(pytest.param(*both, marks=pytest.mark.full) for both in ((False, False), (True, True))),
  ],
)
def test_batches_are_those_of_the_builtin_source(cloze, format, shuffle, pack):
  # 1,000 examples: 18 batches of 64 reach the second epoch, which has another order.
  cfg = cases.make_cfg(
    cloze[format], shuffle=shuffle, pack=pack, task_feature_lengths={'inputs': 70, 'targets': 24}
  )
  ours = cases.open(
    dataclasses.replace(cfg, mixture_or_task_name='python_keyword_cloze', source='builtin')
  )
  theirs = cases.open(cfg)
  assert theirs.element_spec == ours.element_spec
  for _ in range(18):
    assert_equal(next(theirs), next(ours))
  theirs.close()


@pytest.mark.parametrize('pack', [False, True])
def test_data_ends_where_that_of_the_builtin_source_ends(cloze, pack):
  cfg = cases.make_cfg(cloze['jsonl'], shuffle=True, pack=pack, batch_size=300, num_epochs=2)
  ours, theirs = list(cases.open(dataclasses.replace(cfg, source='builtin'))), list(cases.open(cfg))
  assert len(ours) == len(theirs) and (pack or len(ours) == 6)
  assert_equal(ours[-1], theirs[-1])


def test_mixtures_and_tasks_in_memory(cloze):
  mixture = data.BuiltinMixture(
    name='mix', rates={'python_keyword_cloze': 2, 'python_docs_span_corruption': 1}
  )
  cfg = cases.make_cfg(
    mixture, shuffle=True, pack=True, task_feature_lengths={'inputs': 64, 'targets': 32}
  )
  ours, theirs = cases.open(dataclasses.replace(cfg, source='builtin')), cases.open(cfg)
  for _ in range(6):
    assert_equal(next(theirs), next(ours))


def test_json_lines_without_grain(cloze):
  ours, theirs = (
    cases.open(cases.make_cfg(cloze['jsonl'], source=source)) for source in ('builtin', 'grain')
  )
  assert_equal(next(ours), next(theirs))


@pytest.mark.parametrize('source, is_ahead', [('builtin', False), ('grain', True)])
def test_grain_prepares_batches_in_advance(source, is_ahead):
  second_is_read = threading.Event()

  class Numbers(data.StaticExamples):
    def examples(self, seed, numbers):
      if max(numbers) >= 8:
        second_is_read.set()
      return super().examples(seed, numbers)

  ids = np.array([5, 1], np.int32)
  task = data.BuiltinTask(
    name='numbers',
    splits=('train',),
    vocabularies=dict.fromkeys(('inputs', 'targets'), cases.VOCABULARY),
    table_fn=lambda split, lengths: Numbers([{'inputs': ids, 'targets': ids}] * 64, [{}] * 64),
  )
  with contextlib.closing(
    cases.open(cases.make_cfg(task, source=source, split='train', batch_size=8))
  ) as iterator:
    next(iterator)
    assert second_is_read.wait(60 if is_ahead else 0) == is_ahead


@pytest.mark.full  # each worker process imports everything
def test_worker_processes_give_the_same(cloze):
  cfg = cases.make_cfg(cloze['array_record'], shuffle=True, pack=True)
  with_threads, with_workers = cases.open(cfg), cases.open(dataclasses.replace(cfg, num_workers=2))
  expected = cases.take(with_threads, 6)
  for batch in expected[:4]:
    assert_equal(next(with_workers), batch)
  with_workers.set_state(with_workers.get_state(expected[3:4]))
  assert_equal(next(with_workers), expected[3])
  with_workers.close()


@pytest.mark.parametrize('pack', [False, True])
def test_evaluation_is_that_of_the_builtin_source(cloze, pack):
  cfg = cases.make_cfg(cloze['array_record'], pack=pack, batch_size=48)
  layout = cases.layout(1, 2, 48)
  builtin = dataclasses.replace(cfg, mixture_or_task_name='python_keyword_cloze', source='builtin')
  (theirs,), (ours,) = (data.open_eval_iterators(c, layout, 7).values() for c in (cfg, builtin))
  assert theirs.num_examples == ours.num_examples and theirs.num_batches == 7
  for first, second in zip(theirs, ours, strict=True):
    assert_equal(first, second)
  if not pack:
    (theirs,), (ours,) = (data.open_eval_tasks(c, layout) for c in (cfg, builtin))
    assert theirs.targets() == ours.targets() and len(theirs.targets()) == 1000
    assert theirs.examples[7]['inputs_pretokenized'] == ours.examples[7]['inputs_pretokenized']
    # Postprocessors see the rest of the record.
    assert theirs.examples[7]['number'] == 7 and set(theirs.examples[7]) == {
      'inputs',
      'targets',
      'inputs_pretokenized',
      'targets_pretokenized',
      'question',
      'answer',
      'number',
    }
    for (indices, batch), (own_indices, own_batch) in zip(
      theirs.batches, ours.batches, strict=True
    ):
      np.testing.assert_array_equal(indices, own_indices)
      assert_equal(batch, own_batch)


def _letters(folder, format):
  """The task of `toy_run` as files of ids."""
  for split in ('train', 'validation'):
    table = toy_run.TASK.table(split, {})
    cases.write(
      folder / f'{split}.{format}',
      [
        {**{name: ids.tolist() for name, ids in example.items()}, **table.texts(number)}
        for number, example in enumerate(table.examples(0, np.arange(len(table))))
      ],
      format,
    )
  return data.file_task(
    name='letters',
    splits={s: str(folder / f'{s}.{format}') for s in ('train', 'validation')},
    format=format,
    vocabulary=toy_run.TASK.vocabularies['inputs'],
    add_eos={'inputs': False, 'targets': True},
    metric_fns=[data.exact_match],
  )


@pytest.mark.full  # by default, the batches are compared, also those after a resumption
def test_a_model_trains_to_the_same_loss(tmp_path):
  """Losses, metrics and predictions are bitwise equal, also in a run that resumes in the middle of an epoch."""
  builtin, straight, resumed = tmp_path / 'builtin', tmp_path / 'straight', tmp_path / 'resumed'
  task = _letters(tmp_path, 'array_record')
  datasets = {
    f'{use}_dataset_cfg': dataclasses.replace(
      toy_run.dataset('train' if use == 'train' else 'validation'),
      mixture_or_task_name=task,
      source='grain',
    )
    for use in ('train', 'train_eval', 'infer_eval')
  }
  toy_run.train(builtin)
  toy_run.train(straight, **datasets)
  assert toy_run.lines(straight) == toy_run.lines(builtin)
  for ours, theirs in zip(
    *(sorted(run.rglob('predictions-*.jsonl')) for run in (straight, builtin)), strict=True
  ):
    assert ours.read_bytes() == theirs.read_bytes()
  toy_run.train(resumed, 12, **datasets)  # 96 examples of 60
  toy_run.train(resumed, 20, **datasets)
  (state, position), (resumed_state, resumed_position) = (
    toy_run.saved(run, 20) for run in (straight, resumed)
  )
  for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(resumed_state), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert position == resumed_position and position


# --- Position ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('pack', [False, True])
def test_batches_do_not_depend_on_the_number_of_processes(cloze, pack):
  cfg = cases.make_cfg(cloze['jsonl'], shuffle=True, pack=pack)
  whole = cases.open(cfg)
  shards = {num: [cases.open(cfg, i, num) for i in range(num)] for num in (2, 4)}
  for k in range(4):
    if k == 2:  # Two processes resume from the position of one of four, and vice versa.
      states = {num: iterators[1].get_state() for num, iterators in shards.items()}
      for num, other in ((2, 4), (4, 2)):
        for iterator in shards[num]:
          iterator.set_state(states[other])
    batch = next(whole)
    for iterators in shards.values():
      parts = [next(iterator) for iterator in iterators]
      assert_equal(batch, {name: np.concatenate([part[name] for part in parts]) for name in batch})


@pytest.mark.parametrize('pack', [False, True])
def test_resumes_exactly(cloze, pack):
  cfg = cases.make_cfg(cloze['array_record'], shuffle=True, pack=pack)
  partitioner = PjitPartitioner(num_partitions=1)
  with data.GlobalBatches(cases.open(cfg), partitioner, prefetch=3) as batches:
    at_zero = batches.get_state()
    before = cases.take(batches, 5)
    state = batches.get_state()
    after = cases.take(batches, 3)
    batches.set_state(at_zero)
    assert_equal(cases.take(batches, 1)[0], before[0])
  assert sum(map(len, state.values())) < 1000
  with data.GlobalBatches(cases.open(cfg), partitioner) as resumed:
    resumed.set_state(state)
    for expected in after:
      assert_equal(cases.take(resumed, 1)[0], expected)
  other_size = cases.open(dataclasses.replace(cfg, batch_size=16))
  other_size.set_state(state)
  for part in range(4):
    assert_equal(
      next(other_size), {name: rows[16 * part : 16 * part + 16] for name, rows in after[0].items()}
    )


def test_other_data_is_rejected_when_resuming(tmp_path):
  files = [
    cases.write(tmp_path / f'{i}.jsonl', [{'inputs': 'a', 'targets': str(i)}] * 9) for i in range(2)
  ]
  cfg = cases.make_cfg(cases.make_task(files[0]), batch_size=4)
  state = cases.open(cfg).get_state()
  cases.open(cfg).set_state(state)
  changed = [
    cases.make_task(files[1]),
    cases.make_task(files[0], vocabulary=data.ByteVocabulary(100)),
    cases.make_task(files[0], preprocessors=[lambda record, context: {**record, 'inputs': 'b'}]),
  ]
  # The last ids of another vocabulary are others, even where no text shows it.
  for task in (changed[0], changed[2]):
    with pytest.raises(DataError, match='content: saved .*restore_dataset = False'):
      cases.open(dataclasses.replace(cfg, mixture_or_task_name=task)).set_state(state)
  with pytest.raises(DataError, match="source 'grain'.*reads the source 'builtin'. Resume with"):
    cases.open(dataclasses.replace(cfg, source='builtin')).set_state(state)


def test_continues_after_an_error(tmp_path):
  path = tmp_path / 'a.jsonl'
  cases.write(path, [{'inputs': 'a', 'targets': str(i)} for i in range(9)])
  whole = path.read_bytes()
  iterator = cases.open(cases.make_cfg(cases.make_task(str(path)), batch_size=4))
  path.write_bytes(whole[:20])
  with pytest.raises(DataError, match='another content than when they were opened'):
    next(iterator)
  path.write_bytes(whole)
  assert_equal(
    next(iterator), next(cases.open(cases.make_cfg(cases.make_task(str(path)), batch_size=4)))
  )


# --- Records ----------------------------------------------------------------------------------------------------------


def test_json_lines(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  {"a": 2} \r\n{"a": 3}\r\n\r\n{"a": 4}')
  empty = tmp_path / 'empty.jsonl'
  empty.write_bytes(b'')
  lines = records.JsonLines([str(path), str(empty), str(path)])
  assert len(lines) == 8
  parsed = [records.parse_json(content, '') for content in lines.read(range(8))]
  assert [record['a'] for record in parsed] == [1, 2, 3, 4] * 2
  assert [lines.where(i).rpartition(' ')[2] for i in range(8)] == ['1', '3', '4', '6'] * 2
  assert len(records.JsonLines([str(empty)])) == 0
  other = records.JsonLines([str(path), str(path)])
  assert other.fingerprint != lines.fingerprint and len(other) == 8


def test_json_lines_over_chunks(tmp_path, monkeypatch):
  # No option: data of the real size would make the test slow.
  monkeypatch.setattr(line_index, 'CHUNK', 7)
  path = cases.write(tmp_path / 'a.jsonl', [{'number': i} for i in range(30)])
  lines = records.JsonLines([path])
  assert [json.loads(line)['number'] for line in lines.read(range(30))] == list(range(30))
  assert lines.where(29) == f'{path}, line 30'


@pytest.mark.parametrize(
  'make, message',
  [
    (
      lambda: data.SpanCorruption(noise_density=0.0),
      r'noise_density` must be a number in \(0, 1\), got 0.0',
    ),
    (
      lambda: data.SpanCorruption(mean_noise_span_length=0.5),
      'mean_noise_span_length` must be .*got 0.5',
    ),
    (lambda: cases.make_task('a', 'json'), "format` must be one of .*got 'json'.*mean 'jsonl'"),
    (lambda: cases.make_task({}), 'splits` must be a mapping .*got {}'),
    (lambda: cases.make_task('a', keys={}), 'at least one'),
    (lambda: cases.make_task('a', add_eos={'inputs': True}), "add_eos is for .'inputs'."),
    (
      lambda: cases.make_task('a', vocabulary=data.PassThroughVocabulary(9)),
      'add_eos` must be False for .*no end-of-',
    ),
    (
      lambda: cases.make_task('a', vocabulary={'inputs': cases.VOCABULARY}),
      "vocabularies are for .'inputs'.",
    ),
    (lambda: cases.make_cfg('x', num_workers=-1).check(), 'num_workers` must be .*got -1'),
    (
      lambda: cases.make_cfg('x', source='builtin', num_workers=2).check(),
      "works with source = 'grain' only",
    ),
    (lambda: cases.make_cfg('x', source='grian').check(), "'grian'.*mean 'grain'"),
  ],
)
def test_rejected_configurations(make, message):
  with pytest.raises(ConfigError, match=message):
    make()
