"""The rows of the contract table: every optimizer in every mode that has its own code path.

A module of this package has `ROWS`, name to `Row`; `ROWS` here is all of them together. A factory without a row there
has one with its defaults, at the trainer's rate 0.05, so that the contract is checked for each optimizer.
"""

from collections.abc import Callable, Mapping
import dataclasses
import importlib
import pkgutil
from typing import Any

from t5x_lite import optimizers
from t5x_lite.configuration import configurable_names

# The checks of tests/optimizers/test_contract.py that a row may be excepted from.
CHECKS = (
  'minimises',
  'one_trace',
  'state_dict',
  'checkpoint',
  'axes',
  'sharded',
  'bfloat16',
  'odd_trees',
  'learning_rate',
  'needs',
)


@dataclasses.dataclass(frozen=True)
class Row:
  """An optimizer in one mode.

  Attributes:
    factory: makes the definition.
    learning_rate: what to pass at each update; None where the optimizer has its own.
    exceptions: name of a check to the reason, a sentence, why this published optimizer cannot keep it. The check is
      made all the same, and has to fail.
    needs: names of the values of a step that an update cannot do without; see `optimizers.EXTRA_ARGS`.
    per_example: gradients have a leading dim of examples.
  """

  factory: Callable[[], optimizers.OptimizerDef]
  learning_rate: float | None = None
  exceptions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  needs: tuple[str, ...] = ()
  per_example: bool = False

  def __post_init__(self):
    assert all(name in CHECKS and len(reason) > 20 for name, reason in self.exceptions.items()), (
      self.exceptions
    )
    assert all(name in optimizers.EXTRA_ARGS for name in self.needs), self.needs

  @property
  def overrides(self) -> dict[str, Any]:
    """Hyper-parameters of each update."""
    return {} if self.learning_rate is None else {'learning_rate': self.learning_rate}


def _all_rows() -> dict[str, Row]:
  rows = {}
  for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
    more = importlib.import_module(f'{__name__}.{module}').ROWS
    assert not set(rows) & set(more), (
      f'{module}: rows that others have too: {sorted(set(rows) & set(more))}'
    )
    rows |= more
  factories = configurable_names.CALLED['t5x_lite.optimizers.optax_adapter.factories'].split()
  for name in factories:
    # `wrap_optax_optimizer` makes factories; the row `adafactor` is T5X's, and optax's has another name.
    if name != 'wrap_optax_optimizer' and name not in rows:
      rows[name] = Row(getattr(optimizers, name), 0.05)
  return rows


ROWS = _all_rows()
