"""Curves of layers: over steps, and of the load by the rank of an expert. A panel for each stack."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe.tools.report import style
from moe.tools.report.data import History, Layer

# Layers that a legend names; of more, the colours are explained and the highest and lowest named.
_MOST_IN_LEGEND = 8
# Of an even share; what is less is off the scale of load curves.
_FLOOR = 1 / 64
# Kind of number to how a legend says it.
_FORMS = {'share': '{:.3g}%', 'ratio': '{:.2f}×'}


def load_by_rank(history: History) -> Any:
  """Draws the load of experts at the end, the busiest first."""
  figure, panels = style.panels(1, len(history.stacks), 3.0, sharey='row')
  for axes, (stack, layers) in zip(panels[0], history.stacks.items(), strict=True):
    shares = {layer.name: np.sort(history.at_end(layer.relative_load))[::-1] for layer in layers}
    lines = []
    for layer, color in zip(layers, style.shades(len(layers)), strict=True):
      # A logarithm has no 0: dead experts are not drawn, and the line ends before them.
      share = np.where(shares[layer.name] > 0, shares[layer.name], np.nan)
      ranks = np.arange(1, len(share) + 1)
      line, = axes.plot(ranks, share, color=color, marker='o' if len(share) <= 16 else None, markersize=3)
      lines.append((layer, line, float(shares[layer.name][0])))
    axes.axhline(1.0, color=style.MUTED, linewidth=0.8, linestyle='--')
    style.log2_axis(axes, [max(s, _FLOOR) for share in shares.values() for s in share])
    axes.set_title(stack, loc='left')
    axes.set_xlabel('rank of the expert')
    style.integer_ticks(axes.xaxis, max(len(s) for s in shares.values()), start=1, most=8)
    _legend(axes, lines, 'busiest expert', '{:.2f}×')
  panels[0, 0].set_ylabel('load / even share')
  return figure


def over_steps(history: History, rows: Sequence[tuple[str, str, str]]) -> Any:
  """Draws numbers of the layers over steps, a row for each of `rows`.

  Args:
    history: of the run.
    rows: (name as `Layer.over_time` takes it, label, kind: 'share', 'ratio', 'count', 'nats' or 'plain').
  """
  stacks = history.stacks
  figure, panels = style.panels(len(rows), len(stacks), 2.6 * len(rows) + 0.3, sharey='row')
  for row, (name, label, kind) in enumerate(rows):
    for axes, (stack, layers) in zip(panels[row], stacks.items(), strict=True):
      scale = 100.0 if kind == 'share' else 1.0
      lines = []
      for layer, color in zip(layers, style.shades(len(layers)), strict=True):
        values = layer.over_time(name)
        if values is not None and np.isfinite(values).any():
          line, = axes.plot(history.steps, scale * values, color=color, marker=_marker(values), markersize=3)
          lines.append((layer, line, scale * float(history.at_end(values))))
      if kind == 'nats' and lines:
        most = np.log(max(layer.num_experts for layer in layers))
        axes.axhline(most, color=style.MUTED, linewidth=0.8, linestyle='--')
      if row == 0:
        axes.set_title(stack, loc='left')
      if row == len(rows) - 1:
        axes.set_xlabel('step')
      style.step_ticks(axes, history)
      _legend(axes, lines, 'at the end', _FORMS.get(kind, '{:.3g}'))
    values = [y for axes in panels[row] for line in axes.get_lines() for y in np.atleast_1d(line.get_ydata())]
    _finish_scale(panels[row], kind, values)
    panels[row, 0].set_ylabel(f'{label} (%)' if kind == 'share' else label)
  return figure


def _finish_scale(panels: Sequence[Any], kind: str, values: Sequence[float]) -> None:
  if kind == 'ratio':
    for axes in panels:
      style.log2_axis(axes, values)
  elif kind in ('share', 'count'):
    for axes in panels:
      axes.set_ylim(bottom=0)
  if kind == 'count':
    for axes in panels:
      axes.yaxis.get_major_locator().set_params(integer=True)


def _legend(axes: Any, lines: Sequence[tuple[Layer, Any, float]], what: str, form: str) -> None:
  """Names layers, the highest first: all, or of many the extremes."""
  ranked = sorted(lines, key=lambda item: (-item[2] if np.isfinite(item[2]) else np.inf, item[0].index))
  title = what
  if len(ranked) > _MOST_IN_LEGEND:
    title = f'{what}: highest, lowest\nof {len(ranked)} (light: late layers)'
    ranked = [*ranked[:4], *ranked[-2:]]
  if ranked:
    legend = axes.legend([line for _, line, _ in ranked],
                         [f'layer {layer.index}  {form.format(value)}' for layer, _, value in ranked],
                         title=title, loc='upper left', bbox_to_anchor=(1.0, 1.02), fontsize=7, title_fontsize=7,
                         frameon=False, handlelength=1.4, labelspacing=0.35, alignment='left')
    legend.get_title().set_color(style.MUTED)


def _marker(values: np.ndarray) -> str | None:
  """Points where few are known: a line needs two neighbours."""
  return 'o' if np.isfinite(values).sum() <= 12 else None
