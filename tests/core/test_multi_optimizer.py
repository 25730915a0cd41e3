"""MultiOptimizer: parts are what their optimizers are alone, selections, learning rates, state dicts, checkpoints."""

import types
import warnings

import flax.core
import flax.linen.partitioning
import flax.traverse_util
import gin
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import adafactor, checkpoints, gin_utils, optimizers, train_state, tree_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.networks import param_layouts, t5
from tests.contracts.optimizer_rows import ROWS
from tests.core import toy_run

_AXES = {
    'encoder': {'mlp': {'kernel': P('embed', 'mlp')}, 'attention': {'kernel': P('embed', 'layers', 'heads')},
                'norm': {'scale': P('embed')}},
    'decoder': {'mlp': {'kernel': P('embed', 'mlp')}, 'norm': {'scale': P('embed')}},
    'token_embedder': {'embedding': P('vocab', 'embed')},
    'temperature': P(),
}
_SIZES = {'embed': 8, 'mlp': 12, 'heads': 6, 'layers': 2, 'vocab': 16}


def _random(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda axes: jnp.asarray(rng.normal(size=[_SIZES[name] for name in axes]), jnp.float32), _AXES)


def _adafactor(**options):
  return adafactor.Adafactor(
      **{'min_dim_size_to_factor': 4, 'logical_factor_rules': adafactor.standard_logical_factor_rules(), **options})


def _create(optimizer_def, params=None):
  optimizer_def.set_param_axes(_AXES)
  return optimizer_def.create(_random(0) if params is None else params)


def _train(optimizer, num_steps=3, learning_rate=0.05, start=1):

  @jax.jit
  def train(optimizer, grads):
    return jax.lax.scan(lambda o, g: (o.apply_gradient(g, learning_rate=learning_rate), None), optimizer, grads)[0]

  grads = [_random(seed) for seed in range(start, start + num_steps)]
  return train(optimizer, jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads))


def _flat(tree):
  return dict(tree_utils.named_leaves(tree))


def _assert_same(got, want):
  got, want = _flat(got), _flat(want)
  assert got.keys() == want.keys()
  for name, leaf in want.items():
    np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(leaf), err_msg=name)


def _mix():
  return optimizers.MultiOptimizer([
      ('encoder/.*kernel$', _adafactor(beta1=0.9)),
      ('scale$', optimizers.adamw(0.01, weight_decay=0.1)),
      (optimizers.ModelParamTraversal(lambda path, _: path.startswith('/token_embedder/')),
       optimizers.sgd(momentum=0.9)),
  ])


# ---- What a part does. ----


def test_each_part_trains_as_its_optimizer_would_alone():
  trained = _train(_create(_mix()))
  alone = [
      ('encoder/mlp/kernel encoder/attention/kernel', _adafactor(beta1=0.9)),
      ('encoder/norm/scale decoder/norm/scale', optimizers.adamw(0.01, weight_decay=0.1)),
      ('token_embedder/embedding', optimizers.sgd(momentum=0.9)),
  ]
  subtree = lambda tree, paths: tree_utils.unflatten_dict({path: _flat(tree)[path] for path in paths.split()})
  separate = {}
  for paths, optimizer_def in alone:
    optimizer_def.set_param_axes(subtree(_AXES, paths))
    separate[paths] = optimizer_def.create(subtree(_random(0), paths))

  @jax.jit
  def step(separate, grads):
    return {paths: optimizer.apply_gradient(subtree(grads, paths), learning_rate=jnp.float32(0.05))
            for paths, optimizer in separate.items()}

  for seed in range(1, 4):
    separate = step(separate, _random(seed))
  got, num_compared = _flat(trained.target), 0
  for optimizer in separate.values():
    for path, want in _flat(optimizer.target).items():
      np.testing.assert_allclose(got[path], want, rtol=1e-6, atol=1e-7, err_msg=path)
      num_compared += 1
  assert num_compared == 5
  # The rest is not touched.
  for path in ('decoder/mlp/kernel', 'temperature'):
    np.testing.assert_array_equal(got[path], _flat(_random(0))[path], err_msg=path)
  assert trained.state.step == 3 and trained.state.step.dtype == jnp.int32


@pytest.mark.parametrize('make', [lambda: adafactor.Adafactor(min_dim_size_to_factor=2), optimizers.adamw])
def test_one_part_over_all_is_the_optimizer_itself(make):
  several = {
      'itself': make(),
      'path': optimizers.MultiOptimizer([('', make())]),
      'flax': optimizers.MultiOptimizer([(flax.traverse_util.t_identity, make())]),
      'nested': optimizers.MultiOptimizer([('.*', optimizers.MultiOptimizer([('.', make())]))]),
      'label': optimizers.partition({'all': make()}, 'all'),
  }
  step = jax.jit(lambda several, grads: {
      name: optimizer.apply_gradient(grads, learning_rate=0.05) for name, optimizer in several.items()})
  several = {name: optimizer_def.create(_small()) for name, optimizer_def in several.items()}
  for size in (1.0, 3.0):
    several = step(several, jax.tree.map(lambda p: size * p, _small()))
  whole = several.pop('itself')
  for trained in several.values():
    _assert_same(trained.target, whole.target)
    if trained.optimizer_def.has_param_wise_state:
      _assert_same(trained.state_dict(), whole.state_dict())


