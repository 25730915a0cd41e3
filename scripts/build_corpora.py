"""Builds the three embedded corpora from the standard library of the Python that runs this script.

  python scripts/build_corpora.py --output t5x_lite/data/corpora

The library differs between Python versions, so the files in the package are frozen: they were built once (the version
is recorded in each file) and are read as they are. Run this to see how they came about, or to make a corpus of your
own Python in another folder. The same Python gives the same bytes.

* `python_keyword_cloze.json.gz`: lines of code with one keyword left out. A *file* belongs to one split, and a line
  that occurs in several files is kept once, so nothing in validation has been seen in training.
* `python_docs.json.gz`: the prose of `pydoc_data.topics` (what `help('LAMBDA')` prints), cut into documents at blank
  lines. A *topic* belongs to one split.
* `python_function_cloze.json.gz`: whole modules, with the places of function bodies that can be left out. A *module*
  belongs to one split, and a body that occurs in several modules is kept once.

Only the standard library is imported: the script runs without JAX, NumPy, or this package.
"""

import argparse
import ast
import collections
import gzip
import hashlib
import io
import json
import keyword
import pathlib
import platform
import sys
import sysconfig
import tokenize

SENTINEL = '<extra_id_0>'
# With the sentinel as one id and the end-of-sequence id, a line of this many bytes still fits in 64 input ids.
MAX_LINE_BYTES = 62
MIN_LINE_BYTES = 8
NUM_LINES = {'train': 11_000, 'validation': 1_000}
# No keyword is the answer more often than this, so that always answering `def` scores 0.18.
MAX_SHARE = 0.18
# Documents are joined in groups of this many before they are cut into segments (T5's `reduce_concat_tokens`); a
# multiple of it makes every epoch's segments the same.
DOCUMENT_GROUP = 128
# A body of this many bytes and the end-of-sequence id fit in 512 target ids.
MAX_BODY_BYTES = 511
MIN_BODY_BYTES = 64
# Modules are chosen until they have so many bytes in all.
MODULE_BYTES = {'train': 1_200_000, 'validation': 150_000}
MAX_MODULE_BYTES = 60_000
# Modules with few short functions are left out: an example for each so many bytes at least.
BYTES_PER_BODY = 1_500
# Tests hold deliberately odd code, and `pydoc_data` is the second corpus. Installed packages (`site-packages`) carry
# other licences: they are kept out by asking that the top-level name is one of the standard library's modules.
EXCLUDED_FOLDERS = {
  'test',
  'tests',
  'idle_test',
  'pydoc_data',
  'ensurepip',
  'lib2to3',
  'turtledemo',
}


def stable_hash(*parts: str) -> int:
  """Return 64 bits that depend on `parts` alone (unlike `hash`, which is salted per process)."""
  return int.from_bytes(hashlib.sha256('\0'.join(parts).encode('utf-8')).digest()[:8], 'big')


def split_of(name: str) -> str:
  """Assign one file or topic in ten to validation."""
  return 'validation' if stable_hash('split', name) % 10 == 0 else 'train'


def keyword_lines(path: pathlib.Path, name: str) -> list[tuple[str, str]]:
  """Return (line with the sentinel, keyword) for every line of the file `path` that holds a keyword.

  Tokenising, rather than searching, keeps the words of comments and strings out. Of the keywords of one line a
  fixed random one is taken. Indentation is dropped.
  """
  try:
    source = path.read_bytes().decode('utf-8')
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
  except (UnicodeDecodeError, SyntaxError, tokenize.TokenError):
    return []
  columns = collections.defaultdict(list)
  inside_strings = set()
  for token in tokens:
    if token.type == tokenize.NAME and keyword.iskeyword(token.string):
      columns[token.start[0]].append((token.start[1], token.string))
    elif token.start[0] != token.end[0]:
      inside_strings.update(range(token.start[0], token.end[0] + 1))
  examples = []
  lines = source.splitlines()
  for number in sorted(set(columns) - inside_strings):
    if number > len(lines):
      continue
    line = lines[number - 1]
    start, word = columns[number][stable_hash('keyword', name, str(number)) % len(columns[number])]
    if SENTINEL in line or not line.isprintable() or line[start : start + len(word)] != word:
      continue
    stripped = line.strip()
    if MIN_LINE_BYTES <= len(stripped.encode('utf-8')) <= MAX_LINE_BYTES:
      examples.append(((line[:start] + SENTINEL + line[start + len(word) :]).strip(), word))
  return examples


