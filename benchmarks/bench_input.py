"""Input pipeline: batches and examples per second of each source, as global arrays with background prefetch.

python benchmarks/bench_input.py [--batches 200] [--batch 64] [--no-seqio]
"""

import argparse

import common


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--batches', type=common.positive, default=200)
  parser.add_argument('--batch', type=common.positive, default=64)
  parser.add_argument(
    '--no-seqio', action='store_true', help='leave out the sources that need TensorFlow'
  )
  args = parser.parse_args()
  import jax

  from t5x_lite import data
  from t5x_lite import partitioning

  cloze = {'inputs': 64, 'targets': 12}
  cases = [
    ('synthetic', 'synthetic', cloze, False),
    ('keyword cloze', 'builtin', cloze, False),
    ('keyword cloze, packed', 'builtin', {'inputs': 256, 'targets': 48}, True),
  ]
  if not args.no_seqio:
    cases += [
      ('keyword cloze', 'seqio', cloze, False),
      ('keyword cloze, packed', 'seqio', {'inputs': 256, 'targets': 48}, True),
    ]
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  layout = partitioner.get_data_layout(args.batch)
  rows = []
  for name, source, lengths, pack in cases:
    cfg = data.DatasetConfig(
      mixture_or_task_name='synthetic' if source == 'synthetic' else 'python_keyword_cloze',
      task_feature_lengths=lengths,
      split='train',
      batch_size=args.batch,
      shuffle=True,
      seed=0,
      pack=pack,
      source=source,
    )
    batches = data.GlobalBatches(data.open_train_iterator(cfg, layout), partitioner)
    open_seconds, _ = common.timed(lambda: jax.block_until_ready(next(batches)))
    seconds, tokens = common.timed(
      lambda: [jax.block_until_ready(next(batches)) for _ in range(args.batches)]
    )
    nonpad = sum(
      int((b['encoder_input_tokens'] > 0).sum() + (b['decoder_target_tokens'] > 0).sum())
      for b in tokens[:20]
    ) / min(20, args.batches)
    batches.close()
    rows.append(
      (
        name,
        source,
        open_seconds,
        args.batches / seconds,
        args.batches * args.batch / seconds,
        args.batches * nonpad / seconds,
      )
    )
  print(f'matmul 2048^3: {common.matmul_gflops():.0f} GFLOP/s')
  common.print_table(
    'Input pipeline',
    rows,
    ('data', 'source', 'first batch, s', 'batches/s', 'rows/s', 'real tokens/s'),
  )


if __name__ == '__main__':
  main()
