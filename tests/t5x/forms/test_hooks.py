"""Subclasses of models and trainers that override T5X's private methods, which take effect as in T5X."""

import functools
import importlib
import inspect
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import compat
from t5x_lite import decoding
from t5x_lite import models
from t5x_lite import networks
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import trainer
from t5x_lite.errors import ConfigError
from t5x_lite.models import batch_metrics
from t5x_lite.networks import t5
from t5x_lite.train_state import FlaxOptimTrainState
from t5x_lite.trainer import step_params
from tests.models import model_cases
from tests.models import toy_model
from tests.networks import network_cases
from tests.optimizers.axes import axes_cases

_FOLDER = pathlib.Path(__file__).parent / 'hooks'


@pytest.fixture(name='form')
def form_fixture(monkeypatch):
  """Return a function that imports a file of a project, in which `t5x` means t5x_lite."""
  before = {*sys.modules}
  monkeypatch.syspath_prepend(_FOLDER)
  compat.install()
  yield importlib.import_module
  for name in {*sys.modules} - before:
    path = getattr(sys.modules[name], '__file__', None) or ''
    if name.partition('.')[0] == 't5x' or path.startswith(str(_FOLDER)):
      del sys.modules[name]


def _optimizer():
  return optimizers.OptaxWrapper(optax.adam(0.1))


def _train(model, variables, batch, num_steps=2, num_microbatches=None):
  """Return (parameters, metrics of the last step) after steps of training without dropout."""
  state = FlaxOptimTrainState.create(model.optimizer_def, variables)
  step = jax.jit(
    functools.partial(
      trainer.train_with_lr,
      learning_rate=None,
      dropout_rng=None,
      model=model,
      num_microbatches=num_microbatches,
    )
  )
  for _ in range(num_steps):
    state, metrics = step(state, batch)
  return state.params, metrics


def _evaluate(model, variables, batch):
  state = FlaxOptimTrainState.create(model.optimizer_def, variables)
  return trainer.eval_step(model, state, batch)


def _value(metrics, name):
  return float(metrics[name].compute())


def _assert_equal(left, right, **options):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **options), left, right)


def test_a_dual_encoder_trains_and_is_evaluated_by_its_loss(form):
  module = form('dual_encoder')
  vocabulary = model_cases.Vocabulary()
  model = module.DualEncoder(module.Towers(), vocabulary, vocabulary, _optimizer())
  rng = np.random.default_rng(0)
  batch = {side: jnp.asarray(rng.integers(1, 11, (8, 5)), jnp.int32) for side in ('left', 'right')}
  shapes = model_cases.shapes_of(batch)
  variables = model.get_initial_variables(jax.random.key(0), shapes)

  def expected_loss(params):
    left, right = (params['Embed_0']['embedding'][batch[side]].sum(axis=1) for side in shapes)
    logits = left @ right.T
    both = jax.nn.log_softmax(logits, axis=0) + jax.nn.log_softmax(logits, axis=1)
    return -jnp.mean(jnp.diag(both)), jnp.sum(left**2)

  expected, norm = expected_loss(variables['params'])
  metrics = _evaluate(model, variables, batch)
  assert {*metrics} == {'loss', 'norm'}
  assert _value(metrics, 'loss') == pytest.approx(float(expected), rel=1e-5)
  assert _value(metrics, 'norm') == pytest.approx(float(norm), rel=1e-5)
  params, _ = _train(model, variables, batch, num_steps=1)
  grads = jax.grad(lambda params: expected_loss(params)[0])(variables['params'])
  updates, _ = optax.adam(0.1).update(grads, optax.adam(0.1).init(variables['params']))
  _assert_equal(params, optax.apply_updates(variables['params'], updates), rtol=1e-3, atol=1e-5)


