"""The platform that a traced program will run on, by which layers choose between forms of one computation."""

from collections.abc import Iterator
import contextlib
import contextvars

import jax

# The platform of a program that must lower for every platform, as exported ones do.
PORTABLE = 'portable'

_is_portable = contextvars.ContextVar('is_portable', default=False)


@contextlib.contextmanager
def portable_programs() -> Iterator[None]:
  """Makes `traced_platform` return `PORTABLE` within the context, whatever devices are at hand."""
  token = _is_portable.set(True)
  try:
    yield
  finally:
    _is_portable.reset(token)


def traced_platform() -> str:
  """Returns `PORTABLE` or a platform: that of the mesh in context ('cpu', 'gpu', 'tpu'), without one JAX's default."""
  if _is_portable.get():
    return PORTABLE
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform
