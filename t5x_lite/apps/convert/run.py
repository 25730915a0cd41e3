"""Convert weights between the formats of t5x_lite, T5X and Hugging Face.

    t5x_lite convert flan-t5-base/ runs/flan --to=t5x_lite
    t5x_lite convert runs/mine flan-mine/ --to=hugging_face --tokenizer=spiece.model

The conversion is planned and checked by names and shapes; then one array after another is read, converted and written.
The output is renamed to its final path when it is complete. In an object store, the file that makes it valid is written
last.
"""

import collections
from collections.abc import Iterator, Mapping
import contextlib
import os
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import runtime
from t5x_lite.adapters import merging
from t5x_lite.apps.common import output_folder
from t5x_lite.apps.convert import formats
from t5x_lite.apps.convert import plan as convert_plan
from t5x_lite.apps.convert import source_network
from t5x_lite.apps.convert.formats import FORMATS
from t5x_lite.apps.convert.plan import Reader
from t5x_lite.apps.convert.state_plan import OPTIMIZER_STATE
from t5x_lite.apps.convert.targets import Conversion
from t5x_lite.apps.convert.targets import Job
from t5x_lite.apps.convert.targets import Target
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import sources
from t5x_lite.errors import CheckpointError
from t5x_lite.formatting import format_bytes
from t5x_lite.storage import files

__all__ = ('FORMATS', 'OPTIMIZER_STATE', 'Conversion', 'convert', 'open_newest')

_GIGABYTE = 10**9


def convert(
  source: str,
  output: str,
  *,
  to: str,
  dtype: str | None = None,
  param_average: bool = False,
  base: str | None = None,
  progress: runtime.Progress | None = None,
  **options: Any,
) -> Conversion:
  """Convert weights, with a few arrays in memory at a time.

  Args:
    source: folder with weights in any format, or a run directory, of which the newest sound checkpoint is converted; or
      the name of a model of the Hugging Face hub, hf://OWNER/NAME.
    output: path of the output, which must not exist: for 'hugging_face' a folder, otherwise a run directory with one
      checkpoint.
    to: name of the format of the output, 't5x_lite', 't5x', 'hugging_face' or that of a registered class.
    dtype: floating-point dtype of the parameters, one of `convert_plan.DTYPES`; None keeps the stored ones.
    param_average: convert the running average of the parameters instead of the parameters.
    base: for a source that is only an adapter: the model to which it is added, in any format. For a run with an adapter
      only if its base has moved.
    progress: progress line.
    **options: options of the format, fields of its `Target`.

  Returns:
    Description of the output.

  Raises:
    ConfigError: an option has no effect or is not supported for the source, or a value is out of range for `dtype`.
    CheckpointError: the source cannot be read, the output exists, or it cannot be written.
  """
  target = _target(to, dtype, param_average, options)
  shown = progress or runtime.Progress(enabled=False)
  target.check_output(output)
  _check_output(source, output)
  shown.note('reading the source')
  opened = _open(source, base)
  if param_average:
    opened = sources.AverageSource(opened)
  if 'adapter' in opened.metadata:
    opened = target.with_adapter(opened, dtype)
  elif options.get('merge'):
    raise checks.invalid(
      '', '--merge', f'absent, since {source!r} has no adapter', True, 'Remove it.'
    )
  job = _plan(opened, target, dtype, param_average)
  _check_disks(target, output, job.plan.num_bytes)
  shown.note('verifying the source')
  opened.verify()
  make = _Counter(Reader(opened, job.plan, dtype), len(job.plan.arrays), shown)
  path = output
  if target.has_steps:
    path = checkpoints.get_checkpoint_dir(output, job.step)
  final = files.path(output)
  if not files.is_remote(output):
    final = files.path(os.path.abspath(output))
  with output_folder.creating(final) as made, _named_errors(made, output):
    target.write(made, job, make)
    shown.note('waiting for the disk')
  shown.clear()
  published = target.publish(path)
  plan = job.plan
  return Conversion(
    path=path,
    format=target.format,
    source=opened.path,
    source_format=opened.format,
    num_arrays=job.num_arrays,
    num_bytes=plan.num_bytes,
    dtypes=collections.Counter(planned.dtype.name for planned in plan.params().values()),
    num_params=plan.num_params,
    param_layout=plan.param_layout,
    family=job.family,
    architecture=job.architecture,
    has_tokenizer=job.has_tokenizer,
    has_adapter=any(map(merging.is_leaf, plan.arrays)),
    notes=job.notes if published is None else (*job.notes, published),
  )


