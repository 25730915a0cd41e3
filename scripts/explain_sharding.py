"""Shows how a configuration shards its train state: `t5x_lite explain_sharding` as a script.

  python scripts/explain_sharding.py --gin_file=models/t5_1_1_xxl.gin --gin_file=runs/pretrain.gin \
    --gin_file=partitioning/2d.gin --gin.NUM_PARTITIONS=8 --num_devices=64

Runs from a checkout without installation as well. `--help` lists the flags.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from t5x_lite.command_line import cli  # noqa: E402  (the checkout comes first)

if __name__ == '__main__':
  sys.exit(cli.main(['explain_sharding', *sys.argv[1:]]))
