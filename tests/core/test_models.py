"""Models: losses, metrics, collections, scores and predictions, through a small network."""

import functools
import types
from typing import Any

from clu import metrics as clu_metrics
import flax.linen as nn
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite import losses
from t5x_lite import metrics as metrics_lib
from t5x_lite import models

VOCAB_SIZE = 11


class Vocabulary:
  """The part of a vocabulary that models use."""

  pad_id = 0
  eos_id = 1

  def __init__(self, vocab_size=VOCAB_SIZE):
    self.vocab_size = vocab_size


class RunningSum(nn.Module):
  """Sum of all positions up to each one; step by step from a cache with decode=True."""

  @nn.compact
  def __call__(self, y_BLD, decode, prefill_lengths=None):
    if not decode:
      return jnp.cumsum(y_BLD, axis=1)
    if prefill_lengths is not None:
      counted = jnp.arange(y_BLD.shape[1]) < prefill_lengths[:, None]
      self.put_variable('cache', 'total', jnp.sum(y_BLD * counted[..., None], axis=1))
      return jnp.cumsum(y_BLD, axis=1)
    is_initialised = self.has_variable('cache', 'total')
    total = self.variable('cache', 'total', jnp.zeros, (y_BLD.shape[0], y_BLD.shape[2]))
    if is_initialised:
      total.value = total.value + y_BLD[:, 0]
    return total.value[:, None]


class BatchMean(nn.Module):
  """Keeps a moving average of its input's mean, updated where its collection may be written."""

  @nn.compact
  def __call__(self, x):
    mean = self.variable('batch_stats', 'mean', jnp.zeros, ())
    if self.is_mutable_collection('batch_stats') and not self.is_initializing():
      mean.value = 0.5 * mean.value + 0.5 * jnp.mean(x)
    return x + mean.value


class TinySeq2Seq(nn.Module):
  """A few-parameter network with the calls of an encoder-decoder."""

  vocab_size: int = VOCAB_SIZE
  dim: int = 6
  dropout_rate: float = 0.0
  with_statistics: bool = False

  def setup(self):
    self.embed = nn.Embed(self.vocab_size, self.dim)
    self.running_sum = RunningSum()
    self.out = nn.Dense(self.vocab_size)
    self.dropout = nn.Dropout(self.dropout_rate)
    if self.with_statistics:
      self.statistics = BatchMean()

  def encode(self, encoder_input_tokens, enable_dropout=True):
    x_BLD = self.dropout(self.embed(encoder_input_tokens), deterministic=not enable_dropout)
    encoded = jnp.mean(x_BLD * (encoder_input_tokens > 0)[..., None], axis=1, keepdims=True)
    return self.statistics(encoded) if self.with_statistics else encoded

  def decode(self, encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, enable_dropout=True,
             decode=False, max_decode_length=None, prefill=False, prefill_lengths=None):
    del encoder_input_tokens, decoder_target_tokens, max_decode_length, prefill
    state = self.running_sum(self.embed(decoder_input_tokens), decode, prefill_lengths)
    logits = self.out(jnp.tanh(self.dropout(state, deterministic=not enable_dropout) + 3.0 * encoded))
    self.sow('intermediates', 'logit_square', jnp.mean(jnp.square(logits)))
    return logits

  def init_cache(self, encoded, encoder_input_tokens, max_decode_length):
    tokens = jnp.ones((encoder_input_tokens.shape[0], max_decode_length), jnp.int32)
    self.decode(encoded, encoder_input_tokens, tokens, tokens, enable_dropout=False, decode=True)

  def __call__(self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids=None,
               decoder_segment_ids=None, encoder_positions=None, decoder_positions=None, *, enable_dropout=True,
               decode=False):
    del encoder_segment_ids, decoder_segment_ids, encoder_positions, decoder_positions
    encoded = self.encode(encoder_input_tokens, enable_dropout=enable_dropout)
    return self.decode(encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens,
                       enable_dropout=enable_dropout, decode=decode)


def make_model(module=None, model_cls=models.EncoderDecoderModel, **kwargs):
  kwargs = {'decode_fn': decoding.greedy_search, **kwargs}
  return model_cls(module or TinySeq2Seq(), Vocabulary(), Vocabulary(), None, **kwargs)


