"""Conversion to a Hugging Face folder: its network, family and tokenizer."""

from collections.abc import Callable
import dataclasses
import os
import tempfile

import numpy as np

from t5x_lite import files
from t5x_lite.apps.convert.plan import PARAMS
from t5x_lite.apps.convert.plan import StatePlan
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.hugging_face import tokenizer_files
from t5x_lite.checkpoints.hugging_face import writer
from t5x_lite.errors import T5xLiteError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderTarget:
  """Hugging Face folder to write, checked against the source.

  Attributes:
    architecture: architecture of the network.
    family: family of the model.
    tokenizer: file or folder with the tokenizer; None for a family that needs none, or a folder without one.
    has_tokenizer: whether the folder will have a tokenizer.
    source: the weights to convert.
    plan: plan of the parameters.
    notes: remarks for the user.
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

  def write(
    self, folder: files.Path, make: Callable[[str], np.ndarray], max_shard_size: int | None
  ) -> None:
    """Write the folder.

    Args:
      folder: its path, which must not exist.
      make: returns an array from its name in the state.
      max_shard_size: maximum number of bytes of a file of weights; None for the default.
    """
    note = f'Converted from `{os.path.basename(os.path.normpath(self.source.path))}` ({self.source.format})'
    writer.write_folder(
      folder,
      self.architecture,
      self.family,
      lambda name: make(f'{PARAMS}{name}'),
      max_shard_bytes=max_shard_size or writer.MAX_SHARD_BYTES,
      tokenizer=self.tokenizer,
      source_note=f'{note}, step {self.source.step or 0}.',
      order=list(self.plan.params()),
    )


def known_family(source: sources.StateSource) -> hugging_face.Family | None:
  """Return the family of a Hugging Face folder, or of the folder that a checkpoint was converted from."""
  if isinstance(source, sources.HuggingFaceSource):
    return source.folder.family
  name = (source.metadata.get('converted') or {}).get('family')
  if name is None:
    return None
  return hugging_face.get_family(name)


def prepare(
  source: sources.StateSource,
  plan: StatePlan,
  *,
  family: hugging_face.Family | None,
  tokenizer: str | None,
) -> FolderTarget:
  """Determine architecture, family and tokenizer of the folder, without reading values.

  Args:
    source: the weights to convert.
    plan: plan of its parameters, in the layout 't5'.
    family: family of the model; None detects it.
    tokenizer: file or folder with the tokenizer; None for that of the source, if any.

  Raises:
    CheckpointError: transformers does not support the network or its family's class does not, or the tokenizer is
      unusable.
  """
  notes = []
  folder = None
  if isinstance(source, sources.HuggingFaceSource):
    folder = source.folder
  architecture = architecture_of(source, plan)
  if folder is None and not plan.network.get('mlp_activations'):
    notes.append(
      'The checkpoint does not record the MLP activations and the maximum distance of the position biases. '
      f"config.json has T5's values: {', '.join(architecture.mlp_activations)} and "
      f'{architecture.relpos_max_distance}. Correct config.json if the model has other values.'
    )
    if architecture.logits_via_embedding:
      notes.append(
        'The checkpoint does not record whether tied logits are scaled. config.json says that they are, as '
        'in T5X. If they are not, set "scale_decoder_outputs": false in config.json.'
      )
  if family is None:
    family = hugging_face.guess_family(architecture)
  family.check(architecture)
  hugging_face.check_ours(hugging_face.tensor_table(architecture), plan.params(), source.path)
  if folder is None and architecture.num_experts:
    notes.append(
      f'transformers limits an expert to {architecture.expert_capacity} tokens per sequence and drops '
      'further ones; to avoid this, set expert_capacity in config.json to the longest sequence.'
    )
  tokenizer, has_tokenizer = _try_tokenizer(tokenizer, source, family, architecture, notes)
  return FolderTarget(
    architecture=architecture,
    family=family,
    tokenizer=tokenizer,
    has_tokenizer=has_tokenizer,
    source=source,
    plan=plan,
    notes=tuple(notes),
  )


def architecture_of(source: sources.StateSource, plan: StatePlan) -> hugging_face.Architecture:
  """Return the architecture of a planned network.

  Args:
    source: the weights to convert.
    plan: plan of the conversion.

  Raises:
    CheckpointError: transformers does not support the network.
  """
  if isinstance(source, sources.HuggingFaceSource):
    return source.folder.architecture
  return hugging_face.Architecture.from_shapes(plan.params(), plan.network)


def _try_tokenizer(
  path: str | None,
  source: sources.StateSource,
  family: hugging_face.Family,
  architecture: hugging_face.Architecture,
  notes: list[str],
) -> tuple[str | None, bool]:
  """Write the tokenizer to a temporary folder, so that its errors are raised before the weights are written.

  Returns:
    (path of the tokenizer or None, whether there is a tokenizer).
  """

  def write(tokenizer):
    with tempfile.TemporaryDirectory() as folder:
      return bool(
        tokenizer_files.write(folder, family, tokenizer, vocab_size=architecture.vocab_size)
      )

  if path is not None:
    return path, write(path)
  if isinstance(source, sources.HuggingFaceSource) and any(
    (source.folder.path / name).is_file() for name in tokenizer_files.FILES
  ):
    try:
      return source.path, write(source.path)
    except T5xLiteError as error:
      notes.append(f'The folder has no tokenizer. {error}')
      return None, False
  has_tokenizer = write(None)
  if not has_tokenizer:
    notes.append(
      'The folder has no tokenizer: --tokenizer=PATH (a spiece.model or a Hugging Face folder) adds one.'
    )
  return None, has_tokenizer
