"""Write docs/reference from the code, and llms.txt from docs/index.md: `make reference`. Tests compare them."""

import pathlib

from docs import api_pages
from docs import llms
from docs import tables

_DOCS = pathlib.Path(__file__).parent
FOLDER = _DOCS / 'reference'

_HEADER = '<!-- `make reference` writes this page from the code. After a merge conflict, run it again. -->\n\n'


def pages() -> dict[str, str]:
  """Return the pages of the reference in Markdown, by path relative to `FOLDER`."""
  found = {
    'index.md': _index(),
    'flags.md': tables.flag_page(),
    'macros.md': tables.macro_page(),
    'gin_files.md': tables.file_page(),
    'parameters.md': tables.parameter_page(),
    't5x_names.md': tables.t5x_page(),
    'optimizer_measurements.md': tables.measurement_page(),
  }
  found |= {f'api/{module}.md': text for module, text in api_pages.pages().items()}
  return {path: f'{_HEADER}{text.strip()}\n' for path, text in found.items()}


def _index() -> str:
  return f"""# Reference

| page | content |
|---|---|
| [Flags](flags.md) | the flags of each command |
| [Macros](macros.md) | the macros of the gin files that come with t5x_lite, with defaults and meanings |
| [Gin files](gin_files.md) | these files: models, runs, optimizers, partitioning, data, recipes, T5X's paths |
| [Parameters](parameters.md) | what gin files and flags can bind, by class and function |
| [Names of T5X](t5x_names.md) | where T5X's modules and names are here |
| [All optimizers](optimizer_measurements.md) | what each optimizer is, its learning rate, memory and time |

How a configuration is read, the files of a run, events, metric names and exit statuses are in
[Configuration](../configuration.md).

## API

{api_pages.index()}"""


def main() -> None:
  """Write the pages, and remove those of earlier code."""
  written = pages()
  for path in FOLDER.rglob('*.md'):
    if path.relative_to(FOLDER).as_posix() not in written:
      path.unlink()
  for name, text in written.items():
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')
  index = (_DOCS / 'index.md').read_text(encoding='utf-8')
  (_DOCS.parent / 'llms.txt').write_text(llms.text(index), encoding='utf-8')


if __name__ == '__main__':
  main()
