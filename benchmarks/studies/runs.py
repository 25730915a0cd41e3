"""Runs of a study: trained once, by the command `train`, and read from their metrics."""

from collections.abc import Mapping, Sequence
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from t5x_lite import checkpoints
from t5x_lite.trainer import summaries

TASK = 'python_keyword_cloze'
# Compared values: writer and metric. The recipes divide the loss of a batch by its target tokens.
LOSS = (f'training_eval/{TASK}', 'cross_ent_loss')
MATCH = (f'inference_eval/{TASK}', 'exact_match')
STEPS_PER_SECOND = ('train', 'timing/steps_per_second')


def train(folder: pathlib.Path, gin_files: Sequence[str], flags: Mapping[str, Any]) -> None:
  """Train a run of the embedded task, unless it was trained before.

  Args:
    folder: the run.
    gin_files: configuration files.
    flags: values of macros and bindings by name, with 'TRAIN_STEPS'.
  """
  num_steps = flags['TRAIN_STEPS']
  if checkpoints.all_steps(folder)[-1:] == [num_steps]:
    return
  flags = {'MODEL_DIR': folder, 'SAVING_PERIOD': num_steps, 'DATA_SOURCE': 'builtin', **flags}
  command = [
    *(sys.executable, '-m', 't5x_lite', 'train'),
    *(f'--gin_file={name}' for name in gin_files),
    *(f'--gin.{name}={value}' for name, value in flags.items()),
  ]
  print(f'{folder.name}: training', flush=True)
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    sys.exit(
      f'{" ".join(map(str, command))} ended with status {done.returncode}:\n{done.stderr[-3000:]}'
    )


def curve(folder: pathlib.Path, writer: str, metric: str) -> dict[int, float]:
  """Return step to value of one metric of a run."""
  return {
    row['step']: row[metric]
    for row in summaries.read_metrics(folder / writer / summaries.METRICS_FILE)
  }


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
  """Return the mean and the sample standard deviation (0 of one value)."""
  deviation = 0.0
  if len(values) > 1:
    deviation = statistics.stdev(values)
  return statistics.mean(values), deviation
