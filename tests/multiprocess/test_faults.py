"""Faults in one of several processes: all end, the others name it, and the run resumes as if nothing had happened."""

import itertools
import re
import signal

import pytest

from t5x_lite import checkpoints
from tests.apps.train import toy_run
from tests.multiprocess import runs

_STEPS = 60
_FOUR = pytest.param(4, marks=pytest.mark.full)


def _train(model_dir, *flags, steps=_STEPS):
  return runs.train(model_dir, f'--gin.TRAIN_STEPS={steps}', *flags)


def _fault(process, do, at='batch', number=5):
  return {'process': process, 'do': do, 'at': at, 'number': number}


def _others(run, failed, num_processes):
  return {process: run.output_of(process) for process in range(num_processes) if process != failed}


@pytest.mark.parametrize('num_processes', [2, _FOUR])
@pytest.mark.parametrize(
  'failed, at',
  [(1, 'batch')]
  + [
    pytest.param(process, at, marks=pytest.mark.full)
    for process, at in (
      (0, 'batch'),
      *itertools.product((0, 1), ('import', 'open', 'evaluation')),
      (0, 'metric'),
    )
  ],
)
def test_an_exception_in_one_ends_all_and_is_printed_once(model_dir, failed, at, num_processes):
  number = 5 if at == 'batch' else 1
  with runs.Run(
    _train(model_dir), num_processes, faults=[_fault(failed, 'raise', at, number)]
  ) as run:
    seconds = run.seconds_to_end()
  print(f'{seconds:.1f} s until all have ended')
  assert run.statuses == [1] and seconds < 10, run.output
  message = run.output_of(failed)
  assert message.count('first line\n') == message.count('second line') == 1, message
  for output in _others(run, failed, num_processes).values():
    assert re.search(
      rf'ends because process {failed} failed.*RaisedByTest: .*first line', output
    ), output
    assert 'second line' not in output and 'Traceback' not in output, output


@pytest.mark.parametrize(
  'failed, at',
  [(0, 'finish'), (1, 'finish')]
  + [pytest.param(process, 'write', marks=pytest.mark.full) for process in (0, 1)],
)
def test_a_part_that_cannot_be_written_is_a_failed_save_of_all(tmp_path, failed, at):
  # With Orbax the others waited in a barrier for this part, so that all had to end.
  with runs.Run(_train(tmp_path, steps=7), faults=[_fault(failed, 'fill_disk', at, 1)]) as run:
    run.end()
  assert run.statuses == [0], run.output
  for process in (0, 1):
    assert 'The checkpoint of step 3 could not be written' in run.output_of(process), run.output
  assert 'the disk is full' in run.output_of(failed), run.output
  assert checkpoints.all_steps(tmp_path) == [6, 7]


@pytest.mark.parametrize('num_processes', [2, _FOUR])
@pytest.mark.parametrize(
  'killed, at',
  [(0, 'batch'), (1, 'batch')]
  + [
    pytest.param(process, at, marks=pytest.mark.full)
    for process, at in itertools.product((0, 1), ('save_begun', 'evaluation', 'compiled'))
  ],
)
def test_others_survive_a_killed_process_for_seconds(model_dir, killed, at, num_processes):
  with runs.Run(
    _train(model_dir),
    num_processes,
    launched=False,
    flags=['--heartbeat_timeout_seconds=5'],
    faults=[_fault(killed, 'SIGKILL', at, 5 if at == 'batch' else 1)],
  ) as run:
    seconds = run.seconds_to_end()
  print(f'{seconds:.1f} s until all have ended')
  assert seconds < 5 + 10, run.output
  assert run.statuses == [-signal.SIGKILL if i == killed else 75 for i in range(num_processes)], (
    run.output
  )
  for output in _others(run, killed, num_processes).values():
    assert re.search(rf'ends because process {killed} has given no sign of life', output), output
    assert 'Rerun the command on all machines' in output and 'Traceback' not in output, output


@pytest.mark.full
@pytest.mark.parametrize('killed', [0, 1])
def test_the_launcher_ends_the_others_of_a_killed_process(model_dir, killed):
  with runs.Run(_train(model_dir), faults=[_fault(killed, 'SIGKILL')]) as run:
    seconds = run.seconds_to_end()
  print(f'{seconds:.1f} s until all have ended')
  assert seconds < 30 and run.statuses == [128 + signal.SIGKILL], run.output
  assert f'process {killed} was killed by SIGKILL' in run.output, run.output


