"""Generators of random numbers."""

import jax

# Faster on accelerators; its numbers depend on the mesh.
HARDWARE_IMPL = 'unsafe_rbg'


def set_hardware_rng_ops() -> None:
  """Make the hardware's generator JAX's default in this process, for keys without `impl`.

  The command `train` has `use_hardware_rng` instead, which does not change the default of the process.
  """
  jax.config.update('jax_default_prng_impl', HARDWARE_IMPL)
