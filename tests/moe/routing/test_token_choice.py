"""Token choice and expert choice against numpy loops, over shapes, options, ties and edges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import routing
from t5x_lite.errors import ConfigError
from tests.moe.routing import routing_reference as reference

_tokens_choose = jax.jit(routing.tokens_choose, static_argnums=(1, 2))


def _logits(seed, groups, tokens, num_experts, ties=False):
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(groups, tokens, num_experts))
  # Few distinct values: many ties, which the lower index must win.
  return np.asarray(np.round(logits) if ties else logits, np.float32)


def _mask(seed, groups, tokens, kind):
  if kind is None:
    return None
  mask = np.random.default_rng(seed).uniform(size=(groups, tokens)) < 0.7
  if kind == 'group':
    mask[0] = False
  return mask & (kind != 'all')


def _check(routed, kept, expected):
  np.testing.assert_array_equal(routed.expert_index, expected['index'])
  np.testing.assert_array_equal(kept, expected['kept'])
  if expected['position'] is None:
    assert routed.position is None
  else:
    np.testing.assert_array_equal(routed.position, expected['position'])
  np.testing.assert_allclose(routed.gates, expected['gates'], atol=1e-6)
  np.testing.assert_allclose(
    routed.auxiliary_loss, expected['auxiliary_loss'], rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(routed.router_z_loss, expected['router_z_loss'], rtol=1e-5, atol=1e-6)


# (groups, tokens, experts, choices, capacity, ties, padding, options): between them every option with every other kind.
_TOKEN_CASES = [
  (2, 13, 4, 1, 3, False, None, {}),
  (2, 13, 4, 2, 4, True, None, dict(batch_prioritized=True)),
  (2, 13, 4, 2, 3, False, 'some', dict(batch_prioritized=True, normalize_gates=True)),
  (2, 13, 4, 4, 2, True, 'some', dict(normalize_gates=True, padding_in_losses=False)),  # K = E
  (2, 13, 4, 2, 40, False, 'group', dict(padding_in_losses=False)),  # C above T; a group of padding
  (2, 13, 4, 2, 1, True, 'some', dict(padding_uses_capacity=True, batch_prioritized=True)),  # C = 1
  (2, 13, 4, 3, None, False, 'some', dict(score='sigmoid', normalize_gates=True)),  # dropless
  (2, 13, 4, 2, 3, False, None, dict(shared_capacity=True)),
  (
    2,
    13,
    4,
    2,
    3,
    True,
    'some',
    dict(shared_capacity=True, batch_prioritized=True, score='sigmoid'),
  ),
  (2, 13, 4, 2, 3, False, 'all', dict(normalize_gates=True, padding_in_losses=False)),
  (2, 13, 1, 1, 5, False, 'some', {}),  # one expert
  (1, 70, 130, 2, 2, True, None, {}),  # several blocks of places; more experts than tokens
  (3, 1, 4, 2, 1, False, None, {}),  # one token
]


@pytest.mark.parametrize('case', range(len(_TOKEN_CASES)))
def test_token_choice_is_the_loops(case):
  groups, tokens, num_experts, choices, capacity, ties, padding, options = _TOKEN_CASES[case]
  logits, mask = (
    _logits(case, groups, tokens, num_experts, ties),
    _mask(case, groups, tokens, padding),
  )
  _check_token_choice(logits, mask, choices, capacity, options)


def _check_token_choice(logits, mask, choices, capacity, options):
  chosen = functools.partial(
    routing.tokens_choose,
    num_selected=choices,
    options=routing.ChoiceOptions(capacity=capacity, **options),
  )

  @jax.jit
  def run(logits, mask):
    def objective(logits):
      routed = chosen(logits, token_mask=mask)
      weights = jnp.arange(1.0, routed.gates.size + 1).reshape(routed.gates.shape)
      return jnp.sum(routed.gates * weights) + routed.auxiliary_loss + routed.router_z_loss, routed

    gradient, routed = jax.grad(objective, has_aux=True)(logits)
    return gradient, routed, routed.kept()

  gradient, routed, kept = jax.device_get(run(jnp.asarray(logits), mask))
  names = dict(
    normalize_gates='normalize', batch_prioritized='prioritized', shared_capacity='shared'
  )
  expected = reference.tokens_choose(
    logits,
    choices,
    capacity=capacity,
    mask=mask,
    rounded=routed.probs.reshape(logits.shape),
    **{names.get(name, name): value for name, value in options.items()},
  )
  _check(routed, kept, expected)
  assert np.all(np.isfinite(gradient))
  if mask is not None:
    assert not np.any(gradient[~mask])


@pytest.mark.full
@pytest.mark.parametrize('seed', range(60))
def test_token_choice_is_the_loops_for_random_options(seed):
  rng = np.random.default_rng(1000 + seed)
  groups, tokens, num_experts = rng.integers(1, 5), rng.integers(1, 80), rng.integers(1, 20)
  capacity = None if rng.uniform() < 0.2 else int(rng.integers(1, 12))
  padding = rng.choice([None, 'some', 'group', 'all'], p=[0.4, 0.4, 0.15, 0.05])
  options = {
    name: bool(rng.integers(2))
    for name in (
      'normalize_gates',
      'batch_prioritized',
      'shared_capacity',
      'padding_uses_capacity',
      'padding_in_losses',
    )
  }
  options['score'] = str(rng.choice(['softmax', 'sigmoid']))
  _check_token_choice(
    _logits(seed, groups, tokens, num_experts, ties=bool(rng.integers(2))),
    _mask(seed, groups, tokens, padding),
    int(rng.integers(1, num_experts + 1)),
    capacity,
    options,
  )


# (groups, tokens, experts, capacity, ties, padding, options)
_EXPERT_CASES = [
  (2, 13, 4, 3, False, None, {}),
  (2, 13, 4, 9, True, 'some', {}),
  (2, 13, 4, 9, True, 'some', dict(padding_uses_capacity=True, padding_in_losses=False)),
  (2, 13, 4, 40, False, 'group', dict(padding_in_losses=False)),
  (2, 13, 4, 1, False, 'all', {}),
  (2, 13, 1, 5, False, 'some', {}),
]


@pytest.mark.parametrize('case', range(len(_EXPERT_CASES)))
def test_expert_choice_is_the_loops(case):
  groups, tokens, num_experts, capacity, ties, padding, options = _EXPERT_CASES[case]
  logits, mask = (
    _logits(case, groups, tokens, num_experts, ties),
    _mask(case, groups, tokens, padding),
  )

  @jax.jit
  def run(logits, mask):
    def objective(logits):
      routed = routing.experts_choose(logits, capacity, token_mask=mask, **options)
      weights = jnp.arange(1.0, routed.gates.size + 1).reshape(routed.gates.shape)
      return jnp.sum(routed.gates * weights) + routed.router_z_loss, routed

    gradient, routed = jax.grad(objective, has_aux=True)(logits)
    return gradient, routed, routed.times_chosen(), routed.fraction_tokens_left_behind()

  gradient, routed, times_chosen, left_behind = jax.device_get(run(jnp.asarray(logits), mask))
  expected = reference.experts_choose(logits, capacity, mask=mask, rounded=routed.probs, **options)
  np.testing.assert_array_equal(routed.token_index, expected['index'])
  np.testing.assert_allclose(routed.gates, expected['gates'], atol=1e-6)
  np.testing.assert_allclose(routed.router_z_loss, expected['router_z_loss'], rtol=1e-5, atol=1e-6)
  assert np.all(np.isfinite(gradient))
  chosen = np.array(
    [[np.sum(expected['index'][g] == t) for t in range(tokens)] for g in range(groups)]
  )
  np.testing.assert_array_equal(times_chosen, chosen)
  real = np.ones((groups, tokens), bool) if mask is None else mask
  np.testing.assert_allclose(
    left_behind, np.sum(real & (chosen == 0)) / max(real.sum(), 1), atol=1e-6
  )


def _metrics(routed):
  """Return all metrics of tokens' choices; to be called in a jitted function."""
  names = (
    'choice_counts',
    'expert_load',
    'dropped_fraction',
    'fraction_tokens_left_behind',
    'expert_usage',
    'router_confidence',
    'router_entropy',
  )
  return {name: getattr(routed, name)() for name in names}


