"""Memory and work of a compiled step of sharded Shampoo, for tests and for `benchmarks/shampoo.py`.

As a program, `python -m tests.optimizers.shampoo.compiled_memory 64 replicated` prints the figures of 8 kernels
1024 x 2048 for a number of devices, which must be in XLA_FLAGS too, as JSON; `sharded` kernels are sharded over them.
"""

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
  mesh = Mesh(
    np.reshape(jax.devices()[:num_devices], (-1, 2 if num_devices > 1 else 1)),
    ('data', 'model'),
    axis_types=(AxisType.Auto,) * 2,
  )
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

  def place(array):
    if array.shape == shape:
      axes = spec
    else:
      axes = P(('data', 'model')) if array.shape[1:] == (size, size) else P()
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
  num_matrices = sum(-(-dim // size) for dim in shape[-2:-1]) * -(-shape[-1] // size) * 2
  return {
    'temporaries': compiled.memory_analysis().temp_size_in_bytes,
    'state': sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves(placed[1])
    ),
    'matrices': 4 * num_matrices * size**2,
    'collective': max(results, default=0),
    'flops': compiled.cost_analysis()['flops'],
  }


def _sizes(result):
  """Return the bytes of each float32 array in the type of a result."""
  return [
    4 * math.prod(map(int, dims.split(','))) for dims in re.findall(r'f32\[([\d,]+)\]', result)
  ]


if __name__ == '__main__':
  kernel_spec = {'sharded': P(('data', 'model')), 'replicated': P()}[sys.argv[2]]
  print(
    json.dumps(measure(int(sys.argv[1]), kernel_spec, (1024, 2048), root_method='coupled_newton'))
  )
