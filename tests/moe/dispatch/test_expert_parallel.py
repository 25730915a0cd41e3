"""Dropless dispatch on meshes against one device: results, gradients, drops, and the communication of the programs."""

import re

from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from moe import dispatch
from moe import rules
from moe.dispatch import exchange
from moe.dispatch import expert_parallel
from moe.dispatch.types import MlpSpec
from t5x_lite.errors import ConfigError
from tests.moe.dispatch.test_apply import assert_close
from tests.moe.dispatch.test_apply import make_expert_choice
from tests.moe.dispatch.test_apply import make_params
from tests.moe.dispatch.test_apply import make_token_choice

_HEAD = tuple(rules.head_logical_axis_rules(activation_partitioning_dims=1))
# Rules of the first form; with two data axes, and with one.
_TWO_DATA = (
  ('batch', ('data', 'model')),
  ('expert', 'data'),
  ('expert_mlp', None),
  ('expert_replicas', 'model'),
)
_ONE_DATA = (('batch', 'data'), ('expert', 'data'), ('expert_mlp', 'model'))


def _mesh(shape, names=('data', 'expert', 'model')):
  return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def _case(
  seed=0, *, num_experts=8, num_selected=2, groups=4, tokens=16, width=8, hidden=12, **options
):
  rng = np.random.default_rng(seed)
  params = make_params(rng, num_experts, width, hidden, 2, biases=True)
  x = jnp.asarray(rng.normal(size=(groups, tokens, width)), jnp.float32)
  routing = make_token_choice(rng, groups, tokens, num_selected, num_experts, **options)
  return x, routing, params


def _run(x, routing, params, spec=MlpSpec(('gelu', 'linear')), **options):
  """Return (y, drops), and gradients of x, gates and parameters."""
  weights = jnp.asarray(np.random.default_rng(1).normal(size=x.size).reshape(x.shape), jnp.float32)

  def loss(x, gates, params, routing):
    y, stats = dispatch.apply_experts(x, routing.replace(gates=gates), params, spec, **options)
    y32 = y.astype(jnp.float32)
    return jnp.sum(weights * y32 + 0.5 * y32**2), (y, stats.receive_drops)

  (_, outputs), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(
    x, routing.gates, params, routing
  )
  return outputs, grads


def _on_mesh(mesh, axis_rules, *args, **options):
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(axis_rules):
    return jax.device_get(_run(*args, **options))


_MESHES = {
  'data': ((8, 1, 1), _HEAD),
  'expert': ((1, 8, 1), _HEAD),
  'data and expert': ((2, 4, 1), _HEAD),
  'all three': ((2, 2, 2), _HEAD),
  'model': ((1, 1, 8), _HEAD),
  'experts along data': ((4, 1, 2), _ONE_DATA),
  'two data axes': ((4, 1, 2), _TWO_DATA),
}


@pytest.mark.parametrize(
  'name',
  [
    'two data axes',
    *(pytest.param(name, marks=pytest.mark.full) for name in _MESHES if name != 'two data axes'),
  ],
)
def test_mesh_makes_no_difference(name):
  shape, axis_rules = _MESHES[name]
  x, routing, params = _case(ignored=0.1, skew=[5, 1, 1, 1, 1, 1, 1, 0.1], hidden=16)
  key = jax.random.key(3)
  spec = MlpSpec(('gelu', 'linear'), dropout_rate=0.3)
  expected = _run(x, routing, params, spec, dropout_rng=key)
  got = _on_mesh(_mesh(shape), axis_rules, x, routing, params, spec, dropout_rng=key)
  assert_close(got, expected, tol=3e-6)


