"""docs/extending.md and docs/custom.md show the examples of this folder as they are, or link to them."""

import pathlib

import pytest

_FOLDER = pathlib.Path(__file__).parent
_PAGES = tuple(
  (_FOLDER.parents[1] / 'docs' / name).read_text(encoding='utf-8')
  for name in ('extending.md', 'custom.md')
)
_EXAMPLES = sorted(
  path
  for path in _FOLDER.glob('*.py')
  if not path.name.startswith(('test_', '__init__', 'conftest', 'fake_', 'make_'))
)


@pytest.mark.parametrize('path', _EXAMPLES, ids=lambda path: path.stem)
def test_a_page_has_the_example(path):
  shown = f'`{path.name}`:\n\n```python\n{path.read_text(encoding="utf-8")}```'
  link = f'[`{path.name}`](../tests/examples/{path.name})'
  assert sum(shown in page or link in page for page in _PAGES) == 1