def test_a_prompt_of_the_model_equals_one_in_the_batch(form):
  model = model_cases.make_model(model_cls=form('prompted').PromptedModel)
  plain = model_cases.make_model()
  model.optimizer_def = plain.optimizer_def = _optimizer()
  batch = model_cases.make_batch()
  inputs = batch['encoder_input_tokens']
  prompted = {**batch, 'encoder_input_tokens': jnp.pad(inputs, ((0, 0), (2, 0)))}
  prompted['encoder_input_tokens'] = prompted['encoder_input_tokens'].at[:, :2].set([7, 8])
  variables = model.get_initial_variables(jax.random.key(0), model_cases.shapes_of(batch))
  params, metrics = _train(model, variables, batch, num_microbatches=2)
  expected, expected_metrics = _train(plain, variables, prompted, num_microbatches=2)
  _assert_equal(params, expected, rtol=1e-5, atol=1e-6)
  assert _value(metrics, 'loss') == pytest.approx(_value(expected_metrics, 'loss'), rel=1e-5)
  other, _ = _train(plain, variables, batch, num_microbatches=2)
  assert not np.allclose(params['embed']['embedding'], other['embed']['embedding'], atol=1e-3)
  for name in ('loss', 'accuracy', 'z_loss'):
    assert _value(_evaluate(model, variables, batch), name) == pytest.approx(
      _value(_evaluate(plain, variables, prompted), name), rel=1e-5
    )
  np.testing.assert_allclose(
    model.score_batch(params, batch), plain.score_batch(params, prompted), rtol=1e-5
  )
  np.testing.assert_array_equal(
    model.predict_batch(params, batch), plain.predict_batch(params, prompted)
  )


def test_a_step_of_decoding_changes_logits_as_a_callback_does(form):
  vocabulary = types.SimpleNamespace(vocab_size=24, eos_id=1, pad_id=0)
  config = networks.TransformerConfig(
    vocab_size=24, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=24, num_layers=1
  )
  decode_fn = functools.partial(decoding.temperature_sample, temperature=0.0)

  def make(model_cls):
    return model_cls(
      networks.DecoderWrapper(config),
      vocabulary,
      None,
      decode_fn=decode_fn,
      inputs_bidirectional_attention=True,
    )

  plain = make(models.DecoderOnlyModel)
  inputs = np.zeros((3, 10), np.int32)
  prefix = np.zeros((3, 10), np.int32)
  for row, num in enumerate((2, 4, 0)):
    inputs[row, 1 : num + 1] = np.arange(num) + 5 + row
    prefix[row, : num + 1] = 1
  batch = {'decoder_input_tokens': inputs, 'decoder_causal_attention': prefix}
  batch = {name: jnp.asarray(array) for name, array in batch.items()}
  params = plain.get_initial_variables(jax.random.key(0), model_cases.shapes_of(batch))['params']

  def exclude_current(logits, state):
    current = jax.nn.one_hot(state.cur_token[:, 0], logits.shape[-1], dtype=bool)
    return jnp.where(current, decoding.NEG_INF, logits)

  def predict(model, **decoder_params):
    function = functools.partial(model.predict_batch_with_aux, decoder_params=decoder_params)
    return network_cases.jit(function)(params, batch)[0]

  expected = predict(plain, logit_callback_fn=exclude_current)
  found = predict(make(form('repeats_nothing').RepeatsNothing))
  np.testing.assert_array_equal(found, expected)
  assert not np.array_equal(found, predict(plain))


@functools.cache
def _ensemble_variables(model):
  shapes = model_cases.shapes_of(model_cases.make_batch())
  return model.get_initial_variables(jax.random.key(0), shapes)


@pytest.mark.parametrize('num_microbatches', [None, 2])
def test_an_ensemble_trains_its_members_and_reports_their_mean(form, num_microbatches):
  model = model_cases.make_model(model_cls=form('ensemble').Ensemble)
  plain = model_cases.make_model()
  model.optimizer_def = plain.optimizer_def = _optimizer()
  batch = model_cases.make_batch()
  variables = _ensemble_variables(model)
  params, metrics = _train(model, variables, batch, 1, num_microbatches)
  logits = []
  total = 0.0
  for member in range(2):
    one = jax.tree.map(lambda leaf: leaf[member], variables)  # pylint: disable=cell-var-from-loop
    expected, expected_metrics = _train(plain, one, batch, 1, num_microbatches)
    found = jax.tree.map(lambda leaf: leaf[member], params)  # pylint: disable=cell-var-from-loop
    _assert_equal(found, expected, rtol=1e-3, atol=1e-4)
    logits.append(plain.compute_logits(one['params'], batch)[0])
    total += _value(expected_metrics, 'loss')
  assert _value(metrics, 'loss') == pytest.approx(total, rel=1e-5)
  weights = batch['decoder_loss_weights']
  mean_logits = sum(logits) / 2
  correct, count = batch_metrics.compute_weighted_accuracy(
    mean_logits, batch['decoder_target_tokens'], weights
  )
  assert _value(metrics, 'accuracy') == pytest.approx(float(correct / count))
  # T5X divides the loss that it is given by the tokens.
  assert _value(metrics, 'loss_per_nonpadding_target_token') == pytest.approx(
    total / float(weights.sum()), rel=1e-5
  )


