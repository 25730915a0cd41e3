"""Curves of layers: over steps, and of the load by the rank of an expert. Each stack has a panel."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe.tools.report import style
from moe.tools.report.data import History
from moe.tools.report.data import Layer

# A legend names at most this many layers; of more, it names those with the highest and the lowest values.
_MOST_IN_LEGEND = 6
# Relative load below which load curves are cut off.
_FLOOR = 1 / 64
# Kind of number to its form in titles and legends.
_FORMS = {'share': '{:.3g}%', 'entropy': '{:.0f}%', 'ratio': '{:.2f}×'}
_UNITS = {'share': ' (%)', 'entropy': ' (% of maximum)', 'ratio': ' (log scale)'}


def load_by_rank(history: History, is_narrow: bool) -> Any:
  """Draw the load of experts at the end, the busiest first."""
  stacks = history.stacks
  figure, panels = _stack_panels(1, stacks, 3.0, is_narrow)
  for axes, (stack, layers) in zip(panels[0], stacks.items(), strict=True):
    lines = []
    limits = []
    most_experts = 0
    for layer, color in zip(layers, style.shades(len(layers)), strict=True):
      share = np.sort(history.at_end(layer.relative_load))[::-1]
      ranks = np.arange(1, len(share) + 1)
      marker = None
      if len(share) <= 16:
        marker = 'o'
      # The logarithm of 0 is infinite: dead experts are not drawn, and the line ends before them.
      drawn = np.where(share > 0, share, np.nan)
      (line,) = axes.plot(ranks, drawn, color=color, marker=marker, markersize=3)
      lines.append((layer, line, float(share[0])))
      limits += [max(s, _FLOOR) for s in share]
      most_experts = max(most_experts, len(share))
    axes.axhline(1.0, color=style.MUTED, linewidth=0.8, linestyle='--')
    style.log2_axis(axes, limits)
    axes.set_xlabel('rank of the expert')
    style.integer_ticks(axes.xaxis, most_experts, start=1, most=8)
    _name_lines(axes, stack, lines, 'at the busiest expert', '{:.2f}×', is_narrow)
  _set_ylabel(panels[0], 'load / even share (log scale)', is_narrow)
  return figure


def over_steps(history: History, rows: Sequence[tuple[str, str, str]], is_narrow: bool) -> Any:
  """Draw numbers of the layers over steps, a row for each of `rows`.

  Args:
    history: history of the run.
    rows: (name as `Layer.over_time` takes it, label, kind: 'share', 'ratio', 'count', 'entropy' or 'plain').
    is_narrow: for phones.
  """
  stacks = history.stacks
  figure, panels = _stack_panels(len(rows), stacks, 2.6, is_narrow)
  for row, (name, label, kind) in enumerate(rows):
    for axes, (stack, layers) in zip(panels[row], stacks.items(), strict=True):
      lines = []
      for layer, color in zip(layers, style.shades(len(layers)), strict=True):
        values = layer.over_time(name)
        if values is not None and np.isfinite(values).any():
          values = _scale(layer, kind) * values
          (line,) = axes.plot(
            history.steps, values, color=color, marker=_marker(values), markersize=3, clip_on=False
          )
          lines.append((layer, line, float(history.at_end(values))))
      if is_narrow or row == len(rows) - 1:
        axes.set_xlabel('step')
      style.step_ticks(axes, history)
      _name_lines(axes, stack, lines, 'at the end', _FORMS.get(kind, '{:.3g}'), is_narrow)
    drawn = []
    for axes in panels[row]:
      for line in axes.get_lines():
        drawn += list(np.atleast_1d(line.get_ydata()))
    _set_limits(panels[row], kind, drawn)
    _set_ylabel(panels[row], label + _UNITS.get(kind, ''), is_narrow)
  return figure


def _stack_panels(
  rows: int, stacks: Mapping[str, Sequence[Layer]], row_height: float, is_narrow: bool
) -> tuple[Any, np.ndarray]:
  """Return (figure, axes [rows, stacks]); for phones all panels are below each other."""
  if not is_narrow:
    return style.panels(rows, len(stacks), row_height * rows + 0.3, is_narrow=False, sharey='row')
  panel_height = 2.5
  if any(len(layers) > 1 for layers in stacks.values()):
    panel_height = 3.2  # with a legend
  num_panels = rows * len(stacks)
  figure, panels = style.panels(num_panels, 1, panel_height * num_panels, is_narrow=True)
  for axes in panels.flat:
    axes.grid(True)
  return figure, panels.reshape(rows, len(stacks))


def _set_ylabel(panels: Sequence[Any], label: str, is_narrow: bool) -> None:
  if not is_narrow:
    panels = panels[:1]
  for axes in panels:
    axes.set_ylabel(label)


def _scale(layer: Layer, kind: str) -> float:
  """Return the factor from recorded to drawn numbers; the entropy of a single expert is not a share of anything."""
  if kind == 'entropy':
    if layer.num_experts > 1:
      return 100.0 / np.log(layer.num_experts)
    return np.nan
  if kind == 'share':
    return 100.0
  return 1.0


def _set_limits(panels: Sequence[Any], kind: str, values: Sequence[float]) -> None:
  """Set the same limits in all panels; all axes that are not logarithmic start at 0."""
  top = max((value for value in values if np.isfinite(value)), default=0.0)
  for axes in panels:
    if kind == 'ratio':
      style.log2_axis(axes, values)
    elif kind == 'entropy':
      axes.set_ylim(0, 100)
    else:
      axes.set_ylim(0, 1.05 * top or 1.0)
    if kind == 'count':
      axes.yaxis.get_major_locator().set_params(integer=True)


def _name_lines(
  axes: Any,
  stack: str,
  lines: Sequence[tuple[Layer, Any, float]],
  what: str,
  form: str,
  is_narrow: bool,
) -> None:
  """Set the title of a panel, and a legend unless there is only one line; the legend has the highest layers first."""
  from matplotlib import transforms

  if len(lines) == 1:
    ((layer, _, value),) = lines
    axes.set_title(f'{stack} layer {layer.index}: {form.format(value)} {what}')
    return
  axes.set_title(stack)

  def rank(item):
    layer, _, value = item
    if np.isfinite(value):
      return -value, layer.index
    return np.inf, layer.index

  ranked = sorted(lines, key=rank)
  title = what
  if len(ranked) > _MOST_IN_LEGEND:
    title = f'{what}: highest, lowest\nof {len(ranked)} (light: late layers)'
    ranked = [*ranked[:4], *ranked[-2:]]
  if ranked:
    position: dict[str, Any] = {'bbox_to_anchor': (1.0, 1.02)}
    if is_narrow:  # below the label of the x axis
      below = transforms.ScaledTranslation(0.0, -34 / 72, axes.figure.dpi_scale_trans)
      position = {
        'bbox_to_anchor': (0.0, 0.0),
        'bbox_transform': axes.transAxes + below,
        'ncols': 2,
      }
    legend = axes.legend(
      [line for _, line, _ in ranked],
      [f'layer {layer.index}  {form.format(value)}' for layer, _, value in ranked],
      title=title,
      loc='upper left',
      fontsize=7,
      title_fontsize=7,
      frameon=False,
      handlelength=1.4,
      labelspacing=0.35,
      alignment='left',
      **position,
    )
    legend.get_title().set_color(style.MUTED)


def _marker(values: np.ndarray) -> str | None:
  """Return a marker if there are few points, because a line needs two neighbours."""
  if np.isfinite(values).sum() <= 12:
    return 'o'
  return None
