"""Contracts of decoding functions: inheritance by wrappers, and agreement with the signatures."""

import dataclasses
import functools
import inspect

import gin
import pytest

from t5x_lite import decoding

_OF_MODELS = {
  'inputs',
  'cache',
  'tokens_to_logits',
  'eos_id',
  'num_decodes',
  'decode_rng',
  'cache_offset',
}


@pytest.mark.parametrize(
  'decode_fn', [decoding.greedy_search, decoding.beam_search, decoding.temperature_sample]
)
def test_declared_arguments_are_those_of_the_signature(decode_fn):
  contract = decoding.contract_of(decode_fn)
  conditional = {name for name in ('initial_index', 'padding_mask') if getattr(contract, name)}
  assert _OF_MODELS | conditional | set(contract.options) == set(
    inspect.signature(decode_fn).parameters
  )


def test_contracts_of_the_decoding_functions():
  reordering = {
    fn
    for fn in (decoding.greedy_search, decoding.beam_search, decoding.temperature_sample)
    if decoding.contract_of(fn).reorders_decodes
  }
  assert reordering == {decoding.beam_search}
  assert decoding.contract_of(decoding.greedy_search).max_num_decodes == 1
  assert decoding.contract_of(decoding.beam_search).max_num_decodes is None


def of_t5x(
  inputs, cache, tokens_to_logits, eos_id, num_decodes=1, decode_rng=None, cache_offset=0, **options
):
  return decoding.beam_search(
    inputs,
    cache,
    tokens_to_logits,
    eos_id,
    num_decodes,
    decode_rng=decode_rng,
    cache_offset=cache_offset,
    **options,
  )


@decoding.declare(max_num_decodes=7)
class Own:
  def __call__(self, **options):
    return decoding.greedy_search(**options)


def test_the_outermost_declaration_counts_and_t5xs_functions_have_the_defaults():
  beam, default = decoding.contract_of(decoding.beam_search), decoding.DecodeContract()
  wrapped = functools.wraps(decoding.beam_search)(lambda **options: decoding.beam_search(**options))
  partial = functools.partial(decoding.beam_search, alpha=0.0)
  other = decoding.declare(initial_index=False)(
    functools.wraps(decoding.beam_search)(lambda **options: None)
  )
  other_contract = decoding.DecodeContract(initial_index=False)
  for decode_fn, contract in [
    (partial, beam),
    (wrapped, beam),
    (functools.partial(wrapped), beam),
    (functools.wraps(partial)(lambda **options: partial(**options)), beam),
    (of_t5x, default),
    (functools.partial(of_t5x, cache_offset=0), default),
    (other, other_contract),
    (functools.partial(other), other_contract),
    (Own(), decoding.DecodeContract(max_num_decodes=7)),
  ]:
    assert decoding.contract_of(decode_fn) == contract, decode_fn
  assert decoding.contract_of(decoding.beam_search) == beam


def test_accepts_padding_rows_keeps_the_rest_of_a_declaration():
  decode_fn = decoding.declare(max_num_decodes=3)(lambda **options: None)
  assert decoding.contract_of(decoding.accepts_padding_rows(decode_fn)) == decoding.DecodeContract(
    max_num_decodes=3, padding_mask=True
  )
  with pytest.raises(dataclasses.FrozenInstanceError, match='padding_mask'):
    decoding.contract_of(decode_fn).padding_mask = False


def hold(decode_fns):
  return decode_fns


def test_gin_keeps_declarations_of_bound_and_scoped_functions():
  gin.parse_config("""
      from __gin__ import dynamic_registration
      from t5x_lite import decoding
      from tests.decoding import test_state as own
      own.hold.decode_fns = [@decoding.beam_search, @some/decoding.temperature_sample, @own.of_t5x]
      decoding.beam_search.alpha = 0.5
      some/decoding.temperature_sample.topk = 5
  """)
  try:
    of_gin = gin.get_configurable(hold)()
  finally:
    gin.clear_config()
  plain = (decoding.beam_search, decoding.temperature_sample, of_t5x)
  assert not set(of_gin) & set(plain)
  assert [decoding.contract_of(fn) for fn in of_gin] == [decoding.contract_of(fn) for fn in plain]
