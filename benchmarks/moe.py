"""Mixture of Experts: cost and memory of an expert layer relative to a dense MLP of equal active operations.

    python benchmarks/moe.py [--num_experts 4 16 64] [--num_selected 1 2] [--runs 9] [--quick]
        [--tables cost products variants routing model] [--model_experts 8 32 64]

A layer is its router with both losses, dispatch, experts and the weighted sum, forward and backward, in float32 unless
said. Its peer is an MLP whose hidden dim is that of an expert times the choices of a token: the operations that the
layer must do. All of a table's row run in turn, `--runs` times after two that do not count; times are the process's
CPU time, and a ratio is that of the medians. Capacity forms have a factor of 1.25; the one-hot form has groups of 256
tokens, the others one of all. The table `products` has the six matrix products of even loads alone, each one call for
all experts: a form of dispatch is hardly faster than these. The table `routing` compares uneven with even routing in
turn; its ratios are medians of those of pairs. The table `model` has the training step, by the clock, of
recipes/keyword_cloze_moe.gin and of its dense twin, recipes/keyword_cloze.gin. The row `2048^3 matmul` says what the
machine could do in this run.
"""

import argparse
import dataclasses
import functools
import statistics
import time

import common


@dataclasses.dataclass(frozen=True)
class Case:
  """One row: shapes, function of an expert, and imbalance of the choices (the exponent of Zipf's law)."""

  num_tokens: int
  width: int
  hidden: int
  num_experts: int
  num_selected: int
  activations: tuple[str, ...] = ('gelu',)
  dtype: str = 'float32'
  zipf: float = 0.0


_METHODS = ('grouped', 'capacity', 'einsum')
_CAPACITY_FACTOR = 1.25
# Products of an MLP with kernels [experts, width, hidden] and [experts, hidden, width] on [experts, rows, width]:
# forward, gradients of rows, gradients of kernels.
_PRODUCTS = (
  'ecd,edf->ecf',
  'ecf,efd->ecd',
  'ecd,efd->ecf',
  'ecf,edf->ecd',
  'ecd,ecf->edf',
  'ecf,ecd->efd',
)
_TABLES = ('cost', 'products', 'variants', 'routing', 'model')
# Sequences and tokens of inputs and of targets in the table of models.
_MODEL_BATCH = (64, 64)


def spec_of(case):
  """Return the function of an expert."""
  import jax.numpy as jnp

  from moe import dispatch

  return dispatch.MlpSpec(case.activations, dtype=jnp.dtype(case.dtype))


def make_arrays(case):
  """Return (parameters of the layer, parameters of the dense peer, tokens, weights of the loss)."""
  import jax

  from moe import dispatch

  keys = iter(jax.random.split(jax.random.key(0), 16))

  def normal(*shape):
    return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

  shape = (case.num_tokens, case.width)
  x, weights = (jax.random.normal(next(keys), shape) for _ in range(2))
  layer = {
    'router': normal(case.width, case.num_experts),
    'experts': dispatch.MlpParams(
      wi=tuple(normal(case.num_experts, case.width, case.hidden) for _ in case.activations),
      wo=normal(case.num_experts, case.hidden, case.width),
    ),
  }
  hidden = case.hidden * case.num_selected
  dense = {
    'wi': [normal(case.width, hidden) for _ in case.activations],
    'wo': normal(hidden, case.width),
  }
  return layer, dense, x, weights / case.num_tokens


def router_logits(params, x, case):
  """Return the logits of the router, of which those of the first experts are larger if `zipf` is positive."""
  import jax.numpy as jnp

  places = 1.0 / jnp.arange(1, case.num_experts + 1) ** case.zipf
  return x @ params['router'] + jnp.log(places)


