"""What every benchmark shares: the machine, a bare matmul's rate in the same run, and tables.

Machines differ from hour to hour; a figure is only comparable beside the matmul rate of its own run.
"""

import argparse
import ctypes
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence

_ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))


def positive(text: str) -> int:
  """Returns the number that an argument of a command line is, an integer of at least 1."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'got {text!r}; expected an integer of at least 1')
  return int(text)


def matmul_gflops(size: int = 2048, repeats: int = 7) -> float:
  """Returns the median GFLOP/s of a `size`^3 float32 matmul on the default device."""
  import jax
  import jax.numpy as jnp
  a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
  b = jax.random.normal(jax.random.key(1), (size, size), jnp.float32)
  multiply = jax.jit(jnp.matmul)
  multiply(a, b).block_until_ready()
  seconds = [timed(lambda: multiply(a, b).block_until_ready())[0] for _ in range(repeats)]
  return 2 * size**3 / statistics.median(seconds) / 1e9


def timed(fn: Callable[[], object]) -> tuple[float, object]:
  """Returns (wall seconds, result) of one call."""
  start = time.perf_counter()
  result = fn()
  return time.perf_counter() - start, result


def keep_freed_memory() -> None:
  """Tells the C library to keep what is freed for the next allocation, where it can be told (Linux).

  By itself it gives large pieces back to the system or keeps them, by what was freed before. A step whose temporaries
  come back as new pages every time takes up to twice the seconds, which says nothing about the step.
  """
  if sys.platform == 'linux':
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
      mallopt(-4, 0)  # M_MMAP_MAX: everything from the heap
      mallopt(-1, -1)  # M_TRIM_THRESHOLD: which never shrinks


def peak_memory_mb() -> float:
  """Returns the largest resident size of this process so far, in MB (10^6 bytes)."""
  import resource
  scale = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


def machine() -> str:
  """Returns one line about this machine and the versions that decide speed."""
  import jax
  import jaxlib
  device = jax.devices()[0]
  cpu = platform.processor() or platform.machine()
  for line in _lines('/proc/cpuinfo'):
    if line.startswith('model name'):
      cpu = line.split(':', 1)[1].strip()
      break
  return (f'{os.cpu_count()} cores {cpu}; {len(jax.devices())} x {device.device_kind}; jax {jax.__version__}, '
          f'jaxlib {jaxlib.__version__}; Python {platform.python_version()}')


def _lines(path: str) -> list[str]:
  try:
    return pathlib.Path(path).read_text().splitlines()
  except OSError:
    return []


def print_table(title: str, rows: Sequence[Sequence[object]], header: Sequence[str]) -> None:
  """Prints a Markdown table, ready for docs/benchmarks.md."""
  print(f'\n### {title}\n\n{machine()}\n')
  print('| ' + ' | '.join(header) + ' |')
  print('|' + '---|' * len(header))
  for row in rows:
    print('| ' + ' | '.join(f'{cell:.4g}' if isinstance(cell, float) else str(cell) for cell in row) + ' |')
  print()
