"""The network on meshes of 8 devices: constraints, results, and the sharded embedding."""

import collections

from flax.linen import partitioning as nn_partitioning
import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from t5x_lite import layers
from t5x_lite import tree_utils
from t5x_lite.networks import t5
from tests.networks import network_cases as cases

_RULES = (
  ('batch', 'data'),
  ('vocab', 'model'),
  ('mlp', 'model'),
  ('heads', 'model'),
  ('joined_kv', 'model'),
  ('embed', 'data'),
  ('kv', None),
  ('length', None),
  ('layers', None),
  ('relpos_buckets', None),
)


def _mesh(data, model):
  devices = jax.devices()[: data * model]
  return jax.make_mesh(
    (data, model), ('data', 'model'), axis_types=(AxisType.Auto, AxisType.Auto), devices=devices
  )


def _count(jaxpr, primitive):
  """Return the number of runs of `primitive` in `jaxpr`, including calls of functions and iterations of loops."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == primitive:
      total += 1
    rounds = equation.params.get('length', 1) if equation.primitive.name == 'scan' else 1
    for inner in jax_core.jaxprs_in_params(equation.params):
      total += rounds * _count(inner, primitive)
  return total


def _constraints(num_encoder_layers, num_decoder_layers, **fields):
  """Return the number of sharding constraints that a forward pass applies."""
  config = cases.tiny_config(
    num_encoder_layers=num_encoder_layers, num_decoder_layers=num_decoder_layers, **fields
  )
  module = t5.Transformer(config)
  batch = cases.tiny_batch()
  params = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False)['params'], jax.random.key(0)
  )

  def forward(params):
    return module.apply({'params': params}, **batch, enable_dropout=False)

  return _count(jax.make_jaxpr(forward)(params).jaxpr, 'sharding_constraint')


@pytest.mark.parametrize(
  'layout, scan_layers',
  [
    ('scalable_t5', True),
    *(
      pytest.param(*case, marks=pytest.mark.full)
      for case in (('t5', False), ('t5', True), ('scalable_t5', False))
    ),
  ],
)
def test_every_layer_constrains_its_activations_and_parameters(layout, scan_layers):
  fields = dict(param_layout=layout, scan_layers=scan_layers, relpos_bias_tables='per_layer')
  with jax.set_mesh(_mesh(4, 2)), nn_partitioning.axis_rules(_RULES):
    base = _constraints(1, 1, **fields)
    # Activations: 2 norms, query, key, value, hidden units, 2 sums. Parameters: 2 norms, 4 attention and 3 feed-forward
    # kernels, a table of position biases.
    assert _constraints(3, 1, **fields) - base == 2 * (8 + 10)
    # Another attention: a norm, query, key, value, a sum; a norm and 4 kernels.
    assert _constraints(1, 3, **fields) - base == 2 * (8 + 5 + 10 + 5)
  assert _constraints(1, 1, **fields) == 0


@pytest.mark.full  # by default, tests/partitioning/test_mesh_equality.py looks at a step
def test_constraints_reach_the_lowered_step():
  batch = cases.tiny_batch()
  module = t5.Transformer(cases.tiny_config())
  params = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False)['params'], jax.random.key(0)
  )

  def loss(params):
    return jnp.sum(module.apply({'params': params}, **batch, enable_dropout=False))

  with jax.set_mesh(_mesh(4, 2)), nn_partitioning.axis_rules(_RULES):
    text = jax.jit(jax.grad(loss)).lower(params).as_text()
  assert text.count('sharding_constraint') >= 18 + 28  # one body of each kind of layer at least
  assert 'sharding_constraint' not in jax.jit(jax.grad(loss)).lower(params).as_text()


def _shardings(config, batch, mesh):
  module = t5.Transformer(config)
  variables = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False), jax.random.key(0)
  )
  axes = tree_utils.to_dict(nn_partitioning.get_axis_names(variables['params_axes']))
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, nn_partitioning.logical_to_mesh_axes(tuple(spec), _RULES)),
    axes,
    is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
  )


@pytest.mark.full  # by default, tests/partitioning/test_mesh_equality.py trains on a mesh
@pytest.mark.parametrize(
  'layout, scan_layers, shape',
  [pytest.param('t5', False, (4, 2), marks=pytest.mark.full), ('scalable_t5', True, (2, 2))],
)
def test_loss_and_gradients_are_those_of_one_device(layout, scan_layers, shape):
  config = cases.tiny_config(
    param_layout=layout, scan_layers=scan_layers, num_encoder_layers=1, num_decoder_layers=2
  )
  batch = cases.tiny_batch(batch=8)
  params = cases.random_params(config)
  module = t5.Transformer(config)

  def loss_fn(params, batch):
    return jnp.mean(
      jax.nn.logsumexp(module.apply({'params': params}, **batch, enable_dropout=False), axis=-1)
    )

  loss, grads = cases.jit(jax.value_and_grad(loss_fn))(params, batch)
  mesh = _mesh(*shape)
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(_RULES):
    shardings = _shardings(config, batch, mesh)
    sharded = jax.device_put(params, shardings)
    rows = NamedSharding(mesh, PartitionSpec('data'))
    step = cases.jit(jax.value_and_grad(loss_fn), out_shardings=(None, shardings))
    loss_sharded, grads_sharded = step(sharded, jax.device_put(batch, rows))
  np.testing.assert_allclose(loss_sharded, loss, rtol=1e-6)
  cases.assert_trees_close(grads_sharded, grads, 1e-5)
  kernel = grads_sharded['token_embedder']['embedding']
  assert kernel.addressable_shards[0].data.shape == (40 // shape[1], 16 // shape[0])


def test_a_table_sharded_over_its_rows_is_looked_up_where_it_is():
  """Neither the lookup nor its derivative gathers the table on one device."""
  vocab, width = 4096, 8
  table = jnp.asarray(np.random.default_rng(0).standard_normal((vocab, width)), jnp.float32)
  ids = jnp.asarray(np.random.default_rng(1).integers(0, vocab, (4, 6)), jnp.int32)
  module = layers.Embed(vocab, width)

  def loss(table):
    return jnp.sum(module.apply({'params': {'embedding': table}}, ids) ** 3)

  want = jax.value_and_grad(loss)(table)
  mesh = _mesh(1, 8)
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(_RULES):
    rows = NamedSharding(mesh, PartitionSpec('model', None))
    step = jax.jit(jax.value_and_grad(loss), in_shardings=rows, out_shardings=(None, rows))
    compiled = step.lower(table).compile()
    got = compiled(jax.device_put(table, rows))
  np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
  np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
  full_shapes = collections.Counter(
    line.split('=')[1].split()[0]
    for line in compiled.as_text().splitlines()
    if f'f32[{vocab},{width}]' in line
  )
  assert not full_shapes, full_shapes
