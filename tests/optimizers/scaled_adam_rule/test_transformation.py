"""ScaledAdam: recorded traces of the original, an independent reading of it, groups, stacked layers, reports."""

import flax.core
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.layer_stacks import LayerStacks
from tests import golden_data
from tests.optimizers.scaled_adam_rule import scaled_adam_cases as cases
from tests.optimizers.scaled_adam_rule import scaled_adam_reference


@pytest.mark.parametrize('case', ['a', pytest.param('b', marks=pytest.mark.full), 'd'])
def test_golden_traces(case):
  description, arrays = golden_data.load(f'optimizers/scaledadam_{case}')
  names = description['param_order']
  options = {**description['groups'][0]['hyper']}
  rate = options.pop('lr')
  num_steps = description['steps']
  rates = np.asarray(arrays.get('lr', np.full(num_steps, rate)), np.float32)
  optimizer = optimizers.scaled_adam(**options, clip_scale_gradient_only=True)
  params, states = cases.run(
    optimizer,
    {name: arrays[f'init/{name}'] for name in names},
    {name: arrays[f'grad/{name}'] for name in names},
    rates,
  )
  for name in names:
    after = np.concatenate([arrays[f'init/{name}'][None], params[name]])
    np.testing.assert_allclose(
      after[arrays['record_steps']], arrays[f'param/{name}'], rtol=0, atol=2e-6, err_msg=name
    )
    np.testing.assert_allclose(
      states.delta[name][-1], arrays[f'final/delta/{name}'], rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(
      states.exp_avg_sq[name][-1], arrays[f'final/exp_avg_sq/{name}'], rtol=1e-5
    )
  group = states.groups['default']
  for position, name in enumerate(sorted(names)):
    if f'final/param_rms/{name}' in arrays:
      np.testing.assert_allclose(
        group.param_rms[:, position], arrays[f'param_rms_each_step/{name}'], rtol=1e-5
      )
      np.testing.assert_allclose(
        group.scale_exp_avg_sq[-1, position], arrays[f'final/scale_exp_avg_sq/{name}'], rtol=1e-4
      )
      # 60 steps end with a period.
      size_grads = arrays[f'final/scale_grads/{name}']
      np.testing.assert_allclose(group.scale_grad_sum[-1, position], np.sum(size_grads), atol=2e-6)
      np.testing.assert_allclose(
        group.scale_grad_sumsq[-1, position], np.sum(size_grads**2), rtol=1e-4
      )
  if case == 'b':
    assert np.sum(arrays['clip/scale'] < 1) >= 5
    clipping = group.clipping
    np.testing.assert_allclose(clipping.clip_scale, arrays['clip/scale'][:, 0], rtol=1e-5)
    np.testing.assert_allclose(clipping.norm[1:], arrays['clip/tot_norm'][1:, 0], rtol=1e-5)
    known = ~np.isnan(arrays['clip/threshold'][:, 0])
    np.testing.assert_allclose(
      clipping.threshold[known], arrays['clip/threshold'][known, 0], rtol=1e-5
    )
    np.testing.assert_array_equal(clipping.num_clipped[known], arrays['clip/num_clipped'][known, 0])
    np.testing.assert_allclose(
      clipping.model_norms[-1], arrays['final/model_norms/group0'], rtol=1e-5
    )


@pytest.mark.parametrize(
  'seed', [*range(5), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(5, 20))]
)
def test_random_options_against_the_reference(seed):
  params, grads, options = cases.random_case(seed)
  rates = np.asarray(0.05 / np.sqrt(1 + np.arange(64) / 10), np.float32)
  got, states = cases.run(optimizers.scaled_adam(**options), params, grads, rates)
  group = scaled_adam_reference.Group(lr=lambda t: float(rates[t]), **options)
  reference = scaled_adam_reference.Reference(
    params, {'default': group}, dict.fromkeys(params, 'default')
  )
  num_clipped = 0
  for t in range(64):
    reference.step({name: grad[t] for name, grad in grads.items()})
    for name, want in reference.params.items():
      np.testing.assert_allclose(
        got[name][t], want, rtol=2e-5, atol=5e-6, err_msg=f'{name} after step {t}'
      )
    if options['clipping_scale'] is not None:
      clipping = jax.tree.map(lambda x: x[t], states.groups['default'].clipping)  # pylint: disable=cell-var-from-loop
      np.testing.assert_allclose(clipping.clip_scale, reference.clip_scale['default'], rtol=2e-5)
      assert int(clipping.num_clipped) == group.num_clipped
      num_clipped += reference.clip_scale['default'] < 1
      if group.quartiles is not None:
        np.testing.assert_allclose(clipping.quartiles, group.quartiles, rtol=2e-5)
        np.testing.assert_allclose(clipping.percent_clipped, group.percent_clipped, rtol=1e-6)
  assert options['clipping_scale'] is None or num_clipped >= 3


