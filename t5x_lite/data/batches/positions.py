"""Saved positions of iterators: their file, the identity of their data, and the rows of each process."""

from collections.abc import Mapping, Sequence
import io
import json
from typing import Any

import numpy as np

from t5x_lite import checks
from t5x_lite.data.interfaces import DataState
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.errors import DataError

STATE_FILE = 'data_state.json'
# Maximal number of batches in a queue after an iterator.
MAX_UNDELIVERED = 64
# A run that resumes in its MODEL_DIR always uses its data position.
RESTART_REMEDY = (
  'start another run from this checkpoint: another MODEL_DIR, with RestoreCheckpointConfig.path naming '
  'it and restore_dataset = False'
)


def shard_rows(layout: Any) -> slice:
  """Return this process's rows of a global batch.

  Raises:
    ConfigError: the batch size is not a multiple of the number of data shards.
  """
  if layout.batch_size % layout.num_shards:
    raise checks.invalid(
      '',
      'batch_size',
      f'a multiple of {layout.num_shards}, the number of data shards',
      layout.batch_size,
    )
  per_shard = layout.batch_size // layout.num_shards
  return slice(layout.shard_id * per_shard, (layout.shard_id + 1) * per_shard)


def write_state(identity: Mapping[str, Any], **fields: Any) -> DataState:
  """Return the file of a saved position.

  Args:
    identity: JSON values that determine the rows and their order; see `check_identity`.
    **fields: the position, as JSON values.
  """
  return {
    STATE_FILE: json.dumps({'version': 1, 'identity': identity, **fields}, indent=1).encode('utf-8')
  }


def read_state(state: DataState) -> dict[str, Any]:
  """Return the values saved by `write_state`: 'version', 'identity' and the fields.

  Raises:
    DataError: the position is missing, or a later version of t5x_lite wrote it.
  """
  if STATE_FILE in state:
    decoded = json.loads(state[STATE_FILE])
  else:
    decoded = {}
  if decoded.get('version') != 1:
    raise DataError(
      f'The saved data position must have {STATE_FILE!r} of version 1, got {sorted(state)} of version '
      f'{decoded.get("version")}. Use the version of t5x_lite that wrote it, or {RESTART_REMEDY}.'
    )
  return decoded


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
  """Raise if a saved position belongs to other data.

  Args:
    saved: the saved identity.
    now: the identity of the current data.

  Raises:
    DataError: the message has the sources of the data if these differ, otherwise all differences.
  """
  now = json.loads(json.dumps(now))
  differences = [
    f'{key}: saved {saved.get(key)!r}, now {now.get(key)!r}'
    for key in sorted({*saved, *now})
    if saved.get(key) != now.get(key)
  ]
  sources = (saved.get('source'), now.get('source'))
  if None not in sources and sources[0] != sources[1]:  # Other differences follow from this one.
    raise DataError(
      f'The checkpoint holds a position in data of the source {sources[0]!r}, and this run reads the source '
      f'{sources[1]!r}. Resume with --gin.DATA_SOURCE={sources[0]}, or {RESTART_REMEDY}.'
    )
  if differences:
    raise DataError(
      'The checkpoint holds a position in other data than those of this run ('
      + '; '.join(differences)
      + f'). Resume with the same data configuration, or {RESTART_REMEDY}.'
    )


def pack_batches(batches: Sequence[HostBatch]) -> bytes:
  """Return a file with batches that were read and not used."""
  buffer = io.BytesIO()
  arrays: dict[str, Any] = {}
  for i, batch in enumerate(batches):
    for name, rows in batch.items():
      arrays[f'{i}/{name}'] = rows
  np.savez(buffer, **arrays)
  return buffer.getvalue()


def unpack_batches(content: bytes) -> list[HostBatch]:
  """Return the batches of `pack_batches`."""
  batches: list[HostBatch] = []
  with np.load(io.BytesIO(content)) as arrays:
    for key in arrays.files:
      index, _, name = key.partition('/')
      if int(index) == len(batches):
        batches.append({})
      batches[int(index)][name] = arrays[key]
  return batches
