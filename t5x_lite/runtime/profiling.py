"""Profiles of chosen steps, for TensorBoard's profiler and Perfetto."""

from collections.abc import Callable, Sequence
import dataclasses
import logging
import os
import pathlib
import tempfile

import jax

from t5x_lite import checks
from t5x_lite.storage import files

_STEPS = checks.Expectation(
  '(first, last), such as (100, 105) for five steps, a ProfileConfig or None',
  lambda steps: (
    steps is None
    or isinstance(steps, ProfileConfig)
    or (
      isinstance(steps, (list, tuple))
      and len(steps) == 2
      and all(isinstance(s, int) for s in steps)
      and 0 <= steps[0] < steps[1]
    )
  ),
)
_NUMBERS = checks.Expectation(
  'a list of integers >= 0',
  lambda numbers: (
    isinstance(numbers, (list, tuple))
    and len(numbers) > 0
    and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
  ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
  """Profiles of a few steps each, at several points of a run.

  Attributes:
    start_steps: numbers of completed steps after which a profile starts. A start within the steps of the previous
      profile is skipped, with a warning.
    num_steps: number of steps per profile.
    processes: indices of the processes that write a profile; None for all.
    host_tracer_level: level of detail of the host: 0 for nothing, 1 for annotations such as those of steps, 2 adds
      expensive operations of XLA, 3 all operations.
    python_tracer_level: 1 records all calls of Python functions, which makes steps slower and files larger; 0 none.

  Raises:
    ConfigError: an option is out of range.
  """

  start_steps: Sequence[int]
  num_steps: int = 3
  processes: Sequence[int] | None = None
  host_tracer_level: int = 2
  python_tracer_level: int = 0

  def __post_init__(self):
    checks.check(
      'ProfileConfig',
      vars(self),
      start_steps=_NUMBERS,
      num_steps=checks.number(at_least=1, integer=True),
      processes=_NUMBERS.or_none(),
      host_tracer_level=checks.one_of((0, 1, 2, 3)),
      python_tracer_level=checks.one_of((0, 1)),
    )


class StepProfiler:
  """Profiles the chosen steps of a run; the loop pauses before and after them."""

  def __init__(self, steps: Sequence[int] | ProfileConfig | None, folder: str):
    """Configure the profiler.

    Args:
      steps: a configuration, or (first, last) for one profile of the steps after `first` up to `last` by all processes;
        None profiles nothing.
      folder: folder of the profiles: the one that starts after step 100 is in its `plugins/profile/step_100`.

    Raises:
      ConfigError: `steps` is neither.
    """
    checks.check('train', {'profile_steps': steps}, profile_steps=_STEPS)
    if steps is not None and not isinstance(steps, ProfileConfig):
      first, last = steps
      steps = ProfileConfig(start_steps=[first], num_steps=last - first)
    self._cfg = steps
    self._folder = folder
    # Of the running profile, if `folder` is in a store.
    self._local: tempfile.TemporaryDirectory | None = None
    self._starts: list[int] = []
    self._skipped: list[int] = []
    if steps is not None:
      for start in sorted(set(steps.start_steps)):
        if self._starts and start < self._starts[-1] + steps.num_steps:
          self._skipped.append(start)
        else:
          self._starts.append(start)
    self._start: int | None = None  # of the running profile

  def check(self, start_step: int, last_step: float) -> None:
    """Check the steps and processes against those of the run; warn of starts that are skipped.

    Args:
      start_step: step at which the run first started.
      last_step: last step of the run; `math.inf` if it is unknown.

    Raises:
      ConfigError: the run does not contain the steps of a profile, or has no such process.
    """
    if self._cfg is None:
      return
    for start in self._starts:
      end = start + self._cfg.num_steps
      if not start_step <= start < end <= last_step:
        raise checks.invalid(
          'train',
          'profile_steps',
          f'within the steps of the run, {start_step} to {last_step}',
          (start, end),
          'Choose other steps, or raise TRAIN_STEPS.',
        )
    if self._cfg.processes is not None:
      checks.check(
        'ProfileConfig',
        vars(self._cfg),
        processes=checks.Expectation(
          f'indices of processes of the run, below {jax.process_count()}',
          lambda processes: max(processes) < jax.process_count(),
        ),
      )
    if self._skipped:
      logging.getLogger(__name__).warning(
        'No profile starts after step %s: each must start at least %d steps after the previous one '
        '(`ProfileConfig.num_steps`).',
        ', '.join(f'{step:,}' for step in self._skipped),
        self._cfg.num_steps,
      )

  @property
  def pause_steps(self) -> tuple[int, ...]:
    """Steps at which the loop must pause."""
    if self._cfg is None:
      return ()
    steps = []
    for start in self._starts:
      steps += [start, start + self._cfg.num_steps]
    return tuple(steps)

  def before(self, step: int, wait_fn: Callable[[], None]) -> None:
    """Start a profile if one starts after `step`; call this before the next step is dispatched.

    Args:
      step: number of dispatched steps.
      wait_fn: waits for these steps, so that they are not in the profile.
    """
    if self._cfg is None or step not in self._starts or self._start is not None:
      return
    if self._cfg.processes is not None and jax.process_index() not in self._cfg.processes:
      return
    wait_fn()
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = self._cfg.host_tracer_level
    options.python_tracer_level = self._cfg.python_tracer_level
    # The default is the current second, in which another profile or process may start.
    options.session_id = f'step_{step}'
    try:
      folder = self._folder
      if files.is_remote(folder):
        self._local = tempfile.TemporaryDirectory(prefix='t5x_lite-profile-')
        folder = self._local.name
      jax.profiler.start_trace(folder, profiler_options=options)
    except (OSError, RuntimeError) as error:  # e.g. another profile is running
      _warn('started', step, error)
      if self._local is not None:
        self._local.cleanup()
        self._local = None
      return
    self._start = step
    logging.getLogger(__name__).info(
      'Profiling the steps %s to %s.', f'{step + 1:,}', f'{step + self._cfg.num_steps:,}'
    )

  def after(self, step: int, wait_fn: Callable[[], None]) -> None:
    """End the profile if it ends at `step`, which was dispatched, after `wait_fn` has waited for it."""
    if self._cfg is None or self._start is None:
      return
    if step >= self._start + self._cfg.num_steps:
      wait_fn()
      self.close()

  def close(self) -> None:
    """End a running profile and write it."""
    if self._start is not None:
      start = self._start
      self._start = None
      try:
        jax.profiler.stop_trace()
        self._upload()
      except (OSError, RuntimeError) as error:  # e.g. the disk is full
        _warn('written', start, error)
        return
      path = os.path.join(self._folder, 'plugins', 'profile', f'step_{start}')
      logging.getLogger(__name__).info(
        'The profile is in %s. Open it with `tensorboard --logdir=%s`, or a file *.trace.json.gz in Perfetto.',
        path,
        self._folder,
      )

  def _upload(self) -> None:
    if self._local is None:
      return
    with self._local as name:
      self._local = None
      local = pathlib.Path(name)
      target = files.path(self._folder)
      for path in local.rglob('*'):
        if path.is_file():
          files.write(target / path.relative_to(local).as_posix(), path.read_bytes())


def _warn(what: str, step: int, error: Exception) -> None:
  logging.getLogger(__name__).warning(
    'The profile that starts after step %s was not %s (%s: %s). Training continues.',
    f'{step:,}',
    what,
    type(error).__name__,
    error,
  )
