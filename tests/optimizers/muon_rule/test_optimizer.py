"""Muon: its numbers, the same in each layout and on meshes, and states of optax's Muon."""

import flax.linen as nn
import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import optax.contrib
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError, ConfigError
from tests.apps.train import toy_run
from tests.optimizers.muon_rule import muon_cases as cases
from tests.optimizers.muon_rule import muon_reference

_RATE = 0.05


def _changes(optimizer_def, params, gradients):
  """Return the changes of the parameters by updates with the gradients."""
  step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
  optimizer = optimizer_def.create(params)
  for grads in gradients:
    optimizer = step(optimizer, grads)
  return jax.tree.map(lambda new, old: np.asarray(new) - old, optimizer.target, params)


@pytest.mark.parametrize(
  'options,of_muon,of_adam',
  [
    ({}, {}, {}),
    ({'nesterov': True, 'consistent_rms': 0.2}, {'consistent_rms': 0.2}, {}),
    ({'adaptive': True, 'beta': 0.8}, {'adaptive': True, 'beta': 0.8}, {}),
    (
      {'weight_decay': 0.1, 'adam_weight_decay': 0.2, 'adam_b1': 0.8, 'adam_b2': 0.9},
      {'decay': 0.1},
      {'decay': 0.2, 'b1': 0.8, 'b2': 0.9},
    ),
  ],
  ids=['defaults', 'rms', 'adaptive', 'decay'],
)
def test_updates_are_those_of_the_papers(options, of_muon, of_adam):
  params = cases.random_params(0)
  gradients = [cases.random_params(seed) for seed in (1, 2)]
  changes = _changes(
    optimizers.muon(_RATE, **options).with_param_axes(cases.axes('t5')), params, gradients
  )
  by_path = [dict(tree_utils.named_leaves(tree)) for tree in gradients]
  for (path, start), change in zip(
    tree_utils.named_leaves(params), jax.tree.leaves(changes), strict=True
  ):
    grads = [np.float64(tree[path]) for tree in by_path]
    is_kernel = path.partition('layers_')[2][2:] in cases.KERNELS
    expected = np.float64(start)
    if not is_kernel:
      adam = muon_reference.AdamW(**of_adam)
      for grad in grads:
        expected = adam.update(expected, grad, _RATE)
    elif start.ndim == 3:  # a matrix for each expert
      experts = [muon_reference.Muon(**of_muon) for _ in start]
      for grad in grads:
        expected = np.stack(
          [muon.update(p, g, _RATE) for muon, p, g in zip(experts, expected, grad, strict=True)]
        )
    else:
      muon = muon_reference.Muon(**of_muon)
      for grad in grads:
        expected = muon.update(expected, grad, _RATE)
    np.testing.assert_allclose(change, expected - start, atol=2e-5, err_msg=path)


def test_without_nesterov_the_momentum_is_orthogonalized():
  params = {'kernel': np.eye(3, 4, dtype=np.float32)}
  grads = {'kernel': np.random.default_rng(0).normal(size=[3, 4]).astype(np.float32)}
  change = _changes(optimizers.muon(_RATE, nesterov=False), params, [grads])['kernel']
  reference = muon_reference.Muon(nesterov=False)
  expected = reference.update(params['kernel'], np.float64(grads['kernel']), _RATE)
  np.testing.assert_allclose(change, expected - params['kernel'], atol=1e-6)


@pytest.mark.parametrize(
  'options',
  [{'consistent_rms': 0.2, 'weight_decay': 0.1}, {'adaptive': True, 'preconditioning': 'aol'}],
  ids=['rms', 'adaptive'],
)
def test_updates_are_equal_in_each_layout(options):
  optimizer_def = optimizers.muon(_RATE, **options)
  params = cases.random_params(0)
  gradients = [cases.random_params(seed) for seed in (1, 2, 3)]
  single_def = optimizer_def.with_param_axes(cases.axes('t5'))
  expected = _changes(single_def, params, gradients)
  scalable = _changes(
    optimizer_def.with_param_axes(cases.axes('scalable_t5')),
    cases.to_scalable(params),
    [cases.to_scalable(grads) for grads in gradients],
  )
  assert cases.largest_error(cases.from_scalable(scalable), expected) < 1e-6
  stack = cases.STACKS.stack
  stacked = _changes(single_def, stack(params), [stack(grads) for grads in gradients])
  assert cases.largest_error(cases.STACKS.unstack(stacked), expected) < 1e-6


