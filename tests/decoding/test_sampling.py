"""Sampling: its distribution, its limits, callbacks, prompts of uneven length, early stop."""

import inspect

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite.errors import ConfigError
from tests.decoding.decoding_cases import EOS
from tests.decoding.decoding_cases import HistoryModel
from tests.decoding.decoding_cases import jit
from tests.decoding.decoding_cases import lengths
from tests.decoding.decoding_cases import prompts_to_inputs

_KEY = jax.random.PRNGKey(7)


def _sample(model, inputs, cache, rng=_KEY, **options):
  return decoding.temperature_sample(inputs, cache, model.step, EOS, decode_rng=rng, **options)


def _rescore(model, context, tokens, prompt_length=0, log_probs=None):
  """Return the sum of the log-probabilities of the tokens after the prompt, up to the first end token."""
  log_probs = model.log_probs() if log_probs is None else log_probs
  tokens, total = [int(token) for token in tokens], 0.0
  for i, token in enumerate(tokens):
    if i >= prompt_length:
      total += log_probs[model.history(context, tokens[:i]), token]
      if token == EOS:
        assert not any(tokens[i + 1 :])
        break
  return total


def test_draws_follow_the_distribution_that_the_options_leave():
  # One step for many rows, from one distribution: compare frequencies.
  rows = 4000
  probs = np.array([0.0, 0.4, 0.25, 0.15, 0.15, 0.05])
  logits = jnp.log(jnp.asarray(probs, jnp.float32) + 1e-9)

  def step(state):
    return (jnp.broadcast_to(logits, (rows, 6)), state.cache)

  fn = jit(
    lambda temperature, topk, topp: decoding.temperature_sample(
      jnp.zeros((rows, 1), jnp.int32),
      {},
      step,
      EOS,
      decode_rng=_KEY,
      temperature=temperature,
      topk=topk,
      topp=topp,
    )
  )
  for temperature, topk, topp, kept in [
    (1.0, 0, 0.0, (1, 2, 3, 4, 5)),
    (0.5, 0, 0.0, (1, 2, 3, 4, 5)),
    (2.0, 2, 0.0, (1, 2)),
    (1.0, 3, 0.0, (1, 2, 3, 4)),
    (1.0, 0, 0.6, (1, 2)),
    (1.0, 0, 0.7, (1, 2, 3, 4)),
  ]:
    sequences, log_probs = fn(temperature, topk, topp)
    expected = np.where(np.isin(np.arange(6), kept), probs ** (1 / temperature), 0.0)
    expected /= expected.sum()
    tokens = np.asarray(sequences)[:, 0, 0]
    counts = np.bincount(tokens, minlength=6)
    assert not counts[expected == 0].any()
    # Five standard deviations.
    assert np.all(
      np.abs(counts / rows - expected) < 5 * np.sqrt(expected * (1 - expected) / rows) + 1e-9
    )
    np.testing.assert_allclose(np.asarray(log_probs)[:, 0], np.log(expected[tokens]), atol=1e-4)


def test_decodes_are_ranked_and_scored_by_their_distribution():
  model = HistoryModel(9)
  contexts = [3, 5, 11]
  fn = jit(
    lambda cache: _sample(
      model, jnp.zeros((3, 6), jnp.int32), cache, num_decodes=4, topk=0, rescale_log_probs=False
    )
  )
  sequences, log_probs = fn(model.cache(contexts))
  assert sequences.shape == (3, 4, 6) and sequences.dtype == jnp.int32
  assert log_probs.shape == (3, 4) and log_probs.dtype == jnp.float32
  assert np.all(np.diff(log_probs, axis=1) >= 0)
  assert len({tuple(decode) for row in np.asarray(sequences) for decode in row}) > 8
  for row, context in enumerate(contexts):
    for decode in range(4):
      expected = _rescore(model, context, sequences[row, decode])
      np.testing.assert_allclose(log_probs[row, decode], expected, rtol=1e-4, atol=1e-4)


def test_low_temperatures_and_topk_1_are_greedy_search():
  model = HistoryModel(12, bias=np.float32([-4.0] + [0.0] * 11))
  inputs = prompts_to_inputs([[], [3, 4], [5]], 8)
  cache = model.cache([0, 1, 2])
  expected, scores = jit(lambda: decoding.greedy_search(inputs, cache, model.step, EOS))()
  fn = jit(
    lambda temperature: _sample(
      model, inputs, cache, temperature=temperature, topk=0, rescale_log_probs=False
    )
  )
  for temperature in (0.0, 1e-4, 1e-3):
    sequences, log_probs = fn(temperature)
    np.testing.assert_array_equal(sequences, expected)
    np.testing.assert_allclose(log_probs, scores, rtol=1e-5)
  sequences, log_probs = jit(lambda: _sample(model, inputs, cache))()
  np.testing.assert_array_equal(sequences, expected)
  assert not log_probs.any()


