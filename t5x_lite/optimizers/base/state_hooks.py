"""What the states of optax transformations have to say, by state class, wherever in an optimizer's state they stand.

An optax state is a nest of named tuples, and the interesting one may be deep inside: in a chain, behind a mask, in one
part of a partition. A class registers here once what it offers, and every optimizer that holds such a state has it:

* metrics of the last update, with lines for the log made of their values;
* the parameters to evaluate with, where those are not the trained ones;
* that the trainer cannot make its gradients;
* the count at which it takes the schedule of its learning rate.
"""

from collections.abc import Callable, Mapping
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from t5x_lite.errors import ConfigError
from t5x_lite.types import Params, PyTree

# From a state to scalar arrays by name.
StateMetricsFn = Callable[[Any], Mapping[str, jax.Array]]
# From the values of those metrics, by the same names, to lines for the log.
StateReportFn = Callable[[Mapping[str, float]], list[str]]
# From (state, trained parameters) to the parameters to evaluate with.
EvalParamsFn = Callable[[Any, Params], Params]

_NUMBERED = re.compile(r'(\d+)/(.+)')


@dataclasses.dataclass(frozen=True)
class _Hooks:
  """What one state class offers; None for what it does not."""

  metrics_fn: StateMetricsFn | None = None
  report_fn: StateReportFn | None = None
  eval_params_fn: EvalParamsFn | None = None
  trainer_refusal: str | None = None
  schedule_count_fn: Callable[[Any], jax.Array] | None = None


_HOOKS: dict[type, _Hooks] = {}


def _register(state_class: type, **hooks: Any) -> None:
  if not isinstance(state_class, type):
    raise ConfigError(f'Got {state_class!r} of type {type(state_class).__name__}; expected the class of a state.')
  for name, hook in hooks.items():
    if hook is not None and not isinstance(hook, str) and not callable(hook):
      raise ConfigError(f'{name} of {state_class.__name__} is {hook!r}; expected a function.')
  _HOOKS[state_class] = dataclasses.replace(_HOOKS.get(state_class, _Hooks()), **hooks)
  for other in _HOOKS:
    # A module that is loaded anew makes the class anew. States of the old one keep what they need, but log no more.
    if other is not state_class and _full_name(other) == _full_name(state_class):
      _HOOKS[other] = dataclasses.replace(_HOOKS[other], report_fn=None)


def _full_name(state_class: type) -> str:
  return f'{state_class.__module__}.{state_class.__qualname__}'


def register_state_metrics(
    state_class: type, metrics_fn: StateMetricsFn, *, report: StateReportFn | None = None) -> None:
  """Has the trainer report metrics of every state of a class, as `optimizer/<name>`; a later call replaces an earlier.

  Where an optimizer holds several states that have metrics, their names are preceded by a number from 0 in the order
  of the state's leaves, `optimizer/0/<name>`, `optimizer/1/<name>`.

  Args:
    state_class: the class of the state.
    metrics_fn: from a state to scalar arrays by name. It is traced in every train step, so it had better be cheap.
    report: from the values of those metrics on the host, by name, to lines for the log. It is called when a summary is
      written, and is given the metrics of one state at a time, perhaps of one of another class: it returns lines for
      the names that it knows, and none if they are missing.

  >>> from typing import NamedTuple
  >>> class CountState(NamedTuple):
  ...   count: Any
  >>> register_state_metrics(CountState, lambda state: {'count': state.count},
  ...                        report=lambda values: [f"count {values['count']:g}"] if 'count' in values else [])
  """
  _register(state_class, metrics_fn=metrics_fn, report_fn=report)


def register_eval_params(state_class: type, eval_params_fn: EvalParamsFn) -> None:
  """Has evaluation, inference and export use other parameters than the trained ones.

  Args:
    state_class: the class of the state that holds what is needed.
    eval_params_fn: from (state, trained parameters) to the parameters to evaluate with, of the same structure, shapes
      and dtypes. Parts of the parameters may be masked out of the state (`optax.MaskedNode`): those stay as they are.
  """
  _register(state_class, eval_params_fn=eval_params_fn)


def register_schedule_count(state_class: type, schedule_count_fn: Callable[[Any], jax.Array]) -> None:
  """Says at which count an update takes the schedule of its learning rate, where the state counts for itself.

  Args:
    state_class: the class of the state.
    schedule_count_fn: from a state to the count, an int32 scalar, at which the next update takes it.
  """
  _register(state_class, schedule_count_fn=schedule_count_fn)


def _states(param_states: PyTree) -> list[tuple[Any, _Hooks]]:
  """Returns the states that have hooks, outer ones before those inside them."""
  found = []

  def visit(node: PyTree) -> None:
    below = jax.tree.leaves(node, is_leaf=lambda child: child is not node and type(child) in _HOOKS)
    for child in below:
      if type(child) in _HOOKS:
        found.append((child, _HOOKS[type(child)]))
        visit(child)

  # In a tuple, so that the top itself is a child.
  visit((param_states,))
  return found


