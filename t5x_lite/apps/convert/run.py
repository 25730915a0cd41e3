"""Converts weights between the forms that people have them in: ours, T5X's and Hugging Face's.

    t5x_lite convert flan-t5-base/ runs/flan --to=t5x_lite
    t5x_lite convert runs/mine flan-mine/ --to=hugging_face --tokenizer=spiece.model

What is converted is decided and checked by names and shapes; then one array after another is read, changed and written.
The result has its name when it is whole.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from t5x_lite import checkpoints
from t5x_lite import runtime
from t5x_lite.apps.common import output_folder as export_folder
from t5x_lite.apps.convert import hugging_face as convert_hugging_face
from t5x_lite.apps.convert import plan as convert_plan
from t5x_lite.apps.convert.plan import Reader, StatePlan
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints import streaming
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.formatting import format_bytes
from t5x_lite.networks.t5_config import PARAM_LAYOUTS, check_choice

FORMATS = ('t5x_lite', 't5x', 'hugging_face')
OPTIMIZER_STATE = ('keep', 'drop')
_GIGABYTE = 10**9
# Of arrays that are being compressed; a larger one is alone.
_BYTES_UNDER_WAY = 2**27


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
  """What a conversion has written.

  Attributes:
    path: of the result.
    format: one of `FORMATS`.
    source: path of what was converted.
    source_format: one of `sources.FORMATS`.
    num_arrays: arrays written, by the names of the result.
    num_bytes: what they take.
    dtypes: name of a dtype -> number of parameter arrays that have it.
    num_params: number of parameters.
    param_layout: of the result; None for a network that is none of ours.
    family: family of a Hugging Face folder on either side; None without one.
    architecture: of the network; None for one that transformers does not have.
    has_tokenizer: whether the result is a folder with a tokenizer.
    notes: what a person should know of it.
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
  notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertConfig:
  """Options of a conversion, the flags of `t5x_lite convert`.

  Attributes:
    to: one of `FORMATS`.
    dtype: floating dtype of the parameters, one of `convert_plan.DTYPES`; None keeps each array's own.
    param_layout: 't5' or 'scalable_t5'; None keeps the source's. A Hugging Face folder has one form only.
    family: for 'hugging_face', the family of the model; None recognises it.
    tokenizer: for 'hugging_face', a file or folder to take the tokenizer from.
    optimizer_state: 'keep' or 'drop'; None keeps it where the result has a place for it.
    max_shard_size: for 'hugging_face', the most bytes of a file of weights.
    step: number of training steps to record; None for the source's.

  Raises:
    ConfigError: a value that is not supported, or that has no effect with the others.
  """

  to: str
  dtype: str | None = None
  param_layout: str | None = None
  family: str | None = None
  tokenizer: str | None = None
  optimizer_state: str | None = None
  max_shard_size: int | None = None
  step: int | None = None

  def __post_init__(self) -> None:
    to, is_folder = self.to, self.to == 'hugging_face'
    check_choice('--to', to, FORMATS)
    for name, choices in (('dtype', convert_plan.DTYPES), ('param_layout', PARAM_LAYOUTS),
                          ('optimizer_state', OPTIMIZER_STATE)):
      if (value := getattr(self, name)) is not None:
        check_choice(f'--{name}', value, choices)
    for name in ('family', 'tokenizer', 'max_shard_size', 'param_layout', 'step'):
      wants_folder = name not in ('param_layout', 'step')
      if (value := getattr(self, name)) is not None and wants_folder != is_folder:
        of = '--to=hugging_face' if wants_folder else '--to=t5x_lite and --to=t5x'
        raise ConfigError(f'--{name}={value} has no effect with --to={to}: it is for {of}. Leave it out.')
    if is_folder and self.optimizer_state == 'keep':
      raise ConfigError("--optimizer_state=keep: a Hugging Face folder has no place for an optimizer's state. Leave "
                        'the flag out, or convert to t5x_lite or t5x.')
    if self.step is not None and not 0 <= self.step < 2**31:
      raise ConfigError(f'--step={self.step}: expected a whole number from 0 to {2**31 - 1}.')
    if self.max_shard_size is not None and self.max_shard_size < 1:
      raise ConfigError(f'--max_shard_size={self.max_shard_size}: expected a number of bytes above 0, e.g. 5GB.')


