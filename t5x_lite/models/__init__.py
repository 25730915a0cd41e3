"""Models: a network with its loss, its metrics, its predictions and its initial variables."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.decoding': ('DecodeFnCallable', 'TokensIdsToLogitsCallable'),
    't5x_lite.models.base': (
      'BaseModel',
      'BaseTransformerModel',
      'MetricFn',
      'get_input_vocabulary',
      'get_output_vocabulary',
    ),
    't5x_lite.models.batch_metrics': (
      'MetricsMap',
      'compute_base_metrics',
      'compute_metrics',
      'compute_weighted_accuracy',
      'count_packed_examples',
    ),
    't5x_lite.models.decoder_only': ('DecoderOnlyModel',),
    't5x_lite.models.encoder_decoder': ('DecoderParams', 'EncoderDecoderModel'),
    't5x_lite.models.generation': ('remove_prefix',),
    't5x_lite.models.vocabulary_size': ('check_vocabulary_fits',),
  },
)
