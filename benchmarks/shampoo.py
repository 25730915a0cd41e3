"""Distributed Shampoo: the roots of 768 statistics, steps with and without roots, compile seconds, accuracy.

    python benchmarks/shampoo.py [--width 512] [--matrices 16] [--block 128] [--repeats 5]

The default is 6.3 M parameters, eight matrices 512x512 and eight 512x1024, in blocks of 128. A root step is set against
one batched `jnp.linalg.eigh` of the same matrices, any other step against its own matrix products timed alone, all in
one run. The oracle of the accuracy is a float64 eigendecomposition; the statistics are of random gradients whose rows
and columns have scales over three orders of magnitude, so that conditions come near the largest that the ridge allows.
"""

import argparse
import functools
import statistics

import common


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--width', type=int, default=512)
  parser.add_argument('--matrices', type=int, default=16, help='half of them square, half twice as long')
  parser.add_argument('--block', type=int, default=128)
  parser.add_argument('--interval', type=int, default=10, help='steps between roots')
  parser.add_argument('--repeats', type=int, default=5)
  args = parser.parse_args()
  rates = [common.matmul_gflops()]
  params, grads = _params_and_gradients(args.width, args.matrices)
  stacks = _statistics(grads, args.block)
  num_matrices = sum(stack.shape[0] for stack in stacks)
  _roots(stacks, args.repeats, num_matrices)
  _accuracy(stacks)
  _steps(params, grads, args)
  rates.append(common.matmul_gflops())
  common.print_table('Shampoo: the run', [
      ('matmul 2048^3 GFLOP/s before, after', ', '.join(f'{rate:.0f}' for rate in rates)),
      ('peak resident memory, MB', common.peak_memory_mb()),
  ], ('what', 'value'))


