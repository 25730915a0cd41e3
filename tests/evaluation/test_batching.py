"""Batches of examples by length: each example once, whole, at the best lengths."""

import numpy as np
import pytest

from t5x_lite.evaluation import batching


def _rows(input_lengths, target_lengths, input_length=64, target_length=16):
  def padded(lengths, full):
    return (np.arange(full) < np.asarray(lengths)[:, None]).astype(np.int32) * 5

  targets = padded(target_lengths, target_length)
  return {
    'encoder_input_tokens': padded(input_lengths, input_length),
    'decoder_target_tokens': targets,
    'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
    'decoder_loss_weights': targets // 5,
  }


@pytest.mark.parametrize(
  'kind', ['predict', 'predict_with_aux', 'score', 'score_with_intermediates']
)
@pytest.mark.parametrize(
  'num_examples, batch_size, max_num_lengths', [(300, 4, 4), (37, 8, 4), (3, 8, 4), (64, 1, 2)]
)
def test_every_example_is_in_one_batch_and_nothing_of_it_is_cut_off(
  kind, num_examples, batch_size, max_num_lengths
):
  rng = np.random.default_rng(0)
  needed, targets = rng.integers(1, 61, num_examples), rng.integers(0, 11, num_examples)
  rows = _rows(needed, targets)
  planned = batching.by_length(rows, batch_size, kind, max_num_lengths=max_num_lengths)
  indices = np.concatenate([batch.indices for batch in planned])
  assert sorted(indices[indices >= 0]) == list(range(num_examples))
  assert all(
    batch.indices.shape == (batch_size,) and batch.indices.dtype == np.int32 for batch in planned
  )
  # At most one batch is not full.
  assert sum((batch.indices < 0).any() for batch in planned) <= 1 and len(planned) == -(
    -num_examples // batch_size
  )
  for batch in planned:
    real = batch.indices[batch.indices >= 0]
    for name, length in batch.lengths.items():
      assert not rows[name][real, length:].any() and length <= rows[name].shape[1]
    assert kind == 'score' or all(name == 'encoder_input_tokens' for name in batch.lengths)
  lengths = [batch.lengths.get('encoder_input_tokens', 64) for batch in planned]
  assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) <= max_num_lengths
  if kind == 'score_with_intermediates':
    assert all(not batch.lengths for batch in planned)
  elif num_examples == 300:
    assert len(set(lengths)) == 2


def test_lengths_are_the_best_ones():
  rng = np.random.default_rng(1)
  needs = np.concatenate([rng.integers(1, 20, 500), rng.integers(200, 250, 40), [500]])

  def positions(lengths):
    return sum(min(length for length in lengths if length >= need) for need in needs.tolist())

  found = batching.choose_lengths(needs, 512, max_num_lengths=3)
  ladder = list(range(8, 505, 8))
  best = min(positions((a, b, 504)) for a in ladder for b in ladder if a < b < 504)
  assert positions(found) == best and len(found) == 3 and found[-1] == 504
  # Where it saves little, there is one length.
  assert batching.choose_lengths(np.full(100, 400), 512, max_num_lengths=4) == [400]
  assert batching.choose_lengths(np.arange(493, 513), 512, max_num_lengths=4) == [512]
  assert batching.choose_lengths(np.array([0]), 5, max_num_lengths=4) == [5]


def test_decoder_only_rows_are_cut_for_scores_alone():
  rows = {
    name: array
    for name, array in _rows([1] * 40, [3] * 40, target_length=64).items()
    if name.startswith('decoder')
  } | {'decoder_causal_attention': np.ones((40, 64), np.int32)}
  rows['decoder_causal_attention'][:, 5:] = 0
  assert all(
    not batch.lengths for batch in batching.by_length(rows, 4, 'predict', max_num_lengths=4)
  )
  assert all(
    set(batch.lengths) == set(rows) and set(batch.lengths.values()) == {8}
    for batch in batching.by_length(rows, 4, 'score', max_num_lengths=4)
  )


@pytest.mark.parametrize(
  'extra',
  [{'my_feature': np.ones((40, 8))}, {'decoder_causal_attention': np.ones((40, 8, 3), np.int32)}],
)
def test_unknown_features_are_not_cut(extra):
  planned = batching.by_length(_rows([1] * 40, [3] * 40) | extra, 4, 'score', max_num_lengths=4)
  assert [batch.indices.tolist() for batch in planned] == np.arange(40).reshape(10, 4).tolist()
  assert all(not batch.lengths for batch in planned)
