"""Adapters compute y = x W + s dropout(x) A B, change nothing when they are new, and alone are trained."""

import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import adapters
from t5x_lite import decoding
from t5x_lite import gin_utils
from t5x_lite import layer_stacks
from t5x_lite import layers
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import schedules
from t5x_lite import trainer as trainer_lib
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import param_layouts
from t5x_lite.trainer import state_init
from tests.adapters import adapter_cases as cases

# Recorded forward passes of PyTorch, outside of the repository.
_RECORDED = pathlib.Path(__file__).parents[3] / 'shared/real/lora_test.npz'
_ALL = adapters.Lora(rank=3, alpha=4.5, targets='all')


def _random(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _dense(adapter, params, x, rng=None, **fields):
  """Return the output of a projection, as a model computes it."""
  module = layers.DenseGeneral(**fields)
  params = adapter.prepare({'dense': params}, has_dropout=rng is not None)['dense']
  rngs = None if rng is None else {'dropout': rng}
  return module.apply({'params': params}, x, rngs=rngs)


def _logits(model, params):
  return jax.jit(lambda params: model.compute_logits(params, cases.BATCH)[0])(params)


def _loss(model, params):
  return jax.jit(lambda params: model.loss_fn(params, cases.BATCH, None)[0])(params)


# ---- Computation -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not _RECORDED.exists(), reason='the recorded passes are not here')
def test_passes_that_pytorch_recorded():
  recorded = np.load(_RECORDED)
  adapter = adapters.Lora(rank=2, alpha=12.0)
  names = sorted({name.partition('/')[0] for name in recorded.files})
  assert len(names) == 7
  for name in names:
    x = recorded[f'{name}/inputs/x']
    # Outputs of query, key and value, of which the name says which have an adapter.
    outputs = np.split(recorded[f'{name}/outputs/torch_out'], 3, axis=-1)
    number = 0
    for kind, expected in zip('qkv', outputs, strict=True):
      if f'{kind}1' not in name:
        assert not expected.any()
        continue
      params = {
        'kernel': jnp.zeros([10, 10]),
        'lora_a': jnp.asarray(recorded[f'{name}/params/lora_down_weight'][:, number]),
        'lora_b': jnp.asarray(recorded[f'{name}/params/lora_up_weight'][number]),
      }
      y = _dense(adapter, params, x, features=(2, 5))
      np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=2e-5, atol=1e-4)
      number += 1