def test_values_of_the_metrics():
  logits, mask = _logits(5, 2, 16, 4), _mask(5, 2, 16, 'some')
  options = routing.ChoiceOptions(capacity=2)

  @jax.jit
  def run(logits, mask):
    routed = routing.tokens_choose(logits, 2, options, token_mask=mask)
    # 4 sequences of 7 tokens in the 32 of the groups; in 4 bins of a place or two.
    return {'drops_by_position': routed.drops_by_position(4, 7, num_bins=4), **_metrics(routed)}

  got = run(logits, mask)
  expected = reference.tokens_choose(logits, 2, capacity=2, mask=mask)
  index, kept = expected['index'], expected['kept']
  counts = np.array([[np.sum(index[g] == e) for e in range(4)] for g in range(2)])
  np.testing.assert_array_equal(got['choice_counts'], counts)
  np.testing.assert_allclose(got['expert_load'], counts.sum(0) / counts.sum(), rtol=1e-6)
  np.testing.assert_allclose(got['dropped_fraction'], 1 - kept.sum() / (2 * mask.sum()), rtol=1e-6)
  np.testing.assert_allclose(
    got['fraction_tokens_left_behind'], np.mean(~kept.any(-1)[mask]), rtol=1e-6
  )
  np.testing.assert_allclose(got['expert_usage'], kept.sum() / (2 * 4 * 2), rtol=1e-6)
  np.testing.assert_allclose(
    got['router_confidence'], expected['gates'].sum() / kept.sum(), rtol=1e-6
  )
  probs = reference.softmax(np.asarray(logits, np.float64))[mask]
  np.testing.assert_allclose(
    got['router_entropy'], -(probs * np.log(probs)).sum(-1).mean(), rtol=1e-5
  )
  chosen = np.broadcast_to(mask[..., None], kept.shape).reshape(32, 2)[:28].reshape(4, 7, 2)
  dropped = chosen & ~kept.reshape(32, 2)[:28].reshape(4, 7, 2)
  bins = np.arange(7) * 4 // 7
  shares = [dropped[:, bins == b].sum() / chosen[:, bins == b].sum() for b in range(4)]
  np.testing.assert_allclose(got['drops_by_position'], shares, rtol=1e-6)


