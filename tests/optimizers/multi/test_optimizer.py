"""MultiOptimizer: parts are what their optimizers are alone, selections, learning rates, state dicts, checkpoints."""

import flax.core
import flax.linen.partitioning
import flax.traverse_util
import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import adafactor
from t5x_lite import gin_utils
from t5x_lite import optimizers
from t5x_lite import train_state
from t5x_lite import tree_utils
from t5x_lite.configuration import syntax as gin_syntax
from tests.optimizers.contract_rows import ROWS
from tests.optimizers.multi import multi_cases as cases


def test_each_part_trains_as_its_optimizer_would_alone():
  trained = cases.train(cases.create(cases.mix()))
  alone = [
    ('encoder/mlp/kernel encoder/attention/kernel', cases.make_adafactor(beta1=0.9)),
    ('encoder/norm/scale decoder/norm/scale', optimizers.adamw(0.01, weight_decay=0.1)),
    ('token_embedder/embedding', optimizers.sgd(momentum=0.9)),
  ]

  def subtree(tree, paths):
    return tree_utils.unflatten_dict({path: cases.flat(tree)[path] for path in paths.split()})

  separate = {}
  for paths, optimizer_def in alone:
    optimizer_def = optimizer_def.with_param_axes(subtree(cases.AXES, paths))
    separate[paths] = optimizer_def.create(subtree(cases.random(0), paths))

  @jax.jit
  def step(separate, grads):
    return {
      paths: optimizer.apply_gradient(subtree(grads, paths), learning_rate=jnp.float32(0.05))
      for paths, optimizer in separate.items()
    }

  for seed in range(1, 4):
    separate = step(separate, cases.random(seed))
  got, num_compared = cases.flat(trained.target), 0
  for optimizer in separate.values():
    for path, want in cases.flat(optimizer.target).items():
      np.testing.assert_allclose(got[path], want, rtol=1e-6, atol=1e-7, err_msg=path)
      num_compared += 1
  assert num_compared == 5
  # The rest is not touched.
  for path in ('decoder/mlp/kernel', 'temperature'):
    np.testing.assert_array_equal(got[path], cases.flat(cases.random(0))[path], err_msg=path)
  assert trained.state.step == 3 and trained.state.step.dtype == jnp.int32


@pytest.mark.parametrize(
  'make', [lambda: adafactor.Adafactor(min_dim_size_to_factor=2), optimizers.adamw]
)
def test_one_part_over_all_is_the_optimizer_itself(make):
  several = {
    'itself': make(),
    'path': optimizers.MultiOptimizer([('', make())]),
    'flax': optimizers.MultiOptimizer([(flax.traverse_util.t_identity, make())]),
    'nested': optimizers.MultiOptimizer([('.*', optimizers.MultiOptimizer([('.', make())]))]),
    'label': optimizers.partition({'all': make()}, 'all'),
  }
  step = jax.jit(
    lambda several, grads: {
      name: optimizer.apply_gradient(grads, learning_rate=0.05)
      for name, optimizer in several.items()
    }
  )
  several = {name: optimizer_def.create(cases.small()) for name, optimizer_def in several.items()}
  for size in (1.0, 3.0):
    several = step(several, jax.tree.map(lambda p: size * p, cases.small()))
  whole = several.pop('itself')
  for trained in several.values():
    cases.assert_same(trained.target, whole.target)
    if trained.optimizer_def.has_param_wise_state:
      cases.assert_same(trained.state_dict(), whole.state_dict())


def test_frozen_parameters_are_ignored():
  params = {**cases.random(0), 'codes': jnp.asarray([[1, 2]], jnp.bfloat16)}
  optimizer_def = optimizers.MultiOptimizer(
    [('mlp/kernel$', adafactor.Adafactor()), ('scale$', optimizers.adam())]
  )
  optimizer = optimizer_def.create(params)
  grads = {**cases.random(1), 'codes': None, 'temperature': jnp.float32(np.nan)}
  updated = optimizer.apply_gradient(grads, learning_rate=0.1)
  assert (
    updated.target['codes'] is params['codes']
    and updated.target['temperature'] is params['temperature']
  )
  assert not np.array_equal(
    updated.target['encoder']['mlp']['kernel'], params['encoder']['mlp']['kernel']
  )