def test_frozen_parameters_are_not_looked_at():
  params = {**_random(0), 'codes': jnp.asarray([[1, 2]], jnp.bfloat16)}
  optimizer_def = optimizers.MultiOptimizer([('mlp/kernel$', adafactor.Adafactor()), ('scale$', optimizers.adam())])
  optimizer = optimizer_def.create(params)
  grads = {**_random(1), 'codes': None, 'temperature': jnp.float32(np.nan)}
  updated = optimizer.apply_gradient(grads, learning_rate=0.1)
  assert updated.target['codes'] is params['codes'] and updated.target['temperature'] is params['temperature']
  assert not np.array_equal(updated.target['encoder']['mlp']['kernel'], params['encoder']['mlp']['kernel'])


def test_containers_and_dtypes_of_the_parameters_stay():
  params = flax.core.freeze({
      'stack': [jnp.ones([2, 3]), jnp.ones([3])], 'scalar': jnp.float32(2.0), 'narrow': jnp.ones([3, 2], jnp.bfloat16)})
  optimizer_def = optimizers.MultiOptimizer([('stack/0|narrow', adafactor.Adafactor(beta1=0.5)),
                                             ('scalar|stack/1', optimizers.adam())])
  optimizer = optimizer_def.create(params)
  updated = jax.jit(lambda o, g: o.apply_gradient(g, learning_rate=0.1))(optimizer, jax.tree.map(jnp.ones_like, params))
  assert jax.tree.structure(updated) == jax.tree.structure(optimizer)
  for (name, new), old in zip(tree_utils.named_leaves(updated), jax.tree.leaves(optimizer), strict=True):
    assert (new.shape, new.dtype) == (old.shape, old.dtype), name
  pairs = zip(jax.tree.leaves(updated.target), jax.tree.leaves(params), strict=True)
  assert all(np.all(new < old) for new, old in pairs)
  assert {leaf.dtype for leaf in jax.tree.leaves(updated.state.param_states)} == {jnp.dtype('float32'),
                                                                                jnp.dtype('int32')}
  _assert_same(optimizer.restore_state(updated.state_dict()), updated)


@pytest.mark.parametrize('params', [{}, flax.core.freeze({}), {'empty': {}}])
def test_no_parameters(params):
  optimizer = _mix().create(params)
  updated = optimizer.apply_gradient(params, learning_rate=0.1)
  assert updated.state.step == 1 and jax.tree.leaves(updated.target) == []
  _assert_same(optimizer.restore_state(updated.state_dict()), updated)


# ---- Selections. ----


def _flax_traversal(filter_fn):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return flax.traverse_util.ModelParamTraversal(filter_fn)


def _flax_items(*keys):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    traversal = flax.traverse_util.t_identity
    for key in keys:
      traversal = traversal[key]
    return traversal


class _OwnTraversal:
  """Knows the protocol and nothing else."""

  def iterate(self, inputs):
    yield inputs['decoder']['mlp']['kernel']

  def update(self, fn, inputs):
    decoder = inputs['decoder']
    return {**inputs, 'decoder': {**decoder, 'mlp': {'kernel': fn(decoder['mlp']['kernel'])}}}


# Made when they are used: pytest looks at the attributes of parameters, which warns for Flax's.
@pytest.mark.parametrize('make_selection,want', [
    (lambda: 'scale$', 'decoder/norm/scale encoder/norm/scale'),
    (lambda: ['^encoder/mlp', 'embedding'], 'encoder/mlp/kernel token_embedder/embedding'),
    (lambda: optimizers.PathTraversal('.*', exclude=['kernel', 'norm']), 'temperature token_embedder/embedding'),
    (lambda: optimizers.ModelParamTraversal(lambda path, value: path.endswith('/scale') and value.ndim == 1),
     'decoder/norm/scale encoder/norm/scale'),
    (lambda: optimizers.ModelParamTraversal(lambda _, value: value.size > 100), 'token_embedder/embedding'),
    (lambda: _flax_traversal(lambda path, _: path == '/temperature'), 'temperature'),
    (lambda: _flax_traversal(lambda _, value: value.ndim == 3), 'encoder/attention/kernel'),
    (lambda: _flax_items('decoder'), 'decoder/mlp/kernel decoder/norm/scale'),
    (lambda: _OwnTraversal(), 'decoder/mlp/kernel'),
])
def test_selections(make_selection, want):
  optimizer = optimizers.MultiOptimizer([(make_selection(), optimizers.sgd(0.1))]).create(_random(0))
  updated = optimizer.apply_gradient(jax.tree.map(jnp.ones_like, _random(0)))
  moved = [name for (name, new), old in zip(
      tree_utils.named_leaves(updated.target), jax.tree.leaves(optimizer.target), strict=True)
           if not np.array_equal(new, old)]
  assert moved == want.split()
  assert optimizer.state.param_states.paths == (tuple(moved),)


