"""Contents of a user's clone."""

import importlib.util
import pathlib
import platform
import re
import subprocess

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
  'name',
  [
    'README.md',
    'setup.py',
    'pyproject.toml',
    'Makefile',
    'CHANGELOG.md',
    'CONTRIBUTING.md',
    'LICENSE',
    'CITATION.cff',
    'SECURITY.md',
    '.github/workflows/ci.yml',
    'requirements',
    'docs/design.md',
    'benchmarks',
    '.ci/run',
    't5x_lite',
    'moe',
    'gin',
    'scripts',
    'tests',
  ],
)
def test_top_level(name):
  assert (_ROOT / name).exists()


def test_scripts_are_flags_only():
  for name in ('train', 'explain_sharding'):
    assert len((_ROOT / 'scripts' / f'{name}.py').read_text().splitlines()) <= 40


def test_modules_have_a_docstring_of_their_purpose():
  silent = [
    str(path.relative_to(_ROOT))
    for top in ('t5x_lite', 'moe', 'scripts', 'benchmarks')
    for path in (_ROOT / top).rglob('*.py')
    if not path.read_text().lstrip().startswith(('"""', '#!'))
  ]
  assert not silent, silent


def test_no_leftover_markers():
  pattern = re.compile(r'\b(TODO|FIXME|XXX)\b')
  for top in ('t5x_lite', 'moe', 'scripts', 'benchmarks', 'gin'):
    for path in (_ROOT / top).rglob('*'):
      if path.suffix in ('.py', '.gin'):
        assert not pattern.search(path.read_text()), path


def test_locks_agree_between_pythons():
  """The locks of 3.11 and 3.12 pin the same packages; versions differ only where a wheel needs it."""
  pins = {}
  for version in ('3.11', '3.12'):
    lines = (_ROOT / f'requirements/lock-{version}.txt').read_text().splitlines()
    pins[version] = dict(line.split('==') for line in lines if line and not line.startswith('#'))
  assert set(pins['3.11']) == set(pins['3.12'])
  differing = {name for name in pins['3.11'] if pins['3.11'][name] != pins['3.12'][name]}
  assert differing <= {'contourpy', 'scipy'}, differing


@pytest.mark.skipif(
  (platform.system(), platform.machine()) != ('Linux', 'x86_64'), reason='the locks are for Linux'
)
@pytest.mark.parametrize(
  'name',
  [
    'grain',
    'jsonschema',
    'matplotlib',
    'safetensors',
    'seqio',
    'sentencepiece',
    't5',
    'tensorflow',
  ],
)
def test_packages_of_the_lock_are_installed(name):
  """Tests that need one of them are skipped where it is missing; with the lock none is."""
  assert importlib.util.find_spec(name) is not None, (
    f'{name} is missing: install requirements/lock-3.*.txt'
  )


def test_locks_satisfy_setup_ranges():
  from packaging.requirements import Requirement

  text = (_ROOT / 'setup.py').read_text()
  block = text[text.index('install_requires') : text.index('extras_require')]
  pins = dict(
    line.split('==')
    for line in (_ROOT / 'requirements/lock-3.11.txt').read_text().lower().splitlines()
    if line and not line.startswith('#')
  )
  requirements = [
    Requirement(found) for found in re.findall(r"'([^']+)'", block) if found != 'install_requires'
  ]
  assert len(requirements) >= 8
  for requirement in requirements:
    assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


def test_make_lists_its_targets():
  listed = subprocess.run(
    ['make', '-s'], cwd=_ROOT, capture_output=True, text=True, check=True
  ).stdout
  for target in ('train', 'test', 'test-full', 'bench', 'docs', 'clean'):
    assert re.search(rf'^  {target}\s', listed, re.MULTILINE), listed
