"""Metrics by full name, `<kind>/<task>/<metric>`: their means over tasks, and the check of a name that a user gives."""

from collections.abc import Iterable, Mapping
import contextlib
from typing import Any
import warnings

import clu.values
import numpy as np

from t5x_lite import data
from t5x_lite.errors import ConfigError, did_you_mean

TRAINING_EVAL = 'training_eval'
INFERENCE_EVAL = 'inference_eval'
# In the place of a task's name: the mean over tasks.
MEAN = 'mean'
_TIMING = 'timing/'


def mean_over_tasks(metrics_by_task: Mapping[str, Mapping[str, clu.values.Value]]) -> dict[str, clu.values.Scalar]:
  """Returns the plain mean of each number over the tasks that have it; rates and times are left out.

  >>> values = {'a': {'f1': clu.values.Scalar(1.0)}, 'b': {'f1': clu.values.Scalar(0.5), 'em': clu.values.Scalar(0.0)}}
  >>> {name: value.value for name, value in mean_over_tasks(values).items()}
  {'f1': 0.75, 'em': 0.0}
  """
  numbers: dict[str, list[float]] = {}
  for metrics in metrics_by_task.values():
    for name, value in metrics.items():
      if isinstance(value, clu.values.Scalar) and not name.startswith(_TIMING):
        numbers.setdefault(name, []).append(float(np.asarray(value.value)))
  return {name: clu.values.Scalar(float(np.mean(values))) for name, values in numbers.items()}


def full_names(kind: str, metrics_by_task: Mapping[str, Mapping[str, clu.values.Value]]) -> dict[str, float]:
  """Returns the numbers of each task, and their means, by full name; rates and times are left out."""
  everything = {**metrics_by_task, MEAN: mean_over_tasks(metrics_by_task)}
  return {f'{kind}/{task}/{name}': float(np.asarray(value.value)) for task, metrics in everything.items()
          for name, value in metrics.items()
          if isinstance(value, clu.values.Scalar) and not name.startswith(_TIMING)}


def check_task_names(names: Iterable[str]) -> None:
  """Refuses a task whose name stands for the mean over tasks.

  Raises:
    ConfigError: see above.
  """
  if MEAN in names:
    raise ConfigError(f'A task is called {MEAN!r}, which is where means over tasks are written: rename the task.')


def names_of_metrics(task: data.EvalTask) -> set[str] | None:
  """Returns what a task's metrics will be called, before anything is predicted: the targets themselves are judged.

  Returns:
    The names, or None where a metric function does not take them for predictions.
  """
  names: set[str] = set()
  with warnings.catch_warnings(), contextlib.suppress(Exception), np.errstate(all='ignore'):
    warnings.simplefilter('ignore')
    if task.predict_with_aux_metric_fns or task.output_metrics:
      return None
    targets = task.targets()
    for fn in task.metric_fns:
      names |= set(fn(targets, targets))
    for fn in task.score_metric_fns:
      names |= set(fn(targets, np.zeros(len(targets))))
    return names
  return None


def check_metric_name(option: str, name: Any, known: Mapping[str, set[str] | None]) -> None:
  """Refuses the name of a metric that the run will not compute.

  Args:
    option: the option that gives the name.
    name: what it gives.
    known: `<kind>/<task>` to the names of its metrics, None where they are not known before the task is judged.

  Raises:
    ConfigError: with the names that there are.
  """
  folders = dict(known)
  for kind in (TRAINING_EVAL, INFERENCE_EVAL):
    of_kind = [names for folder, names in known.items() if folder.startswith(f'{kind}/')]
    if of_kind:
      folders[f'{kind}/{MEAN}'] = None if None in of_kind else set().union(*of_kind)
  if not isinstance(name, str):
    raise ConfigError(f'{option} is {name!r}; expected the full name of a metric, such as '
                      f"'{INFERENCE_EVAL}/{MEAN}/accuracy'.")
  of_folder = [folder for folder in folders if name.startswith(f'{folder}/')]
  if any(folders[folder] is None or name.removeprefix(f'{folder}/') in folders[folder] for folder in of_folder):
    return
  candidates = [f'{folder}/{metric}' for folder, names in folders.items() for metric in names or ()]
  hint = did_you_mean(name, candidates) if candidates else did_you_mean(name, [f'{folder}/...' for folder in folders])
  if not folders:
    hint = ' Nothing is evaluated: give an evaluation, or leave the option out.'
  raise ConfigError(f'{option} is {name!r}, which is no metric of this run.{hint}')
