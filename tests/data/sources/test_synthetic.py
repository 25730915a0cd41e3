"""The synthetic source: ids, features of any shape, errors."""

import dataclasses

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.errors import ConfigError
from tests.data import builtin_cases as cases

# --- Synthetic -----------------------------------------------------------------------


def test_synthetic_ids():
  source = data.SyntheticSource(vocab_size=50, num_examples=10, shortest=0.5)
  cfg = cases.make_cfg(
    source, source='synthetic', task_feature_lengths={'inputs': 128, 'targets': 64}
  )
  batch = next(cases.open(cfg))
  tokens = batch['encoder_input_tokens']
  lengths = (tokens > 0).sum(axis=1)
  assert (
    tokens.shape == (8, 128)
    and lengths.min() >= 64
    and lengths.max() <= 128
    and len(set(lengths)) > 2
  )
  assert set(np.unique(tokens)) == set(range(50))
  for row, length in zip(tokens, lengths, strict=True):
    assert row[length - 1] == 1 and (row[: length - 1] > 1).all()
  cases.assert_equal(batch, next(cases.open(cfg)))
  other = next(cases.open(dataclasses.replace(cfg, split='other')))
  assert (other['encoder_input_tokens'] != tokens).any()
  assert [v.vocab_size for v in data.get_vocabulary(cfg)] == [50, 50]
  full = next(cases.open(cases.make_cfg('synthetic', source='synthetic')))
  assert (full['encoder_input_tokens'] > 0).all() and full['encoder_input_tokens'].max() > 10000


def test_synthetic_features_of_any_shape():
  source = data.SyntheticSource(
    features={
      'image': data.SyntheticFeature(shape=(3, 4), dtype='float32', maximum=2.0),
      'label': data.SyntheticFeature(shape=(), dtype='int8', maximum=5),
    }
  )
  cfg = cases.make_cfg(source, source='synthetic', task_feature_lengths={}, batch_size=64)
  iterator = cases.open(cfg, 0, 2)
  batch = next(iterator)
  assert batch['image'].shape == (32, 3, 4) and batch['image'].dtype == np.float32
  assert 0 <= batch['image'].min() < 0.1 and 1.9 < batch['image'].max() < 2
  assert batch['label'].dtype == np.int8 and set(batch['label']) == set(range(5))
  assert iterator.element_spec['image'].shape == (64, 3, 4)
  assert [
    len(b) for b in data.open_eval_iterators(cfg, cases.layout(batch_size=64), 3).values()
  ] == [3]
  with pytest.raises(
    ConfigError, match='task_feature_lengths` must be {} with SyntheticSource.features'
  ):
    cases.open(dataclasses.replace(cfg, task_feature_lengths=cases.LENGTHS))


@pytest.mark.parametrize(
  'make',
  [
    lambda: data.SyntheticSource(vocab_size=2),
    lambda: data.SyntheticSource(shortest=0.0),
    lambda: data.SyntheticSource(num_examples=0),
    lambda: data.SyntheticFeature(shape=(), dtype='bool'),
    lambda: data.SyntheticFeature(shape=(), maximum=0),
    lambda: data.SyntheticFeature(shape=(), maximum=0.5),
    lambda: data.SyntheticFeature(shape=(), dtype='int8', maximum=129),
  ],
)
def test_synthetic_errors(make):
  with pytest.raises(ConfigError, match='Synthetic.*must be .*got'):
    make()
