"""A long run under random kills, signals and injected errors, compared bitwise with the same run undisturbed.

    python -m tests.soak [--steps 2000] [--faults 30] [--seed N] [--folder FOLDER] [--kinds TEXT ...]

Prints each fault with what became of it, and ends with status 0 if state, position in the data, metrics and predictions
are equal. A run that is too short for all faults is followed by another one. The seed chooses kinds and times of the
faults; the progress of a run before a signal also depends on the clock. For the run without faults, the memory, files
and threads of its process are printed too.
"""

import argparse
from collections.abc import Sequence
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

_ROOT = pathlib.Path(__file__).parent.parent
_SIGNALS = {
  'SIGKILL': signal.SIGKILL,
  'SIGTERM': signal.SIGTERM,
  'SIGINT': signal.SIGINT,
  'SIGHUP': signal.SIGHUP,
}
_DEAD_READER = 'readers of stdout and stderr end, then SIGTERM'
_SILENT_READER = 'nobody reads stdout and stderr, then SIGTERM'
_RENAMED = 'run directory is renamed for 0.3 s, then SIGTERM'
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
  'full disk for some steps, then SIGTERM': (75, 74, 0),
  'full disk to the end': (74,),
  _DEAD_READER: (75, 0),
  _SILENT_READER: (75, 0),
  # 74: three saves or the last one happened in the meantime; -15: SIGTERM came while the process ended because of them.
  _RENAMED: (75, 74, 0, -15),
}


