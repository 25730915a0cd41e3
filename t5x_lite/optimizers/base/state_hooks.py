"""Hooks of optax states, registered by state class.

An optax state is a nest of named tuples, and a state with a hook may be deep inside: in a chain, behind a mask, in one
part of a partition. Every optimizer that contains a state of a registered class has its hooks:

* metrics of the last update, and lines for the log made from their values;
* the parameters for evaluation, if these are not the trained ones;
* the reason why the trainer does not support the state;
* the count at which the next update evaluates its learning-rate schedule;
* a field that a resumed run may have although its checkpoint lacks it, and the reverse;
* the parameters that updates compute from stored ones, so that changes between updates are lost;
* lines for the log about the arrays of a state.
"""

from collections.abc import Callable, Mapping
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from t5x_lite import tree_utils
from t5x_lite.types import Params, PyTree

# Function from a state to scalar arrays by name.
StateMetricsFn = Callable[[Any], Mapping[str, jax.Array]]
# Function from the values of these metrics, by the same names, to lines for the log.
StateReportFn = Callable[[Mapping[str, float]], list[str]]
# Function from (state, trained parameters) to the parameters for evaluation.
EvalParamsFn = Callable[[Any, Params], Params]

_NUMBERED = re.compile(r'(\d+)/(.+)')


@dataclasses.dataclass(frozen=True)
class _Hooks:
  """Hooks of one state class; None for those that it does not have."""

  metrics_fn: StateMetricsFn | None = None
  report_fn: StateReportFn | None = None
  eval_params_fn: EvalParamsFn | None = None
  unsupported_reason: str | None = None
  schedule_count_fn: Callable[[Any], jax.Array] | None = None
  optional_field: str = ''
  added_fn: Callable[[Any], PyTree] | None = None
  stored_params_fn: Callable[[Any], PyTree] | None = None
  stored_by: str = ''
  describe_fn: Callable[[Any], list[str]] | None = None


_HOOKS: dict[type, _Hooks] = {}


def _register(state_class: type, **hooks: Any) -> None:
  _HOOKS[state_class] = dataclasses.replace(_HOOKS.get(state_class, _Hooks()), **hooks)
  for other in _HOOKS:
    # A module that is loaded twice defines the class twice; only one of the classes writes to the log.
    if other is not state_class and _full_name(other) == _full_name(state_class):
      _HOOKS[other] = dataclasses.replace(_HOOKS[other], report_fn=None)


def _full_name(state_class: type) -> str:
  return f'{state_class.__module__}.{state_class.__qualname__}'


def register_state_metrics(
  state_class: type, metrics_fn: StateMetricsFn, *, report: StateReportFn | None = None
) -> None:
  """Register the metrics of a state class, which the trainer reports as `optimizer/<name>`.

  If an optimizer contains several states with metrics, a number from 0, in the order of the state's leaves, precedes
  the names: `optimizer/0/<name>`, `optimizer/1/<name>`. A later call for the same class replaces an earlier one.

  Args:
    state_class: class of the state.
    metrics_fn: from a state to scalar arrays by name. It is traced in every train step, so it should be cheap.
    report: from the values of these metrics on the host, by name, to lines for the log. It is called when a summary is
      written, with the metrics of one state at a time, possibly of another class: it returns lines for the names that
      it knows, and no lines if they are missing.

  >>> from typing import NamedTuple
  >>> class CountState(NamedTuple):
  ...   count: Any
  >>> register_state_metrics(CountState, lambda state: {'count': state.count},
  ...                        report=lambda values: [f"count {values['count']:g}"] if 'count' in values else [])
  """
  _register(state_class, metrics_fn=metrics_fn, report_fn=report)


def register_eval_params(state_class: type, eval_params_fn: EvalParamsFn) -> None:
  """Register the parameters that evaluation, inference and export use instead of the trained ones.

  Args:
    state_class: class of the state from which they are computed.
    eval_params_fn: from (state, trained parameters) to the parameters for evaluation, with the same structure, shapes
      and dtypes. Parameters that are masked in the state (`optax.MaskedNode`) must be returned unchanged.
  """
  _register(state_class, eval_params_fn=eval_params_fn)


def register_schedule_count(
  state_class: type, schedule_count_fn: Callable[[Any], jax.Array]
) -> None:
  """Register the count at which an update evaluates its learning-rate schedule, for a state with its own count.

  Args:
    state_class: class of the state.
    schedule_count_fn: from a state to the count for the next update, an int32 scalar.
  """
  _register(state_class, schedule_count_fn=schedule_count_fn)


