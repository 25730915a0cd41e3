"""Where a run writes its numbers: one folder per writer, each with TensorBoard events and a `metrics.jsonl`.

`MODEL_DIR/train/`, `MODEL_DIR/training_eval/<task>/` and `MODEL_DIR/inference_eval/<task>/`. A line of
`metrics.jsonl` is one write: `{"step": 100, "wall_time": 1700000000.123, "<metric>": value, ...}`; numbers that JSON
lacks are the strings "NaN", "Infinity" and "-Infinity". Metrics that are arrays (the load of every expert) stand there
as lists, and in no event. Only the lead process writes, from a background thread.

A resumed run first calls `discard_after`: what was written after the restored step will be computed again, so those
lines are cut and the files read as if the run had never stopped.
"""

import concurrent.futures
import contextlib
import math
import os
import pathlib
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import clu.metrics
import clu.values
import jax
import numpy as np

from t5x_lite import files
from t5x_lite import json_lines
from t5x_lite import metrics as metrics_lib
from t5x_lite import multihost
from t5x_lite.errors import DataError
from t5x_lite.types import ArrayLike, PyTree


def _import_tensorboardx() -> tuple[Any, Any, Any]:
  # Where PyTorch is installed the package imports it, for tensors that never come here: seconds of every start.
  hides = 'torch' not in sys.modules
  if hides:
    sys.modules['torch'] = None  # Python's own way to say that a module cannot be imported
  try:
    from tensorboardX import record_writer, summary
    from tensorboardX.proto import event_pb2
  finally:
    if hides:
      del sys.modules['torch']
  return record_writer, summary, event_pb2


record_writer, summary, event_pb2 = _import_tensorboardx()

METRICS_FILE = 'metrics.jsonl'
# Before the step in the names of files of predictions.
PREDICTIONS_PREFIX = 'predictions-'
# What stands for numbers that JSON lacks.
_NOT_IN_JSON = ('NaN', 'Infinity', '-Infinity')
# The folders of a run that hold writers' folders.
WRITER_FOLDERS = ('train', 'training_eval', 'inference_eval')


class MetricValueMapFuture(Protocol):
  """A mapping of metric name to value that is still being computed."""

  def result(self) -> Mapping[str, clu.values.Value]:
    """Waits for the values and returns them; raises what the computation raised."""