@pytest.mark.parametrize('rate', [0.0, 0.5])
@pytest.mark.parametrize('axis, shape', [(-1, (4, 3, 6)), ((-2, -1), (4, 3, 2, 3)), (1, (4, 6, 3))])
def test_gradients_equal_those_of_float64(rate, axis, shape):
  adapter = adapters.Lora(rank=2, alpha=3.0, dropout_rate=rate)
  key = jax.random.key(3) if rate else None
  params = {
    'kernel': _random(6, 5),
    'lora_a': _random(6, 2, seed=1),
    'lora_b': _random(2, 5, seed=2),
  }
  x = _random(*shape)
  dense = functools.partial(_dense, features=5, axis=axis)
  # Dropout of the same key, scaled: the adapter of an identity.
  eye = {'kernel': jnp.zeros([6, 6]), 'lora_a': jnp.eye(6), 'lora_b': jnp.eye(6)}
  one = adapters.Lora(rank=6, alpha=6.0, dropout_rate=rate)
  kept = np.asarray(_dense(one, eye, np.ones_like(x), key, features=6, axis=axis), np.float64)
  assert set(np.unique(kept)) == ({0.0, 2.0} if rate else {1.0})
  axes = (axis,) if isinstance(axis, int) else axis
  rest = [dim for dim in range(len(shape)) if dim not in [a % len(shape) for a in axes]]
  x_rows = (
    np.asarray(x, np.float64).transpose(*rest, *[a % len(shape) for a in axes]).reshape(-1, 6)
  )
  w, a, b = (np.asarray(params[name], np.float64) for name in ('kernel', 'lora_a', 'lora_b'))
  dropped = x_rows * kept.reshape(-1, 6)
  y = dense(adapter, params, x, key)
  expected = x_rows @ w + 1.5 * dropped @ a @ b
  np.testing.assert_allclose(np.reshape(y, (-1, 5)), expected, rtol=1e-4, atol=1e-4)
  g = _random(*y.shape, seed=4)
  found = jax.grad(lambda params: jnp.sum(dense(adapter, params, x, key) * g))(params)
  g = np.asarray(g, np.float64).reshape(-1, 5)
  np.testing.assert_allclose(found['kernel'], x_rows.T @ g, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(found['lora_a'], 1.5 * dropped.T @ g @ b.T, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(found['lora_b'], 1.5 * (dropped @ a).T @ g, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('layout', ['t5', 'scalable_t5'])
def test_a_new_adapter_changes_no_value_and_no_logit(layout):
  plain = cases.make_model(None, param_layout=layout)
  model = cases.make_model(_ALL, param_layout=layout)
  before = tree_utils.flatten_dict(cases.initial_variables(plain)['params'])
  variables = cases.initial_variables(model)
  after = tree_utils.flatten_dict(variables['params'])
  for path, leaf in before.items():
    np.testing.assert_array_equal(after.pop(path), leaf)
  assert after and all('/lora_' in path for path in after)
  logits = _logits(model, variables['params'])
  expected = _logits(plain, tree_utils.unflatten_dict(before))
  np.testing.assert_array_equal(logits, expected)
  assert not any('intermediates' in name for name in variables)


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'scan_layers': True},
    {'scan_layers': True, 'remat_policy': 'full'},
    {'scan_layers': False, 'remat_policy': 'minimal'},
  ],
)
@pytest.mark.parametrize(
  'adapter, scales',
  [
    (_ALL, {'': 1.5}),
    (
      adapters.Lora(
        rank=4,
        targets=('attention', r'decoder/.*/mlp/wi_0/kernel$'),
        rank_stabilized=True,
        rank_pattern=[('query', 9)],
        alpha_pattern=[('query', 3.0), ('value', 5), ('.', 16)],
      ),
      {'query': 1.0, 'value': 2.5, '': 8.0},
    ),
  ],
  ids=['all', 'patterns'],
)
def test_the_pass_is_that_of_merged_kernels(adapter, scales, options):
  model = cases.make_model(adapter, **options)
  params = cases.random_b(cases.initial_variables(model)['params'])
  plain = cases.make_model(None)
  merged = cases.merged(
    params, lambda path: next(scale for part, scale in scales.items() if part in path)
  )
  loss = _loss(model, params)
  expected = _loss(plain, merged)
  base = tree_utils.unflatten_dict(
    {path: x for path, x in tree_utils.flatten_dict(params).items() if '/lora_' not in path}
  )
  assert abs(_loss(plain, base) - expected) > 0.1
  np.testing.assert_allclose(loss, expected, rtol=2e-6)


@pytest.mark.parametrize('layout', ['t5', 'scalable_t5'])
@pytest.mark.parametrize(
  'decode_fn', [decoding.greedy_search, decoding.beam_search, decoding.temperature_sample]
)
def test_decoding_is_that_of_merged_kernels(decode_fn, layout):
  model = cases.make_model(_ALL).with_decode_fn(decode_fn)
  params = cases.random_b(cases.initial_variables(model)['params'])
  plain = cases.make_model(None).with_decode_fn(decode_fn)
  merged = cases.merged(params, lambda path: 1.5)
  options = {'rng': jax.random.key(1)} if decode_fn is decoding.temperature_sample else {}
  expected = plain.predict_batch_with_aux(merged, cases.BATCH, **options)
  if layout == 'scalable_t5':
    model = cases.make_model(_ALL, param_layout=layout).with_decode_fn(decode_fn)
    params = param_layouts.convert(params, 't5', layout, model.module.config)
  found = model.predict_batch_with_aux(params, cases.BATCH, **options)
  np.testing.assert_array_equal(found[0], expected[0])
  np.testing.assert_allclose(found[1]['scores'], expected[1]['scores'], rtol=1e-5)


