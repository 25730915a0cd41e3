"""Cost of what is on by default: the test of loss and gradient norm in each step, its late read, and the watchdog.

    python benchmarks/safety.py [--pairs 30] [--layers 8] [--batch 8] [--inputs 128] [--targets 64]

Steps of the 77 M-parameter T5 1.1 small with the test ('stop') and without it ('ignore') are run in turn from the same
state, and compared pair by pair. What the host does for a step (reading the metric, telling the watchdog) is timed apart.
"""

import argparse
import statistics
import time

import common


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--pairs', type=common.positive, default=30)
  parser.add_argument('--layers', type=common.positive, default=8)
  parser.add_argument('--batch', type=common.positive, default=8)
  parser.add_argument('--inputs', type=common.positive, default=128)
  parser.add_argument('--targets', type=common.positive, default=64)
  args = parser.parse_args()
  common.keep_freed_memory()

  import jax
  import jax.numpy as jnp
  from t5x_lite import adafactor
  from t5x_lite import models
  from t5x_lite import non_finite
  from t5x_lite import partitioning
  from t5x_lite import runtime
  from t5x_lite import state_init
  from t5x_lite import train_step
  from t5x_lite import tree_utils
  from t5x_lite.data import vocabularies
  from t5x_lite.networks import t5

  before = common.matmul_gflops()
  config = t5.T5Config(
      vocab_size=32128, dtype=jnp.float32, emb_dim=512, num_heads=6, num_encoder_layers=args.layers,
      num_decoder_layers=args.layers, head_dim=64, mlp_dim=1024, mlp_activations=('gelu', 'linear'), dropout_rate=0.0,
      logits_via_embedding=False)
  vocabulary = vocabularies.PassThroughVocabulary(32128)
  optimizer_def = adafactor.Adafactor(1e-3)
  model = models.EncoderDecoderModel(t5.Transformer(config), vocabulary, vocabulary, optimizer_def, z_loss=1e-4)
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  lengths = {'encoder_input_tokens': args.inputs, 'decoder_input_tokens': args.targets,
             'decoder_target_tokens': args.targets, 'decoder_loss_weights': args.targets}
  shapes = {name: (args.batch, length) for name, length in lengths.items()}
  initializer = state_init.TrainStateInitializer(
      optimizer_def, model.get_initial_variables, shapes, partitioner, {name: jnp.int32 for name in shapes})
  state = initializer.from_scratch(jax.random.key(0))
  axes, data_spec = initializer.train_state_axes, partitioner.data_partition_spec
  keys = jax.random.split(jax.random.key(1), len(shapes))
  batch = {name: jax.random.randint(key, shape, 2, 32000) for key, (name, shape) in zip(keys, shapes.items())}
  batch['decoder_loss_weights'] = jnp.ones_like(batch['decoder_loss_weights'])
  batch = jax.device_put(batch, jax.sharding.NamedSharding(partitioner.mesh, data_spec))

  compiled = {}
  for action in ('stop', 'ignore'):
    def step(state, batch, action=action):
      return train_step.train_with_lr(state, batch, jnp.float32(1e-3), None, model, None, non_finite_action=action)
    partitioned = partitioner.partition(step, (axes, data_spec), (axes, None), donate_argnums=(0,))
    compiled[action] = partitioned.lower(state, batch).compile()

  seconds = {action: [] for action in compiled}
  metrics = {}
  for index in range(args.pairs + 2):
    # The first of a pair is the other one each time, so that neither always follows a pause.
    for action in sorted(compiled, reverse=bool(index % 2)):
      spent, (state, metrics[action]) = common.timed(lambda: jax.block_until_ready(compiled[action](state, batch)))
      if index >= 2:  # the first steps touch fresh memory
        seconds[action].append(spent)

  monitor = non_finite.Monitor(non_finite.NonFinitePolicy())
  read_seconds = _seconds_per_call(lambda: monitor.observe(1, metrics['stop']))
  watchdog = runtime.Watchdog()
  with watchdog.watching():
    beat_seconds = _seconds_per_call(lambda: watchdog.beat(1))
  watchdog.close()
  after = common.matmul_gflops()

  ratios = [with_test / without for with_test, without in zip(seconds['stop'], seconds['ignore'], strict=True)]
  median = statistics.median(seconds['ignore'])
  rows = [
      ('parameters', f'{tree_utils.num_elements(state.params):,}'),
      ('step without the test, s', median),
      ('step with the test, s', statistics.median(seconds['stop'])),
      ('ratio of the medians', statistics.median(seconds['stop']) / median),
      ('median ratio of the pairs', statistics.median(ratios)),
      ('quartiles of the ratios', ' to '.join(f'{q:.4f}' for q in statistics.quantiles(ratios, n=4)[::2])),
      ('reading the metric of a step, µs', 1e6 * read_seconds),
      ('telling the watchdog, µs', 1e6 * beat_seconds),
      ('both, share of a step', f'{(read_seconds + beat_seconds) / median:.1e}'),
      ('matmul before and after, GFLOP/s', f'{before:.0f}, {after:.0f}'),
  ]
  common.print_table('Cost of the safety defaults', rows, ['what', 't5x_lite'])


def _seconds_per_call(fn, repeats: int = 1000) -> float:
  fn()
  start = time.perf_counter()
  for _ in range(repeats):
    fn()
  return (time.perf_counter() - start) / repeats


if __name__ == '__main__':
  main()
