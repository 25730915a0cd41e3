"""Saved positions of iterators: their file, the data that they belong to, and which rows are this process's."""

from collections.abc import Mapping
import json
from typing import Any

from t5x_lite.data.interfaces import DataState
from t5x_lite.errors import ConfigError, DataError

STATE_FILE = 'data_state.json'
# The most batches that may wait between an iterator and whoever uses them.
MAX_UNDELIVERED = 64
# A run that resumes in its MODEL_DIR always takes its data position.
RESTART_REMEDY = ('start another run from this checkpoint: another MODEL_DIR, with RestoreCheckpointConfig.path naming '
                  'it and restore_dataset = False')


def shard_rows(layout: Any) -> slice:
  """Returns which rows of a global batch are this process's.

  Raises:
    ConfigError: the batch does not divide.
  """
  if layout.batch_size % layout.num_shards:
    raise ConfigError(f'The batch size {layout.batch_size} does not divide over {layout.num_shards} data shards: '
                      f'choose a multiple of {layout.num_shards}.')
  per_shard = layout.batch_size // layout.num_shards
  return slice(layout.shard_id * per_shard, (layout.shard_id + 1) * per_shard)


def write_state(identity: Mapping[str, Any], **fields: Any) -> DataState:
  """Returns a saved position.

  Args:
    identity: everything that decides which rows come, fit for JSON; see `check_identity`.
    **fields: the position itself, fit for JSON.
  """
  return {STATE_FILE: json.dumps({'version': 1, 'identity': identity, **fields}, indent=1).encode('utf-8')}


def read_state(state: DataState) -> dict[str, Any]:
  """Returns what `write_state` saved: 'version', 'identity' and the fields.

  Raises:
    DataError: the position is missing, or a later version wrote it.
  """
  if STATE_FILE not in state:
    raise DataError(f'The saved data position has no {STATE_FILE!r}, only {sorted(state)}: {RESTART_REMEDY}.')
  decoded = json.loads(state[STATE_FILE])
  if decoded['version'] != 1:
    raise DataError(f"The saved data position has version {decoded['version']}, expected 1: it was written by a later "
                    f'version of this package. Update it, or {RESTART_REMEDY}.')
  return decoded


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
  """Raises if a saved position belongs to other data.

  Args:
    saved: the identity that was saved.
    now: that of the data which is read now.

  Raises:
    DataError: naming each difference.
  """
  now = json.loads(json.dumps(now))
  differences = [f'{key}: saved {saved.get(key)!r}, now {now.get(key)!r}'
                 for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
  if differences:
    raise DataError('The checkpoint holds a position in other data than this run reads (' + '; '.join(differences) +
                    f'). Resume with the same data configuration, or {RESTART_REMEDY}.')
