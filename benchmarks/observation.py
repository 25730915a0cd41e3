"""Cost of what a run records or keeps: summaries, log lines, an average of the parameters, in % of a training step.

    python benchmarks/observation.py [--pairs 20] [--steps 3] [--layers 8] [--batch 8] [--inputs 128] [--targets 64]
        [--optimizer adafactor]

Steps of the 77 M-parameter T5 1.1 small run by `Trainer.train`, in turns without any record (the baseline) and with
those of a row, which are made in every step here: a run makes them every 100 steps and every `stats_period`. The row
`average` keeps an exponential average of the parameters. Steps differ by several percent from one to the next, so the
additional work is also timed alone. To add a row, add an entry to `_rows`: a function that trains a number of steps and
a function that does the additional work of one step once.
"""

import argparse
from collections.abc import Callable
import statistics
import tempfile
from typing import NamedTuple

import common


class Row(NamedTuple):
  """Row of the table: something that is recorded or kept.

  Attributes:
    name: name of the row.
    train: trains the given number of steps.
    work: does the additional work of one step; None if it cannot be separated from the step.
  """

  name: str
  train: Callable[[int], None]
  work: Callable[[], None] | None = None


def _rows(trainer, averaging_trainer, batch, folder: str) -> list[Row]:
  """Return the rows; the first one is the baseline, whose summaries are computed once and not written."""
  import io
  import itertools

  import jax
  import jax.numpy as jnp

  from t5x_lite import runtime
  from t5x_lite.apps.train.step_log import LogConfig
  from t5x_lite.apps.train.step_log import StepLog
  from t5x_lite.trainer import summaries

  batches = itertools.repeat(batch)
  silent, written = summaries.MetricsManager('train'), summaries.MetricsManager('train', folder)
  memory = runtime.DeviceMemory(trainer.partitioner.mesh.local_devices)
  log = StepLog(
    LogConfig(period=1), runtime.Progress(stream=io.StringIO(), process=0), memory, written, 0
  )
  newest = {}

  def train(num_steps, manager, *, stretch=None, on_step=None):
    trainer.train_metrics_manager = manager
    for _ in range(num_steps // (stretch or num_steps)):
      trainer.train(batches, stretch or num_steps, on_step=on_step)
    trainer.finish_steps(on_step)
    manager.flush()

  def keep(step, metrics):
    newest.update(step=step, metrics=metrics)

  def summarize():
    written.start_duration_timer()
    written.write_metrics_summary(newest['metrics'], newest['step'], 1).result()

  def train_with_average(num_steps):
    averaging_trainer.train_metrics_manager = silent
    averaging_trainer.train(batches, num_steps)
    averaging_trainer.finish_steps()

  state = averaging_trainer.step_state
  params = jax.tree.map(jnp.copy, state.params)
  update, average = (
    jax.jit(state.param_ema.update, donate_argnums=0),
    [state.param_ema.init(params)],
  )
  del state

  def update_average():
    average[0] = jax.block_until_ready(update(average[0], params, jnp.int32(1)))

  train(2, silent, on_step=keep)  # touches fresh memory
  train_with_average(2)
  return [
    Row('nothing', lambda n: train(n, silent)),
    Row('summaries', lambda n: train(n, written, stretch=1), summarize),
    Row(
      'log lines', lambda n: train(n, silent, on_step=log.on_step), lambda: log.on_step(**newest)
    ),
    Row(
      'both',
      lambda n: train(n, written, stretch=1, on_step=log.on_step),
      lambda: (summarize(), log.on_step(**newest)),
    ),
    Row('average', train_with_average, update_average),
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--pairs', type=common.positive, default=20)
  parser.add_argument('--steps', type=common.positive, default=3, help='steps per turn')
  common.add_t5_small_arguments(parser)
  args = parser.parse_args()

  import jax

  from t5x_lite import trainer as trainer_lib
  from t5x_lite import tree_utils
  from t5x_lite.trainer import averaging
  from t5x_lite.trainer import state_init

  setup = common.t5_small(args)
  before = common.matmul_gflops()
  trainer = common.trainer(setup)
  trainer.compile_train(setup.batch)
  trainer.step_state = setup.initializer.from_scratch(jax.random.key(0), trainer.stacked_layers)
  initializer = state_init.TrainStateInitializer(
    setup.model.optimizer_def,
    setup.model.get_initial_variables,
    {name: array.shape for name, array in setup.batch.items()},
    setup.partitioner,
    {name: array.dtype for name, array in setup.batch.items()},
    averaging.ParamEma(decay=0.999),
  )
  averaging_trainer = trainer_lib.Trainer(
    setup.model,
    initializer.global_train_state_shape,
    setup.partitioner,
    [],
    None,
    initializer.train_state_axes,
    jax.random.key(0),
  )
  averaging_trainer.compile_train(setup.batch)
  averaging_trainer.step_state = initializer.from_scratch(
    jax.random.key(0), averaging_trainer.stacked_layers
  )
  num_params = tree_utils.num_elements(trainer.step_state.params)
  with tempfile.TemporaryDirectory() as folder:
    rows = _rows(trainer, averaging_trainer, setup.batch, folder)
    seconds = {row.name: [] for row in rows}
    for turn in range(args.pairs):
      for row in (
        rows[turn % len(rows) :] + rows[: turn % len(rows)]
      ):  # no row always follows the same one
        seconds[row.name].append(
          common.timed(lambda row=row: row.train(args.steps))[0] / args.steps
        )
    alone = {
      row.name: common.seconds_per_call(row.work, 200) for row in rows if row.work is not None
    }
    trainer.close()
  after = common.matmul_gflops()

  baseline = seconds[rows[0].name]
  step, table = statistics.median(baseline), []
  for row in rows:
    ratios = [mine / without for mine, without in zip(seconds[row.name], baseline, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2
    work = alone.get(row.name)
    table.append(
      (
        row.name,
        statistics.median(seconds[row.name]),
        f'{statistics.median(ratios):.4f}',
        ' to '.join(f'{q:.4f}' for q in quartiles),
        '' if work is None else 1e3 * work,
        '' if work is None else f'{work / step:.3%}',
      )
    )
  common.print_table(
    f'Cost of records in every step ({num_params:,} parameters, {args.optimizer})',
    table,
    ['row', 'step, s', 'ratio to nothing (median)', 'quartiles', 'alone, ms', 'share of a step'],
  )
  print(f'matmul before and after: {before:.0f}, {after:.0f} GFLOP/s')


if __name__ == '__main__':
  common.start_like_commands()
  main()
