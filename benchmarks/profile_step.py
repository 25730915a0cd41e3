"""Time of the parts of a training step or an expert layer on a CPU, and their limits by operations or bytes.

    python benchmarks/profile_step.py [--layers 8] [--batch 8] [--inputs 128] [--targets 64] [--optimizer adafactor]
        [--scan] [--num_experts 64] [--steps 5] [--share 0.03]

The step is that of `bench_train_step.py`; with `--num_experts` the program is the dropless expert layer of `moe.py`,
forward and backward, with one choice. XLA's events of the compiled operations are read from a trace of some runs. A
part is all operations of one name and place in the model, in one direction; its time is the sum over its calls of the
fastest one of all runs. The limit is the larger one of its operations at the rate of a 2048^3 matmul and its bytes at
the rate of a copy of 256 MB, both measured in this run; a part whose arrays are in caches can be below it. Bytes are
those of operands and results, or of the slice if an operation reads or writes only a slice. Run it on one core
(`taskset -c 0`): with more, operations run at the same time and their times overlap.
"""

import argparse
import collections
from collections.abc import Iterable
import dataclasses
import functools
import glob
import gzip
import importlib.util
import json
import math
import os
import re
import sys
import tempfile

import common

_BYTES = {
  'f32': 4,
  's32': 4,
  'u32': 4,
  'bf16': 2,
  'f16': 2,
  'pred': 1,
  's8': 1,
  'u8': 1,
  's64': 8,
  'f64': 8,
}
_INSTRUCTION = re.compile(
  r'^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\([^=]*?\)|\S+) (?P<op>[\w\-]+)\((?P<args>.*)$'
)
# Events of these last as long as those of their computations.
_CONTAINERS = ('while', 'conditional', 'call')
_ARRAY = re.compile(r'(\w+)\[([\d,]*)\]')


@dataclasses.dataclass
class Operation:
  """An instruction of the compiled program: where it comes from in the model, its operations and bytes of one call."""

  source: str
  flops: float
  num_bytes: float


@dataclasses.dataclass
class Part:
  """Sums over the calls of a step."""

  milliseconds: float = 0.0
  calls: int = 0
  flops: float = 0.0
  num_bytes: float = 0.0


def _elements(dims: str) -> int:
  return math.prod(int(dim) for dim in dims.split(',') if dim)


def _num_bytes(type_text: str) -> int:
  return sum(_elements(dims) * _BYTES.get(dtype, 4) for dtype, dims in _ARRAY.findall(type_text))


def _dot_flops(match: re.Match, types: dict[str, str]) -> float:
  """Return 2 x (elements of the result) x (contracted elements of the first operand)."""
  first = re.search(r'%([\w.\-]+)', match['args'])
  contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', match['args'])
  if first is None or contracted is None:
    return 0.0
  dims = [int(dim) for dim in _ARRAY.search(types[first[1]])[2].split(',')]
  depth = math.prod(dims[int(index)] for index in contracted[1].split(','))
  return 2.0 * _elements(_ARRAY.search(match['type'])[2]) * depth


def operations(program_text: str) -> dict[str, Operation]:
  """Return the operations of a compiled program by the names that its events have."""
  types = {}
  flops_of_computation = collections.Counter()
  # Bytes that are read and written where a computation touches a slice of an array only.
  slices_of_computation = collections.Counter()
  computation = ''
  matches = []
  for line in program_text.splitlines():
    match = _INSTRUCTION.match(line)
    if match is None:
      header = re.match(r'^(?:ENTRY )?%([\w.\-]+) ', line)
      if header is not None:
        computation = header[1]
      continue
    types[match['name']] = match['type']
    if match['op'] == 'dot':
      flops_of_computation[computation] += _dot_flops(match, types)
    slices_of_computation[computation] += _slice_bytes(match, types)
    matches.append(match)
  result = {}
  for match in matches:
    if match['op'] in _CONTAINERS:
      continue
    called = re.search(r'calls=%([\w.\-]+)', match['args'])
    flops = 0.0
    slice_bytes = _slice_bytes(match, types)
    if called is not None:
      flops = flops_of_computation[called[1]]
      slice_bytes = slices_of_computation[called[1]]
    elif match['op'] == 'dot':
      flops = _dot_flops(match, types)
    operands = sum(_num_bytes(types.get(name, '')) for name in _operands(match))
    source = re.search(r'op_name="([^"]*)"', match['args'])
    result[match['name']] = Operation(
      _part_name(source[1] if source else ''),
      flops,
      slice_bytes or _num_bytes(match['type']) + operands,
    )
  return result


