"""Files of the metrics of a run: each writer has a folder with TensorBoard events and a `metrics.jsonl`.

The folders are `MODEL_DIR/train/`, `MODEL_DIR/training_eval/<task>/` and `MODEL_DIR/inference_eval/<task>/`. A line of
`metrics.jsonl` is one write: `{"step": 100, "wall_time": 1700000000.123, "<metric>": value, ...}`. Numbers that JSON
does not support are the strings "NaN", "Infinity" and "-Infinity". Metrics that are arrays (the load of every expert)
are lists in `metrics.jsonl` and not in the events. Only the lead process writes, in a background thread.

A resumed run first calls `discard_after`, which deletes the lines after the restored step, because the run writes them
again. The files of a resumed run are then the same as those of an uninterrupted run.
"""

from collections.abc import Callable, Collection, Mapping
import concurrent.futures
import contextlib
import functools
import json
import logging
import math
import os
import re
import socket
import struct
import sys
import threading
import time
from typing import Any, NamedTuple, Protocol, TypeGuard

import clu.metrics
import clu.values
import jax
import numpy as np

from t5x_lite import layer_stacks
from t5x_lite import metrics as metrics_lib
from t5x_lite import multihost
from t5x_lite.errors import DataError, call_all
from t5x_lite.storage import files
from t5x_lite.storage import json_lines
from t5x_lite.types import ArrayLike, PyTree

_logger = logging.getLogger(__name__)


@functools.cache
def _tensorboardx() -> tuple[Any, Any, Any]:
  """Return the modules (record_writer, summary, event_pb2), which only runs that write metrics import."""
  # tensorboardX imports PyTorch if it is installed, which takes seconds; no PyTorch tensors are written here.
  hides = 'torch' not in sys.modules
  if hides:
    modules: dict[str, Any] = sys.modules
    modules['torch'] = None  # None makes the import of the module fail
  try:
    from tensorboardX import record_writer
    from tensorboardX import summary
    from tensorboardX.proto import event_pb2
  finally:
    if hides:
      del sys.modules['torch']
  return record_writer, summary, event_pb2


METRICS_FILE = 'metrics.jsonl'
_MAX_STEP = 2**31 - 1
# Prefix of the names of files of predictions, before the step.
PREDICTIONS_PREFIX = 'predictions-'
# Strings for numbers that JSON does not support.
_NOT_IN_JSON = ('NaN', 'Infinity', '-Infinity')
# Folders of a run that contain the folders of writers.
WRITER_FOLDERS = ('train', 'training_eval', 'inference_eval')


class MetricValueMapFuture(Protocol):
  """A mapping of metric name to value that is still being computed."""

  def result(self) -> Mapping[str, clu.values.Value]:
    """Wait for the values and return them, or raise the exception of the computation."""
    ...


