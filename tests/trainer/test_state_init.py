"""Train states from scratch: sharded as the rules say, with values that do not depend on the mesh."""

from flax.linen import partitioning as flax_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import adafactor
from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import train_state as train_state_lib
from t5x_lite.networks import t5
from t5x_lite.trainer import state_init
from tests.checkpoints.sources import t5x_samples

INPUT_SHAPES = {'encoder_input_tokens': (8, 8), 'decoder_input_tokens': (8, 4)}


class FakeVocabulary:
  """The four attributes that models read."""

  vocab_size = 60
  eos_id = 1
  pad_id = 0


def make_model():
  config = t5.T5Config(
    vocab_size=64,
    emb_dim=16,
    num_heads=8,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=4,
    mlp_dim=32,
    mlp_activations=('gelu', 'linear'),
  )
  return models.EncoderDecoderModel(
    t5.Transformer(config), FakeVocabulary(), FakeVocabulary(), optimizer_def=None
  )


def make_initializer(optimizer_def, partitioner):
  return state_init.TrainStateInitializer(
    optimizer_def, make_model().get_initial_variables, INPUT_SHAPES, partitioner
  )


def small_init(rng, input_shapes, input_types=None):
  """A model of one parameter."""
  del input_shapes, input_types
  return {
    'params': {'kernel': jax.random.normal(rng, [16, 32])},
    'params_axes': {'kernel_axes': flax_partitioning.AxisMetadata(('embed', 'mlp'))},
  }


def make_small_initializer(partitioner, init_fn=small_init, **kwargs):
  return state_init.TrainStateInitializer(None, init_fn, INPUT_SHAPES, partitioner, **kwargs)


def make_partitioner(num_partitions=2, dims=(1, 1), **kwargs):
  return partitioning.PjitPartitioner(
    num_partitions=num_partitions,
    logical_axis_rules=partitioning.standard_logical_axis_rules(*dims),
    **kwargs,
  )


def as_numpy(tree):
  return jax.tree.map(np.asarray, tree)


def assert_placed_as(state, axes, mesh):
  """Check the sharding of every array, and that its pieces have the shape that follows."""

  def check(array, spec):
    sharding = NamedSharding(mesh, spec)
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    expected = sharding.shard_shape(array.shape)
    assert {shard.data.shape for shard in array.addressable_shards} == {expected}
    assert len(array.addressable_shards) == mesh.size

  jax.tree.map(check, state, axes)


@pytest.mark.parametrize(
  'num_partitions, dims', [pytest.param(1, (1, 2), marks=pytest.mark.full), (4, (2, 2))]
)
def test_state_is_that_of_one_device_on_every_mesh(num_partitions, dims):
  optimizer_def = adafactor.Adafactor(
    min_dim_size_to_factor=8, logical_factor_rules=adafactor.standard_logical_factor_rules()
  )
  rng = jax.random.PRNGKey(3)
  variables = jax.jit(lambda rng: make_model().get_initial_variables(rng, INPUT_SHAPES))(rng)
  reference = as_numpy(train_state_lib.FlaxOptimTrainState.create(optimizer_def, variables))
  partitioner = make_partitioner(num_partitions, dims)
  initializer = make_initializer(optimizer_def, partitioner)
  state = initializer.from_scratch(rng)
  assert_placed_as(state, initializer.train_state_axes, partitioner.mesh)
  jax.tree.map(np.testing.assert_array_equal, as_numpy(state), reference)


def test_shapes_and_axes_without_computing():
  partitioner = make_partitioner(2, (1, 2))
  initializer = make_initializer(optimizers.adamw(learning_rate=1e-3), partitioner)
  shapes = initializer.global_train_state_shape
  assert isinstance(shapes, train_state_lib.FlaxOptimTrainState)
  assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
  assert jax.tree.structure(shapes) == jax.tree.structure(initializer.train_state_axes)
  assert initializer.train_state_axes.params['token_embedder']['embedding'] == P('model', 'data')
  # The optimizer state has the sharding of the parameters.
  moments = [
    leaf
    for leaf in jax.tree.leaves(initializer.train_state_axes.param_states)
    if leaf == P('model', 'data')
  ]
  assert len(moments) >= 2


def test_inference_state_without_optimizer():
  initializer = make_small_initializer(make_partitioner(4))
  state = initializer.from_scratch(jax.random.key(0))
  assert isinstance(state, train_state_lib.InferenceState)
  assert int(state.step) == 0
  assert_placed_as(state, initializer.train_state_axes, make_partitioner(4).mesh)


