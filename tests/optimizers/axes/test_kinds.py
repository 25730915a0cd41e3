"""Kinds of fields of optax states, and those that do not fit."""

from typing import Any, NamedTuple

import flax.core
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


_MASK = optax.MaskedNode()


@pytest.mark.parametrize(
  'momentum,expected',
  [
    (SHAPES, AXES),
    (None, None),
    ({**SHAPES, 'dense': _MASK}, {**AXES, 'dense': _MASK}),
    (each(lambda shape: zeros()), each(lambda shape: P())),
    (each(lambda shape: zeros(1)), each(lambda shape: P(None))),
    (
      each(lambda shape: zeros(5, *shape)),
      {'dense': {'kernel': P(None, 'embed', 'mlp'), 'bias': P(None, 'mlp')}, 'scale': P(None)},
    ),
    (
      each(lambda shape: [zeros(size) for size in shape]),
      {'dense': {'kernel': [P('embed'), P('mlp')], 'bias': [P('mlp')]}, 'scale': []},
    ),
    # Parts of parameters: with the first dim, the last one, and with dims of size 1; other parameters are whole.
    (
      each(lambda shape: zeros(*shape[:1])),
      {'dense': {'kernel': P('embed'), 'bias': P('mlp')}, 'scale': P()},
    ),
    (
      each(lambda shape: zeros(*shape[-1:])),
      {'dense': {'kernel': P('mlp'), 'bias': P('mlp')}, 'scale': P()},
    ),
    (
      each(lambda shape: zeros(*shape[:-1], *[1] * bool(shape))),
      {'dense': {'kernel': P('embed', None), 'bias': P(None)}, 'scale': P()},
    ),
    # States and trees of any class.
    (optax.TraceState(SHAPES), optax.TraceState(AXES)),
    ((optax.EmptyState(), [SHAPES, zeros()]), (optax.EmptyState(), [AXES, P()])),
    (zeros(), P()),
    ({'a': zeros(), 'b': zeros()}, {'a': P(), 'b': P()}),
    ({'dense': zeros()}, {'dense': P()}),
  ],
)
def test_shapes_tell_the_axes(momentum, expected):
  assert derive(_Counted(zeros(), momentum), AXES, SHAPES) == _Counted(P(), expected)


@pytest.mark.parametrize(
  'value,message',
  [
    (
      zeros(7),
      r'_Counted.momentum do not follow from its shape \(7,\): no parameter has its place',
    ),
    (each(lambda shape: zeros(3)), r'momentum/dense/bias .*\(3,\).*parameter \(6,\)'),
    (each(lambda shape: zeros(*shape, 3)), r'momentum/dense/bias .*\(6, 3\).*parameter \(6,\)'),
    ({'dense': {'kernel': zeros(4, 6)}}, r'momentum/dense/kernel .* no parameter has its place'),
    ((SHAPES, {'table': zeros(8, 8)}), r'momentum/1/table .*\(8, 8\)'),
  ],
)
def test_an_array_of_another_shape_is_named(value, message):
  with pytest.raises(ConfigError, match=message):
    derive(_Counted(zeros(), value), AXES, SHAPES)


def test_dims_of_one_size_are_ambiguous_unless_their_names_are_equal(rules):
  square = {'w': zeros(4, 4)}
  state = _Counted(zeros(), {'w': zeros(4)})
  with pytest.raises(ConfigError, match=r'_Counted.momentum/w .*in one way only, a part of'):
    derive(state, {'w': P('embed', 'mlp')}, square)
  assert derive(state, {'w': P('embed', 'embed')}, square).momentum == {'w': P('embed')}
  cube = {'w': zeros(4, 4, 6)}
  axes = {'w': P('layers', 'embed', 'mlp')}
  assert derive(_Counted(zeros(), {'w': zeros(4, 4)}), axes, cube).momentum == {
    'w': P('layers', 'embed')
  }
  assert derive(_Counted(zeros(), {'w': zeros(6)}), axes, cube).momentum == {'w': P('mlp')}
  # The shapes decide; without them the axes of a part are unknown.
  with pytest.raises(ConfigError, match='it depends on the shapes of the parameters'):
    derive(_Counted(zeros(), {'w': zeros(6)}), axes)
  rules.register(_Counted, lambda state, axes: state._replace(count=P(), momentum={'w': P('mlp')}))
  assert derive(state, {'w': P('embed', 'mlp')}, square).momentum == {'w': P('mlp')}


def test_parameters_of_one_array():
  axes = P('embed', 'mlp')
  params = zeros(4, 6)
  state = (_Counted(zeros(), zeros(4, 6)), [zeros(4), zeros(6)], zeros(6))
  assert derive(state, axes, params) == (
    _Counted(P(), axes),
    [P('embed'), P('mlp')],
    P('mlp'),
  )
  # A pair of states or of copies is no list of vectors.
  assert derive((zeros(4, 6), zeros(4, 6)), axes, params) == (axes, axes)


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
    ('nested', zeros(3), r'_Counted.momentum do not follow from its shape \(3,\)'),
    ('reduced', each(lambda shape: zeros(3)), "some of the dims .*The kind 'reduced' does not fit"),
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
