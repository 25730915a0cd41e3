"""Runs the parts in processes with limits of their own, and keeps the results on disk after each event."""

from collections.abc import Callable, Mapping
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import threading
import time
from typing import Any

from benchmarks.gpu import report

_PERIOD = 0.1

# (part, path of its events, names of items to skip) -> (command line, environment).
StartFn = Callable[[str, pathlib.Path, list[str]], tuple[list[str], Mapping[str, str]]]


class _Part:
  """Results of a part, filled by the events of its processes."""

  def __init__(self, events: pathlib.Path):
    self.result: dict[str, Any] = {'matmul': [], 'items': {}}
    self.device: dict[str, Any] | None = None
    self.current: str | None = None
    self.current_began = 0.0
    self._limits: dict[str, float] = {}
    self._events = events
    self._position = 0

  def read(self) -> bool:
    """Read the events that were appended; return whether there were any. A line without its end is read later."""
    if not self._events.exists():
      return False
    with self._events.open('rb') as file:
      file.seek(self._position)
      found = file.read()
    complete = found[: found.rfind(b'\n') + 1]
    self._position += len(complete)
    for line in complete.splitlines():
      self._add(json.loads(line))
    return bool(complete)

  def _add(self, event: dict[str, Any]) -> None:
    kind = event.pop('event')
    items = self.result['items']
    name = event.get('item')
    if kind == 'items':
      for item, limit in zip(event['names'], event['limits'], strict=True):
        items.setdefault(item, {'status': 'not run', 'rows': []})
        self._limits[item] = limit
    elif kind == 'device':
      self.device = event
    elif kind == 'matmul':
      self.result['matmul'].append(event)
    elif kind == 'begin':
      items[name]['status'] = 'running'
      self.current = name
      self.current_began = time.monotonic()
    elif kind == 'row':
      items[name]['rows'].append(event['row'])
    else:
      self._end('failed' if kind == 'failed' else 'done', event.get('reason'))

  def _end(self, status: str, reason: str | None) -> None:
    item = self.result['items'][self.current]
    item['status'] = status
    item['seconds'] = round(time.monotonic() - self.current_began, 1)
    if reason:
      item['reason'] = reason
    self.current = None

  def is_over_limit(self) -> bool:
    """Return whether the current item takes longer than its limit."""
    if self.current is None:
      return False
    return time.monotonic() - self.current_began > self._limits[self.current]

  def fail(self, reason: str) -> None:
    """End the current item, if there is one, without its result."""
    if self.current is not None:
      self._end('failed', reason)

  def begun(self) -> list[str]:
    """Return the names of items that ended in any way."""
    return [name for name, item in self.result['items'].items() if item['status'] != 'not run']


