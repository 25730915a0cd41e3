"""Routers as modules: a table of contracts that all hold, noise, state, replay, errors."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import routing
from moe.routing import hashing
from t5x_lite.errors import ConfigError

_GROUPS, _TOKENS, _WIDTH, _EXPERTS = 2, 12, 8, 4
_ROUTERS = {
  'switch': routing.TokensChooseRouter(_EXPERTS),
  'st_moe': routing.TokensChooseRouter(
    _EXPERTS, num_selected=2, normalize_gates=True, batch_prioritized_routing=True, use_bias=True
  ),
  'global': routing.TokensChooseRouter(_EXPERTS, num_selected=2, capacity_scope='global'),
  'loss_free': routing.TokensChooseRouter(
    _EXPERTS, num_selected=2, score='sigmoid', bias_update_rate=0.1
  ),
  'sinkhorn': routing.SinkhornRouter(_EXPERTS, num_selected=2),
  'hash': routing.HashRouter(_EXPERTS, num_selected=2),
  'balanced_hash': routing.HashRouter(_EXPERTS, hash_fn='balanced', vocab_size=50),
  'experts_choose': routing.ExpertsChooseRouter(_EXPERTS),
}


def _inputs(seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(_GROUPS, _TOKENS, _WIDTH)).astype(np.float32) * 3
  mask = np.arange(_TOKENS) < 10
  x = x * mask[None, :, None]
  return (
    jnp.asarray(x),
    jnp.broadcast_to(jnp.asarray(mask), x.shape[:2]),
    jnp.asarray(rng.integers(0, 50, x.shape[:2]), jnp.int32),
  )


@functools.partial(jax.jit, static_argnums=(0, 3), static_argnames=('deterministic', 'mutable'))
def _apply(router, variables, x, capacity, *, mutable=False, **arguments):
  """Apply `router` as one program: operation by operation it takes many times as long."""
  return router.apply(variables, x, capacity=capacity, mutable=mutable, **arguments)


def _call(router, variables, x, ids, capacity=3, mask=None, deterministic=True, **arguments):
  return _apply(
    router,
    variables,
    x,
    capacity,
    token_mask=mask,
    token_ids=ids,
    deterministic=deterministic,
    **arguments,
  )


@functools.cache
def _made(name):
  """Return (router, its variables), the kernel large enough for probabilities that differ."""
  router = _ROUTERS[name]
  x, _, ids = _inputs()
  shapes = jax.eval_shape(
    lambda key: router.init(key, x, capacity=3, token_ids=ids), jax.random.key(0)
  )
  rng = np.random.default_rng(3)
  variables = {
    name: jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
    for name, tree in shapes.items()
    if name != 'params_axes'
  }
  if 'params' in variables:
    kernel = 0.5 * rng.normal(size=(_WIDTH, _EXPERTS)).astype(np.float32)
    variables['params']['router_weights']['w']['kernel'] = kernel
  return router, variables


@functools.cache
def _routed(name, training):
  """Return (routing, gradient of a sum of gates and losses by tokens, kept choices, load) for the inputs."""
  router, variables = _made(name)
  x, mask, ids = _inputs()

  @jax.jit
  def run(x):
    def objective(x):
      routed = _call(router, variables, x, ids, mask=mask, deterministic=not training)
      return jnp.sum(routed.gates**2) + routed.auxiliary_loss + routed.router_z_loss, routed

    gradient, routed = jax.grad(objective, has_aux=True)(x)
    return routed, gradient, routed.kept(), routed.expert_load()

  return jax.device_get(run(x))


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('name', _ROUTERS)
def test_contract(name, training):
  routed, gradient, all_kept, load = _routed(name, training)
  _, mask, _ = _inputs()
  index = routed.expert_index if isinstance(routed, routing.TokenChoice) else routed.token_index
  limit = routed.num_experts if isinstance(routed, routing.TokenChoice) else routed.num_tokens
  assert index.dtype == np.int32 and np.all((index >= 0) & (index <= limit))
  for array in (routed.gates, routed.probs, routed.auxiliary_loss, routed.router_z_loss):
    assert array.dtype == np.float32 and np.all(np.isfinite(array)) and np.all(array >= 0)
  assert routed.gates.shape == index.shape and np.all(routed.gates <= 1 + 1e-6)
  np.testing.assert_array_equal(routed.gates[~all_kept], 0)
  assert np.all(np.isfinite(gradient)) and not np.any(gradient[~np.asarray(mask)])
  np.testing.assert_allclose(np.sum(load), 1.0, rtol=1e-6)
  if isinstance(routed, routing.TokenChoice):
    # A token's choices are distinct, and no place is given out twice or beyond the capacity.
    for choices in index.reshape(-1, routed.num_selected):
      assert len(set(choices)) == len(choices) or set(choices) == {limit}
    assert routed.position.dtype == np.int32
    for group, kept in enumerate(all_kept):
      places = list(zip(index[group][kept], routed.position[group][kept], strict=True))
      assert len(set(places)) == len(places) and np.all(
        routed.position[group][kept] < routed.capacity
      )
    np.testing.assert_array_equal(
      index == limit,
      ~np.broadcast_to(np.asarray(mask).reshape(index.shape[:2])[..., None], index.shape),
    )
  else:
    assert not np.any(
      np.take_along_axis(
        np.broadcast_to(~np.asarray(mask)[:, None], (_GROUPS, _EXPERTS, _TOKENS)), index, -1
      )
    )


@pytest.mark.parametrize('name', [name for name in _ROUTERS if name != 'experts_choose'])
def test_dropless_keeps_all_choices(name):
  router, variables = _made(name)
  x, mask, ids = _inputs()

  @jax.jit
  def run(x):
    routed = _call(router, variables, x, ids, capacity=None, mask=mask)
    return routed, routed.kept(), routed.dropped_fraction(), routed.expert_usage()

  routed, kept, dropped_fraction, expert_usage = run(x)
  assert routed.position is None and routed.capacity is None
  np.testing.assert_array_equal(kept, np.broadcast_to(mask[..., None], routed.gates.shape))
  assert not dropped_fraction and expert_usage == 1.0


@pytest.mark.parametrize('name', _ROUTERS)
def test_replay_repeats_choices(name):
  router, variables = _made(name)
  x, mask, ids = _inputs()
  recorded = _routed(name, False)[0]
  index = (
    recorded.expert_index if isinstance(recorded, routing.TokenChoice) else recorded.token_index
  )
  # The replayed pass has other tokens: the choices and slots are the recorded ones, the gates are not.
  other = _inputs(seed=1)[0]
  replayed = _call(router, variables, other, ids, mask=mask, recorded=routing.RecordedChoice(index))
  given = _call(
    router, variables, other, ids, mask=mask, recorded=routing.RecordedChoice(index, recorded.gates)
  )
  for choice in (replayed, given):
    np.testing.assert_array_equal(
      choice.expert_index if isinstance(choice, routing.TokenChoice) else choice.token_index, index
    )
  if name != 'st_moe':  # There places go by gates, which are others.
    np.testing.assert_array_equal(given.gates, recorded.gates)
  if 'hash' not in name:
    assert not np.allclose(replayed.gates, recorded.gates)
  same = _call(router, variables, x, ids, mask=mask, recorded=routing.RecordedChoice(index))
  np.testing.assert_allclose(same.gates, recorded.gates, rtol=1e-5)
  with pytest.raises(ConfigError, match='`recorded` must be integers of shape'):
    _call(router, variables, x, ids, recorded=routing.RecordedChoice(index[:, :-1]))
  with pytest.raises(ConfigError, match='`recorded` must be integers of shape .*got .float32 of'):
    _call(router, variables, x, ids, recorded=routing.RecordedChoice(recorded.gates))


@pytest.mark.parametrize('name', ['st_moe', 'experts_choose', 'sinkhorn'])
def test_gradients_of_replayed_gates_reach_the_router(name):
  router, variables = _made(name)
  x, mask, ids = _inputs()
  recorded = _routed(name, False)[0]
  index = (
    recorded.expert_index if isinstance(recorded, routing.TokenChoice) else recorded.token_index
  )

  def objective(params, gates):
    routed = _call(
      router, {'params': params}, x, ids, mask=mask, recorded=routing.RecordedChoice(index, gates)
    )
    return jnp.sum(routed.gates**2)

  grad = jax.jit(jax.grad(objective))
  gradient = grad(variables['params'], None)
  assert np.linalg.norm(gradient['router_weights']['w']['kernel']) > 1e-3
  constant = grad(variables['params'], jnp.asarray(recorded.gates))
  assert not np.any(constant['router_weights']['w']['kernel'])


@pytest.mark.parametrize('name', ['switch', 'experts_choose'])
def test_bfloat16_tokens_are_routed_in_float32(name):
  router, variables = _made(name)
  x, mask, ids = _inputs()
  half = x.astype(jnp.bfloat16)
  got = _call(router, variables, half, ids, mask=mask)
  expected = _call(router, variables, half.astype(jnp.float32), ids, mask=mask)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(a, b)


def test_zero_tokens_are_padding_where_no_mask_says_so():
  router, variables = _made('switch')
  x, mask, _ = _inputs()
  got = _apply(router, variables, x, 3)
  np.testing.assert_array_equal(got.token_mask, mask)
  every = _apply(router.clone(ignore_padding_tokens=False), variables, x, 3)
  assert every.token_mask is None and np.all(every.expert_index < _EXPERTS)


def test_jitter_multiplies_inputs_of_the_router_in_training():
  router = routing.TokensChooseRouter(_EXPERTS, num_selected=2, jitter_noise=0.3)
  x = _inputs()[0]
  jax.eval_shape(
    lambda key: router.init(key, x, capacity=3), jax.random.key(0)
  )  # Needs no keys for noise.
  variables = {'params': _made('switch')[1]['params']}
  quiet = _apply(router, variables, x, 3, deterministic=True)
  keys = {'jitter': jax.random.key(2)}
  noisy = _apply(router, variables, x, 3, rngs=keys)
  assert not np.array_equal(noisy.probs, quiet.probs)
  np.testing.assert_array_equal(_apply(router, variables, x, 3, rngs=keys).probs, noisy.probs)
  with pytest.raises(flax.errors.InvalidRngError, match='needs PRNG for "jitter"'):
    _apply(router, variables, x, 3)
  noise = _noise(router, (50, 20, 10), keys)
  assert np.all(np.abs(noise - 1) <= 0.3 + 1e-5) and abs(noise.mean() - 1) < 0.01
  np.testing.assert_allclose(noise.std(), 0.3 / np.sqrt(3), rtol=0.02)


def _noise(router, shape, keys):
  """Return the factors [groups, tokens, width] of inputs of ones, for one expert more than the inputs have values.

  The logit of an expert is the input of its number, and that of the last expert is 0.
  """
  kernel = np.eye(shape[-1], shape[-1] + 1, dtype=np.float32)
  variables = {'params': {'router_weights': {'w': {'kernel': kernel}}}}
  router = router.clone(num_experts=shape[-1] + 1)
  log_probs = np.log(
    np.asarray(_apply(router, variables, jnp.ones(shape), None, rngs=keys).probs, np.float64)
  )
  return log_probs[..., :-1] - log_probs[..., -1:]


def _train_step(router, variables, x, deterministic=False):
  routed, updates = _apply(
    router, variables, x, None, deterministic=deterministic, mutable='router_state'
  )
  return routed, {**variables, **updates}


def test_loss_free_bias_moves_against_the_load_and_balances_it():
  router, variables = _made('loss_free')
  x = _normal(3, (_GROUPS, 64, _WIDTH))
  state = jax.jit(lambda key: router.init(key, x, capacity=None))(jax.random.key(0))['router_state']
  assert (
    not np.any(state['bias']) and state['num_passes'] == 0
  )  # Initialization does not count as a pass.
  before, after = _train_step(router, variables, x)
  counts = np.bincount(np.asarray(before.expert_index).ravel(), minlength=_EXPERTS)
  np.testing.assert_allclose(
    after['router_state']['bias'], 0.1 * np.sign(counts.mean() - counts), rtol=1e-6
  )
  # Gates are the scores without the bias.
  biased = _apply(router, after, x, None, deterministic=True)
  np.testing.assert_array_equal(
    biased.gates, np.take_along_axis(np.asarray(biased.probs), np.asarray(biased.expert_index), -1)
  )
  slow = router.clone(bias_update_rate=0.01)
  skewed = x + 2 * variables['params']['router_weights']['w']['kernel'][:, 0]
  first, current = _train_step(slow, variables, skewed)
  for _ in range(150):
    routed, current = _train_step(slow, current, skewed)
  assert _largest_load(first) > 0.45 and _largest_load(routed) < 0.3


def _largest_load(routed):
  return (
    np.bincount(np.asarray(routed.expert_index).ravel(), minlength=_EXPERTS).max()
    / routed.expert_index.size
  )


def _normal(seed, shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_loss_free_bias_stays_in_evaluation_and_where_it_is_not_mutable():
  router, variables = _made('loss_free')
  x = _inputs()[0]
  _, after = _train_step(router, variables, x, deterministic=True)
  for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(variables), strict=True):
    np.testing.assert_array_equal(a, b)
  _apply(
    router, variables, x, None, deterministic=False
  )  # Nothing mutable: no error, nothing kept.


def test_micro_batches_change_the_bias_like_the_full_batch():
  router, variables = _made('loss_free')
  x = _normal(4, (4, 16, _WIDTH))
  _, whole = _train_step(router, variables, x)
  current = {**variables, 'router_step': {'num_passes': jnp.int32(2)}}
  for step in range(2):
    routed, current = _train_step(router, current, x[2 * step : 2 * step + 2])
    expected = _apply(router, variables, x[2 * step : 2 * step + 2], None, deterministic=True)
    np.testing.assert_array_equal(
      routed.expert_index, expected.expert_index
    )  # One bias for all of a step.
  del current['router_step']
  for a, b in zip(jax.tree.leaves(current), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(a, b)


def test_sinkhorn_spreads_tokens_in_training_only():
  router = routing.SinkhornRouter(_EXPERTS, num_iterations=50, temperature=0.5)
  x = _normal(5, (_GROUPS, 128, _WIDTH))
  kernel = 0.4 * _normal(6, (_WIDTH, _EXPERTS))
  variables = {'params': {'router_weights': {'w': {'kernel': kernel}}}}
  skewed = x + 2 * kernel[:, 0]
  training = _apply(router, variables, skewed, None)
  evaluation = _apply(router, variables, skewed, None, deterministic=True)
  assert _largest_load(evaluation) > 0.4
  assert _largest_load(training) < 0.3
  logits = np.asarray(skewed) @ np.asarray(kernel)
  np.testing.assert_array_equal(evaluation.expert_index[..., 0], logits.argmax(-1))
  # Gates are the probabilities of the logits, of whatever expert was chosen.
  np.testing.assert_allclose(
    training.gates,
    np.take_along_axis(np.asarray(jax.nn.softmax(logits)), np.asarray(training.expert_index), -1),
    rtol=1e-4,
    atol=1e-6,
  )


@pytest.mark.parametrize('masked', [False, True])
def test_sinkhorn_scales_rows_and_columns(masked):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, 20, 4)).astype(np.float32)
  mask = rng.uniform(size=(2, 20)) < 0.7 if masked else np.ones((2, 20), bool)
  got = jax.jit(routing.sinkhorn_scores, static_argnums=(1, 2))(
    logits, 200, 0.7, mask if masked else None
  )
  for g in range(2):
    plan = np.exp(logits[g][mask[g]].astype(np.float64) / 0.7)
    for _ in range(500):
      plan /= plan.sum(1, keepdims=True)
      plan *= mask[g].sum() / 4 / plan.sum(0)
    plan /= plan.sum(1, keepdims=True)
    found = np.exp(np.asarray(got)[g][mask[g]].astype(np.float64))
    np.testing.assert_allclose(found / found.sum(1, keepdims=True), plan, atol=1e-4)


def test_sinkhorn_without_any_token_is_finite():
  scores = routing.sinkhorn_scores(jnp.ones((1, 3, 2)), 5, token_mask=jnp.zeros((1, 3), bool))
  assert np.all(np.isfinite(scores))


@pytest.mark.parametrize('experts,choices', [(4, 1), (4, 4), (6, 3), (1, 1), (7, 5)])
def test_balanced_tables_give_all_experts_as_many_ids(experts, choices):
  table = hashing.balanced_table(100, experts, choices, 3)
  for choice in range(choices):
    counts = np.bincount(table[:, choice], minlength=experts)
    assert counts.max() - counts.min() <= 1
  assert all(len(set(row)) == choices for row in table)
  if experts > 1:
    assert not np.array_equal(table, hashing.balanced_table(100, experts, choices, 4))


def test_hashes_are_fixed_spread_and_distinct():
  ids = jnp.arange(20000, dtype=jnp.int32)
  mixed_index = jax.jit(hashing.mixed_index, static_argnums=(1, 2, 3))
  index = np.asarray(mixed_index(ids, 8, 3, 0))
  counts = np.bincount(index[:, 0], minlength=8)
  assert np.all(np.abs(counts / 2500 - 1) < 0.1)
  assert np.all(
    (index[:, 0] != index[:, 1]) & (index[:, 1] != index[:, 2]) & (index[:, 0] != index[:, 2])
  )
  # Pairs of first choices under two seeds are as good as independent.
  other = np.asarray(mixed_index(ids, 8, 1, 1))[:, 0]
  pairs = np.bincount(index[:, 0] * 8 + other, minlength=64)
  assert np.all(np.abs(pairs / 312.5 - 1) < 0.35)
  np.testing.assert_array_equal(index[:5], mixed_index(jnp.arange(5), 8, 3, 0))


def test_hash_routes_only_by_ids():
  router = routing.HashRouter(_EXPERTS, num_selected=2, ignore_padding_tokens=False)
  x, _, ids = _inputs()
  assert not jax.eval_shape(
    lambda key: router.init(key, x, capacity=3, token_ids=ids), jax.random.key(0)
  )
  routed = _call(router, {}, x, ids, capacity=None)
  np.testing.assert_array_equal(
    routed.expert_index, jax.jit(hashing.mixed_index, static_argnums=(1, 2, 3))(ids, _EXPERTS, 2, 0)
  )
  np.testing.assert_array_equal(routed.gates, 0.5)
  assert not routed.auxiliary_loss and not routed.router_z_loss


@pytest.mark.parametrize(
  'router,options,message',
  [
    (
      routing.TokensChooseRouter,
      dict(num_experts=0),
      'Router.num_experts` must be an integer >= 1, got 0',
    ),
    (
      routing.TokensChooseRouter,
      dict(num_selected=5),
      r'num_selected` must be an integer in \[1, 4\], got 5',
    ),
    (
      routing.TokensChooseRouter,
      dict(jitter_noise=1.0),
      r'jitter_noise` must be a number in \[0, 1\), got 1.0',
    ),
    (routing.TokensChooseRouter, dict(jitter_noise=-0.1), 'jitter_noise` .* got -0.1'),
    (routing.TokensChooseRouter, dict(score='softmaxx'), "Did you mean 'softmax'"),
    (routing.TokensChooseRouter, dict(capacity_scope='globl'), "Did you mean 'global'"),
    (
      routing.TokensChooseRouter,
      dict(padding_uses_capacity=True, ignore_padding_tokens=False),
      'padding_uses_capacity',
    ),
    (
      routing.TokensChooseRouter,
      dict(padding_in_losses=False, ignore_padding_tokens=False),
      'padding_in_losses',
    ),
    (
      routing.TokensChooseRouter,
      dict(bias_update_rate=-1.0),
      'bias_update_rate` must be a number >= 0, got -1.0',
    ),
    (routing.SinkhornRouter, dict(num_selected=0), 'num_selected` .* got 0'),
    (routing.SinkhornRouter, dict(num_iterations=0), 'num_iterations` .* got 0'),
    (routing.SinkhornRouter, dict(temperature=0.0), 'temperature` must be a number > 0, got 0.0'),
    (routing.HashRouter, dict(hash_fn='balance', vocab_size=3), "Did you mean 'balanced'"),
    (
      routing.HashRouter,
      dict(hash_fn='balanced'),
      "an integer >= 1 with hash_fn='balanced', .* got None",
    ),
    (routing.HashRouter, dict(vocab_size=3), "None with 'mix', got 3"),
    (
      routing.HashRouter,
      dict(jitter_noise=0.1),
      'jitter_noise` must be the default, since .* no noise',
    ),
    (
      routing.HashRouter,
      dict(use_bias=True),
      'use_bias` must be the default, since the router has no parameters',
    ),
    (
      routing.HashRouter,
      dict(kernel_init=jax.nn.initializers.ones),
      'kernel_init` must be the default',
    ),
    (
      routing.HashRouter,
      dict(bias_init=jax.nn.initializers.ones),
      'bias_init` must be the default',
    ),
    (
      routing.SinkhornRouter,
      dict(bias_init=jax.nn.initializers.ones),
      'the default with use_bias=False',
    ),
    (
      routing.ExpertsChooseRouter,
      dict(padding_uses_capacity=True, ignore_padding_tokens=False),
      'padding_uses_capacity',
    ),
  ],
)
def test_options_are_checked_when_a_router_is_made(router, options, message):
  with pytest.raises(ConfigError, match=message):
    router(**{'num_experts': _EXPERTS, **options})


@pytest.mark.parametrize(
  'name,arguments,message',
  [
    ('switch', dict(capacity=0), 'capacity` must be an integer >= 1 or None, got 0'),
    ('switch', dict(capacity=1.5), 'capacity` .* got 1.5'),
    ('switch', dict(mask=jnp.ones((1, 3), bool)), 'token_mask` must be an array of shape'),
    (
      'experts_choose',
      dict(capacity=None),
      '`ExpertsChooseRouter.capacity` must be an integer >= 1, got None',
    ),
    ('hash', dict(ids=None), 'token_ids` must be integers of shape .*, got None'),
    ('hash', dict(ids=jnp.ones((_GROUPS, _TOKENS))), 'token_ids` must be integers of shape'),
    (
      'switch',
      dict(x=jnp.ones((3, 4))),
      r'x` must be an array \[groups, tokens of a group, width\]',
    ),
  ],
)
def test_wrong_arguments_raise(name, arguments, message):
  router, variables = _made(name)
  x, _, ids = _inputs()
  with pytest.raises(ConfigError, match=message):
    _call(router, variables, **{'x': x, 'ids': ids, **arguments})


def test_errors_without_a_required_capacity_or_ids():
  assert _ROUTERS['st_moe'].capacity_options == ('batch_prioritized_routing',)
  assert _ROUTERS['global'].capacity_options == ('capacity_scope',)
  assert _ROUTERS['sinkhorn'].capacity_options == ()
  assert [name for name, router in _ROUTERS.items() if router.needs_token_ids] == [
    'hash',
    'balanced_hash',
  ]


def test_parameters_have_t5x_names_and_axes():
  router = routing.TokensChooseRouter(_EXPERTS, use_bias=True)
  x = _inputs()[0]
  variables = jax.eval_shape(lambda key: router.init(key, x, capacity=3), jax.random.key(0))
  assert jax.tree.map(jnp.shape, variables['params']) == {
    'router_weights': {'w': {'kernel': (_WIDTH, _EXPERTS), 'bias': (_EXPERTS,)}}
  }
  axes = variables['params_axes']['router_weights']['w']
  assert axes['kernel_axes'].names == ('embed', 'unmodeled') and axes['bias_axes'].names == (
    'unmodeled',
  )
  assert 'router_state' not in variables
