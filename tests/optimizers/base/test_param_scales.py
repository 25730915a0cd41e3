"""Rules of scales by parameter: first match, errors, log."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.base.param_scales import ParamScales

_PARAMS = {
  'a': {'kernel': np.ones([2, 3], np.float32), 'bias': np.ones([3], np.float32)},
  'b': {'kernel': np.ones([3, 2], np.float32)},
}


def _with(optimizer_def, **options):
  return optimizers.with_update_options(optimizer_def, **options)


def _moved(optimizer_def):
  optimizer = optimizer_def.create(jax.tree.map(jnp.asarray, _PARAMS))
  target = optimizer.apply_gradient(_PARAMS).target
  return [
    round(float(1.0 - leaf.ravel()[0]), 5) for leaf in jax.tree.leaves(target)
  ]  # a/bias, a/kernel, b/kernel


def test_the_first_match_applies_and_stacked_layers_have_the_factors_of_their_first():
  rules = ((r'^layers_1/.*kernel', 0.5), ('kernel', 2.0))
  scales = ParamScales(learning_rates=rules, weight_decays=rules[::-1])
  assert scales.of('layers_1/mlp/kernel') == (0.5, 2.0) and scales.of('layers_0/kernel') == (
    2.0,
    2.0,
  )
  assert scales.of('layers_1/scale') == (1.0, 1.0) and scales.of('layers_1,3/mlp/kernel') == (
    0.5,
    2.0,
  )
  assert _moved(
    _with(optimizers.sgd(0.5), learning_rate_scales=[('^a/', 0.5), ('kernel', 0.25)])
  ) == [0.25, 0.25, 0.125]


def test_a_factor_of_0_keeps_parameters_or_does_not_decay_them():
  assert _moved(_with(optimizers.sgd(0.5), learning_rate_scales=[('^a/', 0.0)])) == [0.0, 0.0, 0.5]
  decay = optimizers.chain([optax.scale(0.0), optimizers.adamw(0.5, weight_decay=0.2)])
  assert _moved(decay) == [0.1, 0.1, 0.1]
  assert _moved(_with(decay, weight_decay_scales=[('bias', 0.0), ('^a', 0.5)])) == [0.0, 0.05, 0.1]


def test_parts_of_a_multi_optimizer_and_the_whole():
  def decaying():
    return optimizers.adamw(0.5, weight_decay=0.2, b1=0.0)

  def parts(**options):
    return optimizers.MultiOptimizer(
      [
        ('^a/', _with(optimizers.sgd(0.5), **options) if options else optimizers.sgd(0.5)),
        ('^b/', decaying()),
      ]
    )

  assert _moved(parts()) == [0.5, 0.5, 0.6]
  assert _moved(
    _with(parts(), learning_rate_scales=[('kernel', 0.5)], weight_decay_scales=[('.', 0.0)])
  ) == [0.5, 0.25, 0.25]
  assert _moved(parts(learning_rate_scales=[('bias', 0.5)])) == [0.25, 0.5, 0.6]
  with pytest.raises(
    ConfigError,
    match="learning_rate_scales`: '.b/' is the first match of no parameter, such as 'a/",
  ):
    _moved(parts(learning_rate_scales=[('^b/', 0.5)]))
  with pytest.raises(ConfigError, match='sgd has scales by parameter already'):
    _with(parts(learning_rate_scales=[('bias', 0.5)]), learning_rate_scales=[('kernel', 0.5)])


def test_definitions_with_equal_options_are_equal():
  def make(factor):
    return _with(optimizers.Adafactor(0.1), learning_rate_scales=[('bias', factor)])

  assert make(0.5) == make(0.5) != make(0.25) and make(0.5) != optimizers.Adafactor(0.1)

  def multi(factor):
    return optimizers.MultiOptimizer([('a', make(factor))])

  assert multi(0.5) == multi(0.5) != multi(0.25)


def test_the_log_says_once_what_each_rule_scales(caplog):
  caplog.set_level(logging.INFO)
  optimizer_def = _with(
    optimizers.adamw(0.1),
    learning_rate_scales=[('kernel', 0.5)],
    weight_decay_scales=[('bias', 0.0)],
    param_dtype='bfloat16',
  )
  for _ in range(2):
    jax.eval_shape(lambda: optimizer_def.create(jax.tree.map(jnp.asarray, _PARAMS)))
  assert [
    record.getMessage() for record in caplog.records if 'base.param_scales' in record.name
  ] == [
    'The learning rate is multiplied by 0.5 for 2 parameter(s), such as a/kernel.',
    'The weight decay is multiplied by 0 for 1 parameter(s), such as a/bias.',
    'Parameters are bfloat16, rounded to nearest in updates.',
  ]


class _Own(optimizers.Adafactor):
  """An optimizer of a user."""

  def _for_param_scales(self, scales):
    return optimizers.OptimizerDef._for_param_scales(self, scales)


@pytest.mark.parametrize(
  'make, message',
  [
    (
      lambda: _with(optimizers.adamw(0.1), learning_rate_scales=[('scale', 0.5)]).create(_PARAMS),
      "learning_rate_scales`: 'scale' is the first match of no parameter, such as 'a/bias'",
    ),
    (
      lambda: _with(optimizers.adamw(0.1), learning_rate_scales=[('.', 0.5), ('bias', 0.1)]).create(
        _PARAMS
      ),
      "'bias' is the first match of no parameter.*move it up",
    ),
    (
      lambda: _with(optimizers.adamw(0.1), learning_rate_scales=[('(', 0.5)]),
      r'regular expressions .*got .\(.',
    ),
    (
      lambda: _with(optimizers.adamw(0.1), learning_rate_scales={'bias': 0.5}),
      'must be a list of pairs',
    ),
    (
      lambda: _with(optimizers.adamw(0.1), weight_decay_scales=[('bias', -1)]),
      'must be a list of pairs',
    ),
    (lambda: _with(optimizers.adamw, weight_decay_scales=[('bias', 1)]), 'Call the function first'),
    (
      lambda: _with(optimizers.adamw(0.1, weight_decay=0.0), weight_decay_scales=[('bias', 0)]),
      'no effect: adamw has no known weight decay',
    ),
    (
      lambda: _with(optimizers.OptaxWrapper(optax.adamw(0.1)), weight_decay_scales=[('bias', 0)]),
      'is not known',
    ),
    (
      lambda: _with(
        _with(optimizers.sgd(0.1), learning_rate_scales=[('a', 1)]), param_dtype='bfloat16'
      ),
      'sgd has `with_update_options` already',
    ),
    (
      lambda: _with(_Own(), learning_rate_scales=[('a', 1)]),
      'Implement _for_param_scales.scales. in _Own',
    ),
    (
      lambda: _with(
        optimizers.chain([optimizers.sgd(0.1), optimizers.lion(0.1)]),
        learning_rate_scales=[('a', 1)],
      ),
      'chain with one learning rate, got sgd and lion',
    ),
    (
      lambda: _with(
        optimizers.OptaxWrapper(optax.contrib.schedule_free_sgd(0.1)),
        learning_rate_scales=[('a', 1)],
      ).create(_PARAMS),
      'the one with ScheduleFreeState are not',
    ),
  ],
)
def test_invalid_options_are_rejected(make, message):
  with pytest.raises(ConfigError, match=message):
    make()
