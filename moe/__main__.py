"""Program `python -m moe` with the commands of this package."""

import sys

import moe
from moe.commands import COMMANDS
from t5x_lite import runtime
from t5x_lite.command_line import cli

_EPILOG = """\
commands (each has --help):
{commands}

Training, evaluation and inference of sparse models are commands of t5x_lite, with a recipe that builds such a model:
  t5x_lite train --gin_file=recipes/keyword_cloze_moe.gin --gin.MODEL_DIR=runs/cloze_moe
  python -m moe report runs/cloze_moe

exit status: 0 done, 2 invalid configuration or input, 1 an error in the code.
"""

PROGRAM = cli.Program(
  package=moe,
  call='python -m moe',
  commands=COMMANDS,
  epilog=_EPILOG,
  description='Look into the routing of sparse models, plan their buffers, and work on their experts.',
)

if __name__ == '__main__':
  runtime.restart_in_utf8()
  sys.exit(cli.main(program=PROGRAM))