def make_batch(seed=0, rows=4, input_length=7, length=6, weights=True):
  rng = np.random.default_rng(seed)
  inputs = rng.integers(2, VOCAB_SIZE, (rows, input_length))
  targets = rng.integers(2, VOCAB_SIZE, (rows, length))
  for row in range(rows):
    num_real = rng.integers(2, length + 1)
    targets[row, num_real - 1] = 1
    targets[row, num_real:] = 0
    inputs[row, input_length - row % 3:] = 0
  batch = {
      'encoder_input_tokens': inputs,
      'decoder_target_tokens': targets,
      'decoder_input_tokens': np.concatenate([np.zeros((rows, 1), int), targets[:, :-1]], axis=1),
  }
  batch = {name: jnp.asarray(value, jnp.int32) for name, value in batch.items()}
  if weights:
    batch['decoder_loss_weights'] = jnp.asarray(targets > 0, jnp.float32)
  return batch


def shapes_of(batch):
  return {name: value.shape for name, value in batch.items()}


@pytest.fixture(name='batch')
def batch_fixture():
  return make_batch()


def initialise(model, seed=0):
  shapes = shapes_of(make_batch())
  return jax.jit(lambda rng: model.get_initial_variables(rng, shapes))(jax.random.key(seed))


@functools.cache
def initial_params():
  return initialise(make_model())['params']


def compute(metrics, duration=2.0, num_steps=1):
  metrics = metrics_lib.set_step_metrics_num_steps(metrics_lib.set_time_metrics_duration(metrics, duration), num_steps)
  return {name: float(metric.compute()) for name, metric in metrics.items()}


@jax.jit
def run_network(params, inputs, decoder_inputs):
  return TinySeq2Seq().apply({'params': params}, inputs, decoder_inputs, decoder_inputs, enable_dropout=False)


def log_likelihoods(params, batch):
  """Log-probability of every target token, by the network's plain call."""
  logits = run_network(params, batch['encoder_input_tokens'], batch['decoder_input_tokens'])
  return np.take_along_axis(
      np.asarray(jax.nn.log_softmax(logits)), np.asarray(batch['decoder_target_tokens'])[..., None], -1)[..., 0]


# ---------------------------------------------------------------------------------------------------------------------
# Loss and metrics
# ---------------------------------------------------------------------------------------------------------------------


def test_loss_is_the_weighted_sum_of_token_losses_and_metrics_say_so(batch):
  loss, metrics = jax.jit(make_model().loss_fn)(initial_params(), batch, None)
  weights = np.asarray(batch['decoder_loss_weights'])
  expected = -np.sum(log_likelihoods(initial_params(), batch) * weights)
  assert float(loss) == pytest.approx(expected, rel=1e-5)
  values = compute(metrics)
  assert values['loss'] == pytest.approx(expected, rel=1e-5)
  assert values['cross_ent_loss'] == pytest.approx(expected, rel=1e-5)
  assert values['z_loss'] == 0.0
  assert values['loss_per_nonpadding_target_token'] == pytest.approx(expected / weights.sum(), rel=1e-5)
  assert values['loss_per_all_target_tokens'] == pytest.approx(expected / weights.size, rel=1e-5)


def test_timing_metrics_count_rows_examples_and_tokens(batch):
  values = compute(jax.jit(make_model().eval_fn)(initial_params(), batch)[1], duration=2.0, num_steps=3)
  num_devices = jax.device_count()
  assert values['timing/seconds'] == 2.0
  assert values['timing/seqs'] == 4
  assert values['timing/seqs_per_second'] == 2.0
  assert values['timing/seqs_per_second_per_core'] == 2.0 / num_devices
  assert values['timing/steps_per_second'] == 1.5
  assert values['timing/target_tokens_per_second'] == 4 * 6 / 2
  assert values['timing/target_tokens_per_second_per_core'] == 4 * 6 / 2 / num_devices
  assert values['timing/tokens_per_second'] == (4 * 6 + 4 * 7) / 2
  assert values['timing/examples_per_second'] == 2.0


def test_metrics_of_a_packed_batch_count_its_examples():
  logits = jnp.zeros((2, 5, VOCAB_SIZE))
  targets = jnp.asarray([[2, 1, 3, 1, 0], [4, 4, 4, 4, 1]])
  segment_ids = {'encoder': jnp.asarray([[1, 1, 2], [1, 1, 0]]),
                 'decoder': jnp.asarray([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]])}
  mask = (targets > 0).astype(jnp.float32)
  metrics = jax.jit(models.compute_base_metrics)(logits, targets, mask, jnp.float32(9.0), segment_ids=segment_ids)
  values = compute(metrics, duration=1.0)
  assert 'z_loss' not in values and 'cross_ent_loss' not in values
  assert values['effective_batch_size/encoder'] == 3
  assert values['effective_batch_size/decoder'] == 3
  assert values['timing/examples_per_second'] == 3
  assert values['timing/seqs_per_second'] == 2
  assert values['non_padding_fraction/encoder'] == pytest.approx(5 / 6)
  assert values['non_padding_fraction/decoder'] == pytest.approx(0.9)
  assert values['non_padding_fraction/overall'] == pytest.approx(14 / 16)
  assert values['non_padding_fraction/loss_weights'] == pytest.approx(0.9)
  assert values['loss_per_nonpadding_target_token'] == pytest.approx(1.0)


