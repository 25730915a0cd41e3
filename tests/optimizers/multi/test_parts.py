"""Parts of a MultiOptimizer: learning rates, arguments, axes, and errors."""

import types

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import adafactor
from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from tests.optimizers.multi import multi_cases as cases

_OWN_SCHEDULE = optax.constant_schedule(0.01)


@pytest.mark.parametrize(
  'left,right,needs,owns,moved_by_trainer',
  [
    (adafactor.Adafactor, optimizers.adamw, True, False, (True, True)),
    (adafactor.Adafactor, lambda: optimizers.adamw(0.01), True, False, (True, False)),
    (lambda: adafactor.Adafactor(0.01), optimizers.adamw, True, False, (False, True)),
    (lambda: adafactor.Adafactor(0.01), adafactor.Adafactor, True, False, (False, True)),
    (
      lambda: adafactor.Adafactor(0.01),
      lambda: adafactor.Adafactor(_OWN_SCHEDULE),
      False,
      True,
      (True, True),
    ),
    (
      lambda: adafactor.Adafactor(0.01),
      lambda: optimizers.adamw(_OWN_SCHEDULE),
      False,
      True,
      (True, False),
    ),
    (
      lambda: optimizers.OptaxWrapper(optax.sgd(0.1)),
      lambda: optimizers.sgd(0.1),
      False,
      True,
      (False, False),
    ),
    (
      lambda: optimizers.OptaxWrapper(optax.sgd(0.1)),
      lambda: optimizers.OptaxWrapper(optax.adam(0.1)),
      False,
      False,
      (False, False),
    ),
  ],
)
def test_every_learning_rate_has_one_owner(left, right, needs, owns, moved_by_trainer):
  optimizer_def = optimizers.MultiOptimizer([('a', left()), ('b', right())])
  assert (optimizer_def.needs_learning_rate, optimizer_def.owns_learning_rate) == (needs, owns)
  assert optimizer_def.uses_learning_rate == any(moved_by_trainer)
  params = {'a': jnp.ones([3]), 'b': jnp.ones([3])}
  optimizer, grads = optimizer_def.create(params), params
  if needs:
    with pytest.raises(ConfigError, match='learning_rate_fn'):
      optimizer.apply_gradient(grads)
  small, large = (
    optimizer.apply_gradient(grads, learning_rate=rate).target for rate in (1e-3, 1e-1)
  )
  assert (
    tuple(not np.array_equal(small[name], large[name]) for name in ('a', 'b')) == moved_by_trainer
  )


def test_one_rate_overrides_those_of_all_parts():
  optimizer_def = optimizers.MultiOptimizer(
    [('a', adafactor.Adafactor(0.3)), ('b', adafactor.Adafactor(0.4))]
  )
  assert [hp.learning_rate for hp in optimizer_def.hyper_params] == [0.3, 0.4]
  assert [hp.learning_rate for hp in optimizer_def.update_hyper_params(learning_rate=0.1)] == [
    0.1,
    0.1,
  ]


def test_hyper_params_of_every_part():
  optimizer_def = optimizers.MultiOptimizer(
    [
      ('a', adafactor.Adafactor()),
      ('b', adafactor.Adafactor(decay_rate=0.5)),
      ('c', optimizers.sgd()),
      ('d', optimizers.MultiOptimizer([('d', adafactor.Adafactor(epsilon2=0.5))])),
    ]
  )
  updated = optimizer_def.update_hyper_params(learning_rate=0.1, decay_rate=0.7)
  assert [hp.learning_rate for hp in (*updated[:3], *updated[3])] == [0.1] * 4
  assert [hp.decay_rate for hp in (*updated[:2], *updated[3])] == [0.7] * 3 and updated[3][
    0
  ].epsilon2 == 0.5
  assert optimizer_def.hyper_params[1].decay_rate == 0.5
  # Given whole, one by one, then overridden.
  given = optimizer_def.hyper_params
  given[0] = given[0].replace(learning_rate=0.3, clipping_threshold=0.25)
  optimizer = optimizer_def.create({name: jnp.ones([2]) for name in 'abcd'})
  grads = {name: jnp.ones([2]) for name in 'abcd'}
  for rates, want in (({}, None), ({'learning_rate': 0.5}, 0.5 * 0.25)):
    if want is None:
      with pytest.raises(ConfigError, match='learning_rate_fn'):
        optimizer.apply_gradient(grads, hyper_params=given)
    else:
      updated = optimizer.apply_gradient(grads, hyper_params=given, **rates)
      np.testing.assert_allclose(updated.target['a'], 1.0 - want, rtol=1e-5)
      np.testing.assert_allclose(updated.target['b'], 0.5, rtol=1e-5)


