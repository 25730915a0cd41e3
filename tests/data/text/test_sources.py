"""Custom texts as examples: lines, JSON lines, standard input; unusable lines are reported and skipped."""

import io
import json
import os
import sys
import threading

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite import errors
from t5x_lite.data.text import sources as text_sources
from t5x_lite.storage import files
from tests.apps.infer import toy_infer

_BYTES = data.ByteVocabulary(extra_ids=125)


def _open(
  path,
  *,
  converter='encoder_decoder',
  needs_targets=False,
  vocabulary=_BYTES,
  lengths=None,
  **kwargs,
):
  cfg = data.TextFileConfig(
    path=str(path),
    task_feature_lengths=lengths or {'inputs': 12, 'targets': 8},
    batch_size=4,
    **kwargs,
  )
  return text_sources.TextSource(
    cfg, converter, vocabulary, vocabulary, needs_targets=needs_targets
  )


def _file(tmp_path, content, name='in.txt'):
  path = tmp_path / name
  path.write_bytes(content if isinstance(content, bytes) else content.encode('utf-8'))
  return path


def _inputs(source):
  return [source.prepare(record).fields['inputs_pretokenized'] for record in source.records()]


def test_each_line_of_a_text_file_is_an_input(tmp_path):
  source = _open(_file(tmp_path, b'\xef\xbb\xbfone\r\n\ntwo\xc2\x85and\x0ba half\nlast'))
  assert source.num_examples == 4 and source.num_skipped == 0 and source.name == 'in'
  assert _inputs(source) == ['one', '', 'two\x85and\x0ba half', 'last']
  example = source.prepare(next(source.records()))
  assert (
    example.row['inputs'].tolist() == [*_BYTES.encode('one'), 1]
    and example.row['targets'].size == 0
  )
  batch = source.convert([example], 2)
  assert batch['encoder_input_tokens'][0, :5].tolist() == [*_BYTES.encode('one'), 1, 0]
  assert (
    batch['decoder_input_tokens'].shape == (2, 8) and not batch['encoder_input_tokens'][1].any()
  )
  assert {name: array.shape for name, array in batch.items()} == {
    name: leaf.shape for name, leaf in source.element_spec(2).items()
  }


def test_reading_may_start_anywhere(tmp_path):
  source = _open(_file(tmp_path, 'a\nb\nc\n'))
  assert [source.prepare(r).fields['inputs_pretokenized'] for r in source.records(1)] == ['b', 'c']


def test_json_lines(tmp_path):
  rows = [{'q': 'héllo', 'a': 'x', 'id': 7, 'inputs': 'not this'}, {'q': '', 'a': None}]
  path = _file(tmp_path, '\n'.join(['', *(json.dumps(row) for row in rows), '  ', '']), 'in.jsonl')
  source = _open(path, inputs_key='q', targets_key='a')
  first, second = [source.prepare(record) for record in source.records()]
  assert (
    first.fields['inputs_pretokenized'] == 'héllo' and first.fields['targets_pretokenized'] == 'x'
  )
  assert first.fields['id'] == 7
  assert first.row['targets'].tolist() == [*_BYTES.encode('x'), 1]
  assert second.fields['inputs_pretokenized'] == '' and second.row['targets'].size == 0


def test_options_of_tokenization(tmp_path):
  path = _file(
    tmp_path, '{"inputs": "a <extra_id_0> b<extra_id_124>", "targets": "abcdefghij"}', 'in.jsonl'
  )
  (example,) = [
    s.prepare(r) for s in [_open(path, append_eos_to_inputs=False)] for r in s.records()
  ]
  assert example.row['inputs'].tolist() == [100, 35, 383, 35, 101, 259]
  assert example.row['targets'].tolist() == [*_BYTES.encode('abcdefg'), 1] and example.is_cut
  (example,) = [
    s.prepare(r) for s in [_open(path, append_eos_to_targets=False)] for r in s.records()
  ]
  assert example.row['targets'].tolist() == _BYTES.encode('abcdefgh')
  source = _open(_file(tmp_path, 'exactly 11\nmore than 12'))
  assert [source.prepare(record).is_cut for record in source.records()] == [False, True]


