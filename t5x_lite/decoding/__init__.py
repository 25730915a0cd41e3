"""Decoding algorithms, independent of the network: a step is a function from a token and a cache to logits."""

from t5x_lite.decoding.beam import beam_init, beam_search, brevity_penalty
from t5x_lite.decoding.cache import (
    add_beam_dim, cache_gather_beams, cache_map, flat_batch_beam_expand, flatten_beam_dim, gather_beams,
    gather_topk_beams, unflatten_beam_dim)
from t5x_lite.decoding.greedy import greedy_search
from t5x_lite.decoding.sampling import temperature_sample
from t5x_lite.decoding.state import (
    MIN_TEMPERATURE, NEG_INF, NEG_INF_VALUE, BeamState, DecodeContract, DecodeFnCallable, DecodingState,
    LogitCallbackFn, SamplingLoopState, StateCallbackFn, TokensIdsToLogitsCallable, accepts_padding_rows,
    contract_of, declare, takes_filling_rows)
from t5x_lite.decoding.topk import float32_bsearch, int32_bsearch, top_k_two_stage, topk_mask, topp_mask

__all__ = [
    'BeamState',
    'DecodeContract',
    'DecodeFnCallable',
    'DecodingState',
    'LogitCallbackFn',
    'MIN_TEMPERATURE',
    'NEG_INF',
    'NEG_INF_VALUE',
    'SamplingLoopState',
    'StateCallbackFn',
    'TokensIdsToLogitsCallable',
    'accepts_padding_rows',
    'add_beam_dim',
    'beam_init',
    'beam_search',
    'brevity_penalty',
    'cache_gather_beams',
    'cache_map',
    'contract_of',
    'declare',
    'flat_batch_beam_expand',
    'flatten_beam_dim',
    'float32_bsearch',
    'gather_beams',
    'gather_topk_beams',
    'greedy_search',
    'int32_bsearch',
    'takes_filling_rows',
    'temperature_sample',
    'top_k_two_stage',
    'topk_mask',
    'topp_mask',
    'unflatten_beam_dim',
]
