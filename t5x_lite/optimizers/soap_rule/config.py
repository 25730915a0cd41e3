"""Options of SOAP, with their checks."""

import dataclasses

from t5x_lite import checks
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.optax_adapter.param_scales import DecayByPath

OWNER = 'soap'

# Largest decay of second moments in bfloat16: the change of a step, 1 - b2, is then at least its relative spacing.
_MAX_BFLOAT16_DECAY = 1 - 2**-7

_COUNT = checks.number(at_least=1, integer=True)
_DECAY = checks.number(at_least=0, at_most=1)  # 1 means the sum, as in Adagrad
_NOT_NEGATIVE = checks.number(at_least=0)
_BOOL = checks.instance(bool, 'True or False')
_OPTIONS = dict(
  b1=checks.number(at_least=0, below=1),
  b2=_DECAY,
  shampoo_beta=_DECAY.or_none(),
  eps=checks.number(above=0),
  weight_decay=_NOT_NEGATIVE._replace(
    holds=lambda value: isinstance(value, DecayByPath) or _NOT_NEGATIVE.holds(value)
  ),
  precondition_frequency=_COUNT,
  max_precond_dim=_COUNT,
  block_size=checks.number(
    at_least=2, integer=True, remedy='Blocks of one element are not rotated; use optimizers.adamw.'
  ).or_none(),
  merge_dims=_BOOL,
  precondition_1d=_BOOL,
  exponent=checks.number(above=0),
  correct_bias=_BOOL,
  skip_first_step=_BOOL,
  spread_refreshes=_BOOL,
  momentum_dtype=checks.one_of(('float32', 'bfloat16', 'int8')),
  second_moment_dtype=checks.one_of(('float32', 'bfloat16')),
  matrix_dtype=checks.one_of(('float32', 'int16')),
  symmetric_storage=_BOOL,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoapConfig:
  """Options of `optimizers.soap`, which describes them, without the learning rate.

  Raises:
    ConfigError: an option that is out of range or without effect.
  """

  b1: float
  b2: float
  shampoo_beta: float | None
  eps: float
  weight_decay: float | DecayByPath
  precondition_frequency: int
  max_precond_dim: int
  block_size: int | None
  merge_dims: bool
  precondition_1d: bool
  exponent: float
  correct_bias: bool
  skip_first_step: bool
  spread_refreshes: bool
  momentum_dtype: str
  second_moment_dtype: str
  matrix_dtype: str
  symmetric_storage: bool

  def __post_init__(self):
    checks.check(OWNER, vars(self), **_OPTIONS)
    for option, is_given, other in (
      (
        'block_size',
        self.block_size is not None and self.block_size >= self.max_precond_dim,
        f'max_precond_dim={self.max_precond_dim}, above which dims are not rotated, only with a larger one',
      ),
      (
        'spread_refreshes',
        self.spread_refreshes and self.precondition_frequency == 1,
        'precondition_frequency=1, only with a larger period',
      ),
      (
        'momentum_dtype',
        self.momentum_dtype != 'float32' and self.b1 == 0,
        'b1=0, which stores no momentum',
      ),
      (
        'correct_bias',
        not self.correct_bias and self.b1 == 0 and self.b2 == 1,
        'b1=0 and b2=1, which have no bias',
      ),
      (
        'symmetric_storage',
        self.symmetric_storage and self.matrix_dtype == 'int16',
        "matrix_dtype='int16', whose columns have different scales",
      ),
      (
        'second_moment_dtype',
        self.second_moment_dtype == 'bfloat16' and self.b2 > _MAX_BFLOAT16_DECAY,
        f'b2={self.b2}: bfloat16 rounds changes of less than 1/128 away',
      ),
    ):
      if is_given:
        raise ConfigError(f'`{OWNER}.{option}` cannot be used with {other}. Leave out one of them.')

  @property
  def statistics_decay(self) -> float:
    """Decay of the statistics."""
    if self.shampoo_beta is None:
      return self.b2
    return self.shampoo_beta

  @property
  def num_slots(self) -> int:
    """Number of steps over which the refreshes of a period are spread."""
    if self.spread_refreshes:
      return self.precondition_frequency
    return 1


def average(old, new, decay: float):
  """Return the running mean `decay old + (1 - decay) new` of arrays of one shape, or their sum for a decay of 1."""
  if decay == 1:
    return old + new
  return decay * old + (1 - decay) * new
