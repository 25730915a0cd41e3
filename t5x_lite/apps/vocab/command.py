"""`t5x_lite vocab`: train a SentencePiece vocabulary with T5's ids, or check one against a task."""

import argparse
import ast
from collections.abc import Callable, Iterable
from typing import Any

from t5x_lite import checks
from t5x_lite import files
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.formatting import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument(
    'model',
    metavar='MODEL',
    help='model file to write, e.g. vocabs/docs.model; without text to '
    'train on, an existing model to check',
  )
  text = parser.add_argument_group('text to train on (one kind)')
  text.add_argument(
    '--text',
    action='append',
    default=[],
    metavar='FILE',
    help='plain text in UTF-8; may be repeated',
  )
  text.add_argument(
    '--json_lines',
    action='append',
    default=[],
    metavar='FILE',
    help='JSONL file with the text of each object in --key; may be repeated',
  )
  text.add_argument(
    '--key', default='text', metavar='NAME', help="key of the text in --json_lines; default: 'text'"
  )
  text.add_argument(
    '--corpus', metavar='NAME', help='embedded corpus: python_docs or python_keyword_cloze'
  )
  text.add_argument(
    '--from_task',
    metavar='NAME',
    help='texts of a task, for all features of --task_feature_lengths',
  )
  training = parser.add_argument_group('training')
  training.add_argument(
    '--vocab_size',
    type=int,
    metavar='N',
    help='number of pieces, including padding, end of sequence and unknown, excluding sentinels',
  )
  training.add_argument(
    '--byte_fallback',
    action='store_true',
    help='encode characters without a piece as bytes (256 of the pieces), so that none is unknown',
  )
  training.add_argument(
    '--character_coverage',
    type=float,
    default=0.9995,
    metavar='SHARE',
    help='share of the characters of the text that have a piece, from 0.98 to 1; default: 0.9995',
  )
  training.add_argument(
    '--max_lines', type=int, metavar='N', help='train on N random lines, with a fixed seed'
  )
  training.add_argument('--overwrite', action='store_true', help='replace MODEL if it exists')
  check = parser.add_argument_group('check and task')
  check.add_argument(
    '--extra_ids',
    type=int,
    default=100,
    metavar='N',
    help='number of sentinels, with the highest ids; default: 100, as in T5',
  )
  check.add_argument(
    '--task',
    action='append',
    default=[],
    metavar='NAME',
    help='print how MODEL encodes the texts of this task; may be repeated',
  )
  check.add_argument(
    '--task_feature_lengths',
    default="{'inputs': 512, 'targets': 114}",
    metavar='DICT',
    help="features of the tasks and their lengths in ids; default: {'inputs': 512, 'targets': 114}",
  )
  check.add_argument(
    '--split', default='train', metavar='NAME', help="split of corpora and tasks; default: 'train'"
  )
  check.add_argument(
    '--source',
    default='builtin',
    metavar='NAME',
    help="registry of the tasks, e.g. 'seqio'; default: 'builtin'",
  )
  check.add_argument(
    '--module',
    metavar='MODULE',
    help='Python module to import, which registers the tasks or the source',
  )
  check.add_argument(
    '--max_examples',
    type=int,
    default=10_000,
    metavar='N',
    help='maximum number of examples of each task; default: 10,000',
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  kinds = {name: getattr(flags, name) for name in ('text', 'json_lines', 'corpus', 'from_task')}
  given = [f'--{name}' for name, value in kinds.items() if value]
  num_pieces: int | None = flags.vocab_size
  problem = ''
  if not given:
    problem = _problem_without_training(flags)
  elif len(given) > 1:
    problem = f'{" and ".join(given)} cannot be combined. Choose one kind of text to train on.'
  elif num_pieces is None:
    problem = f'{given[0]} requires --vocab_size, the number of pieces, e.g. --vocab_size=900.'
  if problem:
    raise ConfigError(problem)
  lengths = _literal(flags.task_feature_lengths)
  checks.check(
    '',
    {'--max_examples': flags.max_examples, '--task_feature_lengths': lengths},
    **{
      '--max_examples': checks.number(at_least=1, integer=True),
      '--task_feature_lengths': checks.instance(
        dict, "a mapping such as {'inputs': 512, 'targets': 114}"
      ),
    },
  )
  from t5x_lite import data
  from t5x_lite.apps.vocab import run as vocab

  def task_texts(name, max_examples):
    cfg = data.DatasetConfig(
      name,
      lengths,
      flags.split,
      batch_size=1,
      shuffle=False,
      seed=0,
      module=flags.module,
      source=flags.source,
    )
    return data.read_task_texts(cfg, max_examples)

  # Read before the training, which may take long.
  texts = {name: task_texts(name, flags.max_examples) for name in flags.task}
  if given:
    (named,) = filter(None, kinds.values())
    names = [named] if isinstance(named, str) else named
    trained = vocab.train_vocabulary(
      _lines(flags, task_texts),
      flags.model,
      vocab_size=flags.vocab_size,
      extra_ids=flags.extra_ids,
      byte_fallback=flags.byte_fallback,
      character_coverage=flags.character_coverage,
      max_lines=flags.max_lines,
      sources=[f'{given[0]} {name}' for name in names],
      overwrite=flags.overwrite,
    )
    show(vocab.describe_training(trained))
  vocabulary = data.SentencePieceVocabulary(flags.model, flags.extra_ids)
  for number, (name, by_feature) in enumerate(texts.items()):
    coverage = {
      feature: vocab.check_vocabulary(vocabulary, found, lengths[feature])
      for feature, found in by_feature.items()
    }
    title = f'{name}, {flags.split}, in {vocabulary.vocab_size:,} ids'
    show(('\n' if given or number else '') + vocab.describe_coverage(title, coverage))
  return ExitCode.OK


def _lines(flags: Any, task_texts: Callable[..., dict[str, list[str]]]) -> Iterable[str]:
  """Return the lines to train on."""
  from t5x_lite.apps.vocab import run as vocab

  if flags.text:
    return vocab.text_lines(flags.text)
  if flags.json_lines:
    return vocab.json_lines(flags.json_lines, flags.key)
  if flags.corpus:
    return vocab.corpus_lines(flags.corpus, flags.split)
  of_task = task_texts(flags.from_task, None)
  return (line for group in of_task.values() for text in group for line in text.splitlines())


def _problem_without_training(flags: Any) -> str:
  """Return why the flags are invalid without text to train on, or ''."""
  for name in ('vocab_size', 'max_lines', 'byte_fallback', 'overwrite'):
    if getattr(flags, name):
      return (
        f'--{name} requires text to train on: --text, --json_lines, --corpus or --from_task. Add one of them, or '
        f'remove --{name} to check MODEL.'
      )
  if not files.path(flags.model).is_file():
    return (
      f'The file {flags.model!r} does not exist. To train it, pass --text, --json_lines, --corpus or '
      '--from_task, and --vocab_size.'
    )
  if not flags.task:
    return f'--task is missing: pass a task to check {flags.model} against, or text to train on.'
  return ''


def _literal(text: str) -> Any:
  """Return the value of a Python literal, or the text if it is not one."""
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return text
