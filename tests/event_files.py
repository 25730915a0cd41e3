"""Reader of TensorBoard's event files, from the record format itself."""

import os

import numpy as np
import tensorboardX.proto.event_pb2 as event_pb2


def read(folder):
  """Yield the events of a folder, oldest file first."""
  for path in sorted(folder.glob('events.out.tfevents.*'), key=os.path.getmtime):
    yield from records(path.read_bytes())


def records(data):
  """Yield the events of the content of a file."""
  while data:
    length = int.from_bytes(data[:8], 'little')
    yield event_pb2.Event.FromString(data[12 : 12 + length])
    data = data[12 + length + 4 :]


def scalars(folder):
  """Return (step, name, value) of all scalars of a folder, written by tensorboardX or TensorFlow."""
  return [
    (event.step, value.tag, _scalar(value))
    for event in read(folder)
    for value in event.summary.value
    if value.HasField('simple_value') or value.metadata.plugin_data.plugin_name == 'scalars'
  ]


def _scalar(value):
  if value.HasField('simple_value'):
    return value.simple_value
  return np.frombuffer(value.tensor.tensor_content, '<f4').item()  # TensorFlow's form
