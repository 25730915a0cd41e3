"""Tasks from files, and the source 'grain': the batches of the builtin source, whatever the number of readers."""

import dataclasses
import json
import pathlib
import platform
import runpy
import sys

import jax
import msgpack
import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data import corpora, records, span_corruption
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.partitioning import DataLayout, PjitPartitioner
from tests.core import toy_run

if (platform.system(), platform.machine()) != ('Linux', 'x86_64'):
  pytest.importorskip('grain')  # The lock has it; for some other machines there is none.

from t5x_lite.data import grain_records  # noqa: E402

_LENGTHS = {'inputs': 64, 'targets': 12}
_VOCABULARY = data.ByteVocabulary(extra_ids=125)
_FORMATS = ('jsonl', 'array_record')


def _layout(shard=0, num_shards=1, batch_size=64):
  return DataLayout(batch_size=batch_size, shard_id=shard, num_shards=num_shards, is_first_host_in_replica_set=True)


def _cfg(task, **kwargs):
  defaults = dict(task_feature_lengths=_LENGTHS, split='validation', batch_size=64, shuffle=False, seed=3,
                  source='grain')
  return data.DatasetConfig(task, **{**defaults, **kwargs})


def _open(cfg, shard=0, num_shards=1):
  return data.open_train_iterator(cfg, _layout(shard, num_shards, cfg.batch_size))


def _take(iterator, num):
  return [{name: np.asarray(array) for name, array in next(iterator).items()} for _ in range(num)]


def _assert_equal(first, second):
  assert set(first) == set(second)
  for name in first:
    assert first[name].dtype == second[name].dtype
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def _write(path, examples, format='jsonl'):
  if format == 'jsonl':
    path.write_text(''.join(json.dumps(example) + '\n' for example in examples))
  else:
    grain_records.write_array_records(str(path), examples)
  return str(path)


def _task(files, format='jsonl', name='from_files', **kwargs):
  return data.file_task(name=name, splits=files if isinstance(files, dict) else {'validation': files}, format=format,
                        vocabulary=kwargs.pop('vocabulary', _VOCABULARY), **kwargs)


@pytest.fixture(scope='module')
def cloze(tmp_path_factory):
  """The embedded task's validation split as a task of the same name from three files, by format."""
  folder = tmp_path_factory.mktemp('cloze')
  examples = [{'question': line, 'answer': keyword, 'number': i}
              for i, (line, keyword) in enumerate(corpora.python_keyword_cloze('validation'))]
  tasks = {}
  for format in _FORMATS:
    for part, (start, end) in enumerate([(0, 300), (300, 301), (301, 1000)]):
      _write(folder / f'part-{part}.{format}', examples[start:end], format)
    tasks[format] = _task(str(folder / f'part-*.{format}'), format, 'python_keyword_cloze',
                          keys={'inputs': 'question', 'targets': 'answer'}, metric_fns=[data.exact_match])
  return tasks


# --- The builtin source gives the same --------------------------------------------------------------------------------


@pytest.mark.parametrize('format', _FORMATS)
@pytest.mark.parametrize('shuffle', [False, True])
@pytest.mark.parametrize('pack', [False, True])
def test_batches_are_those_of_the_builtin_source(cloze, format, shuffle, pack):
  # 1,000 examples: 18 batches of 64 go into the second epoch, which has an order of its own.
  cfg = _cfg(cloze[format], shuffle=shuffle, pack=pack, task_feature_lengths={'inputs': 70, 'targets': 24})
  ours = _open(dataclasses.replace(cfg, mixture_or_task_name='python_keyword_cloze', source='builtin'))
  theirs = _open(cfg)
  assert theirs.element_spec == ours.element_spec
  for _ in range(18):
    _assert_equal(next(theirs), next(ours))
  theirs.close()


def test_mixtures_and_tasks_in_memory(cloze):
  cfg = _cfg(data.BuiltinMixture(name='mix', rates={'python_keyword_cloze': 2, 'python_docs_span_corruption': 1}),
             shuffle=True, pack=True, task_feature_lengths={'inputs': 64, 'targets': 32})
  ours, theirs = _open(dataclasses.replace(cfg, source='builtin')), _open(cfg)
  for _ in range(6):
    _assert_equal(next(theirs), next(ours))


