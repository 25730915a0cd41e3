"""Trains the small sparse model and the dense one of equal active operations, and says which is better.

Both get the same learning rates and seeds; for each, the rate with the best mean of the validation loss at the end is
taken. Finished runs are kept and not repeated, so the study may be interrupted. About 50 s for each of the 18 runs on 2
cores:

  python benchmarks/studies/sparse_against_dense.py --out runs/sparse_against_dense
"""

import argparse
import itertools
import pathlib

import runs as study

_RECIPES = {'dense': 'recipes/keyword_cloze.gin', 'sparse': 'recipes/keyword_cloze_moe.gin'}
_COLORS = {'dense': '#0072b2', 'sparse': '#d55e00'}


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
      points = [study.mean_and_deviation([run[step] for run in runs]) for step in steps]
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
    flags = {
      'LEARNING_RATE': rate,
      'RANDOM_SEED': seed,
      'TRAIN_STEPS': arguments.steps,
      'EVAL_PERIOD': arguments.steps // 5,
      'EVAL_STEPS': 16,
    }
    study.train(runs[model, rate, seed], [recipe], flags)

  lines = [
    '| model | learning rate | validation loss per token | exact match |',
    '|---|---|---|---|',
  ]
  best: dict[str, tuple[float, float]] = {}
  for model, rate in itertools.product(_RECIPES, arguments.rates):
    of_seeds = [runs[model, rate, seed] for seed in arguments.seeds]
    loss, match = (
      study.mean_and_deviation([study.curve(run, *metric)[arguments.steps] for run in of_seeds])
      for metric in (study.LOSS, study.MATCH)
    )
    best[model] = min(best.get(model, (float('inf'), 0.0)), (loss[0], rate))
    lines.append(
      f'| {model} | {rate:g} | {loss[0]:.4f} ± {loss[1]:.4f} | {match[0]:.3f} ± {match[1]:.3f} |'
    )
  print('\n'.join(lines))
  curves = {
    name: {
      f'{model}': [
        study.curve(runs[model, best[model][1], seed], *metric) for seed in arguments.seeds
      ]
      for model in _RECIPES
    }
    for name, metric in (('loss', study.LOSS), ('match', study.MATCH))
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