@pytest.mark.full  # by default, the small buffer above
@pytest.mark.parametrize('method', [pytest.param('capacity', marks=pytest.mark.full), 'einsum'])
@pytest.mark.parametrize('kind', [pytest.param('tokens', marks=pytest.mark.full), 'experts'])
@pytest.mark.parametrize(
  'name',
  [
    'all three',
    *(pytest.param(name, marks=pytest.mark.full) for name in _MESHES if name != 'all three'),
  ],
)
def test_buffers_on_meshes(name, kind, method):
  shape, axis_rules = _MESHES[name]
  x, routing, params = _case(ignored=0.1, capacity=3, groups=8, tokens=8, hidden=16)
  if kind == 'experts':
    routing = make_expert_choice(np.random.default_rng(4), 8, 8, 8, 3)
  key, spec = jax.random.key(3), MlpSpec(('gelu', 'linear'), dropout_rate=0.3)
  expected = _run(x, routing, params, spec, dropout_rng=key)
  got = _on_mesh(_mesh(shape), axis_rules, x, routing, params, spec, dropout_rng=key, method=method)
  assert_close(got, expected, tol=3e-6)


def _sharded(mesh, axis_rules, x, routing, params):
  """Return the arguments where the rules put them."""
  layout = dict(reversed(axis_rules))

  def put(tree, *axes):
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*axes)))

  routing = routing.replace(auxiliary_loss=None, router_z_loss=None)
  x, routing = (
    put(x, layout['batch']),
    put(routing, None if len(routing.gates) == 1 else layout['batch']),
  )
  wide, narrow = (
    (layout['expert'], None, layout['expert_mlp']),
    (layout['expert'], layout['expert_mlp']),
  )
  return (
    x,
    routing,
    params.replace(
      wi=put(params.wi, *wide),
      wo=put(params.wo, *narrow),
      wi_bias=put(params.wi_bias, *narrow),
      wo_bias=put(params.wo_bias, layout['expert']),
    ),
  )


def _program(mesh, axis_rules, x, routing, params, **options):
  """Return the compiled text of loss and gradients."""
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(axis_rules):
    x, routing, params = _sharded(mesh, axis_rules, x, routing, params)

    def loss(x, gates, params, routing):
      y, _ = dispatch.apply_experts(
        x, routing.replace(gates=gates), params, MlpSpec(('gelu', 'linear')), **options
      )
      return jnp.sum(y**2)

    shardings = jax.tree.map(lambda array: array.sharding, (x, routing.gates, params))
    return (
      jax.jit(jax.grad(loss, argnums=(0, 1, 2)), out_shardings=shardings)
      .lower(x, routing.gates, params, routing)
      .compile()
      .as_text()
    )


@pytest.mark.parametrize(('capacity', 'method'), [(None, 'auto'), (4, 'auto'), (4, 'einsum')])
def test_tokens_move_and_weights_stay(capacity, method):
  # Unique dims, so that a shape identifies an array in the program.
  x, routing, params = _case(
    num_experts=8, groups=8, tokens=4, width=24, hidden=52, capacity=capacity
  )
  program = _program(_mesh((2, 4, 1)), _HEAD, x, routing, params, method=method)
  assert re.search(r'\ball-to-all', program)
  assert not re.search(r'= \S*\[8,(24,52|52,24)\]', program), 'all experts on one device'
  gathered = re.findall(r'= (\S+) all-gather', program)
  assert not [shape for shape in gathered if '24' in shape or '52' in shape], gathered
  assert re.search(r'\[2,24,52\]', program), 'two experts on each of four devices'


