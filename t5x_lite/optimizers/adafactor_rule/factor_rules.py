"""Factor rules: the dims of a parameter that Adafactor factors.

Instead of a second moment per element, Adafactor keeps its means over the rows and over the columns of a matrix. A
parameter of a Transformer may not be a matrix: attention kernels may have a dim for heads, scanned layers have one for
layers. A *factor rule* gives each dim its role: `ROW` and `COLUMN` dims span the matrix, `BATCH` dims count separate
matrices, `NONE` dims are not factored.

Rules come from logical axis names (`standard_logical_factor_rules`), from parameter paths (`HParamMap`), or from the
sizes of the dims (`HEURISTIC_RULE`).
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import enum
import re
from typing import Any

import flax.core

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.layer_stacks import BATCH_AXES
from t5x_lite.types import PyTree


class FactorDim(enum.Enum):
  """Role of one dim of a parameter in the factorisation of its second moment."""

  # Not factored.
  NONE = None
  # One matrix per index: never averaged over.
  BATCH = 1
  ROW = 2
  COLUMN = 3


class HeuristicRule(enum.Enum):
  """The type of `HEURISTIC_RULE`."""

  token = 1


# Rule that factors the two dims of a matrix if both are large enough.
HEURISTIC_RULE = HeuristicRule.token
# Name of this rule for gin files, which cannot refer to constants.
HEURISTIC_NAME = 'heuristic'

# A role per dim, the heuristic, or None for "not factored".
FactorRule = tuple[FactorDim, ...] | HeuristicRule | None

_FACTOR_DIM_OF_NAME = {
  'row': FactorDim.ROW,
  'col': FactorDim.COLUMN,
  'column': FactorDim.COLUMN,
  'batch': FactorDim.BATCH,
  'none': FactorDim.NONE,
  'unfactorized': FactorDim.NONE,
}


class UnmatchedPathError(ConfigError, KeyError):
  """A parameter's path that no rule of an `HParamMap` matches."""

  def __str__(self) -> str:
    # KeyError quotes its message.
    return Exception.__str__(self)


def standard_logical_factor_rules() -> flax.core.FrozenDict[str, FactorDim]:
  """Return the roles of T5X's standard logical axes.

  The width of the model is the row, all dims to which a layer maps it are columns; layers, other stacks and experts are
  batch dims; the small matrices of adapters are not factored. T5X defines the names for experts separately, so that its
  optimizer files fail with sparse models.

  Returns:
    Role by logical axis name.
  """
  columns = (
    'vocab',
    'mlp',
    'expert_mlp',
    'heads',
    'kv',
    'joined_kv',
    'multiquery_heads',
    'kv_fused',
    'q_wi_fused',
    'o_wo_fused',
    'mlp_activations',
  )
  rules = dict.fromkeys(columns, FactorDim.COLUMN)
  rules |= {'embed': FactorDim.ROW}
  rules |= dict.fromkeys(BATCH_AXES, FactorDim.BATCH)
  rules |= dict.fromkeys(
    ('relpos_buckets', 'layer_norm_scale', 'unmodeled', 'lora_rank'), FactorDim.NONE
  )
  return flax.core.freeze(rules)


def factor_name_to_factordim(name: str | FactorDim) -> FactorDim:
  """Return the role with a name.

  Args:
    name: 'row', 'col' or 'column', 'batch', 'none' or 'unfactorized' in any case; or a `FactorDim`, which is returned.

  Raises:
    ConfigError: another name.

  >>> factor_name_to_factordim('Col')
  <FactorDim.COLUMN: 3>
  """
  if isinstance(name, FactorDim):
    return name
  if not isinstance(name, str) or name.lower() not in _FACTOR_DIM_OF_NAME:
    raise ConfigError(
      f'The role of a dim in a factorisation must be one of {", ".join(_FACTOR_DIM_OF_NAME)}, got '
      f'{name!r}.{did_you_mean(str(name), _FACTOR_DIM_OF_NAME)}'
    )
  return _FACTOR_DIM_OF_NAME[name.lower()]


class HParamMap:
  """Values by parameter path: an ordered list of pairs (regular expression, value), of which the first match applies.

  A path is the '/'-joined names from the root to the parameter, in which expressions are searched.

  >>> rules = HParamMap([('scale$', False), ('.*', True)])
  >>> rules['encoder/encoder_norm/scale'], rules['encoder/mlp/wi/kernel']
  (False, True)
  """

  def __init__(self, rules: Iterable[tuple[str, Any]]):
    self._rules = []
    for pattern, value in rules:
      try:
        self._rules.append((re.compile(pattern), value))
      except (re.error, TypeError) as error:
        raise checks.invalid(
          'HParamMap', 'rules', f'regular expressions ({error}) with values', pattern
        ) from error

  def __getitem__(self, path: str) -> Any:
    for pattern, value in self._rules:
      if pattern.search(path):
        return value
    shown = [pattern.pattern for pattern, _ in self._rules]
    raise UnmatchedPathError(
      f'No rule of the HParamMap matches the parameter {path!r}; its expressions are {shown}. Add a last rule for '
      "'.*'."
    )

  def __call__(self, params: PyTree) -> PyTree:
    """Return a tree like `params` with the value for its path at each leaf."""
    return tree_utils.map_with_names(lambda path, _: self[path], params)

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, HParamMap) and self._rules == other._rules

  def __hash__(self) -> int:
    # Values may be lists, which have no hash.
    return hash(tuple(pattern for pattern, _ in self._rules))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorPlan:
  """Factorisation of one parameter.

  Attributes:
    averaging_dims: dims over which root mean squares of the parameter and of its update are taken.
    row_dims: row dims; () if the second moment is not factored.
    col_dims: column dims; () if the second moment is not factored.
  """

  averaging_dims: tuple[int, ...]
  row_dims: tuple[int, ...] = ()
  col_dims: tuple[int, ...] = ()

  @property
  def is_factored(self) -> bool:
    """True if the second moment is kept as row and column means."""
    return bool(self.row_dims)

  def row_state_dims(self, rank: int) -> tuple[int, ...]:
    """Return the dims of the parameter that `v_row` has: all except the columns."""
    return tuple(dim for dim in range(rank) if dim not in self.col_dims)

  def col_state_dims(self, rank: int) -> tuple[int, ...]:
    """Return the dims of the parameter that `v_col` has: all except the rows."""
    return tuple(dim for dim in range(rank) if dim not in self.row_dims)


