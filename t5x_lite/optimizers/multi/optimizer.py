"""Different optimizers for different parts of the parameters; parameters that no part selects are frozen.

A part gets nested plain dicts with the parameters that its traversal selects, at their paths, and no others. So any
optimizer can be a part, and its state is the same as for a model with only these parameters.

In memory the state is the tuple of the parts' states, with the selection as static data: `parts` computes it once from
the parameters, and it remains valid when shapes, axes or shardings replace the arrays. `state_dict` describes the saved
form.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
import copy
import dataclasses
import logging
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.axes import names as _axes
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.base import state_dicts
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.multi import parts as _multi_parts
from t5x_lite.types import LogicalAxes, Params

_logger = logging.getLogger(__name__)


@struct.dataclass
class MultiOptimizerState:
  """State of a `MultiOptimizer`.

  Attributes:
    parts: the `param_states` of each part.
    paths: the '/'-joined paths of the parameters that each part trains; static.
  """

  parts: tuple[Any, ...]
  paths: tuple[tuple[str, ...], ...] = struct.field(pytree_node=False)


class MultiOptimizer(definition.OptimizerDef):
  """Optimizer that trains each part of the parameters with another optimizer, and freezes all other parameters.

  The `learning_rate` of an update is used by the parts without a configured learning rate, so parts with and without
  one can be combined. If every part has a configured learning rate, `learning_rate` replaces those of the optimizers
  that allow it, such as Adafactor.

  Options that depend on all gradients, such as clipping by the global norm, use the gradients of their part.

  Attributes:
    traversals: selections of the parameters of each part.
    sub_optimizers: optimizer of each part.
    part_names: names of the parts, by default '0', '1', ...

  >>> import optax
  >>> from t5x_lite.optimizers import Adafactor, OptaxWrapper
  >>> optimizer_def = MultiOptimizer([('kernel$', Adafactor()), ('scale$', OptaxWrapper(optax.sgd(0.1)))])
  >>> params = {'kernel': jnp.ones([2, 3]), 'scale': jnp.ones([2]), 'frozen': jnp.ones([4])}
  >>> updated = optimizer_def.create(params).apply_gradient(jax.tree.map(jnp.ones_like, params), learning_rate=0.5)
  >>> [float(updated.target[name].ravel()[0]) for name in ('kernel', 'scale', 'frozen')]
  [0.5, 0.8999999761581421, 1.0]
  """

  ACCEPTS_STACKED_LAYERS = True

  @checks.checks_arguments('MultiOptimizer')
  def __init__(
    self, traversals_and_optimizers: Sequence[Any], *, part_names: Sequence[str] | None = None
  ):
    """Configure the parts.

    Args:
      traversals_and_optimizers: pairs (selection, optimizer). A selection is a `Traversal`, also a deprecated one of
        Flax; or a regular expression, searched in the path of each parameter, such as 'encoder/layers_0/mlp/wi/kernel';
        or a list of such expressions. The selections must be disjoint.
      part_names: names of the parts, for messages, metrics and state dicts.

    Raises:
      ConfigError: an invalid pair or name.
    """
    traversals, sub_optimizers = _multi_parts.read_pairs(traversals_and_optimizers)
    if part_names is None:
      names = [str(index) for index in range(len(traversals))]
    else:
      names = list(part_names)
    _multi_parts.check_names(names, len(traversals))
    self.traversals = tuple(traversals)
    self.sub_optimizers = tuple(sub_optimizers)
    self.part_names = tuple(names)
    self._param_axes: LogicalAxes | None = None  # not yet passed to the parts
    self._logged_paths: set[tuple[tuple[str, ...], ...]] = (
      set()
    )  # shared by the definitions made from this one

  @property
  def hyper_params(self) -> list[Any]:
    """Hyper-parameters of each part."""
    return [part.hyper_params for part in self.sub_optimizers]

  def __eq__(self, other: Any) -> bool:
    if self is other:
      return True
    return (
      type(other) is type(self)
      and self.part_names == other.part_names
      and self.traversals == other.traversals
      and self.sub_optimizers == other.sub_optimizers
      and self.update_options == other.update_options
      and self._param_axes == other._param_axes
    )

  def __hash__(self) -> int:
    return hash((type(self), self.part_names, self.sub_optimizers))

  # ---- Properties for the trainer. ----

  @property
  def name(self) -> str:
    """Name of the class with the names of the parts' optimizers."""
    return f'{type(self).__name__}({", ".join(part.name for part in self.sub_optimizers)})'

  @property
  def has_param_wise_state(self) -> bool:
    """True if every part has per-parameter state."""
    return all(part.has_param_wise_state for part in self.sub_optimizers)

  @property
  def gradient_clipping(self) -> tuple[str, ...]:
    """See base class; those of the parts."""
    return tuple(
      dict.fromkeys(name for part in self.sub_optimizers for name in part.gradient_clipping)
    )

  @property
  def has_weight_decay(self) -> bool:
    """True if a part has a weight decay."""
    return any(part.has_weight_decay for part in self.sub_optimizers)

  def decaying_paths(self, params: Params) -> frozenset[str]:
    """See base class."""
    return frozenset().union(
      *(part.decaying_paths(part_params) for part, part_params in self._with_params(params))
    )

  @property
  def uses_learning_rate(self) -> bool:
    """True if a `learning_rate` passed to `apply_gradient` has an effect on any part."""
    return any(part.uses_learning_rate for part in self.sub_optimizers)

  @property
  def needs_learning_rate(self) -> bool:
    """True if any part requires a `learning_rate` in `apply_gradient`."""
    return any(part.needs_learning_rate for part in self.sub_optimizers)

  @property
  def owns_learning_rate(self) -> bool:
    """True if the user gave parts a learning rate and no part requires another."""
    return not self.needs_learning_rate and any(
      part.owns_learning_rate for part in self.sub_optimizers
    )

  @property
  def parts_with_own_learning_rate(self) -> tuple[str, ...]:
    """See base class."""
    if not self.needs_learning_rate:
      return ()
    pairs = zip(self.part_names, self.sub_optimizers, strict=True)
    return tuple(name for name, part in pairs if part.owns_learning_rate)

  @property
  def configured_learning_rates(self) -> dict[str, Any]:
    """Configured learning rates of the parts, as `<name of the part>/<name>`."""
    return {
      f'{part_name}/{name}': rate
      for part_name, part in zip(self.part_names, self.sub_optimizers, strict=True)
      for name, rate in part.configured_learning_rates.items()
    }

  def learning_rates(
    self, state: definition.OptimizerState, *, is_passed: bool
  ) -> dict[str, jax.Array]:
    """See base class and `configured_learning_rates`."""
    return {
      f'{part.name}/{name}': value
      for part in self._parts(state)
      for name, value in part.optimizer_def.learning_rates(
        part.state, is_passed=is_passed and self._takes_learning_rate(part.optimizer_def)
      ).items()
    }

  @property
  def extra_args(self) -> tuple[str, ...]:
    """Names of the values that any part needs."""
    return tuple(dict.fromkeys(name for part in self.sub_optimizers for name in part.extra_args))

  def optional_states(self, state: definition.OptimizerState) -> dict[str, dict[str, Any]]:
    """See base class."""
    found = {}
    for part in self._parts(state):
      for start, added in part.optimizer_def.optional_states(part.state).items():
        values = {f'{part.entry}/{name}': value for name, value in added.items()}
        found[f'{part.entry}/{start}'] = values
    return found

  def restore_remedy(self, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """See base class; that of the first part with one."""
    remedies = (part.restore_remedy(stored, wanted) for part in self.sub_optimizers)
    return next(filter(None, remedies), None)

  def metrics(self, state: definition.OptimizerState) -> dict[str, jax.Array]:
    """Return the metrics of the parts, scalar arrays, as `<name of the part>/<metric>`."""
    return {
      f'{part.name}/{metric}': value
      for part in self._parts(state)
      for metric, value in part.optimizer_def.metrics(part.state).items()
    }

  def report(self, values: Mapping[str, float]) -> list[str]:
    """See base class; the name of its part precedes each line."""
    lines = []
    for name, part in zip(self.part_names, self.sub_optimizers, strict=True):
      prefix = f'{name}/'
      part_values = {
        key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)
      }
      lines += [f'part {name}: {line}' for line in part.report(part_values)]
    return lines

  def eval_params(self, params: Params, state: definition.OptimizerState) -> Params:
    """See base class; each part's optimizer gives the parameters of the part."""
    leaves = _multi_parts.by_path(params)
    new_leaves = dict(leaves)
    for part in self._parts(state):
      new_leaves |= _multi_parts.by_path(
        part.optimizer_def.eval_params(_multi_parts.subtree(leaves, part.paths), part.state)
      )
    return _multi_parts.like(params, new_leaves)

  def frozen_paths(self, params: Params, state: definition.OptimizerState) -> frozenset[str]:
    """See base class: parameters of no part, and those that their part does not change."""
    leaves = _multi_parts.by_path(params)
    changed = set()
    for part in self._parts(state):
      changed |= set(part.paths) - part.optimizer_def.frozen_paths(
        _multi_parts.subtree(leaves, part.paths), part.state
      )
    return frozenset(leaves) - changed

  def stored_params(self, state: definition.OptimizerState) -> dict[str, str]:
    """See base class; those of all parts."""
    found = {}
    for part in self._parts(state):
      found |= part.optimizer_def.stored_params(part.state)
    return found

  def unsupported_reason(self, state: definition.OptimizerState) -> str | None:
    """See base class; the reason of the first part that has one."""
    for part in self._parts(state):
      reason = part.optimizer_def.unsupported_reason(part.state)
      if reason is not None:
        return f'{part.description}: {reason}'
    return None

  def update_hyper_params(self, **hyper_param_overrides: Any) -> list[Any]:
    """Return the hyper-parameters of each part with overrides.

    Args:
      **hyper_param_overrides: new values by name, for every part with a hyper-parameter of this name (for
        `learning_rate` see the class); `hyper_params=[...]`, one entry per part, replaces all of them first.

    Raises:
      ConfigError: a hyper-parameter that no part has, or an invalid learning rate.
    """
    hyper_params = hyper_param_overrides.pop('hyper_params', None)
    if hyper_params is None:
      hyper_params = self.hyper_params
    else:
      hyper_params = hyper_params
    known = [_hyper_param_names(part_hyper_params) for part_hyper_params in hyper_params]
    for name in hyper_param_overrides:
      if not any(name in names for names in known):
        raise ConfigError(
          f'MultiOptimizer: no part has a hyper-parameter {name!r}.'
          f'{did_you_mean(name, sorted(set().union(*known)))}'
        )
    updated = []
    for part, names, part_hyper_params in zip(
      self.sub_optimizers, known, hyper_params, strict=True
    ):
      if self._takes_learning_rate(part):
        names = names
      else:
        names = names - {'learning_rate'}
      overrides = {name: value for name, value in hyper_param_overrides.items() if name in names}
      updated.append(part.update_hyper_params(hyper_params=part_hyper_params, **overrides))
    return updated

  # ---- State and update. ----

  def create(self, target: Params) -> definition.Optimizer:
    """Return an `Optimizer` of the parameters `target` with an initial state."""
    self.check_param_scales(target)
    target = self.update_options.prepare(target)
    if self._param_axes is None:
      optimizer_def = self
    else:
      optimizer_def = self._for_param_axes(self._param_axes, target)
    return definition.Optimizer(
      optimizer_def=optimizer_def, state=optimizer_def.init_state(target), target=target
    )

  def init_state(self, params: Params) -> definition.OptimizerState:
    """See base class; returns step 0 and the initial state of each part.

    Raises:
      ConfigError: several parts select one parameter, or a part selects no parameter.
    """
    if self._param_axes is not None:
      return self._for_param_axes(self._param_axes, params).init_state(params)
    leaves = _multi_parts.by_path(params)
    paths = self._select(tree_utils.unflatten_dict(leaves))
    _multi_parts.check_reserved_names(leaves)
    self._log_selection(leaves, paths)
    parts = tuple(
      part.init_state(_multi_parts.subtree(leaves, part_paths)).param_states
      for part, part_paths in zip(self.sub_optimizers, paths, strict=True)
    )
    return definition.OptimizerState(
      step=jnp.zeros([], jnp.int32), param_states=MultiOptimizerState(parts=parts, paths=paths)
    )

  def apply_gradient(
    self,
    hyper_params: Sequence[Any],
    params: Params,
    state: definition.OptimizerState,
    grads: Params,
    **extra_args: Any,
  ) -> tuple[Params, definition.OptimizerState]:
    """Make one update of every part; see `OptimizerDef.apply_gradient`.

    Gradients of frozen parameters are ignored and may be None.
    """
    leaves = _multi_parts.by_path(params)
    grad_leaves = _multi_parts.by_path(grads)
    new_leaves = dict(leaves)
    new_parts = []
    for part, part_hyper_params in zip(self._parts(state), hyper_params, strict=True):
      part_args = {
        key: extra_args[key] for key in part.optimizer_def.extra_args if key in extra_args
      }
      new_params, new_state = part.optimizer_def.apply_gradient(
        part_hyper_params,
        _multi_parts.subtree(leaves, part.paths),
        part.state,
        _multi_parts.subtree(grad_leaves, part.paths),
        **_multi_parts.part_extra_args(part_args, params, leaves, part.paths),
      )
      new_leaves |= _multi_parts.by_path(new_params)
      new_parts.append(new_state.param_states)
    param_states = state.param_states.replace(parts=tuple(new_parts))
    return _multi_parts.like(params, new_leaves), definition.OptimizerState(
      step=state.step + 1, param_states=param_states
    )

  def stacking_key(
    self, path: str, param: jax.Array, state: definition.OptimizerState
  ) -> Hashable | None:
    """See base class; layers of different parts are not stacked."""
    for part in self._parts(state):
      if path in part.paths:
        accepts = layer_stacks.is_accepted_by(part.optimizer_def)
        if accepts:
          key = part.optimizer_def.stacking_key(path, param, part.state)
        else:
          key = None
        if key is None:
          return None
        return (part.name, key)
    return 'frozen'

  def rename_params(
    self, param_states: MultiOptimizerState, rename_fn: Callable[[Sequence[str]], tuple[str, ...]]
  ) -> MultiOptimizerState:
    """See base class."""
    parts = (
      part.rename_params(state, rename_fn)
      for part, state in zip(self.sub_optimizers, param_states.parts, strict=True)
    )
    return MultiOptimizerState(parts=tuple(parts), paths=tuple(map(rename_fn, param_states.paths)))

  def _for_param_scales(self, scales: ParamScales) -> 'MultiOptimizer':
    """See base class; the weight decay is scaled in the parts that have one."""
    parts = []
    for part in self.sub_optimizers:
      of_part = scales.for_optimizer(part.has_weight_decay)
      if of_part:
        part = part.with_param_scales(of_part)
      parts.append(part)
    new = copy.copy(self)
    new.sub_optimizers = tuple(parts)
    return new

  def check_param_scales(self, params: Params) -> None:
    """See base class; the parts may have scales too."""
    super().check_param_scales(params)
    if any(part.param_scales for part in self.sub_optimizers):
      for part, part_params in self._with_params(params):
        part.check_param_scales(part_params)

  def _with_params(self, params: Params) -> list[tuple[definition.OptimizerDef, Params]]:
    """Return the optimizer and the parameters of each part."""
    leaves = _multi_parts.by_path(params)
    selected = self._select(tree_utils.unflatten_dict(leaves))
    return [
      (part, _multi_parts.subtree(leaves, paths))
      for part, paths in zip(self.sub_optimizers, selected, strict=True)
    ]

  # ---- Axes. ----

  def _for_param_axes(
    self, param_logical_axes: LogicalAxes, params: Params | None
  ) -> 'MultiOptimizer':
    """Return the definition whose parts have the axes of their parameters.

    If `params` is None, the parts get the axes later, when the selection is known.
    """
    new = copy.copy(self)
    new._param_axes = param_logical_axes
    if params is not None:
      leaves = _multi_parts.by_path(params)
      selected = self._select(tree_utils.unflatten_dict(leaves))
      new.sub_optimizers = new._parts_with_axes(selected, leaves)
      new._param_axes = None
    return new

  def _parts_with_axes(
    self, paths: tuple[tuple[str, ...], ...], leaves: Mapping[str, Any] | None = None
  ) -> tuple[definition.OptimizerDef, ...]:
    """Return the parts for the parameters at `paths`, with the axes in `_param_axes`."""
    if self._param_axes is None:
      return self.sub_optimizers
    axes = dict(tree_utils.named_leaves(self._param_axes))
    parts = []
    for part, part_paths in zip(self.sub_optimizers, paths, strict=True):
      part_axes = _multi_parts.subtree(axes, part_paths)
      part_params = None
      if leaves is not None:
        part_params = _multi_parts.subtree(leaves, part_paths)
      parts.append(part.with_param_axes(part_axes, part_params))
    return tuple(parts)

  def derive_logical_axes(
    self, optimizer: definition.Optimizer, param_logical_axes: LogicalAxes
  ) -> definition.Optimizer:
    """See `OptimizerDef.derive_logical_axes`; the axes of each part's state follow from its parameters' axes."""
    target_axes = _axes.match_logical_axes(optimizer.target, param_logical_axes)
    leaves = _multi_parts.by_path(optimizer.target)
    axes = _multi_parts.by_path(target_axes)
    parts = []
    for part in self._parts(optimizer.state):
      part_optimizer = definition.Optimizer(
        optimizer_def=part.optimizer_def,
        state=part.state,
        target=_multi_parts.subtree(leaves, part.paths),
      )
      part_axes = part.optimizer_def.derive_logical_axes(
        part_optimizer, _multi_parts.subtree(axes, part.paths)
      )
      parts.append(part_axes.state.param_states)
    param_states = optimizer.state.param_states.replace(parts=tuple(parts))
    state_axes = definition.axes_of_state(param_states)
    _axes.check_logical_axes(optimizer.state, state_axes, 'the state of MultiOptimizer')
    return optimizer.replace(state=state_axes, target=target_axes)

  # ---- State dicts. ----

  def state_dict(self, target: Params, state: definition.OptimizerState) -> dict[str, Any]:
    """Return the serialisable form of parameters and state; see `OptimizerDef.state_dict`.

    The per-parameter state of a part is at the parameters' paths, as in T5X; other state of a part is in an entry
    'optimizer:<name of the part>'. Frozen parameters have no entry in 'param_states'.
    """
    state_dict = super().state_dict(
      target, definition.OptimizerState(step=state.step, param_states={})
    )
    if param_states := _multi_parts.param_states_dict(
      self._parts(state), _multi_parts.by_path(target)
    ):
      state_dict['state']['param_states'] = param_states
    return state_dict

  def restore_state(
    self, opt_target: Params, opt_state: definition.OptimizerState, state_dict: Mapping[str, Any]
  ) -> tuple[Params, definition.OptimizerState]:
    """Return (parameters, state) from a state dict; see `OptimizerDef.restore_state`.

    Raises:
      CheckpointError: a missing or unknown value; the message names its path and its part.
    """
    target = state_dicts.restore_from_state_dict(opt_target, state_dict, 'target')
    step, parts = _multi_parts.restore_parts(
      self._parts(opt_state),
      _multi_parts.by_path(opt_target),
      self.state_dict(opt_target, opt_state)['state'],
      state_dict.get('state', {}),
    )
    return target, definition.OptimizerState(
      step=step, param_states=opt_state.param_states.replace(parts=parts)
    )

  # ---- Helpers. ----

  def _parts(self, state: definition.OptimizerState) -> list[_multi_parts.Part]:
    """Return the parts with their states, each with the shared step."""
    param_states = state.param_states
    return [
      _multi_parts.Part(
        name=name,
        description=description,
        optimizer_def=optimizer_def,
        state=definition.OptimizerState(step=state.step, param_states=part_state),
        paths=paths,
      )
      for name, description, optimizer_def, part_state, paths in zip(
        self.part_names,
        self._descriptions(),
        self._parts_with_axes(param_states.paths),
        param_states.parts,
        param_states.paths,
        strict=True,
      )
    ]

  def _takes_learning_rate(self, part: definition.OptimizerDef) -> bool:
    if self.needs_learning_rate:
      return part.needs_learning_rate
    return part.uses_learning_rate

  def _descriptions(self) -> list[str]:
    """Return a description of each part for messages."""
    return [
      f'part {name!r} ({part.name} on {traversal!r})'
      for name, part, traversal in zip(
        self.part_names, self.sub_optimizers, self.traversals, strict=True
      )
    ]

  def _select(self, tree: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the paths of the parameters of each part, after checking that the parts are disjoint and not empty."""
    return _multi_parts.select(self.traversals, self._descriptions(), tree)

  def _log_selection(self, leaves: Mapping[str, Any], paths: tuple[tuple[str, ...], ...]) -> None:
    if paths in self._logged_paths:  # states are made, or traced, several times
      return
    self._logged_paths.add(paths)
    for description, part_paths in zip(self._descriptions(), paths, strict=True):
      _logger.info('MultiOptimizer: %s trains %d arrays.', description, len(part_paths))
    num_frozen = len(leaves) - sum(map(len, paths))
    if num_frozen:
      _logger.info('MultiOptimizer: the other %d arrays are frozen.', num_frozen)


def _hyper_param_names(hyper_params: Any) -> set[str]:
  """Return the names of hyper-parameters, or those of all parts for the list of a `MultiOptimizer`."""
  if isinstance(hyper_params, (list, tuple)):
    return set().union(*map(_hyper_param_names, hyper_params))
  if dataclasses.is_dataclass(hyper_params):
    return {field.name for field in dataclasses.fields(hyper_params)}
  return set()
