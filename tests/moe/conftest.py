"""Fixtures of the tests of Mixture of Experts."""

import jax
import pytest


@pytest.fixture(scope='module')
def fast_compilation():
  """While a module runs, programs are compiled with few optimizations: its tests compile much and compute little."""
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', before)
