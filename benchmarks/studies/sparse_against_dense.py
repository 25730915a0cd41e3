"""Trains the small sparse model and the dense one of equal active operations, and says which is better.

Both get the same learning rates and seeds; for each, the rate with the best mean of the validation loss at the end is
taken. Finished runs are kept and not repeated, so the study may be interrupted. About 50 s for each of the 18 runs on 2
cores:

  python benchmarks/studies/sparse_against_dense.py --out runs/sparse_against_dense
"""

import argparse
import itertools
import pathlib
import statistics
import subprocess
import sys

from t5x_lite import checkpoints
from t5x_lite.trainer import summaries

_RECIPES = {'dense': 'recipes/keyword_cloze.gin', 'sparse': 'recipes/keyword_cloze_moe.gin'}
_TASK = 'python_keyword_cloze'
# Compared values: writer and metric. The recipes divide the loss of a batch by its target tokens.
_LOSS = (f'training_eval/{_TASK}', 'cross_ent_loss')
_MATCH = (f'inference_eval/{_TASK}', 'exact_match')
_COLORS = {'dense': '#0072b2', 'sparse': '#d55e00'}


def train(folder: pathlib.Path, recipe: str, rate: float, seed: int, num_steps: int) -> None:
  """Train one model, unless it was trained before."""
  if checkpoints.all_steps(folder)[-1:] == [num_steps]:
    return
  flags = {
    'MODEL_DIR': folder,
    'LEARNING_RATE': rate,
    'RANDOM_SEED': seed,
    'TRAIN_STEPS': num_steps,
    'EVAL_PERIOD': num_steps // 5,
    'SAVING_PERIOD': num_steps,
    'DATA_SOURCE': 'builtin',
    'EVAL_STEPS': 16,
  }
  command = [
    sys.executable,
    '-m',
    't5x_lite',
    'train',
    f'--gin_file={recipe}',
    *(f'--gin.{name}={value}' for name, value in flags.items()),
  ]
  print(f'{folder.name}: training', flush=True)
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    sys.exit(
      f'{" ".join(map(str, command))} ended with status {done.returncode}:\n{done.stderr[-3000:]}'
    )


def curve(folder: pathlib.Path, writer: str, metric: str) -> dict[int, float]:
  """Return step to value of one metric of a run."""
  return {
    row['step']: row[metric]
    for row in summaries.read_metrics(folder / writer / summaries.METRICS_FILE)
  }


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
  """Return the mean and the sample standard deviation (0 of one value)."""
  return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def draw(
  path: pathlib.Path, curves: dict[str, dict[str, list[dict[int, float]]]], titles: dict[str, str]
) -> None:
  """Draw mean and deviation over seeds, a panel for each metric.

  Args:
    path: the picture.
    curves: metric to model to one curve for each seed.
    titles: metric to title.
  """
  from matplotlib.figure import Figure

  figure = Figure(figsize=(5 * len(curves), 3.6), layout='constrained')
  for index, (metric, by_model) in enumerate(curves.items()):
    axes = figure.add_subplot(1, len(curves), index + 1)
    for model, runs in by_model.items():
      steps = sorted(runs[0])
      points = [mean_and_deviation([run[step] for run in runs]) for step in steps]
      axes.plot(
        steps,
        [mean for mean, _ in points],
        color=_COLORS[model],
        marker='o',
        markersize=3,
        label=model,
      )
      axes.fill_between(
        steps,
        [mean - dev for mean, dev in points],
        [mean + dev for mean, dev in points],
        color=_COLORS[model],
        alpha=0.2,
        linewidth=0,
      )
    axes.set_title(titles[metric], fontsize=10)
    axes.set_xlabel('step')
    axes.grid(alpha=0.3)
    axes.legend()
  figure.savefig(path, dpi=130)


def main() -> None:
  """Run the study and print its table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--out', type=pathlib.Path, required=True, help='folder of the runs, of the table and the plot'
  )
  parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
  parser.add_argument('--rates', type=float, nargs='+', default=[0.002, 0.004, 0.008])
  parser.add_argument('--steps', type=int, default=500)
  arguments = parser.parse_args()
  runs = {}
  for seed, rate, (model, recipe) in itertools.product(
    arguments.seeds, arguments.rates, _RECIPES.items()
  ):
    runs[model, rate, seed] = arguments.out / f'{model}_{rate:g}_{seed}'
    train(runs[model, rate, seed], recipe, rate, seed, arguments.steps)

  lines = [
    '| model | learning rate | validation loss per token | exact match |',
    '|---|---|---|---|',
  ]
  best: dict[str, tuple[float, float]] = {}
  for model, rate in itertools.product(_RECIPES, arguments.rates):
    of_seeds = [runs[model, rate, seed] for seed in arguments.seeds]
    loss, match = (
      mean_and_deviation([curve(run, *metric)[arguments.steps] for run in of_seeds])
      for metric in (_LOSS, _MATCH)
    )
    best[model] = min(best.get(model, (float('inf'), 0.0)), (loss[0], rate))
    lines.append(
      f'| {model} | {rate:g} | {loss[0]:.4f} ± {loss[1]:.4f} | {match[0]:.3f} ± {match[1]:.3f} |'
    )
  print('\n'.join(lines))
  curves = {
    name: {
      f'{model}': [curve(runs[model, best[model][1], seed], *metric) for seed in arguments.seeds]
      for model in _RECIPES
    }
    for name, metric in (('loss', _LOSS), ('match', _MATCH))
  }
  draw(
    arguments.out / 'sparse_against_dense.png',
    curves,
    {'loss': 'validation loss per token', 'match': 'exact match, decoded'},
  )
  print(
    f'Best rates: {", ".join(f"{model} {rate:g}" for model, (_, rate) in best.items())}. Mean and standard '
    f'deviation over {len(arguments.seeds)} seeds; plot in {arguments.out / "sparse_against_dense.png"}.'
  )


if __name__ == '__main__':
  main()
