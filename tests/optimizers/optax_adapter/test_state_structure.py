"""States of odd containers, keys and changing structure: trained, saved, restored and resumed bitwise, or rejected."""

import collections
import dataclasses
import functools
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import checkpoints
from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError, ConfigError
from tests.apps.train import toy_run

_AXES = {'dense': {'kernel': P('embed', 'mlp'), 'bias': P('mlp')}}
_MESH_AXES = {'embed': 'data', 'mlp': 'model'}


class _Holder(NamedTuple):
  """State of a user's transformation."""

  held: Any


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=['mean', 'count'], meta_fields=['name']
)
@dataclasses.dataclass
class _Mean:
  """A dataclass that JAX knows and Flax does not."""

  mean: Any
  count: Any
  name: str = 'mean'


class _Attributes(dict):
  """A dict that JAX does not know."""


optimizers.OptaxStatePartitionRules.register(_Holder, held='matched')


def _holding(init_fn, update_fn):
  """Return a transformation whose state is a `_Holder`; `update_fn` maps (updates, held) to (updates, held)."""

  def update(updates, state, params=None):
    del params
    updates, held = update_fn(updates, state.held)
    return updates, _Holder(held)

  return optax.GradientTransformation(lambda params: _Holder(init_fn(params)), update)


def _momentum_in(make, get):
  """Return momentum that is kept in a container: `make` makes it of the momentum, and `get` takes it out again."""

  def update(updates, held):
    momentum = jax.tree.map(lambda old, new: 0.9 * old + new, get(held), updates)
    return momentum, make(momentum)

  return _holding(lambda params: make(jax.tree.map(jnp.zeros_like, params)), update)


def _last_norm(updates, held):
  del held
  return updates, {
    'last': optax.tree.norm(updates),
    'means': [updates['dense']['bias'].mean(keepdims=True)],
  }


def _monitor():
  return optax.monitor(
    {
      'norm': optax.tree.norm,
      'updates': lambda updates: updates,
      # Of bools, which begin as such and become float32.
      'clipped': optax.measure_with_ema(lambda updates: optax.tree.norm(updates) > 1.0, decay=0.9),
    }
  )


_CHAINS = {
  'named_chain': lambda: optax.named_chain(('clip', optax.clip(1.0)), ('adam', optax.adam(0.1))),
  'keys': lambda: optax.named_chain(
    *(
      (name, optax.trace(0.5))
      for name in ('a/b', 'a.b', 'a', 'a%2Fb', '.', '..', '', 'é [0]', '%', "'", 'b', '0')
    )
  ),
  'monitor': lambda: optax.chain(_monitor(), optax.trace(0.9)),
  'masked_monitor': lambda: optax.chain(
    optax.masked(
      optax.named_chain(('b', _monitor()), ('a', optax.trace(0.9))),
      {'dense': {'kernel': True, 'bias': False}},
    )
  ),
  'snapshot': lambda: optax.chain(
    optax.snapshot(
      'all/of it', lambda updates: collections.OrderedDict(z=updates, a=optax.tree.norm(updates))
    ),
    optax.trace(0.9),
  ),
  'ordered': lambda: _momentum_in(
    lambda tree: collections.OrderedDict(z={'momentum': tree}, a=jnp.zeros([])),
    lambda held: held['z']['momentum'],
  ),
  'default_dict': lambda: _momentum_in(
    lambda tree: collections.defaultdict(list, m=[tree, None, ()]), lambda held: held['m'][0]
  ),
  'dataclass_in_dict': lambda: _momentum_in(
    lambda tree: {
      'b': collections.OrderedDict(m=_Mean(tree, jnp.int32(3))),
      'a': _Holder(jnp.ones([])),
    },
    lambda held: held['b']['m'].mean,
  ),
  'added_by_the_first_update': lambda: optax.chain(
    _holding(lambda params: None, _last_norm), optax.trace(0.9)
  ),
  'filled_by_the_first_update': lambda: optax.chain(
    _holding(lambda params: {'means': ()}, _last_norm), optax.trace(0.9)
  ),
}


def _random_params(seed):
  rng = np.random.default_rng(seed)
  return {
    'dense': {
      'kernel': jnp.asarray(rng.normal(size=[4, 8]), jnp.float32),
      'bias': jnp.asarray(rng.normal(size=[8]), jnp.float32),
    }
  }


def _mesh(shape):
  devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
  return Mesh(devices, ('data', 'model'), axis_types=(AxisType.Auto,) * 2)


