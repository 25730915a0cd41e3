"""Trains a model: `t5x_lite train` for users of T5X, who call a script.

  python scripts/train.py --gin_file=models/t5_1_1_small.gin --gin_file=runs/pretrain.gin \
    --gin.MIXTURE_OR_TASK_NAME=my_task --gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 114}" \
    --gin.MODEL_DIR=runs/a --gin.TRAIN_STEPS=1000

Runs from a checkout without installation as well. `--help` lists the flags.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from t5x_lite.command_line import cli  # noqa: E402  (the checkout comes first)

if __name__ == '__main__':
  sys.argv.insert(1, 'train')
  cli.run_program(may_restart=True)
