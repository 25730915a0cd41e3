"""QK-clip scales the kernels of exactly the heads above the threshold, in every form of a step."""

import functools

import clu.metrics
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import adapters
from t5x_lite import data
from t5x_lite import layer_stacks
from t5x_lite import layers
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import train_state as train_state_lib
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.models import qk_clip
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5
from t5x_lite.trainer import averaging
from t5x_lite.trainer import train_step
from t5x_lite.trainer import trainer as trainer_lib
from tests.networks import network_cases as cases

# Between the largest scores of the heads of this network.
_THRESHOLD = 2.1
_RATE = 0.5
_BATCH = cases.tiny_batch(batch=8)
_VOCABULARY = data.PassThroughVocabulary(40, eos_id=1)


def _config(**fields):
  return cases.tiny_config(**{'num_decoder_layers': 2, **fields})


def _model(optimizer_def=None, adapter=None, network_fields=None, **fields):
  config = _config(**{'qk_clip_threshold': _THRESHOLD, **fields})
  return models.EncoderDecoderModel(
    t5.Transformer(config, **(network_fields or {})),
    _VOCABULARY,
    _VOCABULARY,
    optimizer_def or optimizers.sgd(),
    adapter=adapter,
  )


def _state(model, param_ema=None):
  """Return a state with parameters that do not depend on the parameter layout; with an adapter, of zeros."""
  shapes = {name: x.shape for name, x in _BATCH.items()}
  init = functools.partial(model.get_initial_variables, input_shapes=shapes)
  variables = dict(jax.eval_shape(init, jax.random.key(0)))
  if model.adapter is None:
    config = model.module.config
    params = param_layouts.convert(_params(), 't5', config.param_layout, config)
    variables['params'] = jax.tree.map(jnp.asarray, params)
  else:
    variables['params'] = jax.tree.map(lambda x: jnp.zeros(x.shape), variables['params'])
  return train_state_lib.FlaxOptimTrainState.create(model.optimizer_def, variables, param_ema)


@functools.cache
def _params():
  return cases.random_params(_config())


def _step(model, state, batch=_BATCH, rate=_RATE, num_microbatches=None, **options):
  fn = functools.partial(
    train_step.train_with_lr, model=model, num_microbatches=num_microbatches, **options
  )
  return cases.jit(fn)(state, batch, jnp.float32(rate), None)


def _attentions(model, params, batch=_BATCH):
  """Return (inputs of queries, inputs of keys) by path of each attention of a pass of layout 't5'."""
  found = {}

  def record(call, args, kwargs, context):
    is_attention = isinstance(context.module, layers.MultiHeadDotProductAttention)
    if is_attention and context.method_name == '__call__':
      # A layer is applied by itself: the order of the calls is that of the layers.
      found.setdefault(context.module.name, []).append(tuple(map(np.asarray, args)))
    return call(*args, **kwargs)

  with nn.intercept_methods(record):
    model.module.apply({'params': params}, **batch, enable_dropout=False)
  paths = {}
  for name, calls in found.items():
    stack = 'encoder' if name == 'attention' else 'decoder'
    for layer, inputs in enumerate(calls):
      paths[f'{stack}/layers_{layer}/{name}'] = inputs
  return paths


def _largest(path, inputs, flat_params, heads=2):
  """Return [heads], the largest score of tokens, computed in float64."""
  projected = [
    (x.astype(np.float64) @ flat_params[f'{path}/{name}/kernel']).reshape(*x.shape[:2], heads, -1)
    for name, x in zip(('query', 'key'), inputs, strict=True)
  ]
  inputs_are_tokens, targets_are_tokens = (
    np.asarray(_BATCH[name]) > 0 for name in ('encoder_input_tokens', 'decoder_target_tokens')
  )
  is_query = inputs_are_tokens if path.startswith('encoder') else targets_are_tokens
  is_key = targets_are_tokens if path.endswith('/self_attention') else inputs_are_tokens
  visible = is_query[:, :, None] & is_key[:, None]
  if path.endswith('/self_attention'):
    visible &= np.tril(np.ones(visible.shape[1:], bool))
  scores = np.einsum('bqhd,bkhd->bhqk', *projected)
  return np.max(np.where(visible[:, None], scores, 0), axis=(0, 2, 3))


def _flat(params):
  """Return NumPy arrays by path."""
  return {path: np.asarray(leaf) for path, leaf in tree_utils.named_leaves(params)}


