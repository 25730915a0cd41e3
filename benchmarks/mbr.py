"""Minimum Bayes risk against greedy search and beam search: quality and seconds on a model trained in the same run.

    python benchmarks/mbr.py [--steps 300] [--examples 512] [--samples 16] [--beams 4]

Trains the recipe `keyword_cloze` for some steps, and decodes the first examples of its validation split with each
algorithm twice, of which the second time counts. Prints exact match and mean sentence chrF against the targets in
percent, and the seconds, those of the choice on the host also alone.
"""

import argparse
import tempfile

import common


def main() -> None:
  """Train, decode and print the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=common.positive, default=300)
  parser.add_argument('--examples', type=common.positive, default=512)
  parser.add_argument('--samples', type=common.positive, default=16)
  parser.add_argument('--beams', type=common.positive, default=4)
  args = parser.parse_args()
  common.start_like_commands()
  from t5x_lite import notebook
  from t5x_lite.command_line import cli

  before = common.matmul_gflops()
  with tempfile.TemporaryDirectory() as folder:
    run = f'{folder}/run'
    status = cli.main(
      [
        'train',
        '--gin_file=recipes/keyword_cloze.gin',
        f'--gin.MODEL_DIR={run}',
        f'--gin.TRAIN_STEPS={args.steps}',
        '--gin.train_script.train.infer_eval_dataset_cfg=None',
      ]
    )
    if status:
      raise SystemExit(status)
    rows = _decode_all(notebook.open_run(run, batch_size=64, output_dir=f'{folder}/notebook'), args)
  common.print_table(
    f'{args.steps} steps, {args.examples} examples; matmul {before:.0f} GFLOP/s before, '
    f'{common.matmul_gflops():.0f} after',
    rows,
    ['decoding', 'exact match', 'chrF', 's', 'choice on the host, s'],
  )


def _decode_all(opened, args) -> list[list[object]]:
  """Return a row of the table for each algorithm.

  Args:
    opened: the `InteractiveModel` of the run.
    args: arguments of the command line.
  """
  from t5x_lite import data
  from t5x_lite import decoding
  from t5x_lite.interactive import texts

  cfg = data.DatasetConfig(
    'python_keyword_cloze',
    dict(opened.task_feature_lengths),
    'validation',
    64,
    False,
    0,
    source='builtin',
  )
  (task,) = data.open_eval_tasks(
    cfg,
    opened.partitioner.get_data_layout(64),
    feature_converter=opened.model.FEATURE_CONVERTER,
    num_examples=args.examples,
  )
  targets = task.targets()
  algorithms = [
    ('greedy search', decoding.greedy_search, {}),
    (f'beam search, {args.beams} beams', decoding.beam_search, {'num_decodes': args.beams}),
    (
      'the more probable of 2 samples',
      decoding.MinimumBayesRisk(num_samples=2, utility=_first),
      {},
    ),
    (
      f'minimum Bayes risk, {args.samples} samples',
      decoding.MinimumBayesRisk(num_samples=args.samples),
      {},
    ),
  ]
  rows = []
  for name, decode_fn, options in algorithms:
    inference = texts.TextInference(
      opened.model.with_decode_fn(decode_fn),
      opened.partitioner,
      opened.train_state_axes,
      opened.task_feature_lengths,
      64,
    )
    examples = inference.reader.read([each['inputs_pretokenized'] for each in task.examples])
    inference.predict(opened.train_state, examples, **options)
    seconds, (ids, _) = common.timed(
      lambda inference=inference, examples=examples, options=options: inference.predict(
        opened.train_state, examples, **options
      )
    )
    predictions = [task.decode(each) for each in ids]
    choice = '-'
    if name.startswith('minimum'):
      choice = _seconds_of_choices(opened, decode_fn, examples)
    rows.append([name, *_quality(predictions, targets), seconds, choice])
  return rows


def _first(candidates, references) -> list[float]:
  """Return equal utilities, so that the more probable of two samples is chosen."""
  del references
  return [0.0] * len(candidates)


def _seconds_of_choices(opened, rule, examples) -> float:
  """Return the seconds of all choices in one thread."""
  from t5x_lite import decoding
  from t5x_lite.interactive import texts

  sampled = texts.TextInference(
    opened.model.with_decode_fn(decoding.temperature_sample),
    opened.partitioner,
    opened.train_state_axes,
    opened.task_feature_lengths,
    64,
  )
  ids, _ = sampled.predict(
    opened.train_state,
    examples,
    num_decodes=rule.num_samples,
    return_all_decodes=True,
    decoder_params={'topk': 0},
  )
  samples = [sampled.text(each) for each in ids]
  return common.timed(lambda: [rule.choose(each) for each in samples])[0]


def _quality(predictions, targets) -> list[float]:
  """Return exact match and mean sentence chrF in percent."""
  from t5x_lite.decoding import text_similarity

  pairs = list(zip(predictions, targets, strict=True))
  matches = [prediction == target for prediction, target in pairs]
  scores = [text_similarity.pairwise_chrf(pair)[0, 1] for pair in pairs]
  return [100 * sum(matches) / len(pairs), sum(scores) / len(pairs)]


if __name__ == '__main__':
  main()
