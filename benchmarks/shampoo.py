"""Distributed Shampoo: roots, steps with and without them, compile seconds, accuracy, memory and work by devices.

    python benchmarks/shampoo.py [--width 512] [--matrices 16] [--block 128] [--repeats 5]
        [--only roots|accuracy|steps|devices]

The default is 6.3 M parameters, eight matrices 512x512 and eight 512x1024, in blocks of 128. The roots are set against
one batched `jnp.linalg.eigh` of the same matrices, a step against its own matrix products timed alone, all in one run:
before each step the products, compiled separately, on given blocks, into allocated memory. The
ratio is the median of those of the pairs, of wall time and of the process's CPU time. The oracle of the accuracy is a
float64 eigendecomposition; the statistics are of random gradients whose rows and columns have scales over three orders
of magnitude, so that conditions come near the largest that the ridge allows.

The tables by devices are of a compiled step of the sharded mode, for 8 kernels 1024 x 2048 and for T5 1.1 small in
blocks of 1024, on virtual CPU devices, and of no other machine's speed: memory per device, and operations, of which XLA
counts one iteration of each loop. Operations of the roots are those of a compiled piece, with one iteration of the
method, times the number of pieces of the device with the most operations.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import common


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--width', type=common.positive, default=512)
  parser.add_argument(
    '--matrices', type=common.positive, default=16, help='half are square, half twice as long'
  )
  parser.add_argument('--block', type=common.positive, default=128)
  parser.add_argument(
    '--interval', type=_interval, default=20, help='steps between roots, 3 at least'
  )
  parser.add_argument('--repeats', type=common.positive, default=5)
  parser.add_argument('--only', choices=('roots', 'accuracy', 'steps', 'devices'))
  args = parser.parse_args()
  if args.only in (None, 'devices'):
    _devices()
  if args.only == 'devices':
    return
  rates = [common.matmul_gflops()]
  params, grads = _params_and_gradients(args.width, args.matrices)
  stacks = _statistics(grads, args.block)
  num_matrices = sum(stack.shape[0] for stack in stacks)
  if args.only in (None, 'roots'):
    _roots(stacks, args.repeats, num_matrices)
  if args.only in (None, 'accuracy'):
    _accuracy(stacks)
  if args.only in (None, 'steps'):
    _steps(params, grads, args)
  rates.append(common.matmul_gflops())
  common.print_table(
    'Shampoo: the run',
    [
      ('matmul 2048^3 GFLOP/s before, after', ', '.join(f'{rate:.0f}' for rate in rates)),
      ('peak resident memory, MB', common.peak_memory_mb()),
    ],
    ('what', 'value'),
  )


def _interval(text):
  """Return the number of steps, of which some have no roots: the first of those is not timed."""
  if not text.isdecimal() or int(text) < 3:
    raise argparse.ArgumentTypeError(f'got {text!r}; expected an integer of at least 3')
  return int(text)


def _params_and_gradients(width, num_matrices):
  """Return parameters and a list of gradients whose rows and columns have scales over three orders of magnitude."""
  import jax

  shapes = {f'm{i:02d}': (width, width * (1 + i % 2)) for i in range(num_matrices)}
  keys = iter(jax.random.split(jax.random.key(0), 5 * num_matrices))
  params = {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
  scales = {
    name: [10 ** jax.random.uniform(next(keys), (dim,), minval=-3, maxval=0) for dim in shape]
    for name, shape in shapes.items()
  }
  grads = [
    {
      name: rows[:, None] * jax.random.normal(next(keys), params[name].shape) * columns
      for name, (rows, columns) in scales.items()
    }
    for _ in range(2)
  ]
  return params, grads


def _statistics(grads, block):
  """Return the statistics of all blocks as stacks float32 [k, block, block], two per parameter."""
  import jax.numpy as jnp

  stacks = []
  for name in grads[0]:
    total = [0, 0]
    for grad in (tree[name] for tree in grads):
      rows, columns = (dim // block for dim in grad.shape)
      blocks = (
        grad.reshape(rows, block, columns, block).transpose(0, 2, 1, 3).reshape(-1, block, block)
      )
      total[0] += jnp.einsum('kij,klj->kil', blocks, blocks, precision='highest')
      total[1] += jnp.einsum('kij,kil->kjl', blocks, blocks, precision='highest')
    stacks += [matrix + 1e-6 * jnp.eye(block) for matrix in total]
  return stacks


def _compiled(fn, *args, **jit_options):
  """Return (compile seconds, compiled function)."""
  import jax

  return common.timed(lambda: jax.jit(fn, **jit_options).lower(*args).compile())


def _median_seconds(fn, repeats):
  """Return the median seconds of a call, after one that is not counted."""
  import jax

  jax.block_until_ready(fn())
  return statistics.median(
    common.timed(lambda: jax.block_until_ready(fn()))[0] for _ in range(repeats)
  )


def _roots(stacks, repeats, num_matrices):
  """Print the seconds of one batched eigendecomposition and of all roots by either method."""
  import jax.numpy as jnp

  from t5x_lite.optimizers.shampoo import root_plan
  from t5x_lite.optimizers.shampoo.roots import RootOptions

  previous = [jnp.broadcast_to(jnp.eye(stack.shape[-1]), stack.shape) for stack in stacks]
  together = jnp.concatenate(stacks)
  compile_seconds, eigh = _compiled(jnp.linalg.eigh, together)
  bare = _median_seconds(lambda: eigh(together), repeats)
  rows = [('one batched jnp.linalg.eigh', bare, 1.0, compile_seconds, '', '')]
  for method in ('eigh', 'coupled_newton'):
    fn = functools.partial(root_plan.compute_roots, options=RootOptions(method=method))
    compile_seconds, roots_fn = _compiled(
      lambda stacks, previous, fn=fn: fn(stacks, [4] * len(stacks), previous, jnp.int32(0)),
      stacks,
      previous,
    )
    errors = jnp.concatenate(roots_fn(stacks, previous)[1])
    seconds = _median_seconds(lambda: roots_fn(stacks, previous), repeats)
    rows.append(
      (
        f'all roots by {method}',
        seconds,
        seconds / bare,
        compile_seconds,
        float(errors.max()),
        roots_fn.memory_analysis().temp_size_in_bytes / 1e6,
      )
    )
  common.print_table(
    f'Shampoo: roots of order 4 of {num_matrices} matrices {together.shape[1:]}',
    rows,
    ('what', 's', 'to eigh', 'compile, s', 'largest reported error', 'temporaries, MB'),
  )


def _accuracy(stacks, num_samples=24):
  """Print the error of both methods against an eigendecomposition in float64."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from t5x_lite.optimizers.shampoo import roots

  matrices = jnp.concatenate(stacks)
  matrices = matrices[:: max(1, len(matrices) // num_samples)]
  values, vectors = np.linalg.eigh(np.asarray(matrices, np.float64))
  values = values + 1e-6 * values[:, -1:]
  rows = []
  for p in (2, 4, 6, 8):
    exact = np.einsum('kij,kj,klj->kil', vectors, values ** (-1 / p), vectors)
    for method in ('eigh', 'coupled_newton'):
      root_fn = functools.partial(
        roots.inverse_pth_root, p=p, options=roots.RootOptions(method=method)
      )
      results, _ = jax.jit(jax.vmap(root_fn))(matrices)
      errors = np.linalg.norm(results - exact, axis=(1, 2)) / np.linalg.norm(exact, axis=(1, 2))
      rows.append((p, method, float(np.median(errors)), float(errors.max())))
  condition = float(np.median(values[:, -1] / values[:, 0]))
  common.print_table(
    f'Shampoo: relative error of {len(matrices)} roots, median condition with the ridge {condition:.2g}',
    rows,
    ('p', 'method', 'median', 'largest'),
  )


def _products_fn(params, grad, block):
  """Return a function that computes the products of one update: statistics, and the gradient times both roots.

  The products are those of `blocks`, written into the memory of the previous ones.
  """
  import jax
  import jax.numpy as jnp

  from t5x_lite.optimizers.shampoo import blocks

  layouts = {
    name: blocks.make_layout(param.shape, block_size=block, merge_dims=True, largest_dim=4096)
    for name, param in params.items()
  }
  matrices = {
    name: [jnp.zeros([count, size, size]) for count, size in layout.stack_shapes]
    for name, layout in layouts.items()
  }
  cut = {name: layouts[name].cut(array) for name, array in grad.items()}

  def multiply(a, b, dim):
    return jax.lax.dot_general(a, b, (((dim,), (dim,)), ((0,), (0,))), precision='highest')

  def products(cut, matrices, memory):
    del memory
    results = []
    for name, groups in cut.items():
      for group, (left, right) in zip(
        groups, zip(*[iter(matrices[name])] * 2, strict=False), strict=False
      ):
        results += [
          multiply(group, group, 2),
          multiply(group, group, 1),
          multiply(multiply(group, left, 1), right, 1),
        ]
    return results

  memory = [products(cut, matrices, None)]
  _, compiled = _compiled(products, cut, matrices, memory[0], donate_argnums=2, keep_unused=True)

  def run():
    memory[0] = jax.block_until_ready(compiled(cut, matrices, memory[0]))

  run()
  return run


def _step_fn(transformation, params, grads):
  """Return (compile seconds, a function of the step number that makes an update in place)."""
  import jax
  import jax.numpy as jnp
  import optax

  def update(params, state, grads):
    updates, state = transformation.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = [jax.tree.map(jnp.copy, params), jax.jit(transformation.init)(params)]
  compile_seconds, compiled = _compiled(update, *state, grads[0], donate_argnums=(0, 1))

  def run(step):
    state[:] = jax.block_until_ready(compiled(*state, grads[step % 2]))

  return compile_seconds, run


def _seconds(fn):
  """Return (wall seconds, seconds of all processors) of a call."""
  cpu = time.process_time()
  wall, _ = common.timed(fn)
  return wall, time.process_time() - cpu


def _against_products(name, step_fn, products_fn, steps):
  """Return a row of a table: medians of the steps' wall seconds and of their ratios to products made just before."""
  pairs = [(_seconds(products_fn), _seconds(functools.partial(step_fn, step))) for step in steps]
  ratios = [[step[i] / products[i] for products, step in pairs] for i in range(2)]
  return (
    name,
    statistics.median(step[0] for _, step in pairs),
    statistics.median(pair[0][0] for pair in pairs),
    *(statistics.median(values) for values in ratios),
    f'{min(ratios[0]):.2f} to {max(ratios[0]):.2f}',
  )


def _steps(params, grads, args):
  """Print the seconds of entire updates and of their matrix products."""
  import numpy as np
  import optax

  from t5x_lite import optimizers

  products_fn = _products_fn(params, grads[0], args.block)
  compile_seconds, adam_fn = _step_fn(optax.adam(1e-3), params, grads)
  adam_fn(0)
  others = [step for step in range(1, 2 * args.interval) if step % args.interval]
  rows = [(*_against_products('optax.adam', adam_fn, products_fn, others), compile_seconds)]
  for name, options in (
    ('eigh', {'root_method': 'eigh'}),
    ('coupled_newton', {'root_method': 'coupled_newton'}),
    ('eigh, int8 momenta', {'root_method': 'eigh', 'best_effort_memory_usage_reduction': True}),
    (
      'eigh, int8 and int16 state',
      {
        'root_method': 'eigh',
        'best_effort_memory_usage_reduction': True,
        'quantize_statistics': True,
      },
    ),
    ('eigh, sharded', {'root_method': 'eigh', 'shard_optimizer_states': True}),
    ('eigh, spread', {'root_method': 'eigh', 'spread_roots': True}),
  ):
    transformation = optimizers.distributed_shampoo(
      1e-3,
      block_size=args.block,
      preconditioning_compute_steps=args.interval,
      start_preconditioning_step=1,
      **options,
    ).optax_optimizer
    compile_seconds, step_fn = _step_fn(transformation, params, grads)
    step_fn(0)
    step_fn(1)
    if 'spread' in name:
      rows.append(
        (*_against_products(f'{name}: every step', step_fn, products_fn, others), compile_seconds)
      )
      continue
    # The number of the update is the state's: steps with roots are those that are made at multiples of the interval.
    first = _against_products(
      f'{name}: any other step', step_fn, products_fn, range(2, args.interval)
    )
    due = _against_products(f'{name}: a step with all roots', step_fn, products_fn, [args.interval])
    rows += [(*due, compile_seconds), (*first, '')]
  num_params = sum(np.size(param) for param in params.values())
  common.print_table(
    f'Shampoo: updates of {num_params / 1e6:.2f} M parameters, roots every {args.interval} steps',
    rows,
    (
      'what',
      's',
      'its matrix products, s',
      'ratio',
      'of CPU seconds',
      'range of ratios',
      'compile, s',
    ),
  )


def _devices():
  """Print memory and operations per device of compiled steps of the sharded mode."""
  rows = []
  for kernels in ('sharded', 'replicated'):
    rows += [(kernels, *_compiled_step(number, kernels)[0]) for number in (1, 8, 16, 32, 64)]
  columns = ('devices', 'state, MB', 'temporaries, MB', 'largest collective, MB', 'GFLOP')
  common.print_table(
    'Shampoo, sharded: one step on each device; matrices of one kernel have 16.8 MB',
    rows,
    ('kernels', *columns),
  )
  rows = []
  for params, roots in (('t5_small', 'in one step'), ('t5_small_spread', 'spread over 20 steps')):
    for number in (8, 64):
      row, figures = _compiled_step(number, params)
      most = figures.get('most_root_flops')
      root_figures = ('', '', '')
      if most:
        share = figures['share_of_root_flops']
        root_figures = (most / 1e9, share / 1e9, most / share)
      rows.append((roots, *row, *root_figures))
  common.print_table(
    'Shampoo, sharded: one step of T5 1.1 small in blocks of 1024 on each device',
    rows,
    ('roots', *columns, 'roots of the device with most, GFLOP', 'all / devices', 'ratio'),
  )


def _compiled_step(num_devices, params):
  """Return (a row of a table, all figures) of `compiled_memory`, in a process with that many devices."""
  environment = os.environ | {'XLA_FLAGS': f'--xla_force_host_platform_device_count={num_devices}'}
  result = subprocess.run(
    [sys.executable, '-m', 'tests.optimizers.shampoo.compiled_memory', str(num_devices), params],
    check=True,
    stdout=subprocess.PIPE,
    cwd=pathlib.Path(__file__).resolve().parents[1],
    env=environment,
  )
  figures = json.loads(result.stdout)
  sizes = [figures[name] / 1e6 for name in ('state', 'temporaries', 'collective')]
  return (num_devices, *sizes, figures['flops'] / 1e9), figures


if __name__ == '__main__':
  common.start_like_commands()
  main()
