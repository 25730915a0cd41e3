"""Style of the report's figures, and their conversion to PNG files and to SVG elements of the page.

Each figure is drawn twice: with panels side by side, and with panels below each other for phones. In the SVG the
colours of text and grid are CSS variables of the page, so they follow its light or dark theme.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import fractions
import io
from typing import Any, Literal

import numpy as np

from moe.tools.report.data import History
from t5x_lite.apps.common import figures

INK = figures.INK
MUTED = figures.MUTED
BLANK = '#b9c0ca'
_DPI = 144
# Widths of figures in inches: on phones, text must not be scaled down.
_WIDTH = 10.0
_NARROW_WIDTH = 3.9
_TITLE_HEIGHT = 0.4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """One figure.

  Attributes:
    name: name of the file, without suffix.
    title: one line.
    caption: how to read the figure.
    png: the wide drawing, on white.
    svg: the wide drawing as an element of the page, without a background.
    narrow_svg: the same for phones.
  """

  name: str
  title: str
  caption: str
  png: bytes
  svg: str
  narrow_svg: str


@contextlib.contextmanager
def report_style() -> Iterator[None]:
  """Draw with the report's style within the context, whatever matplotlibrc says.

  Raises:
    ConfigError: matplotlib is missing.
  """
  with figures.figure_style(
    {
      'font.size': 8.5,
      'axes.titlesize': 9,
      'axes.labelsize': 8.5,
      'xtick.labelsize': 7.5,
      'ytick.labelsize': 7.5,
      'lines.linewidth': 1.3,
      **figures.page_style('moe.report'),
    }
  ):
    yield


def panels(
  rows: int,
  columns: int,
  height: float,
  *,
  is_narrow: bool,
  heights: Sequence[float] | None = None,
  sharey: bool | Literal['none', 'all', 'row', 'col'] = False,
) -> tuple[Any, np.ndarray]:
  """Return (a matplotlib figure, its axes [rows, columns]).

  Args:
    rows: number of rows of panels.
    columns: number of columns of panels.
    height: height of the figure, in inches.
    is_narrow: for phones.
    heights: relative heights of the rows; for maps, which have no grid.
    sharey: as `matplotlib.figure.Figure.subplots` takes it.
  """
  from matplotlib.figure import Figure as Canvas  # not pyplot: no display, no global state
  from matplotlib.layout_engine import ConstrainedLayoutEngine

  layout_engine = ConstrainedLayoutEngine()
  width = _WIDTH
  if is_narrow:
    width = _NARROW_WIDTH
    layout_engine.set(h_pad=0.1)
  figure = Canvas(figsize=(width, max(height, 1.6)), layout=layout_engine)
  gridspec_kw = None
  if heights is not None:
    gridspec_kw = {'height_ratios': heights}
  panels = figure.subplots(
    rows,
    columns,
    squeeze=False,
    sharey=sharey,
    gridspec_kw=gridspec_kw,
  )
  if heights is None and sharey:
    for axes in panels.flat:
      axes.grid(True)
  return figure, panels


def finish(wide: Any, narrow: Any, *, name: str, title: str, caption: str) -> Figure:
  """Convert both drawings of a figure. The title is part of the PNG; on the page it is above the figure."""
  from matplotlib.transforms import Bbox

  svg = figures.svg_element(wide, name, title)
  narrow_svg = figures.svg_element(narrow, f'narrow-{name}', title)
  # The layout stays as it is; the title is added above it.
  wide.set_layout_engine('none')
  width, height = wide.get_size_inches()
  wide.text(
    0.1 / width, 1 + 0.1 / height, title, ha='left', va='bottom', fontsize=11, fontweight='bold'
  )
  png = io.BytesIO()
  wide.savefig(
    png,
    format='png',
    dpi=_DPI,
    metadata={'Software': None},
    bbox_inches=Bbox([[0, 0], [width, height + _TITLE_HEIGHT]]),
  )
  return Figure(
    name=name, title=title, caption=caption, png=png.getvalue(), svg=svg, narrow_svg=narrow_svg
  )


def shades(count: int) -> list[Any]:
  """Return `count` colours that are visible on white and on dark pages; many are from dark to light."""
  import matplotlib

  if count <= 4:
    return list(figures.COLORS[:count])
  return list(matplotlib.colormaps['viridis'](np.linspace(0.2, 0.8, count)))


def step_ticks(axes: Any, history: History, most: int = 5) -> None:
  """Label an axis of steps with a few integers."""
  figures.set_step_ticks(axes, most)
  if len(history.steps) == 1:
    axes.set_xticks([int(history.steps[0])])


def integer_ticks(axis: Any, count: int, start: int = 0, most: int = 16) -> None:
  """Label an axis with at most `most` of `count` integers, beginning at `start`."""
  stride = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2**20) if count <= s * most)
  axis.set_ticks([*range(start, count + start, stride)])


def _fraction(value: float, _: Any) -> str:
  if value >= 1:
    return f'{value:g}'
  return str(fractions.Fraction(value).limit_denominator(2**20))


def log2_axis(axes: Any, values: Sequence[float]) -> None:
  """Scale an axis of ratios by powers of 2; at least 1 and 2 are visible."""
  from matplotlib import ticker

  known = [v for v in values if np.isfinite(v) and v > 0] or [1.0]
  low = min(*known, 0.9)
  high = max(*known, 2.0)
  axes.set_yscale('log', base=2)
  # A narrow range needs ticks between the powers of 2.
  subs = (1.0,)
  if high / low < 6:
    subs = (1.0, 1.5)
  axes.yaxis.set_major_locator(ticker.LogLocator(2, subs=subs))
  axes.set_ylim(low / 1.15, high * 1.15)
  axes.yaxis.set_major_formatter(ticker.FuncFormatter(_fraction))
  axes.yaxis.set_minor_locator(ticker.NullLocator())
