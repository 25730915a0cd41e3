"""Hugging Face folder as the output of `t5x_lite convert`: its network, family and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import os
import tempfile
from typing import Any

from t5x_lite import checks
from t5x_lite.apps.convert import origin
from t5x_lite.apps.convert import source_network
from t5x_lite.apps.convert import targets
from t5x_lite.apps.convert.state_plan import AVERAGE
from t5x_lite.apps.convert.state_plan import MUTABLES
from t5x_lite.apps.convert.state_plan import PARAM_STATES
from t5x_lite.apps.convert.state_plan import PARAMS
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.checkpoints.hugging_face import tokenizer_files
from t5x_lite.checkpoints.hugging_face import writer
from t5x_lite.errors import T5xLiteError
from t5x_lite.storage import files
from t5x_lite.storage import hub


@dataclasses.dataclass(frozen=True)
class HuggingFaceTarget(targets.Target):
  """Folder that transformers loads, with parameters in the layout 't5'.

  Attributes:
    family: family of the model; None detects it.
    tokenizer: file or folder with the tokenizer; None for that of the source or of its run, if any.
    max_shard_size: maximum number of bytes of a file of weights; None for the default.
    push: OWNER/NAME of a new or empty repository of the hub, to which the folder is uploaded; None for no upload.
  """

  format = 'hugging_face'
  title = 'Hugging Face'
  other_names = (
    'hf',
    'huggingface',
    'hugging-face',
    'transformers',
    'pytorch',
    'torch',
    'pt',
    'safetensors',
  )
  unit = 'tensors'
  without_effect = {'optimizer_state': 'drop', 'merge': True}
  only_layout = 't5'
  left_out = {
    AVERAGE: 'The folder has the trained parameters. For their running average, add --param_average.',
    PARAM_STATES: 'The optimizer state, {num} arrays, is not converted: a Hugging Face folder has no '
    'optimizer state.',
    '': '',
  }
  is_uploaded = True

  family: str | None = None
  tokenizer: str | None = None
  max_shard_size: int | None = None
  push: str | None = None

  def __post_init__(self) -> None:
    size = checks.number(at_least=1, integer=True).or_none()
    checks.check('', {'--max_shard_size': self.max_shard_size}, **{'--max_shard_size': size})

  def check_output(self, output: str) -> None:
    """See `Target.check_output`."""
    if self.push is None:
      return
    if files.is_remote(output):
      raise checks.invalid(
        '', 'OUTPUT', 'a folder on a disk with --push', output, 'Name a folder on a disk.'
      )
    hub.check_push(self.push)

  def publish(self, path: str) -> str | None:
    """See `Target.publish`."""
    if self.push is None:
      return None
    return f'Pushed to {hub.push(path, self.push)}'

  @classmethod
  def unsupported(cls, source: sources.StateSource, network: Mapping[str, Any]) -> str | None:
    """See `Target.unsupported`."""
    custom = ' and '.join(map(str, network.get('custom_blocks', ())))
    if custom:
      return f'custom {custom}'
    for name in source.shapes():
      if name.startswith(MUTABLES):
        return f'mutable collections ({name}, ...)'
    return None

  def family_of(self, source: sources.StateSource) -> hugging_face.Family | None:
    """See `Target.family_of`."""
    if self.family is None:
      return source_network.known_family(source)
    return hugging_face.get_family(self.family)

  def prepare(self, job: targets.Job) -> targets.Job:
    """Determine architecture, family and tokenizer of the folder, without reading values.

    Raises:
      CheckpointError: transformers does not support the network or its family's class does not, or the tokenizer is
        unusable.
    """
    source = job.source
    plan = job.plan
    family = job.family
    notes = []
    folder = source_network.folder_of(source)
    architecture = source_network.architecture_of(source, plan)
    path = self.tokenizer
    if folder is None:
      path = path or origin.tokenizer_of_run(source)
      architecture = _with_special_ids(architecture, path)
    if path != self.tokenizer:
      notes.append(f'The tokenizer is that of the run, {path} (config.gin).')
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
    tokenizer, has_tokenizer = _try_tokenizer(path, source, family, architecture, notes)
    return dataclasses.replace(
      job,
      # Each expert has its own tensor.
      num_arrays=sum(len(rule.theirs) for rule in hugging_face.tensor_table(architecture)),
      family=family,
      architecture=architecture,
      tokenizer=tokenizer,
      has_tokenizer=has_tokenizer,
      notes=(*job.notes, *notes),
    )

  def write(self, folder: files.Path, job: targets.Job, make: targets.MakeFn) -> None:
    """See `Target.write`."""
    assert job.architecture is not None and job.family is not None  # `prepare` has set them
    source = job.source
    folder_name = os.path.basename(os.path.normpath(source.path))
    note = f'Converted from `{folder_name}` ({source.format}), step {job.step}.'
    if isinstance(source, sources.MergedSource):
      note += f' {source.note}'
    writer.write_folder(
      folder,
      job.architecture,
      job.family,
      lambda name: make(f'{PARAMS}{name}'),
      max_shard_bytes=self.max_shard_size or writer.MAX_SHARD_BYTES,
      tokenizer=job.tokenizer,
      source_note=note,
      origin=origin.origin_of(source),
      order=list(job.plan.params()),
    )

  @classmethod
  def usage(cls, done: targets.Conversion) -> list[str]:
    """Return lines of Python that load the folder."""
    family = done.family
    architecture = done.architecture
    assert family is not None and architecture is not None  # known for the format 'hugging_face'
    classes = ('AutoTokenizer, ' if done.has_tokenizer else '') + family.architecture
    lines = ['To load it with transformers:']
    path = done.path
    if files.is_remote(path):
      path = files.path(path).name
      if done.path.startswith('gs://'):
        copy = f'gcloud storage cp -r {done.path} .'
      else:
        copy = f'aws s3 cp --recursive {done.path} {path}'
      lines = ['To load it with transformers, copy it to a disk:', f'  {copy}']
    lines += [
      f'  from transformers import {classes}',
      f'  model = {family.architecture}.from_pretrained({path!r})',
    ]
    if family.needs_untied_flag(architecture):
      lines.append(
        f'  model.config.tie_word_embeddings = False  # {family.architecture} would scale the logits '
        'regardless of config.json'
      )
    if done.has_tokenizer:
      lines.append(f'  tokenizer = AutoTokenizer.from_pretrained({path!r})')
    return lines


def _with_special_ids(
  architecture: hugging_face.Architecture, tokenizer: str | None
) -> hugging_face.Architecture:
  """Return the architecture with the special ids of the folder that the tokenizer is from, if it is from one."""
  if tokenizer is None or not (files.path(tokenizer) / 'config.json').is_file():
    return architecture
  config = config_json.read_config(files.path(tokenizer))
  return dataclasses.replace(architecture, **config_json.special_ids(config))


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
  folder = source_network.folder_of(source)
  if folder is not None and any((folder.path / name).is_file() for name in tokenizer_files.FILES):
    try:
      return str(folder.path), write(str(folder.path))
    except T5xLiteError as error:
      notes.append(f'The folder has no tokenizer. {error}')
      return None, False
  has_tokenizer = write(None)
  if not has_tokenizer:
    notes.append(
      'The folder has no tokenizer: --tokenizer=PATH (a spiece.model or a Hugging Face folder) adds one.'
    )
  return None, has_tokenizer
