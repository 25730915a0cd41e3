"""Labels of a classification: their scores against those of each pair of input and label, and invalid labels."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import models
from t5x_lite.data import vocabularies
from t5x_lite.decoding import label_scores
from t5x_lite.errors import ConfigError
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from tests.models import model_cases
from tests.networks import network_cases as cases

_ROWS = 4
_LENGTH = 6
_LAYOUTS = {'t5': {}, 'scalable': dict(param_layout='scalable_t5', scan_layers=True)}


class _Numbers(vocabularies.PassThroughVocabulary):
  """Vocabulary of numbers, which it encodes as themselves; 39 is unknown."""

  unk_id = 39

  def __init__(self):
    super().__init__(40, eos_id=1)

  def encode(self, text):
    return [min(int(number), 39) for number in text.split()]


# Of different lengths, and with common prefixes.
_LABELS = ['7 8 9', '5', '7', '7 8 9 10 11', '6 7 8', '5 7', '12', '13 14']


def _encoder_decoder(layout='t5', labels=None, **options):
  config = cases.tiny_config(num_encoder_layers=1, num_decoder_layers=2, **_LAYOUTS[layout])
  decode_fn = decoding.LabelScores(labels=labels or _LABELS)
  vocabulary = _Numbers()
  return models.EncoderDecoderModel(
    t5.Transformer(config), vocabulary, vocabulary, None, decode_fn, **options
  )


@functools.cache
def _params(layout='t5'):
  params = cases.random_params(_encoder_decoder(layout).module.config, seed=5)
  # Large, so that the best label depends on the inputs.
  return jax.tree.map(lambda x: 2 * x, params)


def _tokens(label, length=_LENGTH):
  ids = [*_Numbers().encode(label), 1]
  return np.pad(ids, (0, length - len(ids))).astype(np.int32)


def _predict(model, params, batch, **options):
  return cases.jit(functools.partial(model.predict_batch_with_aux, **options))(params, batch)


def _batch(rows=_ROWS):
  inputs = cases.tiny_batch(batch=rows)['encoder_input_tokens']
  return {
    'encoder_input_tokens': inputs,
    'decoder_input_tokens': jnp.zeros((rows, _LENGTH), jnp.int32),
  }


def _brute_force(model, params, batch, start=0):
  """Return float32 [rows, labels], the model's scores of all pairs."""
  scores = []
  score = cases.jit(model.score_batch)
  for label in _LABELS:
    targets = np.tile(_tokens(label), (len(batch['encoder_input_tokens']), 1))
    decoder_inputs = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=start)
    pair = {
      **batch,
      'decoder_input_tokens': np.where(decoder_inputs == 1, 0, decoder_inputs),
      'decoder_target_tokens': targets,
    }
    scores.append(score(params, pair))
  return np.stack(scores, axis=1)


@pytest.fixture
def chunk_bytes(monkeypatch):
  """Set the number of bytes of a chunk."""
  return functools.partial(monkeypatch.setattr, label_scores, '_MAX_BYTES')


@pytest.mark.parametrize(
  'layout, start, max_bytes', [('t5', 0, 2**28), ('t5', 3, 20_000), ('scalable', 0, 20_000)]
)
def test_scores_are_those_of_each_pair(layout, start, max_bytes, chunk_bytes):
  chunk_bytes(max_bytes)
  model = _encoder_decoder(layout, decoder_start_id=start)
  params = _params(layout)
  batch = _batch(12)
  found, aux = _predict(model, params, batch)
  want = _brute_force(model, params, batch, start)
  np.testing.assert_allclose(aux['scores'], want, rtol=1e-5, atol=1e-5)
  best = np.argmax(want, axis=1)
  assert len(set(best)) > 1
  np.testing.assert_array_equal(found, np.stack([_tokens(_LABELS[i]) for i in best]))


