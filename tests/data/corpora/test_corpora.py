"""The embedded corpora, the script that builds them, and span corruption against its definition."""

import ast
import collections
import gzip
import hashlib
import importlib.util
import json
import keyword
import pathlib

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data import corpora
from t5x_lite.data.builtin_tasks import BYTE_VOCABULARY
from t5x_lite.data.builtin_tasks import encode_with_sentinel

_ROOT = pathlib.Path(__file__).parents[3]
_FOLDER = pathlib.Path(corpora.__file__).parent
# --- The frozen files ----------------------------------------------------------------


@pytest.mark.parametrize(
  'name, digest, max_bytes',
  [
    (
      'python_keyword_cloze',
      '790ecc7ad34a8339d0421fc51d1f1c4d6a61d4113136c9e1129f5a500799e058',
      140_000,
    ),
    ('python_docs', '13ad5b60b748c2654407bd1207200c9c51a6d0d56cbf343883b2a98eac54844e', 140_000),
    (
      'python_function_cloze',
      'f5d74190486bd7e46bfb4b87047b2a266a3a940939f98ba5fd816827c48e582c',
      350_000,
    ),
  ],
)
def test_files_are_frozen(name, digest, max_bytes):
  """Recorded results depend on the bytes: a rebuilt corpus is a new task, with a new name."""
  content = (_FOLDER / f'{name}.json.gz').read_bytes()
  assert hashlib.sha256(content).hexdigest() == digest and len(content) < max_bytes


def test_licence_travels_with_the_files():
  notice = (_FOLDER / 'NOTICE.txt').read_text()
  licence = (_FOLDER / 'PSF-LICENSE.txt').read_text()
  assert 'Python Software Foundation; All Rights Reserved' in notice and 'changes made' in notice
  assert 'PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2' in licence and 'All Rights' in licence


def test_cloze_examples():
  train, validation = (corpora.python_keyword_cloze(split) for split in corpora.SPLITS)
  assert (len(train), len(validation)) == (11_000, 1_000)
  originals = []
  for line, word in train + validation:
    assert (
      line.count(corpora.SENTINEL_TEXT) == 1 and keyword.iskeyword(word) and line == line.strip()
    )
    assert len(encode_with_sentinel(line, BYTE_VOCABULARY)) + 1 <= 64 and len(word) + 1 <= 12
    originals.append(''.join(line.replace(corpora.SENTINEL_TEXT, word).split()))
  # No line occurs twice, in one split or in both, and no question has two answers.
  assert len(set(originals)) == len(originals)
  assert len({''.join(line.split()) for line, _ in train + validation}) == len(originals)
  for split in (train, validation):
    assert (
      collections.Counter(example.keyword for example in split).most_common(1)[0][1] / len(split)
      == 0.18
    )
  # Without meaning means without order: neighbours are no more alike than others.
  same = np.mean([a.keyword == b.keyword for a, b in zip(train, train[1:], strict=False)])
  assert same < 0.15


def test_function_examples():
  train, validation = (corpora.python_function_cloze(split) for split in corpora.SPLITS)
  assert (len(train), len(validation)) == (1_287, 170)
  for source, body in train + validation:
    before, after = source.split(corpora.SENTINEL_TEXT)
    assert (
      64 <= len(body) <= 511
      and len(before + after) <= corpora.CONTEXT_BYTES
      and (before + after).isascii()
    )
    # The body is complete: with its indentation, it is all of a function.
    indentation = before.rpartition('\n')[2]
    assert not indentation.strip() and after.partition('\n')[0].strip()[:1] in ('', '#')
    ast.parse(f'async def function():\n{indentation}{body}\n')
  bodies = [''.join(body.split()) for _, body in train + validation]
  assert len(set(bodies)) == len(bodies)
  # Most inputs are long: only modules that are shorter than the context give less.
  assert np.mean([len(source) for source, _ in train]) > 1_950
  task = data.get_builtin('python_function_cloze')
  (example,) = task.table('train', {'inputs': 2048, 'targets': 512}).examples(0, np.arange(1))
  assert (
    BYTE_VOCABULARY.decode(example['targets']) == train[0].body
    and (example['inputs'] == 383).sum() == 1
  )


