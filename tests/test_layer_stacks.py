"""Stacked layers: conversion of trees, updates by every optimizer, and equality of training with and without them."""

import contextlib
import itertools
import weakref

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import layer_stacks
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import train_state
from t5x_lite import trainer as trainer_lib
from t5x_lite import tree_utils
from t5x_lite.data import vocabularies
from t5x_lite.errors import ConfigError
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.networks import t5
from t5x_lite.trainer import state_init
from t5x_lite.trainer import summaries
from t5x_lite.trainer import weight_metrics
from tests.networks import network_cases
from tests.optimizers.contract_rows import ROWS

_STACKS = LayerStacks((('encoder', (0, 1, 2)), ('decoder', (0, 2)), ('decoder', (1, 3))))
_SHAPES = {
  'mlp': {'kernel': (16, 24)},
  'attention': {'query': (8, 4, 2)},
  'scale': (6,),
  'temperature': (),
}


def _tree(make):
  """Return a tree like parameters with `make(number, shape)` at each leaf."""
  numbers = itertools.count()

  def layer():
    return jax.tree.map(
      lambda shape: make(next(numbers), shape),
      _SHAPES,
      is_leaf=lambda node: isinstance(node, tuple),
    )

  return {
    'encoder': {**{f'layers_{i}': layer() for i in range(3)}, 'norm': make(next(numbers), (4,))},
    'decoder': {f'layers_{i}': layer() for i in range(4)},
    'embedding': make(next(numbers), (10, 2)),
  }


def _random(seed):
  rng = np.random.default_rng(seed)
  return _tree(lambda _, shape: jnp.asarray(rng.normal(size=shape), jnp.float32))


def _assert_equal(got, expected, **tolerance):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for (path, a), (_, b) in zip(
    tree_utils.named_leaves(got), tree_utils.named_leaves(expected), strict=True
  ):
    bounds = (
      {'rtol': 2**-7} if tolerance and a.dtype == jnp.bfloat16 else tolerance or {'rtol': 0}
    )  # one digit
    np.testing.assert_allclose(a, b, err_msg=path, **bounds)


# ---- Trees -----------------------------------------------------------------------------------------------------------


def test_stacked_arrays_have_the_layers_in_their_first_dim():
  tree = _tree(lambda number, shape: np.full(shape, number, np.float32))
  stacked = _STACKS.stack(tree)
  assert set(stacked['encoder']) == {'layers_0,1,2', 'norm'} and set(stacked['decoder']) == {
    'layers_0,2',
    'layers_1,3',
  }
  np.testing.assert_array_equal(
    stacked['decoder']['layers_1,3']['mlp']['kernel'],
    np.stack(
      [tree['decoder']['layers_1']['mlp']['kernel'], tree['decoder']['layers_3']['mlp']['kernel']]
    ),
  )
  assert stacked['embedding'] is tree['embedding']
  _assert_equal(_STACKS.unstack(stacked), tree)


def test_shapes_and_mesh_axes_are_stacked_like_the_arrays_and_layers_keep_their_sharding():
  mesh = Mesh(
    np.array(jax.devices()).reshape(4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2
  )
  axes = _tree(
    lambda _, shape: (
      P('model', *[None] * (len(shape) - 1)) if len(shape) > 1 else P(*[None] * len(shape))
    )
  )
  arrays = jax.tree.map(
    lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), _random(0), axes
  )
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
  stacked, stacked_shapes, stacked_axes = map(_STACKS.stack, (arrays, shapes, axes))
  for array, shape, spec in zip(
    *map(jax.tree.leaves, (stacked, stacked_shapes, stacked_axes)), strict=True
  ):
    assert (array.shape, array.dtype) == (shape.shape, shape.dtype) and len(spec) == array.ndim
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)
  assert _STACKS.unstack(stacked_axes) == axes and _STACKS.unstack(stacked_shapes) == shapes
  unstacked = _STACKS.unstack(stacked)
  _assert_equal(unstacked, arrays)
  for array, before in zip(jax.tree.leaves(unstacked), jax.tree.leaves(arrays), strict=True):
    assert array.sharding.is_equivalent_to(before.sharding, array.ndim)