def test_json_lines_without_grain(cloze):
  _assert_equal(next(_open(_cfg(cloze['jsonl'], source='builtin'))), next(_open(_cfg(cloze['jsonl']))))


@pytest.mark.full  # each worker process imports everything
def test_worker_processes_give_the_same(cloze):
  cfg = _cfg(cloze['array_record'], shuffle=True, pack=True)
  with_threads, with_workers = _open(cfg), _open(dataclasses.replace(cfg, num_workers=2))
  expected = _take(with_threads, 6)
  for batch in expected[:4]:
    _assert_equal(next(with_workers), batch)
  with_workers.set_state(with_workers.get_state(expected[3:4]))
  _assert_equal(next(with_workers), expected[3])
  with_workers.close()


@pytest.mark.parametrize('pack', [False, True])
def test_evaluation_is_that_of_the_builtin_source(cloze, pack):
  cfg = _cfg(cloze['array_record'], pack=pack, batch_size=48)
  layout = _layout(1, 2, 48)
  builtin = dataclasses.replace(cfg, mixture_or_task_name='python_keyword_cloze', source='builtin')
  (theirs,), (ours,) = (data.open_eval_iterators(c, layout, 7).values() for c in (cfg, builtin))
  assert theirs.num_examples == ours.num_examples and theirs.num_batches == 7
  for first, second in zip(theirs, ours, strict=True):
    _assert_equal(first, second)
  if not pack:
    (theirs,), (ours,) = (data.open_eval_tasks(c, layout) for c in (cfg, builtin))
    assert theirs.targets() == ours.targets() and len(theirs.targets()) == 1000
    assert theirs.examples[7]['inputs_pretokenized'] == ours.examples[7]['inputs_pretokenized']
    # Postprocessors see the rest of the record.
    assert theirs.examples[7]['number'] == 7 and set(theirs.examples[7]) == {
        'inputs', 'targets', 'inputs_pretokenized', 'targets_pretokenized', 'question', 'answer', 'number'}
    for (indices, batch), (own_indices, own_batch) in zip(theirs.batches, ours.batches, strict=True):
      np.testing.assert_array_equal(indices, own_indices)
      _assert_equal(batch, own_batch)


def _letters(folder, format):
  """The task of `toy_run` as files of ids."""
  for split in ('train', 'validation'):
    table = toy_run.TASK.table(split, {})
    _write(folder / f'{split}.{format}', [
        {**{name: ids.tolist() for name, ids in example.items()}, **table.texts(number)}
        for number, example in enumerate(table.examples(0, np.arange(len(table))))], format)
  return data.file_task(name='letters', splits={s: str(folder / f'{s}.{format}') for s in ('train', 'validation')},
                        format=format, vocabulary=toy_run.TASK.vocabularies['inputs'],
                        add_eos={'inputs': False, 'targets': True}, metric_fns=[data.exact_match])


def test_a_model_trains_to_the_same_loss(tmp_path):
  """Losses, metrics and predictions, bitwise; and so does a run that goes on from the middle of an epoch."""
  builtin, straight, resumed = tmp_path / 'builtin', tmp_path / 'straight', tmp_path / 'resumed'
  task = _letters(tmp_path, 'array_record')
  datasets = {f'{use}_dataset_cfg': dataclasses.replace(
      toy_run.dataset('train' if use == 'train' else 'validation'), mixture_or_task_name=task, source='grain')
              for use in ('train', 'train_eval', 'infer_eval')}
  toy_run.train(builtin)
  toy_run.train(straight, **datasets)
  assert toy_run.lines(straight) == toy_run.lines(builtin)
  for ours, theirs in zip(*(sorted(run.rglob('predictions-*.jsonl')) for run in (straight, builtin)), strict=True):
    assert ours.read_bytes() == theirs.read_bytes()
  toy_run.train(resumed, 12, **datasets)  # 96 examples of 60
  toy_run.train(resumed, 20, **datasets)
  (state, position), (resumed_state, resumed_position) = (toy_run.saved(run, 20) for run in (straight, resumed))
  for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(resumed_state), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert position == resumed_position and position


