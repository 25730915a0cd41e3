"""Chains: made from a configuration, complete, partial and wrong states, steps, and checks on shapes."""

import dataclasses
import logging

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints import builders
from tests.checkpoints import checkpoint_states as states
from tests.checkpoints.builders.builder_cases import restore_with

Restore = checkpoints.RestoreCheckpointConfig
WI = 'target/encoder/layers_0/mlp/wi/kernel'


def _initial():
  return jax.tree.map(lambda leaf: np.full(leaf.shape, 7, leaf.dtype), states.target())


def _begin(state):
  """Return optimizer state with the values of the parameters."""
  params = tree_utils.flatten_dict(state['target'])
  moments = {
    f'state/param_states/0/{moment}/{name}': value
    for moment in ('mu', 'nu')
    for name, value in params.items()
  }
  return tree_utils.unflatten_dict(moments | {'state/param_states/0/count': np.int32(0)})


def _begun(flat, step):
  """Return the complete state that begins with the parameters of `flat`."""
  params = tree_utils.unflatten_dict(
    {name: value for name, value in flat.items() if name.startswith('target/')}
  )
  made = {
    name: np.asarray(value) for name, value in tree_utils.flatten_dict(_begin(params)).items()
  }
  return tree_utils.flatten_dict(params) | made | {'state/step': np.asarray(np.int32(step))}


@dataclasses.dataclass(frozen=True)
class Add(builders.StateBuilder):
  """A user's builder, which adds an array that it makes itself."""

  name: str
  shape: tuple[int, ...] = (8, 24)

  def build(self, state, target):
    return state.replace(arrays={**state.arrays, self.name: np.full(self.shape, 3, np.float32)})


def test_a_configuration_is_the_short_form_of_a_chain(saved):
  path, fn, rules = (
    str(saved / 'checkpoint_2'),
    lambda state, wanted, *, is_resuming: state,
    (('state/step', None),),
  )
  own = builders.StartAtStep(4)
  cfg = Restore(
    str(saved), assignment_map=rules, state_transformation_fns=[fn, Add('a')], builders=[own]
  )
  assert builders.chain_of(path, cfg) == (
    builders.Restore(path, rules),
    builders.Transform(fn),
    Add('a'),
    own,
  )
  # A run that resumes is neither renamed nor changed.
  assert builders.chain_of(path, cfg, is_resuming=True) == (
    builders.Restore(path),
    builders.Transform(fn),
    Add('a'),
  )
  assert builders.first_step(builders.chain_of(path, cfg)) == 4
  assert (
    builders.first_step(builders.chain_of(path, Restore(str(saved), assignment_map=rules))) is None
  )
  assert builders.first_step(builders.chain_of(path, Restore(str(saved)))) == 2
  assert builders.describe(path, cfg) == f'{path}, then a new first step'


def test_a_complete_state_is_used_as_it_is(saved):
  restored = restore_with(
    [builders.StartAtStep(5)],
    states.target(),
    saved / 'checkpoint_2',
    initial_state_fn=_initial,
    from_params_fn=_begin,
  )
  states.assert_same(restored.state, states.flat_numpy(2) | {'state/step': np.asarray(np.int32(5))})
  assert restored.step == 5 and restored.is_verified


def test_the_optimizer_begins_with_built_parameters(saved, caplog):
  with caplog.at_level(logging.INFO, 't5x_lite'):
    restored = restore_with(
      [builders.Average(str(saved))],
      states.target(),
      from_params_fn=_begin,
      shardings=states.shardings(),
    )
  mean = {
    name: (value + states.flat_numpy(2)[name]) / 2 for name, value in states.flat_numpy(1).items()
  }
  states.assert_same(restored.state, _begun({n: v.astype(np.float32) for n, v in mean.items()}, 2))
  assert (restored.step, restored.path, restored.data_state) == (2, None, None)
  assert jax.tree.map(lambda leaf: leaf.sharding, restored.state) == states.shardings()
  assert 'Built the state of step 2 from the average of 2 checkpoints' in caplog.text
  assert '4 of 11 arrays; the others are new' in caplog.text


def test_a_partial_state_of_parameters_is_completed_by_initialisation(saved, caplog):
  chain = [builders.Subtree('encoder', 'encoder', path=str(saved / 'checkpoint_1'))]
  with caplog.at_level(logging.INFO, 't5x_lite'):
    restored = restore_with(
      chain, states.target(), initial_state_fn=_initial, from_params_fn=_begin
    )
  initial = tree_utils.flatten_dict(_initial())
  states.assert_same(restored.state, _begun(initial | {WI: states.flat_numpy(1)[WI]}, 0))
  assert (
    'initialised from scratch: target/decoder/decoder_norm/scale, target/token_embedder/embedding'
    in caplog.text
  )
  # Without an initialisation, as for inference, every parameter must be built.
  with pytest.raises(errors.CheckpointError, match='2 missing from the checkpoint'):
    restore_with(chain, {'target': states.target()['target']})


