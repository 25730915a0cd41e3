"""Tasks from files: features, preprocessors, invalid records."""

import dataclasses
import platform

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data import corpora
from t5x_lite.data.batches import span_corruption
from t5x_lite.errors import ConfigError, DataError
from tests.data.builtin_cases import assert_equal

if (platform.system(), platform.machine()) != ('Linux', 'x86_64'):
  pytest.importorskip('grain')  # Not available for all machines.

from tests.data import grain_cases as cases  # noqa: E402


def test_features_are_cut_and_sentinels_are_one_id(tmp_path):
  path = cases.write(
    tmp_path / 'a.jsonl', [{'inputs': 'a <extra_id_0> b <extra_id_1>', 'targets': 'x' * 50}]
  )
  batch = next(cases.open(cases.make_cfg(cases.make_task(path), batch_size=1)))
  np.testing.assert_array_equal(
    batch['encoder_input_tokens'][0, :9], [100, 35, 383, 35, 101, 35, 382, 1, 0]
  )
  np.testing.assert_array_equal(batch['decoder_target_tokens'][0], [123] * 11 + [1])


def test_language_models_may_have_targets_only(tmp_path):
  path = cases.write(tmp_path / 'a.jsonl', [{'text': 'abc'}])
  task = cases.make_task(path, keys={'targets': 'text'})
  cfg = cases.make_cfg(task, task_feature_lengths={'targets': 6}, batch_size=2)
  batch = next(
    data.open_train_iterator(cfg, cases.layout(batch_size=2), feature_converter='decoder_only')
  )
  np.testing.assert_array_equal(batch['decoder_target_tokens'], [[100, 101, 102, 1, 0, 0]] * 2)
  assert data.get_vocabulary(cfg) == (cases.VOCABULARY, cases.VOCABULARY)


# --- Preprocessors ----------------------------------------------------------------------------------------------------


def test_preprocessors_follow_each_other_and_may_be_random(tmp_path):
  path = cases.write(tmp_path / 'a.jsonl', [{'q': 'one'}, {'q': 'two'}])

  def shout(record, context):
    assert context.lengths == cases.LENGTHS and set(context.vocabularies) == {'inputs', 'targets'}
    return {'inputs': record['q'].upper()}

  def draw(record, context):
    return {**record, 'targets': str(int(context.seed[0] % np.uint64(10**9)))}

  cfg = cases.make_cfg(cases.make_task(path, preprocessors=[shout, draw, draw]), batch_size=2)
  epochs = cases.take(cases.open(cfg), 3)
  assert [cases.VOCABULARY.decode(row) for row in epochs[0]['encoder_input_tokens']] == [
    'ONE',
    'TWO',
  ]
  drawn = [
    cases.VOCABULARY.decode(row) for batch in epochs for row in batch['decoder_target_tokens']
  ]
  assert len(set(drawn)) == 6
  again = cases.open(cfg)
  again.set_state(cases.open(dataclasses.replace(cfg)).get_state())
  for batch in epochs:
    assert_equal(next(again), batch)
  shouted = cases.make_task(path, preprocessors=[shout, draw], metric_fns=[data.exact_match])
  (task,) = data.open_eval_tasks(cases.make_cfg(shouted, batch_size=2), cases.layout(batch_size=2))
  # The text belongs to the same random draw as the ids.
  assert [cases.VOCABULARY.decode(example['targets']) for example in task.examples] == [
    example['targets_pretokenized'] for example in task.examples
  ]


def test_span_corruption_of_files(tmp_path):
  texts = [
    ' '.join(corpora.python_docs('validation'))[:3000],
    'a text that is shorter than a segment',
    'ab',
  ]
  path = cases.write(tmp_path / 'a.jsonl', [{'text': text} for text in texts])
  lengths = {'inputs': 64, 'targets': 32}
  task = cases.make_task(path, preprocessors=[data.SpanCorruption()])
  rows = [
    (inputs[inputs > 1], targets[targets > 1])
    for batch in cases.take(
      cases.open(cases.make_cfg(task, batch_size=3, task_feature_lengths=lengths)), 20
    )
    for inputs, targets in zip(
      batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True
    )
  ]
  segment_length = span_corruption.check_lengths(lengths, 0.15, 3.0)
  places = set()
  for number, (inputs, targets) in enumerate(rows):
    # Restore the spans, which are between the sentinels of the targets.
    restored = []
    for i in inputs:
      if i < 260:
        restored.append(i)
      else:
        start = int(np.flatnonzero(targets == i)[0]) + 1
        following = np.flatnonzero(targets[start:] >= 260)
        restored.extend(targets[start : start + following[0] if len(following) else None])
    text = cases.VOCABULARY.decode(restored)
    if number % 3:
      assert text == texts[number % 3]
    else:
      assert len(restored) == segment_length and text in texts[0]
      places.add(texts[0].index(text))
  assert len(places) > 15 and max(places) > 1500
  assert len({tuple(inputs) for inputs, _ in rows[1::3]}) > 2  # new noise, and the same text


