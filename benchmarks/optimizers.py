"""Optimizers: seconds per step, compile seconds and bytes of state of every optimizer of the package.

    python benchmarks/optimizers.py [--params set t5_small] [--only adamw scaled_adam] [--part 1/4] [--steps 24]
      [--record]

An optimizer is one file of `gin/optimizers/`; a table below has changes of its options. `set` is
6.3 M parameters, eight matrices 512x512 and eight 512x1024; `t5_small` the 77 M of T5 1.1 small. A step is the update
alone, from gradients at hand, with parameters and state donated. Each optimizer runs in turn with bare `optax.adam`,
step by step, and its ratio is that of the median seconds; of the mean seconds where work returns every few steps. The
slowest step is shown too. Optimizers that ask for functions get those of a quadratic, whose values and gradients are
then a part of the step. All of them on both take about ten minutes on 2 cores; `--part K/N` makes shorter runs of it.
`--record` replaces the records of the measured optimizers, from which `make reference` makes tables.
"""

import argparse
import datetime
import shlex
import statistics
import sys

import common
import optimizer_records

# Period in steps of work that is not done at every step: means over multiples of it are compared.
_INTERVALS = {
  'distributed_shampoo': 20,
  'lbfgs': 4,
  'sam': 2,
  'scaled_adam': 4,
  'scaled_adam_unclipped': 4,
  'soap': 10,
  'sophia': 10,
}
# Bindings in addition to those of the file.
_BINDINGS = {
  # Roots from the beginning, as in most steps of a run.
  'distributed_shampoo': {'optimizers.distributed_shampoo.start_preconditioning_step': '1'},
  'scaled_adam_unclipped': {'optimizers.scaled_adam.clipping_scale': 'None'},
}
# Required arguments of an update in addition to gradients and loss.
_NEEDS = {'lbfgs': ('grad', 'value_fn'), 'sam': ('grad_fn',), 'sophia': ('obj_fn',)}
# Optimizers that take one gradient per example.
_PER_EXAMPLE = ('dpsgd',)
_RATE = 1e-3
_WARM_UP = 3
_ENOUGH = 3.0  # seconds, after which no step or interval is added


def names():
  """Return the names of all rows: of the files of gin/optimizers/, and of files with other bindings."""
  import pathlib

  from t5x_lite.configuration import syntax as gin_syntax

  return sorted(
    [
      *(pathlib.PurePath(file).stem for file in gin_syntax.packaged_files('optimizers')),
      *optimizer_records.VARIANTS,
    ]
  )


def make(name, axes=None):
  """Return the optimizer's definition, which has been told the axes of the parameters."""
  import gin

  from t5x_lite import gin_utils
  from t5x_lite.configuration import syntax as gin_syntax

  bindings = {'MODEL_DIR': "'runs/x'", **_BINDINGS.get(name, {})}
  flags = [
    gin_syntax.read_flag(key, value, f'--gin.{key}={value}') for key, value in bindings.items()
  ]
  file = optimizer_records.VARIANTS.get(name, name)
  texts = gin_utils.read(['recipes/keyword_cloze.gin', f'optimizers/{file}.gin'], flags)
  try:
    definition = gin_utils.load('t5x_lite.apps.train.train', texts).argument('model').optimizer_def
  finally:
    gin.clear_config()
  return definition if axes is None else definition.with_param_axes(axes)


