"""Greedy and beam search, constraints and scores of labels give what `transformers` gives for the same weights.

Greedy search agrees without changes. The two beam searches differ by design in four rules. The tests undo or avoid each
of them, so that all sequences and scores must agree:

1.  Of the 2k best candidates of a step, T5X lets all that end compete; `generate` lets only those among the k best.
2.  T5X divides log-probabilities by ((5 + n) / 6)^alpha, `generate` by n^length_penalty. Exponents of 0 agree.
3.  T5X stops when no unfinished beam can get a better score than a finished one, at the longest possible length:
    `early_stopping='never'`. The default of `generate` uses the current length and stops earlier.
4.  At the maximal length `generate` treats unfinished sequences as finished; T5X does so only in rows without a
    finished sequence.

Two further differences of `generate` (transformers 5.23): after the end of a beam it writes the end token where the
padding id is 0, and its cache fails for decoders that are deeper than the encoder, hence `use_cache=False`.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from tests.interop import hf_models
from tests.interop import reference

_LENGTH, _NUM_BEAMS, _ROWS, _EOS = 24, 4, 6, 1


def _model_that_ends(family, seed):
  """Returns (a model of theirs that gives the end token often, a batch)."""
  batch = reference.random_batch(seed, rows=_ROWS)
  return reference.hf_model(family, seed).that_ends(batch, family.end_amounts[seed % 2]), batch


@functools.cache
def _predict_fn(name, layout, alpha, constraints=None):
  """Returns a compiled function from (parameters, batch) to the model's predictions; alpha None: greedily."""
  decode_fn = (
    decoding.greedy_search
    if alpha is None
    else functools.partial(decoding.beam_search, alpha=alpha)
  )
  model = reference.our_model(
    reference.our_module(reference.FAMILIES[name], layout),
    decode_fn=decode_fn,
    constraints=constraints,
  )
  return reference.jit(
    functools.partial(
      model.predict_batch_with_aux,
      num_decodes=1 if alpha is None else _NUM_BEAMS,
      return_all_decodes=True,
    )
  )


def _ours(model, batch, name, layout, alpha=None, constraints=None):
  """Returns (int [rows, decodes, length], their scores), best first."""
  params = reference.our_tree(model.tensors, reference.FAMILIES[name], layout)
  inputs = {
    'encoder_input_tokens': batch['encoder_input_tokens'],
    'decoder_input_tokens': np.zeros((_ROWS, _LENGTH), np.int32),
  }
  sequences, aux = _predict_fn(name, layout, alpha, constraints)(params, inputs)
  return np.asarray(sequences)[:, ::-1], np.asarray(aux['scores'])[:, ::-1]


# The other families and layouts are for the long tests; test_logits.py compares their logits.
@pytest.mark.parametrize('name, layout', reference.cases(('t5_1_0', 't5')))
def test_greedy_search(name, layout):
  models = [_model_that_ends(reference.FAMILIES[name], seed) for seed in range(4)]
  wanted = [model.generate(batch, _LENGTH)['tokens'] for model, batch in models]
  for (model, batch), want in zip(models, wanted, strict=True):
    sequences, _ = _ours(model, batch, name, layout)
    np.testing.assert_array_equal(sequences, want)
  num_ended = sum(np.any(want == _EOS, axis=-1).sum() for want in wanted)
  assert 0 < num_ended < 4 * _ROWS


@pytest.mark.full  # by default, tests/decoding compares beams with T5X and with brute force
@pytest.mark.parametrize(
  'name, layout, alpha',
  [
    pytest.param(
      *case.values,
      alpha,
      id=f'{case.id}-{alpha}',
      marks=case.marks if alpha == 0 else pytest.mark.full,
    )
    for case in reference.cases(('switch', 't5'))
    for alpha in (0.0, 0.6)
  ],
)
def test_beam_search(name, layout, alpha):
  options = dict(num_beams=_NUM_BEAMS, alpha=alpha)
  models = [_model_that_ends(reference.FAMILIES[name], seed) for seed in range(6)]
  found = [
    (
      model.generate(batch, _LENGTH, **options)['tokens'],
      model.generate(batch, _LENGTH, all_may_end=True, **options),  # rule 1 undone
    )
    for model, batch in models
  ]
  num_compared = num_plain = num_changed = 0
  for (model, batch), (plain, theirs) in zip(models, found, strict=True):
    sequences, scores = _ours(model, batch, name, layout, alpha)
    want, want_scores = theirs['tokens'], theirs['scores']
    # Rule 4.
    compared = np.all(np.any(want == _EOS, axis=-1), axis=-1)
    np.testing.assert_array_equal(sequences[compared], want[compared])
    # Sums of up to 24 log-probabilities; those of large logits are rounded more.
    np.testing.assert_allclose(scores[compared], want_scores[compared], atol=3e-5, rtol=3e-6)
    # With rule 1 as it is, wherever it is of no effect.
    agree = np.all(np.any(plain == _EOS, axis=-1), axis=-1) & ~theirs['changed_rows']
    np.testing.assert_array_equal(sequences[agree], plain[agree])
    num_compared += compared.sum()
    num_plain += agree.sum()
    num_changed += np.any(plain[compared] != want[compared], axis=(1, 2)).sum()
  assert num_compared >= 18 and (alpha or num_plain), (num_compared, num_plain)
  # Where logits are not scaled, the end is among the k best candidates or not even among the 2k.
  assert num_changed or name == 'tied_unscaled'