# --- Bad files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'content, message',
  [
    ('', "'validation' of 'from_files' is empty"),
    ('\n\n', 'is empty'),
    (
      '{"inputs": "a", "targets": "b"}\n{"inputs": "a", "tar',
      r'a\.jsonl, line 2 must be one JSON object, .*is not JSON',
    ),
    (
      '{"inputs": "a", "targets": "b"}\n\n[1, 2]\n',
      r'a\.jsonl, line 3 .*\[1, 2\].*is not an object',
    ),
    (
      '{"inputs": "a", "targets": "b"}\n{"inputs": "a" "targets": "b"}\n',
      r'a\.jsonl, line 2 .*is not JSON',
    ),
    (
      '{"inputs": "a", "target": "b"}\n',
      r"line 1: the record has no 'targets'.*mean 'target'.*the task's keys",
    ),
    (
      '{"inputs": "a", "targets": null}\n',
      "line 1: 'targets' must be a text or .*, got None of type NoneType",
    ),
    (
      '{"inputs": "a", "targets": [1.5]}\n',
      r"line 1: 'targets' must be a text or .*, got \[1.5\] of type list",
    ),
    (
      '{"inputs": "a", "targets": [3, 384]}\n',
      "line 1: 'targets' must be .* ids from 0 to 383, .* got 384",
    ),
    ('{"inputs": "a", "targets": [-1]}\n', 'from 0 to 383, .* got -1'),
  ],
)
def test_bad_files_are_rejected_when_opened(tmp_path, content, message):
  (tmp_path / 'a.jsonl').write_text(content)
  with pytest.raises(DataError, match=message):
    cases.open(cases.make_cfg(cases.make_task(str(tmp_path / '*.jsonl')), batch_size=2))


def test_missing_files_name_the_pattern(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(
    DataError, match=r"'validation' of the task 'from_files': no file matches 'no-\*\.jsonl' in '/"
  ):
    cases.open(cases.make_cfg(cases.make_task('no-*.jsonl')))
  with pytest.raises(
    DataError, match=f'{tmp_path} must be a file of the format jsonl, got a folder'
  ):
    cases.open(cases.make_cfg(cases.make_task(str(tmp_path))))
  path = cases.write(tmp_path / 'a.jsonl', [{'inputs': 'a', 'targets': 'b'}])
  with pytest.raises(DataError, match='two patterns match'):
    cases.open(cases.make_cfg(cases.make_task([path, f'{tmp_path}/*.jsonl'])))
  with pytest.raises(DataError, match="no split 'validatoin'.*mean 'validation'"):
    cases.open(cases.make_cfg(cases.make_task(path), split='validatoin'))


@pytest.mark.parametrize('source', ['grain', 'builtin'])
def test_a_record_that_breaks_on_the_way_is_named(tmp_path, source):
  lines = ['{"inputs": "a", "targets": "b"}'] * 30
  lines[17] = '{"inputs": "a", "targets": b}'
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
  iterator = cases.open(
    cases.make_cfg(cases.make_task(str(tmp_path / 'a.jsonl')), batch_size=8, source=source)
  )
  cases.take(iterator, 2)
  with pytest.raises(DataError, match=r'a\.jsonl, line 18 .*which is not JSON'):
    next(iterator)

  def fail(record, context):
    return {**record, 'inputs': record['text']}

  with pytest.raises(
    DataError, match=r"line 1: the preprocessor fail of .*'from_files' failed: KeyError: 'text'"
  ):
    cases.open(cases.make_cfg(cases.make_task(str(tmp_path / 'a.jsonl'), preprocessors=[fail])))


def test_span_corruption_with_too_few_sentinels(tmp_path):
  """Short texts need few; the longest record is an error when the data is opened."""
  lengths = {'inputs': 4096, 'targets': 912}
  short = [{'text': 'abcdefghij ' * 20}] * 9
  path = cases.write(tmp_path / 'short.jsonl', short)
  task = cases.make_task(path, preprocessors=[data.SpanCorruption()])
  cases.take(cases.open(cases.make_cfg(task, batch_size=3, task_feature_lengths=lengths)), 3)
  path = cases.write(tmp_path / 'long.jsonl', [*short, {'text': 'abcdefghij ' * 1000}])
  cfg = cases.make_cfg(
    cases.make_task(path, preprocessors=[data.SpanCorruption()]),
    batch_size=3,
    task_feature_lengths=lengths,
  )
  with pytest.raises(ConfigError, match=r'for each of its 227 spans, got ByteVocabulary\(125\)'):
    cases.open(cfg)


@pytest.mark.parametrize(
  'vocabulary, options',
  [(data.ByteVocabulary(0), {'first_sentinel': 258}), (data.PassThroughVocabulary(259, 1), {})],
)
def test_span_corruption_with_given_sentinels(tmp_path, vocabulary, options):
  """The published weights of ByT5 have the last bytes as sentinels."""
  ids = [byte + 3 for byte in b'abcdefghij ' * 9]
  preprocessor = data.SpanCorruption(**options)
  path = cases.write(tmp_path / 'a.jsonl', [{'text': ids}])
  task = cases.make_task(path, preprocessors=[preprocessor], vocabulary=vocabulary)
  (example,) = task.table('validation', {'inputs': 99, 'targets': 99}).examples(0, np.arange(1))
  assert [i for i in example['inputs'] if i > 200] == [258, 257, 256, 255, 254]
  path = cases.write(tmp_path / 'b.jsonl', [{'text': [*ids, 257]}])
  task = cases.make_task(path, preprocessors=[preprocessor], vocabulary=vocabulary)
  with pytest.raises(DataError, match='must not contain the sentinels 254 to 258 .*, got 257'):
    task.table('validation', {'inputs': 99, 'targets': 99}).examples(0, np.arange(1))
