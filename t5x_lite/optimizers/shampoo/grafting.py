"""First-order methods whose step length Shampoo's updates get (grafting).

Shampoo's direction has no natural length, so each tensor's update gets the norm of the update that a well-tuned simple
method computes: `direction * |grafted| / |direction|` (Agarwal et al. 2020, "Disentangling Adaptive Gradient Methods
from Learning Rates", https://arxiv.org/abs/2002.11803; Anil et al. 2020, section 3.5,
https://arxiv.org/abs/2002.09018).
"""

import jax
import jax.numpy as jnp

from t5x_lite.optimizers.shampoo.config import GraftingType
from t5x_lite.optimizers.shampoo.config import ShampooConfig

# Keeps a division by the norm of a tensor of zeros finite.
NORM_EPSILON = 1e-16


def grafted_update(
  grad: jax.Array, accumulator: jax.Array | None, cfg: ShampooConfig
) -> tuple[jax.Array, jax.Array | None]:
  """Return the grafted method's update of one tensor, without learning rate, momentum or weight decay.

  | type | second moments v | update |
  |---|---|---|
  | SGD | none | g |
  | SQRT_N | none | sign(g), whose norm is sqrt(N) |
  | ADAGRAD | v + g^2 | g / (sqrt(v) + eps) |
  | RMSPROP | beta2 v + (1 - beta2) g^2, no bias correction | g / (sqrt(v) + eps) |

  The `NORMALIZED` types replace g by g / |g|; with beta2 = 1 both terms of RMSPROP's v have the weight 1.

  Args:
    grad: float32 gradient.
    accumulator: float32 second moments of the same shape; None for types without them.
    cfg: options.

  Returns:
    (update, new second moments or None).
  """
  match cfg.graft_type:
    case GraftingType.SGD:
      return grad, None
    case GraftingType.SQRT_N:
      return jnp.sign(grad), None
  assert accumulator is not None  # The other types have second moments.
  if cfg.graft_type in (GraftingType.ADAGRAD_NORMALIZED, GraftingType.RMSPROP_NORMALIZED):
    grad = grad / (norm(grad) + NORM_EPSILON)
  # Second moments in the shape of the gradient: one learning rate for each element.
  if cfg.graft_type in (GraftingType.ADAGRAD, GraftingType.ADAGRAD_NORMALIZED):
    accumulator = accumulator + jnp.square(grad)
  else:
    accumulator = cfg.beta2 * accumulator + second_moment_weight(cfg) * jnp.square(grad)
  update = grad / (jnp.sqrt(accumulator) + cfg.diagonal_epsilon)
  if cfg.clip_by_scaled_gradient_norm is not None:
    # The root mean square of the update, also of an empty tensor.
    root_mean_square = norm(update) / max(update.size, 1) ** 0.5
    update = update / jnp.maximum(1.0, root_mean_square / cfg.clip_by_scaled_gradient_norm)
  return update, accumulator


def second_moment_weight(cfg: ShampooConfig) -> float:
  """Return the weight of a new square in a running second moment: 1 - beta2, or 1 for a sum (beta2 = 1)."""
  if cfg.beta2 == 1.0:
    return 1.0
  return 1.0 - cfg.beta2


def norm(array: jax.Array) -> jax.Array:
  """Return the Euclidean norm of all elements (float32 scalar)."""
  return jnp.sqrt(jnp.sum(jnp.square(array)))