class SummaryWriter:
  """Writes scalars and texts to one folder, immediately and in the calling thread; one writer per folder.

  A writer continues at the end of `metrics.jsonl`: TensorBoard is told to ignore the events of later steps, whose lines
  `discard_after` has deleted.

  Only the file format of tensorboardX is used. The `SummaryWriter` of tensorboardX passes events to another thread
  through a queue: a flush does not wait for the queue, and after an error of a full disk the queue blocks forever.
  """

  def __init__(self, folder: str | os.PathLike[str], *, root: str | os.PathLike[str] | None = None):
    """Read the last step of the files in `folder`; the first write creates the folder and opens the files.

    Args:
      folder: folder of the files.
      root: folder at or above it that is not made again if it is deleted later, such as the model directory; None for
        `folder`.
    """
    self._folder = files.path(folder)
    if root is None:
      root = self._folder
    self._lines = files.appended(
      self._folder / METRICS_FILE, root=root, missing_fn=self._missing_line
    )
    # TensorBoard orders files by the seconds in their names; the nanoseconds make the names of runs that start within
    # the same second distinct.
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    name = f'events.out.tfevents.{seconds}.{socket.gethostname()}.{nanoseconds:09d}'
    # TensorBoard reads the parts of a file in a store in the order of their names, as files that each have a version.
    self._events = files.appended(
      self._folder / name,
      header=_event_record(file_version='brain.Event:2'),
      first_fn=self._purge_record,
      root=root,
    )
    self._lock = threading.Lock()

  def _missing_line(self, cause: str, last: bytes | None) -> bytes:
    """Return the line that says which lines are missing: those after a step, None for all, up to a step."""
    path = self._folder / METRICS_FILE
    steps = []
    if path.is_file():
      steps = [row['step'] for _, row in json_lines.read_file(path) if _has_step(row)]
    to_step = None
    if last is not None:
      to_step = json.loads(last).get('step')
    missing = {'after_step': max(steps, default=None), 'to_step': to_step, 'cause': cause}
    return json_lines.to_line({'missing': missing, 'wall_time': round(time.time(), 3)}).encode()

  def _warn_of_loss(self) -> None:
    """Warn once if the files lack what was written; without the lock, since a warning is an event of the run."""
    with self._lock:
      of_lines = self._lines.take_loss()
      if of_lines:
        # Then the events may be lost too, which are written less often: one warning for both.
        self._events.append(b'', at_once=True)
      of_events = self._events.take_loss()
    if not of_lines and not of_events:
      return
    if of_lines:
      name = METRICS_FILE
    else:
      name = 'events.out.tfevents.*'
    _logger.warning(
      '%s %s while the run writes to it. The metrics from now on are written; the line "missing" of %s says which '
      'ones are lost.',
      self._folder / name,
      of_lines or of_events,
      METRICS_FILE,
    )

  def _purge_record(self) -> bytes:
    """Return the event that hides the events of steps after the lines of earlier writers; b'' for the first writer."""
    if not any(self._folder.glob('events.out.tfevents.*')):
      return b''
    last = -1
    for part in self._lines.former_parts():
      for _, row in json_lines.read_file(part):
        if _has_step(row):
          last = max(last, row['step'])
    _, _, event_pb2 = _tensorboardx()
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    return _event_record(step=1 + last, session_log=start)

  def write_scalars(
    self,
    step: int,
    scalars: Mapping[str, ArrayLike],
    *,
    events_only: bool = False,
    arrays: Mapping[str, ArrayLike] | None = None,
    texts: Mapping[str, str] | None = None,
  ) -> None:
    """Append one line, and an event for each number and text; numbers may have any scalar type.

    Args:
      step: training step of the numbers.
      scalars: metric name to number.
      events_only: do not write to `metrics.jsonl`; for numbers about this process, such as compile time, which would
        make the file of a resumed run differ.
      arrays: metric name to array, only for the line.
      texts: metric name to text, Markdown in the events.
    """
    texts = texts or {}
    scalars = {name: float(np.asarray(value)) for name, value in scalars.items()}
    _, summary, _ = _tensorboardx()
    now = time.time()
    line = {
      'step': int(step),
      'wall_time': round(now, 3),
      **{k: _to_json(v) for k, v in scalars.items()},
      **{k: _to_json(np.asarray(v, np.float64).tolist()) for k, v in (arrays or {}).items()},
      **texts,
    }
    with self._lock:
      if not events_only:
        self._lines.append(
          json_lines.to_line(line, ensure_ascii=True, allow_nan=False).encode(), at_once=True
        )
      for name, value in scalars.items():
        self._write_event(step=int(step), wall_time=now, summary=summary.scalar(name, value))
      for name, text in texts.items():
        self._write_event(step=int(step), wall_time=now, summary=summary.text(name, text))
    self._warn_of_loss()

  def write_text(self, step: int, texts: Mapping[str, str]) -> None:
    """Write texts (Markdown) to the TensorBoard events only."""
    _, summary, _ = _tensorboardx()
    with self._lock:
      for name, text in texts.items():
        self._write_event(step=int(step), summary=summary.text(name, text))

  def write_values(self, step: int, values: Mapping[str, clu.values.Value]) -> None:
    """Write metric values by their type.

    Raises:
      DataError: a value is not a `Scalar`, `Summary` (an array) or `Text`.
    """
    scalars = {}
    arrays = {}
    texts = {}
    for name, value in values.items():
      if isinstance(value, clu.values.Scalar):
        scalars[name] = value.value
      elif isinstance(value, clu.values.Summary):
        arrays[name] = value.value
      elif isinstance(value, clu.values.Text):
        texts[name] = value.value
      else:
        raise DataError(
          f'Metric {name!r} must be a clu.values.Scalar, Summary or Text, got a {type(value).__name__}. '
          'Return one of these types from the metric.'
        )
    if values:
      self.write_scalars(step, scalars, arrays=arrays, texts=texts)

  def flush(self) -> None:
    """Return when everything written so far is on disk and survives a crash of the machine.

    Raises:
      OSError: the disk is full, for instance; nothing is lost, and the next flush tries again.
    """
    try:
      with self._lock:
        self._lines.flush()
        self._events.flush()
    finally:
      self._warn_of_loss()

  def close(self) -> None:
    """Flush and close the files; the writer cannot be used afterwards."""
    try:
      with self._lock:
        try:
          self._events.close()
        finally:
          self._lines.close()
    finally:
      self._warn_of_loss()

  def _write_event(self, **fields: Any) -> None:
    self._events.append(_event_record(**fields), at_once=False)


