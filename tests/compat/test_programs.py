"""`python -m t5x_lite.compat.train` and the others, in place of T5X's programs."""

import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize('program', ['train', 'eval', 'infer', 'precompile'])
def test_programs_are_the_commands(program):
  flags = ['-gin_file=recipes/keyword_cloz.gin', '--alsologtostderr', '--gin.MODEL_DIR="x"', '--multiprocess_gpu=false']
  done = [subprocess.run([sys.executable, '-m', *start, *flags], cwd=_ROOT, capture_output=True, text=True, timeout=60,
                         check=False) for start in ([f't5x_lite.compat.{program}'], ['t5x_lite', program])]
  assert done[0].returncode == done[1].returncode == 2
  assert done[0].stderr == done[1].stderr and "Did you mean 'recipes/keyword_cloze.gin'?" in done[0].stderr


def _run(arguments, folder):
  return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120,
                        check=False, env={**os.environ, 'PYTHONPATH': str(_ROOT)})


@pytest.mark.parametrize('is_safe', [False, True])
def test_modules_in_the_current_folder_may_import_t5x(tmp_path, is_safe):
  """As with T5X's programs; also if T5X is installed. In the form of the command `t5x_lite`, a script elsewhere."""
  for package in ('t5x', 'optax'):
    (tmp_path / f'project/{package}').mkdir(parents=True)
    (tmp_path / f'project/{package}/__init__.py').write_text('raise AssertionError("not this one")\n')
  (tmp_path / 'project/old_project.py').write_text(
      'import optax\nfrom t5x import models\nassert models.__name__ == "t5x.models"\n')
  (tmp_path / 'project/run.gin').write_text("import old_project\ninclude 'recipes/keyword_cloze.gin'\nNO_SUCH.x = 1\n")
  (tmp_path / 'command.py').write_text('from t5x_lite.__main__ import run\nrun()\n')
  safe = ['-P'] if is_safe else []
  done = _run([*safe, str(tmp_path / 'command.py'), 'train', '--gin_file=run.gin', '--gin.MODEL_DIR=x'],
              tmp_path / 'project')
  assert done.returncode == 2, done.stderr
  assert is_safe or 'Names of T5X in the module old_project mean those of t5x_lite.' in done.stderr, done.stderr
  assert ("no module 'old_project'" if is_safe else "nothing is called 'NO_SUCH'") in done.stderr, done.stderr


def test_t5x_itself_that_lacks_its_requirements_is_recognised(tmp_path):
  """Where the command runs in a process of the user, which has not called `install`."""
  (tmp_path / 't5x').mkdir()
  (tmp_path / 't5x/__init__.py').write_text('import airio_of_t5x\n')
  (tmp_path / 'run.gin').write_text("import old_project\ninclude 'recipes/keyword_cloze.gin'\n")
  (tmp_path / 'old_project.py').write_text('import t5x\n')
  code = 'import sys; from t5x_lite import cli; ' \
         'sys.exit(cli.main(["train", "--gin_file=run.gin", "--gin.MODEL_DIR=x"]))'
  done = _run(['-c', code], tmp_path)
  assert done.returncode == 2 and "'airio_of_t5x'" in done.stderr, done.stderr
  assert 'After t5x_lite.compat.install(), t5x means t5x_lite' in done.stderr
