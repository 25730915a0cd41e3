"""Style of the figures that commands draw with matplotlib: colours, fonts, axis limits and tick labels.

`svg_element` makes the element of a page of a figure.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import html
import io
import math
import re
from typing import Any

from t5x_lite.errors import needs_packages

INK = '#1d2733'
MUTED = '#5b6776'
GRID = '#d3d9e1'
# Okabe and Ito: distinct with every form of colour blindness.
COLORS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#56b4e9', '#e69f00', INK)
# Colours of text, lines and grid to the variables of a page's theme, `html_page`.
_VARIABLES = {INK: '--ink', MUTED: '--muted', GRID: '--grid'}
# An axis starts at 0 unless the smallest value is more than this share of the largest.
_MAX_SHARE_BELOW_DATA = 0.5


@contextlib.contextmanager
def figure_style(extra: Mapping[str, Any] | None = None) -> Iterator[None]:
  """Draw with one style within the context, whatever matplotlibrc says.

  Args:
    extra: additional rcParams.

  Raises:
    ConfigError: matplotlib is missing.
  """
  with needs_packages('A plot', 'matplotlib', extra='plot'):
    import matplotlib
  rc = {
    'font.size': 9,
    'text.color': INK,
    'axes.labelcolor': INK,
    'axes.edgecolor': MUTED,
    'axes.linewidth': 0.6,
    'axes.titlesize': 10,
    'axes.titleweight': 'bold',
    'axes.titlelocation': 'left',
    'axes.labelsize': 9,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.axisbelow': True,
    'xtick.color': MUTED,
    'ytick.color': MUTED,
    'xtick.labelcolor': INK,
    'ytick.labelcolor': INK,
    'xtick.labelsize': 8,
    'ytick.labelsize': 8,
    'xtick.major.size': 2.5,
    'ytick.major.size': 2.5,
    'xtick.major.width': 0.6,
    'ytick.major.width': 0.6,
    'grid.color': GRID,
    'grid.linewidth': 0.6,
    'figure.facecolor': '#ffffff',
    'svg.fonttype': 'none',
    'text.parse_math': False,
  }
  with matplotlib.rc_context():
    matplotlib.rcdefaults()
    params: Any = matplotlib.rcParams
    params.update(rc | dict(extra or {}))
    yield


def page_style(salt: str) -> Mapping[str, Any]:
  """Return rcParams of `figure_style` for SVG elements of a page; `salt` makes the ids in them the same each time."""
  return {'axes.facecolor': 'none', 'svg.hashsalt': salt}


def svg_element(figure: Any, name: str, title: str) -> str:
  """Return a figure as an element of a page: without a background, with the text colours of the page's theme.

  Args:
    figure: a matplotlib figure that was drawn with `page_style`.
    name: prefix of the ids in the element, different from those of other elements of the page.
    title: description for readers who do not see the figure.
  """
  file = io.StringIO()
  figure.savefig(
    file,
    format='svg',
    dpi=144,  # of maps, which are pixels
    facecolor='none',
    metadata={'Date': None, 'Creator': None, 'Format': None, 'Type': None},
  )
  svg = file.getvalue()
  svg = svg[svg.index('<svg') :].strip()
  svg = re.sub(r'\bid="', f'id="{name}-', svg)
  svg = re.sub(r'(href="|url\()#', rf'\1#{name}-', svg)
  for color, variable in _VARIABLES.items():
    svg = svg.replace(color, f'var({variable}, {color})')
  svg = re.sub(r'<metadata>.*?</metadata>', '', svg, flags=re.DOTALL)
  # The page sets the width; the view box keeps the proportions.
  head = rf'<svg \1 role="img" aria-label="{html.escape(title)}">'
  return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', head, svg, count=1)


def set_linear_limits(axes: Any, values: Sequence[float]) -> str:
  """Set round limits of a linear y axis, which starts at 0 unless the data would fill less than half of it.

  Args:
    axes: matplotlib axes.
    values: the data; values that are not finite are ignored.

  Returns:
    A note with the range for the reader, e.g. 'axis from 0.9 to 1'; '' if the axis contains 0.
  """
  from matplotlib import ticker

  finite = [value for value in values if math.isfinite(value)]
  low = min(finite, default=0.0)
  high = max(finite, default=1.0)
  is_zoomed = low < high and (
    low > _MAX_SHARE_BELOW_DATA * high > 0 or high < _MAX_SHARE_BELOW_DATA * low < 0
  )
  if not is_zoomed:
    low = min(low, 0.0)
    high = max(high, 0.0)
    if low == high == 0:
      high = 1.0
  locator = ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
  ticks = locator.tick_values(low, high)
  axes.yaxis.set_major_locator(locator)
  axes.yaxis.set_major_formatter(ticker.FuncFormatter(short_number))
  axes.set_ylim(ticks[0], ticks[-1])
  if is_zoomed:
    return f'axis from {ticks[0]:g} to {ticks[-1]:g}'
  return ''


def set_step_ticks(axes: Any, max_ticks: int = 5) -> None:
  """Label an x axis of steps with at most `max_ticks` + 1 integers."""
  from matplotlib import ticker

  axes.xaxis.set_major_locator(
    ticker.MaxNLocator(max_ticks, integer=True, steps=[1, 2, 2.5, 5, 10])
  )
  axes.xaxis.set_major_formatter(ticker.FuncFormatter(short_number))


def short_number(value: float, position: Any = None) -> str:
  """Return a tick label; `position` is matplotlib's second argument.

  >>> [short_number(value) for value in (0.25, 0.00005, 200, 1500, 2.5e6)]
  ['0.25', '5e-05', '200', '1.5k', '2.5M']
  """
  del position
  for size, unit in ((1e6, 'M'), (1e3, 'k')):
    if size <= abs(value) < 1e9:
      return f'{value / size:g}{unit}'
  return f'{value:g}'
