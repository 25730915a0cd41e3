"""Facts of a run that its files have, for readers that know nothing but the run directory.

`LineReader` reads `metrics.jsonl` while a run writes to it. Nothing here imports or executes what `config.gin` names.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import io
import itertools
import json
import logging
import math
import os
import re
from typing import Any, BinaryIO, Literal

from t5x_lite import checkpoints
from t5x_lite import runtime
from t5x_lite.apps.common.runs import CONFIG_FILE
from t5x_lite.checkpoints import discovery
from t5x_lite.configuration import masking
from t5x_lite.configuration import syntax
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.storage import files
from t5x_lite.storage import json_lines
from t5x_lite.storage import untrusted
from t5x_lite.trainer import summaries

_logger = logging.getLogger(__name__)

# Largest file and longest line that are read, and bytes before the position that must be unchanged.
_MAX_BYTES = 2**31
_MAX_LINE = 2**26
_TAIL = 4096
# Damaged lines of a file that are named in the log.
_MAX_WARNINGS = 20
# Bytes at the end of a file in which the last line is looked for.
_END = 2**20
# Strings that are paths of a machine or a store, by their beginning, or by the name of their option.
_PATH = re.compile(r'(/|~|\.\.?/|[a-z][a-z0-9+.-]*:/)')
_HUB = 'hf://'
_PATH_NAME = re.compile(r'(.*_)?(dirs?|paths?|files?|folders?)', re.IGNORECASE)
# Row of the number of parameters in model-info.txt: name, arrays, elements.
_PARAMETERS = re.compile(rb'^parameters +[\d,]+ +([\d,]+)', re.MULTILINE)

Status = Literal['unknown', 'running', 'finished', 'failed', 'interrupted']
# Cause of the event 'stop' to the status.
_STATUSES: Mapping[str, Status] = {
  'completed': 'finished',
  'data_ended': 'finished',
  'action': 'finished',
  'signal': 'interrupted',
  'other_process': 'interrupted',
}


# ---- Lines -----------------------------------------------------------------------------------------------------------


class LineReader:
  """Reads the lines of a file that another process appends to; each call continues where the last one ended.

  A file that was truncated or replaced, as a resumed run does, is read from its beginning again.

  Attributes:
    num_restarts: how many times the file was read from its beginning again.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Open nothing; the file may be missing."""
    self.path = files.path(path)
    self.num_restarts = 0
    self.rewind()

  def rewind(self) -> None:
    """Read from the beginning at the next call."""
    self._part = self.path
    self._offset = 0
    self._number = 0
    self._tail = b''

  def read(self, *, is_final: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each complete line that was not yet read.

    Args:
      is_final: also yield a last line without an end.

    Raises:
      InvalidFileError: the file is not a regular file.
      OSError: it cannot be read.
    """
    self.check()
    for part in self._parts():
      try:
        file = _open(part)
      except FileNotFoundError:
        return
      with file:
        if part != self._part:
          self._part = part
          self._offset = 0
          self._tail = b''
        file.seek(self._offset)
        while line := file.readline(_MAX_LINE):
          if not line.endswith(b'\n') and not is_final and len(line) < _MAX_LINE:
            break
          self._offset += len(line)
          self._tail = line[-_TAIL:]
          self._number += 1
          yield self._number, line.removesuffix(b'\n').decode('utf-8', errors='replace')

  def check(self) -> bool:
    """Return whether lines that were read before have changed or are gone; then the next call reads all lines."""
    if not self._number:
      return False
    try:
      with _open(self._part) as file:
        file.seek(self._offset - len(self._tail))
        if file.read(len(self._tail)) == self._tail:
          return False
    except FileNotFoundError:
      pass
    self.rewind()
    self.num_restarts += 1
    return True

  def _parts(self) -> list[files.Path]:
    """Return the part that was read last and the parts after it."""
    parts = files.parts(self.path)
    if self._part in parts:
      parts = parts[parts.index(self._part) :]
    return parts


def _open(part: files.Path) -> BinaryIO:
  if files.is_remote(part):
    return io.BytesIO(part.read_bytes())
  return open(part, 'rb', opener=functools.partial(files.open_to_read, max_bytes=_MAX_BYTES))


class MetricsReader:
  """Reads the lines of a writer's `metrics.jsonl`, as a `LineReader`.

  Attributes:
    lines: reader of the file.
    damaged: 'FILE:LINE' of each invalid line.
    missing: what each line 'missing' says, see `summaries.missing_lines`.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Open nothing; the file may be missing."""
    self.lines = LineReader(path)
    self.damaged: list[str] = []
    self._numbers: set[int] = set()
    self.missing: list[Mapping[str, Any]] = []

  def read(self, *, is_final: bool = False) -> Iterator[summaries.MetricsLine]:
    """Yield the valid lines that were not yet read; see `LineReader.read`."""
    for number, text in self.lines.read(is_final=is_final):
      row = _parse(text)
      line = summaries.parse_line(row)
      missing = summaries.missing_lines(row)
      if line is not None:
        yield line
      elif missing is not None:
        self.missing.append(missing)
      else:
        self._warn(number)

  def _warn(self, number: int) -> None:
    if number in self._numbers:  # the file is read again
      return
    self._numbers.add(number)
    where = f'{self.lines.path}:{number}'
    self.damaged.append(where)
    if len(self.damaged) > _MAX_WARNINGS:
      return
    text = '%s is damaged and skipped: it must be a JSON object with a step, a time and numbers.'
    if len(self.damaged) == _MAX_WARNINGS:
      text += ' Further damaged lines of this file are not shown.'
    _logger.warning(text, where)


