"""Adafactor: T5X's recorded trajectories, learning rates, definitions, and errors."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import adafactor
from t5x_lite import checkpoints
from t5x_lite import tree_utils
from t5x_lite.adafactor import HParamMap
from t5x_lite.errors import CheckpointError, ConfigError
from tests import golden_data
from tests.optimizers.adafactor_rule import adafactor_cases as cases

_CASES = (
  'clip_global_maxscale',
  'hparam_map_scan',
  'moe',
  'noscale_offset',
  'scan_default',
  'std_default',
  'unfactored_mom_wd',
)


@pytest.mark.parametrize('case', _CASES)
def test_golden_trajectory(case):
  description, arrays, optimizer, _ = cases.golden(case)
  tolerance = description['tol']
  assert description['nan_at'] is None
  optimizer = optimizer.replace(
    state=optimizer.state.replace(step=jnp.int32(description['start_step']))
  )
  g0, g1 = golden_data.subtree(arrays, 'g0'), golden_data.subtree(arrays, 'g1')

  @jax.jit
  def step(optimizer, t, sign, learning_rate):
    grads = jax.tree.map(lambda a, b: (1.0 + 0.1 * t) * a + sign * b, g0, g1)
    return optimizer.apply_gradient(grads, learning_rate=learning_rate)

  num_compared = 0
  for t in range(20):
    optimizer = step(
      optimizer, jnp.float32(t), jnp.float32(1 if t % 2 == 0 else -1), arrays['lr'][t]
    )
    for i, path in enumerate(description['param_order_for_norms']):
      norm = np.linalg.norm(np.asarray(tree_utils.flatten_dict(optimizer.target)[path], np.float64))
      np.testing.assert_allclose(
        norm, arrays['param_norm_per_step'][t, i], rtol=tolerance['rtol'], err_msg=path
      )
    for path, want in tree_utils.flatten_dict(
      golden_data.subtree(arrays, f'params_step{t + 1}')
    ).items():
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


def test_learning_rate_may_be_a_schedule_of_the_step():
  params, grads = {'p': jnp.ones([3])}, {'p': jnp.ones([3])}
  by_schedule = adafactor.Adafactor(learning_rate=lambda step: 0.1 / (1.0 + step)).create(params)
  by_override = adafactor.Adafactor().create(params)
  assert (
    by_override.optimizer_def.needs_learning_rate
    and not by_schedule.optimizer_def.needs_learning_rate
  )
  for step in range(3):
    by_schedule = by_schedule.apply_gradient(grads)
    by_override = by_override.apply_gradient(grads, learning_rate=0.1 / (1 + step))
  np.testing.assert_allclose(by_schedule.target['p'], by_override.target['p'], rtol=1e-6)


def test_definitions_compare_by_their_options():
  rules = dict(logical_factor_rules=cases.STANDARD)
  left, right = adafactor.Adafactor(**rules), adafactor.Adafactor(**rules)
  assert (
    left == right and hash(left) == hash(right) and left != adafactor.Adafactor(beta1=0.5, **rules)
  )
  untold, before = left, hash(left)
  left = left.with_param_axes({'p': P('embed', 'mlp')})
  assert hash(left) == before and left != right and untold == right
  right.set_param_axes({'p': P('embed', 'mlp')})
  assert left == right and hash(right) == before
  # States of equal definitions are trees of equal structure.
  params = {'p': jnp.ones([2, 3])}
  assert jax.tree.structure(left.create(params)) == jax.tree.structure(right.create(params))


def test_every_matrix_is_factored_from_the_size_0():
  states = [
    adafactor.Adafactor(min_dim_size_to_factor=size).init_state({'p': jnp.ones([1, 3])})
    for size in (0, 1, 2)
  ]
  # An unfactored second moment has the shape of the parameter.
  assert [state.param_states['p'].v.shape for state in states] == [(1,), (1,), (1, 3)]


def _apply_without_rate():
  adafactor.Adafactor().create({'p': jnp.ones([2])}).apply_gradient({'p': jnp.ones([2])})


def _set_axes(*axes, **options):
  adafactor.Adafactor(**{'logical_factor_rules': cases.STANDARD, **options}).with_param_axes(
    {'layer': {'p': P(*axes)}}
  )


@pytest.mark.parametrize(
  'make,message',
  [
    (lambda: adafactor.Adafactor(learning_rate=-0.1), 'must be a number >= 0'),
    (lambda: adafactor.Adafactor(learning_rate=float('nan')), 'got nan'),
    (lambda: adafactor.Adafactor(learning_rate='1e-3'), "got '1e-3'"),
    (
      lambda: adafactor.Adafactor(beta1=1.0),
      r'`Adafactor.beta1` must be a number in \[0, 1\) or None, got 1.0',
    ),
    (lambda: adafactor.Adafactor(decay_rate=-0.8), 'decay_rate'),
    (lambda: adafactor.Adafactor(clipping_threshold=0.0), 'clipping_threshold'),
    (lambda: adafactor.Adafactor(weight_decay_rate=-1.0), 'weight_decay_rate'),
    (lambda: adafactor.Adafactor(min_dim_size_to_factor=-1), 'min_dim_size_to_factor'),
    (lambda: adafactor.Adafactor(global_norm_clip_threshold=-1.0), 'global_norm_clip_threshold'),
    (lambda: adafactor.Adafactor(max_parameter_scale=0), 'max_parameter_scale'),
    (lambda: adafactor.Adafactor(epsilon1='1e-30'), 'epsilon1'),
    (lambda: adafactor.Adafactor(dtype_momentum=jnp.int8), 'dtype_momentum'),
    (
      lambda: adafactor.Adafactor(dtype_momentum=jnp.bfloat16),
      'dtype_momentum` has no effect with beta1=None',
    ),
    (lambda: adafactor.Adafactor(multiply_by_parameter_scale='yes'), 'multiply_by_parameter_scale'),
    (
      lambda: adafactor.Adafactor(multiply_by_parameter_scale=False, max_parameter_scale=1.0),
      'max_parameter_scale` has no effect',
    ),
    (lambda: adafactor.Adafactor(factor_map=[('.*', None)]), 'factor_map'),
    (
      lambda: adafactor.Adafactor(factored=False, factor_map=HParamMap([('.*', None)])),
      'factored=False',
    ),
    (lambda: adafactor.Adafactor(logical_factor_rules={'embed': 'rwo'}), "Did you mean 'row'"),
    (lambda: adafactor.factor_name_to_factordim('columns'), "Did you mean 'column'"),
    (
      lambda: adafactor.Adafactor().update_hyper_params(learning_rat=0.1),
      "Did you mean 'learning_rate'",
    ),
    (
      lambda: adafactor.Adafactor().update_hyper_params(learning_rate=-0.1),
      'must be a number >= 0',
    ),
    (lambda: adafactor.Adafactor().update_hyper_params(factored=False), 'structure of the state'),
    (lambda: adafactor.Adafactor().update_hyper_params(beta1=0.9), 'structure of the state'),
    (_apply_without_rate, 'learning_rate_fn'),
    (lambda: _set_axes('embd', 'mlp'), "'embd' of the parameter 'layer/p'.*Did you mean 'embed'"),
    (lambda: _set_axes('embed', 'mlp', 'relpos_buckets'), 'must not be unfactored dims'),
    (lambda: adafactor.Adafactor().create({'p': jnp.ones([2, 3, 4])}), r'\(with_param_axes\)'),
    (
      lambda: adafactor.Adafactor(factor_map={'q': ('row', 'col')}).create({'p': jnp.ones([2, 3])}),
      "parameter 'p'",
    ),
    (
      lambda: adafactor.Adafactor(factor_map={'p': ('row', 'col')}).create(
        {'p': jnp.ones([2, 3, 4])}
      ),
      r'a role for each dim of \(2, 3, 4\)',
    ),
    (
      lambda: adafactor.Adafactor(factor_map={'p': 'row'}).create({'p': jnp.ones([2])}),
      'a role for each dim',
    ),
    (lambda: HParamMap([('(', 1)]), 'regular expression'),
  ],
)
def test_invalid_options_are_rejected(make, message):
  with pytest.raises(ConfigError, match=message):
    make()


def test_a_change_of_parameter_layout_is_rejected_with_the_remedy():
  optimizer_def = adafactor.Adafactor(0.1, min_dim_size_to_factor=4)
  states = [optimizer_def.create({name: jnp.ones([4, 6])}).state_dict() for name in ('w', 'kernel')]
  convert = checkpoints.convert_param_trees(lambda tree: {'kernel': tree['w']})
  with pytest.raises(
    CheckpointError,
    match=r"To begin .* = \[\('state/param_states\.\*', None\)\]\.",
  ):
    convert(states[0], states[1], is_resuming=False)