@pytest.mark.parametrize(
  'value, label',
  [
    ('5', 5),
    ('[1, "x"]', [1, 'x']),
    ('{"a": {"b": null}}', {'a': {'b': None}}),
    ('true', True),
    ('null', None),
    ('-Infinity', -np.inf),
    ('"\\ud800"', '\ud800'),
  ],
)
def test_labels_that_are_not_texts_are_kept(tmp_path, value, label):
  line = f'{{"inputs": "a", "targets": {value}, "id": 1}}\n'
  source = _open(_file(tmp_path, line * 2, 'in.jsonl'))
  assert (source.num_examples, source.num_skipped) == (2, 0)
  for record in source.records():
    example = source.prepare(record)
    assert example.row['targets'].size == 0 and example.row['inputs'].tolist() == [100, 1]
    assert example.fields['targets_pretokenized'] == label and example.fields['id'] == 1
    assert example.fields['inputs_pretokenized'] == 'a' and example.fields['targets'].size == 0
  with pytest.raises(errors.DataError, match="'targets' (must be a text|holds half)"):
    _open(tmp_path / 'in.jsonl', needs_targets=True)


def test_columns_named_like_features_are_not_texts_of_other_keys(tmp_path):
  line = '{"q": "a", "inputs": ["x"], "targets": 5, "targets_pretokenized": "b"}'
  source = _open(_file(tmp_path, line, 'in.jsonl'), inputs_key='q', targets_key='label')
  (example,) = [source.prepare(record) for record in source.records()]
  assert example.row['inputs'].tolist() == [100, 1] and example.row['targets'].size == 0
  assert example.fields['targets_pretokenized'] == 'b'
  # The ids of a feature have its name in the results.
  assert example.fields['inputs'].tolist() == [100, 1] and example.fields['targets'].size == 0


def test_keys_of_the_task_come_before_the_usual_ones(tmp_path, caplog):
  rows = [
    {'words': 'a', 'digits': 1, 'inputs': 'not this'},
    {'inputs': 'b', 'targets': 'c'},
    {'words': None, 'inputs': 'd'},
    {'word': 'e'},
  ]
  path = _file(tmp_path, ''.join(json.dumps(row) + '\n' for row in rows), 'in.jsonl')
  task_keys = {'inputs': ('words',), 'targets': ('digits',)}
  source = _open(path, task_keys=task_keys)
  assert _inputs(source) == ['a', 'b'] and source.num_skipped == 2
  (warning,) = [each for each in caplog.messages if "lines have 'inputs' instead of" in each]
  assert "1 of 2 lines have 'inputs' instead of 'words'" in warning
  assert "set TextFileConfig.inputs_key='words'" in warning
  caplog.clear()
  assert _inputs(_open(path, task_keys=task_keys, inputs_key='words')) == ['a']
  assert not [each for each in caplog.messages if "lines have 'inputs'" in each]
  assert source.identity['keys'] == {
    'inputs': ['inputs', 'words'],
    'targets': ['digits', 'targets'],
  }
  # A run with other keys resumes results of lines with the usual ones.
  path = _file(tmp_path, json.dumps(rows[1]), 'in.jsonl')
  assert _open(path, task_keys=task_keys).identity == _open(path).identity
  # A reversed task: no key is that of both features.
  reversed_keys = {'inputs': ('targets',), 'targets': ('inputs',)}
  source = _open(path, task_keys=reversed_keys)
  (example,) = [source.prepare(record) for record in source.records()]
  names = ('inputs_pretokenized', 'targets_pretokenized')
  assert [example.fields[name] for name in names] == ['c', 'b']