@functools.cache
def _reference():
  """Return (largest scores by path of the attention, parameters after the clip) of a step."""
  model = _model(qk_clip_threshold=None)
  state = _state(model)
  before = _flat(state.params)
  attentions = _attentions(model, state.params)
  after = _flat(_step(model, state)[0].params)
  largest = {path: _largest(path, inputs, before) for path, inputs in attentions.items()}
  for path, scores in largest.items():
    factors = np.repeat(np.sqrt(np.minimum(_THRESHOLD / scores, 1)), 8)
    for name in ('query', 'key'):
      after[f'{path}/{name}/kernel'] = after[f'{path}/{name}/kernel'] * factors
  return largest, after


def _assert_equal(params, expected):
  flat = _flat(params)
  assert flat.keys() == expected.keys()
  for path, array in expected.items():
    np.testing.assert_allclose(flat[path], array, rtol=2e-5, atol=2e-6, err_msg=path)


def test_heads_above_the_threshold_are_clipped():
  largest, expected = _reference()
  model = _model()
  state, metrics = _step(model, _state(model))
  _assert_equal(state.params, expected)
  scores = np.stack([largest[path] for path in metrics[qk_clip.CLIPPED_HEADS].paths])
  np.testing.assert_allclose(metrics[qk_clip.CLIPPED_HEADS].scores, scores, rtol=1e-5)
  assert len(scores) == 2 + 2 * 2
  assert metrics[qk_clip.MAX_SCORE].compute() == pytest.approx(scores.max(), rel=1e-5)
  num_clipped = np.sum(scores > _THRESHOLD)
  assert metrics[qk_clip.CLIPPED_HEADS].compute() == num_clipped
  assert 0 < num_clipped < scores.size


def test_without_an_update_the_largest_scores_become_the_threshold():
  """For the inputs of the step; those of later layers change with the scores of earlier ones."""
  model = _model()
  state = _state(model)
  attentions = _attentions(model, state.params)
  new_state, _ = _step(model, state, rate=0.0)
  clipped = _flat(new_state.params)
  for path, inputs in attentions.items():
    before = _largest(path, inputs, _flat(state.params))
    after = _largest(path, inputs, clipped)
    np.testing.assert_allclose(after, np.minimum(before, _THRESHOLD), rtol=1e-5)
  for path, param in _flat(state.params).items():
    if not path.endswith(('/query/kernel', '/key/kernel')):
      np.testing.assert_array_equal(clipped[path], param)


@pytest.mark.parametrize(
  'fields, num_microbatches',
  [
    ({'scan_layers': True}, None),
    ({}, 4),
    ({'attention_kernel': 'blockwise', 'remat_policy': 'full'}, 2),
    ({'param_layout': 'scalable_t5'}, 2),
  ],
  ids=['scan', 'microbatches', 'blocks', 'scalable_t5'],
)
def test_every_form_of_a_step_clips_alike(fields, num_microbatches):
  model = _model(**fields)
  state, metrics = _step(model, _state(model), num_microbatches=num_microbatches)
  params = state.params
  expected = _reference()[1]
  if fields.get('param_layout') == 'scalable_t5':
    # With a table of position biases per layer, whose gradients are not those of a shared one.
    per_layer = _config(relpos_bias_tables='per_layer')
    params = param_layouts.convert(params, 'scalable_t5', 't5', per_layer)
    params, expected = (
      {path: array for path, array in flat.items() if 'relpos_bias' not in path}
      for flat in (_flat(params), expected)
    )
  _assert_equal(params, expected)
  largest = max(scores.max() for scores in _reference()[0].values())
  assert metrics[qk_clip.MAX_SCORE].compute() == pytest.approx(largest, rel=1e-5)


def test_stacked_layers_are_clipped_alike():
  model = _model(scan_layers=True)
  stacks = layer_stacks.LayerStacks((('encoder', (0, 1)), ('decoder', (1, 0))))
  state, _ = _step(model, _state(model).stack_layers(stacks))
  assert 'layers_1,0' in state.params['decoder']
  _assert_equal(state.unstack_layers(stacks).params, _reference()[1])


def _partitioner(data_size, model_size):
  devices = np.array(jax.devices()[: data_size * model_size]).reshape(data_size, model_size)
  axis_types = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.sharding.Mesh(devices, ('data', 'model'), axis_types=axis_types)
  return partitioning.PjitPartitioner(mesh=mesh)


