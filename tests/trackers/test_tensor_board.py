"""TensorBoard events in another folder: equal to the run's, and purged when the run writes steps again."""

from t5x_lite import trackers
from t5x_lite.trainer import summaries
from tests import event_files
from tests.trackers.tracker_cases import GrowingRun


def test_events_have_the_newest_values_of_repeated_steps(tmp_path):
  run = GrowingRun(tmp_path / 'runs/mine')
  run.start()
  tracker = trackers.TensorBoard(log_dir=str(tmp_path / 'shared'))
  follower = trackers.Follower(run.path, tracker)
  run.predictions(10, 'a', [{'index': 0, 'inputs': 'a|b', 'targets': 'y', 'prediction': 'z'}])
  run.line(10, 'inference_eval/a', bleu=1.0)
  for step in (10, 20, 30):
    run.line(step, loss=1.0)
  run.checkpoint(20)
  follower.send()
  run.start()
  summaries.discard_after(run.path, 20)
  run.line(30, loss=2.0)
  run.stop()
  follower.finish(follower.send().status)
  folder = tmp_path / 'shared/mine'
  rows = summaries.read_metrics(folder / 'metrics.jsonl')
  assert [(row['step'], row['train/loss']) for row in rows] == [(10, 1.0), (20, 1.0), (30, 2.0)]
  assert rows[0]['inference_eval/a/bleu'] == 1.0
  visible = []
  texts = set()
  for event in event_files.read(folder):
    if event.HasField('session_log'):  # TensorBoard hides what earlier files have of later steps
      visible = [found for found in visible if found[0] < event.step]
    for value in event.summary.value:
      if value.HasField('simple_value'):
        visible.append((event.step, value.tag, value.simple_value))
      else:
        texts.add(value.tag.removesuffix('/text_summary'))
  losses = [(step, value) for step, tag, value in visible if tag == 'train/loss']
  assert losses == [(10, 1.0), (20, 1.0), (30, 2.0)]
  assert texts == {'configuration', 'facts', 'inference_eval/a/predictions'}
