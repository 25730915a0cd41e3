"""Writing of a folder in the form of Hugging Face, whole or not at all, one array at a time."""

from collections.abc import Callable, Sequence
import os
import pathlib
import shutil
from typing import Any
import uuid

import numpy as np

from t5x_lite import files
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints.hugging_face import model_card, names, tokenizer_files
from t5x_lite.checkpoints.hugging_face.architecture import Architecture
from t5x_lite.checkpoints.hugging_face.families import Family
from t5x_lite.checkpoints.hugging_face.folder import CONFIG_FILE
from t5x_lite.checkpoints.hugging_face.names import TensorRule
from t5x_lite.checkpoints.hugging_face.tensor_writer import SafetensorsWriter, write_json
from t5x_lite.errors import CheckpointError

GENERATION_CONFIG_FILE = 'generation_config.json'
DTYPES = ('float32', 'bfloat16', 'float16')
# transformers' own limit until its version 5.
MAX_SHARD_BYTES = 5 * 10**9


def write_folder(
    output: str | os.PathLike[str], architecture: Architecture, family: Family,
    read_array: Callable[[str], np.ndarray], *, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer: Any = None, source_note: str = '', order: Sequence[str] | None = None,
    progress: Callable[[int, int, str], None] | None = None) -> None:
  """Writes a folder that transformers loads: config.json, weights, tokenizer, a model card.

  It has its name when everything is on the disk. What an interrupted call leaves is called `<output>.tmp-...`.

  Args:
    output: the folder; must not exist.
    architecture: of the network.
    family: says the classes of transformers and special tokens.
    read_array: returns our array of a name, in the layout 't5' without `target/`; called once for each.
    dtype: of the weights, one of `DTYPES`; None keeps what `read_array` returns.
    max_shard_bytes: larger weights are divided into shards of at most so many bytes.
    tokenizer: see `tokenizer_files.write`.
    source_note: where the weights come from, for the model card.
    order: our names in the order in which to ask for the arrays, and to write them; None for that of
      `names.tensor_table`.
    progress: called as (arrays done, arrays in all, name) after each array.

  Raises:
    CheckpointError: the output exists; the family cannot express the architecture; an array has another shape, or
      numbers that `dtype` cannot hold.
  """
  final = pathlib.Path(output)
  rules = _ordered(names.tensor_table(architecture), order)
  _check_arguments(final, dtype, max_shard_bytes)
  architecture.to_config_json(family, dtype)  # refuses before anything is read
  temporary = final.with_name(f'{final.name}{discovery.WRITING_INFIX}{uuid.uuid4().hex[:8]}')
  try:
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
  except OSError as error:
    raise CheckpointError(_refused(final, error)) from error
  try:
    stored = _write_weights(temporary, rules, read_array, dtype, max_shard_bytes, progress)
    write_json(temporary / GENERATION_CONFIG_FILE, {
        'decoder_start_token_id': family.decoder_start_token_id, 'eos_token_id': family.eos_token_id,
        'pad_token_id': family.pad_token_id})
    has_tokenizer = bool(tokenizer_files.write(temporary, family, tokenizer, vocab_size=architecture.vocab_size))
    model_card.write(temporary, architecture, family, stored, source_note, has_tokenizer)
    # Without this file a folder is none.
    write_json(temporary / CONFIG_FILE, architecture.to_config_json(family, stored))
    files.fsync_tree(temporary)
    if os.path.lexists(final):
      raise CheckpointError(_exists(final))
    temporary.rename(final)
    files.fsync(final.parent)
  except OSError as error:
    if error.filename is not None and temporary.name not in os.fsdecode(error.filename):
      raise  # about what is read
    raise CheckpointError(_refused(final, error)) from error
  finally:
    shutil.rmtree(temporary, ignore_errors=True)  # nothing is there after the rename


def _ordered(rules: Sequence[TensorRule], order: Sequence[str] | None) -> list[TensorRule]:
  """Returns `rules` in the `order` of our names."""
  if order is None:
    return list(rules)
  by_name = {rule.ours: rule for rule in rules}
  if sorted(order) != sorted(by_name):
    odd = sorted(set(order) ^ set(by_name)) or ['one that stands there twice']
    raise CheckpointError(f'got an order of {len(order)} arrays; expected each of the {len(by_name)} of the network '
                          f'once. Look at {odd[0]}.')
  return [by_name[name] for name in order]


def _refused(path: pathlib.Path, error: OSError) -> str:
  return f'{str(path)!r} could not be written: {error.strerror or error}. Make room, or change what stands there.'


def _exists(path: pathlib.Path) -> str:
  return f'{str(path)!r} exists already; expected a new folder. Give another name, or remove it.'


def _check_arguments(output: pathlib.Path, dtype: Any, max_shard_bytes: Any) -> None:
  if os.path.lexists(output):
    raise CheckpointError(_exists(output))
  if dtype is not None and dtype not in DTYPES:
    raise CheckpointError(f'got dtype={dtype!r}; expected one of {", ".join(DTYPES)}, or None for that of the source.')
  if not isinstance(max_shard_bytes, int) or isinstance(max_shard_bytes, bool) or max_shard_bytes < 1:
    raise CheckpointError(f'got max_shard_bytes={max_shard_bytes!r}; expected a positive number of bytes.')


def _write_weights(folder, rules, read_array, dtype, max_shard_bytes, progress) -> str:
  """Writes all tensors; returns the dtype that most numbers have."""
  counts: dict[str, int] = {}
  with SafetensorsWriter(folder, [name for rule in rules for name in rule.theirs], max_shard_bytes) as writer:
    for done, rule in enumerate(rules, start=1):
      array = _cast(rule, np.asarray(read_array(rule.ours)), dtype)
      counts[array.dtype.name] = counts.get(array.dtype.name, 0) + array.size
      for name, tensor in rule.to_theirs(array):
        writer.write(name, tensor)
      del array, tensor
      if progress is not None:
        progress(done, len(rules), rule.ours)
  return max(counts, key=counts.__getitem__)


def _cast(rule: TensorRule, array: np.ndarray, dtype: str | None) -> np.ndarray:
  """Returns `array` in `dtype`."""
  if array.shape != rule.shape:
    raise CheckpointError(f'got {rule.ours} of shape {array.shape}; expected {names.describe(rule)}.')
  if array.dtype.name not in (*DTYPES, 'float64'):
    raise CheckpointError(f'got {rule.ours} of dtype {array.dtype.name}; expected one of {", ".join(DTYPES)}.')
  if dtype is None or array.dtype.name == dtype:
    return array
  with np.errstate(over='ignore'):
    cast = array.astype(np.dtype(dtype))
  if dtype == 'float16' and not np.array_equal(np.isfinite(array), np.isfinite(cast)):
    raise CheckpointError(f'got {rule.ours} with numbers beyond 65504; expected what dtype=float16 can hold. Choose '
                          'dtype=bfloat16.')
  return cast
