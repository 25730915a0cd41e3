"""Factories of wrapped optax optimizers: all exist, take every form of learning rate, and have a gin file."""

import functools
import inspect
import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from t5x_lite import optimizers
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError

# Functions of optax.contrib that are not optimizers.
_PARTS = {
  'hutchinson_estimator_diag_hessian': 'estimates curvature, for sophia',
  'differentially_private_aggregate': 'a part of dpsgd, for chains',
  'normalize': 'a part of the perturbation of sam',
  'schedule_free_eval_params': 'OptimizerDef.eval_params, which evaluation calls',
}
_SCHEDULE = optax.linear_schedule(0.5, 0.1, 10)
_NO_RATE = (
  'lbfgs',
  'mechanize',
  'polyak_sgd',
  'reduce_on_plateau',
  'sam',
  'split_real_and_imaginary',
)
# Arguments that must be given.
_REQUIRED = {
  'dpsgd': {'l2_norm_clip': 1.0, 'noise_multiplier': 0.1},
  'mechanize': {'base_optimizer': optax.adam(0.1)},
  'sam': {'optimizer': optax.sgd(0.1), 'adv_optimizer': optax.sgd(0.1)},
  'schedule_free': {'base_optimizer': optax.sgd(0.1)},
  'split_real_and_imaginary': {'inner': optax.sgd(0.1)},
}
# Options whose defaults do not fit tiny parameters.
_OPTIONS = {'galore': {'rank': 2}, 'sophia': {'update_interval': 2}}


def _optax_names() -> list[str]:
  """Return the names of the optimizers in optax's module of aliases, including partial applications."""
  names = []
  for name, value in vars(optax).items():
    function = value.func if isinstance(value, functools.partial) else value
    if inspect.isfunction(function) and function.__module__ == 'optax._src.alias':
      names.append(name)
  return names


def _contrib_names() -> list[str]:
  return [
    name
    for name, value in vars(optax.contrib).items()
    if inspect.isfunction(value) and not name.startswith(('_', 'scale_by_'))
  ]


_NAMES = sorted({*_optax_names(), *_contrib_names()} - set(_PARTS))


def _make(name, **kwargs):
  return getattr(optimizers, name)(**_REQUIRED.get(name, {}), **_OPTIONS.get(name, {}), **kwargs)


def test_the_walk_finds_optimizers():
  assert {'adamw', 'nadam', 'lbfgs', 'muon', 'schedule_free', 'dpsgd'} <= set(_NAMES) and len(
    _NAMES
  ) > 50


@pytest.mark.parametrize('name', _NAMES)
def test_no_optimizer_of_optax_is_missing(name):
  factory = getattr(optimizers, name, None)
  assert factory is not None and name in optimizers.__all__, (
    f"wrap optax's {name}, or add it to _PARTS"
  )
  assert factory.__name__ == name and 'Args:' in factory.__doc__
  # Optax's examples show a transformation with init and update.
  assert '>>>' not in factory.__doc__
  optimizer_def = _make(name, **({'learning_rate': 0.1} if name == 'rprop' else {}))
  assert isinstance(optimizer_def, optimizers.OptaxWrapper) and optimizer_def.name == name
  assert isinstance(optimizer_def.optax_optimizer, optax.GradientTransformation)
  # The arguments are those of optax, also of its version for T5X.
  theirs = getattr(optax.contrib, name, None) or getattr(optax, name)
  ours = list(inspect.signature(factory).parameters)
  assert [key for key in inspect.signature(theirs).parameters if key not in ours] in ([], ['seed'])


def test_parts_of_optimizers_are_not_exported():
  assert not set(_PARTS) & set(optimizers.__all__)
  assert set(_PARTS) <= set(_contrib_names())


# ---- learning rates --------------------------------------------------------------------------------------------------

_PARAMS = {
  'w': np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
  'b': np.full([4], 0.5, np.float32),
}


