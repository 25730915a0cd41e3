"""Work of the grouped kernels follows the rows that exist, with any number of expert partitions and any loads."""

import functools
import itertools

from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from moe import dispatch
from moe.dispatch import accelerators
from moe.dispatch import grouped
from moe.dispatch import tiles
from moe.dispatch.accelerators import PaddedBlocks
from moe.dispatch.mlp import DropoutMask
from moe.dispatch.types import MlpSpec
from moe.routing import plan as plans
from t5x_lite.errors import ConfigError
from tests.moe.dispatch.test_apply import assert_close
from tests.moe.dispatch.test_apply import make_params
from tests.moe.dispatch.test_apply import make_token_choice

# Products of a gated MLP's forward and derivative over those without the projections that the derivative repeats.
_AGAIN_GATED = 11 / 9
_GATED = MlpSpec(('gelu', 'linear'), dropout_rate=0.2)


def _work(blocks, *loads):
  """Return the rows that are multiplied over those that exist, for loads of experts int [E]."""
  num_rows = (
    blocks.num_tiles * blocks.tile_rows * sum(int(blocks.num_blocks(sizes)) for sizes in loads)
  )
  return num_rows / np.sum(loads)


def test_padded_multiplies_at_most_twice_as_much_with_balanced_loads():
  rng = np.random.default_rng(0)
  for num_experts, rows in itertools.product(
    (1, 2, 3, 8, 9, 17, 64), (8, 9, 13, 20, 33, 64, 100, 515, 830, 4000)
  ):
    blocks = PaddedBlocks.for_rows(num_experts * rows, num_experts)
    assert blocks.num_tiles <= num_experts
    assert _work(blocks, np.full(num_experts, rows)) * _AGAIN_GATED <= 2, (num_experts, rows)
    drawn = rng.poisson(rows, (20, num_experts))
    assert _work(blocks, *drawn) * _AGAIN_GATED <= 2, (num_experts, rows)


@functools.cache
def _counted(num_partitions):
  """Return a function to (gradients, blocks in forward and derivative) for a buffer of `num_partitions` shares."""
  counts = []
  params = make_params(np.random.default_rng(0), 8, 8, 12, 2, biases=True)
  rows = jnp.asarray(np.random.default_rng(1).normal(size=(num_partitions * 80, 8)), jnp.float32)

  def mlp(*args):
    jax.debug.callback(lambda: counts.append(1))
    return dispatch.batched_mlp(*args)

  def loss(params, rows, sizes):
    return jnp.sum(
      accelerators.padded_mlp(params, rows, sizes, MlpSpec(('gelu', 'linear')), None, 80) ** 2
    )

  grad_fn = jax.jit(jax.grad(loss, argnums=(0, 1)))

  def run(sizes):
    counts.clear()
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(accelerators, 'batched_mlp', mlp)
      grads = jax.block_until_ready(grad_fn(params, rows, jnp.asarray(sizes, jnp.int32)))
      jax.effects_barrier()
    return grads, len(counts)

  return run


@pytest.mark.parametrize('num_partitions', [1, 64])
def test_executed_blocks_do_not_grow_with_the_buffer(num_partitions):
  """Ten rows for each of eight experts: a tile of 12 each, one per block."""
  run = _counted(num_partitions)
  assert PaddedBlocks.for_rows(80, 8) == PaddedBlocks(12, 1)
  assert run([10] * 8)[1] == 2 * 8
  assert run([30, 0, 0, 0, 0, 0, 0, 1])[1] == 2 * 4
  assert run([0] * 8)[1] == 0
  full = run([num_partitions * 80 - 7, 7, 0, 0, 0, 0, 0, 0])
  assert full[1] == 2 * (-(-(num_partitions * 80 - 7) // 12) + 1)


_KERNELS = {
  'padded': accelerators.padded_mlp,
  'tiles': tiles.tiled_mlp,
  'products': functools.partial(
    accelerators.mlp_by_products, lambda rows, kernels, sizes: _leaving_nans(rows, kernels, sizes)
  ),
}


def _leaving_nans(rows, kernels, sizes):
  expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows.shape[0]), side='right')
  y = jnp.einsum('ni,nio->no', rows, jnp.take(kernels, expert, axis=0, mode='clip'))
  return jnp.where((expert < kernels.shape[0])[:, None], y, jnp.nan)


