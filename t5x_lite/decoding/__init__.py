"""Decoding algorithms: they see a network as a function from a token and a cache to logits."""

from t5x_lite.decoding.cache import flat_batch_beam_expand
from t5x_lite.decoding.greedy import check_num_decodes, greedy_search
from t5x_lite.decoding.state import DecodeFnCallable, DecodingState, TokensIdsToLogitsCallable

__all__ = [
    'DecodeFnCallable',
    'DecodingState',
    'TokensIdsToLogitsCallable',
    'check_num_decodes',
    'flat_batch_beam_expand',
    'greedy_search',
]