def test_parts_get_their_share_of_the_further_arguments():
  seen = {}

  class Curious(optimizers.OptimizerDef):
    extra_args = optimizers.EXTRA_ARGS
    uses_learning_rate = False

    def __init__(self):
      super().__init__(None)

    def init_state(self, params):
      return optimizers.OptimizerState(step=jnp.int32(0), param_states=())

    def apply_gradient(self, hyper_params, params, state, grads, **extra):
      doubled = jax.tree.map(lambda p: 2 * p, params)
      seen.update(
        extra,
        loss=extra['value_fn'](doubled),
        objective=extra['obj_fn'](doubled),
        grads=extra['grad_fn'](doubled, 3),
      )
      return params, state

    def metrics(self, state):
      return {'steps': state.step}

    def report(self, values):
      return [f'{name} is {value}' for name, value in values.items()]

    def eval_params(self, params, state):
      return jax.tree.map(lambda p: p + state.step, params)

    def unsupported_reason(self, state):
      return 'too curious'

  optimizer_def = optimizers.MultiOptimizer(
    [('^a', optimizers.sgd(0.1)), ('^b', Curious())], part_names=['plain', 'nosy']
  )
  assert set(optimizer_def.extra_args) == set(optimizers.EXTRA_ARGS)
  params = {'a': jnp.float32(1.0), 'b': {'x': jnp.float32(3.0)}, 'c': jnp.float32(10.0)}

  def loss(p):
    return p['a'] + p['b']['x'] * p['c']

  optimizer = optimizer_def.create(params)
  updated = optimizer.apply_gradient(
    params,
    value=loss(params),
    grad=params,
    value_fn=loss,
    obj_fn=loss,
    grad_fn=lambda p, number: jax.tree.map(lambda g: number * g, jax.grad(loss)(p)),
  )
  assert seen['value'] == 31 and seen['loss'] == seen['objective'] == 61
  # The other parameters are constants for the part.
  assert seen['grad'] == {'b': {'x': 3.0}} and seen['grads'] == {'b': {'x': 30.0}}
  assert optimizer_def.metrics(updated.state) == {'nosy/steps': 1}
  assert optimizer_def.report({'nosy/steps': 1.0, 'plain/x': 2.0}) == ['part nosy: steps is 1.0']
  assert optimizer_def.eval_params(params, updated.state) == {**params, 'b': {'x': 4.0}}
  assert optimizer_def.unsupported_reason(updated.state).endswith('too curious')
  assert "part 'nosy'" in optimizer_def.unsupported_reason(updated.state)


@pytest.mark.parametrize('make', [optimizers.polyak_sgd, optimizers.schedule_free_adamw])
def test_parts_that_need_more_than_gradients_train_as_alone(make):
  params = {'a': jnp.asarray([1.0, -2.0]), 'b': jnp.asarray([0.5])}

  def loss(p):
    return jnp.sum(p['a'] ** 2) + jnp.sum(p['a']) * jnp.sum(p.get('b', params['b']))

  alone, mixed = (
    make().create({'a': params['a']}),
    optimizers.MultiOptimizer([('a', make())]).create(params),
  )
  for _ in range(2):
    results = []
    for optimizer in (alone, mixed):
      value, grads = jax.value_and_grad(loss)(optimizer.target)
      results.append(optimizer.apply_gradient(grads, value=value, value_fn=loss, learning_rate=0.1))
    alone, mixed = results
  np.testing.assert_array_equal(mixed.target['a'], alone.target['a'])
  evaluated = mixed.optimizer_def.eval_params(mixed.target, mixed.state)
  np.testing.assert_array_equal(
    evaluated['a'], alone.optimizer_def.eval_params(alone.target, alone.state)['a']
  )
  np.testing.assert_array_equal(evaluated['b'], params['b'])


