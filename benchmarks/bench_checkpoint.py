"""Checkpoints: seconds that a save keeps training waiting, seconds until it is committed, and restore, verified or not.

    python benchmarks/bench_checkpoint.py [--megabytes 286] [--runs 5]

The state consists of float32 matrices with the shapes of T5 1.1 small, repeated up to the given size. For comparison,
NumPy writes the same bytes to the same disk.
"""

import argparse
import pathlib
import shutil
import statistics
import tempfile

import common


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--megabytes', type=common.positive, default=286, help='MiB of float32 state')
  parser.add_argument('--runs', type=common.positive, default=5)
  args = parser.parse_args()
  import jax
  import numpy as np
  from t5x_lite import checkpoints

  shapes = [(512, 384), (384, 512), (512, 1024), (1024, 512)]
  state, left, index = {}, int(args.megabytes * 2**20 / 4), 0
  embedding = (32128, 512)
  rng = np.random.default_rng(0)
  while left > 0:
    shape = embedding if index < 2 else shapes[index % len(shapes)]
    state[f'kernel_{index:03d}'] = jax.device_put(rng.standard_normal(shape, np.float32))
    left -= shape[0] * shape[1]
    index += 1
  state = {'target': state, 'state': {'step': jax.numpy.int32(0), 'param_states': {}}}
  num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  shapes_tree = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

  folder = pathlib.Path(tempfile.mkdtemp(prefix='t5x_lite_bench_'))
  blocking, total, restore, plain = [], [], [], []
  try:
    for run in range(args.runs + 1):
      manager = checkpoints.CheckpointManager(
          folder / f'run{run}', save_cfg=checkpoints.SaveCheckpointConfig(period=1, keep=None))
      block, _ = common.timed(lambda: manager.save(1, state))
      rest, _ = common.timed(manager.wait)
      back, restored = common.timed(
          lambda: jax.block_until_ready(manager.restore(1, target=shapes_tree)))
      del restored
      manager.close()
      host = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]

      def write_plain():
        with open(folder / 'plain', 'wb') as out:
          for array in host:
            out.write(memoryview(np.ascontiguousarray(array)).cast('B') if array.ndim else array.tobytes())

      spent, _ = common.timed(write_plain)
      if run:
        blocking.append(block)
        total.append(block + rest)
        restore.append(back)
        plain.append(spent)
      shutil.rmtree(folder / f'run{run}')
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  median = statistics.median
  print(f'matmul 2048^3: {common.matmul_gflops():.0f} GFLOP/s')
  common.print_table(f'Checkpoint of {num_bytes / 2**20:.0f} MiB', [
      ('save: training waits', median(blocking)),
      ('save: until committed, hashed and flushed', median(total)),
      ('restore, every hash verified', median(restore)),
      ('the same bytes by plain writes, not flushed', median(plain)),
  ], ('what', 's (median)'))


if __name__ == '__main__':
  main()
