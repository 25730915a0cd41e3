"""Write a routing report: one HTML page that needs no network, and each figure as a PNG next to it."""

from collections.abc import Callable, Iterator, Sequence
import os
import re

from moe.tools.report import figures
from moe.tools.report import findings as findings_lib
from moe.tools.report.data import History
from moe.tools.report.findings import LayerState
from moe.tools.report.style import Figure
from t5x_lite.apps.common import html_page
from t5x_lite.errors import ConfigError
from t5x_lite.formatting import format_percent
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

PAGE = 'index.html'
# Macros about routing in the run's config.gin, and classes whose parameters are all about routing.
_MACROS = (
  'NUM_EXPERTS',
  'ROUTER',
  'EXPERT_MLP_DIM',
  'SHARED_EXPERT_DIM',
  'TRAIN_EXPERT_CAPACITY_FACTOR',
  'EVAL_EXPERT_CAPACITY_FACTOR',
  'GROUP_SIZE',
  'BATCH_SIZE',
  'JITTER_NOISE',
  'AUX_LOSS_FACTOR',
  'ROUTER_Z_LOSS_FACTOR',
  'NUM_EXPERT_PARTITIONS',
)
_CLASSES = re.compile(r'(?:.*[./])?(?:\w+Router|SparseBlock)')


def write(history: History, folder: str | os.PathLike[str]) -> files.Path:
  """Write the report into a folder, and keep the other files of the folder.

  Each file is replaced atomically, the page last. Figures of an earlier report that this report lacks are deleted.

  Args:
    history: history of a run.
    folder: created if missing.

  Returns:
    The path of the page.

  Raises:
    ConfigError: matplotlib is missing, or the folder cannot be written.
  """
  drawn = figures.draw(history)
  text = page(history, drawn)
  folder = files.path(folder)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for figure in drawn:
      files.write(folder / f'{figure.name}.png', figure.png, durable=False)
    files.write(folder / PAGE, text, durable=False)
    for name in figures.NAMES - {figure.name for figure in drawn}:
      files.remove(folder / f'{name}.png')
  except OSError as error:
    raise ConfigError(
      f'Cannot write the report to {str(folder)!r}: {error.strerror}. Choose another folder '
      '(--out).'
    ) from error
  return folder / PAGE


def page(history: History, drawn: Sequence[Figure]) -> str:
  """Return the page as text. The same numbers give the same text."""
  states = findings_lib.layer_states(history)
  lines = [
    _header(history),
    *_summary(history, states),
    *_facts(history),
    *_table(history, states),
  ]
  for figure in drawn:
    lines += html_page.figure(figure.title, figure.caption, figure.svg, figure.narrow_svg)
  lines += _footer(history, drawn)
  return html_page.page(f'Routing report: {history.run.resolve().name}', lines)


def _header(history: History) -> str:
  counts = sorted({layer.num_experts for layer in history.layers})
  if len(counts) == 1:
    num_experts = html_page.count(counts[0], 'expert')
  else:
    numbers = ' or '.join(map(str, counts))
    num_experts = f'{numbers} experts'
  return html_page.header(
    f'Routing report: {history.run.resolve().name}',
    f'{html_page.count(len(history.layers), "sparse layer")} of {num_experts} · {_steps(history)} · written by '
    f'{html_page.code(history.writer)}',
  )


def _summary(history: History, states: Sequence[LayerState]) -> Iterator[str]:
  yield from html_page.cards(findings_lib.findings(history, states))
  yield html_page.note(
    f'Judged at the end, {history.end} (the last {html_page.count(history.num_end, "period")} of '
    f'{len(history.steps)} that were recorded). Thresholds: a layer is unbalanced if its busiest expert has at '
    f'least {findings_lib.UNBALANCED:g} times an even share; an expert is dead if it got no token, starved below '
    f'{findings_lib.STARVED:g} of an even share; drops are high '
    f'above {format_percent(findings_lib.HIGH_DROPS)}.'
  )


def _facts(history: History) -> Iterator[str]:
  yield from html_page.definitions('Run', _run_facts(history))
  settings = gin_settings(history.run)
  if settings:
    yield from html_page.definitions('Settings', settings, is_settings=True)
    yield html_page.note('From <code>config.gin</code>: the settings of the routing.')


def _run_facts(history: History) -> Iterator[tuple[str, str]]:
  yield 'Directory', str(history.run)
  for stack, layers in history.stacks.items():
    yield f'Sparse layers of the {stack}', ', '.join(str(layer.index) for layer in layers)
  yield 'Recorded', f'{html_page.count(len(history.steps), "period")}, {_steps(history)}'
  started, ended = map(html_page.utc_time, history.wall_times)
  if started and started == ended:
    yield 'Written', started
  elif started:
    yield 'Written', f'{started} to {ended}'
  for name, label in (
    ('loss', 'Loss'),
    ('experts/auxiliary_loss', 'Included load-balancing loss'),
    ('experts/router_z_loss', 'Included router z-loss'),
  ):
    if name in history.totals:
      value = float(history.at_end(history.totals[name]))
      yield label, f'{value:.4g}'


