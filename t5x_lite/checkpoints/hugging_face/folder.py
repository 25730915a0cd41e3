"""A folder in the form of Hugging Face, read as a network of ours, one array at a time."""

from collections.abc import Iterator
import contextlib
import functools
import os
import pathlib
from typing import Any

import jax
import numpy as np

from t5x_lite.checkpoints.hugging_face import config_json, families, names
from t5x_lite.checkpoints.hugging_face.architecture import Architecture
from t5x_lite.checkpoints.hugging_face.names import LM_HEAD, SHARED, TensorRule
from t5x_lite.checkpoints.hugging_face.tensor_files import INDEX_FILE, SINGLE_FILE, SafetensorsFolder
from t5x_lite.errors import CheckpointError, T5xLiteError, did_you_mean

CONFIG_FILE = 'config.json'
_WEIGHTS = (SINGLE_FILE, INDEX_FILE, 'pytorch_model.bin', 'pytorch_model.bin.index.json', 'flax_model.msgpack',
            'tf_model.h5')


def is_hugging_face_folder(path: str | os.PathLike[str]) -> bool:
  """Returns whether `path` is a folder in the form of Hugging Face: a `config.json`, and weights of any kind.

  It may be one that cannot be read: `HuggingFaceFolder` then says why.
  """
  folder = pathlib.Path(path)
  has_config = (folder / CONFIG_FILE).is_file() or (folder / 'adapter_config.json').is_file()
  return has_config and (any((folder / name).exists() for name in _WEIGHTS) or
                         next(folder.glob('*.safetensors'), None) is not None)


class HuggingFaceFolder:
  """The weights of a T5 model as transformers saves them: `config.json` and safetensors.

  Everything but values is read and checked when it is made. Names are those of the layout 't5', without `target/`.

  Attributes:
    path: of the folder.
    config: its `config.json`.
    family: which family of models it is of.
    architecture: of the network.
    tensors: the tensors by their own names.
    rules: our arrays and the tensors that hold them.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Opens the folder.

    Args:
      path: of the folder.

    Raises:
      CheckpointError: another type of model, weights in another format, damaged files, or tensors that are missing,
        surplus or misshapen.
    """
    self.path = pathlib.Path(path)
    self.config = self._read_config()
    with self._named():
      config_json.model_type(self.config)
    self.tensors = SafetensorsFolder(self.path)
    self.family = families.family_of(self.config)
    with self._named():
      self._head = config_json.output_head(self.config, LM_HEAD in self.tensors.entries)
    if self._head == 'compare':
      self._head = 'embedding' if self._same_tables() else 'own'
    with self._named():
      fields = config_json.fields_of_config(self.config, LM_HEAD in self.tensors.entries)
      self.architecture = Architecture(**(fields | config_json.tied_fields(self._head)))
    self._check_size()
    self.rules = names.tensor_table(self.architecture)
    self._by_name = {rule.ours: self._located(rule) for rule in self.rules}
    self._check()

  @contextlib.contextmanager
  def _named(self) -> Iterator[None]:
    """Has errors about a config.json name the folder: several may be in question."""
    try:
      yield
    except T5xLiteError as error:
      raise type(error)(f'{self.path}: {error}') from error

  def _read_config(self) -> dict[str, Any]:
    path = self.path / CONFIG_FILE
    if not path.is_file():
      if (self.path / 'adapter_config.json').is_file():
        raise CheckpointError(f'{self.path} has an adapter alone (adapter_config.json); expected a whole model. Merge '
                              'it: model.merge_and_unload().save_pretrained(folder) with peft.')
      raise CheckpointError(f'{self.path} has no {CONFIG_FILE}; expected a folder that transformers saved. Download '
                            'that file too.')
    return config_json.read(self.path, CONFIG_FILE)

  @functools.cached_property
  def _embeddings(self) -> list[str]:
    """The tensors that hold the token embedding."""
    duplicates = [SHARED, *names.EMBEDDING_DUPLICATES, *([LM_HEAD] if self._head == 'embedding' else [])]
    return [name for name in duplicates if name in self.tensors.entries]

  def _same_tables(self) -> bool:
    present = [name for name in (SHARED, *names.EMBEDDING_DUPLICATES) if name in self.tensors.entries]
    return not present or self.tensors.equal(present[0], LM_HEAD)

  def _located(self, rule: TensorRule) -> TensorRule:
    """Returns `rule` with the names under which this folder has the tensors."""
    if rule.ours == names.TOKEN_EMBEDDING and self._embeddings:
      return TensorRule(rule.ours, (self._embeddings[0],), rule.shape, rule.transform)
    return rule

  def _check_size(self) -> None:
    """Refuses a config.json of far more layers or experts than there are tensors, before their names are made up."""
    arch, number = self.architecture, len(self.tensors.entries)
    for what, wanted in (('layers', arch.num_encoder_layers + arch.num_decoder_layers), ('experts', arch.num_experts)):
      if wanted > number:
        raise CheckpointError(f'{self.path}: {CONFIG_FILE} says there are {wanted} {what}, and the folder holds '
                              f'{number} tensors; expected the config.json of the same model.')

  def _check(self) -> None:
    """Compares names, shapes and dtypes with those of the architecture."""
    entries = self.tensors.entries
    problems, used = [], {*names.IGNORED, *self._embeddings}
    for rule in self._by_name.values():
      used.update(rule.theirs)
      dtypes = {entries[name].dtype for name in rule.theirs if name in entries}
      for name in rule.theirs:
        if name not in entries:
          problems.append(f'missing {rule.ours} {rule.shape} <-> {name} {rule.their_shape}')
        elif entries[name].shape != rule.their_shape:
          problems.append(f'misshapen {rule.ours} {rule.shape} <-> {name}: expected {rule.their_shape}, found '
                          f'{entries[name].shape}')
        elif entries[name].dtype.kind not in 'fV' or len(dtypes) > 1:
          problems.append(f'dtype of {rule.ours} <-> {name}: expected floating-point numbers, one kind in an array, '
                          f'found {entries[name].dtype.name}')
    problems += [f'surplus {name} {entries[name].shape}: the network has nothing like it'
                 for name in sorted(set(entries) - used)]
    names.raise_problems(problems, str(self.path))

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns our names to shapes and dtypes as they are stored."""
    entries = self.tensors.entries
    return {name: jax.ShapeDtypeStruct(rule.shape, entries[rule.theirs[0]].dtype)
            for name, rule in self._by_name.items()}

  def read_array(self, name: str) -> np.ndarray:
    """Returns our array called `name`, in the dtype it is stored in.

    Raises:
      CheckpointError: the token embedding, of which the folder holds another version under another name.
    """
    if name == names.TOKEN_EMBEDDING:
      self._check_duplicates()
    if name not in self._by_name:
      raise CheckpointError(f'{self.path} has no array {name!r}.{did_you_mean(name, self._by_name)}')
    return self._by_name[name].to_ours(self.tensors.read)

  def _check_duplicates(self) -> None:
    first, *others = self._embeddings
    for other in others:
      if not self.tensors.equal(first, other):
        remedy = ('If the model is not tied (T5 1.1), config.json must say "tie_word_embeddings": false.'
                  if other == LM_HEAD else 'Our networks have one token embedding for both stacks.')
        raise CheckpointError(f'{self.path}: {first} and {other} differ; expected equal ones, both <-> '
                              f'{names.TOKEN_EMBEDDING}. {remedy}')
