"""Capacity of experts."""

from t5x_lite import checks


def expert_capacity(
  tokens_per_group: int, num_experts: int, factor: float, min_capacity: int = 4
) -> int:
  """Return the number of slots of an expert for a group: `max(round(factor * tokens / experts), min_capacity)`.

  Halves are rounded to even, as in T5X. With a factor of 1 each expert has the number of slots that balanced top-1
  routing needs; top-k routing needs a factor of k. https://arxiv.org/abs/2101.03961, equation (3).

  Args:
    tokens_per_group: number of tokens of a group, T.
    num_experts: number of experts, E.
    factor: capacity factor.
    min_capacity: smallest number of slots.

  Returns:
    The capacity, at least 1.

  Raises:
    ConfigError: a number out of range, or a capacity of 0, which drops all tokens.

  >>> expert_capacity(tokens_per_group=20, num_experts=8, factor=1.0, min_capacity=1)
  2
  """
  count = checks.number(at_least=1, integer=True)
  positive = checks.number(above=0)

  def is_factor(factor):
    return positive.holds(factor) and (
      min_capacity > 0 or round(factor * tokens_per_group / num_experts) > 0
    )

  checks.check(
    'expert_capacity',
    locals(),
    tokens_per_group=count,
    num_experts=count,
    min_capacity=checks.number(at_least=0, integer=True),
    factor=checks.Expectation(
      'a capacity factor > 0 that gives each expert at least one slot',
      is_factor,
      'Increase it, or set min_expert_capacity >= 1.',
    ),
  )
  share = factor * tokens_per_group / num_experts
  return max(int(round(share)), min_capacity)
