"""Grouped kernels for GPU and TPU: their numbers where they run here, else their lowering, and which is taken when."""

import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import dispatch
from moe.dispatch import accelerators
from moe.dispatch import grouped
from moe.dispatch.mlp import DropoutMask
from moe.dispatch.types import MlpParams
from moe.dispatch.types import MlpSpec
from t5x_lite import layers
from t5x_lite.errors import ConfigError
from t5x_lite.networks import remat
from tests.layers.test_attention_kernels import H100
from tests.layers.test_attention_kernels import use_gpu
from tests.moe.dispatch.test_apply import assert_close
from tests.moe.dispatch.test_apply import make_params

_SIZES = ([60, 0, 37, 3], [0, 0, 100, 0], [0, 0, 0, 0], [25, 25, 25, 25])


@functools.cache
def _grads_fn(mlp_fn, spec):
  """Return a function to result and gradients of a loss that reads rows of no expert too."""

  def loss(params, rows, sizes, keep):
    y = mlp_fn(params, rows, sizes, spec, keep)
    assert y.dtype == jnp.dtype(spec.dtype)
    y = y.astype(jnp.float32)
    weights = jnp.asarray(np.random.default_rng(5).normal(size=rows.shape), jnp.float32)
    return jnp.sum(weights * y + 0.5 * y**2), y

  return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


def _grads(mlp_fn, params, rows, sizes, spec, keep=None):
  return _grads_fn(mlp_fn, spec)(params, rows, jnp.asarray(sizes, jnp.int32), keep)


def _inputs(width, hidden, num_rows=100):
  rng = np.random.default_rng(0)
  params = make_params(rng, 4, width, hidden, 2, biases=True)
  return params, jnp.asarray(rng.normal(size=(num_rows, width)), jnp.float32)


def _oracle(params, rows, sizes, spec, keep=None):
  """Every expert on every row."""
  buffers = jnp.broadcast_to(rows, (4, *rows.shape))
  keep = (
    None if keep is None else jnp.broadcast_to(keep.of_all(), (4, rows.shape[0], keep.hidden_dim))
  )
  all_results = dispatch.batched_mlp(params, buffers, spec, keep)
  expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows.shape[0]), side='right')
  return jnp.einsum('end,ne->nd', all_results, jax.nn.one_hot(expert, 4, dtype=all_results.dtype))


@pytest.mark.parametrize('sizes', _SIZES)
def test_padded_tiles_are_exact(sizes):
  params, rows = _inputs(8, 12)
  spec = MlpSpec(('gelu', 'linear'), dropout_rate=0.2)
  keep = DropoutMask(jax.random.key(0), jnp.arange(100), 12, 0.2)
  assert_close(
    _grads(accelerators.padded_mlp, params, rows, sizes, spec, keep),
    _grads(_oracle, params, rows, sizes, spec, keep),
  )


def _leaving_nans(rows, kernels, group_sizes):
  expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows.shape[0]), side='right')
  y = jnp.einsum('ni,nio->no', rows, jnp.take(kernels, expert, axis=0, mode='clip'))
  return jnp.where((expert < 4)[:, None], y, jnp.nan)


def test_rows_without_an_expert_may_have_any_values():
  params, rows = _inputs(8, 12)
  spec = MlpSpec(('gelu', 'linear'), dropout_rate=0.2)
  keep = DropoutMask(jax.random.key(0), jnp.arange(100), 12, 0.2)
  mlp_fn = functools.partial(accelerators.mlp_by_products, _leaving_nans)
  for sizes in (_SIZES[0], [10, 0, 7, 3]):
    (_, rows_grad), y = got = _grads(mlp_fn, params, rows, sizes, spec, keep)
    assert_close(got, _grads(_oracle, params, rows, sizes, spec, keep))
    assert not np.any(y[sum(sizes) :]) and not np.any(rows_grad[sum(sizes) :])


def test_gradients_of_biases_are_summed_in_float32():
  """A sum of ones in bfloat16 stops at 256."""
  params = MlpParams(
    wi=(jnp.zeros((2, 8, 8)),),
    wo=jnp.zeros((2, 8, 8)),
    wi_bias=(jnp.zeros((2, 8)),),
    wo_bias=jnp.zeros((2, 8)),
  )
  spec, sizes = MlpSpec(('relu',), dtype=jnp.bfloat16), jnp.array([600, 400], jnp.int32)

  def product(rows, kernels, group_sizes):
    expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows.shape[0]), side='right')
    return jnp.einsum('ni,nio->no', rows, jnp.take(kernels, expert, axis=0, mode='clip'))

  grads = jax.grad(
    lambda params: jnp.sum(
      accelerators.mlp_by_products(
        product, params, jnp.ones((1000, 8), jnp.bfloat16), sizes, spec
      ).astype(jnp.float32)
    )
  )(params)
  np.testing.assert_array_equal(grads.wo_bias[:, 0], [600, 400])


