"""ScaledAdam: recorded traces of the original, an independent reading of it, groups, stacked layers, reports."""

import functools
import re

import flax.core
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError
from tests import golden_data
from tests.core import scaled_adam_reference

_SHAPES = {'w': (8, 6), 'bias': (6,), 'kernel3': (4, 3, 2), 's': (1,), 'zero_dim': (), 'w2': (8, 6), 'one': (1, 1)}


def _run(optimizer, params, grads, rates=None):
  """Returns (parameters after each step, states after each step), stacked."""
  def step(carry, inputs):
    grad, rate = inputs
    overrides = {} if rate is None else {'learning_rate': rate}
    optimizer = carry.apply_gradient(grad, **overrides)
    return optimizer, (optimizer.target, optimizer.state.param_states)
  created = optimizer.create(jax.tree.map(jnp.asarray, params))
  return jax.jit(lambda o, xs: jax.lax.scan(step, o, xs)[1])(created, (grads, rates))


@pytest.mark.parametrize('case', ['a', 'b', 'd'])
def test_golden_traces(case):
  description, arrays = golden_data.load(f'optimizers/scaledadam_{case}')
  names = description['param_order']
  options = {**description['groups'][0]['hyper']}
  rate = options.pop('lr')
  num_steps = description['steps']
  rates = np.asarray(arrays.get('lr', np.full(num_steps, rate)), np.float32)
  optimizer = optimizers.scaled_adam(**options, clip_scale_gradient_only=True)
  params, states = _run(optimizer, {name: arrays[f'init/{name}'] for name in names},
                        {name: arrays[f'grad/{name}'] for name in names}, rates)
  for name in names:
    after = np.concatenate([arrays[f'init/{name}'][None], params[name]])
    np.testing.assert_allclose(after[arrays['record_steps']], arrays[f'param/{name}'], rtol=0, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(states.delta[name][-1], arrays[f'final/delta/{name}'], rtol=0, atol=1e-6)
    np.testing.assert_allclose(states.exp_avg_sq[name][-1], arrays[f'final/exp_avg_sq/{name}'], rtol=1e-5)
  group = states.groups['default']
  for position, name in enumerate(sorted(names)):
    if f'final/param_rms/{name}' in arrays:
      np.testing.assert_allclose(group.param_rms[:, position], arrays[f'param_rms_each_step/{name}'], rtol=1e-5)
      np.testing.assert_allclose(
          group.scale_exp_avg_sq[-1, position], arrays[f'final/scale_exp_avg_sq/{name}'], rtol=1e-4)
      # 60 steps end with a period.
      size_grads = arrays[f'final/scale_grads/{name}']
      np.testing.assert_allclose(group.scale_grad_sum[-1, position], np.sum(size_grads), atol=2e-6)
      np.testing.assert_allclose(group.scale_grad_sumsq[-1, position], np.sum(size_grads**2), rtol=1e-4)
  if case == 'b':
    assert np.sum(arrays['clip/scale'] < 1) >= 5
    clipping = group.clipping
    np.testing.assert_allclose(clipping.clip_scale, arrays['clip/scale'][:, 0], rtol=1e-5)
    np.testing.assert_allclose(clipping.norm[1:], arrays['clip/tot_norm'][1:, 0], rtol=1e-5)
    known = ~np.isnan(arrays['clip/threshold'][:, 0])
    np.testing.assert_allclose(clipping.threshold[known], arrays['clip/threshold'][known, 0], rtol=1e-5)
    np.testing.assert_array_equal(clipping.num_clipped[known], arrays['clip/num_clipped'][known, 0])
    np.testing.assert_allclose(clipping.model_norms[-1], arrays['final/model_norms/group0'], rtol=1e-5)


def _random_case(seed):
  """Returns (initial values, gradients [steps, ...], options) of a random run with spikes in the gradients."""
  rng = np.random.default_rng(seed)
  scales = {name: 10.0 ** rng.uniform(-1.5, 0.5) for name in _SHAPES}
  params = {name: np.asarray(rng.normal(size=shape) * scales[name], np.float32) for name, shape in _SHAPES.items()}
  num_steps = 64
  spikes = np.where(rng.random(num_steps) < 0.2, 10.0 ** rng.uniform(0, 2.5, num_steps), 1.0)
  grads = {}
  for name, shape in _SHAPES.items():
    drift = rng.normal(size=shape) * 0.5
    noise = rng.normal(size=(num_steps, *shape)) + drift
    grads[name] = np.asarray(0.01 * noise * spikes.reshape(-1, *(1,) * len(shape)), np.float32)
  period = int(rng.integers(4, 13)) if seed % 4 != 1 else [1, 2, 3][seed // 4 % 3]
  options = dict(
      clipping_scale=[None, 0.7, 1.3, 2.0][seed % 4], betas=[(0.9, 0.98), (0.5, 0.9), (0.95, 0.999)][seed % 3],
      scalar_lr_scale=rng.uniform(0.05, 0.5), eps=10.0 ** rng.uniform(-9, -5), param_min_rms=[1e-5, 0.2][seed % 2],
      param_max_rms=[3.0, 0.4][seed // 2 % 2], scalar_max=[10.0, 0.05][seed % 2],
      size_update_period=[1, 2, 3, 4, 7][seed % 5], clipping_update_period=period,
      clip_scale_gradient_only=bool(seed // 3 % 2))
  return params, grads, options


@pytest.mark.parametrize(
    'seed', [*range(5), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(5, 20))])
def test_random_options_against_the_reference(seed):
  params, grads, options = _random_case(seed)
  rates = np.asarray(0.05 / np.sqrt(1 + np.arange(64) / 10), np.float32)
  got, states = _run(optimizers.scaled_adam(**options), params, grads, rates)
  group = scaled_adam_reference.Group(lr=lambda t: float(rates[t]), **options)
  reference = scaled_adam_reference.Reference(params, {'default': group}, dict.fromkeys(params, 'default'))
  num_clipped = 0
  for t in range(64):
    reference.step({name: grad[t] for name, grad in grads.items()})
    for name, want in reference.params.items():
      np.testing.assert_allclose(got[name][t], want, rtol=2e-5, atol=5e-6, err_msg=f'{name} after step {t}')
    if options['clipping_scale'] is not None:
      clipping = jax.tree.map(lambda x: x[t], states.groups['default'].clipping)  # pylint: disable=cell-var-from-loop
      np.testing.assert_allclose(clipping.clip_scale, reference.clip_scale['default'], rtol=2e-5)
      assert int(clipping.num_clipped) == group.num_clipped
      num_clipped += reference.clip_scale['default'] < 1
      if group.quartiles is not None:
        np.testing.assert_allclose(clipping.quartiles, group.quartiles, rtol=2e-5)
        np.testing.assert_allclose(clipping.percent_clipped, group.percent_clipped, rtol=1e-6)
  assert options['clipping_scale'] is None or num_clipped >= 3


def test_groups_have_their_own_options_clipping_and_rates():
  params, grads, _ = _random_case(1)
  labels = {'bias': 'small', 's': 'small', 'zero_dim': 'small', 'one': 'small', 'w2': 'frozen_size'}
  group_options = {
      'small': dict(clipping_scale=0.8, clipping_update_period=5, size_update_period=2, betas=(0.8, 0.95)),
      'frozen_size': dict(scalar_lr_scale=0.0, learning_rate=lambda count: 0.01 * (1 + count), clipping_scale=None)}
  pairs = (('^(bias|s|zero_dim|one)$', 'small'), ('w2', 'frozen_size'))
  tree = {name: labels.get(name, 'default') for name in params}
  optimizer, *others = [
      optimizers.scaled_adam(0.03, 1.5, clipping_update_period=7, param_labels=form, group_options=group_options)
      for form in (pairs, tree, lambda params: {name: tree[name] for name in params})]
  got, states = _run(optimizer, params, grads)
  groups = {
      'default': scaled_adam_reference.Group(clipping_scale=1.5, clipping_update_period=7),
      'small': scaled_adam_reference.Group(
          clipping_scale=0.8, clipping_update_period=5, size_update_period=2, betas=(0.8, 0.95)),
      'frozen_size': scaled_adam_reference.Group(
          scalar_lr_scale=0.0, lr=lambda t: 0.01 * (1 + t), clipping_update_period=7)}
  reference = scaled_adam_reference.Reference(params, groups, tree)
  for t in range(64):
    reference.step({name: grad[t] for name, grad in grads.items()})
  for name, want in reference.params.items():
    np.testing.assert_allclose(got[name][-1], want, rtol=2e-5, atol=5e-6, err_msg=name)
  # The other forms of labels make the same program.
  jaxprs = [str(jax.make_jaxpr(lambda p, tx=form.optax_optimizer: tx.update(p, tx.init(p), p))(params))
            for form in (optimizer, *others)]
  assert jaxprs[1:] == jaxprs[:1] * 2
  last = jax.tree.map(lambda x: x[-1], states.groups)
  assert last['frozen_size'].clipping is None
  assert last['small'].clipping.num_clipped != last['default'].clipping.num_clipped


def test_a_missing_gradient_is_zero_and_momentum_still_moves():
  params, grads, options = _random_case(2)
  tx = optimizers.scaled_adam(0.03, **options).optax_optimizer
  reference = scaled_adam_reference.Reference(
      params, {'default': scaled_adam_reference.Group(**options)}, dict.fromkeys(params, 'default'))
  state = tx.init(params)
  update = jax.jit(tx.update)
  values = params
  for t in range(20):
    grad = {name: None if (t + len(name)) % 3 == 0 and t > 4 else g[t] for name, g in grads.items()}
    updates, state = update(grad, state, values)
    values = optax.apply_updates(values, updates)
    reference.step(grad)
    for name, want in reference.params.items():
      np.testing.assert_allclose(values[name], want, rtol=2e-5, atol=5e-6, err_msg=f'{name} after step {t}')


def test_stacked_layers_train_as_unstacked_ones():
  rng = np.random.default_rng(0)
  layers, steps = 3, 30
  make = lambda *shape: np.asarray(rng.normal(size=shape), np.float32)  # pylint: disable=unnecessary-lambda-assignment
  unstacked = {f'layer_{i}': {'kernel': make(4, 5) * 0.3 * (i + 1), 'gate': make(1)} for i in range(layers)}
  unstacked['head'] = make(5, 2)
  grads = jax.tree.map(lambda p: make(steps, *p.shape) * 0.01, unstacked)

  def stack(tree, dim):
    kernels, gates = zip(*[(tree[f'layer_{i}']['kernel'], tree[f'layer_{i}']['gate']) for i in range(layers)])
    return {'stack': {'kernel': np.stack(kernels, 1 + dim), 'gate': np.concatenate(gates, dim)}, 'head': tree['head']}

  options = dict(clipping_scale=1.2, clipping_update_period=5, size_update_period=2)
  want, want_states = _run(optimizers.scaled_adam(0.03, **options), unstacked, grads)
  by_axes = optimizers.scaled_adam(0.03, **options)
  axes = {'stack': {'kernel': P('embed', 'layers', 'mlp'), 'gate': P('layers')}, 'head': P('embed', 'vocab')}
  by_axes.set_param_axes(axes)
  by_paths = optimizers.scaled_adam(0.03, **options, batch_dims=(('kernel$', 1), ('gate$', (-1,))))
  for optimizer in (by_axes, by_paths):
    got, states = _run(optimizer, stack(unstacked, 0), stack(grads, 1))
    for name, value in stack(want, 1)['stack'].items():
      np.testing.assert_allclose(got['stack'][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(got['head'], want['head'], rtol=1e-5, atol=1e-6)
    clipping, want_clipping = states.groups['default'].clipping, want_states.groups['default'].clipping
    np.testing.assert_allclose(clipping.norm, want_clipping.norm, rtol=1e-5)
    assert np.any(clipping.clip_scale < 1)
    np.testing.assert_allclose(clipping.dominant.share[1:], want_clipping.dominant.share[1:], rtol=1e-4)
    # Unstacked: head, gate and kernel of layer 0, of layer 1, ...; stacked: head, gates, kernels.
    places = [(0, -1), *((1 + number % 2, number // 2) for number in range(2 * layers))]
    np.testing.assert_array_equal(
        np.stack([clipping.dominant.parameter, clipping.dominant.layer], 1)[1:],
        np.array(places)[want_clipping.dominant.parameter][1:])
  whole, _ = _run(optimizers.scaled_adam(0.03, **options), stack(unstacked, 0), stack(grads, 1))
  assert not np.allclose(whole['stack']['kernel'], stack(want, 1)['stack']['kernel'], atol=1e-4)
  chained = optimizers.chain([optax.zero_nans(), optimizers.scaled_adam(0.03, **options)])
  chained.set_param_axes(axes)
  assert chained.create(stack(unstacked, 0)).state.param_states[1].groups['default'].param_rms.shape == (7,)
  optimizer = by_axes.create(stack(unstacked, 0))
  derived = by_axes.derive_logical_axes(optimizer, axes)
  assert derived.state.param_states.delta == axes
  assert set(derived.state.param_states.groups['default'].param_rms) == {None}


def test_bfloat16_parameters_have_float32_statistics():
  params, grads, options = _random_case(3)
  options['clipping_scale'] = None
  narrow = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
  narrow_grads = jax.tree.map(lambda g: jnp.asarray(g[:10], jnp.bfloat16), grads)
  optimizer = optimizers.scaled_adam(0.03, **options)
  got, states = _run(optimizer, narrow, narrow_grads)
  assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
  assert {leaf.dtype for leaf in jax.tree.leaves(states)} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
  reference = scaled_adam_reference.Reference(
      narrow, {'default': scaled_adam_reference.Group(0.03, **options)}, dict.fromkeys(params, 'default'))
  for t in range(10):
    reference.step({name: grad[t] for name, grad in narrow_grads.items()})
    for name, want in reference.params.items():
      np.testing.assert_allclose(states.exp_avg_sq[name][t], reference.memory[name]['v'], rtol=1e-5)
      if t == 0:
        np.testing.assert_allclose(np.asarray(got[name][0], np.float64), want, rtol=2**-8)
  # The bare transformation keeps the convention of optax: updates of the parameters' dtype.
  tx = optimizer.optax_optimizer
  updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), narrow)
  assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}


def test_odd_trees_and_masks():
  optimizer = optimizers.scaled_adam(0.1, 2.0, clipping_update_period=2)
  trees = ({}, {'s': jnp.float32(2.0)}, {'void': jnp.zeros([0, 3]), 'tall': jnp.zeros([2, 0])},
           flax.core.freeze({'a': {'w': jnp.ones([2, 2])}}))

  def updated(opt, _):
    return opt.apply_gradient(jax.tree.map(jnp.ones_like, opt.target)), None

  created = [optimizer.create(params) for params in trees]
  trained = jax.jit(lambda opts: [jax.lax.scan(updated, opt, length=4)[0] for opt in opts])(created)
  assert jax.tree.structure(trained) == jax.tree.structure(created)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(trained))
  params = {'a': jnp.ones([2, 3]), 'b': {'c': jnp.ones([3])}}
  masked = optimizers.OptaxWrapper(optax.masked(optimizer.optax_optimizer, {'a': True, 'b': False}))
  trained = masked.create(params).apply_gradient({'a': jnp.ones([2, 3]), 'b': {'c': jnp.zeros([3])}})
  np.testing.assert_array_equal(trained.target['b']['c'], 1.0)
  assert np.all(trained.target['a'] < 1.0)
  assert trained.state.param_states.inner_state.groups['default'].param_rms.shape == (1,)
  axes = masked.derive_logical_axes(trained, {'a': P('embed', 'mlp'), 'b': {'c': P('mlp')}})
  assert axes.state.param_states.inner_state.delta['a'] == P('embed', 'mlp')


def _reported(optimizer, opt):
  before = dict(vars(optimizer))
  metrics = jax.jit(optimizer.metrics)(opt.state)
  assert vars(optimizer) == before
  assert all(value.shape == () and value.dtype == jnp.float32 for value in metrics.values())
  values = {name: float(value) for name, value in metrics.items()}
  return values, optimizer.report(values)


@functools.cache
def _step_of(optimizer):
  return jax.jit(lambda opt, grads: opt.apply_gradient(grads))


def test_quartile_and_dominant_parameter_reports():
  period = 8
  optimizer = optimizers.scaled_adam(1e-4, 2.0, clipping_update_period=period)
  params = {'big': {'w': jnp.full([2, 2], 0.5)}, 'tiny': {'w': jnp.full([2, 2], 0.01)}}
  optimizer.set_param_axes(jax.tree.map(lambda _: P('embed', 'mlp'), params))
  opt = optimizer.create(params)
  reference = scaled_adam_reference.Reference(
      {'big': params['big']['w'], 'tiny': params['tiny']['w']},
      {'default': scaled_adam_reference.Group(1e-4, 2.0, clipping_update_period=period)},
      {'big': 'default', 'tiny': 'default'})
  assert _reported(optimizer, opt)[1] == []
  norms = []
  for t in range(3 * period):
    big, tiny = (1.0 + 0.1 * t, 1.0) if t != 2 * period + 3 else (1.0, 1e4)
    grads = {'big': {'w': jnp.full([2, 2], big)}, 'tiny': {'w': jnp.full([2, 2], tiny)}}
    opt = _step_of(optimizer)(opt, grads)
    reference.step({'big': grads['big']['w'], 'tiny': grads['tiny']['w']})
    values, lines = _reported(optimizer, opt)
    group, prefix = reference.groups['default'], 'scaled_adam/default/'
    if t > 0 and not 2 * period + 3 < t < 3 * period + 3:
      name, share, grad_sumsq = reference.dominant['default']
      assert values[f'{prefix}dominant/parameter'] == ['big', 'tiny'].index(name)
      np.testing.assert_allclose(values[f'{prefix}dominant/share'], share, rtol=1e-5)
      np.testing.assert_allclose(values[f'{prefix}dominant/grad_sumsq'], grad_sumsq, rtol=1e-5)
    if group.quartiles is not None:
      shown = [values[f'{prefix}norm_{what}'] for what in ('min', 'quartile_1', 'median', 'quartile_3', 'max')]
      np.testing.assert_allclose(shown, group.quartiles, rtol=1e-5)
      np.testing.assert_allclose(values[f'{prefix}threshold'], group.threshold, rtol=1e-5)
    else:  # Until there is a first period, the norms so far; the first step's is not recorded.
      norms = norms[t == 1:] + [values[f'{prefix}norm']]
      assert (values[f'{prefix}norm_min'], values[f'{prefix}norm_max']) == (min(norms), max(norms)) and min(norms) > 0
      assert min(norms) <= values[f'{prefix}norm_median'] <= max(norms) and values[f'{prefix}threshold'] == 0
    # Said once a period, and when a step is clipped strongly.
    if t > 0 and t % period == 0:
      assert f'{group.threshold:.3e}' in lines[0] and f'{group.percent_clipped:.1f} %' in lines[0]
    elif t == 2 * period + 3:
      assert 'tiny/w' in lines[0] and f'scaled by {reference.clip_scale["default"]:.3g}' in lines[0]
    assert len(lines) == (t > 0 and t % period == 0) + (t == 2 * period + 3)
  # The step that was clipped strongly is kept for a summary after it.
  assert values[f'{prefix}dominant/step'] == 2 * period + 3 and values[f'{prefix}dominant/clip_scale'] < 0.1
  # Without paths, as in a chain: the number instead.
  chained = optimizers.chain([optax.identity(), optimizer])
  assert any('parameter 1 of the tree' in line for line in chained.report(values))


def test_reports_cost_nothing_where_they_are_not_wanted():
  params = {'w': jnp.ones([4, 4])}
  for optimizer, has_norm in ((optimizers.scaled_adam(0.1), False),
                              (optimizers.scaled_adam(0.1, 2.0, show_dominant_parameters=False), True)):
    values, lines = _reported(optimizer, optimizer.create(params))
    assert lines == [] and not [name for name in values if 'dominant' in name]
    assert bool(values) == has_norm
  with_it, without = (
      str(jax.make_jaxpr(lambda p, o=optimizers.scaled_adam(0.1, 2.0, show_dominant_parameters=show).optax_optimizer:
                         o.update(p, o.init(p), p))(params)) for show in (True, False))
  assert 'argmax' in with_it and 'argmax' not in without


@pytest.mark.parametrize('options, message', [
    (dict(clip_scale=2.0), "Did you mean 'clipping_scale'"),
    (dict(clipping_scale=0.0), 'clipping_scale is 0.0'),
    (dict(clipping_scale='2'), 'expected a number'),
    (dict(betas=(0.98, 0.9)), 'betas'),
    (dict(betas=0.9), 'expected two numbers'),
    (dict(betas=(0.0, 0.9)), 'betas'),
    (dict(learning_rate=-1.0), 'learning_rate'),
    (dict(scalar_lr_scale=-0.1), 'scalar_lr_scale'),
    (dict(eps=0.0), 'eps'),
    (dict(param_min_rms=5.0), 'exchange'),
    (dict(scalar_max=0), 'scalar_max'),
    (dict(size_update_period=0), 'size_update_period'),
    (dict(clipping_update_period=2.5), 'expected an integer'),
    (dict(show_dominant_parameters=1), 'True or False'),
    (dict(clip_scale_gradient_only='no'), 'True or False'),
    (dict(group_options={'a': {}}), 'without param_labels'),
    (dict(param_labels=(('bias', 'biases'),), group_options={'bias': {}}), "Did you mean 'bias'"),
    (dict(param_labels=(('bias', 'biases'),), group_options={'biases': {'beta': 1}}), "Did you mean 'betas'"),
    (dict(param_labels=(('bias', 'biases'),), group_options={'biases': {'eps': -1}}), 'eps'),
    (dict(param_labels=(('bias', 'a'),), group_options={'a': {}, 'b': {}}), "label 'b', which no pair"),
    (dict(param_labels=(('(', 'a'),), group_options={'a': {}}), 'not a regular expression'),
    (dict(param_labels='bias', group_options={'bias': {}}), 'pairs'),
    (dict(param_labels=(('bias', 'a/b'),), group_options={'a/b': {}}), 'without "/"'),
    (dict(param_labels=(), group_options=['a']), 'group_options'),
    (dict(param_labels=(('bias', 'a'),), group_options={'a': 2.0}), 'options of group'),
    (dict(batch_axes='layers'), 'tuple of names'),
    (dict(batch_dims=1), 'tuple of (regular expression, dim) pairs'),
    (dict(batch_dims=(('(', 1),)), 'not a regular expression'),
])
def test_options_are_refused_when_the_optimizer_is_made(options, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    optimizers.scaled_adam(**options)


@pytest.mark.parametrize('options, message', [
    (dict(param_labels=(('biass', 'a'),), group_options={'a': {}}), 'no parameter gets'),
    (dict(param_labels={'bias': 'a'}, group_options={'a': {}}), "no label for the parameter 'w'"),
    (dict(param_labels={'bias': 'a', 'w': 'a', 'kernel': 'a'}, group_options={'a': {}}), 'but no parameter there'),
    (dict(param_labels=lambda params: {'bias': 'a', 'w': 'aa'}, group_options={'a': {}}), "Did you mean 'a'"),
    (dict(batch_dims=(('w', 2),)), 'but it has 2 dims'),
])
def test_labels_and_dims_are_refused_when_the_state_is_made(options, message):
  with pytest.raises(ConfigError, match=message):
    optimizers.scaled_adam(0.1, **options).create({'bias': jnp.ones([2]), 'w': jnp.ones([2, 2])})


def test_the_update_needs_the_parameters():
  tx = optimizers.scaled_adam(0.1).optax_optimizer
  params = {'w': jnp.ones([2])}
  with pytest.raises(ConfigError, match='with them'):
    tx.update(params, tx.init(params))
