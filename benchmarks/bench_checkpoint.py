"""Checkpoints: seconds that a save keeps training waiting, seconds until it is committed, and restore, verified or not.

    python benchmarks/bench_checkpoint.py [--megabytes 286] [--runs 5] [--t5x PATH [--t5x_python PYTHON]]

The state consists of float32 matrices with the shapes of T5 1.1 small, repeated up to the given size. For comparison,
NumPy writes the same bytes to the same disk, and with `--t5x`, T5X's two checkpoint managers of a checkout save and
restore the same arrays in turn.
"""

import argparse
import contextlib
import pathlib
import shutil
import statistics
import tempfile

import common
import t5x_process


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--megabytes', type=common.positive, default=286, help='MiB of float32 state')
  parser.add_argument('--runs', type=common.positive, default=5)
  args = t5x_process.parse_args(parser, has_options=False)
  import jax
  import numpy as np

  from t5x_lite import checkpoints

  arrays = common.checkpoint_arrays(args.megabytes)
  state = {'target': arrays, 'state': {'step': jax.numpy.int32(0), 'param_states': {}}}
  num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  shapes_tree = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )

  host = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
  blocking, total, restore, plain, peer_seconds = [], [], [], [], []
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(
      stack.enter_context(tempfile.TemporaryDirectory(prefix='t5x_lite_bench_'))
    )
    if args.t5x:
      t5x = t5x_process.T5x(
        args, 'Checkpoint', {'megabytes': args.megabytes, 'folder': str(folder)}
      )
      stack.callback(t5x.close)

    def write_plain():
      with open(folder / 'plain', 'wb') as out:
        for array in host:
          out.write(
            memoryview(np.ascontiguousarray(array)).cast('B') if array.ndim else array.tobytes()
          )

    for run in range(args.runs + 1):
      manager = checkpoints.CheckpointManager(
        folder / f'run{run}', save_cfg=checkpoints.SaveCheckpointConfig(period=1, keep=None)
      )
      block, _ = common.timed(lambda: manager.save(1, state))
      rest, _ = common.timed(manager.wait)
      back, restored = common.timed(
        lambda: jax.block_until_ready(manager.restore(1, target=shapes_tree))
      )
      del restored
      manager.close()
      spent, _ = common.timed(write_plain)
      peer = t5x('run') if args.t5x else {}
      if run:  # the first run is slower
        blocking.append(block)
        total.append(block + rest)
        restore.append(back)
        plain.append(spent)
        peer_seconds.append(peer)
      shutil.rmtree(folder / f'run{run}')
  median = statistics.median
  print(f'matmul 2048^3: {common.matmul_gflops():.0f} GFLOP/s')
  common.print_table(
    f'Checkpoint of {num_bytes / 2**20:.0f} MiB',
    [
      ('save: training waits', median(blocking)),
      ('save: until committed, hashed and flushed', median(total)),
      ('restore, every hash verified', median(restore)),
      ('the same bytes by plain writes, not flushed', median(plain)),
      *(
        (f'{t5x.name}, {what}', median(seconds[what] for seconds in peer_seconds))
        for what in peer_seconds[0]
      ),
    ],
    ('what', 's (median)'),
  )


if __name__ == '__main__':
  main()