def test_a_missing_gradient_is_zero_and_momentum_still_moves():
  params, grads, options = cases.random_case(2)
  tx = optimizers.scaled_adam(0.03, **options).optax_optimizer
  reference = scaled_adam_reference.Reference(
    params, {'default': scaled_adam_reference.Group(**options)}, dict.fromkeys(params, 'default')
  )
  state = tx.init(params)
  update = jax.jit(tx.update)
  values = params
  for t in range(20):
    grad = {name: None if (t + len(name)) % 3 == 0 and t > 4 else g[t] for name, g in grads.items()}
    updates, state = update(grad, state, values)
    values = optax.apply_updates(values, updates)
    reference.step(grad)
    for name, want in reference.params.items():
      np.testing.assert_allclose(
        values[name], want, rtol=2e-5, atol=5e-6, err_msg=f'{name} after step {t}'
      )


def test_stacked_layers_train_as_unstacked_ones():
  rng = np.random.default_rng(0)
  layers, steps = 3, 30

  def make(*shape):
    return np.asarray(rng.normal(size=shape), np.float32)  # pylint: disable=unnecessary-lambda-assignment

  unstacked = {
    f'layer_{i}': {'kernel': make(4, 5) * 0.3 * (i + 1), 'gate': make(1)} for i in range(layers)
  }
  unstacked['head'] = make(5, 2)
  grads = jax.tree.map(lambda p: make(steps, *p.shape) * 0.01, unstacked)

  def stack(tree, dim):
    kernels, gates = zip(
      *[(tree[f'layer_{i}']['kernel'], tree[f'layer_{i}']['gate']) for i in range(layers)],
      strict=False,
    )
    return {
      'stack': {'kernel': np.stack(kernels, 1 + dim), 'gate': np.concatenate(gates, dim)},
      'head': tree['head'],
    }

  options = dict(clipping_scale=1.2, clipping_update_period=5, size_update_period=2)
  want, want_states = cases.run(optimizers.scaled_adam(0.03, **options), unstacked, grads)
  axes = {
    'stack': {'kernel': P('embed', 'layers', 'mlp'), 'gate': P('layers')},
    'head': P('embed', 'vocab'),
  }
  by_axes = optimizers.scaled_adam(0.03, **options).with_param_axes(axes)
  by_paths = optimizers.scaled_adam(0.03, **options, batch_dims=(('kernel$', 1), ('gate$', (-1,))))
  for optimizer in (by_axes, by_paths):
    got, states = cases.run(optimizer, stack(unstacked, 0), stack(grads, 1))
    for name, value in stack(want, 1)['stack'].items():
      np.testing.assert_allclose(got['stack'][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(got['head'], want['head'], rtol=1e-5, atol=1e-6)
    clipping, want_clipping = (
      states.groups['default'].clipping,
      want_states.groups['default'].clipping,
    )
    np.testing.assert_allclose(clipping.norm, want_clipping.norm, rtol=1e-5)
    assert np.any(clipping.clip_scale < 1)
    np.testing.assert_allclose(
      clipping.dominant.share[1:], want_clipping.dominant.share[1:], rtol=1e-4
    )
    # Unstacked: head, gate and kernel of layer 0, of layer 1, ...; stacked: head, gates, kernels.
    places = [(0, -1), *((1 + number % 2, number // 2) for number in range(2 * layers))]
    np.testing.assert_array_equal(
      np.stack([clipping.dominant.parameter, clipping.dominant.layer], 1)[1:],
      np.array(places)[want_clipping.dominant.parameter][1:],
    )
  whole, _ = cases.run(
    optimizers.scaled_adam(0.03, **options), stack(unstacked, 0), stack(grads, 1)
  )
  assert not np.allclose(whole['stack']['kernel'], stack(want, 1)['stack']['kernel'], atol=1e-4)
  chained = optimizers.chain([optax.zero_nans(), optimizers.scaled_adam(0.03, **options)])
  state = chained.with_param_axes(axes).create(stack(unstacked, 0)).state
  assert state.param_states[1].groups['default'].param_rms.shape == (7,)
  optimizer = by_axes.create(stack(unstacked, 0))
  derived = by_axes.derive_logical_axes(optimizer, axes)
  assert derived.state.param_states.delta == axes
  assert set(derived.state.param_states.groups['default'].param_rms) == {None}


def test_layers_in_stacked_arrays_train_as_single_layers():
  rng = np.random.default_rng(0)
  shapes = {'kernel': (4, 5), 'experts': (2, 3, 3), 'gate': (1,), 'scale': (6,)}
  stacks = LayerStacks((('encoder', (1, 2, 10)), ('encoder', (3, 4))))

  def draw(scale):
    def layer():
      return {
        name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
      }

    return {
      'encoder': {f'layers_{i}': layer() for i in (0, 1, 2, 3, 4, 10)},
      'head': layer()['kernel'],
    }

  axes = jax.tree.map(
    lambda p: P(*('expert' if p.ndim == 3 else None, None, None)[: p.ndim]), draw(1)
  )
  definition = optimizers.scaled_adam(
    0.03,
    clipping_scale=0.9,
    clipping_update_period=3,
    size_update_period=2,
    group_options={'vectors': {}},
    param_labels=lambda params: jax.tree.map(
      lambda p: 'vectors' if p.ndim == 1 else 'default', params
    ),
  ).with_param_axes(axes)
  single = definition.create(draw(0.3))
  stacked = stacks.stack(single)
  assert set(stacked.target['encoder']) == {'layers_0', 'layers_1,2,10', 'layers_3,4'}
  update = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
  found = []
  for _ in range(9):
    grads = jax.tree.map(lambda grad: grad * 10.0 ** rng.uniform(-3, 0), draw(1))
    single, stacked = update(single, grads), update(stacked, stacks.stack(grads))
    got = stacks.unstack(stacked)
    for (path, a), b in zip(tree_utils.named_leaves(got), jax.tree.leaves(single), strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7, err_msg=path)
    clipping = got.state.param_states.groups['default'].clipping
    found.append(
      (int(clipping.dominant.parameter), int(clipping.dominant.layer), float(clipping.clip_scale))
    )
  parameters, layers, scales = zip(*found, strict=False)
  assert len(set(parameters)) > 3 and max(layers) == 1 and min(scales) < 1


def test_bfloat16_parameters_have_float32_statistics():
  params, grads, options = cases.random_case(3)
  options['clipping_scale'] = None
  narrow = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
  narrow_grads = jax.tree.map(lambda g: jnp.asarray(g[:10], jnp.bfloat16), grads)
  optimizer = optimizers.scaled_adam(0.03, **options)
  got, states = cases.run(optimizer, narrow, narrow_grads)
  assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
  assert {leaf.dtype for leaf in jax.tree.leaves(states)} == {
    jnp.dtype(jnp.float32),
    jnp.dtype(jnp.int32),
  }
  reference = scaled_adam_reference.Reference(
    narrow,
    {'default': scaled_adam_reference.Group(0.03, **options)},
    dict.fromkeys(params, 'default'),
  )
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
  trees = (
    {},
    {'s': jnp.float32(2.0)},
    {'void': jnp.zeros([0, 3]), 'tall': jnp.zeros([2, 0])},
    flax.core.freeze({'a': {'w': jnp.ones([2, 2])}}),
  )

  def updated(opt, _):
    return opt.apply_gradient(jax.tree.map(jnp.ones_like, opt.target)), None

  created = [optimizer.create(params) for params in trees]
  trained = jax.jit(lambda opts: [jax.lax.scan(updated, opt, length=4)[0] for opt in opts])(created)
  assert jax.tree.structure(trained) == jax.tree.structure(created)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(trained))
  params = {'a': jnp.ones([2, 3]), 'b': {'c': jnp.ones([3])}}
  masked = optimizers.OptaxWrapper(optax.masked(optimizer.optax_optimizer, {'a': True, 'b': False}))
  trained = masked.create(params).apply_gradient(
    {'a': jnp.ones([2, 3]), 'b': {'c': jnp.zeros([3])}}
  )
  np.testing.assert_array_equal(trained.target['b']['c'], 1.0)
  assert np.all(trained.target['a'] < 1.0)
  assert trained.state.param_states.inner_state.groups['default'].param_rms.shape == (1,)
  axes = masked.derive_logical_axes(trained, {'a': P('embed', 'mlp'), 'b': {'c': P('mlp')}})
  assert axes.state.param_states.inner_state.delta['a'] == P('embed', 'mlp')


def test_the_update_needs_the_parameters():
  tx = optimizers.scaled_adam(0.1).optax_optimizer
  params = {'w': jnp.ones([2])}
  with pytest.raises(ConfigError, match='needs the parameters'):
    tx.update(params, tx.init(params))
