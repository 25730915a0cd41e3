"""Training on any mesh is training on one device: losses, gradients, and every array sharded as the rules say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import adafactor
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import train_state as train_state_lib
from t5x_lite.networks import t5
from t5x_lite.trainer import state_init
from t5x_lite.trainer import train_step

NUM_STEPS = 20
BATCH_SIZE = 8
INPUT_SHAPES = {'encoder_input_tokens': (BATCH_SIZE, 12), 'decoder_input_tokens': (BATCH_SIZE, 6)}
# Every size divides by 8, so that every array can be cut over either axis of any mesh.
CONFIG = t5.T5Config(
  vocab_size=64,
  emb_dim=16,
  num_heads=8,
  num_encoder_layers=1,
  num_decoder_layers=1,
  head_dim=4,
  mlp_dim=32,
  mlp_activations=('gelu', 'linear'),
  dropout_rate=0.1,
)
OPTIMIZERS = {
  'adafactor': lambda: adafactor.Adafactor(
    beta1=0.9,
    min_dim_size_to_factor=8,
    logical_factor_rules=adafactor.standard_logical_factor_rules(),
  ),
  'adamw': lambda: optimizers.adamw(weight_decay=0.01),
}
LEARNING_RATE = {'adafactor': 0.03, 'adamw': 0.01}
# 6 heads are not a multiple of 4 model partitions, although their 24 units are; nor is a width of 18.
INDIVISIBLE_CONFIG = dataclasses.replace(CONFIG, emb_dim=18, num_heads=6)
# (data, model) extents, (activation, parameter) partitioning dims, optimizer. All combinations are in the full suite;
# each costs seconds of compilation.
CASES = [((4, 2), (2, 2), 'adafactor')]
ALL_CASES = [
  (shape, dims, optimizer_name)
  for shape in ((8, 1), (4, 2), (2, 4), (1, 8))
  for dims in ((1, 1), (1, 2), (2, 1), (2, 2))
  for optimizer_name in OPTIMIZERS
]
# The programs are tiny: compiling them well would take far longer than running them.
COMPILER_OPTIONS = {'xla_backend_optimization_level': 0}


class FakeVocabulary:
  """Attributes of a batch's converter that models read."""

  vocab_size = 64
  eos_id = 1
  pad_id = 0


