"""Record of evaluated checkpoints, with which an interrupted evaluation resumes.

`OUTPUT_DIR/evaluated.json` is replaced atomically after each checkpoint. It has the settings that the results depend
on, and the checkpoint and its metrics by step. The hash of its manifest identifies a checkpoint after renaming.
"""

from collections.abc import Mapping
import contextlib
import hashlib
import json
import logging
from typing import Any

import numpy as np

from t5x_lite import checkpoints
from t5x_lite import evaluation
from t5x_lite import losses
from t5x_lite import multihost
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

FILENAME = 'evaluated.json'
_VERSION = 1
_NUM_DIFFERENCES_SHOWN = 4
_logger = logging.getLogger(__name__)
_MAX_BYTES = 2**30


class EvalRecord:
  """Evaluated checkpoints of one output directory."""

  def __init__(self, output_dir: str, identity: Mapping[str, Any]):
    """Read the record; rename a damaged one with a warning, after which no checkpoint counts as evaluated.

    Args:
      output_dir: folder of results.
      identity: everything that the results depend on except the checkpoint, as JSON values.

    Raises:
      ConfigError: the folder has results of another configuration.
    """
    self._path = files.path(output_dir) / FILENAME
    self._identity = json.loads(json.dumps(identity))
    self._finished: dict[int, dict[str, Any]] = {}
    contents = self._read()
    if contents is None:
      return
    differences = _differences(contents['identity'], self._identity)
    if contents['finished'] and differences:
      shown = '; '.join(differences[:_NUM_DIFFERENCES_SHOWN])
      more = len(differences) - _NUM_DIFFERENCES_SHOWN
      if more > 0:
        shown += f'; and {more} more'
      raise ConfigError(
        f'{output_dir!r} has results of another configuration: {shown}. Choose another output_dir '
        f'(EVAL_OUTPUT_DIR), or delete {self._path} to replace the results.'
      )
    self._finished = {int(step): entry for step, entry in contents['finished'].items()}
    self._warn_of_earlier_losses(output_dir)

  def _warn_of_earlier_losses(self, output_dir: str) -> None:
    """Log a warning if checkpoints have losses by an earlier definition, which are kept."""
    steps = []
    for step, entry in self._finished.items():
      has_losses = any(name.startswith(evaluation.TRAINING_EVAL) for name in entry['metrics'])
      if has_losses and entry.get('means_version', 1) != losses.MEANS_VERSION:
        steps.append(step)
    if steps:
      _logger.warning(
        '%s has results of %d checkpoint(s) by an earlier version, which are kept: %s. To compare losses, evaluate '
        'all checkpoints into another output_dir (EVAL_OUTPUT_DIR).',
        output_dir,
        len(steps),
        losses.MEANS_CHANGED,
      )

  @property
  def results(self) -> dict[int, dict[str, float]]:
    """Metrics by step and full name, in ascending order of step."""
    return {
      step: {name: float(value) for name, value in self._finished[step]['metrics'].items()}
      for step in sorted(self._finished)
    }

  def path(self, step: int) -> str | None:
    """Return the path of the checkpoint evaluated at a step; None for random parameters."""
    return self._finished[step]['path']

  def is_done(self, path: str, step: int) -> bool:
    """Return whether this checkpoint is evaluated, as opposed to another checkpoint of the same step."""
    entry = self._finished.get(step)
    if entry is None:
      return False
    fingerprint = _fingerprint(path)
    if fingerprint is None or entry['fingerprint'] is None:
      is_same = entry['path'] is not None and files.real_path(path) == files.real_path(
        entry['path']
      )
    else:
      is_same = fingerprint == entry['fingerprint']
    if not is_same:
      _logger.warning(
        'Step %s was evaluated from another checkpoint (%s); its results are replaced by those of %s.',
        step,
        entry['path'],
        path,
      )
    return is_same

  def add(self, step: int, path: str | None, metrics: Mapping[str, float]) -> None:
    """Record an evaluated checkpoint; the record is on disk when this returns."""
    self._finished[step] = {
      'path': path,
      'fingerprint': None if path is None else _fingerprint(path),
      'metrics': {name: _to_json(value) for name, value in metrics.items()},
      'means_version': losses.MEANS_VERSION,
    }
    if multihost.is_lead():
      body = {
        'version': _VERSION,
        'identity': self._identity,
        'finished': {str(step): self._finished[step] for step in sorted(self._finished)},
      }
      write_json(self._path, {'sha256': _digest(body), 'contents': body})

  def _read(self) -> dict[str, Any] | None:
    data = _read_on_lead(self._path)
    if data is None:
      return None
    try:
      document = json.loads(data)
      body = document['contents']
      intact = document['sha256'] == _digest(body)
    except (ValueError, KeyError, TypeError, RecursionError):
      intact = False
    if intact:
      if body['version'] != _VERSION:
        raise ConfigError(
          f'{self._path} has version {body["version"]}; this version of t5x_lite supports version '
          f'{_VERSION}. Update t5x_lite, or choose another output_dir.'
        )
      return body
    if multihost.is_lead():
      aside = self._path.with_name(f'{FILENAME}.damaged')
      number = 1
      while aside.exists():
        number += 1
        aside = self._path.with_name(f'{FILENAME}.damaged-{number}')
      if files.is_remote(self._path):
        files.write(aside, data)
        files.remove(self._path)
      else:
        self._path.rename(aside)
      _logger.warning(
        '%s is damaged and was renamed to %s. Its checkpoints are evaluated again.',
        self._path,
        aside.name,
      )
    return None


def _read_on_lead(path: files.Path) -> bytes | None:
  """Return the contents that the lead process reads, on every process; None without a file."""
  data = None
  if multihost.is_lead():
    with contextlib.suppress(FileNotFoundError):
      data = untrusted.read_regular(path, _MAX_BYTES)
  length = int(multihost.broadcast_from_lead(np.int32(-1 if data is None else len(data))))
  if length < 0:
    return None
  if data is None:
    content = np.zeros(length, np.uint8)
  else:
    content = np.frombuffer(data, np.uint8)
  return multihost.broadcast_from_lead(content).tobytes()


def write_json(path: files.Path, value: Any) -> None:
  """Write a JSON file atomically and wait until it is on disk."""
  files.write(path, json.dumps(value, indent=1, allow_nan=False) + '\n')


def _to_json(value: float) -> float | str:
  """Return a number as a JSON value that `float` converts back."""
  if abs(value) < float('inf'):
    return value
  return repr(value)


def _digest(body: Any) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _fingerprint(path: str) -> str | None:
  """Return the hash of a checkpoint's manifest, which has the hashes of its files; None without a manifest."""
  try:
    if (found := checkpoints.read_manifest(path)) is None:
      return None
    return _digest(
      {name: entry for name, entry in found.files.items() if name.startswith('state/')}
    )
  except CheckpointError:
    return None


def _differences(former: Any, now: Any, name: str = '') -> list[str]:
  """Return the differences between two trees of JSON values, one clause each."""
  if isinstance(former, dict) and isinstance(now, dict):
    parts = []
    for key in sorted({*former, *now}):
      full_name = f'{name}.{key}' if name else key
      parts += _differences(former.get(key), now.get(key), full_name)
    return parts
  if former == now:
    return []
  return [f'{name} was {former!r} and is {now!r}']
