"""Optimizers: seconds per step, compile seconds and bytes of state of every optimizer of the package.

    python benchmarks/optimizers.py [--optimizers adamw,scaled_adam] [--params set|t5_small] [--steps 12]

`set` is 6.3 M parameters, eight matrices 512x512 and eight 512x1024; `t5_small` the 77 M of T5 1.1 small. A step is the
update alone, from gradients at hand, with parameters and state donated. Each optimizer runs in turn with bare
`optax.adam`, step by step, and its ratio is that of the mean seconds, since some steps of an optimizer cost more than
others: the slowest is shown beside. Optimizers that ask for the loss get that of a quadratic, and its gradient is then
a part of the step. Public factories are found by name; what needs arguments has them in a table below.
"""

import argparse
import inspect
import statistics

import common

# Functions among the public names that make no optimizer.
_NO_FACTORIES = (
    'factor_name_to_factordim', 'match_logical_axes', 'register_eval_params', 'register_state_metrics', 'relative_step',
    'restore_from_state_dict', 'standard_logical_factor_rules', 'unnamed_axes', 'wrap_optax_optimizer')
# What an update cannot do without besides the gradients.
_NEEDS = {'lbfgs': ('value', 'grad', 'value_fn'), 'momo': ('value',), 'momo_adam': ('value',), 'polyak_sgd': ('value',),
          'reduce_on_plateau': ('value',), 'sophia': ('obj_fn',)}
# One gradient per example.
_PER_EXAMPLE = ('dpsgd',)
_RATE = 1e-3


def factories():
  """Returns name to factory for every optimizer: a function without arguments that makes the definition."""
  import optax
  from t5x_lite import optimizers
  with_arguments = {
      'chain': lambda: optimizers.chain([optax.clip_by_global_norm(1.0), optimizers.adamw()]),
      'dpsgd': lambda: optimizers.dpsgd(l2_norm_clip=1.0, noise_multiplier=0.1),
      'galore': lambda: optimizers.galore(rank=64),
      'mechanize': lambda: optimizers.mechanize(optimizers.adam()),
      'noisy_sgd': lambda: optimizers.noisy_sgd(eta=1e-6),
      'partition': lambda: optimizers.partition(
          {'large': optimizers.Adafactor(), 'other': optimizers.adamw()}, [('embed|m0', 'large'), ('.*', 'other')]),
      'reduce_on_plateau': lambda: optimizers.chain([optimizers.adam(), optimizers.reduce_on_plateau()]),
      'rprop': lambda: optimizers.rprop(_RATE),
      'sam': lambda: optimizers.sam(optimizers.adam(), optax.sgd(0.01)),
      'scaled_adam': lambda: optimizers.scaled_adam(clipping_scale=2.0),
      'schedule_free': lambda: optimizers.schedule_free(optimizers.sgd()),
      'split_real_and_imaginary': lambda: optimizers.split_real_and_imaginary(optimizers.adam()),
  }
  table = {'Adafactor': optimizers.Adafactor}
  for name in optimizers.__all__:
    public = getattr(optimizers, name)
    if inspect.isfunction(public) and name not in _NO_FACTORIES:
      table[name] = with_arguments.get(name, public)
  table['scaled_adam_unclipped'] = optimizers.scaled_adam
  return table


