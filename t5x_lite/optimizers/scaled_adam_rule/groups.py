"""Groups of parameters in ScaledAdam: options, labels and batched dims.

Labels assign parameters to groups by a function, a tree, or regular expressions for parameter paths. The indices of a
batched dim count separate parameters: the layers of a scanned stack, the experts of a layer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.adafactor_rule.factor_rules import HParamMap
from t5x_lite.optimizers.base import scalars
from t5x_lite.types import Array, LogicalAxes, Params, PyTree

OWNER = 'scaled_adam'

# Label of the parameters without another label.
DEFAULT_LABEL = 'default'

_POSITIVE = checks.number(above=0)
_PERIOD = checks.number(at_least=1, integer=True)
_BOOL = checks.instance(bool, 'True or False')
_BETAS = checks.Expectation(
  'two numbers, 0 < betas[0] <= betas[1] < 1',
  lambda betas: (
    isinstance(betas, (list, tuple))
    and len(betas) == 2
    and all(map(checks.number(above=0, below=1).holds, betas))
    and betas[0] <= betas[1]
  ),
)
_NOT_NEGATIVE = checks.number(at_least=0)
_OPTIONS = dict(
  betas=_BETAS,
  clipping_scale=_POSITIVE.or_none(),
  scalar_lr_scale=_NOT_NEGATIVE,
  eps=_POSITIVE,
  param_max_rms=checks.number(above=0, finite=False),
  scalar_max=checks.number(above=0, finite=False),
  size_update_period=_PERIOD,
  clipping_update_period=_PERIOD,
  show_dominant_parameters=_BOOL,
  clip_scale_gradient_only=_BOOL,
)
_PARAM_LABELS = checks.Expectation(
  'pairs (regular expression, label), a tree of labels, or a function from the parameters to such a tree',
  lambda labels: callable(labels) or isinstance(labels, Iterable) and not isinstance(labels, str),
).or_none()
_GROUP_OPTIONS = checks.Expectation(
  'a dict from labels without "/" to dicts of options',
  lambda groups: (
    isinstance(groups, Mapping)
    and all(
      isinstance(label, str) and label and '/' not in label and isinstance(options, Mapping)
      for label, options in groups.items()
    )
  ),
).or_none()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOptions:
  """Options of one group of parameters, see `optimizers.scaled_adam`.

  `learning_rate` is None if the group has that of the optimizer.
  """

  learning_rate: Any = None
  clipping_scale: float | None = None
  betas: tuple[float, float] = (0.9, 0.98)
  scalar_lr_scale: float = 0.1
  eps: float = 1e-8
  param_min_rms: float = 1e-5
  param_max_rms: float = 3.0
  scalar_max: float = 10.0
  size_update_period: int = 4
  clipping_update_period: int = 100
  show_dominant_parameters: bool = True
  clip_scale_gradient_only: bool = False

  def __post_init__(self):
    scalars.check_learning_rate(self.learning_rate, OWNER)
    checks.check(
      OWNER,
      vars(self),
      **_OPTIONS,
      param_min_rms=checks.Expectation(
        f'a number >= 0, at most param_max_rms, {self.param_max_rms}',
        lambda rms: _NOT_NEGATIVE.holds(rms) and rms <= self.param_max_rms,
      ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
  """An array of a group, which consists of units: one per index of its batched dims, or one without such dims.

  The array is a parameter, or those of several layers, stacked in dim 0 (see `layer_stacks`), which is batched.

  Attributes:
    index: index among all arrays, in the order in which JAX flattens the tree.
    shape: shape of the array.
    batch_dims: dims whose indices count separate parameters.
    parameters: index of the parameter, or of that of each layer, in the order in which JAX flattens the tree with a
      subtree per layer.
  """

  index: int
  shape: tuple[int, ...]
  batch_dims: tuple[int, ...]
  parameters: tuple[int, ...]

  @property
  def reduced_dims(self) -> tuple[int, ...]:
    """Dims of a unit."""
    return tuple(dim for dim in range(len(self.shape)) if dim not in self.batch_dims)

  @property
  def unit_size(self) -> int:
    """Number of elements of a unit."""
    return math.prod(self.shape[dim] for dim in self.reduced_dims)

  @property
  def num_units(self) -> int:
    """Number of units."""
    return math.prod(self.shape[dim] for dim in self.batch_dims)

  @property
  def parameter_of_unit(self) -> np.ndarray:
    """Int [num_units]: out of `parameters`."""
    return np.repeat(np.array(self.parameters, np.int32), self.num_units // len(self.parameters))

  @property
  def layer_of_unit(self) -> np.ndarray:
    """Int [num_units]: index in the batched dims of a unit's parameter; -1 without such dims."""
    num_layers = self.num_units // len(self.parameters)
    has_batch_dims = len(self.batch_dims) > (len(self.parameters) > 1)
    return np.tile(
      np.arange(num_layers) if has_batch_dims else np.full([num_layers], -1), len(self.parameters)
    )

  @property
  def is_scalar(self) -> bool:
    """True if a unit is a single number."""
    return self.unit_size == 1

  @property
  def broadcast_shape(self) -> tuple[int, ...]:
    """Shape in which one number per unit broadcasts to the parameter."""
    if not self.batch_dims:
      return ()
    return tuple(size if dim in self.batch_dims else 1 for dim, size in enumerate(self.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPlan:
  """A group and its parameters.

  Vectors with one number per unit [U] have the order of the parameters in the tree with a subtree per layer, so that
  they are the same whether or not layers are stacked.

  Attributes:
    label: label of the group.
    options: options of the group.
    members: arrays of the group, in their order.
  """

  label: str
  options: GroupOptions
  members: tuple[Member, ...]

  @property
  def num_units(self) -> int:
    """Number of units of all members."""
    return sum(member.num_units for member in self.members)

  def join(self, numbers: Sequence[Array]) -> Array:
    """Return a vector [U] of the numbers [num_units] of each member."""
    if numbers:
      joined = jnp.concatenate(numbers)
    else:
      joined = jnp.zeros([0], jnp.float32)
    if self._is_in_order:
      return joined
    return joined[self._order]

  def split(self, numbers_U: Array) -> list[Array]:
    """Return the numbers [num_units] of each member, the inverse of `join`."""
    if self._is_in_order:
      ordered = numbers_U
    else:
      ordered = numbers_U[np.argsort(self._order)]
    return jnp.split(ordered, np.cumsum([member.num_units for member in self.members])[:-1])

  def constants(self, value_of: Callable[[Member], Any], dtype: Any) -> np.ndarray:
    """Return <dtype>[U], given a function from a member to a number, or to an array [num_units]."""
    values = [np.broadcast_to(value_of(member), [member.num_units]) for member in self.members]
    return np.concatenate([np.zeros([0]), *values]).astype(dtype)[self._order]

  @functools.cached_property
  def _order(self) -> np.ndarray:
    """Int [U]: index of each unit in the concatenated units of the members."""
    numbers = [number for member in self.members for number in member.parameter_of_unit]
    return np.argsort(np.array(numbers, np.int32), kind='stable')

  @property
  def _is_in_order(self) -> bool:
    return bool(np.all(self._order == np.arange(self.num_units)))


class Groups:
  """Groups of an optimizer: their options, and the assignment of parameters.

  Attributes:
    options: label to options, `DEFAULT_LABEL` first.
  """

  def __init__(
    self,
    defaults: GroupOptions,
    param_labels: Any,
    group_options: Mapping[str, Mapping[str, Any]] | None,
  ):
    """Check the options of all groups.

    Args:
      defaults: options of the optimizer.
      param_labels: see `optimizers.scaled_adam`.
      group_options: see `optimizers.scaled_adam`.

    Raises:
      ConfigError: an invalid option, or labels without effect.
    """
    checks.check(OWNER, locals(), param_labels=_PARAM_LABELS, group_options=_GROUP_OPTIONS)
    self.options = {DEFAULT_LABEL: defaults}
    self._labels = param_labels
    self._patterns: dict[str, str] = {}
    for label, options in (group_options or {}).items():
      self.options[label] = _override(defaults, label, options)
    if param_labels is None:
      if group_options:
        raise ConfigError(
          f'`{OWNER}.group_options` has no effect without param_labels. Assign parameters to '
          f'{sorted(group_options)}, for instance by param_labels=((regular expression, label), ...).'
        )
    elif not callable(param_labels) and not isinstance(param_labels, Mapping):
      self._set_patterns(param_labels)

  def _set_patterns(self, pairs: Any) -> None:
    """Set the labels from pairs (regular expression, label)."""
    pairs = tuple(pairs)
    self._labels = HParamMap((*pairs, ('', DEFAULT_LABEL)))
    for pattern, label in pairs:
      self._check_label(label, f'the expression {pattern!r}')
      self._patterns.setdefault(label, pattern)
    for label in self.options:
      if label != DEFAULT_LABEL and label not in self._patterns:
        raise ConfigError(
          f'`{OWNER}.group_options` has the label {label!r}, which param_labels does not have.'
          f'{did_you_mean(label, self._patterns)}'
        )

  def _check_label(self, label: Any, where: str) -> None:
    if label not in self.options:
      raise ConfigError(
        f'{OWNER}: {where} has the label {label!r}, which is not in group_options.'
        f'{did_you_mean(str(label), self.options)} Add {{{label!r}: {{}}}} for a group with the default options.'
      )

  def labels_of(self, params: Params, paths: Sequence[str]) -> list[str]:
    """Return the label of each parameter.

    Args:
      params: the tree of parameters, or of their shapes, with a subtree per layer.
      paths: '/'-joined paths of its leaves, in their order.

    Raises:
      ConfigError: a parameter without a label, an unknown label, or an unused label.
    """
    if self._labels is None:
      return [DEFAULT_LABEL] * len(paths)
    if isinstance(self._labels, HParamMap):
      labels = [self._labels[path] for path in paths]
      for label, pattern in self._patterns.items():
        if paths and label not in labels:
          raise ConfigError(
            f'{OWNER}: no parameter has the label {label!r}: {pattern!r} is not the first match of any path such as '
            f'{paths[0]!r}.'
          )
      return labels
    if callable(self._labels):
      tree = self._labels(params)
    else:
      tree = self._labels
    labels = _labels_by_path(tree, paths, all_used=not callable(self._labels))
    for path, label in zip(paths, labels, strict=True):
      self._check_label(label, f'the parameter {path!r}')
    return labels

  def label_of(self, params: Params, path: str) -> str:
    """Return the label of the parameter at `path` of a tree that `labels_of` accepts."""
    if self._labels is None:
      return DEFAULT_LABEL
    if isinstance(self._labels, HParamMap):
      return self._labels[path]
    if callable(self._labels):
      tree = self._labels(params)
    else:
      tree = self._labels
    return _labels_by_path(tree, [path], all_used=False)[0]


class BatchDims:
  """Batched dims of parameters: dims whose indices count separate parameters."""

  def __init__(
    self,
    batch_axes: Sequence[str],
    batch_dims: Sequence[tuple[str, Any]],
    param_logical_axes: LogicalAxes | None = None,
  ):
    """Check the options.

    Args:
      batch_axes: see `optimizers.scaled_adam`.
      batch_dims: see `optimizers.scaled_adam`.
      param_logical_axes: logical axes of the parameters; if None, `batch_axes` has no effect.

    Raises:
      ConfigError: an option that is not a tuple or list, or an invalid regular expression.
    """
    checks.check(
      OWNER,
      locals(),
      batch_axes=checks.instance((tuple, list), 'a tuple of names'),
      batch_dims=checks.instance((tuple, list), 'a tuple of (regular expression, dim) pairs'),
    )
    self._rules = HParamMap((*batch_dims, ('', None)))
    self._dims_by_path = {
      path: tuple(dim for dim, name in enumerate(axes) if name in batch_axes)
      for path, axes in tree_utils.named_leaves(
        {} if param_logical_axes is None else param_logical_axes
      )
    }

  def of(self, path: str, num_dims: int) -> tuple[int, ...]:
    """Return the batched dims of the parameter at `path`, in ascending order."""
    dims = self._rules[path]
    if dims is None:
      return self._dims_by_path.get(path, ())
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    for dim in dims:
      if not isinstance(dim, int) or not -num_dims <= dim < num_dims:
        raise checks.invalid(
          OWNER, 'batch_dims', f'a dim out of the {num_dims} dims of {path!r}', dim
        )
    return tuple(sorted({dim % num_dims for dim in dims}))


def make_plans(params: Params, groups: Groups, batch_dims: BatchDims) -> list[GroupPlan]:
  """Return the groups with their parameters.

  Args:
    params: parameters, arrays or shapes. Stacked layers must have equal labels and batched dims.
    groups: the groups.
    batch_dims: batched dims of the parameters.

  Returns:
    A plan for each group, also for groups without parameters.
  """
  named = list(tree_utils.named_leaves(params))
  paths, parameters_of = layer_stacks.single_paths([path for path, _ in named])
  single_params = params
  if len(paths) != len(named):
    single_params = layer_stacks.single_shapes(params)
  labels = groups.labels_of(single_params, paths)
  members = {label: [] for label in groups.options}
  for index, ((path, param), parameters) in enumerate(zip(named, parameters_of, strict=True)):
    first = parameters[0]  # stacked layers have its options, by the `stacking_key`
    is_stacked = layer_stacks.is_stacked(path)
    dims = batch_dims.of(paths[first], param.ndim - is_stacked)
    if is_stacked:
      dims = (0, *(dim + 1 for dim in dims))
    member = Member(index=index, shape=tuple(param.shape), batch_dims=dims, parameters=parameters)
    members[labels[first]].append(member)
  return [
    GroupPlan(label=label, options=options, members=tuple(members[label]))
    for label, options in groups.options.items()
  ]


def _override(defaults: GroupOptions, label: Any, options: Any) -> GroupOptions:
  """Return the options of the group `label`."""
  names = [field.name for field in dataclasses.fields(GroupOptions)]
  for name in options:
    if name not in names:
      raise ConfigError(
        f'{OWNER}: group {label!r} has no option {name!r}.{did_you_mean(str(name), names)}'
      )
  return dataclasses.replace(defaults, **options)


def _labels_by_path(tree: PyTree, paths: Sequence[str], all_used: bool) -> list[Any]:
  """Return the label at each path of a tree of labels, in which a label applies to all parameters below it."""
  by_path = dict(tree_utils.named_leaves(tree, is_leaf=lambda node: isinstance(node, str)))
  labels = []
  used = set()
  for path in paths:
    prefix = path
    while prefix and prefix not in by_path:
      prefix = prefix.rpartition('/')[0]
    labels.append(by_path.get(prefix))
    used.add(prefix)
  missing = [path for path, label in zip(paths, labels, strict=True) if label is None]
  if missing:
    raise ConfigError(
      f'{OWNER}: param_labels has no label for the parameter {missing[0]!r}.'
      f'{did_you_mean(missing[0], by_path)}'
    )
  unused = sorted(set(by_path) - used)
  if unused and all_used and paths:
    raise ConfigError(
      f'{OWNER}: param_labels has a label without parameter at {unused[0]!r}.'
      f'{did_you_mean(unused[0], paths)}'
    )
  return labels
