"""Full names of metrics, `<folder of the evaluation>/<task>/<metric>`: means over tasks, and the check of a name."""

from collections.abc import Iterable, Mapping
import contextlib
from typing import Any
import warnings

import clu.values
import numpy as np

from t5x_lite import checks
from t5x_lite import data
from t5x_lite.errors import ConfigError, did_you_mean

TRAINING_EVAL = 'training_eval'
INFERENCE_EVAL = 'inference_eval'
# Task name of means over tasks.
MEAN = 'mean'
_TIMING = 'timing/'


def mean_over_tasks(
  metrics_by_task: Mapping[str, Mapping[str, clu.values.Value]],
) -> dict[str, clu.values.Scalar]:
  """Return the mean of each number over the tasks that have it, without rates and times.

  >>> values = {'a': {'f1': clu.values.Scalar(1.0)}, 'b': {'f1': clu.values.Scalar(0.5), 'em': clu.values.Scalar(0.0)}}
  >>> {name: value.value for name, value in mean_over_tasks(values).items()}
  {'f1': 0.75, 'em': 0.0}
  """
  numbers: dict[str, list[float]] = {}
  for metrics in metrics_by_task.values():
    for name, value in metrics.items():
      if isinstance(value, clu.values.Scalar) and not name.startswith(_TIMING):
        numbers.setdefault(name, []).append(float(np.asarray(value.value)))
  means = {name: float(np.mean(values)) for name, values in numbers.items()}
  return {name: clu.values.Scalar(mean) for name, mean in means.items()}


def full_names(
  folder: str, metrics_by_task: Mapping[str, Mapping[str, clu.values.Value]]
) -> dict[str, float]:
  """Return the numbers of each task, and their means, by full name, without rates and times."""
  everything = {**metrics_by_task, MEAN: mean_over_tasks(metrics_by_task)}
  numbers = {}
  for task, metrics in everything.items():
    for name, value in metrics.items():
      if isinstance(value, clu.values.Scalar) and not name.startswith(_TIMING):
        numbers[f'{folder}/{task}/{name}'] = float(np.asarray(value.value))
  return numbers


def check_task_names(names: Iterable[str]) -> None:
  """Raise if a task has the name of the mean over tasks.

  Raises:
    ConfigError: see above.
  """
  if MEAN in names:
    raise ConfigError(
      f'No task may be called {MEAN!r}, the folder of means over tasks. Rename the task.'
    )


def names_of_metrics(task: data.EvalTask) -> set[str] | None:
  """Return the names of a task's metrics before anything is predicted, by passing targets as predictions.

  Returns:
    The names, or None if a metric function raises an error for them.
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
      names |= set(task.call_score_metric(fn, targets, np.zeros(len(targets))))
    return names
  return None


def _union(sets: Iterable[set[str] | None]) -> set[str] | None:
  """Return the union of sets of names; None if one of them is unknown."""
  union: set[str] = set()
  for names in sets:
    if names is None:
      return None
    union |= names
  return union


def check_metric_name(
  option: str, name: Any, known: Mapping[str, Mapping[str, set[str] | None]]
) -> None:
  """Raise if the run does not compute a metric.

  Args:
    option: option that contains the name.
    name: full name of a metric.
    known: names of metrics by folder of the evaluation and task, None if they are not known in advance.

  Raises:
    ConfigError: with the known names.
  """
  name = str(name)
  folders: dict[str, set[str] | None] = {}
  for folder, tasks in known.items():
    for task, names in tasks.items():
      folders[f'{folder}/{task}'] = names
    folders[f'{folder}/{MEAN}'] = _union(tasks.values())
  candidates = []
  for folder, names in folders.items():
    if names is None and name.startswith(f'{folder}/'):
      return
    for metric in names or ():
      candidates.append(f'{folder}/{metric}')
  if name in candidates:
    return
  ending = [each for each in candidates if each.endswith(f'/{name}')]
  open_folders = [folder for folder, names in folders.items() if names is None]
  if ending:
    hint = f' Did you mean {ending[0]!r}?'
  elif not candidates and open_folders:
    task, _, metric = name.rpartition('/')
    named = [each for each in open_folders if task and f'/{each}'.endswith(f'/{task}')]
    by_decoding = [each for each in open_folders if each.startswith(INFERENCE_EVAL)]
    of_tasks = [each for each in by_decoding or open_folders if not each.endswith(f'/{MEAN}')]
    proposal = f'{(named or of_tasks or open_folders)[0]}/{metric}'
    hint = f' Did you mean {proposal!r}?'
  elif candidates:
    hint = did_you_mean(name, candidates)
  else:
    hint = did_you_mean(name, [f'{folder}/...' for folder in folders])
  if not folders:
    hint = ' Nothing is evaluated: configure an evaluation, or remove the option.'
  owner, _, option = option.rpartition('.')
  raise checks.invalid(owner, option, 'the full name of a metric of this run', name, hint.strip())
