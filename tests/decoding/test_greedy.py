"""Greedy decoding with tabulated models: T5X's recorded results, brute force, early stop, forced tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import errors
from tests import golden_data
from tests.decoding.decoding_cases import EOS
from tests.decoding.decoding_cases import HistoryModel
from tests.decoding.decoding_cases import jit
from tests.decoding.decoding_cases import lengths
from tests.decoding.decoding_cases import prompts_to_inputs


def tabulated(table_TV, position_PV=None, context_CV=None):
  """Model whose logits are sums of table rows, of the current token, the position and the row's context."""

  def tokens_to_logits(state):
    logits = table_TV[state.cur_token[:, 0]]
    if position_PV is not None:
      logits = logits + position_PV[state.cur_index]
    if context_CV is not None:
      logits = logits + context_CV[state.cache['ctx']]
    return logits, {**state.cache, 'calls': state.cache['calls'] + 1}

  return tokens_to_logits


def search(inputs, fn, **options):
  """Return the result of compiled greedy search."""
  return jit(
    lambda inputs: decoding.greedy_search(inputs, make_cache(len(inputs)), fn, EOS, **options)
  )(inputs)


def make_cache(batch_size):
  return {'ctx': jnp.arange(batch_size), 'calls': jnp.zeros((), jnp.int32)}


@pytest.mark.parametrize('index', [1, 9])
def test_t5x_results_at_temperature_zero(index):
  golden, arrays = golden_data.load('t5x/decode_sample')
  case = golden['cases'][index]
  fn = tabulated(*(jnp.asarray(arrays[name]) for name in 'TPC'))
  inputs = arrays[f'case{index}/inputs']
  assert golden['eos_id'] == EOS
  sequences, scores = search(jnp.asarray(inputs), fn)
  # Case 9 has one temperature per row; row 0's is zero.
  rows = [0] if index == 9 else range(len(inputs))
  assert 'prompts' not in case and not case['rescale_log_probs']
  for row in rows:
    np.testing.assert_array_equal(sequences[row], arrays[f'case{index}/seqs'][row])
    np.testing.assert_allclose(scores[row], arrays[f'case{index}/log_prob'][row], atol=1e-4)


def brute_force(table, inputs):
  """Return the result of the same search, one row and one token at a time."""
  log_probs = np.asarray(jax.nn.log_softmax(table))
  sequences, scores = [], []
  for row in np.asarray(inputs):
    token, score, ended, out = row[0], 0.0, False, []
    for forced in [*row[1:], 0]:
      if forced:
        token = forced
      elif ended:
        token = 0
      else:
        score += log_probs[token].max()
        token = int(log_probs[token].argmax())
        ended = token == EOS
      out.append(token)
    sequences.append(out)
    scores.append(score)
  return np.asarray(sequences), np.asarray(scores)


@pytest.mark.parametrize('seed', range(3))
def test_equals_brute_force_with_and_without_forced_tokens(seed):
  rng = np.random.default_rng(seed)
  table = rng.normal(size=(7, 7)).astype(np.float32)
  inputs = np.zeros((5, 8), np.int32)
  for row in range(1, 5):
    inputs[row, 1 : row + 1] = rng.integers(1, 7, row)
  sequences, scores = search(jnp.asarray(inputs), tabulated(jnp.asarray(table)))
  expected_sequences, expected_scores = brute_force(table, inputs)
  assert sequences.shape == (5, 1, 8) and sequences.dtype == jnp.int32
  assert scores.shape == (5, 1) and scores.dtype == jnp.float32
  np.testing.assert_array_equal(sequences[:, 0], expected_sequences)
  np.testing.assert_allclose(scores[:, 0], expected_scores, rtol=1e-5, atol=1e-5)


def chain(length):
  """Return a table with the sequence 0, 2, 3, ..., eos, so that every row ends after `length` tokens."""
  table = np.zeros((length + 2, length + 2), np.float32)
  path = [0, *range(2, length + 1), EOS]
  for token, successor in zip(path[:-1], path[1:], strict=True):
    table[token, successor] = 5.0
  table[EOS, 2] = 5.0
  return jnp.asarray(table)


def count_calls(table, inputs):
  """Return the number of steps of the network in the search."""
  calls = []

  def counting(state):
    jax.debug.callback(calls.append, state.cache['calls'])
    return tabulated(table)(state)

  jax.block_until_ready(search(inputs, counting))
  jax.effects_barrier()
  return len(calls)


