"""All forms of dispatch against a plain numpy reading of what they mean, and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import dispatch
from moe.dispatch import types
from moe.routing.types import ExpertChoice, TokenChoice
from t5x_lite.errors import ConfigError
from t5x_lite.layers import ACTIVATIONS


def make_params(rng, num_experts, width, hidden, num_branches, biases=False):
  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) == 3 else 1.0), jnp.float32)
  return types.MlpParams(
      wi=tuple(draw(num_experts, width, hidden) for _ in range(num_branches)), wo=draw(num_experts, hidden, width),
      wi_bias=tuple(draw(num_experts, hidden) for _ in range(num_branches)) if biases else None,
      wo_bias=draw(num_experts, width) if biases else None)


def make_token_choice(rng, groups, tokens, num_selected, num_experts, *, capacity=None, ignored=0.0, skew=None):
  """Random distinct choices; places are given out first choices first, in the order of the tokens."""
  load = np.ones(num_experts) if skew is None else np.asarray(skew, float)
  index = np.zeros((groups, tokens, num_selected), np.int32)
  for g in range(groups):
    for t in range(tokens):
      noise = rng.gumbel(size=num_experts) + np.log(load + 1e-30)
      index[g, t] = np.argsort(-noise)[:num_selected]
  index[rng.uniform(size=(groups, tokens)) < ignored] = num_experts
  gates = rng.uniform(0.1, 1.0, size=index.shape)
  position = None
  if capacity is not None:
    position = np.full(index.shape, capacity, np.int32)
    for g in range(groups):
      filled = np.zeros(num_experts, int)
      for k in range(num_selected):
        for t in range(tokens):
          e = index[g, t, k]
          if e < num_experts:
            position[g, t, k] = filled[e]
            filled[e] += 1
    gates = np.where(position < capacity, gates, 0.0)
  gates = np.where(index < num_experts, gates, 0.0)
  return TokenChoice(
      expert_index=jnp.asarray(index), gates=jnp.asarray(gates, jnp.float32),
      position=None if position is None else jnp.asarray(position), probs=jnp.zeros((groups, tokens, num_experts)),
      auxiliary_loss=jnp.zeros([]), router_z_loss=jnp.zeros([]), num_experts=num_experts, capacity=capacity)


def make_expert_choice(rng, groups, tokens, num_experts, capacity):
  """Every expert's own tokens; an expert with more places than tokens has some without."""
  index = np.full((groups, num_experts, capacity), tokens, np.int32)
  for g in range(groups):
    for e in range(num_experts):
      chosen = rng.permutation(tokens)[:capacity]
      index[g, e, :len(chosen)] = chosen
  gates = np.where(index < tokens, rng.uniform(0.1, 1.0, size=index.shape), 0.0)
  return ExpertChoice(
      token_index=jnp.asarray(index), gates=jnp.asarray(gates, jnp.float32),
      probs=jnp.zeros((groups, tokens, num_experts)), auxiliary_loss=jnp.zeros([]), router_z_loss=jnp.zeros([]),
      num_tokens=tokens)


def all_experts(x, routing, gates, params, spec):
  """Every expert on every token, weighted by a table [G, T, E] of gates: no dispatch at all."""
  if isinstance(routing, ExpertChoice):
    one_hot = jax.nn.one_hot(routing.token_index, routing.num_tokens)
    table = jnp.einsum('gect,gec->gte', one_hot, gates)
  else:
    kept = routing.expert_index < routing.num_experts
    if routing.position is not None:
      kept &= routing.position < routing.capacity
    one_hot = jax.nn.one_hot(routing.expert_index, routing.num_experts)
    table = jnp.einsum('gtke,gtk->gte', one_hot, jnp.where(kept, gates, 0.0))
  hidden = 1.0
  for i, (kernel, name) in enumerate(zip(params.wi, spec.activations, strict=True)):
    pre = jnp.einsum('gtd,edf->gtef', x, kernel, precision='highest')
    if params.wi_bias is not None:
      pre += params.wi_bias[i]
    hidden = hidden * ACTIVATIONS[name](pre)
  y = jnp.einsum('gtef,efd->gted', hidden, params.wo, precision='highest')
  if params.wo_bias is not None:
    y += params.wo_bias
  return jnp.einsum('gted,gte->gtd', y, table, precision='highest')


def loss_and_grads(fn, x, routing, params, spec):
  """Loss, and gradients of x, gates and every parameter, of a weighted sum of squares of the result."""
  weights = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

  def loss(x, gates, params):
    y = fn(x, routing.replace(gates=gates), params, spec)
    return jnp.sum(weights * y + 0.5 * y**2)

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, routing.gates, params)


def assert_close(got, expected, tol=1e-5):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) <= tol * max(np.linalg.norm(b), 1e-3), (np.linalg.norm(a - b), np.linalg.norm(b))


def by(method):
  return lambda x, routing, params, spec: dispatch.apply_experts(x, routing, params, spec, method=method)[0]


def oracle(x, routing, params, spec):
  return all_experts(x, routing, routing.gates, params, spec)


@pytest.mark.parametrize('seed', range(6))
def test_dropless_is_exact(seed):
  rng = np.random.default_rng(seed)
  num_experts = int(rng.choice([1, 2, 5, 8]))
  num_selected = int(rng.integers(1, min(num_experts, 3) + 1))
  groups, tokens, width, hidden = (int(n) for n in (rng.integers(1, 4), rng.integers(1, 60), 8, 12))
  activations = [('gelu',), ('silu', 'linear'), ('relu',)][seed % 3]
  params = make_params(rng, num_experts, width, hidden, len(activations), biases=seed % 2 == 1)
  routing = make_token_choice(rng, groups, tokens, num_selected, num_experts, ignored=0.2 * (seed % 2),
                              skew=[[1] * num_experts, [1] + [0] * (num_experts - 1)][seed % 2])
  x = jnp.asarray(rng.normal(size=(groups, tokens, width)), jnp.float32)
  spec = types.MlpSpec(activations)
  assert_close(loss_and_grads(by('grouped'), x, routing, params, spec),
               loss_and_grads(oracle, x, routing, params, spec))


@pytest.mark.parametrize('kind', ['token', 'expert'])
@pytest.mark.parametrize('method', ['einsum', 'capacity', 'grouped'])
def test_capacity_forms_are_exact(kind, method):
  rng = np.random.default_rng(3)
  params = make_params(rng, 4, 8, 12, 2, biases=True)
  x = jnp.asarray(rng.normal(size=(3, 16, 8)), jnp.float32)
  routing = (make_token_choice(rng, 3, 16, 2, 4, capacity=6, ignored=0.1) if kind == 'token'
             else make_expert_choice(rng, 3, 16, 4, 5))
  spec = types.MlpSpec(('gelu', 'linear'))
  if (kind, method) == ('expert', 'grouped'):
    with pytest.raises(ConfigError, match='experts that choose'):
      by(method)(x, routing, params, spec)
    return
  assert_close(loss_and_grads(by(method), x, routing, params, spec),
               loss_and_grads(oracle, x, routing, params, spec))