# --- Position ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('pack', [False, True])
def test_batches_do_not_depend_on_the_number_of_processes(cloze, pack):
  cfg = _cfg(cloze['jsonl'], shuffle=True, pack=pack)
  whole = _open(cfg)
  shards = {num: [_open(cfg, i, num) for i in range(num)] for num in (2, 4)}
  for k in range(4):
    if k == 2:  # The two go on where one of the four was, and the other way round.
      states = {num: iterators[1].get_state() for num, iterators in shards.items()}
      for num, other in ((2, 4), (4, 2)):
        for iterator in shards[num]:
          iterator.set_state(states[other])
    batch = next(whole)
    for iterators in shards.values():
      parts = [next(iterator) for iterator in iterators]
      _assert_equal(batch, {name: np.concatenate([part[name] for part in parts]) for name in batch})


@pytest.mark.parametrize('pack', [False, True])
def test_resumes_exactly(cloze, pack):
  cfg = _cfg(cloze['array_record'], shuffle=True, pack=pack)
  partitioner = PjitPartitioner(num_partitions=1)
  with data.GlobalBatches(_open(cfg), partitioner, prefetch=3) as batches:
    at_zero = batches.get_state()
    before = _take(batches, 5)
    state = batches.get_state()
    after = _take(batches, 3)
    batches.set_state(at_zero)
    _assert_equal(_take(batches, 1)[0], before[0])
  assert sum(map(len, state.values())) < 1000
  with data.GlobalBatches(_open(cfg), partitioner) as resumed:
    resumed.set_state(state)
    for expected in after:
      _assert_equal(_take(resumed, 1)[0], expected)
  other_size = _open(dataclasses.replace(cfg, batch_size=16))
  other_size.set_state(state)
  for part in range(4):
    _assert_equal(next(other_size), {name: rows[16 * part:16 * part + 16] for name, rows in after[0].items()})


def test_other_data_is_refused_when_resuming(tmp_path):
  files = [_write(tmp_path / f'{i}.jsonl', [{'inputs': 'a', 'targets': str(i)}] * 9) for i in range(2)]
  cfg = _cfg(_task(files[0]), batch_size=4)
  state = _open(cfg).get_state()
  _open(cfg).set_state(state)
  changed = [_task(files[1]), _task(files[0], vocabulary=data.ByteVocabulary(100)),
             _task(files[0], preprocessors=[lambda record, context: {**record, 'inputs': 'b'}])]
  # The last ids of another vocabulary are others, even where no text shows it.
  for task in (changed[0], changed[2]):
    with pytest.raises(DataError, match='content: saved .*restore_dataset = False'):
      _open(dataclasses.replace(cfg, mixture_or_task_name=task)).set_state(state)
  with pytest.raises(DataError, match="source: saved 'grain', now 'builtin'"):
    _open(dataclasses.replace(cfg, source='builtin')).set_state(state)


def test_goes_on_after_an_error(tmp_path):
  path = tmp_path / 'a.jsonl'
  _write(path, [{'inputs': 'a', 'targets': str(i)} for i in range(9)])
  whole = path.read_bytes()
  iterator = _open(_cfg(_task(str(path)), batch_size=4))
  path.write_bytes(whole[:20])
  with pytest.raises(DataError, match='shorter since it was opened'):
    next(iterator)
  path.write_bytes(whole)
  _assert_equal(next(iterator), next(_open(_cfg(_task(str(path)), batch_size=4))))


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
  monkeypatch.setattr(records, '_CHUNK', 7)
  path = _write(tmp_path / 'a.jsonl', [{'number': i} for i in range(30)])
  lines = records.JsonLines([path])
  assert [json.loads(line)['number'] for line in lines.read(range(30))] == list(range(30))
  assert lines.where(29) == f'{path}, line 30'