@pytest.mark.parametrize('rows, expected', [
    ([[0, 0, 0]], 0), ([[1, 1, 1]], 1), ([[1, 2, 3]], 3), ([[1, 1, 0], [1, 2, 0]], 3), ([[0, 0], [1, 0]], 1)])
def test_count_packed_examples(rows, expected):
  assert int(models.count_packed_examples(jnp.asarray(rows))) == expected


def test_accuracy_is_that_of_argmax_ties_included():
  rng = np.random.default_rng(1)
  # Few distinct logits: most positions have ties.
  logits = jnp.asarray(rng.integers(0, 3, (5, 40, 4)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, 4, (5, 40)), jnp.int32)
  mask = jnp.asarray(rng.integers(0, 2, (5, 40)), jnp.float32) * 0.5
  ours = jax.jit(models.compute_base_metrics)(logits, targets, mask, jnp.float32(0.0))['accuracy']
  expected = clu_metrics.Accuracy.from_model_output(logits=logits, labels=targets, mask=mask)
  assert isinstance(ours, clu_metrics.Accuracy)
  assert (float(ours.total), int(ours.count)) == (float(expected.total), int(expected.count))
  assert 0 < float(ours.compute()) < 1


def test_accuracy_of_ids_of_a_narrow_dtype():
  # Position 350 is 94 in eight bits, which would make it the first of two equal logits.
  logits = jnp.zeros((1, 1, 400)).at[0, 0, jnp.asarray([200, 350])].set(1.0)
  correct, _ = jax.jit(models.compute_weighted_accuracy)(logits, jnp.asarray([[200]], jnp.uint8))
  assert float(correct) == 1.0


