"""Run of ScaledAdam on random parameters and options."""

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = {
  'w': (8, 6),
  'bias': (6,),
  'kernel3': (4, 3, 2),
  's': (1,),
  'zero_dim': (),
  'w2': (8, 6),
  'one': (1, 1),
}


def run(optimizer, params, grads, rates=None):
  """Return (parameters after each step, states after each step), stacked."""

  def step(carry, inputs):
    grad, rate = inputs
    overrides = {} if rate is None else {'learning_rate': rate}
    optimizer = carry.apply_gradient(grad, **overrides)
    return optimizer, (optimizer.target, optimizer.state.param_states)

  created = optimizer.create(jax.tree.map(jnp.asarray, params))
  return jax.jit(lambda o, xs: jax.lax.scan(step, o, xs)[1])(created, (grads, rates))


def random_case(seed):
  """Return (initial values, gradients [steps, ...], options) of a random run with spikes in the gradients."""
  rng = np.random.default_rng(seed)
  scales = {name: 10.0 ** rng.uniform(-1.5, 0.5) for name in SHAPES}
  params = {
    name: np.asarray(rng.normal(size=shape) * scales[name], np.float32)
    for name, shape in SHAPES.items()
  }
  num_steps = 64
  spikes = np.where(rng.random(num_steps) < 0.2, 10.0 ** rng.uniform(0, 2.5, num_steps), 1.0)
  grads = {}
  for name, shape in SHAPES.items():
    drift = rng.normal(size=shape) * 0.5
    noise = rng.normal(size=(num_steps, *shape)) + drift
    grads[name] = np.asarray(0.01 * noise * spikes.reshape(-1, *(1,) * len(shape)), np.float32)
  period = int(rng.integers(4, 13)) if seed % 4 != 1 else [1, 2, 3][seed // 4 % 3]
  options = dict(
    clipping_scale=[None, 0.7, 1.3, 2.0][seed % 4],
    betas=[(0.9, 0.98), (0.5, 0.9), (0.95, 0.999)][seed % 3],
    scalar_lr_scale=rng.uniform(0.05, 0.5),
    eps=10.0 ** rng.uniform(-9, -5),
    param_min_rms=[1e-5, 0.2][seed % 2],
    param_max_rms=[3.0, 0.4][seed // 2 % 2],
    scalar_max=[10.0, 0.05][seed % 2],
    size_update_period=[1, 2, 3, 4, 7][seed % 5],
    clipping_update_period=period,
    clip_scale_gradient_only=bool(seed // 3 % 2),
  )
  return params, grads, options
