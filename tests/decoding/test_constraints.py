"""Constraints: against rules in plain Python, brute force over all sequences, and other meshes."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite.data import vocabularies
from t5x_lite.errors import ConfigError
from tests.decoding.decoding_cases import EOS
from tests.decoding.decoding_cases import HistoryModel
from tests.decoding.decoding_cases import jit
from tests.decoding.decoding_cases import lengths
from tests.decoding.decoding_cases import prompts_to_inputs

_OUTPUTS = [[2], [2, 3], [2, 3, 4], [3, 3], [4, 2, 2, 5], [4, 2, 5], [5, 5, 5, 5, 5]]
_CASES = {
  'no_repeat_1': dict(no_repeat_ngram_size=1),
  'no_repeat_2': dict(no_repeat_ngram_size=2),
  'no_repeat_3': dict(no_repeat_ngram_size=3),
  'penalty': dict(repetition_penalty=2.0),
  'reward': dict(repetition_penalty=0.5),
  'min_length': dict(min_decode_len=4),
  'together': dict(no_repeat_ngram_size=2, repetition_penalty=1.5, min_decode_len=3),
  'allowed': dict(allowed_outputs=_OUTPUTS),
  'allowed_with_penalty': dict(allowed_outputs=_OUTPUTS, repetition_penalty=1.5),
}


def _constraints(options):
  options = dict(options)
  if 'allowed_outputs' in options:
    options['allowed_outputs'] = decoding.AllowedOutputs(options['allowed_outputs'], EOS)
  return decoding.Constraints(**options)


def _process(scores, read, num_prompt, options):
  """Apply the rules to the scores <float>[vocab] after the tokens `read`, of which `num_prompt` are the prompt."""
  scores = np.array(scores, np.float64)
  penalty = options.get('repetition_penalty', 1.0)
  for token in set(read):
    scores[token] *= penalty if scores[token] < 0 else 1 / penalty
  size = options.get('no_repeat_ngram_size', 0)
  if size:
    ngrams = {tuple(read[i : i + size]) for i in range(len(read) - size + 1)}
    for token in range(len(scores)):
      if (*read[len(read) - size + 1 :], token) in ngrams:
        scores[token] = -np.inf
  decoded = read[num_prompt:]
  if len(decoded) + 1 < options.get('min_decode_len', 0):
    scores[EOS] = -np.inf
  if 'allowed_outputs' in options:
    ended = [(*output, EOS) for output in options['allowed_outputs']]
    for token in range(len(scores)):
      prefix = (*decoded, token)
      if not any(output[: len(prefix)] == prefix for output in ended):
        scores[token] = -np.inf
  return scores


def _log_softmax(scores):
  largest = np.max(scores)
  return scores - largest - np.log(np.sum(np.exp(scores - largest)))


def _greedy(model, context, prompt, length, options):
  """Return (the tokens of a greedy search in plain Python, their log-probability)."""
  read, total = [0, *prompt], 0.0
  while len(read) <= length and EOS not in read[1 + len(prompt) :]:
    logits = model.table[model.history(context, read[1:])]
    log_probs = _log_softmax(_process(logits, read, 1 + len(prompt), options))
    read.append(int(np.argmax(log_probs)))
    total += log_probs[read[-1]]
  return read[1:], total


def _model(vocab_size=6, **options):
  bias = np.zeros(vocab_size, np.float32)
  bias[:2] = -60.0, 1.0
  return HistoryModel(vocab_size, bias=bias, **options)


@pytest.mark.parametrize('is_prefilled', [False, True])
@pytest.mark.parametrize('options', _CASES.values(), ids=_CASES)
def test_greedy_search_and_sampling_follow_the_rules(options, is_prefilled):
  model, length, contexts = _model(seed=4), 9, list(range(5))
  prompts = [[], [3], [4, 4, 2], [5, 2], []]
  inputs = prompts_to_inputs(prompts, length)
  arguments = dict(
    cache=model.cache(contexts, prompts if is_prefilled else None),
    tokens_to_logits=model.step,
    eos_id=EOS,
    initial_index=lengths(prompts) if is_prefilled else None,
    logit_processor=_constraints(options),
  )
  greedy, log_probs = jit(lambda: decoding.greedy_search(inputs, **arguments))()
  expected = [
    _greedy(model, context, prompt, length, options)
    for context, prompt in zip(contexts, prompts, strict=True)
  ]
  unconstrained = [
    _greedy(model, context, prompt, length, {})[0]
    for context, prompt in zip(contexts, prompts, strict=True)
  ]
  assert unconstrained != [tokens for tokens, _ in expected]
  for tokens, log_prob, (want, want_log_prob) in zip(greedy, log_probs, expected, strict=True):
    assert [int(token) for token in tokens[0] if token] == want
    np.testing.assert_allclose(log_prob[0], want_log_prob, rtol=1e-4, atol=1e-5)
  # The most probable token is the same at any temperature.
  for sampling in (dict(temperature=0.0), dict(temperature=3.0, topk=1)):
    sampled, _ = jit(lambda: decoding.temperature_sample(inputs, **arguments, **sampling))()
    np.testing.assert_array_equal(sampled, greedy)


def test_constraints_act_before_the_temperature():
  # One step of many rows. The start token, 0, has been read, and the end token is excluded.
  rows, temperature = 4000, 2.0
  logits = np.float32([1.5, 2.0, 1.0, 0.5])
  sequences, _ = jit(
    lambda: decoding.temperature_sample(
      jnp.zeros((rows, 2), jnp.int32),
      {},
      lambda state: (jnp.broadcast_to(jnp.asarray(logits), (rows, 4)), state.cache),
      EOS,
      decode_rng=jax.random.key(3),
      temperature=temperature,
      topk=0,
      logit_processor=decoding.Constraints(repetition_penalty=3.0, min_decode_len=2),
    )
  )()
  scaled = _process(logits, [0], 1, dict(repetition_penalty=3.0, min_decode_len=2)) / temperature
  found = np.bincount(np.asarray(sequences)[:, 0, 0], minlength=4) / rows
  np.testing.assert_allclose(found, np.exp(_log_softmax(scaled)), atol=0.03)


@pytest.mark.parametrize('topk, topp', [(0, 0.0), (3, 0.0), (40, 0.0), (0, 0.9), (0, 1.0)])
def test_no_draw_is_an_excluded_token(topk, topp):
  model, rows = _model(scale=0.3), 200
  sequences, _ = jit(
    lambda: decoding.temperature_sample(
      jnp.zeros((rows, 7), jnp.int32),
      model.cache(range(rows)),
      model.step,
      EOS,
      decode_rng=jax.random.key(5),
      temperature=50.0,
      topk=topk,
      topp=topp,
      logit_processor=_constraints(dict(allowed_outputs=_OUTPUTS)),
    )
  )()
  found = {
    tuple(token for token in tokens if token) for tokens in np.asarray(sequences)[:, 0].tolist()
  }
  ended = {(*output, EOS) for output in _OUTPUTS}
  assert found <= ended
  assert len(found) > len(ended) / 2


def _all_ended(model, context, prompt, length, options):
  """Return [(tokens, log-probability)] of every sequence that the rules let end, by brute force."""
  found = []
  log_probs = model.log_probs()
  # Sequences that continue, with the prompt.
  live = [([0, *prompt], 0.0)]
  for _ in range(length - len(prompt)):
    extended = []
    for read, total in live:
      scores = _process(log_probs[model.history(context, read[1:])], read, 1 + len(prompt), options)
      for token in np.flatnonzero(np.isfinite(scores)).tolist():
        extended.append(([*read, token], total + scores[token]))
    found += [(read[1:], total) for read, total in extended if read[-1] == EOS]
    live = [(read, total) for read, total in extended if read[-1] not in (EOS, 0)]
  return [(tokens, total) for tokens, total in found if 0 not in tokens]


@pytest.mark.parametrize('is_prefilled', [False, True])
@pytest.mark.parametrize('options', _CASES.values(), ids=_CASES)
def test_a_wide_beam_finds_the_same_as_brute_force(options, is_prefilled):
  alpha, contexts = 0.6, [5, 40, 7]
  if 'allowed_outputs' in options:
    # At most 5 prefixes have the same length, so that 5 beams are wide enough.
    model, length, num_decodes = _model(seed=2), 6, 5
    prompts = [[], [], []]
  else:
    # 81 sequences of 4 tokens have 4 extensions each without the token 0, which never comes.
    model, length, num_decodes = _model(5, seed=2), 5, 200
    prompts = [[], [3], [4]]
  search = jit(
    lambda: decoding.beam_search(
      prompts_to_inputs(prompts, length),
      model.cache(contexts, prompts if is_prefilled else None),
      model.step,
      EOS,
      num_decodes=num_decodes,
      alpha=alpha,
      initial_index=lengths(prompts) if is_prefilled else None,
      logit_processor=_constraints(options),
    )
  )
  sequences, scores = search()
  for row, (context, prompt) in enumerate(zip(contexts, prompts, strict=True)):
    found = _all_ended(model, context, prompt, length, options)
    ranked = sorted((total / ((5 + len(tokens)) / 6) ** alpha, tokens) for tokens, total in found)
    ranked = ranked[::-1][:num_decodes]
    assert len(ranked) > 4
    for (score, tokens), got, got_score in zip(
      ranked, sequences[row][::-1], scores[row][::-1], strict=False
    ):
      np.testing.assert_allclose(got_score, score, rtol=1e-4, atol=1e-5)
      assert [int(token) for token in got if token] == list(tokens)


def test_more_beams_than_outputs_give_each_output_once_and_stop():
  model, outputs = _model(), [[2], [4, 3]]
  sequences, scores = decoding.beam_search(
    jnp.zeros((2, 40), jnp.int32),
    model.cache([1, 2]),
    model.counting_step,
    EOS,
    num_decodes=4,
    logit_processor=_constraints(dict(allowed_outputs=outputs)),
  )
  for row in range(2):
    found = [[token for token in tokens if token] for tokens in np.asarray(sequences)[row].tolist()]
    assert found[:2] == [[], []]
    assert sorted(found[2:]) == [[2, EOS], [4, 3, EOS]]
    assert np.all(np.asarray(scores)[row, :2] == decoding.NEG_INF_VALUE)
  # The last output ends at the third step; the loop stops when a step has found nothing.
  assert len(model.calls) <= 5


def test_prompts_are_not_part_of_an_allowed_output():
  model, prompts = _model(), [[5, 5], [], [3]]
  inputs = prompts_to_inputs(prompts, 9)
  for initial_index in (None, lengths(prompts)):
    sequences, _ = jit(
      lambda initial_index=initial_index: decoding.beam_search(
        inputs,
        model.cache([1, 2, 3], None if initial_index is None else prompts),
        model.step,
        EOS,
        num_decodes=7,
        initial_index=initial_index,
        logit_processor=_constraints(dict(allowed_outputs=_OUTPUTS)),
      )
    )()
    for prompt, found in zip(prompts, np.asarray(sequences).tolist(), strict=True):
      texts = [[token for token in tokens if token] for tokens in found]
      assert sorted(texts) == sorted([*prompt, *output, EOS] for output in _OUTPUTS)


def test_stop_tokens_too_wait_for_the_least_length():
  model = HistoryModel(6, bias=np.float32([-60.0, 0.0, 0.0, 0.0, 0.0, 50.0]))
  for decode_fn in (decoding.greedy_search, decoding.temperature_sample, decoding.beam_search):
    sequences, _ = decode_fn(
      jnp.zeros((1, 6), jnp.int32),
      model.cache([3]),
      model.step,
      EOS,
      stop_token_ids=(5,),
      logit_processor=decoding.Constraints(min_decode_len=4),
    )
    (tokens,) = np.asarray(sequences)[:, -1].tolist()
    assert 5 not in tokens[:3] and EOS not in tokens[:3] and tokens[3:] == [5, 0, 0]


@pytest.mark.parametrize(
  'decode_fn, options', [('greedy_search', {}), ('beam_search', {'num_decodes': 3})]
)
def test_sharded_rows_decode_the_same(decode_fn, options):
  model, rows = _model(), 16
  mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
  by_rows = NamedSharding(mesh, PartitionSpec('data'))
  outputs = [list(output) for n in (1, 2, 3) for output in itertools.product(range(2, 6), repeat=n)]
  processor = _constraints(dict(allowed_outputs=outputs, repetition_penalty=1.4))

  def decode(inputs, contexts, processor):
    cache = {'layer': {'history': contexts, 'cache_index': jnp.zeros((), jnp.int32)}}
    return getattr(decoding, decode_fn)(
      inputs, cache, model.step, EOS, logit_processor=processor, **options
    )

  inputs, contexts = np.zeros((rows, 8), np.int32), np.arange(rows, dtype=np.int32)
  ngrams = decoding.Constraints(no_repeat_ngram_size=2, min_decode_len=5)
  for constraints in (processor, ngrams):
    fn = functools.partial(decode, processor=constraints)
    alone = jit(fn)(inputs, contexts)
    sharded = jit(fn, in_shardings=(by_rows, by_rows), out_shardings=by_rows)(inputs, contexts)
    assert len(sharded[0].addressable_shards) == 8
    np.testing.assert_array_equal(sharded[0], alone[0])
    np.testing.assert_allclose(sharded[1], alone[1], rtol=1e-6)


def test_a_custom_processor_is_carried_along_with_the_beams():
  # Each sequence has a budget of twos: the state counts them.
  def two_twos(inputs):
    def process(count, token, logits):
      count = count + (token == 2)
      return count, jnp.where(
        (count >= 2)[:, None], logits.at[:, 2].set(decoding.EXCLUDED_VALUE), logits
      )

    return jnp.zeros(inputs.num_cached.shape, jnp.int32), process

  model = HistoryModel(6, bias=np.float32([-60.0, -3.0, 3.0, 0.0, 0.0, 0.0]))
  sequences, _ = jit(
    lambda: decoding.beam_search(
      jnp.zeros((3, 8), jnp.int32),
      model.cache([1, 2, 3]),
      model.step,
      EOS,
      num_decodes=4,
      logit_processor=two_twos,
    )
  )()
  counts = np.sum(np.asarray(sequences) == 2, axis=-1)
  assert counts.max() == 2
  assert counts.min() >= 0


@pytest.mark.parametrize(
  'options, message',
  [
    (
      dict(no_repeat_ngram_size=-1),
      'no_repeat_ngram_size` must be an integer >= 0, got -1. 0 allows',
    ),
    (dict(no_repeat_ngram_size=1.5), 'no_repeat_ngram_size` must be an integer >= 0, got 1.5'),
    (
      dict(repetition_penalty=0.0),
      'repetition_penalty` must be a number > 0, got 0.0. 1 is no penalty',
    ),
    (dict(repetition_penalty=-1), 'repetition_penalty` must be a number > 0, got -1'),
    (dict(min_decode_len=-2), 'min_decode_len` must be an integer >= 0, got -2'),
    (
      dict(allowed_outputs=[[2]], min_decode_len=2),
      'min_decode_len` must be 0 with allowed_outputs, .*got 2',
    ),
    (
      dict(allowed_outputs=[[2]], no_repeat_ngram_size=2),
      'no_repeat_ngram_size` must be 0 with allowed',
    ),
  ],
)
def test_invalid_options_are_an_error(options, message):
  with pytest.raises(ConfigError, match=message):
    _constraints(options)


@pytest.mark.parametrize(
  'constraints, options, message',
  [
    (
      dict(min_decode_len=7),
      {},
      'min_decode_len` must be at most the number of tokens to decode, 6, got 7. Red',
    ),
    (dict(min_decode_len=4), dict(max=3), 'min_decode_len` must be at most .* 3, got 4'),
    (
      dict(allowed_outputs=[[3] * 6]),
      {},
      'outputs of at most 6 tokens, .*got .*one of 7, including the end',
    ),
    (dict(allowed_outputs=[[3] * 3]), dict(max=3), 'outputs of at most 3 tokens'),
    (
      dict(allowed_outputs=[[3]]),
      dict(eos_id=4),
      r'the end tokens \(4,\) at the end.*do not set another eos_id',
    ),
    (
      dict(allowed_outputs=[[3, 5]]),
      dict(stop_token_ids=(5, 4)),
      r'outputs with \[5\] before the end token 1.*Remove these tokens',
    ),
  ],
)
@pytest.mark.parametrize('decode_fn', ['greedy_search', 'temperature_sample', 'beam_search'])
def test_constraints_that_the_decoding_cannot_keep_are_an_error(
  decode_fn, constraints, options, message
):
  def step(state):
    raise AssertionError('a step was taken')

  options = {'eos_id': EOS, **options}
  if 'max' in options:
    name = 'max_decode_step' if decode_fn == 'beam_search' else 'max_decode_steps'
    options[name] = options.pop('max')
  with pytest.raises(ConfigError, match=message):
    jax.jit(
      lambda inputs: getattr(decoding, decode_fn)(
        inputs, {}, step, logit_processor=_constraints(constraints), **options
      )
    )(np.zeros((2, 6), np.int32))


def test_a_file_of_outputs_needs_a_vocabulary(tmp_path):
  path = tmp_path / 'outputs.txt'
  path.write_text('yes\nno\n')
  constraints = decoding.Constraints(repetition_penalty=1.2, allowed_outputs=str(path))
  with pytest.raises(
    ConfigError, match='a decoding function has no vocabulary, or None, got .*Call Constraints'
  ):
    decoding.greedy_search(
      jnp.zeros((1, 4), jnp.int32), {}, lambda state: None, EOS, logit_processor=constraints
    )
  encoded = constraints.encoded(vocabularies.ByteVocabulary())
  assert encoded.repetition_penalty == 1.2 and encoded.allowed_outputs.max_length == 4
  assert encoded.encoded(None) is encoded


def test_identity_has_what_the_results_depend_on(tmp_path):
  assert decoding.Constraints().identity == {}
  assert decoding.Constraints(min_decode_len=3).identity == {'min_decode_len': 3}
  hashes = set()
  for output in ('yes', 'no'):
    path = tmp_path / 'outputs.txt'
    path.write_text(output)
    constraints = decoding.Constraints(allowed_outputs=str(path))
    hashes.add(
      constraints.encoded(vocabularies.ByteVocabulary()).identity['allowed_outputs.content']
    )
  assert len(hashes) == 2