def test_own_traversals_iterate_and_update():
  tree = flax.core.freeze({'b': {'kernel': 1, 'scale': 2}, 'a': {'kernel': 3}})
  by_filter = optimizers.ModelParamTraversal(lambda path, _: 'kernel' in path)
  for traversal in (optimizers.PathTraversal('kernel'), by_filter):
    assert isinstance(traversal, optimizers.Traversal)
    assert list(traversal.iterate(tree)) == [3, 1]
    updated = traversal.update(lambda x: 10 * x, tree)
    assert updated == flax.core.freeze({'b': {'kernel': 10, 'scale': 2}, 'a': {'kernel': 30}})
    assert isinstance(updated, flax.core.FrozenDict)


_LABELS = {'encoder': 'matrix', 'decoder': {'mlp': {'kernel': 'matrix'}, 'norm': 'still'}, 'token_embedder': 'vector',
           'temperature': 'still'}


@pytest.mark.parametrize('labels', [
    _LABELS, flax.core.freeze(_LABELS), lambda params: _LABELS,
    lambda params: tree_utils.map_with_names(
        lambda path, leaf: 'vector' if leaf.size > 100 else 'still' if path in ('decoder/norm/scale', 'temperature')
        else 'matrix', params),
    [('temperature|decoder/norm', 'still'), ('embedding', 'vector'), ('', 'matrix')],
    adafactor.HParamMap([('temperature|decoder/norm', 'still'), ('embedding', 'vector'), ('', 'matrix')]),
])
def test_optimizers_by_label(labels):
  optimizer_def = optimizers.partition({'matrix': optimizers.sgd(0.5), 'vector': optimizers.adam(0.1), 'still': None},
                                       labels)
  assert optimizer_def.part_names == ('matrix', 'vector')
  optimizer = optimizer_def.create(_random(0))
  updated = optimizer.apply_gradient(jax.tree.map(jnp.ones_like, _random(0)))
  moved = {name: float(np.mean(old - new)) for (name, new), old in zip(
      tree_utils.named_leaves(updated.target), jax.tree.leaves(optimizer.target), strict=True)}
  for name, distance in moved.items():
    want = 0.1 if name.startswith('token') else 0.0 if name in ('decoder/norm/scale', 'temperature') else 0.5
    np.testing.assert_allclose(distance, want, atol=1e-6, err_msg=name)
  names = tree_utils.flatten_dict(updated.state_dict()['state'])
  assert 'param_states/optimizer:vector/0/mu/token_embedder/embedding' in names