def test_each_array_is_freed_when_it_is_converted():
  alive, largest = weakref.WeakSet(), 0

  class Tracked(np.ndarray):
    __hash__ = object.__hash__

    def __array_finalize__(self, _):
      nonlocal largest
      alive.add(self)
      largest = max(largest, sum(array.nbytes for array in alive))

  class State(dict):
    def stack_layers(state, stacks):
      return _as(Tracked, stacks.stack(dict(state)))

  jax.tree_util.register_pytree_node(
    State, lambda s: ([dict(s)], None), lambda _, children: State(children[0])
  )

  # Ten layers of three arrays each: two copies would be twice the bytes, one more array of all layers a third.
  def make():
    return np.zeros(100).view(Tracked)

  held = layer_stacks.HeldState(
    State(encoder={f'layers_{i}': [make(), make(), make()] for i in range(10)}),
    LayerStacks((('encoder', tuple(range(10))),)),
  )
  num_bytes = largest
  assert sum(leaf.nbytes for leaf in jax.tree.leaves(held.stacked)) == num_bytes == 30 * 800
  assert largest < 1.5 * num_bytes


def _as(array_class, tree):
  return jax.tree.map(
    lambda leaf: leaf.view(array_class) if isinstance(leaf, np.ndarray) else leaf, tree
  )


def test_an_interrupted_conversion_leaves_a_clear_error(monkeypatch):
  trainer = _trainer(optimizer_def=optimizers.sgd(), holds_shapes=True)

  def interrupt(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as context:
    context.setattr(layer_stacks, '_stack', interrupt)
    with pytest.raises(KeyboardInterrupt):
      _ = trainer.step_state
  with pytest.raises(ConfigError, match='the state is lost. Set trainer.train_state'):
    _ = trainer.train_state


def test_host_arrays_without_dims_and_uncommitted_arrays_come_back_as_they_were():
  for tree in (jax.device_get(_random(0)), _random(0)):
    again = _STACKS.unstack(_STACKS.stack(_STACKS.unstack(_STACKS.stack(tree))))
    _assert_equal(again, tree)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
      assert type(a) is type(b) and getattr(a, 'committed', None) == getattr(b, 'committed', None)


def test_paths_are_renamed_in_the_order_of_the_tree():
  paths = tuple(path for path, _ in tree_utils.named_leaves(_tree(lambda *_: 0)))
  stacked = tuple(path for path, _ in tree_utils.named_leaves(_STACKS.stack(_random(0))))
  assert _STACKS.stack_paths(paths) == stacked and _STACKS.unstack_paths(stacked) == paths


# ---- Optimizers ------------------------------------------------------------------------------------------------------


def _definition(row):
  return row.factory().with_param_axes(jax.tree.map(lambda p: P(*[None] * p.ndim), _random(0)))


def _is_stacked(definition):
  state = jax.eval_shape(definition.init_state, _random(0))
  return layer_stacks.is_accepted_by(definition) and all(
    definition.stacking_key(path, leaf, state) for path, leaf in tree_utils.named_leaves(_random(0))
  )


_BY_DEFAULT = ('adafactor_all_options', 'adamw', 'multi_by_label', 'multi_scaled')


@pytest.mark.parametrize(
  'name',
  [pytest.param(name, marks=[] if name in _BY_DEFAULT else [pytest.mark.full]) for name in ROWS],
)
def test_an_update_of_stacked_layers_is_the_update_of_each(name):
  row = ROWS[name]
  try:
    definition = _definition(row)
    is_stacked = _is_stacked(definition)
  except ConfigError:  # options of the row name its own parameters
    is_stacked = False
  if not is_stacked:
    assert name not in (
      *_BY_DEFAULT,
      'sgd',
      'adam',
      'adafactor',
      'scaled_adam',
      'muon',
      'shampoo_sgd',
      'shampoo_sharded',
      'soap',
      'soap_blocks',
    )
    pytest.skip('This optimizer gets single layers.')
  plain = jax.device_get(
    definition.create(_random(0))
  )  # NumPy, since each stack of arrays is a program
  stacked = _stack(plain)
  update = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads, **row.overrides))
  for seed in (1, 2):
    grads = jax.device_get(_random(seed))
    plain, stacked = update(plain, grads), update(stacked, _STACKS.stack(grads))
  plain, stacked = jax.device_get((plain, stacked))
  _assert_equal(_STACKS.unstack(stacked.target), plain.target, rtol=2e-6, atol=2e-6)
  _assert_equal(_stack(plain).state, stacked.state, rtol=2e-6, atol=2e-6)


