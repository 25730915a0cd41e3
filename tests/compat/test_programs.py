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


def test_modules_of_the_configuration_may_import_t5x(tmp_path):
  (tmp_path / 'old_project.py').write_text('from t5x import models\nassert models.__name__ == "t5x.models"\n')
  (tmp_path / 'run.gin').write_text("import old_project\ninclude 'recipes/keyword_cloze.gin'\nNO_SUCH.x = 1\n")
  for program, message in (('t5x_lite.compat.train', "nothing is called 'NO_SUCH'"),
                           ('t5x_lite', "python -m t5x_lite.compat.train")):
    argv = [sys.executable, '-m', program, *(['train'] if program == 't5x_lite' else []),
            f'--gin_file={tmp_path / "run.gin"}', '--gin.MODEL_DIR=x']
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
                          env={**os.environ, 'PYTHONPATH': f'{_ROOT}:{tmp_path}'})
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_t5x_itself_that_lacks_its_requirements_is_recognised(tmp_path):
  (tmp_path / 't5x').mkdir()
  (tmp_path / 't5x/__init__.py').write_text('import airio_of_t5x\n')
  (tmp_path / 'run.gin').write_text("import old_project\ninclude 'recipes/keyword_cloze.gin'\n")
  (tmp_path / 'old_project.py').write_text('import t5x\n')
  argv = [sys.executable, '-m', 't5x_lite', 'train', f'--gin_file={tmp_path / "run.gin"}', '--gin.MODEL_DIR=x']
  done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
                        env={**os.environ, 'PYTHONPATH': f'{_ROOT}:{tmp_path}'})
  assert done.returncode == 2 and "'airio_of_t5x'" in done.stderr and 'python -m t5x_lite.compat.train' in done.stderr