def test_the_log_has_the_selection_of_each_part_once(caplog):
  optimizer_def = optimizers.MultiOptimizer([('kernel', optimizers.sgd(0.1))])
  with caplog.at_level('INFO', logger='t5x_lite.optimizers'):
    for _ in range(2):
      optimizer_def.init_state(cases.small())
  assert [record.getMessage() for record in caplog.records] == [
    "MultiOptimizer: part '0' (sgd on PathTraversal(['kernel'])) trains 1 arrays.",
    'MultiOptimizer: the other 1 arrays are frozen.',
  ]


def _sized(mutate):
  """Return (optimizer, its part before it was made) of a selection that needs the sizes of the parameters."""
  part = cases.make_adafactor()
  optimizer_def = optimizers.MultiOptimizer(
    [(optimizers.ModelParamTraversal(lambda _, p: p.size > 90), part)]
  )
  if mutate:
    optimizer_def.set_param_axes(cases.AXES)
    return optimizer_def.create(cases.random(0)), part
  return cases.create(optimizer_def), part


@pytest.mark.parametrize('mutate', [False, True])
def test_each_part_knows_the_axes_of_its_parameters_alone(mutate):
  optimizer, part = _sized(mutate)
  factor_map = optimizer.optimizer_def.sub_optimizers[0].hyper_params.factor_map
  assert 'encoder/attention/kernel' in factor_map and len(factor_map) == 4
  assert part.hyper_params.factor_map is None
  axes = optimizer.optimizer_def.derive_logical_axes(jax.eval_shape(lambda: optimizer), cases.AXES)
  assert jax.tree.structure(axes) == jax.tree.structure(optimizer)
  flat = tree_utils.flatten_dict(axes.state_dict()['state']['param_states'])
  assert flat['encoder/attention/kernel/v_row'] == P('embed', 'layers')
  assert 'temperature/v' not in flat


@pytest.mark.parametrize('mutate', [False, True])
def test_axes_given_before_the_parameters_apply_in_state_and_update(mutate):
  by_batch = optimizers.scaled_adam(0.1, batch_axes=('layers',))
  definition = optimizers.MultiOptimizer(
    [
      ('inner', optimizers.MultiOptimizer([('stack', by_batch)])),
      ('factored', cases.make_adafactor()),
    ]
  )
  params = {name: jnp.arange(1.0, 41.0).reshape([2, 4, 5]) for name in ('inner/stack', 'factored')}
  params = tree_utils.unflatten_dict(params)
  axes = {'inner': {'stack': P('layers', 'embed', 'mlp')}, 'factored': P('layers', 'embed', 'mlp')}
  want = definition.with_param_axes(axes, params).create(params)
  if mutate:
    definition.set_param_axes(axes)
  else:
    definition = definition.with_param_axes(axes)
  state = definition.init_state(params)
  cases.assert_same(state, want.state)
  assert state.param_states.parts[0].parts[0].groups['default'].param_rms.shape == (2,)
  hyper_params = definition.update_hyper_params(learning_rate=0.1)
  got = jax.jit(
    lambda params, state: definition.apply_gradient(hyper_params, params, state, params)
  )(params, state)
  want = jax.jit(lambda want, grads: want.apply_gradient(grads, learning_rate=0.1))(want, params)
  cases.assert_same(got, (want.target, want.state))


def test_one_optimizer_object_may_be_in_two_parts():
  shared = cases.make_adafactor()
  optimizer = cases.create(optimizers.MultiOptimizer([('encoder', shared), ('decoder', shared)]))
  apart = cases.create(
    optimizers.MultiOptimizer(
      [('encoder', cases.make_adafactor()), ('decoder', cases.make_adafactor())]
    )
  )
  cases.assert_same(optimizer.state_dict(), apart.state_dict())
  left, right = optimizer.optimizer_def.hyper_params
  assert set(left.factor_map) == {
    'encoder/mlp/kernel',
    'encoder/attention/kernel',
    'encoder/norm/scale',
  }
  assert set(right.factor_map) == {'decoder/mlp/kernel', 'decoder/norm/scale'}


def test_definitions_compare_by_their_parts():
  def make(**options):
    return optimizers.MultiOptimizer(
      [('kernel', cases.make_adafactor(**options)), ('scale', cases.make_adafactor())]
    )

  assert make() == make() and hash(make()) == hash(make()) and make() != make(beta1=0.5)
  assert jax.tree.structure(make().create(cases.small())) == jax.tree.structure(
    make().create(cases.small())
  )


