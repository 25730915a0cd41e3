"""`t5x_lite vocab`: trains a SentencePiece vocabulary with T5's ids, and looks at how one fits a task."""

import argparse
import ast
from collections.abc import Callable, Iterable
import os

from t5x_lite.apps.common.flags import Command
from t5x_lite.errors import ConfigError, ExitCode


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('model', metavar='MODEL', help='the model file to write, e.g. vocabs/docs.model; without a source '
                      'of text, an existing one to look at')
  text = parser.add_argument_group('text to train on (one kind)')
  text.add_argument('--text', action='append', default=[], metavar='FILE', help='plain text in UTF-8; repeat for more')
  text.add_argument('--json_lines', action='append', default=[], metavar='FILE',
                    help='one JSON object a line, its text under --key; repeat for more')
  text.add_argument('--key', default='text', metavar='NAME', help="of the text in --json_lines; 'text' by default")
  text.add_argument('--corpus', metavar='NAME', help='an embedded corpus: python_docs, python_keyword_cloze')
  text.add_argument('--from_task', metavar='NAME', help='the texts of a task, all features of --task_feature_lengths')
  training = parser.add_argument_group('training')
  training.add_argument('--vocab_size', type=int, metavar='N',
                        help='number of pieces, pad, end of sequence and unknown included, sentinels not')
  training.add_argument('--byte_fallback', action='store_true',
                        help='spell in bytes what no piece covers (256 of the pieces), so that nothing is unknown')
  training.add_argument('--character_coverage', type=float, default=0.9995, metavar='SHARE',
                        help="share of the text's characters with a piece of their own, 0.98 to 1; 0.9995 by default")
  training.add_argument('--max_lines', type=int, metavar='N', help='train on N lines drawn at random, always the same')
  training.add_argument('--overwrite', action='store_true', help='replace MODEL if it exists')
  check = parser.add_argument_group('check and task')
  check.add_argument('--extra_ids', type=int, default=100, metavar='N',
                     help='sentinels behind the pieces; 100 by default, as T5 has them')
  check.add_argument('--task', action='append', default=[], metavar='NAME',
                     help='show how MODEL spells the texts of this task; repeat for more')
  check.add_argument('--task_feature_lengths', default="{'inputs': 512, 'targets': 114}", metavar='DICT',
                     help="features of the tasks and their lengths in ids; {'inputs': 512, 'targets': 114} by default")
  check.add_argument('--split', default='train', metavar='NAME', help="of corpora and tasks; 'train' by default")
  check.add_argument('--source', default='builtin', metavar='NAME',
                     help="where the tasks are registered, 'seqio' for instance; 'builtin' by default")
  check.add_argument('--module', metavar='MODULE',
                     help='a Python module to import, which registers the tasks or the source')
  check.add_argument('--max_examples', type=int, default=10_000, metavar='N',
                     help='look at so many examples of a task; 10,000 by default')


def _run(arguments: argparse.Namespace) -> int:
  kinds = {name: getattr(arguments, name) for name in ('text', 'json_lines', 'corpus', 'from_task')}
  given = [f'--{name}' for name, value in kinds.items() if value]
  if len(given) > 1:
    raise ConfigError(f'{" and ".join(given)} are both given; expected one kind of text to train on.')
  if given and arguments.vocab_size is None:
    raise ConfigError(f'{given[0]} is given without --vocab_size; expected the number of pieces, e.g. --vocab_size=900.')
  if not given:
    _check_nothing_to_train(arguments)
  lengths = _lengths(arguments.task_feature_lengths)
  if arguments.max_examples < 1:
    raise ConfigError(f'--max_examples={arguments.max_examples}: expected 1 or more.')
  from t5x_lite import data
  from t5x_lite.apps.vocab import run as vocab, check as vocab_check

  def task_texts(name, max_examples):
    cfg = data.DatasetConfig(name, lengths, arguments.split, batch_size=1, shuffle=False, seed=0,
                             module=arguments.module, source=arguments.source)
    return data.read_task_texts(cfg, max_examples)

  # Before the training, which may take long.
  texts = {name: task_texts(name, arguments.max_examples) for name in arguments.task}
  if given:
    (named,) = filter(None, kinds.values())
    names = [named] if isinstance(named, str) else named
    trained = vocab.train_vocabulary(
        _lines(arguments, task_texts), arguments.model, vocab_size=arguments.vocab_size, extra_ids=arguments.extra_ids,
        byte_fallback=arguments.byte_fallback, character_coverage=arguments.character_coverage,
        max_lines=arguments.max_lines, sources=[f'{given[0]} {name}' for name in names], overwrite=arguments.overwrite)
    print(vocab.describe_training(trained))
  vocabulary = data.SentencePieceVocabulary(arguments.model, arguments.extra_ids)
  for number, (name, by_feature) in enumerate(texts.items()):
    coverage = {feature: vocab_check.check_vocabulary(vocabulary, found, lengths[feature])
                for feature, found in by_feature.items()}
    title = f'{name}, {arguments.split}, in {vocabulary.vocab_size:,} ids'
    print(('\n' if given or number else '') + vocab_check.describe_coverage(title, coverage))
  return ExitCode.OK


def _lines(arguments: argparse.Namespace, task_texts: Callable[..., dict[str, list[str]]]) -> Iterable[str]:
  """Returns the lines to train on, of the one kind that is given."""
  from t5x_lite.apps.vocab import run as vocab
  if arguments.text:
    return vocab.text_lines(arguments.text)
  if arguments.json_lines:
    return vocab.json_lines(arguments.json_lines, arguments.key)
  if arguments.corpus:
    return vocab.corpus_lines(arguments.corpus, arguments.split)
  of_task = task_texts(arguments.from_task, None)
  return (line for group in of_task.values() for text in group for line in text.splitlines())


def _check_nothing_to_train(arguments: argparse.Namespace) -> None:
  for name in ('vocab_size', 'max_lines', 'byte_fallback', 'overwrite'):
    if getattr(arguments, name):
      raise ConfigError(f'--{name} is given without a text to train on; expected --text, --json_lines, --corpus or '
                        f'--from_task. Without them MODEL is only looked at: leave --{name} out.')
  if not os.path.isfile(arguments.model):
    raise ConfigError(f'There is no file {arguments.model!r} to look at. To train it, name a text: --text, '
                      '--json_lines, --corpus or --from_task, and --vocab_size.')
  if not arguments.task:
    raise ConfigError(f'{arguments.model} exists, and there is nothing to do with it. Name a text to train on, or a '
                      'task to check it against: --task.')


def _lengths(text: str) -> dict[str, int]:
  try:
    lengths = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    lengths = None
  if not isinstance(lengths, dict):
    raise ConfigError(f'--task_feature_lengths={text}: expected a mapping such as "{{\'inputs\': 512, \'targets\': '
                      '114}".')
  return lengths


COMMAND = Command("train a SentencePiece vocabulary with T5's ids, or check one against a task", _add_arguments, _run)
