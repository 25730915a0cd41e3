"""A long run under random kills, signals and injected errors, compared bitwise with the same run undisturbed.

    python -m tests.soak [--steps 2000] [--faults 30] [--seed N] [--folder FOLDER]

Prints each fault with what became of it, and ends with status 0 if state, position in the data, metrics and predictions
are equal. The seed chooses kinds and times of the faults; the progress of a run before a signal also depends on the
clock.
"""

import argparse
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time

_ROOT = pathlib.Path(__file__).parent.parent
_SAVING_PERIOD = 50
_SIGNALS = {
  'SIGKILL': signal.SIGKILL,
  'SIGTERM': signal.SIGTERM,
  'SIGINT': signal.SIGINT,
  'SIGHUP': signal.SIGHUP,
}
# Kind of fault to the exit statuses that it may end a process with. 0: the run ended before, or survived.
_STATUSES = {
  'SIGKILL': (-9, 0),
  'SIGTERM': (75, 0),
  'SIGINT': (75, 0),
  'SIGHUP': (75, 0),
  'stop and continue, then SIGTERM': (75, 0),
  'damaged checkpoint after SIGKILL': (-9, 0),
  'stalled data, then SIGTERM': (75,),
  'error of the data': (1,),
  'error of the data, retried': (0, 75),
  'full disk for 60 steps, then SIGTERM': (75, 74, 0),
  'full disk to the end': (74,),
}


def _child(model_dir: str, steps: int, fault: str, at: int) -> None:
  """Runs the toy model; `fault` happens in this process when the data or the summaries reach `at`."""
  from t5x_lite import data
  from t5x_lite.actions import BaseAction
  from t5x_lite.errors import T5xLiteError
  from tests.apps.train import toy_run

  class FaultyData(data.HostIterator):
    """The toy data with a fault in front of batch `at`."""

    def __init__(self, *args, **kwargs):
      self._source = data.open_train_iterator(*args, **kwargs)
      self._has_failed = False

    element_spec = property(lambda self: self._source.element_spec)
    has_cheap_state = True

    def __next__(self):
      if self._source._num_batches + 1 == at and not self._has_failed:
        self._has_failed = True
        if fault.startswith('stalled data'):
          os.kill(os.getpid(), signal.SIGTERM)
          threading.Event().wait()
        if fault == 'error of the data':
          raise RuntimeError('injected')
        if fault == 'error of the data, retried':
          raise OSError('injected')
      return next(self._source)

    def get_state(self, undelivered=()):
      return self._source.get_state(undelivered)

    def set_state(self, state):
      self._source.set_state(state)

  class Disk(BaseAction):
    """Lets no file grow past some bytes, from the summary of a step on."""

    def run(self, train_state, metrics_by_task):
      if fault.startswith('full disk'):
        step = int(train_state.step)
        is_full = step >= at and (fault.endswith('end') or step < at + 60)
        resource.setrlimit(
          resource.RLIMIT_FSIZE,
          (1000 if is_full else resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        )

  try:
    toy_run.train(
      model_dir,
      steps,
      save={'period': _SAVING_PERIOD, 'keep': 3, 'max_failures_in_a_row': 3},
      stats_period=10,
      eval_period=500,
      actions={'TRAIN': [Disk()]},
      get_dataset_fn=FaultyData,
    )
  except T5xLiteError as error:
    sys.exit(int(error.exit_code))


def _start(
  folder: pathlib.Path, model_dir: pathlib.Path, steps: int, fault: str = '', at: int = -1
):
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    'PYTHONPATH': str(_ROOT),
    'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
  }
  with open(folder / 'log', 'a', encoding='utf-8') as log:
    return subprocess.Popen(
      [
        sys.executable,
        '-m',
        'tests.soak',
        '--child',
        json.dumps([str(model_dir), steps, fault, at]),
      ],
      cwd=_ROOT,
      env=environment,
      stdout=log,
      stderr=log,
    )


def _num_starts(folder: pathlib.Path) -> int:
  path = folder / 'log'
  return (
    len(re.findall('(Compiled|Loaded) the training step', path.read_text())) if path.exists() else 0
  )


def _newest_row(model_dir: pathlib.Path) -> int:
  from t5x_lite import summaries

  path = model_dir / 'train/metrics.jsonl'
  return (
    max((row['step'] for row in summaries.read_metrics(path)), default=0) if path.exists() else 0
  )