def metrics_of(param_states: PyTree) -> dict[str, jax.Array]:
  """Returns the metrics of all states in `param_states`; see `register_state_metrics`."""
  each = [dict(hooks.metrics_fn(state)) for state, hooks in _states(param_states) if hooks.metrics_fn is not None]
  if len(each) == 1:
    return each[0]
  return {f'{number}/{name}': value for number, metrics in enumerate(each) for name, value in metrics.items()}


def report_of(values: Mapping[str, float]) -> list[str]:
  """Returns the log lines of the values of `metrics_of`."""
  groups: dict[str, dict[str, float]] = {}
  for name, value in values.items():
    match = _NUMBERED.fullmatch(name)
    number, bare = match.groups() if match else ('', name)
    groups.setdefault(number, {})[bare] = value
  lines = []
  for number, group in groups.items():
    for hooks in _HOOKS.values():
      if hooks.report_fn is not None:
        lines += [f'{number}: {line}' if number else line for line in hooks.report_fn(group)]
  return lines


def eval_params_of(params: Params, param_states: PyTree) -> Params:
  """Returns the parameters to evaluate with; `params` itself if no state in `param_states` has others."""
  for state, hooks in _states(param_states):
    if hooks.eval_params_fn is not None:
      params = hooks.eval_params_fn(state, params)
  return params


def schedule_count_of(param_states: PyTree) -> jax.Array | None:
  """Returns the count at which the next update takes the schedule of its learning rate; None if no state keeps one.

  It is not always the step: a state that begins anew where the parameters do not begins its schedule anew too.
  """
  counts = (hooks.schedule_count_fn(state) for state, hooks in _states(param_states)
            if hooks.schedule_count_fn is not None)
  return next(counts, None)


def trainer_refusal_of(param_states: PyTree) -> str | None:
  """Returns why the trainer cannot train with these states, None if it can."""
  if _is_plateau_alone(param_states):
    return ('reduce_on_plateau only scales the updates of another optimizer, and by itself adds the gradients to the '
            'parameters. Put it last in a chain, optimizers.chain([optimizers.adam(), optimizers.reduce_on_plateau()])')
  return next((hooks.trainer_refusal for _, hooks in _states(param_states) if hooks.trainer_refusal), None)


def _is_plateau_alone(param_states: PyTree) -> bool:
  """Whether there is nothing but `reduce_on_plateau`, by itself or as all of a chain."""
  if type(param_states) is tuple:
    return bool(param_states) and all(map(_is_plateau_alone, param_states))
  return isinstance(param_states, optax.contrib.ReduceLROnPlateauState)


def _schedule_free_average(state: optax.contrib.ScheduleFreeState, params: Params) -> Params:
  """Returns the average x of Schedule-Free learning (Defazio et al. 2024, arXiv:2405.15682, equation 2).

  Gradients are taken at y = (1 - b1) z + b1 x, and y is what is trained; hence x = (y - (1 - b1) z) / b1.
  """

  def average(z, y):
    if isinstance(z, optax.MaskedNode):
      return y
    x = (y.astype(z.dtype) - (1 - state.b1) * z) / state.b1
    return x.astype(y.dtype)

  return jax.tree.map(average, state.z, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


def _params_between_perturbations(state: optax.contrib.SAMState, params: Params) -> Params:
  """Returns the parameters at which a round of `sam` began: within one, the trained ones are perturbed."""
  if state.cache is None:  # opaque_mode: every update is a whole round.
    return params

  def choose(cached, param):
    if isinstance(cached, optax.MaskedNode):
      return param
    return jnp.where(state.steps_since_sync == 0, param, cached).astype(param.dtype)

  return jax.tree.map(choose, state.cache, params, is_leaf=lambda node: isinstance(node, optax.MaskedNode))


for _state_class in (
    optax.ScaleByScheduleState, optax.contrib.DAdaptAdamWState, optax.contrib.MadgradState, optax.contrib.MomoState,
    optax.contrib.MomoAdamState, optax.contrib.ProdigyState):
  register_schedule_count(_state_class, lambda state: state.count)
register_schedule_count(optax.contrib.ScheduleFreeState, lambda state: state.step_count)
register_eval_params(optax.contrib.ScheduleFreeState, _schedule_free_average)
register_eval_params(optax.contrib.SAMState, _params_between_perturbations)
_register(
    optax.contrib.DifferentiallyPrivateAggregateState,
    trainer_refusal='differentially private aggregation (dpsgd) clips the gradient of each example by itself, and the '
    'trainer makes one gradient of the whole batch. Choose another optimizer, or write a training loop that takes '
    'per-example gradients (jax.vmap of jax.grad) and hands them to apply_gradient with the examples in dim 0')
_register(
    optax.LookaheadState,
    trainer_refusal='lookahead takes a pair of parameter trees (optax.LookaheadParams), and a model has one. Choose '
    'another optimizer, schedule_free for an average of the iterates, or write a training loop that keeps the pair')