def test_layouts_have_the_shapes_of_each_other():
  model = cases.make_model(_ALL)
  other = cases.make_model(_ALL, param_layout='scalable_t5')
  params = cases.random_b(cases.initial_variables(model)['params'])
  shapes = jax.tree.map(jnp.shape, cases.initial_variables(other)['params'])
  converted = param_layouts.convert(params, 't5', 'scalable_t5', other.module.config)
  assert jax.tree.map(jnp.shape, converted) == shapes
  np.testing.assert_allclose(_loss(other, converted), _loss(model, params), rtol=1e-6)
  back = param_layouts.convert(converted, 'scalable_t5', 't5', model.module.config)
  jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize(
  'options',
  [{'param_layout': 'scalable_t5'}, {'scan_layers': True, 'remat_policy': 'full'}],
  ids=['scalable_t5', 'scan'],
)
def test_dropout_depends_on_the_key_alone(options):
  """Layouts, loops and repeated passes of layers draw the same masks for the adapters."""
  adapter = adapters.Lora(rank=3, targets='attention', dropout_rate=0.4)
  fields = {'num_encoder_layers': 2, 'num_decoder_layers': 1, 'dropout_rate': 0.2}
  first = cases.make_model(adapter, **fields)

  def compute(params, **options):
    model = cases.make_model(adapter, **fields, **options)

    def loss(params, key):
      return model.loss_fn(params, cases.BATCH, key)[0]

    gradients = jax.jit(jax.value_and_grad(loss))
    found, grads = gradients(params, jax.random.key(5))
    assert found != gradients(params, jax.random.key(6))[0]
    return found, grads

  params = cases.random_b(cases.initial_variables(first)['params'])
  loss, expected = compute(params)
  if 'param_layout' in options:
    config = cases.make_model(None, **fields, **options).module.config
    params = param_layouts.convert(params, 't5', 'scalable_t5', config)
    expected = param_layouts.convert(expected, 't5', 'scalable_t5', config)
  found, grads = compute(params, **options)
  np.testing.assert_allclose(found, loss, rtol=1e-6)
  expected = dict(tree_utils.named_leaves(expected))
  for path, grad in tree_utils.named_leaves(grads):
    if '/lora_' in path:
      np.testing.assert_allclose(grad, expected[path], rtol=1e-3, atol=1e-4, err_msg=path)


def test_stacked_layers_keep_their_own_scales():
  adapter = adapters.Lora(rank=2, targets='all', alpha_pattern=[('layers_1/', 3.0)])
  model = cases.make_model(adapter)
  params = cases.random_b(cases.initial_variables(model)['params'])
  stacks = layer_stacks.LayerStacks((('encoder', (0, 1)), ('decoder', (0, 1, 2))))
  stacked = stacks.stack(params)
  gradients = jax.jit(jax.value_and_grad(lambda p: model.loss_fn(p, cases.BATCH, None)[0]))
  loss, grads = gradients(params)
  found, stacked_grads = gradients(stacked)
  np.testing.assert_allclose(found, loss, rtol=1e-6)
  for a, b in zip(
    jax.tree.leaves(stacks.unstack(stacked_grads)), jax.tree.leaves(grads), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
  'fields, stacked',
  [
    ({'rank_pattern': [('layers_0/', 1)]}, [(1, 2, 3)]),
    ({'rank_pattern': [('layers_[02]/', 1)]}, [(0, 2), (1, 3)]),
    ({'targets': (r'layers_1/.*query/kernel$',)}, [(0, 2, 3)]),
  ],
  ids=['another rank', 'ranks in turn', 'one layer'],
)
def test_layers_of_a_loop_may_have_different_adapters(fields, stacked):
  """Layers that cannot be stacked are in different loops, or in none; the trainer stacks the others."""
  adapter = adapters.Lora(**{'rank': 3, 'targets': 'all', **fields})
  unrolled = cases.make_model(adapter, scan_layers=False, num_decoder_layers=4)
  looped = cases.make_model(adapter, scan_layers=True, num_decoder_layers=4)
  params = cases.random_b(cases.initial_variables(unrolled)['params'])
  stacks = layer_stacks.LayerStacks(tuple(('decoder', layers) for layers in stacked))
  expected = _loss(unrolled, params)
  np.testing.assert_allclose(_loss(looped, params), expected, rtol=2e-6)
  np.testing.assert_allclose(_loss(looped, stacks.stack(params)), expected, rtol=2e-6)