def test_padding_that_takes_slots_is_not_in_shares_of_drops():
  logits, mask = _logits(5, 2, 16, 4), _mask(5, 2, 16, 'some')
  options = routing.ChoiceOptions(capacity=2, padding_uses_capacity=True)
  routed = _tokens_choose(logits, 2, options, token_mask=mask)
  lost = ~np.asarray(routed.kept())[mask]
  assert lost.mean() != np.mean(~np.asarray(routed.kept()))
  np.testing.assert_allclose(routed.dropped_fraction(), lost.mean(), rtol=1e-6)
  np.testing.assert_allclose(routed.fraction_tokens_left_behind(), lost.all(-1).mean(), rtol=1e-6)
  np.testing.assert_allclose(routed.drops_by_position(1, 32, num_bins=1), [lost.mean()], rtol=1e-6)


def test_sums_without_any_token_are_finite():

  @jax.jit
  def run(logits, mask):
    routed = routing.tokens_choose(logits, 1, routing.ChoiceOptions(capacity=1), token_mask=mask)
    return {'drops_by_position': routed.drops_by_position(1, 3), **_metrics(routed)}

  for name, metric in run(jnp.zeros((1, 3, 2)), jnp.zeros((1, 3), bool)).items():
    assert not np.any(metric), name


def test_uniform_scores_have_the_largest_entropy():

  @jax.jit
  def run(logits):
    routed = routing.tokens_choose(logits, 1, routing.ChoiceOptions(capacity=None))
    return routed, routed.router_entropy()

  routed, entropy = run(jnp.zeros((1, 3, 8)))
  np.testing.assert_allclose(entropy, np.log(8), rtol=1e-6)
  np.testing.assert_array_equal(routed.expert_index, 0)
  np.testing.assert_allclose(routed.auxiliary_loss, 1.0, rtol=1e-6)