@pytest.mark.parametrize('network', [model_cases.T5XSeq2Seq, model_cases.TinySeq2Seq])
def test_networks_for_t5x_score_each_pair(network):
  labels = ['7', '7 8', '9 10 11']
  decode_fn = decoding.LabelScores(labels=labels).encoded(_Numbers())
  model = model_cases.make_model(network(), decode_fn=decode_fn)
  params = model_cases.initialise(model)['params']
  batch = model_cases.make_batch(weights=False)
  _, aux = _predict(model, params, batch)
  for column, label in enumerate(labels):
    targets = np.tile(_tokens(label), (4, 1))
    pair = {
      **batch,
      'decoder_input_tokens': np.pad(targets[:, :-1], ((0, 0), (1, 0))),
      'decoder_target_tokens': targets,
    }
    want = cases.jit(model.score_batch)(params, pair)
    np.testing.assert_allclose(aux['scores'][:, column], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('layout', _LAYOUTS)
def test_scores_on_a_mesh_are_those_of_one_device(layout, chunk_bytes):
  chunk_bytes(20_000)
  rules = (('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('heads', 'model'))
  model = _encoder_decoder(layout)
  params = _params(layout)
  batch = _batch(8)
  want = _predict(model, params, batch)
  mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P('data'))
    predict = cases.jit(model.predict_batch_with_aux, in_shardings=shardings)
    found = predict(*jax.device_put((params, batch), shardings))
  np.testing.assert_array_equal(found[0], want[0])
  np.testing.assert_allclose(found[1]['scores'], want[1]['scores'], rtol=1e-5, atol=1e-5)


def test_chunks_bound_the_labels_that_are_scored_at_once(chunk_bytes):
  labels = decoding.LabelScores(labels=['5', '6', '7', '8', '9 9 9']).encoded(_Numbers())
  cache = {'cached_key': jnp.zeros((2, 3, 10)), 'cached_bias': jnp.zeros(60)}
  rows = []

  def uniform(state):
    rows.append(len(state.cur_token))
    assert state.cache['cached_key'].shape[0] == rows[-1]
    return jnp.zeros((rows[-1], 40)), state.cache

  def rows_of_chunk(max_bytes):
    chunk_bytes(max_bytes)
    rows.clear()
    labels(inputs=jnp.zeros((2, 4), jnp.int32), cache=cache, tokens_to_logits=uniform, eos_id=1)
    assert rows[0] == 2 and len(set(rows[1:])) == 1
    return rows[1]

  bytes_of_label = 4 * (2 * 40 + 2 * 3 * 10 + 60)
  # Chunks have equal numbers of labels: 2, 2 and 2 for 5 labels.
  for num_at_once, size in ((1, 1), (2, 2), (3, 3), (4, 3), (5, 5), (1000, 5)):
    assert rows_of_chunk(num_at_once * bytes_of_label) == 2 * size
  assert rows_of_chunk(1) == 2


def test_the_first_of_equal_labels_is_best():
  labels = decoding.LabelScores(labels=['5', '6']).encoded(_Numbers())

  def uniform(state):
    return jnp.zeros((len(state.cur_token), 40)), state.cache

  found, scores = labels(
    inputs=jnp.zeros((2, 3), jnp.int32), cache={}, tokens_to_logits=uniform, eos_id=1
  )
  np.testing.assert_allclose(scores, np.full((2, 1, 2), -2 * np.log(40)), rtol=1e-6)
  assert found.tolist() == [[[5, 1, 0]]] * 2


def test_normalized_scores_are_divided_by_the_number_of_tokens():
  model = _encoder_decoder()
  params = _params()
  plain = _predict(model, params, _batch())[1]['scores']
  normalized = decoding.LabelScores(labels=_LABELS, normalize_by_target_length=True)
  found, aux = _predict(model.with_decode_fn(normalized), params, _batch())
  lengths = np.array([len(label.split()) + 1 for label in _LABELS])
  np.testing.assert_allclose(aux['scores'], plain / lengths, rtol=1e-6)
  best = np.argmax(plain / lengths, axis=1)
  np.testing.assert_array_equal(found, np.stack([_tokens(_LABELS[i]) for i in best]))
  assert list(best) != list(np.argmax(plain, axis=1))


def test_labels_continue_prompts():
  model = _encoder_decoder(labels=['7', '7 8', '12 13'])
  params = _params()
  batch = _batch(3)
  # Of 2, 0 and 5 tokens; the label of the last row is cut.
  batch['decoder_input_tokens'] = jnp.asarray(
    [[0, 7, 9, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 4, 5, 6, 7, 8]], jnp.int32
  )
  found, aux = _predict(model, params, batch, prompt_with_targets=True)
  score = cases.jit(model.score_batch)
  for row, prompt in enumerate([[7, 9], [], [4, 5, 6, 7, 8]]):
    want = []
    for label in ([7, 1], [7, 8, 1], [12, 13, 1]):
      targets = np.zeros((1, 9), np.int32)
      targets[0, : len(prompt) + len(label)] = [*prompt, *label]
      pair = {
        'encoder_input_tokens': batch['encoder_input_tokens'][row : row + 1],
        'decoder_input_tokens': np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        'decoder_target_tokens': targets,
        'decoder_loss_weights': ((targets > 0) & (np.arange(9) >= len(prompt))).astype(np.float32),
      }
      want.append(score(params, pair)[0])
      if len(want) == 1 or want[-1] > max(want[:-1]):
        best = [*prompt, *label]
    np.testing.assert_allclose(aux['scores'][row], want, rtol=1e-5, atol=1e-5)
    assert np.trim_zeros(np.asarray(found[row]), 'b').tolist() == best[:_LENGTH]


@pytest.mark.parametrize('bidirectional', [False, True])
def test_decoder_only_models_score_labels_after_their_inputs(bidirectional, chunk_bytes):
  chunk_bytes(1)
  config = decoder_only.TransformerConfig(
    vocab_size=40, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=24, num_layers=2, dropout_rate=0.0
  )
  vocabulary = _Numbers()
  labels = ['7', '7 8 9', '12 13']
  model = models.DecoderOnlyModel(
    decoder_only.DecoderWrapper(config),
    vocabulary,
    None,
    decoding.LabelScores(labels=labels),
    inputs_bidirectional_attention=bidirectional,
  )
  variables = model.get_initial_variables(jax.random.key(0), {'decoder_input_tokens': (2, _LENGTH)})
  params = jax.tree.map(lambda x: 3 * x, variables['params'])
  # The second input fills its row.
  inputs = [[4, 5], [6, 7, 8, 9, 10]]
  batch = {
    'decoder_input_tokens': np.array([[0, 4, 5, 0, 0, 0], [0, 6, 7, 8, 9, 10]], np.int32),
    'decoder_causal_attention': np.array([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]], np.int32),
  }
  found, aux = _predict(model, params, batch)
  score = cases.jit(model.score_batch)
  for row, prompt in enumerate(inputs):
    want = []
    for label in labels:
      ids = [*prompt, *vocabulary.encode(label), 1]
      targets = np.zeros((1, 10), np.int32)
      targets[0, : len(ids)] = ids
      pair = {
        'decoder_input_tokens': np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        'decoder_target_tokens': targets,
        'decoder_causal_attention': (np.arange(10) <= len(prompt)).astype(np.int32)[None],
        'decoder_loss_weights': ((targets > 0) & (np.arange(10) >= len(prompt))).astype(np.float32),
      }
      want.append(score(params, pair)[0])
    np.testing.assert_allclose(aux['scores'][row], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[row], _tokens(labels[int(np.argmax(want))]))


@pytest.mark.parametrize(
  'content, message',
  [
    (None, "`labels` must be a file of UTF-8 text with one label a line, got .*labels.txt'"),
    (b'', 'a file with one label a line, got .*The file is empty. Write the labels into it'),
    (b'5\n\n6\n', "line 2 of .*labels.txt, '', is blank. Remove it"),
    (b'5\n6\n \n', "line 3 of .*labels.txt, ' ', is blank. Remove it"),
    (b'5\n6\n5\n', "line 3 of .*labels.txt, '5', repeats line 1. Remove one"),
    (b'5 6\n6\n5  6\n', "line 3 of .*, '5  6', has the tokens of line 1, '5 6'. Remove one"),
    (b'5\n99\n', "line 2 of .*'99', has characters that the vocabulary .* does not know"),
    (b'5 1\n', "line 1 of .*'5 1', contains the text of the end token"),
    (b'\xff\xfe', 'must be a file of UTF-8 text'),
  ],
)
def test_invalid_files_are_rejected(content, message, tmp_path):
  path = tmp_path / 'labels.txt'
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ConfigError, match=message):
    decoding.LabelScores(labels=str(path)).encoded(_Numbers())


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(labels=[]), 'must be the path of a file with one label a line, or a list of labels'),
    (dict(labels=['5', 6]), 'or a list of labels'),
    (dict(labels=['5', '5']), "line 2 of the list, '5', repeats line 1"),
    (dict(labels=['5'], normalize_by_target_length='yes'), 'must be True or False'),
  ],
)
def test_invalid_options_are_rejected(options, message):
  with pytest.raises(ConfigError, match=message):
    decoding.LabelScores(**options)


