"""Operations on experts: results of tiny networks, changes of the state, errors."""

import numpy as np
import pytest

from moe import rules
from moe import upcycling
from moe.tools import surgery
from t5x_lite import adafactor
from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError, ConfigError
from tests.examples import soft_router
from tests.moe import upcycling_cases as up
from tests.moe.test_upcycling import _shapes as row_shapes
from tests.optimizers.contract_rows import ROWS

_FULL = pytest.mark.full
_LAYER = 'decoder/layers_0/mlp'
_PERMUTATION = [2, 0, 3, 1]


def _network(**options):
  return up.sparse_network('decoder_only', num_layers=1, every=1, **options)


def _restored(state_dict, module):
  """Return the state of another network with the values of a state dict."""
  return up.state_shapes(module).restore_state(state_dict)


# operation, its options, the network after it.
_SAME_FUNCTION = {
  'permute': (surgery.permute, dict(permutation=_PERMUTATION), {}),
  'replicate': (surgery.replicate, dict(times=2), dict(num_experts=8, num_selected=4)),
  'split': (surgery.split, dict(slices=3), dict(num_experts=12, num_selected=6, granularity=3)),
}


@pytest.fixture(scope='module')
def before():
  module = _network()
  state = up.state_of(module)
  return state, up.logits(module, state)


