"""T5X's recorded routers, losses and layer metrics, through our routers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import routing
from tests import golden_data

_ROUTERS, _ROUTER_ARRAYS = golden_data.load('t5x/moe_routers')
_LOSSES, _LOSS_ARRAYS = golden_data.load('t5x/moe_losses')
_LAYERS, _LAYER_ARRAYS = golden_data.load('t5x/moe_layer')


def _router(case, num_experts):
  """Return the router that T5X's `case` is about. T5X's scatter form and expert choice route padding."""
  pads = bool(case.get('pad'))
  common = dict(num_experts=num_experts, ignore_padding_tokens=pads)
  if case['kind'] == 'experts_choose':
    return routing.ExpertsChooseRouter(padding_uses_capacity=pads, **common)
  return routing.TokensChooseRouter(
    num_selected=case['k'],
    batch_prioritized_routing=case.get('bpr', False),
    padding_uses_capacity=pads and case['kind'] == 'scatter',
    **common,
  )


@functools.partial(jax.jit, static_argnums=(0, 3))
def _apply(router, params, x, capacity):
  """Return (routing, which choices are kept, T5X's metrics), as one program: op by op it takes much longer."""
  routed = router.apply({'params': params}, x, capacity=capacity)
  return (
    routed,
    routed.kept(),
    {
      name: getattr(routed, name)()
      for name in ('fraction_tokens_left_behind', 'expert_usage', 'router_confidence')
    },
  )


def _masks(routed, kept, capacity):
  """Return T5X's (dispatch_mask, combine_array) [G, T, E, C] of a routing."""
  groups, tokens, num_experts = routed.probs.shape
  dispatch = np.zeros((groups, tokens, num_experts, capacity), np.int8)
  combine = np.zeros(dispatch.shape, np.float32)
  if isinstance(routed, routing.TokenChoice):
    places = [
      ((g, t, routed.expert_index[g, t, k], routed.position[g, t, k]), routed.gates[g, t, k])
      for g, t, k in np.argwhere(kept)
    ]
  else:
    places = [
      ((g, routed.token_index[g, e, c], e, c), routed.gates[g, e, c])
      for g, e, c in np.argwhere(kept)
    ]
  for place, gate in places:
    dispatch[place], combine[place] = 1, gate
  return dispatch, combine


@pytest.mark.parametrize('number', range(len(_ROUTERS['cases'])))
def test_routers(number):
  case, capacity = _ROUTERS['cases'][number], _ROUTERS['cases'][number]['cap']
  recorded = golden_data.subtree(_ROUTER_ARRAYS, f'case{number}')
  weights = {'kernel': _ROUTER_ARRAYS['router_kernel']}
  router = _router(case, _ROUTERS['num_experts'])
  if case.get('bias', True):
    weights['bias'] = _ROUTER_ARRAYS['router_bias']
    router = router.clone(use_bias=True)
  x = jnp.asarray(_ROUTER_ARRAYS['x_padded' if case.get('pad') else 'x'])
  routed, kept, _ = jax.device_get(_apply(router, {'router_weights': {'w': weights}}, x, capacity))
  if case['kind'] == 'scatter':
    np.testing.assert_array_equal(
      np.stack([routed.expert_index, routed.position], -1), recorded['dispatch_indices']
    )
    np.testing.assert_allclose(routed.gates, recorded['combine_weights'], atol=2e-5)
  else:
    dispatch, combine = _masks(routed, kept, capacity)
    np.testing.assert_array_equal(dispatch, recorded['dispatch_mask'])
    np.testing.assert_allclose(combine, recorded['combine_array'], atol=2e-5)
  for loss in ('auxiliary_loss', 'router_z_loss'):
    np.testing.assert_allclose(getattr(routed, loss), recorded[loss], rtol=2e-5)


@pytest.mark.parametrize('number', range(len(_LOSSES['cases'])))
def test_losses_and_their_gradients(number):
  case = golden_data.subtree(_LOSS_ARRAYS, f'case{number}')
  logits = jnp.asarray(case['logits'])

  def balance(logits):
    return routing.load_balancing_loss(jax.nn.softmax(logits), case['expert_index'])

  for loss_fn, value, gradient in (
    (balance, 'load_balancing_loss', 'd_lb_dlogits'),
    (routing.router_z_loss, 'router_z_loss', 'd_z_dlogits'),
  ):
    got, got_gradient = jax.jit(jax.value_and_grad(loss_fn))(logits)
    np.testing.assert_allclose(got, case[value], rtol=1e-5)
    np.testing.assert_allclose(
      got_gradient, case[gradient], atol=1e-5 * np.abs(case[gradient]).max()
    )


# Groups and tokens of a group into which T5X divided the recorded batches. It pads sequences of 7 to 8 first.
_GROUPS = [(4, 16), (4, 16), (4, 16), (4, 16), (4, 6)]


@pytest.mark.parametrize('mode', ['train', 'eval'])
@pytest.mark.parametrize('number', range(len(_LAYERS['cases'])))
def test_layer_metrics(number, mode):
  case = _LAYERS['cases'][number]
  groups, tokens = _GROUPS[number]
  x = _LAYER_ARRAYS[f'case{number}/x']
  x = np.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0))).reshape(groups, tokens, -1)
  params = golden_data.subtree(_LAYER_ARRAYS, f'case{number}/params')['router']
  capacity = routing.expert_capacity(
    tokens, case['E'], case['tcf' if mode == 'train' else 'ecf'], min_capacity=case['mincap']
  )
  router = _router(case, case['E']).clone(use_bias=bool(case.get('rbias')))
  routed, _, metrics = _apply(router, params, jnp.asarray(x), capacity)
  recorded = case['metrics'][mode]
  for loss in ('auxiliary_loss', 'router_z_loss'):
    np.testing.assert_allclose(getattr(routed, loss), recorded[loss], rtol=2e-5)
  for metric in ('fraction_tokens_left_behind', 'expert_usage', 'router_confidence'):
    np.testing.assert_allclose(metrics[metric], recorded[metric], rtol=2e-5, atol=2e-7)