def _assert_same(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for (name, a), b in zip(tree_utils.named_leaves(left), jax.tree.leaves(right), strict=True):
    np.testing.assert_array_equal(a, b, err_msg=name)


def _check_resumes(transformation, mesh, directory):
  """Make 4 updates, and 2 from a checkpoint after 2; returns the last state."""
  optimizer_def = optimizers.OptaxWrapper(transformation)

  def create(params):
    return optimizer_def.create(params)

  shapes = jax.eval_shape(create, _random_params(0))
  specs = optimizer_def.derive_logical_axes(shapes, _AXES)
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, P(*map(_MESH_AXES.get, spec))), specs)
  optimizer = jax.jit(create, out_shardings=shardings)(_random_params(0))
  _assert_same(optimizer_def.create(_random_params(0)), optimizer)

  def update(optimizer, grads):
    return optimizer.apply_gradient(grads)

  step = (
    jax.jit(update, donate_argnums=0, out_shardings=shardings)
    .lower(optimizer, _random_params(1))
    .compile()
  )
  with checkpoints.CheckpointManager(
    str(directory), save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    for number in range(1, 5):
      optimizer = step(optimizer, _random_params(number))
      if number == 2:
        manager.save(2, optimizer.state_dict())
    names = {
      name: leaf.sharding for name, leaf in tree_utils.flatten_dict(optimizer.state_dict()).items()
    }
    assert len(names) == len(jax.tree.leaves(optimizer))
    restored = manager.restore(2, shapes.state_dict(), shardings=tree_utils.unflatten_dict(names))
  resumed = shapes.restore_state(restored.state)
  for number in (3, 4):
    resumed = step(resumed, _random_params(number))
  _assert_same(resumed, optimizer)
  return jax.device_get(optimizer)


@pytest.mark.parametrize(
  'name',
  [
    name
    if name
    in ('keys', 'masked_monitor', 'snapshot', 'dataclass_in_dict', 'filled_by_the_first_update')
    else pytest.param(name, marks=pytest.mark.full)
    for name in _CHAINS
  ],
)
def test_a_chain_resumes_bitwise(name, tmp_path):
  last = _check_resumes(_CHAINS[name](), _mesh((4, 2)), tmp_path)
  if name == 'keys':
    states = last.state.param_states
    assert isinstance(states, collections.OrderedDict) and list(states)[:2] == ['a/b', 'a.b']
  # The updates are those of optax alone.
  transformation, params = _CHAINS[name](), _random_params(0)
  state = transformation.init(params)
  for number in range(1, 5):
    updates, state = transformation.update(_random_params(number), state, params)
    params = optax.apply_updates(params, updates)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), last.target, params
  )


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[] if name in ('keys', 'masked_monitor') else pytest.mark.full)
    for name in _CHAINS
  ],
)
def test_a_chain_resumes_bitwise_on_one_device(name, tmp_path):
  _check_resumes(_CHAINS[name](), _mesh((1, 1)), tmp_path)


def test_measurements_are_those_of_optax():
  optimizer_def = optimizers.OptaxWrapper(optax.chain(_monitor(), optax.sgd(0.1)))
  optimizer = optimizer_def.create(_random_params(0))
  np.testing.assert_array_equal(optax.tree.get(optimizer.state.param_states, 'norm'), 0.0)
  optimizer = optimizer.apply_gradient(_random_params(1))
  norm = optax.tree.norm(_random_params(1))
  np.testing.assert_allclose(optax.tree.get(optimizer.state.param_states, 'norm'), norm, rtol=1e-6)
  np.testing.assert_allclose(
    optax.tree.get(optimizer.state.param_states, 'clipped'), 1.0, rtol=1e-6
  )


def _starts_with_the_first(updates, held):
  return updates, updates if held is None else jax.tree.map(
    lambda old, new: (old + new) / 2, held, updates
  )


def _scales_all_but_the_first(updates, held):
  return updates if held is None else jax.tree.map(lambda update: update / 2, updates), jnp.zeros(
    []
  )


_REJECTED = {
  'reads the added arrays': (
    lambda params: None,
    _starts_with_the_first,
    "first.*read.*'1/held/dense/bias'",
  ),
  'depends on the presence of an array': (
    lambda params: None,
    _scales_all_but_the_first,
    "first update .*'1/held' is added",
  ),
  'grows': (
    lambda params: (jnp.zeros([]),),
    lambda updates, held: (updates, (*held, held[0])),
    "'1/held/1' is added",
  ),
  'shrinks': (
    lambda params: [jnp.ones([2]), jnp.ones([])],
    lambda updates, held: (updates, held[1:]),
    "'1/held/1' is dropped",
  ),
  'gets longer': (
    lambda params: jnp.ones([2]),
    lambda updates, held: (updates, jnp.append(held, 1.0)),
    r"'1/held' changes from float32\[2\] to float32\[3\]",
  ),
  'gets narrower': (
    lambda params: jnp.ones([]),
    lambda updates, held: (updates, jnp.int32(held)),
    r"'1/held' changes from float32\[\] to int32\[\]",
  ),
  'dict JAX does not know': (
    lambda params: _Attributes(a=jnp.ones([])),
    lambda updates, held: (updates, held),
    'does not fit the parameters .*not a valid JAX array',
  ),
}


