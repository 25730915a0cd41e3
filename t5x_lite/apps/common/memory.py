"""Lower bound of the memory of a run, compared with that of its devices before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
import logging
import math
import os
from typing import Any

import numpy as np

from t5x_lite import partitioning
from t5x_lite.errors import ConfigError
from t5x_lite.formatting import format_bytes
from t5x_lite.train_state import TrainState

# Multiple of the memory from which a run is an error: less may still be in swap space or in other memory.
_ERROR_FACTOR = 10


def check_run(
  state_shape: TrainState,
  partitioner: partitioning.PjitPartitioner,
  specs: Mapping[str, Mapping[str, Any]],
) -> None:
  """Compare the state and a batch with the memory of a device; see `check`.

  Args:
    state_shape: shapes of the state.
    partitioner: partitioner of the run.
    specs: shape and dtype of global batches, by dataset and feature name.
  """
  state_bytes = partitioner.explain(state_shape).totals().bytes_per_device
  batch_bytes = max(
    sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in spec.values())
    for spec in specs.values()
  )
  check(
    state_bytes,
    batch_bytes // partitioner.data_mesh_size,
    device_bytes(partitioner.mesh.local_devices),
  )


def device_bytes(devices: list[Any]) -> int | None:
  """Return the memory of one of the devices of this process, of which CPUs share that of the host; None if unknown."""
  if devices[0].platform == 'cpu':
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') // len(devices)
  return (devices[0].memory_stats() or {}).get('bytes_limit')


def check(state_bytes: int, batch_bytes: int, available: int | None) -> None:
  """Warn if a run needs more than the memory of a device.

  Args:
    state_bytes: bytes of the state on a device.
    batch_bytes: bytes of a batch on a device.
    available: bytes of a device; None if they are unknown, which checks nothing.

  Raises:
    ConfigError: it needs at least 10 times as much.
  """
  needed = state_bytes + batch_bytes
  if available is None or needed <= available:
    return
  text = (
    f'The run must fit into {format_bytes(available)} of memory on each device, got {format_bytes(state_bytes)} of '
    f'state and {format_bytes(batch_bytes)} of a batch, plus activations and gradients. Use a smaller model or batch, '
    'or shard over more devices.'
  )
  if needed >= _ERROR_FACTOR * available:
    raise ConfigError(text)
  logging.getLogger(__name__).warning('%s', text)
