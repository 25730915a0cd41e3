"""Task feature lengths of a split, computed from its examples and kept in a file of the run."""

from collections.abc import Mapping
import dataclasses
import json
import logging
import os
import time
from typing import Any

from t5x_lite import multihost
from t5x_lite.data.builtin_tasks import check_not_empty
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import SplitLengths
from t5x_lite.data.sources.base import get_source
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

# File of kept lengths in the folder of a run or of results.
LENGTHS_FILE = 'feature_lengths.json'
# Interval of the lines about a long computation.
_SECONDS_PER_LINE = 30.0

_logger = logging.getLogger(__name__)


def with_feature_lengths(
  cfg: DatasetConfig,
  *,
  feature_converter: Any = 'encoder_decoder',
  num_examples: int | None = None,
  decodes: bool = False,
  folder: str | None = None,
) -> DatasetConfig:
  """Return `cfg` with the lengths of its longest examples, if its `task_feature_lengths` are None.

  They are the exact maxima over the tasks, in ids with the end-of-sequence id, like those of seqio's Evaluator. All
  processes get those of the lead process.

  Args:
    cfg: options of a dataset for evaluation or inference.
    feature_converter: see `open_train_iterator`.
    num_examples: maximal number of examples of each task, the first ones; None for the entire split. With
      `cfg.pack`, which reads more, the entire split is used.
    decodes: whether only tasks with metrics count, if there are any.
    folder: folder of the run, whose file keeps the lengths until the data changes; None keeps none. Lengths of sources
      that name no files, such as a seqio.FunctionDataSource, are never kept.

  Raises:
    ConfigError: the source or a preprocessor of the task needs given lengths.
    DataError: the task, mixture or split is unknown, or the split is empty.
  """
  if cfg.task_feature_lengths is not None:
    return cfg
  num_examples = None if cfg.pack else num_examples
  split = get_source(cfg).measure(feature_converter, num_examples, decodes)
  identity = json.loads(
    json.dumps(
      {
        'source': cfg.source,
        'mixture_or_task_name': cfg.name,
        'split': cfg.split,
        'seed': cfg.effective_seed,
        'shuffle': cfg.shuffle,
        'use_cached': cfg.use_cached,
        'num_examples': num_examples,
        'decodes': decodes,
        'feature_converter': str(feature_converter),
        **(split.identity or {}),
      }
    )
  )
  if folder is None or split.identity is None:
    path = None
  else:
    path = files.path(folder) / LENGTHS_FILE
  if path is None or not multihost.is_lead():
    entries = []
  else:
    entries = _read(path)
  lengths = next(
    (entry['task_feature_lengths'] for entry in entries if entry['data'] == identity), None
  )
  lengths = multihost.broadcast_json(lengths)
  if path is None:
    origin = ''
  elif lengths is not None:
    origin = f'from {os.fspath(path)}'
  else:
    origin = f'kept in {os.fspath(path)}'
  if lengths is None:
    lengths = multihost.broadcast_json(_longest(cfg, split))
    if path is not None and multihost.is_lead():
      origin = _write(path, [*entries, {'data': identity, 'task_feature_lengths': lengths}])
  _logger.info(
    'task_feature_lengths of %r, split %r: %s, those of the longest examples%s.',
    cfg.name,
    cfg.split,
    lengths,
    origin and f' ({origin})',
  )
  return dataclasses.replace(cfg, task_feature_lengths=lengths)


def _longest(cfg: DatasetConfig, split: SplitLengths) -> dict[str, int]:
  """Return the maximum of each feature, at least 1."""
  _logger.info(
    'DatasetConfig.task_feature_lengths of %r are None: reading the split %r for its longest examples.',
    cfg.name,
    cfg.split,
  )
  longest: dict[str, int] = {}
  last_line = time.monotonic()
  number = 0
  for number, example in enumerate(split.examples, 1):
    for feature, length in example.items():
      longest[feature] = max(longest.get(feature, 1), length)
    if time.monotonic() - last_line > _SECONDS_PER_LINE:
      last_line = time.monotonic()
      _logger.info(
        '%s, split %s: read %s examples, the longest have %s.',
        cfg.name,
        cfg.split,
        f'{number:,}',
        longest,
      )
  check_not_empty(longest, cfg.split, cfg.name)
  return longest


def _read(path: files.Path) -> list[Mapping[str, Any]]:
  """Return the entries of a file of lengths; none if it is missing or damaged."""
  try:
    return [
      {'data': entry['data'], 'task_feature_lengths': dict(entry['task_feature_lengths'])}
      for entry in json.loads(untrusted.read_regular(path))
    ]
  except FileNotFoundError:
    return []
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    _logger.warning('%s cannot be read and is replaced: %s.', path, error)
    return []


def _write(path: files.Path, entries: list[Mapping[str, Any]]) -> str:
  """Write the entries, and return a remark for the log."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(entries, indent=1), durable=False)
  except OSError as error:
    return f'not kept: {error}'
  return f'kept in {os.fspath(path)}'