@pytest.mark.parametrize('kernel', ['dot', pytest.param('blockwise', marks=pytest.mark.full)])
def test_a_run_on_eight_devices_clips_alike_and_writes_the_metrics(kernel, tmp_path):
  model = _model(attention_kernel=kernel)
  state = _state(model)
  partitioner = _partitioner(4, 2)
  trainer = trainer_lib.Trainer(
    model,
    state,
    partitioner,
    (),
    str(tmp_path),
    partitioner.get_mesh_axes(state),
    jax.random.key(0),
    learning_rate_fn=lambda step: _RATE,
  )
  batch = {name: np.asarray(x) for name, x in _BATCH.items()}
  with trainer:
    summary = trainer.train(iter([batch]), 1).result()
    _assert_equal(trainer.train_state.params, _reference()[1])
  largest = np.stack(list(_reference()[0].values()))
  assert summary[qk_clip.MAX_SCORE].value == pytest.approx(largest.max(), rel=1e-5)
  assert summary[qk_clip.CLIPPED_HEADS].value == np.sum(largest > _THRESHOLD)


def test_metrics_of_several_steps_are_those_of_the_largest_scores():
  def metric(scores):
    return qk_clip.ClippedHeads(scores=jnp.array(scores), paths=('a', 'b'), threshold=2.0)

  merged = metric([[1.0, 3.0], [0.0, 1.0]]).merge(metric([[2.5, 0.0], [2.0, 1.0]]))
  np.testing.assert_array_equal(merged.scores, [[2.5, 3.0], [2.0, 1.0]])
  assert merged.compute() == 2


def test_scores_that_are_not_finite_leave_kernels_as_they_are():
  scores = jnp.array([[8.0, np.inf, np.nan]])
  metrics = {
    qk_clip.CLIPPED_HEADS: qk_clip.ClippedHeads(scores=scores, paths=('a',), threshold=2.0)
  }
  params = {'a': {'query': {'kernel': jnp.ones([1, 6])}}}
  config = _config(qk_clip_threshold=2.0)
  clipped = qk_clip.clip(params, config, metrics, frozen=(), stored={})
  np.testing.assert_array_equal(clipped['a']['query']['kernel'], [[0.5, 0.5, 1, 1, 1, 1]])


@pytest.mark.parametrize('excess, is_scaled', [(1.003, False), (1.02, True)])
def test_factors_near_1_are_lost_in_bfloat16(excess, is_scaled):
  """A factor above 1 - 2**-9 is less than half of the spacing from any number."""
  scores = jnp.array([[2.0 * excess]])
  metrics = {
    qk_clip.CLIPPED_HEADS: qk_clip.ClippedHeads(scores=scores, paths=('a',), threshold=2.0)
  }
  kernel = jnp.linspace(-2.0, 2.0, 64, dtype=jnp.bfloat16)[None]
  params = {'a': {'query': {'kernel': kernel}}}
  config = _config(qk_clip_threshold=2.0)
  clipped = qk_clip.clip(params, config, metrics, frozen=(), stored={})
  assert bool(jnp.any(clipped['a']['query']['kernel'] != kernel)) == is_scaled


def test_averages_are_those_of_clipped_parameters():
  model = _model()
  state, _ = _step(model, _state(model, averaging.ParamEma(decay=0.0)))
  _assert_equal(state.param_average, _reference()[1])


def test_a_skipped_update_does_not_clip():
  model = _model()
  state = _state(model)
  new_state, _ = _step(
    model,
    state,
    gradient_transform=lambda grads: jax.tree.map(lambda grad: grad * jnp.nan, grads),
    non_finite_action='skip',
  )
  for path, param in _flat(state.params).items():
    np.testing.assert_array_equal(_flat(new_state.params)[path], param)


def _program(fn, *args):
  return str(jax.make_jaxpr(fn)(*args))


def test_only_training_steps_read_scores():
  on = _model()
  off = _model(qk_clip_threshold=None)
  state = _state(on)
  rng = jax.random.key(0)
  counts = []
  for model in (on, off):
    step = functools.partial(
      train_step.train_with_lr, model=model, num_microbatches=None, dropout_rng=None
    )
    counts.append(_program(step, state, _BATCH, jnp.float32(0.1)).count('reduce_max'))
  # Maxima over keys and over queries and rows, in the functions of the two kinds of layers.
  assert counts[0] > counts[1]
  assert qk_clip.CLIPPED_HEADS not in jax.eval_shape(off.loss_fn, state.params, _BATCH, rng)[1]
  assert off.params_constraint({}, frozenset(), {}) is None
  for method in ('eval_fn', 'score_batch', 'predict_batch'):
    programs = [_program(getattr(model, method), state.params, _BATCH) for model in (on, off)]
    assert programs[0] == programs[1], method