def layer_loss(params, x, weights, case, method):
  """Return the loss of the expert layer, with the router's losses."""
  import jax.numpy as jnp

  from moe import dispatch
  from moe import routing

  group_size = min(256, case.num_tokens) if method == 'einsum' else case.num_tokens
  groups = x.reshape(-1, group_size, case.width)
  logits = router_logits(params, groups, case)
  capacity = (
    None
    if method == 'grouped'
    else routing.expert_capacity(
      group_size, case.num_experts, _CAPACITY_FACTOR * case.num_selected, 4
    )
  )
  choice = routing.tokens_choose(
    logits, case.num_selected, routing.ChoiceOptions(capacity=capacity)
  )
  y, _ = dispatch.apply_experts(groups, choice, params['experts'], spec_of(case), method=method)
  return (
    jnp.sum(y.reshape(x.shape).astype(jnp.float32) * weights)
    + 0.01 * choice.auxiliary_loss
    + 0.001 * choice.router_z_loss
  )


def dense_loss(params, x, weights, case):
  """Return the loss of a dense MLP with the hidden units of a token's choices."""
  import jax.numpy as jnp

  spec = spec_of(case)
  x = x.astype(spec.dtype)
  branches = [
    fn(x @ kernel.astype(spec.dtype))
    for fn, kernel in zip(spec.activation_fns, params['wi'], strict=True)
  ]
  y = functools.reduce(jnp.multiply, branches) @ params['wo'].astype(spec.dtype)
  return jnp.sum(y.astype(jnp.float32) * weights)


def compiled(loss_fn, params, x, weights):
  """Return the compiled loss with its gradients of parameters and tokens."""
  import jax

  return jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1))).lower(params, x, weights).compile()


def measure(case, methods, num_runs):
  """Return {method or 'dense': (median CPU seconds, temporaries in MB)}."""
  layer, dense, x, weights = make_arrays(case)
  calls = {'dense': (compiled(functools.partial(dense_loss, case=case), dense, x, weights), dense)}
  for method in methods:
    calls[method] = (
      compiled(functools.partial(layer_loss, case=case, method=method), layer, x, weights),
      layer,
    )
  seconds = _run_in_turn(calls, x, weights, num_runs)
  return {
    name: (statistics.median(seconds[name]), fn.memory_analysis().temp_size_in_bytes / 1e6)
    for name, (fn, _) in calls.items()
  }


def _run_in_turn(calls, x, weights, num_runs):
  """Return the CPU seconds of each run by name."""
  import jax

  seconds = {name: [] for name in calls}
  for turn in range(2 + num_runs):
    for name, (fn, params) in calls.items():
      start = time.process_time()
      jax.block_until_ready(fn(params, x, weights))
      if turn >= 2:
        seconds[name].append(time.process_time() - start)
  return seconds


def measure_products(case, num_runs):
  """Return (CPU seconds of the six products of all experts, of the dense peer), sums of medians."""
  import jax
  import jax.numpy as jnp

  num_rows = case.num_tokens * case.num_selected // case.num_experts
  shapes = {
    'experts': (case.num_experts, num_rows, case.hidden),
    'dense': (1, case.num_tokens, case.hidden * case.num_selected),
  }
  calls = {}
  for name, (num_matrices, rows, hidden) in shapes.items():
    sizes = {'e': num_matrices, 'c': rows, 'd': case.width, 'f': hidden}
    for equation in _PRODUCTS:
      operands = [
        jax.random.normal(jax.random.key(i), [sizes[dim] for dim in dims])
        for i, dims in enumerate(equation.partition('->')[0].split(','))
      ]
      program = jax.jit(functools.partial(jnp.einsum, equation)).lower(*operands).compile()
      calls[name, equation] = (
        lambda operands, x, weights, program=program: program(*operands),
        operands,
      )
  medians = {
    key: statistics.median(seconds)
    for key, seconds in _run_in_turn(calls, None, None, num_runs).items()
  }
  return tuple(sum(medians[name, equation] for equation in _PRODUCTS) for name in shapes)


def measure_routing(case, method, exponents, num_runs):
  """Return {exponent of Zipf's law: CPU seconds of each run} of a layer whose loads have this law."""
  layer, _, x, weights = make_arrays(case)
  calls = {}
  for zipf in exponents:
    loss = functools.partial(layer_loss, case=dataclasses.replace(case, zipf=zipf), method=method)
    calls[zipf] = (compiled(loss, layer, x, weights), layer)
  return _run_in_turn(calls, x, weights, num_runs)