class SummaryWriter:
  """Writes scalars and texts to one folder, at once and in the calling thread; one writer per folder.

  A writer goes on where `metrics.jsonl` ends: TensorBoard is told to forget the events of later steps, which an earlier
  run wrote and `discard_after` has cut.

  Of tensorboardX only the file format is used. Its own `SummaryWriter` hands events to a further thread through a
  queue: a flush does not wait for what is in the queue, and once the thread has met a full disk the queue blocks for
  ever.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Reads where the files in `folder` end; the first write makes the folder if needed, and opens them."""
    self._folder = pathlib.Path(folder)
    path = self._folder / METRICS_FILE
    purge_step = None
    if any(self._folder.glob('events.out.tfevents.*')):
      purge_step = 1 + max((row['step'] for row in (read_metrics(path) if path.exists() else ())), default=-1)
    # TensorBoard orders files by the seconds in their names; the rest keeps a run that starts within the same second
    # from overwriting one.
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    name = f'events.out.tfevents.{seconds}.{socket.gethostname()}.{nanoseconds:09d}'
    self._events = files.AppendedFile(self._folder / name)
    self._lines = files.AppendedFile(path)
    self._lock = threading.Lock()
    self._write_event(file_version='brain.Event:2')
    if purge_step is not None:
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._write_event(step=purge_step, session_log=start)

  def write_scalars(self, step: int, scalars: Mapping[str, ArrayLike], *, events_only: bool = False,
                    arrays: Mapping[str, ArrayLike] | None = None) -> None:
    """Appends one line and as many events as there are numbers, which may be of any scalar type.

    Args:
      step: training step they belong to.
      scalars: metric name to number.
      events_only: leave `metrics.jsonl` alone; for facts about this process, such as compile time, that would make the
        file of a resumed run differ.
      arrays: metric name to array, for the line alone.
    """
    scalars = {name: float(np.asarray(value)) for name, value in scalars.items()}
    now = time.time()
    line = {'step': int(step), 'wall_time': round(now, 3), **{k: _to_json(v) for k, v in scalars.items()},
            **{k: _to_json(np.asarray(v, np.float64).tolist()) for k, v in (arrays or {}).items()}}
    with self._lock:
      if not events_only:
        self._lines.append(json_lines.to_line(line, ensure_ascii=True, allow_nan=False).encode(), at_once=True)
      for name, value in scalars.items():
        self._write_event(step=int(step), wall_time=now, summary=summary.scalar(name, value))

  def write_text(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes texts (Markdown) to the TensorBoard events only."""
    with self._lock:
      for name, text in texts.items():
        self._write_event(step=int(step), summary=summary.text(name, text))

  def write_values(self, step: int, values: Mapping[str, clu.values.Value]) -> None:
    """Writes metric values by their kind.

    Raises:
      DataError: a value is no `Scalar`, `Summary` (an array) or `Text`.
    """
    scalars, arrays, texts = {}, {}, {}
    for name, value in values.items():
      if isinstance(value, clu.values.Scalar):
        scalars[name] = value.value
      elif isinstance(value, clu.values.Summary):
        arrays[name] = value.value
      elif isinstance(value, clu.values.Text):
        texts[name] = value.value
      else:
        raise DataError(f'Metric {name!r} is a {type(value).__name__}; summaries hold clu.values.Scalar, Summary and '
                        'Text. Return one of these from the metric.')
    if scalars or arrays:
      self.write_scalars(step, scalars, arrays=arrays)
    if texts:
      self.write_text(step, texts)

  def flush(self) -> None:
    """Returns when everything written so far would outlive a crash of the machine.

    Raises:
      OSError: the disk is full, for instance; nothing is lost, and the next flush tries again.
    """
    with self._lock:
      self._lines.flush()
      self._events.flush()

  def close(self) -> None:
    """Flushes and closes the files; the writer is of no use afterwards."""
    with self._lock:
      try:
        self._events.close()
      finally:
        self._lines.close()

  def _write_event(self, *, wall_time: float | None = None, **fields: Any) -> None:
    event = event_pb2.Event(wall_time=time.time() if wall_time is None else wall_time, **fields)
    record = event.SerializeToString()
    # TensorFlow's record format: length and contents, each with its masked CRC-32C.
    length = struct.pack('<Q', len(record))
    crcs = [struct.pack('<I', record_writer.masked_crc32c(part)) for part in (length, record)]
    self._events.append(length + crcs[0] + record + crcs[1], at_once=False)


class MetricsManager:
  """Turns device metrics into numbers and writes them, in order, from one background thread of its own.

  All processes compute the values (they may steer decisions); only the lead one writes. Errors of the thread surface at
  the future's `result()` and at `flush()`. What a full disk refuses waits in memory: only `flush()` raises OSError, as
  long as something is not written.
  """

  def __init__(self, name: str, summary_dir: str | os.PathLike[str] | None = None):
    """Makes nothing on disk yet: the folder is made and the files are opened by the first write.

    Args:
      name: folder below `summary_dir`, e.g. `train` or `training_eval/<task>`.
      summary_dir: the model directory; None writes nothing.
    """
    self._name = name
    self._folder = None
    if summary_dir is not None and multihost.is_lead():
      self._folder = pathlib.Path(summary_dir) / name
    self._writer: SummaryWriter | None = None
    self._worker = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix=f'summaries-{name}')
    self._pending: list[concurrent.futures.Future] = []
    self._start: float | None = None
    self._last_end = -math.inf

  @property
  def summary_writer(self) -> SummaryWriter | None:
    """The writer of this process, made if need be; None where nothing is written."""
    if self._writer is None and self._folder is not None:
      self._writer = SummaryWriter(self._folder)
    return self._writer

  def write_scalar(self, key: str, val: ArrayLike, step: int) -> None:
    """Writes one scalar."""
    self.write_scalars(step, {key: val})

  def write_scalars(self, step: int, scalars: Mapping[str, ArrayLike], *, events_only: bool = False) -> None:
    """Writes scalars that the host already holds; see `SummaryWriter.write_scalars`."""
    scalars = dict(scalars)
    self._write(lambda writer: writer.write_scalars(step, scalars, events_only=events_only))

  def write_values(self, step: int, values: Mapping[str, clu.values.Value]) -> None:
    """Writes metric values that the host already holds."""
    values = dict(values)
    self._write(lambda writer: writer.write_values(step, values))

  def write_text(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes texts to the TensorBoard events."""
    texts = dict(texts)
    self._write(lambda writer: writer.write_text(step, texts))

  def start_duration_timer(self, block_on: PyTree = ()) -> None:
    """Starts the time that `write_metrics_summary` divides by, after waiting for the arrays of `block_on`."""
    jax.block_until_ready(block_on)
    self._start = time.perf_counter()

  def write_metrics_summary(self, metrics: Mapping[str, clu.metrics.Metric], step: int,
                            num_steps: int) -> MetricValueMapFuture:
    """Computes the values of accumulated device metrics and writes them, without making the caller wait for the device.

    Args:
      metrics: metrics merged over `num_steps` steps; the arrays must not be donated afterwards.
      step: number under which to write.
      num_steps: what per-step averages divide by.

    Returns:
      Future of metric name to value.

    Raises:
      RuntimeError: `start_duration_timer` was not called before.
    """
    if self._start is None:
      raise RuntimeError('Call start_duration_timer() before write_metrics_summary(): rates need a duration.')
    start, self._start = self._start, None

    def summarize():
      host_metrics = jax.device_get(dict(metrics))
      end = time.perf_counter()
      # Steps are dispatched ahead: the device may have begun these only after it had finished the last period's.
      duration, self._last_end = end - max(start, self._last_end), end
      host_metrics = metrics_lib.set_time_metrics_duration(host_metrics, duration)
      host_metrics = metrics_lib.set_step_metrics_num_steps(host_metrics, num_steps)
      with np.errstate(divide='ignore', invalid='ignore'):  # a period of skipped steps alone has no means
        values = {name: metric.compute_value() for name, metric in host_metrics.items()}
      if self._folder is not None:
        self.summary_writer.write_values(step, values)
      return values

    return self._submit(summarize)

  def flush(self) -> None:
    """Waits until all that was handed over is on disk; raises the first error of the background thread.

    Raises:
      OSError: the disk is full, for instance; nothing is lost, and the next flush tries again.
    """
    pending, self._pending = self._pending, []
    concurrent.futures.wait(pending)  # also where one raises: the thread writes no longer after this
    for future in pending:
      future.result()
    if self._writer is not None:
      self._writer.flush()

  def close_files(self) -> None:
    """Closes the files after what is pending, for a run that goes back to an earlier step; the next write opens them.

    What a full disk refuses is dropped: no checkpoint was saved after it, so it belongs to steps that are made
    again, or to the evaluation before the first step.
    """
    with contextlib.suppress(OSError):
      self.flush()
    if self._writer is not None:
      with contextlib.suppress(OSError):
        self._writer.close()
      self._writer = None

  def close(self) -> None:
    """Finishes the pending writes and closes the files. May be called again; errors are left to `flush`."""
    self._worker.shutdown(wait=True)
    self._folder = None
    if self._writer is not None:
      with contextlib.suppress(OSError):
        self._writer.close()
      self._writer = None

  def _write(self, fn: Callable[[SummaryWriter], None]) -> None:
    if self._folder is not None:
      self._submit(lambda: fn(self.summary_writer))

  def _submit(self, fn: Callable[[], Any]) -> concurrent.futures.Future:
    self._pending = [f for f in self._pending if not f.done() or f.exception() is not None]
    future = self._worker.submit(fn)
    self._pending.append(future)
    return future


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns the numbers in the lines of a `metrics.jsonl`, a dict for each; a line cut short by a kill is left out."""
  return [{name: float(value) if isinstance(value, str) else value for name, value in row.items()
           if not isinstance(value, list)} for row in _rows(path)]


def read_arrays(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns the arrays in the lines of a `metrics.jsonl` that have any: their `step` and float64 arrays by name."""
  found = []
  for row in _rows(path):
    arrays = {name: np.asarray(value, np.float64) for name, value in row.items() if isinstance(value, list)}
    if arrays:
      found.append({'step': row['step'], **arrays})
  return found


def metrics_files(model_dir: str | os.PathLike[str]) -> dict[str, pathlib.Path]:
  """Returns writer name (`train`, `training_eval/<task>`, ...) to its `metrics.jsonl`, for those that exist."""
  root = pathlib.Path(model_dir)
  found = (path for folder in WRITER_FOLDERS for path in sorted((root / folder).rglob(METRICS_FILE)))
  return {path.parent.relative_to(root).as_posix(): path for path in found}


def no_metrics_message(model_dir: str | os.PathLike[str]) -> str:
  """Return the message of an error about a directory without metrics."""
  got = 'a directory without metrics' if pathlib.Path(model_dir).is_dir() else 'no directory'
  return (f'The model directory of a run must have {WRITER_FOLDERS[0]}/{METRICS_FILE}, got {got} at '
          f'{str(model_dir)!r}. Check the path, or wait until the run has written its first metrics.')


def discard_after(model_dir: str | os.PathLike[str], step: int, *, redo_evaluation: bool = False) -> None:
  """Cuts from every `metrics.jsonl` of a run the lines of steps after `step`, and a half-written last line.

  Files of predictions of such steps are deleted, those of seqio's JSONLogger included.

  Call it once, in the lead process, before writers are opened. Each file is changed in one step, by being truncated or
  replaced; if the process ends in between, the next call changes the others.

  Args:
    model_dir: the run.
    step: the step from which the run goes on; -1 for a run that starts anew.
    redo_evaluation: cut the evaluations of `step` itself too, because they were interrupted and will be made again.
  """
  for name, path in _files_of_lines(model_dir):
    last = step - 1 if redo_evaluation and name != 'train' else step
    _keep_lines(path, lambda found, last=last: found <= last)
    for predictions in _files_of_predictions(path):
      if int(predictions.stem.rpartition('-')[2]) > last:
        predictions.unlink()


def discard_evaluations(folder: str | os.PathLike[str], steps: Collection[int]) -> None:
  """Cuts the lines of some steps, which will be written again; otherwise as `discard_after`.

  Args:
    folder: where evaluations are written.
    steps: the steps.
  """
  for _, path in _files_of_lines(folder):
    _keep_lines(path, lambda found: found not in steps)


def _files_of_lines(folder: str | os.PathLike[str]) -> list[tuple[str, pathlib.Path]]:
  """Returns (writer, file) of the metrics below a folder, those that seqio's JSONLogger writes included."""
  theirs = sorted((pathlib.Path(folder) / 'inference_eval').rglob(f'*-{METRICS_FILE}'))
  return [*metrics_files(folder).items(), *(('inference_eval', path) for path in theirs)]


def _files_of_predictions(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of predictions, one for each step, that belong to a file of metrics."""
  prefix = path.name.removesuffix(METRICS_FILE) or PREDICTIONS_PREFIX
  return [found for found in path.parent.glob('*.jsonl')
          if re.fullmatch(rf'{re.escape(prefix)}\d+\.jsonl', found.name, re.ASCII)]


def _keep_lines(path: pathlib.Path, keep_fn: Callable[[int], bool]) -> None:
  """Rewrites a file with those of its lines whose step `keep_fn` accepts; broken lines go."""
  kept = [line for line, row in json_lines.read(path) if _has_step(row) and keep_fn(row['step'])]
  new, old = ''.join(f'{line}\n' for line in kept).encode(), path.read_bytes()
  if new == old:
    return
  if old.startswith(new):  # A full disk has no space for a second file.
    with path.open('r+b') as f:
      f.truncate(len(new))
      os.fsync(f.fileno())
  else:
    files.write(path, new)


def _has_step(row: Mapping[str, Any] | None) -> bool:
  return row is not None and isinstance(row.get('step'), int)


def _rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  return [row for _, row in json_lines.read(path) if _has_step(row) and all(map(_is_numbers, row.values()))]


def _is_numbers(value: Any) -> bool:
  if isinstance(value, list):
    return all(_is_numbers(item) for item in value)
  return value in _NOT_IN_JSON if isinstance(value, str) else isinstance(value, (int, float))


def _to_json(value: float | list) -> float | str | list:
  if isinstance(value, list):
    return [_to_json(item) for item in value]
  if math.isnan(value):
    return 'NaN'
  return value if math.isfinite(value) else ('Infinity' if value > 0 else '-Infinity')
