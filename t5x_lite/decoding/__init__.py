"""Decoding algorithms, independent of the network: a step is a function from a token and a cache to logits."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.decoding.allowed_outputs': ('AllowedOutputs', 'read_allowed_outputs'),
    't5x_lite.decoding.beam': ('beam_init', 'beam_search', 'brevity_penalty'),
    't5x_lite.decoding.cache': (
      'add_beam_dim',
      'cache_gather_beams',
      'cache_map',
      'flat_batch_beam_expand',
      'flatten_beam_dim',
      'gather_beams',
      'gather_topk_beams',
      'unflatten_beam_dim',
    ),
    't5x_lite.decoding.constraints': ('Constraints',),
    't5x_lite.decoding.greedy': ('greedy_search',),
    't5x_lite.decoding.label_scores': ('EncodedLabels', 'LabelScores', 'encoded', 'labels_of'),
    't5x_lite.decoding.minimum_bayes_risk': ('MinimumBayesRisk', 'minimum_bayes_risk_of'),
    't5x_lite.decoding.sampling': ('temperature_sample',),
    't5x_lite.decoding.state': (
      'BeamState',
      'DecodeContract',
      'DecodeFnCallable',
      'DecodingState',
      'EXCLUDED_VALUE',
      'LogitCallbackFn',
      'LogitProcessor',
      'MIN_TEMPERATURE',
      'NEG_INF',
      'NEG_INF_VALUE',
      'ProcessFn',
      'ProcessorInputs',
      'SamplingLoopState',
      'StateCallbackFn',
      'TokensIdsToLogitsCallable',
      'accepts_padding_rows',
      'contract_of',
      'declare',
      'identity_of',
    ),
    't5x_lite.decoding.topk': (
      'float32_bsearch',
      'int32_bsearch',
      'top_k_two_stage',
      'topk_mask',
      'topp_mask',
    ),
  },
)
