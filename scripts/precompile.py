"""Compiles the programs of a run ahead of time: `t5x_lite precompile` as a script.

  python scripts/precompile.py --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/a \
    --compilation_cache_dir=runs/cache

Runs from a checkout without installation as well. `--help` lists the flags.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from t5x_lite.command_line import cli  # noqa: E402  (the checkout comes first)

if __name__ == '__main__':
  sys.argv.insert(1, 'precompile')
  cli.run_program(may_restart=True)