def _stack(optimizer):
  states = optimizer.optimizer_def.rename_params(optimizer.state.param_states, _STACKS.stack_paths)
  return _STACKS.stack(optimizer.replace(state=optimizer.state.replace(param_states=states)))


@pytest.mark.parametrize(
  'optimizer_def',
  [
    optimizers.adamw(1e-3, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    optimizers.chain([optimizers.lamb(1e-3), optimizers.sgd(1.0)]),
    optimizers.chain([optax.clip_by_block_rms(1.0)]),
    *(getattr(optimizers, name)(1e-3) for name in ('lamb', 'lars', 'novograd', 'fromage')),
  ],
  ids=lambda definition: definition.name,
)
def test_updates_that_may_depend_on_dims_are_not_stacked(optimizer_def):
  assert not _is_stacked(optimizer_def)


def test_clipping_by_a_global_norm_may_precede_an_elementwise_update():
  assert _is_stacked(optimizers.chain([optax.clip_by_global_norm(1.0), optimizers.adamw(1e-3)]))


# ---- Training --------------------------------------------------------------------------------------------------------

_MIXED = optimizers.partition(
  {
    'factored': optimizers.Adafactor(min_dim_size_to_factor=8, beta1=0.9),
    'adam': optimizers.adamw(),
    'frozen': None,
  },
  [('^encoder/layers_0/', 'frozen'), ('(layers_2|decoder).*kernel', 'factored'), ('.*', 'adam')],
)


class _OwnStep(trainer_lib.Trainer):
  """A trainer with a custom step, which may read single layers."""

  def partitioned_train_step(self):
    return super().partitioned_train_step()


def _trainer(
  trainer_cls=trainer_lib.Trainer,
  optimizer_def=None,
  *,
  num_layers=3,
  scan_layers=True,
  holds_shapes=False,
  num_devices=8,
  model_cls=models.EncoderDecoderModel,
  network_cls=t5.Transformer,
  **options,
):
  config = network_cases.tiny_config(
    num_encoder_layers=num_layers, num_decoder_layers=num_layers, scan_layers=scan_layers
  )
  vocabulary = vocabularies.PassThroughVocabulary(40)
  model = model_cls(network_cls(config), vocabulary, vocabulary, optimizer_def or _MIXED)
  mesh = Mesh(
    np.array(jax.devices()[:num_devices]).reshape(-1, min(num_devices, 2)),
    ('data', 'model'),
    axis_types=(AxisType.Auto,) * 2,
  )
  partitioner = partitioning.PjitPartitioner(
    mesh=mesh, params_on_devices=True, logical_axis_rules=partitioning.standard_logical_axis_rules()
  )
  batch = _batch(0)
  initializer = state_init.TrainStateInitializer(
    model.optimizer_def,
    model.get_initial_variables,
    {name: x.shape for name, x in batch.items()},
    partitioner,
  )
  state = (
    initializer.global_train_state_shape
    if holds_shapes
    else initializer.from_scratch(jax.random.key(0))
  )
  return trainer_cls(
    model=model,
    train_state=state,
    partitioner=partitioner,
    eval_names=['a'],
    summary_dir=None,
    train_state_axes=initializer.train_state_axes,
    rng=jax.random.key(1),
    learning_rate_fn=lambda step: 0.01,
    **options,
  )


def _batch(seed):
  return network_cases.tiny_batch(8, seed=seed)


def _batches(first=0):
  return map(_batch, itertools.count(first))


def _values(values):
  return {name: value.value for name, value in values.items() if not name.startswith('timing/')}


def test_training_is_that_of_single_layers_and_users_see_single_layers(caplog):
  caplog.set_level('INFO', 't5x_lite')
  seen = []

  def transform(grads):
    seen.append(dict(tree_utils.named_leaves(grads)))
    encoder = grads['encoder']
    return {
      **grads,
      'encoder': {**encoder, 'layers_1': jax.tree.map(lambda g: -g, encoder['layers_1'])},
    }

  stacked, plain = (
    _trainer(gradient_transform=transform, gradient_clip_norm=0.5),
    _trainer(_OwnStep, gradient_transform=transform, gradient_clip_norm=0.5),
  )
  assert 'Equal layers are compiled as loops: decoder 0-2.' in caplog.messages
  initial = jax.device_get(stacked.train_state)
  paths = [path for path, _ in tree_utils.named_leaves(initial.params)]
  assert set(stacked.step_state.params['encoder']) == {
    'layers_0',
    'layers_1',
    'layers_2',
    'encoder_norm',
    'relpos_bias',
  }  # a part for each
  assert (
    'layers_0,1,2' in stacked.step_state.params['decoder']
    and 'layers_0' in plain.step_state.params['decoder']
  )
  metrics = [_values(trainer.train(_batches(), 2).result()) for trainer in (stacked, plain)]
  assert seen and all(sorted(found) == sorted(paths) for found in seen)
  assert set(metrics[0]) == set(metrics[1])
  assert metrics[0]['gradient_norm/clipped_share'] == 1
  for name, value in metrics[0].items():
    np.testing.assert_allclose(value, metrics[1][name], rtol=1e-4, atol=1e-6, err_msg=name)
  assert stacked.train_state_axes == plain.train_state_axes
  _assert_equal(
    jax.device_get(stacked.train_state), jax.device_get(plain.train_state), rtol=1e-4, atol=2e-5
  )
  for a, b in zip(
    jax.tree.leaves(stacked.train_state), jax.tree.leaves(plain.train_state), strict=True
  ):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
  _assert_equal(
    stacked.train_state.params['encoder']['layers_0'], initial.params['encoder']['layers_0']
  )


def test_compiling_a_step_does_not_convert_the_state():
  trainer = _trainer()
  state = trainer.step_state
  trainer.check_batch(next(iter(_batches())))
  assert trainer.step_state is state


class _OwnComputer(weight_metrics.WeightMetricsComputer):
  """A computer that may read single layers."""

  def compute_metrics(self, gradients, old_train_state, new_train_state):
    assert 'layers_0' in gradients['encoder'] and 'layers_0' in new_train_state.params['decoder']
    return super().compute_metrics(gradients, old_train_state, new_train_state)


def test_statistics_are_those_of_single_layers():
  before = train_state.FlaxOptimTrainState.create(optimizers.sgd(), {'params': _random(0)})
  after, grads = before.replace_params(_random(1)), _random(2)
  computer = weight_metrics.WeightMetricsComputer()
  expected = jax.jit(computer.compute_metrics)(grads, before, after)
  stacked = _STACKS.stack(grads), before.stack_layers(_STACKS), after.stack_layers(_STACKS)
  for its_computer in (computer, _OwnComputer()):
    metrics = jax.jit(weight_metrics.unstacking(its_computer, _STACKS).compute_metrics)(*stacked)
    with contextlib.closing(summaries.MetricsManager('train', None)) as manager:
      manager.start_duration_timer()
      found = manager.write_metrics_summary(metrics, step=1, num_steps=1).result()
    assert set(found) == set(expected) and 'weight_rms/decoder/layers_1/mlp/kernel' in found
    for name, value in found.items():
      np.testing.assert_allclose(value.value, expected[name].total, rtol=1e-6, err_msg=name)


@pytest.mark.full
def test_training_goes_on_bitwise_from_single_layers():
  whole, halves = (
    _trainer(optimizer_def=optimizers.Adafactor(min_dim_size_to_factor=8)) for _ in range(2)
  )
  whole.train(_batches(), 4)
  halves.train(_batches(), 2)
  saved = jax.device_get(halves.train_state)
  resumed = _trainer(optimizer_def=optimizers.Adafactor(min_dim_size_to_factor=8))
  resumed.train_state = jax.tree.map(
    lambda x, like: jax.device_put(x, like.sharding), saved, resumed.train_state
  )
  resumed.train(_batches(2), 2)
  _assert_equal(jax.device_get(resumed.train_state), jax.device_get(whole.train_state))
  evaluated = _values(whole.eval({'a': [_batch(4)]})['a'])['loss']
  assert evaluated == pytest.approx(
    _values(resumed.train(_batches(4), 1).result())['loss'], rel=1e-5
  )


_LAYERWISE = {
  'scaled_adam': optimizers.scaled_adam(
    clipping_scale=0.5, clipping_update_period=2, size_update_period=2
  ),
  **{
    name: optimizers.distributed_shampoo(
      block_size=16, start_preconditioning_step=2, matrix_epsilon=1e-2, **options
    )
    for name, options in {
      'shampoo_sharded': {'shard_optimizer_states': True},
      'shampoo_spread': {'preconditioning_compute_steps': 3, 'spread_roots': True},
    }.items()
  },
}


@pytest.mark.full
@pytest.mark.parametrize('optimizer_def', _LAYERWISE.values(), ids=_LAYERWISE)
def test_a_run_of_single_layers_is_continued_with_stacked_ones(optimizer_def):
  # On virtual devices, XLA's collectives of Shampoo's roots wait for each other if there are fewer cores than devices.
  options = {'num_layers': 2, 'num_devices': 8 if optimizer_def.name == 'scaled_adam' else 1}
  single, stacked = (
    _trainer(trainer_cls, optimizer_def, **options)
    for trainer_cls in (_OwnStep, trainer_lib.Trainer)
  )
  assert (
    'layers_0' in single.step_state.params['encoder']
    and 'layers_0,1' in stacked.step_state.params['encoder']
  )
  single.train(_batches(), 3).result()
  stacked.train_state = jax.tree.map(
    lambda x, like: jax.device_put(x, like.sharding),
    jax.device_get(single.train_state),
    stacked.train_state,
  )
  metrics = [_values(trainer.train(_batches(3), 3).result()) for trainer in (single, stacked)]
  for name, value in metrics[0].items():
    np.testing.assert_allclose(value, metrics[1][name], rtol=1e-6, atol=1e-7, err_msg=name)
  _assert_equal(
    jax.device_get(stacked.train_state), jax.device_get(single.train_state), rtol=1e-4, atol=2e-6
  )


_PARTS = optimizers.partition(
  {
    'a': optimizers.Adafactor(),
    'b': optimizers.distributed_shampoo(block_size=4),
    'c': optimizers.scaled_adam(clipping_scale=2.0),
  },
  [('mlp/wi', 'a'), ('mlp/wo', 'b'), ('.*', 'c')],
)


@pytest.mark.parametrize('num_devices', [1, 8])
def test_a_new_state_can_begin_with_stacked_layers(num_devices):
  trainer = _trainer(optimizer_def=_PARTS, num_devices=num_devices, holds_shapes=True)
  initializer = state_init.TrainStateInitializer(
    _PARTS,
    trainer._model.get_initial_variables,
    {name: x.shape for name, x in _batch(0).items()},
    trainer.partitioner,
  )
  trainer.train_state = single = initializer.from_scratch(jax.random.key(0))
  expected, key = trainer.step_state, jax.random.key(0)
  stacked = initializer.from_scratch(key, trainer.stacked_layers)
  _assert_equal(jax.device_get(stacked), jax.device_get(expected))
  trainer.step_state = stacked
  assert trainer.step == 0
  _assert_equal(jax.device_get(trainer.train_state), jax.device_get(single))
  for a, b in zip(jax.tree.leaves(stacked), jax.tree.leaves(expected), strict=True):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize(
  'num_layers, scan_layers, is_stacked',
  [(5, None, False), (6, None, True), (2, True, True), (6, False, False)],
)
def test_the_trainer_stacks_long_loops_unless_told_otherwise(num_layers, scan_layers, is_stacked):
  trainer = _trainer(
    optimizer_def=optimizers.sgd(),
    num_layers=num_layers,
    scan_layers=scan_layers,
    holds_shapes=True,
  )
  layers = tuple(range(num_layers))
  assert trainer.stacked_layers == LayerStacks(
    (('encoder', layers), ('decoder', layers)) if is_stacked else ()
  )
  text = trainer.partitioned_train_step().lower(trainer.step_state, _batch(0)).as_text()
  assert ('stablehlo.while' in text) == is_stacked


def test_parts_of_a_loop_are_stacked_by_default_if_each_is_long():
  def stacks(num_frozen):
    optimizer_def = optimizers.partition(
      {'frozen': None, 'trained': optimizers.sgd()},
      [(f'layers_({"|".join(map(str, range(num_frozen)))})/', 'frozen'), ('.*', 'trained')],
    )
    return _trainer(optimizer_def=optimizer_def, num_layers=12, scan_layers=None, holds_shapes=True)

  both, one = stacks(6), stacks(8)
  assert [layers for stack, layers in both.stacked_layers.groups if stack == 'decoder'] == [
    tuple(range(6)),
    tuple(range(6, 12)),
  ]
  assert [layers for stack, layers in one.stacked_layers.groups if stack == 'decoder'] == [
    tuple(range(8))
  ]
  # A loop for each stack, forward and backward; the four other layers are compiled one by one.
  num_loops = [
    trainer.partitioned_train_step()
    .trace(trainer.step_state, _batch(0))
    .jaxpr.pretty_print()
    .count('scan[')
    for trainer in (both, one)
  ]
  assert num_loops[1] > 0 and num_loops[0] == 2 * num_loops[1]


def test_a_second_new_state_is_not_compiled_again():
  trainer = _trainer(optimizer_def=optimizers.sgd(), holds_shapes=True)
  initializer = state_init.TrainStateInitializer(
    optimizers.sgd(),
    trainer._model.get_initial_variables,
    {name: x.shape for name, x in _batch(0).items()},
    trainer.partitioner,
  )
  initializer.from_scratch(jax.random.key(0), trainer.stacked_layers)
  compiled = []
  with pytest.MonkeyPatch.context() as context:
    context.setattr(trainer.partitioner, 'partition', lambda *args, **kwargs: compiled.append(args))
    initializer.from_scratch(jax.random.key(1), trainer.stacked_layers)
  assert not compiled


def test_copies_on_one_cpu_share_no_memory():
  # The next step writes to the arrays of one form, while the other may be in use.
  state = jax.tree.map(jnp.asarray, _random(0))
  stacked = _STACKS.stack(state)
  single = _STACKS.unstack(stacked)
  pointers = [
    {x.unsafe_buffer_pointer() for path, x in tree_utils.named_leaves(tree) if 'layers_' in path}
    for tree in (state, stacked, single)
  ]
  assert (
    all(pointers) and not set.intersection(*pointers[:2]) and not set.intersection(*pointers[1:])
  )
  _assert_equal(single, state)


def _num_lines(num_layers):
  trainer = _trainer(optimizer_def=_PARTS, num_layers=num_layers, holds_shapes=True)
  text = trainer.partitioned_train_step().lower(trainer.step_state, _batch(0)).as_text()
  return len(text.splitlines()), len(jax.tree.leaves(trainer.step_state))


def test_the_program_does_not_grow_with_the_number_of_layers():
  assert _num_lines(2) == _num_lines(5)


class _OwnModel(models.EncoderDecoderModel):
  """A model whose loss may read single parameters."""


class _OwnNetwork(t5.Transformer):
  """A network that may read single parameters."""


class _OwnAdafactor(optimizers.Adafactor):
  """An optimizer whose rate may depend on the path."""


class _OwnEvalStep(trainer_lib.Trainer):
  """A trainer with an evaluation of single layers."""

  def partitioned_eval_step(self):
    return super().partitioned_eval_step()


_CUSTOM = {
  'model': dict(model_cls=_OwnModel),
  'network': dict(network_cls=_OwnNetwork),
  'no loop': dict(scan_layers=False),
  'train step': dict(trainer_cls=_OwnStep),
  'eval step': dict(trainer_cls=_OwnEvalStep),
  'optimizer': dict(optimizer_def=optimizers.lamb(1e-3)),
  'subclass': dict(optimizer_def=_OwnAdafactor()),
  'part': dict(
    optimizer_def=optimizers.MultiOptimizer(
      [('kernel', _OwnAdafactor()), ('scale', optimizers.sgd())]
    )
  ),
}


@pytest.mark.parametrize('options', _CUSTOM.values(), ids=_CUSTOM)
def test_nothing_is_stacked_unless_all_classes_declare_it(options):
  options = {'optimizer_def': optimizers.sgd(), 'holds_shapes': True, **options}
  names = {
    name
    for path, _ in tree_utils.named_leaves(_trainer(**options).step_state)
    for name in path.split('/')
  }
  assert 'layers_0' in names and not any(map(layer_stacks.layers_of, names))


_ALL = {'decoder': [(0, 1, 2, 3)]}


@pytest.mark.parametrize(
  'optimizer_def',
  [
    optimizers.Adafactor(
      1e-3,
      factored=False,
      multiply_by_parameter_scale=optimizers.HParamMap([('layers_1/', True), ('.*', False)]),
    ),
    optimizers.Adafactor(
      1e-3,
      factor_map=optimizers.HParamMap([('layers_1/mlp', ('row', 'column')), ('.*', None)]),
      min_dim_size_to_factor=1,
    ),
    optimizers.partition(
      {'a': optimizers.sgd(), 'b': optimizers.sgd()}, [('layers_1/scale', 'a'), ('.*', 'b')]
    ),
    optimizers.scaled_adam(
      group_options={'other': {}},
      param_labels=lambda params: {
        'encoder': 'default',
        'embedding': 'default',
        'decoder': {'layers_1': 'other', **{f'layers_{i}': 'default' for i in (0, 2, 3)}},
      },
    ),
    optimizers.chain(
      [optax.clip_by_global_norm(1.0), optimizers.scaled_adam(batch_dims=(('layers_1/mlp', 0),))]
    ),
    *(
      optimizers.with_update_options(optimizer_def, learning_rate_scales=[('layers_1/', 0.5)])
      for optimizer_def in (
        optimizers.Adafactor(factored=False),
        optimizers.adamw(),
        optimizers.distributed_shampoo(),
        optimizers.scaled_adam(),
        optimizers.chain([optimizers.sgd()]),
        optimizers.MultiOptimizer([('.', optimizers.lion())]),
      )
    ),
    'dtype',
    'axes',
  ],
  ids=[
    'scale',
    'factors',
    'part',
    'label',
    'batched dims',
    *(f'options {i}' for i in range(6)),
    'dtype',
    'axes',
  ],
)
def test_layers_that_differ_are_stacked_apart(optimizer_def):
  params, spec = _random(0), optimizer_def == 'axes'
  if optimizer_def == 'dtype':
    params['decoder']['layers_1'] = jax.tree.map(
      lambda p: p.astype(jnp.bfloat16), params['decoder']['layers_1']
    )
  definition = optimizers.sgd() if isinstance(optimizer_def, str) else optimizer_def
  state = jax.eval_shape(
    lambda: train_state.FlaxOptimTrainState.create(definition, {'params': params})
  )
  state = state.replace(param_average=state.params)
  axes = jax.tree.map(lambda p: P(*[None] * p.ndim), state)
  if spec:
    axes.params['decoder']['layers_1']['scale'] = P('model')
  stacks = state.find_layer_stacks(_ALL, axes)
  assert stacks == LayerStacks((('decoder', (0, 2, 3)),))
  stacked = state.stack_layers(stacks)
  assert (
    set(stacked.param_average['decoder'])
    == set(stacked.params['decoder'])
    == {'layers_0,2,3', 'layers_1'}
  )
  assert jax.tree.structure(stacked.unstack_layers(stacks)) == jax.tree.structure(state)
