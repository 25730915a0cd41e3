"""Formats that `t5x_lite convert` writes: their contract, and the formats of train states.

A format is one class: its name, its options, the parts of a state that it stores, what it needs, and how it writes.
"""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable, Mapping
import concurrent.futures
import dataclasses
import os
from typing import Any, ClassVar

import numpy as np

from t5x_lite import checks
from t5x_lite.apps.convert import source_network
from t5x_lite.apps.convert.state_plan import AVERAGE
from t5x_lite.apps.convert.state_plan import OPTIMIZER_STATE
from t5x_lite.apps.convert.state_plan import PARAMS
from t5x_lite.apps.convert.state_plan import StatePlan
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.saving import streaming
from t5x_lite.networks.t5_config import PARAM_LAYOUTS
from t5x_lite.networks.t5_config import StackConfig
from t5x_lite.storage import files

MakeFn = Callable[[str], np.ndarray]
# Limit for arrays that are compressed at the same time; a larger array is compressed alone.
_MAX_PENDING_BYTES = 2**27


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """Conversion that is planned.

  Attributes:
    source: the weights to convert.
    plan: plan of the output's arrays.
    num_arrays: number of arrays in the output.
    family: family of the model; None if it is unknown.
    architecture: architecture of the network; None if transformers does not support it.
    tokenizer: file or folder with the tokenizer to copy, or None.
    has_tokenizer: whether the output has a tokenizer.
    notes: remarks for the user.
  """

  source: sources.StateSource
  plan: StatePlan
  num_arrays: int
  family: hugging_face.Family | None
  architecture: hugging_face.Architecture | None
  tokenizer: str | None = None
  has_tokenizer: bool = False
  notes: tuple[str, ...]

  @property
  def step(self) -> int:
    """Number of training steps to record."""
    if self.plan.step is not None:
      return self.plan.step
    return self.source.step or 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
  """Result of a conversion.

  Attributes:
    path: path of the output.
    format: name of its format.
    source: path of the source.
    source_format: name of its format.
    num_arrays: number of arrays written.
    num_bytes: their total size.
    dtypes: number of parameter arrays by dtype name.
    num_params: number of parameters.
    param_layout: layout of the output; None for a network of another package.
    family: family of a Hugging Face source or output; None without one.
    architecture: architecture of the network; None if transformers does not support it.
    has_tokenizer: whether the output is a folder with a tokenizer.
    has_adapter: whether the output has an adapter next to its kernels.
    notes: remarks for the user.
  """

  path: str
  format: str
  source: str
  source_format: str
  num_arrays: int
  num_bytes: int
  dtypes: Mapping[str, int]
  num_params: int
  param_layout: str | None
  family: hugging_face.Family | None
  architecture: hugging_face.Architecture | None
  has_tokenizer: bool
  has_adapter: bool
  notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Target(abc.ABC):
  """Format that `convert` writes, with options as fields, which are flags of the command.

  Attributes:
    format: name of the format, the value of --to.
    title: name of the format in reports.
    other_names: names that users give to the format, in lower case.
    unit: word for several arrays in reports.
    without_effect: values of options that may be given although the format does not have the option.
    only_layout: the only layout of parameters that the format supports; None if it supports all.
    left_out: prefix of names in the state -> remark for the user if the source has such arrays, which are not written;
      '{num}' is replaced by their number. An empty remark is not shown. The first prefix counts; '' is that of all
      names. Parameters are always written.
    has_steps: whether the output is a model directory, in which the weights are in checkpoint_<step>.
    is_uploaded: whether an output in an object store is first written to the disk of temporary files.
  """

  format: ClassVar[str]
  title: ClassVar[str]
  other_names: ClassVar[tuple[str, ...]] = ()
  unit: ClassVar[str] = 'arrays'
  without_effect: ClassVar[Mapping[str, Any]] = {}
  only_layout: ClassVar[str | None] = None
  left_out: ClassVar[Mapping[str, str]] = {}
  has_steps: ClassVar[bool] = False
  is_uploaded: ClassVar[bool] = False

  @classmethod
  def unsupported(cls, source: sources.StateSource, network: Mapping[str, Any]) -> str | None:
    """Return the part of a network that the format does not support, or None.

    Args:
      source: the weights to convert.
      network: recorded options of the network.
    """
    return None

  @classmethod
  def remarks(cls, network: Mapping[str, Any], with_optimizer_state: bool) -> list[str]:
    """Return remarks for the user.

    Args:
      network: recorded options of the network.
      with_optimizer_state: whether the output has optimizer state.
    """
    return []

  def family_of(self, source: sources.StateSource) -> hugging_face.Family | None:
    """Return the family of the model, or None if it is unknown."""
    return source_network.known_family(source)

  def with_adapter(self, source: sources.StateSource, dtype: str | None) -> sources.StateSource:
    """Return the state to write of a source with an adapter; by default its kernels with the adapter merged into them.

    Args:
      source: the weights to convert, whose metadata describe an adapter.
      dtype: floating-point dtype of the parameters of the output; None for the stored ones.

    Raises:
      ConfigError: the format does not support the adapter.
    """
    # A cast from float32 is the only rounding.
    return sources.MergedSource(source, None if dtype is None else 'float32')

  def check_output(self, output: str) -> None:
    """Raise before anything is read if the output cannot be written to the path `output`, or published.

    Raises:
      ConfigError: the format does not support the path or the options, or a package or a permission is missing.
    """
    del output

  def publish(self, path: str) -> str | None:
    """Publish the complete output at `path`, and return a remark for the user; None without an option for it.

    Raises:
      CheckpointError: nothing was published; the output is complete.
    """
    return None

  def plan_options(self) -> dict[str, Any]:
    """Return the arguments of `plan.plan_state` that are options of the format."""
    return {}

  def prepare(self, job: Job) -> Job:
    """Check what the format needs and return the job with what is found; writes nothing.

    Raises:
      CheckpointError: the format does not support the network.
    """
    return job

  @classmethod
  def usage(cls, done: Conversion) -> list[str] | None:
    """Return lines that show how to use the output; None for those of a run that starts from it."""
    return None

  @abc.abstractmethod
  def write(self, folder: files.Path, job: Job, make: MakeFn) -> None:
    """Write the output.

    Args:
      folder: path of the folder to create. On a disk it is a temporary one, which gets its name when this method
        returns. In an object store it is the final one: write the file by which the format is detected last.
      job: the conversion.
      make: returns an array from its name in the state; fast in the order of `job.plan.arrays`.

    Raises:
      OSError: the output cannot be written.
    """