def test_layers_are_stacked_unless_a_mask_may_tell_them_apart():
  params = cases.random_params(0)
  state = jax.eval_shape(optimizers.muon().init_state, params)
  path = 'encoder/layers_1/mlp/wi/kernel'
  wi = params['encoder']['layers_1']['mlp']['wi']['kernel']
  assert optimizers.muon(matrices=[('layers_1', False)]).stacking_key(path, wi, state) == 'adam'
  assert optimizers.muon().stacking_key(path, wi, state) == 'muon'
  assert (
    optimizers.muon(weight_decay=0.1, weight_decay_mask=True).stacking_key(path, wi, state) is None
  )


_RULES = {
  'embed': 'data',
  'mlp': 'model',
  'expert_mlp': 'model',
  'joined_kv': 'model',
  'expert': 'expert',
}


def _mesh():
  return Mesh(
    np.reshape(jax.devices()[:8], (2, 2, 2)),
    ('data', 'expert', 'model'),
    axis_types=(AxisType.Auto,) * 3,
  )


def _shardings(axes, rules=_RULES):
  return jax.tree.map(
    lambda spec: NamedSharding(_mesh(), P(*map(rules.get, spec))),
    axes,
    is_leaf=lambda node: isinstance(node, P),
  )


@pytest.mark.parametrize('options', [{}, {'matrices': 'two_dims'}], ids=['kernels', 'two_dims'])
@pytest.mark.parametrize('rules', [(), tuple(_RULES.items())], ids=['without_rules', 'with_rules'])
def test_updates_on_a_mesh_are_those_of_one_device(rules, options):
  axes = cases.axes('t5')
  optimizer_def = optimizers.muon(_RATE, consistent_rms=0.2, **options).with_param_axes(axes)
  params = jax.tree.map(np.zeros_like, cases.random_params(0))  # so that changes are not rounded
  gradients = [cases.random_params(seed) for seed in (1, 2)]
  expected = _changes(optimizer_def, params, gradients)
  optimizer = optimizer_def.create(params)
  shardings = _shardings(optimizer_def.derive_logical_axes(optimizer, axes))
  step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads), out_shardings=shardings)
  with jax.set_mesh(_mesh()), nn.logical_axis_rules(rules):
    optimizer = jax.device_put(optimizer, shardings)
    for grads in gradients:
      optimizer = step(optimizer, jax.device_put(grads, shardings.target))
  # The iteration multiplies rounding errors of the sharded momenta.
  assert cases.largest_error(optimizer.target, expected) < 1e-5
  kernel = optimizer.target['encoder']['layers_0']['mlp']['expert']['wo']['kernel']
  assert kernel.sharding.spec == P('expert', 'model', 'data')


def _compiled_on_mesh(num_layers, shape, axes, rules):
  """Return the compiled update of equal kernels that are sharded over all dims on the mesh."""
  names = [f'layers_{i}' for i in range(num_layers)]
  params_axes = {name: {'kernel': P(*axes)} for name in names}
  optimizer_def = optimizers.muon(_RATE).with_param_axes(params_axes)
  params = {name: {'kernel': jax.ShapeDtypeStruct(shape, np.float32)} for name in names}
  optimizer = jax.eval_shape(optimizer_def.create, params)
  shardings = _shardings(optimizer_def.derive_logical_axes(optimizer, params_axes), rules)
  optimizer, grads = jax.tree.map(
    lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
    (optimizer, params),
    (shardings, shardings.target),
  )
  with jax.set_mesh(_mesh()), nn.logical_axis_rules(tuple(rules.items())):
    step = jax.jit(
      lambda optimizer, grads: optimizer.apply_gradient(grads),
      out_shardings=shardings,
      donate_argnums=0,
    )
    return step.lower(optimizer, grads).compile()


