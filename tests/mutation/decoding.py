"""Mutants of decoding."""

from tests.mutation.mutant import Mutant

MUTANTS = (
  # A penalty of `length` instead of `length + 1` gives the same results: searches only stop sooner.
  Mutant(
    'beams_stop_by_the_penalty_of_now',
    't5x_lite/decoding/beam.py',
    'best_penalty = brevity_penalty(alpha, length + 1)',
    'best_penalty = brevity_penalty(alpha, state.cur_index + 1)',
    'tests/decoding/test_beam.py::test_stops_as_soon_as_no_live_beam_can_win',
  ),
  Mutant(
    'prompts_in_the_cache_have_no_length',
    't5x_lite/decoding/beam.py',
    'brevity_penalty(alpha, num_cached[:, None] + state.cur_index + 1)',
    'brevity_penalty(alpha, state.cur_index + 1)',
    'tests/decoding/test_beam.py::test_prompts_of_uneven_length_decode_as_they_would_alone',
  ),
  Mutant(
    'alpha_counts_double',
    't5x_lite/decoding/beam.py',
    'jnp.power((5.0 + length) / 6.0, alpha)',
    'jnp.power((5.0 + length) / 6.0, 2 * alpha)',
    'tests/decoding/test_golden.py::test_beam_search',
  ),
  Mutant(
    'ended_beams_continue',
    't5x_lite/decoding/beam.py',
    'live_log_probs = log_probs + has_ended * NEG_INF_VALUE',
    'live_log_probs = log_probs',
    'tests/decoding/test_beam.py::test_a_wide_beam_finds_the_same_as_brute_force',
  ),
  Mutant(
    'caches_follow_the_best_extensions',
    't5x_lite/decoding/beam.py',
    'new_cache = select_beams(new_cache, live_beams)',
    'new_cache = select_beams(new_cache, beams[:, :num_decodes])',
    'tests/decoding/test_beam.py::test_a_wide_beam_finds_the_same_as_brute_force',
  ),
  Mutant(
    'ties_at_the_cutoff_are_dropped',
    't5x_lite/decoding/topk.py',
    'jnp.where(x >= cutoff, x',
    'jnp.where(x > cutoff, x',
    'tests/decoding/test_topk.py::test_topk_mask_equals_sorting_for_known_and_traced_k',
  ),
  Mutant(
    'top_p_keeps_one_entry_more',
    't5x_lite/decoding/topk.py',
    'mass = jnp.cumsum(candidates, axis=-1)',
    'mass = jnp.cumsum(candidates, axis=-1) - candidates',
    'tests/decoding/test_topk.py::test_topp_mask_keeps_the_fewest_entries_that_reach_p',
  ),
  Mutant(
    'temperature_without_effect',
    't5x_lite/decoding/sampling.py',
    'scaled = logits / divisor',
    'scaled = logits',
    'tests/decoding/test_sampling.py::test_draws_follow_the_distribution_that_the_options_leave',
  ),
  Mutant(
    'rows_draw_alike_whatever_their_place',
    't5x_lite/decoding/sampling.py',
    'num_noise = rows',
    'num_noise = 1',
    'tests/decoding/test_sampling.py::test_draws_follow_the_distribution_that_the_options_leave',
  ),
  Mutant(
    'forced_end_tokens_end_rows',
    't5x_lite/decoding/loop.py',
    'ends_now = is_decoded & is_end_token(token, ends)',
    'ends_now = is_end_token(token, ends)',
    'tests/decoding/test_greedy.py::test_a_forced_end_token_does_not_end_the_row',
  ),
  Mutant(
    'forced_tokens_are_scored',
    't5x_lite/decoding/loop.py',
    'jnp.where(is_decoded, choice_log_prob, 0.0)',
    'jnp.where(~ended, choice_log_prob, 0.0)',
    'tests/decoding/test_greedy.py::test_equals_brute_force_with_and_without_forced_tokens',
  ),
)