# Options of `Constraints`, each of which changes something in the tests below.
_CONSTRAINTS = {
  'no_repeat_ngram_size 1': dict(no_repeat_ngram_size=1),
  'no_repeat_ngram_size 2': dict(no_repeat_ngram_size=2),
  'no_repeat_ngram_size 3': dict(no_repeat_ngram_size=3),
  'repetition_penalty 1.7': dict(repetition_penalty=1.7),
  'repetition_penalty 0.6': dict(repetition_penalty=0.6),
  'min_decode_len 8': dict(min_decode_len=8),
  'all': dict(no_repeat_ngram_size=2, repetition_penalty=1.3, min_decode_len=8),
}


def _of_generate(options):
  """Return the options of `generate` for options of `Constraints`."""
  return {
    {'min_decode_len': 'min_length'}.get(name, name): value for name, value in options.items()
  }


@pytest.mark.parametrize('name', _CONSTRAINTS)
def test_constraints_of_a_step(name):
  options, rows, length, vocab_size = _CONSTRAINTS[name], 2, 10, 7
  rng = np.random.default_rng(0)
  # Few tokens, so that n-grams repeat. The start token is 0.
  ids = rng.integers(2, 5, (rows, length)).astype(np.int32)
  ids[:, 0] = 0
  scores = rng.normal(size=(length, rows, vocab_size)).astype(np.float32) * 3
  want = hf_models.process_scores(name, _of_generate(options), ids, scores, _EOS)
  assert np.any(want['scores'] != scores)
  state, process = decoding.Constraints(**options)(
    decoding.ProcessorInputs(
      tokens=jnp.zeros((rows, length), jnp.int32),
      num_cached=jnp.zeros((rows,), jnp.int32),
      max_length=length,
      max_decoded=length,
      ends=(_EOS,),
    )
  )
  process = reference.jit(process)
  for column in range(length):
    state, processed = process(state, ids[:, column], scores[column])
    is_excluded = processed == decoding.EXCLUDED_VALUE
    np.testing.assert_array_equal(is_excluded, want['is_excluded'][column])
    np.testing.assert_allclose(
      np.where(is_excluded, 0, processed), want['scores'][column], rtol=1e-6
    )


@pytest.mark.parametrize('name', ['no_repeat_ngram_size 2', 'min_decode_len 8', 'all'])
def test_greedy_search_with_constraints(name):
  options = _CONSTRAINTS[name]
  # The first model ends soon, the second late.
  models = [_model_that_ends(reference.FAMILIES['t5_1_0'], seed) for seed in (1, 2)]
  wanted = [model.generate(batch, _LENGTH, **_of_generate(options)) for model, batch in models]
  plain = [model.generate(batch, _LENGTH) for model, batch in models]
  num_changed = 0
  for (model, batch), want, without in zip(models, wanted, plain, strict=True):
    sequences, _ = _ours(model, batch, 't5_1_0', 't5', constraints=decoding.Constraints(**options))
    np.testing.assert_array_equal(sequences, want['tokens'])
    num_changed += np.any(want['tokens'] != without['tokens'], axis=(1, 2)).sum()
  assert num_changed > 1


@pytest.mark.parametrize('name', ['repetition_penalty 1.7', 'all'])
def test_beam_search_with_constraints(name):
  options = _CONSTRAINTS[name]
  beams = dict(num_beams=_NUM_BEAMS, alpha=0.0, all_may_end=True)  # rule 1 undone
  models = [_model_that_ends(reference.FAMILIES['t5_1_0'], seed) for seed in (1, 2)]
  wanted = [
    model.generate(batch, _LENGTH, **beams, **_of_generate(options)) for model, batch in models
  ]
  num_compared = 0
  for (model, batch), theirs in zip(models, wanted, strict=True):
    constraints = decoding.Constraints(**options)
    sequences, scores = _ours(model, batch, 't5_1_0', 't5', 0.0, constraints)
    want, want_scores = theirs['tokens'], theirs['scores']
    # Rule 4.
    compared = np.all(np.any(want == _EOS, axis=-1), axis=-1)
    np.testing.assert_array_equal(sequences[compared], want[compared])
    np.testing.assert_allclose(scores[compared], want_scores[compared], atol=3e-5, rtol=3e-6)
    num_compared += compared.sum()
  assert num_compared > 1


def test_scores_of_labels():
  # Of different lengths; the scores include the end token.
  tokens = [[5], [5, 9], [9, 5, 7], [30, 2, 8, 8], [4]]
  labels = decoding.LabelScores(labels=[str(ids) for ids in tokens])
  family = reference.FAMILIES['t5_1_0']
  models = [_model_that_ends(family, seed) for seed in (1, 2)]
  wanted = [model.label_scores(batch, [[*ids, _EOS] for ids in tokens]) for model, batch in models]
  ours = reference.our_model(
    reference.our_module(family, 't5'), decode_fn=decoding.EncodedLabels(labels, tokens, _EOS)
  )
  predict = reference.jit(ours.predict_batch_with_aux)
  for (model, batch), want in zip(models, wanted, strict=True):
    inputs = {
      'encoder_input_tokens': batch['encoder_input_tokens'],
      'decoder_input_tokens': np.zeros((_ROWS, 5), np.int32),
    }
    sequences, aux = predict(reference.our_tree(model.tensors, family, 't5'), inputs)
    np.testing.assert_allclose(aux['scores'], want, rtol=1e-5, atol=1e-5)
    for row, best in zip(np.asarray(sequences), np.argmax(want, axis=1), strict=True):
      assert np.trim_zeros(row, 'b').tolist() == [*tokens[best], _EOS]
