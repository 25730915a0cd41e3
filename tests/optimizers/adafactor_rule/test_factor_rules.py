"""Which dims Adafactor factors: by logical axes, by size, by rules of a user."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from t5x_lite import adafactor
from t5x_lite import tree_utils
from t5x_lite.adafactor import FactorDim
from t5x_lite.adafactor import HParamMap
from t5x_lite.errors import ConfigError
from tests.optimizers.adafactor_rule import adafactor_cases as cases

_CASES = (
  'clip_global_maxscale',
  'hparam_map_scan',
  'moe',
  'noscale_offset',
  'scan_default',
  'std_default',
  'unfactored_mom_wd',
)


@pytest.mark.parametrize('case', _CASES)
def test_golden_factor_map_state_shapes_and_axes(case):
  description, _, optimizer, axes = cases.golden(case)
  factor_map = optimizer.optimizer_def.hyper_params.factor_map
  if description['factor_map'] is None:
    assert factor_map is None
  else:
    names = {path: [role.name for role in rule] for path, rule in factor_map.items()}
    assert names == description['factor_map']
  state = tree_utils.flatten_dict(optimizer.state_dict()['state']['param_states'])
  assert {path: list(leaf.shape) for path, leaf in state.items()} == description['state_shapes']

  derived = optimizer.optimizer_def.derive_logical_axes(optimizer, axes)
  derived_flat = tree_utils.flatten_dict(derived.state_dict())
  for path, want in description['logical_axes'].items():
    got = derived_flat[path]
    if want is not None:
      assert tuple(got) == tuple(want), path
    elif path.endswith(('v_row', 'v_col')):
      # T5X replicates the factors; here they have the names of the dims that they keep.
      name = path.removeprefix('state/param_states/')
      param_axes = description['param_axes'][name.rsplit('/', 1)[0]]
      if state[name].shape != (1,):
        assert set(got) < set(param_axes) and len(got) == state[name].ndim, path
    else:
      assert not any(got), path


def test_axes_of_the_factors_are_those_of_the_dims_they_keep():
  params = {
    'kernel': jnp.ones([12, 3, 2, 8]),
    'embedding': jnp.ones([40, 20]),
    'norm': jnp.ones([12]),
  }
  axes = {
    'kernel': P('embed', 'layers', 'heads', 'kv'),
    'embedding': P('vocab', 'embed'),
    'norm': P('embed'),
  }
  optimizer_def = adafactor.Adafactor(
    logical_factor_rules=cases.STANDARD, min_dim_size_to_factor=16
  ).with_param_axes(axes)
  states = optimizer_def.derive_logical_axes(optimizer_def.create(params), axes).state.param_states
  unused = P(None)
  assert states['kernel'].v_row == P('embed', 'layers') and states['kernel'].v_col == P(
    'layers', 'heads', 'kv'
  )
  assert (states['kernel'].v, states['kernel'].m) == (unused, unused)
  # By size the smaller dim is the row.
  assert states['embedding'].v_row == P('embed') and states['embedding'].v_col == P('vocab')
  assert (states['norm'].v_row, states['norm'].v_col, states['norm'].v) == (
    unused,
    unused,
    P('embed'),
  )


@pytest.mark.parametrize(
  'axes,want',
  [
    (('embed', 'mlp'), 'ROW COLUMN'),
    (('vocab', 'embed'), 'COLUMN ROW'),
    (('embed', 'layers', 'heads', 'kv'), 'ROW BATCH COLUMN COLUMN'),
    (('embed',), 'NONE'),
    (('heads', 'relpos_buckets'), 'NONE NONE'),
    (('heads', 'layers', 'relpos_buckets'), 'NONE BATCH NONE'),
    (('embed', 'layers'), 'NONE BATCH'),
    (('embed', None), 'NONE NONE'),
    ((), ''),
  ],
)
def test_rules_by_logical_axes(axes, want):
  optimizer_def = adafactor.Adafactor(logical_factor_rules=cases.STANDARD).with_param_axes(
    {'layer': {'p': P(*axes)}}
  )
  rule = optimizer_def.hyper_params.factor_map['layer/p']
  assert ' '.join(role.name for role in rule) == want


def test_matrices_are_factored_by_size_whatever_their_rule():
  rules = HParamMap(
    [
      ('none', ('none', 'none')),
      ('heuristic', adafactor.HEURISTIC_RULE),
      ('given', ('col', 'row')),
      ('never', None),
      ('batch', ('batch', 'none')),
    ]
  )
  optimizer_def = adafactor.Adafactor(factor_map=rules, min_dim_size_to_factor=8)
  for name, shape, v_row, v in (
    ('none', (8, 9), (8,), (1,)),
    ('heuristic', (9, 8), (8,), (1,)),
    ('given', (8, 9), (8,), (1,)),
    ('none', (7, 9), (1,), (7, 9)),
    ('never', (8, 9), (1,), (8, 9)),
    ('batch', (8, 9), (1,), (8, 9)),
    ('heuristic', (50,), (1,), (50,)),
    ('heuristic', (), (1,), ()),
  ):
    state = optimizer_def.init_param_state(jnp.zeros(shape), name)
    assert (state.v_row.shape, state.v.shape) == (v_row, v), (name, shape)


def test_explicit_rules_may_leave_dims_out_of_both_factors():
  state = adafactor.Adafactor(
    factor_map=HParamMap([('.', ('none', 'row', 'col'))])
  ).init_param_state(jnp.zeros([4, 5, 6]), 'p')
  assert (state.v_row.shape, state.v_col.shape, state.v.shape) == ((4, 5), (4, 6), (1,))


def test_hparam_map():
  rules = HParamMap([('scale$', 1), ('mlp', 2), ('^encoder/', 3)])
  tree = {'encoder': {'norm': {'scale': 0}, 'mlp': {'scale': 0, 'wi': 0}, 'attention': 0}}
  assert rules(tree) == {
    'encoder': {'norm': {'scale': 1}, 'mlp': {'scale': 1, 'wi': 2}, 'attention': 3}
  }
  with pytest.raises(KeyError, match='decoder/attention'):
    rules['decoder/attention']
  assert rules == HParamMap([('scale$', 1), ('mlp', 2), ('^encoder/', 3)])
  assert rules != HParamMap([('scale$', 1), ('mlp', 2)])


def test_names_of_roles():
  for name, role in (
    ('ROW', FactorDim.ROW),
    ('col', FactorDim.COLUMN),
    ('Column', FactorDim.COLUMN),
    ('batch', FactorDim.BATCH),
    ('none', FactorDim.NONE),
    ('unfactorized', FactorDim.NONE),
    (FactorDim.ROW, FactorDim.ROW),
  ):
    assert adafactor.factor_name_to_factordim(name) is role


def test_the_heuristic_may_be_named_as_the_roles_are():
  params = {'w': jnp.ones([4, 6]), 'v': jnp.ones([4, 6])}
  for rule in (adafactor.HEURISTIC_RULE, 'heuristic'):
    factor_map = HParamMap([('w', rule), ('v', None)])
    state = jax.eval_shape(
      adafactor.Adafactor(min_dim_size_to_factor=4, factor_map=factor_map).init_state, params
    )
    assert state.param_states['w'].v_row.shape == (4,) and state.param_states['v'].v.shape == (4, 6)
  with pytest.raises(ConfigError, match="a role for each dim .*'heuristic'.*got 'heuristics'"):
    adafactor.Adafactor(factor_map=HParamMap([('.*', 'heuristics')])).init_state(params)


def test_the_optimizer_has_both_names_of_t5x():
  optimizer = adafactor.Adafactor(0.1).create({'w': jnp.ones((4, 4))})
  axes, definition = {'w': P('embed', 'mlp')}, optimizer.optimizer_def
  derived = definition.derive_logical_axes(optimizer, axes)
  assert derived == definition.derive_logical_axes(
    optimizer_state=optimizer, param_logical_axes=axes
  )
  assert derived == definition.derive_logical_axes(optimizer=optimizer, param_logical_axes=axes)
  with pytest.raises(ConfigError, match='exactly one of optimizer and optimizer_state'):
    definition.derive_logical_axes(param_logical_axes=axes)
