"""Methods of models and trainers under T5X's names, in subclasses that define or call them."""

import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite import models
from t5x_lite import networks
from t5x_lite import partitioning
from t5x_lite import trainer
from t5x_lite.networks import t5
from tests.models import model_cases as cases
from tests.models import toy_model
from tests.networks import network_cases


@pytest.fixture(name='batch')
def batch_fixture():
  return cases.make_batch()


def _doubled(base):
  class Doubled(base):
    def _compute_logits(self, params, batch, dropout_rng=None):
      return 2 * super()._compute_logits(params, batch, dropout_rng)

  return Doubled


def _shifted(base):
  class Shifted(base):
    def compute_logits(self, params, batch, dropout_rng=None, **options):
      logits, collections = super().compute_logits(params, batch, dropout_rng, **options)
      return logits + 1, collections

  return Shifted


def _tripled_by_a_mixin(base):
  class Mixin:
    def _compute_logits(self, params, batch, dropout_rng=None):
      return 3 * super()._compute_logits(params, batch, dropout_rng)

  return type('Tripled', (Mixin, base), {})


def _unchanged(base):
  return type('Unchanged', (base,), {})


@pytest.mark.parametrize(
  'derivations, expected',
  [
    ((_unchanged,), lambda x: x),
    ((_doubled,), lambda x: 2 * x),
    ((_doubled, _unchanged), lambda x: 2 * x),
    ((_doubled, _shifted), lambda x: 2 * x + 1),
    ((_shifted, _doubled), lambda x: 2 * (x + 1)),
    ((_tripled_by_a_mixin,), lambda x: 3 * x),
    ((_shifted, _tripled_by_a_mixin, _doubled), lambda x: 2 * 3 * (x + 1)),
    ((_tripled_by_a_mixin, _shifted, _unchanged), lambda x: 3 * x + 1),
  ],
)
def test_either_name_calls_the_nearest_definition_and_super_the_one_before(
  batch, derivations, expected
):
  cls = models.EncoderDecoderModel
  for derive in derivations:
    cls = derive(cls)
  model = cases.make_model(model_cls=cls)
  params = cases.initial_params()
  plain = expected(cases.make_model().compute_logits(params, batch)[0])
  np.testing.assert_allclose(model.compute_logits(params, batch)[0], plain, rtol=1e-6)
  np.testing.assert_allclose(model._compute_logits(params, batch), plain, rtol=1e-6)


def test_logits_of_t5x_come_with_the_collections_that_may_change(batch):
  model = cases.make_model(cases.TinySeq2Seq(with_statistics=True))
  variables = cases.initialise(model)
  params, statistics = variables['params'], {'batch_stats': variables['batch_stats']}
  logits = model._compute_logits(params, batch, None, other_variables=statistics)
  assert logits.ndim == 3
  for mutable, found in (
    ('intermediates', {'intermediates'}),
    (['intermediates', 'batch_stats'], {'intermediates', 'batch_stats'}),
    ([], set()),
    (True, {'intermediates', 'batch_stats', 'params'}),
  ):
    again, collections = model._compute_logits(params, batch, None, mutable, statistics)
    assert {*collections} == found
    if 'batch_stats' not in found:  # the mean of this batch changes the logits
      np.testing.assert_array_equal(again, logits)


def test_arguments_reach_logits_of_t5x_only_if_they_have_a_value(batch):
  calls = []

  class Mine(models.EncoderDecoderModel):
    def _compute_logits(self, params, batch, dropout_rng=None, **options):
      calls.append(options)
      return super()._compute_logits(params, batch, dropout_rng, **options)

  model = cases.make_model(model_cls=Mine)
  params = cases.initial_params()
  model.loss_fn(params, batch, None)
  model.eval_fn(params, batch)
  model.score_batch(params, batch)
  _, intermediates = model.score_batch(params, batch, return_intermediates=True)
  assert calls == [{}, {}, {}, {'mutable': ('intermediates',)}]
  assert {'logit_square', 'decoder'} == {*intermediates}
  plain = cases.make_model(model_cls=_doubled(models.EncoderDecoderModel))
  with pytest.raises(
    errors.ConfigError,
    match=r'`Doubled._compute_logits` must be a function of \(params, batch, dropout_rng, mutable\)',
  ):
    plain.score_batch(params, batch, return_intermediates=True)


