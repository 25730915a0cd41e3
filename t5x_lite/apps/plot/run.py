"""Draw the metrics of runs: a panel for each metric, a colour for each run."""

from collections.abc import Sequence
import logging
import os

import numpy as np

from t5x_lite import checkpoints
from t5x_lite.apps.common import curves
from t5x_lite.apps.common import figures
from t5x_lite.apps.common import metric_points
from t5x_lite.errors import CheckpointDamagedError, ConfigError, DataError, did_you_mean
from t5x_lite.storage import files

_logger = logging.getLogger(__name__)


def plot(
  model_dirs: Sequence[str | os.PathLike[str]],
  out: str | os.PathLike[str] | None = None,
  metrics: Sequence[str] | None = None,
  *,
  from_start: bool = False,
) -> files.Path:
  """Draw the metrics that runs have written so far; a run may still be training.

  At most six runs or tasks have a colour and a name in the legend; if there are more, the rest are gray.

  Args:
    model_dirs: model directories, all drawn in the same panels.
    out: file to write; its suffix is the format (.png, .svg, .pdf). None is `metrics.png` in the first directory.
    metrics: names as in `metrics.jsonl`; None draws loss, accuracy, learning rate and the metrics of inference.
    from_start: count the steps of each run from the checkpoint that it started from, to compare a fine-tuned model
      with one trained from new parameters.

  Returns:
    The file.

  Raises:
    ConfigError: matplotlib is missing, or the file cannot be written or is a link.
    DataError: a directory has no metrics or no metric of a given name, or a file is not a regular file or too large;
      with `from_start`, no checkpoint has the first step of the run.
  """
  folders = dict(zip(metric_points.run_names(model_dirs), model_dirs, strict=True))
  runs = {}
  known = set()
  for name, folder in folders.items():
    first_step = 0
    if from_start:
      first_step = _first_step(folder)
    runs[name] = read_run(folder, first_step)
    known |= set().union(*runs[name].values())
  known = sorted(known)
  for name in metrics or ():
    if name not in known:
      raise DataError(
        f'`plot.metrics` must be names of recorded metrics, got {name!r}.{did_you_mean(name, known)}'
      )
  chosen = list(dict.fromkeys(metrics or metric_points.default_metrics(runs)))
  if out is not None:
    path = files.path(out)
  else:
    path = files.path(model_dirs[0]) / 'metrics.png'
  if not path.suffix:
    path = path.with_suffix('.png')
  files.check_regular(path)
  with figures.figure_style():
    figure = curves.draw(
      runs,
      chosen,
      loss_unit=metric_points.loss_unit(model_dirs),
      step_label='steps since the start of the run' if from_start else 'training step',
    )
    try:
      files.write(path, lambda local: figure.savefig(local, dpi=120, format=path.suffix[1:]))
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
      raise ConfigError(
        f'Cannot write the plot to {str(path)!r}: {error}. Choose another --out.'
      ) from error
  return path


def _first_step(model_dir: str | os.PathLike[str]) -> int:
  """Return the step of the checkpoint that a run started from; 0 if it started from new parameters."""
  for step in reversed(checkpoints.all_steps(model_dir)):
    try:
      metadata = checkpoints.read_metadata(checkpoints.get_checkpoint_dir(model_dir, step))
    except CheckpointDamagedError as error:
      _logger.warning('%s An earlier checkpoint is read instead.', error)
      continue
    if 'start_step' in metadata.get('run', {}):
      return metadata['run']['start_step']
    break
  raise DataError(
    f'`plot.from_start` requires a checkpoint with the first step of the run, got none in '
    f'{str(model_dir)!r}. Omit from_start (--from_start), or save a checkpoint in the run.'
  )


def read_run(
  model_dir: str | os.PathLike[str], first_step: int = 0
) -> dict[str, dict[str, np.ndarray]]:
  """Return the points of each metric by writer, float64 [n, 2] of (step, value), steps counted from `first_step`.

  Raises:
    DataError: the directory has no metrics.
  """
  found = {}
  for writer, metrics in metric_points.read_run(model_dir).items():
    found[writer] = {name: points - (first_step, 0) for name, points in metrics.points.items()}
  return found
