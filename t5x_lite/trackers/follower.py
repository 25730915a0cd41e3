"""Follower of a run: reads its files and sends what is new to a tracker, each step once.

The position, a step, is in `RUN/trackers/<name>.json`: everything up to it is final and the tracker has it. It is
written after the tracker has a batch, so a follower that is killed in between sends at most this batch again, with the
same values.

A run that resumes or rolls back writes the lines after its checkpoint again, with other values if anything is not
deterministic. A tracker that cannot overwrite gets the lines of a step when they are final: when a checkpoint has the
step and a later step was finite (`run_files.final_step`), or the run has ended.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import heapq
import itertools
import json
import logging
import math
import os
import pathlib
from typing import Any
import uuid

from t5x_lite.apps.common import run_files
from t5x_lite.errors import ConfigError, DataError, DirectoryInUseError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted
from t5x_lite.trackers.base import NAME
from t5x_lite.trackers.base import RunInfo
from t5x_lite.trackers.base import Tracker
from t5x_lite.trackers.base import check_name
from t5x_lite.trainer import summaries

_logger = logging.getLogger(__name__)

FOLDER = 'trackers'
_VERSION = 1
# Lines after which the position is written.
_BATCH_LINES = 10_000
_MAX_TABLE_ROWS = 100
_TABLES_OF = 'inference_eval/'


@dataclasses.dataclass
class _Position:
  """Contents of the file of the position.

  Attributes:
    run_id: see `RunInfo`.
    run: `RunStatus.identity` of the run.
    step: everything up to it is final and sent; -1 for nothing.
  """

  run_id: str
  run: float | None
  step: int


class _Writer:
  """Lines of a writer in their order; the first line after a limit waits for the next call."""

  def __init__(self, name: str, path: files.Path):
    self._name = name
    self._reader = run_files.MetricsReader(path)
    self.rewind()

  def rewind(self) -> None:
    """Read from the beginning at the next call."""
    self._reader.lines.rewind()
    self._waiting: list[summaries.MetricsLine] = []
    self._newest = -1

  def check(self) -> bool:
    """Return whether lines that were read before have changed; then all are read again."""
    if not self._reader.lines.check():
      return False
    self.rewind()
    return True

  def lines(
    self, limit: float, *, is_final: bool
  ) -> Iterator[tuple[int, str, summaries.MetricsLine]]:
    """Yield (step, name of the writer, line) of each new line with a step up to `limit`."""
    new = itertools.chain(self._waiting, self._reader.read(is_final=is_final))
    self._waiting = []
    for line in new:
      if line.step > limit:
        self._waiting = [line]
        return
      if line.step < self._newest:
        _logger.warning(
          '%s is skipped: a line of step %d follows one of step %d.',
          self._reader.lines.path,
          line.step,
          self._newest,
        )
        continue
      self._newest = line.step
      yield line.step, self._name, line


class Follower:
  """Follows a run for a tracker; each call of `send` sends what is due.

  Attributes:
    num_sent: number of steps that this object has sent.
    step: step up to which the tracker has everything, -1 for nothing.
  """

  def __init__(
    self,
    run: str | os.PathLike[str],
    tracker: Tracker,
    state_dir: str | os.PathLike[str] | None = None,
  ):
    """Read the position; the tracker is started by the first `send`.

    Args:
      run: run directory.
      tracker: the tracker.
      state_dir: folder of the position; None for `RUN/trackers`.

    Raises:
      ConfigError: the name of the tracker is invalid, or the position is that of another run or invalid.
      OSError: the position cannot be read.
    """
    check_name(tracker)
    self._run = files.path(run)
    self._tracker = tracker
    if state_dir is None:
      state_dir = self._run / FOLDER
    self._folder = files.path(state_dir)
    self._path = self._folder / f'{tracker.name}.json'
    self._status = run_files.StatusReader(run)
    self._writers: dict[str, _Writer] = {}
    self._position = self._read_position()
    self._run_info: RunInfo | None = None
    self._knows_all = False
    self.num_sent = 0

  @property
  def step(self) -> int:
    """See the class."""
    return self._position.step

  @contextlib.contextmanager
  def alone(self) -> Iterator[None]:
    """Keep other followers that send this run to this tracker away, and read the position that the last one has left.

    The lock is on `<name>.lock` in the folder of the position. Object stores and file systems without locks give no
    protection.

    Raises:
      ConfigError: the folder cannot be written, or see `__init__`.
      DirectoryInUseError: another follower has the lock.
    """
    with contextlib.ExitStack() as stack:
      if not files.is_remote(self._folder):
        self._lock(stack)
      self._position = self._read_position()
      yield

  def _lock(self, stack: contextlib.ExitStack) -> None:
    path = self._path.with_suffix('.lock')
    with self._writes(path):
      self._folder.mkdir(parents=True, exist_ok=True)
      descriptor = files.open_regular(path, os.O_RDWR | os.O_CREAT, 0o644)
    stack.callback(os.close, descriptor)
    try:
      files.flock(descriptor)
    except BlockingIOError:
      raise DirectoryInUseError(
        f'Only one process at a time may send {os.fspath(self._run)!r} to {self._tracker.name}, and another one does: '
        f'{str(path)!r} is locked. Wait until it ends, or stop it.'
      ) from None
    except OSError:  # a file system without locks
      pass

  def send(self) -> run_files.RunStatus:
    """Send everything that is due.

    Returns:
      Status of the run; if it has ended, everything that is due at its end is sent.

    Raises:
      Exception: what the tracker raises; the next call begins again behind the newest step that it has.
      DataError: the directory was deleted, or another run began there.
      OSError: a file cannot be read or written.
    """
    try:
      status = None
      while status is None:
        status = self._send()
      return status
    except BaseException:
      self._run_info = None  # starts the tracker and reads the files again
      raise

  def finish(self, status: run_files.Status) -> None:
    """End the connection of the tracker, if it was started; it may raise anything."""
    if self._run_info is not None:
      self._tracker.finish(status)
      self._run_info = None

  def _send(self) -> run_files.RunStatus | None:
    """See `send`; return None if the run has begun to write lines again meanwhile."""
    # Before the lines are read: those up to the limit are then complete.
    status = self._status.read()
    if self._is_other(status):
      raise DataError(
        f'{os.fspath(self._run)!r} must stay the directory of one run while it is followed, and was deleted, or '
        'another run began there. What was sent is kept. Check the path.'
      )
    final_step = self._final_step(status)
    limit = self._limit(status, final_step)
    self._start(knows_all=final_step >= 0)
    for name, path in summaries.metrics_files(self._run).items():
      if name not in self._writers:
        self._writers[name] = _Writer(name, path)
    # All writers, so not `any`, which ends at the first.
    if sum(writer.check() for writer in self._writers.values()) and self._tracker.can_overwrite:
      self._rewind()
      self._tracker.discard_after(self.step)
    writers = self._writers.values()
    lines = heapq.merge(
      *(writer.lines(limit, is_final=status.has_ended) for writer in writers),
      key=lambda found: found[0],
    )
    num_lines = 0
    last = self.step
    for step, group in itertools.groupby(lines, key=lambda found: found[0]):
      if step <= self.step:
        continue
      if num_lines >= _BATCH_LINES:
        self._commit(last, final_step)
        num_lines = 0
      if not num_lines and not self._are_final(status, limit):
        self._rewind()
        return None
      num_lines += self._send_step(step, list(group))
      last = step
    if num_lines:
      self._commit(last, final_step)
    return status

  def _is_other(self, status: run_files.RunStatus) -> bool:
    """Return whether the directory is gone or that of another run; deleted events alone tell nothing."""
    if self._position.run is None:
      return False
    if status.identity is None:
      return not files.is_remote(self._run) and not self._run.is_dir()
    return status.identity != self._position.run

  def _start(self, *, knows_all: bool) -> None:
    """Start the tracker if it is not started, or if more facts about the run are known than before.

    Args:
      knows_all: whether all facts are known.
    """
    if self._run_info is not None and (not knows_all or self._knows_all):
      return
    if self._position.step < 0:  # otherwise it was written before
      self._write_position()
    run_info = RunInfo(
      name=pathlib.PurePath(os.path.abspath(self._run)).name,
      run_id=self._position.run_id,
      folder=None if files.is_remote(self._folder) else pathlib.Path(self._folder).absolute(),
      configuration=run_files.configuration(self._run),
      facts=run_files.facts(self._run),
    )
    self._tracker.start(run_info)
    self._knows_all = knows_all
    if self._run_info is None:
      if self._tracker.can_overwrite:
        self._tracker.discard_after(self.step)
      else:
        last_step = self._tracker.last_step()
        if last_step is not None:
          self._position.step = last_step
      self._rewind()
    self._run_info = run_info

  def _rewind(self) -> None:
    """Read all files from their beginning at the next call; `_send` leaves out what was sent."""
    for writer in self._writers.values():
      writer.rewind()

  def _final_step(self, status: run_files.RunStatus) -> float:
    """Return the step up to which no restart writes the lines of the run again; -1 for none."""
    if status.status == 'finished':
      return math.inf
    return run_files.final_step(self._run, has_ended=status.has_ended)

  def _limit(self, status: run_files.RunStatus, final_step: float) -> float:
    """Return the step up to which lines are sent; a run that has failed may never be started again."""
    if self._tracker.can_overwrite or status.status == 'failed':
      return math.inf
    return final_step

  def _are_final(self, status: run_files.RunStatus, limit: float) -> bool:
    """Return whether lines up to a limit that was known before they were read are still sent now."""
    now = self._status.read()
    return now.num_starts == status.num_starts and self._limit(now, self._final_step(now)) >= limit

  def _send_step(self, step: int, group: list[tuple[int, str, summaries.MetricsLine]]) -> int:
    """Send the lines of a step, and return their number."""
    values = {}
    for _, writer, line in group:
      values |= {_text(f'{writer}/{name}'): number for name, number in line.numbers.items()}
    if values:
      wall_time = max(line.wall_time or 0.0 for _, _, line in group)
      self._tracker.log(step, values, wall_time)
    for writer in dict.fromkeys(writer for _, writer, _ in group):
      if writer.startswith(_TABLES_OF):
        rows = run_files.predictions(self._run, writer, step, _MAX_TABLE_ROWS)
        if rows:
          self._tracker.table(step, _text(writer), _table(rows))
    self.num_sent += 1
    return len(group)

  def _commit(self, last: int, final_step: float) -> None:
    """Write the position after the step `last`, when the tracker has everything up to it."""
    self._tracker.flush()
    step: float = last
    if self._tracker.can_overwrite:
      step = min(last, final_step)
    self._position.step = int(max(self.step, step))
    self._write_position()

  # ---- Position ------------------------------------------------------------------------------------------------------

  def _read_position(self) -> _Position:
    identity = self._status.read().identity
    try:
      content = untrusted.read_regular(self._path)
    except (FileNotFoundError, NotADirectoryError):
      return _Position(run_id=uuid.uuid4().hex[:16], run=identity, step=-1)
    remedy = 'Delete it to send the run again, as a new one.'
    row = untrusted.parse_object(content, str(self._path), remedy)
    position = _Position(row.get('run_id', ''), row.get('run'), row.get('step', -1))
    if (
      row.get('version') != _VERSION
      or not isinstance(position.run_id, str)
      or not NAME.fullmatch(position.run_id)
      or type(position.step) is not int
    ):
      raise ConfigError(
        f'{self._path} must be a position of version {_VERSION}, got {untrusted.shorten(row)}. {remedy}'
      )
    if position.run is None:
      position.run = identity
    if identity is not None and position.run != identity:
      raise ConfigError(
        f'{self._path} must be the position in {str(self._run)!r}, got that in another run. {remedy}'
      )
    return position

  def _write_position(self) -> None:
    if self._position.run is None:
      self._position.run = self._status.read().identity
    row = {'version': _VERSION, **dataclasses.asdict(self._position)}
    with self._writes(self._path):
      self._folder.mkdir(parents=True, exist_ok=True)
      files.write(self._path, json.dumps(row))

  @contextlib.contextmanager
  def _writes(self, path: files.Path) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      raise ConfigError(
        f'The position in the run must be written to {str(path)!r}: {error}. Pass another folder, e.g. '
        '--state_dir=tracked.'
      ) from error


def _table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Return rows with equal keys, whose columns have numbers alone or texts alone, as tables of wandb must."""
  columns = {}
  for column in dict.fromkeys(key for row in rows for key in row):
    values = [row.get(column) for row in rows]
    if not all(type(value) in (int, float) for value in values):
      values = list(map(_text, values))
    columns[_text(column)] = values
  return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _text(value: Any) -> str:
  """Return a value of JSON as text, with '?' instead of halves of surrogate pairs, which UTF-8 does not have."""
  if value is None:
    return ''
  text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
  return text.encode('utf-8', errors='replace').decode('utf-8')