def test_context_has_whole_lines_around_the_body(monkeypatch):
  text = ''.join(f'line {number}\n' for number in range(10, 99))
  monkeypatch.setattr(corpora, 'CONTEXT_BYTES', 40)
  monkeypatch.setattr(corpora, '_BYTES_BEFORE', 24)

  def place(line):
    return (text.index(line), text.index(line) + len(line))

  assert (
    corpora._context(text, *place('line 50'))
    == 'line 47\nline 48\nline 49\n<extra_id_0>\nline 51\n'
  )
  # At an end of the module, the other side is longer.
  assert (
    corpora._context(text, *place('line 10'))
    == '<extra_id_0>\nline 11\nline 12\nline 13\nline 14\n'
  )
  assert (
    corpora._context(text, *place('line 98'))
    == 'line 94\nline 95\nline 96\nline 97\n<extra_id_0>\n'
  )
  assert corpora._context('a\nb\n', 2, 3) == 'a\n<extra_id_0>\n'


def test_docs_documents():
  counts = [len(corpora.python_docs(split)) for split in corpora.SPLITS]
  assert counts == [1152, 128] and not any(count % 128 for count in counts)
  assert not set(corpora.python_docs('train')) & set(corpora.python_docs('validation'))
  size = sum(len(text.encode()) for split in corpora.SPLITS for text in corpora.python_docs(split))
  assert 440_000 < size < 470_000


def test_the_sentinel_is_one_id():
  ids = encode_with_sentinel('a <extra_id_0> b', BYTE_VOCABULARY)
  assert ids == [100, 35, 383, 35, 101]
  assert encode_with_sentinel('ab', BYTE_VOCABULARY) == [100, 101]
  task = data.get_builtin('python_keyword_cloze')
  assert task.metric_fns == (data.exact_match,)
  table = task.table('train', {'inputs': 64, 'targets': 12})
  for example in table.examples(0, np.arange(200)):
    assert (example['inputs'] == 383).sum() == 1 and example['inputs'][-1] == 1 == example[
      'targets'
    ][-1]


# --- The script -----------------------------------------------------------------------


@pytest.fixture(scope='module')
def script():
  spec = importlib.util.spec_from_file_location(
    'build_corpora', _ROOT / 'scripts' / 'build_corpora.py'
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_lines_with_keywords(script, tmp_path):
  path = tmp_path / 'module.py'
  path.write_text(
    'def function(a):\n'
    '  """if this were\n'
    '  while code"""\n'
    "  text = 'for in strings'  # or not\n"
    '  if a is None:\n'
    '    return text\n'
    '  return ' + 'x' * 80 + '\n'
    '  pass\n'
  )
  lines = dict(script.keyword_lines(path, 'module.py'))
  assert (
    lines.pop('<extra_id_0> function(a):') == 'def' and lines.pop('<extra_id_0> text') == 'return'
  )
  # One keyword of the line is chosen; the others stay.
  ((line, word),) = lines.items()
  assert line.replace('<extra_id_0>', word) == 'if a is None:'
  path.write_text('if (:\n')
  assert script.keyword_lines(path, 'module.py') == []


def test_split_by_file_without_duplicates(script, tmp_path):
  names = [
    'abc',
    'ast',
    'bisect',
    'code',
    'copy',
    'dis',
    'enum',
    'glob',
    'gzip',
    'heapq',
    'io',
    'json',
  ]
  splits = {name: script.split_of(f'{name}.py') for name in names}
  assert set(splits.values()) == {'train', 'validation'}
  words = ['return', 'if', 'while', 'del', 'assert', 'raise', 'yield', 'with', 'elif', 'import']
  for name in names:
    own = ''.join(f'{words[i % 10]} {name}_value_{i}\n' for i in range(20))
    (tmp_path / f'{name}.py').write_text(own + 'async shared_value_1\nasync  shared_value_1\n')
  for folder in ('site-packages', 'test'):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / 'abc.py').write_text('return of_other_licence\n' * 30)
  counts = {split: 20 * list(splits.values()).count(split) for split in ('train', 'validation')}
  counts['validation'] += 1
  corpus = script.build_keyword_cloze(tmp_path, counts)
  for split, by_keyword in corpus['splits'].items():
    lines = [line for lines in by_keyword.values() for line in lines]
    # A line of both splits stays in validation only; nothing comes from elsewhere.
    assert len(lines) == counts[split] and lines.count('<extra_id_0> shared_value_1') == (
      split == 'validation'
    )
    owners = {line.split()[1].partition('_value')[0] for line in lines} - {'shared'}
    assert owners == {name for name in names if splits[name] == split}
  assert corpus == script.build_keyword_cloze(tmp_path, counts)
  with pytest.raises(SystemExit, match='expected 10000'):
    script.build_keyword_cloze(tmp_path, {'train': 10_000, 'validation': 1})


