"""Atomic writing of a Hugging Face folder, one array at a time."""

from collections.abc import Callable, Sequence
import os
import pathlib
import shutil
from typing import Any
import uuid

import numpy as np

from t5x_lite import checks
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints.hugging_face import model_card
from t5x_lite.checkpoints.hugging_face import names
from t5x_lite.checkpoints.hugging_face import tokenizer_files
from t5x_lite.checkpoints.hugging_face.architecture import Architecture
from t5x_lite.checkpoints.hugging_face.config_json import GENERATION_CONFIG_FILE
from t5x_lite.checkpoints.hugging_face.families import Family
from t5x_lite.checkpoints.hugging_face.folder import CONFIG_FILE
from t5x_lite.checkpoints.hugging_face.names import TensorRule
from t5x_lite.checkpoints.hugging_face.tensor_files import SafetensorsWriter
from t5x_lite.checkpoints.hugging_face.tensor_files import write_json
from t5x_lite.errors import CheckpointError
from t5x_lite.storage import files

DTYPES = ('float32', 'bfloat16', 'float16')
# Limit of transformers before version 5.
MAX_SHARD_BYTES = 5 * 10**9


def write_folder(
  output: str | os.PathLike[str],
  architecture: Architecture,
  family: Family,
  read_array: Callable[[str], np.ndarray],
  *,
  dtype: str | None = None,
  max_shard_bytes: int = MAX_SHARD_BYTES,
  tokenizer: Any = None,
  source_note: str = '',
  origin: model_card.Origin = model_card.Origin(),
  order: Sequence[str] | None = None,
  progress: Callable[[int, int, str], None] | None = None,
) -> None:
  """Write a folder that transformers loads: config.json, weights, tokenizer, a model card.

  The folder gets its name when all files are on disk. An interrupted call may leave a folder `<output>.tmp-...`. For an
  object store, the folder is written to the folder of temporary files and then uploaded, config.json last.

  Args:
    output: path of the folder; must not exist.
    architecture: architecture of the network.
    family: family of the model, which has the classes of transformers and the special tokens.
    read_array: function from one of our names, in the layout 't5' without `target/`, to the array; called once per
      name.
    dtype: dtype of the weights, one of `DTYPES`; None for the dtypes of the arrays.
    max_shard_bytes: limit for the weights in one file, in bytes; larger weights are divided into shards.
    tokenizer: see `tokenizer_files.write`.
    source_note: origin of the weights as a sentence, for the model card.
    origin: further facts about the origin, for the model card.
    order: all our names in the order of reading and writing; None for the order of `names.tensor_table`.
    progress: called as (number of arrays written, number of all arrays, name) after each array.

  Raises:
    OSError: the output cannot be written.
    CheckpointError: the output exists; the family cannot express the architecture; an array has a
      wrong shape, or numbers that overflow `dtype`.
  """
  final = files.path(output)
  rules = _ordered(names.tensor_table(architecture), order)
  checks.check(
    'write_folder',
    {'dtype': dtype, 'max_shard_bytes': max_shard_bytes},
    CheckpointError,
    dtype=checks.one_of(DTYPES).or_none(),
    max_shard_bytes=checks.number(at_least=1, integer=True),
  )
  discovery.check_free(final)
  architecture.to_config_json(family, dtype)  # raises before anything is read

  def write(folder: pathlib.Path) -> None:
    stored = _write_weights(folder, rules, read_array, dtype, max_shard_bytes, progress)
    write_json(folder / GENERATION_CONFIG_FILE, architecture.special_ids())
    written = tokenizer_files.write(folder, family, tokenizer, vocab_size=architecture.vocab_size)
    card = model_card.text_of(
      architecture, family, stored, source_note, has_tokenizer=bool(written), origin=origin
    )
    files.write(folder / model_card.README_FILE, card, durable=False)
    config = architecture.to_config_json(family, stored)
    tokenizer_class = tokenizer_files.class_name(folder, tokenizer)
    if tokenizer_class is not None:
      config['tokenizer_class'] = tokenizer_class
    # Written last: without this file the folder is not valid.
    write_json(folder / CONFIG_FILE, config)

  if files.is_remote(final):
    from t5x_lite.storage import uploads

    with uploads.uploaded_folder(final, last=CONFIG_FILE) as local:
      write(local)
      discovery.check_free(final)
    return
  temporary = final.with_name(f'{final.name}{discovery.WRITING_INFIX}{uuid.uuid4().hex[:8]}')
  try:
    temporary.mkdir(parents=True)
    write(temporary)
    files.fsync_tree(temporary)
    discovery.check_free(final)
    temporary.rename(final)
    files.fsync(final.parent)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)  # does not exist after the rename


def _ordered(rules: Sequence[TensorRule], order: Sequence[str] | None) -> list[TensorRule]:
  """Return `rules` in the `order` of our names."""
  by_name = {rule.ours: rule for rule in rules}
  if order is not None and sorted(order) != sorted(by_name):
    unexpected = sorted(set(order) ^ set(by_name)) or ['a name that occurs twice']
    raise CheckpointError(
      f'`order` must list each of the {len(by_name)} arrays of the network exactly once, got '
      f'{len(order)} names. Correct {unexpected[0]}.'
    )
  return [by_name[name] for name in order or by_name]


def _write_weights(folder, rules, read_array, dtype, max_shard_bytes, progress) -> str:
  """Write all tensors and return the dtype of most numbers."""
  counts: dict[str, int] = {}
  with SafetensorsWriter(
    folder, [name for rule in rules for name in rule.theirs], max_shard_bytes
  ) as writer:
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
  """Return `array` in `dtype`, after a check of its shape, dtype and range."""
  if array.shape != rule.shape or array.dtype.name not in (*DTYPES, 'float64'):
    names.raise_problems(
      [
        f'{names.describe(rule)} must have this shape and a dtype of {", ".join(DTYPES)}, got '
        f'{array.shape} and {array.dtype.name}'
      ],
      'the source',
    )
  if dtype is None or array.dtype.name == dtype:
    return array
  with np.errstate(over='ignore'):
    cast = array.astype(np.dtype(dtype))
  if dtype == 'float16' and not np.array_equal(np.isfinite(array), np.isfinite(cast)):
    raise CheckpointError(
      f'The array {rule.ours} has values beyond 65504, the maximum of dtype=float16. Choose '
      'dtype=bfloat16.'
    )
  return cast