def test_weighted_accuracy_sums_weights_of_correct_positions():
  logits = jnp.asarray([[[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [1.0, 1.0, 0.0]]])
  targets = jnp.asarray([[1, 2, 0]])
  assert [float(x) for x in models.compute_weighted_accuracy(logits, targets)] == [2.0, 3.0]
  weights = jnp.asarray([[0.5, 1.0, 0.0]])
  assert [float(x) for x in models.compute_weighted_accuracy(logits, targets, weights)] == [0.5, 1.5]


def test_metrics_merge_under_jit_and_over_micro_batches(batch):
  model = make_model()
  whole = compute(jax.jit(model.eval_fn)(initial_params(), batch)[1])

  @jax.jit
  def merged(params, first, second):
    a, b = model.eval_fn(params, first)[1], model.eval_fn(params, second)[1]
    return {name: a[name].merge(b[name]) for name in a}

  halves = [{k: v[i:i + 2] for k, v in batch.items()} for i in (0, 2)]
  parts = compute(merged(initial_params(), *halves))
  assert set(parts) == set(whole)
  for name, value in whole.items():
    assert parts[name] == pytest.approx(value, rel=1e-5), name


def test_token_counts_of_many_steps_do_not_overflow(batch):
  merge = jax.jit(lambda a, b: {name: a[name].merge(b[name]) for name in a})
  _, metrics = jax.jit(make_model().eval_fn)(initial_params(), batch)
  once = compute(metrics)
  for _ in range(27):  # 4 x 6 tokens, 2**27 times: more than 2**31.
    metrics = merge(metrics, metrics)
  values = compute(metrics, num_steps=2**27)
  for name in ('accuracy', 'loss_per_all_target_tokens', 'non_padding_fraction/overall'):
    assert values[name] == pytest.approx(once[name], rel=1e-5), name
  for name in ('timing/target_tokens_per_second', 'timing/tokens_per_second'):
    assert values[name] == pytest.approx(once[name] * 2**27, rel=1e-5), name


def test_dropout_only_with_a_key(batch):
  model = make_model(TinySeq2Seq(dropout_rate=0.5))
  loss_fn = jax.jit(model.loss_fn)
  loss = lambda key: float(loss_fn(initial_params(), batch, key)[0])
  assert loss(jax.random.key(1)) == loss(jax.random.key(1))
  assert loss(jax.random.key(1)) != loss(jax.random.key(2))
  assert loss(None) == float(jax.jit(make_model().loss_fn)(initial_params(), batch, None)[0])
  assert float(jax.jit(model.eval_fn)(initial_params(), batch)[0]) == loss(None)


@pytest.mark.parametrize('factor, weights', [
    (None, False), ('num_real_target_tokens', False), (losses.SpecialLossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS, True),
    ('AVERAGE_PER_SEQUENCE', True)])
def test_micro_batch_losses_and_gradients_sum_to_those_of_the_batch(factor, weights):
  batch = make_batch(weights=weights)
  model = make_model(AuxiliaryLoss.Network(), AuxiliaryLoss, loss_normalizing_factor=factor, label_smoothing=0.1,
                     z_loss=1e-3)
  params = initial_params()
  loss_of = lambda model: jax.jit(jax.value_and_grad(lambda p, b: model.loss_fn(p, b, None)[0]))
  expected_loss, expected_grads = loss_of(model)(params, batch)

  _, whole, fixed = model.for_microbatches(batch, 2)
  # The model knows nothing of the batch: that of another one serves as well.
  part_model, *_ = model.for_microbatches(jax.tree.map(jnp.ones_like, batch), 2)
  step = loss_of(part_model)
  first, second = (step(params, {k: v[i:i + 2] for k, v in whole.items()} | fixed) for i in (0, 2))
  total_loss, total_grads = jax.tree.map(jnp.add, first, second)
  assert float(total_loss) == pytest.approx(float(expected_loss), rel=1e-5)
  for ours, expected in zip(jax.tree.leaves(total_grads), jax.tree.leaves(expected_grads), strict=True):
    assert np.linalg.norm(ours - expected) <= 3e-6 * np.linalg.norm(expected) + 1e-9
  # The model itself has not changed.
  assert float(jax.jit(model.eval_fn)(params, batch)[0]) == pytest.approx(float(expected_loss), rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Auxiliary losses and mutable collections
# ---------------------------------------------------------------------------------------------------------------------


class AuxiliaryLoss(models.EncoderDecoderModel):
  """Adds a multiple of what the network has sown."""

  Network = TinySeq2Seq

  def auxiliary_losses(self, intermediates, batch):
    (value,) = intermediates['logit_square']
    return 0.1 * value, {'logit_square': clu_metrics.Average(total=value, count=1)}


def test_auxiliary_losses_are_added_to_the_loss_alone(batch):
  fns = (jax.jit(jax.value_and_grad(make_model(model_cls=model_cls, z_loss=1e-3).loss_fn, has_aux=True))
         for model_cls in (models.EncoderDecoderModel, AuxiliaryLoss))
  ((plain_loss, plain), plain_grads), ((loss, metrics), grads) = (fn(initial_params(), batch, None) for fn in fns)
  values, plain = compute(metrics), compute(plain)
  assert values['logit_square'] > 0
  assert float(loss) == pytest.approx(float(plain_loss) + 0.1 * values['logit_square'], rel=1e-6)
  assert values['loss'] == pytest.approx(float(loss))
  for name in ('cross_ent_loss', 'z_loss', 'loss_per_all_target_tokens'):
    assert values[name] == plain[name]
  assert not np.allclose(grads['out']['bias'], plain_grads['out']['bias'])


def test_auxiliary_losses_of_a_network_that_sows_nothing(batch):
  seen = []

  class Model(models.EncoderDecoderModel):

    def auxiliary_losses(self, intermediates, batch):
      seen.append(intermediates)
      return 0.0, {}

  class Silent(TinySeq2Seq):

    def sow(self, *args, **kwargs):
      return False

  jax.eval_shape(make_model(Silent(), Model).loss_fn, initial_params(), batch, None)
  assert seen == [{}]


def test_mutable_collections_are_updated_in_training_and_read_elsewhere(batch):
  module = TinySeq2Seq(with_statistics=True)
  model = make_model(module)
  variables = initialise(model)
  assert set(variables) == {'params', 'batch_stats'}
  params, mutables = variables['params'], {'batch_stats': variables['batch_stats']}
  assert mutables == {'batch_stats': {'statistics': {'mean': 0.0}}}

  loss_fn, eval_fn = jax.jit(model.loss_fn), jax.jit(model.eval_fn)
  loss, (metrics, new) = loss_fn(params, batch, None, mutables)
  assert set(new) == {'batch_stats'} and type(new['batch_stats']) is dict
  mean = float(new['batch_stats']['statistics']['mean'])
  assert mean != 0.0
  assert compute(metrics)['loss'] == pytest.approx(float(loss))

  _, (_, newer) = loss_fn(params, batch, None, new)
  assert float(newer['batch_stats']['statistics']['mean']) != mean

  # What the pass reads is what it was given: evaluation, scores and predictions see the statistics, unchanged.
  fixed = {'batch_stats': {'statistics': {'mean': jnp.float32(5.0)}}}
  eval_loss, eval_metrics = eval_fn(params, batch, fixed)
  assert isinstance(eval_metrics, dict)
  assert float(eval_loss) != pytest.approx(float(eval_fn(params, batch, mutables)[0]))
  scores = jax.jit(model.score_batch)(params, batch, flax_mutables=fixed)
  assert -float(jnp.sum(scores)) == pytest.approx(float(eval_loss), rel=1e-5)
  predict = jax.jit(model.predict_batch_with_aux)
  tokens, aux = predict(params, batch, flax_mutables=fixed)
  np.testing.assert_array_equal(tokens, jax.jit(model.predict_batch)(params, batch, flax_mutables=fixed))
  unlike = predict(params, batch, flax_mutables=mutables)[1]
  assert not np.allclose(aux['scores'], unlike['scores'])


# ---------------------------------------------------------------------------------------------------------------------
# Initial variables
# ---------------------------------------------------------------------------------------------------------------------


def test_initial_variables_are_those_of_the_module(batch):
  model = make_model()
  rng = jax.random.key(3)
  variables = model.get_initial_variables(rng, shapes_of(batch))
  assert set(variables) == {'params'} and type(variables['params']) is dict
  expected = TinySeq2Seq().init(rng, *(jnp.ones((1, 2), jnp.int32),) * 3, enable_dropout=False)['params']
  jax.tree.map(np.testing.assert_array_equal, variables['params'], expected)
  shapes = jax.eval_shape(lambda r: model.get_initial_variables(r, shapes_of(batch)), rng)
  assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, variables)


def test_initial_variables_see_packing_features_and_types():
  seen = {}

  class Spy(TinySeq2Seq):

    def __call__(self, encoder_input_tokens, *args, **kwargs):
      seen.update(kwargs, encoder_input_tokens=encoder_input_tokens)
      return super().__call__(encoder_input_tokens, *args, **kwargs)

  names = ('encoder_segment_ids', 'decoder_segment_ids', 'encoder_positions', 'decoder_positions')
  shapes = {'encoder_input_tokens': (2, 3), 'decoder_input_tokens': (2, 5)}
  shapes |= {name: (2, 3 if name.startswith('encoder') else 5) for name in names}
  jax.eval_shape(lambda rng: make_model(Spy()).get_initial_variables(
      rng, shapes, {'encoder_input_tokens': np.int16, 'decoder_positions': np.int8}), jax.random.key(0))
  assert {name: seen[name].shape for name in names} == {name: shapes[name] for name in names}
  assert seen['encoder_input_tokens'].dtype == np.int16
  assert seen['decoder_positions'].dtype == np.int8
  assert seen['encoder_positions'].dtype == np.int32
  assert seen['enable_dropout'] is False and seen['decode'] is False


@pytest.mark.parametrize('shapes, message', [
    ({'encoder_inputs_tokens': (2, 3), 'decoder_input_tokens': (2, 3)}, "Did you mean 'encoder_inputs_tokens'"),
    ({'encoder_input_tokens': (2, 3), 'decoder_input_tokens': (4, 3)}, '2 rows .* 4 of'),
])
def test_initial_variables_refuse_shapes_that_make_no_batch(shapes, message):
  with pytest.raises(errors.ConfigError, match=message):
    make_model().get_initial_variables(jax.random.key(0), shapes)


# ---------------------------------------------------------------------------------------------------------------------
# Scores and predictions
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('weights', [True, False])
def test_score_batch_sums_log_likelihoods_whatever_the_training_loss(weights):
  batch = make_batch(weights=weights)
  model = make_model(label_smoothing=0.2, z_loss=0.1, loss_normalizing_factor=7.0)
  mask = np.asarray(batch['decoder_target_tokens']) > 0
  expected = np.sum(log_likelihoods(initial_params(), batch) * mask, axis=1)
  np.testing.assert_allclose(jax.jit(model.score_batch)(initial_params(), batch), expected, rtol=1e-5)
  scores, intermediates = jax.jit(functools.partial(model.score_batch, return_intermediates=True))(
      initial_params(), batch)
  np.testing.assert_allclose(scores, expected, rtol=1e-5)
  assert intermediates['logit_square'][0] > 0


def greedy_by_full_passes(params, batch, prompt=None):
  """Greedy decoding without any cache: a full pass for every token."""
  rows, length = batch['decoder_input_tokens'].shape
  forced = np.zeros((rows, length + 1), np.int32)
  if prompt is not None:
    forced[:, :length] = prompt
  sequences, scores, ended = forced.copy(), np.zeros(rows), np.zeros(rows, bool)
  for position in range(length):
    inputs = jnp.asarray(sequences[:, :length])
    logits = run_network(params, batch['encoder_input_tokens'], inputs)
    log_probs = np.asarray(jax.nn.log_softmax(logits[:, position]))
    for row in range(rows):
      if forced[row, position + 1]:
        continue
      choice = int(log_probs[row].argmax())
      sequences[row, position + 1] = 0 if ended[row] else choice
      scores[row] += 0.0 if ended[row] else log_probs[row, choice]
      ended[row] |= choice == 1
  return sequences[:, 1:], scores


@pytest.mark.parametrize('seed', range(2))
def test_predictions_equal_greedy_search_by_full_passes(batch, seed):
  model = make_model()
  params = initialise(model, seed)['params']
  params['embed']['embedding'] *= 3
  params['out']['kernel'] *= 2
  # Make ends of sequence likely enough to be met in some rows.
  params['out']['bias'] = params['out']['bias'].at[1].add(0.5)
  tokens, aux = jax.jit(model.predict_batch_with_aux)(params, batch)
  expected_tokens, expected_scores = greedy_by_full_passes(params, batch)
  np.testing.assert_array_equal(tokens, expected_tokens)
  np.testing.assert_allclose(aux['scores'], expected_scores, rtol=1e-4, atol=1e-5)
  assert tokens.dtype == jnp.int32


def test_decode_fn_is_told_where_the_batch_dim_of_the_cache_is(batch):
  seen = []

  class Stacked(TinySeq2Seq):
    cache_offset: int = 1

  def spy(*, inputs, cache_offset, **kwargs):
    seen.append(cache_offset)
    return jnp.zeros((*inputs.shape[:1], 1, inputs.shape[1]), jnp.int32), jnp.zeros((inputs.shape[0], 1))

  make_model(Stacked(), decode_fn=spy).predict_batch(initial_params(), batch)
  assert seen == [1]


def test_losses_and_predictions_on_a_mesh_equal_those_of_one_device():
  mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
  batch, params = make_batch(rows=8), initial_params()
  model = make_model(loss_normalizing_factor='AVERAGE_PER_SEQUENCE', label_smoothing=0.1)
  fns = lambda params, batch: (model.eval_fn(params, batch)[0], *model.predict_batch_with_aux(params, batch))
  with jax.set_mesh(mesh):
    sharded = jax.jit(fns, in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P('data'))))
    loss, tokens, aux = sharded(params, batch)
  expected_loss, expected_tokens, expected_aux = jax.jit(fns)(params, batch)
  assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
  np.testing.assert_array_equal(tokens, expected_tokens)
  np.testing.assert_allclose(aux['scores'], expected_aux['scores'], rtol=1e-5)


