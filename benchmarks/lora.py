"""Benchmark adapters: time and memory of a training step, with full fine-tuning and frozen parameters in the same run.

    python benchmarks/lora.py [--batch 16] [--inputs 512] [--targets 114] [--rank 8] [--turns 2] [--compile_only]

The model is T5 1.1 small without dropout, in float32, with AdamW. Arguments and temporaries are those that
`precompile` reports for the step. Times are the shortest of calls in turn in this process, divided by that of full
fine-tuning, since the machine may do other work. 'frozen' trains the kernels of queries and values themselves. Rows
with remat are compiled only.
"""

import argparse

import common

_QUERY_VALUE = r'attention/(query|value)/kernel$'


def _variants(rank: int) -> dict[str, dict]:
  """Return the arguments of `common.t5_small` by the name of the row."""
  from t5x_lite import adapters

  def lora(targets, base_dtype=None, **fields):
    adapter = adapters.Lora(rank=rank, targets=targets, base_dtype=base_dtype)
    return {'model_options': {'adapter': adapter}, **fields}

  return {
    'full': {},
    'frozen': {'trained': _QUERY_VALUE},
    'LoRA, query and value': lora('query_value'),
    'LoRA, all kernels': lora('all'),
    'LoRA, query and value, bfloat16 base': lora('query_value', 'bfloat16'),
    'LoRA, query and value, bfloat16 base, remat': lora(
      'query_value', 'bfloat16', remat_policy='full'
    ),
  }


def _program(args: argparse.Namespace, variant: dict):
  """Return (function that makes a state, compiled step of a state and a batch, batch)."""
  import jax

  setup = common.t5_small(args, **variant)
  trainer = common.trainer(setup)
  step = trainer.partitioned_train_step()
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trainer.step_state)
  compiled = step.lower(shapes, setup.batch).compile()

  def make_state():
    return setup.initializer.from_scratch(jax.random.key(0), trainer.stacked_layers)

  return make_state, compiled, setup.batch


def _seconds(make_state, compiled, batch):
  """Return a function that returns the seconds of one step."""
  import jax

  state = [make_state()]

  def step():
    state[0], metrics = compiled(state[0], batch)
    jax.block_until_ready((state[0].step, metrics))

  return lambda: common.timed(step)[0]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  common.add_t5_small_arguments(parser)
  parser.set_defaults(batch=16, inputs=512, targets=114, optimizer='adamw')
  parser.add_argument('--rank', type=common.positive, default=8)
  parser.add_argument(
    '--turns', type=common.positive, default=2, help='twice this number of steps are counted'
  )
  parser.add_argument('--compile_only', action='store_true', help='print no times')
  args = parser.parse_args()
  variants = _variants(args.rank)
  programs = {name: _program(args, variant) for name, variant in variants.items()}
  ratios = {}
  if not args.compile_only:
    timed = [name for name, variant in variants.items() if 'remat_policy' not in variant]
    seconds = common.in_turn([_seconds(*programs[name]) for name in timed], args.turns)
    for name, column in zip(timed, seconds, strict=True):
      ratios[name] = min(column) / min(seconds[0])
  rows = []
  full = programs['full'][1].memory_analysis()
  for name, (_, compiled, _) in programs.items():
    memory = compiled.memory_analysis()
    facts = common.program_facts(compiled)
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    rows.append(
      (
        name,
        facts['gflop'],
        memory.argument_size_in_bytes / 2**20,
        memory.argument_size_in_bytes / full.argument_size_in_bytes,
        memory.temp_size_in_bytes / 2**20,
        memory.temp_size_in_bytes / full.temp_size_in_bytes,
        total / (full.argument_size_in_bytes + full.temp_size_in_bytes),
        ratios.get(name, ''),
      )
    )
  common.print_table(
    f'A step of T5 1.1 small, batch {args.batch} x {args.inputs}/{args.targets}, AdamW, rank {args.rank}',
    rows,
    (
      'trained',
      'GFLOP',
      'arguments, MiB',
      '/ full',
      'temporaries, MiB',
      '/ full',
      'both / full',
      'time / full',
    ),
  )


if __name__ == '__main__':
  common.start_like_commands()
  main()
