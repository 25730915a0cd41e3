"""Platform of a traced program, by which layers choose the form of a computation."""

from collections.abc import Iterator
import contextlib
import contextvars

import jax

# Platform of programs that must lower for every platform, such as exported ones.
PORTABLE = 'portable'

_is_portable = contextvars.ContextVar('is_portable', default=False)


@contextlib.contextmanager
def portable_programs() -> Iterator[None]:
  """Make `traced_platform` return `PORTABLE` within the context, on any devices."""
  token = _is_portable.set(True)
  try:
    yield
  finally:
    _is_portable.reset(token)


def traced_platform() -> str:
  """Return `PORTABLE`, or the platform ('cpu', 'gpu', 'tpu') of the mesh in context, or else JAX's default."""
  if _is_portable.get():
    return PORTABLE
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None:
    return jax.default_backend()
  return device.platform