@pytest.mark.parametrize(
  'make,message',
  [
    (lambda: optimizers.MultiOptimizer([]), 'at least one pair'),
    (lambda: optimizers.MultiOptimizer({'a': optimizers.sgd()}), 'optimizers.partition'),
    (lambda: optimizers.MultiOptimizer([optimizers.sgd()]), 'at least one pair'),
    (lambda: optimizers.MultiOptimizer([(optimizers.sgd(), 'kernel')]), 'must be a traversal'),
    (lambda: optimizers.MultiOptimizer([('kernel', 'scale')]), 'The traversal is the first'),
    (
      lambda: optimizers.MultiOptimizer([('kernel', optimizers.sgd)]),
      'must be an optimizer such as .*got <function sgd.* Call the function first',
    ),
    (
      lambda: optimizers.MultiOptimizer([('kernel', optax.sgd(0.1))]),
      'Wrap the optax transformation in optimizers.OptaxWrapper',
    ),
    (lambda: optimizers.MultiOptimizer([('kernel', None)]), 'To freeze parameters, omit the pair'),
    (
      lambda: optimizers.MultiOptimizer([(lambda path: True, optimizers.sgd())]),
      'ModelParamTraversal',
    ),
    (lambda: optimizers.MultiOptimizer([('(', optimizers.sgd())]), 'regular expression'),
    (lambda: _create_small([([], optimizers.sgd())]), 'selects no parameter out of'),
    (
      lambda: optimizers.MultiOptimizer([('a', optimizers.sgd())], part_names=['a', 'b']),
      'must be 1 different',
    ),
    (lambda: optimizers.MultiOptimizer([('a', optimizers.sgd())], part_names=['a/b']), "'a/b'"),
    (lambda: optimizers.partition([], 'a'), 'must be a mapping'),
    (lambda: optimizers.partition({'a': None}, 'a'), 'not all of them None'),
    (
      lambda: optimizers.partition({'kernl': optimizers.sgd()}, [('.', 'kernel')]).create(
        cases.small()
      ),
      "Did you mean 'kernl'",
    ),
    (lambda: optimizers.partition({'a': optimizers.sgd()}, [('(', 'a')]), 'regular expression'),
    (
      lambda: _create_small([('kernel', optimizers.sgd()), ('k.r', optimizers.adam())]),
      r"'kernel' must be .*, got part '0' \(sgd on .*'kernel'.*\) and part '1' \(adam on ",
    ),
    (
      lambda: _create_small([('kernel', optimizers.sgd()), ('karnel', optimizers.adam())]),
      r"part '1' \(adam on .*'karnel'.*\) selects no parameter out of 2",
    ),
    (
      lambda: _create_small([('optimizer:', optimizers.sgd())], {'optimizer:0': jnp.ones([2])}),
      "Rename the parameter 'optimizer:0'",
    ),
    (
      lambda: _create_small(
        [(types.SimpleNamespace(iterate=iter, update=lambda fn, tree: {}), optimizers.sgd())]
      ),
      'must return the tree',
    ),
    (
      lambda: optimizers.partition(
        {'a': optimizers.sgd()}, lambda p: {'kernel': 'a', 'scale': 'b'}
      ).create(cases.small()),
      "'scale' has the label 'b'",
    ),
    (
      lambda: optimizers.partition({'a': optimizers.sgd()}, {'kernel': 'a'}).create(cases.small()),
      "'scale' has no label",
    ),
    (
      lambda: optimizers.partition({'a': optimizers.sgd(), 'b': optimizers.sgd()}, 'a').create(
        cases.small()
      ),
      "part 'b' .* selects no parameter",
    ),
    (
      lambda: optimizers.MultiOptimizer([('', adafactor.Adafactor())]).update_hyper_params(
        decay_rat=0.1
      ),
      "Did you mean 'decay_rate'",
    ),
    (
      lambda: optimizers.MultiOptimizer([('', adafactor.Adafactor())]).update_hyper_params(
        learning_rate=-1.0
      ),
      'must be a number >= 0',
    ),
  ],
)
def test_invalid_parts_are_rejected(make, message):
  with pytest.raises(ConfigError, match=message):
    make()


def _create_small(pairs, params=None):
  return optimizers.MultiOptimizer(pairs).create(cases.small() if params is None else params)
