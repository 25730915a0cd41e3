"""Sections of a report, as elements of the page."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import math
import re
from typing import Any

import numpy as np

from t5x_lite.apps.common import html_page
from t5x_lite.apps.common import metric_points
from t5x_lite.apps.common.html_page import Card
from t5x_lite.apps.common.html_page import Cell
from t5x_lite.apps.common.html_page import code
from t5x_lite.apps.common.html_page import count
from t5x_lite.apps.report import examples
from t5x_lite.apps.report.run_record import RunRecord
from t5x_lite.formatting import capitalized
from t5x_lite.formatting import format_duration
from t5x_lite.formatting import format_percent
from t5x_lite.runtime import goodput

# Metrics of which lower and higher values are better.
_LOWER = re.compile(r'(.*/)?(loss|cross_ent_loss|perplexity|cer|wer)')
_HIGHER = re.compile(
  r'(.*/)?(accuracy|exact_match|bleu|bleu_t5|chrf|rouge\w+|em|f1|macro_f1|token_f1|matthews|pearson|spearman|squad)'
)
_KINDS = {
  'train': 'Training',
  'training_eval': 'Evaluation',
  'inference_eval': 'Evaluation by decoding',
}
_NUM_EXAMPLES = 10
_NUM_WARNINGS = 50
_NUM_DAMAGED = 20
# Values of a table of the configuration, those of one that is open although it is less important, and characters of a
# value.
_NUM_VALUES = 100
_MAX_OPEN = 12
_MAX_VALUE = 300
# Cell of a value that a run does not have.
_UNKNOWN = '–'
_LOAD = re.compile(r'experts/(.+)/layers_(\d+)/load')
STYLE = """
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
details { margin: .7rem 0; } summary { cursor: pointer; color: var(--muted); }
.text th, .text td { text-align: left; vertical-align: top; }
.text td { overflow-wrap: anywhere; min-width: 5rem; } .named td:first-child { min-width: 12rem; }
.stacked td:first-child { white-space: pre-wrap; } .stacked td { white-space: pre-wrap; }
.metrics { table-layout: fixed; } .metrics th:first-child { width: 34%; } small { color: var(--muted); }
.bar { display: flex; height: 1.1rem; border-radius: 4px; overflow: hidden; margin: .3rem 0 .5rem; }
.bar span, .key { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.key { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px; margin-right: .5rem; }
.load { width: 100%; min-width: 9rem; height: 1.6rem; display: block; } .load path { fill: #0072b2; }
.load line { stroke: var(--muted); stroke-dasharray: 2 2; }
@media screen and (max-width: 44rem) {
  th:first-child, td:first-child { white-space: normal; min-width: 6.5rem; } th, td { padding: .28rem .35rem; }
  .stacked thead { display: none; }
  .stacked tr { display: block; border-bottom: 1px solid var(--grid); padding: .4rem 0; }
  .stacked td { display: grid; grid-template-columns: 6rem 1fr; border: 0; padding: .1rem 0; text-align: left; }
  .named td:first-child { display: block; font-weight: 600; } .named td:first-child::before { display: none; }
  .stacked td:empty { display: none; } .stacked td::before { content: attr(data-name); color: var(--muted); }
  .metrics { table-layout: auto; } .metrics td:nth-last-child(-n+2) { white-space: nowrap; }
  .metrics small { display: block; } }
"""
# Colours of the shares of the time of a run, the useful one first.
_SHARE_COLORS = {
  'step': '#009e73',
  'data': '#e69f00',
  'evaluation': '#56b4e9',
  'saving': '#0072b2',
  'compiling': '#cc79a7',
  'starting': '#8a6fb0',
  'other': '#9aa4b1',
  'repeated': '#d55e00',
  'down': '#7a1f1f',
}


def summary(runs: Sequence[RunRecord]) -> Iterator[str]:
  """Yield the cards and facts of one run, or a table with a column for each of several."""
  facts = [{fact.title: fact for fact in _facts(run)} for run in runs]
  if len(runs) == 1:
    found = facts[0].values()
    yield from html_page.cards(fact for fact in found if fact.text)
    pairs = [(fact.title, fact.value) for fact in found if not fact.text]
    yield from html_page.definitions('Run', pairs)
    return
  yield '<h2>Runs</h2>'
  rows = []
  for title in dict.fromkeys(itertools.chain(*facts)):
    row = [found.get(title, Card(title=title, value=_UNKNOWN)) for found in facts]
    rows.append([title, *(Cell(fact.value, is_bad=fact.is_good is False) for fact in row)])
  headings = ['', *(run.name for run in runs)]
  yield from html_page.table(headings, rows, kind='text stacked named')
  for run in runs:
    if run.is_good is not True:
      yield html_page.note(f'{code(run.name)}: {html_page.escape(_status(run))}')


def _facts(run: RunRecord) -> Iterator[Card]:
  """Yield the known facts of a run; the important ones have a text."""
  yield Card(title='Status', value=capitalized(run.state), is_good=run.is_good, text=_status(run))
  yield from _result(run)
  if run.goodput is not None:
    share = format_percent(run.goodput.details['goodput'])
    text = 'Share of the time in which the run computed training steps that count.'
    yield Card(title='Goodput', value=share, text=text)
    yield Card(title='Time', value=format_duration(run.goodput.total_seconds))
    yield Card(title='Starts', value=f'{run.goodput.num_starts:,}')
  if run.events:
    found = warnings(run)
    value = f'{sum(number for number, _ in found.values()):,}'
    text = 'The log of the run has no warning.'
    if found:
      text = f'The newest: {_cut_off(next(reversed(found)), 200)}'
    yield Card(title='Warnings', value=value, is_good=not found, text=text)
  shares = {feature: share for feature, (share, _) in _cut_shares(run).items() if share}
  if shares:
    value = format_percent(max(shares.values()))
    names = ', '.join(f'{feature} in {format_percent(shares[feature])}' for feature in shares)
    text = f'Of the first training examples, texts are longer than the feature lengths: {names}.'
    yield Card(title='Cut examples', value=value, is_good=False, text=text)
  yield Card(title='Step', value=_step(run))
  if 'num_parameters' in run.facts:
    yield Card(title='Parameters', value=f'{run.facts["num_parameters"]:,}')
  for name, title in (('hardware', 'Hardware'), ('data/content', 'Data')):
    if name in run.facts:
      yield Card(title=title, value=str(run.facts[name]))
  for event in run.events:
    if event.kind == 'start':
      yield Card(title='Started', value=html_page.utc_time(event.wall_time))
      break
  yield Card(title='Newest record', value=html_page.utc_time(run.newest) or _UNKNOWN)
  prefix = 'versions/'
  names = sorted(name for name in run.facts if name.startswith(prefix))
  versions = [f'{name.removeprefix(prefix)} {run.facts[name]}' for name in names]
  if versions:
    yield Card(title='Versions', value=', '.join(versions))


def _step(run: RunRecord) -> str:
  if run.last_step.isdigit():
    return f'{run.step:,} of {int(run.last_step):,}'
  return f'{run.step:,}'


def _status(run: RunRecord) -> str:
  """Return sentences about where the run is."""
  saved = 'without a checkpoint'
  if run.steps_saved:
    saved = (
      f'{count(len(run.steps_saved), "checkpoint")}, the newest at step {run.steps_saved[-1]:,}'
    )
  parts = [f'Step {_step(run)}, {saved}.']
  if run.state == 'no end recorded':
    silence = format_duration(run.read_at - run.newest)
    parts.append(
      f'The newest record was {silence} old when this page was made: the run was killed, or it hangs.'
    )
  elif run.state == 'running':
    parts.append('This page shows what it had recorded so far.')
  if run.status.message:
    parts.append(_cut_off(run.status.message, 400))
  return ' '.join(parts)


def _result(run: RunRecord) -> Iterator[Card]:
  """Yield the most important metric: of decoding, else of teacher forcing, else of training."""
  for kind in reversed(_KINDS):
    writers = [writer for writer in run.metrics if writer.partition('/')[0] == kind]
    # A mean over tasks says more than one of them.
    for writer in sorted(writers, key=lambda writer: not writer.endswith('/mean')):
      points = run.metrics[writer].points
      for name in filter(_direction, metric_points.metrics_in_order(points)):
        step, last = points[name][-1]
        text = f'{name} of {writer} at step {step:,.0f}.'
        best = _best(name, points[name])
        if best is not None and best[1] != last:
          text += f' Best: {_number(best[1])} at step {best[0]:,.0f}.'
        is_good = None if math.isfinite(last) else False
        yield Card(title='Result', value=f'{name} {_number(last)}', is_good=is_good, text=text)
        return


def _best(name: str, points: np.ndarray) -> np.ndarray | None:
  """Return the (step, value) of the best value; None if it is unknown which values are better."""
  finite = points[np.isfinite(points[:, 1])]
  sign = _direction(name)
  if not sign or not len(finite):
    return None
  return finite[np.argmax(sign * finite[:, 1])]


def _direction(name: str) -> int:
  """Return 1 if higher values of a metric are better, -1 if lower ones are, 0 if it is unknown."""
  if _HIGHER.fullmatch(name):
    return 1
  return -1 if _LOWER.fullmatch(name) else 0


def _at_step(point: np.ndarray | None) -> Cell:
  if point is None:
    return Cell(_UNKNOWN)
  step, value = point
  element = f'{_number(value)} <small>at {step:,.0f}</small>'
  return Cell(element_html=element, is_bad=not math.isfinite(value))


def _name(text: str) -> Cell:
  """Return the cell of a name of a metric or parameter, which may be broken at its separators."""
  return Cell(element_html=re.sub(r'([/_.])', r'\1<wbr>', html_page.escape(text)))


def _number(value: float) -> str:
  """Return a number with six digits."""
  if math.isnan(value):
    return 'NaN'
  if value == round(value, 0) and abs(value) < 1e12:
    return f'{value:,.0f}'
  return f'{value:.6g}'


def final_metrics(runs: Sequence[RunRecord]) -> Iterator[str]:
  """Yield a table for each writer, with the less important metrics in another one that is closed."""
  yield '<h2>Final metrics</h2>'
  headings = ['metric', 'run', 'last, at step', 'best, at step']
  if len(runs) == 1:
    headings.remove('run')
  writers = dict.fromkeys(writer for run in runs for writer in run.metrics)
  for writer in sorted(writers, key=_writer_order):
    points = {run.name: run.metrics[writer].points for run in runs if writer in run.metrics}
    rows: dict[bool, list[list[str | Cell]]] = {False: [], True: []}
    for name in metric_points.metrics_in_order(set().union(*points.values())):
      cells: list[str | Cell] = [_name(name)]
      for run, metrics in points.items():
        if name not in metrics:
          continue
        if len(runs) > 1:
          cells.append(run)
        cells += [_at_step(metrics[name][-1]), _at_step(_best(name, metrics[name]))]
        rows[metric_points.is_hidden(name)].append(cells)
        cells = ['']  # the name is above
    yield f'<h3>{html_page.escape(_writer_title(writer))}</h3>'
    if rows[False]:
      yield from html_page.table(headings, rows[False], kind='metrics')
    if rows[True]:
      title = f'{count(len(rows[True]), "more value")} of {writer}'
      table = html_page.table(headings, rows[True], kind='metrics')
      yield from html_page.details(title, table, is_open=not rows[False])
  yield html_page.note(
    'From all lines of <code>metrics.jsonl</code>, rounded to six digits. <em>Best</em> is the lowest loss, perplexity '
    'or error rate and the highest accuracy, match, F1, BLEU, chrF, ROUGE or correlation; for other metrics it is '
    'unknown which values are better. A training value is a mean over the steps since the line before.'
  )


def _writer_order(writer: str) -> tuple[int, str]:
  kind = writer.partition('/')[0]
  return list(_KINDS).index(kind), writer


def _writer_title(writer: str) -> str:
  kind, _, task = writer.partition('/')
  if task:
    return f'{_KINDS[kind]}: task {task}'
  return _KINDS[kind]


def configuration(runs: Sequence[RunRecord]) -> Iterator[str]:
  """Yield the configuration of a single run, or the values that differ between several; macros first."""
  known = [run for run in runs if run.configuration]
  yield '<h2>Configuration</h2>' if len(runs) == 1 else '<h2>Differences of the configuration</h2>'
  for run in runs:
    if run not in known:
      yield html_page.note(f'{code(run.name)} has no <code>config.gin</code> with values.')
  names = dict.fromkeys(name for run in known for name in run.configuration)
  main = []
  others = []
  num_equal = 0
  for name in names:
    values = [run.configuration.get(name, _UNKNOWN) for run in known]
    if len(set(values)) == 1 < len(runs):
      num_equal += 1
    elif name != 'MODEL_DIR' or len(runs) == 1:
      # A run of another kind lacks many values.
      rows = others if '.' in name or _UNKNOWN in values else main
      cells = [Cell(element_html=code(_cut_off(value, _MAX_VALUE))) for value in values]
      rows.append([_name(name), *cells])
  headings = ['name', *(run.name for run in known)]
  yield from _some_values(headings, main)
  if others:
    title = count(len(others), 'parameter')
    if len(runs) > 1:
      title += ' that differ, or values that a run lacks'
    is_open = len(others) <= _MAX_OPEN
    yield from html_page.details(title, _some_values(headings, others), is_open=is_open)
  if len(known) > 1:
    yield html_page.note(f'{count(num_equal, "value")} of <code>config.gin</code> are equal.')
  yield html_page.note(
    'Secrets are <code>***</code>, and a path outside of the run is its last part.'
  )


def _some_values(headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
  """Yield a table of the first values, and how many are left out."""
  if rows:
    yield from html_page.table(headings, rows[:_NUM_VALUES], kind='text stacked named')
  if len(rows) > _NUM_VALUES:
    more = count(len(rows) - _NUM_VALUES, 'more value')
    yield html_page.note(f'{more} are only in the <code>config.gin</code> of the runs.')


def lengths(runs: Sequence[RunRecord]) -> Iterator[str]:
  """Yield feature lengths, the share of examples that are cut to them, and the share of padding."""
  yield '<h2>Lengths and truncation</h2>'
  rows = []
  notes = []
  for run in runs:
    name = f'{run.name}: ' if len(runs) > 1 else ''
    shares = _cut_shares(run)
    for feature, length in run.lengths.items():
      cells = [Cell(_UNKNOWN)] * 2
      if feature in shares:
        cells = [Cell(format_percent(share), is_bad=share > 0) for share in shares[feature]]
      rows.append([f'{name}{feature}', str(length), *cells])
    text = 'The run has not recorded how many examples are cut.'
    if run.sample is not None:
      size = count(run.sample['num_examples'], 'example')
      text = f'Cut examples were counted in the first {size} of the training data.'
    text += f' Positions of the last training batches that are not padding: {_padding(run)}.'
    notes.append(html_page.note(html_page.escape(f'{name}{text}')))
  if rows:
    yield from html_page.table(['feature', 'length', 'examples cut', 'tokens lost'], rows)
  yield from notes


def _cut_shares(run: RunRecord) -> dict[str, tuple[float, float]]:
  """Return the shares of the sampled training examples, and of their tokens, that are cut; empty if unknown."""
  sample = run.sample
  found = {}
  if sample is not None:
    for feature, number in sample['num_cut'].items():
      lost = sample['num_lost'].get(feature, 0) / max(sample['num_tokens'].get(feature, 0), 1)
      found[feature] = number / max(sample['num_examples'], 1), lost
  return found


def _padding(run: RunRecord) -> str:
  prefix = 'non_padding_fraction/'
  points = run.metrics['train'].points if 'train' in run.metrics else {}
  shares = []
  for name in points:
    if name.startswith(prefix) and name.endswith('_tokens'):
      shares.append(f'{name.removeprefix(prefix)} {format_percent(points[name][-1, 1])}')
  return ', '.join(shares) or 'unknown'


def time_of_run(runs: Sequence[RunRecord]) -> Iterator[str]:
  """Yield how the time of each run is divided."""
  measured = {run.name: run.goodput for run in runs if run.goodput is not None}
  if not measured:
    return
  yield '<h2>Time</h2>'
  for name, found in measured.items():
    spans = ''
    for share, seconds in found.seconds.items():
      width = 100 * seconds / max(found.total_seconds, 1e-9)
      spans += f'<span style="width:{width:.3f}%;background:{_SHARE_COLORS[share]}"></span>'
    if len(runs) > 1:
      yield f'<h3>{html_page.escape(name)}</h3>'
    yield f'<div class="bar" role="img" aria-label="{html_page.escape(found.describe())}">{spans}</div>'
  rows = []
  for share, label in goodput.SHARES.items():
    key = f'<span class="key" style="background:{_SHARE_COLORS[share]}"></span>'
    cells: list[str | Cell] = [Cell(label, element_html=key)]
    for found in measured.values():
      seconds = found.seconds[share]
      part = 100 * seconds / max(found.total_seconds, 1e-9)
      cells.append(f'{part:.1f}% ({_seconds(seconds)})' if seconds else '0')
    rows.append(cells)
  total = [_seconds(found.total_seconds) for found in measured.values()]
  headings = ['share', *(measured if len(runs) > 1 else ['time'])]
  yield from html_page.table(headings, [*rows, ['total', *total]])
  yield html_page.note(
    'From <code>events.jsonl</code>. The first share is the goodput. <em>Repeated work</em> was done again after a '
    'restart or a rollback; <em>down</em> is the time from a process that did not complete the run to the next start.'
  )
  for run in runs:
    yield from _starts(run)


def _seconds(seconds: float) -> str:
  if seconds < 60:
    return f'{seconds:.1f} s'
  return format_duration(seconds)


def _starts(run: RunRecord) -> Iterator[str]:
  """Yield a table of the processes of a run that was started more than once."""
  rows: list[list[str | Cell]] = []
  for event in run.events:
    if event.kind == 'start':
      begun = html_page.utc_time(event.wall_time)
      rows.append([begun, _UNKNOWN, _UNKNOWN, Cell('no end recorded', is_bad=True)])
    elif rows and event.kind == 'restored' and event.step is not None:
      rows[-1][1] = f'{event.step:,}'
    if rows and event.step is not None:
      rows[-1][2] = f'{event.step:,}'
    if rows and event.kind == 'stop':
      rows[-1][3] = str(event.details.get('cause')).replace('_', ' ')
  if len(rows) > 1:
    headings = ['started', 'from step', 'to step', 'ended']
    summary_text = f'{count(len(rows), "start")} of {run.name}'
    yield from html_page.details(summary_text, html_page.table(headings, rows), is_open=True)


def predictions(runs: Sequence[RunRecord]) -> Iterator[str]:
  """Yield examples of the newest evaluations, those with bad predictions first."""
  found = [(run, each) for run in runs for each in examples.newest(run)]
  if not found:
    return
  yield '<h2>Examples</h2>'
  yield html_page.note(
    'The worst first: by chrF, the F-score of common character n-grams of prediction and target, from 0 to 100 for '
    'equal texts. It exists for every text and does not depend on the metrics of the task.'
  )
  for number, (run, each) in enumerate(found):
    name = f'{run.name}: ' if len(runs) > 1 else ''
    size = count(len(each.examples), 'example')
    title = f'{name}{each.task} at step {each.step:,}, the first {size} of the evaluation'
    yield from html_page.details(title, _examples(each), is_open=not number)


def _examples(found: examples.TaskExamples) -> Iterator[str]:
  shown = found.examples[:_NUM_EXAMPLES]
  text = f'{len(shown)} of these {len(found.examples)}, {found.order}.'
  values = [each.similarity for each in found.examples if each.similarity is not None]
  if values:
    num_equal = sum(value == 100 for value in values)
    text += f' Mean chrF {np.mean(values):.1f}; {num_equal} predictions are equal to a target.'
  yield html_page.note(text)
  names = dict.fromkeys(name for each in shown for name in each.texts)
  rows = [[each.texts.get(name, '') for name in names] for each in shown]
  yield from html_page.table(list(names), rows, kind='text stacked')


def warnings(run: RunRecord) -> dict[str, tuple[int, int | None]]:
  """Return, by message, how often a warning was logged, and at which step for the last time; the newest last."""
  found: dict[str, tuple[int, int | None]] = {}
  for event in run.events:
    message = ''
    if event.kind == 'warning':
      message = str(event.details.get('message'))
    elif event.kind == 'rollback':
      message = (
        f'Training returned to step {event.details.get("to_step")}: {event.details.get("reason")}'
      )
    if message:
      number, _ = found.pop(message, (0, None))
      found[message] = number + 1, event.step
  return found


def log(runs: Sequence[RunRecord]) -> Iterator[str]:
  """Yield the warnings of the runs, and lines of metrics that are damaged or missing."""
  yield '<h2>Warnings</h2>'
  for run in runs:
    found = warnings(run)
    if len(runs) > 1:
      yield f'<h3>{html_page.escape(run.name)}</h3>'
    rows = []
    for message, (number, step) in list(reversed(found.items()))[:_NUM_WARNINGS]:
      rows.append([message, f'{number:,}', 'before the first' if step is None else f'{step:,}'])
    if rows:
      headings = ['message, the newest first', 'times', 'last at step']
      yield from html_page.table(headings, rows, kind='text stacked')
    notes = []
    if len(found) > _NUM_WARNINGS:
      older = count(len(found) - _NUM_WARNINGS, 'older message')
      notes.append(f'{older} are in <code>events.jsonl</code> only.')
    for writer, metrics in run.metrics.items():
      for where in metrics.damaged[:_NUM_DAMAGED]:
        line = code(f'{run.name}/{writer}/{where.rpartition("/")[2]}')
        notes.append(f'{line} is damaged and was skipped.')
      if len(metrics.damaged) > _NUM_DAMAGED:
        more = count(len(metrics.damaged) - _NUM_DAMAGED, 'more damaged line')
        notes.append(f'{code(f"{run.name}/{writer}")} has {more}.')
      notes += [_missing(run, writer, missing) for missing in metrics.missing]
    if not run.events:
      notes.append('The run has no <code>events.jsonl</code>, so its warnings are unknown.')
    yield from map(html_page.note, notes)
    if not rows and not notes:
      yield html_page.note('None.')


def _missing(run: RunRecord, writer: str, missing: Mapping[str, Any]) -> str:
  after = missing.get('after_step')
  first = 'the start' if after is None else f'step {after}'
  last = missing.get('to_step')
  return (
    f'{code(f"{run.name}/{writer}/metrics.jsonl")} lacks the lines after {html_page.escape(str(first))} up to step '
    f'{html_page.escape(str(last))}: the file {html_page.escape(str(missing.get("cause")))}.'
  )


def routing(runs: Sequence[RunRecord]) -> Iterator[str]:
  """Yield the load of the experts of sparse layers, if the metrics of training have it."""
  for run in runs:
    arrays = run.metrics['train'].arrays if 'train' in run.metrics else {}
    rows = []
    last = 0
    for name, (step, load) in arrays.items():
      match = _LOAD.fullmatch(name)
      if match is None:
        continue
      row = _load_row(run, f'{match[1]} layer {match[2]}', name.removesuffix('load'), load)
      if row is not None:
        rows.append(row)
        last = max(last, step)
    if not rows:
      continue
    whose = f': {run.name}' if len(runs) > 1 else ''
    yield f'<h2>{html_page.escape(f"Load of the experts{whose}")}</h2>'
    names = ['layer', 'load of each expert', 'experts', 'busiest / even', 'least / even']
    yield from html_page.table([*names, 'without tokens', 'choices dropped'], rows)
    yield html_page.note(
      f'In the last period, up to step {last:,}; the dashed line is an even share. More periods and figures: '
      f'{code("python -m moe report RUN")}.'
    )


def _load_row(run: RunRecord, name: str, prefix: str, load: list) -> list[str | Cell] | None:
  """Return the row of a layer; None if the load is not a list of numbers with a sum above 0."""
  try:
    shares = np.asarray(load, np.float64)
  except ValueError:
    return None
  if shares.ndim != 1 or not np.isfinite(shares).all() or shares.sum() <= 0:
    return None
  relative = shares * len(shares) / shares.sum()
  dropped = run.metrics['train'].points.get(f'{prefix}choices_dropped')
  num_dead = int((relative == 0).sum())
  return [
    name,
    Cell(element_html=_load_bars(relative)),
    str(len(relative)),
    f'{relative.max():.2f}×',
    f'{relative.min():.2f}×',
    Cell(str(num_dead), is_bad=num_dead > 0),
    _UNKNOWN if dropped is None else format_percent(dropped[-1, 1]),
  ]


def _load_bars(relative: np.ndarray) -> str:
  """Return a drawing with a bar for each expert, scaled to the busiest one."""
  top = max(float(relative.max()), 1.0)
  bars = ''.join(f'M{10 * k} 40v{-40 * value / top:.1f}h9V40z' for k, value in enumerate(relative))
  width = 10 * len(relative)
  even = 40 - 40 / top
  return (
    f'<svg class="load" viewBox="0 0 {width} 40" preserveAspectRatio="none" role="img" '
    f'aria-label="load of each expert"><path d="{bars}"/>'
    f'<line x1="0" x2="{width}" y1="{even:.1f}" y2="{even:.1f}" vector-effect="non-scaling-stroke"/></svg>'
  )


def _cut_off(text: str, length: int) -> str:
  if len(text) <= length:
    return text
  return f'{text[: length - 1]}…'