@pytest.mark.parametrize(
  'line, problem',
  [
    (b'{"inputs": "a"', 'not JSON'),
    (b'\xff', 'not UTF-8 at byte 1'),
    (b'[1, 2]', 'the line must be a JSON object such as {"inputs": "a text"}, got a list'),
    (b'{"input": "a"}', "no 'inputs' (did you mean 'input'?)"),
    (b'{"x": 1, "y": 2}', "no 'inputs', only 'x', 'y'"),
    (b'{}', "no 'inputs', only nothing"),
    (b'{"inputs": 3}', "'inputs' must be a text, got a value of type int"),
    (b'{"inputs": "\\ud800"}', 'half of a surrogate pair'),
    (b'[' * 100_000, 'not JSON'),
    (b'{"inputs": %s}' % (b'1' * 5000), 'not JSON'),
    (b'{"inputs": null}', "'inputs' must be a text, got a value of type NoneType"),
    (b'{"inputs": {"inputs": "a"}}', "'inputs' must be a text, got a value of type dict"),
    (b'{"inputs": NaN}', "'inputs' must be a text, got a value of type float"),
    (b'\xef\xbb\xbf{"inputs": "a"}', 'not JSON'),
  ],
)
def test_a_broken_line_is_named_and_the_rest_is_done(tmp_path, caplog, line, problem):
  good = b'{"inputs": "fine"}\n'
  source = _open(_file(tmp_path, good + line + b'\n' + good, 'in.jsonl'))
  assert _inputs(source) == ['fine', 'fine'] and (source.num_examples, source.num_skipped) == (2, 1)
  assert 'in.jsonl, line 2 is skipped: ' in caplog.text and problem in caplog.text


def test_of_many_broken_lines_some_are_named(tmp_path, caplog):
  _open(_file(tmp_path, 'x\n' * 50 + '{"inputs": ""}', 'in.jsonl'))
  assert 'line 20 is' in caplog.text and 'line 21 is' not in caplog.text
  assert '30 more lines are skipped, the last is line 50.' in caplog.text


@pytest.mark.parametrize(
  'content, kwargs, fragments',
  [
    ('', {}, ['in.jsonl must have at least one usable line', 'empty']),
    ('\n\n', {}, ['in.jsonl must have at least one usable line', 'empty']),
    ('{"text": "a"}\n3\n', {}, ['all 2 lines are unusable', "Line 1: no 'inputs', only 'text'"]),
    ('{"inputs": "a"}\n', {'needs_targets': True}, ["no 'targets', only 'inputs'"]),
    (
      'a\n',
      {'file_format': 'text', 'needs_targets': True},
      ['text file', 'targets', "file_format='jsonl'"],
    ),
    (
      'a\n',
      {'file_format': 'text', 'vocabulary': data.PassThroughVocabulary(9)},
      ['vocabulary of texts', 'VOCABULARY'],
    ),
    ('a\n', {'lengths': {'inputs': 4}}, ['targets']),
    ('a\n', {'lengths': {'inputs': 4, 'targets': 2, 'target': 3}}, ["'target'"]),
    ('a\n', {'lengths': {'inputs': 4, 'targets': 0}}, ["'targets'", '0']),
    ('a\n', {'converter': 'encoder_decodr'}, ["mean 'encoder_decoder'"]),
    ('a\n', {'file_format': 'txt'}, ["mean 'text'"]),
    ('a\n', {'inputs_key': 'targets'}, ["different from inputs_key, got 'targets'"]),
    ('a\n', {'name': 'a/b'}, ["'a/b'"]),
  ],
)
def test_rejected(tmp_path, content, kwargs, fragments):
  path = _file(tmp_path, content, 'in.jsonl')
  with pytest.raises((errors.ConfigError, errors.DataError)) as caught:
    _open(path, **kwargs)
  for fragment in fragments:
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
  'name, fragment',
  [
    ('inn.txt', "Did you mean 'in.txt'?"),
    ('', 'Is a directory'),
    ('a\0b', 'null byte'),
  ],
)
def test_files_that_cannot_be_read(tmp_path, name, fragment):
  _file(tmp_path, 'a')
  with pytest.raises(errors.DataError, match='cannot be read') as caught:
    _open(f'{tmp_path}/{name}')
  assert fragment in str(caught.value)