@pytest.mark.parametrize('operation', _SAME_FUNCTION)
def test_the_function_is_the_same(before, operation):
  state, wanted = before
  fn, options, network = _SAME_FUNCTION[operation]
  module = _network(**network)
  new = _restored(fn(state.state_dict(), **options), module)
  np.testing.assert_allclose(up.logits(module, new), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('operation', _SAME_FUNCTION)
@pytest.mark.parametrize(
  'kind, layout', [('t5_1_0', 't5'), ('t5_1_1', 'scalable_t5'), ('decoder_only', 'scalable_t5')]
)
def test_the_function_is_the_same_in_every_network(kind, layout, operation):
  fn, options, network = _SAME_FUNCTION[operation]
  shared = dict(
    param_layout=layout,
    every=1,
    block=dict(expert_bias=True),
    router=dict(use_bias=True, bias_update_rate=0.1),
  )
  old, new = (up.sparse_network(kind, **shared | sizes) for sizes in ({}, network))
  state = up.state_of(old)
  changed = _restored(fn(state.state_dict(), **options), new)
  np.testing.assert_allclose(up.logits(new, changed), up.logits(old, state), rtol=2e-5, atol=2e-5)


def test_biases_of_routers_follow():
  module = _network(block=dict(expert_bias=True), router=dict(use_bias=True, bias_update_rate=0.1))
  old = up.flat(up.state_of(module))
  new = tree_utils.flatten_dict(surgery.permute(tree_utils.unflatten_dict(old), _PERMUTATION))
  router = f'{_LAYER}/router'
  for name in (
    f'target/{router}/router_weights/w/bias',
    f'flax_mutables/router_state/{router}/bias',
    f'flax_mutables/router_state/{router}/counts',
    f'target/{_LAYER}/expert/wo/bias',
  ):
    np.testing.assert_array_equal(new[name], old[name][_PERMUTATION], err_msg=name)
  name = f'flax_mutables/router_state/{router}/num_passes'
  np.testing.assert_array_equal(new[name], old[name])


def test_pruned_experts_are_as_if_no_router_chose_them(before):
  state, _ = before
  new = surgery.prune(state.state_dict(), [1, 3])
  old = up.flat(state)
  flat = tree_utils.flatten_dict(new)
  router = f'target/{_LAYER}/router/router_weights/w/kernel'
  np.testing.assert_array_equal(flat[router], old[router][:, [0, 2]])
  # The oracle: the old network, whose router may not choose them.
  module = _network(router=dict(use_bias=True))
  masked = dict(old) | {
    f'target/{_LAYER}/router/router_weights/w/bias': np.array([0, -1e9, 0, -1e9], np.float32)
  }
  wanted = up.logits(module, _restored(tree_utils.unflatten_dict(masked), module))
  module = _network(num_experts=2)
  np.testing.assert_allclose(
    up.logits(module, _restored(new, module)), wanted, rtol=1e-5, atol=1e-5
  )


def test_merging_undoes_replication_and_weighs_by_load(before):
  state = before[0].state_dict()
  old = up.flat(before[0])
  again = tree_utils.flatten_dict(surgery.merge(surgery.replicate(state, 2), 4))
  for name, value in old.items():
    np.testing.assert_array_equal(again[name], value, err_msg=name)
  load = {'decoder/layers_0': [3, 1, 0, 0]}
  merged = tree_utils.flatten_dict(surgery.merge(state, [[0, 1], [3, 2]], load=load))
  name = f'target/{_LAYER}/expert/wi/kernel'
  np.testing.assert_allclose(
    merged[name][0], 0.75 * old[name][0] + 0.25 * old[name][1], rtol=1e-6, atol=1e-7
  )
  np.testing.assert_allclose(
    merged[name][1], 0.5 * old[name][2] + 0.5 * old[name][3], rtol=1e-6, atol=1e-7
  )
  partly = tree_utils.flatten_dict(surgery.merge(state, [[3, 1]]))
  np.testing.assert_array_equal(partly[name][1:], old[name][[0, 2]])


def test_upcycling_in_slices_is_upcycling_and_splitting():
  def make():
    return adafactor.Adafactor(
      0.01, min_dim_size_to_factor=8, logical_factor_rules=rules.logical_factor_rules()
    )

  dense = up.state_of(up.dense_network('decoder_only', num_layers=1), make()).state_dict()
  coarse, fine = (
    up.state_shapes(_network(num_experts=n, granularity=g), make()).state_dict()
    for n, g in ((2, 1), (4, 2))
  )
  sliced = tree_utils.flatten_dict(upcycling.upcycle(2)(dense, fine))
  split = tree_utils.flatten_dict(surgery.split(upcycling.upcycle()(dense, coarse), 2))
  assert sliced.keys() == split.keys()
  for name, value in split.items():
    if '/router/' not in name:
      np.testing.assert_array_equal(sliced[name], value, err_msg=name)
  scale = f'state/param_states/{_LAYER}/expert/wo/kernel/v_row'
  stored = tree_utils.flatten_dict(dense)[scale.replace('/expert', '')]
  np.testing.assert_allclose(sliced[scale], np.stack([stored] * 4) / 4, rtol=1e-6)


def test_noise_tells_replicas_apart(before):
  state = before[0].state_dict()
  exact, noisy = (
    tree_utils.flatten_dict(surgery.replicate(state, 2, noise_stddev=s)) for s in (0.0, 0.1)
  )
  changed = [name for name in exact if np.any(exact[name] != noisy[name])]
  assert changed and all('/expert/' in name for name in changed)
  for name in changed:
    np.testing.assert_array_equal(noisy[name][::2], exact[name][::2])


# ---- Optimizers -----------------------------------------------------------------------------------------------------

_AXES = {
  'decoder/layers_0/mlp/wi/kernel': ('embed', 'mlp'),
  'decoder/norm/scale': ('embed',),
  'token_embedder/embedding': ('vocab', 'embed'),
  'encoder/layers_0/mlp/expert/wi/kernel': ('expert', 'embed', 'expert_mlp'),
  'encoder/layers_0/mlp/expert/wo/kernel': ('expert', 'expert_mlp', 'embed'),
  'encoder/layers_0/mlp/router/router_weights/w/kernel': ('embed', None),
}
_CANNOT_FOLLOW = ('shampoo', 'soap', 'scaled_adam', 'lbfgs', 'galore')


@pytest.mark.parametrize(
  'row', [row if i % 6 == 1 else pytest.param(row, marks=_FULL) for i, row in enumerate(ROWS)]
)
def test_optimizers_follow_a_permutation(row):
  """Arrays with a dim of experts have the new order, others are unchanged; or the operation raises an error."""
  rng = np.random.default_rng(0)
  stored = {
    name: np.asarray(rng.uniform(1, 5, leaf.shape)).astype(leaf.dtype)
    for name, leaf in row_shapes(row, _AXES).items()
  }
  state = tree_utils.unflatten_dict(stored)
  try:
    new = tree_utils.flatten_dict(surgery.permute(state, _PERMUTATION))
  except CheckpointError as error:
    assert any(name in row for name in _CANNOT_FOLLOW), row
    assert "optimizer_state='drop'" in str(error)
    dropped = tree_utils.flatten_dict(surgery.permute(state, _PERMUTATION, optimizer_state='drop'))
    assert (
      not any(name.startswith('state/param_states') for name in dropped) and 'state/step' in dropped
    )
    return
  assert new.keys() == stored.keys()
  for name, old in stored.items():
    own = 'layers_0/mlp/expert' in name or 'router' in name
    axes = [axis for axis, size in enumerate(old.shape) if size == 4] if own else []
    assert len(axes) <= 1
    wanted = np.take(old, _PERMUTATION, axes[0]) if axes else old
    np.testing.assert_array_equal(new[name], wanted, err_msg=name)


@pytest.mark.parametrize(
  'make',
  [
    lambda: optimizers.adamw(),
    pytest.param(
      lambda: adafactor.Adafactor(
        0.01, min_dim_size_to_factor=12, logical_factor_rules=rules.logical_factor_rules()
      ),
      marks=_FULL,
    ),
  ],
)
@pytest.mark.parametrize(
  'operation, options, network',
  [
    (surgery.prune, dict(experts=[1]), dict(num_experts=3)),
    (surgery.merge, dict(groups=2), dict(num_experts=2)),
    (surgery.replicate, dict(times=2), dict(num_experts=8)),
    (surgery.split, dict(slices=2), dict(num_experts=8, granularity=2)),
  ],
)
def test_the_new_state_is_that_of_the_new_network(make, operation, options, network):
  new = operation(up.state_of(_network(), make()).state_dict(), **options)
  wanted = tree_utils.flatten_dict(up.state_shapes(_network(**network), make()).state_dict())
  found = tree_utils.flatten_dict(new)
  assert {name: leaf.shape for name, leaf in found.items()} == {
    name: leaf.shape for name, leaf in wanted.items()
  }
  assert all(np.asarray(found[name]).dtype == leaf.dtype for name, leaf in wanted.items())


# ---- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'operate, message',
  [
    (
      lambda s: surgery.permute(s, [0, 1, 2, 2]),
      r'`permute.permutation` must be .* in decoder/.*, got \[0, 1, 2, 2\]',
    ),
    (lambda s: surgery.permute(s, [0, 1]), 'each number from 0 to 3 once'),
    (
      lambda s: surgery.permute(s, _PERMUTATION, ['decoder/layers_1']),
      "sparse layer 'decoder/layers_1'.*layers_0",
    ),
    (lambda s: surgery.prune(s, [4]), r'at most 3 different numbers from 0 to 3 in .*, got \[4\]'),
    (lambda s: surgery.prune(s, [0, 1, 2, 3]), 'at most 3 different numbers'),
    (
      lambda s: surgery.prune(s, {'encoder/layers_1': [0]}),
      'no value for the layer decoder/layers_0/mlp',
    ),
    (lambda s: surgery.merge(s, 8), 'a divisor of the number of experts 4, .*got 8'),
    (lambda s: surgery.merge(s, 3), 'a divisor'),
    (lambda s: surgery.merge(s, [[0, 1], [1, 2]]), 'at most 4 different numbers'),
    (lambda s: surgery.merge(s, [[0, 9]]), r'from 0 to 3 in .*, got \[0, 9\]'),
    (lambda s: surgery.merge(s, 2, load={'decoder/layers_0': [1, 2]}), 'one finite number'),
    (lambda s: surgery.split(s, 5), r'shape \(.*24.*\) with slices=5'),
    (lambda s: surgery.split(s, 0), 'slices` must be an integer >= 1, got 0'),
    (
      lambda s: surgery.replicate(s, 2, noise_stddev=-1),
      'noise_stddev` must be a number >= 0, got -1',
    ),
    (lambda s: surgery.permute(s, _PERMUTATION, optimizer_state='folow'), "mean 'follow'"),
  ],
)
def test_invalid_operations(before, operate, message):
  with pytest.raises((CheckpointError, ConfigError), match=message):
    operate(before[0].state_dict())


def test_a_dense_state_has_no_experts():
  with pytest.raises(CheckpointError, match='has no experts'):
    surgery.replicate(up.state_of(up.dense_network('decoder_only')).state_dict(), 2)


@pytest.mark.parametrize('kind, layout', [('decoder_only', 't5'), ('t5_1_1', 'scalable_t5')])
def test_routers_with_several_slots_for_each_expert_raise(kind, layout):
  router = soft_router.SoftRouter(4, num_slots=2)
  network = up.sparse_network(kind, param_layout=layout, every=1, block=dict(router=router))
  with pytest.raises(
    CheckpointError, match='surgery: .*router_weights/w/kernel .*of the 4 experts.* Soft routing'
  ):
    surgery.permute(up.state_of(network).state_dict(), _PERMUTATION)
