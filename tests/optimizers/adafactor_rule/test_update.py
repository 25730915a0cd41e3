"""Adafactor's update: independent implementations, the effect of each option, limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import adafactor
from t5x_lite.adafactor import HParamMap
from t5x_lite.optimizers.adafactor_rule import update as update_lib


def _reference(
  param, grads, rates, *, row, col, batch, decay_rate=0.8, eps1=1e-30, eps2=1e-3, clip=1.0
):
  """Adafactor in float64, one matrix at a time: dims are moved to [batch, row, column]."""
  order = (*batch, *row, *col)
  inverse = np.argsort(order)
  sizes = [int(np.prod([param.shape[dim] for dim in dims])) for dims in (batch, row, col)]
  moved_shape = [param.shape[dim] for dim in order]
  p = np.transpose(param, order).reshape(sizes).astype(np.float64)
  v_row, v_col = np.zeros(sizes[:2]), np.zeros([sizes[0], sizes[2]])
  for t, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
    g = np.transpose(grad, order).reshape(sizes).astype(np.float64)
    decay = 1 - t**-decay_rate
    for b in range(sizes[0]):
      squared = g[b] ** 2 + eps1
      v_row[b] = decay * v_row[b] + (1 - decay) * squared.mean(axis=1)
      v_col[b] = decay * v_col[b] + (1 - decay) * squared.mean(axis=0)
      update = g[b] / np.sqrt(np.outer(v_row[b], v_col[b]) / v_row[b].mean())
      update /= max(1.0, np.sqrt(np.mean(update**2)) / clip)
      p[b] -= rate * max(np.sqrt(np.mean(p[b] ** 2)), eps2) * update
  return np.transpose(p.reshape(moved_shape), inverse)


@pytest.mark.parametrize(
  'shape,rule',
  [
    ((6, 8), 'RC'),
    ((8, 6), 'CR'),
    ((5, 3, 7), 'RBC'),
    ((3, 6, 2, 4), 'BRCC'),
    ((2, 4, 3, 2, 5), 'CRBRC'),
    # On a CPU, wide matrices with a multiple of 64 rows are summed in blocks of rows.
    ((64, 16384), 'RC'),
    ((192, 16390), 'RC'),
    ((20, 16384), 'RC'),
    ((16384, 64), 'RC'),
  ],
)
def test_equals_the_algorithm_matrix_by_matrix(shape, rule):
  roles = {'R': 'row', 'C': 'column', 'B': 'batch'}
  dims = {letter: tuple(i for i, role in enumerate(rule) if role == letter) for letter in 'RCB'}
  rng = np.random.default_rng(0)
  param = rng.normal(size=shape).astype(np.float32)
  grads = [rng.normal(size=shape).astype(np.float32) * rng.uniform(0.1, 3) for _ in range(8)]
  rates = np.linspace(0.1, 0.01, 8)
  optimizer = adafactor.Adafactor(
    factor_map=HParamMap([('p', [roles[letter] for letter in rule])]), min_dim_size_to_factor=2
  ).create({'p': param})
  assert optimizer.state.param_states['p'].v.shape == (1,)
  update = jax.jit(
    lambda optimizer, grad, rate: optimizer.apply_gradient({'p': grad}, learning_rate=rate)
  )
  for grad, rate in zip(grads, rates, strict=True):
    optimizer = update(optimizer, grad, rate)
  want = _reference(param, grads, rates, row=dims['R'], col=dims['C'], batch=dims['B'])
  np.testing.assert_allclose(optimizer.target['p'], want, rtol=2e-5, atol=2e-6)


_ROLES = {'R': 'row', 'C': 'column', 'B': 'batch', 'N': 'none'}


def _dims(rule, letter):
  return tuple(dim for dim, role in enumerate(rule) if role == letter)


def _read_independently(params, grads, rates, options, rules, start):
  """Adafactor as T5X defines it, in float64, one array at a time.

  Args:
    params: name to array.
    grads: one such dict per update.
    rates: learning rate of each update.
    options: hyper-parameters by the names of `Adafactor`.
    rules: name to a letter per dim (R, C, B, N), or None for "not factored".
    start: step of the first update.

  Returns:
    (params, name to {'v_row', 'v_col', 'v', 'm'} of those that are in use).
  """
  get = {
    'decay_rate': 0.8,
    'step_offset': 0,
    'clipping_threshold': 1.0,
    'epsilon1': 1e-30,
    'epsilon2': 1e-3,
    'beta1': None,
    'min_dim_size_to_factor': 128,
    'weight_decay_rate': None,
    'weight_decay_rate_lr_exponent': None,
    'max_parameter_scale': None,
    'global_norm_clip_threshold': None,
    'multiply_by_parameter_scale': True,
    'factored': True,
    **options,
  }
  params = {name: p.astype(np.float64) for name, p in params.items()}
  state = {name: {} for name in params}
  for number, (some_grads, rate) in enumerate(zip(grads, rates, strict=True)):
    some_grads = {name: g.astype(np.float64) for name, g in some_grads.items()}
    if get['global_norm_clip_threshold'] is not None:
      norm = np.sqrt(sum((g**2).sum() for g in some_grads.values()))
      some_grads = {
        name: g * min(1, get['global_norm_clip_threshold'] / norm) for name, g in some_grads.items()
      }
    t = max(start + number - get['step_offset'] + 1, 1)
    old, new = 1 - t ** -get['decay_rate'], t ** -get['decay_rate']
    for name, p in params.items():
      g, s, rule = some_grads[name], state[name], rules[name] if get['factored'] else None
      rows = cols = ()
      batch = _dims(rule, 'B') if rule else ()
      if rule is not None and (p.ndim > 2 or batch):
        rows, cols = _dims(rule, 'R'), _dims(rule, 'C')
      elif rule is not None and p.ndim == 2 and min(p.shape) >= get['min_dim_size_to_factor']:
        rows, cols = ((0,), (1,)) if p.shape[0] <= p.shape[1] else ((1,), (0,))
      rows, cols = (rows, cols) if rows and cols else ((), ())
      mean_dims = tuple(dim for dim in range(p.ndim) if dim not in batch)

      def rms(x):
        return np.sqrt((x**2).mean(mean_dims, keepdims=True))

      squares = g**2 + get['epsilon1']
      if rows:
        # Averaged dims have size 1.
        s['v_row'] = old * s.get('v_row', 0.0) + new * squares.mean(cols, keepdims=True)
        s['v_col'] = old * s.get('v_col', 0.0) + new * squares.mean(rows, keepdims=True)
        u = g / np.sqrt(s['v_row'] * s['v_col'] / s['v_row'].mean(rows, keepdims=True))
      else:
        s['v'] = old * s.get('v', 0.0) + new * squares
        u = g / np.sqrt(s['v'])
      if get['clipping_threshold'] is not None:
        u = u / np.maximum(1, rms(u) / get['clipping_threshold'])
      scaled = get['multiply_by_parameter_scale']
      if isinstance(scaled, HParamMap):
        scaled = scaled[name]
      scale = np.maximum(rms(p), get['epsilon2']) if scaled else 1.0
      if scaled and get['max_parameter_scale'] is not None:
        scale = np.minimum(scale, get['max_parameter_scale'])
      u = rate * scale * u
      if get['beta1'] is not None:
        u = s['m'] = get['beta1'] * s.get('m', 0.0) + (1 - get['beta1']) * u
      decay = get['weight_decay_rate']
      if get['weight_decay_rate_lr_exponent']:
        decay = (1.0 if decay is None else decay) * rate ** get['weight_decay_rate_lr_exponent']
      params[name] = p - u - (0.0 if decay is None else decay * p)
  return params, state


# Name to shape and a letter per dim.
_ARRAYS = {
  'wide': ((5, 9), 'RC'),
  'tall': ((11, 6), 'CR'),
  'square': ((6, 6), 'CR'),
  'small': ((3, 9), 'RC'),
  'vector': ((7,), 'N'),
  'scalar': ((), ''),
  'stacked_vector': ((6, 3), 'NB'),
  'stacked': ((5, 2, 7), 'RBC'),
  'heads': ((6, 2, 3, 4), 'RBCC'),
  'apart': ((4, 5, 3), 'NRC'),
  'bias': ((3, 4, 2), 'NBN'),
  'plain': ((4, 5), None),
  'row_alone': ((4, 2, 3), 'RBN'),
}


def _random_options(rng):
  def maybe(*values):
    return values[rng.integers(len(values))]

  options = {
    'factored': maybe(True, True, True, False),
    'beta1': maybe(None, 0.0, 0.5, 0.9),
    'decay_rate': rng.uniform(0.3, 1.0),
    'step_offset': int(rng.integers(0, 8)),
    'clipping_threshold': maybe(None, 0.3, 1.0, 2.0),
    'weight_decay_rate': maybe(None, 0.0, 0.01),
    'weight_decay_rate_lr_exponent': maybe(None, 0.0, 1.0, 2.0),
    'min_dim_size_to_factor': int(rng.integers(2, 8)),
    'epsilon1': maybe(1e-30, 1e-6, 1e-2),
    'epsilon2': maybe(1e-3, 0.5),
    'global_norm_clip_threshold': maybe(None, 0.1, 100.0),
  }
  scale = maybe(True, True, False, HParamMap([('^s', False), ('', True)]))
  options['multiply_by_parameter_scale'] = scale
  if scale is not False:
    options['max_parameter_scale'] = maybe(None, 0.2)
  return options


# Forty were tried when this was written.
@pytest.mark.full  # by default, the golden trajectories and the algorithm above
@pytest.mark.parametrize(
  'seed', [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 12))]
)
def test_equals_an_independent_reading(seed):
  rng = np.random.default_rng(seed)
  options = _random_options(rng)
  rules = {name: rule for name, (_, rule) in _ARRAYS.items()}

  def draw():
    return {
      name: rng.normal(size=shape).astype(np.float32) * np.float32(10.0 ** rng.uniform(-2, 2))
      for name, (shape, _) in _ARRAYS.items()
    }

  params, grads, start = draw(), [draw() for _ in range(5)], int(rng.integers(0, 12))
  rates = rng.uniform(0.01, 0.3, 5).astype(np.float32)
  factor_map = HParamMap(
    [
      (f'^{name}$', None if rule is None else [_ROLES[letter] for letter in rule])
      for name, rule in rules.items()
    ]
  )
  factor_options = {'factor_map': factor_map} if options['factored'] else {}
  optimizer = adafactor.Adafactor(**options, **factor_options).create(
    jax.tree.map(jnp.asarray, params)
  )
  optimizer = optimizer.replace(state=optimizer.state.replace(step=jnp.int32(start)))
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
  optimizer = jax.jit(
    lambda optimizer: jax.lax.scan(
      lambda o, x: (o.apply_gradient(x[0], learning_rate=x[1]), None), optimizer, (stacked, rates)
    )
  )(optimizer)[0]
  want_params, want_state = _read_independently(
    params, grads, rates.astype(np.float64), options, rules, start
  )
  for name, want in want_params.items():
    np.testing.assert_allclose(
      optimizer.target[name],
      want,
      rtol=1e-4,
      atol=2e-5 * np.max(np.abs(want)),
      err_msg=f'{name}, {options}',
    )
    for slot in ('v_row', 'v_col', 'v', 'm'):
      got = getattr(optimizer.state.param_states[name], slot)
      if slot in want_state[name]:
        want_slot = np.asarray(want_state[name][slot])
        assert (
          got.shape == tuple(size for size in want_slot.shape if size != 1)
          or got.shape == want_slot.shape
        )
        np.testing.assert_allclose(
          got.reshape(-1),
          want_slot.reshape(-1),
          rtol=1e-4,
          atol=1e-4 * np.max(np.abs(want_slot)),
          err_msg=f'{name}/{slot}, {options}',
        )
      else:
        assert got.shape == (1,) and got[0] == 0, f'{name}/{slot}'


@pytest.mark.parametrize('warmup_init', [False, True])
def test_relative_step(warmup_init):
  schedule = adafactor.relative_step(0.05, warmup_init=warmup_init)
  steps = np.arange(0, 30_000, 7)
  bound = 1e-6 * (steps + 1) if warmup_init else 0.05
  np.testing.assert_allclose(
    [float(schedule(step)) for step in steps[:200]],
    np.minimum(bound, (steps + 1.0) ** -0.5)[:200],
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    schedule(jnp.asarray(steps)), np.minimum(bound, (steps + 1.0) ** -0.5), rtol=1e-6
  )
  # The optimizer's learning rate has the same effect as the trainer's.
  own = adafactor.Adafactor(schedule).create({'p': jnp.ones([3])})
  passed = adafactor.Adafactor().create({'p': jnp.ones([3])})
  for step in range(3):
    own = own.apply_gradient({'p': jnp.ones([3])})
    passed = passed.apply_gradient({'p': jnp.ones([3])}, learning_rate=schedule(step))
  np.testing.assert_array_equal(own.target['p'], passed.target['p'])


def test_stacked_parameters_train_as_if_they_were_separate():
  rng = np.random.default_rng(1)
  stacked = (
    rng.normal(size=[6, 3, 10]).astype(np.float32)
    * np.array([0.1, 1.0, 7.0], np.float32)[None, :, None]
  )
  grads = rng.normal(size=stacked.shape).astype(np.float32)
  options = dict(min_dim_size_to_factor=2, beta1=0.9, weight_decay_rate=0.01)
  whole = adafactor.Adafactor(
    factor_map=HParamMap([('.', ('row', 'batch', 'col'))]), **options
  ).create({'p': stacked})
  parts = adafactor.Adafactor(**options).create({f'p{i}': stacked[:, i] for i in range(3)})
  for rate in (0.1, 0.05):
    whole = whole.apply_gradient({'p': grads}, learning_rate=rate)
    parts = parts.apply_gradient({f'p{i}': grads[:, i] for i in range(3)}, learning_rate=rate)
  for i in range(3):
    np.testing.assert_allclose(whole.target['p'][:, i], parts.target[f'p{i}'], rtol=1e-5, atol=1e-6)


def _one_update(param, grad, learning_rate=0.1, step=0, **options):
  options = {'multiply_by_parameter_scale': False, 'clipping_threshold': None, **options}
  optimizer = adafactor.Adafactor(**options).create({'p': jnp.asarray(param, jnp.float32)})
  optimizer = optimizer.replace(state=optimizer.state.replace(step=jnp.int32(step)))
  return optimizer.apply_gradient(
    {'p': jnp.asarray(grad, jnp.float32)}, learning_rate=learning_rate
  )


def test_each_option_has_its_documented_effect():
  param, grad = np.array([2.0, -4.0, 4.0]), np.array([3.0, -1.0, 0.5])
  # The first second moment is the squared gradient itself, so an update is the gradient's sign.
  sign = np.sign(grad)
  rms = np.sqrt(np.mean(param**2))

  def moved(**options):
    return (param - np.asarray(_one_update(param, grad, **options).target['p'])) / 0.1

  np.testing.assert_allclose(moved(), sign, rtol=1e-5)
  np.testing.assert_allclose(moved(clipping_threshold=0.25), 0.25 * sign, rtol=1e-5)
  np.testing.assert_allclose(moved(clipping_threshold=2.0), sign, rtol=1e-5)
  np.testing.assert_allclose(moved(multiply_by_parameter_scale=True), rms * sign, rtol=1e-5)
  np.testing.assert_allclose(
    moved(multiply_by_parameter_scale=True, max_parameter_scale=0.5), 0.5 * sign, rtol=1e-5
  )
  np.testing.assert_allclose(
    moved(multiply_by_parameter_scale=True, epsilon2=9.0), 9 * sign, rtol=1e-5
  )
  np.testing.assert_allclose(
    moved(multiply_by_parameter_scale=HParamMap([('^p$', True), ('.*', False)])),
    rms * sign,
    rtol=1e-5,
  )
  np.testing.assert_allclose(moved(beta1=0.75), 0.25 * sign, rtol=1e-5)
  np.testing.assert_allclose(moved(weight_decay_rate=0.02), sign + 0.2 * param, rtol=1e-5)
  np.testing.assert_allclose(
    moved(weight_decay_rate=0.5, weight_decay_rate_lr_exponent=2.0), sign + 0.05 * param, rtol=1e-5
  )
  np.testing.assert_allclose(
    moved(weight_decay_rate_lr_exponent=2.0), sign + 0.1 * param, rtol=1e-5
  )
  # epsilon1 is added to the squared gradient.
  np.testing.assert_allclose(moved(epsilon1=16.0), grad / np.sqrt(grad**2 + 16.0), rtol=1e-5)
  # The joint norm is clipped before the statistics: only they show it.
  state = _one_update(param, grad, global_norm_clip_threshold=0.5).state.param_states['p']
  np.testing.assert_allclose(state.v, (grad * 0.5 / np.linalg.norm(grad)) ** 2, rtol=1e-5)
  state = _one_update(param, grad, global_norm_clip_threshold=50.0).state.param_states['p']
  np.testing.assert_allclose(state.v, grad**2, rtol=1e-5)


@pytest.mark.parametrize('size', [1e8, 1e15])
def test_rows_without_gradients_next_to_very_large_ones_do_not_change(size):
  # The second moment of one row is 1e-30, the mean of all of them is up to 1e27: their quotient is no float32.
  grad = np.zeros([8, 16])
  grad[0, 0] = size
  update = (
    jnp.ones([8, 16]) - _one_update(np.ones([8, 16]), grad, min_dim_size_to_factor=4).target['p']
  )
  assert np.all(np.isfinite(update)) and float(update[0, 0]) > 0
  np.testing.assert_array_equal(np.asarray(update).ravel()[1:], 0.0)


def test_decay_of_the_second_moment():
  grad = np.array([3.0, -1.0])

  def mixing(step, **options):
    return (
      np.asarray(_one_update([1.0, 1.0], grad, step=step, **options).state.param_states['p'].v)
      / grad**2
    )

  np.testing.assert_allclose(mixing(0), 1.0, rtol=1e-6)
  np.testing.assert_allclose(mixing(9), 10**-0.8, rtol=1e-5)
  np.testing.assert_allclose(mixing(9, decay_rate=0.5), 10**-0.5, rtol=1e-5)
  np.testing.assert_allclose(mixing(109, step_offset=100), 10**-0.8, rtol=1e-5)
  # Before the offset every step is a first one; T5X has NaN there.
  np.testing.assert_allclose(mixing(3, step_offset=100), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
  'shape, share', [((256, 512), 0.1), ((512, 256), 0.1), ((512, 16384), 0.13)]
)
def test_an_update_stores_no_array_of_the_size_of_the_parameter(shape, share):
  optimizer = adafactor.Adafactor().create({'p': jnp.ones(shape)})
  update = jax.jit(
    lambda optimizer, grads: optimizer.apply_gradient(grads, learning_rate=0.1), donate_argnums=0
  )
  program = update.lower(optimizer, optimizer.target).compile()
  assert program.memory_analysis().temp_size_in_bytes < share * optimizer.target['p'].nbytes


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_skip_nan_updates_keeps_old_values(bad):
  params = {'matrix': jnp.ones([8, 6]), 'vector': jnp.ones([5]), 'fine': jnp.ones([4])}
  grads = jax.tree.map(jnp.ones_like, params)
  optimizer_def = adafactor.Adafactor(skip_nan_updates=True, min_dim_size_to_factor=2, beta1=0.9)
  before = optimizer_def.create(params).apply_gradient(grads, learning_rate=0.1)
  poisoned = {
    **grads,
    'matrix': grads['matrix'].at[2, 3].set(bad),
    'vector': grads['vector'].at[1].set(bad),
  }
  after = before.apply_gradient(poisoned, learning_rate=0.1)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after))
  np.testing.assert_array_equal(after.target['vector'][1], before.target['vector'][1])
  assert after.state.param_states['vector'].v[1] == before.state.param_states['vector'].v[1]
  assert np.all(after.target['fine'] < before.target['fine'])
  # Finite gradients continue to train all elements.
  again = after.apply_gradient(grads, learning_rate=0.1)
  pairs = zip(jax.tree.leaves(again.target), jax.tree.leaves(after.target), strict=True)
  assert all(np.all(new < old) for new, old in pairs)
  # Without the option the damage shows.
  unguarded = (
    adafactor.Adafactor(min_dim_size_to_factor=2)
    .create(params)
    .apply_gradient(poisoned, learning_rate=0.1)
  )
  assert not np.all(np.isfinite(unguarded.target['vector']))


def test_parameters_of_equal_shapes_and_options_are_traced_once(monkeypatch):
  traced = []
  monkeypatch.setattr(
    update_lib,
    '_factors',
    lambda v_row, v_col, plan, original=update_lib._factors: (
      traced.append(v_row.shape),
      original(v_row, v_col, plan),
    )[1],
  )
  params = {name: jnp.ones((13, 11)) for name in 'abcd'} | {'e': jnp.ones((13, 12))}
  optimizer = adafactor.Adafactor(0.1, min_dim_size_to_factor=4).create(params)
  with_arrays = adafactor.Adafactor(
    0.1, min_dim_size_to_factor=4, clipping_threshold=jnp.float32(1.0)
  ).create(params)
  expected = jax.jit(lambda: optimizer.apply_gradient(params))()
  assert len(traced) == 2
  # Options that are arrays may be traced; so each parameter is.
  got = jax.jit(lambda: with_arrays.apply_gradient(params))()
  assert len(traced) == 2 + 5
  for name in params:
    np.testing.assert_allclose(got.target[name], expected.target[name], rtol=1e-6)
