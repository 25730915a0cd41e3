"""Cost of default safety checks: test of loss and gradient norm in each step, its late read, watchdog and events.

    python benchmarks/safety.py [--pairs 40] [--layers 8] [--batch 8] [--inputs 128] [--targets 64]
        [--optimizer adafactor]

Steps of the 77 M-parameter T5 1.1 small with the test ('stop') and without it ('ignore') are run in turn from the same
state. Steps differ by several percent from one to the next, so the fastest of both are compared too, and the test is
timed alone, as a separate program. The work of the host per step (reading the metric, the watchdog, the log of events)
is timed separately, and so is the writing of an event.
"""

import argparse
import itertools
import os
import statistics
import tempfile

import common


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--pairs', type=common.positive, default=40)
  common.add_t5_small_arguments(parser)
  args = parser.parse_args()

  import jax
  import jax.numpy as jnp

  from t5x_lite import runtime
  from t5x_lite import tree_utils
  from t5x_lite.optimizers import OptimizerState
  from t5x_lite.trainer import non_finite
  from t5x_lite.trainer import train_step

  before = common.matmul_gflops()
  setup = common.t5_small(args)
  model, partitioner, batch = setup.model, setup.partitioner, setup.batch
  state = setup.initializer.from_scratch(jax.random.key(0))
  axes, data_spec = setup.initializer.train_state_axes, partitioner.data_partition_spec

  compiled = {}
  for action in ('stop', 'ignore'):

    def step(state, batch, action=action):
      return train_step.train_with_lr(
        state, batch, jnp.float32(1e-3), None, model, None, non_finite_action=action
      )

    partitioned = partitioner.partition(step, (axes, data_spec), (axes, None), donate_argnums=(0,))
    compiled[action] = partitioned.lower(state, batch).compile()

  seconds = {action: [] for action in compiled}
  metrics = {}
  for index in range(args.pairs + 2):
    # The first of a pair is the other one each time, so that neither always follows a pause.
    for action in sorted(compiled, reverse=bool(index % 2)):
      spent, (state, metrics[action]) = common.timed(
        lambda: jax.block_until_ready(compiled[action](state, batch))
      )
      if index >= 2:  # the first steps touch fresh memory
        seconds[action].append(spent)

  # The parameters have the shapes of the gradients.
  state_after = OptimizerState(state.step, state.param_states)
  evidence = jax.block_until_ready(model.optimizer_def.gradient_evidence(state.params, state_after))
  test = jax.jit(non_finite.count_of_step).lower(jnp.float32(1), evidence).compile()
  test_seconds = common.seconds_per_call(
    lambda: jax.block_until_ready(test(jnp.float32(1), evidence)), 20
  )

  monitor = non_finite.Monitor(non_finite.NonFinitePolicy())
  read_seconds = common.seconds_per_call(lambda: monitor.observe(1, metrics['stop']))
  watchdog = runtime.Watchdog('auto')
  with watchdog.watching():
    steps = itertools.count(1)
    beat_seconds = common.seconds_per_call(lambda: watchdog.beat(next(steps)))
  watchdog.close()
  with (
    tempfile.TemporaryDirectory() as folder,
    runtime.EventLog(os.path.join(folder, runtime.EVENTS_FILE)) as log,
  ):
    log.open()
    with log.phase('step'):
      event_step_seconds = common.seconds_per_call(lambda: log.on_step(1))
      event_seconds = common.seconds_per_call(lambda: log.emit('progress'))
  after = common.matmul_gflops()

  ratios = [
    with_test / without
    for with_test, without in zip(seconds['stop'], seconds['ignore'], strict=True)
  ]
  median = statistics.median(seconds['ignore'])
  rows = [
    ('parameters', f'{tree_utils.num_elements(state.params):,}'),
    ('step without the test, s', median),
    ('step with the test, s', statistics.median(seconds['stop'])),
    ('ratio of the medians', statistics.median(seconds['stop']) / median),
    ('ratio of the fastest steps', min(seconds['stop']) / min(seconds['ignore'])),
    ('median ratio of the pairs', statistics.median(ratios)),
    (
      'quartiles of the ratios',
      ' to '.join(f'{q:.4f}' for q in statistics.quantiles(ratios, n=4)[::2]),
    ),
    ('the test alone, s', test_seconds),
    ('the test alone, share of a step', f'{test_seconds / median:.1e}'),
    ('reading the metric of a step, µs', 1e6 * read_seconds),
    ('telling the watchdog, µs', 1e6 * beat_seconds),
    ('telling the log of events, µs', 1e6 * event_step_seconds),
    (
      'the last three, share of a step',
      f'{(read_seconds + beat_seconds + event_step_seconds) / median:.1e}',
    ),
    ('writing an event, µs', 1e6 * event_seconds),
    ('matmul before and after, GFLOP/s', f'{before:.0f}, {after:.0f}'),
  ]
  common.print_table(f'Cost of the safety defaults ({args.optimizer})', rows, ['what', 't5x_lite'])


if __name__ == '__main__':
  common.start_like_commands()
  main()