def test_an_ensemble_of_former_versions_decodes_with_ids_and_cache(form):
  model = model_cases.make_model(
    model_cls=form('ensemble').Ensemble, decode_fn=decoding.temperature_sample
  )
  plain = model_cases.make_model(decode_fn=decoding.temperature_sample)
  batch = model_cases.make_batch()
  params = _ensemble_variables(model)['params']
  first = jax.tree.map(lambda leaf: leaf[0], params)

  def exclude(logits, state):
    del state
    return logits.at[:, 3].set(-1e7)

  options = {'temperature': 0.0}
  found, _ = model.predict_batch_with_aux(params, batch, decoder_params=options)
  expected, _ = plain.predict_batch_with_aux(
    first, batch, decoder_params={**options, 'logit_callback_fn': exclude}
  )
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize('has_own_rate', [False, True])
def test_a_trainer_that_prunes_equals_masked_parameters_and_gradients(form, has_own_rate):
  module = form('masked_trainer')
  optimizer = optimizers.adamw()
  if has_own_rate:  # T5X calls the schedule of the trainer, and this optimizer ignores it.
    optimizer = _optimizer()
  model = toy_model.make_model(optimizer)
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  batches = [toy_model.make_batch(seed=seed) for seed in range(3)]
  masks = jax.tree.map(
    lambda x: (np.arange(x.size).reshape(x.shape) % 3 > 0).astype(np.float32),
    toy_model.make_state(model).params,
  )
  mask = functools.partial(module.pruned, masks=masks)

  def make(trainer_cls, prunes, **options):
    state = toy_model.make_state(model)
    if prunes:
      state = state.replace_params(mask(state.params))
    return trainer_cls(
      model,
      state,
      partitioner,
      ['validation'],
      None,
      partitioner.get_mesh_axes(state),
      jax.random.key(0),
      learning_rate_fn=lambda step: 0.1 / (1.0 + step),
      num_microbatches=2,
      weight_metrics_computer=trainer.WeightMetricsComputer(),
      **options,
    )

  # AdamW leaves a parameter without gradients at zero, so pruning once and masking gradients is the same.
  pruning = make(module.MaskedTrainer, False, masks=masks)
  plain = make(trainer.Trainer, True, gradient_transform=mask)
  values = []
  for each in (pruning, plain):
    each.compile_train(batches[0])
    each.compile_eval({'validation': batches[0]})
    found = dict(each.train(iter(batches), 3).result())
    values.append((found, each.eval({'validation': batches[:2]})['validation']))
  for found, expected in zip(*values, strict=True):
    assert float(found['loss'].value) == pytest.approx(float(expected['loss'].value), rel=1e-5)
  assert any(name.startswith('weight_rms/') for name in values[0][0])
  _assert_equal(mask(pruning.train_state.params), plain.train_state.params, rtol=1e-4, atol=1e-5)


_VALUES_OF_OPTIONS = {
  'gradient_transform': lambda grads: grads,
  'gradient_clip_norm': 1.0,
  'non_finite_policy': trainer.NonFinitePolicy(action='skip'),
  'train_dtype': 'bfloat16',
  'param_noise': step_params.GaussianParamNoise([('.*', 0.1)]),
}
_OURS = [
  name
  for name, parameter in inspect.signature(trainer.Trainer.__init__).parameters.items()
  if parameter.kind is parameter.KEYWORD_ONLY
]


@pytest.mark.parametrize('calls_super', [False, True])
@pytest.mark.parametrize('option', [*_OURS, 'qk_clip_threshold'])
def test_options_that_t5x_does_not_have_need_our_step(form, option, calls_super):
  """A step of T5X's reads the options that T5X has: the others have no effect unless it calls ours."""
  cls = form('masked_trainer').MaskedTrainer
  if calls_super:
    cls = type('Calls', (trainer.Trainer,), {'_partitioned_train_step': property(_step_of_super)})
  masks = {} if calls_super else {'masks': None}
  options = {}
  model = toy_model.make_model(_optimizer())
  state = toy_model.make_state(model)
  if option in _VALUES_OF_OPTIONS:
    options = {option: _VALUES_OF_OPTIONS[option]}
  else:
    model.module = t5.Transformer(network_cases.tiny_config(qk_clip_threshold=2.0))
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  axes = partitioner.get_mesh_axes(state)
  made = cls(model, state, partitioner, [], None, axes, jax.random.key(0), **masks, **options)
  if calls_super:
    made.make_train_step()
    return
  name = {'non_finite_policy': 'action'}.get(option, option)
  with pytest.raises(ConfigError, match=f'[.]{name}` must be .* the training step of MaskedTra'):
    made.compile_train(toy_model.make_batch())