def test_stops_when_all_rows_have_ended():
  inputs = jnp.zeros((3, 20), jnp.int32)
  assert count_calls(chain(4), inputs) == 4
  # A row with forced tokens takes more steps; the others are padded.
  table = chain(4)
  longer = inputs.at[1, 1:7].set(2)
  assert count_calls(table, longer) == 6 + 3
  sequences, _ = search(longer, tabulated(table))
  assert sequences[0, 0].tolist() == [2, 3, 4, 1] + [0] * 16
  assert sequences[1, 0].tolist() == [2] * 6 + [3, 4, 1] + [0] * 11


def test_runs_to_the_length_of_the_inputs_when_no_row_ends():
  table = jnp.zeros((4, 4)).at[:, 3].set(1.0)
  assert count_calls(table, jnp.zeros((2, 5), jnp.int32)) == 5
  sequences, scores = search(jnp.zeros((2, 5), jnp.int32), tabulated(table))
  assert sequences.tolist() == [[[3] * 5]] * 2
  np.testing.assert_allclose(scores, 5 * float(jax.nn.log_softmax(table[0])[3]), rtol=1e-6)


def test_a_forced_end_token_does_not_end_the_row():
  sequences, scores = search(jnp.asarray([[0, 2, EOS, 0, 0, 0, 0, 0]]), tabulated(chain(4)))
  assert sequences[0, 0].tolist() == [2, EOS, 2, 3, 4, EOS, 0, 0]
  log_probs = np.asarray(jax.nn.log_softmax(chain(4)))
  # Forced tokens are not scored, the end token is.
  expected = log_probs[EOS, 2] + log_probs[2, 3] + log_probs[3, 4] + log_probs[4, EOS]
  np.testing.assert_allclose(scores, [[expected]], rtol=1e-6)


def test_low_precision_logits_are_scored_in_float32():
  table = jnp.asarray(np.random.default_rng(0).normal(size=(6, 6)), jnp.bfloat16)
  low = search(jnp.zeros((1, 9), jnp.int32), tabulated(table))
  high = search(jnp.zeros((1, 9), jnp.int32), tabulated(table.astype(jnp.float32)))
  np.testing.assert_array_equal(low[0], high[0])
  np.testing.assert_allclose(low[1], high[1], rtol=1e-6)


def test_more_than_one_decode_raises():
  with pytest.raises(errors.ConfigError, match='num_decodes` must be one of 1, got 4'):
    decoding.greedy_search(jnp.zeros((1, 2), jnp.int32), {}, tabulated(jnp.zeros((3, 3))), EOS, 4)


def test_no_token_is_forced_after_the_end_of_a_row_and_the_start_token_is_not_part_of_the_prompt():
  model = HistoryModel(10, bias=np.float32([-9.0, 20.0] + [0.0] * 8))
  # The third token is free and the model ends the sequence there; forced tokens follow.
  inputs = jnp.asarray([[2, 4, 0, 6, 7]], jnp.int32)
  ended, _ = jit(lambda: decoding.greedy_search(inputs, model.cache([0]), model.step, EOS))()
  np.testing.assert_array_equal(ended[0, 0], [4, EOS, 0, 0, 0])
  endless = HistoryModel(10, bias=np.float32([-50.0, -50.0] + [0.0] * 8))
  inputs = jnp.asarray([[2, 4, 0, 0, 0]], jnp.int32)
  limited, _ = jit(
    lambda: decoding.greedy_search(
      inputs, endless.cache([0]), endless.step, EOS, max_decode_steps=1
    )
  )()
  assert np.count_nonzero(limited) == 2


def test_prefilled_prompts_of_uneven_length_and_max_decode_steps():
  model = HistoryModel(10, bias=np.float32([-9.0, -2.0] + [0.0] * 8))
  prompts = [[3, 4, 5, 6], [], [7, EOS], [8, 2, 3]]
  inputs = prompts_to_inputs(prompts, 9)
  forced = jit(lambda: decoding.greedy_search(inputs, model.cache(range(4)), model.step, EOS))()
  prefilled = jit(
    lambda **options: decoding.greedy_search(
      inputs,
      model.cache(range(4), prompts),
      model.step,
      EOS,
      initial_index=lengths(prompts),
      **options,
    )
  )
  for one, other in zip(forced, prefilled(), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-6)
  steps = np.array([1, 2, 9, 3])
  sequences, _ = prefilled(max_decode_steps=steps)
  for row, prompt in enumerate(prompts):
    num_kept = len(prompt) + steps[row]
    np.testing.assert_array_equal(sequences[row, 0, :num_kept], forced[0][row, 0, :num_kept])
    assert not np.any(sequences[row, 0, num_kept:])
