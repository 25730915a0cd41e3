"""A custom router that weighs tokens instead of choosing: the example of docs/extending.md."""

import pathlib
import re

from flax.linen import partitioning as nn_partitioning
import gin
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

import moe
from moe import dispatch
from moe import rules
from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError
from tests.examples import soft_router
from tests.networks import network_cases as cases


def _layer(expert=None, router=None, **options):
  router = soft_router.SoftRouter(4, num_slots=2) if router is None else router
  return moe.MoeLayer(
    num_experts=4, expert=expert or moe.ExpertMlp(dim=12), router=router, group_size=6, **options
  )


def _inputs():
  x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 8)), jnp.float32)
  return x, jnp.asarray([[1] * 6, [1] * 4 + [0] * 2], bool)


def _init(layer, x, mask):
  init = cases.jit(lambda key: layer.init(key, x, mask, deterministic=True)['params'])
  return jax.tree.map(lambda leaf: leaf * 3, init(jax.random.key(0)))


def _reference(params, x, mask):
  """The paper's algorithm 1, group by group and slot by slot, in float64."""
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  phi = params['router']['router_weights']['w']['kernel']
  wi, wo = (params['expert'][name]['kernel'] for name in ('wi', 'wo'))
  result = []
  for tokens, real in zip(np.asarray(x, np.float64), np.asarray(mask), strict=True):
    logits = tokens @ phi
    into = np.exp(logits) * real[:, None]
    into /= into.sum(axis=0)
    out_of = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    slots = into.T @ tokens
    outputs = [np.maximum(slot @ wi[i // 2], 0) @ wo[i // 2] for i, slot in enumerate(slots)]
    result.append(out_of @ np.stack(outputs))
  return np.stack(result)


def test_layer_computes_the_papers_formula_and_reports_metrics():
  x, mask = _inputs()
  layer = _layer()
  params = _init(layer, x, mask)
  y, sown = cases.jit(
    lambda params: layer.apply(
      {'params': params}, x, mask, deterministic=True, mutable=['intermediates', 'routing']
    )
  )(params)
  np.testing.assert_allclose(y, _reference(params, x, mask), rtol=1e-4, atol=1e-5)
  assert 'routing' not in sown
  values = {
    name: np.asarray(value[0])
    for name, value in sown['intermediates'].items()
    if name != 'metric_weights'
  }
  assert (
    values['fraction_tokens_left_behind']
    == values['choices_dropped']
    == values['auxiliary_loss']
    == 0
  )
  np.testing.assert_allclose(values['expert_load'].sum(), 1, rtol=1e-6)
  assert 0.25 < values['router_confidence'] < 1 and 0 < values['router_entropy'] < np.log(4)
  grads = cases.jit(
    jax.grad(
      lambda params: jnp.sum(layer.apply({'params': params}, x, mask, deterministic=True) ** 2)
    )
  )(params)
  assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(grads))


def test_dropout_draws_for_each_slot():
  x, mask = _inputs()
  layer = _layer(moe.ExpertMlp(dim=12, dropout_rate=0.5))
  params = _init(layer, x, mask)
  first, again, other = (
    layer.apply({'params': params}, x, mask, rngs={'dropout': jax.random.key(seed)})
    for seed in (0, 0, 1)
  )
  np.testing.assert_array_equal(first, again)
  assert np.abs(first - other).max() > 1e-3


@pytest.mark.full  # by default, tests/moe/routing/test_mesh.py has routers on a mesh
@pytest.mark.parametrize('shape', [(2, 4, 1), (4, 1, 2)])
def test_mesh_makes_no_difference(shape):
  x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6, 8)), jnp.float32)
  layer = _layer(moe.ExpertMlp(dim=12, dropout_rate=0.2))
  params = _init(layer, x, None)

  def run():
    return jax.jit(
      lambda params: layer.apply({'params': params}, x, rngs={'dropout': jax.random.key(0)})
    )(params)

  expected = run()
  mesh = jax.make_mesh(shape, ('data', 'expert', 'model'), axis_types=(AxisType.Auto,) * 3)
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(tuple(rules.head_logical_axis_rules(1))):
    np.testing.assert_allclose(jax.device_get(run()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(dispatch='grouped'), "`dispatch` must be one of 'auto', 'einsum', got 'grouped'"),
    (dict(train_capacity_factor=1.0, eval_capacity_factor=1.0), 'its experts have `num_slots`'),
    (
      dict(train_capacity_factor=1.0, eval_capacity_factor=1.0, dispatch='capacity'),
      'its experts have `num_slots`',
    ),
  ],
)
def test_unsupported_options_are_rejected(options, message):
  x, mask = _inputs()
  with pytest.raises(ConfigError, match=re.escape(message)):
    _layer(**options).init(jax.random.key(0), x, mask, deterministic=True)


def test_other_forms_of_dispatch_are_rejected():
  x, mask = _inputs()
  routing, _ = soft_router.SoftRouter(4).init_with_output(
    jax.random.key(0), x, capacity=None, token_mask=mask
  )
  assert dispatch.select_method('auto', routing, 'cpu') == 'einsum'
  with pytest.raises(
    ConfigError, match="`dispatch` must be one of 'auto', 'einsum', got 'capacity'"
  ):
    dispatch.select_method('capacity', routing, 'cpu')


def test_gin_file_of_the_page(monkeypatch):
  monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
  page = (pathlib.Path(__file__).parents[2] / 'docs' / 'extending.md').read_text(encoding='utf-8')
  (shown,) = re.findall(r'`soft_moe.gin`:\n\n```gin\n(.*?)```', page, re.DOTALL)
  shown = gin_syntax.read_text(shown + "MODEL_DIR = 'runs/x'\n", 'own.gin', is_flag=False)
  model = gin_utils.load('t5x_lite.apps.train.train', [shown]).argument('model')
  tokens = {name: jax.ShapeDtypeStruct((2, 4), jnp.int32) for name in cases.tiny_batch()}
  params = jax.eval_shape(
    lambda: model.get_initial_variables(
      jax.random.key(0), {name: array.shape for name, array in tokens.items()}
    )
  )['params']
  kernel = params['encoder']['layers_1']['mlp']['router']['router_weights']['w']['kernel']
  assert kernel.shape == (model.module.config.emb_dim, 8 * 4)
  metrics = jax.eval_shape(
    lambda params, batch: model.loss_fn(params, batch, jax.random.key(0))[1], params, tokens
  )
  assert 'experts/encoder/layers_1/load' in metrics
  gin.clear_config()
