"""Layers of the original, recomputed with routers and dispatch: outputs in both modes, and all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import dispatch
from moe import grouping
from moe import routing
from tests import golden_data

_DESCRIPTION, _ARRAYS = golden_data.load('t5x/moe_layer')


def _route(case, params, x, capacity):
  """Logits and routing as the case's router has them, with padding by T5X's rule."""
  weights = params['router']['router_weights']['w']
  logits = x @ weights['kernel'] + weights.get('bias', 0.0)
  mask = jnp.any(x != 0, axis=-1) if case.get('pad') else None
  if case['kind'] == 'experts_choose':
    return routing.experts_choose(logits, capacity, token_mask=mask)
  options = routing.ChoiceOptions(capacity=capacity, batch_prioritized=case.get('bpr', False))
  return routing.tokens_choose(logits, case['k'], options, token_mask=mask)


def _layer(params, x, case, factor, method):
  """Return (out like x, (auxiliary loss, z-loss))."""
  division = grouping.divide(*x.shape[:2], case['group'], multiple=case['E'])
  groups = division.split(x)
  capacity = routing.expert_capacity(division.group_size, case['E'], factor, case['mincap'])
  choice = _route(case, params, groups, capacity)
  experts = dispatch.MlpParams.from_tree(params['expert'])
  y, _ = dispatch.apply_experts(
    groups, choice, experts, dispatch.MlpSpec(tuple(case['acts'])), method=method
  )
  return division.merge(y, *x.shape[:2]), (choice.auxiliary_loss, choice.router_z_loss)


@pytest.mark.parametrize(
  'index, method',
  [
    (1, 'einsum'),
    (3, 'capacity'),
    (4, 'grouped'),
    *(
      pytest.param(*case, marks=pytest.mark.full)
      for case in ((0, 'capacity'), (2, 'capacity'), (3, 'einsum'))
    ),
  ],
)
def test_layer(index, method):
  case, arrays = _DESCRIPTION['cases'][index], golden_data.subtree(_ARRAYS, f'case{index}')
  layer = functools.partial(_layer, case=case, method=method)

  def loss(params, x):
    out, (auxiliary, z) = layer(params, x, factor=case['tcf'])
    return jnp.sum(out * arrays['cot']) + 0.1 * auxiliary + 0.01 * z, out

  grad_fn = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  (_, out), (params_grad, x_grad) = grad_fn(arrays['params'], arrays['x'])
  tol = _DESCRIPTION['tol']['floats']
  np.testing.assert_allclose(out, arrays['train']['out'], atol=tol)
  np.testing.assert_allclose(x_grad, arrays['grad_x'], atol=tol)
  for (path, got), (_, expected) in zip(
    *(jax.tree_util.tree_leaves_with_path(tree) for tree in (params_grad, arrays['grad'])),
    strict=True,
  ):
    np.testing.assert_allclose(got, expected, atol=tol, err_msg=str(path))
  out, _ = jax.jit(functools.partial(layer, factor=case['ecf']))(arrays['params'], arrays['x'])
  np.testing.assert_allclose(out, arrays['eval']['out'], atol=tol)
