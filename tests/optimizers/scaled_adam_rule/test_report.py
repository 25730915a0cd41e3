"""ScaledAdam's reports."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils
from tests.optimizers.scaled_adam_rule import scaled_adam_reference


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
  optimizer = optimizer.with_param_axes(jax.tree.map(lambda _: P('embed', 'mlp'), params))
  opt = optimizer.create(params)
  reference = scaled_adam_reference.Reference(
    {'big': params['big']['w'], 'tiny': params['tiny']['w']},
    {'default': scaled_adam_reference.Group(1e-4, 2.0, clipping_update_period=period)},
    {'big': 'default', 'tiny': 'default'},
  )
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
      shown = [
        values[f'{prefix}norm_{what}']
        for what in ('min', 'quartile_1', 'median', 'quartile_3', 'max')
      ]
      np.testing.assert_allclose(shown, group.quartiles, rtol=1e-5)
      np.testing.assert_allclose(values[f'{prefix}threshold'], group.threshold, rtol=1e-5)
    else:  # Until there is a first period, the norms so far; the first step's is not recorded.
      norms = norms[t == 1 :] + [values[f'{prefix}norm']]
      assert (values[f'{prefix}norm_min'], values[f'{prefix}norm_max']) == (
        min(norms),
        max(norms),
      ) and min(norms) > 0
      assert (
        min(norms) <= values[f'{prefix}norm_median'] <= max(norms)
        and values[f'{prefix}threshold'] == 0
      )
    # Said once a period, and when a step is clipped strongly.
    if t > 0 and t % period == 0:
      assert f'{group.threshold:.3e}' in lines[0] and f'{group.percent_clipped:.1f} %' in lines[0]
    elif t == 2 * period + 3:
      assert 'tiny/w' in lines[0] and f'scaled by {reference.clip_scale["default"]:.3g}' in lines[0]
    assert len(lines) == (t > 0 and t % period == 0) + (t == 2 * period + 3)
  # The step that was clipped strongly is kept for a summary after it.
  assert (
    values[f'{prefix}dominant/step'] == 2 * period + 3
    and values[f'{prefix}dominant/clip_scale'] < 0.1
  )
  # Without paths, as in a chain: the number instead.
  chained = optimizers.chain([optax.identity(), optimizer])
  assert any('parameter 1 of the tree' in line for line in chained.report(values))


def test_clipping_that_is_added_to_a_run_starts_after_a_full_period():
  period = 4
  options = {'clipping_update_period': period}
  without = optimizers.scaled_adam(1e-4, **options)
  clips = optimizers.scaled_adam(1e-4, 2.0, **options)
  params = {'w': jnp.full([2, 2], 0.5), 'b': jnp.full([3], 0.5)}
  grads = [jax.tree.map(lambda p, s=s: jnp.full(p.shape, s), params) for s in range(1, 20)]
  old = without.create(params)
  for step in range(6):  # one step into a period
    old = _step_of(without)(old, grads[step])
  fields = clips.optional_states(clips.create(params).state)
  (prefix,) = fields
  assert prefix == 'groups/default/clipping/' and len(fields[prefix]) == 15
  assert without.optional_states(old.state) == {'groups/default/clipping/': {}}
  # The state as a resumed run gets it: that of the checkpoint with the added arrays.
  flat = tree_utils.flatten_dict(clips.create(params).state_dict())
  saved = tree_utils.flatten_dict(old.state_dict())
  added = {f'state/param_states/{n}': v for n, v in fields[prefix].items()}
  assert set(flat) == {*saved, *added}
  opt = clips.create(params).restore_state(tree_utils.unflatten_dict({**saved, **added}))
  norms = []
  for step in range(6, 19):
    # Larger gradients in the end, which are clipped.
    grad = jax.tree.map(lambda g, s=step: g * (100.0 if s > 13 else 1.0), grads[step])
    opt = _step_of(clips)(opt, grad)
    old = _step_of(without)(old, grad)
    values, lines = _reported(clips, opt)
    values = {name.rpartition('/')[2]: value for name, value in values.items()}
    norms.append(values['norm'])
    if step < 12:  # The period from step 6 on is incomplete at step 8.
      assert values['clip_scale'] == 1 and values['threshold'] == 0 and lines == []
      jax.tree.map(np.testing.assert_array_equal, opt.target, old.target)
    elif step < 16:
      threshold = 2 * np.sort(norms[3:7])[2]
      np.testing.assert_allclose(values['threshold'], threshold, rtol=1e-6)
      want = min(1, threshold / norms[-1])
      np.testing.assert_allclose(values['clip_scale'], want, rtol=1e-6)
  assert values['clip_scale'] < 1 or norms[-1] < values['threshold']


@pytest.mark.parametrize(
  'make',
  [
    lambda part: optimizers.chain([optax.identity(), part.optax_optimizer]),
    lambda part: optimizers.partition({'a': optimizers.sgd(0.1), 'c': part}, {'b': 'a', 'w': 'c'}),
    lambda part: optimizers.MultiOptimizer(
      [
        (optimizers.ModelParamTraversal(lambda path, _: 'w' in path), part),
        (optimizers.ModelParamTraversal(lambda path, _: 'b' in path), optimizers.sgd(0.1)),
      ]
    ),
  ],
)
def test_names_of_added_clipping_are_those_of_the_state_in_every_optimizer(make):
  params = {'w': jnp.ones([2, 2]), 'b': jnp.ones([3])}
  names = []
  for clipping_scale in (None, 2.0):
    opt = make(optimizers.scaled_adam(0.01, clipping_scale)).create(params)
    names.append(set(tree_utils.flatten_dict(opt.state_dict())))
  (added,) = opt.optimizer_def.optional_states(opt.state).values()
  assert names[1] - names[0] == {f'state/param_states/{name}' for name in added}
  assert names[0] < names[1]


def test_reports_cost_nothing_where_they_are_not_wanted():
  params = {'w': jnp.ones([4, 4])}
  for optimizer, has_norm in (
    (optimizers.scaled_adam(0.1), False),
    (optimizers.scaled_adam(0.1, 2.0, show_dominant_parameters=False), True),
  ):
    values, lines = _reported(optimizer, optimizer.create(params))
    assert lines == [] and not [name for name in values if 'dominant' in name]
    assert bool(values) == has_norm
  with_it, without = (
    str(
      jax.make_jaxpr(
        lambda p, o=optimizers.scaled_adam(0.1, 2.0, show_dominant_parameters=show).optax_optimizer: (
          o.update(p, o.init(p), p)
        )
      )(params)
    )
    for show in (True, False)
  )
  assert 'argmax' in with_it and 'argmax' not in without
