"""Train step: initialisation, trace, compile and step seconds, tokens per second, peak memory.

    python benchmarks/bench_train_step.py [--layers 8] [--batch 8] [--inputs 128] [--targets 64] [--remat none]
        [--scan] [--layout t5] [--dtype float32] [--optimizer adafactor] [--num_devices 1] [--steps 5]
        [--compile_only] [--sweep layers 8 16 32] [--t5x PATH [--t5x_python PYTHON] [--same_options]]

The default is the 77 M-parameter T5 1.1 small (8+8 layers, width 512, 6 heads of 64, mlp 1024, vocabulary 32128). The
step is that of `Trainer`. A peer takes steps in turn with it: with `--t5x`, T5X's own step from a checkout; otherwise
the rebuilt peer, which computes the same in the formulation of T5X's example network (`peer_t5.py`), unrolled and in
float32, with optax's optimizer of the same name. In float32 the first losses must be equal, unless T5X's network has
other parameters than this package (with `--scan` or `--remat`, without `--layout scalable_t5`). `--sweep` measures
several values of an option, each in a new process, and prints a row for each.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import multiprocessing
import statistics
import time

import common
import t5x_process

_SWEEPS = ('layers', 'batch', 'inputs', 'targets', 'num_devices')
# (what, value of t5x_lite, value of the peer or '').
Rows = list[tuple[str, object, object]]


def _gradients(loss_fn, params, batch):
  """Return (a function that returns the seconds of a forward and backward pass, its temporaries in MB)."""
  import jax

  program = jax.jit(jax.value_and_grad(loss_fn)).lower(params, batch).compile()

  def run():
    return jax.block_until_ready(program(params, batch))

  run()  # touches fresh memory
  return lambda: common.timed(run)[0], common.program_facts(program)['temporaries']


class _Rebuilt:
  """The rebuilt peer: `peer_t5` and optax."""

  name = 'rebuilt peer'

  def __init__(self, args, setup, params):
    import jax
    import jax.numpy as jnp
    import optax
    import peer_t5

    self._batch = setup.batch
    self._loss_fn = lambda params, batch: peer_t5.loss_fn(params, batch, setup.config, 1e-4)
    optimizer = optax.adafactor(1e-3) if args.optimizer == 'adafactor' else optax.adamw(1e-3)

    def step(state, batch):
      params, optimizer_state = state
      loss, grads = jax.value_and_grad(self._loss_fn)(params, batch)
      updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
      return (optax.apply_updates(params, updates), optimizer_state), loss

    replicated = jax.sharding.NamedSharding(setup.partitioner.mesh, jax.sharding.PartitionSpec())
    state = jax.eval_shape(lambda params: (params, optimizer.init(params)), params)
    state = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), state
    )
    jitted = jax.jit(step, donate_argnums=(0,), out_shardings=(replicated, replicated))
    trace, lowered = common.timed(lambda: jitted.lower(state, self._batch))
    compiling, self._step = common.timed(lowered.compile)
    self.facts = {
      'trace': trace,
      'compile': compiling,
      **common.program_facts(self._step),
      'same_params': True,
    }
    if not args.compile_only:
      params = jax.tree.map(jnp.array, params)  # a copy, since steps consume their state
      self._state = jax.device_put((params, optimizer.init(params)), replicated)

  def step(self):
    """Return (seconds, loss) of a step."""
    import jax

    spent, (self._state, loss) = common.timed(
      lambda: jax.block_until_ready(self._step(self._state, self._batch))
    )
    return spent, float(loss)

  def compile_gradients(self):
    """Compile the forward and backward pass; return its temporaries in MB."""
    self.gradients, temporaries = _gradients(self._loss_fn, self._state[0], self._batch)
    return temporaries

  def close(self):
    """Nothing to end: the peer is no process."""


class _T5x:
  """T5X's own step; see `t5x_worker.Step`."""

  def __init__(self, args, setup, params):
    from flax import traverse_util

    options = {
      name: getattr(args, name)
      for name in ('layers', 'optimizer', 'dtype', 'scan', 'remat', 'num_devices', 'compile_only')
    }
    arrays = {f'batch/{name}': x for name, x in setup.batch.items()}
    if not args.compile_only:
      arrays.update(
        {f'params/{name}': x for name, x in traverse_util.flatten_dict(params, sep='/').items()}
      )
    call = t5x_process.T5x(args, 'Step', {**options, 'vocab': setup.config.vocab_size}, arrays)
    self.name, self.facts, self.close = call.name, call.facts, call.close
    self.step, self.gradients, self.compile_gradients = (
      functools.partial(call, name) for name in ('step', 'gradients', 'compile_gradients')
    )