def test_what_labels_do_not_support_is_rejected():
  model = _encoder_decoder()
  params = _params()
  short = {**_batch(), 'decoder_input_tokens': jnp.zeros((_ROWS, 5), jnp.int32)}
  with pytest.raises(
    ConfigError, match="at most 5 tokens, .* got .*'7 8 9 10 11'.* 6 tokens.*Increase the length"
  ):
    model.predict_batch(params, short)
  with pytest.raises(ConfigError, match='num_decodes.*got 2'):
    model.predict_batch_with_aux(params, _batch(), num_decodes=2)
  with pytest.raises(ConfigError, match='eos_id` must be .*1.* got 2'):
    model.predict_batch_with_aux(params, _batch(), decoder_params={'eos_id': 2})
  constrained = model.with_constraints(decoding.Constraints(repetition_penalty=2))
  with pytest.raises(ConfigError, match='the constraints of the model.*remove the constraints'):
    constrained.predict_batch(params, _batch())


def test_a_vocabulary_without_an_end_token_is_rejected():
  with pytest.raises(ConfigError, match='Use a vocabulary with an end-of-sequence id'):
    decoding.LabelScores(labels=['5']).encoded(vocabularies.PassThroughVocabulary(40))


def test_the_identity_is_that_of_the_labels_in_their_order(tmp_path):
  path = tmp_path / 'labels.txt'
  path.write_bytes('\ufeff5\r\n6'.encode())
  read = decoding.LabelScores(labels=str(path))
  assert read.texts == ('5', '6')
  assert decoding.identity_of(read) == decoding.identity_of(read.encoded(_Numbers()))
  assert read.identity == decoding.LabelScores(labels=['5', '6']).identity
  assert read.identity != decoding.LabelScores(labels=['6', '5']).identity
  assert read.identity != decoding.LabelScores(labels=['5', '6', '7']).identity
