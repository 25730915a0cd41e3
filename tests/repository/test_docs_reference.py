"""The generated reference agrees with the code, is complete, and its links resolve."""

import argparse
import functools
import importlib
import inspect
import itertools
import operator
import pathlib
import re

import optax
import pytest

from benchmarks import optimizer_records
from docs import api_pages
from docs import make_reference
from docs import tables
from t5x_lite import errors
from t5x_lite import schedules
from t5x_lite.apps import commands
from t5x_lite.apps.common.flags import add_shared_arguments
from t5x_lite.compat import names
from t5x_lite.configuration import configurable_names
from t5x_lite.configuration import syntax

_ROOT = pathlib.Path(__file__).parents[2]
_COMMITTED = {
  path.relative_to(make_reference.FOLDER).as_posix(): path.read_text(encoding='utf-8')
  for path in make_reference.FOLDER.rglob('*.md')
}


@functools.cache
def _pages():
  return make_reference.pages()


def _cells(page):
  """Return the rows of all tables of a page, as lists of cells."""
  return [
    [cell.strip() for cell in re.split(r'(?<!\\)\|', line)[1:-1]]
    for line in page.splitlines()
    if line.startswith('|')
  ]


def test_committed_pages_are_those_of_the_code():
  made = _pages()
  differing = sorted(path for path in made if made[path] != _COMMITTED.get(path))
  assert differing == [], 'run `make reference`'
  assert sorted(_COMMITTED) == sorted(made), 'run `make reference`'


@pytest.mark.parametrize('path', sorted(_COMMITTED))
def test_links_resolve(path):
  text = re.sub(r'```.*?```', '', _COMMITTED[path], flags=re.DOTALL)
  folder = (make_reference.FOLDER / path).parent
  for target in re.findall(r'\]\(([^)\s]+)\)', text):
    if '://' not in target:
      file, _, anchor = target.partition('#')
      linked = folder / file if file else make_reference.FOLDER / path
      assert linked.exists(), target
      headings = re.findall(r'^#+ (.*)$', linked.read_text(encoding='utf-8'), re.MULTILINE)
      assert not anchor or anchor in api_pages.anchors(headings).values(), target


def test_anchors_of_equal_headings_are_numbered():
  assert api_pages.anchors(['Chat', 'Chat.answer', 'chat', 'A b_c!']) == {
    'Chat': 'chat',
    'Chat.answer': 'chatanswer',
    'chat': 'chat-1',
    'A b_c!': 'a-b_c',
  }


@pytest.mark.parametrize('path', sorted(_COMMITTED))
def test_github_shows_the_pages_as_they_are(path):
  """No directives, which only Sphinx knows, and no tags outside of code."""
  text = re.sub(r'```(?:python|pycon|text)\n.*?```\n', '', _COMMITTED[path], flags=re.DOTALL)
  assert '```' not in text
  text = re.sub(r'`[^`\n]*`', '', text).replace('<!-- ', '')
  assert re.findall(r'(?<!\\)<\w.*', text) == []


@pytest.mark.parametrize(
  'text, shown',
  [
    ('__init__ and _x_ of snake_case', r'\_\_init\_\_ and \_x\_ of snake_case'),
    ('Array<int> * 2, a~b~c, &lt; `a_*`', r'Array\<int> \* 2, a\~b\~c, \&lt; `a_*`'),
    ('the sum of\n+ a, and\n# b\n> c', 'the sum of\n\\+ a, and\n\\# b\n\\> c'),
    ('in ~/.cache, see https://a.b/c_*', 'in ~/.cache, see https://a.b/c_*'),
    ('* a\n* b', '- a\n- b'),
    ('Code:\n\n    a * b', 'Code:\n\n```text\na * b\n```'),
  ],
)
def test_signs_of_markdown_in_docstrings_are_only_signs(text, shown):
  assert api_pages._Text('t5x_lite.losses', None).body(text) == shown


def test_docstrings_have_no_fences():
  with pytest.raises(ValueError, match='must show code as doctests'):
    api_pages._Text('t5x_lite.losses', None).body('Code:\n\n```python\na * b\n```')


def test_rows_have_the_cells_of_their_heads():
  for path, text in _pages().items():
    for table in re.findall(r'(?:^\|.*\n)+', re.sub(r'```.*?```', '', text, flags=re.DOTALL), re.M):
      assert len({len(row) for row in _cells(table)}) == 1, (path, table)


