"""T5X's function for enumerated datasets gives the outputs of the model, in order and without padding rows."""

import jax
import numpy as np
import pytest

from t5x_lite import evaluation
from t5x_lite.errors import DataError
from tests.apps.train import toy_run
from tests.evaluation import evaluation_cases as cases


def _dataset(count):
  rng = np.random.default_rng(count)
  return [
    (
      100 + i,
      {
        name: rng.integers(2, 10, 6).astype(np.int32)
        for name in ('decoder_input_tokens', 'decoder_target_tokens')
      }
      | {
        'encoder_input_tokens': rng.integers(2, 10, 6).astype(np.int32),
        'decoder_loss_weights': np.ones(6, np.int32),
      },
    )
    for i in range(count)
  ]


@pytest.mark.parametrize('keep', [False, True])
def test_predictions_scores_and_auxiliary_values(keep):
  model, state, axes = cases.make_state()
  ds = _dataset(13)
  batch = {name: np.stack([example[name] for _, example in ds]) for name in ds[0][1]}

  def run(step, **kwargs):
    return evaluation.get_infer_fn(step, 8, axes, toy_run.partitioner(), **kwargs)(ds, state)

  scores = run(model.score_batch)
  assert [index for index, _ in scores] == list(range(100, 113))
  np.testing.assert_allclose(
    [score for _, score in scores], model.score_batch(state.params, batch), rtol=1e-5
  )

  def with_scores(params, batch):
    return model.predict_batch(params, batch), {'scores': model.score_batch(params, batch)}

  predictions, aux = run(with_scores, keep_aux_as_numpy=keep)
  expected, expected_aux = with_scores(state.params, batch)
  np.testing.assert_array_equal([tokens for _, tokens in predictions], expected)
  np.testing.assert_allclose(aux['scores'], expected_aux['scores'], rtol=1e-5)
  assert type(aux['scores']) is list and isinstance(
    aux['scores'][0], np.floating if keep else float
  )


def test_keys_are_split_batch_by_batch():
  _, state, axes = cases.make_state()

  def step(params, batch, rng):
    del params
    return jax.random.uniform(rng, batch['encoder_input_tokens'].shape[:1])

  infer_fn = evaluation.get_infer_fn(step, 8, axes, toy_run.partitioner())
  key, expected = jax.random.key(3), []
  for _ in range(2):
    step_key, key = jax.random.split(key)
    expected += jax.random.uniform(step_key, (8,)).tolist()
  found = infer_fn(_dataset(13), state, jax.random.key(3))
  np.testing.assert_allclose([value for _, value in found], expected[:13], rtol=1e-6)


def test_a_dataset_of_tensorflow():
  tf = pytest.importorskip('tensorflow')
  model, state, axes = cases.make_state()
  ds = _dataset(5)
  infer_fn = evaluation.get_infer_fn(model.predict_batch, 4, axes, toy_run.partitioner())
  batches = tf.data.Dataset.from_tensor_slices(
    {name: np.stack([example[name] for _, example in ds]) for name in ds[0][1]}
  ).enumerate(start=100)
  for (index, tokens), (other, expected) in zip(
    infer_fn(batches, state), infer_fn(ds, state), strict=True
  ):
    assert index == other
    np.testing.assert_array_equal(tokens, expected)


def test_an_empty_dataset_is_an_error():
  model, state, axes = cases.make_state()
  with pytest.raises(DataError, match='no examples'):
    evaluation.get_infer_fn(model.predict_batch, 8, axes, toy_run.partitioner())([], state)


@pytest.mark.parametrize(
  'change, message',
  [
    (
      lambda ds: [example for _, example in ds],
      r'`infer_fn.ds` must be pairs .*Pass dataset.enumerate',
    ),
    (
      lambda ds: [*ds[:2], (7, ds[2][1] | {'decoder_loss_weights': np.ones(3)})],
      'Example 7 must have the shapes of ',
    ),
    (lambda ds: [*ds[:2], (7, {})], 'Example 7 must have the shapes of the first one'),
  ],
)
def test_datasets_of_other_forms_are_rejected(change, message):
  model, state, axes = cases.make_state()
  with pytest.raises(DataError, match=message):
    evaluation.get_infer_fn(model.predict_batch, 8, axes, toy_run.partitioner())(
      change(_dataset(3)), state
    )