def test_seed_decides():
  initializer = make_small_initializer(make_partitioner(1))
  first, again, other = (
    as_numpy(initializer.from_scratch(jax.random.key(seed)).params) for seed in (0, 0, 1)
  )
  jax.tree.map(np.testing.assert_array_equal, first, again)
  assert not np.array_equal(first['kernel'], other['kernel'])


def test_params_in_host_memory():
  partitioner = make_partitioner(2, params_on_devices=False)
  initializer = make_small_initializer(partitioner)
  state = initializer.from_scratch(jax.random.key(0))
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state))
  moved = partitioner.move_params_to_devices(state, initializer.train_state_axes)
  assert_placed_as(moved, initializer.train_state_axes, partitioner.mesh)


def test_input_types_reach_the_model():
  seen = []

  def init_fn(rng, input_shapes, input_types=None):
    seen.append((input_shapes, input_types))
    return small_init(rng, input_shapes)

  types = {'encoder_input_tokens': jnp.int32}
  make_small_initializer(make_partitioner(), init_fn, input_types=types)
  assert seen == [(INPUT_SHAPES, types)]


def test_dims_that_do_not_divide_are_rejected_before_computing():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:3]).reshape(1, 3), ('data', 'model'))
  with pytest.raises(
    errors.ConfigError,
    match=r"parameters: kernel: dim 1 \('mlp'\).*must be a multiple of 3.*got 32",
  ):
    make_small_initializer(partitioning.PjitPartitioner(mesh=mesh, max_replicated_size=0))
  # With an optimizer, whose state comes first in the tree, it is still the parameter that is named.
  with pytest.raises(errors.ConfigError, match=r'^parameters: kernel: dim 1'):
    state_init.TrainStateInitializer(
      optimizers.adamw(),
      small_init,
      INPUT_SHAPES,
      partitioning.PjitPartitioner(mesh=mesh, max_replicated_size=0),
    )


def test_random_numbers_that_depend_on_the_mesh_are_rejected():
  initializer = make_small_initializer(make_partitioner())
  with (
    jax.threefry_partitionable(False),
    pytest.raises(errors.ConfigError, match='jax_threefry_partitionable'),
  ):
    initializer.from_scratch(jax.random.key(0))


class _OwnCheckpointer:
  """A user's class with T5X's arguments."""

  def __init__(self, **kwargs):
    self.kwargs = kwargs

  def restore(self, **kwargs):
    return self.kwargs | kwargs


def test_states_from_checkpoints_of_t5x(tmp_path):
  run = t5x_samples.unpack(tmp_path)['t5x']
  params = checkpoints.load(run / 'checkpoint_7')['target']
  initializer = t5x_samples.initializer(
    t5x_samples.model(optimizers.adamw(learning_rate=0.1)), make_partitioner()
  )
  (tmp_path / 'empty').mkdir()
  cfgs = [
    checkpoints.RestoreCheckpointConfig(str(path), assignment_map=[('state/param_states.*', None)])
    for path in (tmp_path / 'empty', run)
  ]
  state = initializer.from_checkpoint(cfgs)
  assert_placed_as(state, initializer.train_state_axes, make_partitioner().mesh)
  jax.tree.map(np.testing.assert_array_equal, as_numpy(state.params), params)
  assert int(state.step) == 7 and not any(
    np.any(leaf) for leaf in jax.tree.leaves(as_numpy(state.param_states))
  )
  [(same, path)] = initializer.from_checkpoints(cfgs)
  assert path == str(run / 'checkpoint_7') and int(same.step) == 7
  assert initializer.from_checkpoint(cfgs[:1]) is None
  rng = jax.random.key(0)
  jax.tree.map(
    np.testing.assert_array_equal,
    as_numpy(initializer.from_checkpoint_or_scratch(cfgs[:1], init_rng=rng)),
    as_numpy(initializer.from_scratch(rng)),
  )
  twice = checkpoints.RestoreCheckpointConfig([path, path], 'specific')
  with pytest.raises(errors.CheckpointError, match='at most one checkpoint, got .*checkpoint_7, '):
    initializer.from_checkpoint([twice])


def test_a_checkpointer_of_a_user_gets_the_arguments_of_t5x(tmp_path):
  initializer = make_small_initializer(make_partitioner())
  cfg = checkpoints.RestoreCheckpointConfig(
    str(tmp_path),
    'specific',
    [('target/.*', None)],
    fallback_to_scratch=True,
    dtype='bfloat16',
    checkpointer_cls=_OwnCheckpointer,
  )
  got = initializer.from_checkpoint([cfg], init_rng=jax.random.key(0))
  assert (
    got['path'] == str(tmp_path) and got['state_transformation_fns'] == cfg.state_transformation_fns
  )
  assert got['restore_dtype'] == 'bfloat16' and set(got['fallback_state']) == {'target', 'state'}
