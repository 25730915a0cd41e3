"""Kinds of fields of optax states, and those that do not fit."""

from typing import Any, NamedTuple

import flax.core
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError

_AXES = {'dense': {'kernel': P('embed', 'mlp'), 'bias': P('mlp')}, 'scale': P()}
_SHAPES = {
    'dense': {'kernel': jax.ShapeDtypeStruct([4, 6], jnp.float32), 'bias': jax.ShapeDtypeStruct([6], jnp.float32)},
    'scale': jax.ShapeDtypeStruct([], jnp.float32)}
_derive = optimizers.OptaxStatePartitionRules.derive_optax_logical_axes


@pytest.fixture
def rules(monkeypatch):
  """Return the rules; registrations of a test are undone after it."""
  monkeypatch.setattr(optimizers.OptaxStatePartitionRules, '_RULES', dict(optimizers.OptaxStatePartitionRules._RULES))
  return optimizers.OptaxStatePartitionRules


class _Counted(NamedTuple):
  count: Any
  momentum: Any


def _zeros(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _each(fn):
  """Return a tree like the parameters with the results of `fn` for their shapes."""
  return jax.tree.map(lambda param: fn(param.shape), _SHAPES)


@pytest.mark.parametrize('momentum,kind', [
    (_SHAPES, 'params'),
    (_each(lambda shape: _zeros()), 'per_parameter_scalar'),
    (_each(lambda shape: _zeros(1)), 'per_parameter_scalar'),
    (_each(lambda shape: _zeros(5, *shape)), 'leading_dims'),
    (_each(lambda shape: [_zeros(size) for size in shape]), 'per_dim'),
    (optax.TraceState(_SHAPES), 'nested'),
    ((optax.EmptyState(), optax.TraceState(_SHAPES)), 'nested'),
    (_zeros(), 'scalar'),
    ({'a': _zeros(), 'b': _zeros()}, 'scalar'),
    (_zeros(7), 'replicated'),
    (_each(lambda shape: _zeros(*shape[:1])), 'replicated'),
    (None, 'params'),
])
def test_the_call_that_the_error_shows_has_kinds_that_fit(rules, momentum, kind):
  state = _Counted(_zeros(), momentum)
  with pytest.raises(ConfigError) as error:
    _derive(state, _AXES, _SHAPES)
  assert f"register(_Counted, count='scalar', momentum={kind!r})" in str(error.value)
  assert ("have a copy of ['momentum']" in str(error.value)) == (kind == 'replicated')
  rules.register(_Counted, count='scalar', momentum=kind)
  axes = _derive(state, _AXES, _SHAPES)
  assert jax.tree.structure(axes) == jax.tree.structure(state)
  assert [len(spec) for spec in jax.tree.leaves(axes)] == [leaf.ndim for leaf in jax.tree.leaves(state)]


def test_kinds(rules):

  def axes_of(kind, value):
    rules.register(_Counted, count='scalar', momentum=kind)
    return _derive(_Counted(_zeros(), value), _AXES, _SHAPES).momentum

  assert axes_of('params', _SHAPES) == _AXES
  assert axes_of('params', flax.core.freeze(_SHAPES)) == flax.core.freeze(_AXES)
  assert axes_of('params', {**_SHAPES, 'scale': None}) == {**_AXES, 'scale': None}
  assert axes_of('leading_dims', _each(lambda shape: _zeros(2, 3, *shape))) == {
      'dense': {'kernel': P(None, None, 'embed', 'mlp'), 'bias': P(None, None, 'mlp')}, 'scale': P(None, None)}
  assert axes_of('leading_dims', _SHAPES) == _AXES
  assert axes_of('per_dim', _each(lambda shape: tuple(_zeros(size) for size in shape)))['dense'] == {
      'kernel': (P('embed'), P('mlp')), 'bias': (P('mlp'),)}
  assert axes_of('per_parameter_scalar', _each(lambda shape: _zeros(1)))['dense']['kernel'] == P(None)
  assert axes_of('scalar', {'a': _zeros()}) == {'a': P()}
  assert axes_of('replicated', [_zeros(4, 6)]) == [P(None, None)]
  assert axes_of('nested', [optax.TraceState(_SHAPES), {'b': optax.EmptyState()}]) == [
      optax.TraceState(_AXES), {'b': optax.EmptyState()}]
  assert axes_of('matched', {'copy': _SHAPES, 'norm': _zeros(), 'other': [_zeros(4, 6)]}) == {
      'copy': _AXES, 'norm': P(), 'other': [P(None, None)]}
  mask = optax.MaskedNode()
  assert axes_of('matched', [{**_SHAPES, 'dense': mask}, mask, None]) == [{**_AXES, 'dense': mask}, mask, None]


@pytest.mark.parametrize('kind,value,message', [
    ('params', _each(lambda shape: _zeros()),
     r"_Counted.momentum must have the dims .* at 'dense/(kernel|bias)', got shape \(\)"),
    ('params', _each(lambda shape: _zeros(*(size + 1 for size in shape))), r'the dims \((6,|4, 6)\) of the parameter'),
    ('params', {'all': _zeros(4)}, r"structure of the parameters: at '' it has dict of \['all'\].*'dense', 'scale'"),
    ('params', {**_SHAPES, 'dense': _zeros(4)}, "at 'dense' it has an array"),
    ('params', {**_SHAPES, 'scale': [_zeros()]}, r"at 'scale', got list \(not an array\)"),
    ('params', {**_SHAPES, 'dense': {'kernel': _zeros(4, 6)}}, r"at 'dense' it has dict of \['kernel'\]"),
    ('leading_dims', _each(lambda shape: _zeros(*shape, 3)), "at 'dense/.*The kind 'leading_dims' does not fit"),
    ('leading_dims', _each(lambda shape: _zeros()), "The kind 'leading_dims' does not fit"),
    ('per_dim', _SHAPES, "The kind 'per_dim' does not fit"),
    ('per_dim', _each(lambda shape: [_zeros(size + 1) for size in shape]), "The kind 'per_dim' does not fit"),
    ('per_parameter_scalar', _SHAPES, "must have one element .*The kind 'per_parameter_scalar' does not fit"),
    ('scalar', [_zeros(3)], r"_Counted.momentum must have a scalar .*got shape \(3,\)"),
    ('nested', _zeros(3), r'an array of shape \(3,\) outside of any state class'),
    ('nested', {'momentum': _SHAPES}, 'outside of any state class'),
])
def test_a_kind_that_does_not_fit_is_rejected(rules, kind, value, message):
  rules.register(_Counted, count='scalar', momentum=kind)
  with pytest.raises(ConfigError, match=message):
    _derive(_Counted(_zeros(), value), _AXES, _SHAPES)


def test_without_the_shapes_ranks_are_compared(rules):
  rules.register(_Counted, count='scalar', momentum='params')
  with pytest.raises(ConfigError, match=r"the dims \(\) of the parameter at 'scale', got shape \(1,\)"):
    _derive(_Counted(_zeros(), {**_SHAPES, 'scale': _zeros(1)}), _AXES)
  rules.register(_Counted, count='scalar', momentum='leading_dims')
  assert _derive(_Counted(_zeros(), _each(lambda shape: _zeros(9, *shape))), _AXES).momentum['scale'] == P(None)
