"""Convert weights between the formats of t5x_lite, T5X and Hugging Face.

    t5x_lite convert flan-t5-base/ runs/flan --to=t5x_lite
    t5x_lite convert runs/mine flan-mine/ --to=hugging_face --tokenizer=spiece.model

The conversion is planned and checked by names and shapes; then one array after another is read, converted and written.
The output is renamed to its final path when it is complete. In an object store, the file that makes it valid is written
last.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import files
from t5x_lite import runtime
from t5x_lite.apps.common import output_folder
from t5x_lite.apps.convert import hugging_face as convert_hugging_face
from t5x_lite.apps.convert import plan as convert_plan
from t5x_lite.apps.convert.formats import FORMATS
from t5x_lite.apps.convert.formats import OTHER_NAMES
from t5x_lite.apps.convert.plan import Reader
from t5x_lite.apps.convert.plan import StatePlan
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints import streaming
from t5x_lite.errors import CheckpointError
from t5x_lite.formatting import format_bytes
from t5x_lite.networks.t5_config import PARAM_LAYOUTS

OPTIMIZER_STATE = ('keep', 'drop')
_GIGABYTE = 10**9
# Limit for arrays that are compressed at the same time; a larger array is compressed alone.
_MAX_PENDING_BYTES = 2**27


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
  """Result of a conversion.

  Attributes:
    path: path of the output.
    format: one of `FORMATS`.
    source: path of the source.
    source_format: one of `sources.FORMATS`.
    num_arrays: number of arrays written.
    num_bytes: their total size.
    dtypes: number of parameter arrays by dtype name.
    num_params: number of parameters.
    param_layout: layout of the output; None for a network of another package.
    family: family of a Hugging Face source or output; None without one.
    architecture: architecture of the network; None if transformers does not support it.
    has_tokenizer: whether the output is a folder with a tokenizer.
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
  notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertConfig:
  """Options of a conversion, the flags of `t5x_lite convert`.

  Attributes:
    to: one of `FORMATS`.
    dtype: floating-point dtype of the parameters, one of `convert_plan.DTYPES`; None keeps the stored ones.
    param_layout: 't5' or 'scalable_t5'; None keeps the source's. Not for 'hugging_face'.
    family: for 'hugging_face', the family of the model; None detects it.
    tokenizer: for 'hugging_face', file or folder with the tokenizer.
    optimizer_state: 'keep' or 'drop'; None keeps it if the output format supports it.
    max_shard_size: for 'hugging_face', maximum number of bytes of a file of weights.
    step: number of training steps to record; None for the source's.
    param_average: convert the running average of the parameters instead of the parameters.

  Raises:
    ConfigError: a value is not supported, or has no effect with the others.
  """

  to: str
  dtype: str | None = None
  param_layout: str | None = None
  family: str | None = None
  tokenizer: str | None = None
  optimizer_state: str | None = None
  max_shard_size: int | None = None
  step: int | None = None
  param_average: bool = False

  def __post_init__(self) -> None:
    flags = {f'--{name}': value for name, value in vars(self).items()}
    if self.to == 'hugging_face':
      others = ['--param_layout', '--step']
      supported = '--to=t5x_lite or --to=t5x'
      if self.optimizer_state == 'keep':
        others.append('--optimizer_state')
    else:
      others = ['--family', '--tokenizer', '--max_shard_size']
      supported = '--to=hugging_face'
    absent = checks.Expectation(
      f'absent with --to={self.to}',
      lambda value: value is None,
      f'It requires {supported}: remove the flag.',
    )
    optimizer_state = checks.one_of(OPTIMIZER_STATE).or_none()
    if self.param_average:
      optimizer_state = checks.Expectation(
        "absent or 'drop' with --param_average",
        lambda value: value in (None, 'drop'),
        'The state belongs to the trained parameters.',
      )
    expectations = {
      '--to': checks.one_of(FORMATS, synonyms=OTHER_NAMES),
      '--dtype': checks.one_of(convert_plan.DTYPES).or_none(),
      '--param_layout': checks.one_of(PARAM_LAYOUTS).or_none(),
      '--optimizer_state': optimizer_state,
      '--step': checks.number(at_least=0, below=2**31, integer=True).or_none(),
      '--max_shard_size': checks.number(at_least=1, integer=True).or_none(),
    }
    checks.check('', flags, **expectations | dict.fromkeys(others, absent))


