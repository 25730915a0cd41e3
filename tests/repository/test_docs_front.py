"""The pages that a reader opens first agree with the repository: README, AGENTS.md, `llms.txt`, the index."""

import pathlib
import re

import pytest

from docs import llms

_ROOT = pathlib.Path(__file__).parents[2]
_README = (_ROOT / 'README.md').read_text(encoding='utf-8')
_INDEX = (_ROOT / 'docs/index.md').read_text(encoding='utf-8')
_AGENTS = (_ROOT / 'AGENTS.md').read_text(encoding='utf-8')
_URL = re.search(r"^_URL = '(.*)'$", (_ROOT / 'setup.py').read_text(), re.MULTILINE)[1]


def test_readme_is_short():
  assert len(_README.splitlines()) <= 120


def test_pages_are_short():
  """Generated pages and notebooks are not counted: they are in folders."""
  words = {
    path.name: len(path.read_text(encoding='utf-8').split())
    for path in (_ROOT / 'docs').glob('*.md')
  }
  assert words['design.md'] <= 6_000
  assert sum(words.values()) <= 55_000


@pytest.mark.parametrize(
  'page', ['README.md', 'CITATION.cff', 'docs/install.md', '.github/ISSUE_TEMPLATE/config.yml']
)
def test_pages_name_the_address_of_the_repository(page):
  name = _URL.rpartition('/')[2]
  text = (_ROOT / page).read_text(encoding='utf-8')
  found = set(re.findall(rf'https://github\.com/[\w-]+/{name}\b', text))
  assert found == {_URL}


def test_llms_txt_is_that_of_the_index():
  written = (_ROOT / 'llms.txt').read_text(encoding='utf-8')
  assert written == llms.text(_INDEX), 'run `make reference`'


def test_llms_txt_links_all_pages_of_the_table():
  links = re.findall(r'^- \[.+?\]\((\S+?)\): \S.*$', llms.text(_INDEX), re.MULTILINE)
  raw = _URL.replace('https://github.com', 'https://raw.githubusercontent.com')
  pages = {link.removeprefix(f'{raw}/main/docs/') for link in links}
  assert len(pages) == len(links)
  assert all((_ROOT / 'docs' / page).is_file() for page in pages)
  shown = ' '.join(re.findall(r'```\{toctree\}.*?\n\n(.*?)```', _INDEX, re.DOTALL)).split()
  # The API reference and generated pages are on the site only.
  written = {f'{name}.md' for name in shown if (_ROOT / f'docs/{name}.md').is_file()}
  assert {page for page in written if '/' not in page} <= pages


def test_agents_page_names_targets_and_folders():
  makefile = (_ROOT / 'Makefile').read_text()
  targets = re.findall(r'`make ([\w-]+)[ `]', _AGENTS)
  assert len(targets) > 5
  for target in targets:
    assert re.search(rf'^{target}:', makefile, re.MULTILINE), target
  rows = re.search(r'\| folder \| contents \|\n\|---\|---\|\n((?:\|.*\n)+)', _AGENTS)[1]
  for row in rows.splitlines():
    names = re.findall(r'`([^`]+)`', row.split('|')[1])
    assert names
    for name in names:
      assert (_ROOT / name).is_dir() or (_ROOT / 't5x_lite' / name).is_dir(), name


def test_install_page_lists_the_extras_and_the_pythons():
  page = (_ROOT / 'docs/install.md').read_text(encoding='utf-8')
  setup = (_ROOT / 'setup.py').read_text()
  extras = re.search(r'extras_require=\{\n(.*?)\n  \},\n', setup, re.DOTALL)[1]
  users = {
    name
    for name in re.findall(r"^    '([\w-]+)': \[", extras, re.MULTILINE)
    if not name.startswith('test') and name not in ('docs', 'pictures')
  }
  rows = re.search(r'\| extra \| for .*\n\|[-|]+\n((?:\|.*\n)+)', page)[1]
  listed = [name for row in rows.splitlines() for name in re.findall(r'`(\w+)`', row.split('|')[1])]
  assert sorted(listed) == sorted(users)
  locks = {
    path.stem.removeprefix('lock-') for path in (_ROOT / 'requirements').glob('lock-3.*.txt')
  }
  rows = re.search(r'\| Python \| JAX .*\n\|[-|]+\n((?:\|.*\n)+)', page)[1]
  tested = [row.split('|')[1] for row in rows.splitlines() if '| tested' in row]
  assert set(re.findall(r'3\.\d+', ' '.join(tested))) == locks


@pytest.mark.parametrize('page', ['AGENTS.md', 'CONTRIBUTING.md', 'SECURITY.md'])
def test_links_of_pages_for_developers_resolve(page):
  """`test_docs.py` tests those of README and docs."""
  links = re.findall(r'\]\(([^)\s]+)\)', (_ROOT / page).read_text(encoding='utf-8'))
  assert links
  for file, _, anchor in (link.partition('#') for link in links if '://' not in link):
    text = (_ROOT / file).read_text(encoding='utf-8') if file.endswith('.md') else ''
    assert (_ROOT / file).exists(), file
    headings = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
    anchors = {re.sub(r'[^\w\- ]', '', each.lower()).replace(' ', '-') for each in headings}
    assert not anchor or anchor in anchors, (file, anchor)
