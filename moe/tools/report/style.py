"""Paper and ink of the report's figures, and what turns a drawing into a PNG and an element of a page.

In the SVG, ink and grid are CSS variables of the page, so that they follow its light or dark theme.
"""

import contextlib
import dataclasses
import fractions
import html
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moe.tools.report.data import History
from t5x_lite.errors import ConfigError, install_command

INK, MUTED, GRID, BLANK = '#1d2733', '#5b6776', '#d3d9e1', '#b9c0ca'
_VARIABLES = {INK: '--ink', MUTED: '--muted', GRID: '--grid'}
_DPI = 144
_WIDTH = 10.0
_STRIP = 0.4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """One figure.

  Attributes:
    name: of its file, without an ending.
    title: one line.
    caption: how to read it.
    png: the picture, on white.
    svg: the same as an element of a page, without a background.
  """

  name: str
  title: str
  caption: str
  png: bytes
  svg: str


@contextlib.contextmanager
def paper() -> Iterator[None]:
  """Within it, figures look as the report's do, whatever the user has configured.

  Raises:
    ConfigError: matplotlib is missing.
  """
  try:
    import matplotlib
  except ImportError as error:
    raise ConfigError("The report's plots need matplotlib, which is not installed. Install it with "
                      f'`{install_command("plot")}`.') from error
  rc = {
      'font.size': 8.5, 'axes.titlesize': 9, 'axes.titleweight': 'bold', 'axes.labelsize': 8.5,
      'text.color': INK, 'axes.labelcolor': INK, 'axes.edgecolor': MUTED, 'xtick.color': MUTED, 'ytick.color': MUTED,
      'xtick.labelcolor': INK, 'ytick.labelcolor': INK, 'xtick.labelsize': 7.5, 'ytick.labelsize': 7.5,
      'grid.color': GRID, 'grid.linewidth': 0.6, 'axes.linewidth': 0.6, 'lines.linewidth': 1.3,
      'xtick.major.size': 2.5, 'ytick.major.size': 2.5, 'xtick.major.width': 0.6, 'ytick.major.width': 0.6,
      'axes.spines.top': False, 'axes.spines.right': False, 'figure.facecolor': '#ffffff', 'axes.facecolor': 'none',
      'svg.fonttype': 'none', 'svg.hashsalt': 'moe.report', 'text.parse_math': False, 'axes.axisbelow': True}
  with matplotlib.rc_context():
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(rc)
    yield


def panels(rows: int, columns: int, height: float, *, heights: Sequence[float] | None = None,
            sharey: bool | str = False) -> tuple[Any, np.ndarray]:
  """Returns (a matplotlib figure, its axes [rows, columns]).

  Args:
    rows: of panels.
    columns: of panels.
    height: of the figure, in inches.
    heights: of the rows, relative to each other; for maps, which have no grid.
    sharey: as `matplotlib.figure.Figure.subplots` takes it.
  """
  from matplotlib.figure import Figure as Canvas  # not pyplot: no display, no global state
  figure = Canvas(figsize=(_WIDTH, max(height, 1.6)), layout='constrained')
  panels = figure.subplots(rows, columns, squeeze=False, sharey=sharey,
                           gridspec_kw=None if heights is None else {'height_ratios': heights})
  if heights is None and sharey:
    for axes in panels.flat:
      axes.grid(True)
  return figure, panels


def finish(figure: Any, *, name: str, title: str, caption: str) -> Figure:
  """Writes a drawing in both forms. The title stands in the PNG; on a page it stands above."""
  from matplotlib.transforms import Bbox
  png, svg = io.BytesIO(), io.StringIO()
  figure.savefig(svg, format='svg', dpi=_DPI, facecolor='none',
                 metadata={'Date': None, 'Creator': None, 'Format': None, 'Type': None})
  # What is laid out stays; the title comes on a strip above it.
  figure.set_layout_engine('none')
  width, height = figure.get_size_inches()
  figure.text(0.1 / width, 1 + 0.1 / height, title, ha='left', va='bottom', fontsize=11, fontweight='bold')
  figure.savefig(png, format='png', dpi=_DPI, metadata={'Software': None},
                 bbox_inches=Bbox([[0, 0], [width, height + _STRIP]]))
  return Figure(name=name, title=title, caption=caption, png=png.getvalue(), svg=_for_page(svg.getvalue(), name, title))


def _for_page(svg: str, name: str, title: str) -> str:
  """Returns an SVG file as an element: no head, ids of its own, colours of the page's theme."""
  svg = svg[svg.index('<svg'):].strip()
  svg = re.sub(r'\bid="', f'id="{name}-', svg)
  svg = re.sub(r'(href="|url\()#', rf'\1#{name}-', svg)
  for color, variable in _VARIABLES.items():
    svg = svg.replace(color, f'var({variable}, {color})')
  svg = re.sub(r'<metadata>.*?</metadata>', '', svg, flags=re.DOTALL)
  # The page says how wide it is; the view box keeps the proportions.
  head = rf'<svg \1 role="img" aria-label="{html.escape(title)}">'
  return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', head, svg, count=1)


def shades(count: int) -> list[Any]:
  """Returns colours from dark to light that are seen on white and on dark pages."""
  import matplotlib
  if count <= 4:
    # Hues of Okabe and Ito, which nobody confuses.
    return ['#0072b2', '#d55e00', '#009e73', '#cc79a7'][:count]
  return list(matplotlib.colormaps['viridis'](np.linspace(0.2, 0.8, count)))


def step_ticks(axes: Any, history: History, most: int = 5) -> None:
  """Labels an axis of steps with a few whole numbers."""
  from matplotlib import ticker
  axes.xaxis.set_major_locator(ticker.MaxNLocator(most, integer=True))
  axes.xaxis.set_major_formatter(ticker.FuncFormatter(_short_number))
  if len(history.steps) == 1:
    axes.set_xticks([int(history.steps[0])])


def _short_number(value: float, _: Any) -> str:
  return f'{value / 1e6:g}M' if abs(value) >= 1e6 else f'{value / 1e3:g}k' if abs(value) >= 1e3 else f'{value:g}'


def integer_ticks(axis: Any, count: int, start: int = 0, most: int = 16) -> None:
  """Labels an axis with at most so many of `count` whole numbers, from `start` on."""
  stride = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2**20) if count <= s * most)
  axis.set_ticks([*range(start, count + start, stride)])


def _fraction(value: float, _: Any) -> str:
  return f'{value:g}' if value >= 1 else str(fractions.Fraction(value).limit_denominator(2**20))


def log2_axis(axes: Any, values: Sequence[float]) -> None:
  """Scales an axis of ratios by powers of 2, of which at least two are in view."""
  from matplotlib import ticker
  known = [v for v in values if np.isfinite(v) and v > 0] or [1.0]
  low, high = min(*known, 0.9), max(*known, 2.0)
  axes.set_yscale('log', base=2)
  # Over a few octaves, what lies between them too.
  axes.yaxis.set_major_locator(ticker.LogLocator(2, subs=(1.0, 1.5) if high / low < 6 else (1.0,)))
  axes.set_ylim(low / 1.15, high * 1.15)
  axes.yaxis.set_major_formatter(ticker.FuncFormatter(_fraction))
  axes.yaxis.set_minor_locator(ticker.NullLocator())
