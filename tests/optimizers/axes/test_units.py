"""Units of parameters: equal in each layout of the parameters."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite.optimizers.axes import units as units_lib

_CASES = {
  'matrix': ((4, 6), ('embed', 'mlp'), (), (4, 6), ('embed', 'mlp')),
  'scale of layers': ((4, 2), ('embed', 'layers'), (2,), (4,), ('embed',)),
  'query of layers': (
    (4, 2, 3, 5),
    ('embed', 'layers', 'heads', 'kv'),
    (2,),
    (4, 15),
    ('embed', 'joined_kv'),
  ),
  'output of layers': (
    (3, 2, 5, 4),
    ('heads', 'layers', 'kv', 'embed'),
    (2,),
    (15, 4),
    ('joined_kv', 'embed'),
  ),
  'experts of layers': (
    (3, 4, 2, 6),
    ('expert', 'embed', 'layers', 'expert_mlp'),
    (3, 2),
    (4, 6),
    ('embed', 'expert_mlp'),
  ),
  'positions': ((3, 8), ('heads', 'relpos_buckets'), (), (3, 8), ('heads', 'relpos_buckets')),
  'scalar': ((), (), (), (), ()),
  'unknown': ((2, 3), (None, None), (), (2, 3), (None, None)),
}


@pytest.mark.parametrize('case', _CASES)
def test_units(case):
  shape, axes, batch_shape, unit_shape, unit_axes = _CASES[case]
  units = units_lib.units_of(shape, axes)
  assert units.batch_shape == batch_shape
  assert units.unit_shape == unit_shape
  assert units.unit_axes == unit_axes
  array = jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape)
  split = units.split(array)
  assert split.shape == (*batch_shape, *unit_shape)
  assert len(units.split_axes) == split.ndim
  assert units.num_units == np.prod(batch_shape)
  np.testing.assert_array_equal(units.join(split), array)
  assert units.is_single == (split.shape == shape and not batch_shape)


def test_units_are_equal_in_both_layouts():
  # [layers, embed, heads * kv]: the query kernels of two layers, as in the layout 't5'.
  layers = np.arange(2 * 4 * 15, dtype=np.float32).reshape(2, 4, 15)
  stacked = layers.reshape(2, 4, 3, 5).transpose(1, 0, 2, 3)
  units = units_lib.units_of(stacked.shape, ('embed', 'layers', 'heads', 'kv'))
  np.testing.assert_array_equal(units.split(jnp.asarray(stacked)), layers)


def test_units_by_path_of_stacked_layers():
  axes = {'encoder': {'layers_0': {'kernel': P('embed', 'mlp')}, 'scale': P('embed')}}
  by_path = units_lib.UnitsByPath(axes)
  stacked = by_path.of('encoder/layers_0,1/kernel', jax.ShapeDtypeStruct((2, 4, 6), jnp.float32))
  assert stacked.batch_shape == (2,)
  assert stacked.unit_shape == (4, 6)
  single = by_path.of('encoder/layers_0/kernel', jax.ShapeDtypeStruct((4, 6), jnp.float32))
  assert single.is_single
  unknown = units_lib.UnitsByPath().of('x', jax.ShapeDtypeStruct((3, 4, 6), jnp.float32))
  assert unknown.is_single


def test_dims_after_the_last_name_have_no_name():
  by_path = units_lib.UnitsByPath({'none': P(), 'first': P('expert')})
  array = jax.ShapeDtypeStruct((3, 4, 6), jnp.float32)
  assert by_path.of('none', array).is_single
  assert by_path.of('first', array).batch_shape == (3,)
  assert by_path.of('first', array).unit_shape == (4, 6)
