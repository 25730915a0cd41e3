"""Layers in bfloat16 without implicit promotion; gradients have the dtypes of their inputs."""

import jax
import jax.numpy as jnp
import pytest

from moe import routing
from moe.experts import ExpertMlp
from moe.layers import MoeLayer

_CAPACITIES = dict(train_capacity_factor=1.0, eval_capacity_factor=1.0)
_MLP = dict(activations=('gelu', 'linear'), use_bias=True, dropout_rate=0.1)


@pytest.mark.parametrize(
  'router, options',
  [
    (
      routing.TokensChooseRouter(4, num_selected=2, jitter_noise=0.1, bias_update_rate=0.1),
      dict(shared_expert_dim=8),
    ),
    (
      routing.TokensChooseRouter(4, num_selected=2, normalize_gates=True, score='sigmoid'),
      _CAPACITIES,
    ),
    (routing.TokensChooseRouter(4), dict(dispatch='einsum', **_CAPACITIES)),
    (
      routing.TokensChooseRouter(4, capacity_scope='global', batch_prioritized_routing=True),
      _CAPACITIES,
    ),
    (routing.SinkhornRouter(4), {}),
    (routing.HashRouter(4), {}),
    (routing.ExpertsChooseRouter(4), _CAPACITIES),
  ],
)
def test_no_dtype_is_promoted(router, options):
  layer = MoeLayer(4, ExpertMlp(dim=16, **_MLP), router, dtype=jnp.bfloat16, **options)
  x, ids = jnp.zeros((2, 8, 8), jnp.bfloat16), jnp.ones((2, 8), jnp.int32)

  def step(key):
    params, others = (lambda params, params_axes, **others: (params, others))(
      **layer.init({'params': key, 'dropout': key}, x, token_ids=ids)
    )

    def loss(params, x):
      y, new = layer.apply(
        {'params': params, **others},
        x,
        token_ids=ids,
        rngs={'dropout': key, 'jitter': key},
        mutable=['intermediates', *others],
      )
      sown = new['intermediates']
      return jnp.sum(y.astype(jnp.float32)) + sown['auxiliary_loss'][0] + sown['router_z_loss'][
        0
      ], new

    (_, new), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return new['intermediates'], grads, (others, {name: new[name] for name in others})

  with jax.numpy_dtype_promotion('strict'):
    sown, (params_grad, x_grad), (before, after) = jax.eval_shape(step, jax.random.key(0))
  assert {leaf.dtype for leaf in jax.tree.leaves((sown, params_grad))} == {jnp.dtype('float32')}
  assert x_grad.dtype == jnp.bfloat16
  assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(
    lambda x: (x.shape, x.dtype), after
  )
