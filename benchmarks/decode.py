"""Decoding: seconds, steps per second and compile seconds of greedy search, sampling and beam search.

    python benchmarks/decode.py [--layers 8] [--batch 8] [--inputs 128] [--tokens 64] [--beams 4] [--repeats 5]
        [--layout t5] [--dtype float32] [--weights bfloat16] [--only greedy 'beam search, 1']
        [--t5x PATH [--t5x_python PYTHON] [--same_options]] [--constraints | --labels 10 100 1000]

The default is the 77 M-parameter T5 1.1 small (8+8 layers, width 512, 6 heads of 64, mlp 1024, vocabulary 32128) with
random parameters. A decoding is `predict_batch_with_aux`, encoder included, with an end token that never occurs: all
steps are taken. A peer decodes in turn: with `--t5x`, T5X's own `predict_batch_with_aux` from a checkout; otherwise the
rebuilt peer, which computes the same in T5X's formulation (`peer_decode.py`). It must decode the same tokens where
nothing is drawn. Beam search is set against greedy search of as many rows, where both are run.

With `--constraints`, each search decodes in turn without and with each constraint, and the ratios are medians of pairs.
Allowed outputs have as many tokens as are decoded, so that all steps are taken.

With `--labels`, the scores of so many labels of `--tokens` tokens, greedy search of as many tokens, and the scoring of
one label as targets are measured in turn. Scoring each label as targets takes the time of one times their number.
"""

import argparse
import functools
import statistics

import common
import t5x_process


