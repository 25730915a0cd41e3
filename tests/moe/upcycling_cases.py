"""Dense and sparse tiny networks, and checkpoints of them, that tests of upcycling and surgery share."""

import functools

from flax.linen import partitioning as flax_partitioning
import jax
import jax.numpy as jnp
import numpy as np

from moe import networks
from moe import routing
from t5x_lite import checkpoints
from t5x_lite import train_state
from t5x_lite import tree_utils
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from tests.networks import network_cases as cases

SIZES = dict(num_encoder_layers=2, num_decoder_layers=2)


def dense_network(kind='t5_1_1', **overrides):
  """Return a dense network."""
  if kind == 'decoder_only':
    return decoder_only.DecoderWrapper(
      decoder_only.TransformerConfig(
        **dict(
          vocab_size=40,
          emb_dim=16,
          num_heads=2,
          num_layers=2,
          head_dim=8,
          mlp_dim=24,
          dropout_rate=0.0,
        )
        | overrides
      )
    )
  activations = ('gelu', 'linear') if kind == 't5_1_1' else ('relu',)
  return t5.Transformer(cases.tiny_config(**SIZES | dict(mlp_activations=activations) | overrides))


def sparse_network(
  kind='t5_1_1',
  num_experts=4,
  num_selected=2,
  granularity=1,
  every=2,
  router=None,
  block=None,
  **overrides,
):
  """Return the sparse network that goes with it; its experts are a part of a dense block."""
  config = dense_network(kind, **overrides).config
  router = dict(num_selected=num_selected, normalize_gates=True) | (router or {})
  block = networks.SparseBlock(
    **dict(
      num_experts=num_experts,
      router=routing.TokensChooseRouter(num_experts, **router),
      expert_dim=config.mlp_dim // granularity,
    )
    | (block or {})
  )
  layout = f'every_{every}'
  if kind == 'decoder_only':
    return networks.sparse_decoder_only(config, block, decoder_layout=layout)
  return networks.sparse_transformer(config, block, encoder_layout=layout, decoder_layout=layout)


def batch_of(module, **sizes):
  """Return inputs of a network."""
  batch = cases.tiny_batch(**sizes)
  if isinstance(module, decoder_only.DecoderWrapper):
    del batch['encoder_input_tokens']
  return batch


@functools.cache
def shapes_of(module):
  """Return the shapes of a network's variables except sown ones."""
  init = functools.partial(module.init, **batch_of(module), enable_dropout=False)
  variables = dict(jax.eval_shape(init, jax.random.key(0)))
  return {
    name: tree for name, tree in variables.items() if name not in ('intermediates', 'routing')
  }


def random_variables(module, seed=0):
  """Return random variables, without compiling an initialisation."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: (
      rng.standard_normal(leaf.shape).astype(leaf.dtype) * 0.3 if hasattr(leaf, 'shape') else leaf
    ),
    shapes_of(module),
    is_leaf=lambda leaf: isinstance(leaf, flax_partitioning.AxisMetadata),
  )


def state_of(module, optimizer=None, seed=0):
  """Return a state of step 7 with random numbers in it, those of the optimizer between 1 and 2."""
  variables = random_variables(module, seed)
  if optimizer is None:
    return train_state.InferenceState.create(variables).replace_step(7)
  shapes = state_shapes(module, optimizer)
  rng = np.random.default_rng(seed + 1)
  values = {
    name: rng.uniform(1, 2, leaf.shape).astype(leaf.dtype)
    for name, leaf in tree_utils.flatten_dict(shapes.state_dict()).items()
  }
  state = shapes.restore_state(tree_utils.unflatten_dict(values)).replace_params(
    variables['params']
  )
  return state.replace_step(7)


def state_shapes(module, optimizer=None):
  """Return the shapes of a state."""
  variables = shapes_of(module)
  if optimizer is None:
    return jax.eval_shape(lambda: train_state.InferenceState.create(_zeros(variables)))
  return jax.eval_shape(
    lambda: train_state.FlaxOptimTrainState.create(optimizer, _zeros(variables))
  )


def _zeros(variables):
  def is_axes(leaf):
    return isinstance(leaf, flax_partitioning.AxisMetadata)

  return jax.tree.map(
    lambda leaf: leaf if is_axes(leaf) else jnp.zeros(leaf.shape, leaf.dtype),
    variables,
    is_leaf=is_axes,
  )


def save(state, directory, step=7, **facts):
  """Write a checkpoint and returns its path."""
  with checkpoints.CheckpointManager(
    directory, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(step, state.state_dict(), **facts)
  return checkpoints.get_checkpoint_dir(directory, step)


def restore(path, shapes, *transforms, **options):
  """Return the state that `shapes` wants, from a checkpoint."""
  cfg = checkpoints.RestoreCheckpointConfig(
    path=path, mode='specific', builders=transforms, **options
  )
  restored = checkpoints.restore_checkpoint(path, shapes.state_dict(), restore_cfg=cfg)
  return shapes.restore_state(restored.state)


def logits(module, state):
  """Return the logits of the targets that are no padding: that is not routed."""
  batch = batch_of(module)
  variables = {'params': state.params, **state.flax_mutables}
  found = cases.jit(lambda v: module.apply(v, **batch, enable_dropout=False))(variables)
  return np.asarray(found)[np.asarray(batch['decoder_target_tokens']) > 0]


def flat(state):
  """Return a state as a flat dict of NumPy arrays."""
  return {
    name: np.asarray(leaf) for name, leaf in tree_utils.flatten_dict(state.state_dict()).items()
  }