@pytest.mark.parametrize('method', [pytest.param('capacity', marks=pytest.mark.full), 'einsum'])
def test_groups_that_span_devices_gather_nothing(method):
  """One group of all tokens, a capacity that drops: the same drops, and rows travel."""
  x, routing, params = _case(
    num_experts=8, groups=1, tokens=32, width=24, hidden=52, capacity=5, ignored=0.1
  )
  assert 0.1 < routing.dropped_fraction() < 0.9
  spec, key = MlpSpec(('gelu', 'linear'), dropout_rate=0.3), jax.random.key(3)
  expected = _run(x, routing, params, spec, dropout_rng=key, method=method)
  args = x.reshape(8, 4, 24), routing, params
  (y, drops), grads = _on_mesh(_mesh((2, 4, 1)), _HEAD, *args, spec, dropout_rng=key, method=method)
  assert drops == 0
  assert_close(
    ((y.reshape(x.shape), drops), (grads[0].reshape(x.shape), *grads[1:])), expected, tol=3e-6
  )
  program = _program(_mesh((2, 4, 1)), _HEAD, *args, method=method)
  gathered = re.findall(r'= (\S+) all-gather', program)
  assert not [shape for shape in gathered if '24' in shape or '52' in shape], gathered
  # A device receives no more than its two experts have places for: 10 rows, not the 32 of the worst case.
  assert re.search(r'= f32\[10,24\]', program)


def test_tokens_that_do_not_divide_are_on_all_devices():
  # 15 tokens; steps of decoding have few too.
  x, routing, params = _case(groups=1, tokens=15, hidden=16)
  key, spec = jax.random.key(3), MlpSpec(('gelu', 'linear'), dropout_rate=0.3)
  expected = _run(x, routing, params, spec, dropout_rng=key)
  shape, axis_rules = _MESHES['two data axes']
  assert_close(
    _on_mesh(_mesh(shape), axis_rules, x, routing, params, spec, dropout_rng=key),
    expected,
    tol=3e-6,
  )
  with jax.set_mesh(_mesh((2, 2, 2))), nn_partitioning.axis_rules(_HEAD):
    layouts = [expert_parallel.find_layout(tokens, 8, 16) for tokens in (16, 6, 15)]
    assert [layout.token_axes for layout in layouts] == [('expert', 'data'), ('data',), ()]
    assert [layout.moves_tokens for layout in layouts] == [True, False, False]
    assert expert_parallel.find_layout(16, 8, 15).mlp_axes == ()


@pytest.mark.full
def test_bfloat16():
  x, routing, params = _case(hidden=16)
  spec = MlpSpec(('gelu', 'linear'), dtype=jnp.bfloat16)
  got = _on_mesh(_mesh((2, 2, 2)), _HEAD, x, routing, params, spec)
  (y, _), (_, _, params_grad) = got
  assert y.dtype == jnp.bfloat16 and all(
    leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params_grad)
  )
  assert_close(got, _run(x, routing, params, MlpSpec(('gelu', 'linear'))), tol=2e-2)


def _numpy_admitted(index, num_shards, num_experts, num_rows, block):
  """Return which choices [shards, choices] find a place, by a plain reading of `admitted`; int64 fractions."""
  kept = np.zeros(index.shape, bool)
  local = num_experts // num_shards
  for receiver in range(num_shards):
    experts = range(receiver * local, (receiver + 1) * local)
    counts = np.array([[np.sum(index[s] == e) for e in experts] for s in range(num_shards)])
    for s in range(num_shards):
      for j, e in enumerate(experts):
        share = min(1.0, num_rows / max(counts.sum(), 1), block / max(counts[s].sum(), 1))
        number = counts[s, j] if share == 1.0 else int(np.floor(counts[s, j] * share * (1 - 1e-6)))
        kept[s, np.flatnonzero(index[s] == e)[:number]] = True
  return kept


