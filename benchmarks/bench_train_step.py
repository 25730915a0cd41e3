"""Train step: initialisation, trace, compile and step seconds, tokens per second, peak memory.

    python benchmarks/bench_train_step.py [--layers 8] [--batch 8] [--inputs 128] [--targets 64] [--remat none]
        [--scan] [--dtype float32] [--optimizer adafactor] [--steps 10]

The default is the 77 M-parameter T5 1.1 small (8+8 layers, width 512, 6 heads of 64, mlp 1024, vocabulary 32128).
Beside it runs a peer of the same mathematics in the formulation of T5X's example network (`peer_t5.py`), with optax's
optimizer of the same name, step by step in turn; its first loss is checked to be the same.
"""

import argparse
import statistics
import time

import common


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  common.add_t5_small_arguments(parser)
  parser.add_argument('--remat', default='none', choices=['none', 'minimal', 'full'])
  parser.add_argument('--scan', action='store_true', help='compile the layers as one scanned body')
  parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
  parser.add_argument('--steps', type=common.positive, default=10)
  args = parser.parse_args()

  start = time.perf_counter()
  import jax
  import jax.numpy as jnp
  import optax
  from t5x_lite import state_init  # noqa: F401  For the seconds of imports: `common.t5_small` imports it too.
  from t5x_lite import train_step
  from t5x_lite import tree_utils
  from t5x_lite.networks import t5  # noqa: F401
  jax.devices()
  import_seconds = time.perf_counter() - start
  import peer_t5

  before = common.matmul_gflops()
  setup = common.t5_small(args, dtype=jnp.dtype(args.dtype), remat_policy=args.remat, scan_layers=args.scan)
  config, model, partitioner, initializer, batch = (
      setup.config, setup.model, setup.partitioner, setup.initializer, setup.batch)
  init_seconds, state = common.timed(
      lambda: jax.block_until_ready(initializer.from_scratch(jax.random.key(0))))

  def step(state, batch):
    return train_step.train_with_lr(state, batch, jnp.float32(1e-3), None, model, None)

  axes = initializer.train_state_axes
  partitioned = partitioner.partition(step, (axes, partitioner.data_partition_spec), (axes, None), donate_argnums=(0,))
  trace_seconds, lowered = common.timed(lambda: partitioned.lower(state, batch))
  compile_seconds, compiled = common.timed(lowered.compile)
  memory = compiled.memory_analysis()
  flops = compiled.cost_analysis().get('flops', float('nan'))

  # The peer's optimizer is optax's of the same name; it has a separate state, since steps consume their state.
  peer_optimizer = optax.adafactor(1e-3) if args.optimizer == 'adafactor' else optax.adamw(1e-3)

  def peer_step(state, batch):
    params, optimizer_state = state
    loss, grads = jax.value_and_grad(peer_t5.loss_fn)(params, batch, config, 1e-4)
    updates, optimizer_state = peer_optimizer.update(grads, optimizer_state, params)
    return (optax.apply_updates(params, updates), optimizer_state), loss

  peer_params = jax.tree.map(jnp.array, state.params)
  peer_state = (peer_params, peer_optimizer.init(peer_params))
  del peer_params
  peer = jax.jit(peer_step, donate_argnums=(0,)).lower(peer_state, batch).compile()
  seconds, peer_seconds = [], []
  for index in range(args.steps + 2):
    spent, (state, metrics) = common.timed(lambda: jax.block_until_ready(compiled(state, batch)))
    peer_spent, (peer_state, peer_loss) = common.timed(lambda: jax.block_until_ready(peer(peer_state, batch)))
    if index == 0 and args.dtype == 'float32':
      loss = float(metrics['loss'].compute())
      assert abs(loss - float(peer_loss)) < 1e-4 * loss, (loss, float(peer_loss))
    if index >= 2:  # the first steps touch fresh memory
      seconds.append(spent)
      peer_seconds.append(peer_spent)
  def median_seconds(fn, *arguments):
    jax.block_until_ready(fn(*arguments))
    return statistics.median(common.timed(lambda: jax.block_until_ready(fn(*arguments)))[0] for _ in range(args.steps))

  def grads_of(loss_fn):
    return jax.jit(jax.value_and_grad(loss_fn)).lower(state.params, batch).compile()

  gradient_seconds = median_seconds(grads_of(lambda p, b: model.loss_fn(p, b, None)[0]), state.params, batch)
  peer_grads = grads_of(lambda p, b: peer_t5.loss_fn(p, b, config, 1e-4))
  peer_gradient_seconds = median_seconds(peer_grads, state.params, batch)
  after = common.matmul_gflops()
  median, peer_median = statistics.median(seconds), statistics.median(peer_seconds)
  tokens = args.batch * (args.inputs + args.targets)
  rows = [
      ('parameters', f'{tree_utils.num_elements(state.params):,}'),
      ('import and start, s', import_seconds),
      ('initialisation, s', init_seconds),
      ('trace, s', trace_seconds),
      ('compile, s', compile_seconds),
      ('step, s (median)', median),
      ('step, s (min)', min(seconds)),
      ('tokens/s', tokens / median),
      ('peer (T5X formulation): step, s (median)', peer_median),
      ('peer / ours', peer_median / median),
      ('forward and backward alone, s (median)', gradient_seconds),
      ('peer: forward and backward alone, s (median)', peer_gradient_seconds),
      ('peer: temporaries of forward and backward, MB', peer_grads.memory_analysis().temp_size_in_bytes / 1e6),
      ('peer / ours, forward and backward', peer_gradient_seconds / gradient_seconds),
      ('peer: GFLOP counted by XLA', peer.cost_analysis().get('flops', float('nan')) / 1e9),
      ('peer: temporaries, MB', peer.memory_analysis().temp_size_in_bytes / 1e6),
      ('GFLOP counted by XLA', flops / 1e9),
      ('GFLOP/s of the step', flops / median / 1e9),
      ('matmul 2048^3 GFLOP/s before, after', f'{before:.0f}, {after:.0f}'),
      ('temporaries, MB', memory.temp_size_in_bytes / 1e6 if memory else 'unknown'),
      ('peak resident memory, MB', common.peak_memory_mb()),
  ]
  common.print_table(f'Train step ({args.optimizer}, {args.dtype}, remat {args.remat}, scan {args.scan}, '
                     f'batch {args.batch} x {args.inputs}/{args.targets})', rows, ('what', 'value'))


if __name__ == '__main__':
  main()