def library_files(stdlib: pathlib.Path) -> list[pathlib.Path]:
  """Return the paths of the library's modules, relative to `stdlib`."""
  files = sorted(path.relative_to(stdlib) for path in stdlib.rglob('*.py'))
  return [
    path
    for path in files
    if path.parts[0].removesuffix('.py') in sys.stdlib_module_names
    and not EXCLUDED_FOLDERS & set(path.parts[:-1])
  ]


def build_keyword_cloze(stdlib: pathlib.Path, num_lines: dict[str, int]) -> dict:
  """Return the keyword corpus: {'python', 'splits': {split: {keyword: [line, ...]}}}."""
  candidates: dict[str, list[tuple[str, str]]] = {'train': [], 'validation': []}
  seen = set()
  # Validation first: a line that occurs in both splits stays there, and leaves training.
  for split in ('validation', 'train'):
    for path in library_files(stdlib):
      name = path.as_posix()
      if split_of(name) != split:
        continue
      for text, word in keyword_lines(stdlib / path, name):
        # Lines that differ by white space only count as one, and so do lines that differ in the missing keyword only:
        # a question has one answer.
        question, answer = ''.join(text.split()), ''.join(text.replace(SENTINEL, word).split())
        if not seen & {question, answer}:
          seen |= {question, answer}
          candidates[split].append((text, word))
  splits = {}
  for split, examples in candidates.items():
    counts = collections.Counter()
    chosen = []
    for text, word in sorted(examples, key=lambda example: stable_hash('choice', *example)):
      if len(chosen) < num_lines[split] and counts[word] < MAX_SHARE * num_lines[split]:
        counts[word] += 1
        chosen.append((text, word))
    if len(chosen) < num_lines[split]:
      raise SystemExit(
        f'{stdlib} gives {len(chosen)} {split} lines, expected {num_lines[split]}: ask for fewer with '
        '--train_lines and --validation_lines.'
      )
    # By keyword and alphabetically, which compresses best; the reader brings the lines into an order without meaning.
    splits[split] = {
      word: sorted(text for text, other in chosen if other == word)
      for word in sorted({word for _, word in chosen})
    }
  return {'python': platform.python_version(), 'splits': splits}


def function_bodies(text: str) -> list[tuple[int, int]]:
  """Return the places (start, end) in the module `text` of bodies that can be left out.

  A body has all statements of a function or method that is not inside another one, from the first character of the
  first statement after the docstring. `text` is ASCII, so a place counts bytes and characters.
  """
  starts = [0]
  for line in text.splitlines(keepends=True):
    starts.append(starts[-1] + len(line))
  places, nodes = [], list(ast.parse(text).body)
  while nodes:
    node = nodes.pop()
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      nodes.extend(ast.iter_child_nodes(node))
      continue
    body = node.body[ast.get_docstring(node, clean=False) is not None :]
    if body and body[0].lineno > node.lineno and not getattr(body[0], 'decorator_list', None):
      start = starts[body[0].lineno - 1] + body[0].col_offset
      end = starts[body[-1].end_lineno - 1] + body[-1].end_col_offset
      if MIN_BODY_BYTES <= end - start <= MAX_BODY_BYTES:
        places.append((start, end))
  return sorted(places)


