"""Recorded measurements of optimizers, and the tables of the documentation that show them.

    python benchmarks/optimizers.py --only lion adamw --record    # measures and records
    make reference                                                # writes the tables

A line of `results/optimizers.jsonl` is one optimizer on one set of parameters. No figure is typed into a table:
`overview` and `table` make both tables of the reference, from these records and the first paragraphs of the files of
gin/optimizers/.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import itertools
import json
import pathlib
import re

_ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = 'benchmarks/results/optimizers.jsonl'
PARAMS = ('set', 't5_small')
# Rows of the benchmark that are a file of gin/optimizers/ with other bindings, and that file.
VARIANTS = {'scaled_adam_unclipped': 'scaled_adam'}
_FILES = 'gin/optimizers'
# A learning rate in the first paragraph of a file, and the sentence that says nothing else.
_RATE = re.compile(
  r'\b(?:(?:begin|start) with(?: a rate of)?|trains at|about) (\d[\d.]*(?:e-\d+)?)'
)
_RATE_SENTENCE = re.compile(
  r" Uses the trainer's learning rate; start with [\d.]+(?:e-\d+)?\.(?= |$)"
)
_ARXIV = re.compile(r'\b(?:arXiv:|arxiv\.org/abs/)(\d{4}\.\d{5}|\d{4}\.\d{4})\b')


@dataclasses.dataclass(frozen=True)
class Record:
  """A measurement of one optimizer on one set of parameters.

  Attributes:
    optimizer: name of a file of gin/optimizers/, or of `VARIANTS`.
    params: one of `PARAMS`.
    num_params: number of parameters.
    num_steps: number of steps that count.
    step_ms: their median; the mean where work returns every few steps.
    slowest_ms: the slowest of them.
    adam_ms: median of the steps of `optax.adam` between them.
    compile_s: seconds of compilation.
    state_bytes: size of the optimizer state.
    matmul_gflops: rates of a bare matmul before and after the run.
    date: day of the run, as 2026-11-29.
    command: command that measured it.
    machine: processor, devices and versions.
  """

  optimizer: str
  params: str
  num_params: int
  num_steps: int
  step_ms: float
  slowest_ms: float
  adam_ms: float
  compile_s: float
  state_bytes: int
  matmul_gflops: list[float]
  date: str
  command: str
  machine: str

  @property
  def ratio(self) -> float:
    """Time of a step divided by that of `optax.adam`."""
    return self.step_ms / self.adam_ms

  @property
  def bytes_per_param(self) -> float:
    """Size of the state divided by the number of parameters."""
    return self.state_bytes / self.num_params


Records = Mapping[tuple[str, str], Record]


def read(root: pathlib.Path = _ROOT) -> dict[tuple[str, str], Record]:
  """Return the records of a checkout by (optimizer, params)."""
  path = root / FILE
  if not path.exists():
    return {}
  records = {}
  for line in path.read_text(encoding='utf-8').splitlines():
    known = Record(**json.loads(line))
    records[known.optimizer, known.params] = known
  return records


def save(measured: Iterable[Record], root: pathlib.Path = _ROOT) -> None:
  """Replace or add these records, and keep the others.

  Args:
    measured: new records.
    root: folder of the checkout.
  """
  records = read(root)
  for new in measured:
    records[new.optimizer, new.params] = new
  lines = [json.dumps(dataclasses.asdict(records[key])) + '\n' for key in sorted(records)]
  path = root / FILE
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(lines), encoding='utf-8')


def faults(names: Iterable[str], records: Records) -> list[str]:
  """Return a message for each file without a record, and for each record without a file.

  Args:
    names: files of gin/optimizers/ without their suffix.
    records: result of `read`.
  """
  names = sorted(names)
  messages = []
  for name in [*names, *sorted(VARIANTS)]:
    if missing := _missing(name, records):
      messages.append(
        f'`{name}` has no record for {" and ".join(missing)} in {FILE}. Measure it: '
        f'python benchmarks/optimizers.py --only {name} --record'
      )
  recorded = {name for name, _ in records} - set(VARIANTS)
  for name in sorted(recorded.difference(names)):
    messages.append(
      f'{FILE} has a record of `{name}`, and {_FILES} no such file. Delete the record.'
    )
  return messages


def first_paragraph(name: str, root: pathlib.Path = _ROOT) -> str:
  """Return the first paragraph of the comment at the top of a file of gin/optimizers/, on one line.

  Args:
    name: file without its suffix.
    root: folder of the checkout.
  """
  lines = (root / _FILES / f'{name}.gin').read_text(encoding='utf-8').splitlines()
  paragraph = itertools.takewhile(lambda line: line.startswith('# '), lines)
  return ' '.join(line.removeprefix('# ') for line in paragraph)


def rate(paragraph: str) -> str:
  """Return the learning rate to start with that a first paragraph gives; empty if it gives none."""
  written = _RATE.search(paragraph)
  return written[1].rstrip('.') if written else ''


def overview(records: Records, root: pathlib.Path = _ROOT) -> str:
  """Return what each optimizer is, its rate, state and times as a Markdown table, in order of the state.

  Args:
    records: result of `read`.
    root: folder of the checkout.
  """
  measured = {name for name, _ in records if name not in VARIANTS and not _missing(name, records)}
  states = {name: state_text(records[name, 'set'].bytes_per_param) for name in measured}
  lines = [['file', 'optimizer', 'rate', 'state', 'step', 'T5 small'], ['---'] * 6]
  for name in sorted(measured, key=lambda name: (float(states[name]), name)):
    paragraph = first_paragraph(name, root)
    described = _ARXIV.sub(
      r'[arXiv:\1](https://arxiv.org/abs/\1)', _RATE_SENTENCE.sub('', paragraph)
    )
    lines.append([f'`{name}`', described, rate(paragraph), states[name], *_ratios(name, records)])
  return _markdown(lines)


def table(records: Records) -> str:
  """Return all figures as a Markdown table: a row for each optimizer that is measured on both sets.

  Args:
    records: result of `read`.
  """
  columns = (
    'step, ms',
    'slowest, ms',
    'to `optax.adam`',
    'compile, s',
    'state, bytes per parameter',
  )
  head = ['file', *columns, *columns]
  head[1 + len(columns)] = f'T5 small: {columns[0]}'
  lines = [head, ['---'] * len(head)]
  for name in sorted({name for name, _ in records}):
    if not _missing(name, records):
      measured = [records[name, params] for params in PARAMS]
      lines.append([f'`{name}`', *(figure for one in measured for figure in _figures(one))])
  return _markdown(lines)


def state_text(bytes_per_param: float) -> str:
  """Return the size of a state as the tables show it."""
  return f'{round(bytes_per_param, 3):.2g}'


def _markdown(lines):
  return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)


def _missing(name, records):
  """Return the sets of parameters on which the optimizer is not measured."""
  return [params for params in PARAMS if (name, params) not in records]


def _ratios(name, records):
  """Return the measured cells of a row of `overview`: ratios with one decimal, or none from 10 on."""
  ratios = [records[name, params].ratio for params in PARAMS]
  return [f'{ratio:.1f}' if ratio < 9.95 else f'{ratio:.0f}' for ratio in ratios]


def _figures(measured):
  """Return the cells of `table` for an optimizer on one set of parameters."""
  figures = []
  for value in (measured.step_ms, measured.slowest_ms, measured.ratio, measured.compile_s):
    figures.append(f'{value:.3g}' if value < 99.5 else f'{value:.0f}')
  return [*figures, state_text(measured.bytes_per_param)]