def test_flags_are_described():
  page = _pages()['flags.md']
  assert [line[3:] for line in page.splitlines() if line.startswith('## ')] == list(
    commands.COMMANDS
  )
  for command, section in zip(commands.COMMANDS, page.split('\n## ')[1:], strict=True):
    parser = argparse.ArgumentParser(add_help=False)
    commands.COMMANDS[command].add_arguments(parser)
    add_shared_arguments(parser)
    for flag in itertools.chain.from_iterable(action.option_strings for action in parser._actions):
      assert re.search(rf'{re.escape(flag)}(?![\w.])', section), (command, flag)
    assert [flag for flag, meaning in tables.flags(command) if not meaning] == []
  assert '| `--input_format=auto\\|text\\|jsonl\\|csv\\|tsv\\|parquet\\|arrow` |' in page
  assert '| `--inputs, --input_template=TEMPLATE` |' in page
  assert 'must have started; default: 300 |' in page


# Flags of other programs, T5X's that have no equivalent, and placeholders.
_OTHER_FLAGS = (
  '--build-arg --fdl_config --find-links --flag --gin --no-deps --no-index --nodes --noflag --ntasks-per-node '
  '--jax_debug_infs --jax_debug_nans --jax_disable_jit --logdir --pdb --python --run_mode --run_with_profiling '
  '--help --version --xla_backend_extra_options --xla_force_host_platform_device_count'
)


def test_flags_that_pages_name_exist():
  """In text and tables too: `test_docs.py` tests those of commands."""
  known = set(_OTHER_FLAGS.split())
  for command in commands.COMMANDS.values():
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    add_shared_arguments(parser)
    known |= set(parser._option_string_actions)
  for folder in ('moe', 'benchmarks', 'scripts', 'tests/t5x'):
    for path in (_ROOT / folder).rglob('*.py'):
      known |= set(re.findall(r"add(?:_argument|option)\(\s*'(--\w+)'", path.read_text('utf-8')))
  for path in [_ROOT / 'README.md', _ROOT / 'AGENTS.md', *(_ROOT / 'docs').glob('*.md')]:
    flags = re.findall(r'(?<![\w-])--[a-zA-Z]\w*(?:-\w+)*', path.read_text(encoding='utf-8'))
    assert set(flags) <= known, path.name


def test_docstrings_describe_no_other_parameters():
  for module in itertools.chain.from_iterable(api_pages.MODULES.values()):
    for name, value in api_pages.described(module).items():
      if api_pages.package(value) not in ('t5x_lite', 'moe'):
        continue
      described = [value]
      if inspect.isclass(value):
        described += [api_pages._function(member) for _, member in api_pages._members(value)]
      for each in described:
        text = ''.join(found for kind, found in _sections(each) if kind == 'Args')
        known = {row.name for row in api_pages.parameters(each)} if text else set()
        assert set(api_pages._entries(text)) <= known | {'cls'}, (name, each)


def _sections(described):
  return api_pages._SECTION.findall(api_pages._doc(described))


def test_every_packaged_file_is_listed():
  listed = {row[0].strip('`') for row in _cells(_pages()['gin_files.md'])}
  found = syntax.packaged_folder().rglob('*.gin')
  assert {path.relative_to(syntax.packaged_folder()).as_posix() for path in found} <= listed
  assert all(tables.summary(file) for file in tables.packaged_files())


def test_every_macro_is_described():
  """A macro without a comment is described in another file, such as one that it includes."""
  for file, rows in tables.listed_macros().items():
    assert [macro.name for macro in rows if not macro.meaning] == [], file
  described = {macro.name for rows in tables.listed_macros().values() for macro in rows}
  for file in tables.packaged_files():
    text = (syntax.packaged_folder() / file).read_text(encoding='utf-8')
    assert set(re.findall(r'^([A-Z][A-Z0-9_]*) *=', text, re.MULTILINE)) <= described, file
  page = _pages()['macros.md']
  assert '| `TRAIN_STEPS` | required | step at which the run ends, ' in page
  assert (
    '| `GRANULARITY` | `1` | Number of slices of a dense block; ' in page
  )  # from the lines above