def _peer(args, setup, params):
  """Return the peer, or None for arguments that no peer supports."""
  if args.t5x:
    return _T5x(args, setup, params)
  return _Rebuilt(args, setup, params) if args.layout == 't5' else None


def _measure_steps(args, setup, trainer, step, peer) -> Rows:
  """Return the rows of steps and gradients, ours and the peer's in turn."""
  import jax

  state = trainer.step_state
  trainer.close()

  def our_step():
    nonlocal state
    spent, (state, metrics) = common.timed(lambda: jax.block_until_ready(step(state, setup.batch)))
    return spent, float(metrics['loss'].compute())

  steps = [our_step, *([peer.step] if peer else [])]
  losses = [step()[1] for step in steps]
  seconds = common.in_turn([lambda step=step: step()[0] for step in steps], args.steps)
  if peer and peer.facts['same_params'] and args.dtype == 'float32':
    assert abs(losses[0] - losses[1]) < 1e-4 * losses[0], losses
  gradients, temporaries = _gradients(
    lambda p, b: setup.model.loss_fn(p, b, None)[0], state.params, setup.batch
  )
  peer_temporaries = peer.compile_gradients() if peer else ''
  gradient_seconds = common.in_turn([gradients, *([peer.gradients] if peer else [])], args.steps)
  tokens = args.batch * (args.inputs + args.targets)

  def row(what, fn, columns):
    return (what, fn(columns[0]), fn(columns[1]) if peer else '')

  return [
    row('step, s (median)', statistics.median, seconds),
    row('step, s (min)', min, seconds),
    row('forward and backward, s (median)', statistics.median, gradient_seconds),
    row('tokens/s', lambda column: tokens / statistics.median(column), seconds),
    ('temporaries of forward and backward, MB', temporaries, peer_temporaries),
    ('loss of the first step', losses[0], losses[1] if peer else ''),
  ]


def measure(args: argparse.Namespace) -> tuple[str, Rows]:
  """Return (name of the peer or '', rows) for one set of arguments."""
  start = time.perf_counter()
  import jax

  if args.num_devices is not None:
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', args.num_devices)
  import jax.numpy as jnp

  from t5x_lite import trainer as trainer_lib
  from t5x_lite import tree_utils
  from t5x_lite.networks import t5  # noqa: F401  For the seconds of imports: `common.t5_small` imports it too.

  jax.devices()
  facts = {'import': time.perf_counter() - start}

  before = common.matmul_gflops()
  setup = common.t5_small(
    args,
    dtype=jnp.dtype(args.dtype),
    remat_policy=args.remat,
    scan_layers=args.scan,
    param_layout=args.layout,
  )
  shapes = setup.initializer.global_train_state_shape
  trainer = trainer_lib.Trainer(
    setup.model,
    shapes,
    setup.partitioner,
    [],
    None,
    setup.initializer.train_state_axes,
    jax.random.key(0),
  )
  jitted = trainer.partitioned_train_step()
  facts['trace'], lowered = common.timed(lambda: jitted.lower(trainer.step_state, setup.batch))
  facts['compile'], step = common.timed(lowered.compile)
  facts.update(common.program_facts(step))
  facts['model_gflop'] = trainer.count_flops(setup.batch).total / 1e9
  params = shapes.params
  if not args.compile_only:
    facts['init'], trainer.train_state = common.timed(
      lambda: jax.block_until_ready(setup.initializer.from_scratch(jax.random.key(0)))
    )
    params = trainer.train_state.params
  peer = _peer(args, setup, params)
  del params
  with contextlib.closing(peer) if peer else contextlib.nullcontext():
    rows = [] if args.compile_only else _measure_steps(args, setup, trainer, step, peer)
  after = common.matmul_gflops()
  peer_facts = peer.facts if peer else {}
  rows += [
    (label, facts[name], peer_facts.get(name, ''))
    for name, label in (
      ('gflop', 'GFLOP counted by XLA'),
      ('model_gflop', 'GFLOP of the model'),
      ('temporaries', 'temporaries of the step, MB'),
      ('import', 'import and start, s'),
      ('init', 'initialisation, s'),
      ('trace', 'trace, s'),
      ('compile', 'compile, s'),
    )
    if name in facts
  ]
  rows += [
    ('parameters', f'{tree_utils.num_elements(shapes.params):,}', ''),
    ('peak resident memory, MB', common.peak_memory_mb(), ''),
    ('matmul 2048^3 GFLOP/s before, after', f'{before:.0f}, {after:.0f}', ''),
  ]
  return (peer.name if peer else ''), rows


