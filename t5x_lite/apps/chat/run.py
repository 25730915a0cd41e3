"""Chat with a trained model: each line is an input; the answer is printed with its log-probability.

t5x_lite chat runs/keyword_cloze
echo '<extra_id_0> x in numbers:' | t5x_lite chat runs/keyword_cloze/checkpoint_500
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import logging
import sys
import time
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import decoding
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite.apps.common import report
from t5x_lite.apps.common import restore as restore_lib
from t5x_lite.data.text import examples as text_examples
from t5x_lite.errors import ConfigError, DataError, did_you_mean
from t5x_lite.formatting import printable
from t5x_lite.interactive import texts as text_inference
from t5x_lite.train_state import InferenceState

_PROMPT = '> '
_COMMANDS = {
  ':score TARGET': 'print the log-probability of TARGET as the answer to the last input',
  ':help': 'print this help',
  ':quit': 'quit; Ctrl-D does the same',
}
_COUNT = checks.number(at_least=1, below=2**31, integer=True)
_SAMPLING = ('--temperature', '--topk', '--topp')
_LENGTHS = {'inputs': '--max_input_length', 'targets': '--max_length'}
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingOptions:
  """Decoding options; by default those of the model's `decode_fn`.

  Attributes:
    num_decodes: number of answers per input, best first; more than one are sampled, or the best beams.
    temperature: sampling temperature; 0 takes the most probable token.
    topk: number of most probable tokens to sample from.
    topp: total probability of the most probable tokens to sample from.
    beam_size: number of beams of a beam search.
    seed: seed of sampling; input k uses this seed folded with k.
    decode_fn: decoding algorithm with options of its own, which replaces all others but `seed`.

  Raises:
    ConfigError: an option is out of range, or options exclude each other.
  """

  num_decodes: int = 1
  temperature: float | None = None
  topk: int | None = None
  topp: float | None = None
  beam_size: int | None = None
  seed: int = 0
  decode_fn: decoding.DecodeFnCallable | None = None

  def __post_init__(self) -> None:
    flags = {f'--{name}': value for name, value in vars(self).items()}
    flags['--beam'] = flags.pop('--beam_size')
    flags['--decode'] = flags.pop('--decode_fn')
    checks.check(
      '',
      flags,
      **{
        '--num_decodes': _COUNT,
        '--beam': _COUNT.or_none(),
        '--topk': _COUNT.or_none(),
        '--seed': checks.number(at_least=0, below=2**31, integer=True),
        '--temperature': checks.number(at_least=0).or_none(),
        '--topp': checks.number(above=0, at_most=1).or_none(),
      },
    )
    conflicts = [
      pair
      for pair in (
        ('--topk', '--topp'),
        *(('--beam', name) for name in _SAMPLING),
        *(('--decode', name) for name in (*_SAMPLING, '--beam')),
      )
      if all(flags[name] is not None for name in pair)
    ]
    if self.beam_size is not None and self.num_decodes > self.beam_size:
      conflicts.append(('--num_decodes', '--beam'))
    if self.decode_fn is not None and self.num_decodes > 1:
      conflicts.append(('--decode', '--num_decodes'))
    for pair in conflicts:
      both = ' and '.join(name if name == '--decode' else f'{name}={flags[name]}' for name in pair)
      remedy = 'Remove one of them.'
      if pair == ('--num_decodes', '--beam'):
        remedy = 'Increase --beam.'
      elif '--decode' in pair:
        remedy = 'Remove one of them; options of --decode are gin parameters, see --help.'
      raise ConfigError(f'{both} cannot be combined. {remedy}')

  def apply(
    self, model: models.BaseTransformerModel
  ) -> tuple[models.BaseTransformerModel, dict[str, Any]]:
    """Return (model, options of its `predict_batch_with_aux`) for these options."""
    if self.decode_fn is not None:
      return model.with_decode_fn(self.decode_fn), {}
    if self.beam_size is not None:
      return (
        model.with_decode_fn(decoding.beam_search),
        {'num_decodes': self.beam_size, 'return_all_decodes': True},
      )
    if (
      self.num_decodes == 1 and self.temperature is None and self.topk is None and self.topp is None
    ):
      return model, {}
    # T5X's default of topk, 1, would always take the most probable token.
    sampling = {
      'temperature': 1.0 if self.temperature is None else float(self.temperature),
      'topk': self.topk or 0,
      'topp': self.topp or 0.0,
    }
    return (
      model.with_decode_fn(decoding.temperature_sample),
      {'num_decodes': self.num_decodes, 'return_all_decodes': True, 'decoder_params': sampling},
    )


class Answer(NamedTuple):
  """Answer of a model.

  Attributes:
    text: the text, on one line.
    log_prob: log-probability of its tokens, including the end-of-sequence token.
  """

  text: str
  log_prob: float


class Chat:
  """Trained model that answers inputs."""

  def __init__(
    self,
    model: models.BaseTransformerModel,
    partitioner: partitioning.PjitPartitioner,
    task_feature_lengths: Mapping[str, int],
    restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig,
    options: DecodingOptions,
    max_input_length: int | None = None,
    max_length: int | None = None,
    literal_sentinels: bool = False,
  ):
    """Restore the parameters and compile; see `chat`."""
    if jax.process_count() > 1:
      raise ConfigError(
        f'chat requires a single process, got {jax.process_count()}. Run it without launch and '
        'with --distributed=off, or use `t5x_lite infer`.'
      )
    self._options = options
    self._vocabulary = model.output_vocabulary
    model, self._predict_options = options.apply(model)
    # A model without inputs continues the typed text, which therefore has no end-of-sequence token.
    continues_text = 'inputs' not in task_feature_lengths
    lengths = feature_lengths(task_feature_lengths, max_input_length, max_length)
    # Smallest batch that the mesh supports; one row is used.
    batch_size = partitioner.data_mesh_size
    spec = text_inference.element_spec(model, lengths, batch_size)
    progress = runtime.Progress()
    progress.note('restoring the parameters')
    try:
      restored = next(
        restore_lib.restore_for_inference(
          model,
          restore_checkpoint_cfg,
          partitioner,
          {name: leaf.shape for name, leaf in spec.items()},
        )
      )
      self._state: InferenceState = restored.train_state
      progress.log(
        f'{restored.origin}: {report.run_header(self._state, partitioner)}, step {restored.step:,}.'
      )
      self._inference = text_inference.TextInference(
        model,
        partitioner,
        restored.train_state_axes,
        lengths,
        batch_size,
        {'inputs': not continues_text, 'targets': True},
        {feature: f'{flag} sets it' for feature, flag in _LENGTHS.items()},
        literal_sentinels,
      )
      progress.note('compiling')
      started = time.perf_counter()
      self._inference.compile('predict', self._state, **self._predict_options)
      self._inference.compile('score', self._state)
      progress.log(f'Compiled in {time.perf_counter() - started:.1f} s.')
    finally:
      progress.clear()
    self._num_inputs = 0

  def answer(self, text: str) -> list[Answer]:
    """Return the distinct answers to an input, best first."""
    (example,) = self._inference.reader.read([text])
    (ids,), _ = self._inference.predict(
      self._state,
      [example],
      seed=self._options.seed,
      first=self._num_inputs,
      **self._predict_options,
    )
    self._num_inputs += 1
    # Decoders return the best last.
    decodes = [self._until_end(row) for row in np.atleast_2d(ids)[::-1]][
      : self._options.num_decodes
    ]
    decodes = list({tuple(row.tolist()): row for row in decodes}.values())
    # Scores of decoders depend on the algorithm, so that log-probabilities are computed as for `:score`.
    log_probs, _ = self._inference.score(
      self._state, [{**example, 'targets': row} for row in decodes]
    )
    answers = []
    for row, log_prob in zip(decodes, log_probs, strict=True):
      text = text_examples.decode_ids(row.tolist(), self._vocabulary)
      answers.append(Answer(one_line(text), log_prob))
    return answers

  def score(self, text: str, target: str) -> float:
    """Return the log-probability of a target as the answer to an input."""
    examples = self._inference.reader.read([{'inputs': text, 'targets': target}])
    return self._inference.score(self._state, examples)[0][0]

  def _until_end(self, ids: np.ndarray) -> np.ndarray:
    """Return the ids up to the first end-of-sequence id; without one, the ids without padding at the end."""
    # An answer in one row with its input may be longer than `lengths['targets']`.
    ids = ids[: self._inference.reader.lengths['targets']]
    ends = np.flatnonzero(ids == self._vocabulary.eos_id)
    if len(ends):
      return ids[: ends[0] + 1]
    used = np.flatnonzero(ids)
    if not len(used):
      return ids[:0]
    return ids[: used[-1] + 1]


def chat(
  *,
  model: models.BaseTransformerModel,
  partitioner: partitioning.PjitPartitioner,
  task_feature_lengths: Mapping[str, int],
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig,
  options: DecodingOptions = DecodingOptions(),
  max_input_length: int | None = None,
  max_length: int | None = None,
  literal_sentinels: bool = False,
) -> None:
  """Answer the lines of standard input until it ends.

  On a terminal, there are a prompt and commands (`:help`). Otherwise every line is an input and gives one line of
  output: the answers, each followed by its log-probability, separated by tabs.

  Args:
    model: the model.
    partitioner: partitioner of the parameters.
    task_feature_lengths: feature lengths of training; with 'targets' only, the model continues the inputs.
    restore_checkpoint_cfg: the checkpoint.
    options: decoding options.
    max_input_length: maximum length of inputs in tokens; default as in training, or half of 'targets' without inputs.
    max_length: maximum length of answers in tokens; default as in training, or half of 'targets' without inputs.
    literal_sentinels: encode `<extra_id_0>` like any other text, as the task of training with this option.

  Raises:
    ConfigError: options are invalid for the model or the mesh.
    CheckpointError: the checkpoint is missing, damaged or of another model.
  """
  for name, stream in (('Standard input', sys.stdin), ('Standard output', sys.stdout)):
    if stream is None:
      raise ConfigError(f'{name} must be a terminal or a pipe, got a closed stream.')
  talk = Chat(
    model,
    partitioner,
    task_feature_lengths,
    restore_checkpoint_cfg,
    options,
    max_input_length,
    max_length,
    literal_sentinels,
  )
  if sys.stdin.isatty() and sys.stdout.isatty():
    on_terminal(talk, sys.stdout)
  else:
    _from_pipe(talk, sys.stdin, sys.stdout)


def _from_pipe(talk: Chat, lines: TextIO, out: TextIO) -> None:
  number = 0
  for number, line in enumerate(_lines(lines), start=1):
    if any('\ud800' <= c <= '\udfff' for c in line):
      _logger.error('Line %d is not UTF-8 and is skipped.', number)
      _print('', out)
    else:
      _print(
        '\t'.join(f'{answer.text}\t{answer.log_prob:.6g}' for answer in talk.answer(line)), out
      )
  if not number:
    _logger.warning('Standard input was empty.')


def _lines(stream: Any) -> Iterator[str]:
  """Yield lines without line ends; bytes that are not UTF-8 become surrogates."""
  stream.reconfigure(errors='surrogateescape')
  for line in stream:
    yield line.removesuffix('\n').removesuffix('\r')


def on_terminal(talk: Chat, out: TextIO) -> None:
  """Answer inputs typed at a terminal until the input ends."""
  with contextlib.suppress(ImportError):
    import readline as readline  # Line editing and history of `input`.
  _print('Type an input; :help lists the commands, Ctrl-D quits.', out)
  last = None
  try:
    while True:
      line = input(_PROMPT)
      if line.startswith(':') and not line.startswith('::'):
        command, _, argument = line.partition(' ')
        if command == ':quit':
          return
        _command(talk, command, argument.strip(), last, out)
      elif line.strip():
        if line.startswith('::'):
          last = line.removeprefix(':')
        else:
          last = line
        _print_answers(talk, last, out)
  except EOFError:
    _print('', out)  # The shell's prompt starts on a new line.
  except KeyboardInterrupt:
    _print('', out)


def _print_answers(talk: Chat, line: str, out: TextIO) -> None:
  try:
    answers = talk.answer(line)
  except DataError as error:  # The input is not UTF-8.
    _print(f'{error}', out)
    return
  for rank, (text, log_prob) in enumerate(answers, start=1):
    number = f'{rank}. ' if len(answers) > 1 else ''
    _print(f'{number}{text}  [{log_prob:.4g}]', out)


def _command(talk: Chat, command: str, argument: str, last: str | None, out: TextIO) -> None:
  if command == ':help':
    _print(
      'Each input gets an answer, followed by the log-probability of its tokens in brackets.', out
    )
    for name, what in _COMMANDS.items():
      _print(f'  {name:<15}{what}', out)
    _print('  ::TEXT         input that begins with a colon', out)
  elif command == ':score':
    if last is None:
      _print('No input yet: type an input first.', out)
    else:
      _print(f'[{talk.score(last, argument):.4g}]', out)
  else:
    _print(
      f'{command} is not a command.{did_you_mean(command, [name.split()[0] for name in _COMMANDS])}',
      out,
    )


def one_line(text: str) -> str:
  """Return `text` with every non-printable character escaped.

  >>> print(one_line('a\\nb\\x1b[K é'))
  a\\nb\\x1b[K é
  """
  return printable(text)


def _print(line: str, out: TextIO) -> None:
  encoding = out.encoding or 'utf-8'
  print(line.encode(encoding, errors='backslashreplace').decode(encoding), file=out, flush=True)


def feature_lengths(
  of_training: Mapping[str, int], max_input_length: int | None, max_length: int | None
) -> dict[str, int]:
  """Return the lengths of inputs and targets in tokens.

  Args:
    of_training: feature lengths of training.
    max_input_length: length of inputs, or None.
    max_length: length of targets, or None.

  Raises:
    ConfigError: a length is invalid, or the run has no length of targets.
  """
  lengths = dict(of_training)
  if 'inputs' not in lengths and 'targets' in lengths:
    # Inputs and targets together are as long as the training sequences.
    lengths['inputs'] = max(1, lengths['targets'] // 2)
    lengths['targets'] = max(1, lengths['targets'] - lengths['inputs'])
  given = dict(zip(_LENGTHS.values(), (max_input_length, max_length), strict=True))
  required = checks.Expectation(
    f'{_COUNT.text}, as the run has no length of targets (task_feature_lengths = {dict(of_training)})',
    _COUNT.holds,
    'Set --max_input_length and --max_length.',
  )
  expectations = dict.fromkeys(given, _COUNT.or_none())
  if 'targets' not in lengths:
    expectations[_LENGTHS['targets']] = required
  checks.check('', given, **expectations)
  for feature, flag in _LENGTHS.items():
    length = given[flag]
    if length is not None:
      lengths[feature] = length
  return lengths
