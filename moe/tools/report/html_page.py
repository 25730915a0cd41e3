"""Write a routing report: one HTML page that needs no network, and each figure as a PNG next to it."""

from collections.abc import Callable, Iterator, Sequence
import datetime
import html
import os
import re

from moe.tools.report import figures
from moe.tools.report import findings as findings_lib
from moe.tools.report.data import History
from moe.tools.report.findings import Finding
from moe.tools.report.findings import LayerState
from moe.tools.report.style import Figure
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
# `Finding.is_good` -> (class of the element, words).
_VERDICTS = {True: ('good', '✓ good'), False: ('bad', '▲ look here'), None: ('', '')}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --muted: #5b6776; --grid: #d3d9e1; --paper: #ffffff; --card: #f4f6f9;
  --good: #00674f; --bad: #a63d00; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --muted: #9fabb9; --grid: #39434f;
  --paper: #14191f; --card: #1d242c; --good: #4cc9a4; --bad: #ffa366; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .4rem; }
p { margin: .4rem 0; }
.lead, figcaption, .note, th, dt { color: var(--muted); }
.lead { margin: .3rem 0 0; overflow-wrap: anywhere; }
.findings { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: .8rem; margin: 1.4rem 0 .9rem; }
.finding { background: var(--card); border-left: 4px solid var(--grid); border-radius: 4px; padding: .8rem 1rem; }
.finding h3 { font-size: .85rem; font-weight: 600; margin: 0; color: var(--muted); }
.finding .value { font-size: 1.6rem; font-weight: 650; line-height: 1.25; }
.finding p { font-size: .92rem; overflow-wrap: anywhere; }
.finding.good { border-color: var(--good); } .finding.bad { border-color: var(--bad); }
.good .verdict { color: var(--good); } .bad .verdict, td.bad { color: var(--bad); font-weight: 600; }
.verdict { float: right; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.25rem; margin: .6rem 0; }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.settings { grid-template-columns: repeat(2, max-content 1fr); }
.settings dt { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .28rem .6rem; border-bottom: 1px solid var(--grid); vertical-align: bottom; }
th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; position: sticky; left: 0;
  background: var(--paper); }
