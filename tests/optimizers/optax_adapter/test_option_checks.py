"""Options of optax's optimizers: each option has a check or a reason for none, and errors precede compute."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.optax_adapter import option_checks

_FACTORIES = {
  name: factory
  for name, factory in ((name, getattr(optimizers, name)) for name in dir(optimizers))
  if inspect.isfunction(factory)
  and factory.__module__ in (optimizers.adamw.__module__, optimizers.muon.__module__)
  and name not in ('chain', 'distributed_shampoo', 'wrap_optax_optimizer')
}
_REQUIRED = {
  'dpsgd': {'l2_norm_clip': 1.0, 'noise_multiplier': 0.1},
  'mechanize': {'base_optimizer': optax.adam(0.1)},
  'rprop': {'learning_rate': 0.1},
  'sam': {'optimizer': optax.sgd(0.1), 'adv_optimizer': optax.sgd(0.1)},
  'schedule_free': {'base_optimizer': optax.sgd(0.1)},
  'split_real_and_imaginary': {'inner': optax.sgd(0.1)},
}


def _make(name, **options):
  return _FACTORIES[name](**{**_REQUIRED.get(name, {}), **options})


def _options(name):
  return inspect.signature(_FACTORIES[name]).parameters


def test_every_option_of_every_factory_is_checked_or_listed_as_unchecked():
  assert len(_FACTORIES) > 50 and {'adamw', 'sam', 'muon', 'lbfgs'} <= set(_FACTORIES)
  unknown = [
    f'{name}.{option}'
    for name in _FACTORIES
    for option in _options(name)
    if not option_checks.has_check(name, option) and option not in option_checks.UNCHECKED
  ]
  assert not unknown, 'add a check, or an entry in UNCHECKED'
  everywhere = {option for name in _FACTORIES for option in _options(name)}
  # Rows without an option, which no public function shows.
  assert everywhere >= option_checks.UNCHECKED and set(option_checks._EXPECTATIONS) <= everywhere
  assert all(option in _options(name) for name, option in option_checks._EXCEPTIONS)


@pytest.mark.parametrize('name', _FACTORIES)
def test_a_text_is_rejected_for_every_checked_option_and_defaults_are_accepted(name):
  defaults = {
    option: parameter.default
    for option, parameter in _options(name).items()
    if parameter.default is not parameter.empty and 'REQUIRED' not in repr(parameter.default)
  }
  option_checks.check_options(name, defaults)
  for option in _options(name):
    if option_checks.has_check(name, option):
      with pytest.raises(ConfigError, match=rf"^`{name}\.{option}` must be .*, got 'absurd'"):
        _make(name, **{option: 'absurd'})


_ABSURD = [
  ('adamw', 'b1', 1.5),
  ('adamw', 'b1', 1),
  ('adamw', 'b2', -0.1),
  ('adamw', 'eps', -1),
  ('adamw', 'b1', True),
  ('adamw', 'weight_decay', -1),
  ('adamw', 'b1', float('nan')),
  ('adamw', 'eps', float('inf')),
  ('adamw', 'nesterov', 1),
  ('adamw', 'mu_dtype', 'bfloat61'),
  ('adamw', 'mu_dtype', 'int8'),
  ('adamw', 'mask', {'a': 1}),
  ('adamw', 'b1', jnp.ones([2])),
  ('adamw', 'b1', np.float32(2)),
  ('adamw', 'b2', lambda step: 0.9),
  ('adamw', 'weight_decay', lambda: 0.1),
  ('sgd', 'momentum', 1.0),
  ('rmsprop', 'decay', 1.0),
  ('adadelta', 'rho', 1.1),
  ('prodigy', 'betas', (0.9, 1.0)),
  ('prodigy', 'betas', 0.9),
  ('prodigy', 'weight_decay', lambda step: 0.1),
  ('schedule_free', 'b1', 0.0),
  ('dog', 'init_step', ('distant', 1.0)),
  ('muon', 'preconditioning', 'frobenious'),
  ('polyak_sgd', 'variant', 'sps++'),
  ('lbfgs', 'memory_size', 0),
  ('reduce_on_plateau', 'patience', 0),
  ('reduce_on_plateau', 'factor', 1.0),
  ('noisy_sgd', 'eta', -0.1),
  ('rprop', 'eta_minus', 0.0),
  ('rprop', 'eta_plus', 0.9),
  ('dpsgd', 'l2_norm_clip', 0),
  ('lars', 'trust_coefficient', 0),
  ('muon', 'adam_learning_rate', -1.0),
  ('muon', 'muon_weight_dimension_numbers', {'a': 2}),
  ('muon', 'ns_coeffs', 'muonn'),
  ('muon', 'ns_coeffs', (3.0, -4.0)),
  ('muon', 'ns_coeffs', (3.0, -4.0, float('nan'))),
  ('muon', 'matrices', [('(', True)]),
  ('muon', 'matrices', [('logits', 1)]),
  ('muon', 'matrices', 'all'),
  ('sophia', 'update_interval', 2.5),
  ('adafactor', 'decay_rate', -1),
]


@pytest.mark.parametrize('name,option,value', _ABSURD)
def test_absurd_values_are_rejected(name, option, value):
  with pytest.raises(ConfigError, match=rf'^`{name}\.{option}` must be .*, got '):
    _make(name, **{option: value})


_VALID = [
  (
    'adamw',
    {'b1': 0, 'eps': 0, 'weight_decay': optax.linear_schedule(0.1, 0.0, 5), 'mu_dtype': 'bfloat16'},
  ),
  (
    'adamw',
    {
      'b1': np.float32(0.9),
      'b2': jnp.float32(0.99),
      'eps': np.array(1e-8),
      'mu_dtype': jnp.bfloat16,
    },
  ),
  ('adamw', {'mask': {'p': True}}),
  ('adamw', {'mask': lambda params: jax.tree.map(jnp.ndim, params)}),
  ('adamw', {'mask': True, 'nesterov': np.bool_(True), 'mu_dtype': None}),
  ('ademamix', {'b3': optax.linear_schedule(0.9, 0.999, 5), 'alpha': optax.constant_schedule(2.0)}),
  ('optimistic_gradient_descent', {'alpha': optax.constant_schedule(2.0), 'beta': -1.0}),
  ('schedule_free', {'b1': 1.0}),
  ('adafactor', {'clipping_threshold': None, 'weight_decay_rate': 0.1}),
  ('polyak_sgd', {'scaling': optax.constant_schedule(0.5), 'variant': 'sps+', 'f_min': -1.0}),
  ('muon', {'ns_coeffs': 'dion', 'adam_learning_rate': optax.constant_schedule(0.1)}),
  ('muon', {'ns_coeffs': [[3.0, -4.0, 2.0], [2.0, -1.5, 0.5]], 'matrices': [('logits', True)]}),
  ('muon', {'weight_decay': optax.constant_schedule(0.1)}),
  ('lbfgs', {'linesearch': None}),
  ('dog', {'init_step': ('distance', 0.1), 'weight_decay': 0.1}),
  ('lion', {'mu_dtype': np.float32}),
]


@pytest.mark.parametrize('name,options', _VALID)
def test_documented_values_are_accepted(name, options):
  assert isinstance(_make(name, **options), optimizers.OptaxWrapper)


def test_options_may_be_traced():
  @jax.jit
  def update(b1):
    optimizer = optimizers.sgd(1.0, momentum=b1).create({'p': jnp.ones([])})
    return optimizer.apply_gradient({'p': 1.0}).apply_gradient({'p': 1.0}).target['p']

  np.testing.assert_allclose(update(0.5), 1 - 1 - 1.5, rtol=1e-6)


@pytest.mark.parametrize(
  'make,message',
  [
    (
      lambda: optimizers.reduce_on_plateau(rtol=0.0, atol=0.0),
      'reduce_on_plateau has invalid options: At least one',
    ),
    # Before the trainer passes a learning rate.
    (
      lambda: optimizers.lbfgs(linesearch=optax.sgd),
      "lbfgs has invalid options: .*no attribute 'init'",
    ),
  ],
)
def test_errors_of_optax_are_configuration_errors(make, message):
  with pytest.raises(ConfigError, match=message):
    make()


def test_constructors_of_others_may_mean_something_else_by_a_name():
  def make(learning_rate, b1='mean', eps=-1.0):
    del b1, eps
    return optax.sgd(learning_rate)

  assert optimizers.wrap_optax_optimizer(make, takes_learning_rate=True)(
    b1='median'
  ).uses_learning_rate


@pytest.mark.parametrize(
  'make,message',
  [
    (
      lambda: optimizers.Adafactor(factord=False),
      r"^Adafactor: .*'factord'\. Did you mean 'factored'\?",
    ),
    (
      lambda: optimizers.MultiOptimizer([], part_name=['a']),
      "^MultiOptimizer: .*Did you mean 'part_names'",
    ),
    (
      lambda: optimizers.MultiOptimizer(),
      '^MultiOptimizer: missing a required argument.*Its arguments are trav',
    ),
    (
      lambda: optimizers.partition({'a': None}, param_label='a'),
      "^partition: .*Did you mean 'param_labels'",
    ),
    (lambda: optimizers.chain(transformation=[]), "^chain: .*Did you mean 'transformations'"),
    (
      lambda: optimizers.OptaxWrapper(optax.sgd(0.1), nam='a'),
      "^OptaxWrapper: .*Did you mean 'name'",
    ),
    (lambda: optimizers.scaled_adam(lr=0.1), '^scaled_adam: .*Known names'),
    (
      lambda: optimizers.distributed_shampoo(blocksize=2),
      "^distributed_shampoo: .*mean 'block_size'",
    ),
  ],
)
def test_unknown_arguments_are_explained(make, message):
  with pytest.raises(ConfigError, match=message) as caught:
    make()
  assert not re.search(r'self|__init__', str(caught.value))


def test_a_checked_constructor_still_shows_its_arguments():
  assert list(inspect.signature(optimizers.Adafactor).parameters)[:2] == [
    'learning_rate',
    'factored',
  ]
  assert 'part_names' in inspect.getfullargspec(optimizers.MultiOptimizer.__init__).kwonlyargs