def _with_loss(base):
  class WithLoss(base):
    def loss_fn(self, params, batch, dropout_rng):
      assert dropout_rng is None
      return jnp.float32(7), {}

  return WithLoss


def _with_evaluation(base):
  class WithEvaluation(base):
    def eval_fn(self, params, batch, flax_mutables=None):
      return jnp.float32(8), {}

  return WithEvaluation


def _with_doubled_evaluation(base):
  class WithDoubledEvaluation(base):
    def eval_fn(self, params, batch, flax_mutables=None):
      loss, metrics = super().eval_fn(params, batch, flax_mutables)
      return 2 * loss, metrics

  return WithDoubledEvaluation


@pytest.mark.parametrize(
  'derivations, expected',
  [
    ((_with_loss, _unchanged), 7),
    ((_with_loss, _with_evaluation), 8),
    ((_with_evaluation, _with_loss), 8),
    ((_with_doubled_evaluation, _with_loss), 14),
    ((_with_loss, _with_doubled_evaluation), 14),
  ],
)
def test_a_loss_of_the_model_is_that_of_evaluations_as_in_t5x(batch, derivations, expected):
  cls = models.EncoderDecoderModel
  for derive in derivations:
    cls = derive(cls)
  model = cases.make_model(model_cls=cls)
  assert model.eval_fn(cases.initial_params(), batch) == (expected, {})


def test_evaluations_by_a_loss_drop_the_new_collections(batch):
  class Mine(models.EncoderDecoderModel):
    def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
      return super().loss_fn(params, batch, dropout_rng, flax_mutables)

  model = cases.make_model(cases.TinySeq2Seq(with_statistics=True), Mine)
  variables = cases.initialise(model)
  statistics = {'batch_stats': variables['batch_stats']}
  _, metrics = model.eval_fn(variables['params'], batch, statistics)
  assert 'accuracy' in metrics


def test_metrics_of_t5x_get_its_arguments_by_name(batch):
  class Mine(models.EncoderDecoderModel):
    def _compute_metrics(self, logits, targets, mask, loss, z_loss=None, segment_ids=None):
      metrics = super()._compute_metrics(logits, targets, mask, loss, z_loss, segment_ids)
      return {'accuracy': metrics['accuracy'], 'mine': metrics['loss'], 'z_loss': metrics['z_loss']}

  model, plain = (
    cases.make_model(model_cls=cls, z_loss=0.1) for cls in (Mine, models.EncoderDecoderModel)
  )
  loss, metrics = model.loss_fn(cases.initial_params(), batch, None)
  expected_loss, expected = plain.loss_fn(cases.initial_params(), batch, None)
  assert float(loss) == float(expected_loss)
  assert {*metrics} == {'accuracy', 'mine', 'z_loss'}
  for name, other in (('accuracy', 'accuracy'), ('mine', 'loss'), ('z_loss', 'z_loss')):
    assert float(metrics[name].compute()) == pytest.approx(float(expected[other].compute()))


def _predict(model, params, batch, **options):
  options = {'decoder_params': {'temperature': 0.0}, **options}
  return model.predict_batch_with_aux(params, batch, prompt_with_targets=True, **options)