def gin_settings(run: files.Path) -> list[tuple[str, str]]:
  """Return (name, value) of the routing settings in the run's config.gin that fit on one line."""
  path = run / 'config.gin'
  if not path.is_file():
    return []
  found = {}
  for line in untrusted.read_regular(path).decode('utf-8', errors='replace').splitlines():
    if line.startswith(' '):  # Not a binding of the run, e.g. of a mesh rule.
      continue
    name, _, value = (part.strip() for part in line.partition('='))
    owner, _, parameter = name.rpartition('.')
    # The values of macros and the members of objects are on other lines; long values have several lines.
    if not value or value.endswith('\\') or (value.startswith(('%', '@')) and name != 'ROUTER'):
      continue
    if _CLASSES.fullmatch(owner):
      scope = owner.rpartition('/')[0]
      found[f'{scope}/{parameter}'.removeprefix('/')] = value
    elif name in _MACROS:
      found[name] = value
  order = {name: rank for rank, name in enumerate(_MACROS)}
  return sorted(found.items(), key=lambda item: order.get(item[0], len(order)))


def _busiest(state: LayerState) -> str:
  if state.busiest is None:
    return '–'
  return str(state.busiest)


# Heading, function of a cell's text, and predicate on bad values.
_Column = tuple[str, Callable[[LayerState], str], Callable[[LayerState], bool]]
_COLUMNS: tuple[_Column, ...] = (
  ('busiest expert', _busiest, lambda s: False),
  ('its load / even', lambda s: _ratio(s.largest), lambda s: s.largest >= findings_lib.UNBALANCED),
  ('least load / even', lambda s: _ratio(s.smallest), lambda s: s.smallest < findings_lib.STARVED),
  ('dead', lambda s: str(len(s.dead)), lambda s: bool(s.dead)),
  ('starved', lambda s: str(s.num_starved - len(s.dead)), lambda s: s.num_starved > len(s.dead)),
  ('entropy / maximum', lambda s: _share(s.entropy), lambda s: False),
  (
    'choices dropped',
    lambda s: _share(s.choices_dropped),
    lambda s: s.choices_dropped > findings_lib.HIGH_DROPS,
  ),
  (
    'tokens left behind',
    lambda s: _share(s.tokens_left_behind),
    lambda s: s.tokens_left_behind > findings_lib.HIGH_DROPS,
  ),
  (
    'receive drops',
    lambda s: _share(s.receive_drops),
    lambda s: s.receive_drops > findings_lib.HIGH_DROPS,
  ),
)


def _table(history: History, states: Sequence[LayerState]) -> Iterator[str]:
  rows = []
  for state in states:
    row: list[str | html_page.Cell] = [state.layer.name, str(state.layer.num_experts)]
    for _, text_fn, is_bad_fn in _COLUMNS:
      text = text_fn(state)
      row.append(html_page.Cell(text, is_bad=is_bad_fn(state)))
    rows.append(row)
  yield '<h2>Layers at the end</h2>'
  yield from html_page.table(['layer', 'experts', *(name for name, _, _ in _COLUMNS)], rows)
  missing = []
  for name, what in (
    ('choices_dropped', 'choices dropped'),
    ('router_entropy', 'entropy'),
    ('receive_drops', 'receive drops'),
  ):
    if all(layer.over_time(name) is None for layer in history.layers):
      missing.append(what)
  if missing:
    yield html_page.note(f'Not recorded by this run: {", ".join(missing)}.')


def _footer(history: History, drawn: Sequence[Figure]) -> Iterator[str]:
  drawn_names = {figure.name for figure in drawn}
  absent = [title for name, title in figures.ONLY_IF_ANY.items() if name not in drawn_names]
  if absent:
    yield html_page.note(f'Never above 0, so without a figure: {", ".join(absent)}.')
  if len(history.steps) == 1:
    yield html_page.note(
      'Only one period has been recorded: a map of the load over time needs two.'
    )
  names = ', '.join(html_page.code(f'{figure.name}.png') for figure in drawn)
  yield (
    f'<footer>From {html_page.code(f"{history.writer}/metrics.jsonl")}. The figures are also files next to '
    f'this page: {names}.</footer>'
  )


def _ratio(value: float) -> str:
  if value == 0:
    return '0'
  if value != value:
    return 'unknown'
  if value >= 0.005:
    return f'{value:.2f}×'
  return '<0.01×'


def _share(value: float) -> str:
  if value != value:
    return '–'
  return format_percent(value)


def _steps(history: History) -> str:
  first = int(history.steps[0])
  last = int(history.steps[-1])
  if first == last:
    return f'step {last}'
  return f'steps {first} to {last}'
