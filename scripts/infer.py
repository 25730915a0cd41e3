"""Infers from a checkpoint: `t5x_lite infer` for users of T5X, who call a script.

  python scripts/infer.py --gin_file=models/t5_1_1_small.gin --gin_file=runs/infer.gin \
    --gin.MIXTURE_OR_TASK_NAME=my_task --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}" \
    --gin.CHECKPOINT_PATH=runs/a/checkpoint_1000 --gin.INFER_OUTPUT_DIR=runs/a/answers

Runs from a checkout without installation as well. `--help` lists the flags.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from t5x_lite.command_line import cli  # noqa: E402  (the checkout comes first)

if __name__ == '__main__':
  sys.argv.insert(1, 'infer')
  cli.run_program(may_restart=True)
