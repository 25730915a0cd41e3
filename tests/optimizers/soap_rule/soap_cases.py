"""Options of SOAP for its tests, by name, and matrices in the form of its state."""

import inspect

import jax.numpy as jnp

from t5x_lite import optimizers
from t5x_lite.optimizers.soap_rule import state as state_lib
from t5x_lite.optimizers.soap_rule.config import SoapConfig

to_float = state_lib.to_float


def config(**options):
  """Return the options, those that are not given with their defaults."""
  parameters = inspect.signature(optimizers.soap).parameters.values()
  defaults = {each.name: each.default for each in parameters if each.name != 'learning_rate'}
  return SoapConfig(**{**defaults, **options})


def to_state(matrices, cfg):
  """Return matrices [K, n, n] in the form of bases."""
  return state_lib.matrices_to_state(jnp.asarray(matrices, jnp.float32), cfg)
