"""JAX's default generator."""

import jax

from t5x_lite import random_numbers


def test_keys_are_of_the_hardware_generator():
  before = jax.config.jax_default_prng_impl
  try:
    random_numbers.set_hardware_rng_ops()
    assert jax.random.key_impl(jax.random.key(0)) == 'unsafe_rbg'
  finally:
    jax.config.update('jax_default_prng_impl', before)
