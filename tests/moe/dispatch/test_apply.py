"""All forms of dispatch against a NumPy implementation, and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from moe import dispatch
from moe import models
from moe import partitioner
from moe import routing as routing_lib
from moe.dispatch import types
from moe.routing.types import ExpertChoice
from moe.routing.types import TokenChoice
from t5x_lite.errors import ConfigError
from t5x_lite.layers import ACTIVATIONS
from tests.networks import network_cases
from tests.trainer import flops_cases


def make_params(rng, num_experts, width, hidden, num_branches, biases=False):
  def draw(*shape):
    return jnp.asarray(
      rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) == 3 else 1.0), jnp.float32
    )

  return types.MlpParams(
    wi=tuple(draw(num_experts, width, hidden) for _ in range(num_branches)),
    wo=draw(num_experts, hidden, width),
    wi_bias=tuple(draw(num_experts, hidden) for _ in range(num_branches)) if biases else None,
    wo_bias=draw(num_experts, width) if biases else None,
  )


def make_token_choice(
  rng, groups, tokens, num_selected, num_experts, *, capacity=None, ignored=0.0, skew=None
):
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
    expert_index=jnp.asarray(index),
    gates=jnp.asarray(gates, jnp.float32),
    position=None if position is None else jnp.asarray(position),
    probs=jnp.zeros((groups, tokens, num_experts)),
    auxiliary_loss=jnp.zeros([]),
    router_z_loss=jnp.zeros([]),
    num_experts=num_experts,
    capacity=capacity,
  )


def make_expert_choice(rng, groups, tokens, num_experts, capacity):
  """Every expert's own tokens; an expert with more places than tokens has some without."""
  index = np.full((groups, num_experts, capacity), tokens, np.int32)
  for g in range(groups):
    for e in range(num_experts):
      chosen = rng.permutation(tokens)[:capacity]
      index[g, e, : len(chosen)] = chosen
  gates = np.where(index < tokens, rng.uniform(0.1, 1.0, size=index.shape), 0.0)
  return ExpertChoice(
    token_index=jnp.asarray(index),
    gates=jnp.asarray(gates, jnp.float32),
    probs=jnp.zeros((groups, tokens, num_experts)),
    auxiliary_loss=jnp.zeros([]),
    router_z_loss=jnp.zeros([]),
    num_tokens=tokens,
  )


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
    assert np.linalg.norm(a - b) <= tol * max(np.linalg.norm(b), 1e-3), (
      np.linalg.norm(a - b),
      np.linalg.norm(b),
    )


def by(method):
  return lambda x, routing, params, spec: dispatch.apply_experts(
    x, routing, params, spec, method=method
  )[0]


def run(fn, x, routing, params, spec):
  """Return `fn` of the arguments, as one program: op by op it takes several times as long."""
  return jax.jit(lambda x, routing, params: fn(x, routing, params, spec))(x, routing, params)


def oracle(x, routing, params, spec):
  return all_experts(x, routing, routing.gates, params, spec)


@pytest.mark.parametrize(
  'seed',
  [seed if seed in (1, 2) else pytest.param(seed, marks=pytest.mark.full) for seed in range(24)],
)
def test_dropless_is_exact(seed):
  rng = np.random.default_rng(seed)
  num_experts = int(rng.choice([1, 2, 5, 8]))
  num_selected = int(rng.integers(1, min(num_experts, 3) + 1))
  groups, tokens, width, hidden = (int(n) for n in (rng.integers(1, 4), rng.integers(1, 60), 8, 12))
  activations = [
    ('gelu',),
    ('silu', 'linear'),
    ('relu',),
    *((name,) for name in sorted(ACTIVATIONS)),
  ][seed % 14]
  params = make_params(rng, num_experts, width, hidden, len(activations), biases=seed % 2 == 1)
  routing = make_token_choice(
    rng,
    groups,
    tokens,
    num_selected,
    num_experts,
    ignored=0.2 * (seed % 2),
    skew=[[1] * num_experts, [1] + [0] * (num_experts - 1)][seed % 2],
  )
  x = jnp.asarray(rng.normal(size=(groups, tokens, width)), jnp.float32)
  spec = types.MlpSpec(activations)
  assert_close(
    loss_and_grads(by('grouped'), x, routing, params, spec),
    loss_and_grads(oracle, x, routing, params, spec),
  )