def build_function_cloze(stdlib: pathlib.Path, num_bytes: dict[str, int]) -> dict:
  """Return the corpus of functions: {'python', 'splits': {split: [module, ...]}}.

  A module is {'module': path, 'text': source, 'bodies': [[start, end], ...]}.
  """
  splits, seen = {}, set()
  # Validation first: a body that occurs in both splits stays there.
  for split in ('validation', 'train'):
    modules, left = [], num_bytes[split]
    for path in sorted(
      library_files(stdlib), key=lambda path: stable_hash('module', path.as_posix())
    ):
      raw = (stdlib / path).read_bytes()
      if (
        split_of(path.as_posix()) != split
        or len(raw) > min(left, MAX_MODULE_BYTES)
        or not raw.isascii()
      ):
        continue
      text = raw.decode('ascii')
      # Form feeds and lone carriage returns are line ends for `splitlines`, and not for Python's parser.
      if '<extra_id_' in text or not (text.replace('\n', '').replace('\t', '').isprintable()):
        continue
      bodies = []
      for start, end in function_bodies(text):
        words = ''.join(text[start:end].split())
        if words not in seen:
          seen.add(words)
          bodies.append([start, end])
      if len(bodies) * BYTES_PER_BODY >= max(len(text), 1):
        modules.append({'module': path.as_posix(), 'text': text, 'bodies': bodies})
        left -= len(text)
    if not modules:
      raise SystemExit(
        f'{stdlib} gives no module of {split}, expected modules of {num_bytes[split]} bytes in all.'
      )
    splits[split] = sorted(modules, key=lambda module: module['module'])
  return {'python': platform.python_version(), 'splits': splits}


def cut_documents(text: str, max_bytes: int) -> list[str]:
  """Cut `text` at blank lines into documents of whole paragraphs, each about `max_bytes` long at most."""
  documents, current = [], ''
  for paragraph in text.strip().split('\n\n'):
    if current and len((current + paragraph).encode('utf-8')) > max_bytes:
      documents.append(current)
      current = ''
    current += paragraph + '\n\n'
  return documents + [current]


def build_python_docs(topics: dict[str, str]) -> dict:
  """Return the prose corpus: {'python', 'splits': {split: [document, ...]}}."""
  splits = {}
  for split in ('train', 'validation'):
    texts = [text for name, text in sorted(topics.items()) if split_of(name) == split]
    # The cut that wastes the fewest documents beyond the last whole group.
    cuts = (
      [doc for text in texts for doc in cut_documents(text, size)] for size in range(320, 640, 20)
    )
    best = min(cuts, key=lambda documents: len(documents) % DOCUMENT_GROUP / len(documents))
    if len(best) < DOCUMENT_GROUP:
      raise SystemExit(
        f'The {split} topics give {len(best)} documents, expected at least {DOCUMENT_GROUP}.'
      )
    splits[split] = best[: len(best) - len(best) % DOCUMENT_GROUP]
  return {'python': platform.python_version(), 'splits': splits}


def write(path: pathlib.Path, corpus: dict) -> None:
  """Write `corpus` as gzipped JSON (gzip is in every Python; lzma is not), the same bytes at every run."""
  text = json.dumps(corpus, ensure_ascii=False, indent=0)
  with (
    open(path, 'wb') as raw,
    gzip.GzipFile('', 'wb', compresslevel=9, fileobj=raw, mtime=0) as stream,
  ):
    stream.write(text.encode('utf-8'))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--output', type=pathlib.Path, required=True, help='folder for the three files'
  )
  parser.add_argument(
    '--stdlib',
    type=pathlib.Path,
    default=pathlib.Path(sysconfig.get_path('stdlib')),
    help="folder of the library to read (default: this Python's)",
  )
  parser.add_argument('--train_lines', type=int, default=NUM_LINES['train'])
  parser.add_argument('--validation_lines', type=int, default=NUM_LINES['validation'])
  args = parser.parse_args()
  from pydoc_data import topics

  args.output.mkdir(parents=True, exist_ok=True)
  cloze = build_keyword_cloze(
    args.stdlib, {'train': args.train_lines, 'validation': args.validation_lines}
  )
  write(args.output / 'python_keyword_cloze.json.gz', cloze)
  write(args.output / 'python_docs.json.gz', build_python_docs(topics.topics))
  write(
    args.output / 'python_function_cloze.json.gz', build_function_cloze(args.stdlib, MODULE_BYTES)
  )
  for name in ('python_keyword_cloze', 'python_docs', 'python_function_cloze'):
    path = args.output / f'{name}.json.gz'
    print(
      f'{path}: {path.stat().st_size} bytes, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}'
    )


if __name__ == '__main__':
  main()