def test_the_same_labels_in_optax_train_the_same():
  labels = lambda params: jax.tree.map(lambda p: 'matrix' if p.ndim >= 2 else 'vector', params)
  ours = optimizers.partition({'matrix': optimizers.adam(0.1), 'vector': optimizers.sgd(0.2, momentum=0.5)}, labels)
  theirs = optimizers.OptaxWrapper(
      optax.partition({'matrix': optax.adam(0.1), 'vector': optax.sgd(0.2, momentum=0.5)}, labels))
  trained = (jax.tree.leaves(_train(_create(optimizer_def)).target) for optimizer_def in (ours, theirs))
  for got, want in zip(*trained, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


# ---- Hyper-parameters and learning rates. ----

_OWN_SCHEDULE = optax.constant_schedule(0.01)


@pytest.mark.parametrize('left,right,needs,owns,moved_by_trainer', [
    (adafactor.Adafactor, optimizers.adamw, True, False, (True, True)),
    (adafactor.Adafactor, lambda: optimizers.adamw(0.01), True, False, (True, False)),
    (lambda: adafactor.Adafactor(0.01), optimizers.adamw, True, False, (False, True)),
    (lambda: adafactor.Adafactor(0.01), adafactor.Adafactor, True, False, (False, True)),
    (lambda: adafactor.Adafactor(0.01), lambda: adafactor.Adafactor(_OWN_SCHEDULE), False, True, (True, True)),
    (lambda: adafactor.Adafactor(0.01), lambda: optimizers.adamw(_OWN_SCHEDULE), False, True, (True, False)),
    (lambda: optimizers.OptaxWrapper(optax.sgd(0.1)), lambda: optimizers.sgd(0.1), False, True, (False, False)),
    (lambda: optimizers.OptaxWrapper(optax.sgd(0.1)), lambda: optimizers.OptaxWrapper(optax.adam(0.1)), False, False,
     (False, False)),
])
def test_every_learning_rate_has_one_owner(left, right, needs, owns, moved_by_trainer):
  optimizer_def = optimizers.MultiOptimizer([('a', left()), ('b', right())])
  assert (optimizer_def.needs_learning_rate, optimizer_def.owns_learning_rate) == (needs, owns)
  assert optimizer_def.uses_learning_rate == any(moved_by_trainer)
  params = {'a': jnp.ones([3]), 'b': jnp.ones([3])}
  optimizer, grads = optimizer_def.create(params), params
  if needs:
    with pytest.raises(ConfigError, match='learning_rate_fn'):
      optimizer.apply_gradient(grads)
  small, large = (optimizer.apply_gradient(grads, learning_rate=rate).target for rate in (1e-3, 1e-1))
  assert tuple(not np.array_equal(small[name], large[name]) for name in ('a', 'b')) == moved_by_trainer


def test_one_rate_overrides_those_of_all_parts():
  optimizer_def = optimizers.MultiOptimizer([('a', adafactor.Adafactor(0.3)), ('b', adafactor.Adafactor(0.4))])
  assert [hp.learning_rate for hp in optimizer_def.hyper_params] == [0.3, 0.4]
  assert [hp.learning_rate for hp in optimizer_def.update_hyper_params(learning_rate=0.1)] == [0.1, 0.1]


def test_hyper_params_of_every_part():
  optimizer_def = optimizers.MultiOptimizer([
      ('a', adafactor.Adafactor()), ('b', adafactor.Adafactor(decay_rate=0.5)), ('c', optimizers.sgd()),
      ('d', optimizers.MultiOptimizer([('d', adafactor.Adafactor(epsilon2=0.5))]))])
  updated = optimizer_def.update_hyper_params(learning_rate=0.1, decay_rate=0.7)
  assert [hp.learning_rate for hp in (*updated[:3], *updated[3])] == [0.1] * 4
  assert [hp.decay_rate for hp in (*updated[:2], *updated[3])] == [0.7] * 3 and updated[3][0].epsilon2 == 0.5
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
      seen.update(extra, loss=extra['value_fn'](doubled), objective=extra['obj_fn'](doubled),
                  grads=extra['grad_fn'](doubled, 3))
      return params, state

    def metrics(self, state):
      return {'steps': state.step}

    def report(self, values):
      return [f'{name} is {value}' for name, value in values.items()]

    def eval_params(self, params, state):
      return jax.tree.map(lambda p: p + state.step, params)

    def trainer_refusal(self, state):
      return 'too curious'

  optimizer_def = optimizers.MultiOptimizer(
      [('^a', optimizers.sgd(0.1)), ('^b', Curious())], part_names=['plain', 'nosy'])
  assert set(optimizer_def.extra_args) == set(optimizers.EXTRA_ARGS)
  params = {'a': jnp.float32(1.0), 'b': {'x': jnp.float32(3.0)}, 'c': jnp.float32(10.0)}
  loss = lambda p: p['a'] + p['b']['x'] * p['c']
  optimizer = optimizer_def.create(params)
  updated = optimizer.apply_gradient(
      params, value=loss(params), grad=params, value_fn=loss, obj_fn=loss,
      grad_fn=lambda p, number: jax.tree.map(lambda g: number * g, jax.grad(loss)(p)))
  assert seen['value'] == 31 and seen['loss'] == seen['objective'] == 61
  # The other parameters are constants for the part.
  assert seen['grad'] == {'b': {'x': 3.0}} and seen['grads'] == {'b': {'x': 30.0}}
  assert optimizer_def.metrics(updated.state) == {'nosy/steps': 1}
  assert optimizer_def.report({'nosy/steps': 1.0, 'plain/x': 2.0}) == ['part nosy: steps is 1.0']
  assert optimizer_def.eval_params(params, updated.state) == {**params, 'b': {'x': 4.0}}
  assert optimizer_def.trainer_refusal(updated.state).endswith('too curious')
  assert "part 'nosy'" in optimizer_def.trainer_refusal(updated.state)


@pytest.mark.parametrize('make', [optimizers.polyak_sgd, optimizers.schedule_free_adamw])
def test_parts_that_need_more_than_gradients_train_as_alone(make):
  params = {'a': jnp.asarray([1.0, -2.0]), 'b': jnp.asarray([0.5])}
  loss = lambda p: jnp.sum(p['a'] ** 2) + jnp.sum(p['a']) * jnp.sum(p.get('b', params['b']))
  alone, mixed = make().create({'a': params['a']}), optimizers.MultiOptimizer([('a', make())]).create(params)
  for _ in range(2):
    results = []
    for optimizer in (alone, mixed):
      value, grads = jax.value_and_grad(loss)(optimizer.target)
      results.append(optimizer.apply_gradient(grads, value=value, value_fn=loss, learning_rate=0.1))
    alone, mixed = results
  np.testing.assert_array_equal(mixed.target['a'], alone.target['a'])
  evaluated = mixed.optimizer_def.eval_params(mixed.target, mixed.state)
  np.testing.assert_array_equal(
      evaluated['a'], alone.optimizer_def.eval_params(alone.target, alone.state)['a'])
  np.testing.assert_array_equal(evaluated['b'], params['b'])


@pytest.mark.full
@pytest.mark.parametrize('row', [name for name, row in ROWS.items() if not row.per_example])
def test_every_optimizer_serves_as_a_part(row):
  rows, params, axes = ROWS[row], _random(0), _AXES
  optimizer_def = optimizers.MultiOptimizer([(['encoder', 'decoder', 'temperature'], rows.factory())])
  optimizer_def.set_param_axes(axes)
  loss = lambda p: sum(jnp.sum(leaf ** 2) for leaf in jax.tree.leaves(p))
  known = {'value': jnp.float32(1.0), 'grad': params, 'value_fn': loss, 'obj_fn': loss,
           'grad_fn': lambda p, _: jax.grad(loss)(p)}

  def update(optimizer, grads):
    known['grad'] = grads
    return optimizer.apply_gradient(grads, **rows.overrides, **{name: known[name] for name in rows.needs})

  optimizer = jax.eval_shape(optimizer_def.create, params)
  updated = jax.eval_shape(update, optimizer, params)
  assert jax.tree.structure(updated) == jax.tree.structure(optimizer)
  assert [(x.shape, x.dtype) for x in jax.tree.leaves(updated)] == [
      (x.shape, x.dtype) for x in jax.tree.leaves(optimizer)]
  assert jax.tree.structure(optimizer_def.derive_logical_axes(optimizer, axes)) == jax.tree.structure(optimizer)
  numbered = jax.tree.unflatten(jax.tree.structure(optimizer), range(len(jax.tree.leaves(optimizer))))
  assert jax.tree.leaves(optimizer.restore_state(numbered.state_dict())) == jax.tree.leaves(numbered)


def test_the_log_tells_once_what_each_part_trains(caplog):
  optimizer_def = optimizers.MultiOptimizer([('kernel', optimizers.sgd(0.1))])
  with caplog.at_level('INFO', logger='t5x_lite.optimizers'):
    for _ in range(2):
      optimizer_def.init_state(_small())
  assert [record.getMessage() for record in caplog.records] == [
      "MultiOptimizer: part '0' (sgd on PathTraversal(['kernel'])) trains 1 arrays.",
      'MultiOptimizer: no part trains the other 1 arrays; they keep their values.']


# ---- Logical axes. ----


def test_axes_reach_the_parts_before_and_after_the_parameters_are_known():
  by_path, by_size = _adafactor(), _adafactor()
  optimizers.MultiOptimizer([('kernel', by_path)]).set_param_axes(_AXES)
  assert set(by_path.hyper_params.factor_map) == {
      'encoder/mlp/kernel', 'encoder/attention/kernel', 'decoder/mlp/kernel'}
  # The axes do not tell sizes.
  optimizer_def = optimizers.MultiOptimizer([(optimizers.ModelParamTraversal(lambda _, p: p.size > 90), by_size)])
  optimizer_def.set_param_axes(_AXES)
  assert by_size.hyper_params.factor_map is None
  optimizer = optimizer_def.create(_random(0))
  assert 'encoder/attention/kernel' in by_size.hyper_params.factor_map and len(by_size.hyper_params.factor_map) == 4
  axes = optimizer_def.derive_logical_axes(jax.eval_shape(lambda: optimizer), _AXES)
  assert jax.tree.structure(axes) == jax.tree.structure(optimizer)
  flat = tree_utils.flatten_dict(axes.state_dict()['state']['param_states'])
  assert flat['encoder/attention/kernel/v_row'] == P('embed', 'layers')
  assert 'temperature/v' not in flat


def test_one_optimizer_object_may_stand_in_two_parts():
  shared = _adafactor()
  optimizer = _create(optimizers.MultiOptimizer([('encoder', shared), ('decoder', shared)]))
  apart = _create(optimizers.MultiOptimizer([('encoder', _adafactor()), ('decoder', _adafactor())]))
  _assert_same(optimizer.state_dict(), apart.state_dict())
  left, right = optimizer.optimizer_def.hyper_params
  assert set(left.factor_map) == {'encoder/mlp/kernel', 'encoder/attention/kernel', 'encoder/norm/scale'}
  assert set(right.factor_map) == {'decoder/mlp/kernel', 'decoder/norm/scale'}


def test_definitions_compare_by_their_parts():
  make = lambda **options: optimizers.MultiOptimizer([('kernel', _adafactor(**options)), ('scale', _adafactor())])
  assert make() == make() and hash(make()) == hash(make()) and make() != make(beta1=0.5)
  assert jax.tree.structure(make().create(_small())) == jax.tree.structure(make().create(_small()))


def _small():
  return {'kernel': jnp.ones([2, 3]), 'scale': jnp.ones([3])}


# ---- State dicts. ----


def test_state_dict_of_adafactors_is_that_of_t5x():
  optimizer_def = optimizers.MultiOptimizer([('kernel', adafactor.Adafactor(min_dim_size_to_factor=2)),
                                             ('scale', adafactor.Adafactor(factored=False, beta1=0.9))])
  trained = optimizer_def.create({'layer': {**_small(), 'frozen': jnp.ones([2])}})
  trained = trained.apply_gradient({'layer': {**_small(), 'frozen': None}}, learning_rate=0.1)
  state_dict = trained.state_dict()
  names = {name: tuple(leaf.shape) for name, leaf in tree_utils.flatten_dict(state_dict).items()}
  assert names == {
      'target/layer/kernel': (2, 3), 'target/layer/scale': (3,), 'target/layer/frozen': (2,), 'state/step': (),
      'state/param_states/layer/kernel/v_row': (2,), 'state/param_states/layer/kernel/v_col': (3,),
      'state/param_states/layer/kernel/v': (1,), 'state/param_states/layer/kernel/m': (1,),
      'state/param_states/layer/scale/v_row': (1,), 'state/param_states/layer/scale/v_col': (1,),
      'state/param_states/layer/scale/v': (3,), 'state/param_states/layer/scale/m': (3,)}
  # T5X has None for what it does not train.
  state_dict['state']['param_states']['layer']['frozen'] = None
  fresh = optimizer_def.create(jax.tree.map(jnp.zeros_like, trained.target))
  _assert_same(fresh.restore_state(state_dict), trained)


@pytest.mark.parametrize('make', [
    _mix,
    lambda: optimizers.MultiOptimizer([('encoder', _mix_of_kernels()), ('decoder', optimizers.adam())]),
    lambda: optimizers.partition({'a': optimizers.chain([optax.clip(1.0), optimizers.adam()]), 'b': _adafactor()},
                                 [('encoder', 'a'), ('', 'b')]),
])
def test_state_dicts_restore(make):
  fresh = _create(make())
  trained = _train(fresh)
  state_dict = trained.state_dict()
  flat = tree_utils.flatten_dict(state_dict, keep_empty=True)
  assert len(flat) == len(jax.tree.leaves(trained))
  restored = fresh.restore_state(state_dict)
  assert jax.tree.structure(restored) == jax.tree.structure(trained)
  _assert_same(restored, trained)
  for name in flat:
    damaged = dict(flat)
    del damaged[name]
    with pytest.raises(CheckpointError, match='is missing') as error:
      fresh.restore_state(tree_utils.unflatten_dict(damaged))
    assert name in str(error.value)


def _mix_of_kernels():
  return optimizers.MultiOptimizer([('mlp', optimizers.adam()), ('attention', _adafactor())])


@pytest.mark.parametrize('other,message', [
    (lambda: optimizers.MultiOptimizer([('kernel', adafactor.Adafactor()), ('scale', optimizers.sgd(momentum=0.9))]),
     r"state/param_states/optimizer:1/0/count \(part '1' \(sgd on .*'scale'.* keeps no such value"),
    (lambda: optimizers.MultiOptimizer([('kernel', adafactor.Adafactor())]),
     r'state/param_states/optimizer:1/0/count \(no part trains such a parameter or has this name\)'),
    (lambda: optimizers.MultiOptimizer([('', optimizers.adam())]),
     r"state/param_states/kernel/v_row \(part '0' \(adam on .* trains this parameter and keeps its state at "
     'state/param_states/optimizer:0'),
    (lambda: optimizers.MultiOptimizer([('', adafactor.Adafactor())]), 'state/param_states/optimizer:1/0/count'),
    (lambda: optimizers.adam(), 'state/param_states/kernel'),
    (lambda: adafactor.Adafactor(), 'state/param_states/optimizer:1'),
])
def test_state_of_another_mix_is_refused(other, message):
  mix = optimizers.MultiOptimizer([('kernel', adafactor.Adafactor()), ('scale', optimizers.adam())])
  with pytest.raises(CheckpointError, match=message):
    other().create(_small()).restore_state(mix.create(_small()).state_dict())


def test_missing_state_names_its_part():
  mix = lambda scale: optimizers.MultiOptimizer([('kernel', adafactor.Adafactor()), ('scale', scale)])
  state_dict = mix(optimizers.sgd()).create(_small()).state_dict()
  with pytest.raises(CheckpointError, match=r"optimizer:1/0/count is missing \(part '1' \(adam on "):
    mix(optimizers.adam()).create(_small()).restore_state(state_dict)


# ---- Checkpoints and training. ----


def _variables():
  axes = jax.tree.map(lambda spec: flax.linen.partitioning.AxisMetadata(tuple(spec)), _AXES)
  return {'params': _random(0), 'params_axes': _suffixed(axes)}


def _suffixed(tree):
  return {f'{key}_axes' if not isinstance(value, dict) else key: _suffixed(value) if isinstance(value, dict) else value
          for key, value in tree.items()}


def test_a_checkpoint_of_a_mix_goes_on_bitwise(tmp_path):
  state = train_state.FlaxOptimTrainState.create(_mix(), _variables())

  @jax.jit
  def step_fn(state, seed):
    grads = jax.tree.map(lambda p: jnp.sin(p + seed), state.params)
    return state.apply_gradient(grads, learning_rate=0.05)

  for seed in range(2):
    state = step_fn(state, seed)
  with checkpoints.CheckpointManager(tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()) as manager:
    manager.save(2, state.state_dict())
    restored = manager.restore(None, jax.eval_shape(lambda: state).state_dict())
  fresh = train_state.FlaxOptimTrainState.create(_mix(), _variables())
  again = fresh.restore_state(restored.state)
  _assert_same(again, state)
  for seed in range(2, 5):
    state, again = step_fn(state, seed), step_fn(again, seed)
  _assert_same(again, state)
  # Another mix does not fit.
  other = train_state.FlaxOptimTrainState.create(
      optimizers.MultiOptimizer([('kernel$', _adafactor()), ('scale$', optimizers.adamw())]), _variables())
  with pytest.raises(CheckpointError, match='state/param_states/optimizer:2/0/trace/token_embedder/embedding'):
    checkpoints.restore_checkpoint(restored.path, jax.eval_shape(lambda: other).state_dict())


@pytest.mark.full
def test_a_run_resumes_bitwise(tmp_path):

  def model():
    optimizer_def = optimizers.MultiOptimizer([
        ('logits', adafactor.Adafactor(min_dim_size_to_factor=4)), ('embedding', optimizers.adamw(0.01))])
    return toy_run.model(optimizer_def)

  kwargs = dict(train_eval_dataset_cfg=None, infer_eval_dataset_cfg=None, save={'period': 4})
  toy_run.train(tmp_path / 'whole', 8, model=model(), **kwargs)
  toy_run.train(tmp_path / 'halves', 4, model=model(), **kwargs)
  toy_run.train(tmp_path / 'halves', 8, model=model(), **kwargs)
  whole, halves = (checkpoints.load(tmp_path / name / 'checkpoint_8') for name in ('whole', 'halves'))
  _assert_same(halves, whole)
  names = tree_utils.flatten_dict(whole['state']['param_states'])
  assert any(name.startswith('optimizer:1/0/mu/') for name in names) and any(n.endswith('/v_row') for n in names)


@pytest.mark.parametrize('pairs,refused', [
    ([('.', optimizers.adamw)], None),
    ([('kernel$', optimizers.adamw), ('scale$', _adafactor)], 'state/param_states/optimizer:0/0/mu/'),
    ([('decoder/.*kernel$', _adafactor)], 'state/param_states/decoder/layers_0/'),
])
def test_into_the_other_parameter_layout(pairs, refused):
  tokens = jnp.ones((1, 4), jnp.int32)

  def create(layout):
    config = t5.T5Config(
        vocab_size=8, emb_dim=4, num_heads=1, num_encoder_layers=1, num_decoder_layers=1, head_dim=4, mlp_dim=8,
        mlp_activations=('relu',), param_layout=layout, relpos_bias_tables='per_layer')
    optimizer_def = optimizers.MultiOptimizer([(pattern, make()) for pattern, make in pairs])
    shapes = jax.eval_shape(lambda: train_state.FlaxOptimTrainState.create(optimizer_def, t5.Transformer(config).init(
        jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)))
    rng = np.random.default_rng(0)
    return config, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)

  (_, stored), (config, wanted) = create('t5'), create('scalable_t5')
  fn = lambda tree: param_layouts.convert(tree, 't5', 'scalable_t5', config)
  transform = checkpoints.convert_param_trees(fn)
  if refused:
    message = f'cannot follow a change of parameter layout: .*{refused}.*assignment_map'
    with pytest.raises(CheckpointError, match=message):
      transform(stored.state_dict(), wanted.state_dict())
    return
  converted = wanted.restore_state(transform(stored.state_dict(), wanted.state_dict()))
  moments = lambda state: state.param_states.parts[0][0].mu
  _assert_same(moments(converted), fn(moments(stored)))


