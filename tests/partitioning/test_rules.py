"""Logical axis rules: resolution, the rule that decides, errors."""

import itertools

from flax.linen import partitioning as flax_partitioning
import jax
import pytest

from t5x_lite import errors
from t5x_lite import partitioning
from t5x_lite.partitioning import rules as rules_lib

# Rules.


AXIS_NAMES = ('batch', 'length', 'embed', 'mlp', 'heads', 'vocab', None)


@pytest.mark.parametrize('dims', [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_resolution_equals_flax(dims):
  rules = partitioning.standard_logical_axis_rules(
    *dims, additional_rules=[('heads', ('data', 'model'))]
  )
  # A rule with two mesh axes, ahead of the others, exercises partial overlaps.
  for rule_list in (rules, [('embed', ('data', 'model'))] + rules):
    for rank in range(4):
      for axes in itertools.permutations(AXIS_NAMES, rank):
        assert partitioning.logical_to_mesh_axes(
          axes, rule_list
        ) == flax_partitioning.logical_to_mesh_axes(axes, rule_list)


def test_resolution_says_which_rule_decided_and_which_lost():
  rules = tuple(partitioning.standard_logical_axis_rules(2, 2))
  vocab, embed = rules_lib.resolve(('vocab', 'embed'), rules)
  assert vocab.rule == ('vocab', 'model') and not vocab.blocked
  assert embed.rule == ('embed', 'data') and embed.blocked == (('embed', 'model'),)
  assert rules_lib.resolve(('mlp', 'embed'), (('mlp', 'model'), ('embed', 'model')))[1].rule is None


@pytest.mark.parametrize(
  'axes,shape,want',
  [
    (('optimizer_stack', 'optimizer_rows', None), (8, 6, 6), (('data', 'model'), None, None)),
    (('optimizer_stack', 'optimizer_rows', None), (9, 8, 8), (None, ('data', 'model'), None)),
    (('optimizer_stack', 'optimizer_rows'), (6, 8), (('model',), ('data',))),
    # Matrices of experts stay with their experts.
    (('expert', 'optimizer_stack', 'optimizer_rows'), (4, 8, 6), ('data', ('model',), None)),
    (('expert', 'optimizer_stack', 'optimizer_rows'), (4, 9, 6), ('data', None, ('model',))),
    (('optimizer_blocks',), (8,), (None,)),
  ],
)
def test_matrices_of_an_optimizer_are_divided_over_all_devices_that_are_left(axes, shape, want):
  mesh_shape = {'data': 4, 'model': 2}
  rules = rules_lib.with_optimizer_rules((('expert', 'data'),), axes, shape, mesh_shape)
  decisions = rules_lib.resolve(axes, rules, shape=shape, mesh_shape=mesh_shape)
  assert tuple(decision.mesh_axis for decision in decisions) == want
  own = (('expert', 'data'), *((axis, 'model') for axis in axes if axis != 'expert'))
  assert rules_lib.with_optimizer_rules(own, axes, shape, mesh_shape) == own


def test_a_rule_that_does_not_divide_its_dim_is_skipped():
  mesh_shape = {'data': 2, 'expert': 3, 'model': 4}
  rules = (('embed', ('data', 'expert')), ('mlp', 'model'), ('embed', 'data'), ('heads', 'model'))
  for size, chosen, num_skipped in ((12, ('data', 'expert'), 0), (8, 'data', 1), (9, None, 2)):
    embed, mlp = rules_lib.resolve(('embed', 'mlp'), rules, shape=(size, 8), mesh_shape=mesh_shape)
    assert (embed.mesh_axis, embed.indivisible) == (
      chosen,
      tuple(r for r in rules if r[0] == 'embed')[:num_skipped],
    )
    assert (embed.rule is None) == (size == 9) and mlp.mesh_axis == 'model' and not mlp.indivisible
  # Mesh axes that were not taken are free for other dims, and taken ones are not called indivisible.
  heads, mlp = rules_lib.resolve(('heads', 'mlp'), rules[::-1], shape=(6, 8), mesh_shape=mesh_shape)
  assert (
    heads.mesh_axis is None
    and heads.indivisible == (('heads', 'model'),)
    and mlp.mesh_axis == 'model'
  )
  heads, mlp = rules_lib.resolve(('heads', 'mlp'), rules, shape=(6, 8), mesh_shape=mesh_shape)
  assert (
    heads.blocked == (('heads', 'model'),) and not heads.indivisible and mlp.mesh_axis == 'model'
  )
  assert rules_lib.resolve(
    ('embed',), (*rules, ('embed', None)), shape=(9,), mesh_shape=mesh_shape
  )[0].rule == ('embed', None)


@pytest.mark.parametrize(
  'axes,message',
  [
    (('embd', 'mlp'), "no rule for logical axis 'embd'.*Did you mean 'embed'"),
    (('registered', 'embed'), "no rule for logical axis 'registered'.* Read its page. Rules"),
    (('embed', 'embed'), 'more than once'),
  ],
)
def test_bad_logical_axes(monkeypatch, axes, message):
  monkeypatch.setattr(
    rules_lib, '_REMEDIES', {}
  )  # A registration cannot be undone by a public function.
  partitioning.register_axis_remedy(['registered'], 'Read its page.')
  with pytest.raises(errors.ConfigError, match='decoder/kernel: .*' + message):
    partitioning.logical_to_mesh_axes(
      axes, partitioning.standard_logical_axis_rules(), 'decoder/kernel'
    )


@pytest.mark.parametrize(
  'rules', [['embed'], [('embed', 3)], [('embed', ('data', None))], [('a', 'b', 'c')]]
)
def test_malformed_rules(rules):
  with pytest.raises(errors.ConfigError, match='`logical_axis_rules` must be pairs such as'):
    partitioning.PjitPartitioner(num_partitions=1, logical_axis_rules=rules)


def test_axis_names_are_a_leaf():
  assert jax.tree.map(len, {'a': partitioning.AxisNames('x', 'y')}) == {'a': 2}


def test_rule_for_an_axis_that_the_mesh_lacks():
  partitioner = partitioning.PjitPartitioner(
    num_partitions=1, logical_axis_rules=[('embed', 'modle')]
  )
  with pytest.raises(
    errors.ConfigError, match="_rules.'embed'.` must be one of .*got 'modle'. Did you mean 'model'"
  ):
    _ = partitioner.mesh
