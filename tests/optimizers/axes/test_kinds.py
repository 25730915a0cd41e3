"""Kinds of fields of optax states, and those that do not fit."""

from typing import Any, NamedTuple

import flax.core
import jax
from jax.sharding import PartitionSpec as P
import optax
import pytest

from t5x_lite.errors import ConfigError
from tests.optimizers.axes.axes_cases import AXES
from tests.optimizers.axes.axes_cases import SHAPES
from tests.optimizers.axes.axes_cases import derive
from tests.optimizers.axes.axes_cases import each
from tests.optimizers.axes.axes_cases import zeros


class _Counted(NamedTuple):
  count: Any
  momentum: Any


@pytest.mark.parametrize(
  'momentum,kind',
  [
    (SHAPES, 'params'),
    (each(lambda shape: zeros()), 'per_parameter_scalar'),
    (each(lambda shape: zeros(1)), 'per_parameter_scalar'),
    (each(lambda shape: zeros(5, *shape)), 'leading_dims'),
    (each(lambda shape: [zeros(size) for size in shape]), 'per_dim'),
    (optax.TraceState(SHAPES), 'nested'),
    ((optax.EmptyState(), optax.TraceState(SHAPES)), 'nested'),
    (zeros(), 'scalar'),
    ({'a': zeros(), 'b': zeros()}, 'scalar'),
    (zeros(7), 'replicated'),
    (each(lambda shape: zeros(*shape[:1])), 'replicated'),
    (None, 'params'),
  ],
)
def test_the_call_that_the_error_shows_has_kinds_that_fit(rules, momentum, kind):
  state = _Counted(zeros(), momentum)
  with pytest.raises(ConfigError) as error:
    derive(state, AXES, SHAPES)
  assert f"register(_Counted, count='scalar', momentum={kind!r})" in str(error.value)
  assert ("have a copy of ['momentum']" in str(error.value)) == (kind == 'replicated')
  rules.register(_Counted, count='scalar', momentum=kind)
  axes = derive(state, AXES, SHAPES)
  assert jax.tree.structure(axes) == jax.tree.structure(state)
  assert [len(spec) for spec in jax.tree.leaves(axes)] == [
    leaf.ndim for leaf in jax.tree.leaves(state)
  ]


def test_kinds(rules):

  def axes_of(kind, value):
    rules.register(_Counted, count='scalar', momentum=kind)
    return derive(_Counted(zeros(), value), AXES, SHAPES).momentum

  assert axes_of('params', SHAPES) == AXES
  assert axes_of('params', flax.core.freeze(SHAPES)) == flax.core.freeze(AXES)
  assert axes_of('params', {**SHAPES, 'scale': None}) == {**AXES, 'scale': None}
  assert axes_of('leading_dims', each(lambda shape: zeros(2, 3, *shape))) == {
    'dense': {'kernel': P(None, None, 'embed', 'mlp'), 'bias': P(None, None, 'mlp')},
    'scale': P(None, None),
  }
  assert axes_of('leading_dims', SHAPES) == AXES
  assert axes_of('per_dim', each(lambda shape: tuple(zeros(size) for size in shape)))['dense'] == {
    'kernel': (P('embed'), P('mlp')),
    'bias': (P('mlp'),),
  }
  assert axes_of('per_parameter_scalar', each(lambda shape: zeros(1)))['dense']['kernel'] == P(None)
  assert axes_of('scalar', {'a': zeros()}) == {'a': P()}
  assert axes_of('replicated', [zeros(4, 6)]) == [P(None, None)]
  assert axes_of('nested', [optax.TraceState(SHAPES), {'b': optax.EmptyState()}]) == [
    optax.TraceState(AXES),
    {'b': optax.EmptyState()},
  ]
  assert axes_of('matched', {'copy': SHAPES, 'norm': zeros(), 'other': [zeros(4, 6)]}) == {
    'copy': AXES,
    'norm': P(),
    'other': [P(None, None)],
  }
  mask = optax.MaskedNode()
  assert axes_of('matched', [{**SHAPES, 'dense': mask}, mask, None]) == [
    {**AXES, 'dense': mask},
    mask,
    None,
  ]


@pytest.mark.parametrize(
  'kind,value,message',
  [
    (
      'params',
      each(lambda shape: zeros()),
      r"_Counted.momentum must have the dims .* at 'dense/(kernel|bias)', got shape \(\)",
    ),
    (
      'params',
      each(lambda shape: zeros(*(size + 1 for size in shape))),
      r'the dims \((6,|4, 6)\) of the parameter',
    ),
    (
      'params',
      {'all': zeros(4)},
      r"structure of the parameters: at '' it has dict of \['all'\].*'dense', 'scale'",
    ),
    ('params', {**SHAPES, 'dense': zeros(4)}, "at 'dense' it has an array"),
    ('params', {**SHAPES, 'scale': [zeros()]}, r"at 'scale', got list \(not an array\)"),
    (
      'params',
      {**SHAPES, 'dense': {'kernel': zeros(4, 6)}},
      r"at 'dense' it has dict of \['kernel'\]",
    ),
    (
      'leading_dims',
      each(lambda shape: zeros(*shape, 3)),
      "at 'dense/.*The kind 'leading_dims' does not fit",
    ),
    ('leading_dims', each(lambda shape: zeros()), "The kind 'leading_dims' does not fit"),
    ('per_dim', SHAPES, "The kind 'per_dim' does not fit"),
    (
      'per_dim',
      each(lambda shape: [zeros(size + 1) for size in shape]),
      "The kind 'per_dim' does not fit",
    ),
    (
      'per_parameter_scalar',
      SHAPES,
      "must have one element .*The kind 'per_parameter_scalar' does not fit",
    ),
    ('scalar', [zeros(3)], r'_Counted.momentum must have a scalar .*got shape \(3,\)'),
    ('nested', zeros(3), r'an array of shape \(3,\) outside of any state class'),
    ('nested', {'momentum': SHAPES}, 'outside of any state class'),
  ],
)
def test_a_kind_that_does_not_fit_is_rejected(rules, kind, value, message):
  rules.register(_Counted, count='scalar', momentum=kind)
  with pytest.raises(ConfigError, match=message):
    derive(_Counted(zeros(), value), AXES, SHAPES)


def test_without_the_shapes_ranks_are_compared(rules):
  rules.register(_Counted, count='scalar', momentum='params')
  with pytest.raises(
    ConfigError, match=r"the dims \(\) of the parameter at 'scale', got shape \(1,\)"
  ):
    derive(_Counted(zeros(), {**SHAPES, 'scale': zeros(1)}), AXES)
  rules.register(_Counted, count='scalar', momentum='leading_dims')
  assert derive(_Counted(zeros(), each(lambda shape: zeros(9, *shape))), AXES).momentum[
    'scale'
  ] == P(None)