# ---- gin. ----


@pytest.mark.parametrize('name,want', [
    ('multi_optimizer', {'0': '/kernel', '1': '/embedding /rel_embedding /scale'}),
    ('multi_optimizer_by_label', {'matrix': '/kernel', 'vector': '/rel_embedding /scale'}),
])
def test_gin_files(name, want):
  files = ['recipes/keyword_cloze.gin', f'optimizers/{name}.gin']
  flags = [gin_syntax.read_flag('MODEL_DIR', 'runs/x', '--gin.MODEL_DIR=runs/x')]
  try:
    model = gin_utils.load('t5x_lite.apps.train.train', gin_utils.read(files, flags)).argument('model')
  finally:
    gin.clear_config()
  assert model.optimizer_def.needs_learning_rate
  shapes = {'encoder_input_tokens': (2, 8), 'decoder_input_tokens': (2, 8), 'decoder_target_tokens': (2, 8)}
  state = jax.eval_shape(lambda: train_state.FlaxOptimTrainState.create(
      model.optimizer_def, model.get_initial_variables(jax.random.key(0), shapes)))
  assert jax.tree.structure(state.as_logical_axes()) == jax.tree.structure(state)
  trained = dict(zip(model.optimizer_def.part_names, state.param_states.paths))
  last_names = {part: sorted({f"/{path.split('/')[-1]}" for path in paths}) for part, paths in trained.items()}
  assert {part: ' '.join(names) for part, names in last_names.items()} == want
  frozen = {path.split('/')[0] for path in set(_flat(state.params)) - set().union(*trained.values())}
  assert frozen == (set() if name == 'multi_optimizer' else {'encoder', 'token_embedder'})