def _step_of_super(self):
  return super(type(self), self)._partitioned_train_step


@pytest.mark.parametrize('has_own_rate', [False, True])
def test_a_trainer_may_replace_the_schedule_of_its_constructor(form, has_own_rate):
  module = form('scaled_rate')
  optimizer = optimizers.adamw()
  if has_own_rate:  # It ignores the rate of the trainer.
    optimizer = _optimizer()
  model = toy_model.make_model(optimizer)
  partitioner = partitioning.PjitPartitioner(num_partitions=1)

  def train(trainer_cls, schedule):
    state = toy_model.make_state(model)
    made = trainer_cls(
      model,
      state,
      partitioner,
      [],
      None,
      partitioner.get_mesh_axes(state),
      jax.random.key(0),
      learning_rate_fn=schedule,
      num_microbatches=None,
    )
    found = made.train(iter([toy_model.make_batch()]), 1).result()
    return made.learning_rate_fn, found, made.train_state.params

  rate, found, params = train(module.Trainer, lambda step: 0.2 / (1 + step))
  expected_rate, expected, expected_params = train(trainer.Trainer, lambda step: 0.1 / (1 + step))
  _assert_equal(params, expected_params, rtol=1e-6)
  if has_own_rate:
    assert rate is expected_rate is None
    assert 'learning_rate' not in found
  else:
    assert rate(1) == expected_rate(1) == 0.05
    assert found['learning_rate'].value == expected['learning_rate'].value


def test_rules_of_t5x_give_the_axes_of_states(form, monkeypatch):
  # Without the assignments of other files, and to undo those of this one.
  monkeypatch.setattr(optimizers.OptaxStatePartitionRules, '_RULES', {})
  module = form('sparse_optimizer')
  shapes = jax.tree.map(lambda shape: jnp.ones(shape.shape), axes_cases.SHAPES)
  optimizer = module.optimizer.create(shapes)
  axes = optimizer.optimizer_def.derive_logical_axes(optimizer, axes_cases.AXES)
  found = axes.state.param_states
  assert found.masks == axes_cases.AXES and found.count == P()
  assert found.sparsities == axes_cases.each(lambda shape: P(None))
  row, column = found.inner_state.v_row['dense'], found.inner_state.v_col['dense']
  assert {row['kernel'], column['kernel']} == {P('embed'), P('mlp')}
  assert found.inner_state.v['dense']['bias'] == P('mlp') and found.inner_state.count == P()
  del optimizers.OptaxStatePartitionRules._RULES[optax.FactoredState]
  without = optimizer.optimizer_def.derive_logical_axes(optimizer, axes_cases.AXES)
  assert without.state.param_states.inner_state.v_row['dense']['kernel'] == P('embed')


def test_a_search_of_the_model_equals_one_by_full_passes(form):
  module = form('own_search')
  config = network_cases.tiny_config(
    vocab_size=model_cases.VOCAB_SIZE, num_encoder_layers=1, num_decoder_layers=1
  )
  model = model_cases.make_model(t5.Transformer(config), module.OwnSearch)
  batch = model_cases.make_batch(rows=2, length=5)
  params = model.get_initial_variables(jax.random.key(0), model_cases.shapes_of(batch))['params']
  found, aux = network_cases.jit(model.predict_batch_with_aux)(params, batch)
  inputs = jnp.repeat(batch['encoder_input_tokens'], 3, axis=0)

  def full_pass(state):
    tokens = state.sequences[:, :-1]
    logits = model.module.apply(
      {'params': params}, inputs, tokens, jnp.ones_like(tokens), enable_dropout=False
    )
    return logits[:, state.cur_index], {}

  expected, scores = network_cases.jit(lambda: module.search(full_pass, {}, 2, 3, 5))()
  np.testing.assert_array_equal(found, expected[:, -1])
  np.testing.assert_allclose(aux['scores'], scores[:, -1], rtol=1e-4)
