"""Beam search: against brute force, greedy search, T5X's rules, and itself in other batches and on other meshes."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite.errors import ConfigError
from tests.decoding.decoding_cases import EOS
from tests.decoding.decoding_cases import HistoryModel
from tests.decoding.decoding_cases import all_finished
from tests.decoding.decoding_cases import jit
from tests.decoding.decoding_cases import lengths
from tests.decoding.decoding_cases import prompts_to_inputs


def _search(model, inputs, cache, **options):
  return decoding.beam_search(inputs, cache, model.step, EOS, cache_offset=model.offset, **options)


def _ranked(found, alpha):
  """Return [(score, tokens)], best last."""
  scored = [(log_prob / ((5 + len(tokens)) / 6) ** alpha, tokens) for tokens, log_prob in found]
  return sorted(scored)


def _check_equal(sequences, scores, expected):
  """Compare the best of one row's beams with [(score, tokens)]."""
  for tokens, score, (expected_score, expected_tokens) in zip(
    sequences[::-1], scores[::-1], expected[::-1], strict=False
  ):
    np.testing.assert_allclose(score, expected_score, rtol=1e-4, atol=1e-5)
    assert tuple(int(token) for token in tokens if token) == tuple(expected_tokens)


@pytest.mark.parametrize('offset', [0, 1])
def test_a_wide_beam_finds_the_same_as_brute_force(offset):
  # 0 never comes: 1 + 3 + 9 + 27 sequences of up to 4 tokens end; 27 beams with 5 extensions each are all candidates.
  length, contexts = 4, [5, 40]
  model = HistoryModel(5, offset=offset, bias=np.float32([-60.0, 0.0, 0.0, 0.0, 0.0]))
  search = jit(
    lambda inputs, cache, alpha: _search(model, inputs, cache, num_decodes=70, alpha=alpha)
  )
  for alpha in (0.0, 0.6, 2.0):
    sequences, scores = search(jnp.zeros((2, length), jnp.int32), model.cache(contexts), alpha)
    assert sequences.shape == (2, 70, length) and scores.shape == (2, 70)
    assert np.all(np.diff(scores, axis=1) >= 0)
    for row, context in enumerate(contexts):
      expected = [
        pair for pair in _ranked(all_finished(model, context, length), alpha) if 0 not in pair[1]
      ]
      assert len(expected) == 40
      _check_equal(np.asarray(sequences)[row], np.asarray(scores)[row], expected)


def test_forced_prompts_are_kept_unscored_and_counted_in_the_length():
  length, contexts, prompts = 5, [5, 40, 7], [[3, 2], [4], []]
  model = HistoryModel(5, seed=1, bias=np.float32([-60.0, 0.0, 0.0, 0.0, 0.0]))
  inputs = prompts_to_inputs(prompts, length)
  options = dict(num_decodes=70, alpha=0.8, max_decode_len=4)
  forced = jit(lambda: _search(model, inputs, model.cache(contexts), **options))()
  prefilled = jit(
    lambda: _search(
      model, inputs, model.cache(contexts, prompts), initial_index=lengths(prompts), **options
    )
  )()
  for row, (context, prompt) in enumerate(zip(contexts, prompts, strict=True)):
    found = all_finished(model, context, 4, prompt=tuple(prompt))
    expected = [pair for pair in _ranked(found, 0.8) if 0 not in pair[1]]
    for sequences, scores in (forced, prefilled):
      assert sequences.shape == (3, 70, 4)
      _check_equal(np.asarray(sequences)[row], np.asarray(scores)[row], expected)


def test_stop_tokens_end_sequences():
  model = HistoryModel(6, bias=np.float32([-60.0] + [0.0] * 5))
  sequences, scores = jit(
    lambda: _search(
      model, jnp.zeros((1, 4), jnp.int32), model.cache([5]), num_decodes=90, stop_token_ids=(3,)
    )
  )()
  expected = [p for p in _ranked(all_finished(model, 5, 4, ends=(EOS, 3)), 0.6) if 0 not in p[1]]
  _check_equal(np.asarray(sequences)[0], np.asarray(scores)[0], expected)
  assert any(3 in tokens for _, tokens in expected)