def test_parameters_are_those_of_configurable_names():
  """Each name that a configuration may use is described, with its parameters and their meanings."""
  page = _pages()['parameters.md']
  for table in (configurable_names.CALLED, configurable_names.PASSED):
    for module, listed in table.items():
      if module.startswith(('optax', 'seqio')):
        continue
      for name in listed.split():
        if name.startswith('_'):
          continue
        value = operator.attrgetter(name)(importlib.import_module(module))
        home = api_pages.home(value)
        assert home is not None, f'{module}.{name}'
        if '.' not in home.name:
          (row,) = [row for row in _cells(page) if row[0] == f'[`{home.name}`](api/{home.link()})']
          shown = re.findall(r'`(\w+)`', row[1])
          assert shown == [each.name for each in api_pages.parameters(value)]
        if api_pages.package(value) in ('t5x_lite', 'moe'):
          # Some have one sentence instead of descriptions.
          described = {bool(each.meaning) for each in api_pages.parameters(value)}
          assert len(described) < 2 and inspect.getdoc(value), name


def test_every_public_name_is_on_the_page_of_its_module():
  for module, text in api_pages.pages().items():
    found = importlib.import_module(module)
    for name in getattr(found, '__all__', ()):
      forms = (f'\n## {name}\n', f'[`{name}`]', f'\n{name} = ', f'\n{name}: ')
      if not inspect.ismodule(getattr(found, name)):
        assert any(form in text for form in forms), (module, name)


def test_texts_of_other_packages_are_not_copied():
  page = _pages()['api/t5x_lite.optimizers.md']
  (section,) = re.findall(r'^## adabelief\n.*?^## ', page, re.MULTILINE | re.DOTALL)
  assert '#optax.adabelief' in section and 'eps=1e-16' in section
  assert optax.adabelief.__doc__.splitlines()[0] not in page


def test_learning_rate_factors_are_described():
  with pytest.raises(errors.ConfigError) as caught:
    schedules.create_learning_rate_scheduler('nothing')
  known = re.findall(r"'(\w+)'", str(caught.value).partition(', got ')[0])
  assert len(known) > 5
  for factor in known:
    assert f'\n- `{factor}`: ' in _pages()['api/t5x_lite.schedules.md']


def test_t5x_names_are_listed():
  page = _pages()['t5x_names.md']
  for module, row in names.MODULES.items():
    assert not row.here or f'| `{module}` | `{row.here}` |' in page
    for name in (*row.names, *row.left_out):
      assert f'| `{module}.{name}` | ' in page


def test_optimizers_are_listed_with_the_comments_of_their_files():
  overview, _, _ = _pages()['optimizer_measurements.md'].partition('\n## Measurements\n')
  head, _, *rows = _cells(overview)
  assert head == ['file', 'optimizer', 'rate', 'state', 'step', 'T5 small']
  files = [pathlib.PurePath(file).stem for file in syntax.packaged_files('optimizers')]
  assert sorted(row[0].strip('`') for row in rows) == sorted(files)
  assert [float(row[3]) for row in rows] == sorted(float(row[3]) for row in rows)
  (lion,) = [row for row in rows if row[0] == '`lion`']
  ratios = [
    f'{optimizer_records.read()["lion", params].ratio:.1f}' for params in ('set', 't5_small')
  ]
  assert lion[1:] == [
    'Lion: the sign of an interpolated momentum; one moment of state. Use a larger weight decay than with AdamW (Chen '
    'et al. 2023, [arXiv:2302.06675](https://arxiv.org/abs/2302.06675)).',
    '1e-4',
    '4',
    *ratios,
  ]
  # Relative rates, rates that the optimizer finds, and those of parts.
  assert {row[0].strip('`') for row in rows if not row[2]} == {
    'adafactor',
    'lbfgs',
    'multi_optimizer',
    'multi_optimizer_by_label',
    'polyak_sgd',
    'rprop',
    'sgd',
  }


def test_records_of_optimizers_are_listed():
  _, _, measurements = _pages()['optimizer_measurements.md'].partition('\n## Measurements\n')
  head, _, *figures = _cells(measurements)
  assert len(head) == 1 + 2 * 5 and 'T5 small: step, ms' in head
  records = optimizer_records.read()
  assert {(row[0].strip('`'), params) for row in figures for params in ('set', 't5_small')} == set(
    records
  )
  (adam,) = [row for row in figures if row[0] == '`adam`']
  record = records['adam', 't5_small']
  assert [float(cell) for cell in adam[6:]] == pytest.approx(
    [record.step_ms, record.slowest_ms, record.ratio, record.compile_s, 8], rel=5e-3
  )


def test_exit_statuses_are_in_the_configuration():
  page = (_ROOT / 'docs/configuration.md').read_text(encoding='utf-8')
  listed = {row[0] for row in _cells(page)}
  assert {str(int(code)) for code in errors.ExitCode} <= listed