def _operands(match: re.Match) -> list[str]:
  return re.findall(r'%([\w.\-]+)', match['args'].split('), ')[0])


def _slice_bytes(match: re.Match, types: dict[str, str]) -> int:
  """Return the bytes that an operation on a slice reads and writes; 0 for one on whole arrays."""
  if match['op'] == 'dynamic-update-slice':
    return 2 * _num_bytes(types.get(_operands(match)[1], ''))
  if match['op'] in ('dynamic-slice', 'gather'):
    return 2 * _num_bytes(match['type'])
  return 0


def _part_name(source: str) -> str:
  """Return direction and place in the model of an operation, from its `op_name`."""
  if 'transpose(' in source:
    direction = 'backward'
  elif 'jvp(' in source:
    direction = 'forward'
  else:
    direction = 'update'
  names = [name for name in source.split('/') if re.fullmatch(r'[\w.]+', name)]
  dropped = ('while', 'body', 'cond', 'closed_call', 'checkpoint', 'rematted_computation', 'remat')
  return f'{direction}: ' + ' '.join([name for name in names if name not in dropped][-3:])


def read_events(folder: str) -> dict[str, list[float]]:
  """Return milliseconds of all events of a trace by name."""
  (path,) = glob.glob(f'{folder}/**/*.trace.json.gz', recursive=True)
  with gzip.open(path, 'rt', encoding='utf-8') as file:
    events = json.load(file)['traceEvents']
  result = collections.defaultdict(list)
  for event in events:
    if event.get('ph') == 'X':
      result[event['name']].append(event['dur'] / 1000)
  return result


def sum_parts(
  events: dict[str, list[float]], program: dict[str, Operation], num_steps: int
) -> dict[str, Part]:
  """Return the parts of a step by name."""
  parts = collections.defaultdict(Part)
  for name, times in events.items():
    operation = program.get(name)
    calls = len(times) // num_steps
    if operation is None or calls == 0:
      continue
    part = parts[operation.source]
    # The calls of a step are in the same order in each.
    part.milliseconds += sum(min(times[call::calls]) for call in range(calls))
    part.calls += calls
    part.flops += calls * operation.flops
    part.num_bytes += calls * operation.num_bytes
  return parts


def _copy_rate() -> float:
  """Return bytes read and written by a copy of 256 MB, per second."""
  import jax
  import jax.numpy as jnp

  x = jnp.zeros(64_000_000, jnp.float32)
  add = jax.jit(lambda x: x + 1, donate_argnums=0)
  x = jax.block_until_ready(add(x))
  seconds = []
  for _ in range(5):
    spent, x = common.timed(lambda x=x: jax.block_until_ready(add(x)))
    seconds.append(spent)
  return 2 * x.nbytes / min(seconds)


def _step_program(args):
  """Return (compiled step, function from a result to the next arguments, first arguments)."""
  import jax

  setup = common.t5_small(args, scan_layers=args.scan)
  trainer = common.trainer(setup)
  program = trainer.partitioned_train_step().lower(trainer.step_state, setup.batch).compile()
  trainer.train_state = setup.initializer.from_scratch(jax.random.key(0))
  return program, lambda result: (result[0], setup.batch), (trainer.step_state, setup.batch)


