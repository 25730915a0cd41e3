"""Folder of an adapter of PEFT as the output of `t5x_lite convert`."""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import dataclasses
import pathlib
import sys
from typing import Any

from t5x_lite.adapters import merging
from t5x_lite.apps.convert import source_network
from t5x_lite.apps.convert import targets
from t5x_lite.apps.convert.hugging_face import HuggingFaceTarget
from t5x_lite.apps.convert.state_plan import AVERAGE
from t5x_lite.apps.convert.state_plan import PARAMS
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.hugging_face import adapter_config
from t5x_lite.checkpoints.hugging_face import names
from t5x_lite.checkpoints.hugging_face import tensor_files
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.formatting import first_names
from t5x_lite.storage import files
from t5x_lite.storage import hub


@dataclasses.dataclass(frozen=True)
class PeftTarget(targets.Target):
  """Folder that PEFT loads, with the arrays of an adapter alone."""

  format = 'peft'
  title = 'PEFT adapter'
  other_names = ('lora', 'adapter')
  unit = 'tensors'
  without_effect = {'optimizer_state': 'drop'}
  only_layout = 't5'
  left_out = {AVERAGE: HuggingFaceTarget.left_out[AVERAGE], '': ''}
  is_uploaded = True

  @classmethod
  def unsupported(cls, source: sources.StateSource, network: Mapping[str, Any]) -> str | None:
    """See `Target.unsupported`."""
    return HuggingFaceTarget.unsupported(source, network)

  def with_adapter(self, source: sources.StateSource, dtype: str | None) -> sources.StateSource:
    """See `Target.with_adapter`."""
    also_trained = source.metadata['adapter']['also_train']
    if also_trained:
      raise ConfigError(
        f'--to=peft requires a run that trained the adapter alone, got {source.path!r}, which also trained '
        f'{first_names(also_trained)}. Merge the adapter: --to=t5x_lite --merge, or --to=hugging_face.'
      )
    return source

  def prepare(self, job: targets.Job) -> targets.Job:
    """Find the modules of the adapter, without reading values.

    Raises:
      CheckpointError: the source has no adapter, or transformers does not have its network.
    """
    source = job.source
    if 'adapter' not in source.metadata:
      raise CheckpointError(
        f'{source.path!r} must be of a run with an adapter, got a model without one. Use another --to.'
      )
    notes = job.notes
    if _base_model(source) is None:
      notes += (
        'adapter_config.json names no base, since the run did not start from a Hugging Face folder: '
        'convert the base too, --to=hugging_face.',
      )
    arrays = {name: each for name, each in job.plan.arrays.items() if merging.is_leaf(name)}
    job = dataclasses.replace(
      job,
      plan=dataclasses.replace(job.plan, arrays=arrays),
      architecture=source_network.architecture_of(source, job.plan),
      notes=notes,
    )
    num_kernels = sum(len(kernel.theirs) for kernel, _ in _adapted(job))
    return dataclasses.replace(job, num_arrays=2 * num_kernels)

  def write(self, folder: files.Path, job: targets.Job, make: targets.MakeFn) -> None:
    """See `Target.write`."""
    config = _config(job)
    rules = []
    for kernel, own in _adapted(job):
      rules += names.adapter_rules(kernel, own['rank'])
    tensors = [tensor for rule in rules for tensor in rule.theirs]
    if files.is_remote(folder):
      from t5x_lite.storage import uploads

      writing = uploads.uploaded_folder(folder, last=adapter_config.CONFIG_FILE)
    else:
      writing = contextlib.nullcontext(pathlib.Path(folder))
    with writing as local:
      local.mkdir(exist_ok=True)
      file = adapter_config.WEIGHTS_FILE
      with tensor_files.SafetensorsWriter(local, tensors, sys.maxsize, file) as writer:
        for rule in rules:
          for name, tensor in rule.to_theirs(make(f'{PARAMS}{rule.ours}')):
            writer.write(name, tensor)
      tensor_files.write_json(local / adapter_config.CONFIG_FILE, config)

  @classmethod
  def usage(cls, done: targets.Conversion) -> list[str]:
    """Return lines of Python that load the folder."""
    return [
      'To load it with PEFT, given its base as a model of transformers:',
      '  from peft import PeftModel',
      f'  model = PeftModel.from_pretrained(model, {done.path!r})',
    ]


def _adapted(job: targets.Job) -> list[tuple[names.TensorRule, Mapping[str, Any]]]:
  """Return (rule of the kernel, its rank and alpha) for each kernel with an adapter."""
  assert job.architecture is not None  # `prepare` has set it
  kernels = job.source.metadata['adapter']['kernels']
  found = []
  for kernel in names.tensor_table(job.architecture):
    planned = job.plan.params().get(merging.leaves_of(kernel.ours)[0])
    if planned is not None:
      # The layout of the source has other paths.
      module = planned.inputs[0].removeprefix(PARAMS).removesuffix('lora_a')
      found.append((kernel, kernels[f'{module}kernel']))
  return found


def _config(job: targets.Job) -> dict[str, Any]:
  """Return the contents of adapter_config.json."""
  assert job.architecture is not None  # `prepare` has set it
  metadata = job.source.metadata['adapter']
  adapters = {}
  for kernel, own in _adapted(job):
    adapters |= dict.fromkeys(kernel.modules, (own['rank'], own['alpha']))
  linear_modules = []
  for rule in names.tensor_table(job.architecture):
    if rule.transform != names.COPY:
      linear_modules += rule.modules
  options = {
    'base_model_name_or_path': _base_model(job.source),
    'lora_dropout': metadata['dropout_rate'],
  }
  if metadata['rank_stabilized']:
    options['use_rslora'] = True
  return adapter_config.make(adapters, linear_modules, **options)


def _base_model(source: sources.StateSource) -> str | None:
  """Return the folder or the name on the hub of the base of a run; None if it is not a folder of transformers."""
  model = source_network.base_of(source)
  if not isinstance(model, sources.HuggingFaceSource):
    return None
  if hub.is_name(model.path):
    return model.path.removeprefix('hf://').partition('@')[0]
  return model.path