def _target(to: str, dtype: str | None, param_average: bool, options: Mapping[str, Any]) -> Target:
  """Return the target with its options, and check the options of all formats."""
  target = formats.make_target(to, options)
  optimizer_state = options.get('optimizer_state')
  dropped = checks.Expectation(
    "absent or 'drop' with --param_average",
    lambda value: not param_average or value in (None, 'drop'),
    'The state belongs to the trained parameters.',
  )
  checks.check(
    '',
    {'--dtype': dtype, '--optimizer_state': optimizer_state},
    **{'--dtype': checks.one_of(convert_plan.DTYPES).or_none(), '--optimizer_state': dropped},
  )
  return target


def _plan(
  source: sources.StateSource, target: Target, dtype: str | None, param_average: bool
) -> Job:
  """Return the planned and checked conversion; reads no values, except for tables of position biases."""
  family = target.family_of(source)
  plan = convert_plan.plan_state(
    source,
    to=target.format,
    dtype=dtype,
    relpos_per_layer=family is not None and family.relpos_per_layer,
    **target.plan_options(),
  )
  notes = plan.notes
  if isinstance(source, sources.MergedSource):
    notes = (source.note, *notes)
    if sources.has_param_average(source.source):
      notes += ('For the running average of the parameters, add --param_average.',)
  if param_average:
    notes = ('The parameters are the running average (param_average).', *notes)
  return target.prepare(
    Job(
      source=source,
      plan=plan,
      num_arrays=len(plan.arrays),
      family=family,
      architecture=source_network.known_architecture(source, plan),
      notes=notes,
    )
  )


def _open(source: str, base: str | None) -> sources.StateSource:
  """Open the source, an adapter together with its base."""
  if not sources.is_adapter(source):
    opened = open_newest(source, base)
    if base is not None and opened.own is opened:
      expected = f'absent, since {source!r} is not only an adapter'
      raise checks.invalid('', '--base', expected, base, 'Remove the flag.')
    # A path that does not exist would leave the recorded one, and the flag would have no effect.
    if base is not None and not files.path(sources.folder_of(base)).is_dir():
      raise checks.invalid(
        '',
        '--base',
        'the folder or run directory of the base',
        base,
        'Correct the path; if the base has not moved, remove the flag.',
      )
    return opened
  if base is None:
    expected = f'the folder or run directory of the model of the adapter {source!r}'
    raise checks.invalid('', '--base', expected, base, 'Add the flag.')
  model = open_newest(base)
  adapter = sources.open_peft(source, model.shapes(), model.path)
  return sources.AdapterSource(adapter, lambda: model)


def open_newest(path: str, base_path: str | None = None) -> sources.StateSource:
  """Open weights in any format, or the newest checkpoint of a run directory.

  For checkpoints of t5x_lite this is the newest sound one; T5X's cannot be verified.

  Args:
    path: folder with weights, a run directory, or the name of a model of the Hugging Face hub.
    base_path: path of the base if this is a run with an adapter, see `sources.recorded_base`.

  Raises:
    CheckpointError: no checkpoint is readable.
  """
  return sources.open_source(checkpoints.newest_of(path), base_path=base_path)


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


def _check_disks(target: Target, output: str, num_bytes: int) -> None:
  if not files.is_remote(output):
    _check_disk_space(pathlib.Path(os.path.abspath(output)).parent, output, num_bytes)
  elif target.is_uploaded:
    temporary = pathlib.Path(tempfile.gettempdir())
    _check_disk_space(temporary, output, num_bytes, 'the disk of temporary files (TMPDIR)')


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
