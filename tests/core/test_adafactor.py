"""Adafactor: T5X's recorded trajectories, factor rules, a brute-force reference, each option's effect, refusals."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import adafactor, checkpoints, tree_utils
from t5x_lite.adafactor import FactorDim, HParamMap
from t5x_lite.errors import CheckpointError, ConfigError
from tests import golden_data

_CASES = ('clip_global_maxscale', 'hparam_map_scan', 'moe', 'noscale_offset', 'scan_default', 'std_default',
          'unfactored_mom_wd')
_STANDARD = adafactor.standard_logical_factor_rules()
_RULES = {
    'standard': _STANDARD,
    'moe': {**_STANDARD, 'expert': 'batch', 'expert_mlp': 'column', 'mlp_embed': 'row', 'unmodeled': 'none'},
    None: None,
}


def _golden(case):
  description, arrays = golden_data.load(f't5x/adafactor_{case}')
  options = dict(description['hyperparams'])
  options.pop('lr', None)
  options['logical_factor_rules'] = _RULES[options.get('logical_factor_rules', 'standard')]
  if isinstance(options.get('multiply_by_parameter_scale'), str):
    assert options['multiply_by_parameter_scale'] == "HParamMap([('scale$', False), ('.*', True)])"
    options['multiply_by_parameter_scale'] = HParamMap([('scale$', False), ('.*', True)])
  optimizer_def = adafactor.Adafactor(**options)
  axes = tree_utils.unflatten_dict({path: P(*names) for path, names in description['param_axes'].items()})
  optimizer_def.set_param_axes(axes)
  optimizer = optimizer_def.create(jax.tree.map(jnp.asarray, golden_data.subtree(arrays, 'params0')))
  return description, arrays, optimizer, axes


@pytest.mark.parametrize('case', _CASES)
def test_golden_trajectory(case):
  description, arrays, optimizer, _ = _golden(case)
  tolerance = description['tol']
  assert description['nan_at'] is None
  optimizer = optimizer.replace(state=optimizer.state.replace(step=jnp.int32(description['start_step'])))
  g0, g1 = golden_data.subtree(arrays, 'g0'), golden_data.subtree(arrays, 'g1')

  @jax.jit
  def step(optimizer, t, sign, learning_rate):
    grads = jax.tree.map(lambda a, b: (1.0 + 0.1 * t) * a + sign * b, g0, g1)
    return optimizer.apply_gradient(grads, learning_rate=learning_rate)

  num_compared = 0
  for t in range(20):
    optimizer = step(optimizer, jnp.float32(t), jnp.float32(1 if t % 2 == 0 else -1), arrays['lr'][t])
    for i, path in enumerate(description['param_order_for_norms']):
      norm = np.linalg.norm(np.asarray(tree_utils.flatten_dict(optimizer.target)[path], np.float64))
      np.testing.assert_allclose(norm, arrays['param_norm_per_step'][t, i], rtol=tolerance['rtol'], err_msg=path)
    for path, want in tree_utils.flatten_dict(golden_data.subtree(arrays, f'params_step{t + 1}')).items():
      got = tree_utils.flatten_dict(optimizer.target)[path]
      np.testing.assert_allclose(got, want, **tolerance, err_msg=f'{path} after {t + 1} steps')
      num_compared += 1
  assert num_compared == 5 * len(description['param_order_for_norms'])

  state_dict = optimizer.state_dict()['state']
  assert state_dict['step'] == description['start_step'] + 20
  got = tree_utils.flatten_dict(state_dict['param_states'])
  want = tree_utils.flatten_dict(golden_data.subtree(arrays, 'state_final'))
  assert got.keys() == want.keys()
  for path in got:
    np.testing.assert_allclose(got[path], want[path], **tolerance, err_msg=path)


@pytest.mark.parametrize('case', _CASES)
def test_golden_factor_map_state_shapes_and_axes(case):
  description, _, optimizer, axes = _golden(case)
  factor_map = optimizer.optimizer_def.hyper_params.factor_map
  if description['factor_map'] is None:
    assert factor_map is None
  else:
    names = {path: [role.name for role in rule] for path, rule in factor_map.items()}
    assert names == description['factor_map']
  state = tree_utils.flatten_dict(optimizer.state_dict()['state']['param_states'])
  assert {path: list(leaf.shape) for path, leaf in state.items()} == description['state_shapes']

  derived = optimizer.optimizer_def.derive_logical_axes(optimizer, axes)
  derived_flat = tree_utils.flatten_dict(derived.state_dict())
  for path, want in description['logical_axes'].items():
    got = derived_flat[path]
    if want is not None:
      assert tuple(got) == tuple(want), path
    elif path.endswith(('v_row', 'v_col')):
      # T5X replicates the factors; here they have the names of the dims that they keep.
      name = path.removeprefix('state/param_states/')
      param_axes = description['param_axes'][name.rsplit('/', 1)[0]]
      if state[name].shape != (1,):
        assert set(got) < set(param_axes) and len(got) == state[name].ndim, path
    else:
      assert not any(got), path


def test_axes_of_the_factors_are_those_of_the_dims_they_keep():
  params = {'kernel': jnp.ones([12, 3, 2, 8]), 'embedding': jnp.ones([40, 20]), 'norm': jnp.ones([12])}
  axes = {'kernel': P('embed', 'layers', 'heads', 'kv'), 'embedding': P('vocab', 'embed'), 'norm': P('embed')}
  optimizer_def = adafactor.Adafactor(logical_factor_rules=_STANDARD, min_dim_size_to_factor=16)
  optimizer_def.set_param_axes(axes)
  states = optimizer_def.derive_logical_axes(optimizer_def.create(params), axes).state.param_states
  unused = P(None)
  assert states['kernel'].v_row == P('embed', 'layers') and states['kernel'].v_col == P('layers', 'heads', 'kv')
  assert (states['kernel'].v, states['kernel'].m) == (unused, unused)
  # By size the smaller dim is the row.
  assert states['embedding'].v_row == P('embed') and states['embedding'].v_col == P('vocab')
  assert (states['norm'].v_row, states['norm'].v_col, states['norm'].v) == (unused, unused, P('embed'))


def _reference(param, grads, rates, *, row, col, batch, decay_rate=0.8, eps1=1e-30, eps2=1e-3, clip=1.0):
  """Adafactor in float64, one matrix at a time: dims are moved to [batch, row, column]."""
  order = (*batch, *row, *col)
  inverse = np.argsort(order)
  sizes = [int(np.prod([param.shape[dim] for dim in dims])) for dims in (batch, row, col)]
  moved_shape = [param.shape[dim] for dim in order]
  p = np.transpose(param, order).reshape(sizes).astype(np.float64)
  v_row, v_col = np.zeros(sizes[:2]), np.zeros([sizes[0], sizes[2]])
  for t, (grad, rate) in enumerate(zip(grads, rates), start=1):
    g = np.transpose(grad, order).reshape(sizes).astype(np.float64)
    decay = 1 - t ** -decay_rate
    for b in range(sizes[0]):
      squared = g[b] ** 2 + eps1
      v_row[b] = decay * v_row[b] + (1 - decay) * squared.mean(axis=1)
      v_col[b] = decay * v_col[b] + (1 - decay) * squared.mean(axis=0)
      update = g[b] / np.sqrt(np.outer(v_row[b], v_col[b]) / v_row[b].mean())
      update /= max(1.0, np.sqrt(np.mean(update ** 2)) / clip)
      p[b] -= rate * max(np.sqrt(np.mean(p[b] ** 2)), eps2) * update
  return np.transpose(p.reshape(moved_shape), inverse)


@pytest.mark.parametrize('shape,rule', [
    ((6, 8), 'RC'),
    ((8, 6), 'CR'),
    ((5, 3, 7), 'RBC'),
    ((3, 6, 2, 4), 'BRCC'),
    ((2, 4, 3, 2, 5), 'CRBRC'),
])
def test_equals_the_algorithm_matrix_by_matrix(shape, rule):
  roles = {'R': 'row', 'C': 'column', 'B': 'batch'}
  dims = {letter: tuple(i for i, role in enumerate(rule) if role == letter) for letter in 'RCB'}
  rng = np.random.default_rng(0)
  param = rng.normal(size=shape).astype(np.float32)
  grads = [rng.normal(size=shape).astype(np.float32) * rng.uniform(0.1, 3) for _ in range(8)]
  rates = np.linspace(0.1, 0.01, 8)
  optimizer = adafactor.Adafactor(
      factor_map=HParamMap([('p', [roles[letter] for letter in rule])]), min_dim_size_to_factor=2).create({'p': param})
  assert optimizer.state.param_states['p'].v.shape == (1,)
  for grad, rate in zip(grads, rates):
    optimizer = optimizer.apply_gradient({'p': grad}, learning_rate=rate)
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
  get = {'decay_rate': 0.8, 'step_offset': 0, 'clipping_threshold': 1.0, 'epsilon1': 1e-30, 'epsilon2': 1e-3,
         'beta1': None, 'min_dim_size_to_factor': 128, 'weight_decay_rate': None, 'weight_decay_rate_lr_exponent': None,
         'max_parameter_scale': None, 'global_norm_clip_threshold': None, 'multiply_by_parameter_scale': True,
         'factored': True, **options}
  params = {name: p.astype(np.float64) for name, p in params.items()}
  state = {name: {} for name in params}
  for number, (some_grads, rate) in enumerate(zip(grads, rates)):
    some_grads = {name: g.astype(np.float64) for name, g in some_grads.items()}
    if get['global_norm_clip_threshold'] is not None:
      norm = np.sqrt(sum((g ** 2).sum() for g in some_grads.values()))
      some_grads = {name: g * min(1, get['global_norm_clip_threshold'] / norm) for name, g in some_grads.items()}
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
      rms = lambda x: np.sqrt((x ** 2).mean(mean_dims, keepdims=True))
      squares = g ** 2 + get['epsilon1']
      if rows:
        # With dims of size 1 in the place of those that are averaged over.
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
    'wide': ((5, 9), 'RC'), 'tall': ((11, 6), 'CR'), 'square': ((6, 6), 'CR'), 'small': ((3, 9), 'RC'),
    'vector': ((7,), 'N'), 'scalar': ((), ''), 'stacked_vector': ((6, 3), 'NB'), 'stacked': ((5, 2, 7), 'RBC'),
    'heads': ((6, 2, 3, 4), 'RBCC'), 'apart': ((4, 5, 3), 'NRC'), 'bias': ((3, 4, 2), 'NBN'), 'plain': ((4, 5), None),
    'row_alone': ((4, 2, 3), 'RBN'),
}


def _random_options(rng):
  maybe = lambda *values: values[rng.integers(len(values))]
  options = {
      'factored': maybe(True, True, True, False), 'beta1': maybe(None, 0.0, 0.5, 0.9),
      'decay_rate': rng.uniform(0.3, 1.0), 'step_offset': int(rng.integers(0, 8)),
      'clipping_threshold': maybe(None, 0.3, 1.0, 2.0),
      'weight_decay_rate': maybe(None, 0.0, 0.01), 'weight_decay_rate_lr_exponent': maybe(None, 0.0, 1.0, 2.0),
      'min_dim_size_to_factor': int(rng.integers(2, 8)), 'epsilon1': maybe(1e-30, 1e-6, 1e-2),
      'epsilon2': maybe(1e-3, 0.5), 'global_norm_clip_threshold': maybe(None, 0.1, 100.0)}
  scale = maybe(True, True, False, HParamMap([('^s', False), ('', True)]))
  options['multiply_by_parameter_scale'] = scale
  if scale is not False:
    options['max_parameter_scale'] = maybe(None, 0.2)
  return options


# Forty were tried when this was written.
@pytest.mark.parametrize('seed', [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 12))])
def test_equals_an_independent_reading(seed):
  rng = np.random.default_rng(seed)
  options = _random_options(rng)
  rules = {name: rule for name, (_, rule) in _ARRAYS.items()}
  draw = lambda: {name: rng.normal(size=shape).astype(np.float32) * np.float32(10.0 ** rng.uniform(-2, 2))
                  for name, (shape, _) in _ARRAYS.items()}
  params, grads, start = draw(), [draw() for _ in range(5)], int(rng.integers(0, 12))
  rates = rng.uniform(0.01, 0.3, 5).astype(np.float32)
  factor_map = HParamMap([
      (f'^{name}$', None if rule is None else [_ROLES[letter] for letter in rule]) for name, rule in rules.items()])
  factor_options = {'factor_map': factor_map} if options['factored'] else {}
  optimizer = adafactor.Adafactor(**options, **factor_options).create(jax.tree.map(jnp.asarray, params))
  optimizer = optimizer.replace(state=optimizer.state.replace(step=jnp.int32(start)))
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
  optimizer = jax.jit(lambda optimizer: jax.lax.scan(
      lambda o, x: (o.apply_gradient(x[0], learning_rate=x[1]), None), optimizer, (stacked, rates)))(optimizer)[0]
  want_params, want_state = _read_independently(params, grads, rates.astype(np.float64), options, rules, start)
  for name, want in want_params.items():
    np.testing.assert_allclose(
        optimizer.target[name], want, rtol=1e-4, atol=2e-5 * np.max(np.abs(want)), err_msg=f'{name}, {options}')
    for slot in ('v_row', 'v_col', 'v', 'm'):
      got = getattr(optimizer.state.param_states[name], slot)
      if slot in want_state[name]:
        want_slot = np.asarray(want_state[name][slot])
        assert got.shape == tuple(size for size in want_slot.shape if size != 1) or got.shape == want_slot.shape
        np.testing.assert_allclose(
            got.reshape(-1), want_slot.reshape(-1), rtol=1e-4, atol=1e-4 * np.max(np.abs(want_slot)),
            err_msg=f'{name}/{slot}, {options}')
      else:
        assert got.shape == (1,) and got[0] == 0, f'{name}/{slot}'


@pytest.mark.parametrize('warmup_init', [False, True])
def test_relative_step(warmup_init):
  schedule = adafactor.relative_step(0.05, warmup_init=warmup_init)
  steps = np.arange(0, 30_000, 7)
  bound = 1e-6 * (steps + 1) if warmup_init else 0.05
  np.testing.assert_allclose(
      [float(schedule(step)) for step in steps[:200]], np.minimum(bound, (steps + 1.0) ** -0.5)[:200], rtol=1e-6)
  np.testing.assert_allclose(schedule(jnp.asarray(steps)), np.minimum(bound, (steps + 1.0) ** -0.5), rtol=1e-6)
  # As the optimizer's own rate it does what the trainer's would.
  own = adafactor.Adafactor(schedule).create({'p': jnp.ones([3])})
  passed = adafactor.Adafactor().create({'p': jnp.ones([3])})
  for step in range(3):
    own = own.apply_gradient({'p': jnp.ones([3])})
    passed = passed.apply_gradient({'p': jnp.ones([3])}, learning_rate=schedule(step))
  np.testing.assert_array_equal(own.target['p'], passed.target['p'])


def test_stacked_parameters_train_as_if_they_were_separate():
  rng = np.random.default_rng(1)
  stacked = rng.normal(size=[6, 3, 10]).astype(np.float32) * np.array([0.1, 1.0, 7.0], np.float32)[None, :, None]
  grads = rng.normal(size=stacked.shape).astype(np.float32)
  options = dict(min_dim_size_to_factor=2, beta1=0.9, weight_decay_rate=0.01)
  whole = adafactor.Adafactor(factor_map=HParamMap([('.', ('row', 'batch', 'col'))]), **options).create({'p': stacked})
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
  return optimizer.apply_gradient({'p': jnp.asarray(grad, jnp.float32)}, learning_rate=learning_rate)


def test_each_option_does_what_it_says():
  param, grad = np.array([2.0, -4.0, 4.0]), np.array([3.0, -1.0, 0.5])
  # The first second moment is the squared gradient itself, so an update is the gradient's sign.
  sign = np.sign(grad)
  rms = np.sqrt(np.mean(param ** 2))

  def moved(**options):
    return (param - np.asarray(_one_update(param, grad, **options).target['p'])) / 0.1

  np.testing.assert_allclose(moved(), sign, rtol=1e-5)
  np.testing.assert_allclose(moved(clipping_threshold=0.25), 0.25 * sign, rtol=1e-5)
  np.testing.assert_allclose(moved(clipping_threshold=2.0), sign, rtol=1e-5)
  np.testing.assert_allclose(moved(multiply_by_parameter_scale=True), rms * sign, rtol=1e-5)
  np.testing.assert_allclose(moved(multiply_by_parameter_scale=True, max_parameter_scale=0.5), 0.5 * sign, rtol=1e-5)
  np.testing.assert_allclose(moved(multiply_by_parameter_scale=True, epsilon2=9.0), 9 * sign, rtol=1e-5)
  np.testing.assert_allclose(
      moved(multiply_by_parameter_scale=HParamMap([('^p$', True), ('.*', False)])), rms * sign, rtol=1e-5)
  np.testing.assert_allclose(moved(beta1=0.75), 0.25 * sign, rtol=1e-5)
  np.testing.assert_allclose(moved(weight_decay_rate=0.02), sign + 0.2 * param, rtol=1e-5)
  np.testing.assert_allclose(
      moved(weight_decay_rate=0.5, weight_decay_rate_lr_exponent=2.0), sign + 0.05 * param, rtol=1e-5)
  np.testing.assert_allclose(moved(weight_decay_rate_lr_exponent=2.0), sign + 0.1 * param, rtol=1e-5)
  # epsilon1 is added to the squared gradient.
  np.testing.assert_allclose(moved(epsilon1=16.0), grad / np.sqrt(grad ** 2 + 16.0), rtol=1e-5)
  # The joint norm is clipped before the statistics: only they show it.
  state = _one_update(param, grad, global_norm_clip_threshold=0.5).state.param_states['p']
  np.testing.assert_allclose(state.v, (grad * 0.5 / np.linalg.norm(grad)) ** 2, rtol=1e-5)
  state = _one_update(param, grad, global_norm_clip_threshold=50.0).state.param_states['p']
  np.testing.assert_allclose(state.v, grad ** 2, rtol=1e-5)


@pytest.mark.parametrize('size', [1e8, 1e15])
def test_rows_without_gradients_beside_very_large_ones_stay(size):
  # The second moment of one row is 1e-30, the mean of all of them is up to 1e27: their quotient is no float32.
  grad = np.zeros([8, 16])
  grad[0, 0] = size
  update = jnp.ones([8, 16]) - _one_update(np.ones([8, 16]), grad, min_dim_size_to_factor=4).target['p']
  assert np.all(np.isfinite(update)) and float(update[0, 0]) > 0
  np.testing.assert_array_equal(np.asarray(update).ravel()[1:], 0.0)


def test_decay_of_the_second_moment():
  grad = np.array([3.0, -1.0])

  def mixing(step, **options):
    return np.asarray(_one_update([1.0, 1.0], grad, step=step, **options).state.param_states['p'].v) / grad ** 2

  np.testing.assert_allclose(mixing(0), 1.0, rtol=1e-6)
  np.testing.assert_allclose(mixing(9), 10 ** -0.8, rtol=1e-5)
  np.testing.assert_allclose(mixing(9, decay_rate=0.5), 10 ** -0.5, rtol=1e-5)
  np.testing.assert_allclose(mixing(109, step_offset=100), 10 ** -0.8, rtol=1e-5)
  # Before the offset every step is a first one; T5X has NaN there.
  np.testing.assert_allclose(mixing(3, step_offset=100), 1.0, rtol=1e-6)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_skip_nan_updates_keeps_old_values(bad):
  params = {'matrix': jnp.ones([8, 6]), 'vector': jnp.ones([5]), 'fine': jnp.ones([4])}
  grads = jax.tree.map(jnp.ones_like, params)
  optimizer_def = adafactor.Adafactor(skip_nan_updates=True, min_dim_size_to_factor=2, beta1=0.9)
  before = optimizer_def.create(params).apply_gradient(grads, learning_rate=0.1)
  poisoned = {**grads, 'matrix': grads['matrix'].at[2, 3].set(bad), 'vector': grads['vector'].at[1].set(bad)}
  after = before.apply_gradient(poisoned, learning_rate=0.1)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after))
  np.testing.assert_array_equal(after.target['vector'][1], before.target['vector'][1])
  assert after.state.param_states['vector'].v[1] == before.state.param_states['vector'].v[1]
  assert np.all(after.target['fine'] < before.target['fine'])
  # Sound gradients go on training all of it, the element that was hit included.
  again = after.apply_gradient(grads, learning_rate=0.1)
  pairs = zip(jax.tree.leaves(again.target), jax.tree.leaves(after.target), strict=True)
  assert all(np.all(new < old) for new, old in pairs)
  # Without the option the damage shows.
  unguarded = adafactor.Adafactor(min_dim_size_to_factor=2).create(params).apply_gradient(poisoned, learning_rate=0.1)
  assert not np.all(np.isfinite(unguarded.target['vector']))


def test_learning_rate_may_be_a_schedule_of_the_step():
  params, grads = {'p': jnp.ones([3])}, {'p': jnp.ones([3])}
  by_schedule = adafactor.Adafactor(learning_rate=lambda step: 0.1 / (1.0 + step)).create(params)
  by_override = adafactor.Adafactor().create(params)
  assert by_override.optimizer_def.needs_learning_rate and not by_schedule.optimizer_def.needs_learning_rate
  for step in range(3):
    by_schedule = by_schedule.apply_gradient(grads)
    by_override = by_override.apply_gradient(grads, learning_rate=0.1 / (1 + step))
  np.testing.assert_allclose(by_schedule.target['p'], by_override.target['p'], rtol=1e-6)


@pytest.mark.parametrize('axes,want', [
    (('embed', 'mlp'), 'ROW COLUMN'),
    (('vocab', 'embed'), 'COLUMN ROW'),
    (('embed', 'layers', 'heads', 'kv'), 'ROW BATCH COLUMN COLUMN'),
    (('embed',), 'NONE'),
    (('heads', 'relpos_buckets'), 'NONE NONE'),
    (('heads', 'layers', 'relpos_buckets'), 'NONE BATCH NONE'),
    (('embed', 'layers'), 'NONE BATCH'),
    (('embed', None), 'NONE NONE'),
    ((), ''),
])
def test_rules_by_logical_axes(axes, want):
  optimizer_def = adafactor.Adafactor(logical_factor_rules=_STANDARD)
  optimizer_def.set_param_axes({'layer': {'p': P(*axes)}})
  rule = optimizer_def.hyper_params.factor_map['layer/p']
  assert ' '.join(role.name for role in rule) == want


def test_matrices_are_factored_by_size_whatever_their_rule():
  rules = HParamMap([('none', ('none', 'none')), ('heuristic', adafactor.HEURISTIC_RULE), ('given', ('col', 'row')),
                     ('never', None), ('batch', ('batch', 'none'))])
  optimizer_def = adafactor.Adafactor(factor_map=rules, min_dim_size_to_factor=8)
  for name, shape, v_row, v in (
      ('none', (8, 9), (8,), (1,)), ('heuristic', (9, 8), (8,), (1,)), ('given', (8, 9), (8,), (1,)),
      ('none', (7, 9), (1,), (7, 9)), ('never', (8, 9), (1,), (8, 9)), ('batch', (8, 9), (1,), (8, 9)),
      ('heuristic', (50,), (1,), (50,)), ('heuristic', (), (1,), ())):
    state = optimizer_def.init_param_state(jnp.zeros(shape), name)
    assert (state.v_row.shape, state.v.shape) == (v_row, v), (name, shape)


def test_explicit_rules_may_leave_dims_out_of_both_factors():
  state = adafactor.Adafactor(factor_map=HParamMap([('.', ('none', 'row', 'col'))])).init_param_state(
      jnp.zeros([4, 5, 6]), 'p')
  assert (state.v_row.shape, state.v_col.shape, state.v.shape) == ((4, 5), (4, 6), (1,))


def test_hparam_map():
  rules = HParamMap([('scale$', 1), ('mlp', 2), ('^encoder/', 3)])
  tree = {'encoder': {'norm': {'scale': 0}, 'mlp': {'scale': 0, 'wi': 0}, 'attention': 0}}
  assert rules(tree) == {'encoder': {'norm': {'scale': 1}, 'mlp': {'scale': 1, 'wi': 2}, 'attention': 3}}
  with pytest.raises(KeyError, match='decoder/attention'):
    rules['decoder/attention']
  assert rules == HParamMap([('scale$', 1), ('mlp', 2), ('^encoder/', 3)])
  assert rules != HParamMap([('scale$', 1), ('mlp', 2)])


def test_names_of_roles():
  for name, role in (('ROW', FactorDim.ROW), ('col', FactorDim.COLUMN), ('Column', FactorDim.COLUMN),
                     ('batch', FactorDim.BATCH), ('none', FactorDim.NONE), ('unfactorized', FactorDim.NONE),
                     (FactorDim.ROW, FactorDim.ROW)):
    assert adafactor.factor_name_to_factordim(name) is role


def test_definitions_compare_by_their_options():
  rules = dict(logical_factor_rules=_STANDARD)
  left, right = adafactor.Adafactor(**rules), adafactor.Adafactor(**rules)
  assert left == right and hash(left) == hash(right) and left != adafactor.Adafactor(beta1=0.5, **rules)
  before = hash(left)
  left.set_param_axes({'p': P('embed', 'mlp')})
  assert hash(left) == before and left != right
  right.set_param_axes({'p': P('embed', 'mlp')})
  assert left == right
  # States of equal definitions are trees of equal structure.
  params = {'p': jnp.ones([2, 3])}
  assert jax.tree.structure(left.create(params)) == jax.tree.structure(right.create(params))


def _apply_without_rate():
  adafactor.Adafactor().create({'p': jnp.ones([2])}).apply_gradient({'p': jnp.ones([2])})


def _set_axes(*axes, **options):
  adafactor.Adafactor(**{'logical_factor_rules': _STANDARD, **options}).set_param_axes({'layer': {'p': P(*axes)}})


@pytest.mark.parametrize('make,message', [
    (lambda: adafactor.Adafactor(learning_rate=-0.1), 'not negative'),
    (lambda: adafactor.Adafactor(learning_rate=float('nan')), 'finite'),
    (lambda: adafactor.Adafactor(learning_rate='1e-3'), 'type str'),
    (lambda: adafactor.Adafactor(beta1=1.0), 'beta1 is 1.0; expected a number >= 0 and < 1 or None'),
    (lambda: adafactor.Adafactor(decay_rate=-0.8), 'decay_rate'),
    (lambda: adafactor.Adafactor(clipping_threshold=0.0), 'clipping_threshold'),
    (lambda: adafactor.Adafactor(weight_decay_rate=-1.0), 'weight_decay_rate'),
    (lambda: adafactor.Adafactor(min_dim_size_to_factor=0), 'min_dim_size_to_factor'),
    (lambda: adafactor.Adafactor(global_norm_clip_threshold=-1.0), 'global_norm_clip_threshold'),
    (lambda: adafactor.Adafactor(max_parameter_scale=0), 'max_parameter_scale'),
    (lambda: adafactor.Adafactor(epsilon1='1e-30'), 'epsilon1'),
    (lambda: adafactor.Adafactor(dtype_momentum=jnp.int8), 'dtype_momentum'),
    (lambda: adafactor.Adafactor(dtype_momentum=jnp.bfloat16), 'dtype_momentum=bfloat16 has no effect'),
    (lambda: adafactor.Adafactor(multiply_by_parameter_scale='yes'), 'multiply_by_parameter_scale'),
    (lambda: adafactor.Adafactor(multiply_by_parameter_scale=False, max_parameter_scale=1.0),
     'leaves max_parameter_scale without effect'),
    (lambda: adafactor.Adafactor(factor_map=[('.*', None)]), 'factor_map'),
    (lambda: adafactor.Adafactor(factored=False, factor_map=HParamMap([('.*', None)])), 'factored=False'),
    (lambda: adafactor.Adafactor(logical_factor_rules={'embed': 'rwo'}), "Did you mean 'row'"),
    (lambda: adafactor.factor_name_to_factordim('columns'), "Did you mean 'column'"),
    (lambda: adafactor.Adafactor().update_hyper_params(learning_rat=0.1), "Did you mean 'learning_rate'"),
    (lambda: adafactor.Adafactor().update_hyper_params(learning_rate=-0.1), 'not negative'),
    (lambda: adafactor.Adafactor().update_hyper_params(factored=False), 'structure of the state'),
    (lambda: adafactor.Adafactor().update_hyper_params(beta1=0.9), 'structure of the state'),
    (_apply_without_rate, 'learning_rate_fn'),
    (lambda: _set_axes('embd', 'mlp'), "'embd' of the parameter 'layer/p'.*Did you mean 'embed'"),
    (lambda: _set_axes('embed', 'mlp', 'relpos_buckets'), 'must not be unfactored dims'),
    (lambda: adafactor.Adafactor().create({'p': jnp.ones([2, 3, 4])}), 'set_param_axes'),
    (lambda: adafactor.Adafactor(factor_map={'q': ('row', 'col')}).create({'p': jnp.ones([2, 3])}), "parameter 'p'"),
    (lambda: adafactor.Adafactor(factor_map={'p': ('row', 'col')}).create({'p': jnp.ones([2, 3, 4])}), 'has 2 dims'),
    (lambda: adafactor.Adafactor(factor_map={'p': 'row'}).create({'p': jnp.ones([2])}), 'expected a role per dim'),
    (lambda: HParamMap([('(', 1)]), 'regular expression'),
    (lambda: HParamMap(['abc']), 'pairs'),
])
def test_refusals(make, message):
  with pytest.raises(ConfigError, match=message):
    make()


def test_the_heuristic_may_be_named_as_the_roles_are():
  params = {'w': jnp.ones([4, 6]), 'v': jnp.ones([4, 6])}
  for rule in (adafactor.HEURISTIC_RULE, 'heuristic'):
    factor_map = HParamMap([('w', rule), ('v', None)])
    state = jax.eval_shape(adafactor.Adafactor(min_dim_size_to_factor=4, factor_map=factor_map).init_state, params)
    assert state.param_states['w'].v_row.shape == (4,) and state.param_states['v'].v.shape == (4, 6)
  with pytest.raises(ConfigError, match="'heuristics'; expected .*'heuristic'"):
    adafactor.Adafactor(factor_map=HParamMap([('.*', 'heuristics')])).init_state(params)


def test_a_change_of_parameter_layout_is_refused_with_the_remedy():
  optimizer_def = adafactor.Adafactor(0.1, min_dim_size_to_factor=4)
  states = [optimizer_def.create({name: jnp.ones([4, 6])}).state_dict() for name in ('w', 'kernel')]
  convert = checkpoints.convert_param_trees(lambda tree: {'kernel': tree['w']})
  with pytest.raises(CheckpointError, match=r"assignment_map=\[\('state/param_states\.\*', None\)\], with which"):
    convert(states[0], states[1], is_resuming=False)