def shapes_of(params_name):
  """Return (tree of `jax.ShapeDtypeStruct`s, tree of axes) of the parameters called `set` or `t5_small`."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import PartitionSpec

  from t5x_lite import optimizers

  if params_name == 'set':
    # Names as a model's, by which some files choose.
    paths = [(f'm{i:02d}', 'kernel' if i < 12 else 'embedding') for i in range(16)]
    shapes = {
      module: {leaf: jax.ShapeDtypeStruct((512, 512 * (1 + i % 2)), jnp.float32)}
      for i, (module, leaf) in enumerate(paths)
    }
    return shapes, jax.tree.map(lambda _: PartitionSpec('embed', 'mlp'), shapes)
  from flax.linen import partitioning as flax_partitioning

  from t5x_lite import models
  from t5x_lite.data import vocabularies
  from t5x_lite.networks import t5

  config = t5.T5Config(
    vocab_size=32128,
    emb_dim=512,
    num_heads=6,
    num_encoder_layers=8,
    num_decoder_layers=8,
    head_dim=64,
    mlp_dim=1024,
    mlp_activations=('gelu', 'linear'),
    dropout_rate=0.0,
    logits_via_embedding=False,
  )
  vocabulary = vocabularies.PassThroughVocabulary(32128)
  model = models.EncoderDecoderModel(t5.Transformer(config), vocabulary, vocabulary, None)
  batch = dict.fromkeys(
    ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens'), (1, 8)
  )
  variables = jax.eval_shape(lambda rng: model.get_initial_variables(rng, batch), jax.random.key(0))
  axes = flax_partitioning.get_axis_names(variables['params_axes'])
  return variables['params'], optimizers.match_logical_axes(variables['params'], axes)


class Setting:
  """Shared inputs of all optimizers: parameters, gradients, and the reference's compiled step with separate arrays.

  Attributes:
    params: arrays that stay.
    grads: arrays of the same tree, for every step.
    axes: their logical axes.
    num_params: number of elements.
  """

  def __init__(self, params_name):
    import jax
    import optax

    from t5x_lite import tree_utils

    shapes, self.axes = shapes_of(params_name)
    self.num_params = tree_utils.num_elements(shapes)
    self.params, self.grads = _normal(shapes, 0, 0.05), _normal(shapes, 1, 0.01)
    self._reference = _copied(lambda: (self.params, optax.adam(_RATE).init(self.params)))

    def step(carry, grads):
      params, state = carry
      updates, state = optax.adam(_RATE).update(grads, state, params)
      return optax.apply_updates(params, updates), state

    self._compiled = jax.jit(step, donate_argnums=(0,)).lower(self._reference, self.grads).compile()

  def time_reference(self):
    """Return the seconds of a step of `optax.adam`."""
    import jax

    seconds, self._reference = common.timed(
      lambda: jax.block_until_ready(self._compiled(self._reference, self.grads))
    )
    return seconds


def measure(name, setting, num_steps):
  """Return (compile seconds, seconds of each step, seconds of each step of optax.adam, bytes of state)."""
  import jax
  import jax.numpy as jnp

  from t5x_lite import tree_utils

  definition = make(name, setting.axes)
  optimizer = _copied(lambda: definition.create(setting.params))
  num_bytes = tree_utils.num_bytes(optimizer.state)
  needs = _NEEDS.get(name, ())
  target = jax.tree.map(jnp.subtract, setting.params, setting.grads) if needs else None

  def step(optimizer, grads, target):

    def loss_fn(params):
      return 0.5 * sum(
        jax.tree.leaves(jax.tree.map(lambda p, t: ((p - t) ** 2).sum(), params, target))
      )

    overrides = {'learning_rate': jnp.float32(_RATE)} if definition.uses_learning_rate else {}
    if needs:
      loss, grads = jax.value_and_grad(loss_fn)(optimizer.target)
      known = {
        'grad': grads,
        'value_fn': loss_fn,
        'obj_fn': loss_fn,
        'grad_fn': lambda p, _: jax.grad(loss_fn)(p),
      }
      overrides |= {key: known[key] for key in needs}
    if 'value' in definition.extra_args:  # a train step has it anyway
      overrides['value'] = loss if needs else jnp.float32(1.0)
    if name in _PER_EXAMPLE:
      grads = jax.tree.map(lambda g: g[None], grads)
    return optimizer.apply_gradient(grads, **overrides)

  compile_seconds, compiled = common.timed(
    lambda: jax.jit(step, donate_argnums=(0,)).lower(optimizer, setting.grads, target).compile()
  )
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  print(f'{name}: {temporaries / 1e6:.0f} MB of temporaries', file=sys.stderr, flush=True)
  seconds, reference_seconds = [], []
  interval = _INTERVALS.get(name, 1)
  for index in range(_WARM_UP + -(-num_steps // interval) * interval):
    if (index - _WARM_UP) % interval == 0 and sum(seconds) > _ENOUGH:
      break
    spent, optimizer = common.timed(
      lambda: jax.block_until_ready(compiled(optimizer, setting.grads, target))
    )
    reference_spent = setting.time_reference()
    if index >= _WARM_UP:  # the first steps touch fresh memory
      seconds.append(spent)
      reference_seconds.append(reference_spent)
  return compile_seconds, seconds, reference_seconds, num_bytes


def main(argv=None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--params',
    nargs='+',
    default=list(optimizer_records.PARAMS),
    choices=optimizer_records.PARAMS,
  )
  parser.add_argument(
    '--only', nargs='+', metavar='NAME', help='files of gin/optimizers/; all if not given'
  )
  parser.add_argument(
    '--part', type=_part, default=(1, 1), metavar='K/N', help='the K-th of N parts of the list'
  )
  parser.add_argument(
    '--steps', type=common.positive, default=24, help=f'that count, if they take < {_ENOUGH:g} s'
  )
  parser.add_argument(
    '--record',
    action='store_true',
    help=f'write {optimizer_records.FILE}',
  )
  args = parser.parse_args(argv)
  chosen, known = args.only or names(), names()
  if unknown := [name for name in chosen if name not in known]:
    parser.error(f'unknown optimizers {", ".join(unknown)}; there are {", ".join(known)}')
  number, count = args.part
  chosen = chosen[len(chosen) * (number - 1) // count : len(chosen) * number // count]
  if not chosen:
    parser.error(f'part {number} of {count} is empty')
  words = sys.argv[1:] if argv is None else argv
  command = shlex.join(['python', 'benchmarks/optimizers.py', *words])
  for params_name in args.params:
    records = measure_all(params_name, chosen, args.steps, command)
    _print_records(records)
    if args.record:
      optimizer_records.save(records)


def measure_all(params_name, chosen, num_steps, command):
  """Return the records of the optimizers called `chosen` on one set of parameters."""
  matmul_before = common.matmul_gflops()
  setting = Setting(params_name)
  measured = {}
  for name in chosen:
    seconds, measured[name] = common.timed(lambda name=name: measure(name, setting, num_steps))
    print(f'{params_name}: {name} took {seconds:.1f} s', file=sys.stderr, flush=True)
  matmul_gflops = [round(matmul_before, 1), round(common.matmul_gflops(), 1)]
  records = []
  for name, (compile_seconds, seconds, reference_seconds, num_bytes) in measured.items():
    typical = statistics.mean if name in _INTERVALS else statistics.median
    records.append(
      optimizer_records.Record(
        optimizer=name,
        params=params_name,
        num_params=setting.num_params,
        num_steps=len(seconds),
        step_ms=_milliseconds(typical(seconds)),
        slowest_ms=_milliseconds(max(seconds)),
        adam_ms=_milliseconds(statistics.median(reference_seconds)),
        compile_s=round(compile_seconds, 6),
        state_bytes=num_bytes,
        matmul_gflops=matmul_gflops,
        date=datetime.date.today().isoformat(),
        command=command,
        machine=common.machine(),
      )
    )
  return records


def _milliseconds(seconds):
  return round(seconds * 1e3, 6)  # to the nanosecond


def _print_records(records):
  """Print the table of the optimizers on one set of parameters."""
  before, after = records[0].matmul_gflops
  common.print_table(
    f'Optimizers ({records[0].params}, {records[0].num_params:,} parameters float32; matmul 2048^3 before, '
    f'after: {before:.0f}, {after:.0f} GFLOP/s)',
    [
      (
        f'`{record.optimizer}`',
        record.step_ms,
        record.slowest_ms,
        record.adam_ms,
        record.ratio,
        record.compile_s,
        record.bytes_per_param,
      )
      for record in records
    ],
    (
      'optimizer',
      'step, ms',
      'slowest, ms',
      'optax.adam, ms',
      'ratio',
      'compile, s',
      'state, bytes per parameter',
    ),
  )


def _normal(shapes, seed, scale):
  """Return normally distributed arrays of these shapes, cut out of one buffer, each elsewhere."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  leaves, structure = jax.tree.flatten(shapes)
  spare = 4096
  buffer = (
    np.random.default_rng(seed).standard_normal(
      max(leaf.size for leaf in leaves) + spare, np.float32
    )
    * scale
  )
  starts = [index * 97 % spare for index in range(len(leaves))]
  return jax.tree.unflatten(
    structure,
    [
      jnp.array(buffer[start : start + leaf.size].reshape(leaf.shape))
      for start, leaf in zip(starts, leaves, strict=False)
    ],
  )


def _copied(make_tree):
  """Return the function's tree with each array copied, so that an array that occurs twice can be donated."""
  import jax
  import jax.numpy as jnp

  leaves, structure = jax.tree.flatten(make_tree())
  for index, leaf in enumerate(leaves):
    leaves[index] = jnp.copy(leaf)  # Frees the old array: memory may not hold two large states.
  return jax.tree.unflatten(structure, leaves)


def _part(text):
  """Return (K, N) of 'K/N'."""
  number, _, count = text.partition('/')
  if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
    raise argparse.ArgumentTypeError(
      f'got {text!r}; expected K/N, such as 2/4 for the second of four parts'
    )
  return int(number), int(count)


if __name__ == '__main__':
  common.start_like_commands()
  main()
