"""Process of a part: measures its items one after the other and appends events to a file, a JSON object each line.

Events: 'device' with facts of the device, 'items' with all names, 'matmul' with rates, 'begin', 'row', 'failed' and
'end' of an item. The runner reads the file while it grows, so that nothing is lost if this process is ended.
"""

from collections.abc import Collection
import importlib
import json
import os
import pathlib
import subprocess
import sys
import traceback
from typing import Any

from benchmarks import common
from benchmarks.gpu import items

PARTS = ('correctness', 'attention', 'training', 'experts', 'runs', 'recorded')
# Lowering of the programs of all parts: only in the rehearsal.
REHEARSAL = 'lowering'
# Size of the matrices of the bare product.
_MATMUL = {'real': 8192, 'tiny': 256}


def make_items(part: str, sizes: str) -> list[items.Item]:
  """Return the items of a part."""
  return importlib.import_module(f'benchmarks.gpu.{part}').make_items(sizes)


class Events:
  """File of events."""

  def __init__(self, path: pathlib.Path):
    self._path = path

  def write(self, kind: str, **details: Any) -> None:
    """Append an event; values that JSON does not have become text."""
    with self._path.open('a', encoding='utf-8') as file:
      file.write(json.dumps({'event': kind, **details}, default=str) + '\n')


def device_facts() -> dict[str, Any]:
  """Return the facts of the machine and its first device."""
  import jax

  from t5x_lite import runtime

  device = jax.local_devices()[0]
  peaks = {}
  for dtype in ('bfloat16', 'float32'):
    rate = runtime.peak_flops(device.device_kind, dtype)
    peaks[f'peak in {dtype}, TFLOP/s'] = rate and rate / 1e12
  return {
    'device': device.device_kind,
    **peaks,
    'platform': jax.default_backend(),
    'runtime': device.client.platform_version.replace('\n', ' '),
    'driver, power limit, clocks': _nvidia_smi(),
    'capability': getattr(device, 'compute_capability', None),
    'memory, GB': (items.device_bytes() or 0) / 1e9 or None,
    'machine': common.machine(),
  }


def _nvidia_smi() -> str | None:
  """Return what the driver says of the GPU of the kit; None without a driver."""
  query = '--query-gpu=driver_version,power.limit,clocks.sm,clocks.max.sm,clocks.max.mem'
  try:
    found = subprocess.run(
      [
        'nvidia-smi',
        query,
        '--format=csv,noheader',
        f'--id={os.environ.get("CUDA_VISIBLE_DEVICES", "0")}',
      ],
      capture_output=True,
      text=True,
      timeout=20,
      check=True,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return found.stdout.strip() or None


def run(part: str, sizes: str, events: Events, skip: Collection[str] = ()) -> None:
  """Measure the items of a part, except those of the names `skip`.

  Args:
    part: one of `PARTS`, or `REHEARSAL`.
    sizes: 'real' or 'tiny'.
    events: file of events.
    skip: names of items that another process of this part has begun.

  Raises:
    SystemExit: real sizes without an NVIDIA GPU.
    Exception: the device does not compute after an item.
  """
  if sizes == 'real':
    _check_gpu()
  found = make_items(part, sizes)
  # A busy machine stops processes for minutes.
  patience = {'real': 1, 'tiny': 20}[sizes]
  limits = [item.limit * patience for item in found]
  events.write('items', names=[item.name for item in found], limits=limits)
  measures_rates = part != REHEARSAL
  if measures_rates:
    events.write('device', **device_facts())
    _write_rates(events, sizes)
  for item in found:
    if item.name in skip:
      continue
    events.write('begin', item=item.name)
    try:
      for row in item.measure():
        events.write('row', item=item.name, row=row)
    except Exception as error:  # Later items must run.
      traceback.print_exc()
      events.write('failed', item=item.name, reason=items.note_of(error))
    else:
      events.write('end', item=item.name)
    if measures_rates:
      check_device()
  if measures_rates:
    _write_rates(events, sizes)


def check_device() -> None:
  """Raise if the device computes nothing any more: after some errors of a kernel only another process can use it.

  The runner then starts one for the items that are left.
  """
  import jax

  jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.zeros(1)))


def _check_gpu() -> None:
  import jax

  if jax.default_backend() != 'gpu':
    sys.exit(
      f"Real sizes need an NVIDIA GPU, JAX has {jax.default_backend()!r}. Install JAX's CUDA packages, or rehearse "
      'with make gpu SIZES=tiny'
    )


def _write_rates(events: Events, sizes: str) -> None:
  """Write the TFLOP/s of a bare product in the dtypes of the part."""
  size = _MATMUL[sizes]
  rates = {dtype: items.matmul_tflops(dtype, size) for dtype in ('bfloat16', 'float32')}
  events.write('matmul', size=size, **rates)
