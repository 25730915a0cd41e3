"""The part of a conversion that makes a Hugging Face folder: which network, which family, which tokenizer."""

from collections.abc import Callable
import dataclasses
import os
import pathlib
import tempfile

import numpy as np

from t5x_lite.apps.convert.plan import PARAMS, StatePlan
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.hugging_face import tokenizer_files
from t5x_lite.checkpoints.hugging_face import writer
from t5x_lite.errors import T5xLiteError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderTarget:
  """A folder to be, checked against what there is.

  Attributes:
    architecture: of the network.
    family: of the model.
    tokenizer: file or folder to take the tokenizer from; None for a family that needs none, or a folder without one.
    has_tokenizer: whether the folder will have one.
    source: what is converted.
    plan: of the parameters.
    notes: what a person should know of it.
  """

  architecture: hugging_face.Architecture
  family: hugging_face.Family
  tokenizer: str | None
  has_tokenizer: bool
  source: sources.StateSource
  plan: StatePlan
  notes: tuple[str, ...]

  @property
  def num_tensors(self) -> int:
    """Number of tensors in the folder; each expert has its own."""
    return sum(len(rule.theirs) for rule in hugging_face.tensor_table(self.architecture))

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
    CheckpointError: transformers has no such network, the family's class cannot express it, or the tokenizer cannot be
      used.
  """
  notes = []
  folder = source.folder if isinstance(source, sources.HuggingFaceSource) else None
  architecture = architecture_of(source, plan)
  if folder is None and not plan.network.get('mlp_activations'):
    notes.append(f'Which activations the network has, and up to which distance positions differ, is in no array: '
                 f'{", ".join(architecture.mlp_activations)} and {architecture.relpos_max_distance} are written to '
                 "config.json, T5's own. Change them there if the network has others.")
    if architecture.logits_via_embedding:
      notes.append('No array says whether tied logits are scaled: config.json says that they are, as in T5X. If they are '
                   'not, set "scale_decoder_outputs": false there.')
  family = hugging_face.guess_family(architecture) if family is None else family
  family.check(architecture)
  hugging_face.check_ours(hugging_face.tensor_table(architecture), plan.params(), source.path)
  if folder is None and architecture.num_experts:
    notes.append(f'transformers lets an expert have {architecture.expert_capacity} tokens of a sequence and drops '
                 'others; set expert_capacity in config.json to the longest sequence, and none is dropped.')
  tokenizer, has_tokenizer = _try_tokenizer(tokenizer, source, family, architecture, notes)
  return FolderTarget(architecture=architecture, family=family, tokenizer=tokenizer, has_tokenizer=has_tokenizer,
                      source=source, plan=plan, notes=tuple(notes))


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


def _try_tokenizer(path: str | None, source: sources.StateSource, family: hugging_face.Family,
                   architecture: hugging_face.Architecture, notes: list[str]) -> tuple[str | None, bool]:
  """Writes the tokenizer somewhere else first: what is wrong with it is to be known before the weights are written.

  Returns:
    (what to take it from, whether there is one).
  """

  def write(tokenizer):
    with tempfile.TemporaryDirectory() as folder:
      return bool(tokenizer_files.write(folder, family, tokenizer, vocab_size=architecture.vocab_size))

  if path is not None:
    return path, write(path)
  if isinstance(source, sources.HuggingFaceSource) and any(
      os.path.isfile(os.path.join(source.path, name)) for name in tokenizer_files.FILES):
    try:
      return source.path, write(source.path)
    except T5xLiteError as error:
      notes.append(f'The folder has no tokenizer. {error}')
      return None, False
  has_tokenizer = write(None)
  if not has_tokenizer:
    notes.append('The folder has no tokenizer: --tokenizer=PATH (a spiece.model or a Hugging Face folder) adds one.')
  return None, has_tokenizer