def test_a_bfloat16_base_is_rounded_once():
  model = cases.make_model(
    adapters.Lora(rank=2, base_dtype='bfloat16', also_train=('norm/scale$',))
  )
  params = cases.random_b(cases.initial_variables(model)['params'])
  for path, leaf in tree_utils.named_leaves(params):
    is_trained = '/lora_' in path or path.endswith('norm/scale')
    assert leaf.dtype == (jnp.float32 if is_trained else jnp.bfloat16), path
  wide = cases.make_model(adapters.Lora(rank=2))
  wide_params = cases.random_b(cases.initial_variables(wide)['params'])
  logits = _logits(model, params)
  expected = _logits(wide, wide_params)
  difference = np.abs(np.asarray(logits) - np.asarray(expected)).max()
  assert 0 < difference < 0.02 * np.abs(np.asarray(expected)).max()


@pytest.mark.parametrize(
  'rank, targets, expected, fields',
  [
    (8, 'query_value', 884_736, dict(emb_dim=768, num_heads=12, mlp_dim=2048, layers=12)),
    (16, 'query_value', 9_437_184, dict(emb_dim=2048, num_heads=32, mlp_dim=5120, layers=24)),
  ],
)
def test_numbers_of_parameters_that_others_publish(rank, targets, expected, fields):
  num_layers = fields.pop('layers')
  model = cases.make_model(
    adapters.Lora(rank=rank, targets=targets),
    head_dim=64,
    num_encoder_layers=num_layers,
    num_decoder_layers=num_layers,
    **fields,
  )
  shapes = jax.eval_shape(lambda: cases.initial_variables(model)['params'])
  trained = [leaf.size for path, leaf in tree_utils.named_leaves(shapes) if '/lora_' in path]
  assert sum(trained) == expected


@pytest.mark.parametrize('policy', ['none', 'minimal'])
def test_a_step_with_adapters_stores_no_more_than_one_that_trains_the_kernels(policy):
  def temporaries(adapter):
    model = cases.make_model(
      adapter,
      num_encoder_layers=6,
      num_decoder_layers=6,
      scan_layers=True,
      param_layout='scalable_t5',
      remat_policy=policy,
    )
    params = jax.eval_shape(lambda: cases.initial_variables(model)['params'])
    flat = tree_utils.flatten_dict(params)
    trained = {path for path in flat if adapter is None or adapter.is_trained(path)}

    def loss(trained, frozen):
      return model.loss_fn(tree_utils.unflatten_dict(trained | frozen), batch, None)[0]

    step = jax.jit(jax.grad(loss)).lower(
      {path: flat[path] for path in trained}, {path: flat[path] for path in flat.keys() - trained}
    )
    return step.compile().memory_analysis().temp_size_in_bytes

  # Residuals are larger than the gradients of these kernels. Those of the rank, 1 next to 16, are stored in addition.
  batch = {name: np.repeat(x, 64, axis=0) for name, x in cases.BATCH.items()}
  assert temporaries(adapters.Lora(rank=1, targets='all')) < 1.1 * temporaries(None)


# ---- Training --------------------------------------------------------------------------------------------------------


def _small_model(adapter, optimizer_def=None):
  return cases.make_model(adapter, optimizer_def, num_encoder_layers=1, num_decoder_layers=1)


def _train(model, num_steps, mesh=None, num_partitions=1, batch=None, **options):
  """Return (first parameters, those after training, metrics, last state)."""
  if mesh is None:
    partitioner = partitioning.PjitPartitioner(num_partitions=num_partitions)
  else:
    partitioner = partitioning.PjitPartitioner(mesh=mesh)
  batch = batch or {**cases.BATCH, 'decoder_loss_weights': np.ones((8, 5), np.float32)}
  initializer = state_init.TrainStateInitializer(
    model.optimizer_def,
    model.get_initial_variables,
    {name: x.shape for name, x in batch.items()},
    partitioner,
  )
  state = initializer.from_scratch(jax.random.key(0))
  first = jax.device_get(state.params)
  with trainer_lib.Trainer(
    model,
    state,
    partitioner,
    (),
    None,
    initializer.train_state_axes,
    jax.random.key(1),
    schedules.create_learning_rate_scheduler('constant', base_learning_rate=0.01),
    **options,
  ) as trainer:
    metrics = trainer.train(iter([batch] * num_steps), num_steps).result()
    return first, jax.device_get(trainer.train_state.params), metrics, trainer.train_state


