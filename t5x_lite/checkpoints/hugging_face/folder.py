"""Reading a Hugging Face folder under our names of arrays, one array at a time."""

from collections.abc import Iterator
import contextlib
import functools
import os
from typing import Any

import jax
import numpy as np

from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.checkpoints.hugging_face import families
from t5x_lite.checkpoints.hugging_face import names
from t5x_lite.checkpoints.hugging_face.architecture import Architecture
from t5x_lite.checkpoints.hugging_face.names import LM_HEAD
from t5x_lite.checkpoints.hugging_face.names import SHARED
from t5x_lite.checkpoints.hugging_face.names import TensorRule
from t5x_lite.checkpoints.hugging_face.tensor_files import INDEX_FILE
from t5x_lite.checkpoints.hugging_face.tensor_files import MERGE_COMMAND
from t5x_lite.checkpoints.hugging_face.tensor_files import SINGLE_FILE
from t5x_lite.checkpoints.hugging_face.tensor_files import SafetensorsFolder
from t5x_lite.errors import CheckpointError, T5xLiteError
from t5x_lite.storage import files

CONFIG_FILE = 'config.json'
_WEIGHTS = (
  SINGLE_FILE,
  INDEX_FILE,
  'pytorch_model.bin',
  'pytorch_model.bin.index.json',
  'flax_model.msgpack',
  'tf_model.h5',
)


def is_hugging_face_folder(path: str | os.PathLike[str]) -> bool:
  """Return True if `path` is a folder with a `config.json` and weights of any format, supported or not."""
  folder = files.path(path)
  has_config = (folder / CONFIG_FILE).is_file() or (folder / 'adapter_config.json').is_file()
  return has_config and (
    any((folder / name).exists() for name in _WEIGHTS)
    or next(folder.glob('*.safetensors'), None) is not None
  )


