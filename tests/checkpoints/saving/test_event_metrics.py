"""Metrics of steps from the event files of a run: ours, and those that T5X writes, as tensors."""

import tensorboardX.proto.event_pb2 as event_pb2

from t5x_lite import checkpoints
from t5x_lite.trainer import summaries


def write_event(path, step, **value):
  data = event_pb2.Event(step=step, summary={'value': [value]}).SerializeToString()
  with path.open('ab') as file:
    file.write(len(data).to_bytes(8, 'little') + bytes(4) + data + bytes(4))


def test_values_of_our_runs(tmp_path):
  writer = summaries.SummaryWriter(tmp_path / 'inference_eval' / 'task')
  for step, value in ((1, 0.25), (2, 0.5), (2, 0.75), (3, 1.0)):
    writer.write_scalars(step, {'exact/match': value})
  writer.close()
  found = checkpoints.populate_metrics_for_steps(
    tmp_path, 'inference_eval/task/exact/match', [1, 2, 4]
  )
  assert found == {1: 0.25, 2: 0.75}
  assert checkpoints.populate_metrics_for_steps(tmp_path, 'inference_eval/task/other', [1]) == {}
  assert checkpoints.populate_metrics_for_steps(tmp_path / 'nothing', 'a/b', [1]) == {}


def test_values_that_t5x_wrote(tmp_path):
  (tmp_path / 'train').mkdir()
  path = tmp_path / 'train' / 'events.out.tfevents.1.host.v2'
  write_event(path, 1, tag='accuracy', tensor={'dtype': 1, 'float_val': [0.5]})
  write_event(path, 2, tag='accuracy', tensor={'dtype': 1, 'tensor_content': b'\x00\x00\x80\x3f'})
  write_event(path, 3, tag='text', tensor={'dtype': 7, 'string_val': [b'accuracy']})
  with path.open('ab') as file:  # the writer was killed
    file.write(b'\x40\x00\x00')
  assert checkpoints.populate_metrics_for_steps(tmp_path, 'train/accuracy', range(9)) == {
    1: 0.5,
    2: 1.0,
  }