def _event_record(*, wall_time: float | None = None, **fields: Any) -> bytes:
  """Return an event in TensorFlow's record format: length and contents, each with its masked CRC-32C."""
  record_writer, _, event_pb2 = _tensorboardx()
  event = event_pb2.Event(wall_time=time.time() if wall_time is None else wall_time, **fields)
  record = event.SerializeToString()
  length = struct.pack('<Q', len(record))
  crcs = [struct.pack('<I', record_writer.masked_crc32c(part)) for part in (length, record)]
  return length + crcs[0] + record + crcs[1]


def _by_layer(metrics: Mapping[str, clu.metrics.Metric]) -> dict[str, clu.metrics.Metric]:
  """Return metrics in which one of stacked layers (see `layer_stacks`) is replaced by one of each layer.

  Args:
    metrics: metrics of NumPy arrays, whose first dim is over layers if the name is that of stacked layers.
  """
  result = {}
  for name, metric in metrics.items():
    paths = layer_stacks.paths_of(name)
    if paths == [name]:
      result[name] = metric
    else:
      for i, path in enumerate(paths):
        result[path] = _of_layer(metric, i)
  return result


def _of_layer(metric: clu.metrics.Metric, i: int) -> clu.metrics.Metric:
  """Return the metric of one of stacked layers; scalars are the same for all layers."""

  def select(x):
    if np.ndim(x):
      return x[i]
    return x

  return jax.tree.map(select, metric)


def compute_values(
  metrics: Mapping[str, clu.metrics.Metric], *, num_steps: int, duration: float | None = None
) -> dict[str, clu.values.Value]:
  """Return the values of metrics by name, separately for each of stacked layers.

  Args:
    metrics: metrics of NumPy arrays, merged over `num_steps` steps.
    num_steps: divisor of averages per step.
    duration: seconds of these steps; None if no metric needs them.
  """
  if duration is not None:
    metrics = metrics_lib.set_time_metrics_duration(metrics, duration)
  metrics = _by_layer(
    metrics_lib.separate(metrics_lib.set_step_metrics_num_steps(metrics, num_steps))
  )
  with np.errstate(
    divide='ignore', invalid='ignore'
  ):  # a period with only skipped steps has no means
    return {name: metric.compute_value() for name, metric in metrics.items()}


