"""State dicts of optax states: names, and states of other optimizers."""

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError


def _params(seed=0):
  rng = np.random.default_rng(seed)
  return {
    'dense': {
      'kernel': rng.normal(size=[4, 6]).astype(np.float32),
      'bias': rng.normal(size=[6]).astype(np.float32),
    },
    'scale': np.float32(1.5),
  }


def test_state_dict_of_an_optax_state_has_these_names():
  flat = tree_utils.flatten_dict(optimizers.adamw(0.1).create({'p': jnp.ones([2])}).state_dict())
  # A chain is a tuple; its members without state leave no entry.
  assert set(flat) == {
    'target/p',
    'state/step',
    'state/param_states/0/count',
    'state/param_states/0/mu/p',
    'state/param_states/0/nu/p',
  }


def test_restoring_the_state_of_another_optimizer_is_rejected():
  adam, sgd = (make(0.1).create(_params()) for make in (optimizers.adam, optimizers.sgd))
  with pytest.raises(
    CheckpointError, match='state/param_states/0/count is missing.*another optimizer'
  ):
    adam.restore_state(sgd.state_dict())
  with pytest.raises(CheckpointError, match='unknown value at state/param_states/0'):
    sgd.restore_state(adam.state_dict())
  with pytest.raises(
    CheckpointError, match="'target/dense' must have the entries .*, got a single value"
  ):
    adam.restore_state({**adam.state_dict(), 'target': {'dense': 1.0, 'scale': 2.0}})
  with pytest.raises(CheckpointError, match='target/dense/kernel is missing'):
    adam.restore_state({'state': adam.state_dict()['state']})
