"""The source distribution is the checkout, the wheel has all files that a user needs, and the first example runs."""

import email.parser
import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import site
import subprocess
import sys
import tarfile
import textwrap
import types
import venv
import zipfile

from packaging.requirements import Requirement
import pytest

import t5x_lite
from t5x_lite.apps import commands
from tests import processes

_ROOT = pathlib.Path(__file__).parents[2]
_URL = 'https://github.com/t5x-lite/t5x_lite'
# Written by setuptools, next to the checkout's files.
_GENERATED = re.compile(r'PKG-INFO|setup\.cfg|t5x_lite\.egg-info/.*')
# Ignored by git; a developer's checkout has them.
_LEFTOVERS = (
  'runs/cloze/config.gin',
  '.venv/bin/python',
  '.jax_cache/program',
  'docs/_build/index.html',
  'docs/jupyter_execute/notebooks/experts.ipynb',
  'build/lib/moe/old.py',
  't5x_lite/__pycache__/cli.cpython-311.pyc',
  'tests/__pycache__/test_cli.cpython-311.pyc',
)
_BUILD = """
import os, sys, tarfile
from setuptools import build_meta
folder = os.path.abspath(sys.argv[1])
sdist = os.path.join(folder, build_meta.build_sdist(folder))
with tarfile.open(sdist) as archive:
  archive.extractall(os.path.join(folder, 'unpacked'), filter='data')
os.chdir(os.path.join(folder, 'unpacked', os.path.basename(sdist).removesuffix('.tar.gz')))
build_meta.build_wheel(folder)
"""


