"""Several optimizers at once, each for its part of the parameters; what none of them selects stays as it is.

A part sees nested plain dicts with the parameters that its traversal selects, under their own paths, and nothing of the
others. So any optimizer serves as a part, and its state is what it would be for a model of those parameters alone.

In memory the state is the tuple of the parts' states. The selection stands beside it as static data: it is made once,
from the parameters (`parts`), and holds for whatever takes the arrays' place later (shapes, axes, shardings).
How it is saved is said in `state_dict`.
"""

from collections.abc import Mapping, Sequence
import copy
import dataclasses
import logging
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.axes import names as _axes
from t5x_lite.optimizers.base import definition, state_dicts
from t5x_lite.optimizers.multi import (
    parts as _multi_parts,
    state_dict as _multi_state_dict,
    paths as _paths,
)
from t5x_lite.types import LogicalAxes, Params

_logger = logging.getLogger(__name__)


@struct.dataclass
class MultiOptimizerState:
  """What a `MultiOptimizer` keeps.

  Attributes:
    parts: the `param_states` of each part.
    paths: the '/'-joined paths of the parameters that each part trains; static.
  """

  parts: tuple[Any, ...]
  paths: tuple[tuple[str, ...], ...] = struct.field(pytree_node=False)


class MultiOptimizer(definition.OptimizerDef):
  """Trains parts of the parameters with an optimizer each, and freezes the rest.

  `learning_rate` of an update goes to the parts that have none of their own. Where every part has one, it replaces the
  rates of those that let theirs be replaced, as Adafactor does. So the trainer's schedule and parts that schedule
  themselves go together, and no rate that was configured is without effect.

  Options that look at all gradients together, such as clipping by the global norm, look at those of their part.

  Attributes:
    traversals: what selects the parameters of each part.
    sub_optimizers: the optimizer of each part.
    part_names: the names of the parts, by default '0', '1', ...

  >>> import optax
  >>> from t5x_lite.optimizers import Adafactor, OptaxWrapper
  >>> optimizer_def = MultiOptimizer([('kernel$', Adafactor()), ('scale$', OptaxWrapper(optax.sgd(0.1)))])
  >>> params = {'kernel': jnp.ones([2, 3]), 'scale': jnp.ones([2]), 'frozen': jnp.ones([4])}
  >>> updated = optimizer_def.create(params).apply_gradient(jax.tree.map(jnp.ones_like, params), learning_rate=0.5)
  >>> [float(updated.target[name].ravel()[0]) for name in ('kernel', 'scale', 'frozen')]
  [0.5, 0.8999999761581421, 1.0]
  """

  @checks.checks_arguments('MultiOptimizer')
  def __init__(
      self, traversals_and_optimizers: Sequence[Any], *, part_names: Sequence[str] | None = None):
    """Configures the parts.

    Args:
      traversals_and_optimizers: pairs of (what selects the parameters, their optimizer). A selection is a `Traversal`,
        Flax's deprecated ones included; or a regular expression that may match anywhere in a parameter's path such as
        'encoder/layers_0/mlp/wi/kernel'; or a list of such expressions. No two may select the same parameter.
      part_names: names of the parts, for messages, metrics and state dicts.

    Raises:
      ConfigError: something else was given.
    """
    traversals, sub_optimizers = _multi_parts.read_pairs(traversals_and_optimizers)
    names = [str(index) for index in range(len(traversals))] if part_names is None else list(part_names)
    _multi_parts.check_names(names, len(traversals))
    self.traversals = tuple(traversals)
    self.sub_optimizers = tuple(sub_optimizers)
    self.part_names = tuple(names)
    self._param_axes: LogicalAxes | None = None  # that the parts do not know yet
    self._logged_paths: set[tuple[tuple[str, ...], ...]] = set()  # shared by the definitions made from this one

  @property
  def hyper_params(self) -> list[Any]:
    """The hyper-parameters of each part."""
    return [part.hyper_params for part in self.sub_optimizers]

  def __eq__(self, other: Any) -> bool:
    if self is other:
      return True
    return (type(other) is type(self) and self.part_names == other.part_names and self.traversals == other.traversals
            and self.sub_optimizers == other.sub_optimizers and self._param_axes == other._param_axes)

  def __hash__(self) -> int:
    return hash((type(self), self.part_names, self.sub_optimizers))

  # ---- What the trainer asks. ----

  @property
  def name(self) -> str:
    """The class with the names of the parts' optimizers."""
    return f'{type(self).__name__}({", ".join(part.name for part in self.sub_optimizers)})'

  @property
  def has_param_wise_state(self) -> bool:
    """Whether every part keeps its state parameter by parameter."""
    return all(part.has_param_wise_state for part in self.sub_optimizers)

  @property
  def uses_learning_rate(self) -> bool:
    """Whether a `learning_rate` passed to `apply_gradient` has an effect on any part."""
    return any(part.uses_learning_rate for part in self.sub_optimizers)

  @property
  def needs_learning_rate(self) -> bool:
    """Whether any part has no learning rate of its own."""
    return any(part.needs_learning_rate for part in self.sub_optimizers)

  @property
  def owns_learning_rate(self) -> bool:
    """Whether the parts have learning rates of their own and none is left to take another."""
    return not self.needs_learning_rate and any(part.owns_learning_rate for part in self.sub_optimizers)

  @property
  def own_learning_rates(self) -> dict[str, Any]:
    """The learning rates of the parts, each with the name of its part."""
    return {f'{part_name}/{name}': rate for part_name, part in zip(self.part_names, self.sub_optimizers, strict=True)
            for name, rate in part.own_learning_rates.items()}

  def learning_rates(self, state: definition.OptimizerState, *, is_passed: bool) -> dict[str, jax.Array]:
    """See base class and `own_learning_rates`."""
    return {
        f'{part.name}/{name}': value
        for part in self._parts(state) for name, value in part.optimizer_def.learning_rates(
            part.state, is_passed=is_passed and self._takes_learning_rate(part.optimizer_def)).items()
    }

  @property
  def extra_args(self) -> tuple[str, ...]:
    """What any part asks for."""
    return tuple(dict.fromkeys(name for part in self.sub_optimizers for name in part.extra_args))

  def metrics(self, state: definition.OptimizerState) -> dict[str, jax.Array]:
    """Returns the metrics of the parts as `<name of the part>/<metric>`."""
    return {
        f'{part.name}/{metric}': value
        for part in self._parts(state) for metric, value in part.optimizer_def.metrics(part.state).items()
    }

  def report(self, values: Mapping[str, float]) -> list[str]:
    """Returns the parts' lines for the log, each with the name of its part before it."""
    lines = []
    for name, part in zip(self.part_names, self.sub_optimizers, strict=True):
      prefix = f'{name}/'
      own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
      lines += [f'part {name}: {line}' for line in part.report(own)]
    return lines

  def eval_params(self, params: Params, state: definition.OptimizerState) -> Params:
    """Returns the parameters with those of each part as that part evaluates them."""
    leaves = _paths.by_path(params)
    new_leaves = dict(leaves)
    for part in self._parts(state):
      new_leaves |= _paths.by_path(part.optimizer_def.eval_params(_paths.subtree(leaves, part.paths), part.state))
    return _paths.like(params, new_leaves)

  def trainer_refusal(self, state: definition.OptimizerState) -> str | None:
    """Returns why the trainer cannot train with one of the parts, None where it can with all."""
    for part in self._parts(state):
      refusal = part.optimizer_def.trainer_refusal(part.state)
      if refusal is not None:
        return f'{part.description}: {refusal}'
    return None

  def update_hyper_params(self, **hyper_param_overrides: Any) -> list[Any]:
    """Returns the hyper-parameters of each part with overrides applied.

    Args:
      **hyper_param_overrides: new values by name, for every part that has a hyper-parameter of the name (of
        `learning_rate` the class says more); `hyper_params=[...]`, one entry per part, replaces all of them first.

    Raises:
      ConfigError: a name that no part has, a value that a part refuses, or `hyper_params` of another length.
    """
    hyper_params = hyper_param_overrides.pop('hyper_params', None)
    hyper_params = self.hyper_params if hyper_params is None else hyper_params
    if not isinstance(hyper_params, (list, tuple)) or len(hyper_params) != len(self.sub_optimizers):
      raise ConfigError(
          f'MultiOptimizer: hyper_params is {hyper_params!r}; expected a list with the hyper-parameters of each of the '
          f'{len(self.sub_optimizers)} parts.')
    known = [_hyper_param_names(part_hyper_params) for part_hyper_params in hyper_params]
    for name in hyper_param_overrides:
      if not any(name in names for names in known):
        raise ConfigError(
            f'MultiOptimizer: no part has a hyper-parameter {name!r} to override.'
            f'{did_you_mean(name, sorted(set().union(*known)))}')
    updated = []
    for part, names, part_hyper_params in zip(self.sub_optimizers, known, hyper_params, strict=True):
      names = names if self._takes_learning_rate(part) else names - {'learning_rate'}
      overrides = {name: value for name, value in hyper_param_overrides.items() if name in names}
      updated.append(part.update_hyper_params(hyper_params=part_hyper_params, **overrides))
    return updated

  # ---- State and update. ----

  def create(self, target: Params) -> definition.Optimizer:
    """Returns an `Optimizer` of the parameters `target` with a fresh state."""
    told = self if self._param_axes is None else self._for_param_axes(self._param_axes, target)
    return definition.Optimizer(optimizer_def=told, state=told.init_state(target), target=target)

  def init_state(self, params: Params) -> definition.OptimizerState:
    """Returns step 0 and the initial state of each part.

    Raises:
      ConfigError: a parameter that several parts select, or a part that selects none.
    """
    if self._param_axes is not None:
      return self._for_param_axes(self._param_axes, params).init_state(params)
    leaves = _paths.by_path(params)
    paths = self._select(tree_utils.unflatten_dict(leaves))
    _multi_state_dict.check_reserved_names(leaves)
    self._log_selection(leaves, paths)
    parts = tuple(
        part.init_state(_paths.subtree(leaves, part_paths)).param_states
        for part, part_paths in zip(self.sub_optimizers, paths, strict=True))
    return definition.OptimizerState(
        step=jnp.zeros([], jnp.int32), param_states=MultiOptimizerState(parts=parts, paths=paths))

  def apply_gradient(
      self, hyper_params: Sequence[Any], params: Params, state: definition.OptimizerState, grads: Params,
      **extra_args: Any) -> tuple[Params, definition.OptimizerState]:
    """Makes one update of every part; see `OptimizerDef.apply_gradient`.

    Gradients of parameters that no part trains are not looked at and may be None.
    """
    leaves, grad_leaves = _paths.by_path(params), _paths.by_path(grads)
    new_leaves, new_parts = dict(leaves), []
    for part, part_hyper_params in zip(self._parts(state), hyper_params, strict=True):
      if missing := [path for path in part.paths if path not in grad_leaves]:
        raise ConfigError(f'MultiOptimizer: there is no gradient of {missing[0]!r}, which {part.description} trains.')
      part_args = {key: extra_args[key] for key in part.optimizer_def.extra_args if key in extra_args}
      new_params, new_state = part.optimizer_def.apply_gradient(
          part_hyper_params, _paths.subtree(leaves, part.paths), part.state, _paths.subtree(grad_leaves, part.paths),
          **_paths.part_extra_args(part_args, params, leaves, part.paths))
      new_leaves |= _paths.by_path(new_params)
      new_parts.append(new_state.param_states)
    new_param_states = state.param_states.replace(parts=tuple(new_parts))
    return _paths.like(params, new_leaves), definition.OptimizerState(step=state.step + 1, param_states=new_param_states)

  # ---- Axes. ----

  def _for_param_axes(self, param_logical_axes: LogicalAxes, params: Params | None) -> 'MultiOptimizer':
    """Returns the definition whose parts know the axes of their parameters.

    If `params` is None, the parts are told as soon as it is known which parameters they train.
    """
    told = copy.copy(self)
    told._param_axes = param_logical_axes
    if params is not None:
      leaves = _paths.by_path(params)
      told.sub_optimizers = told._told_parts(self._select(tree_utils.unflatten_dict(leaves)), leaves)
      told._param_axes = None
    return told

  def _told_parts(
      self, paths: tuple[tuple[str, ...], ...],
      leaves: Mapping[str, Any] | None = None) -> tuple[definition.OptimizerDef, ...]:
    """Returns the parts, which train the parameters at `paths`, with the axes that they do not know yet."""
    if self._param_axes is None:
      return self.sub_optimizers
    axes = dict(tree_utils.named_leaves(self._param_axes))
    return tuple(
        part.with_param_axes(
            _paths.subtree(axes, part_paths), None if leaves is None else _paths.subtree(leaves, part_paths))
        for part, part_paths in zip(self.sub_optimizers, paths, strict=True))

  def derive_logical_axes(
      self, optimizer: definition.Optimizer, param_logical_axes: LogicalAxes) -> definition.Optimizer:
    """Derives the axes of each part's state from those of its parameters; see `OptimizerDef.derive_logical_axes`."""
    target_axes = _axes.match_logical_axes(optimizer.target, param_logical_axes)
    leaves, axes = _paths.by_path(optimizer.target), _paths.by_path(target_axes)
    parts = []
    for part in self._parts(optimizer.state):
      part_optimizer = definition.Optimizer(
          optimizer_def=part.optimizer_def, state=part.state, target=_paths.subtree(leaves, part.paths))
      part_axes = part.optimizer_def.derive_logical_axes(part_optimizer, _paths.subtree(axes, part.paths))
      parts.append(part_axes.state.param_states)
    state_axes = definition.OptimizerState(
        step=PartitionSpec(), param_states=optimizer.state.param_states.replace(parts=tuple(parts)))
    _axes.check_logical_axes(optimizer.state, state_axes, 'the state of MultiOptimizer')
    return optimizer.replace(state=state_axes, target=target_axes)

  # ---- State dicts. ----

  def state_dict(self, target: Params, state: definition.OptimizerState) -> dict[str, Any]:
    """Returns the serialisable form of parameters and state; see `OptimizerDef.state_dict`.

    A part that keeps its state parameter by parameter has it there, at the parameter's path, as in T5X; another has an
    entry 'optimizer:<name of the part>'. Parameters that no part trains have no entry in 'param_states'.
    """
    state_dict = super().state_dict(target, definition.OptimizerState(step=state.step, param_states={}))
    if param_states := _multi_state_dict.param_states_dict(self._parts(state), _paths.by_path(target)):
      state_dict['state']['param_states'] = param_states
    return state_dict

  def restore_state(
      self, opt_target: Params, opt_state: definition.OptimizerState,
      state_dict: Mapping[str, Any]) -> tuple[Params, definition.OptimizerState]:
    """Inverse of `state_dict`; see `OptimizerDef.restore_state`.

    Raises:
      CheckpointError: a value that is missing or has no place; the message names its path and its part.
    """
    target = state_dicts.restore_from_state_dict(opt_target, state_dict, 'target')
    step, parts = _multi_state_dict.restore_parts(
        self._parts(opt_state), _paths.by_path(opt_target), self.state_dict(opt_target, opt_state)['state'],
        state_dict.get('state', {}))
    return target, definition.OptimizerState(step=step, param_states=opt_state.param_states.replace(parts=parts))

  # ---- Helpers. ----

  def _parts(self, state: definition.OptimizerState) -> list[_multi_state_dict.Part]:
    """Returns the parts with their states, each with the common step."""
    param_states = state.param_states
    return [
        _multi_state_dict.Part(
            name=name, description=description, optimizer_def=optimizer_def,
            state=definition.OptimizerState(step=state.step, param_states=part_state), paths=paths)
        for name, description, optimizer_def, part_state, paths in zip(
            self.part_names, self._descriptions(), self._told_parts(param_states.paths), param_states.parts,
            param_states.paths, strict=True)
    ]

  def _takes_learning_rate(self, part: definition.OptimizerDef) -> bool:
    return part.needs_learning_rate if self.needs_learning_rate else part.uses_learning_rate

  def _descriptions(self) -> list[str]:
    """Returns for each part what a message calls it."""
    return [f'part {name!r} ({part.name} on {traversal!r})'
            for name, part, traversal in zip(self.part_names, self.sub_optimizers, self.traversals, strict=True)]

  def _select(self, tree: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of the parameters of each part, after checking that the parts are disjoint and not empty."""
    return _multi_parts.select(self.traversals, self._descriptions(), tree)

  def _log_selection(self, leaves: Mapping[str, Any], paths: tuple[tuple[str, ...], ...]) -> None:
    if paths in self._logged_paths:  # states are made, or traced, several times
      return
    self._logged_paths.add(paths)
    for described, part_paths in zip(self._descriptions(), paths, strict=True):
      _logger.info('MultiOptimizer: %s trains %d arrays.', described, len(part_paths))
    num_frozen = len(leaves) - sum(map(len, paths))
    if num_frozen:
      _logger.info('MultiOptimizer: no part trains the other %d arrays; they keep their values.', num_frozen)


def _hyper_param_names(hyper_params: Any) -> set[str]:
  """Returns the names of hyper-parameters; those of all parts for the list that a `MultiOptimizer` has."""
  if isinstance(hyper_params, (list, tuple)):
    return set().union(*map(_hyper_param_names, hyper_params))
  return {field.name for field in dataclasses.fields(hyper_params)} if dataclasses.is_dataclass(hyper_params) else set()
