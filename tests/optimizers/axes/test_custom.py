"""Rules for custom states: registration, kinds of fields, and errors."""

import collections
from collections.abc import Mapping
import dataclasses
import re
import subprocess
import sys
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError
from tests.optimizers.axes.axes_cases import AXES
from tests.optimizers.axes.axes_cases import SHAPES
from tests.optimizers.axes.axes_cases import derive
from tests.optimizers.axes.axes_cases import each
from tests.optimizers.axes.axes_cases import zeros


class _Counted(NamedTuple):
  count: Any
  momentum: Any


@struct.dataclass
class _FlaxState:
  momentum: Any
  count: Any
  decay: float = struct.field(pytree_node=False, default=0.9)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _JaxState:
  count: Any
  momentum: Any
  decay: float = dataclasses.field(default=0.9, metadata={'static': True})


@jax.tree_util.register_pytree_node_class
class _Node:
  def __init__(self, momentum):
    self.momentum = momentum

  def tree_flatten(self):
    return (self.momentum,), None

  @classmethod
  def tree_unflatten(cls, aux, children):
    del aux
    return cls(*children)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _MappingState(Mapping):
  """Like a dataclass of chex, which is a mapping from its fields too."""

  count: Any
  momentum: Any

  def __getitem__(self, key):
    return getattr(self, key)

  def __iter__(self):
    return iter(('count', 'momentum'))

  def __len__(self):
    return 2


def _counted_tx(momentum_of=jnp.zeros_like):
  return optax.GradientTransformation(
    lambda params: _Counted(jnp.zeros([], jnp.int32), jax.tree.map(momentum_of, params)),
    lambda updates, state, params=None: (updates, state),
  )


def test_a_state_that_is_like_the_parameters_needs_no_rule():
  tx = optax.chain(optax.clip(1.0), optax.masked(_counted_tx(), {'dense': True, 'scale': False}))
  optimizer = optimizers.OptaxWrapper(tx).create(
    jax.tree.map(lambda shape: jnp.ones(shape.shape), SHAPES)
  )
  axes = optimizer.optimizer_def.derive_logical_axes(optimizer, AXES)
  assert axes.state.param_states[1].inner_state == _Counted(
    P(), {**AXES, 'scale': optax.MaskedNode()}
  )


def test_an_array_like_no_parameter_is_rejected_until_registered_by_the_call_in_the_error(rules):
  # A random key, next to copies.
  state = optax.MaskedState(_Counted(count=zeros(2), momentum=SHAPES))
  with pytest.raises(ConfigError) as error:
    derive((state,), AXES, SHAPES)
  message = str(error.value)
  assert (
    'axes of _Counted.count do not follow from its shape (2,): no parameter has its place'
    in message
  )
  call = re.search(r'optimizers\.OptaxStatePartitionRules\.register\(.*?\)', message).group()
  assert call == "optimizers.OptaxStatePartitionRules.register(_Counted, count='replicated')"
  eval(call)  # pylint: disable=eval-used
  assert derive((state,), AXES, SHAPES)[0].inner_state == _Counted(P(None), AXES)
  # A part of a state: the error names the class and the field that hold the array.
  state = _Counted(
    count=zeros(), momentum={**SHAPES, 'dense': {**SHAPES['dense'], 'bias': zeros(5)}}
  )
  with pytest.raises(ConfigError, match=r'_Counted.momentum/dense/bias .*\(5,\).*parameter \(6,\)'):
    derive((state,), AXES, SHAPES)


def test_a_rule_may_be_a_function(rules):

  def row_axes(state, params_axes):
    return state._replace(count=P(), momentum=jax.tree.map(lambda axes: P(*axes[:1]), params_axes))

  rules.register(_Counted, row_axes)
  assert derive(_Counted(zeros(), each(lambda shape: zeros(*shape[:1]))), AXES).momentum['dense'][
    'kernel'
  ] == (P('embed'))
  # A rule that does not fit the state is rejected wherever the state is.
  with pytest.raises(ConfigError, match='_Counted by its rule.*the array has rank 2'):
    derive((optax.MaskedState(_Counted(zeros(), SHAPES)),), AXES)
  rules.register(_Counted, lambda state, params_axes: state._replace(count=P(), momentum={}))
  with pytest.raises(ConfigError, match='_Counted by its rule have the structure'):
    derive(_Counted(zeros(), SHAPES), AXES)


