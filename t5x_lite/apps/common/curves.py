"""Panels with the curves of metrics, for plots and pages: their titles, units, lines and legends."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
import textwrap
from typing import Any

import numpy as np

from t5x_lite.apps.common import figures
from t5x_lite.formatting import capitalized
from t5x_lite.formatting import format_cell

# Metric to its points, float64 [n, 2] of (step, value), by writer.
RunPoints = Mapping[str, Mapping[str, np.ndarray]]
# Kinds of writers whose panels are next to each other.
TRAINING = ('train',)
EVALUATION = ('training_eval', 'inference_eval')

# Maximum number of entries of a legend. If there are more lines, the last entry counts the others, which are gray.
_MAX_LEGEND = 6
_OTHER_COLOR = '#b3bac4'
# Markers tell tasks apart if several runs have several tasks.
_MARKERS = 'os^Dv'
# Every point of a line with at most this many points has a marker.
_MAX_MARKED = 12
_MAX_COLUMNS = 3
# Columns of a figure to the width of a panel, in inches.
_PANEL_WIDTHS = {1: 6.4, 2: 5.2, 3: 4.3}
# The same for phones, with one column.
_NARROW_WIDTH = 3.9
_PANEL_HEIGHT = 3.1
# Longest lines of a title and of notes, in characters, for the narrowest panel.
_TITLE_LENGTH = 40
_NOTE_LENGTH = 52
# Columns of pixels of a panel, of which a line has up to four points.
_MAX_PIXELS = 300
# Longest name of a run or task, in characters.
_MAX_NAME = 48
# A loss whose largest value is at least this multiple of the smallest one has a logarithmic axis.
_LOGARITHMIC = 5.0
# Smallest value of a logarithmic axis as a share of the largest; matplotlib's ticks overflow for less.
_SMALLEST_SHARE = 1e-100
# Largest absolute value that is drawn.
_LARGEST = 1e290
_UNITS = {'accuracy': 'share of target tokens', 'timing/seconds': 'seconds'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
  """The points of one run and task, float64 [n, 2] of (step, value); `task` is '' for training."""

  run: str
  task: str
  points: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
  """The lines of one metric of training or evaluation."""

  metric: str
  title: str
  unit: str
  lines: Sequence[Line]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LineStyle:
  """Look of a line; `label` is '' if the legend does not name the line."""

  label: str
  color: str
  marker: str


def draw(
  runs: Mapping[str, RunPoints],
  metrics: Sequence[str],
  *,
  step_label: str,
  loss_unit: str,
  sections: Sequence[Sequence[str]] = (TRAINING, EVALUATION),
  has_title: bool = True,
  is_narrow: bool = False,
) -> Any:
  """Draw the metrics of runs, training apart from evaluation; call it within `figures.figure_style`.

  Args:
    runs: name of a run to its points.
    metrics: names to draw; those that no run has are left out.
    step_label: label of the x axes.
    loss_unit: unit of the loss, e.g. 'nats per token'.
    sections: kinds of writers, those of a section next to each other.
    has_title: whether the name of the run, or the number of runs, is above the panels.
    is_narrow: for phones, with the panels below each other.

  Returns:
    A matplotlib figure; None if no writer of these kinds has any of the metrics.
  """
  panels = [_panels(runs, metrics, kinds, loss_unit) for kinds in sections]
  panels = [section for section in panels if section]
  if not panels:
    return None
  return _draw_panels(panels, list(runs), step_label, has_title, is_narrow)


def _draw_panels(
  sections: Sequence[Sequence[Panel]],
  runs: Sequence[str],
  step_label: str,
  has_title: bool,
  is_narrow: bool,
) -> Any:
  from matplotlib.figure import Figure  # not pyplot: no display, no global state

  styles = [_line_styles(section, runs) for section in sections]
  header_legend = _shared_legend(styles, len(runs))
  sizes = [len(section) for section in sections]
  # A few panels fit into one row; otherwise, and if sections have legends, each section starts a new row.
  max_columns = 1 if is_narrow else _MAX_COLUMNS
  is_one_row = sum(sizes) <= max_columns and header_legend is not None
  if is_one_row:
    columns = sum(sizes)
    columns_of = sizes
  else:
    columns = min(max_columns, max(sizes))
    columns_of = [columns] * len(sizes)
  rows = [math.ceil(size / columns) for size in sizes]
  num_rows = 1 if is_one_row else sum(rows)
  width = _NARROW_WIDTH if is_narrow else _PANEL_WIDTHS[columns] * columns
  title = []
  if has_title and len(runs) == 1:
    title = textwrap.wrap(_shorten(runs[0]), int(8 * width))
  elif has_title:
    title = textwrap.wrap(f'Comparison of {len(runs)} runs', int(8 * width))
  num_lines = len(title) + _legend_shape(header_legend or (), width)[0]
  heights = [0.1 + 0.22 * num_lines, _PANEL_HEIGHT * num_rows]
  figure = Figure(figsize=(width, sum(heights)), layout='constrained')
  layout: Any = figure.get_layout_engine()
  layout.set(w_pad=0.1, h_pad=0.06)
  parts: Any = figure.subfigures(2, 1, height_ratios=heights)
  header, body = parts
  header.text(
    0.1 / width,
    1 - 0.08 / heights[0],
    '\n'.join(title),
    ha='left',
    va='top',
    fontsize=13,
    fontweight='bold',
  )
  if header_legend:
    _add_legend(
      header,
      header_legend,
      width,
      loc='lower left',
      bbox_to_anchor=(0.1 / width, 0),
      borderaxespad=0,
    )
  if is_one_row:
    parts = body.subfigures(1, len(sections), squeeze=False, width_ratios=sizes)
  else:
    parts = body.subfigures(len(sections), 1, squeeze=False, height_ratios=rows)
  drawn = []
  shapes = zip(rows, columns_of, strict=True)
  for part, section, style, shape in zip(parts.flat, sections, styles, shapes, strict=True):
    all_axes = part.subplots(*shape, squeeze=False).flat
    for axes, panel in itertools.zip_longest(all_axes, section):
      if panel is None:
        axes.set_axis_off()
      else:
        _draw_lines(axes, panel, style)
        drawn.append((axes, panel))
    if header_legend is None:
      _add_legend(part, tuple(style.values()), width, loc='outside upper left')
  _set_steps(drawn, step_label)
  _add_titles(drawn)
  return figure


def _panels(
  runs: Mapping[str, RunPoints], metrics: Sequence[str], kinds: Sequence[str], loss_unit: str
) -> list[Panel]:
  """Return the panels of the metrics that writers of these kinds have recorded."""
  panels = []
  for kind, metric in itertools.product(kinds, metrics):
    lines = []
    for run, writers in runs.items():
      for writer, points in writers.items():
        writer_kind, _, task = writer.partition('/')
        if writer_kind == kind and metric in points:
          exact = np.asarray(points[metric], np.float64).reshape(-1, 2)
          lines.append(Line(run=run, task=task, points=exact))
    if lines:
      title = _title(metric, kind)
      unit = _unit(metric, loss_unit)
      panels.append(Panel(metric=metric, title=title, unit=unit, lines=lines))
  return panels


def _title(metric: str, kind: str) -> str:
  """Return the title of a panel, e.g. 'Training loss' or 'Exact match (inference)'."""
  words = (
    metric.removeprefix('timing/')
    .replace('cross_ent_loss', 'cross-entropy')
    .replace('/', ', ')
    .replace('_', ' ')
  )
  if kind == 'training_eval':
    return f'Evaluation {words}'
  if kind == 'inference_eval':
    return f'{capitalized(words)} (inference)'
  is_also_evaluated = metric == 'accuracy' or 'loss' in metric
  if is_also_evaluated:
    return f'Training {words}'
  return capitalized(words)


def _unit(metric: str, loss_unit: str) -> str:
  """Return the label of the y axis; '' if the unit is unknown. The loss may include auxiliary losses."""
  if metric in ('loss', 'cross_ent_loss'):
    return f'{metric.replace("cross_ent_loss", "cross-entropy")} ({loss_unit})'
  if metric in _UNITS:
    return _UNITS[metric]
  if metric.endswith('_per_second'):
    return 'per second'
  return ''


def _line_styles(
  section: Sequence[Panel], runs: Sequence[str]
) -> dict[tuple[str, str], _LineStyle]:
  """Return (run, task) to the look of its lines.

  Each run has one colour. The tasks of a single run differ by colour, and the first colour remains for training.
  """
  lines = itertools.chain.from_iterable(panel.lines for panel in section)
  keys = list(dict.fromkeys((line.run, line.task) for line in lines))
  keys.sort(key=lambda key: runs.index(key[0]))
  tasks = sorted({task for _, task in keys})
  num_named = len(keys)
  if num_named > _MAX_LEGEND:
    num_named = _MAX_LEGEND - 1
  has_runs = len(runs) > 1
  has_tasks = len(tasks) > 1
  styles = {}
  for number, (run, task) in enumerate(keys):
    names = []
    marker = 'o'
    index = tasks.index(task) + has_tasks
    if has_runs:
      names.append(_shorten(run))
      marker = _MARKERS[tasks.index(task) % len(_MARKERS)]
      index = runs.index(run)
    if has_tasks:
      names.append(_shorten(task))
    label = ''
    color = _OTHER_COLOR
    if number < num_named:
      label = ': '.join(names)
      color = figures.COLORS[index % len(figures.COLORS)]
    styles[run, task] = _LineStyle(label=label, color=color, marker=marker)
  return styles


def _shared_legend(
  styles: Sequence[Mapping[tuple[str, str], _LineStyle]], num_runs: int
) -> tuple[_LineStyle, ...] | None:
  """Return the lines of a legend for all sections; () without a legend, None if sections need different legends."""
  largest = tuple(max(styles, key=len).values())
  if len(largest) == 1:
    return ()
  # The title of the panel is enough to name the training line of a single run.
  is_shared = all(
    set(style.values()) <= set(largest) or num_runs == len(style) == 1 for style in styles
  )
  if is_shared:
    return largest
  return None


def _shorten(name: str) -> str:
  """Return a name on one line; the middle of a long one is omitted, because names often differ at the end."""
  if len(name) > _MAX_NAME:
    beginning = name[: _MAX_NAME // 2]
    end = name[-_MAX_NAME // 2 + 1 :]
    name = f'{beginning}…{end}'
  return format_cell(name)


def _draw_lines(axes: Any, panel: Panel, styles: Mapping[tuple[str, str], _LineStyle]) -> None:
  # Lines that the legend names are in front.

  def is_named(line: Line) -> bool:
    return styles[line.run, line.task].color != _OTHER_COLOR

  for line in sorted(panel.lines, key=is_named):
    style = styles[line.run, line.task]
    steps, values = _reduced(line.points).T
    finite = np.where(_is_drawable(values), values, math.nan)
    axes.plot(
      steps,
      finite,
      color=style.color,
      linewidth=1.5,
      marker=style.marker,
      markersize=4,
      markevery=_marked(finite),
      clip_on=False,
    )


def _reduced(points: np.ndarray) -> np.ndarray:
  """Return the points of [n, 2] that a picture shows, in their order.

  Steps are divided into columns of pixels. Of each column remain the first and the last point, and those with the
  smallest and the largest value that can be drawn. A column without such a value remains a gap.
  """
  if len(points) <= 4 * _MAX_PIXELS:
    return points
  steps, values = points.T
  width = (steps.max() - steps.min()) / _MAX_PIXELS or 1.0
  columns = np.floor((steps - steps.min()) / width)
  is_drawable = _is_drawable(values)
  low = np.where(is_drawable, values, np.inf)
  high = np.where(is_drawable, values, -np.inf)
  order = np.argsort(columns, kind='stable')
  starts = np.flatnonzero(np.diff(columns[order])) + 1
  kept = set()
  for column in np.split(order, starts):
    smallest = column[np.argmin(low[column])]
    largest = column[np.argmax(high[column])]
    kept.update((column[0], column[-1], smallest, largest))
  return points[sorted(kept)]


def _set_steps(drawn: Sequence[tuple[Any, Panel]], label: str) -> None:
  """Set the axes of steps, which have the same limits in all panels."""
  steps = np.concatenate([line.points[:, 0] for _, panel in drawn for line in panel.lines])
  low = steps.min(initial=0)
  high = steps.max(initial=0)
  margin = 0.03 * (high - low) or 1.0
  for axes, _ in drawn:
    axes.set_xlim(low - margin, high + margin)
    axes.set_xlabel(label)
    figures.set_step_ticks(axes)


def _add_titles(drawn: Sequence[tuple[Any, Panel]]) -> None:
  """Add the titles of panels and notes below them; all titles are equally far above their panel."""
  notes = [_set_scale(axes, panel) for axes, panel in drawn]
  num_lines = max(map(len, notes))
  for (axes, panel), lines in zip(drawn, notes, strict=True):
    axes.set_title(textwrap.fill(panel.title, _TITLE_LENGTH), pad=6 + 11 * num_lines)
    axes.annotate(
      '\n'.join(lines),
      (0, 1),
      (0, 6 + 11 * (num_lines - len(lines))),
      xycoords='axes fraction',
      textcoords='offset points',
      fontsize=8,
      color=figures.MUTED,
      va='bottom',
      annotation_clip=False,
    )


def _set_scale(axes: Any, panel: Panel) -> list[str]:
  """Set the axis of values; return notes for the reader, in lines: the task, the range of the axis, missing values."""
  values = np.concatenate([line.points[:, 1] for line in panel.lines])
  finite = values[_is_drawable(values)]
  low = finite.min() if finite.size else 0.0
  high = finite.max() if finite.size else 0.0
  is_wide = low > 0 and high >= _LOGARITHMIC * low
  if panel.metric.endswith('loss') and is_wide and low >= _SMALLEST_SHARE * high:
    scale = _set_logarithmic(axes)
  else:
    scale = figures.set_linear_limits(axes, [low, high] if finite.size else [])
  axes.set_ylabel(panel.unit)
  axes.grid(bool(finite.size))
  if not finite.size:
    axes.set_yticks([])
    axes.text(
      0.5,
      0.5,
      f'all values are {_missing(values)}',
      transform=axes.transAxes,
      ha='center',
      va='center',
      color=figures.MUTED,
    )
  notes = []
  tasks = {line.task for line in panel.lines}
  if len(tasks) == 1:
    notes.append(_shorten(tasks.pop()))
  notes.append(scale)
  num_missing = len(values) - len(finite)
  if finite.size and num_missing:
    notes.append(f'{num_missing:,} of {len(values):,} values are {_missing(values)}')
  return textwrap.wrap(' · '.join(filter(None, notes)), _NOTE_LENGTH)


def _is_drawable(values: np.ndarray) -> np.ndarray:
  """Return bool [n]: the value is finite, and so far from the limits of floats that axes can be computed."""
  return np.isfinite(values) & (np.abs(values) <= _LARGEST)


def _missing(values: np.ndarray) -> str:
  """Return what values that are not drawn are."""
  if (np.isfinite(values) & ~_is_drawable(values)).any():
    return f'NaN, infinite or above {_LARGEST:g}'
  return 'NaN or infinite'


def _set_logarithmic(axes: Any) -> str:
  """Set a logarithmic axis: losses fall by orders of magnitude at first, and runs differ in what comes later."""
  from matplotlib import ticker

  axes.set_yscale('log')
  axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  axes.yaxis.set_major_formatter(ticker.FuncFormatter(figures.short_number))
  axes.yaxis.set_minor_formatter(ticker.NullFormatter())
  return 'logarithmic axis'


def _marked(values: np.ndarray) -> list[int]:
  """Return the indices of points with a marker: all of a few points, otherwise those without a neighbour."""
  is_finite = [False, *map(math.isfinite, values), False]
  few = sum(is_finite) <= _MAX_MARKED
  marked = []
  for k in range(len(values)):
    has_neighbour = is_finite[k] or is_finite[k + 2]
    if is_finite[k + 1] and (few or not has_neighbour):
      marked.append(k)
  return marked


def _legend_shape(styles: Sequence[_LineStyle], width: float) -> tuple[int, int]:
  """Return (rows, columns) of the legend of lines in `width` inches."""
  entries = min(len(styles), _MAX_LEGEND)
  longest = max((len(style.label) for style in styles), default=0)
  # Inches of an entry: its text, and its line.
  entry_width = 0.09 * max(longest, len('and 100 more')) + 0.5
  columns = max(1, min(entries, int(width / entry_width)))
  return math.ceil(entries / columns), columns


def _add_legend(figure: Any, styles: Sequence[_LineStyle], width: float, **place: Any) -> None:
  """Add a legend of lines to a figure of `width` inches; `place` is passed to matplotlib."""
  from matplotlib.lines import Line2D

  several_markers = len({style.marker for style in styles}) > 1
  named = [style for style in styles if style.label]
  handles = []
  for style in named:
    marker = style.marker if several_markers else ''
    handles.append(
      Line2D(
        [],
        [],
        color=style.color,
        linewidth=2,
        label=style.label,
        markersize=5,
        marker=marker,
      )
    )
  if len(named) < len(styles):
    handles.append(
      Line2D([], [], color=_OTHER_COLOR, linewidth=2, label=f'and {len(styles) - len(named)} more')
    )
  figure.legend(
    handles=handles,
    frameon=False,
    fontsize=9,
    ncols=_legend_shape(styles, width)[1],
    borderpad=0,
    **place,
  )