def test_a_file_that_changes_while_it_is_read_is_rejected(tmp_path):
  path = _file(tmp_path, 'a\nb\n')
  source = _open(path)
  path.write_text('a\nc\n')
  with pytest.raises(errors.DataError, match='was changed while it was read'):
    list(source.records())


def test_identity_follows_the_content_not_the_name(tmp_path):
  one = _open(_file(tmp_path, 'a\nb\n'))
  assert _open(_file(tmp_path, 'a\nb\n', 'other.txt')).identity == one.identity
  for changed in (
    _open(_file(tmp_path, 'a\nc\n')),
    _open(_file(tmp_path, 'a\nb\n'), append_eos_to_inputs=False),
    _open(_file(tmp_path, 'a\nb\n'), lengths={'inputs': 13, 'targets': 8}),
  ):
    assert changed.identity != one.identity
  json.dumps(one.identity)


def test_json_lines_that_are_read_as_texts_are_named(tmp_path, caplog):
  path = _file(tmp_path, '{"inputs": "a", "targets": "b"}\n{"inputs": "c"}\n')
  assert len(_inputs(_open(path))) == 2
  assert 'line 1 is a JSON object. Pass --input_format=jsonl' in caplog.text
  caplog.clear()
  assert _inputs(_open(path, file_format='jsonl')) == ['a', 'c'] and not caplog.text
  _open(path, file_format='text')
  assert not caplog.text


def test_nul_is_not_part_of_a_text(tmp_path, caplog):
  good = b'fine\n' * 2000
  source = _open(_file(tmp_path, good + b'a\0b\n' + good))
  assert (source.num_examples, source.num_skipped) == (4000, 1)
  assert 'line 2001 is skipped: NUL at character 2' in caplog.text


def test_standard_input_is_read_again_and_again(monkeypatch):
  monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO('ä\nb'.encode()), encoding='utf-8'))
  source = _open('-')
  assert source.name == 'stdin' and _inputs(source) == _inputs(source) == ['ä', 'b']
  source.close()
  monkeypatch.setattr(sys, 'stdin', None)  # as after the shell's <&-
  with pytest.raises(errors.DataError, match='Standard input must be .*, got a closed stream'):
    _open('-')


def test_a_pipe_is_read_again_and_again(tmp_path):
  os.mkfifo(tmp_path / 'pipe')
  writer = threading.Thread(target=lambda: (tmp_path / 'pipe').write_text('a\nb\n'))
  writer.start()
  source = _open(tmp_path / 'pipe')
  writer.join()
  assert _inputs(source) == _inputs(source) == ['a', 'b']
  source.close()


@pytest.mark.parametrize(
  'converter, lengths, name',
  [
    ('decoder_only', {'targets': 8}, 'decoder_target_tokens'),
    ('prefix_lm', {'inputs': 6, 'targets': 8}, 'decoder_input_tokens'),
  ],
)
def test_models_of_a_decoder_alone(tmp_path, converter, lengths, name):
  # A model with only targets scores the lines; a prefix language model continues them.
  source = _open(
    _file(tmp_path, 'abc\n'),
    converter=converter,
    lengths=lengths,
    needs_targets=converter == 'decoder_only',
  )
  (example,) = [source.prepare(record) for record in source.records()]
  batch = source.convert([example], 2)
  shift = converter == 'prefix_lm'
  assert batch[name][0, shift : shift + 4].tolist() == [*_BYTES.encode('abc'), 1]
  assert batch[name].shape == (2, sum(lengths.values()))
  if converter == 'prefix_lm':
    assert batch['decoder_causal_attention'][0].tolist() == [1] * 5 + [0] * 9