class _OwnLoss(models.EncoderDecoderModel):
  """Model that does not read the scores of attention."""

  def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
    logits, _ = self.compute_logits(params, batch, dropout_rng)
    loss = jnp.mean(jnp.square(logits))
    return loss, {'loss': clu.metrics.Average.from_model_output(loss.reshape(1))}


def _custom_attention(stack, layer):
  del stack, layer
  return functools.partial(t5.t5_attention, block=layers.MultiHeadDotProductAttention)


def _shapes_of_step(model):
  """Trace a step."""
  state = _state(model)
  step_params = train_step.step_params_of(
    state, train_step.StepParams(), layer_stacks.LayerStacks(), model.adapter
  )
  step = functools.partial(
    train_step.train_with_lr,
    model=model,
    num_microbatches=None,
    dropout_rng=None,
    step_params=step_params,
  )
  return jax.eval_shape(step, state, _BATCH, jnp.float32(_RATE))


def _sam(**options):
  return optimizers.sam(optimizers.sgd(), optax.sgd(0.1), **options)


@pytest.mark.parametrize(
  'optimizer_def',
  [
    _sam(opaque_mode=True),
    optimizers.MultiOptimizer(
      [
        ('(query|key)/kernel$', optimizers.sgd()),
        ('^(?!.*(query|key)/kernel$)', optimizers.mechanize(optimizers.sgd())),
      ]
    ),
  ],
  ids=['sam in opaque_mode', 'mechanize for others'],
)
def test_optimizers_that_keep_the_scaling_are_accepted(optimizer_def):
  metrics = _shapes_of_step(_model(optimizer_def))[1]
  assert qk_clip.CLIPPED_HEADS in metrics


@pytest.mark.parametrize(
  'case, message',
  [
    ('frozen', r'must be None if decoder/layers_\S+/key/kernel is frozen or has an adapter'),
    ('adapter', r'must be None if \S+/key/kernel is frozen or has an adapter'),
    ('trained base', r'must be None if \S+/query/kernel is frozen or has an adapter'),
    ('own loss', 'must be None for a model without scores of attention'),
    ('own attention', 'must be None with a custom attention_fn'),
    ('mechanize', r'must be None if mechanize trains \S+/key/kernel, whose next update undoes it'),
    ('cocob', r'must be None if cocob trains \S+/key/kernel, whose next update undoes it'),
    ('sam', r'must be None if sam without opaque_mode trains \S+/key/kernel, whose next update'),
    ('part', r'must be None if mechanize trains encoder/\S+/key/kernel, whose next update'),
  ],
)
def test_what_cannot_be_clipped_is_rejected_before_the_first_step(case, message):
  frozen = optimizers.MultiOptimizer(
    [
      (('^encoder/', 'query/kernel$'), optimizers.sgd()),
    ]
  )
  model = {
    'frozen': lambda: _model(frozen),
    'adapter': lambda: _model(adapter=adapters.Lora(rank=2)),
    'trained base': lambda: _model(
      adapter=adapters.Lora(rank=2, also_train=('(query|key)/kernel$',))
    ),
    'own loss': lambda: _OwnLoss(_model().module, _VOCABULARY, _VOCABULARY, optimizers.sgd()),
    'own attention': lambda: _model(network_fields={'attention_fn': _custom_attention}),
    'mechanize': lambda: _model(optimizers.mechanize(optimizers.sgd())),
    'cocob': lambda: _model(optimizers.chain([optimizers.cocob()]), scan_layers=True),
    'sam': lambda: _model(_sam()),
    'part': lambda: _model(
      optimizers.MultiOptimizer(
        [
          ('^encoder/', optimizers.mechanize(optimizers.sgd())),
          ('^(?!encoder/)', optimizers.sgd()),
        ]
      )
    ),
  }[case]()
  with pytest.raises(ConfigError, match=message) as error:
    _shapes_of_step(model)
  assert str(error.value).endswith('got 2.1. Set it to None.')
  assert '`T5Config.qk_clip_threshold`' in str(error.value)


@pytest.mark.parametrize('value', [0, -1.0, float('nan'), '100'])
def test_a_threshold_is_a_positive_number(value):
  with pytest.raises(ConfigError, match='qk_clip_threshold` must be a number > 0 or None, got'):
    cases.tiny_config(qk_clip_threshold=value)
