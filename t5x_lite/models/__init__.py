"""Models: a network with its loss, its metrics, its predictions and its initial variables."""

from t5x_lite.decoding import DecodeFnCallable, TokensIdsToLogitsCallable
from t5x_lite.models.base import (
    BaseModel,
    BaseTransformerModel,
    MetricFn,
    check_vocabulary_fits,
    get_input_vocabulary,
    get_output_vocabulary,
)
from t5x_lite.models.batch_metrics import (
    MetricsMap,
    compute_base_metrics,
    compute_weighted_accuracy,
    count_packed_examples,
)
from t5x_lite.models.decoder_only import DecoderOnlyModel
from t5x_lite.models.encoder_decoder import DecoderParams, EncoderDecoderModel
from t5x_lite.models.generation import remove_prefix

__all__ = [
    'BaseModel',
    'BaseTransformerModel',
    'DecodeFnCallable',
    'DecoderOnlyModel',
    'DecoderParams',
    'EncoderDecoderModel',
    'MetricFn',
    'MetricsMap',
    'TokensIdsToLogitsCallable',
    'check_vocabulary_fits',
    'compute_base_metrics',
    'compute_weighted_accuracy',
    'count_packed_examples',
    'get_input_vocabulary',
    'get_output_vocabulary',
    'remove_prefix',
]