def test_prompt_with_targets_forces_targets_without_their_ends(batch):
  batch = {**batch, 'decoder_input_tokens': jnp.asarray(
      [[0, 5, 1, 0, 0, 0], [0, 3, 4, 6, 0, 0], [0, 0, 0, 0, 0, 0], [0, 7, 7, 7, 7, 7]], jnp.int32)}
  tokens, aux = make_model().predict_batch_with_aux(initial_params(), batch, prompt_with_targets=True)
  prompt = np.where(np.asarray(batch['decoder_input_tokens']) == 1, 0, batch['decoder_input_tokens'])
  expected_tokens, expected_scores = greedy_by_full_passes(initial_params(), batch, prompt)
  np.testing.assert_array_equal(tokens, expected_tokens)
  np.testing.assert_allclose(aux['scores'], expected_scores, rtol=1e-5)
  assert tokens[1, :3].tolist() == [3, 4, 6] and tokens[3, :5].tolist() == [7] * 5


def test_any_decode_fn_sees_expanded_rows_and_its_options(batch):
  seen = {}

  def two_decodes(*, inputs, cache, tokens_to_logits, eos_id, num_decodes, decode_rng, cache_offset, bonus):
    seen.update(eos_id=eos_id, rng=decode_rng, cache_offset=cache_offset, bonus=bonus)
    expand = functools.partial(decoding.flat_batch_beam_expand, beam_size=num_decodes)
    cache = jax.tree.map(expand, cache)
    rows = inputs.shape[0] * num_decodes
    logits, cache = tokens_to_logits(decoding.DecodingState(
        cur_index=jnp.int32(0), sequences=expand(inputs), cur_token=jnp.zeros((rows, 1), jnp.int32), cache=cache))
    seen['logits'] = logits
    first = jnp.argsort(logits, axis=-1).reshape(inputs.shape[0], num_decodes, -1)[:, :, -1]
    sequences = jnp.zeros((inputs.shape[0], num_decodes, inputs.shape[1]), jnp.int32).at[..., 0].set(first)
    return sequences, jnp.broadcast_to(jnp.arange(num_decodes) * bonus, sequences.shape[:2])

  model = make_model(decode_fn=two_decodes, default_decoder_params=models.DecoderParams(num_decodes=2))
  rng = jax.random.key(1)
  options = {'bonus': 10.0, 'eos_id': 3}
  tokens, aux = model.predict_batch_with_aux(initial_params(), batch, rng, options)
  assert options == {'bonus': 10.0, 'eos_id': 3}
  assert (seen['eos_id'], seen['rng'], seen['cache_offset'], seen['bonus']) == (3, rng, 0, 10.0)
  assert tokens.shape == (4, 6) and aux['scores'].tolist() == [10.0] * 4
  np.testing.assert_array_equal(seen['logits'][0::2], seen['logits'][1::2])
  greedy_first = make_model().predict_batch(initial_params(), batch)[:, 0]
  np.testing.assert_array_equal(tokens[:, 0], greedy_first)
  tokens, aux = model.predict_batch_with_aux(
      initial_params(), batch, rng, {'bonus': 1.0}, return_all_decodes=True, num_decodes=3)
  assert tokens.shape == (4, 3, 6) and aux['scores'].shape == (4, 3)