def last_line(path: files.Path) -> summaries.MetricsLine | None:
  """Return the last valid line of a `metrics.jsonl`, of those in its last MiB; None without one."""
  for part in reversed(files.parts(path)):
    try:
      with _open(part) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END))
        texts = file.read().split(b'\n')
    except FileNotFoundError:
      continue
    for text in reversed(texts):
      line = summaries.parse_line(_parse(text))
      if line is not None:
        return line
  return None


def _parse(text: str | bytes) -> dict[str, Any] | None:
  try:
    row = json.loads(text)
  except (ValueError, RecursionError):
    return None
  if isinstance(row, dict):
    return row
  return None


# ---- Status and checkpoints ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStatus:
  """Status of a run.

  Attributes:
    status: 'running' after a start, also if the process was killed, which leaves no trace; 'unknown' without events.
    cause: cause of the event 'stop'; '' while the run is running.
    message: message of the error that ended the run.
    num_starts: number of processes that have started the run, one after the other.
    identity: time of the first start, which identifies the run; None without events.
  """

  status: Status = 'unknown'
  cause: str = ''
  message: str = ''
  num_starts: int = 0
  identity: float | None = None

  @property
  def has_ended(self) -> bool:
    """Whether the process of the run has ended, as far as the events tell."""
    return self.status not in ('unknown', 'running')


class StatusReader:
  """Reads the status of a run from `events.jsonl`; each call reads only new events."""

  def __init__(self, run: str | os.PathLike[str]):
    """Open nothing; the file may be missing."""
    self._lines = LineReader(files.path(run) / runtime.EVENTS_FILE)
    self._status = RunStatus()

  def read(self) -> RunStatus:
    """Return the status now.

    Raises:
      OSError: the file cannot be read.
    """
    if self._lines.check():  # also if no line is left
      self._status = RunStatus()
    num_restarts = self._lines.num_restarts
    for _, text in self._lines.read():
      if self._lines.num_restarts != num_restarts:
        self._status = RunStatus()
        num_restarts = self._lines.num_restarts
      row = _parse(text) or {}
      if row.get('event') == 'start':
        self._status = RunStatus(
          status='running',
          num_starts=self._status.num_starts + 1,
          identity=self._status.identity or row.get('wall_time'),
        )
      elif row.get('event') == 'stop':
        cause = str(row.get('cause'))
        self._status = dataclasses.replace(
          self._status,
          status=_STATUSES.get(cause, 'failed'),
          cause=cause,
          message=str(row.get('message', '')),
        )
    return self._status


def final_step(run: str | os.PathLike[str], *, has_ended: bool = False) -> int:
  """Return the step up to which the lines of a run are final; -1 if none are.

  No restart and no rollback writes them again: a checkpoint has the step, and a later step was finite. If evaluations
  of the step are due after a restart, the last final step is the one before.

  Args:
    run: run directory.
    has_ended: whether the process of the run has ended, so that its last checkpoint needs no later step.

  Raises:
    OSError: the directory cannot be read.
  """
  last = last_line(files.path(run) / 'train' / summaries.METRICS_FILE)
  if last is None or not math.isfinite(last.numbers.get('loss', 0.0)):
    return -1
  for step in reversed(checkpoints.all_steps(run)):
    folder = checkpoints.get_checkpoint_dir(run, step)
    is_confirmed = step < last.step or has_ended
    if is_confirmed and not discovery.is_marked_unsound(folder):
      return _final_step_of(folder, step)
  return -1


def _final_step_of(folder: str, step: int) -> int:
  try:
    manifest = checkpoints.read_manifest(folder)
  except CheckpointError:
    manifest = None
  if manifest is None or manifest.metadata.get('run', {}).get('evaluation_due'):
    return step - 1
  return step


# ---- Configuration and facts -----------------------------------------------------------------------------------------


def configuration(run: str | os.PathLike[str]) -> dict[str, str]:
  """Return the values of a run's `config.gin` as text, by name; nothing is imported.

  A path outside of the run is its last component, one in the run is relative to it, and a secret is `***`. Empty if
  there is no file, as for a run of a Python program, and with a warning if it is invalid.
  """
  path = files.path(run) / CONFIG_FILE
  try:
    text = untrusted.read_limited(files.path(run), CONFIG_FILE).decode('utf-8', errors='replace')
    bindings = syntax.bindings_of([syntax.read_text(text, str(path))])
  except FileNotFoundError:
    return {}
  except (OSError, CheckpointError, ConfigError) as error:
    _logger.warning('The configuration of %s is unknown: %s', os.fspath(run), error)
    return {}
  found = {}
  for binding in bindings:
    value = repr(_without_paths(binding.value, binding.arg_name or binding.selector, run))
    found[binding.key] = masked(binding.key, value)
  return found


