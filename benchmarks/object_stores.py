"""Seconds and memory of saving and restoring a state in emulated object stores and on the local disk.

    python benchmarks/object_stores.py [--mb 300] [--runs 3] [--kinds disk gcs s3]

Needs the packages of requirements/lock-stores.txt. Each measurement is a new process that makes arrays like
those of a model, saves them with `CheckpointManager`, and restores them with the hashes verified. The emulators and a
proxy run in other processes of this machine and are programs in Python: so the limit of a store is the row "one
object", TensorStore's write and read of the same bytes through the same emulator. Memory is the largest that the
process had beyond the arrays themselves.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import common

_ROOT = pathlib.Path(__file__).resolve().parent.parent
# Bytes of an array, about those of a layer of T5 base.
_ARRAY_BYTES = 9 << 20


def _state(num_mb: int) -> dict:
  import numpy as np

  rng = np.random.default_rng(0)
  count = max(1, num_mb * 10**6 // _ARRAY_BYTES)
  return {
    'target': {
      f'layers_{i}': {'kernel': rng.standard_normal((1024, _ARRAY_BYTES // 4096), np.float32)}
      for i in range(count)
    }
  }


def _shapes(num_mb: int) -> dict:
  import jax
  import numpy as np

  count = max(1, num_mb * 10**6 // _ARRAY_BYTES)
  leaf = jax.ShapeDtypeStruct((1024, _ARRAY_BYTES // 4096), np.float32)
  return {'target': {f'layers_{i}': {'kernel': leaf} for i in range(count)}}


def _resident() -> int:
  return int(pathlib.Path('/proc/self/statm').read_text(encoding='utf-8').split()[1]) * os.sysconf(
    'SC_PAGE_SIZE'
  )


def _save(root: str, num_mb: int) -> dict[str, float]:
  """Save below `root`; return seconds and MB."""
  import jax

  from t5x_lite import checkpoints

  state = _state(num_mb)
  jax.devices()
  with checkpoints.CheckpointManager(root, save_cfg=checkpoints.SaveCheckpointConfig()) as manager:
    before = _resident()
    start = time.perf_counter()
    manager.save(1, state)
    blocking = time.perf_counter() - start
    manager.wait()
    committed = time.perf_counter() - start
  return {
    'save, blocking, s': blocking,
    'save, committed, s': committed,
    'save, memory, MB': common.peak_memory_mb() - before / 1e6,
  }


def _restore(root: str, num_mb: int) -> dict[str, float]:
  """Restore what `_save` has saved; return seconds and MB beyond the arrays."""
  import jax
  import numpy as np

  from t5x_lite import checkpoints

  shapes = _shapes(num_mb)
  jax.devices()
  before = _resident()
  start = time.perf_counter()
  with checkpoints.CheckpointManager(root) as manager:
    restored = manager.restore(1, shapes)
  seconds = time.perf_counter() - start
  memory = (
    common.peak_memory_mb()
    - before / 1e6
    - sum(x.nbytes for x in jax.tree.leaves(restored.state)) / 1e6
  )
  assert restored.is_verified
  jax.tree.map(np.testing.assert_array_equal, restored.state, _state(num_mb))
  return {'restore, s': seconds, 'restore, memory, MB': memory}


def _one_object(spec: str, num_mb: int) -> dict[str, float]:
  """Write and read one object of the size of the state."""
  import numpy as np
  import tensorstore

  content = np.random.default_rng(0).bytes(num_mb * 10**6)
  store = tensorstore.KvStore.open(json.loads(spec)).result()
  start = time.perf_counter()
  store.write('object', content).result()
  written = time.perf_counter() - start
  start = time.perf_counter()
  assert len(store.read('object').result().value) == len(content)
  return {'write, s': written, 'read, s': time.perf_counter() - start}


def _run(kind: str, environment: dict[str, str], place: str, num_mb: int) -> dict[str, float]:
  done = subprocess.run(
    [sys.executable, __file__, '--worker', kind, '--place', place, '--mb', str(num_mb)],
    check=False,
    env={**os.environ, **environment, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(_ROOT)},
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise SystemExit(
      f'{kind} at {place} ended with status {done.returncode}:\n{done.stderr[-3000:]}'
    )
  return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
  """Measure and print the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--mb', type=common.positive, default=300)
  parser.add_argument('--runs', type=common.positive, default=3)
  parser.add_argument(
    '--kinds', nargs='+', choices=('disk', 'gcs', 's3'), default=('disk', 'gcs', 's3')
  )
  parser.add_argument('--worker', help=argparse.SUPPRESS)
  parser.add_argument('--place', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    fn = {'object': _one_object, 'save': _save, 'restore': _restore}[args.worker]
    print(json.dumps(fn(args.place, args.mb)))
    return
  sys.path.insert(0, str(_ROOT))
  import pytest

  from tests import stores

  rows = []
  for kind in args.kinds:
    measured, limits = [], []
    for _ in range(args.runs):
      with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if kind == 'disk':
          measured.append(_run('save', {}, folder, args.mb) | _run('restore', {}, folder, args.mb))
        else:
          with stores.opened(kind, patch) as store:
            measured.append(
              _run('save', store.env, store.root, args.mb)
              | _run('restore', store.env, store.root, args.mb)
            )
            limits.append(_run('object', store.env, json.dumps(store.spec('limit/')), args.mb))
    rows += [
      [kind, *(f'{statistics.median(m[name] for m in measured):.2f}' for name in measured[0])]
    ]
    if limits:
      write, read = (f'{statistics.median(m[name] for m in limits):.2f}' for name in limits[0])
      rows += [[f'{kind}, one object', '', write, '', read, '']]
  common.print_table(
    f'{args.mb} MB, medians of {args.runs}; matmul {common.matmul_gflops():.0f} GFLOP/s',
    rows,
    [
      'place',
      'save, blocking, s',
      'save, committed, s',
      'save, memory, MB',
      'restore, s',
      'restore, memory, MB',
    ],
  )


if __name__ == '__main__':
  main()
