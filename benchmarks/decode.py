"""Decoding: seconds, steps per second and compile seconds of greedy search, sampling and beam search.

    python benchmarks/decode.py [--layers 8] [--batch 8] [--inputs 128] [--tokens 64] [--beams 4] [--repeats 5]
        [--layout t5] [--dtype float32] [--weights float32] [--only greedy 'beam search, 1']

The default is the 77 M-parameter T5 1.1 small (8+8 layers, width 512, 6 heads of 64, mlp 1024, vocabulary 32128) with
random parameters. A decoding is `predict_batch_with_aux`, encoder included, with an end token that never occurs: all
steps are taken. Beside each runs a peer of the same mathematics in T5X's formulation (`peer_decode.py`), in turn; that it
decodes the same tokens is checked where nothing is drawn. Beam search is set against greedy search of as many rows,
where both are run.
"""

import argparse
import functools
import statistics

import common


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--layers', type=common.positive, default=8)
  parser.add_argument('--batch', type=common.positive, default=8)
  parser.add_argument('--inputs', type=common.positive, default=128, help='length of the inputs')
  parser.add_argument('--tokens', type=common.positive, default=64, help='number of tokens to decode, all taken')
  parser.add_argument('--beams', type=common.positive, default=4)
  parser.add_argument('--vocab', type=common.positive, default=32128)
  parser.add_argument('--repeats', type=common.positive, default=5)
  parser.add_argument('--layout', default='t5', choices=['t5', 'scalable_t5'], help="the peer takes 't5' only")
  parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'], help='the peer is float32')
  parser.add_argument('--weights', default='float32', choices=['float32', 'bfloat16'], help="ours; the peer's are float32")
  parser.add_argument('--only', nargs='+', default=[''], metavar='NAME', help='run what starts so; all if not given')
  args = parser.parse_args()

  import jax
  import jax.numpy as jnp
  import numpy as np
  from t5x_lite import decoding
  from t5x_lite import models
  from t5x_lite.data import vocabularies
  from t5x_lite.networks import t5
  import peer_decode

  before = common.matmul_gflops()
  config = t5.T5Config(
      vocab_size=args.vocab, dtype=jnp.dtype(args.dtype), emb_dim=512, num_heads=6, num_encoder_layers=args.layers,
      num_decoder_layers=args.layers, head_dim=64, mlp_dim=1024, mlp_activations=('gelu', 'linear'), dropout_rate=0.0,
      param_layout=args.layout, scan_layers=args.layout == 'scalable_t5')
  vocabulary = vocabularies.PassThroughVocabulary(args.vocab)
  never = {'eos_id': args.vocab}

  def batch_of(rows):
    tokens = jax.random.randint(jax.random.key(1), (rows, args.inputs), 2, args.vocab)
    return {'encoder_input_tokens': tokens, 'decoder_input_tokens': jnp.zeros((rows, args.tokens), jnp.int32)}

  def model(decode_fn):
    return models.EncoderDecoderModel(t5.Transformer(config), vocabulary, vocabulary, None, decode_fn)

  shapes = {name: value.shape for name, value in batch_of(args.batch).items()}
  params = jax.jit(lambda rng: model(None).get_initial_variables(rng, shapes)['params'])(jax.random.key(0))
  weights = jax.tree.map(lambda param: param.astype(args.weights), params)
  rng = jax.random.key(2)

  def ours(decode_fn, num_decodes=1, **options):
    predict = functools.partial(
        model(decode_fn).predict_batch_with_aux, num_decodes=num_decodes, decoder_params={**never, **options})
    return lambda params, batch, rng: predict(params, batch, rng)[0]

  def peer_sample(temperature, topk):
    return lambda params, batch, rng: peer_decode.sample(
        params, batch['encoder_input_tokens'], rng, config, length=args.tokens, temperature=temperature, topk=topk)

  def peer_beams(num_beams):
    return lambda params, batch, rng: peer_decode.beam_search(
        params, batch['encoder_input_tokens'], config, length=args.tokens, num_beams=num_beams)[:, -1]

  wide = args.batch * args.beams
  # Title, our function, the peer's, rows, whether tokens depend only on the parameters.
  cases = [
      ('greedy', ours(decoding.greedy_search), peer_sample(0.0, 0), args.batch, True),
      ('beam search, 1 beam', ours(decoding.beam_search), peer_beams(1), args.batch, True),
      ('sampling, temperature 1', ours(decoding.temperature_sample, topk=0), peer_sample(1.0, 0), args.batch, False),
      ('sampling, top 40', ours(decoding.temperature_sample, topk=40), peer_sample(1.0, 40), args.batch, False),
      (f'beam search, {args.beams} beams', ours(decoding.beam_search, args.beams), peer_beams(args.beams), args.batch,
       True),
      (f'greedy, batch {wide}', ours(decoding.greedy_search), peer_sample(0.0, 0), wide, True),
  ]
  cases = [case for case in cases if case[0].startswith(tuple(args.only))]
  if not cases:
    parser.error(f'--only {args.only} names nothing that is measured here')
  with_peer = args.layout == 't5' and args.dtype == 'float32'
  rows, medians = [], {}
  for name, fn, peer_fn, num_rows, is_certain in cases:
    batch = batch_of(num_rows)
    runs = [(fn, weights), (peer_fn, params)] if with_peer else [(fn, weights)]
    compiled, seconds, compile_seconds, tokens = [], [], [], []
    for run, values in runs:
      spent, program = common.timed(lambda run=run, values=values: jax.jit(run).lower(values, batch, rng).compile())
      compile_seconds.append(spent)
      compiled.append(functools.partial(program, values, batch, rng))
      tokens.append(np.asarray(compiled[-1]()))
    assert all((t[:, -1] != 0).any() and t.shape == (num_rows, args.tokens) for t in tokens), name
    same = np.mean(tokens[0] == tokens[-1])
    # Rounding may turn a near tie, and a row with it.
    assert not is_certain or args.weights != 'float32' or same > 0.5, (name, same)
    for _ in range(args.repeats):
      seconds.append([common.timed(lambda c=c: jax.block_until_ready(c()))[0] for c in compiled])
    mine, *others = (statistics.median(column) for column in zip(*seconds))
    medians[name] = mine
    peer = [others[0], others[0] / mine, compile_seconds[1]] if others else ['', '', '']
    rows.append((name, mine, args.tokens / mine, compile_seconds[0], *peer,
                 compiled[0].func.memory_analysis().temp_size_in_bytes / 1e6))
  after = common.matmul_gflops()
  common.print_table(
      f'Decoding ({args.dtype}, {args.weights} weights, layout {args.layout}, batch {args.batch} x {args.inputs}, {args.tokens} tokens)', rows,
      ('what', 's', 'steps/s', 'compile, s', 'peer (T5X formulation), s', 'peer / ours', 'peer: compile, s',
       'temporaries, MB'))
  beams, greedy = medians.get(f'beam search, {args.beams} beams'), medians.get(f'greedy, batch {wide}')
  common.print_table('Decoding: beams, and the run', [
      *([(f'beam search with {args.beams} beams / greedy search of {wide} rows', beams / greedy)]
        if beams and greedy else []),
      ('matmul 2048^3 GFLOP/s before, after', f'{before:.0f}, {after:.0f}'),
      ('peak resident memory, MB', common.peak_memory_mb()),
  ], ('what', 'value'))


if __name__ == '__main__':
  main()