def test_containers_and_dtypes_of_the_parameters_stay():
  params = flax.core.freeze(
    {
      'stack': [jnp.ones([2, 3]), jnp.ones([3])],
      'scalar': jnp.float32(2.0),
      'narrow': jnp.ones([3, 2], jnp.bfloat16),
    }
  )
  optimizer_def = optimizers.MultiOptimizer(
    [('stack/0|narrow', adafactor.Adafactor(beta1=0.5)), ('scalar|stack/1', optimizers.adam())]
  )
  optimizer = optimizer_def.create(params)
  updated = jax.jit(lambda o, g: o.apply_gradient(g, learning_rate=0.1))(
    optimizer, jax.tree.map(jnp.ones_like, params)
  )
  assert jax.tree.structure(updated) == jax.tree.structure(optimizer)
  for (name, new), old in zip(
    tree_utils.named_leaves(updated), jax.tree.leaves(optimizer), strict=True
  ):
    assert (new.shape, new.dtype) == (old.shape, old.dtype), name
  pairs = zip(jax.tree.leaves(updated.target), jax.tree.leaves(params), strict=True)
  assert all(np.all(new < old) for new, old in pairs)
  assert {leaf.dtype for leaf in jax.tree.leaves(updated.state.param_states)} == {
    jnp.dtype('float32'),
    jnp.dtype('int32'),
  }
  cases.assert_same(optimizer.restore_state(updated.state_dict()), updated)


@pytest.mark.parametrize('params', [{}, flax.core.freeze({}), {'empty': {}}])
def test_no_parameters(params):
  optimizer = cases.mix().create(params)
  updated = optimizer.apply_gradient(params, learning_rate=0.1)
  assert updated.state.step == 1 and jax.tree.leaves(updated.target) == []
  cases.assert_same(optimizer.restore_state(updated.state_dict()), updated)


@pytest.mark.full
@pytest.mark.parametrize('row', [name for name, row in ROWS.items() if not row.per_example])
def test_every_optimizer_serves_as_a_part(row):
  rows, params, axes = ROWS[row], cases.random(0), cases.AXES
  optimizer_def = optimizers.MultiOptimizer(
    [(['encoder', 'decoder', 'temperature'], rows.factory())]
  )
  optimizer_def = optimizer_def.with_param_axes(axes, params)

  def loss(p):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))

  known = {
    'value': jnp.float32(1.0),
    'grad': params,
    'value_fn': loss,
    'obj_fn': loss,
    'grad_fn': lambda p, _: jax.grad(loss)(p),
  }

  def update(optimizer, grads):
    known['grad'] = grads
    return optimizer.apply_gradient(
      grads, **rows.overrides, **{name: known[name] for name in rows.needs}
    )

  optimizer = jax.eval_shape(optimizer_def.create, params)
  updated = jax.eval_shape(update, optimizer, params)
  assert jax.tree.structure(updated) == jax.tree.structure(optimizer)
  assert [(x.shape, x.dtype) for x in jax.tree.leaves(updated)] == [
    (x.shape, x.dtype) for x in jax.tree.leaves(optimizer)
  ]
  assert jax.tree.structure(
    optimizer_def.derive_logical_axes(optimizer, axes)
  ) == jax.tree.structure(optimizer)
  numbered = jax.tree.unflatten(
    jax.tree.structure(optimizer), range(len(jax.tree.leaves(optimizer)))
  )
  assert jax.tree.leaves(optimizer.restore_state(numbered.state_dict())) == jax.tree.leaves(
    numbered
  )


@pytest.mark.parametrize(
  'name,want',
  [
    ('multi_optimizer', {'0': '/kernel', '1': '/embedding /rel_embedding /scale'}),
    ('multi_optimizer_by_label', {'matrix': '/kernel', 'vector': '/rel_embedding /scale'}),
  ],
)
def test_gin_files(name, want):
  files = ['recipes/keyword_cloze.gin', f'optimizers/{name}.gin']
  flags = [gin_syntax.read_flag('MODEL_DIR', 'runs/x', '--gin.MODEL_DIR=runs/x')]
  try:
    model = gin_utils.load('t5x_lite.apps.train.train', gin_utils.read(files, flags)).argument(
      'model'
    )
  finally:
    gin.clear_config()
  assert model.optimizer_def.needs_learning_rate
  shapes = {
    'encoder_input_tokens': (2, 8),
    'decoder_input_tokens': (2, 8),
    'decoder_target_tokens': (2, 8),
  }
  state = jax.eval_shape(
    lambda: train_state.FlaxOptimTrainState.create(
      model.optimizer_def, model.get_initial_variables(jax.random.key(0), shapes)
    )
  )
  assert jax.tree.structure(state.as_logical_axes()) == jax.tree.structure(state)
  trained = dict(zip(model.optimizer_def.part_names, state.param_states.paths, strict=True))
  last_names = {
    part: sorted({f'/{path.split("/")[-1]}' for path in paths}) for part, paths in trained.items()
  }
  assert {part: ' '.join(names) for part, names in last_names.items()} == want
  frozen = {
    path.split('/')[0] for path in set(cases.flat(state.params)) - set().union(*trained.values())
  }
  assert frozen == (set() if name == 'multi_optimizer' else {'encoder', 'token_embedder'})