def factor_rule_of_axes(
  axes: Sequence[str | None], rules: Mapping[str, FactorDim], path: str
) -> tuple[FactorDim, ...]:
  """Return the factor rule of a parameter, given the logical names of its dims.

  A rule with rows but no columns, or with columns but no rows, cannot be factored: these dims become NONE.

  Args:
    axes: logical axis name of each dim; None means not factored.
    rules: role by logical axis name.
    path: path of the parameter, for error messages.

  Returns:
    One role per dim.

  Raises:
    ConfigError: a name without a role, or a rule with rows, columns and unfactored dims.
  """
  roles = []
  for name in axes:
    if name is not None and name not in rules:
      raise ConfigError(
        f'Adafactor has no factor rule for the logical axis {name!r} of the parameter {path!r} with axes '
        f'{tuple(axes)}.{did_you_mean(str(name), rules)} Add it to logical_factor_rules as row, column, batch or '
        'none.'
      )
    if name is None:
      roles.append(FactorDim.NONE)
    else:
      roles.append(rules[name])
  if FactorDim.ROW in roles and FactorDim.COLUMN in roles:
    if FactorDim.NONE in roles:
      raise ConfigError(
        f'Adafactor cannot factor the parameter {path!r} with the logical axes {tuple(axes)} and the roles '
        f'{[role.name for role in roles]}: with rows and columns there must not be unfactored dims. Make each of '
        'them row, column or batch.'
      )
    return tuple(roles)
  return tuple(role if role is FactorDim.BATCH else FactorDim.NONE for role in roles)


def plan_factorization(
  rule: Any, shape: Sequence[int], path: str, min_dim_size_to_factor: int
) -> FactorPlan:
  """Return the factorisation of one parameter.

  Matrices and vectors without BATCH dims are factored by size, independently of the rule: if both dims have at least
  `min_dim_size_to_factor` elements, the smaller dim (the first of equal ones) is the row. For all other parameters the
  rule applies, independently of the sizes.

  Args:
    rule: a sequence of roles or names of roles, one per dim; `HEURISTIC_RULE` or 'heuristic'; or None for not factored.
    shape: shape of the parameter.
    path: path of the parameter, for error messages.
    min_dim_size_to_factor: smallest size of a dim that the heuristic factors.

  Raises:
    ConfigError: an invalid rule, or the heuristic for more than two dims.
  """
  rank = len(shape)
  every_dim = tuple(range(rank))
  if rule is None:
    return FactorPlan(averaging_dims=every_dim)
  if rule is HEURISTIC_RULE or rule == HEURISTIC_NAME:
    if rank > 2:
      raise ConfigError(
        f'Adafactor needs an explicit factor rule for the parameter {path!r} of shape {tuple(shape)}, which has more '
        'than two dims. Give logical_factor_rules and the axes of the parameters (with_param_axes), a factor_map, or '
        'factored=False.'
      )
    roles: tuple[FactorDim, ...] = ()
  else:
    if not isinstance(rule, Sequence) or isinstance(rule, str) or len(rule) != rank:
      raise checks.invalid(
        'Adafactor',
        f'factor_map[{path!r}]',
        f'a role for each dim of {tuple(shape)}, HEURISTIC_RULE (in gin '
        f'{HEURISTIC_NAME!r}) or None',
        rule,
      )
    roles = tuple(factor_name_to_factordim(role) for role in rule)

  if FactorDim.BATCH not in roles and rank <= 2:
    return _plan_by_size(shape, min_dim_size_to_factor)
  averaging_dims = tuple(dim for dim in every_dim if roles[dim] is not FactorDim.BATCH)
  row_dims = tuple(dim for dim in every_dim if roles[dim] is FactorDim.ROW)
  col_dims = tuple(dim for dim in every_dim if roles[dim] is FactorDim.COLUMN)
  # The means of an array without elements are NaN.
  if not row_dims or not col_dims or 0 in shape:
    return FactorPlan(averaging_dims=averaging_dims)
  return FactorPlan(averaging_dims=averaging_dims, row_dims=row_dims, col_dims=col_dims)


def _plan_by_size(shape: Sequence[int], min_dim_size_to_factor: int) -> FactorPlan:
  every_dim = tuple(range(len(shape)))
  if len(shape) < 2 or min(shape) < min_dim_size_to_factor:
    return FactorPlan(averaging_dims=every_dim)
  row = 0
  column = 1
  if shape[0] > shape[1]:
    row = 1
    column = 0
  return FactorPlan(averaging_dims=every_dim, row_dims=(row,), col_dims=(column,))
