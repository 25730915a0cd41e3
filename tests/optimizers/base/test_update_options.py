"""Options of every optimizer: each file of gin/optimizers/ honours scales by parameter, or says why it cannot."""

import inspect

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError
from tests.optimizers import optimizer_files

_PARAMS = {
  'encoder': {'mlp': {'kernel': (4, 6)}},
  'decoder': {'mlp': {'kernel': (4, 6)}, 'out': {'kernel': (6, 4)}, 'norm': {'scale': (6,)}},
  'token_embedder': {'embedding': (8, 4)},
}
_AXES = {
  'encoder': {'mlp': {'kernel': P('embed', 'mlp')}},
  'decoder': {
    'mlp': {'kernel': P('embed', 'mlp')},
    'out': {'kernel': P('mlp', 'embed')},
    'norm': {'scale': P('embed')},
  },
  'token_embedder': {'embedding': P('vocab', 'embed')},
}
_FACTOR, _PATTERN, _DECAY = 0.25, '^decoder/mlp|embedding$', 0.5
_SCALED = ('decoder/mlp/kernel', 'token_embedder/embedding')

# Learning rates that are not those of single parameters.
_WITHOUT_RATE = {
  'lbfgs': 'line search',
  'rprop': 'initial step size',
  'cocob': 'do not depend on the size',
}
# Steps that depend on values of all parameters: compared in the first step only, in which the parameters are equal.
_JOINT = {
  'dadapt_adamw',
  'dog',
  'dowg',
  'mechanize',
  'momo',
  'momo_adam',
  'polyak_sgd',
  'prodigy',
  'sam',
}
# Weight decays that are part of such steps.
_JOINT_DECAY = {'dog', 'dowg', 'momo', 'momo_adam'}
_DECAY_OPTIONS = {
  'adafactor': ['adafactor__Adafactor__weight_decay_rate'],
  'adafactor_optax': ['optimizers__adafactor__weight_decay_rate'],
  'muon': ['optimizers__muon__weight_decay', 'optimizers__muon__adam_weight_decay'],
  **{
    stem: ['optimizers__adamw__weight_decay']
    for stem in ('chain', 'mechanize', 'sam', 'schedule_free')
  },
  **{
    stem: ['optimizers__adamw__weight_decay', 'adafactor__Adafactor__weight_decay_rate']
    for stem in ('multi_optimizer', 'multi_optimizer_by_label')
  },
}
# Shampoo and SOAP without roots and bases, which take long to compile: neither factor changes them.
_OPTIONS = {
  'distributed_shampoo': {'optimizers__distributed_shampoo__skip_preconditioning_dim_size_gt': 1},
  'galore': {'optimizers__galore__rank': 2},
  'soap': {
    'optimizers__soap__max_precond_dim': 1,
    'optimizers__soap__block_size': None,
  },
}
# One file for each way of scaling; all others in `make test-full`.
_BY_DEFAULT = {
  'adafactor',
  'adafactor_optax',
  'adamw',
  'chain',
  'distributed_shampoo',
  'dog',
  'fromage',
  'lamb',
  'lbfgs',
  'madgrad',
  'mechanize',
  'multi_optimizer',
  'muon',
  'prodigy',
  'scaled_adam',
  'schedule_free',
  'schedule_free_adamw',
  'sgd',
  'split_real_and_imaginary',
}
_FILES = [
  stem if stem in _BY_DEFAULT else pytest.param(stem, marks=pytest.mark.full)
  for stem in optimizer_files.FILES
  if stem not in ('dpsgd', 'reduce_on_plateau')
] + ['reduce_on_plateau']


def _arrays(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: np.asarray(rng.normal(size=shape) * 0.3, np.float32),
    _PARAMS,
    is_leaf=lambda node: isinstance(node, tuple),
  )


def _decay_options(stem):
  """Return the names of the options of a file's weight decay; [] without one."""
  factory = getattr(optimizers, stem, None)
  has_option = factory is not None and 'weight_decay' in inspect.signature(factory).parameters
  return _DECAY_OPTIONS.get(stem, [f'optimizers__{stem}__weight_decay'] if has_option else [])


def _definition(stem, decay=None, **scales):
  decays = {} if decay is None else dict.fromkeys(_decay_options(stem), decay)
  optimizer_def = optimizer_files.definition(stem, **_OPTIONS.get(stem, {}), **decays)
  optimizer_def = (
    optimizers.with_update_options(optimizer_def, **scales) if scales else optimizer_def
  )
  return optimizer_def.with_param_axes(_AXES, _arrays(0))