def convert(
  source: str, output: str, *, progress: runtime.Progress | None = None, **options: Any
) -> Conversion:
  """Convert weights, with a few arrays in memory at a time.

  Args:
    source: folder with weights in any format, or a run directory, of which the newest sound checkpoint is converted; or
      the name of a model of the Hugging Face hub, hf://OWNER/NAME.
    output: path of the output, which must not exist: for 'hugging_face' a folder, otherwise a run directory with one
      checkpoint.
    progress: progress line.
    **options: attributes of `ConvertConfig`.

  Returns:
    Description of the output.

  Raises:
    ConfigError: an option has no effect or is not supported for the source, or a value is out of range for `dtype`.
    CheckpointError: the source cannot be read, the output exists, or it cannot be written.
  """
  cfg = ConvertConfig(**options)
  shown = progress or runtime.Progress(enabled=False)
  _check_output(source, output)
  shown.note('reading the source')
  opened = open_newest(source)
  if cfg.param_average:
    opened = sources.AverageSource(opened)
  if cfg.family is None:
    family = convert_hugging_face.known_family(opened)
  else:
    family = hugging_face.get_family(cfg.family)
  plan = convert_plan.plan_state(
    opened,
    to=cfg.to,
    dtype=cfg.dtype,
    param_layout=cfg.param_layout,
    relpos_per_layer=family is not None and family.relpos_per_layer,
    optimizer_state=cfg.optimizer_state,
    step=cfg.step,
  )
  if cfg.param_average:
    plan = dataclasses.replace(
      plan, notes=('The parameters are the running average (param_average).', *plan.notes)
    )
  target = None
  if cfg.to == 'hugging_face':
    target = convert_hugging_face.prepare(opened, plan, family=family, tokenizer=cfg.tokenizer)
  if not files.is_remote(output):
    _check_disk_space(pathlib.Path(os.path.abspath(output)).parent, output, plan.num_bytes)
  elif target is not None:  # it is uploaded from there
    _check_disk_space(
      pathlib.Path(tempfile.gettempdir()),
      output,
      plan.num_bytes,
      'the disk of temporary files (TMPDIR)',
    )
  if opened.format != 'hugging_face':  # Opening a Hugging Face folder verifies it.
    shown.note('verifying the source')
    opened.verify()
  make = _Counter(Reader(opened, plan, cfg.dtype), len(plan.arrays), shown)
  at_step = cfg.step
  if at_step is None:
    at_step = opened.step or 0
  path = output
  if target is None:
    path = checkpoints.get_checkpoint_dir(output, at_step)
  final = files.path(output)
  if not files.is_remote(output):
    final = files.path(os.path.abspath(output))
  with output_folder.creating(final) as made, _named_errors(made, output):
    if target is not None:
      target.write(made, make, cfg.max_shard_size)
    elif cfg.to == 't5x_lite':
      streaming.write_checkpoint(made, at_step, plan.arrays, make, metadata=_metadata(plan, opened))
    else:
      _write_t5x(made, at_step, plan, make)
    shown.note('waiting for the disk')
  shown.clear()
  done = Conversion(
    path=path,
    format=cfg.to,
    source=opened.path,
    source_format=opened.format,
    num_arrays=len(plan.arrays),
    num_bytes=plan.num_bytes,
    dtypes=collections.Counter(planned.dtype.name for planned in plan.params().values()),
    num_params=plan.num_params,
    param_layout=plan.param_layout,
    family=family,
    architecture=None,
    has_tokenizer=False,
    notes=plan.notes,
  )
  if target is None:
    return dataclasses.replace(done, architecture=_known_architecture(opened, plan))
  return dataclasses.replace(
    done,
    num_arrays=target.num_tensors,
    family=target.family,
    architecture=target.architecture,
    has_tokenizer=target.has_tokenizer,
    notes=(*plan.notes, *target.notes),
  )


def open_newest(path: str) -> sources.StateSource:
  """Open weights in any format, or the newest checkpoint of a run directory.

  For checkpoints of t5x_lite this is the newest sound one; T5X's cannot be verified.

  Args:
    path: folder with weights, a run directory, or the name of a model of the Hugging Face hub.

  Raises:
    CheckpointError: no checkpoint is readable.
  """
  path = sources.folder_of(path)
  if sources.detect_format(path) is None:
    if checkpoints.all_steps(path):
      step = checkpoints.newest_sound_step(path)
    else:
      step = checkpoints.newest_of_others(path)
    if step is not None:
      path = checkpoints.get_checkpoint_dir(path, step)
  return sources.open_source(path)


