"""Follow a run, and send what it writes to a tracker of experiments."""

import logging
import os
import time

from t5x_lite import checks
from t5x_lite import trackers
from t5x_lite.apps.common import run_files
from t5x_lite.errors import DataError, T5xLiteError
from t5x_lite.storage import files
from t5x_lite.trackers import threads
from t5x_lite.trainer import summaries

_logger = logging.getLogger(__name__)


def track(
  run: str | os.PathLike[str],
  tracker: trackers.Tracker,
  *,
  state_dir: str | os.PathLike[str] | None = None,
  once: bool = False,
) -> str:
  """Send the results of a run to a tracker, until the run ends.

  The position is kept: the same call continues behind what the tracker has. The first error of the tracker ends the
  call; later ones are logged once, and the call tries again.

  Args:
    run: model directory; the run may be training.
    tracker: the tracker, such as `trackers.Wandb()`.
    state_dir: folder of the position; None for `RUN/trackers`.
    once: end when everything so far is sent.

  Returns:
    A sentence about what was sent.

  Raises:
    ConfigError: the position is that of another run, or cannot be written.
    DataError: the directory does not exist, is deleted or gets another run meanwhile or, with `once`, has no metrics.
    DirectoryInUseError: another process sends the run to the tracker.
    T5xLiteError: the tracker has failed.
  """
  checks.check(
    'track',
    {'tracker': tracker},
    tracker=checks.instance(trackers.Tracker, 'a trackers.Tracker', 'In gin: @trackers.Wandb().'),
  )
  root = files.path(run)
  if not files.is_remote(root) and not root.is_dir() or once and not summaries.metrics_files(root):
    raise DataError(summaries.no_metrics_message(run))
  follower = trackers.Follower(root, tracker, state_dir)
  with follower.alone():
    status = _follow(follower, tracker, once=once)
  lines = map(run_files.last_line, summaries.metrics_files(root).values())
  newest = max((line.step for line in lines if line is not None), default=-1)
  text = f'Sent {follower.num_sent:,} steps of {os.fspath(run)} to {tracker.name}, '
  text += f'which has the run up to step {max(0, follower.step):,}; the run is {status.status}.'
  if follower.step < newest and not tracker.can_overwrite:
    text += (
      f' Later steps, up to {newest:,}, are sent when the run has saved a checkpoint after them.'
    )
  return text


def _follow(
  follower: trackers.Follower, tracker: trackers.Tracker, *, once: bool
) -> run_files.RunStatus:
  """Send until the run ends or, with `once`, once; return the status of the run then."""
  num_errors = 0
  has_sent = False
  has_warned = False
  while True:
    try:
      status = follower.send()
      num_errors = 0
      has_sent = True
      if status.has_ended or once:
        follower.finish(status.status)
        return status
    except Exception as error:  # of the tracker, which may raise anything
      message = f'The tracker {tracker.name} has failed ({type(error).__name__}: {error}).'
      if once or not has_sent or isinstance(error, DataError):
        if isinstance(error, T5xLiteError):
          raise
        raise T5xLiteError(f'{message} Rerun the command when the cause is removed.') from error
      num_errors += 1
      if not has_warned:
        has_warned = True
        _logger.warning('%s It is tried again, without further warnings.', message)
    time.sleep(threads.delay(num_errors))