def test_equal_best_tokens_are_drawn_among_with_topk_1():
  logits = jnp.asarray([0.0, 1.0, 3.0, 3.0])

  def step(state):
    return (jnp.broadcast_to(logits, (200, 4)), state.cache)

  sequences, log_probs = jit(
    lambda: decoding.temperature_sample(
      jnp.zeros((200, 1), jnp.int32), {}, step, EOS, decode_rng=_KEY
    )
  )()
  assert 60 < np.sum(np.asarray(sequences) == 2) < 140 and np.all(np.asarray(sequences) >= 2)
  np.testing.assert_allclose(log_probs, np.log(0.5), rtol=1e-6)


def _primitives(jaxpr, skip=None):
  """Return the names of all primitives, including nested programs except those of primitive `skip`."""
  found = set()
  for equation in jaxpr.eqns:
    found.add(equation.primitive.name)
    if equation.primitive.name != skip:
      for nested in jax_core.jaxprs_in_params(equation.params):
        found |= _primitives(nested, skip)
  return found


def test_samples_that_are_not_drawn_are_not_computed():
  model = HistoryModel(50)

  def of_loop(skip=None, **options):
    program = jax.make_jaxpr(
      lambda: decoding.temperature_sample(
        jnp.zeros((2, 4), jnp.int32), model.cache([0, 1]), model.step, EOS, **options
      )
    )()
    (loop,) = [equation for equation in program.eqns if equation.primitive.name == 'while']
    return set().union(
      *(_primitives(nested, skip) for nested in jax_core.jaxprs_in_params(loop.params))
    )

  costly = {'random_bits', 'top_k', 'sort', 'cumsum', 'argmax'}
  assert costly & of_loop(topk=20) == {'random_bits', 'top_k'}
  assert not costly & of_loop(temperature=0.0, topk=20)
  # Only where tokens tie does topk=1 draw.
  assert not costly & of_loop(skip='cond')
  assert 'random_bits' in of_loop()


def test_rows_with_different_temperatures_sample_as_if_alone():
  model = HistoryModel(9)
  temperatures = [0.0, 0.7, 1.5]
  options = dict(num_decodes=3, topk=0, rescale_log_probs=False)
  together = jit(
    lambda temperature: _sample(
      model,
      jnp.zeros((3, 6), jnp.int32),
      model.cache([3, 5, 11]),
      temperature=temperature,
      **options,
    )
  )
  sequences, log_probs = together(jnp.asarray(temperatures))
  alone = jit(
    lambda cache, temperature: _sample(
      model, jnp.zeros((1, 6), jnp.int32), cache, temperature=temperature, **options
    )
  )
  for row, (context, temperature) in enumerate(zip([3, 5, 11], temperatures, strict=True)):
    row_sequences, row_log_probs = alone(model.cache([context]), temperature)
    np.testing.assert_array_equal(sequences[row], row_sequences[0])
    np.testing.assert_allclose(log_probs[row], row_log_probs[0], rtol=1e-5)
  assert len({tuple(decode) for decode in np.asarray(sequences[2])}) == 3


_PROMPTS = [[3, 4, 5, 6], [], [7, EOS], [8, 2, 3]]


@pytest.mark.parametrize('offset', [0, 1])
def test_prompts_of_uneven_length_decode_as_they_would_alone(offset):
  model = HistoryModel(10, offset=offset, bias=np.float32([-9.0] + [0.0] * 9))
  contexts = [1, 2, 3, 4]
  options = dict(temperature=0.0, rescale_log_probs=False, num_decodes=2, cache_offset=offset)
  prefilled = jit(
    lambda inputs, cache, index: _sample(model, inputs, cache, initial_index=index, **options)
  )
  inputs = prompts_to_inputs(_PROMPTS, 8)
  together, scores = prefilled(inputs, model.cache(contexts, _PROMPTS), lengths(_PROMPTS))
  alone = jit(lambda inputs, cache: _sample(model, inputs, cache, **options))
  for row, context in enumerate(contexts):
    # The prompt is forced, token by token, from an empty cache.
    sequences, row_scores = alone(inputs[row : row + 1], model.cache([context]))
    np.testing.assert_array_equal(together[row], sequences[0])
    np.testing.assert_allclose(scores[row], row_scores[0], rtol=1e-5)
    expected = _rescore(model, context, sequences[0, 0], len(_PROMPTS[row]))
    np.testing.assert_allclose(row_scores[0], [expected] * 2, rtol=1e-4)