def test_a_rule_may_need_the_shapes_of_the_parameters(rules):
  """Statistics of columns: they keep the last dim of a parameter if that is the longer one, else the first."""

  def columns(state, params_axes, params):
    def keep(axes, param):
      return P(axes[param.shape.index(max(param.shape))]) if param.shape else P()

    return state._replace(count=P(), momentum=jax.tree.map(keep, params_axes, params))

  rules.register_with_params(_Counted, columns)
  state = _Counted(zeros(), each(lambda shape: zeros(*sorted(shape)[-1:])))
  assert derive(state, AXES, SHAPES).momentum == {
    'dense': {'kernel': P('mlp'), 'bias': P('mlp')},
    'scale': P(),
  }
  with pytest.raises(ConfigError, match='axes of _Counted depend on the shapes of the parameters'):
    derive(state, AXES)
  # The wrapper passes them.
  tx = _counted_tx(lambda param: jnp.zeros(sorted(param.shape)[-1:]))
  optimizer = optimizers.OptaxWrapper(tx).create(
    jax.tree.map(lambda shape: jnp.ones(shape.shape), SHAPES)
  )
  axes = optimizer.optimizer_def.derive_logical_axes(optimizer, AXES)
  assert axes.state.param_states.momentum['dense']['kernel'] == P('mlp')


@pytest.mark.parametrize(
  'state_class,static',
  [(_FlaxState, {'decay': 0.5}), (_JaxState, {'decay': 0.5}), (_MappingState, {})],
)
def test_dataclasses(rules, state_class, static):
  state = state_class(count=zeros(), momentum=SHAPES, **static)
  axes = derive((state,), AXES, SHAPES)[0]
  assert type(axes) is state_class and axes.momentum == AXES and axes.count == P()
  assert all(getattr(axes, field) == value for field, value in static.items())
  with pytest.raises(ConfigError, match=r"kinds of its fields with arrays.*got kinds of .*'decay'"):
    rules.register(state_class, count='scalar', momentum='params', decay='scalar')
  rules.register(state_class, momentum='replicated')
  axes = derive((state,), AXES, SHAPES)[0]
  assert axes.momentum['dense']['bias'] == P(None) and axes.count == P()


def test_other_nodes_may_have_a_function(rules):
  assert derive(_Node(SHAPES), AXES).momentum == AXES
  with pytest.raises(ConfigError, match=r'register\(_Node, rule\)'):
    rules.register(_Node, momentum='params')
  rules.register(_Node, lambda state, params_axes: _Node({}))
  with pytest.raises(ConfigError, match='_Node by its rule have the structure'):
    derive(_Node(SHAPES), AXES)


def test_a_subclass_has_the_rule_of_its_base(rules):

  class Mine(optax.ScaleByAdamState):
    """Only more methods."""

  axes = derive(Mine(zeros(), SHAPES, SHAPES), AXES, SHAPES)
  assert type(axes) is Mine and axes.mu == AXES

  @struct.dataclass
  class More(_FlaxState):
    extra: Any = None

  rules.register(_FlaxState, momentum='replicated')
  axes = derive(More(count=zeros(), momentum=SHAPES, extra=SHAPES), AXES)
  assert axes.momentum['dense']['bias'] == P(None) and axes.extra == AXES


def test_a_custom_rule_replaces_that_of_optax(rules, forget_rules):
  rules.register(optax.TraceState, trace='replicated')
  assert derive(optax.TraceState(SHAPES), AXES).trace['dense']['kernel'] == P(None, None)
  # The same before any class of optax was looked up.
  forget_rules()
  rules.register(optax.TraceState, trace='replicated')
  assert derive(optax.sgd(0.1, momentum=0.9).init({'w': jnp.ones([3])}), {'w': P('embed')})[
    0
  ].trace['w'] == P(None)
  assert derive(optax.EmaState(zeros(), SHAPES), AXES).ema == AXES


