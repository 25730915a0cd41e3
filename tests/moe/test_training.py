"""T5X's trainer of sparse models, which multiplies gradients of experts."""

import itertools

import jax
import numpy as np
import pytest

import moe
from moe import training
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import trainer
from t5x_lite.errors import ConfigError
from tests.models import toy_model


def _after_two_steps(trainer_cls, state, **options):
  """Return the parameters after two steps of SGD."""
  model = toy_model.make_model(optimizers.sgd())
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  state = jax.tree.map(np.array, state)
  with trainer_cls(
    model,
    state,
    partitioner,
    (),
    None,
    partitioner.get_mesh_axes(state),
    jax.random.key(0),
    lambda step: 0.01,
    None,
    **options,
  ) as runner:
    runner.train(itertools.repeat(toy_model.make_batch()), 1)
    return jax.device_get(runner.train_state.params)


def test_gradients_of_matching_parameters_are_multiplied():
  state = jax.device_get(toy_model.make_state(toy_model.make_model(optimizers.sgd())))
  plain = _after_two_steps(trainer.Trainer, state)
  scaled = _after_two_steps(
    moe.MoeTrainer, state, num_expert_partitions=4, sharded_match_fn=moe.match_fn('hid')
  )
  for name, old in state.params.items():
    step, other_step = plain[name] - old, scaled[name] - old
    assert np.linalg.norm(step) > 0
    np.testing.assert_allclose(
      other_step, (4 if name == 'hidden' else 1) * step, rtol=1e-3, atol=1e-6, err_msg=name
    )
  assert moe.MoeTrainer.ACCEPTS_STACKED_LAYERS
  # Clipped after the factor: a step of the rate 0.01 and the norm 0.5.
  clipped = _after_two_steps(
    moe.MoeTrainer,
    state,
    num_expert_partitions=4,
    sharded_match_fn=moe.match_fn('hid'),
    gradient_clip_norm=0.5,
  )
  steps = {name: clipped[name] - old for name, old in state.params.items()}
  norm = np.linalg.norm([np.linalg.norm(step) for step in steps.values()])
  np.testing.assert_allclose(norm, 0.005, rtol=1e-3)


def test_options_are_checked():
  state = toy_model.make_state(toy_model.make_model())
  for options, message in (
    ({'num_expert_partitions': 0}, 'num_expert_partitions. must be .* got 0'),
    ({'num_expert_partitions': 2, 'sharded_match_fn': '.*'}, 'sharded_match_fn. must be a func'),
  ):
    with pytest.raises(ConfigError, match=message):
      _after_two_steps(moe.MoeTrainer, state, **options)


def test_selected_leaves_are_changed():
  grads = {'mlp': {'expert': {'wi': np.ones(3)}, 'router': np.ones(2)}}
  scaled = training.scale_sharded_grads(grads, moe.match_fn('.*expert.*'), 3.0)
  assert scaled['mlp']['expert']['wi'][0] == 3 and scaled['mlp']['router'][0] == 1
  assert training.scale_sharded_grads(grads, None, 3.0) is grads
  assert training.tree_map_with_names(np.sum, grads) == {'mlp': {'expert': {'wi': 3}, 'router': 2}}