@dataclasses.dataclass(frozen=True)
class StateTarget(Target):
  """Format of train states.

  Attributes:
    param_layout: 't5' or 'scalable_t5'; None keeps the source's.
    optimizer_state: 'keep' or 'drop'; None keeps it.
    step: number of training steps to record; None for the source's.
  """

  param_layout: str | None = None
  optimizer_state: str | None = None
  step: int | None = None

  def __post_init__(self) -> None:
    expectations = {
      '--param_layout': checks.one_of(PARAM_LAYOUTS).or_none(),
      '--optimizer_state': checks.one_of(OPTIMIZER_STATE).or_none(),
      '--step': checks.number(at_least=0, below=2**31, integer=True).or_none(),
    }
    checks.check('', {f'--{name}': value for name, value in vars(self).items()}, **expectations)

  def plan_options(self) -> dict[str, Any]:
    """See `Target.plan_options`."""
    names = ('param_layout', 'optimizer_state', 'step')
    return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class OwnTarget(StateTarget):
  """Checkpoint of t5x_lite.

  Attributes:
    merge: merge the adapter of the source into its kernels; None keeps it.
  """

  format = 't5x_lite'
  title = 't5x_lite checkpoint'
  has_steps = True
  other_names = ('t5x-lite', 't5xlite')

  merge: bool | None = None

  def with_adapter(self, source: sources.StateSource, dtype: str | None) -> sources.StateSource:
    """See `Target.with_adapter`."""
    if self.merge:
      return super().with_adapter(source, dtype)
    return source

  def prepare(self, job: Job) -> Job:
    """See `Target.prepare`; notes an adapter that is kept."""
    adapter = job.source.metadata.get('adapter')
    if adapter is None:
      return job
    note = (
      f'The adapter of {len(adapter["kernels"])} kernels is kept. A run from it needs the settings of '
      'adapters.Lora of its run; to have complete weights instead, add --merge.'
    )
    return dataclasses.replace(job, notes=(note, *job.notes))

  def write(self, folder: files.Path, job: Job, make: MakeFn) -> None:
    """See `Target.write`."""
    streaming.write_checkpoint(folder, job.step, job.plan.arrays, make, metadata=_metadata(job))