def _git_files(*flags):
  """Returns the files that git lists and that exist."""
  if not (_ROOT / '.git').exists() or shutil.which('git') is None:
    pytest.skip('not a git checkout, so there is nothing to compare a distribution with')
  # Git lists nothing in a checkout of another owner, as in some containers, unless told.
  listed = subprocess.run(
    ['git', '-c', 'safe.directory=*', 'ls-files', '-z', *flags],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  return {name for name in listed.split('\0') if name and (_ROOT / name).is_file()}


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """Builds the sdist from a copy of the checkout, and the wheel from that sdist. Has their paths, files and metadata.

  The copy has files that are not committed yet, so that they can be tested before, and leftovers.
  """
  folder = tmp_path_factory.mktemp('packaging')
  copied = _git_files('--cached', '--others', '--exclude-standard')
  for name in copied:
    copy = folder / 'checkout' / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(_ROOT / name, copy)
  for name in _LEFTOVERS:
    (folder / 'checkout' / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / 'checkout' / name).write_text('')
  dist = folder / 'dist'
  dist.mkdir()
  subprocess.run(
    [sys.executable, '-W', 'error', '-c', _BUILD, dist],
    cwd=folder / 'checkout',
    check=True,
    capture_output=True,
    text=True,
    timeout=300,
  )
  (sdist,), (wheel,) = dist.glob('*.tar.gz'), dist.glob('*.whl')
  with tarfile.open(sdist) as archive:
    sdist_files = {member.name.partition('/')[2] for member in archive if member.isfile()}
  with zipfile.ZipFile(wheel) as archive:
    wheel_files = set(archive.namelist())
    (info,) = {name.partition('/')[0] for name in wheel_files if '.dist-info/' in name}
    metadata, entry_points = (
      archive.read(f'{info}/{name}').decode() for name in ('METADATA', 'entry_points.txt')
    )
  return types.SimpleNamespace(
    copied=copied,
    sdist=sdist,
    sdist_files=sdist_files,
    wheel=wheel,
    wheel_files=wheel_files,
    metadata=email.parser.Parser().parsestr(metadata),
    entry_points=entry_points,
  )


# ----------------------------------------------------------------------------------------------------------------------
# Contents


def test_sdist_is_the_checkout(built):
  missing = _git_files() - built.sdist_files
  assert not missing, f'MANIFEST.in lacks {sorted(missing)}'
  extra = {name for name in built.sdist_files - built.copied if not _GENERATED.fullmatch(name)}
  assert not extra, f'MANIFEST.in takes {sorted(extra)}'


def test_wheel_has_both_packages_and_all_gin_files(built):
  expected = {name for name in built.copied if name.startswith(('t5x_lite/', 'moe/'))}
  expected |= {
    f't5x_lite/gin_files/{name.removeprefix("gin/")}'
    for name in built.copied
    if name.startswith('gin/')
  }
  found = {name for name in built.wheel_files if '.dist-info/' not in name}
  assert found == expected, (sorted(expected - found), sorted(found - expected))
  assert {'t5x_lite/py.typed', 'moe/py.typed'} <= found
  licenses = {name.partition('/licenses/')[2] for name in built.wheel_files} - {''}
  assert licenses == {
    'LICENSE',
    't5x_lite/data/corpora/PSF-LICENSE.txt',
    't5x_lite/data/corpora/NOTICE.txt',
  }


def test_metadata(built):
  metadata = built.metadata
  assert metadata['Version'] == t5x_lite.__version__
  assert f'({t5x_lite.__version__})' in (_ROOT / 'CHANGELOG.md').read_text() or re.search(
    rf'^## {re.escape(t5x_lite.__version__)}', (_ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE
  )
  assert metadata['Author'] == 'The t5x_lite authors' and 'mixture-of-experts' in metadata[
    'Keywords'
  ].split(',')
  assert metadata['License-Expression'] == 'Apache-2.0 AND PSF-2.0'
  urls = dict(text.split(', ') for text in metadata.get_all('Project-URL'))
  assert set(urls) == {'Source', 'Documentation', 'Changelog', 'Issues'}
  assert all(url.startswith(_URL) for url in urls.values())
  systems = {
    text
    for text in metadata.get_all('Classifier')
    if text.startswith(('Operating System', 'Typing'))
  }
  assert systems == {
    'Operating System :: MacOS',
    'Operating System :: POSIX :: Linux',
    'Typing :: Typed',
  }


def test_description_has_absolute_links(built):
  """A package index shows README without the files next to it."""
  description = built.metadata.get_payload()
  assert re.search(r'Linux\s+and\s+macOS\s+are\s+supported', description)
  links = re.findall(r'\]\(([^)]*)\)', description)
  assert f'{_URL}/blob/main/docs/first_steps.md' in links
  for link in links:
    assert link.startswith(('https://', '#')), link
    if link.startswith(f'{_URL}/blob/main/'):
      assert link.removeprefix(f'{_URL}/blob/main/').partition('#')[0] in built.copied, link


# ----------------------------------------------------------------------------------------------------------------------
# The programs that the documentation names

# docs/design.md is for people who read or change the code, in a checkout.
_TOLD = [
  path.relative_to(_ROOT).as_posix()
  for path in (
    _ROOT / 'README.md',
    *sorted(set((_ROOT / 'docs').glob('*.md')) - {_ROOT / 'docs/design.md'}),
    *sorted((_ROOT / 'docs/notebooks').glob('*.ipynb')),
    *sorted((_ROOT / 'gin').rglob('*.gin')),
    *sorted(path for package in ('t5x_lite', 'moe') for path in (_ROOT / package).rglob('*.py')),
  )
]
_CHECKOUT_PROGRAM = re.compile(r'\b(scripts|benchmarks|tools)/([\w/]+\.(?:py|sh))')
# 'tests/t5x/losses' is run in a checkout, as its page says.
_OTHERS_MODULES = sys.stdlib_module_names | {'pip', 'pytest', 't5x/train', 'tests/t5x/losses'}


def test_modules_to_run_are_in_the_wheel(built):
  told = {}
  for page in _TOLD:
    for module in re.findall(r'python3? -m ([\w.]+)', (_ROOT / page).read_text(encoding='utf-8')):
      told.setdefault(module.rstrip('.').replace('.', '/'), page)
  assert {'t5x_lite', 'moe'} <= set(told)
  lost = {
    module: page
    for module, page in told.items()
    if module not in _OTHERS_MODULES
    and not {f'{module}.py', f'{module}/__main__.py'} & built.wheel_files
  }
  assert not lost, f'not in the wheel: {lost}'


def test_programs_outside_the_wheel_are_said_to_be_a_checkouts(built):
  found, unsaid = set(), {}
  for page in _TOLD:
    text = (_ROOT / page).read_text(encoding='utf-8')
    for folder, name in _CHECKOUT_PROGRAM.findall(text):
      found.add(page)
      assert f'{folder}/{name}' in built.sdist_files, (page, folder, name)
      paragraphs = re.split(r'\n\s*\n', text)
      if not any(
        f'{folder}/' in paragraph and 'checkout' in paragraph.lower() for paragraph in paragraphs
      ):
        unsaid[page] = f'{folder}/{name}'
  assert {'README.md', 'docs/benchmarks.md', 'gin/recipes/keyword_cloze_moe.gin'} <= found
  assert not unsaid, f'say "in a checkout", or name a program of the wheel: {unsaid}'


def test_every_script_of_a_user_is_a_command(built):
  """`scripts/` holds commands under T5X's names, and tools of developers."""
  assert 't5x_lite = t5x_lite.__main__:' in built.entry_points
  scripts = {path.stem for path in (_ROOT / 'scripts').glob('*.py')}
  assert scripts - set(commands.COMMANDS) == {'build_corpora'}


# ----------------------------------------------------------------------------------------------------------------------
# Installed


def _installed_files(requirements):
  """Returns the files, relative to site-packages, of the distributions that `requirements` bring, extras included."""
  found, queue = {}, list(requirements)
  while queue:
    requirement = queue.pop()
    distribution = importlib.metadata.distribution(requirement.name)
    assert requirement.specifier.contains(distribution.version, prereleases=True), (
      requirement,
      distribution.version,
    )
    for extra in ('', *requirement.extras):
      if (distribution.name, extra) not in found:
        found[distribution.name, extra] = {str(path) for path in distribution.files}
        wanted = map(Requirement, distribution.requires or ())
        queue += [
          one for one in wanted if one.marker is None or one.marker.evaluate({'extra': extra})
        ]
  return set().union(*found.values())


def _link_requirements(folder, requirements):
  """Link the installed files of `requirements` into `folder`, without packages that are not declared."""
  files = _installed_files(requirements)
  entries = set()
  for file in files:
    top, _, rest = file.partition('/')
    if top in ('..', '__pycache__'):
      continue
    is_shared = rest and f'{top}/__init__.py' not in files and not top.endswith('.dist-info')
    entries.add(f'{top}/{rest.partition("/")[0]}' if is_shared else top)
  packages = next(
    pathlib.Path(path) for path in site.getsitepackages() if (pathlib.Path(path) / 'jax').is_dir()
  )
  for entry in entries:
    (folder / entry).parent.mkdir(parents=True, exist_ok=True)
    (folder / entry).symlink_to(packages / entry)


def _environment(**more):
  """Returns the environment of a user who has set nothing, on a CPU."""
  kept = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(('PYTHON', 'XLA_', 'JAX_', 'T5X_LITE', 'VIRTUAL_ENV'))
  }
  return kept | {'JAX_PLATFORMS': 'cpu'} | more


def _first_example(program, folder, env):
  """Returns the words of the first command that `t5x_lite --help` shows."""
  shown = subprocess.run(
    [program, '--help'], cwd=folder, env=env, capture_output=True, text=True, check=True
  ).stdout
  words = shlex.split(re.search(r'^  t5x_lite (train .*)$', shown, re.MULTILINE)[1])
  assert '--gin_file=recipes/keyword_cloze.gin' in words
  return [program, *words]


_LOOK_AROUND = textwrap.dedent("""
    import contextlib, importlib, importlib.metadata, importlib.util, io, pkgutil, sys
    import moe.commands, moe.__main__, t5x_lite
    from t5x_lite.command_line import cli
    from t5x_lite.apps import commands
    from t5x_lite.configuration import syntax as gin_syntax
    for package in (moe, t5x_lite):
      assert package.__file__.startswith(sys.prefix), package.__file__
    assert importlib.metadata.version('t5x_lite') == t5x_lite.__version__
    for name in ('tensorflow', 'seqio', 't5', 'torch', 'grain', 'matplotlib', 'pytest'):
      assert importlib.util.find_spec(name) is None, name
    assert gin_syntax.packaged_folder().is_relative_to(sys.prefix)
    with contextlib.redirect_stdout(io.StringIO()):
      for program, names in ((cli.T5X_LITE, commands.COMMANDS), (moe.__main__.PROGRAM, moe.commands.COMMANDS)):
        for name in names:
          assert cli.main([name, '--help'], program) == 0
      # The one requirement that nothing imports before it is used.
      assert cli.main(['vocab', 'v.model', '--corpus=python_docs', '--vocab_size=300', '--max_lines=500']) == 0
    for package in (t5x_lite, moe):
      for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):
        has_packages = found.name.rpartition('.')[2].startswith(('grain_', 'columnar', '__main__'))
        if '.data.seqio.' not in found.name and not has_packages:
          importlib.import_module(found.name)
    """)


def test_first_example_runs_from_the_wheel(built, tmp_path):
  """In a fresh environment that has the wheel and what its metadata requires, and nothing else."""
  venv.create(tmp_path / 'env', with_pip=False)
  python, program = (tmp_path / 'env' / 'bin' / name for name in ('python', 't5x_lite'))
  subprocess.run(
    [
      sys.executable,
      '-m',
      'pip',
      '--python',
      python,
      'install',
      '--quiet',
      '--disable-pip-version-check',
      '--no-index',
      '--no-deps',
      '--no-compile',
      built.wheel,
    ],
    check=True,
    cwd=tmp_path,
    env=_environment(),
  )
  required = map(Requirement, built.metadata.get_all('Requires-Dist'))
  _link_requirements(tmp_path / 'required', [one for one in required if one.marker is None])
  (packages,) = (tmp_path / 'env/lib').glob('python*/site-packages')
  (packages / 'required.pth').write_text(f'{tmp_path / "required"}\n')
  work = tmp_path / 'work'
  work.mkdir()
  # Most of the time would go to the compiler's optimizations.
  env = _environment(JAX_DISABLE_MOST_OPTIMIZATIONS='1', XLA_FLAGS=processes.xla_flags(1))
  subprocess.run([python, '-c', _LOOK_AROUND], cwd=work, env=env, check=True, timeout=300)
  command = _first_example(program, work, env)
  done = subprocess.run(
    [
      *command,
      '--gin.TRAIN_STEPS=2',
      '--gin.SAVING_PERIOD=2',
      '--gin.EVAL_PERIOD=2',
      '--gin.EVAL_STEPS=1',
      '--gin.BATCH_SIZE=8',
      '--gin.network.T5Config.num_encoder_layers=1',
      '--gin.network.T5Config.num_decoder_layers=1',
    ],
    cwd=work,
    env=env,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert (
    work / 'runs/cloze/checkpoint_2'
  ).is_dir() and 'Outputs are in runs/cloze' in done.stdout + done.stderr


@pytest.mark.full  # downloads JAX
def test_plain_pip_install_runs_the_first_example(built, tmp_path):
  """pip's current choice of versions, and the example as shown."""
  venv.create(tmp_path / 'env', with_pip=True)
  python, program = (tmp_path / 'env' / 'bin' / name for name in ('python', 't5x_lite'))
  env = _environment()
  subprocess.run(
    [python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', built.wheel],
    check=True,
    cwd=tmp_path,
    env=env,
  )
  subprocess.run([python, '-m', 'pip', 'check'], check=True, env=env)
  command = _first_example(program, tmp_path, env)
  done = subprocess.run(
    [*command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1800
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert (tmp_path / 'runs/cloze/checkpoint_500').is_dir()
