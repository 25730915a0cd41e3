"""Small program for gin configurations: a model, a dataset and a train function, without computation."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Literal

from t5x_lite import checks
from t5x_lite.errors import ConfigError
from t5x_lite.types import ChoosesMesh


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
  """A positional frozen config that validates itself."""

  name: str
  lengths: Mapping[str, int]
  batch_size: int
  shuffle: bool = True
  seed: int | None = 0
  mode: Literal['fast', 'exact'] = 'fast'

  def __post_init__(self):
    if self.batch_size < 1:
      raise ConfigError(f'batch_size: got {self.batch_size}, expected at least 1.')
    checks.check(
      'DatasetConfig', vars(self), seed=checks.number(at_least=0, remedy='Omit it.').or_none()
    )


class Model:
  """A class with a configurable method."""

  def __init__(
    self, width: int, rate: float = 0.1, names: Sequence[str] = (), dtype: Any = 'float32'
  ):
    self.width, self.rate, self.names, self.dtype = width, rate, names, dtype

  def predict(self, num_decodes: int = 1) -> int:
    """Return the value."""
    return num_decodes


def schedule(base: float = 1.0, steps: int = 10) -> Callable[[int], float]:
  """Return a function."""
  return lambda step: base * min(1.0, step / steps)


class Trainer:
  """Called by train, with more arguments than gin binds."""

  def __init__(self, model: Model, learning_rate_fn: Callable[[int], float]):
    self.model, self.learning_rate_fn = model, learning_rate_fn


def train(
  *,
  model: Model,
  train_cfg: DatasetConfig,
  eval_cfg: DatasetConfig | None = None,
  trainer_cls: Callable[..., Trainer],
  model_dir: str,
  total_steps: int,
  dry_run: bool = False,
) -> dict[str, Any]:
  """Return the arguments."""
  trainer = trainer_cls(model=model)
  return {
    'model': model,
    'train_cfg': train_cfg,
    'eval_cfg': eval_cfg,
    'rate': trainer.learning_rate_fn(5),
    'model_dir': model_dir,
    'total_steps': total_steps,
    'dry_run': dry_run,
  }


def unused(value: int = 1) -> int:
  """Nothing refers to it."""
  return value


NOT_CALLABLE = 3


class Mesh(ChoosesMesh):
  """A mesh that is configured, or chosen by the class."""

  def __init__(
    self,
    extents: Sequence[int] | None = None,
    num_partitions: int | None = None,
    names: str = 'data',
  ):
    self.extents, self.num_partitions, self.names = extents, num_partitions, names

  @classmethod
  def automatic_mesh(cls, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without extents, if there were any."""
    return {'num_partitions': -1, **({'extents': None} if configured.get('extents') else {})}