def test_a_stalled_source_ends_all_and_sigterm_a_survivor_of_a_stopped_process(model_dir, tmp_path):
  """Two runs at once, since both wait: for the limit of a step, and for a process that gives no sign of life."""
  stalled = runs.Run(
    _train(model_dir, '--gin.train_script.train.max_step_seconds=4'), faults=[_fault(1, 'sleep')]
  )
  stopped = runs.Run(_train(tmp_path), launched=False, faults=[_fault(1, 'SIGSTOP')])
  with stalled, stopped:
    stopped.wait_for('FAULT')
    stopped.wait_until_stopped(1)
    at = stopped.send(0, signal.SIGTERM)
    stalled_seconds = stalled.seconds_to_end()
    stopped_seconds = stopped.wait_for('ends because process 1 has given no sign of life') - at
    stopped.send(1, signal.SIGKILL)
    stopped.end()
  print(f'{stalled_seconds:.1f} and {stopped_seconds:.1f} s until all have ended')
  assert stalled.statuses == [4] and stalled_seconds < 4 + 10, stalled.output
  waiting = stalled.output_of(0)
  assert re.search(
    r'no step was completed within 4 seconds.*Processes, the last one first: process 1 after step \d+ '
    r"in 'data'",
    waiting,
  ), waiting
  assert re.search(r'ends because process 0 failed.*Watchdog', stalled.output_of(1)), stalled.output
  # The stacks of both: the cause is in the other process than the one whose step is late.
  assert ' in block_until_ready' in waiting and 'in happens' not in waiting, waiting
  assert 'Stacks of all threads' in stalled.output_of(1), stalled.output
  assert re.search(r'letters\.py", line \d+ in happens', stalled.output_of(1)), stalled.output
  assert stopped.statuses[0] == 75 and stopped_seconds < 20, stopped.output


@pytest.mark.parametrize(
  'number, process',
  [
    (signal.SIGTERM, 1),
    pytest.param(signal.SIGINT, 0, marks=pytest.mark.full),
    pytest.param(signal.SIGHUP, 1, marks=pytest.mark.full),
  ],
)
def test_a_signal_to_one_stops_all_after_a_few_steps(model_dir, number, process):
  with runs.Run(
    _train(model_dir), seconds=0.5, faults=[_fault(process, number.name, number=4)]
  ) as run:
    seconds = run.seconds_to_end()
  print(f'{seconds:.1f} s until all have ended')
  assert run.statuses == [75], run.output
  assert run.output.count('Stopped after step') == 1, run.output
  found = re.search(
    rf'Stopped after step (\d+) of {_STEPS} by {number.name} to process {process}; step (\d+) is saved',
    run.output_of(0),
  )
  assert found and found[1] == found[2], run.output
  first = int(re.search(r'at step (\d+), to step', run.output)[1])
  # Three steps had their batches before the signal.
  assert int(found[1]) - first - 3 <= 4, run.output
  assert checkpoints.newest_sound_step(model_dir) == int(found[1])


@pytest.mark.full
def test_all_is_saved_within_the_grace_of_a_scheduler(model_dir):
  with runs.Run(_train(model_dir), seconds=5.0) as run:
    run.wait_for(r' step \d+  loss')
    at = run.send(1, signal.SIGTERM)
    seconds = run.end() - at
  print(f'{seconds:.1f} s until all have ended')
  assert run.statuses == [75] and 'is saved in' in run.output and seconds < 30, run.output


def test_a_signal_during_an_evaluation_stops_all(model_dir):
  with runs.Run(_train(model_dir), faults=[_fault(1, 'SIGTERM', 'evaluation_begun', 1)]) as run:
    run.end()
  assert run.statuses == [75] and 'by SIGTERM to process 1' in run.output_of(0), run.output


@pytest.mark.parametrize(
  'at, process',
  [('import', 1)]
  + [
    pytest.param(at, process, marks=pytest.mark.full)
    for at, process in (
      ('import', 0),
      ('open', 0),
      ('open', 1),
      ('restored', 0),
      ('restored', 1),
      ('compiled', 1),
      ('first_step', 0),
    )
  ],
)
def test_a_signal_during_the_start_stops_all(model_dir, at, process):
  with runs.Run(_train(model_dir), faults=[_fault(process, 'SIGTERM', at, 1)]) as run:
    seconds = run.seconds_to_end()
  print(f'{seconds:.1f} s until all have ended')
  assert run.statuses == [75] and run.output.count('] Stopped') == 1, run.output
  assert f't5x_lite: [process {process if at == "import" else 0}] Stopped' in run.output, run.output
  assert 'Traceback' not in run.output, run.output


def test_launch_restarts_all_from_the_newest_checkpoint(tmp_path):
  """Each start is killed at its first checkpoint, which is one more than the allowed restarts without a new one."""
  with runs.Run(
    _train(tmp_path, '--gin.SAVING_PERIOD=10', steps=20),
    faults=[_fault(0, 'SIGKILL', 'save_committed', 1)],
    launch_flags=['--max_restarts=1', '--restart_seconds=0.1'],
  ) as run:
    run.end()
  assert run.statuses == [0], run.output
  assert re.findall(
    r'(process 0 was killed by SIGKILL; restart 1 of at most 1 from step \d+)', run.output
  ) == [
    f'process 0 was killed by SIGKILL; restart 1 of at most 1 from step {step}' for step in (10, 20)
  ], run.output
  addresses = re.findall(r'with 2 devices, address (\S+)\.$', run.output, re.MULTILINE)
  assert len(set(addresses)) == 3, run.output
  assert checkpoints.newest_sound_step(tmp_path) == 20


def test_the_run_equals_one_without_faults(model_dir, tmp_path):
  with runs.Run(_train(model_dir)) as faulty, runs.Run(_train(tmp_path / 'whole')) as whole:
    for run in (faulty, whole):
      run.end()
      assert run.statuses == [0], run.output
  toy_run.assert_same_run(tmp_path / 'whole', model_dir, _STEPS, b_was_stopped=True)