@pytest.mark.parametrize(
  'steps, hard_limit, prefill',
  [
    (2, None, False),
    ([1, 2, 9, 3], None, True),
    ([3, 9, 1, 2], 2, False),
    *(
      pytest.param(*case, marks=pytest.mark.full)
      for case in ((2, None, True), ([1, 2, 9, 3], None, False), ([3, 9, 1, 2], 2, True))
    ),
  ],
)
def test_max_decode_steps_count_behind_the_prompt(steps, hard_limit, prefill):
  # Never generates the end token.
  model = HistoryModel(10, bias=np.float32([-50.0, -50.0] + [0.0] * 8))
  options = dict(initial_index=lengths(_PROMPTS)) if prefill else {}
  cache = model.cache(range(4), _PROMPTS if prefill else None)
  fn = jit(
    lambda steps: _sample(
      model,
      prompts_to_inputs(_PROMPTS, 12),
      cache,
      max_decode_steps=steps,
      max_decode_steps_hard_limit=hard_limit,
      num_decodes=2,
      **options,
    )
  )
  sequences, _ = fn(jnp.asarray(steps))
  for row, prompt in enumerate(_PROMPTS):
    expected = min(len(prompt) + min(np.broadcast_to(steps, 4)[row], hard_limit or 99), 12)
    assert [int(np.count_nonzero(tokens)) for tokens in sequences[row]] == [expected] * 2


def test_stops_when_all_rows_have_ended_and_rows_wait_with_padding():
  model = HistoryModel(8, bias=np.float32([-9.0, 2.0] + [0.0] * 6))
  inputs = jnp.zeros((3, 40), jnp.int32)
  sequences, _ = jit(
    lambda: decoding.temperature_sample(
      inputs, model.cache([0, 1, 2]), model.counting_step, EOS, topk=0, decode_rng=_KEY
    )
  )()
  jax.block_until_ready(sequences)
  jax.effects_barrier()
  ends = np.argmax(np.asarray(sequences)[:, 0] == EOS, axis=1)
  assert len(model.calls) == ends.max() + 1 < 40
  assert len(set(ends)) > 1
  for row, end in enumerate(ends):
    assert not np.any(np.asarray(sequences)[row, 0, end + 1 :])


def test_stop_tokens_end_a_sequence_as_the_end_token_does():
  model = HistoryModel(8, bias=np.float32([-9.0] + [0.0] * 7))
  inputs = prompts_to_inputs([[], [5], [2, 5]], 30)
  for search in (
    lambda **options: decoding.greedy_search(
      inputs, model.cache([0, 1, 2]), model.step, EOS, **options
    ),
    lambda **options: _sample(model, inputs, model.cache([0, 1, 2]), topk=0, **options),
  ):
    free, _ = jit(search)()
    stopped, _ = jit(lambda search=search: search(stop_token_ids=(5, 7)))()
    for row, num_forced in enumerate([0, 1, 2]):
      tokens = np.asarray(free)[row, 0]
      behind = tokens[num_forced:]
      end = num_forced + int(np.argmax(np.isin(behind, (EOS, 5, 7))))
      # The stop token is kept, and a forced one does not stop.
      np.testing.assert_array_equal(stopped[row, 0, : end + 1], tokens[: end + 1])
      assert not np.any(stopped[row, 0, end + 1 :])


def test_state_callbacks_see_every_step_and_may_force_and_end():
  model = HistoryModel(8, bias=np.float32([-50.0, -50.0] + [0.0] * 6))
  seen = []

  def end_behind_a_3(state):
    """Write an end token after each 3, and record the number of steps of each call."""
    assert isinstance(state, decoding.SamplingLoopState)
    jax.debug.callback(
      lambda *args: seen.append(args), state.step, state.cur_index, state.ended, ordered=False
    )
    positions = jnp.arange(state.sequences.shape[1])
    behind = positions == state.cur_index[:, None] + 1
    is_3 = jnp.take_along_axis(state.sequences, state.cur_index[:, None], axis=1) == 3
    return state.replace(sequences=jnp.where(behind & is_3 & ~state.ended, EOS, state.sequences))

  def fn(**options):
    return _sample(
      model, prompts_to_inputs([[], [4, 3], [6]], 20), model.cache([0, 1, 2]), topk=0, **options
    )

  sequences, _ = jit(lambda: fn(state_callback_fn=end_behind_a_3))()
  jax.block_until_ready(sequences)
  jax.effects_barrier()
  longest = 0
  for tokens in np.asarray(sequences)[:, 0]:
    first = int(np.argmax(tokens == 3))
    assert tokens[first] == 3 and tokens[first + 1] == EOS and not np.any(tokens[first + 2 :])
    longest = max(longest, first + 2)
  # Before each step, and once more with the final state.
  seen.sort(key=lambda args: int(args[0]))
  assert [int(step) for step, *_ in seen] == list(range(longest + 1))
  assert all(np.all(index[~ended[:, 0]] == step) for step, index, ended in seen)
  assert np.all(seen[-1][2]) and not np.all(seen[-2][2])


