"""The texts behind the examples of tasks: what stood there before it became ids.

For what looks at texts rather than ids, such as the check of a vocabulary that the task does not have yet.
"""

from collections.abc import Iterable

import numpy as np

from t5x_lite.data import builtin_source
from t5x_lite.data.config import DatasetConfig
from t5x_lite.errors import ConfigError, did_you_mean


def read_task_texts(cfg: DatasetConfig, max_examples: int | None = None) -> dict[str, list[str]]:
  """Returns the texts of a task's examples in the order of the split; those of a mixture task by task.

  A task that keeps no text (span corruption makes its examples out of ids) gives what its vocabulary decodes from the
  ids, in which sentinels leave no trace.

  Args:
    cfg: what to read, with a source that has texts.
    max_examples: how many of each task; None for all.

  Returns:
    Task feature name to texts.

  Raises:
    ConfigError, DataError: as `data.open_train_iterator`; or the source is another one.
  """
  if cfg.source == 'seqio':
    from t5x_lite.data import seqio_texts
    return seqio_texts.read_task_texts(cfg, max_examples)
  if cfg.source != 'builtin':
    raise ConfigError(f"The texts of a dataset with source = {cfg.source!r} cannot be read; expected 'seqio' or "
                      "'builtin'.")
  texts: dict[str, list[str]] = {}
  for task in builtin_source.tasks_of(cfg):
    check_features(cfg, task.name, task.vocabularies)
    table = task.table(cfg.split, cfg.task_feature_lengths)
    numbers = np.arange(len(table) if max_examples is None else min(max_examples, len(table)))
    examples = None
    for feature in cfg.task_feature_lengths:
      kept = [table.texts(int(number)).get(f'{feature}_pretokenized') for number in numbers]
      if None in kept:
        examples = table.examples(cfg.effective_seed, numbers) if examples is None else examples
        kept = [task.vocabularies[feature].decode(example[feature]) for example in examples]
      texts.setdefault(feature, []).extend(kept)
  return texts


def check_features(cfg: DatasetConfig, task_name: str, features: Iterable[str]) -> None:
  """Refuses lengths of features that a task does not have.

  Raises:
    ConfigError: naming the feature.
  """
  features = list(features)
  for feature in cfg.task_feature_lengths:
    if feature not in features:
      raise ConfigError(f'task_feature_lengths names {feature!r}, which {task_name!r} does not have.'
                        f'{did_you_mean(feature, features)}')