class HuggingFaceFolder:
  """The weights of a T5 model as transformers saves them: `config.json` and safetensors.

  The constructor reads and checks everything except values. Names are those of the layout 't5', without `target/`.

  Attributes:
    path: path of the folder; that in the cache for the name of a model of the Hugging Face hub.
    config: contents of `config.json`, see `config_json.read_config`.
    family: family of the model.
    architecture: architecture of the network.
    tensors: the tensors by their names in the files.
    rules: our arrays with the tensors that hold them.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Open the folder.

    Args:
      path: path of the folder, on a disk or in an object store, or the name of a model, hf://OWNER/NAME.

    Raises:
      CheckpointError: the type of model or the format of the weights is not supported, a file is damaged, or tensors
        are missing, surplus or of a wrong shape.
    """
    self.path = files.path(path)
    self.config = self._read_config()
    with self._named():
      config_json.model_type(self.config)
    config_json.log_open_fields(self.config, self.path)
    self.tensors = SafetensorsFolder(self.path, tied=(SHARED, *names.EMBEDDING_DUPLICATES, LM_HEAD))
    self.family = families.family_of(self.config)
    with self._named():
      self._head = config_json.output_head(self.config, LM_HEAD in self.tensors.entries)
    if self._head == 'compare':
      self._head = 'embedding' if self._same_tables() else 'own'
    with self._named():
      fields = config_json.fields_of_config(self.config, LM_HEAD in self.tensors.entries)
      fields |= config_json.tied_fields(self._head)
      self.architecture = Architecture(**fields)
    self._check_size()
    self.rules = names.tensor_table(self.architecture)
    self._by_name = {rule.ours: self._located(rule) for rule in self.rules}
    self._check()

  @contextlib.contextmanager
  def _named(self) -> Iterator[None]:
    """Add the folder to messages of errors about config.json."""
    try:
      yield
    except T5xLiteError as error:
      raise type(error)(f'{self.path}: {error}') from error

  def _read_config(self) -> dict[str, Any]:
    if not (self.path / CONFIG_FILE).is_file():
      is_adapter = (self.path / 'adapter_config.json').is_file()
      if is_adapter:
        remedy = f'It holds only an adapter: merge it with its model, {MERGE_COMMAND}.'
      else:
        remedy = 'Download that file too.'
      raise CheckpointError(
        f'{self.path} must be a folder that transformers saved, got one without {CONFIG_FILE}. {remedy}'
      )
    return config_json.read_config(self.path)

  @functools.cached_property
  def _embeddings(self) -> list[str]:
    """Names of the tensors that hold the token embedding."""
    duplicates = [
      SHARED,
      *names.EMBEDDING_DUPLICATES,
      *([LM_HEAD] if self._head == 'embedding' else []),
    ]
    return [name for name in duplicates if name in self.tensors.entries]

  def _same_tables(self) -> bool:
    present = [
      name for name in (SHARED, *names.EMBEDDING_DUPLICATES) if name in self.tensors.entries
    ]
    return not present or self.tensors.equal(present[0], LM_HEAD)

  def _located(self, rule: TensorRule) -> TensorRule:
    """Return `rule` with the names of the tensors in this folder."""
    if rule.ours == names.TOKEN_EMBEDDING and self._embeddings:
      return TensorRule(rule.ours, (self._embeddings[0],), rule.shape, rule.transform)
    return rule

  def _check_size(self) -> None:
    """Raise if config.json has more layers or experts than there are tensors, before their names are listed."""
    arch = self.architecture
    number = len(self.tensors.entries)
    num_layers = arch.num_encoder_layers + arch.num_decoder_layers
    if max(num_layers, arch.num_experts) > number:
      names.raise_problems(
        [
          f'{CONFIG_FILE} has {num_layers} layers and {arch.num_experts} experts, but the folder '
          f'holds {number} tensors'
        ],
        str(self.path),
      )

  def _check(self) -> None:
    """Raise if names, shapes or dtypes differ from those of the architecture."""
    entries = self.tensors.entries
    problems = []
    used = {*names.IGNORED, *self._embeddings, *self.tensors.aliases}
    for rule in self._by_name.values():
      used.update(rule.theirs)
      dtypes = {entries[name].dtype for name in rule.theirs if name in entries}
      for name in rule.theirs:
        if name not in entries:
          problems.append(f'missing {rule.ours} {rule.shape} <-> {name} {rule.their_shape}')
        elif entries[name].shape != rule.their_shape:
          problems.append(
            f'{rule.ours} {rule.shape} <-> {name} must have shape {rule.their_shape}, got '
            f'{entries[name].shape}'
          )
        elif entries[name].dtype.kind not in 'fV' or len(dtypes) > 1:
          problems.append(
            f'{rule.ours} <-> {name} must have one floating-point dtype in an array, got '
            f'{entries[name].dtype.name}'
          )
    problems += [
      f'surplus {name} {entries[name].shape}: not part of the network'
      for name in sorted(set(entries) - used)
    ]
    names.raise_problems(problems, str(self.path))

  def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and the stored dtype of each array by our name."""
    entries = self.tensors.entries
    return {
      name: jax.ShapeDtypeStruct(rule.shape, entries[rule.theirs[0]].dtype)
      for name, rule in self._by_name.items()
    }

  def read_array(self, name: str) -> np.ndarray:
    """Return an array by our name, in the shape of the network and its stored dtype.

    Raises:
      CheckpointError: the folder holds several tensors of the token embedding that differ.
    """
    if name == names.TOKEN_EMBEDDING:
      self._check_duplicates()
    return self._by_name[name].to_ours(self.tensors.read)

  def _check_duplicates(self) -> None:
    first, *others = self._embeddings
    for other in others:
      if not self.tensors.equal(first, other):
        if other == LM_HEAD:
          remedy = (
            'If the model is not tied (T5 1.1), set "tie_word_embeddings": false in config.json.'
          )
        else:
          remedy = 'Our networks have one token embedding for both stacks.'
        names.raise_problems(
          [f'{names.TOKEN_EMBEDDING} <-> {first} and {other} differ. {remedy}'], str(self.path)
        )
