"""Writes a trained model as StableHLO programs, and as a SavedModel: `t5x_lite export` as a script.

  python scripts/export.py --gin_file=recipes/keyword_cloze.gin --gin.CHECKPOINT_PATH=runs/a/checkpoint_500 \
    --gin.MODEL_OUTPUT_DIR=exports --gin.MODEL_NAME=a

Runs from a checkout without installation as well. `--help` lists the flags.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from t5x_lite.command_line import cli  # noqa: E402  (the checkout comes first)

if __name__ == '__main__':
  sys.argv.insert(1, 'export')
  cli.run_program(may_restart=True)
