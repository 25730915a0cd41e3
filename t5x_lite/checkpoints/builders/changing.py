"""Builders that change the state so far: names, layout, sizes, values and the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import logging
from typing import Any, ClassVar

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.builders import base
from t5x_lite.checkpoints.restoring import lazy_arrays
from t5x_lite.checkpoints.restoring import transforms
from t5x_lite.formatting import first_names
from t5x_lite.networks import layout_plan
from t5x_lite.networks.t5_config import StackConfig

_logger = logging.getLogger(__name__)

NEW_ROWS = ('mean', 'initializer')
# Parameters with a dim for the vocabulary, in the networks of this package.
_VOCABULARY_PARAMS = (r'(.*/)?token_embedder/embedding', r'(.*/)?logits_dense/kernel')


@dataclasses.dataclass(frozen=True)
class ConvertLayout(base.StateBuilder):
  """Builder that converts parameters, and arrays with the shapes of parameters, to the layout of a network.

  A state in this layout, or in none of `PARAM_LAYOUTS`, is not changed.

  Attributes:
    network: configuration of the network; None for that of the target state.
  """

  network: StackConfig | None = None

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    network = self.network or target.network
    if network is None:
      return state
    stored_layout = sources.layout_of(state.arrays)
    if stored_layout is None or stored_layout == network.param_layout:
      return state
    if target.has_values:
      _logger.info(
        'Converting the parameters from layout %s to %s.', stored_layout, network.param_layout
      )
    tree = tree_utils.unflatten_dict(state.arrays)
    # If the parameters do not fit, they and not the optimizer's state are the problem, or a later builder changes both.
    stored_params = tree['target']
    params = tree_utils.flatten_dict({'target': _in_layout(stored_params, stored_params, network)})
    wanted = {
      name: tuple(leaf.shape)
      for name, leaf in target.wanted.items()
      if name.startswith(base.PARAMS)
    }
    fits = {name: array.shape for name, array in params.items()} == wanted
    convert = transforms.convert_param_trees(lambda tree: _in_layout(tree, stored_params, network))
    tree = convert(tree, target.state_dict if fits else {}, is_resuming=target.is_resuming)
    return state.replace(arrays=tree_utils.flatten_dict(tree))


def in_layout_of_model(state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
  """Return `state` in the parameter layout of the model; see `ConvertLayout`."""
  return ConvertLayout().build(state, target)


def _in_layout(
  tree: Mapping[str, Any], params: Mapping[str, Any], network: StackConfig
) -> dict[str, Any]:
  """Return a tree in the layout of `network`, as lazy arrays.

  Args:
    tree: nested dicts of arrays with the shapes of all parameters or of some.
    params: the parameters.
    network: configuration of the network.
  """
  flat = tree_utils.flatten_dict(tree)
  plan_fn = functools.partial(
    layout_plan.plan,
    to_layout=network.param_layout,
    relpos_per_layer=network.relpos_per_layer,
    heads=network.num_heads,
  )
  planned = layout_plan.plan_part(flat, tree_utils.flatten_dict(params), plan_fn)

  def compute_fn(plan):
    return lambda *arrays: plan.make(dict(zip(plan.inputs, arrays, strict=True)).__getitem__)

  return tree_utils.unflatten_dict(
    {
      name: flat[name]
      if name in flat and plan.inputs == (name,)
      else lazy_arrays.ComputedArray(
        shape=plan.shape,
        dtype=plan.dtype,
        inputs=tuple(flat[each] for each in plan.inputs),
        compute_fn=compute_fn(plan),
      )
      for name, plan in planned.items()
    }
  )


@dataclasses.dataclass(frozen=True)
class Transform(base.StateBuilder):
  """Builder that applies a function with T5X's signature to the entire state in host memory.

  `RestoreCheckpointConfig.state_transformation_fns` become these builders. A check applies the function to shapes.

  Attributes:
    fn: function `(state_dict, target_state_dict, *, is_resuming) -> state_dict` on nested dicts of NumPy arrays.
  """

  fn: transforms.RestoreStateTransformationFn

  @property
  def needs_values(self) -> bool:
    """See `StateBuilder.needs_values`."""
    return not isinstance(self.fn, transforms.AcceptsShapes)

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return transforms.name_of(self.fn)

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`; reads all arrays if `target.has_values`."""
    if target.has_values:
      values = tree_utils.unflatten_dict(lazy_arrays.read(state.arrays, {}))
      tree = self.fn(values, target.state_dict, is_resuming=target.is_resuming)
    else:
      tree = transforms.transform_shapes(
        self.fn,
        tree_utils.unflatten_dict(base.shapes_of(state.arrays)),
        target.state_dict,
        is_resuming=target.is_resuming,
      )
    return state.replace(arrays=tree_utils.flatten_dict(tree))


@dataclasses.dataclass(frozen=True)
class ParamAverage(base.StateBuilder):
  """Builder that begins with the running average of the parameters (`param_average`) instead of the parameters.

  The step is kept. The optimizer, and a new average, begin with these parameters.
  """

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return 'param_average as parameters'

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    prefix = base.FROM_PARAMS[1]
    averages = {
      base.PARAMS + name.removeprefix(prefix): array
      for name, array in state.arrays.items()
      if name.startswith(prefix)
    }
    if not averages:
      raise errors.CheckpointError(
        '`ParamAverage` must follow the restore of a checkpoint with param_average, got a '
        'state without it. Give a checkpoint of a run that averages its parameters.'
      )
    missing = [
      name for name in state.arrays if name.startswith(base.PARAMS) and name not in averages
    ]
    if missing:
      raise errors.CheckpointError(
        '`ParamAverage` must get an average of every parameter, got none of '
        f'{first_names(missing)}. Restore another checkpoint.'
      )
    rest = state.without(base.PARAMS, *base.FROM_PARAMS)
    return rest.replace(arrays={**averages, **rest.arrays})


