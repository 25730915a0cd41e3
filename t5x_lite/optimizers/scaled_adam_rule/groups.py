"""What ScaledAdam knows of each parameter before it computes: its group, the group's options, the dims to be batched.

Groups are found by label, and labels by a function, by a tree, or by regular expressions over parameter paths. Dims to
be batched are those whose indices count separate parameters: the layers of a scanned stack, the experts of a layer.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
from typing import Any

from t5x_lite import tree_utils
from t5x_lite.checks import check_number
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.adafactor_rule.factor_rules import HParamMap
from t5x_lite.optimizers.base import definition
from t5x_lite.types import LogicalAxes, Params, PyTree

_OWNER = 'scaled_adam'

# Label of the parameters for which no other is given.
DEFAULT_LABEL = 'default'


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupOptions:
  """The options of one group of parameters; `optimizers.scaled_adam` explains them.

  `learning_rate` is None where the group takes that of the optimizer.
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
    definition.check_learning_rate(self.learning_rate, _OWNER)
    if isinstance(self.betas, str) or not isinstance(self.betas, Sequence) or len(self.betas) != 2:
      raise ConfigError(f'{_OWNER}: betas is {self.betas!r}; expected two numbers, for instance (0.9, 0.98).')
    for name, value in zip(('betas[0]', 'betas[1]'), self.betas, strict=True):
      check_number(_OWNER, name, value, above=0, below=1)
    if self.betas[0] > self.betas[1]:
      raise ConfigError(f'{_OWNER}: betas is {self.betas!r}; expected 0 < betas[0] <= betas[1] < 1.')
    check_number(_OWNER, 'clipping_scale', self.clipping_scale, above=0, below=math.inf, optional=True)
    check_number(_OWNER, 'scalar_lr_scale', self.scalar_lr_scale, at_least=0, below=math.inf)
    check_number(_OWNER, 'eps', self.eps, above=0, below=math.inf)
    check_number(_OWNER, 'param_min_rms', self.param_min_rms, at_least=0, below=math.inf)
    check_number(_OWNER, 'param_max_rms', self.param_max_rms, above=0)
    if self.param_min_rms > self.param_max_rms:
      raise ConfigError(
          f'{_OWNER}: param_min_rms is {self.param_min_rms}, above param_max_rms, {self.param_max_rms}; exchange them.')
    check_number(_OWNER, 'scalar_max', self.scalar_max, above=0)
    check_number(_OWNER, 'size_update_period', self.size_update_period, at_least=1, integer=True)
    check_number(_OWNER, 'clipping_update_period', self.clipping_update_period, at_least=1, integer=True)
    for name in ('show_dominant_parameters', 'clip_scale_gradient_only'):
      if not isinstance(getattr(self, name), bool):
        raise ConfigError(f'{_OWNER}: {name} is {getattr(self, name)!r}; expected True or False.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
  """A parameter of a group. What its batched dims count, or else the whole of it, is called a unit.

  Attributes:
    index: its number among all parameters, in the order in which JAX flattens the tree.
    shape: its shape.
    batch_dims: dims whose indices count separate parameters.
  """

  index: int
  shape: tuple[int, ...]
  batch_dims: tuple[int, ...]

  @property
  def reduced_dims(self) -> tuple[int, ...]:
    """The dims of a unit."""
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
  def is_scalar(self) -> bool:
    """Whether a unit is a single number, which has no size apart from its value."""
    return self.unit_size == 1

  @property
  def broadcast_shape(self) -> tuple[int, ...]:
    """Shape in which one number per unit meets the parameter: its own with the dims of a unit of size 1."""
    if not self.batch_dims:
      return ()
    return tuple(size if dim in self.batch_dims else 1 for dim, size in enumerate(self.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPlan:
  """A group and its parameters.

  Attributes:
    label: its name.
    options: its options.
    members: its parameters, in their order.
  """

  label: str
  options: GroupOptions
  members: tuple[Member, ...]

  @property
  def num_units(self) -> int:
    """Number of units of all members."""
    return sum(member.num_units for member in self.members)


class Groups:
  """The groups of an optimizer: their options, and which parameter belongs to which.

  Attributes:
    options: label to options, `DEFAULT_LABEL` first.
  """

  def __init__(
      self, defaults: GroupOptions, param_labels: Any, group_options: Mapping[str, Mapping[str, Any]] | None):
    """Checks the options of all groups; see `optimizers.scaled_adam` for the arguments."""
    self.options = {DEFAULT_LABEL: defaults}
    self._labels = param_labels
    self._patterns: dict[str, str] = {}
    if group_options is not None and not isinstance(group_options, Mapping):
      raise ConfigError(
          f'{_OWNER}: group_options is of type {type(group_options).__name__}; expected a dict from label to a dict of '
          'options.')
    for label, options in (group_options or {}).items():
      self.options[label] = _override(defaults, label, options)
    if param_labels is None:
      if len(self.options) > 1 or group_options:
        raise ConfigError(f'{_OWNER}: group_options without param_labels has no effect; say which parameters belong to '
                          f'{sorted(group_options)}, for instance param_labels=((regular expression, label), ...).')
    elif not callable(param_labels) and not isinstance(param_labels, Mapping):
      self._set_patterns(param_labels)

  def _set_patterns(self, pairs: Any) -> None:
    """Takes labels given as (regular expression, label) pairs."""
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
      raise ConfigError(
          f'{_OWNER}: param_labels is {pairs!r}; expected (regular expression, label) pairs, a tree of labels, or a '
          'function from the parameters to such a tree.')
    pairs = tuple(pairs)
    self._labels = HParamMap((*pairs, ('', DEFAULT_LABEL)))
    for pattern, label in pairs:
      self._check_label(label, f'the expression {pattern!r}')
      self._patterns.setdefault(label, pattern)
    for label in self.options:
      if label != DEFAULT_LABEL and label not in self._patterns:
        raise ConfigError(f'{_OWNER}: group_options has the label {label!r}, which no pair of param_labels gives.'
                          f'{did_you_mean(label, self._patterns)}')

  def _check_label(self, label: Any, where: str) -> None:
    if label not in self.options:
      raise ConfigError(
          f'{_OWNER}: {where} has the label {label!r}, which is not in group_options.'
          f'{did_you_mean(str(label), self.options)} A group without options of its own is {{{label!r}: {{}}}}.')

  def labels_of(self, params: Params, paths: Sequence[str]) -> list[str]:
    """Returns the label of each parameter.

    Args:
      params: the tree of parameters.
      paths: '/'-joined paths of its leaves, in their order.

    Raises:
      ConfigError: a parameter without a label, an unknown label, or a label or expression that applies to nothing.
    """
    if self._labels is None:
      return [DEFAULT_LABEL] * len(paths)
    if isinstance(self._labels, HParamMap):
      labels = [self._labels[path] for path in paths]
      for label, pattern in self._patterns.items():
        if paths and label not in labels:
          raise ConfigError(
              f'{_OWNER}: no parameter gets the label {label!r}; {pattern!r} was looked for in paths such as '
              f'{paths[0]!r}, and the first matching expression counts.')
      return labels
    tree = self._labels(params) if callable(self._labels) else self._labels
    labels = _labels_by_path(tree, paths, all_used=not callable(self._labels))
    for path, label in zip(paths, labels, strict=True):
      self._check_label(label, f'the parameter {path!r}')
    return labels


class BatchDims:
  """Finds the dims of a parameter whose indices count separate parameters."""

  def __init__(
      self, batch_axes: Sequence[str], batch_dims: Sequence[tuple[str, Any]],
      param_logical_axes: LogicalAxes | None = None):
    """Checks and keeps the options; see `optimizers.scaled_adam`. Without axes of the parameters no dim has a name."""
    for name, value in (('batch_axes', batch_axes), ('batch_dims', batch_dims)):
      if isinstance(value, str) or not isinstance(value, Sequence):
        form = 'names' if name == 'batch_axes' else '(regular expression, dim) pairs'
        raise ConfigError(f'{_OWNER}: {name} is {value!r}; expected a tuple of {form}.')
    self._rules = HParamMap((*batch_dims, ('', None)))
    self._dims_by_path = {
        path: tuple(dim for dim, name in enumerate(axes) if name in batch_axes)
        for path, axes in tree_utils.named_leaves({} if param_logical_axes is None else param_logical_axes)
    }

  def of(self, path: str, num_dims: int) -> tuple[int, ...]:
    """Returns the batched dims of the parameter at `path`, in ascending order."""
    dims = self._rules[path]
    if dims is None:
      return self._dims_by_path.get(path, ())
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    for dim in dims:
      if not isinstance(dim, int) or not -num_dims <= dim < num_dims:
        raise ConfigError(f'{_OWNER}: batch_dims gives {path!r} the dim {dim!r}, but it has {num_dims} dims.')
    return tuple(sorted({dim % num_dims for dim in dims}))


def make_plans(params: Params, groups: Groups, batch_dims: BatchDims) -> list[GroupPlan]:
  """Returns the groups with the parameters of each; a group may have none."""
  named = list(tree_utils.named_leaves(params))
  members = {label: [] for label in groups.options}
  for i, label in enumerate(groups.labels_of(params, [path for path, _ in named])):
    path, param = named[i]
    members[label].append(Member(index=i, shape=tuple(param.shape), batch_dims=batch_dims.of(path, param.ndim)))
  return [GroupPlan(label=label, options=options, members=tuple(members[label]))
          for label, options in groups.options.items()]


def _override(defaults: GroupOptions, label: Any, options: Any) -> GroupOptions:
  """Returns the options of the group `label`."""
  if not isinstance(label, str) or not label or '/' in label:
    raise ConfigError(f'{_OWNER}: group_options has the label {label!r}; expected a name without "/".')
  if not isinstance(options, Mapping):
    raise ConfigError(f'{_OWNER}: the options of group {label!r} are {options!r}; expected a dict from name to value.')
  names = [field.name for field in dataclasses.fields(GroupOptions)]
  for name in options:
    if name not in names:
      raise ConfigError(f'{_OWNER}: group {label!r} has no option {name!r}.{did_you_mean(str(name), names)}')
  return dataclasses.replace(defaults, **options)


def _labels_by_path(tree: PyTree, paths: Sequence[str], all_used: bool) -> list[Any]:
  """Returns the label at each path of a tree of labels, in which a label holds for all parameters below it."""
  by_path = dict(tree_utils.named_leaves(tree, is_leaf=lambda node: isinstance(node, str)))
  labels, used = [], set()
  for path in paths:
    parts = path.split('/')
    prefixes = ['/'.join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    found = next((prefix for prefix in prefixes if prefix in by_path), None)
    if found is None:
      raise ConfigError(f'{_OWNER}: param_labels has no label for the parameter {path!r}.{did_you_mean(path, by_path)}')
    labels.append(by_path[found])
    used.add(found)
  if all_used and paths and (unused := sorted(set(by_path) - used)):
    raise ConfigError(f'{_OWNER}: param_labels has a label at {unused[0]!r}, but no parameter there.'
                      f'{did_you_mean(unused[0], paths)}')
  return labels
