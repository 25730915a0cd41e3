"""The sparse layer: T5X's numbers, an oracle that loops over experts, padding, groups, metrics, records, errors."""

import functools
import math

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import grouping
from moe import routing
from moe.experts import ExpertMlp
from moe.layers import MoeLayer
from t5x_lite import layers
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from tests import golden_data
from tests.networks.network_cases import assert_trees_close
from tests.networks.network_cases import jit

_NAME = 't5x/moe_layer'


def _layer(num_experts=4, num_selected=2, dim=12, router=None, expert=None, **fields):
  router_fields = dict(normalize_gates=True, ignore_padding_tokens=True) | (router or {})
  return MoeLayer(
    num_experts=num_experts,
    expert=ExpertMlp(**{'dim': dim, 'activations': ('gelu', 'linear')} | (expert or {})),
    router=routing.TokensChooseRouter(num_experts, num_selected=num_selected, **router_fields),
    **fields,
  )


def _params(layer, x, seed=0, **call):
  shapes = jax.eval_shape(
    lambda key: layer.init(key, x, deterministic=True, **call), jax.random.key(0)
  )['params']
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * 0.5, jnp.float32), shapes
  )


def _apply(layer, params, x, mutable=False, rngs=None, collections=None, **call):
  """Apply `layer` as one compiled program: op by op it takes several times as long."""
  arrays = {name: value for name, value in call.items() if isinstance(value, jax.Array)}
  static = {name: value for name, value in call.items() if name not in arrays}

  def run(variables, x, rngs, arrays):
    return layer.apply(variables, x, rngs=rngs, mutable=mutable, **arrays, **static)

  return jit(run)({'params': params, **(collections or {})}, x, rngs, arrays)


def _x(batch=3, length=8, width=6, seed=1):
  return jnp.asarray(
    np.random.default_rng(seed).standard_normal((batch, length, width)), jnp.float32
  )


# ---- T5X's numbers --------------------------------------------------------------------------------------------------


def _golden_layer(case):
  kinds = {
    'masked': routing.TokensChooseRouter,
    'scatter': routing.TokensChooseRouter,
    'experts_choose': routing.ExpertsChooseRouter,
  }
  options = dict(use_bias=case.get('rbias', False), ignore_padding_tokens=case.get('pad', False))
  if case['kind'] != 'experts_choose':
    options |= dict(num_selected=case['k'], batch_prioritized_routing=case.get('bpr', False))
  return MoeLayer(
    num_experts=case['E'],
    router=kinds[case['kind']](case['E'], **options),
    expert=ExpertMlp(
      dim=case['F'], activations=tuple(case['acts']), use_bias=case.get('bias', False)
    ),
    group_size=case['group'],
    train_capacity_factor=case['tcf'],
    eval_capacity_factor=case['ecf'],
    min_expert_capacity=case['mincap'],
    num_groups_multiple=case['E'],
  )


@pytest.mark.parametrize(
  'index',
  [pytest.param(index, marks=pytest.mark.full) if index in (1, 3) else index for index in range(5)],
)
def test_golden_layers(index):
  description, arrays = golden_data.load(_NAME)
  case, tree = description['cases'][index], golden_data.subtree(arrays, f'case{index}')
  layer, tol = _golden_layer(case), description['tol']['floats']

  def loss_fn(params, x, deterministic):
    y, sown = layer.apply(
      {'params': params}, x, deterministic=deterministic, mutable=['intermediates']
    )
    sown = {name: value[0] for name, value in sown['intermediates'].items()}
    return jnp.sum(y * tree['cot']) + 0.1 * sown['auxiliary_loss'] + 0.01 * sown['router_z_loss'], (
      y,
      sown,
    )

  step = jax.value_and_grad(
    functools.partial(loss_fn, deterministic=False), argnums=(0, 1), has_aux=True
  )
  both = jit(lambda params, x: (step(params, x), loss_fn(params, x, deterministic=True)))
  ((_, (y, sown)), (grads, grad_x)), (_, (eval_y, eval_sown)) = both(tree['params'], tree['x'])
  for mode, got_y, got_sown in (('train', y, sown), ('eval', eval_y, eval_sown)):
    np.testing.assert_allclose(got_y, tree[mode]['out'], rtol=tol, atol=tol)
    for name, want in case['metrics'][mode].items():
      assert got_sown[name].shape == () and got_sown[name].dtype == jnp.float32
      np.testing.assert_allclose(got_sown[name], want, rtol=tol, atol=tol, err_msg=f'{mode} {name}')
  np.testing.assert_allclose(grad_x, tree['grad_x'], rtol=tol, atol=tol)
  assert_trees_close(grads, tree['grad'], tol)
  axes = jax.eval_shape(
    lambda key: layer.init(key, tree['x'], deterministic=True), jax.random.key(0)
  )['params_axes']
  got_axes = tree_utils.flatten_dict(nn_partitioning.get_axis_names(axes))
  assert {name: list(axes) for name, axes in got_axes.items()} == case['param_axes']


