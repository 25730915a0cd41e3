"""Classes with the structure of a train state, with logical axes."""

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


@struct.dataclass
class FakeOptimizer:
  """Shaped as `optimizers.Optimizer` is."""

  state: dict
  target: dict


@struct.dataclass
class FakeTrainState:
  """Shaped as `train_state.FlaxOptimTrainState` is."""

  _optimizer: FakeOptimizer
  flax_mutables: dict = struct.field(default_factory=dict)

  def as_logical_axes(self):
    axes = params_axes()
    return FakeTrainState(
      FakeOptimizer(
        state={
          'step': P(),
          'param_states': {
            'mu': axes,
            'nu': jax.tree.map(lambda _: P(None), axes, is_leaf=lambda node: isinstance(node, P)),
          },
        },
        target=axes,
      ),
      flax_mutables={'counts': {'seen': P('vocab')}} if self.flax_mutables else {},
    )


def params_axes():
  layer = {'mlp': {'wi': P('embed', 'mlp')}, 'norm': P('embed')}
  return {'embedding': P('vocab', 'embed'), 'layers_0': layer, 'layers_1': layer}


def make_state(mutables=True, **other_params):
  layer = {'mlp': {'wi': jnp.ones([16, 32])}, 'norm': jnp.ones([16])}
  params = {'embedding': jnp.ones([64, 16]), 'layers_0': layer, 'layers_1': layer}
  return FakeTrainState(
    FakeOptimizer(
      target=params | other_params,
      state={
        'step': jnp.int32(0),
        'param_states': {
          'mu': jax.tree.map(lambda x: x.astype(jnp.bfloat16), params),
          'nu': jax.tree.map(lambda x: jnp.zeros([1]), params),
        },
      },
    ),
    flax_mutables={'counts': {'seen': jnp.zeros([64], jnp.int32)}} if mutables else {},
  )