@pytest.mark.parametrize('name', ['num_decodes', 'cache', 'inputs', 'tokens_to_logits', 'cache_offset', 'initial_index',
                                  'is_filling'])
def test_decoder_params_that_the_model_sets_are_refused(batch, name):
  with pytest.raises(errors.ConfigError, match=f"decoder_params\\['{name}'\\]"):
    make_model().predict_batch_with_aux(initial_params(), batch, decoder_params={name: 1})


@pytest.mark.parametrize('decode_fn, options, message', [
    (decoding.temperature_sample, {'temprature': 0.5}, "temperature_sample has no such option. Did you mean 'temperature'"),
    (functools.partial(decoding.beam_search, alpha=1.0), {'top_k': 5}, 'beam_search has no such option. Known names: alp'),
    (decoding.greedy_search, {'temperature': 0.5}, 'greedy_search has no such option'),
])
def test_options_that_the_decode_fn_does_not_have_are_refused(batch, decode_fn, options, message):
  params = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), initial_params())
  with pytest.raises(errors.ConfigError, match=message):
    make_model(decode_fn=decode_fn).predict_batch_with_aux(params, batch, decoder_params=options)


def test_prompts_need_a_decode_fn_that_starts_behind_them(batch):

  def from_the_start(*, inputs, cache, tokens_to_logits, eos_id, num_decodes, decode_rng, cache_offset):
    raise AssertionError

  with pytest.raises(errors.ConfigError, match='decode_fn=from_the_start, which has no argument initial_index'):
    make_model(decode_fn=from_the_start).predict_batch_with_aux(initial_params(), batch, prompt_with_targets=True)