@dataclasses.dataclass(frozen=True)
class Plan:
  """Periods of a run, in steps, and the moments of its faults.

  Attributes:
    steps: number of steps.
  """

  steps: int

  @property
  def saving_period(self) -> int:
    """Steps between two checkpoints."""
    return max(1, min(50, self.steps // 12))

  @property
  def stats_period(self) -> int:
    """Steps between two summaries, by which a fault knows the progress of the run."""
    return max(1, self.saving_period // 5)

  @property
  def last(self) -> int:
    """Last step at which a fault may begin: most of them must end before the run."""
    return max(1, self.steps - 3 * self.saving_period)

  def num_faults(self, num_faults: int) -> int:
    """Return how many of some faults one run takes if each has a period of its own."""
    return max(1, min(num_faults, self.last // self.saving_period))

  def moment(self, fault: str, newest: int, share: float, rng: random.Random) -> int | None:
    """Return the step of a fault, which is random; None if the run is too far, so that another run must take it.

    Args:
      fault: kind of the fault.
      newest: newest checkpoint, 0 for a new run.
      share: part of the steps before the fault; steps lost by an earlier one are trained again.
      rng: generator.
    """
    if newest >= self.last and newest:
      return None
    at = max(newest + 1, int(share * self.steps)) + rng.randrange(2 * self.stats_period)
    if fault.startswith('full disk'):  # begins with a summary
      at += -at % self.stats_period
    return min(at, self.last)


def _child(model_dir: str, steps: int, fault: str, at: int, resources: str) -> None:
  """Runs the toy model; `fault` happens in this process when the data or the summaries reach `at`.

  Args:
    model_dir: the run directory.
    steps: number of steps.
    fault: kind of fault; empty for none.
    at: number of the batch or step.
    resources: file that gets the resources of the process; empty for none.
  """
  from t5x_lite import data
  from t5x_lite.errors import T5xLiteError
  from t5x_lite.trainer.actions import BaseAction
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

  plan = Plan(steps)

  class Summary(BaseAction):
    """Lets no file grow past some bytes, writes output, or records resources, at each summary."""

    def run(self, train_state, metrics_by_task):
      step = int(train_state.step)
      if fault.startswith('full disk'):
        is_full = step >= at and (fault.endswith('end') or step < at + plan.saving_period + 10)
        limit = resource.RLIM_INFINITY
        if is_full:
          limit = 1000
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
      if fault in (_DEAD_READER, _SILENT_READER):
        for stream in (sys.stdout, sys.stderr):
          print('x' * 4096, file=stream, flush=True)
      if resources:
        with open(resources, 'a', encoding='utf-8') as file:
          file.write(json.dumps({'step': step, **_resources()}) + '\n')

  try:
    toy_run.train(
      model_dir,
      steps,
      save={'period': plan.saving_period, 'keep': 3, 'max_failures_in_a_row': 3},
      stats_period=plan.stats_period,
      eval_period=min(500, max(1, steps // 2)),
      actions={'TRAIN': [Summary()]},
      get_dataset_fn=FaultyData,
    )
  except T5xLiteError as error:
    sys.exit(int(error.exit_code))


def _resources() -> dict[str, int]:
  """Returns the resources of this process."""
  pages = int(pathlib.Path('/proc/self/statm').read_text(encoding='utf-8').split()[1])
  return {
    'MiB of memory': pages * resource.getpagesize() // 2**20,
    'open files': len(os.listdir('/proc/self/fd')),
    'threads': len(os.listdir('/proc/self/task')),
    'temporary files': sum(len(names) for _, _, names in os.walk(os.environ['TMPDIR'])),
  }


class _Process(contextlib.AbstractContextManager):
  """A process of the run, whose output goes to a log file or, for some faults, to a pipe. A context that ends it."""

  def __init__(
    self,
    folder: pathlib.Path,
    model_dir: pathlib.Path,
    steps: int,
    fault: str = '',
    at: int = -1,
    resources: str = '',
  ):
    self._model_dir = model_dir
    self._reader: int | None = None
    temporary = folder / 'tmp'
    temporary.mkdir(exist_ok=True)
    environment = {
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
      'PYTHONPATH': str(_ROOT),
      'TMPDIR': str(temporary),
      'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    self._num_starts = self._count_starts()
    with contextlib.ExitStack() as stack:
      if fault in (_DEAD_READER, _SILENT_READER):
        self._reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, resource.getpagesize())
        stack.callback(os.close, writer)
        output: Any = writer
      else:
        output = stack.enter_context(open(folder / 'log', 'a', encoding='utf-8'))
      arguments = json.dumps([str(model_dir), steps, fault, at, resources])
      self._process = subprocess.Popen(
        [sys.executable, '-m', 'tests.soak', '--child', arguments],
        cwd=_ROOT,
        env=environment,
        stdout=output,
        stderr=output,
      )

  def _count_starts(self) -> int:
    try:
      events = (self._model_dir / 'events.jsonl').read_text(errors='replace')
    except OSError:  # not yet there
      return 0
    return events.count('"event": "compiled"')

  @property
  def runs(self) -> bool:
    return self._process.poll() is None

  def wait_until_compiled(self) -> None:
    """By then the process has cut the summaries of an earlier one that went further, and takes signals."""
    while self.runs and self._count_starts() == self._num_starts:
      time.sleep(0.01)

  def wait_for(self, step: int) -> None:
    """Waits for the summary of a step or of a later one."""
    while self.runs and _newest_row(self._model_dir) < step:
      time.sleep(0.01)

  def send(self, number: signal.Signals) -> None:
    if self.runs:
      self._process.send_signal(number)

  def end_reader(self) -> None:
    if self._reader is not None:
      os.close(self._reader)
    self._reader = None

  def end(self, timeout: float = 1800) -> int:
    """Waits for the end; returns the exit status."""
    status = self._process.wait(timeout=timeout)
    self.end_reader()
    return status

  def __exit__(self, *exc_info) -> None:
    self.end_reader()
    self._process.kill()
    self._process.wait()


def _newest_row(model_dir: pathlib.Path) -> int:
  from t5x_lite.trainer import summaries

  path = model_dir / 'train/metrics.jsonl'
  with contextlib.suppress(OSError):  # not yet there, or away
    return max((row['step'] for row in summaries.read_metrics(path)), default=0)
  return 0


def _disturb(
  folder: pathlib.Path, model_dir: pathlib.Path, plan: Plan, fault: str, at: int, rng: random.Random
) -> int:
  """Starts the run, has the fault happen around step `at`, and returns the exit status."""
  from t5x_lite import checkpoints

  sent = fault.partition(' after ')[2] or fault.partition(', then ')[2] or fault
  with _Process(folder, model_dir, plan.steps, fault, at) as process:
    process.wait_until_compiled()
    if sent in _SIGNALS and not fault.startswith('stalled'):
      process.wait_for(at)
      if fault.startswith('full disk'):
        process.wait_for(at + 2 * plan.saving_period)
      time.sleep(rng.uniform(0, 0.1))
      if fault.startswith('stop and continue'):
        process.send(signal.SIGSTOP)
        time.sleep(2)
        process.send(signal.SIGCONT)
      if fault == _RENAMED:
        away = model_dir.with_name('away')
        model_dir.rename(away)
        time.sleep(0.3)
        away.rename(model_dir)
        process.wait_for(at + plan.saving_period)
      if fault == _DEAD_READER:
        process.end_reader()
        process.wait_for(at + plan.saving_period)
      process.send(_SIGNALS[sent])
    elif fault == 'error of the data, retried':
      process.wait_for(at + 2 * plan.stats_period)
      process.send(signal.SIGTERM)
    status = process.end(timeout=600)
  if fault.startswith('damaged') and len(saved := checkpoints.all_steps(model_dir)) > 1:
    victims = [
      path for path in (model_dir / f'checkpoint_{saved[-1]}').rglob('*') if path.is_file()
    ]
    victim = rng.choice([path for path in victims if path.stat().st_size])
    content = bytearray(victim.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    victim.write_bytes(content)
  return status


def _log_of(folder: pathlib.Path) -> str:
  return (folder / 'log').read_text()[-3000:]


def _disturbed_run(
  folder: pathlib.Path, model_dir: pathlib.Path, plan: Plan, faults: list[str], rng: random.Random
) -> int:
  """Trains a run under the first of some faults, as many as it has steps for, and removes them from the list.

  Returns:
    How many of them have ended a process.
  """
  from t5x_lite import checkpoints

  num_effective = 0
  num_faults = plan.num_faults(len(faults))
  for number in range(1, num_faults + 1):
    newest = max(checkpoints.all_steps(model_dir), default=0)
    at = plan.moment(faults[0], newest, number / (num_faults + 1), rng)
    if at is None:
      break
    fault = faults.pop(0)
    status = _disturb(folder, model_dir, plan, fault, at, rng)
    newest = checkpoints.newest_sound_step(model_dir)
    print(f'{fault:<50} at {at:5}  status {status:3}  newest sound checkpoint {newest}', flush=True)
    assert status in _STATUSES[fault], (fault, status, _log_of(folder))
    num_effective += status != 0
  with _Process(folder, model_dir, plan.steps) as process:
    assert process.end() == 0, _log_of(folder)
  return num_effective


def soak(
  folder: pathlib.Path, steps: int, num_faults: int, seed: int, kinds: Sequence[str] = ()
) -> None:
  """Runs all runs in `folder`; raises AssertionError where they differ or a process ends as it should not.

  Args:
    folder: empty folder.
    steps: number of steps of each run.
    num_faults: number of faults in all.
    seed: seed of their kinds and moments.
    kinds: texts, one of which each fault contains; empty for all kinds.
  """
  from tests.apps.train import toy_run

  rng = random.Random(seed)
  plan = Plan(steps)
  whole = folder / 'whole'
  resources = folder / 'resources'
  started = time.monotonic()
  with _Process(folder, whole, steps, resources=str(resources)) as process:
    assert process.end() == 0, _log_of(folder)
  print(f'{steps} steps undisturbed: {time.monotonic() - started:.0f} s', flush=True)
  rows = [json.loads(line) for line in resources.read_text().splitlines()]
  for row in rows[len(rows) // 4], rows[len(rows) // 2], rows[-1]:
    print('  ' + ', '.join(f'{name} {value}' for name, value in row.items()), flush=True)
  chosen = [fault for fault in _STATUSES if not kinds or any(kind in fault for kind in kinds)]
  rng.shuffle(chosen)
  faults = list(itertools.islice(itertools.cycle(chosen), num_faults))
  rng.shuffle(faults)
  num_effective = 0
  num_runs = 0
  while faults:
    num_runs += 1
    disturbed = folder / f'disturbed-{num_runs}'
    num_effective += _disturbed_run(folder, disturbed, plan, faults, rng)
    toy_run.assert_same_run(whole, disturbed, steps, b_was_stopped=True)
    leftovers = [
      path.name for path in disturbed.iterdir() if '.tmp-' in path.name or '.deleted-' in path.name
    ]
    assert not leftovers, leftovers
    print(f'Disturbed run {num_runs} equals the undisturbed one bitwise.', flush=True)
  print(
    f'{num_effective} of {num_faults} faults ended a process; {time.monotonic() - started:.0f} s in all.'
  )


def _positive(text: str) -> int:
  """Returns the number that an argument of a command line is, an integer of at least 1."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'got {text!r}; expected an integer of at least 1')
  return int(text)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=_positive, default=2000)
  parser.add_argument('--faults', type=_positive, default=30)
  parser.add_argument('--seed', type=int, default=random.SystemRandom().randrange(2**31))
  parser.add_argument(
    '--folder', type=pathlib.Path, help='keep the runs here; it must be empty or new'
  )
  parser.add_argument(
    '--kinds', nargs='+', default=(), help='only faults whose name contains one of these texts'
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
    soak(args.folder, args.steps, args.faults, args.seed, args.kinds)
    return
  with tempfile.TemporaryDirectory() as folder:
    soak(pathlib.Path(folder), args.steps, args.faults, args.seed, args.kinds)


if __name__ == '__main__':
  main()
