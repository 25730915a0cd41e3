"""Cost of a follower for trackers, in % of a training step.

    python benchmarks/trackers.py [--pairs 10] [--steps 30] [--poll 1] [--layers 8] [--batch 8] [--inputs 128]
        [--targets 64] [--optimizer adafactor]

Steps of the 77 M-parameter T5 1.1 small run by `Trainer.train`, in turns without and with a thread that follows the
run's files, 300 steps of each; the metrics of each step are written in both. The tracker writes TensorBoard events of
each line, so it has the most work per line without a network. A turn begins when the follower has looked once and has
the lines of the turn before. `train` looks at the files every 10 s instead of every
second, and writes metrics every `stats_period` steps. Steps differ by several percent from one to the next, so one look
at the files is also timed alone, without and with a new line.
"""

import argparse
import itertools
import pathlib
import statistics
import tempfile
import threading

import common


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--pairs', type=common.positive, default=10)
  parser.add_argument('--steps', type=common.positive, default=30, help='steps per turn')
  parser.add_argument('--poll', type=float, default=1.0, help='seconds between two looks')
  common.add_t5_small_arguments(parser)
  args = parser.parse_args()

  import jax

  from t5x_lite import runtime
  from t5x_lite import trackers
  from t5x_lite import tree_utils
  from t5x_lite.trainer import summaries

  setup = common.t5_small(args)
  before = common.matmul_gflops()
  trainer = common.trainer(setup)
  trainer.compile_train(setup.batch)
  trainer.step_state = setup.initializer.from_scratch(jax.random.key(0), trainer.stacked_layers)
  num_params = tree_utils.num_elements(trainer.step_state.params)
  batches = itertools.repeat(setup.batch)
  seconds = {False: [], True: []}
  with tempfile.TemporaryDirectory() as folder:
    run = pathlib.Path(folder) / 'run'
    run.mkdir()
    event = runtime.Event(kind='start', wall_time=1.0)
    (run / runtime.EVENTS_FILE).write_text(event.to_line(), encoding='utf-8')
    manager = summaries.MetricsManager('train', run)
    trainer.train_metrics_manager = manager

    def train() -> None:
      for _ in range(args.steps):
        trainer.train(batches, 1)
      trainer.finish_steps()
      manager.flush()

    class Tracker(trackers.TensorBoard):
      """A tracker that tells when it has the first lines."""

      name = 'tensorboard'

      def __init__(self):
        super().__init__(log_dir=folder)
        self.has_looked = threading.Event()

      def flush(self) -> None:
        super().flush()
        self.has_looked.set()

    trainer.train(batches, 2)  # touches fresh memory
    trainer.finish_steps()
    for turn in range(args.pairs):
      for follows in (turn % 2 == 0, turn % 2 == 1):
        given = [Tracker()] if follows else []
        with trackers.FollowerThreads(run, given, poll_seconds=args.poll) as threads:
          threads.start()
          for tracker in given:
            tracker.has_looked.wait()
          seconds[follows].append(common.timed(train)[0] / args.steps)
    follower = trackers.Follower(run, Tracker())
    follower.send()
    idle = common.seconds_per_call(follower.send, 200)

    def write() -> None:
      manager.write_scalars(trainer.step + 1, dict.fromkeys(map(str, range(30)), 1.0))
      manager.flush()

    def write_and_send() -> None:
      write()
      follower.send()

    with_line = common.seconds_per_call(write_and_send, 200) - common.seconds_per_call(write, 200)
    trainer.close()
  after = common.matmul_gflops()

  ratios = [mine / alone for mine, alone in zip(seconds[True], seconds[False], strict=True)]
  quartiles = ratios * 2
  if len(ratios) > 1:
    quartiles = statistics.quantiles(ratios, n=4)[::2]
  step = statistics.median(seconds[False])
  common.print_table(
    f'Cost of a follower, a look every {args.poll:g} s ({num_params:,} parameters, {args.optimizer})',
    [
      ('step without, s', f'{step:.4f}'),
      ('step with, s', f'{statistics.median(seconds[True]):.4f}'),
      ('ratio (median)', f'{statistics.median(ratios):.4f}'),
      ('ratio (quartiles)', ' to '.join(f'{q:.4f}' for q in quartiles)),
      ('look without a new line, ms', f'{1e3 * idle:.3f}'),
      ('look with a new line, ms', f'{1e3 * with_line:.3f}'),
      ('share of the time, alone', f'{with_line / args.poll:.3%}'),
    ],
    ['measure', 'value'],
  )
  print(f'matmul before and after: {before:.0f}, {after:.0f} GFLOP/s')


if __name__ == '__main__':
  common.start_like_commands()
  main()
