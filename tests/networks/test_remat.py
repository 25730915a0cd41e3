"""Policies of rematerialization: what each stores and computes again, in loops and outside of them; offloading."""

import logging
import math
import re

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.errors import ConfigError
from t5x_lite.networks import remat
from t5x_lite.networks import t5
from tests.layers import test_attention_kernels
from tests.networks import network_cases as cases

_LAYERS, _BATCH, _LENGTH, _EMBED, _HEADS, _HEAD_DIM, _MLP = 12, 2, 64, 24, 4, 8, 40
_IN_LOOP = dict(scan_layers=True, param_layout='scalable_t5')


def _trace(num_layers=_LAYERS, **fields):
  """Trace loss and gradients of an encoder."""
  module = t5.Transformer(
    cases.tiny_config(
      num_encoder_layers=num_layers,
      emb_dim=_EMBED,
      num_heads=_HEADS,
      head_dim=_HEAD_DIM,
      mlp_dim=_MLP,
      **fields,
    )
  )
  options = dict(method='encode', enable_dropout=False)
  tokens = jax.ShapeDtypeStruct((_BATCH, _LENGTH), jnp.int32)
  params = jax.eval_shape(
    lambda key, tokens: module.init(key, tokens, **options)['params'], jax.random.key(0), tokens
  )
  return jax.jit(
    jax.value_and_grad(
      lambda params, tokens: jnp.sum(module.apply({'params': params}, tokens, **options))
    )
  ).trace(params, tokens)


def _temporaries(traced):
  return traced.lower().compile().memory_analysis().temp_size_in_bytes