@pytest.mark.parametrize('num_decodes', [1, 3])
def test_a_step_and_a_cache_of_t5x_reach_ours_for_prompts_and_statistics(num_decodes):
  calls = {}

  class Mine(models.EncoderDecoderModel):
    def _compute_kv_cache(self, params, encoded_inputs, prefill_decoder_prompt, **options):
      calls['cache'] = {*options}
      return super()._compute_kv_cache(
        params, encoded_inputs, prefill_decoder_prompt=prefill_decoder_prompt, **options
      )

    def _compute_logits_from_slice(self, decoding_state, params, encoded_inputs, **options):
      calls['slice'] = (encoded_inputs.shape, {*options})
      return super()._compute_logits_from_slice(decoding_state, params, encoded_inputs, **options)

  network = cases.TinySeq2Seq(with_statistics=True)
  options = {'decode_fn': decoding.temperature_sample}
  model, plain = (
    cases.make_model(network, cls, **options) for cls in (Mine, models.EncoderDecoderModel)
  )
  variables = cases.initialise(plain)
  batch = cases.make_batch()
  batch['decoder_input_tokens'] = batch['decoder_input_tokens'].at[:, 3:].set(0)
  more = {
    'num_decodes': num_decodes,
    'flax_mutables': {'batch_stats': {'statistics': {'mean': 0.5}}},
  }
  found = _predict(model, variables['params'], batch, **more)
  jax.tree.map(
    np.testing.assert_array_equal, found, _predict(plain, variables['params'], batch, **more)
  )
  assert calls == {
    'cache': {'encoder_input_tokens', 'decoder_input_tokens', 'flax_mutables'},
    'slice': ((4 * num_decodes, 1, 6), {'raw_inputs', 'max_decode_length', 'flax_mutables'}),
  }


def test_a_step_of_t5x_gets_what_t5x_passes_to_it():
  """The rows of encoded inputs and cache are those of the beams, also of a network with a cache of encoded inputs."""
  calls = []

  class Mine(models.EncoderDecoderModel):
    def _compute_logits_from_slice(self, decoding_state, params, encoded_inputs, **options):
      calls.append(
        [options['raw_inputs'].shape, encoded_inputs.shape]
        + [leaf.shape[0] for leaf in jax.tree.leaves(decoding_state.cache) if leaf.ndim == 4]
      )
      return super()._compute_logits_from_slice(decoding_state, params, encoded_inputs, **options)

  config = network_cases.tiny_config(
    vocab_size=cases.VOCAB_SIZE, num_encoder_layers=1, num_decoder_layers=1
  )
  model, plain = (
    cases.make_model(t5.Transformer(config), cls, decode_fn=decoding.beam_search)
    for cls in (Mine, models.EncoderDecoderModel)
  )
  batch = cases.make_batch(rows=2, length=5)
  params = plain.get_initial_variables(jax.random.key(0), cases.shapes_of(batch))['params']
  options = {'num_decodes': 3, 'return_all_decodes': True}
  found, expected = (
    network_cases.jit(functools.partial(each.predict_batch_with_aux, **options))(params, batch)
    for each in (model, plain)
  )
  np.testing.assert_array_equal(found[0], expected[0])
  assert calls and all(rows == [(6, 7), (6, 7, 16), 6, 6] for rows in calls)