def masked(name: str, value: str) -> str:
  """Return the text of a value with masks instead of secrets."""
  return masking.masked_words([f'{name}={value}'])[0].partition('=')[2]


def _without_paths(value: Any, name: str, run: str | os.PathLike[str]) -> Any:
  """Return a value of gin whose strings have no paths of the machine."""
  if isinstance(value, str):
    return _without_path(value, name, run)
  if isinstance(value, dict):
    return {
      _without_paths(key, '', run): _without_paths(each, str(key), run)
      for key, each in value.items()
    }
  if isinstance(value, (list, tuple)):
    return type(value)(_without_paths(each, name, run) for each in value)
  return value


def _without_path(text: str, name: str, run: str | os.PathLike[str]) -> str:
  is_path = _PATH.match(text) or ('/' in text and _PATH_NAME.fullmatch(name))
  if not is_path or text.startswith(_HUB):
    return text
  whole = files.real_path(text) if '://' not in text else text
  root = files.real_path(run)
  if whole.startswith(f'{root}/'):
    return whole.removeprefix(f'{root}/')
  return text.rstrip('/').rpartition('/')[2]


def facts(run: str | os.PathLike[str]) -> dict[str, Any]:
  """Return what the files of a run tell about it, as numbers and texts by name; what is unknown is left out.

  The names are 'num_parameters', 'hardware', 'num_processes', 'network/...', 'optimizer/...', 'data/...' (with a hash
  of the content if the source has one), 'versions/...' and 'random_seed'. No fact names the machine or a path.
  """
  root = files.path(run)
  found: dict[str, Any] = {}
  try:
    match = _PARAMETERS.search(untrusted.read_regular(root / 'model-info.txt'))
  except (OSError, CheckpointError):
    match = None
  if match is not None:
    found['num_parameters'] = int(match[1].replace(b',', b''))
  for event in _events(root):
    if event.kind == 'start':
      found |= {name: event.details.get(name) for name in ('hardware', 'num_processes')}
      found['versions/t5x_lite'] = event.details.get('version')
  for step in reversed(checkpoints.all_steps(run)):
    folder = checkpoints.get_checkpoint_dir(run, step)
    try:
      manifest = checkpoints.read_manifest(folder)
    except CheckpointError:
      continue
    if manifest is None:
      continue
    metadata = manifest.metadata
    run_facts = metadata.get('run', {})
    found |= _flat('network', metadata.get('network', {}))
    found |= _flat('optimizer', metadata.get('optimizer', {}))
    found |= _flat('data', {**run_facts.get('data', {}), 'content': _data_content(folder)})
    found |= _flat('versions', manifest.versions)
    found['random_seed'] = run_facts.get('random_seed')
    break
  texts = {}
  for name, value in found.items():
    if value is None:
      continue
    texts[name] = value
    if isinstance(value, str):
      texts[name] = masked(name, _without_path(value, name, run))
  return texts


def _events(root: files.Path) -> Iterator[runtime.Event]:
  try:
    yield from runtime.read_events(root / runtime.EVENTS_FILE)
  except (OSError, CheckpointError):
    return


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """Return nested values as '<prefix>/<name>/...' to number or text."""
  found = {}
  for name, value in values.items():
    if isinstance(value, Mapping):
      found |= _flat(f'{prefix}/{name}', value)
    elif isinstance(value, (int, float, str)):
      found[f'{prefix}/{name}'] = value
    elif value is not None:
      found[f'{prefix}/{name}'] = json.dumps(value)
  return found


def _data_content(folder: str) -> Any:
  """Return what identifies the content of the data, by the position in it of the first process; None if unknown."""
  for path in sorted((files.path(folder) / 'dataset').glob('process_0-of-*/data_state.json.bin')):
    try:
      state = json.loads(untrusted.read_regular(path))
      return state['identity']['content']
    except (OSError, CheckpointError, ValueError, KeyError, TypeError):
      return None
  return None


# ---- Predictions -----------------------------------------------------------------------------------------------------


def predictions(
  run: str | os.PathLike[str], writer: str, step: int, limit: int = 100
) -> list[dict[str, Any]]:
  """Return the first predictions of an evaluation: 'index', 'inputs', 'targets', 'prediction', as the file has them.

  Args:
    run: run directory.
    writer: 'inference_eval/<task>'.
    step: step of the evaluation.
    limit: largest number of examples.

  Returns:
    The rows; [] without the file.
  """
  path = files.path(run) / writer / f'{summaries.PREDICTIONS_PREFIX}{step}.jsonl'
  try:
    rows = [row for _, row in itertools.islice(json_lines.read(path), limit)]
  except (OSError, CheckpointError):
    return []
  return [row for row in rows if row is not None]