def _end(process: subprocess.Popen) -> None:
  """Kill a process and those that it started."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  # A driver that hangs may keep it.
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(timeout=10)


class Runner:
  """Runs parts and writes `results.json` and `results.md`.

  Attributes:
    results: all results, as in the file.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    work_folder: pathlib.Path,
    start_fn: StartFn,
    seconds: float,
    shares: Mapping[str, float],
    facts: Mapping[str, Any],
  ):
    """Make the folders.

    Args:
      folder: folder of the results.
      work_folder: folder of logs and events.
      start_fn: function that returns command line and environment of the process of a part.
      seconds: limit of all parts together.
      shares: share of this time by part. Parts that follow get the time that a part does not use.
      facts: facts of the run for the results.
    """
    for each in (folder, work_folder):
      each.mkdir(parents=True, exist_ok=True)
    self._folder = folder
    self._work_folder = work_folder
    self._start_fn = start_fn
    self._shares = shares
    self._end_time = time.monotonic() + seconds
    self._lock = threading.RLock()
    self._is_stopped = threading.Event()
    self.results: dict[str, Any] = {**facts, 'device': None, 'parts': {}}

  def write(self) -> None:
    """Write the results, each file at once."""
    with self._lock:
      writers = {'results.json': _to_json, 'results.md': report.to_markdown}
      for name, to_text in writers.items():
        temporary = self._folder / f'.{name}.new'
        temporary.write_text(to_text(self.results), encoding='utf-8')
        temporary.replace(self._folder / name)

  def run(self, parts: list[str], in_background: list[str] | None = None) -> None:
    """Run the parts in their order; each gets its share of the time that is left.

    Args:
      parts: names of parts.
      in_background: names of parts that run at the same time as these and measure nothing.
    """
    threads = [
      threading.Thread(target=self._run_part, args=(part, self._seconds_left()))
      for part in in_background or ()
    ]
    for thread in threads:
      thread.start()
    try:
      for index, part in enumerate(parts):
        share = self._shares[part] / sum(self._shares[other] for other in parts[index:])
        self._run_part(part, self._seconds_left() * share)
      for thread in threads:
        thread.join()
    finally:
      self._is_stopped.set()
    self.write()

  def _seconds_left(self) -> float:
    return self._end_time - time.monotonic()

  def _run_part(self, name: str, seconds: float) -> None:
    """Run a part; a process that ends early is followed by another one, for the items that are left."""
    start = time.monotonic()
    events = self._work_folder / f'{name}.events.jsonl'
    events.unlink(missing_ok=True)
    part = _Part(events)
    part.result['limit'] = round(seconds, 1)
    with self._lock:
      self.results['parts'][name] = part.result
    log = self._work_folder / f'{name}.log'
    log.unlink(missing_ok=True)
    is_complete = False
    while not is_complete and time.monotonic() - start < seconds and not self._is_stopped.is_set():
      num_begun = len(part.begun())
      reason = self._run_process(name, part, events, log, start + seconds)
      is_complete = reason is None
      if reason is not None:
        with self._lock:
          part.fail(reason)
      if not is_complete and len(part.begun()) == num_begun:
        # A process that begins nothing would be started forever.
        with self._lock:
          part.result['reason'] = ': '.join(filter(None, (reason, _last_line(log))))
        break
    with self._lock:
      part.result['seconds'] = round(time.monotonic() - start, 1)
    self.write()

  def _run_process(
    self, name: str, part: _Part, events: pathlib.Path, log: pathlib.Path, end: float
  ) -> str | None:
    """Run one process of a part; return None if it did all of its items, else the reason why it ended."""
    command, environment = self._start_fn(name, events, part.begun())
    with log.open('ab') as output:
      process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
    try:
      while True:
        status = process.poll()
        with self._lock:
          if part.read():
            self.results['device'] = part.device or self.results['device']
            self.write()
        if status == 0:
          return None
        if status is not None:
          return f'its process ended with status {status}'
        if time.monotonic() > end:
          return 'the time of the part was over'
        if self._is_stopped.is_set():
          return 'the kit was stopped'
        if part.is_over_limit():
          return 'it took longer than its limit'
        time.sleep(_PERIOD)
    finally:
      _end(process)


def _to_json(results: Mapping[str, Any]) -> str:
  return json.dumps(results, indent=1) + '\n'


def _last_line(log: pathlib.Path) -> str:
  lines = log.read_text(encoding='utf-8', errors='replace').split('\n')
  return next((line for line in reversed(lines) if line.strip()), '')[:300]


def problems(results: Mapping[str, Any]) -> list[str]:
  """Return a sentence for each item that has no result and each comparison that did not pass."""
  found = []
  for part, result in results['parts'].items():
    if 'reason' in result:
      found.append(f'{part}: {result["reason"]}.')
    for name, item in result['items'].items():
      if item['status'] != 'done':
        found.append(f'{part}, {name}: {item["status"]}, {item.get("reason", "no time was left")}.')
      failed = [row for row in item['rows'] if row.get('passes') is False]
      found += [f'{part}, {name}: {row}' for row in failed]
  return found
