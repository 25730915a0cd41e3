"""A mesh of one device for gin files of tests: programs for it compile faster than those for eight."""

import jax
import numpy as np


def mesh():
  """Return a mesh of the first device."""
  return jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1),
    ('data', 'model'),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