def test_a_step_of_former_versions_calls_and_is_called_by_later_ones(batch):
  class Former(models.EncoderDecoderModel):
    def _compute_logits_from_slice(self, flat_ids, flat_cache, params, *args, **kwargs):
      logits, cache = super()._compute_logits_from_slice(
        flat_ids, flat_cache, params, *args, **kwargs
      )
      return logits.at[:, 3].set(-1e7), cache

  class Later(Former):
    def _compute_logits_from_slice(self, decoding_state, *args, **kwargs):
      logits, cache = super()._compute_logits_from_slice(decoding_state, *args, **kwargs)
      return logits.at[:, 4].set(-1e7), cache

  class Last(Later):
    def _compute_logits_from_slice(self, flat_ids, flat_cache, *args, **kwargs):
      return super()._compute_logits_from_slice(flat_ids, flat_cache, *args, **kwargs)

  def exclude(logits, state):
    del state
    return logits.at[:, 3:5].set(-1e7)

  options = {'decode_fn': decoding.temperature_sample}
  params = cases.initial_params()
  found = _predict(cases.make_model(model_cls=Last, **options), params, batch)
  expected = _predict(
    cases.make_model(**options),
    params,
    batch,
    decoder_params={'temperature': 0.0, 'logit_callback_fn': exclude},
  )
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_steps_of_trainers_have_both_names_and_are_made_once():
  calls = []

  class Theirs(trainer.Trainer):
    @property
    def _partitioned_train_step(self):
      calls.append('train')
      return super()._partitioned_train_step

    @functools.cached_property
    def _partitioned_eval_step(self):
      calls.append('eval')
      return super()._partitioned_eval_step

    def _get_step_rng(self, step):
      calls.append('key')
      return super()._get_step_rng(step)

  class Ours(Theirs):
    def partitioned_train_step(self):
      calls.append('ours')
      return super().partitioned_train_step()

  model = toy_model.make_model()
  partitioner = partitioning.PjitPartitioner(num_partitions=1)

  def make(cls):
    state = toy_model.make_state(model)
    return cls(
      model,
      state,
      partitioner,
      ['validation'],
      None,
      partitioner.get_mesh_axes(state),
      jax.random.key(0),
      learning_rate_fn=lambda step: 0.1,
      weight_metrics_computer=trainer.WeightMetricsComputer(),
    )

  batch = toy_model.make_batch()
  assert make(trainer.Trainer).step_arguments(True) == (True,)
  mine = make(Ours)
  assert mine._partitioned_train_step is mine._partitioned_train_step
  assert calls == ['ours', 'train'] and mine.step_arguments(True) == ()
  values = mine.train(iter([batch]), 1).result()
  assert calls == ['ours', 'train'] * 2 + ['key'] and 'learning_rate' in values
  mine.eval({'validation': [batch]})
  mine.eval({'validation': [batch]})
  assert calls.count('eval') == 1
  with pytest.raises(
    errors.ConfigError, match=r'`Ours.partitioned_eval_step` must be a function of \(metric_fns\)'
  ):
    mine.compile_eval({'validation': batch}, [lambda logits, batch: {}])


def _decoder_only(cls):
  vocabulary = types.SimpleNamespace(vocab_size=24, eos_id=1, pad_id=0)
  config = networks.TransformerConfig(
    vocab_size=24, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=24, num_layers=1
  )
  return cls(networks.DecoderWrapper(config), vocabulary, None, inputs_bidirectional_attention=True)


def test_predictions_written_as_those_of_t5x_equal_ours():
  class Mine(models.DecoderOnlyModel):
    def _compute_kv_cache(self, params, inputs, causal_attention_mask):
      num_inputs = jnp.sum(inputs[:, 1:] != 0, axis=-1)
      ones = jnp.ones_like(inputs)
      options = {'enable_dropout': False, 'mutable': ['cache']}
      _, empty = self.module.apply({'params': params}, ones, ones, decode=True, **options)
      _, filled = self.module.apply(
        {'params': params, 'cache': empty['cache']},
        decoder_input_tokens=inputs,
        decoder_target_tokens=causal_attention_mask,
        decoder_causal_attention=self._get_decoder_causal_attention(
          {'decoder_causal_attention': causal_attention_mask}
        ),
        prefill=True,
        prefill_lengths=num_inputs,
        **options,
      )
      return filled['cache'], num_inputs

  class Entire(models.DecoderOnlyModel):
    def predict_batch_with_aux(self, params, batch):
      inputs = batch['decoder_input_tokens'] * batch['decoder_causal_attention']
      cache, index = self._compute_kv_cache(params, inputs, batch['decoder_causal_attention'])
      step = functools.partial(
        self._compute_logits_from_slice, params=params, max_decode_length=inputs.shape[1]
      )
      sequences, scores = self._decode_fn(
        inputs=inputs,
        cache=cache,
        tokens_to_logits=step,
        num_decodes=2,
        initial_index=index,
        cache_offset=0,
        eos_id=self.output_vocabulary.eos_id,
        temperature=0.0,
      )
      return models.remove_prefix(sequences[:, -1], index), {'scores': scores[:, -1]}

  inputs = np.zeros((3, 10), np.int32)
  prefix = np.zeros((3, 10), np.int32)
  for row, num in enumerate((2, 4, 0)):
    inputs[row, 1 : num + 1] = np.arange(num) + 5 + row
    prefix[row, : num + 1] = 1
  batch = {
    'decoder_input_tokens': jnp.asarray(inputs),
    'decoder_causal_attention': jnp.asarray(prefix),
  }
  plain = _decoder_only(models.DecoderOnlyModel)
  params = plain.get_initial_variables(jax.random.key(0), cases.shapes_of(batch))['params']
  options = {'decoder_params': {'temperature': 0.0}, 'num_decodes': 2}
  expected = network_cases.jit(functools.partial(plain.predict_batch_with_aux, **options))(
    params, batch
  )
  for cls, more in ((Mine, options), (Entire, {})):
    predict = functools.partial(_decoder_only(cls).predict_batch_with_aux, **more)
    found = network_cases.jit(predict)(params, batch)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1]['scores'], expected[1]['scores'], rtol=1e-4)


