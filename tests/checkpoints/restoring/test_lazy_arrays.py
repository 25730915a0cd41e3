"""Lazy arrays: read and computed when they are placed, in groups, with few reads."""

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite.checkpoints.restoring import lazy_arrays
from tests.checkpoints import checkpoint_states as states

WI, NORM = 'target/encoder/layers_0/mlp/wi/kernel', 'target/decoder/decoder_norm/scale'


def _sum(*arrays):
  shape, dtype = tuple(arrays[0].shape), np.dtype(arrays[0].dtype)
  return lazy_arrays.ComputedArray(
    shape=shape,
    dtype=dtype,
    inputs=arrays,
    compute_fn=lambda *values: np.sum(values, axis=0, dtype=dtype),
  )


def test_every_kind_is_read_and_placed(saved):
  source, values = checkpoints.open_source(saved / 'checkpoint_2'), states.flat_numpy(2)
  stored = lazy_arrays.stored(source)
  assert {name: (array.shape, array.dtype, array.ndim) for name, array in stored.items()} == {
    name: (value.shape, value.dtype, value.ndim) for name, value in values.items()
  }
  initial = lazy_arrays.InitialArray(name='a', shape=(8,), dtype=np.dtype(np.float32))
  once = _sum(stored[NORM], initial, np.ones(8, np.float32))
  arrays = {
    'stored': stored[WI],
    'again': stored[WI],
    'initial': initial,
    'given': np.arange(8.0),
    'sum': once,
    'sum of sum': _sum(once, once),
  }
  assert (
    lazy_arrays.initial_names(arrays) == {'a'}
    and lazy_arrays.initial_names({'x': stored[WI]}) == set()
  )
  new = {'a': jax.numpy.full(8, 5, np.float32)}
  expected = {
    'stored': values[WI],
    'again': values[WI],
    'initial': new['a'],
    'given': np.arange(8.0),
    'sum': values[NORM] + 6,
    'sum of sum': 2 * (values[NORM] + 6),
  }
  read = lazy_arrays.read(arrays, new)
  wanted = {
    name: jax.ShapeDtypeStruct(array.shape, jax.numpy.bfloat16) for name, array in arrays.items()
  }
  shardings = {name: states.sharding(states.P('data')) for name in arrays} | {'given': None}
  placed = lazy_arrays.place(arrays, wanted, shardings, new)
  assert list(read) == list(placed) == list(arrays)
  for name, value in expected.items():
    np.testing.assert_allclose(read[name], value, rtol=1e-6)
    np.testing.assert_array_equal(
      np.asarray(placed[name]), read[name].astype(jax.numpy.bfloat16), err_msg=name
    )
    assert isinstance(placed[name], np.ndarray) == (name == 'given')
    assert name == 'given' or placed[name].sharding == shardings[name]


def test_computed_arrays_are_in_memory_a_group_at_a_time(saved, monkeypatch):
  """The sizes of reads are limited, so that no second copy of the weights is on the host."""
  source = checkpoints.open_source(saved / 'checkpoint_2')
  reads = []
  monkeypatch.setattr(
    type(source),
    'read',
    lambda self, names, read=type(source).read: (reads.append(sorted(names)), read(self, names))[1],
  )
  stored = lazy_arrays.stored(source)
  moments = [name for name in stored if name.endswith('wi/kernel')]
  arrays = {f'{i}': _sum(stored[name]) for i, name in enumerate(moments)}
  wanted = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
  lazy_arrays.place(arrays, wanted, dict.fromkeys(arrays), {})
  assert reads == [sorted(moments)]
  reads.clear()
  monkeypatch.setattr(lazy_arrays, '_BATCH_BYTES', 1)
  lazy_arrays.place(arrays, wanted, dict.fromkeys(arrays), {})
  assert reads == [[name] for name in moments] and len(moments) == 3
  # The same for arrays that are used as they are.
  reads.clear()
  wanted = {name: jax.ShapeDtypeStruct(stored[name].shape, stored[name].dtype) for name in moments}
  lazy_arrays.place({name: stored[name] for name in moments}, wanted, dict.fromkeys(moments), {})
  assert reads == [[name] for name in moments]
