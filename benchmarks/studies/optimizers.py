"""Trains keyword cloze with six optimizers at tuned rates, and compares loss, steps and seconds.

Each optimizer is tuned on one seed: three rates, a factor of 2 apart, and further ones until the best is not at the end
of the tried ones; the best has the lowest validation loss after the last step. It is then trained with all seeds. The
schedule is that of the recipe, warm-up and half a cosine. Finished runs are kept and not repeated, so the study may be
interrupted. About 30 s for each of about 50 runs on 2 cores:

  python benchmarks/studies/optimizers.py --out runs/optimizers_study

Seconds are steps divided by the steps per second of a run of 200 steps, without compilation and evaluations. Delete the
folders `*_speed` to measure all of them again, with nothing else running.
"""

import argparse
import dataclasses
import pathlib
import statistics

import runs as study

# Steps of a run that measures the speed.
_SPEED_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An optimizer of the study.

  Attributes:
    first_rate: middle one of the rates that are tried first.
    options: bindings next to its file in `gin/optimizers`, by name.
  """

  first_rate: float
  options: tuple[tuple[str, str], ...] = ()


_OPTIMIZERS = {
  'adamw': Optimizer(0.004),
  'adafactor': Optimizer(0.06),
  'scaled_adam': Optimizer(0.06),
  # A short run needs a shorter memory of second moments, and an earlier start.
  'distributed_shampoo': Optimizer(
    0.004,
    (
      ('optimizers.distributed_shampoo.beta2', '0.98'),
      ('optimizers.distributed_shampoo.start_preconditioning_step', '25'),
    ),
  ),
  'soap': Optimizer(0.004),
  'muon': Optimizer(0.004),
}


@dataclasses.dataclass(frozen=True)
class Study:
  """The runs of the study.

  Attributes:
    out: folder of the runs.
    steps: number of training steps of each run.
    period: steps between two evaluations.
  """

  out: pathlib.Path
  steps: int
  period: int

  def run(self, name: str, rate: float, seed: int) -> pathlib.Path:
    """Return the finished run of an optimizer."""
    return self._run(f'{name}_{rate:g}_{seed}', name, rate, seed, self.steps, self.period)

  def steps_per_second(self, name: str, rate: float) -> float:
    """Return the median of a run without evaluations before its end."""
    folder = self._run(f'{name}_speed', name, rate, 0, _SPEED_STEPS, _SPEED_STEPS)
    _, *rates = study.curve(folder, *study.STEPS_PER_SECOND).values()  # without compilation
    return statistics.median(rates)

  def _run(
    self, folder_name: str, name: str, rate: float, seed: int, steps: int, period: int
  ) -> pathlib.Path:
    folder = self.out / folder_name
    flags = {
      'LEARNING_RATE': rate,
      'RANDOM_SEED': seed,
      'TRAIN_STEPS': steps,
      'EVAL_PERIOD': period,
      'EVAL_STEPS': 16,
      **dict(_OPTIMIZERS[name].options),
    }
    files = ['recipes/keyword_cloze_optimizers.gin', f'optimizers/{name}.gin']
    study.train(folder, files, flags)
    return folder

  def losses(self, name: str, rate: float, seed: int) -> dict[int, float]:
    """Return step to validation loss."""
    return study.curve(self.run(name, rate, seed), *study.LOSS)

  def best_rate(self, name: str, seed: int) -> tuple[float, list[float]]:
    """Return (the best rate, all tried ones in ascending order)."""
    first = _OPTIMIZERS[name].first_rate
    found = {}
    pending = [first / 2, first, first * 2]
    while pending:
      for rate in pending:
        found[rate] = self.losses(name, rate, seed)[self.steps]
      best = min(found, key=found.__getitem__)
      pending = []
      if best == min(found):
        pending = [best / 2]
      elif best == max(found):
        pending = [best * 2]
    return best, sorted(found)


def first_step_at(losses: dict[int, float], target: float) -> int | None:
  """Return the first evaluated step whose loss is at most `target`, or None."""
  return next((step for step, loss in sorted(losses.items()) if loss <= target), None)


def main() -> None:
  """Run the study and print its table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--out', type=pathlib.Path, required=True, help='folder of the runs')
  parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 3, 4])
  parser.add_argument('--steps', type=int, default=300)
  parser.add_argument('--period', type=int, default=20, help='steps between two evaluations')
  parser.add_argument('--target', type=float, default=0.35, help='validation loss to reach')
  parser.add_argument('--only', nargs='+', choices=_OPTIMIZERS, default=list(_OPTIMIZERS))
  arguments = parser.parse_args()
  of_study = Study(arguments.out, arguments.steps, arguments.period)
  lines = [
    '| optimizer | rate | tried | validation loss | exact match '
    f'| steps to {arguments.target:g} | seconds to it |',
    '|---|---|---|---|---|---|---|',
  ]
  for name in arguments.only:
    rate, tried = of_study.best_rate(name, arguments.seeds[0])
    curves = [of_study.losses(name, rate, seed) for seed in arguments.seeds]
    folders = [of_study.run(name, rate, seed) for seed in arguments.seeds]
    speed = of_study.steps_per_second(name, rate)
    loss, loss_range = study.mean_and_deviation([losses[arguments.steps] for losses in curves])
    matches = [study.curve(folder, *study.MATCH)[arguments.steps] for folder in folders]
    match, match_range = study.mean_and_deviation(matches)
    reached = [first_step_at(losses, arguments.target) for losses in curves]
    steps = 'not reached'
    seconds = ''
    if None not in reached:
      steps = f'{statistics.mean(reached):.0f} ({min(reached)} to {max(reached)})'
      seconds = f'{statistics.mean(reached) / speed:.1f}'
    lines.append(
      f'| `{name}` | {rate:g} | {", ".join(f"{each:g}" for each in tried)} | {loss:.3f} ± {loss_range:.3f} '
      f'| {match:.3f} ± {match_range:.3f} | {steps} | {seconds} |'
    )
  print('\n'.join(lines))
  print(
    f'{arguments.steps} steps; mean and standard deviation over {len(arguments.seeds)} seeds; tuned on seed '
    f'{arguments.seeds[0]}; evaluated every {arguments.period} steps.'
  )


if __name__ == '__main__':
  main()