@pytest.mark.parametrize('kind', ['token', 'expert'])
def test_capacity_forms_are_exact(kind):
  rng = np.random.default_rng(3)
  params = make_params(rng, 4, 8, 12, 2, biases=True)
  x = jnp.asarray(rng.normal(size=(3, 16, 8)), jnp.float32)
  routing = (
    make_token_choice(rng, 3, 16, 2, 4, capacity=6, ignored=0.1)
    if kind == 'token'
    else make_expert_choice(rng, 3, 16, 4, 5)
  )
  spec = types.MlpSpec(('gelu', 'linear'))
  expected = loss_and_grads(oracle, x, routing, params, spec)
  for method in ('einsum', 'capacity', 'grouped'):
    if (kind, method) == ('expert', 'grouped'):
      with pytest.raises(
        ConfigError, match="must be one of 'auto', 'capacity', 'einsum', got 'grouped'"
      ):
        by(method)(x, routing, params, spec)
      continue
    assert_close(loss_and_grads(by(method), x, routing, params, spec), expected)


def test_choices_dropped_or_ignored_or_of_one_expert():
  """Empty experts, all rows on one, and rows that count for nothing: one compiled function, other routings."""
  rng = np.random.default_rng(5)
  params = make_params(rng, 4, 8, 12, 1, biases=True)
  x = jnp.asarray(rng.normal(size=(1, 90, 8)), jnp.float32)
  spec = types.MlpSpec(('gelu',))
  routing = make_token_choice(rng, 1, 90, 1, 4)
  grad_fns = [
    jax.jit(
      jax.value_and_grad(
        lambda x, routing, params, fn=fn: jnp.sum(fn(x, routing, params, spec) ** 2), argnums=(0, 2)
      )
    )
    for fn in (by('grouped'), oracle)
  ]
  for experts in (
    np.full(90, 3),
    np.full(90, 0),
    np.full(90, 4),
    np.where(np.arange(90) < 5, 1, 4),
    np.repeat([0, 2, 3], [1, 17, 72]),
    rng.integers(0, 5, 90),
  ):
    index = jnp.asarray(experts, jnp.int32).reshape(1, 90, 1)
    case = routing.replace(expert_index=index, gates=jnp.where(index < 4, 0.7, 0.0))
    assert_close(*(jax.tree.map(np.asarray, fn(x, case, params)) for fn in grad_fns))


def test_buffers_hold_no_more_slots_than_a_group_has_tokens():
  rng = np.random.default_rng(8)
  params, x = make_params(rng, 4, 8, 12, 1), jnp.asarray(rng.normal(size=(3, 5, 8)), jnp.float32)
  routing, spec = make_token_choice(rng, 3, 5, 2, 4, capacity=50, ignored=0.1), types.MlpSpec()
  expected = run(by('grouped'), x, routing, params, spec)
  for method in ('einsum', 'capacity'):
    jaxpr = str(jax.make_jaxpr(lambda x, params: by(method)(x, routing, params, spec))(x, params))
    assert 'f32[4,15,12]' in jaxpr and 'f32[4,150,12]' not in jaxpr, jaxpr
    assert_close(run(by(method), x, routing, params, spec), expected)


def test_shared_capacity_has_one_group_of_all_tokens():
  rng = np.random.default_rng(6)
  params = make_params(rng, 3, 8, 12, 1)
  x = jnp.asarray(rng.normal(size=(4, 5, 8)), jnp.float32)
  routing = make_token_choice(rng, 1, 20, 2, 3, capacity=9)
  spec = types.MlpSpec(('relu',))
  expected = run(oracle, x.reshape(1, 20, 8), routing, params, spec)
  for method in ('einsum', 'capacity', 'grouped', 'auto'):
    np.testing.assert_allclose(
      run(by(method), x, routing, params, spec).reshape(1, 20, 8), expected, atol=1e-5
    )