figure { margin: 0; } figure svg { width: 100%; height: auto; display: block; margin-top: .5rem; }
figure svg text { font-family: system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif !important; }
figcaption { font-size: .92rem; max-width: 48rem; }
code { font: .9em ui-monospace, 'SFMono-Regular', Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.narrow { display: none; }
@media screen and (max-width: 44rem) {
  body { padding: 1.25rem 1rem 3rem; }
  dl, .settings { display: block; } .run dt { font-size: .85rem; } .run dd { margin-bottom: .55rem; }
  .settings dt, .settings dd { display: inline; } .settings dt::after { content: ' = '; }
  .settings dd::after { content: '\\A'; white-space: pre; }
  .wide { display: none; } .narrow { display: block; } }
footer { margin-top: 3rem; border-top: 1px solid var(--grid); padding-top: .8rem; font-size: .85rem;
  color: var(--muted); }
@media print { @page { margin: 14mm; } :root { color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  figure, .finding, tr { break-inside: avoid; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  h2 { break-after: avoid; } .scroll { overflow: visible; }
  .finding { border: 1px solid var(--grid); border-left-width: 4px; } }
"""


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
  name = html.escape(history.run.resolve().name)
  lines = [
    *_header(history, name),
    *_summary(history, states),
    *_facts(history),
    *_table(history, states),
  ]
  for figure in drawn:
    lines += _figure(figure)
  lines += _footer(history, drawn)
  body = '\n'.join(lines)
  return (
    f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
    f'content="width=device-width, initial-scale=1">\n<title>Routing report: {name}</title>\n'
    f'<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n'
  )


def _header(history: History, name: str) -> Iterator[str]:
  counts = sorted({layer.num_experts for layer in history.layers})
  if len(counts) == 1:
    num_experts = _count(counts[0], 'expert')
  else:
    numbers = ' or '.join(map(str, counts))
    num_experts = f'{numbers} experts'
  yield f'<header><h1>Routing report: {name}</h1>'
  yield (
    f'<p class="lead">{_count(len(history.layers), "sparse layer")} of {num_experts}'
    f' · {_steps(history)} · written by <code>{html.escape(history.writer)}</code></p></header>'
  )


def _summary(history: History, states: Sequence[LayerState]) -> Iterator[str]:
  yield '<section class="findings" aria-label="Summary">'
  for finding in findings_lib.findings(history, states):
    yield _finding(finding)
  yield '</section>'
  yield (
    f'<p class="note">Judged at the end, {history.end} (the last {_count(history.num_end, "period")} of '
    f'{len(history.steps)} that were recorded). Thresholds: a layer is unbalanced if its busiest expert has at '
    f'least {findings_lib.UNBALANCED:g} times an even share; an expert is dead if it got no token, starved below '
    f'{findings_lib.STARVED:g} of an even share; drops are high '
    f'above {format_percent(findings_lib.HIGH_DROPS)}.</p>'
  )


def _finding(finding: Finding) -> str:
  kind, verdict = _VERDICTS[finding.is_good]
  return (
    f'<div class="finding {kind}"><span class="verdict">{verdict}</span><h3>{html.escape(finding.title)}</h3>'
    f'<div class="value">{html.escape(finding.value)}</div><p>{html.escape(finding.text)}</p></div>'
  )


def _facts(history: History) -> Iterator[str]:
  yield from _definitions('Run', 'run', list(_run_facts(history)))
  settings = gin_settings(history.run)
  if settings:
    yield from _definitions('Settings', 'settings', settings)
    yield '<p class="note">From <code>config.gin</code>: the settings of the routing.</p>'


def _definitions(title: str, kind: str, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
  """Yield a heading and a list of names with values; those of settings are code."""
  tag = ('', '')
  if kind == 'settings':
    tag = ('<code>', '</code>')
  yield f'<h2>{title}</h2>\n<dl class="{kind}">'
  for name, value in pairs:
    yield f'<dt>{html.escape(name).join(tag)}</dt><dd>{html.escape(value).join(tag)}</dd>'
  yield '</dl>'


def _run_facts(history: History) -> Iterator[tuple[str, str]]:
  yield 'Directory', str(history.run)
  for stack, layers in history.stacks.items():
    yield f'Sparse layers of the {stack}', ', '.join(str(layer.index) for layer in layers)
  yield 'Recorded', f'{_count(len(history.steps), "period")}, {_steps(history)}'
  started, ended = map(_time, history.wall_times)
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
  yield '<h2>Layers at the end</h2>\n<div class="scroll"><table>'
  headings = ['layer', 'experts', *(name for name, _, _ in _COLUMNS)]
  cells = ''.join(f'<th scope="col">{heading}</th>' for heading in headings)
  yield f'<thead><tr>{cells}</tr></thead>\n<tbody>'
  for state in states:
    cells = ''
    for _, text, is_bad in _COLUMNS:
      tag = '<td>'
      if is_bad(state):
        tag = '<td class=bad>'
      cells += f'{tag}{html.escape(text(state))}</td>'
    yield f'<tr><td>{html.escape(state.layer.name)}</td><td>{state.layer.num_experts}</td>{cells}</tr>'
  yield '</tbody></table></div>'
  missing = []
  for name, what in (
    ('choices_dropped', 'choices dropped'),
    ('router_entropy', 'entropy'),
    ('receive_drops', 'receive drops'),
  ):
    if all(layer.over_time(name) is None for layer in history.layers):
      missing.append(what)
  if missing:
    yield f'<p class="note">Not recorded by this run: {", ".join(missing)}.</p>'


def _figure(figure: Figure) -> Iterator[str]:
  yield f'<figure><h2>{html.escape(figure.title)}</h2>'
  yield f'<figcaption>{html.escape(figure.caption)}</figcaption>'
  yield f'<div class="wide">{figure.svg}</div>\n<div class="narrow">{figure.narrow_svg}</div></figure>'


def _footer(history: History, drawn: Sequence[Figure]) -> Iterator[str]:
  drawn_names = {figure.name for figure in drawn}
  absent = [title for name, title in figures.ONLY_IF_ANY.items() if name not in drawn_names]
  if absent:
    yield f'<p class="note">Never above 0, so without a figure: {", ".join(absent)}.</p>'
  if len(history.steps) == 1:
    yield '<p class="note">Only one period has been recorded: a map of the load over time needs two.</p>'
  names = ', '.join(f'<code>{figure.name}.png</code>' for figure in drawn)
  yield (
    f'<footer>From <code>{html.escape(history.writer)}/metrics.jsonl</code>. The figures are also files next to '
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


def _count(number: int, what: str) -> str:
  if number == 1:
    return f'{number} {what}'
  return f'{number} {what}s'


def _steps(history: History) -> str:
  first = int(history.steps[0])
  last = int(history.steps[-1])
  if first == last:
    return f'step {last}'
  return f'steps {first} to {last}'


def _time(seconds: float) -> str:
  if seconds != seconds:
    return ''
  return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime('%Y-%m-%d %H:%M UTC')