@pytest.mark.parametrize(
  'register,message',
  [
    (
      lambda rules: rules.register(_Counted, count='scalar', momentun='params', momentum='params'),
      "got kinds of .*'momentun'.*Did you mean 'momentum'",
    ),
    (
      lambda rules: rules.register(_Counted, count='replicate', momentum='params'),
      "Did you mean 'replicated'",
    ),
    (
      lambda rules: rules.register(_Counted, count='scalar', momentum=3),
      '`_Counted.momentum` must be one of .*, got 3',
    ),
    (lambda rules: rules.register(_Counted, rule=lambda s, a: s), r'register\(_Counted, rule\)'),
    (lambda rules: rules.register(dict), r'register\(dict, rule\)'),
    (
      lambda rules: rules.register(_Counted, lambda s, a: s, count='scalar'),
      'must be either a function',
    ),
    (lambda rules: rules.register(_Counted, 'params'), "must be either a function .* got 'params'"),
  ],
)
def test_registration_is_checked(rules, register, message):
  with pytest.raises(ConfigError, match=message):
    register(rules)
  assert derive(_Counted(zeros(), SHAPES), AXES).momentum == AXES  # Nothing was registered.


def test_states_without_a_class():
  assert derive({'momentum': SHAPES, 'count': zeros()}, AXES, SHAPES) == {
    'momentum': AXES,
    'count': P(),
  }
  with pytest.raises(ConfigError, match=r'an array of shape \(4, 6\) outside of any state class'):
    derive({'kernel': zeros(4, 6)}, AXES, SHAPES)

  class NoTree:
    pass

  with pytest.raises(ConfigError, match='an object of type NoTree, which is not a pytree'):
    derive((NoTree(),), AXES)
  # A vector of all parameters has no named dims.
  flat = optax.flatten(optax.adam(0.1)).init(
    jax.tree.map(lambda shape: jnp.ones(shape.shape), SHAPES)
  )
  with pytest.raises(
    ConfigError, match='ScaleByAdamState.mu is one vector of all parameters.*remove optax.flatten'
  ):
    derive(flat, AXES, SHAPES)


@pytest.mark.parametrize(
  'state,message',
  [
    (
      optax.FactoredState(
        zeros(), each(lambda shape: zeros(1)), each(lambda shape: zeros(2)), SHAPES
      ),
      r"FactoredState.v_col must have the shape .* at 'dense/.*got \(2,\)",
    ),
    (
      optax.FactoredState(zeros(), SHAPES, SHAPES, SHAPES),
      'Does the state belong to these parameters',
    ),
    (
      optax.contrib.GaLoreState(zeros(), (), each(lambda shape: zeros(5, 2))),
      r'GaLoreState.projector.*\(5, 2\)',
    ),
  ],
)
def test_reduced_states_of_other_parameters_are_rejected(state, message):
  with pytest.raises(ConfigError, match=message):
    derive(state, AXES, SHAPES)


def test_a_rule_for_optax_needs_the_name_and_the_fields_of_the_table():

  def key_axes(module, name):
    state_class = collections.namedtuple('HutchinsonState', [name])
    state_class.__module__ = module
    return derive(state_class(zeros(2)), AXES, SHAPES)

  assert key_axes('optax.later', 'key') == (P(None),)  # moved by a later version
  for module, name in (('optax.later', 'random_key'), ('mine', 'key')):
    with pytest.raises(ConfigError, match=f'HutchinsonState.{name} do not follow from its shape'):
      key_axes(module, name)


def test_importing_the_rules_imports_nothing_more_of_optax():
  # The table itself: a public function that asks for a rule adds those for optax.
  code = (
    'import sys, optax; before = set(sys.modules);'
    'from t5x_lite.optimizers.axes import rules as partition_rules;'
    'new = {name for name in set(sys.modules) - before if name.startswith("optax")};'
    'assert not new, new; rules = partition_rules.OptaxStatePartitionRules._rules;'
    'assert not [known for known in rules if known.__module__.startswith("optax")]'
  )
  subprocess.run([sys.executable, '-c', code], check=True)