def test_two_keys_for_one_decoding_are_refused(batch):
  with pytest.raises(errors.ConfigError, match='not both'):
    make_model().predict_batch_with_aux(
        initial_params(), batch, jax.random.key(0), decoder_params={'decode_rng': jax.random.key(1)})


def test_remove_prefix_shifts_each_row():
  sequences = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], jnp.int32)
  shifted = jax.jit(models.remove_prefix)(sequences, jnp.asarray([0, 1, 4]))
  assert shifted.tolist() == [[1, 2, 3, 4], [6, 7, 8, 0], [0, 0, 0, 0]] and shifted.dtype == jnp.int32


def test_packed_batches_are_not_predicted(batch):
  with pytest.raises(errors.ConfigError, match='pack=False'):
    make_model().predict_batch(initial_params(), {**batch, 'encoder_segment_ids': batch['encoder_input_tokens']})


@pytest.mark.parametrize('missing, message', [
    ('decoder_input_tokens', "without 'decoder_input_tokens'; expected .* zeros, as long as what is to be decoded"),
    ('encoder_input_tokens', "without 'encoder_input_tokens'; expected the inputs")])
def test_batches_without_what_predictions_read_are_refused(batch, missing, message):
  batch.pop(missing)
  for refuse in (lambda: make_model().predict_batch(initial_params(), batch),
                 lambda: make_model().check_prediction_features(batch.keys())):
    with pytest.raises(errors.ConfigError, match=message):
      refuse()