@pytest.mark.full  # by default, test_layers.py compares the forms with dropout
def test_dropout_drops_the_same_units_in_every_form():
  rng = np.random.default_rng(7)
  params = make_params(rng, 4, 8, 33, 1)
  x = jnp.asarray(rng.normal(size=(2, 16, 8)), jnp.float32)
  spec = types.MlpSpec(('relu',), dropout_rate=0.4)
  routing = make_token_choice(rng, 2, 16, 2, 4, capacity=16)

  def loss(params, method, seed):
    y, _ = dispatch.apply_experts(
      x, routing, params, spec, method=method, dropout_rng=jax.random.key(seed)
    )
    return jnp.sum(y**2)

  step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  results = {
    (method, seed): step(params, method, seed)
    for method in ('einsum', 'capacity', 'grouped')
    for seed in (0, 1)
  }
  for seed in (0, 1):
    assert_close(results['capacity', seed], results['einsum', seed])
    assert_close(results['grouped', seed], results['einsum', seed])
  assert abs(results['grouped', 0][0] - results['grouped', 1][0]) > 1e-3
  # Compared with a mask drawn token by token: the mask does not depend on the position of a row.
  keep = dispatch.dropout_keep(jax.random.key(0), jnp.arange(64, dtype=jnp.int32), 33, 0.4)
  assert abs(np.mean(keep) - 0.6) < 0.03
  y = np.zeros((32, 8))
  for choice in range(64):
    expert = int(routing.expert_index.reshape(-1)[choice])
    hidden = np.maximum(
      np.asarray(x).reshape(32, 8)[choice // 2] @ np.asarray(params.wi[0][expert]), 0
    )
    hidden = hidden * np.asarray(keep[choice]) / (1 - round(0.4 * 65536) / 65536)
    y[choice // 2] += np.asarray(routing.gates).reshape(-1)[choice] * (
      hidden @ np.asarray(params.wo[expert])
    )
  np.testing.assert_allclose(results['grouped', 0][0], np.sum(y**2), rtol=1e-5)


def test_experts_that_choose_have_dropout_too():
  rng = np.random.default_rng(8)
  params = make_params(rng, 4, 8, 12, 1)
  x = jnp.asarray(rng.normal(size=(2, 16, 8)), jnp.float32)
  spec = types.MlpSpec(('relu',), dropout_rate=0.5)
  routing = make_expert_choice(rng, 2, 16, 4, 6)

  def dropping(method):
    return lambda x, routing, params, spec: dispatch.apply_experts(
      x, routing, params, spec, method=method, dropout_rng=jax.random.key(0)
    )[0]

  a, b = (run(dropping(method), x, routing, params, spec) for method in ('einsum', 'capacity'))
  np.testing.assert_allclose(a, b, atol=1e-5)
  assert np.max(np.abs(a - run(by('capacity'), x, routing, params, spec))) > 1e-2


def test_bfloat16_compute_keeps_float32_gradients_of_parameters():
  rng = np.random.default_rng(9)
  params = make_params(rng, 4, 8, 12, 2, biases=True)
  x = jnp.asarray(rng.normal(size=(1, 70, 8)), jnp.float32)
  routing = make_token_choice(rng, 1, 70, 2, 4)
  spec = types.MlpSpec(('gelu', 'linear'), dtype=jnp.bfloat16)
  shape = jax.eval_shape(
    lambda x, routing, params: by('grouped')(x, routing, params, spec), x, routing, params
  )
  assert shape.dtype == jnp.bfloat16
  got = loss_and_grads(by('grouped'), x, routing, params, spec)
  assert {g.dtype for g in jax.tree.leaves(got[1])} == {np.dtype('float32')}
  assert_close(
    got, loss_and_grads(oracle, x, routing, params, types.MlpSpec(('gelu', 'linear'))), tol=2e-2
  )


@pytest.mark.parametrize('method', ['einsum', 'capacity', 'grouped'])
def test_bfloat16_experts_multiply_bfloat16_tokens_and_sum_in_float32(method):
  rng = np.random.default_rng(9)
  params = jax.tree.map(lambda param: param.astype(jnp.bfloat16), make_params(rng, 4, 64, 64, 1))
  routing = make_token_choice(rng, 1, 40, 1, 4, capacity=40)
  x = jnp.asarray(rng.normal(size=(1, 40, 64)), jnp.bfloat16).astype(jnp.float32)
  # Whole hidden units of 1 to 3 digits, which bfloat16 holds, so that only sums and the last product may round.
  params = params.replace(wi=(jnp.round(params.wi[0] * 2),))
  x = jnp.round(x)
  got = run(by(method), x, routing, params, types.MlpSpec(('relu',)))
  wide = jax.tree.map(lambda param: param.astype(jnp.float32), params)
  assert got.dtype == jnp.float32
  assert_close(got, run(oracle, x, routing, wide, types.MlpSpec(('relu',))), tol=1e-6)
  # The tokens are rounded like the experts.
  assert_close(
    got, run(by(method), x * (1 + 2.0**-12), routing, params, types.MlpSpec(('relu',))), tol=1e-6
  )


def test_grouped_mlp_leaves_rows_past_the_end_at_zero():
  rng = np.random.default_rng(10)
  params = make_params(rng, 3, 8, 12, 1, biases=True)
  rows = jnp.asarray(rng.normal(size=(40, 8)), jnp.float32)
  sizes = jnp.asarray([7, 0, 12], jnp.int32)
  spec = types.MlpSpec(('gelu',))

  def loss(rows, params):
    y = dispatch.grouped_mlp(params, rows, sizes, spec)
    return jnp.sum(y**2), y

  (_, y), (rows_grad, params_grad) = jax.jit(
    jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  )(rows, params)
  by_expert = [np.asarray(one_expert(params, rows, expert, spec)) for expert in range(3)]
  np.testing.assert_allclose(y[:7], by_expert[0][:7], atol=1e-5)
  np.testing.assert_allclose(y[7:19], by_expert[2][7:19], atol=1e-5)
  assert (
    not np.any(y[19:]) and not np.any(rows_grad[19:]) and np.all(np.any(rows_grad[:19], axis=1))
  )
  assert not any(np.any(g[1]) for g in jax.tree.leaves(params_grad))
  none = dispatch.grouped_mlp(params, rows[:0], jnp.zeros(3, jnp.int32), spec)
  assert none.shape == (0, 8)


def one_expert(params, rows, expert, spec):
  one = jax.tree.map(lambda p: p[expert][None], params)
  return dispatch.batched_mlp(one, rows[None], spec)[0]


def test_batches_and_raises_for_second_derivatives():
  rng = np.random.default_rng(11)
  params = make_params(rng, 3, 8, 12, 1)
  rows = jnp.asarray(rng.normal(size=(2, 20, 8)), jnp.float32)
  sizes = jnp.asarray([[5, 10, 5], [20, 0, 0]], jnp.int32)
  fn = jax.jit(
    lambda rows, sizes: dispatch.grouped_mlp(params, rows, sizes, types.MlpSpec(('relu',)))
  )
  alone = np.stack([fn(*args) for args in zip(rows, sizes, strict=True)])
  np.testing.assert_allclose(jax.vmap(fn)(rows, sizes), alone, atol=1e-6)

  def loss(rows):
    return jnp.sum(fn(rows, sizes[0]) ** 2)

  with pytest.raises(ConfigError, match='no second derivatives'):
    jax.grad(lambda rows: jnp.sum(jax.grad(loss)(rows)))(rows[0])
  with pytest.raises(TypeError, match='forward-mode'):
    jax.jvp(loss, (rows[0],), (rows[0],))


def test_errors():
  rng = np.random.default_rng(12)
  params, spec = make_params(rng, 3, 8, 12, 1), types.MlpSpec(('relu',))
  x = jnp.zeros((1, 6, 8))
  dropless, dropping = (
    make_token_choice(rng, 1, 6, 1, 3),
    make_token_choice(rng, 1, 6, 1, 3, capacity=4),
  )
  for method, match in (
    ('ragged_dot', 'every row with every expert'),
    ('einsum', 'dropless'),
    ('capacity', 'capacity factor'),
    ('groupd', "Did you mean 'grouped'"),
  ):
    with pytest.raises(ConfigError, match=match):
      by(method)(x, dropless, params, spec)
  for backend in ('gpu', 'tpu'):
    assert dispatch.select_method('auto', dropping, backend) == 'capacity'
    assert dispatch.select_method('auto', dropless, backend) == 'grouped'
  with pytest.raises(ConfigError, match="dispatch='capacity'"):
    dispatch.select_method('auto', dropless, 'metal')
  assert dispatch.select_method('auto', dropless, 'cpu') == 'grouped'
  with pytest.raises(ConfigError, match='every row with every expert'):
    dispatch.grouped_mlp(params, x[0], jnp.zeros(3, jnp.int32), spec, method='ragged_dot')
  with pytest.raises(ConfigError, match='and 5 tokens, those of x, got .3, 6.'):
    by('auto')(x[:, :5], dropless, params, spec)
  with pytest.raises(ConfigError, match='of 2 experts, those of params, .*got .3, 6.'):
    by('auto')(x, dropless, make_params(rng, 2, 8, 12, 1), spec)
  with pytest.raises(ConfigError, match='`MlpParams.wo` must be of shape .*inputs of size 8'):
    by('auto')(x, dropless, params.replace(wo=params.wo[:, :, :7]), spec)
  with pytest.raises(ConfigError, match='`MlpParams.wi` must be of shape'):
    by('auto')(x, dropless, params, types.MlpSpec(('relu', 'linear')))
  with pytest.raises(ConfigError, match='receive_factor'):
    dispatch.apply_experts(x, dropless, params, spec, receive_factor=0.0)
  for options, match in (
    ({'activations': 'relu'}, 'tuple'),
    ({'activations': ('rely',)}, "'relu'"),
    ({'dropout_rate': 1.0}, 'dropout_rate'),
    ({'dtype': jnp.int32}, 'floating'),
  ):
    with pytest.raises(ConfigError, match=match):
      types.MlpSpec(**options)


# ---- Model FLOPs -----------------------------------------------------------------------------------------------------

_SIZES = dict(num_encoder_layers=1, num_decoder_layers=1)


def _trainer(block, num_expert_partitions=1):
  network = moe.sparse_transformer(
    network_cases.tiny_config(**flops_cases.WIDE, **_SIZES),
    block,
    num_encoder_sparse_layers=1,
    num_decoder_sparse_layers=1,
  )
  mesh = flops_cases.mesh_of(1, num_expert_partitions, 1, axes=('data', 'expert', 'model'))
  return flops_cases.make_trainer(
    network,
    model_cls=models.MoeEncoderDecoderModel,
    partitioner=partitioner.MoePjitPartitioner(
      num_expert_partitions=num_expert_partitions, mesh=mesh
    ),
  )


def _model_flops(router, num_expert_partitions=1, **fields):
  block = moe.SparseBlock(num_experts=4, router=router, **fields)
  trainer, batch = _trainer(block, num_expert_partitions)
  return trainer.count_flops(batch).total


@pytest.mark.parametrize('num_selected', [1, 2])
def test_model_flops_are_those_of_the_chosen_experts(num_selected):
  router = routing_lib.TokensChooseRouter(4, num_selected=num_selected)
  mlp_dim = num_selected * flops_cases.WIDE['mlp_dim']
  twin = flops_cases.count(flops_cases.t5_network(**_SIZES, mlp_dim=mlp_dim))
  tokens = flops_cases.ROWS * (flops_cases.INPUTS + flops_cases.TARGETS)
  of_routers = 6 * tokens * flops_cases.WIDE['emb_dim'] * 4
  for fields in (
    {},
    dict(train_capacity_factor=2.0, eval_capacity_factor=2.0),
    dict(train_capacity_factor=2.0, eval_capacity_factor=2.0, dispatch='einsum'),
    dict(num_expert_partitions=2),
  ):
    assert _model_flops(router, **fields) == twin + of_routers


# A slot for each choice.
_FULL_BUFFERS = dict(train_capacity_factor=1.0, eval_capacity_factor=1.0)


@pytest.mark.full
def test_xla_counts_the_same_with_full_buffers():
  router = routing_lib.TokensChooseRouter(4)
  trainer, batch = _trainer(moe.SparseBlock(num_experts=4, router=router, **_FULL_BUFFERS))
  counted = trainer.count_flops(batch).total
  traced = flops_cases.trace(trainer, batch)
  assert counted == flops_cases.products(traced)
  assert counted == flops_cases.flops_by_xla(traced)


def test_model_flops_of_expert_choice_are_those_of_its_slots():
  chosen, twin = (
    _model_flops(router(4), **_FULL_BUFFERS)
    for router in (routing_lib.ExpertsChooseRouter, routing_lib.TokensChooseRouter)
  )
  assert chosen == twin
  masks = _model_flops(routing_lib.ExpertsChooseRouter(4), dispatch='einsum', **_FULL_BUFFERS)
  assert masks == chosen