def test_one_beam_is_greedy_search_where_the_end_token_is_never_second():
  model = HistoryModel(10, seed=3)
  # The end token is either the best by far or the worst by far.
  ends_here = np.random.default_rng(0).random(len(model.table)) < 0.15
  model.table[:, EOS] = np.where(ends_here, 50.0, -50.0)
  contexts, length = list(range(6)), 12
  inputs = prompts_to_inputs([[], [3], [4, 5], [], [6], []], length)
  cache = model.cache(contexts)
  greedy, log_probs = jit(lambda: decoding.greedy_search(inputs, cache, model.step, EOS))()
  beam, scores = jit(lambda: _search(model, inputs, cache, num_decodes=1))()
  np.testing.assert_array_equal(beam, greedy)
  has_ended = np.any(np.asarray(greedy)[:, 0] == EOS, axis=1)
  assert 0 < has_ended.sum() < 6
  num_tokens = np.argmax(np.asarray(greedy)[:, 0] == EOS, axis=1) + 1
  # A row that does not end has its plain log-probability for a score.
  penalty = np.where(has_ended, ((5 + num_tokens) / 6) ** 0.6, 1.0)
  np.testing.assert_allclose(scores[:, 0], log_probs[:, 0] / penalty, rtol=1e-5)


def test_a_row_of_which_nothing_has_ended_gives_its_live_beams():
  model = HistoryModel(9, bias=np.float32([-60.0, -60.0] + [0.0] * 7))
  sequences, scores = jit(
    lambda: _search(model, jnp.zeros((1, 3), jnp.int32), model.cache([9]), num_decodes=3)
  )()
  log_probs = model.log_probs()
  assert np.all(np.diff(scores[0]) >= 0)
  for tokens, score in zip(np.asarray(sequences)[0], scores[0], strict=True):
    total = sum(log_probs[model.history(9, tokens[:i]), token] for i, token in enumerate(tokens))
    np.testing.assert_allclose(score, total, rtol=1e-5)


def test_prompts_of_uneven_length_decode_as_they_would_alone():
  # The end token is rare: rows with long prompts reach their limit while others continue.
  model = HistoryModel(9, seed=5, bias=np.float32([-60.0, -2.0] + [0.0] * 7))
  rng = np.random.default_rng(0)
  options = dict(num_decodes=3, alpha=0.6)
  together = jit(
    lambda inputs, cache, index: _search(model, inputs, cache, initial_index=index, **options)
  )
  alone = jit(lambda inputs, cache: _search(model, inputs, cache, **options))
  num_unfinished = 0
  for _ in range(8):
    prompts = [rng.integers(2, 9, n).tolist() for n in rng.permutation(5)]
    contexts = rng.integers(0, 90, 5)
    inputs = prompts_to_inputs(prompts, 8)
    sequences, scores = together(inputs, model.cache(contexts, prompts), lengths(prompts))
    for row in range(5):
      row_sequences, row_scores = alone(inputs[row : row + 1], model.cache(contexts[row : row + 1]))
      np.testing.assert_allclose(scores[row], row_scores[0], rtol=1e-5)
      # Slots for which nothing has ended hold nothing but the prompt, if that.
      is_found = np.asarray(row_scores[0]) > 0.9 * decoding.NEG_INF_VALUE
      np.testing.assert_array_equal(sequences[row][is_found], row_sequences[0][is_found])
      num_unfinished += not np.any(np.asarray(row_sequences) == EOS)
  assert 0 < num_unfinished < 40


def _count_steps(model, max_decode_len=None):
  """Return fn(**options) -> number of steps of a search for 30 tokens."""
  search = jit(
    lambda **options: decoding.beam_search(
      jnp.zeros((2, 30), jnp.int32),
      model.cache([0, 1]),
      model.counting_step,
      EOS,
      num_decodes=2,
      max_decode_len=max_decode_len,
      **options,
    )
  )

  def count(**options):
    model.calls.clear()
    jax.block_until_ready(search(**options))
    jax.effects_barrier()
    return len(model.calls)

  return count