@pytest.mark.parametrize(
  'num_layers,shape,axes,rules',
  [
    (16, (256, 512), ('embed', 'mlp'), {**_RULES, 'embed': ('data', 'expert')}),
    (4, (8, 128, 256), ('expert', 'embed', 'mlp'), _RULES),
    (3, (8, 128, 256), ('expert', 'embed', 'mlp'), _RULES),
  ],
  ids=['dense', 'experts', 'experts_of_3_layers'],
)
def test_each_device_of_a_mesh_has_its_share_of_the_stack(num_layers, shape, axes, rules):
  compiled = _compiled_on_mesh(num_layers, shape, axes, rules)
  # In bytes: the share of a device of all kernels. The gathered stack would be eight of them.
  share = 4 * -(-num_layers // 4) * 4 * np.prod(shape) // 8
  assert compiled.memory_analysis().temp_size_in_bytes < 6 * share
  assert 'all-gather' not in compiled.as_text()


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'nesterov': False, 'weight_decay': 0.1, 'adam_weight_decay': 0.1},
    {'ns_coeffs': 'dion', 'adaptive': True, 'consistent_rms': 0.2},
    {'preconditioning': 'spectral', 'mu_dtype': 'bfloat16'},
    {'preconditioning': 'aol', 'ns_steps': 4},
    {'preconditioning': 'schatten', 'learning_rate': optax.linear_schedule(0.1, 0.0, 5)},
  ],
  ids=['defaults', 'decay', 'dion', 'spectral', 'aol', 'schedule'],
)
def test_all_arrays_of_two_dims_are_updated_as_by_optax(options):
  options = {'learning_rate': _RATE, **options}
  earlier = optimizers.OptaxWrapper(optax.contrib.muon(**options))
  now = optimizers.muon(matrices='two_dims', **options).with_param_axes(cases.axes('t5'))
  params = cases.random_params(0)
  step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
  before = step(earlier.create(params), cases.random_params(1))
  resumed = now.create(params).restore_state(before.state_dict())
  after, expected = (step(each, cases.random_params(2)) for each in (resumed, before))
  assert jax.tree.structure(after.state) == jax.tree.structure(expected.state)
  assert cases.largest_error(after.target, expected.target) < 1e-6


def test_a_resumed_run_has_the_coefficients_of_its_options():
  params = {'kernel': np.random.default_rng(0).normal(size=[3, 4]).astype(np.float32)}
  start = optimizers.muon(_RATE).create(params)
  other = optimizers.muon(_RATE, ns_coeffs=(2.0, -1.5, 0.5))
  resumed = other.create(params).restore_state(start.state_dict()).apply_gradient(params)
  expected = other.create(params).apply_gradient(params)
  np.testing.assert_array_equal(resumed.target['kernel'], expected.target['kernel'])
  np.testing.assert_allclose(
    resumed.state.param_states.inner_states['muon'].inner_state[0].ns_coeffs, (2.0, -1.5, 0.5)
  )


@pytest.mark.parametrize(
  'options, message',
  [
    (
      {'ns_coeffs': 'dion', 'ns_steps': 9},
      r'`muon.ns_steps` must be the default .* got 9. Leave it out',
    ),
    ({'ns_coeffs': [(3.0, -4.0, 2.0)] * 2, 'ns_steps': 3}, r'`muon.ns_steps` must be the default'),
    ({'ns_coeffs': (True, False, True)}, r'`muon.ns_coeffs` must be'),
  ],
)
def test_coefficients_and_their_number_are_checked(options, message):
  with pytest.raises(ConfigError, match=message):
    optimizers.muon(_RATE, **options)


def test_a_mask_without_weight_decay_is_rejected():
  message = (
    r'^`muon.weight_decay_mask` must be None with `muon.weight_decay` = 0.0, with which it has no effect, got True. '
    r'Set `muon.weight_decay`, or leave the mask out\.$'
  )
  with pytest.raises(ConfigError, match=message):
    optimizers.muon(weight_decay_mask=True, adam_weight_decay=0.1)
  schedule = optax.linear_schedule(0.0, 0.1, 10)
  for weight_decay in (0.1, schedule):
    optimizers.muon(weight_decay=weight_decay, weight_decay_mask=True)


def test_the_dims_of_matrices_cannot_be_given():
  numbers = {'kernel': optax.contrib.MuonDimensionNumbers(0, 1)}
  with pytest.raises(ConfigError, match='must be None, got .*follow from the logical axes'):
    optimizers.muon(muon_weight_dimension_numbers=numbers)


# ---- A run that began with optax's Muon ------------------------------------------------------------------------------

_earlier_muon = optimizers.wrap_optax_optimizer(optax.contrib.muon, takes_learning_rate=True)


@pytest.mark.parametrize(
  'wrapped',
  [lambda muon: muon, lambda muon: optimizers.chain([optax.clip(1.0), muon])],
  ids=['muon', 'chain'],
)
def test_an_earlier_run_is_resumed_with_the_option_that_its_error_names(wrapped, tmp_path):
  toy_run.train(tmp_path, 4, model=toy_run.model(wrapped(_earlier_muon())), save={'period': 4})
  with pytest.raises(CheckpointError) as error:
    toy_run.train(tmp_path, 6, model=toy_run.model(wrapped(optimizers.muon())))
  message = str(error.value)
  assert 'Muon had other arrays. ' in message
  _, _, remedy = message.partition('Set `muon.')
  option, _, rest = remedy.partition('` to ')
  value = rest.partition(', which chooses them')[0].strip("'")
  muon = optimizers.muon(**{option: value})
  _, state = toy_run.train(tmp_path, 6, model=toy_run.model(wrapped(muon)))
  assert int(state.step) == 6