def _update(name, optimizer, **overrides):
  """Make one update with all values of the step."""

  def loss_fn(params):
    return sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))

  grads = jax.grad(loss_fn)(optimizer.target)
  if name == 'dpsgd':
    grads = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
  return optimizer.apply_gradient(
    grads,
    value=loss_fn(optimizer.target),
    grad=grads,
    value_fn=loss_fn,
    obj_fn=loss_fn,
    grad_fn=lambda params, number: jax.grad(loss_fn)(params),
    **overrides,
  )


@pytest.mark.parametrize('name', [name for name in _NAMES if name not in _NO_RATE])
def test_every_form_of_learning_rate_is_taken(name):
  forms = [('a number', {'learning_rate': 0.1}, {})]
  if name != 'rprop':  # Its initial step size is a number.
    forms += [
      ("the trainer's", {}, {'learning_rate': 0.1}),
      ('a schedule', {'learning_rate': _SCHEDULE}, {}),
    ]
  for form, options, overrides in forms:
    optimizer_def = _make(name, **options)
    assert optimizer_def.uses_learning_rate == bool(overrides), form
    assert optimizer_def.owns_learning_rate != bool(overrides), form
    optimizer = jax.eval_shape(
      lambda optimizer_def=optimizer_def: optimizer_def.create(jax.tree.map(jnp.asarray, _PARAMS))
    )
    updated = jax.eval_shape(lambda o, rate: _update(name, o, **rate), optimizer, overrides)
    assert jax.tree.structure(updated) == jax.tree.structure(optimizer), form
    for new, old in zip(jax.tree.leaves(updated), jax.tree.leaves(optimizer), strict=True):
      assert (new.shape, new.dtype, new.weak_type) == (old.shape, old.dtype, old.weak_type), form


@pytest.mark.parametrize(
  'name',
  [
    name
    if name in ('adamw', 'schedule_free', 'fromage')
    else pytest.param(name, marks=pytest.mark.full)
    for name in _NAMES
    if name not in (*_NO_RATE, 'rprop')
  ],
)
def test_the_forms_of_a_learning_rate_agree(name):
  targets = []
  for options, overrides in (
    ({'learning_rate': 0.1}, {}),
    ({}, {'learning_rate': 0.1}),
    ({'learning_rate': optax.constant_schedule(0.1)}, {}),
  ):
    optimizer = _make(name, **options).create(jax.tree.map(jnp.asarray, _PARAMS))
    step = jax.jit(lambda o, rate: _update(name, o, **rate))
    for _ in range(3):
      optimizer = step(optimizer, overrides)
    targets.append(optimizer.target)
  for other in targets[1:]:
    for key, value in targets[0].items():
      np.testing.assert_allclose(other[key], value, rtol=2e-5, atol=1e-6)
      assert not np.array_equal(value, _PARAMS[key])


def test_optimizers_in_optimizers_take_the_trainers_rate():
  params = jax.tree.map(jnp.asarray, _PARAMS)
  for factory, options, plain in (
    (
      optimizers.mechanize,
      {'base_optimizer': optimizers.adam(b1=0.5)},
      lambda rate: optax.contrib.mechanize(optax.adam(rate, b1=0.5)),
    ),
    (
      optimizers.schedule_free,
      {'base_optimizer': optimizers.sgd()},
      lambda rate: optax.contrib.schedule_free(optax.sgd(rate), rate),
    ),
    (
      optimizers.split_real_and_imaginary,
      {'inner': optimizers.sgd(momentum=0.5)},
      lambda rate: optax.contrib.split_real_and_imaginary(optax.sgd(rate, 0.5)),
    ),
  ):
    optimizer, state, expected = factory(**options).create(params), plain(0.1).init(params), params
    assert (
      optimizer.optimizer_def.uses_learning_rate and not optimizer.optimizer_def.owns_learning_rate
    )
    for _ in range(2):
      grads = jax.tree.map(jnp.sin, expected)
      optimizer = optimizer.apply_gradient(grads, learning_rate=0.1)
      updates, state = plain(0.1).update(grads, state, expected)
      expected = optax.apply_updates(expected, updates)
    for key, value in expected.items():
      np.testing.assert_allclose(optimizer.target[key], value, rtol=1e-6)


