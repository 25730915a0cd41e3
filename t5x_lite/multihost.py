"""Coordination of several processes: lead process, barriers and broadcasts. All are no-ops in a single process."""

import json
from typing import Any

import jax
import numpy as np

PyTree = Any


def is_lead() -> bool:
  """Return whether this is the lead process, which writes logs and summaries."""
  return jax.process_index() == 0


def sync(name: str) -> None:
  """Wait until every process has reached the barrier `name`."""
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(name)


def broadcast_from_lead(tree: PyTree) -> PyTree:
  """Return the lead process's `tree` of numbers or NumPy arrays on every process, as NumPy arrays."""
  if jax.process_count() == 1:
    return jax.tree.map(np.asarray, tree)
  from jax.experimental import multihost_utils

  return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def broadcast_json(value: Any) -> Any:
  """Return the lead process's `value`, of which `json` can make a text, on every process."""
  if jax.process_count() == 1:
    return value
  text = np.frombuffer(json.dumps(value).encode(), np.uint8).astype(np.int32)
  (length,) = broadcast_from_lead(np.array([len(text)]))
  mine = np.resize(text, int(length))  # Only its shape matters on other processes.
  return json.loads(bytes(broadcast_from_lead(mine).astype(np.uint8)))


def any_process(flag: bool) -> bool:
  """Return whether `flag` is true on at least one process; every process must call this at the same point."""
  if jax.process_count() == 1:
    return bool(flag)
  from jax.experimental import multihost_utils

  return bool(np.any(multihost_utils.process_allgather(np.asarray(bool(flag)))))


def sum_over_processes(tree: PyTree) -> PyTree:
  """Return the sums of NumPy arrays over the processes; every process must call this at the same point."""
  if jax.process_count() == 1:
    return tree
  from jax.experimental import multihost_utils

  gathered = multihost_utils.process_allgather(tree)
  return jax.tree.map(lambda arrays: np.sum(arrays, axis=0, dtype=arrays.dtype), gathered)


def assert_equal(input_tree: PyTree, fail_message: str = '') -> None:
  """Raise AssertionError with `fail_message` unless every process passed equal numbers."""
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    multihost_utils.assert_equal(input_tree, fail_message)