def test_logit_callbacks_can_ban_tokens_depending_on_decoded_ones():
  model = HistoryModel(8, bias=np.float32([-50.0, -50.0] + [0.0] * 6))

  def no_repetition(logits, state):
    """Mask all tokens that the row contains."""
    assert logits.shape == (4, 8)
    has = jax.nn.one_hot(state.sequences[:, 1:], 8).any(axis=1)
    return jnp.where(has, decoding.NEG_INF_VALUE, logits)

  sequences, _ = jit(
    lambda: _sample(
      model,
      jnp.zeros((2, 6), jnp.int32),
      model.cache([0, 1]),
      topk=0,
      num_decodes=2,
      logit_callback_fn=no_repetition,
    )
  )()
  for tokens in np.asarray(sequences).reshape(4, 6):
    assert sorted(tokens) == [2, 3, 4, 5, 6, 7]


def test_accepts_the_arguments_of_the_decoding_interface():
  protocol = inspect.signature(decoding.DecodeFnCallable.__call__).parameters
  names = {name for name, p in protocol.items() if name != 'self' and p.kind is not p.VAR_KEYWORD}
  for decode_fn in (decoding.greedy_search, decoding.temperature_sample, decoding.beam_search):
    assert names <= set(inspect.signature(decode_fn).parameters)


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(num_decodes=0), '`temperature_sample.num_decodes` must be an integer >= 1, got 0'),
    (dict(num_decodes=2.0), 'got 2.0'),
    (dict(temperature=-0.5), 'temperature` must be a finite number >= 0, .*got -0.5'),
    (dict(temperature=float('nan')), 'temperature` .* got nan'),
    (dict(temperature='hot'), "temperature` .* got 'hot'"),
    (dict(temperature=jnp.ones((3,))), 'one for each of the 2 rows, got Array'),
    (dict(topk=-1), 'topk` must be an integer >= 0, got -1'),
    (dict(topk=1.5), 'topk` .* got 1.5'),
    (dict(topk='3'), "topk` must be an integer >= 0, got '3'"),
    (dict(topk=0, topp='a'), "topp` .* got 'a'"),
    (dict(max_decode_steps='a'), 'max_decode_steps` must be an integer from 1 to 6'),
    (dict(topk=0, topp=1.5), 'topp` .* got 1.5'),
    (dict(topk=0, topp=-0.1), 'topp` .* got -0.1'),
    (dict(topp=0.9), 'Set topk=0'),
    (dict(max_decode_steps=0), 'max_decode_steps` .* got 0'),
    (dict(max_decode_steps=2.5), 'an integer from .*, got 2.5'),
    (dict(max_decode_steps=7), 'from 1 to 6, the length of `inputs`, .*got 7'),
    (
      dict(max_decode_steps=jnp.ones((5,), jnp.int32)),
      'one for each of the 2 rows or None, got Array',
    ),
    (
      dict(max_decode_steps=2, max_decode_steps_hard_limit=-1),
      'hard_limit` must be an integer >= 0 or None, got -1',
    ),
    (dict(initial_index=jnp.asarray([1, 6])), r'from 0 to 5, .*got Array\(\[1, 6\]'),
    (dict(initial_index=jnp.asarray([1, 2])), r'not padding, got Array\(\[1, 2\]'),
    (dict(initial_index=jnp.asarray([1, 0, 0])), r'initial_index` must be <int32>\[2\]'),
    (dict(initial_index=jnp.asarray([1.0, 0.0])), 'dtype=float32'),
    (dict(stop_token_ids=(5, 0)), r'stop_token_ids` .* got \(5, 0\)'),
    (dict(stop_token_ids=5), 'stop_token_ids` .* got 5'),
    (dict(inputs=jnp.zeros((2, 6))), 'inputs` must be token ids'),
    (dict(inputs=jnp.zeros((6,), jnp.int32)), 'inputs` must be token ids'),
  ],
)
def test_options_out_of_range_raise_before_any_step(options, message):
  def step(state):
    raise AssertionError('a step was taken')

  options = {'inputs': prompts_to_inputs([[4], []], 6), **options}
  with pytest.raises(ConfigError, match=message):
    decoding.temperature_sample(cache={}, tokens_to_logits=step, eos_id=EOS, **options)