def test_scalars_get_adagrads_rule_in_sm3():
  optimizer = optimizers.sm3(0.1, momentum=0.0).create(
    {'s': jnp.float32(1.0), 'w': jnp.ones([2, 2])}
  )
  for _ in range(2):
    optimizer = optimizer.apply_gradient({'s': jnp.float32(2.0), 'w': jnp.full([2, 2], 2.0)})
  # Accumulators of 4 and 8.
  expected = 1.0 - 0.1 * (2 / 2 + 2 / 8**0.5)
  np.testing.assert_allclose(optimizer.target['s'], expected, rtol=1e-5)
  np.testing.assert_allclose(optimizer.target['w'], expected, rtol=1e-5)


@pytest.mark.parametrize(
  'make,message',
  [
    (lambda: optimizers.rprop(), "rprop: missing a required argument: 'learning_rate'"),
    (lambda: optimizers.rprop(learning_rate=_SCHEDULE), 'rprop.*number'),
    (lambda: optimizers.dpsgd(l2_norm_clip=1.0), "missing a required argument: 'noise_multiplier'"),
    (lambda: optimizers.optimistic_adam(_SCHEDULE, 0.1), 'optimistic_adam_v2'),
    (lambda: optimizers.lion(wd=0.1), "unexpected keyword argument 'wd'"),
    (lambda: optimizers.muon(beta_=0.1), "Did you mean 'beta'"),
    (
      lambda: optimizers.prodigy(-1.0),
      '`prodigy.learning_rate` must be a number >= 0 or a schedule, got -1.0',
    ),
    (lambda: optimizers.mechanize(optax.adam), 'base_optimizer.*Call the function'),
    (
      lambda: optimizers.adamw(mask={'a': True}).create(
        {'kernel': jnp.ones(2), 'scale': jnp.ones(2)}
      ),
      r'^The optimizer adamw does not fit the parameters \(.*\)\. A mask, .* begins with kernel, scale, ',
    ),
    (
      lambda: optimizers.chain([optax.masked(optax.sgd(0.1), {'b': True})]).create(
        {'kernel': jnp.ones(2)}
      ),
      'does not fit the parameters',
    ),
    (lambda: optimizers.galore(rank=0), '`galore.rank` must be an integer >= 1, got 0'),
    (
      lambda: optimizers.galore(update_proj_gap=-1),
      'update_proj_gap` must be an integer >= 1, got -1',
    ),
    (
      lambda: optimizers.sophia(update_interval=0),
      'update_interval` must be an integer >= 1, got 0',
    ),
    (
      lambda: optimizers.adamw(mu_dtype='bfloat61'),
      "mu_dtype` must be a floating-point dtype .*, got 'bfloat61'",
    ),
  ],
)
def test_invalid_options_are_rejected(make, message):
  with pytest.raises(ConfigError, match=message):
    make()


# ---- gin files -------------------------------------------------------------------------------------------------------

_FILES = list(gin_syntax.packaged_files('optimizers'))


def test_every_factory_has_a_gin_file():
  named = {name.removeprefix('optimizers/').removesuffix('.gin') for name in _FILES}
  assert set(_NAMES) - named == set()


@pytest.mark.parametrize('name', _FILES)
def test_gin_files_bind_an_optimizer(name):
  text = gin_syntax.find_file(name).read_text(encoding='utf-8')
  assert text.startswith('# ') and 'OPTIMIZER = @' in text
  gin.clear_config()
  try:
    gin.parse_config(text)
    optimizer_def = gin.query_parameter('OPTIMIZER/macro.value').scoped_configurable_fn()
  finally:
    gin.clear_config()
  assert isinstance(optimizer_def, optimizers.OptimizerDef)
  # Files for optimizers that ignore the trainer's learning rate set it to None.
  has_no_rate = re.search(r'^trainer\.Trainer\.learning_rate_fn = None', text, re.MULTILINE)
  assert bool(has_no_rate) != optimizer_def.uses_learning_rate
