"""Constructors of optax's optimizers whose originals do not accept a schedule, a scalar, a dtype or a step's values.

They return optax transformations, which `factories` wraps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from t5x_lite import checks


def noisy_sgd(learning_rate, eta=0.01, gamma=0.55, key=None, *, seed=None):
  """Stochastic gradient descent with annealed Gaussian noise on the gradients (Neelakantan et al. 2015, section 3).

  Args:
    learning_rate: a number or a schedule.
    eta: variance of the noise at the first update.
    gamma: exponent by which the variance falls with the number of updates.
    key: seed of the noise, a number or a typed key; None for 0.
    seed: older name of `key`.

  Returns:
    The transformation.

  Raises:
    ConfigError: both `key` and `seed`.
  """
  if key is not None and seed is not None:
    raise checks.invalid('noisy_sgd', 'seed', 'None if key is given', seed, 'Set only key.')
  if key is None:
    key = seed
  if key is None:
    key = 0
  return optax.chain(
    optax.add_noise(eta, gamma, key),
    optax.scale_by_learning_rate(learning_rate),
  )


def ademamix(
  learning_rate,
  b1=0.9,
  b2=0.999,
  b3=0.9999,
  alpha=5.0,
  eps=1e-8,
  eps_root=0.0,
  mu_dtype=None,
  weight_decay=0.0,
  mask=None,
):
  """AdamW with a second, slower average of the gradients (Pagliardini et al. 2024).

  Args:
    learning_rate: a number or a schedule.
    b1: decay of the fast average of the gradients.
    b2: decay of the second moment.
    b3: decay of the slow average, a number or a schedule.
    alpha: factor of the slow average, a number or a schedule.
    eps: added to the root of the second moment.
    eps_root: added to the second moment under the root.
    mu_dtype: dtype of both averages; None means that of the parameters.
    weight_decay: factor of the decoupled weight decay, a number or a schedule.
    mask: tree of bools like the parameters, or a function that returns one, True where weights decay.

  Returns:
    The transformation.
  """
  scale = optax.contrib.scale_by_ademamix(b1, b2, b3, alpha, eps, eps_root)

  def narrow(state):
    # Optax has no second moment in float32 with narrow averages, and returns averages in the dtype of the updates. A
    # second moment in bfloat16 would not decay, since a change of one thousandth is rounded away.
    return state._replace(
      m1=optax.tree.cast(state.m1, mu_dtype), m2=optax.tree.cast(state.m2, mu_dtype)
    )

  def update(updates, state, params=None):
    updates, state = scale.update(updates, state, params)
    return updates, narrow(state)

  return optax.chain(
    optax.GradientTransformation(lambda params: narrow(scale.init(params)), update),
    optax.add_decayed_weights(weight_decay, mask),
    optax.scale_by_learning_rate(learning_rate),
  )


def dpsgd(learning_rate, l2_norm_clip, noise_multiplier, seed=0, momentum=None, nesterov=False):
  """Differentially private SGD (Abadi et al. 2016, algorithm 1) on per-example gradients, examples in dim 0.

  Args:
    learning_rate: a number or a schedule.
    l2_norm_clip: largest Euclidean norm of the gradient of one example; longer gradients are scaled down.
    noise_multiplier: standard deviation of the noise as a multiple of `l2_norm_clip`.
    seed: seed of the noise.
    momentum: decay of the momentum, or None.
    nesterov: use Nesterov's momentum.

  Returns:
    The transformation.
  """
  aggregate = optax.contrib.differentially_private_aggregate(
    l2_norm_clip, noise_multiplier, key=seed
  )
  if momentum is None:
    trace = optax.identity()
  else:
    trace = optax.trace(momentum, nesterov)
  return optax.chain(aggregate, trace, optax.scale_by_learning_rate(learning_rate))


def sm3(learning_rate, momentum=0.9):
  """SM3 (Anil et al. 2019, algorithm SM3-II): Adagrad with statistics of one row per dim.

  Args:
    learning_rate: a number or a schedule.
    momentum: decay of the momentum.

  Returns:
    The transformation.
  """
  scale = optax.scale_by_learning_rate(learning_rate)
  plain = optax.chain(optax.scale_by_sm3(momentum), scale)
  # Optax's SM3 fails for scalars, which have no dim; Adagrad's rule replaces it.
  adagrad_rule = optax.chain(optax.scale_by_rss(0.0, eps=1e-8), optax.ema(momentum, debias=False))
  mixed = optax.chain(
    optax.partition(
      {'array': optax.scale_by_sm3(momentum), 'scalar': adagrad_rule},
      lambda tree: jax.tree.map(lambda leaf: 'array' if leaf.ndim else 'scalar', tree),
    ),
    scale,
  )

  def chosen(tree):
    if all(leaf.ndim for leaf in jax.tree.leaves(tree)):
      return plain
    return mixed

  return optax.GradientTransformationExtraArgs(
    lambda params: chosen(params).init(params),
    lambda updates, state, params=None, **_: chosen(updates).update(updates, state, params),
  )


def novograd(learning_rate, b1=0.9, b2=0.25, eps=1e-06, eps_root=0.0, weight_decay=0.0):
  """NovoGrad (Ginsburg et al. 2019, algorithm 1): Adam whose second moment is a number for each array.

  Args:
    learning_rate: a number or a schedule.
    b1: decay of the momentum.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    eps_root: added to the second moment under the root.
    weight_decay: factor of the parameters that is added to the normalized gradients.

  Returns:
    The transformation.
  """
  scale = optax.scale_by_novograd(b1, b2, eps, eps_root, weight_decay)

  def update(updates, state, params=None):
    # Optax tells the first update by conditions, to which `jax.vmap` passes transposed arrays, which are copied. A
    # condition with a known value is removed.
    results = [scale.update(updates, state._replace(count=count), params) for count in (0, 1)]
    updates, new_state = jax.tree.map(
      lambda first, later: jnp.where(state.count == 0, first, later), *results
    )
    return updates, new_state._replace(count=optax.safe_increment(state.count))

  return optax.chain(
    optax.GradientTransformation(scale.init, update), optax.scale_by_learning_rate(learning_rate)
  )


def optimistic_adam(
  learning_rate,
  optimism=None,
  b1=0.9,
  b2=0.999,
  eps=1e-8,
  eps_root=0.0,
  mu_dtype=None,
  *,
  nesterov=True,
):
  """Adam with optimistic gradients in the older parametrisation (Daskalakis et al. 2017); see `optimistic_adam_v2`.

  Args:
    learning_rate: factor of the current direction, a number; without `optimism`, a number or a schedule.
    optimism: factor of the difference to the last direction; None means the learning rate.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    eps_root: added to the second moment under the root.
    mu_dtype: dtype of the first moment.
    nesterov: use Nesterov's momentum.

  Returns:
    The transformation.

  Raises:
    ConfigError: a schedule together with `optimism`.
  """
  alpha: Any = 1.0
  beta: Any = 1.0
  rate: Any = learning_rate
  if optimism is not None:
    alpha = learning_rate
    beta = optimism
    rate = 1.0
  if callable(alpha):
    raise checks.invalid(
      'optimistic_adam',
      'learning_rate',
      'a number if optimism is given',
      learning_rate,
      'Use optimistic_adam_v2, whose alpha and beta are relative to the learning rate.',
    )
  return optax.chain(
    optax.scale_by_adam(
      b1=b1, b2=b2, eps=eps, eps_root=eps_root, mu_dtype=mu_dtype, nesterov=nesterov
    ),
    optax.scale_by_optimistic_gradient(alpha=alpha, beta=beta),
    optax.scale_by_learning_rate(rate),
  )


def rprop(learning_rate, eta_minus=0.5, eta_plus=1.2, min_step_size=1e-6, max_step_size=50.0):
  """Rprop: each element's step size follows the signs of its gradients (Riedmiller and Braun 1993).

  Args:
    learning_rate: initial step size, a number.
    eta_minus: factor of a step size when the sign has changed.
    eta_plus: factor of a step size when the sign has not changed.
    min_step_size: smallest step size.
    max_step_size: largest step size.

  Returns:
    The transformation.

  Raises:
    ConfigError: `learning_rate` is a schedule.
  """
  if callable(learning_rate):
    raise checks.invalid('rprop', 'learning_rate', 'a number, the initial step size', learning_rate)
  return optax.rprop(learning_rate, eta_minus, eta_plus, min_step_size, max_step_size)


def sam(
  optimizer, adv_optimizer, sync_period=2, reset_state=True, opaque_mode=False, batch_axis_name=None
):
  """Sharpness-aware minimisation (Foret et al. 2020, algorithm 1) around an optimizer.

  Args:
    optimizer: transformation that updates the parameters with the gradients at the perturbed parameters.
    adv_optimizer: transformation that perturbs, e.g. `optax.chain(optax.contrib.normalize(), optax.sgd(0.05))`.
    sync_period: steps per round; all steps but the last perturb.
    reset_state: reset the state of `adv_optimizer` in each round.
    opaque_mode: one update is a complete round on one batch (the trainer passes the function that computes gradients);
      otherwise each update is one step of a round with another batch.
    batch_axis_name: name of a mapped axis over which gradients are averaged, for `jax.shard_map` in a custom loop.

  Returns:
    The transformation.
  """
  sam_transformation = optax.contrib.sam(
    optimizer, adv_optimizer, sync_period, reset_state, opaque_mode, batch_axis_name
  )

  def update(updates, state, params=None, *, grad_fn=None, **extra_args):
    del extra_args  # Optax's update raises for unknown arguments.
    return sam_transformation.update(updates, state, params, grad_fn=grad_fn)

  return optax.GradientTransformationExtraArgs(sam_transformation.init, update)