def _cells(results, methods):
  """Return milliseconds of the dense peer, then ratio and temporaries of every method."""
  dense, dense_memory = results['dense']
  cells = [f'{1000 * dense:.0f}', f'{dense_memory:.0f}']
  for method in methods:
    cells += (
      [f'{results[method][0] / dense:.2f}', f'{results[method][1]:.0f}']
      if method in results
      else ['', '']
    )
  return cells


def _header(methods):
  return ['dense, CPU ms', 'MB'] + [
    name for method in methods for name in (f'{method} / dense', 'MB')
  ]


def _cost(args, shape):
  rows = []
  for num_selected in args.num_selected:
    for num_experts in args.num_experts:
      results = measure(Case(*shape, num_experts, num_selected), args.methods, args.runs)
      rows.append((num_experts, num_selected, *_cells(results, args.methods)))
  common.print_table(
    'Expert layer: CPU time over that of the dense MLP, and temporaries',
    rows,
    ('experts', 'choices', *_header(args.methods)),
  )


def _products(args, shape):
  """Print the CPU time of the products alone over that of the dense peer's."""
  rows = []
  for num_selected in args.num_selected:
    for num_experts in args.num_experts:
      experts, dense = measure_products(Case(*shape, num_experts, num_selected), args.runs)
      rows.append((num_experts, num_selected, f'{1000 * dense:.0f}', f'{experts / dense:.2f}'))
  common.print_table(
    'Matrix products alone: CPU time over that of the dense MLP',
    rows,
    ('experts', 'choices', 'dense, CPU ms', 'experts / dense'),
  )


def _variants(args, shape):
  methods = [method for method in args.methods if method != 'einsum']
  rows = []
  for title, options in (
    ('gated (gelu, linear)', {'activations': ('gelu', 'linear')}),
    ('bfloat16', {'dtype': 'bfloat16'}),
    ('gated, bfloat16', {'activations': ('gelu', 'linear'), 'dtype': 'bfloat16'}),
  ):
    for num_selected in args.num_selected:
      results = measure(
        Case(*shape, args.variant_experts, num_selected, **options), methods, args.runs
      )
      rows.append((title, args.variant_experts, num_selected, *_cells(results, methods)))
  common.print_table(
    'Expert layer: other experts',
    rows,
    ('what', 'experts', 'choices', *_header(methods)),
  )


def _routing(args, shape):
  """Print the CPU time of layers with uneven routing over that with even routing."""
  rows = []
  for num_selected in args.num_selected:
    for method in [method for method in args.methods if method != 'einsum']:
      case = Case(*shape, args.variant_experts, num_selected)
      even, *uneven = measure_routing(case, method, (0.0, 1.0, 2.0), args.runs).values()
      ratios = [
        statistics.median(one / other for one, other in zip(seconds, even, strict=True))
        for seconds in uneven
      ]
      even_ms = f'{1000 * statistics.median(even):.0f}'
      rows.append((method, num_selected, even_ms, *(f'{ratio:.2f}' for ratio in ratios)))
  common.print_table(
    f'Expert layer: uneven routing of {args.variant_experts} experts, CPU time over that of even routing',
    rows,
    ('method', 'choices', 'even, CPU ms', 'Zipf 1 / even', 'Zipf 2 / even'),
  )


