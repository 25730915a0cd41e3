"""One model in each layout of its parameters, and training in it."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from tests.optimizers import optimizer_files

NUM_LAYERS = 2
NUM_EXPERTS = 2
_SIZES = {
  'embed': 8,
  'heads': 2,
  'kv': 6,
  'joined_kv': 12,
  'mlp': 10,
  'expert_mlp': 9,
  'vocab': 11,
  'relpos_buckets': 5,
  'layers': NUM_LAYERS,
  'expert': NUM_EXPERTS,
}
# Parameters of a layer: axes in the layout 't5', axes in 'scalable_t5'.
_OF_LAYER = {
  'attention/query/kernel': (('embed', 'joined_kv'), ('embed', 'layers', 'heads', 'kv')),
  'attention/out/kernel': (('joined_kv', 'embed'), ('heads', 'layers', 'kv', 'embed')),
  'mlp/wi/kernel': (('embed', 'mlp'), ('embed', 'layers', 'mlp')),
  'mlp/wo/kernel': (('mlp', 'embed'), ('mlp', 'layers', 'embed')),
  'norm/scale': (('embed',), ('embed', 'layers')),
}
_EXPERT = (('embed', 'expert_mlp'), ('expert', 'embed', 'layers', 'expert_mlp'))
_OF_MODEL = {
  'token_embedder/embedding': ('vocab', 'embed'),
  'decoder/logits_dense/kernel': ('embed', 'vocab'),
  'decoder/decoder_norm/scale': ('embed',),
  'encoder/relpos_bias/rel_embedding': ('heads', 'relpos_buckets'),
}
EXPERT_NAME = 'mlp/expert/wi/kernel'


def axes_of(form):
  """Return the axes of each parameter by path, in the form 'single', 'experts' or 'scalable'."""
  axes = dict(_OF_MODEL)
  if form == 'scalable':
    for name, (_, scalable) in _OF_LAYER.items():
      axes[f'encoder/encoder/{name}'] = scalable
    axes[f'encoder/encoder/{EXPERT_NAME}'] = _EXPERT[1]
    return axes
  for layer in range(NUM_LAYERS):
    for name, (single, _) in _OF_LAYER.items():
      axes[f'encoder/layers_{layer}/{name}'] = single
    if form == 'experts':
      axes[f'encoder/layers_{layer}/{EXPERT_NAME}'] = ('expert', *_EXPERT[0])
    else:
      for expert in range(NUM_EXPERTS):
        axes[f'encoder/layers_{layer}/mlp/expert_{expert}/wi/kernel'] = _EXPERT[0]
  return axes


def from_single(arrays, form):
  """Return arrays by path in a form, given those of the form 'single'."""
  if form == 'single':
    return arrays
  result = {path: arrays[path] for path in _OF_MODEL}

  def layer_of(layer):
    of_layer = {name: arrays[f'encoder/layers_{layer}/{name}'] for name in _OF_LAYER}
    experts = [
      arrays[f'encoder/layers_{layer}/mlp/expert_{expert}/wi/kernel']
      for expert in range(NUM_EXPERTS)
    ]
    of_layer[EXPERT_NAME] = jnp.stack(experts)
    return of_layer

  layers = [layer_of(layer) for layer in range(NUM_LAYERS)]
  if form == 'experts':
    for layer, of_layer in enumerate(layers):
      result |= {f'encoder/layers_{layer}/{name}': array for name, array in of_layer.items()}
    return result
  for path, axes in axes_of('scalable').items():
    if path not in _OF_MODEL:
      name = path.removeprefix('encoder/encoder/')
      layers_dim = axes.index('layers')
      shape = [_SIZES[axis] for axis in axes if axis != 'layers']
      result[path] = jnp.stack([layer[name].reshape(shape) for layer in layers], layers_dim)
  return result


def to_single(arrays, form):
  """Return the inverse of `from_single`."""
  if form == 'single':
    return arrays
  result = {path: arrays[path] for path in _OF_MODEL}
  for path, axes in axes_of('single').items():
    if path in _OF_MODEL:
      continue
    _, layer_name, name = path.split('/', 2)
    layer = int(layer_name.removeprefix('layers_'))
    expert = None
    if 'expert_' in name:
      expert = int(name.split('/')[1].removeprefix('expert_'))
      name = EXPERT_NAME
    if form == 'experts':
      array = arrays[f'encoder/{layer_name}/{name}']
    else:
      stacked = f'encoder/encoder/{name}'
      array = jnp.take(arrays[stacked], layer, axes_of('scalable')[stacked].index('layers'))
    if expert is not None:
      array = array[expert]
    result[path] = array.reshape([_SIZES[axis] for axis in axes])
  return result


def random_arrays(seed, scale=1.0):
  rng = np.random.default_rng(seed)
  return {
    path: jnp.asarray(scale * rng.normal(size=[_SIZES[axis] for axis in axes]), jnp.float32)
    for path, axes in axes_of('single').items()
  }


def tree(arrays):
  return tree_utils.unflatten_dict(arrays)


def _loss(params, linear):
  losses = jax.tree.map(lambda p, a: jnp.sum(0.3 * p * p + a * p), params, linear)
  return sum(jax.tree.leaves(losses))


def _curved_loss(params, linear):
  """Return a loss whose curvature is not diagonal, so that a random estimate of its diagonal is not exact."""
  total = sum(jnp.sum(param) for param in jax.tree.leaves(params))
  return _loss(params, linear) + 10.0 * total**2


def _step(optimizer, linear):
  """Return the optimizer after a step with all values that it needs."""
  loss_fn = functools.partial(_loss, linear=linear)
  grads = jax.grad(loss_fn)(optimizer.target)
  known = {
    'value': jnp.float32(
      2.0
    ),  # a sum over all parameters would be rounded otherwise in each layout
    'grad': grads,
    'value_fn': loss_fn,
    'obj_fn': functools.partial(_curved_loss, linear=linear),
    'grad_fn': lambda params, number: jax.grad(loss_fn)(params),
  }
  overrides = {name: known[name] for name in optimizer.optimizer_def.extra_args}
  if optimizer.optimizer_def.needs_learning_rate:
    overrides['learning_rate'] = 0.1
  if optimizer.optimizer_def.name == 'dpsgd':  # takes the gradient of each example
    grads = jax.tree.map(lambda grad: jnp.stack([grad, 0.5 * grad]), grads)
  return optimizer.apply_gradient(grads, **overrides)


def train(optimizer_def, form, num_steps=3):
  """Return the parameters in the form 'single' after some steps in a form, or with stacked layers of 'experts'."""
  is_stacked = form == 'stacked'
  if is_stacked:
    form = 'experts'
  axes = tree({path: P(*names) for path, names in axes_of(form).items()})
  params = tree(from_single(random_arrays(0, 0.1), form))
  optimizer = optimizer_def.with_param_axes(axes, params).create(params)
  stacks = layer_stacks.LayerStacks()
  if is_stacked:
    stacks = layer_stacks.LayerStacks((('encoder', tuple(range(NUM_LAYERS))),))
  optimizer = stacks.stack(optimizer)
  step_fn = jax.jit(_step)
  for step in range(num_steps):
    linear = tree(from_single(random_arrays(step + 1), form))
    optimizer = step_fn(optimizer, stacks.stack(linear))
  optimizer = stacks.unstack(optimizer)
  arrays = dict(tree_utils.named_leaves(optimizer.target))
  return to_single(arrays, form)


# Files of optimizers whose updates depend on the layout, and the one of their optimizers with this property.
DEPENDENT = {
  'adafactor': 'Adafactor',
  'multi_optimizer': 'Adafactor',
  'dpsgd': 'dpsgd',
  'noisy_sgd': 'noisy_sgd',
  'sophia': 'sophia',
}
_OPTIONS = {
  'adafactor_optax': {'optimizers__adafactor__min_dim_size_to_factor': 8},
  'galore': {'optimizers__galore__rank': 3, 'optimizers__galore__update_proj_gap': 2},
  'distributed_shampoo': {
    'optimizers__distributed_shampoo__block_size': 8,
    'optimizers__distributed_shampoo__start_preconditioning_step': 1,
    'optimizers__distributed_shampoo__preconditioning_compute_steps': 2,
    'optimizers__distributed_shampoo__matrix_epsilon': 1e-2,
    'optimizers__distributed_shampoo__spread_roots': False,
  },
}


@functools.cache
def definition(stem):
  """Return the optimizer of a file, with options that suit small arrays."""
  return optimizer_files.definition(stem, **_OPTIONS.get(stem, {}))


@functools.cache
def expected_params(stem):
  """Return the parameters that a file trains in the form 'single'."""
  return train(definition(stem), 'single')


def difference(result, expected):
  """Return the largest difference of parameters, relative to the largest change in training."""
  first = random_arrays(0, 0.1)
  largest = max(float(jnp.abs(expected[path] - first[path]).max()) for path in first)
  assert largest > 0
  return max(float(jnp.abs(result[path] - expected[path]).max()) for path in expected) / largest


def created(optimizer_def, form):
  """Return (optimizer, axes of the parameters) in a form."""
  axes = tree({path: P(*names) for path, names in axes_of(form).items()})
  params = tree(from_single(random_arrays(0, 0.1), form))
  return optimizer_def.with_param_axes(axes, params).create(params), axes