def test_array_records_of_json_and_msgpack(tmp_path):
  path = tmp_path / 'new' / 'a.array_record'
  written = [{'inputs': 'é', 'targets': [5, 6]}, msgpack.packb({'inputs': [7, 8, 1], 'targets': 'b'}),
             msgpack.packb({'inputs': b'c', 'targets': ''}), '{"inputs": "d", "targets": "d"}'.encode()]
  assert grain_records.write_array_records(str(path), written) == 4
  assert [p.name for p in path.parent.iterdir()] == ['a.array_record']
  batch = next(_open(_cfg(_task(str(path), 'array_record'), batch_size=4)))
  shown = [(_VOCABULARY.decode(i), [int(x) for x in t if x]) for i, t in
           zip(batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True)]
  assert shown == [('é', [5, 6, 1]), (_VOCABULARY.decode([7, 8]), [101, 1]), ('c', [1]), ('d', [103, 1])]
  # An end that is there already is not put twice.
  np.testing.assert_array_equal(batch['encoder_input_tokens'][1, :4], [7, 8, 1, 0])
  with pytest.raises(DataError, match='exists, and is left as it is'):
    grain_records.write_array_records(str(path), [])
  (tmp_path / 'file').write_text('')
  with pytest.raises(DataError, match='Cannot write'):
    grain_records.write_array_records(str(tmp_path / 'file' / 'a'), [])


def test_features_are_cut_and_sentinels_are_one_id(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [{'inputs': 'a <extra_id_0> b <extra_id_1>', 'targets': 'x' * 50}])
  batch = next(_open(_cfg(_task(path), batch_size=1)))
  np.testing.assert_array_equal(batch['encoder_input_tokens'][0, :9], [100, 35, 383, 35, 101, 35, 382, 1, 0])
  np.testing.assert_array_equal(batch['decoder_target_tokens'][0], [123] * 11 + [1])


def test_language_models_may_have_targets_only(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [{'text': 'abc'}])
  task = _task(path, keys={'targets': 'text'})
  cfg = _cfg(task, task_feature_lengths={'targets': 6}, batch_size=2)
  batch = next(data.open_train_iterator(cfg, _layout(batch_size=2), feature_converter='decoder_only'))
  np.testing.assert_array_equal(batch['decoder_target_tokens'], [[100, 101, 102, 1, 0, 0]] * 2)
  assert data.get_vocabulary(cfg) == (_VOCABULARY, _VOCABULARY)


# --- Preprocessors ----------------------------------------------------------------------------------------------------


def test_preprocessors_follow_each_other_and_may_be_random(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [{'q': 'one'}, {'q': 'two'}])

  def shout(record, context):
    assert context.lengths == _LENGTHS and set(context.vocabularies) == {'inputs', 'targets'}
    return {'inputs': record['q'].upper()}

  def draw(record, context):
    return {**record, 'targets': str(int(context.seed[0] % np.uint64(10**9)))}

  cfg = _cfg(_task(path, preprocessors=[shout, draw, draw]), batch_size=2)
  epochs = _take(_open(cfg), 3)
  assert [_VOCABULARY.decode(row) for row in epochs[0]['encoder_input_tokens']] == ['ONE', 'TWO']
  drawn = [_VOCABULARY.decode(row) for batch in epochs for row in batch['decoder_target_tokens']]
  assert len(set(drawn)) == 6
  again = _open(cfg)
  again.set_state(_open(dataclasses.replace(cfg)).get_state())
  for batch in epochs:
    _assert_equal(next(again), batch)
  (task,) = data.open_eval_tasks(_cfg(_task(path, preprocessors=[shout, draw], metric_fns=[data.exact_match]),
                                      batch_size=2), _layout(batch_size=2))
  # The text beside the ids is of the same draw.
  assert [_VOCABULARY.decode(example['targets']) for example in task.examples] == [
      example['targets_pretokenized'] for example in task.examples]


