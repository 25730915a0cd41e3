"""Kernels that adapters may stand next to: which of them an adapter selects, and the dims of its arrays."""

from collections.abc import Mapping, Sequence
import dataclasses
import re
from typing import Any

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, T5xLiteError
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
# Logical axes of dims that number kernels: an adapter has an A and a B for each of them.
KERNELS_AXES = ('expert', 'layers', 'stack')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """Kernel with the roles of its dims.

  Attributes:
    path: '/'-joined path of the parameter.
    shape: shape of the array.
    axes: logical axis name of each dim.
    inputs: numbers of the dims of the input.
    outputs: numbers of the dims of the output; all other dims number kernels.
  """

  path: str
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]

  @classmethod
  def of(cls, path: str, shape: Sequence[int], axes: Sequence[str | None]) -> 'Kernel':
    """Return a kernel with the roles of its dims: of two dims the first is the input, of three 'embed' is one side.

    Raises:
      ConfigError: the dims of input and output are unknown.
    """
    dims = tuple(dim for dim, name in enumerate(axes) if name not in KERNELS_AXES)
    num_inputs = None
    if len(dims) == 2 or (len(dims) == 3 and axes[dims[0]] == 'embed'):
      num_inputs = 1
    elif len(dims) == 3 and axes[dims[-1]] == 'embed':
      num_inputs = 2
    if num_inputs is None or len(axes) != len(shape):
      raise ConfigError(
        f'`Lora.targets` selects {path}, of which the dims of input and output are not known: its shape is '
        f'{tuple(shape)}, its logical axes are {tuple(axes)}. A kernel has two dims, or three of which the first or '
        "last is 'embed', and dims of experts and layers. Narrow the targets."
      )
    return cls(
      path=path,
      shape=tuple(shape),
      axes=tuple(axes),
      inputs=dims[:num_inputs],
      outputs=dims[num_inputs:],
    )

  @property
  def name(self) -> str:
    """Name of the projection, such as 'query'."""
    return self.path.split('/')[-2]

  @property
  def parent(self) -> str:
    """Path of the module."""
    return self.path.rpartition('/')[0]

  def size(self, dims: Sequence[int]) -> int:
    """Return the product of the sizes of some dims."""
    size = 1
    for dim in dims:
      size *= self.shape[dim]
    return size

  @property
  def num_kernels(self) -> int:
    """Number of kernels in the array: of experts and stacked layers."""
    sides = (*self.inputs, *self.outputs)
    return self.size([dim for dim in range(len(self.shape)) if dim not in sides])

  @property
  def dims(self) -> str:
    """The roles of the dims, a letter each, as `merging` has them."""
    letters = ['s'] * len(self.shape)
    for dim in self.inputs:
      letters[dim] = 'i'
    for dim in self.outputs:
      letters[dim] = 'o'
    return ''.join(letters)

  def of_a(self, of_dims: Sequence[Any], of_rank: Any) -> tuple[Any, ...]:
    """Return the values of the dims of A: those of the kernel's dims, with the rank in place of the output's."""
    return _with_rank(of_dims, self.outputs, of_rank)

  def of_b(self, of_dims: Sequence[Any], of_rank: Any) -> tuple[Any, ...]:
    """Return the values of the dims of B: those of the kernel's dims, with the rank in place of the input's."""
    return _with_rank(of_dims, self.inputs, of_rank)


def _with_rank(of_dims: Sequence[Any], replaced: Sequence[int], of_rank: Any) -> tuple[Any, ...]:
  values = []
  for dim, value in enumerate(of_dims):
    if dim == replaced[0]:
      values.append(of_rank)
    elif dim not in replaced:
      values.append(value)
  return tuple(values)


def with_adapter(params: Mapping[str, Any], params_axes: Mapping[str, Any]) -> list[Kernel]:
  """Return the kernels that have an adapter.

  Args:
    params: nested dicts of arrays or shapes.
    params_axes: axes metadata of the parameters.
  """
  flat = tree_utils.flatten_dict(tree_utils.to_dict(params))
  metadata = tree_utils.flatten_dict(tree_utils.to_dict(params_axes))
  ending = f'/{low_rank.LORA_A}'
  found = []
  for name in flat:
    if name.endswith(ending):
      path = f'{name.removesuffix(ending)}/{KERNEL}'
      found.append(Kernel.of(path, flat[path].shape, metadata[f'{path}_axes'].names))
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
      found = [path for path in projections if re.search(TARGET_SETS[target], path)]
    else:
      found = [path for path in shapes if re.search(target, path) and _is_kernel(path)]
    for path in found:
      if path not in projections:
        raise _unsupported(target, path)
      selected[path] = Kernel.of(path, shapes[path], axes[path])
    if not found:
      others = [path for path in shapes if re.search(target, path)]
      if others and target not in TARGET_SETS:
        raise _unsupported(target, others[0])
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
