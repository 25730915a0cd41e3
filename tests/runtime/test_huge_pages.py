"""A process asks for huge pages once, where this has an effect, and is otherwise the same."""

import os
import pathlib
import subprocess
import sys

import pytest

from t5x_lite import runtime
from t5x_lite.runtime import huge_pages

_ROOT = pathlib.Path(__file__).parents[2]


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
  monkeypatch.setattr(huge_pages, '_KERNEL', tmp_path / 'enabled')
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
  monkeypatch.setattr(huge_pages, '_KERNEL', tmp_path / 'enabled')
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
from t5x_lite.runtime import huge_pages
huge_pages._KERNEL = pathlib.Path({str(tmp_path / 'enabled')!r})
print('start', flush=True)
huge_pages.restart_with_huge_pages()
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
from t5x_lite.runtime import huge_pages
huge_pages._KERNEL = pathlib.Path({str(tmp_path / 'enabled')!r})
print('start', flush=True)
huge_pages.restart_with_huge_pages()
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