@dataclasses.dataclass(frozen=True)
class T5xTarget(StateTarget):
  """Checkpoint in T5X's native format."""

  format = 't5x'
  title = 'T5X checkpoint'
  has_steps = True
  left_out = {
    AVERAGE: 'The running average of the parameters (param_average) is not converted: T5X does not '
    'support it. To convert it instead of the parameters, add --param_average.'
  }

  def with_adapter(self, source: sources.StateSource, dtype: str | None) -> sources.StateSource:
    """Raise; see `Target.with_adapter`."""
    raise checks.invalid(
      '',
      '--to',
      'a format with adapters',
      self.format,
      'Merge the adapter first: --to=t5x_lite --merge.',
    )

  @classmethod
  def remarks(cls, network: Mapping[str, Any], with_optimizer_state: bool) -> list[str]:
    """See `Target.remarks`."""
    remarks = []
    if not with_optimizer_state:
      remarks.append(
        'The output has no optimizer state: to train from it, T5X needs RestoreCheckpointConfig with '
        "fallback_to_scratch = True and assignment_map = ((r'state/param_states.*', None),)."
      )
    if network.get('scale_tied_logits') is False:
      remarks.append(
        'Warning: the tied logits of this network are not scaled (scale_tied_logits=False), which this format '
        "does not record. T5X's networks divide tied logits by sqrt(emb_dim): for them, multiply "
        'decoder/decoder_norm/scale by sqrt(emb_dim).'
      )
    epsilon = network.get('layer_norm_epsilon', StackConfig.layer_norm_epsilon)
    if epsilon != StackConfig.layer_norm_epsilon:
      remarks.append(
        f'Warning: the norms of this network add {epsilon} (layer_norm_epsilon), which this format does not record. '
        f"T5X's networks add {StackConfig.layer_norm_epsilon}: their results differ."
      )
    start = network.get('decoder_start_token_id', 0)
    if start != 0:
      remarks.append(
        f'Warning: the decoder of this network starts with id {start} (decoder_start_token_id), which this format does '
        "not record. T5X's decoders start with id 0: their results differ."
      )
    return remarks

  def write(self, folder: files.Path, job: Job, make: MakeFn) -> None:
    """Write several arrays at a time, since the format is compressed, which takes longer than reading."""
    folder.mkdir()
    path = discovery.get_checkpoint_dir(folder, job.step)
    pending: collections.deque[tuple[concurrent.futures.Future, int]] = collections.deque()
    num_bytes = 0
    with (
      sources.T5xNativeWriter(path) as writer,
      concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
      for name in job.plan.arrays:
        array = make(name)
        while pending and num_bytes + array.nbytes > _MAX_PENDING_BYTES:
          future, size = pending.popleft()
          future.result()
          num_bytes -= size
        pending.append((pool.submit(writer.write, name, array), array.nbytes))
        num_bytes += array.nbytes
        del array
      for future, _ in pending:
        future.result()


def _metadata(job: Job) -> dict[str, Any]:
  """Return the metadata of the output checkpoint: those of the source that still apply."""
  source = job.source
  plan = job.plan
  metadata = dict(source.metadata)
  metadata.pop('optimizer', None)
  metadata.pop('run', None)  # Facts of the run about its data and evaluations do not apply.
  if plan.with_optimizer_state and 'optimizer' in source.metadata:
    metadata['optimizer'] = source.metadata['optimizer']
  if plan.param_layout is not None:
    metadata['param_layout'] = plan.param_layout
  if plan.network:
    metadata['network'] = dict(plan.network)
  if 'adapter' in metadata:
    metadata['adapter'] = _adapter_in_layout(metadata['adapter'], plan)
  metadata['converted'] = {
    'from': source.path if '://' in source.path else os.path.abspath(source.path),
    'format': source.format,
  }
  if job.family is not None:  # Used when converting back.
    metadata['converted']['family'] = job.family.name
  return metadata


def _adapter_in_layout(adapter: Mapping[str, Any], plan: StatePlan) -> dict[str, Any]:
  """Return the description of an adapter, see `Lora.metadata`, with the paths and dims of the output."""
  params = plan.params()
  trained = {f'{PARAMS}{path}' for path in adapter['also_train']}
  also_train = [path for path, planned in params.items() if not trained.isdisjoint(planned.inputs)]
  kernels = {}
  for path, planned in params.items():
    if not path.endswith('/lora_a'):
      continue
    stored = planned.inputs[0].removeprefix(PARAMS).replace('lora_a', 'kernel')
    kernel = path.replace('lora_a', 'kernel')
    kernels[kernel] = dict(adapter['kernels'][stored])
    for name in planned.inputs:
      other = adapter['kernels'][name.removeprefix(PARAMS).replace('lora_a', 'kernel')]
      if other['alpha'] != kernels[kernel]['alpha']:
        raise checks.invalid(
          '',
          '--param_layout',
          f'that of the source for an adapter whose layers have different alphas ({name})',
          plan.param_layout,
          'Remove it, or add --merge.',
        )
    if kernel != stored:
      num_inputs = len(planned.shape) - 1
      dims = 'i' * num_inputs + 'o' * (len(params[kernel].shape) - num_inputs)
      if plan.param_layout == 'scalable_t5':
        dims = f'{dims[0]}s{dims[2:]}'  # the second dim is that of the layers
      kernels[kernel]['dims'] = dims
  return {**adapter, 'also_train': also_train, 'kernels': kernels}