# ---- An oracle ------------------------------------------------------------------------------------------------------

_ACTIVATIONS = {
  'linear': lambda x: x,
  'relu': lambda x: np.maximum(x, 0),
  'gelu': lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def _oracle(params, x, num_selected, activations, mask=None):
  """Return float64 [batch, length, embed]: every expert for every token, then the chosen ones by normalised gates."""
  params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  x = np.asarray(x, np.float64)
  logits = x @ params['router']['router_weights']['w']['kernel']
  probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  y = np.zeros_like(x)
  names = ['wi'] if len(activations) == 1 else [f'wi_{i}' for i in range(len(activations))]
  for b, t in np.ndindex(*x.shape[:2]):
    if mask is not None and not mask[b, t]:
      continue
    chosen = np.argsort(-probs[b, t], kind='stable')[:num_selected]
    for e in chosen:
      branches = [
        _ACTIVATIONS[activation](x[b, t] @ params['expert'][name]['kernel'][e])
        for activation, name in zip(activations, names, strict=True)
      ]
      hidden = np.prod(branches, axis=0)
      y[b, t] += (
        probs[b, t, e] / probs[b, t, chosen].sum() * (hidden @ params['expert']['wo']['kernel'][e])
      )
  return y


@pytest.mark.parametrize(
  'num_selected, activations, group_size',
  [pytest.param(1, ('relu',), 6, marks=pytest.mark.full), (3, ('gelu', 'linear'), 4096)],
)
def test_dropless_is_the_oracle(num_selected, activations, group_size):
  layer = _layer(5, num_selected, expert={'activations': activations}, group_size=group_size)
  x = _x()
  mask = np.random.default_rng(0).random(x.shape[:2]) < 0.7
  params = _params(layer, x)
  y = _apply(layer, params, x, token_mask=jnp.asarray(mask), deterministic=True)
  np.testing.assert_allclose(
    y, _oracle(params, x, num_selected, activations, mask), rtol=1e-5, atol=1e-5
  )
  everything = _apply(layer, params, x, deterministic=True)
  np.testing.assert_allclose(
    everything, _oracle(params, x, num_selected, activations), rtol=1e-5, atol=1e-5
  )


def test_forms_of_dispatch_agree_dropout_included():
  """With a place for everything, and with drops."""
  x = _x()
  for factor in (8.0, 0.75):
    results = {}
    for dispatch in ('einsum', 'capacity', 'grouped'):
      layer = _layer(
        expert={'dropout_rate': 0.3},
        dispatch=dispatch,
        group_size=8,
        min_expert_capacity=1,
        train_capacity_factor=factor,
        eval_capacity_factor=factor,
      )
      params = _params(layer, x)
      results[dispatch] = _apply(layer, params, x, rngs={'dropout': jax.random.key(0)})
    np.testing.assert_allclose(results['einsum'], results['capacity'], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results['grouped'], results['capacity'], rtol=1e-4, atol=1e-5)
  assert not np.allclose(
    results['grouped'], _apply(layer, params, x, deterministic=True), atol=1e-3
  )


def test_a_shared_expert_is_added_for_all_tokens():
  layer, x = _layer(shared_expert_dim=7, expert={'dropout_rate': 0.0}), _x()
  params = _params(layer, x)
  assert params['shared_mlp']['wi_0']['kernel'].shape == (6, 7)
  mask = jnp.asarray(np.arange(8) < [[3], [8], [0]])
  y = _apply(layer, params, x, token_mask=mask, deterministic=True)
  shared = layers.MlpBlock(7, ('gelu', 'linear'), intermediate_dropout_rate=0.0)
  shared_y = jit(functools.partial(shared.apply, deterministic=True))(
    {'params': params['shared_mlp']}, x
  )
  want = shared_y + _oracle(params, x, 2, ('gelu', 'linear'), np.asarray(mask))
  np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


class _Block(nn.Module):
  """An expert of a test's own."""

  dim: int

  @nn.compact
  def __call__(self, x, decode=False, deterministic=False):
    self.sow('intermediates', 'seen', jnp.sum(x))
    hidden = layers.DenseGeneral(self.dim, kernel_axes=('embed', 'expert_mlp'), name='wi')(x)
    return layers.DenseGeneral(x.shape[-1], kernel_axes=('expert_mlp', 'embed'), name='wo')(
      nn.relu(hidden)
    )


@pytest.mark.parametrize(
  'router_cls',
  [routing.TokensChooseRouter, pytest.param(routing.ExpertsChooseRouter, marks=pytest.mark.full)],
)
def test_experts_of_any_kind_are_mapped(router_cls):
  """Blocks that compute the same as an ExpertMlp have the same results, drops and gradients."""
  x = _x()
  fields = dict(
    num_experts=4,
    router=router_cls(4),
    group_size=12,
    train_capacity_factor=1.0,
    eval_capacity_factor=1.0,
    min_expert_capacity=1,
  )
  own = MoeLayer(expert=functools.partial(_Block, 12), **fields)
  usual = MoeLayer(expert=ExpertMlp(dim=12), **fields)
  params = _params(usual, x)
  variables = jax.eval_shape(lambda key: own.init(key, x, deterministic=True), jax.random.key(0))
  assert jax.tree.map(jnp.shape, variables['params']) == jax.tree.map(jnp.shape, params)
  axes = nn_partitioning.get_axis_names(variables['params_axes'])
  assert tuple(axes['expert']['wi']['kernel']) == ('expert', 'embed', 'expert_mlp')

  def loss(layer, params, x):
    return jnp.sum(jnp.sin(layer.apply({'params': params}, x, deterministic=True)))

  got, want = (
    jit(jax.value_and_grad(functools.partial(loss, layer), argnums=(0, 1)))(params, x)
    for layer in (own, usual)
  )
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
  assert_trees_close(got[1], want[1], 1e-5)


# ---- Groups and padding ---------------------------------------------------------------------------------------------


def _t5x_num_groups(tokens, group_size, multiple):
  """T5X's rule, as its documentation and code have it, after filling."""
  least = max(tokens // group_size, multiple)
  return next(n for n in range(least, tokens + 1) if tokens % n == 0 and n % multiple == 0)


def test_groups_are_the_largest_that_divide():
  rng = np.random.default_rng(0)
  for trial in range(200):
    batch, length, size = (int(n) for n in rng.integers(1, 40, 3))
    multiple = int(rng.integers(1, 5))
    tokens = batch * length
    divisors = [d for d in range(1, tokens + 1) if tokens % d == 0 and d <= size]
    if multiple == 1:
      if divisors[-1] * 8 < min(size, tokens):
        with pytest.raises(ConfigError, match='Set group_size to'):
          grouping.divide(batch, length, size)
        continue
      assert grouping.divide(batch, length, size) == (
        batch,
        length,
        tokens // divisors[-1],
        divisors[-1],
      )
      continue
    groups = grouping.divide(batch, length, size, multiple)
    assert groups.batch * groups.length == groups.num_groups * groups.group_size
    assert groups.num_groups == _t5x_num_groups(groups.batch * groups.length, size, multiple)
    assert groups.group_size < 2 * size and (groups.batch == batch or groups.length == length)
    if trial % 20 == 0:
      x = jnp.asarray(rng.integers(1, 9, (batch, length, 2)))
      np.testing.assert_array_equal(groups.merge(groups.split(x), batch, length), x)


def test_batches_of_unknown_size_have_no_groups():
  (rows,) = jax.export.symbolic_shape('batch')
  with pytest.raises(ConfigError, match='export_lib.save.batch_size'):
    grouping.divide(rows, 8, 4)


@pytest.mark.parametrize(
  'factors',
  [
    pytest.param({}, marks=pytest.mark.full),
    dict(train_capacity_factor=1.0, eval_capacity_factor=1.0),
  ],
)
def test_padding_changes_nothing_for_other_tokens(factors):
  """With capacities too, in one group of which the capacity stays the same."""
  layer = _layer(min_expert_capacity=5 if factors else None, **factors)
  x = _x(2, 6)
  params = _params(layer, x)

  def apply(x, mask):
    return _apply(layer, params, x, token_mask=mask, deterministic=True, mutable=['intermediates'])

  y, sown = apply(x, jnp.ones((2, 6), bool))
  longer = jnp.concatenate([x, 3 * _x(2, 3, seed=5)], axis=1)
  mask = jnp.arange(9) < 6 + jnp.zeros((2, 1), jnp.int32)
  padded, padded_sown = apply(longer, mask)
  np.testing.assert_allclose(padded[:, :6], y, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(padded[:, 6:], 0.0)
  for name in ('expert_load', 'router_confidence', 'router_entropy', 'fraction_tokens_left_behind'):
    np.testing.assert_allclose(
      padded_sown['intermediates'][name][0],
      sown['intermediates'][name][0],
      rtol=1e-5,
      atol=1e-6,
      err_msg=name,
    )
  if factors:
    assert sown['intermediates']['drops_by_position'][0].sum() > 0
  # Without a mask, zeros are padding.
  zeros = jnp.where(mask[..., None], longer, 0.0)
  np.testing.assert_allclose(
    _apply(layer, params, zeros, deterministic=True), padded, rtol=1e-6, atol=1e-6
  )


def test_steps_of_decoding_drop_nothing():
  """A row is continued in the same way whatever the other rows are."""
  layer = _layer(train_capacity_factor=0.5, eval_capacity_factor=0.5, min_expert_capacity=1)
  x = jnp.broadcast_to(_x(1, 1), (8, 1, 6))
  params = _params(layer, x)
  step, sown = _apply(layer, params, x, decode=True, deterministic=True, mutable=['intermediates'])
  np.testing.assert_allclose(
    step,
    np.broadcast_to(_oracle(params, x[:1], 2, ('gelu', 'linear')), x.shape),
    rtol=1e-5,
    atol=1e-5,
  )
  assert sown['intermediates']['drops_by_position'][0].sum() == 0
  crowded = _apply(layer, params, x, deterministic=True)
  assert np.any(np.all(np.asarray(crowded) == 0, axis=-1))


# ---- Metrics and losses ---------------------------------------------------------------------------------------------


def test_sown_values():
  layer, x = (
    _layer(
      train_capacity_factor=0.5, eval_capacity_factor=0.5, min_expert_capacity=1, group_size=8
    ),
    _x(4, 8),
  )
  params = _params(layer, x)
  _, sown = _apply(layer, params, x, deterministic=True, mutable=['intermediates'])
  sown = {name: value[0] for name, value in sown['intermediates'].items()}
  weights = sown.pop('metric_weights')
  assert weights['drops_by_position'].shape == (16,) and weights['expert_load'] == 4 * 8 * 2
  shapes = dict.fromkeys(
    (
      'auxiliary_loss',
      'router_z_loss',
      'fraction_tokens_left_behind',
      'expert_usage',
      'router_confidence',
      'router_entropy',
      'choices_dropped',
      'receive_drops',
    ),
    (),
  )
  shapes |= {'expert_load': (4,), 'drops_by_position': (16,)}
  assert {name: value.shape for name, value in sown.items()} == shapes
  assert all(value.dtype == jnp.float32 for value in sown.values())
  # Independent: first choices of all tokens come before second ones, 2 places per expert and group of 8 tokens.
  logits = np.asarray(x, np.float64) @ np.asarray(
    params['router']['router_weights']['w']['kernel'], np.float64
  )
  chosen = np.argsort(-logits, axis=-1, kind='stable')[..., :2]
  dropped = np.zeros((4, 8, 2), bool)
  for group in range(4):
    used = np.zeros(4, int)
    for k, t in np.ndindex(2, 8):
      expert = chosen[group, t, k]
      dropped[group, t, k] = used[expert] >= 1
      used[expert] += 1
  np.testing.assert_allclose(
    sown['expert_load'], np.bincount(chosen.ravel(), minlength=4) / chosen.size, rtol=1e-6
  )
  np.testing.assert_allclose(sown['drops_by_position'][::2], dropped.mean((0, 2)), rtol=1e-6)
  np.testing.assert_allclose(sown['choices_dropped'], dropped.mean(), rtol=1e-6)
  np.testing.assert_allclose(sown['fraction_tokens_left_behind'], dropped.all(-1).mean(), rtol=1e-6)
  np.testing.assert_allclose(sown['expert_usage'], (~dropped).sum() / (4 * 4), rtol=1e-6)


def test_decisions_are_recorded_and_repeated():
  x = _x()
  first = _layer(router={'jitter_noise': 0.1})
  params = _params(first, x)
  rngs = {'jitter': jax.random.key(3)}
  y, record = _apply(first, params, x, rngs=rngs, mutable=['routing'])
  assert record['routing']['expert_index'].shape == record['routing']['gates'].shape == (1, 24, 2)
  # Elsewhere, with another router, the tokens go the same way; gates are of the new router, which gets gradients.
  other = jax.tree.map(lambda leaf: leaf, params)
  other['router']['router_weights']['w']['kernel'] *= -1.0

  def run(params):
    y, again = first.apply(
      {'params': params, 'routing_replay': replay}, x, rngs=rngs, mutable=['routing']
    )
    return jnp.sum(y), (y, again)

  replay = {'expert_index': record['routing']['expert_index']}
  step = jit(jax.value_and_grad(run, has_aux=True))
  (_, (replayed, _)), _ = step(params)
  np.testing.assert_allclose(replayed, y, rtol=1e-6, atol=1e-6)
  (_, (_, again)), grads = step(other)
  np.testing.assert_array_equal(again['routing']['expert_index'], record['routing']['expert_index'])
  assert np.abs(grads['router']['router_weights']['w']['kernel']).max() > 0
  # With the gates of the record the other router computes the same, and has no gradient of it.
  replay = record['routing']
  (_, (replayed, again)), grads = jit(jax.value_and_grad(run, has_aux=True))(other)
  np.testing.assert_allclose(replayed, y, rtol=1e-6, atol=1e-6)
  np.testing.assert_array_equal(again['routing']['gates'], record['routing']['gates'])
  assert not np.any(grads['router']['router_weights']['w']['kernel'])
  variables = jax.eval_shape(lambda key: first.init(key, x, deterministic=True), jax.random.key(0))
  assert set(variables) == {'params', 'params_axes'}


def test_experts_that_choose_are_recorded_and_repeated():
  layer = MoeLayer(
    num_experts=4,
    expert=ExpertMlp(dim=8),
    router=routing.ExpertsChooseRouter(4),
    group_size=8,
    train_capacity_factor=1.0,
    eval_capacity_factor=1.0,
    min_expert_capacity=1,
  )
  x = _x()
  params = _params(layer, x)
  y, record = _apply(layer, params, x, deterministic=True, mutable=['routing'])
  assert record['routing']['token_index'].shape == (3, 4, 2)
  shuffled = {'token_index': (record['routing']['token_index'] + 1) % 8}
  replay = jit(
    lambda record: layer.apply({'params': params, 'routing_replay': record}, x, deterministic=True)
  )
  moved, again = replay(shuffled), replay({'token_index': record['routing']['token_index']})
  np.testing.assert_allclose(again, y, rtol=1e-6, atol=1e-6)
  weighed = replay(
    {'token_index': record['routing']['token_index'], 'gates': 2 * record['routing']['gates']}
  )
  np.testing.assert_allclose(weighed, 2 * y, rtol=1e-6, atol=1e-6)
  assert not np.allclose(moved, y, atol=1e-3)


def test_token_ids_reach_the_router():
  layer = MoeLayer(num_experts=4, expert=ExpertMlp(dim=8), router=routing.HashRouter(4))
  x = _x()
  ids = jnp.asarray(np.random.default_rng(0).integers(0, 50, x.shape[:2]), jnp.int32)
  params = _params(layer, x, token_ids=ids)
  _, record = _apply(layer, params, x, token_ids=ids, deterministic=True, mutable=['routing'])
  index = np.asarray(record['routing']['expert_index']).ravel()
  for token in np.unique(ids):
    assert len(set(index[np.asarray(ids).ravel() == token])) == 1
  assert len(set(index)) == 4


def test_half_precision_keeps_the_router_in_float32():
  x = _x()
  layer, exact = _layer(dtype=jnp.bfloat16, shared_expert_dim=4), _layer(shared_expert_dim=4)
  params = _params(layer, x)
  (y, record), (want, exact_record) = (
    _apply(module, params, x, deterministic=True, mutable=['routing']) for module in (layer, exact)
  )
  assert y.dtype == jnp.bfloat16 and want.dtype == jnp.float32
  np.testing.assert_array_equal(
    record['routing']['expert_index'], exact_record['routing']['expert_index']
  )
  np.testing.assert_array_equal(record['routing']['gates'], exact_record['routing']['gates'])
  np.testing.assert_allclose(y.astype(np.float32), want, rtol=0.1, atol=0.1)
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def test_experts_begin_different_and_of_the_variance_of_a_dense_block():
  layer = _layer(8, dim=64)
  params = jit(lambda key: layer.init(key, _x(2, 4, 32), deterministic=True))(jax.random.key(0))[
    'params'
  ]['expert']
  block = layers.MlpBlock(64, ('gelu', 'linear'))
  dense = jit(lambda key: block.init(key, _x(2, 4, 32), deterministic=True))(jax.random.key(0))[
    'params'
  ]
  for name in ('wi_0', 'wi_1', 'wo'):
    kernel = params[name]['kernel']
    assert len(np.unique(np.asarray(kernel).reshape(8, -1)[:, 0])) == 8
    np.testing.assert_allclose(np.std(kernel), np.std(dense[name]['kernel']), rtol=0.05)


# ---- Errors ---------------------------------------------------------------------------------------------------------

_CAPACITIES = dict(train_capacity_factor=1.0, eval_capacity_factor=2.0)


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(group_size=0), '`MoeLayer.group_size` must be an integer >= 1, got 0'),
    (
      dict(train_capacity_factor=-1.0),
      'train_capacity_factor` must be a number > 0 or None, got -1.0',
    ),
    (
      dict(dispatch='capacty', **_CAPACITIES),
      "dispatch` must be .* got 'capacty'. Did you mean 'capacity'",
    ),
    (dict(dispatch='capacity'), "a number > 0, got None. It is required by dispatch='capacity'"),
    (
      dict(min_expert_capacity=2),
      'min_expert_capacity` must be None without capacity factors, got 2',
    ),
    (
      dict(router=dict(batch_prioritized_routing=True)),
      'without capacity factors, .*batch_prioritized_routing',
    ),
    (dict(expert=dict(activations=('relu6x',))), 'relu6x'),
    (dict(expert=dict(dim=0)), '`ExpertMlp.dim` must be an integer >= 1, got 0'),
  ],
)
def test_options_are_checked_when_made(fields, message):
  with pytest.raises(ConfigError, match=message):
    _layer(**fields)


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(num_experts=3), '`MoeLayer.router.num_experts` must be num_experts=3, got 4'),
    (
      dict(router=routing.ExpertsChooseRouter(4)),
      'got None. It is required by ExpertsChooseRouter',
    ),
    (dict(expert=functools.partial(_Block, 4)), 'got None. It is required by custom experts'),
    (
      dict(expert=functools.partial(_Block, 4), dispatch='grouped', **_CAPACITIES),
      "got 'grouped'. The experts",
    ),
    (
      dict(expert=functools.partial(_Block, 4), shared_expert_dim=3, **_CAPACITIES),
      'shared_expert_dim` .* got 3. The',
    ),
    (
      dict(expert=_Block(4), **_CAPACITIES),
      r'must be an ExpertMlp, or .*(?s:.*) functools.partial',
    ),
  ],
)
def test_combinations_are_checked_when_made(fields, message):
  with pytest.raises(ConfigError, match=message):
    MoeLayer(
      **dict(num_experts=4, expert=ExpertMlp(dim=4), router=routing.TokensChooseRouter(4)) | fields
    )