@pytest.mark.parametrize('kernel', _KERNELS)
def test_any_loads_give_the_same_as_one_block_of_all_experts(kernel):
  """A buffer of 700 rows and a share of 90: one to three blocks, experts across their ends, and empty ones."""
  params = make_params(np.random.default_rng(0), 4, 8, 12, 2, biases=True)
  rows = jnp.asarray(np.random.default_rng(1).normal(size=(700, 8)), jnp.float32)
  keep = DropoutMask(jax.random.key(0), jnp.arange(700), 12, 0.2)
  weights = jnp.asarray(np.random.default_rng(2).normal(size=rows.shape), jnp.float32)

  def grads_of(mlp_fn):
    def loss(params, rows, sizes):
      y = mlp_fn(params, rows, sizes)
      return jnp.sum(weights * y + 0.5 * y**2), y

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

  def every_expert_on_every_row(params, rows, sizes):
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(700), side='right')
    y = dispatch.batched_mlp(
      params,
      jnp.broadcast_to(rows, (4, *rows.shape)),
      _GATED,
      jnp.broadcast_to(keep.of_all(), (4, 700, 12)),
    )
    return jnp.einsum('end,ne->nd', y, jax.nn.one_hot(expert, 4))

  got, expected = (
    grads_of(lambda params, rows, sizes: _KERNELS[kernel](params, rows, sizes, _GATED, keep, 90)),
    grads_of(every_expert_on_every_row),
  )
  for sizes in ([22, 23, 22, 23], [0, 260, 0, 90], [0, 0, 0, 0], [700, 0, 0, 0], [0, 0, 1, 699]):
    sizes = jnp.asarray(sizes, jnp.int32)
    assert_close(got(params, rows, sizes), expected(params, rows, sizes))


def test_tokens_are_read_by_index():
  rng = np.random.default_rng(3)
  params, tokens = make_params(rng, 4, 8, 12, 1), jnp.asarray(rng.normal(size=(40, 8)), jnp.float32)
  gates = jnp.asarray(rng.uniform(size=(40, 2)), jnp.float32)
  plan, sizes = plans.sort_by_expert(jnp.asarray(rng.integers(0, 5, 80), jnp.int32), 4)

  def grads_of(method):
    return jax.jit(
      jax.grad(
        lambda params, tokens, gates: jnp.sum(
          grouped.grouped_tokens(
            params, tokens, gates, plan, sizes, MlpSpec(('gelu',)), method=method, balanced_rows=20
          )
          ** 2
        ),
        argnums=(0, 1, 2),
      )
    )(params, tokens, gates)

  assert_close(grads_of('padded'), grads_of('tiles'))


def test_batches_and_raises_for_second_derivatives():
  params = make_params(np.random.default_rng(11), 3, 8, 12, 1)
  rows = jnp.asarray(np.random.default_rng(12).normal(size=(2, 20, 8)), jnp.float32)
  sizes = jnp.asarray([[5, 10, 5], [20, 0, 0]], jnp.int32)
  fn = jax.jit(lambda rows, sizes: accelerators.padded_mlp(params, rows, sizes, MlpSpec(('relu',))))
  alone = np.stack([fn(*args) for args in zip(rows, sizes, strict=True)])
  np.testing.assert_allclose(jax.vmap(fn)(rows, sizes), alone, atol=1e-6)
  with pytest.raises(ConfigError, match='no second derivatives'):
    jax.grad(lambda rows: jnp.sum(jax.grad(lambda rows: jnp.sum(fn(rows, sizes[0])))(rows)))(
      rows[0]
    )


_RULES = (
  ('batch', ('expert', 'data')),
  ('expert', 'expert'),
  ('expert_replicas', 'data'),
  ('expert_mlp', 'model'),
  ('embed', None),
)


