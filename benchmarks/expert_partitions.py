"""Mixture of Experts: work and memory of a device by the number of expert partitions, from compiled programs.

    python benchmarks/expert_partitions.py [--partitions 1 2 4 8 16 32 64] [--kernels padded tiles]

Each device has 1024 tokens of 2 choices among 64 experts, width 256, hidden 512, gelu, float32; the program is dropless
dispatch, forward and backward, on virtual CPU devices. Its work is an upper bound: the FLOPs of the compiled program
(`cost_analysis`, which counts each loop once) times the number of blocks that the loops of `padded` run, over the FLOPs
of a device's choices. Balanced loads are equal for all experts, drawn loads are of random choices (mean of the
devices), and with uneven loads (Zipf 1) the busiest device counts. `tiles` has nested loops, whose work is not known
from the program. Temporaries are those of `memory_analysis`. Nothing is executed.
"""

import argparse

import common

_TOKENS, _CHOICES, _EXPERTS, _WIDTH, _HIDDEN = 1024, 2, 64, 256, 512
_RULES = (
  ('batch', ('expert', 'data')),
  ('expert', 'expert'),
  ('expert_replicas', 'data'),
  ('expert_mlp', 'model'),
  ('embed', None),
)


def compile_layer(num_partitions, kernel):
  """Return the compiled loss and gradients of dropless experts on a mesh of expert partitions."""
  from flax.linen import partitioning as nn_partitioning
  import jax
  import jax.numpy as jnp
  from jax.sharding import AxisType
  from jax.sharding import NamedSharding
  from jax.sharding import PartitionSpec

  from moe import dispatch
  from moe.dispatch import grouped
  from moe.routing.types import TokenChoice

  grouped.KERNELS_OF_BACKEND['cpu'] = (kernel,)
  mesh = jax.make_mesh(
    (1, num_partitions, 1),
    ('data', 'expert', 'model'),
    axis_types=(AxisType.Auto,) * 3,
    devices=jax.devices()[:num_partitions],
  )
  sharding = NamedSharding(mesh, PartitionSpec('expert'))

  def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  def loss(x, gates, params, expert_index):
    routing = TokenChoice(
      expert_index=expert_index,
      gates=gates,
      position=None,
      probs=jnp.zeros((*x.shape[:2], _EXPERTS)),
      auxiliary_loss=jnp.zeros([]),
      router_z_loss=jnp.zeros([]),
      num_experts=_EXPERTS,
      capacity=None,
    )
    y, _ = dispatch.apply_experts(x, routing, params, dispatch.MlpSpec(('gelu',)), method='grouped')
    return jnp.sum(y**2)

  params = dispatch.MlpParams(
    wi=(array(_EXPERTS, _WIDTH, _HIDDEN),), wo=array(_EXPERTS, _HIDDEN, _WIDTH)
  )
  choices = (num_partitions, _TOKENS, _CHOICES)
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(_RULES):
    return (
      jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
      .lower(
        array(num_partitions, _TOKENS, _WIDTH),
        array(*choices),
        params,
        array(*choices, dtype=jnp.int32),
      )
      .compile()
    )


def device_loads(num_partitions, rng, zipf):
  """Return the loads int [P, E / P] of random choices; their mean is that of balanced ones."""
  shares = 1.0 / (1 + rng.permutation(_EXPERTS)) ** zipf
  loads = rng.multinomial(num_partitions * _TOKENS * _CHOICES, shares / shares.sum())
  return loads.reshape(num_partitions, -1)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--partitions', type=common.positive, nargs='+', default=[1, 2, 4, 8, 16, 32, 64]
  )
  parser.add_argument(
    '--kernels', nargs='+', choices=('padded', 'tiles'), default=['padded', 'tiles']
  )
  args = parser.parse_args()
  import jax
  import numpy as np

  from moe.dispatch.accelerators import PaddedBlocks

  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', max(args.partitions))
  rng = np.random.default_rng(0)
  num_rows = _TOKENS * _CHOICES
  ideal_per_row = 3 * 2 * 2 * _WIDTH * _HIDDEN
  rows = []
  for num_partitions in args.partitions:
    programs = {kernel: compile_layer(num_partitions, kernel) for kernel in args.kernels}
    work = ['', '', '']
    if 'padded' in programs:
      flops = programs['padded'].cost_analysis()['flops']
      blocks = PaddedBlocks.for_rows(num_rows, _EXPERTS // num_partitions)

      def ratio(loads, flops=flops, blocks=blocks):
        return (
          flops
          * sum(int(blocks.num_blocks(sizes)) for sizes in loads)
          / (ideal_per_row * np.sum(loads))
        )

      uneven = device_loads(num_partitions, rng, 1.0)
      busiest = uneven[np.argmax(uneven.sum(axis=1))][None]
      work = [
        f'{ratio(loads):.2f}'
        for loads in (
          np.full((1, _EXPERTS // num_partitions), num_rows * num_partitions // _EXPERTS),
          device_loads(num_partitions, rng, 0.0),
          busiest,
        )
      ]
    memory = [
      f'{programs[kernel].memory_analysis().temp_size_in_bytes / 1e6:.0f}'
      for kernel in args.kernels
    ]
    rows.append((num_partitions, *work, *memory))
  common.print_table(
    'Experts: FLOPs of a device over those of its choices, and its temporaries in MB',
    rows,
    (
      'partitions',
      'padded, balanced',
      'drawn',
      'Zipf 1, busiest',
      *(f'MB, {kernel}' for kernel in args.kernels),
    ),
  )


if __name__ == '__main__':
  common.start_like_commands()
  main()
