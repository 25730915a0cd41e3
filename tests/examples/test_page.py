"""docs/extending.md shows the examples of this folder as they are."""

import pathlib

import pytest

_FOLDER = pathlib.Path(__file__).parent
_EXAMPLES = sorted(
  path
  for path in _FOLDER.glob('*.py')
  if not path.name.startswith(('test_', '__init__', 'conftest', 'fake_', 'make_'))
)


@pytest.mark.parametrize('path', _EXAMPLES, ids=lambda path: path.stem)
def test_page_shows_the_example(path):
  page = (_FOLDER.parents[1] / 'docs' / 'extending.md').read_text(encoding='utf-8')
  assert f'`{path.name}`:\n\n```python\n{path.read_text(encoding="utf-8")}```' in page