def count_flops(jaxpr):
  """Return the number of operations of all matrix products in a program, whose loops have a known length."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      inputs = equation.invars[0].aval.shape
      total += 2 * equation.outvars[0].aval.size * math.prod(inputs[dim] for dim in contracted)
    for nested in jax_core.jaxprs_in_params(equation.params):
      total += equation.params.get('length', 1) * count_flops(nested)
  return total


# ---- Effects --------------------------------------------------------------------------------------------------------


def test_each_policy_stores_its_results_and_computes_the_others_again():
  names = [policy for policy in remat.REMAT_POLICIES if policy != 'offload']
  traced = {policy: _trace(remat_policy=policy, **_IN_LOOP) for policy in names}
  flops = {policy: count_flops(program.jaxpr.jaxpr) for policy, program in traced.items()}
  rows, joined = _LAYERS * _BATCH * _LENGTH, _HEADS * _HEAD_DIM
  projections, out = 3 * 2 * rows * _EMBED * joined, 2 * rows * _EMBED * joined
  scores, mlp = 2 * 2 * rows * _LENGTH * joined, 2 * 2 * rows * _EMBED * _MLP
  assert {policy: flops[policy] - flops['none'] for policy in names} == {
    'none': 0,
    'minimal': scores,
    'save_attention': projections + out + mlp,
    'save_dots_except_mlp': scores + mlp,
    'full': projections + scores + out + mlp,
  }

  temporaries = {policy: _temporaries(program) for policy, program in traced.items()}
  assert sorted(names, key=temporaries.get, reverse=True) == [
    'none',
    'save_attention',
    'minimal',
    'save_dots_except_mlp',
    'full',
  ], temporaries
  stored = {
    'minimal': 4 * joined + 2 * _MLP - 2 * _EMBED,
    'save_attention': _HEADS * _LENGTH + joined,
  }
  for policy, width in stored.items():
    np.testing.assert_allclose(
      temporaries[policy] - temporaries['full'], 4 * rows * width, rtol=0.2
    )


@pytest.mark.parametrize('policy, bound', [('minimal', 0.6), ('full', 0.25)])
def test_policies_save_memory_outside_of_loops_on_a_cpu(policy, bound):
  """The compiler drops barriers; without another order a policy only adds operations."""
  assert _temporaries(_trace(remat_policy=policy)) < bound * _temporaries(_trace())


@pytest.mark.parametrize('in_loop', [True, pytest.param(False, marks=pytest.mark.full)])
def test_results_with_dropout_are_those_without_remat(in_loop):
  """Otherwise the gradients would belong to another function."""
  params = cases.random_params(cases.tiny_config(num_encoder_layers=2))
  tokens = cases.tiny_batch()['encoder_input_tokens']

  def run(policy, in_loop):
    offload = remat.RESULT_NAMES if policy == 'offload' else ()
    module = t5.Transformer(
      cases.tiny_config(
        num_encoder_layers=2,
        dropout_rate=0.3,
        remat_policy=policy,
        remat_offload=offload,
        scan_layers=in_loop,
      )
    )

    def loss(params):
      return jnp.mean(
        module.apply(
          {'params': params}, tokens, method='encode', rngs={'dropout': jax.random.key(1)}
        )
        ** 2
      )

    return cases.jit(jax.value_and_grad(loss))(params)

  expected = run('none', False)
  for policy in remat.REMAT_POLICIES:
    cases.assert_trees_close(run(policy, in_loop), expected, 1e-5)


def test_unrolled_layers_keep_their_order_and_their_integers():
  """Outside of loops on a CPU, residuals depend on cotangents. Gradients and integers stay the same."""

  def layer(index, x, key):
    y = jnp.sin(x['a']) * jax.random.normal(key, x['a'].shape) * (x['count'] + index)
    return {'a': y, 'count': x['count'] + 1}

  def loss(x, layer):
    for i in range(3):
      x = layer(jnp.uint32(i), x, jax.random.key(0))
    return jnp.sum(x['a'] ** 2), x['count']

  x = {'a': jnp.arange(1.0, 7.0), 'count': jnp.array(2)}
  grad = jax.grad(loss, has_aux=True, allow_int=True)
  expected, count = grad(x, layer)
  got, got_count = grad(x, remat.remat(layer, 'full', in_loop=False))
  np.testing.assert_allclose(got['a'], expected['a'], rtol=1e-6)
  assert got['count'].dtype == expected['count'].dtype and got_count == count == 5


def test_an_empty_batch_has_gradients():
  grad = jax.grad(lambda x: jnp.sum(remat.remat(jnp.sin, 'full', in_loop=False)(x)))(
    jnp.zeros((0, 3))
  )
  assert grad.shape == (0, 3)


# ---- Where a policy has no effect -----------------------------------------------------------------------------------


@pytest.fixture(name='warnings')
def _warnings(caplog):
  remat._warn.cache_clear()
  with caplog.at_level(logging.WARNING, remat.__name__):
    yield lambda: caplog.messages
  remat._warn.cache_clear()


def _mesh(num_devices):
  return jax.sharding.Mesh(
    np.array(jax.devices()[:num_devices]), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )


def test_several_cpu_devices_without_loops_warn_once(warnings):
  with jax.set_mesh(_mesh(2)):
    _trace(2, remat_policy='full', **_IN_LOOP)
    jax.eval_shape(remat.remat(jnp.sin, 'full', in_loop=False), 1.0)  # no derivatives
    assert not warnings()
    for _ in range(2):
      _trace(2, remat_policy='full')
  (line,) = warnings()
  with jax.set_mesh(_mesh(2)):  # nor does it add operations
    assert count_flops(_trace(2, remat_policy='full').jaxpr.jaxpr) == count_flops(
      _trace(2).jaxpr.jaxpr
    )
  assert re.match(
    r"remat_policy='full' has no effect: on several CPU devices.*Set scan_layers=True\.$", line
  )
  with jax.set_mesh(_mesh(1)):
    _trace(2, remat_policy='minimal')
  assert len(warnings()) == 1


def test_offloading_on_a_cpu_stores_and_warns(warnings):
  offloaded = _trace(
    remat_policy='offload', remat_offload=('query', 'key', 'value', 'attention_output'), **_IN_LOOP
  )
  (line,) = warnings()
  assert re.match(
    r"remat_policy='offload' has no effect: a CPU has no other memory.*TPUs or GPUs\.$", line
  )
  stored = _trace(remat_policy='save_dots_except_mlp', **_IN_LOOP)
  assert _temporaries(offloaded) == _temporaries(stored)


def test_unknown_policy_raises():
  with pytest.raises(ConfigError, match="Did you mean 'full'"):
    remat.remat(lambda x: x, 'fulll', in_loop=False)


# ---- Accelerators ---------------------------------------------------------------------------------------------------


_SHAPES = {
  'layer_input': (_BATCH, _LENGTH, _EMBED),
  **dict.fromkeys(('query', 'key', 'value'), (_BATCH, _LENGTH, _HEADS, _HEAD_DIM)),
  'attention_weights': (_BATCH, _HEADS, _LENGTH, _LENGTH),
  'attention_context': (_BATCH, _LENGTH, _HEADS, _HEAD_DIM),
  'attention_output': (_BATCH, _LENGTH, _EMBED),
  'mlp_hidden': (_BATCH, _LENGTH, _MLP),
}


@pytest.mark.parametrize(
  'names', [('layer_input',), ('attention_weights', 'mlp_hidden'), tuple(_SHAPES)]
)
@pytest.mark.parametrize('fields', [_IN_LOOP, {}])
def test_tpus_offload_the_chosen_results_to_the_host(names, fields, monkeypatch):
  monkeypatch.setattr(remat.layers, 'traced_platform', lambda: 'tpu')
  traced = _trace(2, remat_policy='offload', remat_offload=names, **fields)
  text = traced.lower(lowering_platforms=('tpu',)).as_text()
  # Each kind of layer is one function, and the hidden units have two projections.
  expected = sorted(
    _SHAPES[name] for name in names for _ in range(2 if name == 'mlp_hidden' else 1)
  )
  for memory in ('pinned_host', 'device'):
    moved = re.findall(rf'_xla_buffer_placement = "{memory}".*-> tensor<([\dx]+)xf32>', text)
    assert sorted(tuple(map(int, shape.split('x'))) for shape in moved) == expected


def test_cudnn_attention_is_not_computed_again(monkeypatch):
  test_attention_kernels.use_gpu(monkeypatch, test_attention_kernels.H100, 90800)
  counts = {}
  for policy in ('full', 'save_attention'):
    config = dict(
      dtype='bfloat16', attention_kernel='cudnn', remat_policy=policy, relpos_bias_tables=None
    )
    counts[policy] = str(_trace(1, **config).jaxpr).count('dot_product_attention_fwd_wrapper[')
  assert counts == {'full': 2, 'save_attention': 1}


def test_all_names_are_those_of_results():
  jaxpr = str(_trace(1, remat_policy='full').jaxpr)
  found = set(re.findall(r'name\[name=(\w+)\]', jaxpr))
  assert found == {name for name in remat.RESULT_NAMES if not name.startswith('expert')}


def test_blockwise_attention_is_not_computed_again():
  """The output and the log of the sums are stored, so no products of scores are computed a second time."""
  rows, joined = _LAYERS * _BATCH * _LENGTH, _HEADS * _HEAD_DIM
  flops, temporaries = {}, {}
  for policy in ('full', 'save_attention', 'none'):
    traced = _trace(remat_policy=policy, attention_kernel='blockwise', **_IN_LOOP)
    flops[policy], temporaries[policy] = count_flops(traced.jaxpr.jaxpr), _temporaries(traced)
  scores = 2 * 2 * rows * _LENGTH * joined
  assert flops['full'] - flops['save_attention'] == scores
  assert temporaries['full'] < temporaries['save_attention'] < temporaries['none']
