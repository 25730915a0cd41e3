"""Transforms of a restore: assignment maps, functions, parameter trees."""

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints.restoring import transforms
from tests.checkpoints import checkpoint_states as states
from tests.checkpoints.restoring.restore_cases import flat_target
from tests.checkpoints.restoring.restore_cases import nested
from tests.checkpoints.restoring.restore_cases import restore
from tests.checkpoints.restoring.restore_cases import spec


def test_assignment_map(saved):
  flat = flat_target()
  wanted = {
    name.replace('encoder/layers_0/mlp', 'encoder/block_0/ffn'): leaf for name, leaf in flat.items()
  }
  wanted['target/decoder/logits/kernel'] = spec(16, 8)
  rules = [
    (r'(.*)/encoder/block_(\d+)/ffn/(.*)', r'\1/encoder/layers_\2/mlp/\3'),
    (r'target/decoder/logits/kernel', r'target/token_embedder/embedding'),
  ]
  shardings = {
    name: states.sharding(states.P('model') if leaf.ndim else states.P())
    if hasattr(leaf, 'ndim')
    else states.sharding()
    for name, leaf in wanted.items()
  }
  shardings['target/decoder/logits/kernel'] = states.sharding(states.P('data', 'model'))
  restored = restore(saved, nested(wanted), assignment_map=rules, shardings=nested(shardings))
  stored = states.flat_numpy(2)
  expected = {
    name.replace('encoder/layers_0/mlp', 'encoder/block_0/ffn'): leaf
    for name, leaf in stored.items()
  }
  # One stored array may serve two names, in two layouts.
  expected['target/decoder/logits/kernel'] = stored['target/token_embedder/embedding']
  states.assert_same(restored.state, expected)
  for name, leaf in tree_utils.flatten_dict(restored.state).items():
    assert leaf.sharding == shardings[name], name


def test_assignment_map_drops_with_none(saved):
  initial = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), states.target())
  rules = [(r'state/param_states/.*', None)]
  restored = restore(
    saved, assignment_map=rules, fallback_to_scratch=True, initial_state_fn=lambda: initial
  )
  expected = {
    name: np.zeros_like(leaf) if name.startswith('state/param_states') else leaf
    for name, leaf in states.flat_numpy(2).items()
  }
  states.assert_same(restored.state, expected)
  with pytest.raises(errors.CheckpointError, match='missing from the checkpoint'):
    restore(saved, assignment_map=rules)
  # A run that resumes keeps its optimizer state.
  resumed = restore(saved, assignment_map=rules, is_resuming=True)
  states.assert_same(resumed.state, states.flat_numpy(2))


@pytest.mark.parametrize(
  'rules, message',
  [
    (
      [('target/nothing', None)],
      r"the rule\(s\) \[\('target/nothing', None\)\] match no name of the target state in",
    ),
    ([('target', None)], 'match no name'),
    (
      [('target/token_embedder/(.*)', r'target/token_embeder/\1')],
      "restore 'target/token_embedder/embedding': the checkpoint does not hold 'target/token_embeder/embedding'. "
      "Did you mean 'target/token_embedder/embedding'",
    ),
    ([('target/token_embedder/(.*)', r'target/\2')], 'does not suit the expression'),
  ],
)
def test_assignment_map_rejects(saved, rules, message):
  with pytest.raises(errors.CheckpointError, match=message):
    restore(saved, assignment_map=rules)


def test_assignment_map_on_trees():
  stored = {'old': {'a': 1, 'b': 2}, 'both': 3, 'rest': 4}
  wanted = {'new': {'a': 0, 'b': 0}, 'both': 0, 'absent': 0}
  apply = checkpoints.apply_assignment_map
  # The first rule that matches decides; what nothing refers to stays, what only a rename refers to goes.
  assert apply(stored, wanted, [('new/b', None), ('new/(.*)', r'old/\1')]) == {
    'new': {'a': 1},
    'both': 3,
    'old': {'b': 2},
    'rest': 4,
  }
  assert apply(stored, wanted, [('nothing', 'x')], require_all_rules_match=False) == stored
  # None also drops names that are only in the checkpoint.
  assert apply(stored, wanted, [('rest|old/.*', None)]) == {'both': 3}
  assert apply(stored, wanted, [('nothing', 'x')], is_resuming=True) == stored