# ---- Refusals. ----


@pytest.mark.parametrize('make,message', [
    (lambda: optimizers.MultiOptimizer([]), 'one at least'),
    (lambda: optimizers.MultiOptimizer({'a': optimizers.sgd()}), 'optimizers.partition'),
    (lambda: optimizers.MultiOptimizer([optimizers.sgd()]), r'entry 0 .* expected a pair'),
    (lambda: optimizers.MultiOptimizer([(optimizers.sgd(), 'kernel')]), 'selects no parameters'),
    (lambda: optimizers.MultiOptimizer([('kernel', 'scale')]), 'The traversal comes first'),
    (lambda: optimizers.MultiOptimizer([('kernel', optimizers.sgd)]), 'has sgd for an optimizer.* Call it first'),
    (lambda: optimizers.MultiOptimizer([('kernel', optax.sgd(0.1))]), 'has a bare optax transformation .*OptaxWrapper'),
    (lambda: optimizers.MultiOptimizer([('kernel', None)]), 'To freeze parameters leave the pair out'),
    (lambda: optimizers.MultiOptimizer([(lambda path: True, optimizers.sgd())]), 'ModelParamTraversal'),
    (lambda: optimizers.MultiOptimizer([('(', optimizers.sgd())]), 'regular expression'),
    (lambda: optimizers.MultiOptimizer([([], optimizers.sgd())]), 'patterns'),
    (lambda: optimizers.MultiOptimizer([('a', optimizers.sgd())], part_names=['a', 'b']), 'expected 1 different'),
    (lambda: optimizers.MultiOptimizer([('a', optimizers.sgd())], part_names=['a/b']), "'a/b'"),
    (lambda: optimizers.ModelParamTraversal('kernel'), 'PathTraversal'),
    (lambda: optimizers.partition([], 'a'), 'expected a mapping'),
    (lambda: optimizers.partition({'a': None}, 'a'), 'nothing would be trained'),
    (lambda: optimizers.partition({'kernl': optimizers.sgd()}, [('.', 'kernel')]), "Did you mean 'kernl'"),
    (lambda: optimizers.partition({'a': optimizers.sgd()}, [('(', 'a')]), 'regular expression'),
    (lambda: _create_small([('kernel', optimizers.sgd()), ('k.r', optimizers.adam())]),
     r"'kernel' is selected by part '0' \(sgd on .*'kernel'.*\) and by part '1' \(adam on "),
    (lambda: _create_small([('kernel', optimizers.sgd()), ('karnel', optimizers.adam())]),
     r"part '1' \(adam on .*'karnel'.*\) selects none of the 2 parameters"),
    (lambda: _create_small([(_flax_items('encoder'), optimizers.sgd())]), "asks for 'encoder'"),
    (lambda: _create_small([('optimizer:', optimizers.sgd())], {'optimizer:0': jnp.ones([2])}), 'rename it'),
    (lambda: _create_small([(types.SimpleNamespace(iterate=iter, update=lambda fn, tree: {}), optimizers.sgd())]),
     'must return the tree'),
    (lambda: optimizers.partition({'a': optimizers.sgd()}, lambda p: {'kernel': 'a', 'scale': 'b'}).create(_small()),
     "'scale' has the label 'b'"),
    (lambda: optimizers.partition({'a': optimizers.sgd()}, {'kernel': 'a'}).create(_small()), "'scale' no label"),
    (lambda: optimizers.partition({'a': optimizers.sgd(), 'b': optimizers.sgd()}, 'a').create(_small()),
     "part 'b' .* selects none"),
    (lambda: optimizers.MultiOptimizer([('', adafactor.Adafactor())]).update_hyper_params(decay_rat=0.1),
     "Did you mean 'decay_rate'"),
    (lambda: optimizers.MultiOptimizer([('', adafactor.Adafactor())]).update_hyper_params(hyper_params=[]),
     'each of the 1 parts'),
    (lambda: optimizers.MultiOptimizer([('', adafactor.Adafactor())]).update_hyper_params(learning_rate=-1.0),
     'not negative'),
    (lambda: optimizers.MultiOptimizer([('k', optimizers.sgd(0.1))]).create(_small()).apply_gradient({'scale': 1.0}),
     "no gradient of 'kernel'"),
])
def test_refusals(make, message):
  with pytest.raises(ConfigError, match=message):
    make()


def _create_small(pairs, params=None):
  return optimizers.MultiOptimizer(pairs).create(_small() if params is None else params)