def test_products_without_a_loop_have_names_for_policies():
  """Otherwise 'minimal' would compute the products of experts again: they have no primitive that it stores."""
  params, rows = _inputs(8, 12)
  sizes, spec = jnp.array(_SIZES[0], jnp.int32), MlpSpec(('gelu', 'linear'))

  def mlp(params):
    return accelerators.mlp_by_products(_leaving_nans, params, rows, sizes, spec)

  products = {
    policy: str(
      jax.make_jaxpr(
        jax.grad(lambda params: jnp.sum(remat.remat(mlp, policy, in_loop=True)(params)))
      )(params)
    ).count('dot_general')
    for policy in ('minimal', 'full')
  }
  assert products['minimal'] < products['full']


@pytest.mark.parametrize('name', ['mosaic_gpu', 'blackwell', 'megablox'])
def test_second_derivatives_of_products_raise(monkeypatch, name):
  if name == 'blackwell':
    devices = [types.SimpleNamespace(core_count=148)]
    for devices_fn in ('devices', 'local_devices'):
      monkeypatch.setattr(jax, devices_fn, lambda *args: devices)
  product, shape = (
    getattr(accelerators, f'{name}_product'),
    jax.ShapeDtypeStruct((256, 128), jnp.bfloat16),
  )
  args = (
    shape,
    jax.ShapeDtypeStruct((2, 128, 128), jnp.bfloat16),
    jax.ShapeDtypeStruct((2,), jnp.int32),
  )

  def norm(rows, *others):
    grad = jax.grad(lambda rows: jnp.sum(product(rows, *others).astype(jnp.float32) ** 2))(rows)
    return jnp.sum(grad.astype(jnp.float32))

  with pytest.raises(ConfigError, match='no second derivatives'):
    jax.eval_shape(jax.grad(norm), *args)


_interpreted_megablox = functools.partial(
  accelerators.mlp_by_products, functools.partial(accelerators.megablox_product, interpret=True)
)


@pytest.mark.parametrize(
  'sizes',
  [
    _SIZES[0],
    *(pytest.param(sizes, marks=pytest.mark.full) for sizes in (*_SIZES[1:], [10, 0, 7, 3])),
  ],
)
def test_megablox_is_exact(sizes):
  params, rows = _inputs(128, 128)
  spec = MlpSpec(('gelu', 'linear'))
  mlp_fn = _interpreted_megablox
  assert_close(
    _grads(mlp_fn, params, rows, sizes, spec), _grads(_oracle, params, rows, sizes, spec), tol=1e-4
  )


def _lower(mlp_fn, platform, dtype, width=128, balanced_rows=None):
  """Return the program of gradients; with `balanced_rows`, of a receive buffer for many more rows."""
  params, rows = _inputs(width, 2 * width, 100 if balanced_rows is None else 20 * balanced_rows)
  spec = MlpSpec(('gelu', 'linear'), dtype=dtype)
  fn = jax.jit(
    jax.grad(
      lambda params, rows, sizes: jnp.sum(
        mlp_fn(params, rows, sizes, spec, None, balanced_rows).astype(jnp.float32)
      ),
      argnums=(0, 1),
    )
  )
  return (
    fn.trace(params, rows, jnp.zeros(4, jnp.int32)).lower(lowering_platforms=(platform,)).as_text()
  )


@pytest.mark.full
def test_hopper_kernels_lower_for_cuda(monkeypatch):
  # One of the kernels asks the first device for its number of multiprocessors.
  monkeypatch.setattr(jax, 'devices', lambda *args: [types.SimpleNamespace(core_count=132)])
  for width in (64, 192, 256):
    program = _lower(
      accelerators.mosaic_gpu_mlp, 'cuda', jnp.bfloat16, width, None if width == 64 else 100
    )
    assert program.count('@mosaic_gpu') >= 5, program.count('@mosaic_gpu')


@pytest.mark.parametrize('width', [128, pytest.param(256, marks=pytest.mark.full)])
def test_blackwell_kernel_lowers_for_cuda(monkeypatch, width):
  devices = [types.SimpleNamespace(core_count=148)]
  monkeypatch.setattr(jax, 'devices', lambda *args: devices)
  monkeypatch.setattr(jax, 'local_devices', lambda *args: devices)
  program = _lower(accelerators.blackwell_mlp, 'cuda', jnp.bfloat16, width, 100)
  # Forward and input gradient of both projections; equal ones are one function.
  assert program.count('@mosaic_gpu') >= 4, program.count('@mosaic_gpu')


def test_blackwell_kernel_gradients_by_tiles():
  rng, sizes = np.random.default_rng(0), jnp.asarray([60, 0, 37, 3], jnp.int32)
  rows, grad = (jnp.asarray(rng.normal(size=(128, width)), jnp.float32) for width in (8, 12))
  got = jax.jit(accelerators._kernels_grad_by_tiles)(rows, grad, sizes)
  expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(128), side='right')
  assert_close(got, jnp.einsum('nd,nf,ne->edf', rows, grad, jax.nn.one_hot(expert, 4)))


@pytest.mark.parametrize('balanced_rows', [pytest.param(None, marks=pytest.mark.full), 100])
def test_megablox_lowers_for_tpu(balanced_rows):
  program = _lower(accelerators.megablox_mlp, 'tpu', jnp.bfloat16, balanced_rows=balanced_rows)
  # Forward and both gradients of one projection, both gradients of the other; equal ones are one function.
  assert program.count('tpu_custom_call') >= 5