@dataclasses.dataclass(frozen=True)
class NewVocabulary(base.StateBuilder):
  """Builder that changes the size of the vocabulary of the embedding and of the logits.

  The vectors of the first tokens are kept, so the new vocabulary must begin with the tokens of the old one. If it is
  smaller, the last vectors are dropped. If a size changes, the optimizer begins with the parameters; the step is kept.

  Attributes:
    new_rows: 'mean' gives each new token the mean of the stored vectors, so that it is neither likely nor unlikely at
      first (Hewitt 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html); 'initializer' gives it the vector of
      the newly initialised model.
    params: regular expressions of the names of parameters with one dim for the vocabulary.
  """

  new_rows: str = 'mean'
  params: Sequence[str] = _VOCABULARY_PARAMS

  def __post_init__(self):
    checks.check(
      'NewVocabulary', vars(self), new_rows=checks.one_of(NEW_ROWS), params=base.PATTERNS
    )

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return 'a new vocabulary'

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    names = [
      name
      for name in base.matching_params(self.params, target.wanted, 'NewVocabulary.params')
      if name in state.arrays
    ]
    resized = {}
    for name in names:
      old = tuple(state.arrays[name].shape)
      new = tuple(target.wanted[name].shape)
      if old == new:
        continue
      dims = [dim for dim, sizes in enumerate(zip(old, new, strict=False)) if sizes[0] != sizes[1]]
      if len(old) != len(new) or len(dims) != 1:
        raise errors.CheckpointError(
          f'`NewVocabulary` must change one dim of {name}, got {old}, and the model has '
          f'{new}. Keep the other sizes of the network.'
        )
      if target.has_values:
        _logger.info(
          'The vocabulary of %s changes from %d to %d tokens.', name, old[dims[0]], new[dims[0]]
        )
      resized[name] = self._resize(name, state.arrays[name], dims[0], target)
    if not resized:
      return state
    kept = state.without(*base.FROM_PARAMS)
    return kept.replace(arrays={**kept.arrays, **resized})

  def _resize(
    self, name: str, array: Any, dim: int, target: base.TargetState
  ) -> lazy_arrays.ComputedArray:
    shape = tuple(target.wanted[name].shape)
    num_kept = min(array.shape[dim], shape[dim])
    if self.new_rows == 'initializer' and num_kept < shape[dim]:
      inputs = (array, target.initial(name))
    else:
      inputs = (array,)

    def resize(old, initial=None):
      kept = np.take(old, np.arange(num_kept), axis=dim)
      if initial is not None:
        new = np.take(initial, np.arange(num_kept, shape[dim]), axis=dim).astype(old.dtype)
      else:
        mean = np.mean(old, axis=dim, keepdims=True, dtype=np.float64).astype(old.dtype)
        new = np.repeat(mean, shape[dim] - num_kept, axis=dim)
      return np.concatenate([kept, new], axis=dim)

    return lazy_arrays.ComputedArray(
      shape=shape, dtype=array.dtype, inputs=inputs, compute_fn=resize
    )


@dataclasses.dataclass(frozen=True)
class Reinitialize(base.StateBuilder):
  """Builder that gives some parameters the values of the newly initialised model.

  The optimizer begins with the parameters; the step is kept.

  Attributes:
    params: regular expressions of the names of the parameters.
  """

  params: Sequence[str]

  def __post_init__(self):
    checks.check('Reinitialize', vars(self), params=base.PATTERNS)

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return f'new values of {", ".join(self.params)}'

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    names = base.matching_params(self.params, target.wanted, 'Reinitialize.params')
    kept = state.without(*base.FROM_PARAMS)
    return kept.replace(
      arrays={**kept.arrays, **{name: target.initial(name) for name in names}},
      initialized=kept.initialized | set(names),
    )


@dataclasses.dataclass(frozen=True)
class StartAtStep(base.StateBuilder):
  """Builder that begins the run at another step; counters in the optimizer's state are kept.

  Attributes:
    step: the first step of the run, at which learning-rate schedules begin.
  """

  step: int = 0

  KEEPS_BASE: ClassVar[bool] = True

  def __post_init__(self):
    checks.check(
      'StartAtStep', vars(self), step=checks.number(at_least=0, below=2**31, integer=True)
    )

  def first_step(self, step: int | None) -> int | None:
    """See `StateBuilder.first_step`."""
    return self.step

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return 'a new first step'

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    return state.at_step(self.step)


@dataclasses.dataclass(frozen=True)
class OnArrays(base.StateBuilder):
  """Builder that applies a function to the complete state on its devices, after the model is initialised.

  Attributes:
    fn: function from the nested dict of `state_dict()` of a train state, with JAX arrays, to one with the same names,
      shapes and dtypes. It is compiled.
  """

  fn: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dataclasses.field(repr=False)

  INPUT: ClassVar[str] = base.ARRAYS

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return transforms.name_of(self.fn)

  def build(self, state: base.BuiltState, target: base.TargetState) -> base.BuiltState:
    """See `StateBuilder.build`."""
    tree = tree_utils.unflatten_dict(state.arrays)
    on_devices = all(isinstance(array, jax.Array) for array in state.arrays.values())
    if on_devices:
      shardings = jax.tree.map(lambda array: array.sharding, tree)
    else:
      shardings = None
    return state.replace(
      arrays=tree_utils.flatten_dict(jax.jit(self.fn, out_shardings=shardings)(tree))
    )