def test_a_builtin_task_gives_its_examples_in_order():
  model = toy_infer.model()
  table = data.StaticExamples(
    [
      {'inputs': np.array([i, 1], np.int32), 'targets': np.array([1], np.int32)}
      for i in range(3, 8)
    ],
    [{'inputs_pretokenized': f't{i}'} for i in range(5)],
  )
  task = data.BuiltinTask(
    name='five',
    splits=('test',),
    table_fn=lambda *args: table,
    vocabularies={'inputs': toy_infer.VOCABULARY, 'targets': toy_infer.VOCABULARY},
  )
  cfg = data.DatasetConfig(task, {'inputs': 4, 'targets': 2}, 'test', 2, False, 0, source='builtin')
  (source,) = data.open_example_sources(cfg, model)
  found = [source.prepare(record) for record in source.records(2)]
  assert [example.fields['inputs_pretokenized'] for example in found] == ['t2', 't3', 't4']
  assert [example.row['inputs'].tolist() for example in found] == [[5, 1], [6, 1], [7, 1]]
  assert source.num_examples == 5 and source.is_exact
  for option in ('shuffle', 'pack'):
    kwargs = {'shuffle': option == 'shuffle', 'pack': option == 'pack'}
    invalid = data.DatasetConfig(
      task,
      {'inputs': 4, 'targets': 2},
      'test',
      2,
      kwargs['shuffle'],
      0,
      source='builtin',
      pack=kwargs['pack'],
    )
    with pytest.raises(
      errors.ConfigError, match=f'DatasetConfig.{option}` must be False for inference'
    ):
      data.open_example_sources(invalid, model)


@pytest.mark.parametrize('source', ['builtin', 'grain'])
def test_a_task_of_files_gives_its_records_as_its_seed_makes_them(tmp_path, source):
  _file(
    tmp_path,
    ''.join(
      json.dumps({'inputs': text, 'targets': 'a', 'id': i}) + '\n'
      for i, text in enumerate(['b', 'c'])
    ),
    'part.jsonl',
  )

  def mark(record, context):
    return {**record, 'inputs': record['inputs'] + str(context.seed[0] % 7)}

  task = data.file_task(
    name='marked',
    splits={'test': str(tmp_path / 'part.jsonl')},
    format='jsonl',
    vocabulary=_BYTES,
    preprocessors=[mark],
  )
  found = []
  for seed in (0, 3):
    cfg = data.DatasetConfig(
      task, {'inputs': 6, 'targets': 4}, 'test', 2, False, seed, source=source
    )
    model = toy_infer.LetterModel(toy_infer.toy_model.ToyNetwork(), _BYTES, _BYTES, None)
    (opened,) = data.open_example_sources(cfg, model)
    examples = [opened.prepare(record) for record in opened.records()]
    assert [example.fields['id'] for example in examples] == [0, 1]
    for example in examples:
      text = example.fields['inputs_pretokenized']
      assert example.row['inputs'].tolist() == [
        *_BYTES.encode(text),
        1,
      ]  # text and ids are of one draw
    found.append([example.fields['inputs_pretokenized'] for example in examples])
  assert found[0] != found[1] and [text[0] for text in found[0]] == ['b', 'c']


def test_a_file_in_a_store(store):
  files.write(f'{store.root}/in.txt', 'one\n\ntwo\xc2\x85\n')
  source = _open(f'{store.root}/in.txt')
  assert (source.name, source.num_examples) == ('in', 3) and _inputs(source) == [
    'one',
    '',
    'two\xc2\x85',
  ]
  files.write(f'{store.root}/in.txt', 'two\n')
  with pytest.raises(errors.DataError, match='was changed while it was read'):
    list(source.records())
  with pytest.raises(
    errors.DataError, match=r"/im.txt' cannot be read: No such file .*Did you mean 'in.txt'"
  ):
    _open(f'{store.root}/im.txt')