def convert(source: str, output: str, *, progress: runtime.Progress | None = None, **options: Any) -> Conversion:
  """Converts weights; holds a few arrays in memory at a time.

  Args:
    source: a folder with weights in any form, or a directory of checkpoints, whose newest sound one is taken.
    output: what to make: for 'hugging_face' that folder, otherwise a model directory with one checkpoint. It must not
      exist.
    progress: shows how far it is.
    **options: the attributes of `ConvertConfig`.

  Returns:
    What was written.

  Raises:
    ConfigError: an option has no effect or does not fit the source, or a value does not fit `dtype`.
    CheckpointError: the source cannot be read, the output exists, or it cannot be written.
  """
  cfg = ConvertConfig(**options)
  progress = progress or runtime.Progress(enabled=False)
  _check_output(source, output)
  progress.note('looking at the source')
  opened = open_newest(source)
  family = convert_hugging_face.known_family(opened) if cfg.family is None else hugging_face.get_family(cfg.family)
  plan = convert_plan.plan_state(
      opened, to=cfg.to, dtype=cfg.dtype, param_layout=cfg.param_layout,
      relpos_per_layer=family is not None and family.relpos_per_layer,
      optimizer_state=cfg.optimizer_state, step=cfg.step)
  target = None
  if cfg.to == 'hugging_face':
    target = convert_hugging_face.prepare(opened, plan, family=family, tokenizer=cfg.tokenizer)
  _check_room(output, plan.num_bytes)
  if opened.format != 'hugging_face':  # of which all that can be is verified already
    progress.note('looking for damage in the source')
    opened.verify()
  make = _Counter(Reader(opened, plan, cfg.dtype), len(plan.arrays), progress)
  at_step = (opened.step or 0) if cfg.step is None else cfg.step
  path = output if target is not None else checkpoints.get_checkpoint_dir(output, at_step)
  with export_folder.making(pathlib.Path(os.path.abspath(output))) as made, _named_errors(made, output):
    if target is not None:
      target.write(made, make, cfg.max_shard_size)
    elif cfg.to == 't5x_lite':
      streaming.write_checkpoint(made, at_step, plan.arrays, make, metadata=_metadata(plan, opened))
    else:
      _write_t5x(made, at_step, plan, make)
    progress.note('waiting for the disk')
  progress.clear()
  return Conversion(
      path=path, format=cfg.to, source=opened.path, source_format=opened.format,
      num_arrays=len(plan.arrays) if target is None else target.num_tensors, num_bytes=plan.num_bytes,
      dtypes=collections.Counter(planned.dtype.name for planned in plan.params().values()),
      num_params=plan.num_params, param_layout=plan.param_layout,
      family=family if target is None else target.family,
      architecture=_known_architecture(opened, plan) if target is None else target.architecture,
      has_tokenizer=target is not None and target.has_tokenizer,
      notes=plan.notes if target is None else (*plan.notes, *target.notes))


def open_newest(path: str) -> sources.StateSource:
  """Opens weights in any form, or the newest ones of a directory of checkpoints.

  Of checkpoints of ours that is the newest sound one; those of T5X have nothing to be verified by.

  Args:
    path: a folder.

  Raises:
    CheckpointError: there is nothing that can be read.
  """
  discovery.check_local_path(path, 'SOURCE')
  if sources.detect_format(path) is None:
    step = checkpoints.newest_sound_step(path) if checkpoints.all_steps(path) else checkpoints.newest_of_others(path)
    if step is not None:
      path = checkpoints.get_checkpoint_dir(path, step)
  return sources.open_source(path)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused before anything is read


