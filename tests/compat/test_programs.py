"""`python -m t5x_lite.compat.train` and the others, in place of T5X's programs."""

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