def _loss(params):
  return 1.0 + sum(jnp.sum(jnp.square(param)) for param in jax.tree.leaves(params))


def _updated(optimizer, rate, num_steps):
  """Return the optimizer after updates with gradients that do not depend on the parameters."""
  for step in range(num_steps):
    grads = jax.tree.map(jnp.asarray, _arrays(step + 1))
    values = {
      'value': jnp.float32(2.0),
      'grad': grads,
      'value_fn': _loss,
      'obj_fn': _loss,
      'grad_fn': lambda params, number: jax.grad(_loss)(params),
    }
    extra_args = {name: values[name] for name in optimizer.optimizer_def.extra_args}
    rates = {'learning_rate': rate} if optimizer.optimizer_def.uses_learning_rate else {}
    optimizer = optimizer.apply_gradient(grads, **rates, **extra_args)
  return optimizer


def _by_path(optimizer):
  before = dict(zip(_paths(), jax.tree.leaves(_arrays(0)), strict=True))
  return {
    path: np.asarray(leaf) - before[path]
    for path, leaf in zip(_paths(), jax.tree.leaves(optimizer.target), strict=True)
  }


def _paths():
  return [
    'decoder/mlp/kernel',
    'decoder/norm/scale',
    'decoder/out/kernel',
    'encoder/mlp/kernel',
    'token_embedder/embedding',
  ]


@pytest.mark.parametrize('stem', _FILES)
def test_every_file_honours_scales_by_parameter(stem):
  rate, num_steps = 0.05, 1 if stem in _JOINT else 3
  rate_scales, decay_scales = (
    {name: [(_PATTERN, _FACTOR)]} for name in ('learning_rate_scales', 'weight_decay_scales')
  )
  with_decay = bool(_decay_options(stem)) and stem not in _JOINT_DECAY
  start = _arrays(0)

  # name -> (definition, learning rate)
  runs = {'plain': (_definition(stem), rate)}
  if stem in _WITHOUT_RATE:
    with pytest.raises(
      ConfigError,
      match=f'learning_rate_scales` cannot be used with {stem}: .*{_WITHOUT_RATE[stem]}',
    ):
      _definition(stem, **rate_scales)
  else:
    runs['scaled'] = (_definition(stem, **rate_scales), rate)
    runs['other rate'] = (_definition(stem), rate * _FACTOR)
  if with_decay:
    runs |= {
      'decay': (_definition(stem, _DECAY), rate),
      'other decay': (_definition(stem, _DECAY * _FACTOR), rate),
      'scaled decay': (_definition(stem, _DECAY, **decay_scales), rate),
    }
  else:
    message = (
      'cannot be used .* is part of the step'
      if stem in _JOINT_DECAY
      else 'has no effect: .* no known weight'
    )
    with pytest.raises(ConfigError, match=f'weight_decay_scales` {message}'):
      _definition(stem, _DECAY if stem in _JOINT_DECAY else None, **decay_scales)

  results = jax.jit(
    lambda start: {
      name: _updated(definition.create(start), run_rate, num_steps)
      for name, (definition, run_rate) in runs.items()
    }
  )(jax.tree.map(jnp.asarray, start))
  deltas = {name: _by_path(result) for name, result in results.items()}
  for plain, other, scaled in (
    ('plain', 'other rate', 'scaled'),
    ('decay', 'other decay', 'scaled decay'),
  ):
    if scaled not in runs:
      continue
    assert jax.tree.structure(results[scaled].state) == jax.tree.structure(results[plain].state)
    for path, delta in deltas[scaled].items():
      expected = deltas[other if path in _SCALED else plain][path]
      if stem in _JOINT and path in _SCALED and scaled == 'scaled':
        expected = _FACTOR * deltas[plain][path]
      np.testing.assert_allclose(delta, expected, rtol=2e-5, atol=1e-7, err_msg=f'{scaled}: {path}')
    # The factors make a difference: to only one of both where parts freeze or do not decay the other.
    assert any(
      np.abs(deltas[scaled][path] - deltas[plain][path]).max()
      > 1e-4 * np.abs(deltas[plain][path]).max()
      for path in _SCALED
    )