def _check_output(source: str, output: str) -> None:
  discovery.check_local_path(output, 'OUTPUT')
  if not output.strip() or os.path.basename(os.path.abspath(output)) in ('', os.sep):
    raise ConfigError(f'OUTPUT is {output!r}; expected the path of a new folder.')
  real, real_source = os.path.realpath(output), os.path.realpath(source)
  if real == real_source or real.startswith(real_source + os.sep):
    raise ConfigError(f'OUTPUT {output!r} is in SOURCE {source!r}; expected a path outside of it, since what is read '
                      'stays as it is.')
  if os.path.lexists(output):
    raise CheckpointError(f'{output!r} exists already; expected the path of a new folder, since nothing is '
                          'overwritten. Give another name, or remove it.')


def _check_room(output: str, num_bytes: int) -> None:
  folder = pathlib.Path(os.path.abspath(output)).parent
  while not folder.exists():
    folder = folder.parent
  free = shutil.disk_usage(folder).free
  if 0 < free < num_bytes:
    raise CheckpointError(f'{output!r} will take {format_bytes(num_bytes)}, and the disk has {format_bytes(free)} '
                          'free. Make room, give an OUTPUT on another disk, or a smaller --dtype.')


# ----------------------------------------------------------------------------------------------------------------------
# Writing


class _Counter:
  """Makes arrays, and shows how many it has made."""

  def __init__(self, reader: Reader, total: int, progress: runtime.Progress):
    self._reader, self._progress = reader, progress
    self._num_made = self._num_bytes = 0
    progress.begin(total, 0)

  def __call__(self, name: str) -> np.ndarray:
    """Returns the array `name` of the result."""
    array = self._reader.make(name)
    self._num_made += 1
    self._num_bytes += array.nbytes
    if self._progress.due:
      self._progress.update(self._num_made, {'GB': self._num_bytes / _GIGABYTE})
    return array


MakeFn = Callable[[str], np.ndarray]


def _write_t5x(folder: pathlib.Path, step: int, plan: StatePlan, make: MakeFn) -> None:
  """Writes several arrays at a time: T5X's form is compressed, which takes longer than reading."""
  folder.mkdir()
  path = checkpoints.get_checkpoint_dir(folder, step)
  pending: collections.deque[tuple[concurrent.futures.Future, int]] = collections.deque()
  with sources.T5xNativeWriter(path) as writer, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    for name in plan.arrays:
      array = make(name)
      while pending and sum(num_bytes for _, num_bytes in pending) + array.nbytes > _BYTES_UNDER_WAY:
        pending.popleft()[0].result()
      pending.append((pool.submit(writer.write, name, array), array.nbytes))
      del array
    for future, _ in pending:
      future.result()


def _metadata(plan: StatePlan, source: sources.StateSource) -> dict[str, Any]:
  """Returns what to record with a checkpoint of ours: what was known, as far as it still holds."""
  metadata = dict(source.metadata)
  metadata.pop('optimizer', None)
  metadata.pop('run', None)  # Its data and its evaluations are not taken over.
  if plan.with_optimizer_state and 'optimizer' in source.metadata:
    metadata['optimizer'] = source.metadata['optimizer']
  if plan.param_layout is not None:
    metadata['param_layout'] = plan.param_layout
  if plan.network:
    metadata['network'] = dict(plan.network)
  metadata['converted'] = {'from': os.path.abspath(source.path), 'format': source.format}
  family = convert_hugging_face.known_family(source)
  if family is not None:  # for the way back
    metadata['converted']['family'] = family.name
  return metadata


@contextlib.contextmanager
def _named_errors(made: pathlib.Path, output: str) -> Iterator[None]:
  """Has errors of writing name the output in the place of the temporary folder."""
  try:
    yield
  except CheckpointError as error:
    if str(made) not in str(error):
      raise
    raise CheckpointError(f'{str(error).replace(str(made), output)} Nothing is left of it: mend that, and run the same '
                          'command again.') from error
  except OSError as error:
    if error.filename is not None and export_folder.INFIX not in os.fsdecode(error.filename):
      raise  # about the source
    raise CheckpointError(f'{output!r} could not be written: {error.strerror or error}. Nothing is left of it: make '
                          'room or change what stands there, and run the same command again.') from error


def _known_architecture(source: sources.StateSource, plan: StatePlan) -> hugging_face.Architecture | None:
  try:
    return convert_hugging_face.architecture_of(source, plan)
  except CheckpointError:
    return None  # a network that transformers does not have, and we may
