"""`llms.txt` (https://llmstxt.org), a list of the pages for language models, from the table of `docs/index.md`."""

import re

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