def _disturb(
  folder: pathlib.Path, model_dir: pathlib.Path, steps: int, fault: str, at: int, rng: random.Random
) -> int:
  """Starts the run, has the fault happen around step `at`, and returns the exit status."""
  from t5x_lite import checkpoints

  num_starts = _num_starts(folder)
  process = _start(folder, model_dir, steps, fault, at)
  # By then the process has cut the summaries of an earlier one that went further, and takes signals.
  while process.poll() is None and _num_starts(folder) == num_starts:
    time.sleep(0.01)
  sent = fault.partition(' after ')[2] or fault.partition(', then ')[2] or fault
  if sent in _SIGNALS and not fault.startswith('stalled'):
    wait_for = at + 100 if fault.startswith('full disk') else at
    while process.poll() is None and _newest_row(model_dir) < wait_for:
      time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))
    if fault.startswith('stop and continue') and process.poll() is None:
      process.send_signal(signal.SIGSTOP)
      time.sleep(2)
      process.send_signal(signal.SIGCONT)
    if process.poll() is None:
      process.send_signal(_SIGNALS[sent])
  elif fault == 'error of the data, retried':
    while process.poll() is None and _newest_row(model_dir) < at + 20:
      time.sleep(0.01)
    if process.poll() is None:
      process.send_signal(signal.SIGTERM)
  status = process.wait(timeout=600)
  if fault.startswith('damaged') and len(saved := checkpoints.all_steps(model_dir)) > 1:
    victims = [
      path for path in (model_dir / f'checkpoint_{saved[-1]}').rglob('*') if path.is_file()
    ]
    victim = rng.choice([path for path in victims if path.stat().st_size])
    content = bytearray(victim.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    victim.write_bytes(content)
  return status


def soak(folder: pathlib.Path, steps: int, num_faults: int, seed: int) -> None:
  """Runs both runs in `folder`; raises AssertionError where they differ or a process ends as it should not."""
  from t5x_lite import checkpoints
  from tests.apps.train import toy_run

  rng = random.Random(seed)
  whole, disturbed = folder / 'whole', folder / 'disturbed'
  started = time.monotonic()
  assert _start(folder, whole, steps).wait(timeout=1800) == 0, (folder / 'log').read_text()[-3000:]
  print(f'{steps} steps undisturbed: {time.monotonic() - started:.0f} s', flush=True)
  kinds = [*_STATUSES] * (num_faults // len(_STATUSES) + 1)
  kinds = kinds[:num_faults]
  rng.shuffle(kinds)
  num_effective = 0
  for number, fault in enumerate(kinds, 1):
    # Summaries come every 10 steps. The moments are spread over the run; steps lost by a fault are trained again.
    newest = max(checkpoints.all_steps(disturbed), default=0)
    at = min(max(newest + 1, steps * number // (num_faults + 1)) + rng.randrange(20), steps - 150)
    if fault.startswith('full disk'):
      at += 10 - at % 10
    status = _disturb(folder, disturbed, steps, fault, at, rng)
    newest = checkpoints.newest_sound_step(disturbed)
    print(
      f'{number:3}  {fault:<40} at {at:5}  status {status:3}  newest sound checkpoint {newest}',
      flush=True,
    )
    assert status in _STATUSES[fault], (fault, status, (folder / 'log').read_text()[-3000:])
    num_effective += status != 0
  assert num_effective > num_faults // 2, (
    'The run ended before most of the faults could happen: take more steps.'
  )
  assert _start(folder, disturbed, steps).wait(timeout=1800) == 0, (folder / 'log').read_text()[
    -3000:
  ]
  toy_run.assert_same_run(whole, disturbed, steps, b_was_stopped=True)
  leftovers = [
    path.name for path in disturbed.iterdir() if '.tmp-' in path.name or '.deleted-' in path.name
  ]
  assert not leftovers, leftovers
  print(
    f'The disturbed run equals the undisturbed one bitwise ({time.monotonic() - started:.0f} s in all).'
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=2000)
  parser.add_argument('--faults', type=int, default=30)
  parser.add_argument('--seed', type=int, default=random.SystemRandom().randrange(2**31))
  parser.add_argument(
    '--folder', type=pathlib.Path, help='keep the runs here; it must be empty or new'
  )
  parser.add_argument('--child', type=json.loads, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    _child(*args.child)
    return
  print(f'--seed={args.seed} chooses the faults.', flush=True)
  # Runs leave signals that were ignored at their start ignored; this program may itself run in the background.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.signal(signal.SIGHUP, signal.SIG_DFL)
  if args.folder is not None:
    args.folder.mkdir(parents=True, exist_ok=True)
    soak(args.folder, args.steps, args.faults, args.seed)
    return
  with tempfile.TemporaryDirectory() as folder:
    soak(pathlib.Path(folder), args.steps, args.faults, args.seed)


if __name__ == '__main__':
  main()