@pytest.mark.parametrize('name', _REJECTED)
def test_a_state_that_cannot_be_compiled_is_rejected_before_the_first_update(name):
  init_fn, update_fn, message = _REJECTED[name]
  optimizer_def = optimizers.OptaxWrapper(
    optax.chain(optax.clip(1.0), _holding(init_fn, update_fn)), name='mine'
  )
  with pytest.raises(ConfigError, match=message):
    jax.eval_shape(optimizer_def.create, _random_params(0))


def test_a_monitor_that_optax_itself_cannot_update_is_rejected():
  wrapper = optax.apply_if_finite(optax.chain(_monitor(), optax.trace(0.9)), 3)
  with pytest.raises(ConfigError, match=r'optax.monitor inside .*Move the monitor outside'):
    jax.eval_shape(optimizers.OptaxWrapper(wrapper).create, _random_params(0))


def test_a_state_of_optax_that_an_update_changes_is_rejected():
  def update(updates, state, params=None):
    del params
    return updates, optax.TraceState((state.trace, state.trace))

  transformation = optax.GradientTransformation(
    lambda params: optax.TraceState(jnp.zeros([])), update
  )
  optimizer = optimizers.OptaxWrapper(transformation).create(_random_params(0))
  with pytest.raises(
    ConfigError, match="changes the structure of its state: the array 'trace' is dropped"
  ):
    jax.eval_shape(
      lambda optimizer, grads: optimizer.apply_gradient(grads), optimizer, _random_params(1)
    )


def test_keys_that_are_equal_as_strings_are_rejected():
  tree = {'a': collections.OrderedDict([(1, np.ones(1)), ('1', np.ones(1))])}
  with pytest.raises(ConfigError, match=r"OrderedDict .* equal as strings: \['1', '1'\]"):
    optimizers.to_state_dict(tree)


def test_messages_name_values_in_odd_containers():
  optimizer = optimizers.OptaxWrapper(_CHAINS['named_chain']()).create(_random_params(0))
  flat = tree_utils.flatten_dict(optimizer.state_dict())
  del flat['state/param_states/adam/0/mu/dense/bias']
  with pytest.raises(CheckpointError, match='state/param_states/adam/0/mu/dense/bias is missing'):
    optimizer.restore_state(tree_utils.unflatten_dict(flat))


def test_a_run_resumes_bitwise(tmp_path, capfd):
  # Of texts that are cut, which a run says and writes once, too.
  chain = optax.named_chain(
    ('clip/1', optax.clip(1.0)), ('watch', _monitor()), ('adam.w', optax.adam(0.05))
  )
  arguments = {
    'model': toy_run.model(optimizers.OptaxWrapper(chain)),
    'save': {'period': 2},
    'train_eval_dataset_cfg': None,
    'infer_eval_dataset_cfg': None,
    'trainer_kwargs': {'learning_rate_fn': None, 'num_microbatches': None},
    'train_dataset_cfg': dataclasses.replace(
      toy_run.dataset('train'), task_feature_lengths={'inputs': toy_run.LENGTH, 'targets': 3}
    ),
  }
  toy_run.train(tmp_path / 'whole', 4, **arguments)
  shutil.copytree(tmp_path / 'whole', tmp_path / 'resumed')
  shutil.rmtree(tmp_path / 'resumed/checkpoint_4')
  toy_run.train(tmp_path / 'resumed', 4, **arguments)
  toy_run.assert_same_run(tmp_path / 'whole', tmp_path / 'resumed', 4)
  assert capfd.readouterr().err.count("have 'targets' cut to 3 tokens") == 1
  fractions = [
    row
    for row in toy_run.lines(tmp_path / 'resumed')['train']
    if 'data/truncated_examples_fraction/targets' in row
  ]
  sizes = [
    len(example['targets'])
    for example in toy_run.TASK.table('train', {}).examples(0, np.arange(60))
  ]
  assert [row['step'] for row in fractions] == [
    0
  ] and 'data/truncated_tokens_fraction/inputs' not in fractions[0]
  # 256 examples are four epochs of 60, and 16 more.
  np.testing.assert_allclose(
    fractions[0]['data/truncated_examples_fraction/targets'],
    np.mean([size > 3 for size in sizes]),
    atol=0.05,
  )
