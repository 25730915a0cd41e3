"""A state with an adapter in either layout, as the state of a model without one."""

import jax
import ml_dtypes
import numpy as np
import pytest

from t5x_lite.checkpoints import sources
from t5x_lite.errors import ConfigError
from tests.apps.convert import convert_cases as given

_ADAPTER = {
  'rank_stabilized': False,
  'base_dtype': None,
  'kernels': {'encoder/encoder/attention/query/kernel': {'rank': 2, 'alpha': 3.0, 'dims': 'isoo'}},
}
_Q = 'target/encoder/encoder/attention/query'


def _source(dtype=np.float32):
  rng = np.random.default_rng(0)
  shapes = {
    f'{_Q}/kernel': (6, 3, 2, 4),
    f'{_Q}/lora_a': (6, 3, 2),
    f'{_Q}/lora_b': (2, 3, 2, 4),
    'target/encoder/encoder/attention/value/kernel': (6, 3, 2, 4),
    f'state/param_states/{_Q.removeprefix("target/")}/lora_a/m': (6, 3, 2),
    f'param_average/{_Q.removeprefix("target/")}/lora_a': (6, 3, 2),
    'state/step': (),
  }
  state = {
    name: rng.standard_normal(shape).astype(dtype if 'lora' not in name else np.float32)
    for name, shape in shapes.items()
  }
  return given.FakeSource(state, {'adapter': _ADAPTER, 'optimizer': {'name': 'x'}, 'network': {}})


@pytest.mark.parametrize('dtype', [None, 'float32'])
@pytest.mark.parametrize('stored', [np.float32, ml_dtypes.bfloat16])
def test_kernels_are_merged_and_all_else_is_unchanged(stored, dtype):
  source = _source(stored)
  merged = sources.MergedSource(source, dtype)
  names = [f'{_Q}/kernel', 'target/encoder/encoder/attention/value/kernel', 'state/step']
  assert list(merged.shapes()) == names
  kernel, a, b = (source.state[f'{_Q}/{leaf}'] for leaf in ('kernel', 'lora_a', 'lora_b'))
  want = kernel.astype(np.float64) + 1.5 * np.einsum('elr,rlhk->elhk', a, b)
  got = merged.read_array(names[0])
  assert got.dtype == merged.shapes()[names[0]].dtype == np.dtype(dtype or stored)
  np.testing.assert_allclose(
    got.astype(np.float64), want, rtol=2**-8 if got.dtype.itemsize == 2 else 1e-6, atol=1e-6
  )
  value = merged.read_array(names[1])
  assert value.tobytes() == source.state[names[1]].tobytes()
  assert merged.metadata == {'network': {}, 'param_layout': 'scalable_t5'}


def test_arrays_are_read_together_and_placed():
  source = _source()
  merged = sources.MergedSource(source)
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = {
    f'{_Q}/kernel': (np.dtype(ml_dtypes.bfloat16), sharding),
    'state/step': (np.dtype(np.float32), None),
  }
  values = merged.read(wanted)
  assert list(values) == list(wanted) and len(source.batches) == 1
  kernel = values[f'{_Q}/kernel']
  assert isinstance(kernel, jax.Array) and kernel.dtype == ml_dtypes.bfloat16
  rounded = merged.read_array(f'{_Q}/kernel').astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(np.asarray(kernel), rounded)


def test_the_note_says_that_training_saw_a_rounded_base():
  source = _source()
  assert sources.MergedSource(source).note == (
    'The adapter of 1 kernels is merged into the weights.'
  )
  source._metadata['adapter'] = _ADAPTER | {'base_dtype': 'bfloat16'}
  assert 'rounded to bfloat16' in sources.MergedSource(source).note


def test_a_sum_beyond_the_dtype_of_its_kernel_raises():
  source = _source(np.float16)
  source.state[f'{_Q}/lora_b'] *= 1e6
  with pytest.raises(
    ConfigError,
    match=f'{_Q}/kernel with its adapter must have values up to 65504, the maximum of float16, got .*dtype=bfloat16',
  ):
    sources.MergedSource(source).read_array(f'{_Q}/kernel')
  assert np.isfinite(sources.MergedSource(source, 'float32').read_array(f'{_Q}/kernel')).all()
