"""Logical axes of parameter-like trees: matching and checks."""

import flax.core
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import adafactor
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite.errors import ConfigError

_AXES = {'dense': {'kernel': P('embed', 'mlp'), 'bias': P('mlp')}, 'scale': P()}


def _params(seed=0):
  rng = np.random.default_rng(seed)
  return {
    'dense': {
      'kernel': rng.normal(size=[4, 6]).astype(np.float32),
      'bias': rng.normal(size=[6]).astype(np.float32),
    },
    'scale': np.float32(1.5),
  }


def _derive(optimizer_def, params=None, axes=None):
  optimizer = optimizer_def.create(_params() if params is None else params)
  return optimizer_def.derive_logical_axes(optimizer, _AXES if axes is None else axes)


def test_axes_of_adamw():
  axes = _derive(optimizers.adamw(0.1))
  adam_axes = axes.state.param_states[0]
  assert axes.target == _AXES and adam_axes.mu == _AXES and adam_axes.nu == _AXES
  assert adam_axes.count == P() and axes.state.step == P()


def test_axes_may_be_axis_names_as_in_t5x():
  names = {
    'dense': {
      'kernel': partitioning.AxisNames('embed', 'mlp'),
      'bias': partitioning.AxisNames('mlp'),
    },
    'scale': partitioning.AxisNames(),
  }
  optimizer_def = adafactor.Adafactor()
  optimizer = optimizer_def.create(_params())
  assert optimizer_def.derive_logical_axes(optimizer=optimizer, param_logical_axes=names) == (
    optimizer_def.derive_logical_axes(optimizer=optimizer, param_logical_axes=_AXES)
  )


def test_axes_of_masked_parameters_stay_masked():
  mask = {'dense': False, 'scale': True}
  axes = _derive(optimizers.OptaxWrapper(optax.masked(optax.adam(0.1), mask)))
  mu = axes.state.param_states.inner_state[0].mu
  assert mu == {'dense': optax.MaskedNode(), 'scale': P()}


def test_axes_are_found_in_frozen_and_plain_dicts_and_none_means_no_names():
  given = flax.core.freeze({'dense': {'kernel': None, 'bias': P('mlp')}, 'scale': P()})
  axes = _derive(optimizers.adam(0.1), axes=given)
  assert axes.state.param_states[0].mu['dense']['kernel'] == P(None, None)


@pytest.mark.parametrize(
  'axes,message',
  [
    ({'dense': {'kernel': P('embed', 'mlp')}, 'scale': P()}, "'dense/bias' has no logical axes"),
    (
      {**_AXES, 'dense': {'kernel': P('embed'), 'bias': P('mlp')}},
      r"'dense/kernel' has rank 2 \(shape \(4, 6\)\)",
    ),
    ({**_AXES, 'more': P('embed')}, "'more', but no such parameter"),
  ],
)
def test_axes_that_do_not_fit_the_parameters_are_rejected(axes, message):
  for optimizer_def in (optimizers.adamw(), optimizers.Adafactor()):
    with pytest.raises(ConfigError, match=message):
      _derive(optimizer_def, axes=axes)