def _expert_program(args):
  """Return what `_step_program` returns, of the dropless expert layer."""
  # The package `moe` has the name of the script.
  spec = importlib.util.spec_from_file_location('moe_layer', f'{os.path.dirname(__file__)}/moe.py')
  moe_layer = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = moe_layer  # dataclasses look their module up
  spec.loader.exec_module(moe_layer)
  case = moe_layer.Case(4096, 256, 512, args.num_experts, 1)
  layer, _, x, weights = moe_layer.make_arrays(case)
  loss_fn = functools.partial(moe_layer.layer_loss, case=case, method='grouped')
  program = moe_layer.compiled(loss_fn, layer, x, weights)
  return program, lambda _: (layer, x, weights), (layer, x, weights)


def measure(args: argparse.Namespace) -> None:
  """Print the parts of the program."""
  import jax

  if args.num_experts is None:
    program, next_arguments, arguments = _step_program(args)
  else:
    program, next_arguments, arguments = _expert_program(args)
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  seconds = []
  with tempfile.TemporaryDirectory() as folder:
    for _ in range(2):
      arguments = next_arguments(jax.block_until_ready(program(*arguments)))
    with jax.profiler.trace(folder, profiler_options=options):
      for _ in range(args.steps):
        spent, result = common.timed(functools.partial(_run, program, arguments))
        arguments = next_arguments(result)
        seconds.append(spent)
    parts = sum_parts(read_events(folder), operations(program.as_text()), args.steps)
  _print_parts(parts, min(seconds), args.share)


def _run(program, arguments):
  import jax

  return jax.block_until_ready(program(*arguments))


def _print_parts(parts, seconds, smallest_share):
  flop_rate = common.matmul_gflops() * 1e9
  byte_rate = _copy_rate()
  total = _sum_of(parts.values())

  def row(name, part):
    limit = 1000 * max(part.flops / flop_rate, part.num_bytes / byte_rate)
    share = part.milliseconds / total.milliseconds
    return (
      name,
      part.calls,
      f'{part.milliseconds:.1f}',
      f'{100 * share:.1f}',
      f'{part.flops / 1e9:.1f}',
      f'{part.num_bytes / 1e6:.0f}',
      f'{limit:.1f}',
    )

  smallest = smallest_share * total.milliseconds
  by_time = sorted(parts.items(), key=lambda item: -item[1].milliseconds)
  rows = [row(name, part) for name, part in by_time if part.milliseconds >= smallest]
  others = [part for part in parts.values() if part.milliseconds < smallest]
  products = [part for part in parts.values() if part.flops > 0]
  rows += [
    row('all others', _sum_of(others)),
    row('all', total),
    row('of all, matrix products', _sum_of(products)),
  ]
  common.print_table(
    f'Parts of a program of {1000 * seconds:.0f} ms (fastest run, traced); matmul {flop_rate / 1e9:.0f} GFLOP/s, '
    f'copy {byte_rate / 1e9:.0f} GB/s',
    rows,
    ('part', 'calls', 'ms', '% of the events', 'GFLOP', 'MB', 'limit, ms'),
  )


def _sum_of(parts: Iterable[Part]) -> Part:
  total = Part()
  for part in parts:
    total.milliseconds += part.milliseconds
    total.calls += part.calls
    total.flops += part.flops
    total.num_bytes += part.num_bytes
  return total


def main() -> None:
  """Parse the arguments and print the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  common.add_t5_small_arguments(parser)
  parser.add_argument('--scan', action='store_true', help='loops over layers')
  parser.add_argument('--num_experts', type=common.positive, help='profile an expert layer instead')
  parser.add_argument('--steps', type=common.positive, default=5)
  parser.add_argument(
    '--share', type=float, default=0.03, help='smallest share of a part with a row'
  )
  measure(parser.parse_args())


if __name__ == '__main__':
  common.start_like_commands()
  main()
