"""Draw the metrics of runs: a panel for each metric, a colour for each run."""

from collections.abc import Mapping, Sequence
import logging
import os
import re

from t5x_lite import checkpoints
from t5x_lite.apps.common import curves
from t5x_lite.apps.common import figures
from t5x_lite.errors import CheckpointDamagedError, ConfigError, DataError, did_you_mean
from t5x_lite.storage import files
from t5x_lite.storage import untrusted
from t5x_lite.trainer import summaries

_logger = logging.getLogger(__name__)

# Drawn by default, together with the metrics of inference.
# Writer to metric to (step, value).
_Points = dict[str, dict[str, list[tuple[int, float]]]]
_DEFAULT_METRICS = ('loss', 'accuracy', 'learning_rate')
_INFERENCE = 'inference_eval/'
_BOOKKEEPING = ('step', 'wall_time')
# Value of `loss_normalizing_factor` to the unit of the loss.
_LOSS_UNITS = {
  'NUM_REAL_TARGET_TOKENS': 'nats per token',
  'NUM_TOTAL_TARGET_TOKENS': 'nats per target position',
  'AVERAGE_PER_SEQUENCE': 'nats per token, mean of sequences',
  'None': 'nats per batch',
}


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
  folders = dict(zip(_run_names(model_dirs), model_dirs, strict=True))
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
  chosen = list(dict.fromkeys(metrics or _default_metrics(runs, known)))
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
      loss_unit=_loss_unit(model_dirs),
      step_label='steps since the start of the run' if from_start else 'training step',
    )
    try:
      files.write(path, lambda local: figure.savefig(local, dpi=120, format=path.suffix[1:]))
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
      raise ConfigError(
        f'Cannot write the plot to {str(path)!r}: {error}. Choose another --out.'
      ) from error
  return path


def _run_names(model_dirs: Sequence[str | os.PathLike[str]]) -> list[str]:
  """Return the name of each directory, with as many parent folders as make different directories distinct."""
  paths = [files.path(model_dir).resolve() for model_dir in model_dirs]
  for length in range(1, max(len(path.parts) for path in paths) + 1):
    names = ['/'.join(path.parts[-length:]) for path in paths]
    if len(set(names)) == len(set(paths)):
      break
  return names


def _loss_unit(model_dirs: Sequence[str | os.PathLike[str]]) -> str:
  """Return the unit of the loss, which depends on the recorded `loss_normalizing_factor`; 'nats' if runs differ."""
  units = set()
  for model_dir in model_dirs:
    path = files.path(model_dir) / 'config.gin'
    if path.is_file():
      text = untrusted.read_regular(path).decode('utf-8', errors='replace')
    else:
      text = ''
    values = re.findall(r'\.loss_normalizing_factor = (?:\\\s+)?(\S+)', text)
    macros = dict(re.findall(r'^(\w+) = (\S+)', text, re.MULTILINE))
    if not values:
      units.add('nats')
    for value in values:
      value = value.removeprefix('%')
      value = macros.get(value, value).strip('\'"').upper().replace('NONE', 'None')
      units.add(_LOSS_UNITS.get(value, 'nats'))
  if len(units) == 1:
    return units.pop()
  return 'nats'


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


def read_run(model_dir: str | os.PathLike[str], first_step: int = 0) -> _Points:
  """Return writer to metric to (step, value) points, steps counted from `first_step`.

  Raises:
    DataError: the directory has no metrics.
  """
  found: _Points = {}
  for writer, path in summaries.metrics_files(model_dir).items():
    for row in summaries.read_metrics(path):
      step = row['step'] - first_step
      for name, value in row.items():
        if name not in _BOOKKEEPING:
          points = found.setdefault(writer, {}).setdefault(name, [])
          points.append((step, value))
  if not found:
    raise DataError(summaries.no_metrics_message(model_dir))
  return found


def _default_metrics(runs: Mapping[str, curves.RunPoints], known: Sequence[str]) -> list[str]:
  inferred = set()
  for run in runs.values():
    for writer, points in run.items():
      if writer.startswith(_INFERENCE):
        inferred |= {name for name in points if not name.startswith('timing/')}
  chosen = [name for name in _DEFAULT_METRICS if name in known]
  chosen += sorted(inferred - set(_DEFAULT_METRICS))
  return chosen or list(known[:4])
