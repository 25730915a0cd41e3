"""Lowering of the kit's programs for CUDA on a machine without a GPU: shapes and kernels are checked, nothing runs."""

from collections.abc import Iterable, Iterator
import contextlib
import functools
import types
from typing import Any

from benchmarks.gpu import items
from benchmarks.gpu import worker

# What the code asks of a GPU: Hopper, whose kernels can all be traced without it.
_DEVICE = types.SimpleNamespace(
  platform='gpu', device_kind='NVIDIA H100', compute_capability='9.0', core_count=132
)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
  before = getattr(owner, name)
  setattr(owner, name, value)
  try:
    yield
  finally:
    setattr(owner, name, before)


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
  """Make programs that are traced in this context those of a Hopper GPU with cuDNN."""
  import jax
  from jax._src import lib
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  from moe.dispatch import accelerators
  from t5x_lite import layers
  from t5x_lite.layers import fused_attention
  from t5x_lite.layers import platforms

  versions = types.SimpleNamespace(cudnn_get_version=lambda: 91000)
  replacements = [
    (platforms, 'traced_platform', lambda: 'gpu'),
    (layers, 'traced_platform', lambda: 'gpu'),
    (fused_attention, 'gpu_unsupported_reason', lambda *_: None),
    (accelerators, '_compute_capability', lambda: _DEVICE.compute_capability),
    (jax, 'devices', lambda *_: [_DEVICE]),
    (lib, 'cuda_versions', versions),
    (cudnn, 'cuda_versions', versions),
    (cudnn, 'check_compute_capability', lambda _: True),
    (cudnn, 'is_cuda_compute_capability_equal', lambda _: False),
  ]
  with contextlib.ExitStack() as stack:
    for replacement in replacements:
      stack.enter_context(_replaced(*replacement))
    yield


def lower(item: items.Item, names: Iterable[str] | None = None) -> dict[str, str]:
  """Return the text of each program of an item, lowered for CUDA, by name.

  Args:
    item: the item.
    names: names of the programs; None for all.
  """
  programs = item.programs()
  chosen = programs if names is None else names
  found = {}
  for name in chosen:
    with as_on_gpu():
      traced = programs[name]()
      found[name] = traced.lower(lowering_platforms=('cuda',)).as_text()
  return found


def _measure(item: items.Item) -> Iterator[items.Row]:
  for name in item.programs():
    text = lower(item, [name])[name]
    kernels = text.count('__cudnn$') + text.count('@mosaic_gpu')
    yield {'program': name, 'lines': text.count('\n'), 'calls of fused kernels': kernels}


def make_items(sizes: str) -> list[items.Item]:
  """Return an item for each of the real items that have programs, whatever the sizes of the rehearsal."""
  del sizes
  found = []
  for part in worker.PARTS:
    for item in worker.make_items(part, 'real'):
      measure = functools.partial(_measure, item)
      found.append(items.Item(name=f'{part}: {item.name}', measure=measure, programs=item.programs))
  return found
