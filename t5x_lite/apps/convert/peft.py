"""Folder of an adapter of PEFT as the output of `t5x_lite convert`."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import itertools
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
    num_tensors = sum(len(rule.theirs) for rule in _contents(job)[1])
    return dataclasses.replace(job, num_arrays=num_tensors)

  def write(self, folder: files.Path, job: targets.Job, make: targets.MakeFn) -> None:
    """See `Target.write`."""
    config, rules = _contents(job)

    def write(path: pathlib.Path) -> None:
      tensors = [tensor for rule in rules for tensor in rule.theirs]
      file = adapter_config.WEIGHTS_FILE
      with tensor_files.SafetensorsWriter(path, tensors, sys.maxsize, file) as writer:
        for rule in rules:
          for name, tensor in rule.to_theirs(make(f'{PARAMS}{rule.ours}')):
            writer.write(name, tensor)
      tensor_files.write_json(path / adapter_config.CONFIG_FILE, config)

    if files.is_remote(folder):
      from t5x_lite.storage import uploads

      with uploads.uploaded_folder(folder, last=adapter_config.CONFIG_FILE) as local:
        write(local)
    else:
      folder.mkdir(parents=True)
      write(pathlib.Path(folder))

  @classmethod
  def usage(cls, done: targets.Conversion) -> list[str]:
    """Return lines of Python that load the folder."""
    return [
      'To load it with PEFT, given its base as a model of transformers:',
      '  from peft import PeftModel',
      f'  model = PeftModel.from_pretrained(model, {done.path!r})',
    ]


def _contents(job: targets.Job) -> tuple[dict[str, Any], list[names.TensorRule]]:
  """Return (contents of adapter_config.json, rules of the arrays) of a job with an architecture."""
  assert job.architecture is not None  # `prepare` has set it
  metadata = job.source.metadata['adapter']
  modules = {}
  adapters = {}
  rules = []
  for kernel in names.tensor_table(job.architecture):
    if kernel.transform == names.COPY:
      continue
    modules[kernel.ours] = [names.module_of(tensor) for tensor in kernel.theirs]
    planned = job.plan.params().get(merging.leaves_of(kernel.ours)[0])
    if planned is not None:
      stored = planned.inputs[0].removeprefix(PARAMS).removesuffix('lora_a')
      adapted = metadata['kernels'][f'{stored}kernel']
      own = (adapted['rank'], adapted['alpha'])
      adapters |= dict.fromkeys(modules[kernel.ours], own)
      rules += names.adapter_rules(kernel, adapted['rank'])
  options = {
    'base_model_name_or_path': _base_model(job.source),
    'lora_dropout': metadata['dropout_rate'],
  }
  if metadata['rank_stabilized']:
    options['use_rslora'] = True
  linear_modules = itertools.chain.from_iterable(modules.values())
  return adapter_config.make(adapters, linear_modules, **options), rules


def _base_model(source: sources.StateSource) -> str | None:
  """Return the folder or the name on the hub of the base of a run; None if it is not a folder of transformers."""
  model = source_network.base_of(source)
  if not isinstance(model, sources.HuggingFaceSource):
    return None
  if hub.is_name(model.path):
    return model.path.removeprefix('hf://').partition('@')[0]
  return model.path