def test_span_corruption_of_files(tmp_path):
  texts = [' '.join(corpora.python_docs('validation'))[:3000], 'a text that is shorter than a segment', 'ab']
  path = _write(tmp_path / 'a.jsonl', [{'text': text} for text in texts])
  lengths = {'inputs': 64, 'targets': 32}
  task = _task(path, preprocessors=[data.SpanCorruption()])
  rows = [(inputs[inputs > 1], targets[targets > 1])
          for batch in _take(_open(_cfg(task, batch_size=3, task_feature_lengths=lengths)), 20)
          for inputs, targets in zip(batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True)]
  segment_length = span_corruption.check_lengths(lengths, 0.15, 3.0)
  places = set()
  for number, (inputs, targets) in enumerate(rows):
    # Put the spans back: what stands between the sentinels of the targets.
    restored = []
    for i in inputs:
      if i < 260:
        restored.append(i)
      else:
        start = int(np.flatnonzero(targets == i)[0]) + 1
        following = np.flatnonzero(targets[start:] >= 260)
        restored.extend(targets[start:start + following[0] if len(following) else None])
    text = _VOCABULARY.decode(restored)
    if number % 3:
      assert text == texts[number % 3]
    else:
      assert len(restored) == segment_length and text in texts[0]
      places.add(texts[0].index(text))
  assert len(places) > 15 and max(places) > 1500
  assert len({tuple(inputs) for inputs, _ in rows[1::3]}) > 2  # new noise, and the same text


@pytest.mark.parametrize('make, message', [
    (lambda: data.SpanCorruption(noise_density=0.0), 'noise_density is 0.0'),
    (lambda: data.SpanCorruption(mean_noise_span_length=0.5), 'mean_noise_span_length is 0.5'),
    (lambda: _task('a', 'json'), "format 'json'.*mean 'jsonl'"),
    (lambda: _task({}), 'has no splits'),
    (lambda: _task('a', keys={}), 'at least one'),
    (lambda: _task('a', add_eos={'inputs': True}), "add_eos for .'inputs'.: expected the same"),
    (lambda: _task('a', vocabulary=data.PassThroughVocabulary(9)), 'has no end-of-sequence id: set add_eos = False'),
    (lambda: _task('a', vocabulary={'inputs': _VOCABULARY}), 'same features'),
    (lambda: _cfg('x', num_workers=-1), 'num_workers is -1'),
    (lambda: _cfg('x', source='builtin', num_workers=2), "works with source = 'grain' only"),
    (lambda: _cfg('x', source='grian'), "'grian'.*mean 'grain'")])
def test_refused_configurations(make, message):
  with pytest.raises(ConfigError, match=message):
    make()


# --- Bad files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('content, message', [
    ('', "'validation' of the task 'from_files' is empty"),
    ('\n\n', 'is empty'),
    ('{"inputs": "a", "targets": "b"}\n{"inputs": "a", "tar', r'a\.jsonl, line 2: not JSON .*Expected one JSON object'),
    ('{"inputs": "a", "targets": "b"}\n\n[1, 2]\n', r'a\.jsonl, line 3: .* is not a JSON object'),
    ('{"inputs": "a", "targets": "b"}\n{"inputs": "a" "targets": "b"}\n', r'a\.jsonl, line 2: not JSON'),
    ('{"inputs": "a", "target": "b"}\n', r"line 1: there is no 'targets'.*mean 'target'.*the task's keys"),
    ('{"inputs": "a", "targets": null}\n', "line 1: 'targets' must be a text or a list of ids, got None of type NoneType"),
    ('{"inputs": "a", "targets": [1.5]}\n', r"line 1: 'targets' must be a text or a list of ids, got \[1.5\] of type list"),
    ('{"inputs": "a", "targets": [3, 384]}\n', "line 1: 'targets' must have ids from 0 to 383, .* got 384"),
    ('{"inputs": "a", "targets": [-1]}\n', 'from 0 to 383, .* got -1')])
def test_bad_files_are_refused_when_opened(tmp_path, content, message):
  (tmp_path / 'a.jsonl').write_text(content)
  with pytest.raises(DataError, match=message):
    _open(_cfg(_task(str(tmp_path / '*.jsonl')), batch_size=2))


