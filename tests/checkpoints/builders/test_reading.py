"""Builders that read checkpoints: restore, average, subtree."""

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints import builders
from tests.checkpoints import checkpoint_states as states
from tests.checkpoints.builders.builder_cases import build
from tests.checkpoints.builders.builder_cases import target

EMPTY = builders.BuiltState()


def _params(step):
  return {
    name: value for name, value in states.flat_numpy(step).items() if name.startswith('target/')
  }


def test_restore_renames_and_knows_its_step(saved):
  path = str(saved / 'checkpoint_2')
  step, values = build(builders.Restore(path), EMPTY, target())
  assert step == builders.Restore(path).first_step(None) == 2
  states.assert_same(tree_utils.unflatten_dict(values), states.flat_numpy(2))
  dropped = builders.Restore(path, [('state/.*', None)])
  step, values = build(dropped, EMPTY, target())
  assert step is None and dropped.first_step(5) is None and values.keys() == _params(2).keys()


def test_an_average_is_the_mean_of_the_parameters_alone(saved, tmp_path):
  paths = [str(saved / f'checkpoint_{step}') for step in (1, 2)]
  expected = {
    name: ((value.astype(np.float64) + _params(2)[name]) / 2).astype(np.float32)
    for name, value in _params(1).items()
  }
  for builder in (
    builders.Average(paths),
    builders.Average(paths[::-1]),
    builders.Average(str(saved)),
    builders.Average(str(saved), last=2),
  ):
    step, values = build(builder, EMPTY, target())
    assert step == builder.first_step(None) == 2  # the newest, in any order
    states.assert_same(
      tree_utils.unflatten_dict(values), expected | {'state/step': np.asarray(np.int32(2))}
    )
  assert builders.Average(str(saved), last=1).paths_of_model == (paths[1],)


def test_an_average_keeps_the_dtype_and_integers_of_the_newest(tmp_path):
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig(dtype='bfloat16')
  ) as manager:
    for step, value in ((1, 1.0), (5, 2.0)):
      manager.save(
        step,
        {
          'target': {'w': jnp.full(3, value), 'count': jnp.int32(step)},
          'flax_mutables': {'router': {'bias': np.full(2, value, np.float32)}},
        },
      )
  _, values = build(builders.Average(str(tmp_path)), EMPTY, target())
  assert values['target/w'].dtype == jnp.bfloat16 and (values['target/w'] == 1.5).all()
  assert values['target/count'] == 5 and (values['flax_mutables/router/bias'] == 1.5).all()


def test_checkpoints_of_other_models_have_no_average(saved, tmp_path):
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    flat = _params(1) | {
      'target/new/w': np.zeros(2, np.float32),
      'target/decoder/decoder_norm/scale': np.ones(3),
    }
    del flat['target/token_embedder/embedding']
    manager.save(3, tree_utils.unflatten_dict(flat | {'state/step': np.int32(3)}))
  message = (
    r"same model, got '.*checkpoint_3', in which, compared with '.*checkpoint_2', 1 arrays are missing: "
    r'target/token_embedder/embedding; 1 arrays are additional: target/new/w; 1 arrays are of another shape: '
    r'target/decoder/decoder_norm/scale \(3,\) instead of \(8,\)'
  )
  with pytest.raises(errors.CheckpointError, match=message):
    build(
      builders.Average([str(saved / 'checkpoint_2'), str(tmp_path / 'checkpoint_3')]),
      EMPTY,
      target(),
    )
  with pytest.raises(errors.CheckpointError, match='at least 3 checkpoint.s., got .* with 2'):
    _ = builders.Average(str(saved), last=3).paths_of_model
  with pytest.raises(errors.CheckpointError, match='at least 1 checkpoint.s., got .* with 0'):
    _ = builders.Average(str(tmp_path / 'none')).paths_of_model


def test_a_subtree_moves_and_drops_the_rest(saved):
  built = builders.Restore(str(saved / 'checkpoint_2')).build(EMPTY, target())
  builder = builders.Subtree('encoder', into='tower/encoder')
  step, values = build(builder, built, target())
  assert step is None and builder.first_step(2) is None
  kernel = states.flat_numpy(2)['target/encoder/layers_0/mlp/wi/kernel']
  states.assert_same(values, {'target/tower/encoder/layers_0/mlp/wi/kernel': kernel})
  _, up = build(builders.Subtree('tower'), builders.BuiltState(arrays=values), target())
  states.assert_same(up, {'target/encoder/layers_0/mlp/wi/kernel': kernel})


def test_a_subtree_of_another_checkpoint_is_added(saved):
  built = builders.Restore(str(saved / 'checkpoint_2')).build(EMPTY, target())
  builder = builders.Subtree('encoder', into='encoder', path=str(saved / 'checkpoint_1'))
  step, values = build(builder, built, target())
  assert step == builder.first_step(2) == 2
  name = 'target/encoder/layers_0/mlp/wi/kernel'
  states.assert_same(
    values, _params(2) | {name: _params(1)[name], 'state/step': np.asarray(np.int32(2))}
  )


def test_a_prefix_without_parameters_names_the_others(saved):
  with pytest.raises(
    errors.CheckpointError, match="prefix` must .*, got 'enc'. At the top it has decoder, enc"
  ):
    build(builders.Subtree('enc', path=str(saved / 'checkpoint_1')), EMPTY, target())


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: builders.Restore(''), "`Restore.path` must be the path of a checkpoint, got ''"),
    (
      lambda: builders.Average(['a']),
      'Average.path` must be a run directory, or paths of at least two',
    ),
    (
      lambda: builders.Average(['a', 'b'], last=2),
      'Average.last` must be None with several paths, got 2',
    ),
    (lambda: builders.Average('a', last=0), 'Average.last` must be an integer >= 1 or None, got 0'),
    (
      lambda: builders.Average(['a', 'b', 'a/']),
      'Average.path` must be .* all different, got .*Give each',
    ),
    (
      lambda: builders.Subtree('/encoder'),
      "Subtree.prefix` must be a path in the tree .*no '/' at their ends",
    ),
    (
      lambda: builders.Subtree('a//b'),
      "Subtree.prefix` must be a path in the tree .*, got 'a//b'. .* and no '//'",
    ),
    (lambda: builders.Subtree('a', into='b//c'), 'Subtree.into` must be a path in the tree'),
    (
      lambda: builders.Restore('a', 5),
      'Restore.assignment_map` must be pairs .*, got 5. 5 is not a list',
    ),
    (
      lambda: builders.Restore('a', [('(', None)]),
      "Restore.assignment_map` must be pairs .*'.' is not a regular exp",
    ),
  ],
)
def test_invalid_options(make, message):
  with pytest.raises(errors.ConfigError, match=message):
    make()
