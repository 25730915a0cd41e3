"""Memory and work of a compiled step of sharded Shampoo, for tests and for `benchmarks/shampoo.py`.

As a program, `python -m tests.optimizers.shampoo.compiled_memory 64 replicated` prints the figures of 8 kernels
1024 x 2048 for a number of devices, which must be in XLA_FLAGS too, as JSON; `sharded` kernels are sharded over them.
`t5_small` are the parameters of T5 1.1 small, sharded too, in blocks of 1024, `t5_small_spread` with roots that are
spread over 20 steps.
"""

import functools
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from t5x_lite import optimizers
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.networks import t5
from t5x_lite.optimizers.shampoo import roots
from t5x_lite.optimizers.shampoo.blocks import make_layout
from t5x_lite.optimizers.shampoo.root_balance import RootBalance

_AXES = ('data', 'model')
_COLLECTIVE = re.compile(
  r' = \(?(.*?)\)? (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\('
)


def measure(num_devices, spec, shape, *, num_kernels=8, num_layers=None, **options):
  """Return figures of a step that updates equal kernels, in bytes per device.

  Args:
    num_devices: number of devices.
    spec: `PartitionSpec` of the kernels, without that of the layers.
    shape: shape of a kernel.
    num_kernels: number of kernels, or of layers.
    num_layers: stack layers in arrays with this many layers; None does not stack.
    **options: options of `distributed_shampoo`.

  Returns:
    {'temporaries', 'state': without parameters, 'matrices': those of one kernel, 'collective': largest result of a
    collective operation, 'flops'}.
  """
  names = [f'layers_{i}' for i in range(num_kernels)]
  if num_layers:
    names = [
      'layers_' + ','.join(map(str, range(i, i + num_layers)))
      for i in range(0, num_kernels, num_layers)
    ]
    shape, spec = (num_layers, *shape), P(None, *spec)
  tx = optimizers.distributed_shampoo(1e-3, shard_optimizer_states=True, **options).optax_optimizer
  params = {
    'decoder': {name: {'kernel': jax.ShapeDtypeStruct(shape, jnp.float32)} for name in names}
  }
  single = {
    'decoder': {
      f'layers_{i}': {'kernel': jax.ShapeDtypeStruct(shape[-2:], jnp.float32)}
      for i in range(num_kernels)
    }
  }
  state = jax.eval_shape(tx.init, single)
  if num_layers:
    state = LayerStacks(
      tuple(('decoder', tuple(range(i, i + num_layers))) for i in range(0, num_kernels, num_layers))
    ).stack(state)
  size = state.stats.global_stats.statistics.shape[-1]

  def axes_of(array):
    if array.shape == shape:
      return spec
    return P(_AXES) if array.shape[1:] == (size, size) else P()

  num_matrices = sum(-(-dim // size) for dim in shape[-2:-1]) * -(-shape[-1] // size) * 2
  return {'matrices': 4 * num_matrices * size**2} | _figures(
    num_devices, tx, params, state, axes_of
  )


def measure_t5_small(num_devices, **options):
  """Return the figures of `measure` but 'matrices' for T5 1.1 small, with each array sharded in its first dim.

  Unless roots are spread, the figures of `_root_flops` too.
  """
  config = t5.T5Config(
    vocab_size=32128,
    emb_dim=512,
    num_heads=6,
    num_encoder_layers=8,
    num_decoder_layers=8,
    head_dim=64,
    mlp_dim=1024,
    mlp_activations=('gelu', 'linear'),
    logits_via_embedding=False,
  )
  network = t5.Transformer(config)
  tokens = jnp.ones([1, 8], jnp.int32)
  params = jax.eval_shape(
    lambda: network.init(jax.random.key(0), *[tokens] * 3, enable_dropout=False)
  )['params']
  tx = optimizers.distributed_shampoo(1e-3, shard_optimizer_states=True, **options).optax_optimizer
  state = jax.eval_shape(tx.init, params)

  def axes_of(array):
    return P(_AXES) if array.shape and array.shape[0] % num_devices == 0 else P()

  figures = _figures(num_devices, tx, params, state, axes_of)
  if not options.get('spread_roots'):
    figures |= _root_flops(num_devices, params, options['block_size'])
  return figures


def _root_flops(num_devices, params, block_size):
  """Return {'most_root_flops', 'share_of_root_flops'}: FLOPs of the device with most, and of all divided by devices.

  A device's FLOPs are its number of pieces times those of the compiled root of a piece, with one iteration of each
  loop, summed over sizes and exponents.
  """
  layouts = [
    make_layout(leaf.shape, block_size=block_size, merge_dims=True, largest_dim=4096)
    for leaf in jax.tree.leaves(params)
  ]
  keys = [(size, layout.exponent) for layout in layouts for size in layout.sizes]
  batches = [(np.flatnonzero([key == each for each in keys]), *key) for key in sorted(set(keys))]
  num_rows = -(-len(keys) // num_devices)
  balance = RootBalance(batches, num_devices, num_rows)
  flops = np.zeros(num_devices)
  share = 0.0
  for size, exponent, num_pieces, rows in balance.classes:
    flops += num_pieces * _flops_of_roots(size, exponent, rows.shape[-1])
    num_matrices = keys.count((size, exponent))
    share += num_matrices * _flops_of_roots(size, exponent, 1) / num_devices
  return {'most_root_flops': flops.max(), 'share_of_root_flops': share}


def _flops_of_roots(size, exponent, num_matrices):
  """Return the FLOPs of the compiled roots of matrices of one size, with one iteration of each loop."""
  root_fn = jax.vmap(functools.partial(roots.inverse_pth_root, p=exponent))
  matrices = jax.ShapeDtypeStruct([num_matrices, size, size], jnp.float32)
  return jax.jit(root_fn).lower(matrices).compile().cost_analysis()['flops']


def _figures(num_devices, tx, params, state, axes_of):
  """Return the figures of `measure` but 'matrices', given the function of an array that returns its spec."""
  mesh = Mesh(
    np.reshape(jax.devices()[:num_devices], (-1, 2 if num_devices > 1 else 1)),
    _AXES,
    axis_types=(AxisType.Auto,) * 2,
  )

  def place(array):
    axes = axes_of(array)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, axes))

  def update(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return jax.tree.map(jnp.add, params, updates), state

  placed = jax.tree.map(place, (params, state))
  with jax.set_mesh(mesh):
    compiled = (
      jax.jit(
        update, donate_argnums=(0, 1), out_shardings=jax.tree.map(lambda x: x.sharding, placed)
      )
      .lower(*placed, placed[0])
      .compile()
    )
  results = [
    bytes_
    for match in _COLLECTIVE.finditer(compiled.as_text())
    for bytes_ in _sizes(match.group(1))
  ]
  return {
    'temporaries': compiled.memory_analysis().temp_size_in_bytes,
    'state': sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves(placed[1])
    ),
    'collective': max(results, default=0),
    'flops': compiled.cost_analysis()['flops'],
  }


def _sizes(result):
  """Return the bytes of each float32 array in the type of a result."""
  return [
    4 * math.prod(map(int, dims.split(','))) for dims in re.findall(r'f32\[([\d,]+)\]', result)
  ]


if __name__ == '__main__':
  count = int(sys.argv[1])
  name = sys.argv[2]
  options = {'root_method': 'coupled_newton'}
  if name == 't5_small':
    figures = measure_t5_small(count, block_size=1024, **options)
  elif name == 't5_small_spread':
    options |= {'spread_roots': True, 'preconditioning_compute_steps': 20}
    figures = measure_t5_small(count, block_size=1024, **options)
  else:
    kernel_spec = {'sharded': P(_AXES), 'replicated': P()}[name]
    figures = measure(count, kernel_spec, (1024, 2048), **options)
  print(json.dumps(figures))
