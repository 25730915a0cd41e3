"""Loss of large vocabularies: temporaries and seconds of all logits at once and of chunks of tokens.

    python benchmarks/large_vocabulary.py [--batch 16] [--length 512] [--width 512] [--dtype float32] [--tied]
        [--vocab 32128 250112] [--timed_vocab 32128] [--pairs 7] [--step]

The function is the loss with z-loss and accuracy, and its gradients with respect to hidden states and output kernel.
Programs are compiled for all sizes; those of `--timed_vocab` also run, in turns. `--step` also compiles a train step of
T5 1.1 small with both forms.
"""

import argparse
import statistics

import common


def _loss_and_gradients(args, vocab_size, chunk_size):
  """Return (compiled function, its arguments' shapes)."""
  import jax
  import jax.numpy as jnp

  from t5x_lite import layers
  from t5x_lite.models import token_losses

  def loss_fn(hidden, kernel, targets):
    outputs = layers.OutputProjection(
      hidden,
      kernel,
      vocab_dim=0 if args.tied else 1,
      divisor=args.width**0.5 if args.tied else 1.0,
      chunk_size=chunk_size,
    )
    loss, z_loss, is_correct = token_losses.weighted_loss(
      outputs, targets, None, 0.0, 1e-4, float(targets.size)
    )
    return loss.value, (z_loss.value, jnp.sum(is_correct))

  shapes = (
    jax.ShapeDtypeStruct((args.batch, args.length, args.width), jnp.dtype(args.dtype)),
    jax.ShapeDtypeStruct(
      (vocab_size, args.width) if args.tied else (args.width, vocab_size), jnp.float32
    ),
    jax.ShapeDtypeStruct((args.batch, args.length), jnp.int32),
  )
  return jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)).lower(
    *shapes
  ).compile(), shapes


def _arguments(shapes, vocab_size):
  """Return random arguments with standard deviations like those of a network."""
  import jax

  keys = jax.random.split(jax.random.key(0), 3)
  hidden, kernel, targets = shapes
  return (
    jax.random.normal(keys[0], hidden.shape, hidden.dtype),
    jax.random.normal(keys[1], kernel.shape, kernel.dtype) * (kernel.shape[0] ** -0.5),
    jax.random.randint(keys[2], targets.shape, 0, vocab_size),
  )


def _seconds(program, arguments):
  import jax

  return common.timed(lambda: jax.block_until_ready(program(*arguments)))[0]


def _compile_step(args, chunk_size):
  """Return the compiled train step of T5 1.1 small."""
  small = argparse.Namespace(
    layers=8, batch=args.batch, inputs=args.length, targets=args.length, optimizer='adafactor'
  )
  setup = common.t5_small(small, loss_chunk_size=chunk_size, dtype=args.dtype)
  trainer = common.trainer(setup)
  return trainer.partitioned_train_step().lower(trainer.step_state, setup.batch).compile()


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--batch', type=common.positive, default=16)
  parser.add_argument('--length', type=common.positive, default=512)
  parser.add_argument('--width', type=common.positive, default=512)
  parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
  parser.add_argument('--tied', action='store_true')
  parser.add_argument('--vocab', type=common.positive, nargs='+', default=[32128, 250112])
  parser.add_argument('--timed_vocab', type=common.positive, nargs='*', default=[32128])
  parser.add_argument('--pairs', type=common.positive, default=7)
  parser.add_argument('--step', action='store_true')
  args = parser.parse_args()
  common.start_like_commands()
  matmul, rows = common.matmul_gflops(), []
  for vocab_size in args.vocab:
    (whole, shapes), (chunks, _) = (
      _loss_and_gradients(args, vocab_size, size) for size in (0, None)
    )
    before, after = (common.program_facts(program)['temporaries'] for program in (whole, chunks))
    seconds = ('', '', '')
    if vocab_size in args.timed_vocab:
      arguments = _arguments(shapes, vocab_size)
      pairs = common.in_turn(
        [lambda: _seconds(whole, arguments), lambda: _seconds(chunks, arguments)], args.pairs
      )
      ratios = [b / a for a, b in zip(*pairs, strict=False)]
      span = f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})'
      seconds = (*map(statistics.median, pairs), span)
    rows.append((vocab_size, before, after, before / after, *seconds))
  if args.step:
    whole, chunks = (
      common.program_facts(_compile_step(args, size))['temporaries'] for size in (0, None)
    )
    rows.append(('32128, train step of T5 1.1 small', whole, chunks, whole / chunks, '', '', ''))
  common.print_table(
    f'Loss and gradients of {args.batch} x {args.length} tokens, width {args.width}, {args.dtype}; '
    f'matmul {matmul:.0f} GFLOP/s',
    rows,
    (
      'words',
      'temporaries, all logits, MB',
      'in chunks, MB',
      'factor',
      'all logits, s',
      'in chunks, s',
      'ratio',
    ),
  )


if __name__ == '__main__':
  main()