def shapes_of(name):
  """Returns a tree of `jax.ShapeDtypeStruct`s: the parameters called `set` or `t5_small`."""
  import jax
  import jax.numpy as jnp
  if name == 'set':
    return {f'm{i:02d}': jax.ShapeDtypeStruct((512, 512 * (1 + i % 2)), jnp.float32) for i in range(16)}
  from t5x_lite import models
  from t5x_lite.data import vocabularies
  from t5x_lite.networks import t5
  config = t5.T5Config(
      vocab_size=32128, emb_dim=512, num_heads=6, num_encoder_layers=8, num_decoder_layers=8, head_dim=64, mlp_dim=1024,
      mlp_activations=('gelu', 'linear'), dropout_rate=0.0, logits_via_embedding=False)
  vocabulary = vocabularies.PassThroughVocabulary(32128)
  model = models.EncoderDecoderModel(t5.Transformer(config), vocabulary, vocabulary, None)
  batch = {feature: (1, 8) for feature in ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')}
  return jax.eval_shape(lambda rng: model.get_initial_variables(rng, batch)['params'], jax.random.key(0))


def measure(name, factory, shapes, num_steps):
  """Returns (compile seconds, seconds of each step, seconds of each step of optax.adam, bytes of state)."""
  import jax
  import optax
  from t5x_lite import tree_utils
  params, grads = _normal(shapes, 0, 0.05), _normal(shapes, 1, 0.01)
  definition = factory()
  optimizer = jax.jit(definition.create)(params)
  reference = (params, optax.adam(_RATE).init(params))
  target = jax.tree.map(lambda p, g: p - g, params, grads)

  def loss_fn(params):
    return 0.5 * sum(jax.tree.leaves(jax.tree.map(lambda p, t: ((p - t) ** 2).sum(), params, target)))

  def step(optimizer, grads):
    overrides = {'learning_rate': jax.numpy.float32(_RATE)} if definition.uses_learning_rate else {}
    if needs := _NEEDS.get(name):
      loss, grads = jax.value_and_grad(loss_fn)(optimizer.target)
      known = {'value': loss, 'grad': grads, 'value_fn': loss_fn, 'obj_fn': loss_fn}
      overrides |= {key: known[key] for key in needs}
    if name in _PER_EXAMPLE:
      grads = jax.tree.map(lambda g: g[None], grads)
    return optimizer.apply_gradient(grads, **overrides)

  def reference_step(carry, grads):
    params, state = carry
    updates, state = optax.adam(_RATE).update(grads, state, params)
    return optax.apply_updates(params, updates), state

  # Each keeps arrays of its own, since steps consume what they get.
  reference = jax.tree.map(lambda x: x.copy(), reference)
  num_bytes = tree_utils.num_bytes(optimizer.state)
  del params
  compile_seconds, compiled = common.timed(
      lambda: jax.jit(step, donate_argnums=(0,)).lower(optimizer, grads).compile())
  reference_compiled = jax.jit(reference_step, donate_argnums=(0,)).lower(reference, grads).compile()
  seconds, reference_seconds = [], []
  for index in range(num_steps + 4):
    spent, optimizer = common.timed(lambda: jax.block_until_ready(compiled(optimizer, grads)))
    reference_spent, reference = common.timed(lambda: jax.block_until_ready(reference_compiled(reference, grads)))
    if index >= 4:  # the first steps touch fresh memory, and code that runs now and then
      seconds.append(spent)
      reference_seconds.append(reference_spent)
  return compile_seconds, seconds, reference_seconds, num_bytes


def main(argv=None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--optimizers', default='', help='names with commas between; all of them by default')
  parser.add_argument('--params', default='set', choices=['set', 't5_small'])
  parser.add_argument('--steps', type=int, default=12, help='steps that count; a multiple of 4 is fair')
  args = parser.parse_args(argv)
  table = factories()
  names = args.optimizers.split(',') if args.optimizers else list(table)
  if unknown := [name for name in names if name not in table]:
    parser.error(f'unknown optimizers {unknown}; there are {", ".join(table)}')

  from t5x_lite import tree_utils
  shapes = shapes_of(args.params)
  num_params = tree_utils.num_elements(shapes)
  before = common.matmul_gflops()
  rows = []
  for name in names:
    compile_seconds, seconds, reference_seconds, num_bytes = measure(name, table[name], shapes, args.steps)
    mean, reference_mean = statistics.mean(seconds), statistics.mean(reference_seconds)
    rows.append((name, mean * 1e3, max(seconds) * 1e3, reference_mean * 1e3, mean / reference_mean, compile_seconds,
                 num_bytes / num_params))
  after = common.matmul_gflops()
  common.print_table(
      f'Optimizers ({args.params}, {num_params:,} parameters float32, {args.steps} steps; matmul 2048^3 before, after: '
      f'{before:.0f}, {after:.0f} GFLOP/s)', rows,
      ('optimizer', 'step, ms (mean)', 'slowest, ms', 'optax.adam beside it, ms', 'ratio', 'compile, s',
       'state, bytes per parameter'))


def _normal(shapes, seed, scale):
  """Returns normally distributed arrays of these shapes, computed on the device."""
  import jax
  leaves, structure = jax.tree.flatten(shapes)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  return jax.jit(lambda keys: jax.tree.unflatten(
      structure, [scale * jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves)]))(keys)


if __name__ == '__main__':
  main()
