"""Programs of the runner: one for each choice of options and shape."""

import concurrent.futures
import contextlib

import jax
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import evaluation
from t5x_lite.errors import ConfigError
from tests.apps.train import toy_run
from tests.evaluation import evaluation_cases as cases
from tests.models import toy_model


class _DrawingModel(toy_model.ToyModel):
  """Predicts random numbers."""

  def predict_batch_with_aux(self, params, batch, rng=None, *, times=1, flax_mutables=None):
    return times * jax.random.randint(rng, batch['inputs'].shape[:1], 0, 1000), {}


def test_programs_are_kept_by_options_and_shape_and_serve_all_seeds():
  vocabulary = toy_model.ToyVocabulary()
  model = _DrawingModel(toy_model.ToyNetwork(), vocabulary, vocabulary, None)
  runner = evaluation.PredictRunner(model, toy_run.partitioner())
  _, state, axes = cases.make_state()
  compiled = []

  @contextlib.contextmanager
  def compiling():
    compiled.append(None)
    yield

  def run(seed=0, num_rows=8, **options):
    batches = [(f'batch {k}', k, {'inputs': jax.numpy.zeros((num_rows, 3))}) for k in (4, 5)]
    found = list(
      runner.run(
        'predict_with_aux', batches, state, axes, seed=seed, options=options, compiling_fn=compiling
      )
    )
    assert [given for given, _ in found] == ['batch 4', 'batch 5']
    return [outputs[0] for _, outputs in found], len(compiled)

  for seed in (0, 2**31, 2**32 - 1):
    drawn, num_compiled = run(seed)
    for number, each in zip((4, 5), drawn, strict=True):
      np.testing.assert_array_equal(
        each, jax.random.randint(jax.random.fold_in(jax.random.key(seed), number), (8,), 0, 1000)
      )
    assert num_compiled == 1
  doubled, num_compiled = run(seed, times=2)
  assert num_compiled == 2 and (doubled[0] == 2 * drawn[0]).all()
  assert run(times=2)[1] == 2 and run(times=2.0)[0][0].dtype == np.float32
  assert run(num_rows=16)[1] == 4


@pytest.mark.parametrize(
  'kwargs',
  [
    {'num_examples': 0},
    {'num_examples': True},
    {'num_examples_to_write': -1},
    {'max_num_lengths': 0},
    {'max_num_lengths': None},
    {'batch_by_length': 'yes'},
  ],
)
def test_options_out_of_range(kwargs):
  with pytest.raises(ConfigError, match=f'InferenceEvalConfig.{next(iter(kwargs))}` must be'):
    evaluation.InferenceEvalConfig(**kwargs)


class _SamplingModel(toy_model.ToyModel):
  """Returns samples of the right shape and their scores, in ascending order, drawn with the key."""

  def predict_batch_with_aux(
    self, params, batch, rng=None, *, num_decodes, return_all_decodes, flax_mutables=None
  ):
    assert return_all_decodes
    num_rows = batch['inputs'].shape[0]
    samples = jax.random.randint(rng, (num_rows, num_decodes, 5), 1, 8)
    scores = jax.numpy.sort(jax.random.normal(rng, (num_rows, num_decodes)), axis=1)
    return samples, {'scores': scores}


@pytest.mark.parametrize('kind', ['predict', 'predict_with_aux'])
def test_minimum_bayes_risk_chooses_among_the_samples_of_each_example(kind, monkeypatch):
  vocabulary = toy_model.ToyVocabulary()
  rule = decoding.MinimumBayesRisk(num_samples=6)
  model = _SamplingModel(toy_model.ToyNetwork(), vocabulary, vocabulary, None).with_decode_fn(rule)
  _, state, axes = cases.make_state()
  partitioner = toy_run.partitioner()

  def run(seed, features):
    batch = {'inputs': jax.numpy.zeros((8, 3)), **features}
    runner = evaluation.PredictRunner(model, partitioner)
    ((_, outputs),) = runner.run(kind, [(None, 4, batch)], state, axes, seed=seed)
    return outputs

  found = run(3, {})
  key = jax.random.fold_in(jax.random.key(3), 4)
  samples = np.asarray(jax.random.randint(key, (8, 6, 5), 1, 8))
  scores = np.sort(np.asarray(jax.random.normal(key, (8, 6))), axis=1)
  texts = [[vocabulary.decode(ids) for ids in row[::-1]] for row in samples]
  choices = [rule.choose(row) for row in texts]
  best = np.array([5 - index for index, _ in choices])
  rows = np.arange(8)
  if kind == 'predict':
    np.testing.assert_array_equal(found, samples[rows, best])
  else:
    np.testing.assert_array_equal(found[0], samples[rows, best])
    np.testing.assert_allclose(found[1]['scores'], scores[rows, best], rtol=1e-6)
    np.testing.assert_allclose(found[1]['utility'], [u for _, u in choices], rtol=1e-6)
  indices, with_indices = run(3, {'example_indices': jax.numpy.arange(8)})
  np.testing.assert_array_equal(indices, np.arange(8))
  jax.tree.map(np.testing.assert_array_equal, with_indices, found)
  # Two processes choose for half of the examples each and exchange the choices.
  shares = []
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  for process in range(2):
    monkeypatch.setattr(jax, 'process_index', lambda p=process: p)
    monkeypatch.setattr('t5x_lite.multihost.sum_over_processes', lambda x: shares.append(x) or x)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      runner = evaluation.PredictRunner(model, partitioner)
      runner._choose('predict_with_aux', (samples, {'scores': scores}), pool)
  np.testing.assert_array_equal(shares[0][0] + shares[1][0], best)
  assert not shares[0][1][1::2].any() and not shares[1][1][::2].any()