def register_optional_field(
  state_class: type, field: str, added_fn: Callable[[Any], PyTree]
) -> None:
  """Register a field of a state that depends on an option which may change when a run is resumed.

  Args:
    state_class: class of the state, a named tuple whose field is None without the option.
    field: name of the field.
    added_fn: from the field's shapes to its values, NumPy arrays, in a run whose checkpoint lacks it.
  """
  _register(state_class, optional_field=field, added_fn=added_fn)


def register_description(state_class: type, describe_fn: Callable[[Any], list[str]]) -> None:
  """Register lines for the log about the arrays of a state, which is logged when their axes are derived.

  Args:
    state_class: class of the state.
    describe_fn: from a state, or its shapes, to lines. Arrays of layers and experts that are updated as arrays of their
      own have their dims in front, see `axes.units`.
  """
  _register(state_class, describe_fn=describe_fn)


def descriptions_of(param_states: PyTree) -> list[str]:
  """Return the lines about the arrays of all states in `param_states`, see `register_description`."""
  lines = []
  for state, hooks in _states(param_states):
    if hooks.describe_fn is not None:
      lines += hooks.describe_fn(state)
  return lines


def optional_states(param_states: PyTree) -> dict[str, dict[str, Any]]:
  """Return the optional fields of all states in `param_states`, see `register_optional_field`.

  Args:
    param_states: arrays or shapes of the states.

  Returns:
    Beginning of the names of a field's arrays to the values of an added field, NumPy arrays by name: {} if the state
    does not have the field.
  """

  def has_optional_field(node: Any) -> bool:
    return type(node) in _HOOKS and bool(_HOOKS[type(node)].optional_field)

  found = {}
  for name, state in tree_utils.named_leaves(param_states, has_optional_field):
    if not has_optional_field(state):
      continue
    hooks = _HOOKS[type(state)]
    assert hooks.added_fn is not None  # `register_optional_field` sets both
    start = f'{name}/{hooks.optional_field}/'
    value = getattr(state, hooks.optional_field)
    added = {}
    if value is not None:
      added = {
        f'{start}{leaf}': array for leaf, array in tree_utils.named_leaves(hooks.added_fn(value))
      }
    found[start] = added
  return found


def _states(param_states: PyTree) -> list[tuple[Any, _Hooks]]:
  """Return the states that have hooks, outer states before the states inside them."""
  found = []

  def visit(node: PyTree) -> None:
    below = jax.tree.leaves(node, is_leaf=lambda child: child is not node and type(child) in _HOOKS)
    for child in below:
      if type(child) in _HOOKS:
        found.append((child, _HOOKS[type(child)]))
        visit(child)

  # In a tuple, so that the top node is visited as a child.
  visit((param_states,))
  return found


def metrics_of(param_states: PyTree) -> dict[str, jax.Array]:
  """Return the metrics of all states in `param_states`: name to scalar array; see `register_state_metrics`."""
  each = []
  for state, hooks in _states(param_states):
    if hooks.metrics_fn is not None:
      each.append(dict(hooks.metrics_fn(state)))
  if len(each) == 1:
    return each[0]
  numbered = {}
  for number, metrics in enumerate(each):
    for name, value in metrics.items():
      numbered[f'{number}/{name}'] = value
  return numbered


def report_of(values: Mapping[str, float]) -> list[str]:
  """Return the log lines of the values of `metrics_of`."""
  groups: dict[str, dict[str, float]] = {}
  for name, value in values.items():
    number = ''
    match = _NUMBERED.fullmatch(name)
    if match:
      number, name = match.groups()
    groups.setdefault(number, {})[name] = value
  lines = []
  for number, group in groups.items():
    prefix = ''
    if number:
      prefix = f'{number}: '
    for hooks in _HOOKS.values():
      if hooks.report_fn is not None:
        lines += [f'{prefix}{line}' for line in hooks.report_fn(group)]
  return lines


def eval_params_of(params: Params, param_states: PyTree) -> Params:
  """Return the parameters for evaluation, shaped like `params`; `params` itself if no state has such a hook."""
  for state, hooks in _states(param_states):
    if hooks.eval_params_fn is not None:
      params = hooks.eval_params_fn(state, params)
  return params