def test_values_per_token_are_checked():
  layer, x = _layer(), _x()
  with pytest.raises(
    ConfigError, match=r'`MoeLayer.token_mask` must be an array of shape \(3, 8\)'
  ):
    layer.init(jax.random.key(0), x, token_mask=jnp.ones((3, 7), bool), deterministic=True)


def test_receive_buffers_without_effect_raise():
  options = dict(
    num_experts=4,
    expert=ExpertMlp(dim=8),
    router=routing.TokensChooseRouter(4),
    train_capacity_factor=1.0,
    eval_capacity_factor=2.0,
    receive_factor=1.5,
  )
  for dispatch in ('auto', 'capacity', 'einsum'):
    with pytest.raises(ConfigError, match='receive_factor` must be None with .* got 1.5'):
      MoeLayer(dispatch=dispatch, **options)
  MoeLayer(dispatch='grouped', **options)
  MoeLayer(**{**options, 'train_capacity_factor': None})


@pytest.mark.parametrize('axis', ['expert', 'expert_mlp', 'unmodeled'])
def test_rules_of_dense_models_name_the_partitioner_for_experts(axis):
  with pytest.raises(
    ConfigError, match=f"no rule for logical axis '{axis}'.*partitioning/moe_expert_partitions.gin"
  ):
    partitioning.logical_to_mesh_axes(
      (axis, 'embed'), partitioning.standard_logical_axis_rules(), 'decoder/kernel'
    )
