"""Benchmark the policies of rematerialization: memory, work and time of a forward and backward pass, per policy.

    python benchmarks/remat.py [--layers 12] [--batch 8] [--inputs 128] [--targets 64] [--turns 3] [--compile_only]

The model is T5 1.1 small with more layers, without dropout, in float32. 'In loops' is `scan_layers=True` with the
stacked parameters of a trainer, 'unrolled' is `scan_layers=False`. Temporaries are those of the compiled program. XLA
counts the body of a loop once, so GFLOP are those of the unrolled program. Times are the shortest of calls in turn in
this process, divided by that of 'none'. 'offload' has no effect on a CPU and is left out;
`tests/networks/test_remat.py` checks its program for a TPU.
"""

import argparse

import common


def _program(args: argparse.Namespace, policy: str, in_loops: bool):
  """Return (compiled function of parameters and batch, shapes of the parameters, batch)."""
  import jax

  from t5x_lite.layer_stacks import LayerStacks

  setup = common.t5_small(args, remat_policy=policy, scan_layers=in_loops)
  stacks = LayerStacks(
    tuple(
      (stack, group)
      for stack, groups in setup.model.module.scanned_layers.items()
      for group in groups
    )
  )
  shapes = jax.eval_shape(stacks.stack, setup.initializer.global_train_state_shape.params)
  step = jax.jit(
    jax.value_and_grad(lambda params, batch: setup.model.loss_fn(params, batch, None)[0])
  )
  return step.lower(shapes, setup.batch).compile(), shapes, setup.batch


def _seconds(program, shapes, batch):
  """Return a function that returns the seconds of one call."""
  import jax

  params = jax.tree.map(
    lambda leaf: jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype) * 0.05, shapes
  )
  return lambda: common.timed(lambda: jax.block_until_ready(program(params, batch)))[0]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  common.add_t5_small_arguments(parser)
  parser.set_defaults(layers=12)
  parser.add_argument(
    '--turns', type=common.positive, default=3, help='twice this number of calls are counted'
  )
  parser.add_argument('--compile_only', action='store_true', help='print no times')
  args = parser.parse_args()
  from t5x_lite.networks import remat

  policies = [policy for policy in remat.REMAT_POLICIES if policy != 'offload']
  before = common.matmul_gflops()
  facts, ratios = {}, {}
  for in_loops in (True, False):
    programs = {policy: _program(args, policy, in_loops) for policy in policies}
    for policy, (program, *_) in programs.items():
      facts[in_loops, policy] = common.program_facts(program)
    if not args.compile_only:
      seconds = common.in_turn([_seconds(*programs[policy]) for policy in policies], args.turns)
      ratios.update(
        {
          (in_loops, policy): min(column) / min(seconds[0])
          for policy, column in zip(policies, seconds, strict=True)
        }
      )
  rows = [
    (
      policy,
      facts[True, policy]['temporaries'],
      ratios.get((True, policy), ''),
      facts[False, policy]['temporaries'],
      ratios.get((False, policy), ''),
      facts[False, policy]['gflop'],
    )
    for policy in policies
  ]
  rows.append(('matmul 2048^3 GFLOP/s before, after', before, common.matmul_gflops(), '', '', ''))
  common.print_table(
    f'Rematerialization ({args.layers}+{args.layers} layers, batch {args.batch} x {args.inputs}/{args.targets})',
    rows,
    ('policy', 'in loops, MB', 'time / none', 'unrolled, MB', 'time / none', 'GFLOP'),
  )


if __name__ == '__main__':
  common.start_like_commands()
  main()
