"""Talks with a trained model: each line is an input; what the model makes of it is printed with its log-probability.

    t5x_lite chat runs/keyword_cloze
    echo '<extra_id_0> x in numbers:' | t5x_lite chat runs/keyword_cloze/checkpoint_500
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import logging
import math
import sys
import time
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import decoding
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite.apps.common import report
from t5x_lite.apps.common import restore as restore_lib
from t5x_lite.data import text_examples
from t5x_lite.errors import ConfigError, DataError, did_you_mean
from t5x_lite.interactive import texts as text_inference
from t5x_lite.train_state import InferenceState

_PROMPT = '> '
_COMMANDS = {
    ':score TARGET': 'the log-probability of TARGET as the answer to the last input',
    ':help': 'show this',
    ':quit': 'end, as Ctrl-D does',
}
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingOptions:
  """How answers are decoded; by default as the model's own `decode_fn` does.

  Attributes:
    num_decodes: how many answers to show for each input, the best first; more than one are sampled, or the best beams.
    temperature: sample at this temperature; 0 takes the most probable token.
    topk: sample from this many most probable tokens.
    topp: sample from the most probable tokens that together have this probability.
    beam_size: search with this many beams.
    seed: of what is sampled; input k draws with the seed folded with k.
  """

  num_decodes: int = 1
  temperature: float | None = None
  topk: int | None = None
  topp: float | None = None
  beam_size: int | None = None
  seed: int = 0

  def __post_init__(self) -> None:
    for name, smallest in (('num_decodes', 1), ('beam_size', 1), ('topk', 1), ('seed', 0)):
      value = getattr(self, name)
      if value is not None and (isinstance(value, bool) or not isinstance(value, int)
                                or not smallest <= value < 2**31):
        flag = {'beam_size': 'beam'}.get(name, name)
        raise ConfigError(f'{flag} (--{flag}) is {value!r}; expected a whole number from {smallest} up.')
    if self.temperature is not None and not 0 <= self.temperature < math.inf:
      raise ConfigError(f'temperature is {self.temperature!r}; expected a finite number, at least 0.')
    if self.topp is not None and not 0 < self.topp <= 1:
      raise ConfigError(f'topp is {self.topp!r}; expected a probability above 0, up to 1.')
    if self.topk is not None and self.topp is not None:
      raise ConfigError(f'topk={self.topk} and topp={self.topp} exclude each other. Give one of them.')
    sampling = {name: value for name in ('temperature', 'topk', 'topp') if (value := getattr(self, name)) is not None}
    if self.beam_size is not None and sampling:
      name, value = next(iter(sampling.items()))
      raise ConfigError(f'beam={self.beam_size} and {name}={value} exclude each other: beam search draws nothing. Give '
                        'one of them.')
    if self.beam_size is not None and self.num_decodes > self.beam_size:
      raise ConfigError(f'num_decodes={self.num_decodes} and beam={self.beam_size}: expected at least as many beams as '
                        f'answers. Set beam to {self.num_decodes}.')

  def apply(self, model: models.BaseTransformerModel) -> tuple[models.BaseTransformerModel, dict[str, Any]]:
    """Returns (model, options of its `predict_batch_with_aux`) that decode so."""
    if self.beam_size is not None:
      return (model.with_decode_fn(decoding.beam_search),
              {'num_decodes': self.beam_size, 'return_all_decodes': True})
    if self.num_decodes == 1 and self.temperature is None and self.topk is None and self.topp is None:
      return model, {}
    # T5X's default of topk, 1, would leave nothing to draw.
    drawn = {'temperature': 1.0 if self.temperature is None else float(self.temperature), 'topk': self.topk or 0,
             'topp': self.topp or 0.0}
    return (model.with_decode_fn(decoding.temperature_sample),
            {'num_decodes': self.num_decodes, 'return_all_decodes': True, 'decoder_params': drawn})


class Answer(NamedTuple):
  """What a model makes of an input.

  Attributes:
    text: the text, on one line.
    log_prob: log-probability of its tokens, the end-of-sequence token included.
  """

  text: str
  log_prob: float


class Chat:
  """A model ready to answer."""

  def __init__(self, model: models.BaseTransformerModel, partitioner: partitioning.PjitPartitioner,
               task_feature_lengths: Mapping[str, int],
               restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig, options: DecodingOptions,
               max_input_length: int | None = None, max_length: int | None = None):
    """Restores the parameters and compiles; see `chat`."""
    if jax.process_count() > 1:
      raise ConfigError(f'chat got {jax.process_count()} processes; expected one, at which a person types. Start it '
                        'without a coordinator, or use infer.')
    self._options = options
    self._vocabulary = model.output_vocabulary
    model, self._predict_options = options.apply(model)
    # A model of targets alone goes on with what is typed, which therefore has no end.
    goes_on = 'inputs' not in task_feature_lengths
    lengths = feature_lengths(task_feature_lengths, max_input_length, max_length)
    # The fewest rows that divide over the mesh: one is used.
    batch_size = partitioner.data_mesh_size
    spec = text_inference.element_spec(model, lengths, batch_size)
    progress = runtime.Progress()
    progress.note('restoring the parameters')
    try:
      restored = next(restore_lib.restore_for_inference(
          model, restore_checkpoint_cfg, partitioner, {name: leaf.shape for name, leaf in spec.items()}))
      self._state: InferenceState = restored.train_state
      progress.log(f'{restored.path}: {report.run_header(self._state, partitioner)}, step {restored.step:,}.')
      self._inference = text_inference.TextInference(
          model, partitioner, restored.train_state_axes, lengths, batch_size,
          {'inputs': not goes_on, 'targets': True},
          {'inputs': '--max_input_length sets it', 'targets': '--max_length sets it'})
      progress.note('compiling')
      started = time.perf_counter()
      self._inference.compile('predict', self._state, **self._predict_options)
      self._inference.compile('score', self._state)
      progress.log(f'Compiled in {time.perf_counter() - started:.1f} s.')
    finally:
      progress.clear()
    self._num_inputs = 0

  def answer(self, text: str) -> list[Answer]:
    """Returns the answers to an input, the best first; of equal ones but one."""
    example, = self._inference.reader.read([text])
    (ids,), _ = self._inference.predict(
        self._state, [example], seed=self._options.seed, first=self._num_inputs, **self._predict_options)
    self._num_inputs += 1
    # Decoders return the best last.
    decodes = [self._until_end(row) for row in np.atleast_2d(ids)[::-1]][:self._options.num_decodes]
    decodes = list({tuple(row.tolist()): row for row in decodes}.values())
    # What decoders call scores depends on the algorithm; log-probabilities are those of `:score` as well.
    log_probs, _ = self._inference.score(self._state, [{**example, 'targets': row} for row in decodes])
    return [Answer(one_line(text_examples.decode_ids(row, self._vocabulary)), log_prob)
            for row, log_prob in zip(decodes, log_probs, strict=True)]

  def score(self, text: str, target: str) -> float:
    """Returns the log-probability of a target as the answer to an input."""
    examples = self._inference.reader.read([{'inputs': text, 'targets': target}])
    return self._inference.score(self._state, examples)[0][0]

  def _until_end(self, ids: np.ndarray) -> np.ndarray:
    """Returns the ids of an answer: up to the first end-of-sequence id; without one, all but padding at the end."""
    # What stands in one row with its input may have had more room.
    ids = ids[:self._inference.reader.lengths['targets']]
    ends = np.flatnonzero(ids == self._vocabulary.eos_id)
    if len(ends):
      return ids[:ends[0] + 1]
    used = np.flatnonzero(ids)
    return ids[:used[-1] + 1 if len(used) else 0]


def chat(*, model: models.BaseTransformerModel, partitioner: partitioning.PjitPartitioner,
         task_feature_lengths: Mapping[str, int], restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig,
         options: DecodingOptions = DecodingOptions(), max_input_length: int | None = None,
         max_length: int | None = None) -> None:
  """Answers standard input line by line, until it ends.

  On a terminal there are a prompt and commands (`:help`). Elsewhere every line is an input, and each gives one line of
  output: answer and log-probability, separated by a tab, and so on for further answers.

  Args:
    model: the model.
    partitioner: lays parameters out over the mesh.
    task_feature_lengths: what the model was trained with; with 'targets' alone it goes on with what is typed.
    restore_checkpoint_cfg: the checkpoint.
    options: how answers are decoded.
    max_input_length: length in ids of inputs; by default as in training, or of 'targets' alone the half.
    max_length: the same for answers.

  Raises:
    ConfigError: options that do not fit the model or the mesh.
    CheckpointError: there is no checkpoint, it is damaged, or it is of another model.
  """
  if sys.stdin is None:
    raise ConfigError('Standard input is closed; expected a terminal, or lines to answer.')
  if sys.stdout is None:
    raise ConfigError('Standard output is closed; expected a terminal, or a reader of the answers.')
  talk = Chat(model, partitioner, task_feature_lengths, restore_checkpoint_cfg, options, max_input_length, max_length)
  if sys.stdin.isatty() and sys.stdout.isatty():
    on_terminal(talk, sys.stdout)
  else:
    _from_pipe(talk, sys.stdin, sys.stdout)


def _from_pipe(talk: Chat, lines: TextIO, out: TextIO) -> None:
  number = 0
  for number, line in enumerate(_lines(lines), start=1):
    if any('\ud800' <= c <= '\udfff' for c in line):
      _logger.error('Line %d is not UTF-8: it is left out.', number)
      _print('', out)
    else:
      _print('\t'.join(f'{answer.text}\t{answer.log_prob:.6g}' for answer in talk.answer(line)), out)
  if not number:
    _logger.warning('Standard input was empty: there was nothing to answer.')


def _lines(stream: TextIO) -> Iterator[str]:
  """Yields lines without their ends; one that is not UTF-8 has surrogates in it."""
  stream.reconfigure(errors='surrogateescape')
  for line in stream:
    yield line.removesuffix('\n').removesuffix('\r')


def on_terminal(talk: Chat, out: TextIO) -> None:
  """Answers texts typed at a terminal until its input ends."""
  try:
    import readline as readline  # line editing and history for `input`
  except ImportError:
    pass
  _print('Type an input; :help lists the commands, Ctrl-D ends.', out)
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
        last = line.removeprefix(':') if line.startswith('::') else line
        _print_answers(talk, last, out)
  except EOFError:
    _print('', out)  # the shell's prompt goes on a line of its own
  except KeyboardInterrupt:
    _print('', out)


def _print_answers(talk: Chat, line: str, out: TextIO) -> None:
  try:
    answers = talk.answer(line)
  except DataError as error:  # not UTF-8
    _print(f'{error}', out)
    return
  for rank, (text, log_prob) in enumerate(answers, start=1):
    _print(f'{f"{rank}. " if len(answers) > 1 else ""}{text}  [{log_prob:.4g}]', out)


def _command(talk: Chat, command: str, argument: str, last: str | None, out: TextIO) -> None:
  if command == ':help':
    _print('An input is answered with a text and, in brackets, the log-probability of its tokens.', out)
    for name, what in _COMMANDS.items():
      _print(f'  {name:<15}{what}', out)
    _print('  ::TEXT         an input that begins with a colon', out)
  elif command == ':score':
    if last is None:
      _print('There is no input yet: type one first.', out)
    else:
      _print(f'[{talk.score(last, argument):.4g}]', out)
  else:
    _print(f'There is no command {command}.{did_you_mean(command, [name.split()[0] for name in _COMMANDS])}', out)


def one_line(text: str) -> str:
  """Returns `text` with everything that would move the cursor escaped.

  >>> print(one_line('a\\nb\\x1b[K é'))
  a\\nb\\x1b[K é
  """
  return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in text)


def _print(line: str, out: TextIO) -> None:
  encoding = out.encoding or 'utf-8'
  print(line.encode(encoding, errors='backslashreplace').decode(encoding), file=out, flush=True)


def feature_lengths(
    of_training: Mapping[str, int], max_input_length: int | None, max_length: int | None) -> dict[str, int]:
  """Returns the lengths of inputs and answers in ids."""
  lengths = dict(of_training)
  if 'inputs' not in lengths and 'targets' in lengths:
    # Together as long as what the model was trained on.
    lengths['inputs'] = max(1, lengths['targets'] // 2)
    lengths['targets'] = max(1, lengths['targets'] - lengths['inputs'])
  for feature, name, length in (
      ('inputs', 'max_input_length', max_input_length), ('targets', 'max_length', max_length)):
    if length is not None:
      if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ConfigError(f'{name} is {length!r}; expected a whole number from 1 up.')
      lengths[feature] = length
  if 'targets' not in lengths:
    raise ConfigError(f'The run has no lengths of texts (task_feature_lengths = {dict(of_training)}); expected those '
                      'of inputs and targets. Set --max_input_length and --max_length.')
  return lengths
