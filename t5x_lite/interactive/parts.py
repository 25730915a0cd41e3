"""Parts of `InteractiveModel`: checks of its arguments, what it starts from, and its batches."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from t5x_lite import checkpoints
from t5x_lite import models
from t5x_lite import schedules
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.common import start as start_lib
from t5x_lite.data.text_examples import TextExample
from t5x_lite.errors import CheckpointError, ConfigError

# A list of examples, or a list of such lists.
Batches = Sequence[TextExample] | Sequence[Sequence[TextExample]]


def check_positive(name: str, value: Any, or_none: bool = False) -> None:
  """Refuses anything but a whole number above 0, or None where that is allowed."""
  if not (or_none and value is None) and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
    raise ConfigError(f'{name} is {value!r}; expected a whole number above 0{", or None" if or_none else ""}.')


def default_trainer_cls(model: models.BaseTransformerModel) -> trainer_lib.BaseTrainerConstructor:
  """Returns the trainer with T5X's default schedule, where the optimizer has none of its own."""
  schedule = schedules.create_learning_rate_scheduler() if model.optimizer_def.needs_learning_rate else None
  return functools.partial(trainer_lib.Trainer, learning_rate_fn=schedule)


def starting_point(cfg: checkpoints.RestoreCheckpointConfig | None) -> start_lib.StartingPoint:
  """Returns what the state is made from; None means new parameters."""
  if cfg is None:
    return start_lib.StartingPoint()
  if cfg.mode == 'all':
    raise ConfigError("restore_mode is 'all'; expected 'specific' for a checkpoint or 'latest' for the newest one in a "
                      'directory.')
  _, paths = checkpoints.get_first_valid_restore_config_and_paths([cfg])
  if not paths:
    raise CheckpointError(f'There is no checkpoint below {cfg.path!r}; expected a directory with checkpoint_<step> in '
                          "it. Correct checkpoint_path, or set it to '' for new parameters.")
  return start_lib.StartingPoint(path=paths[0], restore_cfg=cfg)


def as_batches(batches: Batches) -> list[Sequence[TextExample]]:
  """Returns a list of batches, one if examples were given."""
  return [batches] if isinstance(batches[0], (str, bytes, Mapping)) else list(batches)


def flat(batches: Batches | None) -> list[TextExample]:
  """Returns all examples of all batches."""
  return [example for batch in as_batches(batches) for example in batch] if batches else []