def schedule_count_of(param_states: PyTree) -> jax.Array | None:
  """Return the count, an int32 scalar, at which the next update evaluates its schedule; None if no state has one.

  It differs from the step if the parameters were restored and the state was not: then the schedule restarts too.
  """
  counts = (
    hooks.schedule_count_fn(state)
    for state, hooks in _states(param_states)
    if hooks.schedule_count_fn is not None
  )
  return next(counts, None)


def stored_params_of(param_states: PyTree) -> dict[str, str]:
  """Return the parameters that updates compute from stored ones; see `OptimizerDef.stored_params`."""
  found = {}
  for state, hooks in _states(param_states):
    if hooks.stored_params_fn is not None:
      paths = (path for path, _ in tree_utils.named_leaves(hooks.stored_params_fn(state)))
      found |= dict.fromkeys(paths, hooks.stored_by)
  return found


def unsupported_reason_of(param_states: PyTree) -> str | None:
  """Return why the trainer cannot train with these states, None if it can."""
  if _is_only_plateau(param_states):
    return (
      'reduce_on_plateau only scales the updates of another optimizer; alone it adds the gradients to the '
      'parameters. Put it last in a chain, optimizers.chain([optimizers.adam(), optimizers.reduce_on_plateau()])'
    )
  return next(
    (hooks.unsupported_reason for _, hooks in _states(param_states) if hooks.unsupported_reason),
    None,
  )


def _is_only_plateau(param_states: PyTree) -> bool:
  """Return True if the transformation is only `reduce_on_plateau`, possibly in a chain."""
  if type(param_states) is tuple:
    return bool(param_states) and all(map(_is_only_plateau, param_states))
  return isinstance(param_states, optax.contrib.ReduceLROnPlateauState)


def _schedule_free_average(state: optax.contrib.ScheduleFreeState, params: Params) -> Params:
  """Return the average x of Schedule-Free learning (Defazio et al. 2024, arXiv:2405.15682, equation 2).

  The trained parameters are y = (1 - b1) z + b1 x, at which gradients are computed; hence x = (y - (1 - b1) z) / b1.
  """

  def average(z, y):
    if isinstance(z, optax.MaskedNode):
      return y
    x = (y.astype(z.dtype) - (1 - state.b1) * z) / state.b1
    return x.astype(y.dtype)

  return jax.tree.map(
    average, state.z, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
  )


def _params_between_perturbations(state: optax.contrib.SAMState, params: Params) -> Params:
  """Return the parameters from the start of a round of `sam`; within a round, the trained ones are perturbed."""
  if state.cache is None:  # opaque_mode: every update is a complete round.
    return params

  def choose(cached, param):
    if isinstance(cached, optax.MaskedNode):
      return param
    return jnp.where(state.steps_since_sync == 0, param, cached).astype(param.dtype)

  return jax.tree.map(
    choose, state.cache, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
  )


for _state_class in (
  optax.ScaleByScheduleState,
  optax.contrib.DAdaptAdamWState,
  optax.contrib.MadgradState,
  optax.contrib.MomoState,
  optax.contrib.MomoAdamState,
  optax.contrib.ProdigyState,
):
  register_schedule_count(_state_class, lambda state: state.count)
register_schedule_count(optax.contrib.ScheduleFreeState, lambda state: state.step_count)
register_eval_params(optax.contrib.ScheduleFreeState, _schedule_free_average)
register_eval_params(optax.contrib.SAMState, _params_between_perturbations)
_register(
  optax.contrib.COCOBState,
  stored_params_fn=lambda state: state.init_particles,
  stored_by='cocob',
)
_register(
  optax.contrib.MechanicState, stored_params_fn=lambda state: state.x0, stored_by='mechanize'
)
_register(
  optax.contrib.SAMState,
  stored_params_fn=lambda state: state.cache,  # None in opaque_mode
  stored_by='sam without opaque_mode',
)
_register(
  optax.contrib.DifferentiallyPrivateAggregateState,
  unsupported_reason='differentially private aggregation (dpsgd) clips the gradient of each example, and the trainer '
  'computes one gradient of the entire batch. Choose another optimizer, or write a training loop that passes '
  'per-example gradients (jax.vmap of jax.grad) to apply_gradient, with the examples in dim 0',
)
_register(
  optax.LookaheadState,
  unsupported_reason='lookahead trains a pair of parameter trees (optax.LookaheadParams), and a model has one. '
  'Choose another optimizer, such as schedule_free, which averages the iterates, or write a training loop that keeps '
  'the pair',
)