def make_batches():
  """Return `NUM_STEPS` batches whose targets are a function of their inputs, with padding at the ends of rows."""
  rng = np.random.default_rng(0)
  batches = []
  for _ in range(NUM_STEPS):
    inputs = rng.integers(2, 64, INPUT_SHAPES['encoder_input_tokens']).astype(np.int32)
    lengths = rng.integers(2, 7, [BATCH_SIZE])
    weights = (np.arange(6)[None] < lengths[:, None]).astype(np.int32)
    targets = (inputs[:, :6] // 2 + 2) * weights
    decoder_inputs = np.pad(targets[:, :-1], [(0, 0), (1, 0)])
    inputs[:, 8:] *= rng.integers(0, 2, [BATCH_SIZE, 1], dtype=np.int32)
    batches.append(
      {
        'encoder_input_tokens': inputs,
        'decoder_input_tokens': decoder_inputs,
        'decoder_target_tokens': targets,
        'decoder_loss_weights': weights,
      }
    )
  return batches


BATCHES = make_batches()


@functools.cache
def make_model(optimizer_name, config=CONFIG):
  return models.EncoderDecoderModel(
    t5.Transformer(config),
    FakeVocabulary(),
    FakeVocabulary(),
    OPTIMIZERS[optimizer_name](),
    z_loss=1e-4,
  )


class Training:
  """The training step on one mesh."""

  def __init__(self, mesh, dims, optimizer_name, config=CONFIG):
    self.partitioner = partitioning.PjitPartitioner(
      mesh=mesh, logical_axis_rules=partitioning.standard_logical_axis_rules(*dims)
    )
    model = make_model(optimizer_name, config)
    self.initializer = state_init.TrainStateInitializer(
      model.optimizer_def, model.get_initial_variables, INPUT_SHAPES, self.partitioner
    )
    self.axes = self.initializer.train_state_axes
    learning_rate = jnp.float32(LEARNING_RATE[optimizer_name])
    spec = self.partitioner.data_partition_spec

    def step(state, batch, dropout_rng):
      grads, metrics, _ = train_step.accumulate_grads_microbatched(
        model, state, batch, dropout_rng, None, data_partition_spec=spec
      )
      state, _ = train_step.apply_grads(state, grads, metrics, learning_rate, None)
      return state, metrics['loss'].total, grads

    self.step = self.partitioner.partition(
      step,
      in_axis_resources=(self.axes, spec, None),
      out_axis_resources=(self.axes, None, self.axes.params),
    )

  def run(self, state):
    """Return (state, losses, gradients of the first step) after `NUM_STEPS` steps from `state`."""
    state = jax.device_put(state, self.partitioner.get_shardings(self.axes))
    compiled = self.step.lower(state, BATCHES[0], jax.random.key(7)).compile(
      compiler_options=COMPILER_OPTIONS
    )
    losses, first_grads = [], None
    for number, batch in enumerate(BATCHES):
      batch = jax.device_put(
        batch, self.partitioner.get_shardings(self.partitioner.data_partition_spec)
      )
      rng = jax.device_put(
        jax.random.fold_in(jax.random.key(7), number), self.partitioner.get_shardings(None)
      )
      state, loss, grads = compiled(state, batch, rng)
      losses.append(float(loss))
      first_grads = grads if first_grads is None else first_grads
    return state, np.array(losses), first_grads


def make_mesh(shape):
  devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
  return Mesh(devices, ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@functools.cache
def initial_variables(config=CONFIG):
  init = jax.jit(lambda rng: make_model('adamw', config).get_initial_variables(rng, INPUT_SHAPES))
  return init.lower(jax.random.key(0)).compile(compiler_options=COMPILER_OPTIONS)(jax.random.key(0))


@functools.cache
def one_device(optimizer_name, config=CONFIG):
  """Return (initial state, losses, first gradients) of one device, as NumPy arrays."""
  training = Training(make_mesh((1, 1)), (1, 1), optimizer_name, config)
  optimizer_def = make_model(optimizer_name, config).optimizer_def
  state = jax.tree.map(
    np.asarray, train_state_lib.FlaxOptimTrainState.create(optimizer_def, initial_variables(config))
  )
  _, losses, grads = training.run(state)
  return state, losses, jax.tree.map(np.asarray, grads)


def assert_placed_as(tree, axes, mesh):
  def check(array, spec):
    sharding = NamedSharding(mesh, spec)
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
    assert {shard.data.shape for shard in array.addressable_shards} == {
      sharding.shard_shape(array.shape)
    }
    assert len(array.addressable_shards) == mesh.size

  jax.tree.map(check, tree, axes)


@pytest.mark.parametrize(
  'optimizer_name', ['adafactor', pytest.param('adamw', marks=pytest.mark.full)]
)
def test_the_reference_learns(optimizer_name):
  """Constant losses would make the comparisons below meaningless."""
  _, losses, _ = one_device(optimizer_name)
  tokens = np.array([batch['decoder_loss_weights'].sum() for batch in BATCHES])
  assert (losses / tokens)[-3:].mean() < 0.9 * (losses / tokens)[0]


@pytest.mark.parametrize(
  'shape,dims,optimizer_name',
  [
    *CASES,
    *(pytest.param(*case, marks=pytest.mark.full) for case in ALL_CASES if case not in CASES),
  ],
)
def test_mesh_equals_one_device(shape, dims, optimizer_name):
  check_mesh(Training(make_mesh(shape), dims, optimizer_name), one_device(optimizer_name))


@pytest.mark.parametrize(
  'optimizer_name', ['adafactor', pytest.param('adamw', marks=pytest.mark.full)]
)
def test_dims_that_do_not_divide(optimizer_name):
  training = Training(make_mesh((2, 4)), (2, 2), optimizer_name, INDIVISIBLE_CONFIG)
  params = training.axes.params['encoder']
  assert params['relpos_bias']['rel_embedding'] == P(None, None) and params['encoder_norm'][
    'scale'
  ] == P('data')
  assert params['layers_0']['attention']['query']['kernel'] == P('data', 'model')
  check_mesh(training, one_device(optimizer_name, INDIVISIBLE_CONFIG))


def check_mesh(training, expected):
  """Check losses, gradients and shardings of a training against (initial state, losses, gradients) of one device."""
  initial_state, reference_losses, reference_grads = expected
  state, losses, grads = training.run(initial_state)

  assert abs(losses[0] - reference_losses[0]) <= 1e-6 * abs(reference_losses[0])

  def check_gradient(got, expected):
    assert np.linalg.norm(np.asarray(got) - expected) <= 1e-5 * np.linalg.norm(expected)

  jax.tree.map(check_gradient, grads, reference_grads)
  np.testing.assert_allclose(losses, reference_losses, rtol=1e-3)

  mesh = training.partitioner.mesh
  assert_placed_as(state, training.axes, mesh)
  assert_placed_as(grads, training.axes.params, mesh)


@pytest.mark.parametrize(
  'dims,kernel,embedding,norm',
  [
    ((1, 1), P(None, 'model'), P('model', None), P(None)),
    ((1, 2), P('data', 'model'), P('model', 'data'), P('data')),
    ((2, 1), P(None, 'model'), P('model', None), P('model')),
    ((2, 2), P('data', 'model'), P('model', 'data'), P('model')),
  ],
)
def test_rules_shard_parameters_and_their_statistics(dims, kernel, embedding, norm):
  """The specs that the arrays above were compared with, written out."""
  training = Training(make_mesh((4, 2)), dims, 'adafactor')
  params = training.axes.params
  assert params['encoder']['layers_0']['mlp']['wi_0']['kernel'] == kernel
  assert params['encoder']['layers_0']['attention']['query']['kernel'] == kernel
  assert params['token_embedder']['embedding'] == embedding
  assert params['decoder']['decoder_norm']['scale'] == norm
  # Momentum has the sharding of the parameter.
  states = training.axes.param_states
  assert states['token_embedder']['embedding'].m == embedding
  assert states['encoder']['layers_0']['mlp']['wi_0']['kernel'].m == kernel


@pytest.mark.parametrize(
  'dims,activation',
  [
    pytest.param((1, 1), '[{"data"}, {}, {}]', marks=pytest.mark.full),
    ((2, 2), '[{"data"}, {}, {"model"}]'),
  ],
)
def test_logical_constraints_are_in_the_lowered_step(dims, activation):
  """Flax ignores constraints silently if no mesh is set."""
  training = Training(make_mesh((4, 2)), dims, 'adafactor')
  shapes = training.initializer.global_train_state_shape
  lowered = training.step.lower(shapes, BATCHES[0], jax.random.key(0)).as_text()
  constraints = [line for line in lowered.splitlines() if 'sdy.sharding_constraint' in line]
  # At least the inputs and outputs of each block of each layer, and their parameters.
  assert len(constraints) > 50
  # Activations [batch, length, embed].
  assert sum(f'{activation}> : tensor<8x12x16xf32>' in line for line in constraints) >= 3
  assert sum(f'{activation}> : tensor<8x6x16xf32>' in line for line in constraints) >= 3