def test_one_line_of_the_log_names_the_methods_of_a_class(caplog):
  with caplog.at_level(logging.INFO, 't5x_lite.subclassing'):
    type('Quiet', (models.EncoderDecoderModel,), {'loss_fn': None, 'compute_logits': None})
    type('Own', (models.BaseTransformerModel,), {'_compute_logits_from_slice': None})
    assert not caplog.messages
    mine = type(
      'Mine', (models.EncoderDecoderModel,), {'_compute_metrics': 1, '_compute_logits': 2}
    )
    type('Mine', (mine,), {})  # as gin derives one
    _tripled_by_a_mixin(models.DecoderOnlyModel)
    type('Steps', (trainer.Trainer,), {'_partitioned_train_step': None})
  assert caplog.messages == [
    'Mine overrides methods of T5X, which take effect: _compute_logits, _compute_metrics.',
    'Tripled overrides methods of T5X, which take effect: _compute_logits.',
    'Steps overrides methods of T5X, which take effect: _partitioned_train_step.',
  ]


def test_the_feature_converter_of_t5x_is_that_of_the_model():
  class Mine(cases.make_model().__class__):
    FEATURE_CONVERTER_CLS = dict  # in place of a class of seqio

  model = cases.make_model(model_cls=Mine)
  assert model.FEATURE_CONVERTER is model.FEATURE_CONVERTER_CLS is dict
  model.FEATURE_CONVERTER_CLS = list
  assert model.FEATURE_CONVERTER is list
  assert cases.make_model().FEATURE_CONVERTER_CLS == 'encoder_decoder'


class _HalfOfTargets(models.EncoderDecoderModel):
  def loss_fn(self, params, batch, dropout_rng):
    weights = batch['decoder_loss_weights'].at[:, ::2].set(0)
    return super().loss_fn(params, {**batch, 'decoder_loss_weights': weights}, dropout_rng)


@pytest.mark.parametrize('factor, is_logged', [('NUM_REAL_TARGET_TOKENS', True), (8.0, False)])
def test_a_loss_that_changes_targets_has_the_factor_of_the_batch_before(caplog, factor, is_logged):
  """T5X divides the loss of each micro-batch by the factor of its changed targets."""
  caplog.set_level(logging.INFO)
  options = {'loss_normalizing_factor': factor}
  model = cases.make_model(model_cls=_HalfOfTargets, **options)
  batch = cases.make_batch()
  params = model.get_initial_variables(jax.random.key(0), cases.shapes_of(batch))['params']
  whole, _ = model.loss_fn(params, batch, None)
  part_model, parts, fixed = model.for_microbatches(batch, 2)
  message = 'divided by the NUM_REAL_TARGET_TOKENS of the batch before _HalfOfTargets.loss_fn'
  assert caplog.text.count(message) == is_logged
  rows = [{name: value[i::2] for name, value in parts.items()} for i in range(2)]
  total = sum(part_model.loss_fn(params, {**each, **fixed}, None)[0] for each in rows)
  weights = batch['decoder_loss_weights']
  share = 1.0
  if is_logged:
    share = float(weights[:, 1::2].sum() / weights.sum())
  np.testing.assert_allclose(total, share * whole, rtol=1e-5)
  caplog.clear()
  cases.make_model(**options).for_microbatches(batch, 2)
  assert not caplog.text
