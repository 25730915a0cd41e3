"""Metrics of checkpoints from the TensorBoard events of their run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from t5x_lite.checkpoints import discovery
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

_EVENT_FILES = 'events.out.tfevents.*'
_MAX_BYTES = 2**31
_NUM_HEADER_BYTES = 12
_NUM_FOOTER_BYTES = 4
# Numbers of TensorFlow's float dtypes in events.
_FLOAT = 1
_DOUBLE = 2
_HALF = 19
_BFLOAT16 = 14
_DTYPES = {_FLOAT: np.float32, _DOUBLE: np.float64, _HALF: np.float16, _BFLOAT16: jnp.bfloat16}


def populate_metrics_for_steps(
  checkpoints_dir: discovery.PathLike, metric_name: str, steps: Collection[int]
) -> dict[int, float]:
  """Return the values of a metric at steps, from the TensorBoard events of a run of t5x_lite or T5X.

  Args:
    checkpoints_dir: the model directory.
    metric_name: folder of the metric and its name in the events, e.g. 'training_eval/my_task/accuracy'.
    steps: the steps.

  Returns:
    step -> value, the one written last; steps without a value are missing.
  """
  parts = metric_name.split('/')
  found = {}
  for length in range(1, len(parts)):
    folder = files.path(checkpoints_dir) / '/'.join(parts[:length])
    tag = '/'.join(parts[length:])
    if not folder.is_dir():
      continue
    for path in sorted(folder.glob(_EVENT_FILES)):
      for step, name, value in _scalars(untrusted.read_regular(path, _MAX_BYTES)):
        if name == tag and step in steps:
          found[step] = value
  return found


def _scalars(data: bytes) -> Iterator[tuple[int, str, float]]:
  """Yield (step, tag, value) of the numbers in an events file; a last record that is incomplete is ignored."""
  from tensorboardX.proto import event_pb2  # takes long to import

  messages: Any = event_pb2  # protobuf adds the classes when it is imported
  at = 0
  while at + _NUM_HEADER_BYTES <= len(data):
    start = at + _NUM_HEADER_BYTES
    end = start + int.from_bytes(data[at : at + 8], 'little')
    if end + _NUM_FOOTER_BYTES > len(data):
      return
    event = messages.Event.FromString(data[start:end])
    for value in event.summary.value:
      if value.HasField('simple_value'):
        number = value.simple_value
      else:
        number = _number_of(value.tensor)
      if number is not None:
        yield event.step, value.tag, float(number)
    at = end + _NUM_FOOTER_BYTES


def _number_of(tensor) -> float | None:
  """Return the only number of a tensor, as T5X writes scalars; None for other tensors."""
  for values in (tensor.float_val, tensor.double_val):
    if len(values) == 1:
      return values[0]
  if tensor.dtype in _DTYPES:
    numbers = np.frombuffer(tensor.tensor_content, _DTYPES[tensor.dtype])
    if numbers.size == 1:
      return numbers[0]
    return None
  return None