def test_state_utils():
  first, second = {'a': {'b': 1, 'c': 2}, 'd': 3}, {'a': {'b': 10}, 'e': 5}
  assert checkpoints.intersect_state(first, second) == {'a': {'b': 1}}
  assert checkpoints.merge_state(first, second) == {'a': {'b': 1, 'c': 2}, 'd': 3, 'e': 5}
  assert checkpoints.merge_state(first, second, overwrite=True) == {
    'a': {'b': 10, 'c': 2},
    'd': 3,
    'e': 5,
  }
  assert checkpoints.flatten_state_dict({'a': {}}) == {}
  assert checkpoints.flatten_state_dict({'a': {}}, keep_empty_nodes=True) == {'a': {}}
  assert checkpoints.get_name_tree({'a': {}, 'b': {'c': 1}}, keep_empty_nodes=True) == {
    'a': {},
    'b': {'c': 'b/c'},
  }


def test_transformation_fns_run_in_order(saved):
  seen = []

  def first(state, target, *, is_resuming):
    seen.append(is_resuming)
    assert isinstance(state['target']['decoder']['decoder_norm']['scale'], np.ndarray)
    assert target['state']['step'].dtype == np.int32
    return state | {'state': state['state'] | {'step': state['state']['step'] + 1}}

  def second(state, target, *, is_resuming):
    del target, is_resuming
    return state | {'state': state['state'] | {'step': state['state']['step'] * 10}}

  restored = restore(
    saved,
    state_transformation_fns=[second],
    transformation_fns=[first],
    shardings=states.shardings(),
  )
  states.assert_same(
    restored.state, states.flat_numpy(2) | {'state/step': np.asarray(np.int32(30))}
  )
  assert seen == [False]


def split_heads(params):
  """A change of layout as param_layouts makes them: other names and shapes."""
  flat = tree_utils.flatten_dict(params)
  kernel = flat.pop('encoder/layers_0/mlp/wi/kernel')
  return tree_utils.unflatten_dict(flat | {'encoder/layers/wi': kernel.reshape(8, 1, 24)})


def test_convert_param_trees(saved):
  def convert_flat(flat):
    return {
      name.replace('layers_0/mlp/wi/kernel', 'layers/wi'): leaf.reshape(8, 1, 24)
      if 'wi/kernel' in name
      else leaf
      for name, leaf in flat.items()
    }

  expected = convert_flat(states.flat_numpy(2))
  target = states.shapes(nested(expected))
  restored = restore(
    saved,
    target,
    transformation_fns=[checkpoints.convert_param_trees(split_heads)],
    is_resuming=True,
    shardings=states.sharding(),
  )
  states.assert_same(restored.state, expected)  # The moments have followed the parameters.
  assert checkpoints.read_metadata(saved / 'checkpoint_2') == {'param_layout': 't5'}


def test_convert_rejects_state_that_cannot_follow(tmp_path):
  params = {'w': np.zeros((4, 6), np.float32)}
  factored = {'w': {'v_row': np.zeros(4, np.float32), 'v_col': np.zeros(6, np.float32)}}
  state = {
    'target': params,
    'state': {'step': np.int32(1), 'param_states': factored},
    'param_average': params,
  }
  convert = checkpoints.convert_param_trees(lambda tree: {'kernel': tree['w'].reshape(2, 2, 6)})
  new_params = {'kernel': spec(2, 2, 6)}
  target = {
    'target': new_params,
    'param_average': new_params,
    'state': {
      'step': spec(dtype=np.int32),
      'param_states': {'kernel': {'v_row': spec(4), 'v_col': spec(6)}},
    },
  }
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(1, state)
    with pytest.raises(
      errors.CheckpointError, match='cannot be converted to another param_layout: .*w/v_row'
    ):
      manager.restore(1, target, transformation_fns=[convert])
    # For inference, only the parameters are wanted.
    restored = manager.restore(
      1, {'target': new_params, 'param_average': new_params}, transformation_fns=[convert]
    )
    assert restored.state['param_average']['kernel'].shape == (2, 2, 6)


def test_an_accepted_difference_does_not_change_the_remedy():
  """The average is all that is wrong if missing arrays are accepted."""
  stored = {'target/w': spec(2), 'param_average/w': spec(2)}
  wanted = {'target/w': spec(2), 'state/param_states/w/m': spec(2)}
  with pytest.raises(errors.CheckpointError, match='has a running average of the parameters'):
    transforms.check_fit(stored, wanted, allow_surplus=False, allow_missing=True, where='run')
  with pytest.raises(errors.CheckpointError, match='Use the model and optimizer that wrote it'):
    transforms.check_fit(stored, wanted, allow_surplus=False, allow_missing=False, where='run')