class MetricsManager:
  """Computes the values of device metrics and writes them, in order, in a background thread.

  All processes compute the values, because decisions may depend on them; only the lead process writes. Errors of the
  thread are raised by the future's `result()` and by `flush()`. If the disk is full, data waits in memory, and
  `flush()` raises OSError until everything is written.

  Attributes:
    summary_dir: folder of the events, on all processes; None if nothing is written.
    host_metrics_fn: returns further numbers by name, which are written with those of `write_metrics_summary`. All
      processes call it in the background thread, when the device has computed the metrics.
  """

  def __init__(self, name: str, summary_dir: str | os.PathLike[str] | None = None):
    """Create nothing on disk: the first write creates the folder and the files.

    Args:
      name: folder below `summary_dir`, e.g. `train` or `training_eval/<task>`.
      summary_dir: the model directory; with None nothing is written.
    """
    self._name = name
    self._root = summary_dir
    if summary_dir is None:
      self.summary_dir = None
    else:
      self.summary_dir = str(files.path(summary_dir) / name)
    self._writes = summary_dir is not None and multihost.is_lead()
    self._writer: SummaryWriter | None = None
    # What is to be written when the files can be opened; used by the background thread.
    self._waiting: list[Callable[[SummaryWriter], None]] = []
    self._worker = concurrent.futures.ThreadPoolExecutor(
      max_workers=1, thread_name_prefix=f'summaries-{name}'
    )
    self._pending: list[concurrent.futures.Future] = []
    self._start: float | None = None
    self._last_end = -math.inf
    self.host_metrics_fn: Callable[[], Mapping[str, float]] = dict

  @property
  def summary_writer(self) -> SummaryWriter | None:
    """The writer of this process, created on first use; None if this process does not write."""
    if self._writer is None and self._writes and self.summary_dir is not None:
      self._writer = SummaryWriter(self.summary_dir, root=self._root)
    return self._writer

  def write_scalar(self, key: str, val: ArrayLike, step: int) -> None:
    """Write one scalar."""
    self.write_scalars(step, {key: val})

  def write_scalars(
    self, step: int, scalars: Mapping[str, ArrayLike], *, events_only: bool = False
  ) -> None:
    """Write scalars that are already on the host; see `SummaryWriter.write_scalars`."""
    scalars = dict(scalars)
    self._write(lambda writer: writer.write_scalars(step, scalars, events_only=events_only))

  def write_values(self, step: int, values: Mapping[str, clu.values.Value]) -> None:
    """Write metric values that are already on the host."""
    values = dict(values)
    self._write(lambda writer: writer.write_values(step, values))

  def write_text(self, step: int, texts: Mapping[str, str]) -> None:
    """Write texts to the TensorBoard events."""
    texts = dict(texts)
    self._write(lambda writer: writer.write_text(step, texts))

  def start_duration_timer(self, block_on: PyTree = ()) -> None:
    """Wait for the arrays of `block_on`, then start the timer for the rates of `write_metrics_summary`.

    Arrays that were donated to a later step, which no longer exist, are not waited for.
    """
    arrays = [
      x for x in jax.tree.leaves(block_on) if not (isinstance(x, jax.Array) and x.is_deleted())
    ]
    jax.block_until_ready(arrays)
    self._start = time.perf_counter()

  def write_metrics_summary(
    self, metrics: Mapping[str, clu.metrics.Metric], step: int, num_steps: int
  ) -> concurrent.futures.Future:
    """Compute the values of accumulated device metrics and write them; the caller does not wait for the device.

    Args:
      metrics: metrics merged over `num_steps` steps; the arrays must not be donated afterwards.
      step: step of the line.
      num_steps: divisor of per-step averages.

    Returns:
      Future of metric name to value.

    Raises:
      RuntimeError: `start_duration_timer` was not called before.
    """
    if self._start is None:
      raise RuntimeError(
        'Call start_duration_timer() before write_metrics_summary(): rates need a duration.'
      )
    start = self._start
    self._start = None

    def summarize():
      host_metrics = jax.device_get(dict(metrics))
      end = time.perf_counter()
      # Dispatch is asynchronous: the device starts these steps after those of the last period have ended.
      duration = end - max(start, self._last_end)
      self._last_end = end
      values = compute_values(host_metrics, num_steps=num_steps, duration=duration)
      for name, value in self.host_metrics_fn().items():
        values[name] = clu.values.Scalar(value)
      if self._writes:
        self._write_next(lambda writer: writer.write_values(step, values))
      return values

    return self._submit(summarize)

  def flush(self) -> None:
    """Wait until everything is on disk; raise the first error of the background thread.

    Raises:
      OSError: the disk is full, for instance; nothing is lost, and the next flush tries again.
    """
    pending = self._pending
    self._pending = []
    concurrent.futures.wait(
      pending
    )  # all of them, even if one raises: then the thread has stopped writing
    functions: list[Callable[[], object]] = [future.result for future in pending]
    if self._waiting:
      functions.append(self._worker.submit(self._write_waiting).result)
    if self._writer is not None:
      functions.append(self._writer.flush)
    call_all(functions)

  def close_files(self) -> None:
    """Finish the pending writes and close the files before a run returns to an earlier step; the next write opens them.

    Data that does not fit on a full disk is discarded: no checkpoint was saved after it, so it belongs to steps that
    are repeated, or to the evaluation before the first step.
    """
    with contextlib.suppress(OSError):
      self.flush()
    self._waiting.clear()
    if self._writer is not None:
      with contextlib.suppress(OSError):
        self._writer.close()
      self._writer = None

  def close(self) -> None:
    """Finish the pending writes and close the files. Errors are raised by `flush` only; repeated calls are allowed."""
    self._worker.shutdown(wait=True)
    self._writes = False
    if self._writer is not None:
      with contextlib.suppress(OSError):
        self._writer.close()
      self._writer = None

  def _write(self, fn: Callable[[SummaryWriter], None]) -> None:
    if self._writes:
      self._submit(lambda: self._write_next(fn))

  def _write_next(self, fn: Callable[[SummaryWriter], None]) -> None:
    self._waiting.append(fn)
    self._write_waiting()

  def _write_waiting(self) -> None:
    """Write what waits, in order; all of it waits on if the files cannot be opened, which raises OSError."""
    writer = self.summary_writer
    assert writer is not None  # since this process writes
    while self._waiting:
      self._waiting.pop(0)(writer)

  def _submit(self, fn: Callable[[], Any]) -> concurrent.futures.Future:
    self._pending = [f for f in self._pending if not f.done() or f.exception() is not None]
    future = self._worker.submit(fn)
    self._pending.append(future)
    return future


