"""A process starts again once, in UTF-8 mode or for huge pages, where this has an effect, and is otherwise the same."""

import os
import pathlib
import subprocess
import sys

import pytest

from t5x_lite import runtime
from t5x_lite.runtime import restart

_ROOT = pathlib.Path(__file__).parents[2]
_PROGRAM = """
import os, sys
from t5x_lite import runtime

print(os.getpid(), flush=True)
runtime.restart_in_utf8()
print(sys.argv[1], sys.getfilesystemencoding(), open(sys.argv[2]).read())
"""


def _environment(**variables):
  names = ('LANG', 'LC_ALL', 'LC_CTYPE', 'PYTHONUTF8', 'PYTHONCOERCECLOCALE', 'PYTHONIOENCODING')
  kept = {name: value for name, value in os.environ.items() if name not in names}
  return kept | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'} | variables


_ASCII = {'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}


@pytest.mark.parametrize('variables', [{'LC_ALL': 'C'}, {'LC_ALL': 'POSIX'}, {'LANG': 'C'}])
def test_names_in_an_ascii_locale(tmp_path, variables):
  program = tmp_path / 'program.py'
  program.write_text(_PROGRAM, encoding='utf-8')
  text = tmp_path / 'größe.txt'
  text.write_text('Straße', encoding='utf-8')
  done = subprocess.run(
    [sys.executable, program, 'größe', text],
    env=_environment(**variables, **_ASCII),
    capture_output=True,
    check=True,
  )
  first, second, result = done.stdout.decode().splitlines()
  assert first == second  # the same process
  assert result == 'größe utf-8 Straße'


@pytest.mark.parametrize(
  'program, variables, shown',
  [
    (['t5x_lite', 'plot'], {'LC_ALL': 'C', **_ASCII}, 'größe'),
    (['moe', 'report'], {'LC_ALL': 'C', **_ASCII}, 'größe'),
    (['t5x_lite', 'train', '--gin_file'], {'PYTHONIOENCODING': 'ascii'}, r'gr\xf6\xdfe'),
  ],
)
def test_messages_have_the_names_of_files(tmp_path, program, variables, shown):
  done = subprocess.run(
    [sys.executable, '-m', *program, 'größe'],
    env=_environment(**variables),
    cwd=tmp_path,
    capture_output=True,
  )
  assert done.returncode == 2 and shown in done.stderr.decode()


def test_results_are_printed_where_standard_output_is_ascii():
  code = 'from t5x_lite import cli; cli.main(["--version"]); print("größe")'
  done = subprocess.run(
    [sys.executable, '-c', code],
    env=_environment(PYTHONIOENCODING='ascii'),
    capture_output=True,
    check=True,
  )
  assert done.stdout.endswith(rb'gr\xf6\xdfe' + b'\n')


@pytest.mark.parametrize(
  'kernel, tunables, expected',
  [
    ('always [madvise] never', None, 'glibc.malloc.hugetlb=1'),
    (
      'always [madvise] never',
      'glibc.malloc.check=1',
      'glibc.malloc.check=1:glibc.malloc.hugetlb=1',
    ),
    ('always [madvise] never', 'glibc.malloc.hugetlb=0', None),
    ('[always] madvise never', None, None),
    ('always madvise [never]', None, None),
    (None, None, None),
  ],
)
def test_a_process_restarts_where_huge_pages_have_to_be_asked_for(
  tmp_path, monkeypatch, kernel, tunables, expected
):
  monkeypatch.setattr(restart, '_KERNEL', tmp_path / 'enabled')
  monkeypatch.setattr(
    sys.modules['__main__'], '__file__', __file__, raising=False
  )  # a worker of pytest-xdist has none
  if kernel is not None:
    (tmp_path / 'enabled').write_text(f'{kernel}\n')
  monkeypatch.delenv('GLIBC_TUNABLES', raising=False)
  if tunables is not None:
    monkeypatch.setenv('GLIBC_TUNABLES', tunables)
  restarts = []
  monkeypatch.setattr(os, 'execve', lambda *args: restarts.append(args))
  runtime.restart_with_huge_pages()
  assert restarts == (
    []
    if expected is None
    else [
      (
        sys.executable,
        [sys.executable, *sys.orig_argv[1:]],
        {**os.environ, 'GLIBC_TUNABLES': expected, 'T5X_LITE_RESTARTED_PROCESS': str(os.getpid())},
      )
    ]
  )


def test_a_process_that_cannot_restart_goes_on(tmp_path, monkeypatch):
  monkeypatch.setattr(restart, '_KERNEL', tmp_path / 'enabled')
  (tmp_path / 'enabled').write_text('[madvise]')
  monkeypatch.delenv('GLIBC_TUNABLES', raising=False)
  monkeypatch.setattr(sys.modules['__main__'], '__file__', __file__, raising=False)
  monkeypatch.setattr(sys, 'executable', str(tmp_path / 'missing'))
  runtime.restart_with_huge_pages()


_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != 'GLIBC_TUNABLES'}


def test_the_process_is_the_same_after_the_restart(tmp_path):
  (tmp_path / 'enabled').write_text('[madvise]')
  (tmp_path / 'program.py').write_text(f"""
import os, pathlib, sys
from t5x_lite.runtime import restart
restart._KERNEL = pathlib.Path({str(tmp_path / 'enabled')!r})
print('start', flush=True)
restart.restart_with_huge_pages()
print(os.getpid(), os.environ['GLIBC_TUNABLES'], sys.argv[1:], sys.flags.optimize, sys.stdin.read())
""")
  process = subprocess.Popen(
    [sys.executable, '-O', tmp_path / 'program.py', 'a b', '--c'],
    env={**_ENVIRONMENT, 'PYTHONPATH': str(_ROOT)},
    text=True,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  output, _ = process.communicate('input')
  assert output.splitlines() == [
    'start',
    'start',
    f"{process.pid} glibc.malloc.hugetlb=1 ['a b', '--c'] 1 input",
  ]


def _program(tmp_path):
  (tmp_path / 'enabled').write_text('[madvise]')
  return f"""
import pathlib
from t5x_lite.runtime import restart
restart._KERNEL = pathlib.Path({str(tmp_path / 'enabled')!r})
print('start', flush=True)
restart.restart_with_huge_pages()
print('end')
"""


def test_a_process_restarts_once_if_its_environment_is_reset(tmp_path):
  (tmp_path / 'sitecustomize.py').write_text('import os\nos.environ.pop("GLIBC_TUNABLES", None)')
  (tmp_path / 'program.py').write_text(_program(tmp_path))
  done = subprocess.run(
    [sys.executable, tmp_path / 'program.py'],
    capture_output=True,
    text=True,
    timeout=30,
    env={**_ENVIRONMENT, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{_ROOT}'},
  )
  assert done.stdout.split() == ['start', 'start', 'end']


def test_a_program_that_cannot_be_read_again_does_not_restart(tmp_path):
  done = subprocess.run(
    [sys.executable, '-'],
    input=_program(tmp_path),
    cwd=_ROOT,
    env=_ENVIRONMENT,
    capture_output=True,
    text=True,
  )
  assert done.stdout.split() == ['start', 'end']
