"""Finds out which values of the step a transformation asks for in vain, when its update has failed.

Transformations are chained and wrapped in functions that pass on whatever they get, so no signature says what one deep
inside needs, and optax's messages differ. But it can be asked: with a stand-in for what is missing, or without what it
does not take, its update can be traced.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lite.types import PyTree

# From keyword arguments by name to whatever the update returns; fails if they are not those that it takes.
TryUpdate = Callable[..., Any]


def missing_values(try_update: TryUpdate, given: Mapping[str, Any], names: Iterable[str], grads: PyTree) -> list[str]:
  """Returns the values without which the update fails, out of those that were not given.

  Args:
    try_update: the update, as a function of the keyword arguments that name values of the step.
    given: those that it got when it failed.
    names: all that there are.
    grads: gradients as the update gets them.

  Returns:
    Names in the order of `names`; none if it fails with all of them too, so that something else is wrong.
  """
  stand_ins = {name: value for name, value in _stand_ins(grads).items() if name in set(names) - set(given)}
  if not stand_ins or not _can_be_traced(try_update, {**given, **stand_ins}):
    return []
  needed = dict(stand_ins)
  for name in stand_ins:
    others = {other: value for other, value in needed.items() if other != name}
    if _can_be_traced(try_update, {**given, **others}):
      needed = others
  return [name for name in names if name in needed]


def surplus_value(try_update: TryUpdate, given: Mapping[str, Any]) -> str | None:
  """Returns the first value that the update must not get, None if it can be traced without no single one of them."""
  for name in given:
    if _can_be_traced(try_update, {other: value for other, value in given.items() if other != name}):
      return name
  return next(iter(given), None) if len(given) > 1 and _can_be_traced(try_update, {}) else None


def _can_be_traced(try_update: TryUpdate, values: Mapping[str, Any]) -> bool:
  try:
    jax.eval_shape(lambda: try_update(**values))
  except Exception:  # pylint: disable=broad-except
    # Whatever it raises: the question is whether it would have worked.
    return False
  return True


def _stand_ins(grads: PyTree) -> dict[str, Any]:
  """Returns a value of the right kind for each name; nothing is computed with them."""

  def value_fn(params, *, obj_fn=None, grad_fn=None, learning_rate=None):
    # Optax's line searches refuse arguments beside their own that this does not take by name.
    del obj_fn, grad_fn, learning_rate
    return sum(jnp.sum(jnp.square(jnp.abs(param))) for param in jax.tree.leaves(params))

  return {'value': jnp.zeros([], jnp.float32), 'grad': grads, 'value_fn': value_fn, 'obj_fn': value_fn,
          'grad_fn': lambda params, number: grads}