class MetricsLine(NamedTuple):
  """A line of a `metrics.jsonl`.

  Attributes:
    step: training step.
    wall_time: seconds since 1970, UTC; None if the line has none.
    numbers: metric name to number; NaN and infinity are floats.
    arrays: metric name to list of numbers, or of lists.
    texts: metric name to text.
  """

  step: int
  wall_time: float | None
  numbers: dict[str, float]
  arrays: dict[str, list]
  texts: dict[str, str]


def parse_line(row: dict[str, Any] | None) -> MetricsLine | None:
  """Return the line of a JSON object; None for an invalid one, such as a line without a step."""
  if not _has_step(row):
    return None
  values = dict(row)
  step = values.pop('step')
  wall_time = values.pop('wall_time', None)
  if wall_time is not None and not is_wall_time(wall_time):
    return None
  if set(map(type, values.values())) == {
    float
  }:  # nearly all lines, and a file may have millions of values
    return MetricsLine(step, wall_time, values, {}, {})
  line = MetricsLine(step, wall_time, {}, {}, {})
  for name, value in values.items():
    if isinstance(value, str) and value not in _NOT_IN_JSON:
      line.texts[name] = value
    elif not _is_numbers(value):
      return None
    elif isinstance(value, list):
      line.arrays[name] = value
    else:
      line.numbers[name] = float(value) if isinstance(value, str) else value
  return line