def test_stops_as_soon_as_no_live_beam_can_win():
  count = _count_steps(HistoryModel(6, scale=0.5, bias=np.float32([-60.0, 4.0] + [0.0] * 4)))
  assert count(alpha=0.6) < 8
  # A large bonus for length keeps the long ones in play for longer.
  assert count(alpha=3.0) > count(alpha=0.6)
  never_ends = HistoryModel(6, bias=np.float32([-60.0, -60.0] + [0.0] * 4))
  count = _count_steps(never_ends)
  assert count(max_decode_step=-1, min_log_prob=-1e7) == 30
  assert count(max_decode_step=7, min_log_prob=-1e7) == 7
  assert 1 < count(max_decode_step=-1, min_log_prob=-6.0) < 30
  assert _count_steps(never_ends, max_decode_len=11)() == 11


@pytest.mark.parametrize(
  'decode_fn, options',
  [
    pytest.param(decoding.greedy_search, {}, marks=pytest.mark.full),
    pytest.param(
      decoding.temperature_sample,
      dict(topk=3, num_decodes=2, rescale_log_probs=False),
      marks=pytest.mark.full,
    ),
    (decoding.beam_search, dict(num_decodes=3)),
  ],
  ids=['greedy', 'sample', 'beam'],
)
def test_a_sharded_batch_decodes_as_on_one_device(decode_fn, options):
  if len(jax.devices()) < 8:
    pytest.skip('needs 8 devices')
  model = HistoryModel(11)
  prompts = [[3, 4], [], [5], [6, 7, 8]] * 2
  inputs, cache = prompts_to_inputs(prompts, 9), model.cache(range(8), prompts)
  decode = functools.partial(
    decode_fn, tokens_to_logits=model.step, eos_id=EOS, decode_rng=jax.random.PRNGKey(1), **options
  )
  fn = jit(lambda inputs, cache, index: decode(inputs=inputs, cache=cache, initial_index=index))
  expected = fn(inputs, cache, lengths(prompts))
  mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)

  def place(x):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec('data')))

  with jax.set_mesh(mesh):
    sequences, scores = fn(*jax.tree.map(place, (inputs, cache, lengths(prompts))))
  np.testing.assert_array_equal(sequences, expected[0])
  np.testing.assert_allclose(scores, expected[1], rtol=1e-5)


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(num_decodes=0), '`beam_search.num_decodes` must be an integer >= 1, got 0'),
    (dict(num_decodes=-4), 'got -4'),
    (dict(alpha=-0.1), 'alpha` must be a finite number >= 0, got -0.1'),
    (dict(alpha=float('inf')), 'alpha` .* got inf'),
    (dict(alpha='a'), "alpha` .* got 'a'"),
    (dict(min_log_prob='a'), "min_log_prob` must be a number, got 'a'"),
    (dict(max_decode_step=2.5), 'max_decode_step` must be an integer, got 2.5'),
    (dict(eos_id='</s>'), "eos_id` must be a token id .*, got '</s>'"),
    (dict(eos_id=1.0), 'eos_id` .* got 1.0'),
    (dict(max_decode_len=0), 'max_decode_len` must be an integer >= 1 .* got 0'),
    (dict(max_decode_len=1), 'at least the number of tokens of each prompt, or None, got 1'),
    (
      dict(initial_index=jnp.asarray([2, 9])),
      r'initial_index` must be .*, from 0 to 5, .*got Array\(\[2, 9\]',
    ),
    (dict(initial_index=jnp.asarray([2, 1])), r'not padding, got Array\(\[2, 1\]'),
    (dict(stop_token_ids=('</s>',)), 'stop_token_ids` must be a sequence of token ids'),
    (
      dict(padding_mask=jnp.asarray([True])),
      r'padding_mask` must be <bool>\[2\].*got Array\(\[ True\], dtype=bool',
    ),
    (dict(padding_mask=jnp.asarray([1, 0])), 'dtype=int32'),
    (dict(inputs=jnp.zeros((2, 6))), 'inputs` must be token ids'),
  ],
)
def test_options_out_of_range_raise_before_any_step(options, message):
  def step(state):
    raise AssertionError('a step was taken')

  options = {'inputs': prompts_to_inputs([[4, 5], []], 6), 'eos_id': EOS, **options}
  with pytest.raises(ConfigError, match=message):
    decoding.beam_search(cache={}, tokens_to_logits=step, **options)
