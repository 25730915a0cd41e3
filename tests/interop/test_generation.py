"""Greedy and beam search give what `transformers.generate` gives for the same weights.

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

import numpy as np
import pytest
import torch

from t5x_lite import decoding
from tests.interop import reference
from tests.networks import network_cases

_LENGTH, _NUM_BEAMS, _ROWS, _EOS = 24, 4, 6, reference.VOCABULARY.eos_id


def _model_that_ends(family, seed):
  """Returns (a model of theirs that gives the end token often, a batch)."""
  model, batch = reference.torch_model(family, seed), reference.random_batch(seed, rows=_ROWS)
  with torch.no_grad():
    head = model.lm_head.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    hidden: list[torch.Tensor] = []
    reference.torch_forward(model, batch)
    head.remove()
    mean = hidden[0].mean((0, 1))
    # Adds 1.5 to 4 to the logit of the end token on average.
    model.lm_head.weight[_EOS] += mean * ((1.5 + 2.5 * (seed % 2)) / (mean @ mean))
  return model, batch


@functools.cache
def _predict_fn(name, layout, alpha):
  """Returns a compiled function from (parameters, batch) to the model's predictions; alpha None: greedily."""
  decode_fn = (
    decoding.greedy_search
    if alpha is None
    else functools.partial(decoding.beam_search, alpha=alpha)
  )
  model = reference.our_model(
    reference.our_module(reference.FAMILIES[name], layout), decode_fn=decode_fn
  )
  return network_cases.jit(
    functools.partial(
      model.predict_batch_with_aux,
      num_decodes=1 if alpha is None else _NUM_BEAMS,
      return_all_decodes=True,
    )
  )


def _ours(model, batch, name, layout, alpha=None):
  """Returns (int [rows, decodes, length], their scores), best first."""
  params = reference.our_tree(reference.state_dict(model), reference.FAMILIES[name], layout)
  inputs = {
    'encoder_input_tokens': batch['encoder_input_tokens'],
    'decoder_input_tokens': np.zeros((_ROWS, _LENGTH), np.int32),
  }
  sequences, aux = _predict_fn(name, layout, alpha)(params, inputs)
  return np.asarray(sequences)[:, ::-1], np.asarray(aux['scores'])[:, ::-1]


def _theirs(model, batch, **options):
  """Returns (int [rows, decodes, length] with 0 behind the end, their scores or None), best first."""
  inputs = torch.from_numpy(batch['encoder_input_tokens']).long()
  result = model.generate(
    input_ids=inputs,
    attention_mask=(inputs > 0).long(),
    max_new_tokens=_LENGTH,
    do_sample=False,
    use_cache=False,
    return_dict_in_generate=True,
    output_scores=True,
    **options,
  )
  tokens = result.sequences.numpy()[:, 1:]
  tokens = np.pad(tokens, ((0, 0), (0, _LENGTH - tokens.shape[1]))).reshape(_ROWS, -1, _LENGTH)
  is_end = tokens == _EOS
  tokens = np.where(np.cumsum(is_end, axis=-1) > is_end, 0, tokens)
  scores = result.get('sequences_scores')
  return tokens, None if scores is None else scores.numpy().reshape(_ROWS, -1)


class _BrevityPenalty(float):
  """An exponent that makes T5X's penalty of `n ** exponent`."""

  def __rpow__(self, length):
    return ((5 + length) / 6) ** float(self)


class _AllCandidatesMayEnd:
  """Rule 1 undone: in place of a model's `_update_finished_beams`. Notes the rows in which it made a difference."""

  def __init__(self, model):
    self._update = model._update_finished_beams
    self.rows = np.zeros(_ROWS, bool)

  def __call__(
    self,
    *,
    top_num_beam_mask,
    next_token_hits_stopping_criteria,
    is_early_stop_heuristic_unsatisfied,
    **options,
  ):
    late = torch.any(next_token_hits_stopping_criteria & ~top_num_beam_mask, dim=1, keepdim=True)
    self.rows |= torch.any(late & is_early_stop_heuristic_unsatisfied, dim=1).numpy()
    return self._update(
      top_num_beam_mask=torch.ones_like(top_num_beam_mask),
      next_token_hits_stopping_criteria=next_token_hits_stopping_criteria,
      is_early_stop_heuristic_unsatisfied=is_early_stop_heuristic_unsatisfied,
      **options,
    )


# The other families and layouts are for the long tests; test_logits.py compares their logits.
@pytest.mark.parametrize('name, layout', reference.cases(('t5_1_0', 't5')))
def test_greedy_search(name, layout):
  num_ended = 0
  for seed in range(4):
    model, batch = _model_that_ends(reference.FAMILIES[name], seed)
    sequences, _ = _ours(model, batch, name, layout)
    want, _ = _theirs(model, batch, num_beams=1)
    np.testing.assert_array_equal(sequences, want)
    num_ended += np.any(want == _EOS, axis=-1).sum()
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
  num_compared = num_plain = num_changed = 0
  for seed in range(6):
    model, batch = _model_that_ends(reference.FAMILIES[name], seed)
    sequences, scores = _ours(model, batch, name, layout, alpha)
    options = dict(
      num_beams=_NUM_BEAMS,
      num_return_sequences=_NUM_BEAMS,
      early_stopping='never',
      length_penalty=_BrevityPenalty(alpha),
    )
    plain, _ = _theirs(model, batch, **options)
    model._update_finished_beams = all_may_end = _AllCandidatesMayEnd(model)
    want, want_scores = _theirs(model, batch, **options)
    # Rule 4.
    compared = np.all(np.any(want == _EOS, axis=-1), axis=-1)
    np.testing.assert_array_equal(sequences[compared], want[compared])
    np.testing.assert_allclose(scores[compared], want_scores[compared], atol=3e-5)
    # With rule 1 as it is, wherever it is of no effect.
    agree = np.all(np.any(plain == _EOS, axis=-1), axis=-1) & ~all_may_end.rows
    np.testing.assert_array_equal(sequences[agree], plain[agree])
    num_compared += compared.sum()
    num_plain += agree.sum()
    num_changed += np.any(plain[compared] != want[compared], axis=(1, 2)).sum()
  assert num_compared >= 18 and num_changed and (alpha or num_plain), (
    num_compared,
    num_changed,
    num_plain,
  )