def test_a_model_without_decode_fn_trains_but_does_not_predict(batch):
  model = make_model(decode_fn=None)
  assert np.isfinite(model.eval_fn(initial_params(), batch)[0])
  with pytest.raises(errors.ConfigError, match=r'decode_fn=None to predict with; .*with_decode_fn\('):
    model.predict_batch(initial_params(), batch)
  for make in (lambda: make_model(decode_fn='greedy_search'), lambda: model.with_decode_fn('greedy_search')):
    with pytest.raises(errors.ConfigError, match="decode_fn='greedy_search'; expected a decoding algorithm"):
      make()


# ---------------------------------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('options, message', [
    ({'label_smoothing': 1.0}, 'label_smoothing=1.0'),
    ({'label_smoothing': -0.1}, 'label_smoothing=-0.1'),
    ({'label_smoothing': float('nan')}, 'label_smoothing=nan'),
    ({'z_loss': -1e-4}, 'z_loss=-0.0001'),
    ({'z_loss': '1e-4'}, "z_loss='1e-4'"),
    ({'loss_normalizing_factor': 0}, 'loss_normalizing_factor=0'),
    ({'loss_normalizing_factor': -1.0}, 'loss_normalizing_factor=-1.0'),
    ({'loss_normalizing_factor': True}, 'loss_normalizing_factor=True'),
    ({'loss_normalizing_factor': 'num_real_target_token'}, "Did you mean 'NUM_REAL_TARGET_TOKENS'"),
    ({'default_decoder_params': models.DecoderParams(num_decodes=4)}, 'num_decodes=4'),
    ({'decode_fn': functools.partial(decoding.greedy_search),
      'default_decoder_params': models.DecoderParams(num_decodes=2)}, 'num_decodes=2'),
])
def test_options_out_of_range_are_refused(options, message):
  with pytest.raises(errors.ConfigError, match=message):
    make_model(**options)


def test_a_wrapped_greedy_search_is_recognised():

  @functools.wraps(decoding.greedy_search)
  def configured(*args, **kwargs):
    return decoding.greedy_search(*args, **kwargs)

  with pytest.raises(errors.ConfigError, match='num_decodes=2'):
    make_model(decode_fn=configured, default_decoder_params=models.DecoderParams(num_decodes=2))


def test_num_decodes_of_a_call_are_checked(batch):
  with pytest.raises(errors.ConfigError, match='num_decodes=2'):
    make_model().predict_batch_with_aux(initial_params(), batch, num_decodes=2)
  for wrong in (0, 2.0, True):
    with pytest.raises(errors.ConfigError, match=f'num_decodes={wrong}; expected a whole number of at least 1'):
      models.DecoderParams(num_decodes=wrong)
    with pytest.raises(errors.ConfigError, match=f'num_decodes={wrong}; expected a whole number of at least 1'):
      make_model(decode_fn=decoding.beam_search).predict_batch_with_aux(initial_params(), batch, num_decodes=wrong)


class Configured(TinySeq2Seq):
  """A network that tells its sizes, as T5X's do."""

  config: Any = None


@pytest.mark.parametrize('which', ['input_vocabulary', 'output_vocabulary'])
def test_a_vocabulary_larger_than_the_network_is_refused(which):
  config = types.SimpleNamespace(vocab_size=VOCAB_SIZE)
  vocabularies = {'input_vocabulary': Vocabulary(), 'output_vocabulary': Vocabulary(), which: Vocabulary(384)}
  with pytest.raises(errors.ConfigError, match=f'{which} with vocab_size=384 and a network with vocab_size=11'):
    models.EncoderDecoderModel(module=Configured(config=config), optimizer_def=None, **vocabularies)
  models.EncoderDecoderModel(Configured(config=config), Vocabulary(10), Vocabulary(VOCAB_SIZE), None)


def test_a_network_without_config_is_checked_by_its_logits(batch):
  model = models.EncoderDecoderModel(TinySeq2Seq(), Vocabulary(), Vocabulary(12), None)
  with pytest.raises(errors.ConfigError, match='vocab_size=12 and a network with vocab_size=11'):
    jax.eval_shape(lambda rng: model.get_initial_variables(rng, shapes_of(batch)), jax.random.key(0))


def test_feature_converter_and_accessors():
  assert make_model().FEATURE_CONVERTER == 'encoder_decoder'
  assert make_model(feature_converter_cls='prefix_lm').FEATURE_CONVERTER == 'prefix_lm'
  assert models.EncoderDecoderModel.FEATURE_CONVERTER == 'encoder_decoder'
  first, second = Vocabulary(5), Vocabulary(6)
  model = models.EncoderDecoderModel(TinySeq2Seq(), first, second, 'optimizer')
  assert models.get_input_vocabulary(model) is first and models.get_output_vocabulary(model) is second
  assert model.optimizer_def == 'optimizer' and model.decode_fn is decoding.beam_search
