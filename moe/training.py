"""What training of sparse models may need beside the core's trainer."""

import re
from collections.abc import Callable

import jax

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite import checks
from t5x_lite.types import PyTree


def scale_expert_gradients(num_expert_partitions: int, match: str = r'.*expert.*') -> Callable[[PyTree], PyTree]:
  """Return a `Trainer.gradient_transform` that multiplies experts' gradients by the number of expert partitions.

  T5X's trainer of sparse models does so always. Here it is for runs that are to repeat T5X's, and off by default:
  gradients are those of the loss on every mesh, so nothing has to be made up for, and with it a run depends on its
  mesh. Optimizers that normalise gradients hardly see it, but clipping by a global norm does.

  Args:
    num_expert_partitions: the factor.
    match: regular expression for the whole '/'-joined name of a parameter.

  Raises:
    ConfigError: a number that is none, a malformed expression; when called, an expression that no parameter matches.
  """
  checks.check_number('scale_expert_gradients', 'num_expert_partitions', num_expert_partitions, at_least=1,
                       integer=True)
  try:
    pattern = re.compile(match)
  except re.error as error:
    raise ConfigError(f'scale_expert_gradients: got match={match!r}; expected a regular expression ({error}). Correct '
                      'match.') from error

  def transform(grads: PyTree) -> PyTree:
    names = [name for name, _ in tree_utils.named_leaves(grads)]
    matched = [pattern.fullmatch(name) is not None for name in names]
    if not any(matched):
      raise ConfigError(f'scale_expert_gradients: match={match!r} matches none of the {len(names)} parameters; '
                        f'expected some, such as {names[:1]}. Correct match, or leave the transform out.')
    leaves, treedef = jax.tree.flatten(grads)
    return treedef.unflatten(
        leaf * num_expert_partitions if scaled else leaf for leaf, scaled in zip(leaves, matched, strict=True))

  return transform
