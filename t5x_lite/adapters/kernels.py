"""Kernels that adapters may stand next to: which of them an adapter selects, and the dims of its arrays."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.adapters import merging
from t5x_lite.errors import ConfigError, T5xLiteError
from t5x_lite.layer_stacks import BATCH_AXES
from t5x_lite.layers import low_rank

# Name of the kernels of projections.
KERNEL = 'kernel'
# Logical axis of the dim that the two arrays of an adapter share.
RANK_AXIS = 'lora_rank'
# Names of usual sets of targets, with the expression that selects among all kernels that support an adapter.
TARGET_SETS: Mapping[str, str] = {
  'query_value': r'attention/(query|value)/kernel$',
  'attention': r'attention/(query|key|value|out)/kernel$',
  'all': '',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """Kernel with the roles of its dims.

  Attributes:
    path: '/'-joined path of the parameter.
    shape: shape of the array.
    axes: logical axis name of each dim.
    dims: role of each dim, a letter each, see `merging`.
  """

  path: str
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  dims: str

  @classmethod
  def of(cls, path: str, shape: Sequence[int], axes: Sequence[str | None]) -> 'Kernel':
    """Return a kernel with the roles of its dims: of two dims the first is the input, of three 'embed' is one side.

    Raises:
      ConfigError: the dims of input and output are unknown.
    """
    # An adapter has an A and a B for each layer and expert.
    sides = [name for name in axes if name not in BATCH_AXES]
    roles = ''
    if len(sides) == 2:
      roles = 'io'
    elif len(sides) == 3 and sides[0] == 'embed':
      roles = 'ioo'
    elif len(sides) == 3 and sides[-1] == 'embed':
      roles = 'iio'
    if not roles or len(axes) != len(shape):
      raise ConfigError(
        f'`Lora.targets` selects {path}, of which the dims of input and output are not known: its shape is '
        f'{tuple(shape)}, its logical axes are {tuple(axes)}. A kernel has two dims, or three of which the first or '
        "last is 'embed', and dims of experts and layers. Narrow the targets."
      )
    remaining = iter(roles)
    dims = ['s' if name in BATCH_AXES else next(remaining) for name in axes]
    return cls(path=path, shape=tuple(shape), axes=tuple(axes), dims=''.join(dims))

  @property
  def name(self) -> str:
    """Name of the projection, such as 'query'."""
    return self.path.split('/')[-2]

  def size(self, role: str) -> int:
    """Return the product of the sizes of the dims with a role; of 's', the number of experts and stacked layers."""
    return math.prod(size for size, dim in zip(self.shape, self.dims, strict=True) if dim == role)


def with_adapter(params: Mapping[str, Any], params_axes: Mapping[str, Any]) -> list[Kernel]:
  """Return the kernels that have an adapter.

  Args:
    params: nested dicts of arrays or shapes.
    params_axes: axes metadata of the parameters.
  """
  flat = tree_utils.flatten_dict(tree_utils.to_dict(params))
  metadata = tree_utils.flatten_dict(tree_utils.to_dict(params_axes))
  found = []
  for path, leaf in flat.items():
    if _is_kernel(path) and merging.leaves_of(path)[0] in flat:
      found.append(Kernel.of(path, leaf.shape, metadata[f'{path}_axes'].names))
  return found


def sites_of(intermediates: Mapping[str, Any]) -> frozenset[str]:
  """Return the paths of the kernels that support an adapter, from the sown values of an initialization."""
  flat = tree_utils.flatten_dict(tree_utils.to_dict(intermediates))
  ending = f'/{low_rank.SITE}'
  return frozenset(
    f'{path.removesuffix(ending)}/{KERNEL}' for path in flat if path.endswith(ending)
  )


def select(
  targets: Sequence[str],
  shapes: Mapping[str, Sequence[int]],
  axes: Mapping[str, Sequence[str | None]],
  sites: frozenset[str],
) -> list[Kernel]:
  """Return the kernels that the targets of an adapter select.

  Args:
    targets: names of `TARGET_SETS`, or regular expressions that are searched in the paths of kernels.
    shapes: shape of each parameter by path.
    axes: logical axes of each parameter by path.
    sites: paths of the kernels that support an adapter.

  Raises:
    ConfigError: a target selects no kernel, or one that cannot have an adapter.
  """
  projections = [path for path in shapes if path in sites and 'vocab' not in axes[path]]
  selected = {}
  for target in targets:
    if target in TARGET_SETS:
      matches = [path for path in projections if re.search(TARGET_SETS[target], path)]
    else:
      matches = [path for path in shapes if re.search(target, path)]
    # An expression may also match what is next to a kernel, such as its bias.
    found = list(filter(_is_kernel, matches))
    for path in found or matches:
      if path not in projections:
        raise _unsupported(target, path)
      selected[path] = Kernel.of(path, shapes[path], axes[path])
    if not matches:
      raise checks.invalid(
        'Lora',
        'targets',
        f'names of sets ({", ".join(TARGET_SETS)}) or regular expressions that each match a kernel',
        target,
        f"Kernels are {_examples(projections)}. Write several targets as a tuple: ('query_value', 'mlp/wo/kernel$').",
      )
  return [selected[path] for path in shapes if path in selected]


def _is_kernel(path: str) -> bool:
  return path.split('/')[-1] == KERNEL


def _examples(paths: Sequence[str]) -> str:
  if not paths:
    return 'not in this network'
  return f'{paths[0]} and {len(paths) - 1} others'


def _unsupported(target: str, path: str) -> T5xLiteError:
  if path.endswith('embedding'):
    reason = (
      'a table: it is read by lookup, and a tied one also computes the logits, so that it cannot have an adapter of '
      'its own'
    )
  elif _is_kernel(path):
    reason = (
      'neither a kernel of layers.DenseGeneral in a layer nor one of experts (but of logits, a router or a custom '
      'product)'
    )
  else:
    reason = 'not a kernel'
  return checks.invalid(
    'Lora',
    'targets',
    'expressions that match kernels of layers.DenseGeneral or of experts',
    target,
    f'It matches {path}, which is {reason}. Narrow the expression, or train this parameter by `Lora.also_train`.',
  )
