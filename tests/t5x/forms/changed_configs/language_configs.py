"""Configurations of a project: derived dataclasses that compute their values, and one that is changed later.

In T5X the classes are plain dataclasses: `__post_init__` of a subclass and any other code may assign fields, and the
values count that the fields have when the run reads them. `DatasetConfig` has no `__post_init__`, and that of
`RestoreCheckpointConfig` puts the assignment map before the functions.
"""

import dataclasses
import os

from t5x import utils


@dataclasses.dataclass
class LanguageDatasetConfig(utils.DatasetConfig):
  """Data whose task has the language in its name."""

  language: str = 'words'

  def __post_init__(self):
    self.mixture_or_task_name = f'{self.mixture_or_task_name}_{self.language}'


@dataclasses.dataclass
class StepOfRun(utils.RestoreCheckpointConfig):
  """Checkpoint of a step of another run."""

  mode: str = dataclasses.field(default='specific', init=False)
  step: int = 0

  def __post_init__(self):
    super().__post_init__()
    self.path = os.path.join(self.path, f'checkpoint_{self.step}')


@dataclasses.dataclass
class NamedCheckpointConfig(utils.CheckpointConfig):
  """Checkpoints with a name in the configuration."""

  name: str = 'pretrained'


def with_rows(cfg, rows):
  """Return a configuration whose batch is given only now."""
  cfg.batch_size = rows
  return cfg


def often(cfg=utils.SaveCheckpointConfig(keep=3), period=2):
  """Return how to save; the default is one object for all calls."""
  cfg.period = period
  return cfg
