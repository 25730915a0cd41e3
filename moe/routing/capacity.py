"""How many tokens an expert takes."""

from t5x_lite.errors import ConfigError
from t5x_lite import checks


def expert_capacity(tokens_per_group: int, num_experts: int, factor: float, min_capacity: int = 4) -> int:
  """Return the places that an expert has for a group's tokens: `max(round(factor * tokens / experts), min_capacity)`.

  Halves are rounded to even, as T5X does. With a factor of 1 each expert has as many places as balanced top-1 routing
  needs; top-k routing needs a factor of k. https://arxiv.org/abs/2101.03961, equation (3).

  Args:
    tokens_per_group: T.
    num_experts: E.
    factor: the capacity factor.
    min_capacity: the least number of places.

  Returns:
    The capacity, at least 1.

  Raises:
    ConfigError: a number out of its range, or a capacity that drops every token.

  >>> expert_capacity(tokens_per_group=20, num_experts=8, factor=1.0, min_capacity=1)
  2
  """
  for name, value, integer in (('tokens_per_group', tokens_per_group, True), ('num_experts', num_experts, True)):
    checks.check_number('expert_capacity', name, value, at_least=1, integer=integer)
  checks.check_number('expert_capacity', 'the capacity factor', factor, above=0)
  checks.check_number('expert_capacity', 'min_expert_capacity', min_capacity, at_least=0, integer=True)
  capacity = max(int(round(factor * tokens_per_group / num_experts)), min_capacity)
  if capacity < 1:
    raise ConfigError(
        f'a capacity factor of {factor} gives each of {num_experts} experts no place for any of {tokens_per_group} '
        f'tokens: everything would be dropped. Expected at least {num_experts / tokens_per_group:.3g}; raise the '
        'factor, set min_expert_capacity to 1 or more, or route without capacity (factor None).')
  return capacity
