"""Functions whose arguments are the fields of a dataclass: train, evaluate and infer."""

import dataclasses
import inspect
import typing

import pytest

from t5x_lite.apps.common.options import takes_options
from t5x_lite.apps.evaluate import run as evaluate_app
from t5x_lite.apps.evaluate.config import EvaluateConfig
from t5x_lite.apps.infer import run as infer_app
from t5x_lite.apps.infer.config import InferConfig
from t5x_lite.apps.train import run as train_app
from t5x_lite.apps.train.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Base:
  """Options of all.

  Attributes:
    size: the size,
      in bytes.
  """

  size: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config(_Base):
  """Options of one.

  Attributes:
    name: the name.

  Raises:
    ValueError: never.
  """

  name: str


@takes_options(_Config)
def _program(cfg: _Config) -> str:
  """Run.

  Returns:
    The name.
  """
  return cfg.name * cfg.size


def test_a_function_takes_the_fields_of_its_configuration():
  assert str(inspect.signature(_program)) == '(*, name: str, size: int = 3) -> str'
  assert typing.get_type_hints(_program) == {'name': str, 'size': int, 'return': str}
  assert inspect.getfullargspec(_program).kwonlyargs == ['name', 'size']
  assert _program(name='a') == 'aaa'
  assert _program.__doc__.splitlines() == [
    'Run.',
    '',
    'Args:',
    '  size: the size,',
    '    in bytes.',
    '  name: the name.',
    '',
    'Returns:',
    '  The name.',
  ]
  for call in (_program, lambda: _program('a'), lambda: _program(name='a', other=1)):
    with pytest.raises(TypeError):
      call()


@pytest.mark.parametrize(
  'program, cfg_cls',
  [
    (train_app.train, TrainConfig),
    (evaluate_app.evaluate, EvaluateConfig),
    (infer_app.infer, InferConfig),
  ],
)
def test_options_are_defined_once(program, cfg_cls):
  fields = {field.name: field.type for field in dataclasses.fields(cfg_cls)}
  hints = typing.get_type_hints(program)
  del hints['return']
  assert hints == fields