@pytest.mark.parametrize('factor', [0.6, pytest.param(1.2, marks=pytest.mark.full)])
def test_a_small_receive_buffer_drops_and_says_so(factor):
  x, routing, params = _case(ignored=0.1, skew=[9, 6, 1, 1, 1, 1, 1, 1])
  shape = (1, 4, 2)
  got = _on_mesh(_mesh(shape), _HEAD, x, routing, params, receive_factor=factor)
  index = np.asarray(routing.expert_index).reshape(4, -1)
  num_rows, block = expert_parallel.num_receive_rows(16, 2, 2, 4, factor)
  kept = _numpy_admitted(index, 4, 8, num_rows, block)
  for receiver in range(4):
    assert np.sum(kept & (index // 2 == receiver)) <= num_rows
  chosen = index < 8
  drops = 1 - np.sum(kept & chosen) / np.sum(chosen)
  assert 0.05 < drops < 0.6
  np.testing.assert_allclose(got[0][1], drops, rtol=1e-6)
  dropped = routing.replace(
    expert_index=jnp.where(kept.reshape(routing.expert_index.shape), routing.expert_index, 8)
  )
  (y, _), grads = _run(x, dropped, params)
  kept_gates = jnp.where(kept.reshape(routing.gates.shape), grads[1], 0.0)
  assert_close((got[0][0], got[1]), (y, (grads[0], kept_gates, grads[2])))


@pytest.mark.full
def test_choices_that_are_not_distinct_are_counted():
  # More choices for a device than it has experts: no router makes them, a record from elsewhere could.
  x, routing, params = _case(num_experts=4, num_selected=2)
  routing = routing.replace(expert_index=jnp.zeros_like(routing.expert_index))
  (_, drops), _ = _on_mesh(_mesh((2, 4, 1)), _HEAD, x, routing, params)
  # A half, plus rounding: at most one row of each sender for each expert.
  assert 0.5 <= drops <= 0.5 + 8 / 128


def test_receive_rows_hold_the_admitted_choices():
  rng = np.random.default_rng(0)
  for i in range(60):
    num_shards, local = [(1, 4), (4, 2), (8, 1)][i % 3]
    counts = rng.integers(0, 3 ** rng.integers(1, 12), (num_shards, num_shards * local)).astype(
      np.int32
    )
    num_rows, block = int(rng.integers(1, counts.sum() + 2)), int(rng.integers(1, counts.sum() + 2))
    kept = np.asarray(expert_parallel.admitted(jnp.asarray(counts), num_shards, num_rows, block))
    by_pair = kept.reshape(num_shards, num_shards, local).sum(2)
    assert (
      np.all(kept <= counts) and np.all(by_pair <= block) and np.all(by_pair.sum(0) <= num_rows)
    )
    if (
      counts.reshape(num_shards, num_shards, local).sum((0, 2)).max() <= num_rows
      and counts.sum() <= block
    ):
      np.testing.assert_array_equal(kept, counts)


def test_errors():
  x, routing, params = _case(num_experts=6)
  with pytest.raises(
    ConfigError, match='must be a multiple of 4, the devices .*got 6. Alternatively, use 2 expert'
  ):
    _on_mesh(_mesh((2, 4, 1)), _HEAD, x, routing, params)
  with pytest.raises(ConfigError, match='receive_factor` must be a number > 0 or None, got 0'):
    _on_mesh(_mesh((2, 2, 2)), _HEAD, x, routing, params, receive_factor=0)
  with pytest.raises(ConfigError, match="form` must be .*got 'raged'. Did you mean 'ragged'"):
    exchange.exchange(x[0], jnp.zeros((1, 1), jnp.int32), 1, 1, ('expert',), 'raged')


# ---- The exchange ----------------------------------------------------------------------------------------------------


def _exchanged(mesh, form, rows, sizes, num_received, block):
  """Return what every shard receives, and the gradient of a weighted sum of it."""
  axes = mesh.axis_names
  spec = PartitionSpec(axes)
  send = jax.shard_map(
    lambda rows, sizes: exchange.exchange(rows, sizes, num_received, block, axes, form),
    mesh=mesh,
    in_specs=(spec, PartitionSpec()),
    out_specs=spec,
    check_vma=False,
  )

  def loss(rows):
    received = send(rows, sizes)
    weights = jnp.arange(received.size, dtype=jnp.float32).reshape(received.shape)
    return jnp.sum(weights * received), received

  return jax.jit(jax.grad(loss, has_aux=True))


def _exchange_case(num_shards):
  rng = np.random.default_rng(0)
  sizes = rng.integers(0, 6, (num_shards, num_shards)).astype(np.int32)
  num_rows, num_received, block = (
    int(sizes.sum(1).max()) + 2,
    int(sizes.sum(0).max()) + 1,
    int(sizes.max()),
  )
  rows = rng.normal(size=(num_shards * num_rows, 3)).astype(np.float32)
  return rows, sizes, num_received, block


def _check_exchange(mesh, form):
  num_shards = mesh.size
  rows, sizes, num_received, block = _exchange_case(num_shards)
  grad, received = _exchanged(mesh, form, rows, sizes, num_received, block)(rows)
  parts, grad = rows.reshape(num_shards, -1, 3), np.asarray(grad).reshape(num_shards, -1, 3)
  weights = np.arange(received.size, dtype=np.float32).reshape(num_shards, num_received, 3)
  expected_grad, starts = np.zeros_like(parts), np.cumsum(sizes, axis=1) - sizes
  for r, got in enumerate(np.asarray(received).reshape(num_shards, num_received, 3)):
    place = 0
    for s in range(num_shards):
      source = slice(starts[s, r], starts[s, r] + sizes[s, r])
      np.testing.assert_array_equal(got[place : place + sizes[s, r]], parts[s, source])
      expected_grad[s, source] = weights[r, place : place + sizes[s, r]]
      place += sizes[s, r]
    assert not np.any(got[place:])
  np.testing.assert_array_equal(grad, expected_grad)


def test_exchange_by_blocks():
  _check_exchange(_mesh((8,), ('expert',)), 'blocks')


@pytest.mark.full
def test_exchange_by_blocks_along_two_axes():
  _check_exchange(_mesh((2, 4), ('a', 'b')), 'blocks')


@pytest.mark.skipif(
  jax.default_backend() == 'cpu' or jax.device_count() < 2,
  reason='CPUs have no ragged all-to-all, and it takes two devices',
)
def test_ragged_exchange():
  _check_exchange(_mesh((jax.device_count(),), ('expert',)), 'ragged')


@pytest.mark.parametrize('platform', ['cuda', 'tpu'])
def test_ragged_exchange_lowers(platform):
  assert exchange.select_form('cpu') == 'blocks' and exchange.select_form('gpu') == 'ragged'
  mesh = _mesh((8,), ('expert',))
  rows, sizes, num_received, block = _exchange_case(8)
  fn = _exchanged(mesh, 'ragged', rows, sizes, num_received, block)
  program = fn.trace(jnp.asarray(rows)).lower(lowering_platforms=(platform,)).as_text()
  assert program.count('ragged_all_to_all') >= 2 and '"stablehlo.all_to_all"' not in program


def test_ragged_offsets(monkeypatch):
  """The offsets that the ragged collective receives, applied in NumPy because CPUs do not support it."""
  rows, sizes, num_received, block = _exchange_case(4)
  parts, told = rows.reshape(4, -1, 3), {}

  def record(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    told[shard] = [
      np.asarray(a)
      for a in (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    ]
    return output

  monkeypatch.setattr(jax.lax, 'ragged_all_to_all', record)
  monkeypatch.setattr(jax.lax, 'axis_index', lambda axis_name: shard)
  for shard in range(4):
    exchange.exchange(
      jnp.asarray(parts[shard]), jnp.asarray(sizes), num_received, block, ('expert',), 'ragged'
    )
  outputs = {r: told[r][1].copy() for r in told}
  for s, (operand, _, input_offsets, send_sizes, output_offsets, _) in told.items():
    for r in range(4):
      assert send_sizes[r] == told[r][5][s]
      outputs[r][output_offsets[r] : output_offsets[r] + send_sizes[r]] = operand[
        input_offsets[r] : input_offsets[r] + send_sizes[r]
      ]
  monkeypatch.undo()
  _, expected = _exchanged(_mesh((4,), ('expert',)), 'blocks', rows, sizes, num_received, block)(
    rows
  )
  np.testing.assert_array_equal(np.concatenate([outputs[r] for r in range(4)]), expected)
