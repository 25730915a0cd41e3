"""Contents of a user's clone."""

import importlib.metadata
import importlib.util
import pathlib
import platform
import re
import shutil
import subprocess
import sys

from packaging.requirements import Requirement
import pytest

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
  'name',
  [
    'README.md',
    'AGENTS.md',
    'llms.txt',
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


# Python: (JAX, Flax) of its lock.
_VERSIONS = {
  '3.11': ('0.10', '0.12.8'),
  '3.12': ('0.12', '0.12.12'),
  '3.13': ('0.12', '0.12.12'),
}


def _pins(name):
  """Returns the versions of requirements/lock-<name>.txt by package."""
  lines = (_ROOT / f'requirements/lock-{name}.txt').read_text().splitlines()
  pins = [line.split('==') for line in lines if line and not line.startswith('#')]
  return {re.sub(r'[-_.]+', '-', package).lower(): version for package, version in pins}


@pytest.mark.parametrize('version', _VERSIONS)
def test_locks_have_the_tested_versions(version):
  jax_version, flax_version = _VERSIONS[version]
  pins = _pins(version)
  assert pins['jax'].startswith(f'{jax_version}.') and pins['jaxlib'] == pins['jax']
  assert pins['flax'] == flax_version and pins['numpy'].startswith('2.')
  first_line = (_ROOT / f'requirements/lock-{version}.txt').read_text().splitlines()[0]
  assert f'Python {version},' in first_line


def test_setup_accepts_the_tested_versions_and_no_later_ones():
  setup = (_ROOT / 'setup.py').read_text()
  minors = [int(jax_version.partition('.')[2]) for jax_version, _ in _VERSIONS.values()]
  jax_range = f'>=0.{min(minors)},<0.{max(minors) + 1}'
  assert re.findall(r"'jax(?:\[\w+\])?(>=[^']+)'", setup) == [jax_range] * 3
  oldest_flax = _VERSIONS['3.11'][1]
  newest_flax = _VERSIONS['3.13'][1]
  assert f"'flax>={oldest_flax},<={newest_flax}'" in setup and "'numpy>=2.0,<3'" in setup


def test_first_lock_has_the_oldest_versions_and_the_others_the_same():
  oldest = (_ROOT / 'requirements/oldest.txt').read_text()
  pins = _pins('3.11')
  for package, version in re.findall(r'^([\w-]+)==(\S+)', oldest, re.MULTILINE):
    assert pins[package] == version, package
  assert _pins('3.12') == _pins('3.13')
  assert _pins('core-3.14').items() <= _pins('3.13').items()


def test_pages_name_the_tested_versions():
  limits = (_ROOT / 'docs/limits.md').read_text()
  for version, (jax_version, flax_version) in _VERSIONS.items():
    assert re.search(
      rf'^\| .*\b{version}\b.* \| tested with JAX {jax_version} and Flax {flax_version} ',
      limits,
      re.MULTILINE,
    ), version
  jax_versions = [jax_version for jax_version, _ in _VERSIONS.values()]
  changelog = (_ROOT / 'CHANGELOG.md').read_text()
  first, *_, last = _VERSIONS
  assert f'Python {first} to {last}, JAX {jax_versions[0]} to {jax_versions[-1]},' in changelog


def test_locks_of_all_pythons_pin_the_same_packages():
  assert set(_pins('3.11')) == set(_pins('3.12')) == set(_pins('3.13'))
  # The core is a part: TensorFlow and what needs it are left out.
  core = set(_pins('core-3.14'))
  assert core < set(_pins('3.13')) and 'jax' in core and not core & {'seqio', 'tensorflow-cpu'}


def test_pytorch_is_in_no_environment_with_tensorflow():
  """`make test-interop` installs lock-interop.txt next to a lock's core; elsewhere neither library is pinned."""
  interop = _pins('interop')
  assert {'ctranslate2', 'peft', 'torch', 'transformers', 'tokenizers', 'filelock'} <= set(interop)
  assert not set(interop) & {'tensorflow', 'tensorflow-cpu', 'seqio', 't5'}
  for name in (*_VERSIONS, 'core-3.14', 'stores', 'docs'):
    pins = _pins(name)
    assert not set(pins) & {'torch', 'transformers', 'triton'}, name
    assert all(interop[package] == pins[package] for package in set(interop) & set(pins)), name
  extra = re.search(r"'test-interop': \[(.*?)\]", (_ROOT / 'setup.py').read_text(), re.DOTALL)[1]
  assert 'torch' in extra and 'tensorflow' not in extra and 'seqio' not in extra


def test_all_places_name_the_tested_pythons():
  setup = (_ROOT / 'setup.py').read_text()
  classifiers = re.findall(r'Programming Language :: Python :: (3\.\d+)', setup)
  assert classifiers == list(_VERSIONS)
  assert f"python_requires='>={classifiers[0]}'" in setup
  makefile = (_ROOT / 'Makefile').read_text()
  first, last = (version.replace('.', ', ') for version in (classifiers[0], classifiers[-1]))
  assert f'({first}) <= sys.version_info[:2] <= ({last})' in makefile
  tried = re.search(r'^  PYTHONS := (python3 .*)', makefile, re.MULTILINE)[1]
  assert re.findall(r'python(3\.\d+)', tried) == classifiers[::-1]
  listed = 'Python 3.11, 3.12 or 3.13'
  for page in ('README.md', 'docs/first_steps.md', 'Makefile'):
    assert listed in (_ROOT / page).read_text(), page


def test_the_makefile_names_files_of_tests():
  named = re.findall(r'tests/[\w/]+\.py', (_ROOT / 'Makefile').read_text())
  assert len(named) > 30
  assert not [name for name in named if not (_ROOT / name).is_file()]


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


@pytest.mark.parametrize('version', _VERSIONS)
def test_locks_satisfy_setup_ranges(version):
  text = (_ROOT / 'setup.py').read_text()
  block = text[text.index('install_requires') : text.index('extras_require')]
  pins = _pins(version)
  requirements = [
    Requirement(found) for found in re.findall(r"'([^']+)'", block) if found != 'install_requires'
  ]
  assert len(requirements) >= 8
  for requirement in requirements:
    assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


def test_wheels_of_the_kit_are_what_jax_does_not_bring():
  """`make gpu` installs them without an index and without dependencies."""
  lines = (_ROOT / 'requirements/gpu-wheels.txt').read_text().splitlines()
  packages = [line for line in lines if not line.startswith('#')]
  pins = {}
  for line in packages:
    name, version = re.fullmatch(r'([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}', line).groups()
    pins[name] = version
  assert pins.items() <= _pins('3.12').items()
  of_jax = {'jax', 'jaxlib', 'ml-dtypes', 'numpy', 'opt-einsum', 'scipy'}
  text = (_ROOT / 'setup.py').read_text()
  block = text[text.index('install_requires') : text.index('extras_require')]
  queue = [Requirement(found).name for found in re.findall(r"'([^']+)',", block)]
  needed = set()
  while queue:
    name = re.sub(r'[-_.]+', '-', queue.pop()).lower()
    if name in needed | of_jax:
      continue
    needed.add(name)
    required = map(Requirement, importlib.metadata.requires(name) or ())
    queue += [one.name for one in required if one.marker is None or one.marker.evaluate()]
  assert needed <= set(pins) and not of_jax & set(pins)


def test_make_lists_its_targets():
  listed = subprocess.run(
    ['make', '-s'], cwd=_ROOT, capture_output=True, text=True, check=True
  ).stdout
  makefile = (_ROOT / 'Makefile').read_text()
  targets = re.search(r'^\.PHONY: help (.*)', makefile, re.MULTILINE)[1].split()
  assert {'train', 'test', 'test-t5x', 'lint', 'types', 'docs'} < set(targets)
  for target in targets:
    assert re.search(rf'^  {target}\s', listed, re.MULTILINE), listed


def test_another_python_gets_an_environment_of_its_own(tmp_path):
  """Otherwise `make PYTHON=... test` would test the Python of the environment."""

  def make(python):
    command = ['make', '-n', f'PYTHON={python}', 'lint']
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

  for name in ('Makefile', 'pyproject.toml', 'setup.py'):
    shutil.copy(_ROOT / name, tmp_path)
  another = tmp_path / 'another_python'
  another.write_text('#!/bin/sh\necho "(3, 99)"\n')
  another.chmod(0o755)
  (tmp_path / '.venv/bin').mkdir(parents=True)
  (tmp_path / '.venv/bin/python').symlink_to(sys.executable)
  stamp = tmp_path / '.venv/.installed'
  stamp.write_text(f'{tmp_path}\n')
  assert 'venv --clear' not in make(sys.executable)
  assert 'venv --clear' in make(another)
  # Scripts of an environment name its folder, so that of a checkout that was moved does not work.
  stamp.write_text('/elsewhere\n')
  assert 'venv --clear' in make(sys.executable)
