"""Platform and purpose of a traced program, by which layers choose the form of a computation."""

from collections.abc import Iterator
import contextlib
import contextvars

import jax

# Platform of programs that must lower for every platform, such as exported ones.
PORTABLE = 'portable'

_is_portable = contextvars.ContextVar('is_portable', default=False)
_is_counted = contextvars.ContextVar('is_counted', default=False)


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


@contextlib.contextmanager
def counted_products() -> Iterator[None]:
  """Make layers compute the matrix products of their definition within the context, for programs that are not run.

  Attention has all scores and a loss all logits at once, and experts compute one row for each choice of a token, so
  that `trainer.model_flops` counts the same products whatever kernels, mesh and sizes the run has.
  """
  token = _is_counted.set(True)
  try:
    yield
  finally:
    _is_counted.reset(token)


def counts_products() -> bool:
  """Return whether the program is traced within `counted_products`."""
  return _is_counted.get()
