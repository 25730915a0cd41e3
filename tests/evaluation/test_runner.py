"""Programs of the runner: one for each choice of options and shape."""

import contextlib

import jax
import numpy as np
import pytest

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
