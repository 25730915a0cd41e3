"""Writes `llms.txt` (https://llmstxt.org), a list of the pages for language models, from the table of `docs/index.md`.

python docs/llms.py
"""

import pathlib
import re

_ROOT = pathlib.Path(__file__).parents[1]
# Pages as text, without the site's HTML.
_PAGES = 'https://raw.githubusercontent.com/t5x-lite/t5x_lite/main/docs'
_ROW = re.compile(
  r'^\| (?P<task>.+) \| \[(?P<name>.+)\]\((?P<page>[\w/]+\.\w+)\) \|$', re.MULTILINE
)


def text(index: str) -> str:
  """Return the contents of `llms.txt`.

  Args:
    index: text of `docs/index.md`: a heading, a paragraph, and a table with rows of a task and the link of a page.
  """
  heading, summary, *_ = index.split('\n\n')
  rows = [
    f'- [{row["name"]}]({_PAGES}/{row["page"]}): {row["task"]}' for row in _ROW.finditer(index)
  ]
  quoted = ' '.join(re.sub(r'\[(.+?)\]\(.+?\)', r'\1', summary).split())
  return '\n'.join([heading, '', f'> {quoted}', '', '## Pages', '', *rows, ''])


def main() -> None:
  index = (_ROOT / 'docs/index.md').read_text(encoding='utf-8')
  (_ROOT / 'llms.txt').write_text(text(index), encoding='utf-8')


if __name__ == '__main__':
  main()