def _on_expert_partitions(fn, num_partitions, *args):
  """Return `fn` lowered and compiled with (x, gates, parameters) on a mesh of expert partitions."""
  mesh = jax.make_mesh(
    (1, num_partitions, 1),
    ('data', 'expert', 'model'),
    axis_types=(AxisType.Auto,) * 3,
    devices=jax.devices()[:num_partitions],
  )
  sharding = NamedSharding(mesh, PartitionSpec('expert'))
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(_RULES):
    return jax.jit(fn, in_shardings=sharding).lower(*args).compile()


def test_compiled_work_and_memory_do_not_grow_with_partitions(monkeypatch):
  """FLOPs of the compiled program, which counts each loop once, times the number of its blocks with balanced loads."""
  monkeypatch.setitem(grouped.KERNELS_OF_BACKEND, 'cpu', ('padded',))
  tokens, width, hidden, num_experts = 512, 64, 128, 16
  results = {}
  for num_partitions in (2, 8):
    routing = make_token_choice(np.random.default_rng(0), num_partitions, tokens, 1, num_experts)
    params = jax.eval_shape(
      lambda: make_params(np.random.default_rng(0), num_experts, width, hidden, 1)
    )

    def loss(x, gates, params, routing=routing):
      y, _ = dispatch.apply_experts(
        x, routing.replace(gates=gates), params, MlpSpec(('relu',)), method='grouped'
      )
      return jnp.sum(y**2)

    compiled = _on_expert_partitions(
      jax.value_and_grad(loss, argnums=(0, 1, 2)),
      num_partitions,
      jax.ShapeDtypeStruct((num_partitions, tokens, width), jnp.float32),
      routing.gates,
      params,
    )
    experts = num_experts // num_partitions
    blocks = PaddedBlocks.for_rows(tokens, experts)
    num_blocks = int(blocks.num_blocks(np.full(experts, tokens // experts)))
    ideal = 3 * 2 * 2 * tokens * width * hidden
    results[num_partitions] = (
      compiled.cost_analysis()['flops'] * num_blocks / ideal,
      compiled.memory_analysis().temp_size_in_bytes,
    )
  assert results[8][0] < 2 and results[2][0] < 2, results
  # A row of the worst-case buffer costs its width a few times, not the hidden units.
  extra_rows = (8 - 2) * tokens
  assert results[8][1] - results[2][1] < 4 * extra_rows * (7 * width), results


@pytest.mark.parametrize('kernel', ['padded', 'interpreted megablox'])
def test_all_tokens_on_one_device_drop_nothing(kernel, monkeypatch):
  """The worst case of a receive buffer, at the other end of the balanced one."""
  width, hidden = (8, 12) if kernel == 'padded' else (128, 128)
  params = make_params(np.random.default_rng(0), 8, width, hidden, 1)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 160, width)), jnp.float32)
  spec = MlpSpec(('gelu',))
  if kernel != 'padded':
    mlp_fn = functools.partial(
      accelerators.mlp_by_products, functools.partial(accelerators.megablox_product, interpret=True)
    )
    monkeypatch.setitem(grouped.KERNELS, kernel, grouped.GroupedKernel(mlp_fn))

  def grads_of(routing, run):
    def loss(x, gates, params):
      y, stats = dispatch.apply_experts(
        x, routing.replace(gates=gates), params, spec, method='grouped'
      )
      return jnp.sum(y**2), stats.receive_drops

    return run(jax.grad(loss, argnums=(0, 1, 2), has_aux=True), x, routing.gates, params)

  for skew in (
    ([0, 0, 0, 0, 1, 0, 0, 0],) if kernel != 'padded' else ([0, 0, 0, 0, 5, 1, 0, 0], [1] * 8)
  ):
    routing = make_token_choice(np.random.default_rng(2), 4, 160, 1, 8, skew=skew)
    expected = grads_of(routing, lambda fn, *args: jax.jit(fn)(*args))
    with monkeypatch.context() as patch:
      patch.setitem(grouped.KERNELS_OF_BACKEND, 'cpu', (kernel,))
      got, drops = grads_of(routing, lambda fn, *args: _on_expert_partitions(fn, 4, *args)(*args))
    assert drops == 0
    assert_close(got, expected[0], tol=1e-4)