@pytest.mark.parametrize('num_entries', [1, 31, 32, 33, 200])
def test_ranks_count_earlier_equals(num_entries):
  index = np.random.default_rng(num_entries).integers(0, 5, (3, num_entries)).astype(np.int32)
  got = jax.jit(functools.partial(routing.rank_within_expert, num_experts=4))(index)
  expected = [[np.sum(row[:n] == row[n]) for n in range(num_entries)] for row in index]
  np.testing.assert_array_equal(np.where(index < 4, got, 0), np.where(index < 4, expected, 0))


def test_gates_of_normalized_choices_sum_to_one_and_one_choice_has_gate_one():
  logits = jnp.asarray(_logits(3, 1, 8, 4))
  for choices in (1, 3):
    routed = _tokens_choose(
      logits, choices, routing.ChoiceOptions(capacity=None, normalize_gates=True)
    )
    np.testing.assert_allclose(np.sum(routed.gates, -1), 1.0, rtol=1e-6)


def test_sigmoids_that_underflow_have_finite_normalized_gates():
  options = routing.ChoiceOptions(capacity=None, score='sigmoid', normalize_gates=True)

  def objective(logits):
    routed = routing.tokens_choose(logits, 2, options)
    return jnp.sum(routed.gates) + routed.auxiliary_loss + routed.router_z_loss

  value, gradient = jax.jit(jax.value_and_grad(objective))(jnp.full((1, 2, 4), -200.0))
  assert np.isfinite(value) and np.all(np.isfinite(gradient))


@pytest.mark.parametrize(
  'factor,tokens,experts,least,expected',
  [
    (1.0, 20, 8, 1, 2),
    (1.0, 28, 8, 1, 4),
    (1.25, 64, 16, 4, 5),
    (1.0, 16, 8, 4, 4),
    (2.0, 6, 4, 1, 3),
    (1.0, 6, 4, 1, 2),
    (0.01, 16, 4, 1, 1),
  ],
)
def test_capacity_rounds_halves_to_even(factor, tokens, experts, least, expected):
  assert routing.expert_capacity(tokens, experts, factor, least) == expected


@pytest.mark.parametrize(
  'arguments,message',
  [
    (
      dict(factor=0.1, min_capacity=0),
      'factor` must be .* that gives each expert at least one slot, got 0.1',
    ),
    (dict(factor=0.0), 'factor` must be .* got 0.0'),
    (dict(factor=float('nan')), 'factor` must be .* got nan'),
    (dict(factor=1.0, min_capacity=-1), 'min_capacity` must be an integer >= 0'),
  ],
)
def test_capacities_that_drop_everything_raise(arguments, message):
  with pytest.raises(ConfigError, match=message):
    routing.expert_capacity(16, 8, **arguments)


def test_errors_of_the_functions():
  with pytest.raises(
    ConfigError, match=r'num_selected` must be an integer in \[1, 4\], got 5. num_experts is 4'
  ):
    routing.tokens_choose(jnp.zeros((1, 2, 4)), 5, routing.ChoiceOptions(capacity=None))
  with pytest.raises(ConfigError, match="Did you mean 'softmax'"):
    routing.ChoiceOptions(capacity=None, score='soft_max')
  routed = _tokens_choose(jnp.zeros((1, 2, 4)), 1, routing.ChoiceOptions(capacity=None))
  with pytest.raises(
    ConfigError, match='as many tokens as were routed, 2, got 3 sequences of 1 tokens'
  ):
    routed.drops_by_position(3, 1)


def test_one_group_of_shared_capacity_is_a_single_group_of_all_slots():
  logits = _logits(7, 3, 6, 4)
  shared = _tokens_choose(
    logits, 2, routing.ChoiceOptions(capacity=2, shared_capacity=True, batch_prioritized=True)
  )
  single = _tokens_choose(
    logits.reshape(1, 18, 4), 2, routing.ChoiceOptions(capacity=6, batch_prioritized=True)
  )
  assert shared.capacity == single.capacity == 6
  for name in ('expert_index', 'position', 'gates', 'probs'):
    np.testing.assert_array_equal(getattr(shared, name), getattr(single, name))
  assert not np.isclose(
    shared.auxiliary_loss, single.auxiliary_loss
  )  # Losses stay those of the groups.
  assert routing.record_shape(3, 6, 2, routing.ChoiceOptions(capacity=2, shared_capacity=True)) == (
    1,
    18,
    2,
  )