def test_missing_files_name_the_pattern(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(DataError, match=r"'validation' of the task 'from_files': no file matches 'no-\*\.jsonl' in '/"):
    _open(_cfg(_task('no-*.jsonl')))
  with pytest.raises(DataError, match=f"Cannot read '{tmp_path}'"):
    _open(_cfg(_task(str(tmp_path))))
  path = _write(tmp_path / 'a.jsonl', [{'inputs': 'a', 'targets': 'b'}])
  with pytest.raises(DataError, match='matched by two patterns'):
    _open(_cfg(_task([path, f'{tmp_path}/*.jsonl'])))
  with pytest.raises(DataError, match="no split 'validatoin'.*mean 'validation'"):
    _open(_cfg(_task(path), split='validatoin'))


@pytest.mark.parametrize('source', ['grain', 'builtin'])
def test_a_record_that_breaks_on_the_way_is_named(tmp_path, source):
  lines = ['{"inputs": "a", "targets": "b"}'] * 30
  lines[17] = '{"inputs": "a", "targets": b}'
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
  iterator = _open(_cfg(_task(str(tmp_path / 'a.jsonl')), batch_size=8, source=source))
  _take(iterator, 2)
  with pytest.raises(DataError, match=r'a\.jsonl, line 18: not JSON'):
    next(iterator)

  def fail(record, context):
    return {**record, 'inputs': record['text']}

  with pytest.raises(DataError, match=r"line 1: the preprocessor fail of .*'from_files' failed: KeyError: 'text'"):
    _open(_cfg(_task(str(tmp_path / 'a.jsonl'), preprocessors=[fail])))


def test_bad_array_records(tmp_path):
  path = tmp_path / 'a.array_record'
  path.write_text('{"inputs": "a", "targets": "b"}\n')
  with pytest.raises(DataError, match="no whole array record file: .*format = 'jsonl'"):
    _open(_cfg(_task(str(path), 'array_record')))
  for number, content in enumerate([b'hello', b'\x93\x01\x02\x03', b'\xc1']):
    broken = str(tmp_path / f'{number}.array_record')
    grain_records.write_array_records(broken, [{'inputs': 'a', 'targets': 'b'}] * 4 + [content])
    iterator = _open(_cfg(_task(broken, 'array_record'), batch_size=5))
    with pytest.raises(DataError, match=f'{number}.array_record, record 4: .*msgpack'):
      next(iterator)
  path.unlink()
  rng = np.random.default_rng(0)
  grain_records.write_array_records(str(path), [{'inputs': rng.bytes(30).hex(), 'targets': 'b'} for _ in range(2000)])
  content = bytearray(path.read_bytes())
  content[len(content) // 4] ^= 1
  path.write_bytes(content)
  iterator = _open(_cfg(_task(str(path), 'array_record'), batch_size=64))
  with pytest.raises(DataError, match=r'a.array_record, record \d+: cannot be read: .*hash mismatch'):
    _take(iterator, 2000 // 64 + 1)


def test_without_grain_the_message_names_the_extra(cloze, monkeypatch):
  for name in [m for m in sys.modules if m.startswith('t5x_lite.data.grain_')]:
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(data, name.rpartition('.')[2], raising=False)
  monkeypatch.setitem(sys.modules, 'grain', None)
  with pytest.raises(ConfigError, match=r"pip install 'grain>=.*--gin.DATA_SOURCE=builtin"):
    _open(_cfg(cloze['jsonl']))
  with pytest.raises(ConfigError, match=r"pip install 'grain>="):
    _open(_cfg(cloze['array_record'], source='builtin'))
  assert next(_open(_cfg(cloze['jsonl'], source='builtin')))


def test_script_converts_json_lines(tmp_path, monkeypatch, capsys):
  examples = [{'inputs': f'é {i}', 'targets': str(i)} for i in range(20)]
  path = _write(tmp_path / 'a.jsonl', examples)
  converted = str(tmp_path / 'a.array_record')
  script = str(pathlib.Path(__file__).parents[2] / 'scripts' / 'jsonl_to_array_record.py')
  monkeypatch.setattr(sys, 'argv', [script, path, converted])
  with pytest.raises(SystemExit) as stop:
    runpy.run_path(script, run_name='__main__')
  assert not stop.value.code and '20 records' in capsys.readouterr().out
  found = grain_records.ArrayRecords([converted])
  assert [json.loads(content) for content in found.read(range(20))] == examples
  with pytest.raises(SystemExit) as stop:
    runpy.run_path(script, run_name='__main__')
  assert stop.value.code == 2 and 'exists' in capsys.readouterr().err


