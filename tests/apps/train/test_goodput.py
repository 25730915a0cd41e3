"""Events and goodput of a run that is killed and resumed, and of the real command with a hook."""

import os
import signal
import subprocess

import gin
import pytest

from t5x_lite import runtime
from t5x_lite.command_line import cli
from tests import processes
from tests.apps.common import cloze_run
from tests.apps.train import toy_run

_KILLED = """
    import os, signal, sys, time
    from tests.apps.train import toy_run

    def kill(event):
      if event.kind == 'evaluation_begun':
        while not os.path.isdir(os.path.join(sys.argv[1], 'checkpoint_6')):
          time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    toy_run.train(sys.argv[1], 12, save={'period': 6}, eval_period=10, infer_eval_dataset_cfg=None, event_fns=kill)
    """


def test_a_killed_run_tells_what_it_lost(tmp_path):
  with processes.start(_KILLED, tmp_path, stderr=subprocess.DEVNULL) as process:
    assert process.wait(timeout=120) == -signal.SIGKILL
  path = tmp_path / runtime.EVENTS_FILE
  killed = list(runtime.read_events(path))
  # The save of step 6 may be committed while step 7 to 10 are computed.
  assert [(event.kind, event.step) for event in killed if event.kind != 'save_committed'] == [
    ('start', None),
    ('restored', 0),
    ('data_sampled', 0),
    ('compiled', 0),
    ('first_step', 1),
    ('save_begun', 6),
    ('evaluation_begun', 10),
  ]
  with path.open('a') as file:
    file.write('{"event": "progress", "wall_ti')
  toy_run.train(tmp_path, 12, save={'period': 6}, eval_period=10, infer_eval_dataset_cfg=None)
  events = list(runtime.read_events(path))
  second = events[len(killed) :]
  assert (second[0].kind, second[1].kind, second[1].step) == ('start', 'restored', 6)
  assert second[1].details == {'source': f'{tmp_path}/checkpoint_6 (this run)', 'resumes': True}
  assert (
    events[: len(killed)] == killed
    and events[-1].kind == 'summary'
    and events[-1].details['num_starts'] == 2
  )
  total = events[-1].details['total_seconds']
  lost = [
    sum(event.seconds.values()) for event in killed if event.step is not None and event.step > 6
  ]
  assert total['repeated'] == pytest.approx(sum(lost), abs=0.01) and total['repeated'] > 0
  assert total['down'] == pytest.approx(second[0].wall_time - killed[-1].wall_time, abs=0.01)
  assert sum(total.values()) == pytest.approx(events[-1].wall_time - events[0].wall_time, abs=0.05)
  assert total['step'] < sum(event.seconds.get('step', 0) for event in events)


_STOPPED = """
    import os, signal, sys
    from t5x_lite import errors
    from tests.apps.train import toy_run

    def terminate(event):
      print(event.kind, event.details.get('cause'), event.details.get('signal'))
      if event.kind in ('start', 'stop'):
        os.kill(os.getpid(), signal.SIGTERM if event.kind == 'start' else signal.SIGHUP)

    try:
      toy_run.train(sys.argv[1], 12, event_fns=terminate)
    except errors.StoppedOnSignalError as error:
      print(error)
    """


def test_a_signal_during_the_hooks_of_the_first_and_the_last_event_is_a_normal_stop(tmp_path):
  with processes.start(_STOPPED, tmp_path / 'run', stderr=subprocess.DEVNULL) as process:
    output, _ = process.communicate(timeout=120)
  assert process.returncode == 0
  *events, message = output.splitlines()
  assert events[0] == 'start None None' and 'stop signal SIGTERM' in events
  assert message.startswith('Stopped by SIGTERM before the first step')


def hook(event):
  """Append an event to a file, for the gin file below."""
  with open(os.environ['T5X_LITE_TEST_EVENTS'], 'a', encoding='utf-8') as file:
    file.write(event.to_line())


def test_the_command_shows_the_goodput_and_calls_the_hook_of_a_gin_file(
  tmp_path, capsys, monkeypatch
):
  (tmp_path / 'hook.gin').write_text(
    'from __gin__ import dynamic_registration\n'
    'from t5x_lite.apps import train as train_script\n'
    'from tests.apps.train import test_goodput\n'
    'train_script.train.event_fns = [@test_goodput.hook]\n'
  )
  (tmp_path / 'one.gin').write_text(cloze_run.ONE_DEVICE)
  monkeypatch.setenv('T5X_LITE_TEST_EVENTS', str(tmp_path / 'hooked.jsonl'))
  flags = [f'--gin.{flag}' for flag in cloze_run.bindings("{'inputs': 16, 'targets': 4}")]
  status = cli.main(
    [
      'train',
      '--gin_file=recipes/keyword_cloze.gin',
      f'--gin_file={tmp_path}/hook.gin',
      f'--gin_file={tmp_path}/one.gin',
      f'--gin.MODEL_DIR={tmp_path}/run',
      '--gin.TRAIN_STEPS=4',
      '--gin.EVAL_STEPS=1',
      '--gin.train_script.train.infer_eval_dataset_cfg=None',
      *flags,
    ]
  )
  gin.clear_config()
  assert status == 0
  (line,) = [line for line in capsys.readouterr().err.splitlines() if 'Time of the run ' in line]
  assert '% training steps, ' in line and '% compiling' in line
  start, *others = runtime.read_events(tmp_path / 'run' / runtime.EVENTS_FILE)
  assert start.kind == 'start' and 'start' not in {event.kind for event in others}
  # Also without a selector of mesh rules the file tells the hardware.
  assert start.details['hardware'] == 'cpu-8' and start.details['command']
  assert (tmp_path / 'hooked.jsonl').read_text() == (
    tmp_path / 'run' / runtime.EVENTS_FILE
  ).read_text()
