"""`t5x_lite completion`: its scripts in the shells of this machine, and its errors."""

import os
import pathlib
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest

from t5x_lite.apps.completion import command
from t5x_lite.command_line import cli

_ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def environment(tmp_path):
  """The environment of a shell that finds `t5x_lite`; its folder is `tmp_path`."""
  program = tmp_path / 'bin/t5x_lite'
  program.parent.mkdir()
  program.write_text(f'#!/bin/sh\nexec {sys.executable} -m t5x_lite "$@"\n')
  program.chmod(0o755)
  for name in ('runs/cloze', 'c:d', 'u@h'):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / 'in.gin').write_text('')
  for shell, script in command.SCRIPTS.items():
    (tmp_path / shell).write_text(script)
  return {
    **os.environ,
    'HOME': str(tmp_path),
    'PATH': f'{tmp_path}/bin{os.pathsep}{os.environ["PATH"]}',
    'PYTHONPATH': str(_ROOT),
    'TERM': 'dumb',
  }


_LINES = [
  ('t5x_lite pl', 't5x_lite plot '),
  ('t5x_lite train --gin_f', 't5x_lite train --gin_file='),
  ('t5x_lite train --gin_file=recipes/keyword_cloze_fi', 'keyword_cloze_finetune.gin '),
  ('t5x_lite train --gin_file recipes/keyword_cloze_fi', 'keyword_cloze_finetune.gin '),
  ('t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.TRAIN_S', '--gin.TRAIN_STEPS='),
  ('t5x_lite launch -n 2 -- train --log_level=w', '--log_level=warning '),
  ('t5x_lite chat runs/', 't5x_lite chat runs/cloze/'),
  ('t5x_lite train --gin_file=c:d/', 't5x_lite train --gin_file=c:d/in.gin '),
]
# Bash replaces a part of a word, which depends on quotes and on a variable that users change.
_LINES_OF_BASH = [
  ('t5x_lite train --gin_file=u@h/', ' --gin_file=u@h/in.gin '),
  ('t5x_lite train --gin_file="c:d/', ' --gin_file="c:d/in.gin" '),
  ('t5x_lite train "--gin_file=c:d/', ' "--gin_file=c:d/in.gin" '),
  ('COMP_WORDBREAKS=" "\nt5x_lite train --gin_file=c:d/', ' --gin_file=c:d/in.gin '),
]


def _type_and_complete(arguments, script, line, environment, folder):
  """Returns what an interactive shell shows after the script, the line, Tab and `~~`."""
  terminal, end_of_shell = pty.openpty()
  shell = subprocess.Popen(
    arguments,
    cwd=folder,
    env=environment,
    stdin=end_of_shell,
    stdout=end_of_shell,
    stderr=end_of_shell,
    start_new_session=True,
  )
  os.close(end_of_shell)
  shown = b''
  end = time.monotonic() + 120

  def read_until(text):
    nonlocal shown
    while text not in shown:
      assert time.monotonic() < end, shown
      if select.select([terminal], [], [], 1)[0]:
        shown += os.read(terminal, 4096)

  try:
    os.write(terminal, f'. {script}; stty cols 200; PS1=rea""dy:\n'.encode())
    read_until(b'ready:')  # the shell reads keys
    os.write(terminal, f'{line}\t~~'.encode())
    read_until(b'~~')
  finally:
    shell.kill()
    shell.wait()
    os.close(terminal)
  return re.sub('.\x08', '', shown.decode())  # zsh removes and writes characters again


@pytest.mark.parametrize('line, expected', _LINES + _LINES_OF_BASH)
def test_bash_completes_what_is_typed(environment, tmp_path, line, expected):
  arguments = ['bash', '--norc', '--noprofile', '-i']
  shown = _type_and_complete(arguments, './bash', line, environment, tmp_path)
  assert f'{expected}~~' in shown


@pytest.mark.skipif(shutil.which('zsh') is None, reason='zsh is missing')
@pytest.mark.parametrize('line, expected', _LINES)
def test_zsh_completes_what_is_typed(environment, tmp_path, line, expected):
  shown = _type_and_complete(['zsh', '-f', '-i'], './zsh', line, environment, tmp_path)
  assert f'{expected}~~' in shown


@pytest.mark.skipif(shutil.which('fish') is None, reason='fish is missing')
@pytest.mark.parametrize('line, expected', _LINES)
def test_fish_offers_the_candidates(environment, tmp_path, line, expected):
  text = f'source fish; complete -C "{line}"'
  done = subprocess.run(
    ['fish', '--no-config', '-c', text],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  )
  (offered,) = done.stdout.splitlines()
  assert offered.endswith(expected.split()[-1])


def test_prints_scripts(capsys):
  for shell, script in command.SCRIPTS.items():
    assert cli.main(['completion', shell]) == 0
    assert capsys.readouterr().out == script


@pytest.mark.parametrize('arguments', [[], ['bash', '--line']])
def test_exactly_one_of_shell_and_line(capsys, arguments):
  assert cli.main(['completion', *arguments]) == 2
  assert 'must have a shell or --line' in capsys.readouterr().err


def test_candidates_need_no_heavy_imports():
  code = (
    'import io, sys; sys.stdin = io.StringIO("t5x_lite train --gin.EVAL_P")\n'
    'from t5x_lite.command_line import cli; cli.main(["completion", "--line"])\n'
    'assert not {"jax", "numpy", "flax", "absl"} & set(sys.modules)'
  )
  done = subprocess.run(
    [sys.executable, '-c', code],
    env={**os.environ, 'PYTHONPATH': str(_ROOT)},
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.splitlines() == ['--gin.EVAL_PERIOD=']