def _one_device():
  return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('data', 'model'))


@pytest.mark.parametrize(
  'optimizer_def, options',
  [
    (optimizers.adamw(), {}),
    (optimizers.lion(), {'gradient_clip_norm': 0.1}),
    (
      optimizers.Adafactor(logical_factor_rules=optimizers.standard_logical_factor_rules()),
      {'num_microbatches': 2},
    ),
  ],
  ids=['adamw', 'lion', 'adafactor'],
)
def test_only_adapters_and_chosen_parameters_change(optimizer_def, options):
  adapter = adapters.Lora(
    rank=2, targets='all', dropout_rate=0.1, also_train=('encoder_norm/scale$',)
  )
  model = _small_model(adapter, optimizer_def)
  first, last, metrics, state = _train(model, 20, _one_device(), **options)
  trained = set()
  for path, before in tree_utils.named_leaves(first):
    after = dict(tree_utils.named_leaves(last))[path]
    if '/lora_' in path or path == 'encoder/encoder_norm/scale':
      assert (before != after).any(), path
      trained.add(path)
    else:
      np.testing.assert_array_equal(after, before)
  states = [path for path, _ in tree_utils.named_leaves(state.state_dict()['state'])]
  frozen = {path for path, _ in tree_utils.named_leaves(first)} - trained
  assert not any(path in name for path in frozen for name in states)
  assert metrics['adapter/without_gradient'].value == 0


def test_a_float32_base_trains_as_frozen_parameters_do():
  """The same arrays, of which a part of an optimizer selects those of the adapter, without rounding of the others."""
  _, expected, _, _ = _train(_small_model(adapters.Lora(rank=2)), 3, _one_device())
  _, found, _, _ = _train(
    _small_model(adapters.Lora(rank=2, base_dtype='float32')), 3, _one_device()
  )
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize('num_partitions', [1, 2])
def test_meshes_agree_with_one_device(num_partitions):
  model = _small_model(adapters.Lora(rank=2, targets='all'), optimizers.sgd())
  _, expected, metrics, _ = _train(model, 2, _one_device())
  _, found, others, _ = _train(model, 2, num_partitions=num_partitions)
  np.testing.assert_allclose(others['loss'].value, metrics['loss'].value, rtol=2e-6)
  for (path, a), b in zip(tree_utils.named_leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1, np.abs(b).max()), err_msg=path)


def test_a_later_optimizer_file_trains_only_the_adapters():
  files = ['recipes/keyword_cloze.gin', 'adapters/lora.gin', 'optimizers/lion.gin']
  placeholders = {'MODEL_DIR': "'unused'", 'INITIAL_CHECKPOINT_PATH': "'unused'"}
  texts = gin_utils.read(files, placeholders=placeholders)
  model = gin_utils.load('t5x_lite.apps.train.train', texts).argument('model')
  assert model.optimizer_def.name == 'MultiOptimizer(lion)'
  assert model.adapter == adapters.Lora()


def test_an_optimizer_must_train_all_adapters():
  """Otherwise some would silently stay as they are."""
  optimizer_def = optimizers.MultiOptimizer([('^encoder/', optimizers.sgd(0.1))])
  model = _small_model(adapters.Lora(rank=2), optimizer_def)
  with pytest.raises(
    ConfigError,
    match=r'the optimizer MultiOptimizer.* trains.* freezes decoder/layers_0/.*lora_a.*adamw',
  ):
    _train(model, 1, _one_device())


# ---- Bad inputs ------------------------------------------------------------------------------------------------------