def is_wall_time(value: Any) -> bool:
  """Return whether a value of JSON is a time in seconds since 1970, and before the year 6325."""
  return isinstance(value, (int, float)) and 0 <= value < 2**37


def missing_lines(row: dict[str, Any] | None) -> dict[str, Any] | None:
  """Return what the object of a line says about missing lines: 'after_step', 'to_step', 'cause'; None for others."""
  if row is None or not isinstance(row.get('missing'), dict):
    return None
  return row['missing']


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Return the numbers in the lines of a `metrics.jsonl`, a dict for each, without incomplete lines."""
  found = []
  for line in _lines(path):
    row = {'step': line.step, **line.numbers}
    if line.wall_time is not None:
      row['wall_time'] = line.wall_time
    found.append(row)
  return found


def read_arrays(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Return `step` and float64 arrays by name, for each line of a `metrics.jsonl` that has arrays."""
  found = []
  for line in _lines(path):
    arrays = {}
    for name, value in line.arrays.items():
      with contextlib.suppress(ValueError):  # Lists of unequal lengths are not an array.
        arrays[name] = np.asarray(value, np.float64)
    if arrays:
      found.append({'step': line.step, **arrays})
  return found


def metrics_files(model_dir: str | os.PathLike[str]) -> dict[str, files.Path]:
  """Return writer name (`train`, `training_eval/<task>`, ...) to its `metrics.jsonl`, for existing files."""
  root = files.path(model_dir)
  found = {}
  for folder in WRITER_FOLDERS:
    for path in sorted((root / folder).rglob(METRICS_FILE)):
      found[path.parent.relative_to(root).as_posix()] = path
  return found


def no_metrics_message(model_dir: str | os.PathLike[str]) -> str:
  """Return the message of an error about a directory without metrics."""
  if files.path(model_dir).is_dir():
    got = 'a directory without metrics'
  else:
    got = 'no directory'
  return (
    f'The model directory of a run must have {WRITER_FOLDERS[0]}/{METRICS_FILE}, got {got} at '
    f'{str(model_dir)!r}. Check the path, or wait until the run has written its first metrics.'
  )


def discard_after(
  model_dir: str | os.PathLike[str], step: int, *, redo_evaluation: bool = False
) -> None:
  """Delete the lines of steps after `step` and incomplete lines from every `metrics.jsonl` of a run.

  Files of predictions of these steps are deleted too, including those of seqio's JSONLogger.

  Call it once, in the lead process, before writers are opened. Each file is truncated or replaced atomically; if the
  process is killed, the next call changes the other files.

  Args:
    model_dir: the model directory.
    step: the step from which the run resumes; -1 for a run that starts from the beginning.
    redo_evaluation: also delete the evaluations of `step`, because they were interrupted and will be repeated.
  """
  files.flush(model_dir)  # nothing of later steps is written afterwards
  for name, path in _files_of_lines(model_dir):
    if redo_evaluation and name != 'train':
      last = step - 1
    else:
      last = step
    keep_lines(path, lambda found, last=last: found <= last, last_step=last)
    for predictions in _files_of_predictions(path):
      if int(predictions.stem.rpartition('-')[2]) > last:
        predictions.unlink()


def discard_evaluations(folder: str | os.PathLike[str], steps: Collection[int]) -> None:
  """Delete the lines of these steps, which will be written again; otherwise like `discard_after`.

  Args:
    folder: folder of the evaluations.
    steps: steps to delete.
  """
  for _, path in _files_of_lines(folder):
    keep_lines(path, lambda found: found not in steps)