def _load_step(file, num_experts):
  """Return (compiled training step of a recipe's model, state, batch of random tokens)."""
  import gin
  import jax

  from t5x_lite import gin_utils
  from t5x_lite.configuration import syntax as gin_syntax

  bindings = {'MODEL_DIR': "'runs/x'"}
  if num_experts:
    bindings['NUM_EXPERTS'] = str(num_experts)
  flags = [
    gin_syntax.read_flag(key, value, f'--gin.{key}={value}') for key, value in bindings.items()
  ]
  texts = gin_utils.read([file], flags)
  try:
    train = gin_utils.load('t5x_lite.apps.train.train', texts)
    model = train.argument('model')
    partitioner = train.argument('partitioner')
  finally:
    gin.clear_config()
  names = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
  setup = common.training(model, partitioner, dict.fromkeys(names, _MODEL_BATCH), 255)
  trainer = common.trainer(setup, lambda step: 1e-3)
  step = trainer.partitioned_train_step().lower(trainer.step_state, setup.batch).compile()
  trainer.train_state = setup.initializer.from_scratch(jax.random.key(0))
  return step, trainer.step_state, setup.batch


def _model(args):
  """Print the training steps of the recipe with experts and of its dense twin, and their ratio."""
  import jax

  from t5x_lite import tree_utils

  programs = {'dense': _load_step('recipes/keyword_cloze.gin', None)}
  for num_experts in args.model_experts:
    programs[num_experts] = _load_step('recipes/keyword_cloze_moe.gin', num_experts)
  seconds = {name: [] for name in programs}
  states = {name: state for name, (_, state, _) in programs.items()}
  for turn in range(2 + args.runs):
    for name, (step, _, batch) in programs.items():
      start = time.perf_counter()
      states[name], _ = jax.block_until_ready(step(states[name], batch))
      if turn >= 2:
        seconds[name].append(time.perf_counter() - start)
  medians = {name: statistics.median(values) for name, values in seconds.items()}
  rows = [
    (
      name,
      f'{tree_utils.num_elements(states[name].params):,}',
      f'{1000 * medians[name]:.0f}',
      f'{medians[name] / medians["dense"]:.2f}',
      f'{step.memory_analysis().temp_size_in_bytes / 1e6:.1f}',
      f'{step.memory_analysis().argument_size_in_bytes / 1e6:.1f}',
    )
    for name, (step, _, _) in programs.items()
  ]
  common.print_table(
    f'Training step of recipes/keyword_cloze_moe.gin, batch {_MODEL_BATCH}',
    rows,
    ('experts', 'parameters', 'step, ms', 'over dense', 'temporaries, MB', 'arguments, MB'),
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--num_experts', type=common.positive, nargs='+', default=[4, 16, 64])
  parser.add_argument(
    '--num_selected', type=common.positive, nargs='+', default=[1, 2], help='choices of a token'
  )
  parser.add_argument('--methods', nargs='+', choices=_METHODS, default=list(_METHODS))
  parser.add_argument(
    '--tables',
    nargs='+',
    choices=_TABLES,
    default=_TABLES,
  )
  parser.add_argument(
    '--variant_experts',
    type=common.positive,
    default=16,
    help='experts of the tables variants and routing',
  )
  parser.add_argument(
    '--model_experts',
    type=common.positive,
    nargs='+',
    default=[8, 32, 64],
    help='experts of the table model',
  )
  parser.add_argument('--runs', type=common.positive, default=9)
  parser.add_argument(
    '--quick', action='store_true', help='512 tokens, width 64, hidden 128: to see that it works'
  )
  args = parser.parse_args()
  shape = (512, 64, 128) if args.quick else (4096, 256, 512)
  rates = [common.matmul_gflops()]
  if 'cost' in args.tables:
    _cost(args, shape)
  if 'products' in args.tables:
    _products(args, shape)
  if 'variants' in args.tables:
    _variants(args, shape)
  if 'routing' in args.tables:
    _routing(args, shape)
  if 'model' in args.tables:
    _model(args)
  rates.append(common.matmul_gflops())
  common.print_table(
    f'Expert layer: the run ({shape[0]} tokens, width {shape[1]}, hidden {shape[2]})',
    [
      ('2048^3 matmul, GFLOP/s before, after', ', '.join(f'{rate:.0f}' for rate in rates)),
      ('peak resident memory, MB', common.peak_memory_mb()),
    ],
    ('what', 'value'),
  )


if __name__ == '__main__':
  common.start_like_commands()
  main()
