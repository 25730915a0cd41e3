"""The notebooks of the documentation as Markdown, so that they are checked like its pages."""

import json
import pathlib

FOLDER = pathlib.Path(__file__).parents[2] / 'docs/notebooks'
SHELL = '%%bash -eo pipefail\n'


def cells(path: pathlib.Path) -> list[tuple[str, str]]:
  """Return the kind ('markdown' or 'code') and the source of each cell."""
  notebook = json.loads(path.read_text(encoding='utf-8'))
  return [(cell['cell_type'], ''.join(cell['source'])) for cell in notebook['cells']]


def markdown(path: pathlib.Path) -> str:
  """Return the notebook as a page, with a fence for each cell of code."""
  return '\n\n'.join(_block(kind, source) for kind, source in cells(path)) + '\n'


def _block(kind: str, source: str) -> str:
  if kind == 'markdown':
    return source
  language = 'sh' if source.startswith(SHELL) else 'python'
  return f'```{language}\n{source.removeprefix(SHELL)}\n```'
