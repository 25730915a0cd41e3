"""Parts of self-contained HTML pages: style, cards, tables and figures, for wide screens, phones, dark mode and paper.

A page loads nothing. All texts are escaped here; arguments named `*_html` are elements already.
"""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import datetime
import html
import math
from typing import NamedTuple

from t5x_lite.formatting import printable

# `Card.is_good` -> (class of the element, words).
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
  """One finding of a summary.

  Attributes:
    title: the topic, two or three words.
    value: the most important number.
    is_good: True, False, or None if the value is neither good nor bad.
    text: the finding in sentences.
  """

  title: str
  value: str
  is_good: bool | None = None
  text: str = ''


class Cell(NamedTuple):
  """A cell of a table that is more than a text.

  Attributes:
    text: the text.
    is_bad: whether the value is bad.
    element_html: an element in front of the text; '' for none.
  """

  text: str = ''
  is_bad: bool = False
  element_html: str = ''


def escape(text: str) -> str:
  """Return a text as HTML; characters that control the direction of texts or cannot be shown are escaped visibly."""
  return html.escape(printable(text, keeps_lines=True))


def page(title: str, body_html: Iterable[str], style: str = '') -> str:
  """Return the text of a page; `style` is added to the style of all pages."""
  body = '\n'.join(body_html)
  return (
    f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
    f'content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
    f'<style>{_STYLE}{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n'
  )


def header(title: str, lead_html: str) -> str:
  """Return the heading of a page with a line below it."""
  return f'<header><h1>{escape(title)}</h1>\n<p class="lead">{lead_html}</p></header>'


def code(text: str) -> str:
  """Return an element of a file name, a flag or a value."""
  return f'<code>{escape(text)}</code>'


def details(summary: str, body_html: Iterable[str], *, is_open: bool = False) -> Iterator[str]:
  """Yield a part of a page that is hidden until it is asked for."""
  tag = '<details open>' if is_open else '<details>'
  yield f'{tag}<summary>{escape(summary)}</summary>'
  yield from body_html
  yield '</details>'


def note(text_html: str) -> str:
  """Return a paragraph that explains what is above it."""
  return f'<p class="note">{text_html}</p>'


def cards(found: Iterable[Card]) -> Iterator[str]:
  """Yield the summary of a page."""
  yield '<section class="findings" aria-label="Summary">'
  for card in found:
    kind, verdict = _VERDICTS[card.is_good]
    yield (
      f'<div class="finding {kind}"><span class="verdict">{verdict}</span><h3>{escape(card.title)}</h3>'
      f'<div class="value">{escape(card.value)}</div><p>{escape(card.text)}</p></div>'
    )
  yield '</section>'


def definitions(
  title: str, pairs: Iterable[tuple[str, str]], *, is_settings: bool = False
) -> Iterator[str]:
  """Yield a heading and a list of names with values; those of settings are code."""
  kind = 'run'
  element_fn = escape
  if is_settings:
    kind = 'settings'
    element_fn = code
  yield f'<h2>{escape(title)}</h2>\n<dl class="{kind}">'
  for name, value in pairs:
    yield f'<dt>{element_fn(name)}</dt><dd>{element_fn(value)}</dd>'
  yield '</dl>'


def table(
  headings: Sequence[str], rows: Iterable[Sequence[str | Cell]], *, kind: str = ''
) -> Iterator[str]:
  """Yield a table whose first column has names and whose other columns have numbers.

  Args:
    headings: headings of the columns.
    rows: cells of each row.
    kind: class of the table in the style of the page; the heading of a cell is its attribute `data-name`.
  """
  cells = ''.join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
  tag = f'<table class="{kind}">' if kind else '<table>'
  yield f'<div class="scroll">{tag}\n<thead><tr>{cells}</tr></thead>\n<tbody>'
  for row in rows:
    cells = ''
    for heading, cell in zip(headings, row, strict=True):
      if isinstance(cell, str):
        cell = Cell(cell)
      attributes = ' class=bad' if cell.is_bad else ''
      if kind:
        attributes += f' data-name="{escape(heading)}"'
      cells += f'<td{attributes}>{cell.element_html}{escape(cell.text)}</td>'
    yield f'<tr>{cells}</tr>'
  yield '</tbody></table></div>'


def figure(title: str, caption: str, svg: str, narrow_svg: str) -> Iterator[str]:
  """Yield a figure with its heading; both forms are elements of `figures.svg_element`."""
  yield f'<figure><h2>{escape(title)}</h2>'
  yield f'<figcaption>{escape(caption)}</figcaption>'
  yield f'<div class="wide">{svg}</div>\n<div class="narrow">{narrow_svg}</div></figure>'


def count(number: int, what: str) -> str:
  """Return a number of things.

  >>> count(1, 'run'), count(1200, 'line')
  ('1 run', '1,200 lines')
  """
  if number == 1:
    return f'{number} {what}'
  return f'{number:,} {what}s'


def utc_time(seconds: float) -> str:
  """Return a time in seconds since 1970; '' for NaN.

  >>> utc_time(0.0)
  '1970-01-01 00:00 UTC'
  """
  if math.isnan(seconds):
    return ''
  return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime('%Y-%m-%d %H:%M UTC')
