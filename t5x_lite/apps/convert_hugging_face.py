"""The part of a conversion that makes a Hugging Face folder: which network, which family, which tokenizer."""

from collections.abc import Callable
import dataclasses
import os
import pathlib

import numpy as np

from t5x_lite.apps.convert_plan import PARAMS, StatePlan
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.hugging_face import writer
from t5x_lite.errors import ConfigError

# What a folder's tokenizer is made of, of which one must be there.
_TOKENIZER_FILES = ('spiece.model', 'tokenizer.json', 'tokenizer_config.json')


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderTarget:
  """A folder to be, checked against what there is.

  Attributes:
    architecture: of the network.
    family: of the model.
    tokenizer: file or folder to take the tokenizer from; None for a folder without one.
    source: what is converted.
    plan: of the parameters.
    notes: what a person should know of it.
  """

  architecture: hugging_face.Architecture
  family: hugging_face.Family
  tokenizer: str | None
  source: sources.StateSource
  plan: StatePlan
  notes: tuple[str, ...]

  @property
  def num_tensors(self) -> int:
    """Number of tensors in the folder; each expert has its own."""
    return sum(len(rule.theirs) for rule in hugging_face.tensor_table(self.architecture))

  @property
  def has_tokenizer(self) -> bool:
    """Whether the folder has a tokenizer; ByT5's is in no file."""
    return self.tokenizer is not None or self.family.name == 'byt5'

  def write(self, folder: pathlib.Path, make: Callable[[str], np.ndarray], max_shard_size: int | None) -> None:
    """Writes it.

    Args:
      folder: its path, which must not exist.
      make: function from a name in the state to the array.
      max_shard_size: the most bytes of a file of weights; None for the usual.
    """
    note = f'Converted from `{os.path.basename(os.path.normpath(self.source.path))}` ({self.source.format})'
    writer.write_folder(
        folder, self.architecture, self.family, lambda name: make(f'{PARAMS}{name}'),
        max_shard_bytes=max_shard_size or writer.MAX_SHARD_BYTES, tokenizer=self.tokenizer,
        source_note=f'{note}, step {self.source.step or 0}.', order=list(self.plan.params()))


def known_family(source: sources.StateSource) -> hugging_face.Family | None:
  """Returns the family that a Hugging Face folder is of, or that a checkpoint was once converted from."""
  if isinstance(source, sources.HuggingFaceSource):
    return source.folder.family
  name = (source.metadata.get('converted') or {}).get('family')
  return None if name is None else hugging_face.get_family(name)


def prepare(source: sources.StateSource, plan: StatePlan, *, family: hugging_face.Family | None,
            tokenizer: str | None) -> FolderTarget:
  """Finds out what the folder is to be; reads no values.

  Args:
    source: what is converted.
    plan: of its parameters, in the layout 't5'.
    family: of the model; None recognises it.
    tokenizer: file or folder to take the tokenizer from; None for that of a source which has one.

  Raises:
    CheckpointError: transformers has no such network, or the family's class cannot express it.
    ConfigError: there is no such tokenizer.
  """
  notes = []
  folder = source.folder if isinstance(source, sources.HuggingFaceSource) else None
  architecture = architecture_of(source, plan)
  if folder is None and not plan.network.get('mlp_activations'):
    notes.append(f'Which activations the network has is in no array: {", ".join(architecture.mlp_activations)} is '
                 "written to config.json, T5's own. Change it there if the network has others.")
  family = hugging_face.guess_family(architecture) if family is None else family
  family.check(architecture)
  hugging_face.check_ours(hugging_face.tensor_table(architecture), plan.params(), source.path)
  if tokenizer is None and folder is not None and _has_tokenizer(source.path):
    tokenizer = source.path
  elif tokenizer is None and family.name != 'byt5':
    notes.append('The folder has no tokenizer: --tokenizer=PATH (a spiece.model or a Hugging Face folder) adds one.')
  elif tokenizer is not None:
    _check_tokenizer(tokenizer)
  return FolderTarget(architecture=architecture, family=family, tokenizer=tokenizer, source=source, plan=plan,
                      notes=tuple(notes))


def architecture_of(source: sources.StateSource, plan: StatePlan) -> hugging_face.Architecture:
  """Returns the architecture of the network that a plan is of.

  Args:
    source: what is converted.
    plan: of it.

  Raises:
    CheckpointError: transformers has no such network.
  """
  if isinstance(source, sources.HuggingFaceSource):
    return source.folder.architecture
  return hugging_face.Architecture.from_shapes(plan.params(), plan.network)


def _has_tokenizer(path: str) -> bool:
  return any(os.path.isfile(os.path.join(path, name)) for name in _TOKENIZER_FILES)


def _check_tokenizer(path: str) -> None:
  if os.path.isfile(path) or (os.path.isdir(path) and _has_tokenizer(path)):
    return
  found = 'a folder without any of ' + ', '.join(_TOKENIZER_FILES) if os.path.isdir(path) else 'no such file or folder'
  raise ConfigError(f'--tokenizer={path}: got {found}; expected a sentencepiece model such as spiece.model, or a Hugging '
                    'Face folder with its tokenizer.')