# ----------------------------------------------------------------------------------------------------------------------
# Checks before anything is read


def _check_output(source: str, output: str) -> None:
  discovery.check_path(source, 'SOURCE', may_be_model=True)
  is_path, real_source = output_folder.directory('Name a new folder.'), files.real_path(source)
  checks.check(
    '',
    {'OUTPUT': output},
    OUTPUT=checks.Expectation(
      f'{is_path.text}, outside of SOURCE {source!r}',
      lambda output: (
        is_path.holds(output)
        and not (files.real_path(output) + os.sep).startswith(real_source + os.sep)
      ),
      is_path.remedy,
    ),
  )
  discovery.check_free(files.path(output))


def _check_disk_space(
  folder: pathlib.Path, output: str, num_bytes: int, disk: str = 'the disk'
) -> None:
  while not folder.exists():
    folder = folder.parent
  free = shutil.disk_usage(folder).free
  if 0 < free < num_bytes:
    raise CheckpointError(
      f'{output!r} needs {format_bytes(num_bytes)}, and {disk} has {format_bytes(free)} free. '
      'Free disk space, choose an OUTPUT on another disk, or a smaller --dtype.'
    )


# ----------------------------------------------------------------------------------------------------------------------
# Writing


class _Counter:
  """Computes arrays, and updates the progress line."""

  def __init__(self, reader: Reader, total: int, progress: runtime.Progress):
    self._reader = reader
    self._progress = progress
    self._num_made = self._num_bytes = 0
    progress.begin(total, 0)

  def __call__(self, name: str) -> np.ndarray:
    """Return the array `name` of the output."""
    array = self._reader.make(name)
    self._num_made += 1
    self._num_bytes += array.nbytes
    if self._progress.due:
      self._progress.update(self._num_made, {'GB': self._num_bytes / _GIGABYTE})
    return array


MakeFn = Callable[[str], np.ndarray]


def _write_t5x(folder: files.Path, step: int, plan: StatePlan, make: MakeFn) -> None:
  """Write several arrays at a time, since T5X's format is compressed, which takes longer than reading."""
  folder.mkdir()
  path = checkpoints.get_checkpoint_dir(folder, step)
  pending: collections.deque[tuple[concurrent.futures.Future, int]] = collections.deque()
  with (
    sources.T5xNativeWriter(path) as writer,
    concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
  ):
    for name in plan.arrays:
      array = make(name)
      while (
        pending and sum(num_bytes for _, num_bytes in pending) + array.nbytes > _MAX_PENDING_BYTES
      ):
        pending.popleft()[0].result()
      pending.append((pool.submit(writer.write, name, array), array.nbytes))
      del array
    for future, _ in pending:
      future.result()


def _metadata(plan: StatePlan, source: sources.StateSource) -> dict[str, Any]:
  """Return the metadata of the output checkpoint: those of the source that still apply."""
  metadata = dict(source.metadata)
  metadata.pop('optimizer', None)
  metadata.pop('run', None)  # Facts of the run about its data and evaluations do not apply.
  if plan.with_optimizer_state and 'optimizer' in source.metadata:
    metadata['optimizer'] = source.metadata['optimizer']
  if plan.param_layout is not None:
    metadata['param_layout'] = plan.param_layout
  if plan.network:
    metadata['network'] = dict(plan.network)
  metadata['converted'] = {
    'from': source.path if '://' in source.path else os.path.abspath(source.path),
    'format': source.format,
  }
  family = convert_hugging_face.known_family(source)
  if family is not None:  # Used when converting back.
    metadata['converted']['family'] = family.name
  return metadata


@contextlib.contextmanager
def _named_errors(made: files.Path, output: str) -> Iterator[None]:
  """Replace the path of the temporary folder by `output` in errors."""
  try:
    yield
  except (CheckpointError, OSError) as error:
    if isinstance(error, CheckpointError):
      message = str(error).replace(str(made), output)
      is_about_output = message != str(error)
    else:
      message = f'{output!r} could not be written: {error.strerror or error}.'
      is_about_output = error.filename is None or output_folder.INFIX in os.fsdecode(error.filename)
    if not is_about_output:
      raise
    raise CheckpointError(
      f'{message} Nothing was written: free disk space or fix the path, then rerun the command.'
    ) from error


def _known_architecture(
  source: sources.StateSource, plan: StatePlan
) -> hugging_face.Architecture | None:
  try:
    return convert_hugging_face.architecture_of(source, plan)
  except CheckpointError:
    return None  # transformers does not support the network; t5x_lite may.