def test_exported_experts_lower_for_every_platform(monkeypatch):
  """On a Hopper GPU, of which the kernel of choice lowers for CUDA alone."""
  params, rows = _inputs(64, 64)
  spec, sizes = MlpSpec(('gelu', 'linear'), dtype=jnp.bfloat16), jnp.asarray(_SIZES[0], jnp.int32)
  expected = jax.jit(lambda *args: grouped.grouped_mlp(*args, spec))(params, rows, sizes)
  use_gpu(monkeypatch, H100, 90800)
  monkeypatch.setattr(jax, 'devices', lambda *args: [H100])
  assert grouped.select_kernel('auto', 'gpu', params, spec) == 'mosaic_gpu'
  with layers.portable_programs():
    exported = jax.export.export(
      jax.jit(lambda *args: grouped.grouped_mlp(*args, spec)), platforms=('cpu', 'cuda', 'tpu')
    )(params, rows, sizes)
  monkeypatch.undo()
  assert_close(
    exported.call(params, rows, sizes).astype(jnp.float32), expected.astype(jnp.float32), tol=2e-2
  )


def test_the_first_choice_is_logged_with_its_reason(monkeypatch, caplog):
  params = _inputs(128, 256)[0]

  def logged(capability, backend='gpu'):
    monkeypatch.setattr(
      jax, 'devices', lambda: [types.SimpleNamespace(compute_capability=capability)]
    )
    monkeypatch.setattr(grouped, '_has_logged_choice', False)
    caplog.clear()
    with caplog.at_level(logging.INFO):
      for _ in range(2):
        grouped.select_kernel(
          'auto', backend, params, MlpSpec(('gelu', 'linear'), dtype=jnp.bfloat16)
        )
    return [record.getMessage() for record in caplog.records]

  (line,) = logged('8.0')
  assert (
    "takes 'padded'" in line
    and "'mosaic_gpu' needs a Hopper GPU" in line
    and "'blackwell' needs" in line
  ), line
  (line,) = logged('10.0')
  assert "takes 'blackwell'" in line and 'got 10.0' in line
  (line,) = logged('9.0')
  assert "takes 'mosaic_gpu'" in line and 'device, dtype and dims allow it' in line
  assert len(logged(None, 'tpu')) == 1 and not logged(None, 'cpu')


_IS_HOPPER = jax.default_backend() == 'gpu' and jax.devices()[0].compute_capability == '9.0'


@pytest.mark.skipif(not _IS_HOPPER, reason='needs a Hopper GPU: the kernels run nowhere else')
@pytest.mark.parametrize('width', [64, 192, 256])
@pytest.mark.parametrize('sizes', [*_SIZES, [1000, 0, 24, 2000]])
def test_hopper_kernels_are_exact(width, sizes):
  params, rows = _inputs(width, 2 * width, max(100, sum(sizes)))
  spec = MlpSpec(('gelu', 'linear'), dtype=jnp.bfloat16)
  got = _grads(accelerators.mosaic_gpu_mlp, params, rows, sizes, spec)
  assert_close(got, _grads(_oracle, params, rows, sizes, MlpSpec(('gelu', 'linear'))), tol=2e-2)


def test_the_kernel_follows_the_device(monkeypatch):
  small, large = _inputs(48, 96)[0], _inputs(128, 256)[0]
  bf16, f32 = (MlpSpec(('gelu', 'linear'), dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))

  def selected(backend, params, spec, capability=None):
    monkeypatch.setattr(
      jax, 'devices', lambda: [types.SimpleNamespace(compute_capability=capability)]
    )
    return grouped.select_kernel('auto', backend, params, spec)

  assert selected('gpu', large, bf16, '9.0') == 'mosaic_gpu'
  assert selected('gpu', large, f32, '9.0') == 'padded'
  assert selected('gpu', small, bf16, '9.0') == 'padded'
  assert selected('gpu', large, bf16, '8.0') == 'padded'
  assert selected('gpu', large, bf16, '10.0') == selected('gpu', large, bf16, '10.3') == 'blackwell'
  assert selected('gpu', _inputs(192, 256)[0], bf16, '10.0') == 'padded'
  assert selected('gpu', large, bf16, '12.0') == 'padded'
  assert selected('tpu', large, f32) == 'megablox'
  assert selected('tpu', small, f32) == 'padded'
  assert selected('cpu', large, f32) == 'tiles'
  with pytest.raises(ConfigError, match="'mosaic_gpu' needs a Hopper GPU .*got 8.0. Use 'auto'"):
    selected('gpu', large, bf16, '8.0') and grouped.select_kernel('mosaic_gpu', 'gpu', large, bf16)
  with pytest.raises(ConfigError, match='multiples of 128, got 48 and 96'):
    grouped.select_kernel('megablox', 'tpu', small, bf16)
  with pytest.raises(
    ConfigError, match="one of 'auto', 'tiles', 'padded', got .*another backend than 'cpu'"
  ):
    grouped.select_kernel('mosaic_gpu', 'cpu', large, bf16)
