"""A key-value store like that of `jax.distributed`, within one process."""

import threading
import time


class FakeStore:
  """Values by key; `is_gone` lets calls of a lost server wait, as those of the real one do."""

  def __init__(self):
    self.values: dict[str, str] = {}
    self.is_gone = False
    self._changed = threading.Condition()

  def _call(self):
    while self.is_gone:
      time.sleep(0.01)

  def key_value_set(self, key, value, allow_overwrite=False):
    self._call()
    with self._changed:
      if key in self.values and not allow_overwrite:
        raise RuntimeError(f'ALREADY_EXISTS: {key}')
      self.values[key] = value
      self._changed.notify_all()

  def key_value_dir_get(self, key):
    self._call()
    with self._changed:
      return [(name, value) for name, value in self.values.items() if name.startswith(key)]

  def blocking_key_value_get(self, key, timeout_in_ms):
    with self._changed:
      if self.is_gone or not self._changed.wait_for(
        lambda: key in self.values, timeout_in_ms / 1000
      ):
        raise RuntimeError(f'DEADLINE_EXCEEDED: {key}')
      return self.values[key]
