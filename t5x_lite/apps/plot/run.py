"""Draws the metrics of runs: one panel per metric, one colour per run."""

from collections.abc import Collection, Mapping, Sequence
import logging
import math
import os
import pathlib
from typing import Any

from t5x_lite import checkpoints
from t5x_lite import summaries
from t5x_lite.errors import CheckpointDamagedError, ConfigError, DataError, did_you_mean, install_command

_logger = logging.getLogger(__name__)

# Drawn when nothing is asked for, besides all that evaluation by decoding measured.
_DEFAULT_METRICS = ('loss', 'accuracy', 'learning_rate')
_DECODED = 'inference_eval/'
_BOOKKEEPING = ('step', 'wall_time')
_COLORS = ('#1f77b4', '#d62728', '#2ca02c', '#9467bd', '#ff7f0e', '#17becf', '#8c564b', '#7f7f7f')
# Kind of writer to line style: training is a thin line, evaluations have a mark per point.
_STYLES: Mapping[str, Mapping[str, Any]] = {
    'train': {'linewidth': 0.9, 'alpha': 0.8},
    'training_eval': {'linewidth': 1.4, 'marker': 'o', 'markersize': 4, 'linestyle': '--'},
    'inference_eval': {'linewidth': 1.4, 'marker': 's', 'markersize': 4},
}


def plot(model_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None,
         metrics: Sequence[str] | None = None, *, from_start: bool = False) -> pathlib.Path:
  """Draws the metrics that runs have written so far; a run may still be going on.

  Args:
    model_dirs: model directories, all drawn into the same panels.
    out: file to write, its ending says the format (.png, .svg, .pdf); None is `metrics.png` in the first directory.
    metrics: names as in `metrics.jsonl`; None draws loss, accuracy, learning rate, and what decoding measured.
    from_start: count each run's steps from the checkpoint that it started from, so that a fine-tuned model and one from
      scratch are seen at equal numbers of steps.

  Returns:
    The file that was written.

  Raises:
    ConfigError: matplotlib is missing, or the file cannot be written.
    DataError: a directory holds no metrics, or none of a wanted name; with `from_start`, no checkpoint that says where
      the run began.
  """
  runs = {str(model_dir): read_run(model_dir, _first_step(model_dir) if from_start else 0) for model_dir in model_dirs}
  known = sorted({name for run in runs.values() for points in run.values() for name in points})
  for name in metrics or ():
    if name not in known:
      raise DataError(f'No metric {name!r} in {", ".join(runs)}.{did_you_mean(name, known)}')
  chosen = list(metrics or _default_metrics(runs, known))
  figure = draw(runs, chosen, 'step of the run' if from_start else 'step')
  path = pathlib.Path(out) if out is not None else pathlib.Path(model_dirs[0]) / 'metrics.png'
  if not path.suffix:
    path = path.with_suffix('.png')
  try:
    figure.savefig(path, dpi=120)
  except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
    raise ConfigError(f'Cannot write the plot to {str(path)!r}: {error}. Choose another --out.') from error
  return path


def _first_step(model_dir: str | os.PathLike[str]) -> int:
  """Returns the step at which a run began: that of the checkpoint from which it was started, 0 from scratch."""
  for step in reversed(checkpoints.all_steps(model_dir)):
    try:
      facts = checkpoints.read_metadata(checkpoints.get_checkpoint_dir(model_dir, step))
    except CheckpointDamagedError as error:
      _logger.warning('%s Looking for an older one.', error)
      continue
    if 'start_step' in facts.get('run', {}):
      return facts['run']['start_step']
    break
  raise DataError(f'{str(model_dir)!r} holds no checkpoint of its own that says at which step the run began. Leave '
                  'from_start (--from_start) out, or save a checkpoint in the run.')


def read_run(model_dir: str | os.PathLike[str], first_step: int = 0) -> dict[str, dict[str, list[tuple[int, float]]]]:
  """Returns writer to metric to (step, value) points, steps counted from `first_step`."""
  files = summaries.metrics_files(model_dir)
  if not files:
    what = 'holds no metrics yet' if pathlib.Path(model_dir).is_dir() else 'is no directory'
    raise DataError(f'{str(model_dir)!r} {what}; expected the model directory of a run, in which train/'
                    f'{summaries.METRICS_FILE} stands.')
  found: dict[str, dict[str, list[tuple[int, float]]]] = {}
  for writer, path in files.items():
    points = found.setdefault(writer, {})
    for row in summaries.read_metrics(path):
      for name, value in row.items():
        if name not in _BOOKKEEPING:
          points.setdefault(name, []).append((row['step'] - first_step, value))
  return found


def _default_metrics(runs: Mapping[str, Mapping[str, Mapping[str, Any]]], known: Sequence[str]) -> list[str]:
  decoded = {name for run in runs.values() for writer, points in run.items() if writer.startswith(_DECODED)
             for name in points if not name.startswith('timing/')}
  chosen = [name for name in _DEFAULT_METRICS if name in known] + sorted(decoded - set(_DEFAULT_METRICS))
  return chosen or list(known[:4])


def draw(runs: Mapping[str, Mapping[str, Mapping[str, list[tuple[int, float]]]]], metrics: Sequence[str],
          step_label: str) -> Any:
  try:
    from matplotlib import ticker
    from matplotlib.figure import Figure  # not pyplot: no display, no global state
  except ImportError as error:
    raise ConfigError('Plots need matplotlib, which is not installed. Install it with '
                      f'`{install_command("plot")}`.') from error
  columns = min(2, len(metrics))
  rows = math.ceil(len(metrics) / columns)
  figure = Figure(figsize=(5.5 * columns, 3.4 * rows), layout='constrained')
  for index, metric in enumerate(metrics):
    axes = figure.add_subplot(rows, columns, index + 1)
    drawn = []
    names = _writer_names({writer for writers in runs.values() for writer, points in writers.items() if metric in points})
    for (run, writers), color in zip(runs.items(), _cycle(len(runs))):
      for writer, points in writers.items():
        if metric in points:
          run_name = pathlib.PurePath(run).name
          of_many = f'{run_name}: {names[writer]}' if len(names) > 1 else run_name
          steps, values = zip(*points[metric], strict=True)
          shade = color if len(runs) > 1 else _COLORS[list(_STYLES).index(writer.split('/')[0])]
          axes.plot(steps, values, color=shade, label=writer if len(runs) == 1 else of_many,
                    **_STYLES[writer.split('/')[0]])
          drawn += values
    if metric.endswith('loss') and all(math.isfinite(value) and value > 0 for value in drawn):
      # Losses fall by orders of magnitude at first, and what tells runs apart comes later.
      axes.set_yscale('log')
      axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
      axes.yaxis.set_major_formatter(ticker.FormatStrFormatter('%g'))
      axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_title(metric, fontsize=10)
    axes.set_xlabel(step_label, fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, framealpha=0.6)
  return figure


def _writer_names(writers: Collection[str]) -> dict[str, str]:
  """Returns what a legend calls the writers: the kind alone where there is one of it, without the task's name."""
  kinds = [writer.split('/')[0] for writer in writers]
  return {writer: kind if kinds.count(kind) == 1 else writer for writer, kind in zip(writers, kinds, strict=True)}


def _cycle(count: int) -> list[str]:
  return [_COLORS[i % len(_COLORS)] for i in range(count)]