class _Custom(nn.Module):
  """Feed-forward block whose product does not look for adapters."""

  @nn.compact
  def __call__(self, x, decode=False, deterministic=False):
    kernel = self.param('kernel', nn.initializers.ones, (x.shape[-1], x.shape[-1]))
    return x @ kernel


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(rank=0), '`Lora.rank` must be an integer >= 1, got 0'),
    (dict(alpha=0), '`Lora.alpha` must be a number > 0'),
    (dict(dropout_rate=1.0), '`Lora.dropout_rate` must be'),
    (dict(init='pissa'), "`Lora.init` must be one of 'default', 'gaussian'"),
    (dict(targets='('), '`Lora.targets` must be names of sets .*query_value'),
    (dict(targets=()), '`Lora.targets` must be names of sets'),
    (dict(rank_pattern=[('query', 0)]), '`Lora.rank_pattern` must be pairs'),
    (dict(base_dtype='int8'), "`Lora.base_dtype` must be one of 'bfloat16'"),
  ],
)
def test_invalid_options_raise(options, message):
  with pytest.raises(ConfigError, match=message):
    adapters.Lora(**options)


@pytest.mark.parametrize(
  'options, message',
  [
    (
      dict(rank=17),
      '`Lora.rank` must be at most 16 for encoder/layers_0/.*, a kernel from 16 to 16',
    ),
    (
      dict(targets='wq'),
      "`Lora.targets` must be .* each match a kernel, got 'wq'. Kernels are .*/kernel",
    ),
    (
      dict(targets=('query_value', 'token_embedder')),
      'token_embedder/embedding, which is a table: .*tied',
    ),
    (dict(targets='logits_dense'), 'decoder/logits_dense/kernel, which is neither'),
    (dict(targets='rel_embedding'), 'which is a table'),
    (dict(targets='norm/scale'), 'which is not a kernel'),
    (dict(rank_pattern=[('mlp', 2)]), "`Lora.rank_pattern` must be .*, got 'mlp'"),
    (dict(alpha_pattern=[('mlp', 2)]), "`Lora.alpha_pattern` must be .*, got 'mlp'"),
    (dict(alpha_pattern=[('.', 2), ('query', 3)]), "must be .* the first match .*, got 'query'"),
    (dict(also_train=['no_such']), "`Lora.also_train` must be .*, got 'no_such'"),
  ],
)
def test_options_that_do_not_fit_the_network_raise(options, message):
  model = cases.make_model(adapters.Lora(**options), logits_via_embedding=False)
  with pytest.raises(ConfigError, match=message):
    cases.initial_variables(model)


def _custom_block(config, name):
  del config
  return _Custom(name=name)


def _custom_everywhere(stack, layer):
  del stack, layer
  return _custom_block


def test_a_kernel_of_a_custom_product_is_an_error_and_in_no_set():
  with pytest.raises(ConfigError, match='mlp/kernel, which is neither'):
    cases.initial_variables(
      cases.make_model(adapters.Lora(rank=2, targets='mlp'), feed_forward=_custom_everywhere)
    )
  variables = cases.initial_variables(
    cases.make_model(adapters.Lora(rank=2, targets='all'), feed_forward=_custom_everywhere)
  )
  assert 'lora_a' in variables['params']['encoder']['layers_0']['attention']['query']
  assert set(variables['params']['encoder']['layers_0']['mlp']) == {'kernel'}


def test_parameters_of_an_adapter_without_its_model_raise():
  params = cases.initial_variables(cases.make_model(_ALL))['params']
  with pytest.raises(ConfigError, match='have an adapter .*/lora_a.*, but not its scale'):
    cases.make_model(None).loss_fn(params, cases.BATCH, None)


def test_options_of_updates_that_concern_all_parameters_raise():
  with pytest.raises(
    ConfigError, match='param_dtype` must be unset with an adapter.*Lora.base_dtype'
  ):
    cases.make_model(
      _ALL, optimizers.with_update_options(optimizers.adamw(0.1), param_dtype='bfloat16')
    )
  with pytest.raises(ConfigError, match='EncoderDecoderModel.adapter. must be an adapters.Lora'):
    cases.make_model(8)