def _constraints(args):
  """Return logit processors by title."""
  import numpy as np

  from t5x_lite import decoding

  def allowed(num_outputs):
    ids = np.random.default_rng(0).integers(2, args.vocab, (num_outputs, args.tokens - 1))
    return decoding.Constraints(allowed_outputs=decoding.AllowedOutputs(ids.tolist(), 1))

  return {
    'no constraint': decoding.Constraints(),
    'no_repeat_ngram_size 3': decoding.Constraints(no_repeat_ngram_size=3),
    'repetition_penalty 1.2': decoding.Constraints(repetition_penalty=1.2),
    'min_decode_len': decoding.Constraints(min_decode_len=args.tokens),
    '1,000 allowed outputs': allowed(1000),
    '100,000 allowed outputs': allowed(100_000),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--layers', type=common.positive, default=8)
  parser.add_argument('--batch', type=common.positive, default=8)
  parser.add_argument('--inputs', type=common.positive, default=128, help='length of the inputs')
  parser.add_argument(
    '--tokens', type=common.positive, default=64, help='number of tokens to decode, all taken'
  )
  parser.add_argument('--beams', type=common.positive, default=4)
  parser.add_argument('--vocab', type=common.positive, default=32128)
  parser.add_argument('--repeats', type=common.positive, default=5)
  parser.add_argument(
    '--layout', default='t5', choices=['t5', 'scalable_t5'], help="the rebuilt peer takes 't5' only"
  )
  parser.add_argument(
    '--dtype',
    default='float32',
    choices=['float32', 'bfloat16'],
    help='the rebuilt peer is float32',
  )
  parser.add_argument(
    '--weights', default='float32', choices=['float32', 'bfloat16'], help='not those of the peer'
  )
  parser.add_argument(
    '--only', nargs='+', default=[''], metavar='NAME', help='run what starts so; all if not given'
  )
  parser.add_argument(
    '--constraints', action='store_true', help='measure constraints, without a peer'
  )
  parser.add_argument(
    '--labels', type=common.positive, nargs='+', metavar='N', help='measure scores of N labels'
  )
  args = t5x_process.parse_args(parser)

  from flax import traverse_util
  import jax
  import jax.numpy as jnp
  import numpy as np
  import peer_decode

  from t5x_lite import decoding
  from t5x_lite import models
  from t5x_lite.data import vocabularies
  from t5x_lite.networks import t5

  before = common.matmul_gflops()
  config = t5.T5Config(
    vocab_size=args.vocab,
    dtype=jnp.dtype(args.dtype),
    emb_dim=512,
    num_heads=6,
    num_encoder_layers=args.layers,
    num_decoder_layers=args.layers,
    head_dim=64,
    mlp_dim=1024,
    mlp_activations=('gelu', 'linear'),
    dropout_rate=0.0,
    param_layout=args.layout,
    scan_layers=args.layout == 'scalable_t5',
  )
  vocabulary = vocabularies.PassThroughVocabulary(args.vocab)
  never = {'eos_id': args.vocab}

  def batch_of(rows):
    tokens = jax.random.randint(jax.random.key(1), (rows, args.inputs), 2, args.vocab)
    return {
      'encoder_input_tokens': tokens,
      'decoder_input_tokens': jnp.zeros((rows, args.tokens), jnp.int32),
    }

  def model(decode_fn):
    return models.EncoderDecoderModel(
      t5.Transformer(config), vocabulary, vocabulary, None, decode_fn
    )

  shapes = {name: value.shape for name, value in batch_of(args.batch).items()}
  params = jax.jit(lambda rng: model(None).get_initial_variables(rng, shapes)['params'])(
    jax.random.key(0)
  )
  our_params = jax.tree.map(lambda param: param.astype(args.weights), params)
  rng = jax.random.key(2)

  def ours(decode_fn, num_decodes=1, **options):
    predict = functools.partial(
      model(decode_fn).predict_batch_with_aux,
      num_decodes=num_decodes,
      decoder_params={**never, **options},
    )
    return lambda params, batch, rng: predict(params, batch, rng)[0]

  def temperature(value, topk):
    return 'temperature_sample', 1, {'temperature': value, 'topk': topk}

  def beams(num_beams):
    return 'beam_search', num_beams, {}

  def compiled(fn, params, batch):
    """Return (compile seconds, tokens, a function that returns the seconds of a decoding, temporaries in MB)."""
    spent, program = common.timed(lambda: jax.jit(fn).lower(params, batch, rng).compile())

    def run():
      return jax.block_until_ready(program(params, batch, rng))

    return (
      spent,
      np.asarray(run()),
      lambda: common.timed(run)[0],
      program.memory_analysis().temp_size_in_bytes / 1e6,
    )

  def rebuilt(name, num_decodes, options):
    """Return the rebuilt peer of a search of T5X."""
    if name == 'beam_search':
      return lambda params, batch, rng: peer_decode.beam_search(
        params, batch['encoder_input_tokens'], config, length=args.tokens, num_beams=num_decodes
      )[:, -1]
    return lambda params, batch, rng: peer_decode.sample(
      params, batch['encoder_input_tokens'], rng, config, length=args.tokens, **options
    )

  if args.constraints:
    searches = {
      'greedy': (decoding.greedy_search, 1, {}),
      'sampling, temperature 1': (decoding.temperature_sample, 1, {'topk': 0}),
      f'beam search, {args.beams} beams': (decoding.beam_search, args.beams, {}),
    }
    constraints = _constraints(args)
    batch = batch_of(args.batch)
    rows = []
    for search, (decode_fn, num_decodes, options) in searches.items():
      if not search.startswith(tuple(args.only)):
        continue
      _, _, plain, _ = compiled(ours(decode_fn, num_decodes, **options), our_params, batch)
      for name, processor in constraints.items():
        options_of_name = {**options, 'logit_processor': processor}
        if processor.allowed_outputs is not None:
          options_of_name['eos_id'] = processor.allowed_outputs.eos_id
        compile_seconds, tokens, run, _ = compiled(
          ours(decode_fn, num_decodes, **options_of_name), our_params, batch
        )
        assert (tokens[:, -1] != 0).all(), (search, name)
        pairs = [(plain(), run()) for _ in range(args.repeats)]
        rows.append(
          (
            f'{search}: {name}',
            statistics.median(first for first, _ in pairs) / args.tokens * 1e3,
            statistics.median(second / first for first, second in pairs),
            compile_seconds,
          )
        )
    common.print_table(
      f'Constraints ({args.dtype}, batch {args.batch} x {args.inputs}, {args.tokens} tokens)',
      rows,
      ('what', 'step without, ms', 'ratio', 'compile, s'),
    )
    return

  if args.labels:
    batch = batch_of(args.batch)
    _, _, greedy, _ = compiled(ours(decoding.greedy_search), our_params, batch)
    targets = jnp.ones((args.batch, args.tokens), jnp.int32)
    pairs = {**batch, 'decoder_target_tokens': targets}
    _, _, score, _ = compiled(
      lambda params, batch, rng: model(None).score_batch(params, batch), our_params, pairs
    )
    rows = []
    for num_labels in args.labels:
      ids = np.random.default_rng(0).integers(2, args.vocab, (num_labels, args.tokens - 1))
      config_of_labels = decoding.LabelScores(labels=[str(row.tolist()) for row in ids])
      labels = decoding.EncodedLabels(config_of_labels, ids.tolist(), 1)
      compile_seconds, _, run, temporaries = compiled(ours(labels, eos_id=1), our_params, batch)
      times = [(run(), greedy(), score()) for _ in range(args.repeats)]
      seconds, of_greedy, of_pairs = map(statistics.median, zip(*times, strict=True))
      rows.append(
        (
          num_labels,
          seconds,
          of_greedy,
          seconds / of_greedy,
          of_pairs * num_labels,
          compile_seconds,
          temporaries,
        )
      )
    common.print_table(
      f'Labels ({args.dtype}, batch {args.batch} x {args.inputs}, {args.tokens} tokens)',
      rows,
      (
        'labels',
        's',
        'greedy, s',
        'ratio',
        'each pair, s',
        'compile, s',
        'temporaries, MB',
      ),
    )
    return

  wide = args.batch * args.beams
  # Title, our function, T5X's (name, num_decodes, options), rows, whether tokens depend only on the parameters.
  cases = [
    ('greedy', ours(decoding.greedy_search), temperature(0.0, 0), args.batch, True),
    ('beam search, 1 beam', ours(decoding.beam_search), beams(1), args.batch, True),
    (
      'sampling, temperature 1',
      ours(decoding.temperature_sample, topk=0),
      temperature(1.0, 0),
      args.batch,
      False,
    ),
    (
      'sampling, top 40',
      ours(decoding.temperature_sample, topk=40),
      temperature(1.0, 40),
      args.batch,
      False,
    ),
    (
      f'beam search, {args.beams} beams',
      ours(decoding.beam_search, args.beams),
      beams(args.beams),
      args.batch,
      True,
    ),
    (f'greedy, batch {wide}', ours(decoding.greedy_search), temperature(0.0, 0), wide, True),
  ]
  cases = [case for case in cases if case[0].startswith(tuple(args.only))]
  if not cases:
    parser.error(f'--only {args.only} names nothing that is measured here')
  process = None
  if args.t5x:
    options = {
      'layers': args.layers,
      'vocab': args.vocab,
      'tokens': args.tokens,
      'dtype': args.dtype,
      'scan': args.layout == 'scalable_t5',
    }
    arrays = {
      f'params/{name}': x for name, x in traverse_util.flatten_dict(params, sep='/').items()
    }
    arrays.update(
      {
        f'inputs/{rows}': batch_of(rows)['encoder_input_tokens']
        for rows in {case[3] for case in cases}
      }
    )
    process = t5x_process.T5x(args, 'Decode', options, arrays)
    peer_name = process.name
  else:
    peer_name = 'rebuilt peer' if args.layout == 't5' and args.dtype == 'float32' else ''
  rows, medians = [], {}
  for name, fn, search, num_rows, is_certain in cases:
    batch = batch_of(num_rows)
    compile_seconds, tokens, run, temporaries = compiled(fn, our_params, batch)
    assert (tokens[:, -1] != 0).any() and tokens.shape == (num_rows, args.tokens), name
    runs = [run]
    if process:
      peer_compile_seconds, peer_tokens = process('compile', rows=num_rows, search=search)
      runs.append(functools.partial(process, 'run'))
    elif peer_name:
      peer_compile_seconds, peer_tokens, peer_run, _ = compiled(rebuilt(*search), params, batch)
      runs.append(peer_run)
    seconds = [[run() for run in runs] for _ in range(args.repeats)]
    mine, *others = (statistics.median(column) for column in zip(*seconds, strict=False))
    medians[name] = mine
    peer_cells = []
    if others:
      same = np.mean(tokens == np.asarray(peer_tokens))
      # Rounding may turn a near tie, and a row with it.
      is_exact = is_certain and (args.dtype, args.weights) == ('float32', 'float32')
      assert not is_exact or same > 0.5, (name, same)
      peer_cells = [others[0], others[0] / mine, peer_compile_seconds]
    rows.append((name, mine, args.tokens / mine, compile_seconds, *peer_cells, temporaries))
  if process:
    process.close()
  after = common.matmul_gflops()
  common.print_table(
    f'Decoding ({args.dtype}, weights in {args.weights}, layout {args.layout}, batch {args.batch} x {args.inputs}, '
    f'{args.tokens} tokens)',
    rows,
    (
      'what',
      's',
      'steps/s',
      'compile, s',
      *([f'{peer_name}, s', 'ratio', f'{peer_name}: compile, s'] if peer_name else []),
      'temporaries, MB',
    ),
  )
  beams, greedy = (
    medians.get(f'beam search, {args.beams} beams'),
    medians.get(f'greedy, batch {wide}'),
  )
  common.print_table(
    'Decoding: beams, and the run',
    [
      *(
        [(f'beam search with {args.beams} beams / greedy search of {wide} rows', beams / greedy)]
        if beams and greedy
        else []
      ),
      ('matmul 2048^3 GFLOP/s before, after', f'{before:.0f}, {after:.0f}'),
      ('peak resident memory, MB', common.peak_memory_mb()),
    ],
    ('what', 'value'),
  )


if __name__ == '__main__':
  common.start_like_commands()
  main()