def _params_and_gradients(width, num_matrices):
  """Returns parameters and a list of gradients whose rows and columns have scales over three orders of magnitude."""
  import jax
  shapes = {f'm{i:02d}': (width, width * (1 + i % 2)) for i in range(num_matrices)}
  keys = iter(jax.random.split(jax.random.key(0), 5 * num_matrices))
  params = {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
  scales = {name: [10 ** jax.random.uniform(next(keys), (dim,), minval=-3, maxval=0) for dim in shape]
            for name, shape in shapes.items()}
  grads = [{name: rows[:, None] * jax.random.normal(next(keys), params[name].shape) * columns
            for name, (rows, columns) in scales.items()} for _ in range(2)]
  return params, grads


def _statistics(grads, block):
  """Returns the statistics of all blocks as stacks float32 [k, block, block], two per parameter."""
  import jax.numpy as jnp
  stacks = []
  for name in grads[0]:
    total = [0, 0]
    for grad in (tree[name] for tree in grads):
      rows, columns = (dim // block for dim in grad.shape)
      blocks = grad.reshape(rows, block, columns, block).transpose(0, 2, 1, 3).reshape(-1, block, block)
      total[0] += jnp.einsum('kij,klj->kil', blocks, blocks, precision='highest')
      total[1] += jnp.einsum('kij,kil->kjl', blocks, blocks, precision='highest')
    stacks += [matrix + 1e-6 * jnp.eye(block) for matrix in total]
  return stacks


def _compiled(fn, *args, **jit_options):
  """Returns (compile seconds, compiled function)."""
  import jax
  return common.timed(lambda: jax.jit(fn, **jit_options).lower(*args).compile())


def _median_seconds(fn, repeats):
  """Returns the median seconds of a call, after one that is not counted."""
  import jax
  jax.block_until_ready(fn())
  return statistics.median(common.timed(lambda: jax.block_until_ready(fn()))[0] for _ in range(repeats))


def _roots(stacks, repeats, num_matrices):
  """Prints the seconds of one batched eigendecomposition and of all roots by either method."""
  import jax.numpy as jnp
  from t5x_lite.optimizers._shampoo import root_plan
  previous = [jnp.broadcast_to(jnp.eye(stack.shape[-1]), stack.shape) for stack in stacks]
  together = jnp.concatenate(stacks)
  compile_seconds, eigh = _compiled(jnp.linalg.eigh, together)
  bare = _median_seconds(lambda: eigh(together), repeats)
  rows = [('one batched jnp.linalg.eigh', bare, 1.0, compile_seconds, '', '')]
  for method in ('eigh', 'coupled_newton'):
    fn = functools.partial(root_plan.compute_roots, method=method)
    compile_seconds, roots_fn = _compiled(
        lambda stacks, previous, fn=fn: fn(stacks, [4] * len(stacks), previous, jnp.int32(0)), stacks, previous)
    errors = jnp.concatenate(roots_fn(stacks, previous)[1])
    seconds = _median_seconds(lambda: roots_fn(stacks, previous), repeats)
    rows.append((f'all roots by {method}', seconds, seconds / bare, compile_seconds, float(errors.max()),
                 roots_fn.memory_analysis().temp_size_in_bytes / 1e6))
  common.print_table(
      f'Shampoo: roots of order 4 of {num_matrices} matrices {together.shape[1:]}', rows,
      ('what', 's', 'to eigh', 'compile, s', 'largest reported error', 'temporaries, MB'))


def _accuracy(stacks, num_samples=24):
  """Prints the error of both methods against an eigendecomposition in float64."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from t5x_lite.optimizers._shampoo import roots
  matrices = jnp.concatenate(stacks)
  matrices = matrices[::max(1, len(matrices) // num_samples)]
  values, vectors = np.linalg.eigh(np.asarray(matrices, np.float64))
  values = values + 1e-6 * values[:, -1:]
  rows = []
  for p in (2, 4, 6, 8):
    exact = np.einsum('kij,kj,klj->kil', vectors, values ** (-1 / p), vectors)
    for method in ('eigh', 'coupled_newton'):
      results, _ = jax.jit(jax.vmap(functools.partial(roots.inverse_pth_root, p=p, method=method)))(matrices)
      errors = np.linalg.norm(results - exact, axis=(1, 2)) / np.linalg.norm(exact, axis=(1, 2))
      rows.append((p, method, float(np.median(errors)), float(errors.max())))
  condition = float(np.median(values[:, -1] / values[:, 0]))
  common.print_table(
      f'Shampoo: relative error of {len(matrices)} roots, median condition with the ridge {condition:.2g}', rows,
      ('p', 'method', 'median', 'largest'))


def _products_seconds(params, grad, args):
  """Returns the seconds of the matrix products in one update: the statistics, and the gradient times both roots."""
  import jax.numpy as jnp
  from t5x_lite.optimizers._shampoo import blocks
  layouts = {name: blocks.make_layout(param.shape, block_size=args.block, merge_dims=True, largest_dim=4096)
             for name, param in params.items()}
  matrices = {name: [jnp.zeros([count, size, size]) for count, size in layout.stack_shapes]
              for name, layout in layouts.items()}
  cut = {name: layouts[name].cut(array) for name, array in grad.items()}

  def products(cut, matrices):
    highest = functools.partial(jnp.einsum, precision='highest')
    results = []
    for name, groups in cut.items():
      for group, (left, right) in zip(groups, zip(*[iter(matrices[name])] * 2)):
        results += [highest('kij,klj->kil', group, group), highest('kij,kil->kjl', group, group)]
        results += [highest('kij,kjl->kil', highest('kij,kil->klj', group, left), right)]
    return results

  _, products_fn = _compiled(products, cut, matrices)
  return _median_seconds(lambda: products_fn(cut, matrices), args.repeats)


def _update_seconds(transformation, params, grads, num_steps, interval):
  """Returns (compile seconds, median seconds of every `interval`-th step, median of the others); step 0 is left out."""
  import jax
  import jax.numpy as jnp
  import optax

  def update(params, state, grads):
    updates, state = transformation.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = jax.jit(transformation.init)(params)
  params = jax.tree.map(jnp.copy, params)
  compile_seconds, update_fn = _compiled(update, params, state, grads[0], donate_argnums=(0, 1))
  due, others = [], []
  for step in range(num_steps):
    seconds, (params, state) = common.timed(
        lambda step=step: jax.block_until_ready(update_fn(params, state, grads[step % 2])))
    if step:
      (due if step % interval == 0 else others).append(seconds)
  return compile_seconds, *(statistics.median(times) if times else float('nan') for times in (due, others))


def _steps(params, grads, args):
  """Prints the seconds of whole updates beside those of their matrix products."""
  import numpy as np
  import optax
  from t5x_lite import optimizers
  own = _products_seconds(params, grads[0], args)
  rows = [('the matrix products of an update alone', own, 1.0, '')]
  num_steps = 2 * args.interval + 1
  compile_seconds, seconds, _ = _update_seconds(optax.adam(1e-3), params, grads, num_steps, 1)
  rows.append(('optax.adam', seconds, seconds / own, compile_seconds))
  for name, options in (
      ('eigh', {'root_method': 'eigh'}),
      ('coupled_newton', {'root_method': 'coupled_newton'}),
      ('eigh, int8 and int16 state', {
          'root_method': 'eigh', 'best_effort_memory_usage_reduction': True, 'quantize_statistics': True}),
      ('eigh, spread', {'root_method': 'eigh', 'spread_roots': True})):
    transformation = optimizers.distributed_shampoo(
        1e-3, block_size=args.block, preconditioning_compute_steps=args.interval, start_preconditioning_step=1,
        **options).optax_optimizer
    compile_seconds, due, others = _update_seconds(transformation, params, grads, num_steps, args.interval)
    if 'spread' not in name:
      rows.append((f'{name}: a step with all roots', due, due / own, compile_seconds))
    rows.append((f'{name}: any other step', others, others / own, '' if 'spread' not in name else compile_seconds))
  num_params = sum(np.size(param) for param in params.values())
  common.print_table(
      f'Shampoo: updates of {num_params / 1e6:.2f} M parameters, roots every {args.interval} steps', rows,
      ('what', 's', 'to its matrix products', 'compile, s'))


if __name__ == '__main__':
  main()
