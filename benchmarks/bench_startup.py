"""Start-up: wall and CPU seconds of imports and of the command's help, each in a fresh process, median of several.

python benchmarks/bench_startup.py [--runs 5]
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

import common

_CASES = {
  'python -c pass': ['-c', 'pass'],
  'import jax, flax, optax': ['-c', 'import jax, flax, optax'],
  'import jax, flax, optax, t5x_lite': ['-c', 'import jax, flax, optax, t5x_lite'],
  'all packages of training (models, optimizers, data, checkpoints, trainer)': [
    '-c',
    'from t5x_lite import models, optimizers, data, checkpoints, trainer, partitioning; '
    'from t5x_lite.networks import t5; import jax; jax.devices()',
  ],
  't5x_lite --help': ['-m', 't5x_lite', '--help'],
  't5x_lite train --dry_run (keyword cloze, built-in data)': [
    '-m',
    't5x_lite',
    'train',
    '--gin_file=recipes/keyword_cloze.gin',
    '--gin.DATA_SOURCE=builtin',
    '--gin.MODEL_DIR=/nonexistent/run',
    '--dry_run',
  ],
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--runs', type=common.positive, default=5)
  args = parser.parse_args()
  env = {**os.environ, 'PYTHONPATH': str(common._ROOT)}
  rows = []
  for name, arguments in _CASES.items():
    wall, cpu = [], []
    for index in range(args.runs + 1):
      before = resource.getrusage(resource.RUSAGE_CHILDREN)
      start = time.perf_counter()
      subprocess.run(
        [sys.executable, *arguments],
        check=True,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
      )
      spent = time.perf_counter() - start
      after = resource.getrusage(resource.RUSAGE_CHILDREN)
      if index:  # the first run reads the files from disk
        wall.append(spent)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    rows.append((name, statistics.median(wall), statistics.median(cpu)))
  print(f'matmul 2048^3: {common.matmul_gflops():.0f} GFLOP/s')
  common.print_table('Start-up', rows, ('what', 'wall s', 'CPU s'))


if __name__ == '__main__':
  main()