def test_no_keyword_prevails_and_no_question_has_two_answers(script, tmp_path):
  names = [
    'abc',
    'ast',
    'bisect',
    'code',
    'copy',
    'dis',
    'enum',
    'glob',
    'gzip',
    'heapq',
    'io',
    'json',
  ]
  name = next(name for name in names if script.split_of(f'{name}.py') == 'validation')
  # `return value_1` and `raise value_1` ask the same: the first is kept. Then `return` may answer 18 of 100.
  (tmp_path / f'{name}.py').write_text(
    ''.join(f'return value_{i}\nraise value_{i}\n' for i in range(200))
  )
  with pytest.raises(SystemExit, match=r'gives 18 validation lines'):
    script.build_keyword_cloze(tmp_path, {'train': 0, 'validation': 100})


def test_function_bodies(script, monkeypatch):
  monkeypatch.setattr(script, 'MIN_BODY_BYTES', 32)
  text = '''def short(): return 'on the same line as the signature'
def function(a):
  """Docstring."""
  def inner():
    return 'a body in another body is not a place'
  # A comment is not the start.
  return inner
class Class:
  async def method(self):  # comment
    return 'the body of a method, one line'
  def few(self):
    pass
if True:
  def conditional(a):
    while a: a = a.next_element_of_the_list
    return a
'''
  bodies = [text[start:end] for start, end in script.function_bodies(text)]
  assert [body.split('\n')[0] for body in bodies] == [
    'def inner():',
    "return 'the body of a method, one line'",
    'while a: a = a.next_element_of_the_list',
  ]
  assert bodies[0].endswith('return inner') and bodies[2].endswith('return a')


def test_modules_of_functions_are_split_without_duplicates(script, tmp_path, monkeypatch):
  monkeypatch.setattr(script, 'MIN_BODY_BYTES', 32)
  names = [
    'abc',
    'ast',
    'bisect',
    'code',
    'copy',
    'dis',
    'enum',
    'glob',
    'gzip',
    'heapq',
    'io',
    'json',
  ]
  body = 'def function(a):\n  return "{} in a body of some length"\n'
  for name in names:
    (tmp_path / f'{name}.py').write_text(body.format(name) + body.format('shared'))
  (tmp_path / 'os.py').write_text(body.format('é'))
  (tmp_path / 'this.py').write_text('x = 1\n' * 500 + body.format('rare'))
  corpus = script.build_function_cloze(tmp_path, {'train': 10_000, 'validation': 10_000})
  modules = {
    split: [module['module'] for module in modules] for split, modules in corpus['splits'].items()
  }
  assert sorted(modules['train'] + modules['validation']) == [f'{name}.py' for name in names]
  assert all(script.split_of(name) == split for split, found in modules.items() for name in found)
  bodies = [
    module['text'][start:end]
    for split in corpus['splits'].values()
    for module in split
    for start, end in module['bodies']
  ]
  assert len(bodies) == len(set(bodies)) == len(names) + 1
  assert any(len(module['bodies']) == 2 for module in corpus['splits']['validation'])
  with pytest.raises(SystemExit, match='no module of validation'):
    script.build_function_cloze(tmp_path, {'train': 10_000, 'validation': 10})


def test_documents(script):
  text = '\n\n'.join(f'paragraph {i} ' + 'x' * 90 for i in range(10))
  documents = script.cut_documents(text, 250)
  assert ''.join(documents).strip() == text and len(documents) == 5
  topics = {f'topic {i}': text for i in range(500)}
  corpus = script.build_python_docs(topics)
  assert all(len(documents) % 128 == 0 and documents for documents in corpus['splits'].values())


def test_written_files_are_reproducible(script, tmp_path):
  for name in ('a', 'b'):
    script.write(tmp_path / name, {'python': '3', 'splits': {'train': ['é']}})
  assert (tmp_path / 'a').read_bytes() == (tmp_path / 'b').read_bytes()
  assert json.loads(gzip.decompress((tmp_path / 'a').read_bytes()))['splits'] == {'train': ['é']}
