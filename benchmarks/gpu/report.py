"""Markdown of the results: a table for each part, with the rates of the bare product of the same process."""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu import attention


def _cell(value: Any) -> str:
  if value is None:
    return ''
  if isinstance(value, bool):
    return 'yes' if value else '**no**'
  if isinstance(value, float):
    return f'{value:.4g}'
  return ' '.join(str(value).replace('|', '\\|').split())


def table(rows: Iterable[Mapping[str, Any]]) -> str:
  """Return a Markdown table of rows with different columns, in the order in which they first appear."""
  rows = list(rows)
  columns = list(dict.fromkeys(column for row in rows for column in row))
  lines = ['| ' + ' | '.join(columns) + ' |', '|' + '---|' * len(columns)]
  for row in rows:
    lines.append('| ' + ' | '.join(_cell(row.get(column)) for column in columns) + ' |')
  return '\n'.join(lines)


def _rates(matmul: list[Mapping[str, Any]]) -> str:
  """Return a sentence with the rates before and after."""
  found = []
  for dtype in ('bfloat16', 'float32'):
    rates = ' and '.join(f'{one[dtype]:.4g}' for one in matmul)
    found.append(f'{rates} TFLOP/s in {dtype}')
  return f'A bare product of {matmul[0]["size"]}^3 in the same process: {", ".join(found)}.'


def to_markdown(results: Mapping[str, Any]) -> str:
  """Return the page of the results.

  Args:
    results: see `runner.Runner.results`.
  """
  device = results['device'] or {}
  name = device.get('device', 'no device')
  lines = [
    f'# {name}',
    '',
    f'`{results["command"]}`, {results["date"]}, sizes {results["sizes"]!r}.',
    '',
  ]
  if device:
    facts = (f'{key}: {_cell(value)}' for key, value in device.items() if value is not None)
    lines += ['; '.join(facts) + '.', '']
  for part, result in results['parts'].items():
    lines += [f'## {part}', '']
    if result['matmul']:
      lines += [_rates(result['matmul']), '']
    rows = [
      {**row, 'item': item} for item, found in result['items'].items() for row in found['rows']
    ]
    # Rows of different kinds have different first columns.
    for first in dict.fromkeys(next(iter(row)) for row in rows):
      lines += [table(row for row in rows if next(iter(row)) == first), '']
    if part == 'attention':
      lines += [*attention.thresholds(rows), '']
    if 'reason' in result:
      lines += [f'The part ended early: {result["reason"]}.', '']
    for item, found in result['items'].items():
      if found['status'] != 'done':
        lines.append(f'- {item}: {found["status"]}, {found.get("reason", "no time was left")}.')
    lines.append('')
  return '\n'.join(lines)
