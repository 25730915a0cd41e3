"""Gradient transforms for the training of sparse models."""

import re
from collections.abc import Callable

import jax

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.types import PyTree


def scale_expert_gradients(num_expert_partitions: int, match: str = r'.*expert.*') -> Callable[[PyTree], PyTree]:
  """Return a `Trainer.gradient_transform` that multiplies experts' gradients by the number of expert partitions.

  T5X's trainer of sparse models always does this. Use it to repeat runs of T5X; by default it is off, since gradients
  are those of the loss on every mesh, and with the factor a run depends on its mesh. It has little effect on optimizers
  that normalize gradients, but it affects clipping by a global norm.

  Args:
    num_expert_partitions: factor of the gradients.
    match: regular expression for the entire '/'-joined name of a parameter.

  Raises:
    ConfigError: an invalid number or expression; when called, an expression that no parameter matches.
  """
  checks.check('scale_expert_gradients', locals(), num_expert_partitions=checks.number(at_least=1, integer=True))
  try:
    pattern = re.compile(match)
  except re.error as error:
    raise checks.invalid('scale_expert_gradients', 'match', f'a regular expression ({error})', match) from error

  def transform(grads: PyTree) -> PyTree:
    names = [name for name, _ in tree_utils.named_leaves(grads)]
    matched = [pattern.fullmatch(name) is not None for name in names]
    if not any(matched):
      raise checks.invalid('scale_expert_gradients', 'match', 'a regular expression that matches the full name of '
                           f'at least one parameter, such as {names[0]!r}', match)
    leaves, treedef = jax.tree.flatten(grads)
    return treedef.unflatten(
        leaf * num_expert_partitions if scaled else leaf for leaf, scaled in zip(leaves, matched, strict=True))

  return transform
