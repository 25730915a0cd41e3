"""Attention over long rows: seconds and temporary memory of the blockwise kernel and the plain one.

    python benchmarks/long_inputs.py [--lengths 512 1024 2048 4096] [--batch 4] [--heads 8] [--runs 5]
        [--tables attention packed layers]

The table `attention` has the loss and all gradients (also of the position biases) of one self-attention with head_dim
64, bidirectional and causal; `packed` the same for causal rows of 8 packed examples each, where blocks between examples
are skipped; `layers` the temporaries of a training step's gradient of one encoder and one decoder layer, with inputs of
each length and targets of 512. Kernels run in turn in one process. Temporaries are XLA's count of the compiled program.
"""

import argparse
import statistics

import common


def _attention(kernel: str, causal: bool, num_examples: int, length: int, args: argparse.Namespace):
  """Return (compiled gradients of one attention, their arguments)."""
  import jax
  import jax.numpy as jnp

  from t5x_lite import layers

  shape = (args.batch, length, args.heads, 64)
  keys = jax.random.split(jax.random.key(0), 5)
  query, key, value, cotangent = (0.3 * jax.random.normal(key, shape) for key in keys[:4])
  biases = jax.random.normal(keys[4], (args.heads, 2 * length - 1))
  valid = jnp.ones(shape[:2], bool)
  ids = 1 + jnp.broadcast_to(jnp.arange(length) * num_examples // length, shape[:2])
  packing = dict(query_segment_ids=ids, key_segment_ids=ids) if num_examples > 1 else {}

  def loss(query, key, value, biases):
    bias = layers.make_attention_bias(
      valid, valid, causal=causal, position=layers.DistanceBias(biases, length), **packing
    )
    return jnp.sum(cotangent * layers.dot_product_attention(query, key, value, bias, kernel=kernel))

  arrays = (query, key, value, biases)
  return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).lower(*arrays).compile(), arrays


def _compare(title: str, rows: list, args: argparse.Namespace) -> None:
  """Print the table of rows (name, causal, packed examples), with one line per length."""
  import jax

  table = []
  for name, causal, num_examples in rows:
    for length in args.lengths:
      programs = [
        _attention(kernel, causal, num_examples, length, args) for kernel in ('dot', 'blockwise')
      ]
      for program, arrays in programs:
        jax.block_until_ready(program(*arrays))
      seconds = common.in_turn(
        [
          lambda program=program, arrays=arrays: common.timed(
            lambda: jax.block_until_ready(program(*arrays))
          )[0]
          for program, arrays in programs
        ],
        args.runs,
      )
      medians = [statistics.median(column) for column in seconds]
      ratios = [b / a for a, b in zip(*seconds, strict=True)]
      sizes = [common.program_facts(program)['temporaries'] for program, _ in programs]
      table.append(
        [
          name,
          length,
          *medians,
          f'{medians[1] / medians[0]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})',
          *(f'{size:,.0f}' for size in sizes),
        ]
      )
  common.print_table(
    title, table, ['mask', 'length', 'plain s', 'blockwise s', 'ratio', 'plain MB', 'blockwise MB']
  )


def _layers(args: argparse.Namespace) -> None:
  """Print the temporaries of the gradients of one encoder and one decoder layer."""
  import jax
  import jax.numpy as jnp

  from t5x_lite.networks import t5

  table = []
  for length in args.lengths:
    row = [f'{length} / 512']
    for kernel in ('dot', 'blockwise'):
      config = t5.T5Config(
        vocab_size=512,
        emb_dim=512,
        num_heads=args.heads,
        num_encoder_layers=1,
        num_decoder_layers=1,
        head_dim=64,
        mlp_dim=1024,
        dropout_rate=0.0,
        attention_kernel=kernel,
      )
      network = t5.Transformer(config)
      inputs = jax.ShapeDtypeStruct((args.batch, length), jnp.int32)
      targets = jax.ShapeDtypeStruct((args.batch, 512), jnp.int32)
      variables = jax.eval_shape(network.init, jax.random.key(0), inputs, targets, targets)

      def loss(params, inputs, targets, network=network):
        return jnp.sum(
          network.apply({'params': params}, inputs, targets, targets, enable_dropout=False) ** 2
        )

      program = jax.jit(jax.grad(loss)).lower(variables['params'], inputs, targets).compile()
      row.append(f'{common.program_facts(program)["temporaries"]:,.0f}')
    table.append(row)
  common.print_table(
    f'Temporaries of one encoder and one decoder layer, batch {args.batch}, {args.heads} heads',
    table,
    ['inputs / targets', 'plain MB', 'blockwise MB'],
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--lengths', type=common.positive, nargs='+', default=[512, 1024, 2048, 4096])
  parser.add_argument('--batch', type=common.positive, default=4)
  parser.add_argument('--heads', type=common.positive, default=8)
  parser.add_argument('--runs', type=common.positive, default=5)
  parser.add_argument(
    '--tables',
    nargs='+',
    default=['attention', 'packed', 'layers'],
    choices=['attention', 'packed', 'layers'],
  )
  args = parser.parse_args()
  common.start_like_commands()
  print(f'bare matmul: {common.matmul_gflops():.0f} GFLOP/s')
  if 'attention' in args.tables:
    _compare('Loss and gradients of one attention', [('none', False, 1), ('causal', True, 1)], args)
  if 'packed' in args.tables:
    _compare('Packed rows', [('causal, 8 examples', True, 8)], args)
  if 'layers' in args.tables:
    _layers(args)


if __name__ == '__main__':
  main()
