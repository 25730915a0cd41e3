"""A process that would read names as ASCII starts again in Python's UTF-8 mode."""

import os
import pathlib
import subprocess
import sys

import pytest

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
