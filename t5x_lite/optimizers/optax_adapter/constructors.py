"""Constructors of optax put together anew, where its own cannot take a schedule, a scalar or the values of a step.

They return bare transformations; `factories` wraps them.
"""

import jax
import optax
import optax.contrib

from t5x_lite.errors import ConfigError


def noisy_sgd(learning_rate, eta=0.01, gamma=0.55, key=0):
  """Stochastic gradient descent with annealed Gaussian noise on the gradients (Neelakantan et al. 2015, section 3).

  Args:
    learning_rate: a number or a schedule.
    eta: variance of the noise at the first update.
    gamma: exponent by which the variance falls with the number of updates.
    key: seed of the noise, a number or a typed key.

  Returns:
    The transformation.
  """
  return optax.chain(optax.add_noise(eta, gamma, key), optax.scale_by_learning_rate(learning_rate))


def dpsgd(learning_rate, l2_norm_clip, noise_multiplier, seed=0, momentum=None, nesterov=False):
  """Differentially private SGD (Abadi et al. 2016, algorithm 1) on per-example gradients, examples in dim 0.

  Args:
    learning_rate: a number or a schedule.
    l2_norm_clip: the largest norm that one example's gradient keeps.
    noise_multiplier: standard deviation of the noise as a multiple of `l2_norm_clip`.
    seed: seed of the noise.
    momentum: decay of a momentum, None for none.
    nesterov: whether the momentum is Nesterov's.

  Returns:
    The transformation.
  """
  aggregate = optax.contrib.differentially_private_aggregate(l2_norm_clip, noise_multiplier, key=seed)
  trace = optax.identity() if momentum is None else optax.trace(momentum, nesterov)
  return optax.chain(aggregate, trace, optax.scale_by_learning_rate(learning_rate))


def sm3(learning_rate, momentum=0.9):
  """SM3 (Anil et al. 2019, algorithm SM3-II): Adagrad's statistics reduced to one row per dim.

  Args:
    learning_rate: a number or a schedule.
    momentum: decay of the momentum.

  Returns:
    The transformation.
  """
  scale = optax.scale_by_learning_rate(learning_rate)
  plain = optax.chain(optax.scale_by_sm3(momentum), scale)
  # A scalar has no dim to keep statistics of, and optax's SM3 fails. There the rule is Adagrad's.
  adagrad_rule = optax.chain(optax.scale_by_rss(0.0, eps=1e-8), optax.ema(momentum, debias=False))
  mixed = optax.chain(
      optax.partition({'array': optax.scale_by_sm3(momentum), 'scalar': adagrad_rule},
                      lambda tree: jax.tree.map(lambda leaf: 'array' if leaf.ndim else 'scalar', tree)), scale)

  def chosen(tree):
    return plain if all(leaf.ndim for leaf in jax.tree.leaves(tree)) else mixed

  return optax.GradientTransformationExtraArgs(
      lambda params: chosen(params).init(params),
      lambda updates, state, params=None, **_: chosen(updates).update(updates, state, params))


def optimistic_adam(
    learning_rate, optimism=None, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, mu_dtype=None, *, nesterov=True):
  """Adam with optimistic gradients in the older parametrisation (Daskalakis et al. 2017); see `optimistic_adam_v2`.

  Args:
    learning_rate: what the present direction is multiplied by, a number; or, without `optimism`, a schedule.
    optimism: what the difference to the last direction is multiplied by; None for the learning rate.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    eps_root: added to the second moment below the root.
    mu_dtype: dtype of the first moment.
    nesterov: whether the momentum is Nesterov's.

  Returns:
    The transformation.
  """
  if callable(learning_rate) and optimism is not None:
    raise ConfigError('Optimizer optimistic_adam takes a schedule as learning_rate only without optimism; use '
                      'optimistic_adam_v2, whose alpha and beta are relative to the learning rate.')
  alpha, beta, rate = (1.0, 1.0, learning_rate) if optimism is None else (learning_rate, optimism, 1.0)
  return optax.chain(
      optax.scale_by_adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root, mu_dtype=mu_dtype, nesterov=nesterov),
      optax.scale_by_optimistic_gradient(alpha=alpha, beta=beta),
      optax.scale_by_learning_rate(rate))


def rprop(learning_rate, eta_minus=0.5, eta_plus=1.2, min_step_size=1e-6, max_step_size=50.0):
  """Rprop: each element's step size follows the signs of its gradients (Riedmiller and Braun 1993).

  Args:
    learning_rate: where the step sizes start, a number.
    eta_minus: what a step size is multiplied by when the sign has changed.
    eta_plus: what it is multiplied by when it has not.
    min_step_size: the smallest step size.
    max_step_size: the largest.

  Returns:
    The transformation.
  """
  if callable(learning_rate):
    raise ConfigError('Optimizer rprop: learning_rate is a schedule; expected a number, where the step sizes start.')
  return optax.rprop(learning_rate, eta_minus, eta_plus, min_step_size, max_step_size)


def sam(optimizer, adv_optimizer, sync_period=2, reset_state=True, opaque_mode=False, batch_axis_name=None):
  """Sharpness-aware minimisation (Foret et al. 2020, algorithm 1) around an optimizer.

  Args:
    optimizer: makes the update, by the gradients at the perturbed parameters.
    adv_optimizer: makes the perturbation, e.g. `optax.chain(optax.contrib.normalize(), optax.sgd(0.05))`.
    sync_period: steps of one round, all but the last of which perturb.
    reset_state: whether `adv_optimizer` begins anew each round.
    opaque_mode: whether one update is a whole round, with the further gradients on the same batch (the trainer passes
      the function that computes them); if not, each update is one step of a round, on a batch of its own.
    batch_axis_name: name of a mapped axis to average gradients over, for `jax.shard_map` in a loop of one's own.

  Returns:
    The transformation.
  """
  sam_transformation = optax.contrib.sam(
      optimizer, adv_optimizer, sync_period, reset_state, opaque_mode, batch_axis_name)

  def update(updates, state, params=None, *, grad_fn=None, **extra_args):
    del extra_args  # Optax's update refuses what it does not know.
    return sam_transformation.update(updates, state, params, grad_fn=grad_fn)

  return optax.GradientTransformationExtraArgs(sam_transformation.init, update)
