"""Stacks as loops: the size of the program; and the conversion between parameter layouts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5
from tests.networks import network_cases as cases

# ---- Programs -------------------------------------------------------------------------------------------------------


def _step_text(num_layers, **fields):
  """Return the program of loss and gradients for a model of `num_layers` + `num_layers` layers, before compilation."""
  config = cases.tiny_config(num_encoder_layers=num_layers, num_decoder_layers=num_layers, **fields)
  module = t5.Transformer(config)
  batch = cases.tiny_batch()
  params = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False)['params'], jax.random.key(0)
  )

  def loss(params):
    return jnp.sum(module.apply({'params': params}, **batch, enable_dropout=False))

  return jax.jit(jax.value_and_grad(loss)).lower(params).as_text()


@pytest.mark.parametrize(
  'layout, remat_policy',
  [
    # By default, test_segments.py has the other layout, with unlike layers.
    ('scalable_t5', 'minimal'),
    *(pytest.param('t5', policy, marks=pytest.mark.full) for policy in ('none', 'minimal')),
    pytest.param('scalable_t5', 'none', marks=pytest.mark.full),
  ],
)
def test_a_looped_program_does_not_grow_with_depth(layout, remat_policy):
  shallow, deep = (
    _step_text(n, param_layout=layout, scan_layers=True, remat_policy=remat_policy) for n in (4, 12)
  )
  assert shallow.count('stablehlo.dot_general') == deep.count('stablehlo.dot_general')
  assert shallow.count('stablehlo.while') == deep.count('stablehlo.while') > 0
  if layout == 'scalable_t5':
    assert len(deep) < 1.02 * len(shallow)
  else:
    # Arguments and results of this tree are per layer; only stacking and unstacking grow.
    growth = set(re.findall(r'stablehlo\.\w+', deep)) - set(re.findall(r'stablehlo\.\w+', shallow))
    assert not growth
    assert len(deep) < 2.5 * len(shallow)


def test_by_default_loops_run_where_parameters_are_stacked():
  assert 'stablehlo.while' in _step_text(4, param_layout='scalable_t5')
  assert 'stablehlo.while' not in _step_text(4, param_layout='scalable_t5', scan_layers=False)
  assert 'stablehlo.while' not in _step_text(8)  # a subtree per layer


def test_an_unrolled_program_traces_each_kind_of_layer_once():
  """Equal layers are calls of one function, so tracing and lowering do not grow with depth."""
  shallow, deep = (_step_text(n) for n in (4, 12))
  assert shallow.count('stablehlo.dot_general') == deep.count('stablehlo.dot_general')
  assert 'stablehlo.while' not in deep
  calls = [
    len(re.findall(r'call @EncoderLayer|call @DecoderLayer|call @run_layer|call @jvp', text))
    for text in (shallow, deep)
  ]
  assert calls[1] >= 2.5 * calls[0] > 0


def test_parameters_are_made_in_a_loop():
  """Random number generators are the largest part of the program of an initialization."""
  sizes = []
  for num_layers in (2, 8):
    module = t5.Transformer(
      cases.tiny_config(num_encoder_layers=num_layers, num_decoder_layers=num_layers)
    )
    init = jax.jit(
      lambda key, module=module: module.init(key, **cases.tiny_batch(), enable_dropout=False)[
        'params'
      ]
    )
    sizes.append(len(init.lower(jax.random.key(0)).as_text()))
  assert sizes[1] < 1.5 * sizes[0]


@pytest.mark.parametrize('num_devices', [1, 2])
def test_a_loop_stores_no_weights_and_no_results_that_are_simple_to_repeat(num_devices):
  config = cases.tiny_config(
    num_encoder_layers=3,
    num_decoder_layers=1,
    scan_layers=True,
    param_layout='scalable_t5',
    dropout_rate=0.1,
    emb_dim=28,
    mlp_dim=40,
  )
  module, batch = t5.Transformer(config), cases.tiny_batch()
  params = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False)['params'], jax.random.key(0)
  )

  def loss(params, key):
    return jnp.sum(module.apply({'params': params}, **batch, rngs={'dropout': key}))

  partitioner = partitioning.PjitPartitioner(
    mesh=jax.sharding.Mesh(
      np.array(jax.devices()[:num_devices]).reshape(num_devices, 1), ('data', 'model')
    )
  )
  traced = partitioner.partition(jax.grad(loss), (None, None), None).trace(
    params, jax.random.key(1)
  )
  encoder = next(equation for equation in traced.jaxpr.eqns if equation.primitive.name == 'scan')
  # What a loop carries has the shape that its body returns; what it stores has the dim over layers, too.
  stored = [
    (outer.aval.shape, outer.aval.dtype)
    for outer, inner in zip(encoder.outvars, encoder.params['jaxpr'].out_avals, strict=True)
    if outer.aval.shape != inner.shape
  ]
  # The dim over layers is the second one in parameters and the first one in a loop.
  weights = {
    (leaf.shape[1], leaf.shape[0], *leaf.shape[2:])
    for leaf in jax.tree.leaves(params['encoder']['encoder'])
  }
  assert not [shape for shape, _ in stored if shape in weights]
  # Hidden units: both projections and the hyperbolic tangent of the activation. Dropout's mask is stored as bool.
  hidden = [dtype for shape, dtype in stored if shape[-1] == config.mlp_dim]
  assert sorted(map(str, hidden)) == ['bool'] + ['float32'] * 3, stored


# ---- Layouts --------------------------------------------------------------------------------------------------------


def _assert_same_function(config_a, params_a, config_b, params_b):
  batch = cases.tiny_batch()
  np.testing.assert_allclose(
    cases.forward(config_a, params_a, batch),
    cases.forward(config_b, params_b, batch),
    rtol=1e-4,
    atol=1e-4,
  )


def test_conversion_between_layouts_is_exact_and_keeps_the_function():
  apart = cases.tiny_config(relpos_bias_tables='per_layer')
  stacked = cases.tiny_config(param_layout='scalable_t5')
  params = cases.random_params(apart)
  there = param_layouts.convert(params, 't5', 'scalable_t5', stacked)

  def shapes(tree):
    return {name: leaf.shape for name, leaf in tree_utils.named_leaves(tree)}

  assert shapes(there) == shapes(cases.random_params(stacked))
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(there))
  _assert_same_function(apart, params, stacked, there)
  back = param_layouts.convert(there, 'scalable_t5', 't5', apart)
  jax.tree.map(np.testing.assert_array_equal, back, params)
  assert (
    param_layouts.param_layout(there) == 'scalable_t5' and param_layouts.param_layout(back) == 't5'
  )


def test_a_shared_table_is_copied_and_equal_tables_are_shared():
  shared = cases.tiny_config()
  stacked = cases.tiny_config(param_layout='scalable_t5')
  params = cases.random_params(shared)
  there = param_layouts.convert(params, 't5', 'scalable_t5', stacked)
  assert there['decoder']['decoder']['relpos_bias']['rel_embedding'].shape == (2, 3, 32)
  _assert_same_function(shared, params, stacked, there)
  back = param_layouts.convert(there, 'scalable_t5', 't5', shared)
  jax.tree.map(np.testing.assert_array_equal, back, params)
  # Within a layout, for a model with one table per layer.
  apart = param_layouts.convert(
    params, 't5', 't5', cases.tiny_config(relpos_bias_tables='per_layer')
  )
  assert 'relpos_bias' in apart['encoder']['layers_1'] and 'relpos_bias' not in apart['encoder']
  there['encoder']['encoder']['relpos_bias']['rel_embedding'][0, 1, 0] += 1
  with pytest.raises(
    ConfigError, match="'encoder' must have equal tables .*layers 0 and 1.*bias_tables='per_layer'"
  ):
    param_layouts.convert(there, 'scalable_t5', 't5', shared)


def test_conversion_works_on_device_and_inside_jit():
  apart = cases.tiny_config(relpos_bias_tables='per_layer')
  stacked = cases.tiny_config(param_layout='scalable_t5')
  params = cases.random_params(apart)
  convert = jax.jit(lambda params: param_layouts.convert(params, 't5', 'scalable_t5', stacked))
  jax.tree.map(
    np.testing.assert_array_equal,
    convert(params),
    param_layouts.convert(params, 't5', 'scalable_t5', stacked),
  )


@pytest.mark.parametrize(
  'from_layout, to_layout, fields, message',
  [
    ('t5', 't5x', {}, "`to_layout` must be one of 't5', got 't5x'. Did you mean 't5'"),
    (
      'scalable_t5',
      't5',
      {},
      "`from_layout` must be one of 't5', .* It is the layout of the parameters",
    ),
    (
      't5',
      'scalable_t5',
      {},
      "`to_layout` must be one of 't5', .* It is the param_layout of the model",
    ),
    (
      't5',
      't5',
      {'num_encoder_layers': 3},
      "'encoder' must have 3 layers, got 2. Set num_encoder_layers",
    ),
  ],
)
def test_errors_of_conversions(from_layout, to_layout, fields, message):
  params = cases.random_params(cases.tiny_config())
  with pytest.raises(ConfigError, match=message):
    param_layouts.convert(params, from_layout, to_layout, cases.tiny_config(**fields))


def test_stacked_parameters_of_another_depth_raise():
  params = cases.random_params(cases.tiny_config(param_layout='scalable_t5'))
  with pytest.raises(ConfigError, match='must have 5 layers, got {.}. Set num_decoder_layers'):
    param_layouts.convert(
      params,
      'scalable_t5',
      't5',
      cases.tiny_config(num_decoder_layers=5, relpos_bias_tables='per_layer'),
    )
  with pytest.raises(ConfigError, match='decoder/layers_0'):
    param_layouts.param_layout({'decoder': {'embedding': 1}})


def test_a_loop_over_one_layer_is_the_layer():
  config = cases.tiny_config(num_encoder_layers=1, num_decoder_layers=1)
  params, batch = cases.random_params(config), cases.tiny_batch()
  logits = [
    cases.jit(
      functools.partial(
        t5.Transformer(dataclasses.replace(config, scan_layers=scan_layers)).apply,
        enable_dropout=False,
      )
    )({'params': params}, **batch)
    for scan_layers in (False, True)
  ]
  np.testing.assert_allclose(logits[1], logits[0], rtol=1e-5, atol=1e-5)
