"""Task feature lengths of a split, computed from its examples and kept in a file of the run."""

from collections.abc import Callable, Mapping
import json
import logging
import os
import time
from typing import Any, NamedTuple

from t5x_lite import multihost
from t5x_lite.data.builtin_tasks import check_not_empty
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import SplitLengths
from t5x_lite.data.sources.base import get_source
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

# File of kept lengths in the folder of a run or of results.
LENGTHS_FILE = 'feature_lengths.json'
# Lengths for training: the largest one, and of what all are multiples.
_MAX_LENGTH = 1024
_MULTIPLE = 8
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
  identity = _identity(
    cfg, split, num_examples=num_examples, decodes=decodes, feature_converter=str(feature_converter)
  )

  def compute() -> dict[str, Any]:
    _logger.info(
      'DatasetConfig.task_feature_lengths of %r are None: reading the split %r for its longest examples.',
      cfg.name,
      cfg.split,
    )
    return {'task_feature_lengths': _Measured.of(cfg, split).longest}

  found, origin = _remembered(split, identity, folder, compute)
  lengths = found['task_feature_lengths']
  _logger.info(
    'task_feature_lengths of %r, split %r: %s, those of the longest examples%s.',
    cfg.name,
    cfg.split,
    lengths,
    origin and f' ({origin})',
  )
  return cfg.changed(task_feature_lengths=lengths)


def lengths_for_training(
  cfg: DatasetConfig, *, feature_converter: Any = 'encoder_decoder', folder: str | None = None
) -> dict[str, int]:
  """Return feature lengths for the training data of `cfg`, whose `task_feature_lengths` are None.

  A length is that of the longest example, at most 1024, rounded up to a multiple of 8. One line of the log has them and
  how many examples are cut. All processes get those of the lead process.

  Args:
    cfg: options of the training data.
    feature_converter: see `open_train_iterator`.
    folder: see `with_feature_lengths`.

  Raises:
    ConfigError: the source or a preprocessor of the task needs given lengths.
    DataError: the task, mixture or split is unknown, or the split is empty.
  """
  split = get_source(cfg).measure(feature_converter, None, False)
  identity = _identity(
    cfg, split, feature_converter=str(feature_converter), at_most=_MAX_LENGTH, multiple=_MULTIPLE
  )

  def compute() -> dict[str, Any]:
    measured = _Measured.of(cfg, split)
    lengths = {}
    for feature, longest in measured.longest.items():
      lengths[feature] = -(-min(longest, _MAX_LENGTH) // _MULTIPLE) * _MULTIPLE
    return {
      'task_feature_lengths': lengths,
      'longest': measured.longest,
      'num_examples': measured.num_examples,
      'num_cut': measured.num_longer,
    }

  found, _ = _remembered(split, identity, folder, compute)
  lengths = found['task_feature_lengths']
  parts = [
    f'{name} {length} (longest {found["longest"][name]})' for name, length in lengths.items()
  ]
  _logger.info(
    'Lengths  %s; %s of %s records are cut',
    ', '.join(parts),
    f'{found["num_cut"]:,}',
    f'{found["num_examples"]:,}',
  )
  return lengths


def _identity(cfg: DatasetConfig, split: SplitLengths, **options: Any) -> dict[str, Any]:
  """Return what determines the lengths of a split, as values of JSON."""
  identity = {
    'source': cfg.source,
    'mixture_or_task_name': cfg.name,
    'split': cfg.split,
    'seed': cfg.effective_seed,
    'shuffle': cfg.shuffle,
    'use_cached': cfg.use_cached,
    **options,
    **(split.identity or {}),
  }
  return json.loads(json.dumps(identity))


def _remembered(
  split: SplitLengths,
  identity: Mapping[str, Any],
  folder: str | None,
  compute_fn: Callable[[], dict[str, Any]],
) -> tuple[dict[str, Any], str]:
  """Return the results of `compute_fn` with a remark on their file, which has them if the data is the same."""
  path = None
  if folder is not None and split.identity is not None:
    path = files.path(folder) / LENGTHS_FILE
  entries: list[Mapping[str, Any]] = []
  if path is not None and multihost.is_lead():
    entries = _read(path)
  found = next((entry for entry in entries if entry['data'] == identity), None)
  found = multihost.broadcast_json(found)
  if found is not None:
    return found, f'from {path}'
  found = multihost.broadcast_json(compute_fn())
  if path is None:
    return found, ''
  if not multihost.is_lead():
    return found, f'kept in {os.fspath(path)}'
  return found, _write(path, [*entries, {'data': identity, **found}])


class _Measured(NamedTuple):
  """Lengths of the examples of a split.

  Attributes:
    longest: task feature name to the length of the longest example, at least 1.
    num_examples: number of examples.
    num_longer: number of examples with a feature above `_MAX_LENGTH`.
  """

  longest: dict[str, int]
  num_examples: int
  num_longer: int

  @classmethod
  def of(cls, cfg: DatasetConfig, split: SplitLengths) -> '_Measured':
    """Return the lengths of all examples of a split."""
    longest: dict[str, int] = {}
    num_longer = 0
    last_line = time.monotonic()
    number = 0
    for number, example in enumerate(split.examples, 1):
      for feature, length in example.items():
        longest[feature] = max(longest.get(feature, 1), length)
      num_longer += any(length > _MAX_LENGTH for length in example.values())
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
    return cls(longest, number, num_longer)


def _read(path: files.Path) -> list[Mapping[str, Any]]:
  """Return the entries of a file of lengths; none if it is missing or damaged."""
  try:
    entries = json.loads(untrusted.read_regular(path))
    return [
      {**entry, 'data': entry['data'], 'task_feature_lengths': dict(entry['task_feature_lengths'])}
      for entry in entries
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
