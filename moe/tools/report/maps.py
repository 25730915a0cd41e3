"""Maps: load by layer and expert, load over time, drops by position.

Blue is less than an even share and red is more; black means no token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe.tools.report import style
from moe.tools.report.data import History
from moe.tools.report.data import Layer

# Columns of a map over time; more periods than this are averaged.
_MAP_COLUMNS = 200
# Cells have numbers up to this many columns, wide and on phones, and layers.
_MOST_ANNOTATED = {False: 16, True: 8}
_MOST_TALL = 24
# The colours of loads range from 2**-_SCALE to 2**_SCALE.
_SCALE = 3


def load_at_end(history: History, is_narrow: bool) -> Any:
  """Draw layer by expert, a map for each stack."""
  stacks = history.stacks
  figure, panels = _layer_panels(history, list(stacks.values()), is_narrow)
  image = None
  for axes, (stack, layers) in zip(panels[:, 0], stacks.items(), strict=True):
    rows = _padded([history.at_end(layer.relative_load) for layer in layers])
    image = _load_map(axes, rows)
    if rows.shape[1] <= _MOST_ANNOTATED[is_narrow] and len(layers) <= _MOST_TALL:
      _annotate(axes, rows, image)
    _label_layers(axes, layers)
    style.integer_ticks(axes.xaxis, rows.shape[1])
    axes.set_title(stack, loc='left')
    axes.set_xlabel('expert')
  _load_colorbar(figure, image, panels)
  return figure


def load_over_time(history: History, is_narrow: bool) -> Any:
  """Draw step by expert, a map for each layer."""
  if is_narrow and len(history.layers) <= 4:
    most = 1
  elif is_narrow:
    most = 2
  elif len(history.layers) <= 16:
    most = 4
  else:
    most = 6
  columns = min(len(history.layers), most)
  num_rows = -(-len(history.layers) // columns)
  row_height = 1.35
  if columns <= 4:
    row_height = 1.9
  figure, panels = style.panels(num_rows, columns, num_rows * row_height + 0.3, is_narrow=is_narrow)
  edges = bin_edges(history.steps)
  image = None
  for k, axes in enumerate(panels.flat):
    if k >= len(history.layers):
      axes.set_axis_off()
      continue
    layer = history.layers[k]
    image = _load_map(
      axes,
      resampled(edges, layer.relative_load).T,
      extent=(edges[0], edges[-1], layer.num_experts - 0.5, -0.5),
    )
    axes.invert_yaxis()
    axes.set_title(layer.name.replace('/layers_', ' layer '), loc='left', fontsize=8)
    style.integer_ticks(axes.yaxis, layer.num_experts, most=5)
    style.step_ticks(axes, history, most=3)
    axes.tick_params(labelsize=7)
    if k % columns == 0:
      axes.set_ylabel('expert', fontsize=8)
    if k + columns >= len(history.layers):
      axes.set_xlabel('step', fontsize=8)
    else:
      axes.set_xticklabels([])
  _load_colorbar(figure, image, panels)
  return figure


def drops_by_position(history: History, is_narrow: bool) -> Any:
  """Draw layer by position, a map for each stack; layers that did not record it are omitted."""
  stacks: dict[str, list[Layer]] = {}
  rows: dict[str, list[np.ndarray]] = {}
  for layer in history.layers:
    if layer.drops_by_position is not None:
      stacks.setdefault(layer.stack, []).append(layer)
      rows.setdefault(layer.stack, []).append(history.at_end(layer.drops_by_position))
  figure, panels = _layer_panels(history, list(stacks.values()), is_narrow)
  maps = [100 * _padded(rows_of_stack) for rows_of_stack in rows.values()]
  largest = 1e-2
  for values in maps:
    if np.isfinite(values).any():
      largest = max(largest, np.nanmax(values))
  if largest >= 10:
    digits = 0
  elif largest >= 1:
    digits = 1
  else:
    digits = 2
  image = None
  for axes, (stack, layers), values in zip(panels[:, 0], stacks.items(), maps, strict=True):
    image = axes.imshow(
      values, aspect='auto', cmap=_colormap('drops'), vmin=0, vmax=largest, interpolation='nearest'
    )
    if len(layers) <= _MOST_TALL and values.shape[1] <= _MOST_ANNOTATED[is_narrow]:
      _annotate(axes, values, image, digits=digits)
    _label_layers(axes, layers)
    num_parts = values.shape[1]
    axes.set_xticks(np.linspace(-0.5, num_parts - 0.5, 5), ['0%', '25%', '50%', '75%', '100%'])
    axes.set_title(stack, loc='left')
    axes.set_xlabel('position in the sequence')
  bar = figure.colorbar(image, ax=list(panels.flat), **_bar_shape(figure))
  _finish_colorbar(bar, 'choices dropped (%)')
  return figure


def _layer_panels(
  history: History, stacks: Sequence[Sequence[Layer]], is_narrow: bool
) -> tuple[Any, np.ndarray]:
  """Return (figure, axes [stacks, 1]) for maps with a row for each layer."""
  cell = 0.16
  if len(history.layers) <= _MOST_TALL:
    cell = 0.27
  heights = [len(layers) * cell for layers in stacks]
  height = sum(heights) + 0.75 * len(stacks) + 0.2
  return style.panels(len(stacks), 1, height, is_narrow=is_narrow, heights=heights)


def _load_map(axes: Any, relative: np.ndarray, **kwargs: Any) -> Any:
  """Draw log2 of loads within the scale; only loads of 0 are below the scale."""
  with np.errstate(divide='ignore'):
    logs = np.log2(relative)
  clipped = np.clip(logs, -_SCALE, _SCALE)
  shown = np.where(np.isneginf(logs), -100.0, clipped)
  return axes.imshow(
    np.ma.masked_invalid(shown),
    aspect='auto',
    cmap=_colormap('load'),
    vmin=-_SCALE,
    vmax=_SCALE,
    interpolation='nearest',
    **kwargs,
  )


def _load_colorbar(figure: Any, image: Any, panels: np.ndarray) -> None:
  bar = figure.colorbar(image, ax=list(panels.flat), extend='min', **_bar_shape(figure))
  labels = {-3: '≤1/8', -2: '1/4', -1: '1/2', 0: '1', 1: '2', 2: '4', 3: '≥8'}
  ticks = [k for k in labels if figure.get_figheight() > 2.0 or k % _SCALE == 0]
  bar.set_ticks(ticks, labels=[labels[k] for k in ticks])
  _finish_colorbar(bar, 'load / even share\n(black: no token)')


def _finish_colorbar(bar: Any, label: str) -> None:
  bar.set_label(label, fontsize=8)
  bar.ax.tick_params(labelsize=7, length=2)
  bar.outline.set_visible(False)


def _bar_shape(figure: Any) -> dict[str, Any]:
  """Return arguments of a bar of at most about 3 inches, at the top of the figure."""
  return {
    'aspect': 30,
    'pad': 0.02,
    'anchor': (0.0, 1.0),
    'shrink': min(1.0, 3.0 / figure.get_figheight()),
  }


def _colormap(kind: str) -> Any:
  import matplotlib
  from matplotlib import colors

  if kind == 'load':
    # The ends of the full colormap are nearly black, and black means no token.
    shades = matplotlib.colormaps['RdBu_r'](np.linspace(0.1, 0.9, 256))
    colormap = colors.ListedColormap(shades).with_extremes(bad=style.BLANK, under='#000000')
    return colormap
  return matplotlib.colormaps['YlOrBr'].with_extremes(bad=style.BLANK)


def _annotate(axes: Any, values: np.ndarray, image: Any, digits: int = 2) -> None:
  for (row, column), value in np.ndenumerate(values):
    if np.isfinite(value):
      red, green, blue, _ = image.cmap(image.norm(image.get_array()[row, column]))
      ink = '#101010'
      if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5:
        ink = '#ffffff'
      axes.text(
        column,
        row,
        _number(value, digits),
        ha='center',
        va='center',
        fontsize=6.5,
        color=ink,
      )


def _number(value: float, digits: int) -> str:
  """Return the text of a cell; only 0 is shown as 0.

  >>> _number(0.001, 2), _number(0.0, 2), _number(1.234, 2)
  ('<.01', '0', '1.23')
  """
  if value == 0:
    return '0'
  least = 10.0**-digits
  if value >= least / 2:
    return f'{value:.{digits}f}'
  return '<' + f'{least:g}'.removeprefix('0')


def _label_layers(axes: Any, layers: Sequence[Layer]) -> None:
  stride = 1
  if len(layers) > _MOST_TALL:
    stride = 2
  axes.set_yticks(
    range(0, len(layers), stride),
    [f'layer {layer.index}' for layer in layers[::stride]],
    fontsize=7,
  )


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
  """Return rows of different lengths as one array, padded with NaN."""
  width = max(len(row) for row in rows)
  padded = np.full((len(rows), width), np.nan)
  for padded_row, row in zip(padded, rows, strict=True):
    padded_row[: len(row)] = row
  return padded


def bin_edges(steps: np.ndarray) -> np.ndarray:
  """Return the limits of periods, float64 [S + 1]; the first period is assumed to be as long as the second."""
  period = 1
  if len(steps) > 1:
    period = steps[1] - steps[0]
  first = steps[0] - period
  if steps[0] > 0:
    first = max(first, 0)
  return np.concatenate([[first], steps]).astype(np.float64)


def resampled(edges: np.ndarray, values: np.ndarray) -> np.ndarray:
  """Return [columns, n] means of [S, n] over columns with equal numbers of steps; periods may differ in length."""
  widths = np.diff(edges)
  # No more columns than are needed to show every period; equal periods are not averaged.
  num_shortest = round((edges[-1] - edges[0]) / widths.min())
  num_columns = int(min(_MAP_COLUMNS, max(1, num_shortest)))
  columns = np.linspace(edges[0], edges[-1], num_columns + 1)
  known = np.isfinite(values)

  def integral(y: np.ndarray) -> np.ndarray:
    sums = np.cumsum(y * widths[:, None], axis=0)
    total = np.concatenate([np.zeros((1, y.shape[1])), sums])
    at_columns = [np.interp(columns, edges, curve) for curve in total.T]
    return np.diff(np.stack(at_columns, axis=1), axis=0)

  weight = integral(known.astype(np.float64))
  total = integral(np.where(known, values, 0.0))
  means = total / np.where(weight > 0, weight, 1.0)
  return np.where(weight > 0, means, np.nan)
