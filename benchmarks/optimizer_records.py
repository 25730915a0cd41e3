"""Recorded measurements of optimizers, and the tables of the documentation that show them.

    python benchmarks/optimizers.py --only lion adamw --record    # measures, records, writes the tables
    python benchmarks/optimizer_records.py                        # writes the tables again from the records

A line of `results/optimizers.jsonl` is one optimizer on one set of parameters. No figure is typed into a table: a new
optimizer gets a row with empty ratios in docs/optimizers.md, and `--record` fills them; `tests/repository/test_docs.py`
compares both. All figures are a table of docs/benchmarks.md that is made when the pages are built.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import pathlib
import re

_ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = 'benchmarks/results/optimizers.jsonl'
PARAMS = ('set', 't5_small')
# Rows of the benchmark that are a file of gin/optimizers/ with other bindings, and that file.
VARIANTS = {'scaled_adam_unclipped': 'scaled_adam'}
# Page with a row for each optimizer, the comment before each of its tables, and the number of cells before the ratios.
PAGE = 'docs/optimizers.md'
_COMMENT = '<!-- optimizers -->\n'
_FIRST_RATIO = 4


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
  """Replace or add these records, keep the others, and write the ratios into the tables of `PAGE`.

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
  write_tables(root)


def write_tables(root: pathlib.Path = _ROOT) -> None:
  """Write the recorded ratios into the tables of `PAGE`, in rows whose optimizer is measured on both sets."""
  records = read(root)
  path = root / PAGE
  lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
  for index, name in _rows(lines).items():
    if not _missing(name, records):
      lines[index] = _with_ratios(lines[index], _ratios(name, records))
  path.write_text(''.join(lines), encoding='utf-8')


def faults(text: str, records: Records) -> list[str]:
  """Return a message for each row whose ratios are not recorded, and for each record without a row.

  Args:
    text: contents of `PAGE`.
    records: result of `read`.
  """
  lines = text.splitlines(keepends=True)
  rows = _rows(lines)
  messages = []
  for index, name in rows.items():
    measure = _command(name)
    if missing := _missing(name, records):
      messages.append(
        f'{PAGE}: `{name}` has no record for {" and ".join(missing)} in {FILE}. Measure it: {measure}'
      )
      continue
    recorded = _ratios(name, records)
    shown = _cells(lines[index])[_FIRST_RATIO : _FIRST_RATIO + len(recorded)]
    if shown != recorded:
      messages.append(
        f'{PAGE}: `{name}` shows the ratios {", ".join(shown)}, and {FILE} has {", ".join(recorded)}. '
        f'Write those into the table: python benchmarks/optimizer_records.py, or measure again: {measure}'
      )
  names = {name for name, _ in records} - set(VARIANTS)
  for name in sorted(names - set(rows.values())):
    messages.append(
      f'{PAGE}: the record of `{name}` has no row. Delete it from {FILE}, or add a row with empty ratios and run '
      f'{_command(name)}'
    )
  return messages


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
  return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)


def state_text(bytes_per_param: float) -> str:
  """Return the size of a state as the tables show it."""
  return f'{round(bytes_per_param, 3):.2g}'


def _command(name):
  return f'python benchmarks/optimizers.py --only {name} --record'


def _missing(name, records):
  """Return the sets of parameters on which the optimizer is not measured."""
  return [params for params in PARAMS if (name, params) not in records]


def _ratios(name, records):
  """Return the measured cells of a row of `PAGE`: ratios with one decimal, or none from 10 on."""
  ratios = [records[name, params].ratio for params in PARAMS]
  return [f'{ratio:.1f}' if ratio < 9.95 else f'{ratio:.0f}' for ratio in ratios]


def _figures(measured):
  """Return the cells of `table` for an optimizer on one set of parameters."""
  figures = []
  for value in (measured.step_ms, measured.slowest_ms, measured.ratio, measured.compile_s):
    figures.append(f'{value:.3g}' if value < 99.5 else f'{value:.0f}')
  return [*figures, state_text(measured.bytes_per_param)]


def _rows(lines):
  """Return {index of a line: optimizer} of the rows of the tables of `PAGE`."""
  rows = {}
  for start, line in enumerate(lines):
    if line != _COMMENT:
      continue
    # An empty line is between the comment and the table.
    for index in range(start + 2, len(lines)):
      if not lines[index].startswith('|'):
        break
      if name := re.match(r'\| `(\w+)` \|', lines[index]):
        rows[index] = name[1]
  return rows


def _cells(line):
  return [cell.strip() for cell in line.split('|')[1:-1]]


def _with_ratios(line, ratios):
  """Return the row of a table with these ratios instead of its own."""
  cells = line.split('|')
  first = 1 + _FIRST_RATIO  # Before the first bar stands nothing.
  cells[first : first + len(ratios)] = [f' {ratio} ' for ratio in ratios]
  return '|'.join(cells)


if __name__ == '__main__':
  write_tables()
