"""Recorded matrices and roots of the original implementation, and the compiled root function."""

import functools
import pathlib

import jax
import numpy as np

from t5x_lite.optimizers.shampoo import roots

_GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'optimizers'
# Tests compile more than they compute.
FAST_COMPILE = {'xla_backend_optimization_level': 0}


def load(name):
  """Return the arrays of a recorded file."""
  with np.load(_GOLDEN / f'{name}.npz') as arrays:
    return dict(arrays)


@functools.cache
def root_fn(method='coupled_newton', **options):
  """Return fn(matrix [n, n], order) -> (root, error), compiled once per shape: the order is traced."""
  return jax.jit(
    functools.partial(roots.inverse_pth_root, options=roots.RootOptions(method=method, **options)),
    compiler_options=FAST_COMPILE,
  )
