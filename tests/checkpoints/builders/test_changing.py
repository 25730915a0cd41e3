"""Builders that change a state: average as parameters, vocabulary, new values, step, functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints import builders
from t5x_lite.checkpoints.restoring import transforms
from tests.checkpoints import checkpoint_states as states
from tests.checkpoints.builders.builder_cases import build
from tests.checkpoints.builders.builder_cases import restore_with
from tests.checkpoints.builders.builder_cases import target

EMBEDDING, NORM = 'target/token_embedder/embedding', 'target/decoder/decoder_norm/scale'


def _state(**more):
  return builders.BuiltState(step=2, arrays=states.flat_numpy(2) | more)


def _without_optimizer(flat):
  return {name: value for name, value in flat.items() if not name.startswith('state/param_states/')}


def test_the_average_of_the_run_becomes_the_parameters():
  averages = {
    name.replace('target/', 'param_average/'): value + 1
    for name, value in states.flat_numpy(2).items()
    if name.startswith('target/')
  }
  step, values = build(builders.ParamAverage(), _state(**averages), target())
  expected = {
    name: value + 1 if name.startswith('target/') else value
    for name, value in _without_optimizer(states.flat_numpy(2)).items()
  }
  assert step == 2
  states.assert_same(values, expected)
  with pytest.raises(
    errors.CheckpointError, match='must follow the restore of a checkpoint with param_average'
  ):
    build(builders.ParamAverage(), _state(), target())
  del averages[EMBEDDING.replace('target/', 'param_average/')]
  with pytest.raises(
    errors.CheckpointError, match=f'an average of every parameter, got none of {EMBEDDING}'
  ):
    build(builders.ParamAverage(), _state(**averages), target())


@pytest.mark.parametrize('new_rows', ['mean', 'initializer'])
def test_a_larger_vocabulary_keeps_the_rows(new_rows):
  old = states.flat_numpy(2)
  logits = 'target/decoder/logits_dense/kernel'
  kernel = np.arange(128, dtype=np.float32).reshape(8, 16)
  wanted = tree_utils.flatten_dict(states.target()) | {
    EMBEDDING: jax.ShapeDtypeStruct((20, 8), np.float32),
    logits: jax.ShapeDtypeStruct((8, 20), np.float32),
  }
  step, values = build(builders.NewVocabulary(new_rows), _state(**{logits: kernel}), target(wanted))
  assert step == 2
  new = (
    np.full((4, 8), 7)
    if new_rows == 'initializer'
    else np.tile(old[EMBEDDING].mean(0, dtype=np.float64), (4, 1))
  )
  columns = (
    np.full((8, 4), 7) if new_rows == 'initializer' else np.tile(kernel.mean(1, keepdims=True), 4)
  )
  states.assert_same(
    values,
    _without_optimizer(old)
    | {
      EMBEDDING: np.concatenate([old[EMBEDDING], new]).astype(np.float32),
      logits: np.concatenate([kernel, columns], axis=1).astype(np.float32),
    },
  )


def test_a_smaller_vocabulary_drops_rows_and_the_same_changes_nothing():
  wanted = tree_utils.flatten_dict(states.target())
  smaller = wanted | {EMBEDDING: jax.ShapeDtypeStruct((10, 8), np.float32)}
  _, values = build(builders.NewVocabulary('initializer'), _state(), target(smaller))
  np.testing.assert_array_equal(values[EMBEDDING], states.flat_numpy(2)[EMBEDDING][:10])
  assert values.keys() == _without_optimizer(states.flat_numpy(2)).keys()
  _, values = build(builders.NewVocabulary(), _state(), target(wanted))
  states.assert_same(values, states.flat_numpy(2))  # with the optimizer's state


def test_a_vocabulary_in_two_dims_or_without_parameters_is_an_error():
  wanted = tree_utils.flatten_dict(states.target()) | {
    EMBEDDING: jax.ShapeDtypeStruct((20, 9), np.float32)
  }
  with pytest.raises(
    errors.CheckpointError,
    match=r'one dim of .*embedding, got \(16, 8\), and the model has \(20, 9',
  ):
    build(builders.NewVocabulary(), _state(), target(wanted))
  with pytest.raises(
    errors.CheckpointError,
    match="NewVocabulary.params` must match .*such as '.*', got .'heads'., w",
  ):
    build(builders.NewVocabulary(params=['heads']), _state(), target())


def test_new_values_of_some_parameters():
  builder = builders.Reinitialize(['decoder/.*'])
  step, values = build(builder, _state(), target())
  assert step == 2 and builder.build(_state(), target()).initialized == {NORM}
  states.assert_same(
    values, _without_optimizer(states.flat_numpy(2)) | {NORM: np.full(8, 7, np.float32)}
  )


def test_another_first_step_keeps_the_optimizer():
  builder = builders.StartAtStep(0)
  step, values = build(builder, _state(), target())
  assert step == builder.first_step(2) == 0
  states.assert_same(values, states.flat_numpy(2) | {'state/step': np.asarray(np.int32(0))})


class _Halve(transforms.AcceptsShapes):
  """A function that declares that it maps shapes."""

  def __call__(self, state_dict, target_state_dict, *, is_resuming=False):
    def halve(leaf):
      return (
        leaf
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else (np.asarray(leaf) / 2).astype(leaf.dtype)
      )

    return jax.tree.map(halve, state_dict)


def test_a_function_gets_arrays_or_shapes():
  _, values = build(builders.Transform(_Halve()), _state(), target())
  np.testing.assert_array_equal(values[NORM], states.flat_numpy(2)[NORM] / 2)
  assert (
    not builders.Transform(_Halve()).needs_values
    and builders.Transform(lambda state, wanted: state).needs_values
  )
  built = builders.Transform(_Halve()).build(_state(), target(has_values=False))
  assert built.arrays[NORM] == jax.ShapeDtypeStruct((8,), np.float32)


def _double(tree):
  return {**tree, 'target': jax.tree.map(lambda x: 2 * x, tree['target'])}


def test_a_function_of_the_complete_state_on_its_devices(saved):
  restored = restore_with(
    [builders.OnArrays(_double)],
    states.target(),
    saved / 'checkpoint_2',
    shardings=states.shardings(),
  )
  states.assert_same(
    restored.state,
    {
      name: value * (2 if name.startswith('target/') else 1)
      for name, value in states.flat_numpy(2).items()
    },
  )
  assert jax.tree.map(lambda leaf: leaf.sharding, restored.state) == states.shardings()
  shrink = builders.OnArrays(
    lambda tree: {**tree, 'target': jax.tree.map(lambda x: x[:1], tree['target'])}
  )
  with pytest.raises(
    errors.CheckpointError, match='must keep names, shapes and dtypes, got other ones from .*lambda'
  ):
    restore_with([shrink], states.target(), saved / 'checkpoint_2')


@pytest.mark.parametrize(
  'make, message',
  [
    (
      lambda: builders.NewVocabulary('zero'),
      "new_rows` must be one of 'mean', 'initializer', got 'zero'",
    ),
    (
      lambda: builders.Reinitialize('decoder'),
      'Reinitialize.params` must be a list of regular expressions',
    ),
    (
      lambda: builders.Reinitialize(['a(']),
      'Reinitialize.params` must be a list of regular expressions',
    ),
    (
      lambda: builders.StartAtStep(-1),
      r'StartAtStep.step` must be an integer in \[0, 2147483648\), got -1',
    ),
  ],
)
def test_invalid_options(make, message):
  with pytest.raises(errors.ConfigError, match=message):
    make()


def test_bfloat16_rows_have_a_mean_in_float64():
  table = jnp.full((16, 8), 1.0, jnp.bfloat16)
  wanted = tree_utils.flatten_dict(states.target()) | {
    EMBEDDING: jax.ShapeDtypeStruct((20, 8), jnp.bfloat16)
  }
  _, values = build(
    builders.NewVocabulary(), _state(**{EMBEDDING: np.asarray(table)}), target(wanted)
  )
  assert values[EMBEDDING].dtype == jnp.bfloat16 and (values[EMBEDDING] == 1).all()