def _print_rows(title: str, peer: str, rows: Rows) -> None:
  cells = []
  for what, ours, theirs in rows:
    is_cost = what.endswith((', s', ', s (median)', ', s (min)', ', MB', 'by XLA')) and theirs != ''
    cells.append((what, ours, theirs, theirs / ours if is_cost else ''))
  common.print_table(
    title,
    cells if peer else [row[:2] for row in cells],
    ('what', 't5x_lite', peer, 'ratio') if peer else ('what', 't5x_lite'),
  )


def _print_sweep(title: str, option: str, results: list[tuple[int, str, Rows]]) -> None:
  """Print a table with a row for each value."""
  names = ('step, s (median)', 'trace, s', 'compile, s', 'temporaries of the step, MB')
  peer, header, table = results[0][1], [option], []
  for value, _, rows in results:
    cells, header = [value], [option]
    for what, ours, theirs in rows:
      if what in names:
        cells += [ours, theirs, theirs / ours] if peer else [ours]
        header += [what, peer, 'ratio'] if peer else [what]
    table.append((*cells, rows[-1][1]))
  common.print_table(title, table, (*header, rows[-1][0]))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  common.add_t5_small_arguments(parser)
  parser.add_argument('--remat', default='none', choices=['none', 'minimal', 'full'])
  parser.add_argument('--scan', action='store_true', help='compile the layers as one scanned body')
  parser.add_argument(
    '--layout', default='t5', choices=['t5', 'scalable_t5'], help="the rebuilt peer takes 't5' only"
  )
  parser.add_argument('--dtype', default='float32', choices=['float32', 'bfloat16'])
  parser.add_argument(
    '--num_devices', type=common.positive, metavar='N', help='simulate N devices, in data parallel'
  )
  parser.add_argument(
    '--steps', type=common.positive, default=5, help='twice this number are counted'
  )
  parser.add_argument('--compile_only', action='store_true', help='trace and compile without steps')
  parser.add_argument(
    '--sweep',
    nargs='+',
    metavar=('OPTION', 'VALUE'),
    help=f'measure each value of an option: {", ".join(_SWEEPS)}',
  )
  args = t5x_process.parse_args(parser)
  title = (
    f'Train step ({args.optimizer}, {args.dtype}, remat {args.remat}, scan {args.scan}, layout {args.layout}, '
    f'batch {args.batch} x {args.inputs}/{args.targets}, {args.layers}+{args.layers} layers)'
  )
  if args.sweep is None:
    return _print_rows(title, *measure(args))
  option, *values = args.sweep
  if option not in _SWEEPS or not values:
    parser.error(
      f'argument --sweep: must be one of {", ".join(_SWEEPS)} and its values, got {" ".join(args.sweep)!r}'
    )
  try:
    values = [common.positive(value) for value in values]
  except argparse.ArgumentTypeError as e:
    parser.error(f'argument --sweep: {e}')
  runs = [argparse.Namespace(**{**vars(args), option: value}) for value in values]
  # A new process for each, so that none inherits compiled programs, devices or memory of another.
  with concurrent.futures.ProcessPoolExecutor(
    1, multiprocessing.get_context('spawn'), max_tasks_per_child=1
  ) as pool:
    results = [
      (value, *result) for value, result in zip(values, pool.map(measure, runs), strict=True)
    ]
  _print_sweep(f'{title}, by {option}', option, results)


if __name__ == '__main__':
  common.start_like_commands()
  main()