def test_anything_else_lists_names_and_shapes(saved):
  begin = dict(initial_state_fn=_initial, from_params_fn=_begin)
  surplus = [builders.Average(str(saved)), Add('target/encoder/other/kernel')]
  message = r'state built from .the average of (.|\n)*only:\n    target/encoder/other/kernel .8, 24'
  with pytest.raises(errors.CheckpointError, match=message):
    restore_with(surplus, states.target(), **begin)
  misshapen = [builders.Average(str(saved)), Add(WI, (3,))]
  with pytest.raises(errors.CheckpointError, match=r'wi/kernel: stored \(3,\), wanted \(8, 24\)'):
    restore_with(misshapen, states.target(), **begin)


def test_parameters_are_never_made_up(saved):
  """Neither next to the state of an optimizer, nor for a checkpoint of the entire model."""
  begin = dict(initial_state_fn=_initial, from_params_fn=_begin)
  part = [Add('state/param_states/0/mu/encoder/layers_0/mlp/wi/kernel'), Add(WI)]
  with pytest.raises(errors.CheckpointError, match='8 missing from the checkpoint'):
    restore_with(part, states.target(), initial_state_fn=_initial)
  new = tree_utils.flatten_dict(states.target()) | {
    'target/new': jax.ShapeDtypeStruct((2,), np.float32)
  }
  chain, target = [builders.Reinitialize(['decoder/.*'])], tree_utils.unflatten_dict(new)
  with pytest.raises(errors.CheckpointError, match='missing from the checkpoint:\n    target/new'):
    restore_with(chain, target, saved / 'checkpoint_2', **begin)


def test_a_chain_that_builds_nothing_is_not_a_run_from_scratch():
  message = (
    "must build parameters, got 'a new vocabulary, then a new first step', which builds none"
  )
  with pytest.raises(errors.CheckpointError, match=message):
    restore_with(
      [builders.NewVocabulary(), builders.StartAtStep(3)],
      states.target(),
      initial_state_fn=_initial,
      from_params_fn=_begin,
    )


def test_initial_values_need_an_initialisation(saved):
  chain, path = [builders.Reinitialize(['decoder/.*'])], saved / 'checkpoint_2'
  with pytest.raises(
    errors.ConfigError, match='initial values of target/decoder/decoder_norm/scale.*fallback_init'
  ):
    restore_with(chain, states.target(), path, from_params_fn=_begin)
  restored = restore_with(
    chain, states.target(), path, from_params_fn=_begin, initial_state_fn=_initial
  )
  initial = {'target/decoder/decoder_norm/scale': np.full(8, 7, np.float32)}
  states.assert_same(restored.state, _begun(states.flat_numpy(2) | initial, 2))


def test_a_check_runs_the_chain_without_reading_values(saved, monkeypatch):
  def no_values(*args):
    raise AssertionError('values are read')

  source = type(checkpoints.open_source(saved / 'checkpoint_2'))
  for method in ('read', 'verify'):
    monkeypatch.setattr(source, method, no_values)
  wanted = tree_utils.flatten_dict(states.target()) | {
    'target/token_embedder/embedding': jax.ShapeDtypeStruct((20, 8), np.float32)
  }
  for name in list(wanted):
    if name.endswith('token_embedder/embedding') and name.startswith('state/'):
      wanted[name] = jax.ShapeDtypeStruct((20, 8), np.float32)
  chain = [
    builders.Average(str(saved)),
    builders.NewVocabulary('initializer'),
    builders.OnArrays(no_values),
  ]
  wanted = tree_utils.unflatten_dict(wanted)
  checkpoints.check_fits(None, wanted, restore_cfg=Restore(builders=chain), may_begin=True)
  with pytest.raises(
    errors.CheckpointError, match=r'embedding: stored \(16, 8\), wanted \(20, 8\)'
  ):
    checkpoints.check_fits(None, wanted, restore_cfg=Restore(builders=chain[:1]), may_begin=True)


def test_the_identity_of_results_names_builders_and_their_checkpoints(saved):
  assert builders.identity(Restore('a')) == {}
  cfg = Restore(builders=[builders.Average(str(saved), last=1), builders.OnArrays(_begin)])
  average, function = builders.identity(cfg)['builders']
  assert (
    'last=1' in average
    and 'checkpoint_2' in average
    and function == f'OnArrays(): {__name__}._begin'
  )


@pytest.mark.parametrize(
  'chain',
  [
    ['x'],
    [builders.NewVocabulary],
    builders.NewVocabulary(),
    [builders.OnArrays(_begin), builders.StartAtStep()],
  ],
)
def test_invalid_chains(chain):
  with pytest.raises(
    errors.ConfigError, match='builders` must be a sequence of builders, those on shapes before'
  ):
    Restore(builders=chain).check()