def _files_of_lines(folder: str | os.PathLike[str]) -> list[tuple[str, files.Path]]:
  """Return (writer, file) of the metrics in a folder, including the files of seqio's JSONLogger."""
  theirs = sorted((files.path(folder) / 'inference_eval').rglob(f'*-{METRICS_FILE}'))
  return [*metrics_files(folder).items(), *(('inference_eval', path) for path in theirs)]


def _files_of_predictions(path: files.Path) -> list[files.Path]:
  """Return the files of predictions of a file of metrics, one for each step."""
  prefix = path.name.removesuffix(METRICS_FILE) or PREDICTIONS_PREFIX
  pattern = re.compile(rf'{re.escape(prefix)}\d+\.jsonl', re.ASCII)
  return [found for found in path.parent.glob('*.jsonl') if pattern.fullmatch(found.name)]


def check_files(model_dir: str | os.PathLike[str]) -> None:
  """Raise if a file of the metrics in a model directory is a link, so that a run would change another file.

  Raises:
    LinkedFileError: it is.
  """
  for _, path in _files_of_lines(model_dir):
    files.check_regular(path)


def keep_lines(
  path: files.Path, keep_fn: Callable[[int], bool], last_step: int | None = None
) -> None:
  """Keep only the lines of a file whose step `keep_fn` accepts; invalid lines are deleted.

  A line about missing lines is kept, about those up to `last_step`, since all later ones are written again.

  Parts in a store are changed from the last to the first, each at once: if the process is killed, the next call changes
  the others. Empty parts at the end are deleted.
  """
  files.check_regular(path)
  first, *others = files.parts(path)
  is_last = True
  for part in (*reversed(others), first):
    kept = []
    for line, row in json_lines.read_file(part):
      if _has_step(row) and keep_fn(row['step']):
        kept.append(f'{line}\n')
      elif row is not None and missing_lines(row) is not None:
        kept += _missing_until(line, row, last_step)
    new = ''.join(kept).encode()
    old = part.read_bytes()
    if not new and is_last and part is not first:
      part.unlink()
      continue
    is_last = False
    if new == old:
      continue
    if old.startswith(new) and not files.is_remote(
      part
    ):  # a full disk has no space for a second file
      with part.open('r+b') as f:
        f.truncate(len(new))
        os.fsync(f.fileno())
    else:
      files.write(part, new)


def _missing_until(line: str, row: dict[str, Any], last_step: int | None) -> list[str]:
  """Return the line about missing lines, of steps up to `last_step`; [] if no such line is missing."""
  missing = row['missing']
  after_step = missing.get('after_step')
  to_step = missing.get('to_step')
  if last_step is None or (isinstance(to_step, int) and to_step <= last_step):
    return [f'{line}\n']
  if not isinstance(after_step, int):
    after_step = -1
  if last_step <= after_step:
    return []
  return [json_lines.to_line({**row, 'missing': {**missing, 'to_step': last_step}})]


def _has_step(row: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
  return row is not None and type(row.get('step')) is int and abs(row['step']) <= _MAX_STEP


def _lines(path: str | os.PathLike[str]) -> list[MetricsLine]:
  parsed = (parse_line(row) for _, row in json_lines.read(path))
  return [line for line in parsed if line is not None]


def _is_numbers(value: Any) -> bool:
  if isinstance(value, list):
    return all(_is_numbers(item) for item in value)
  if isinstance(value, str):
    return value in _NOT_IN_JSON
  # Longer integers are not floating-point numbers.
  return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1023)


def _to_json(value: float | list) -> float | str | list:
  if isinstance(value, list):
    return [_to_json(item) for item in value]
  if math.isnan(value):
    return 'NaN'
  if math.isfinite(value):
    return value
  if value > 0:
    return 'Infinity'
  return '-Infinity'
