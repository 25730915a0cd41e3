"""Metrics of every training and evaluation step of a Transformer."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import losses
from t5x_lite import metrics as metrics_lib
from t5x_lite.types import Array, Batch

MetricsMap = dict[str, clu_metrics.Metric]
# (logits <float32>[batch, length, vocab], batch) -> metrics by name.
MetricFn = Callable[[Array, Batch], MetricsMap]


@dataclasses.dataclass(frozen=True)
class CustomMetrics:
  """Metrics of a user's functions.

  Attributes:
    owner: class that has the option `metric_fns`, for error messages.
    metric_fns: the functions.
  """

  owner: str
  metric_fns: Sequence[MetricFn]

  def add_to(self, metrics: MetricsMap, logits: Any, batch: Batch) -> MetricsMap:
    """Return `metrics` and those of the functions.

    Args:
      metrics: metrics by name.
      logits: <float32>[batch, length, vocab]; without functions, another form of them.
      batch: arrays [batch, ...] by name.

    Raises:
      ConfigError: a function does not take these arguments, does not return metrics, or returns a name twice.
    """
    for metric_fn in self.metric_fns:
      found = checks.call_custom(
        self.owner, 'metric_fns', 'logits, batch', metric_fn, logits, batch
      )
      is_valid = isinstance(found, Mapping) and all(map(metrics_lib.is_metric_obj, found.values()))
      got = found
      if is_valid:
        got = sorted(set(found) & set(metrics))
      if not is_valid or got:
        name = getattr(metric_fn, '__name__', repr(metric_fn))
        raise errors.ConfigError(
          f'The function {name} of `{self.owner}.metric_fns` must return '
          'a dict of clu.metrics.Metric, such as Average(total=..., count=...), with names that no other metric has, '
          f'got {got!r}.'
        )
      metrics = {**metrics, **found}
    return metrics


def segment_ids_of(batch: Batch) -> dict[str, Array]:
  """Return segment ids by the names of metrics; for an unpacked batch, 1 at tokens and 0 at padding."""
  suffix = '_segment_ids'
  packed = {name.removesuffix(suffix): ids for name, ids in batch.items() if name.endswith(suffix)}
  if packed:
    return packed
  names = ('encoder_input_tokens', 'decoder_target_tokens')
  return {name: (batch[name] != 0).astype(jnp.int32) for name in names if name in batch}


def count_packed_examples(segment_ids: Array) -> Array:
  """Return the number of examples packed into the rows, an int32 scalar.

  Args:
    segment_ids: <int>[batch, length]; consecutive equal ids above 0 are one example, 0 is padding.

  >>> import numpy as np
  >>> print(count_packed_examples(np.array([[1, 1, 2, 0], [1, 0, 0, 0], [1, 1, 1, 1]])))
  4
  """
  first = segment_ids[:, 0]
  following = segment_ids[:, 1:]
  # [batch, length - 1]: True at the first token of an example.
  starts = (following != segment_ids[:, :-1]) & (following != 0)
  return jnp.sum(first != 0, dtype=jnp.int32) + jnp.sum(starts, dtype=jnp.int32)


def is_argmax(logits: Array, ids: Array) -> Array:
  """Return <bool>[...], True where `ids` equal the `argmax` of the logits, the first of equal maxima.

  Comparing with the logit of each id is vectorized on CPU; searching for the index of the maximum is not.

  Args:
    logits: <float>[..., vocab].
    ids: <int>[...].
  """
  ids = ids.astype(jnp.int32)
  vocab_size = logits.shape[-1]
  # [..., 1]: the logit of each id.
  valid_ids = jnp.clip(ids, 0, vocab_size - 1)
  own = jnp.take_along_axis(logits, valid_ids[..., None], axis=-1, mode='promise_in_bounds')
  positions = jax.lax.broadcasted_iota(ids.dtype, logits.shape, logits.ndim - 1)
  # [..., vocab]: logits before the id must be smaller, those after it may be equal.
  is_below = jnp.where(positions < ids[..., None], logits < own, logits <= own)
  return jnp.all(is_below, axis=-1) & (ids >= 0) & (ids < vocab_size)


def compute_weighted_accuracy(
  logits: Array, targets: Array, weights: Array | None = None
) -> tuple[Array, Array]:
  """Return (sum of the weights of targets that are the most probable token, sum of all weights), float32 scalars.

  The `accuracy` of `compute_base_metrics` counts positions instead, independent of their weights.

  Args:
    logits: <float>[..., vocab].
    targets: <int>[...].
    weights: <float>[...], or None for ones.
  """
  if weights is None:
    weights = jnp.ones(targets.shape, jnp.float32)
  else:
    weights = weights.astype(jnp.float32)
  of_correct = jnp.where(is_argmax(logits, targets), weights, 0.0)
  return jnp.sum(of_correct), jnp.sum(weights)


def compute_base_metrics(
  logits: Array,
  targets: Array,
  mask: Array | None,
  loss: Array | losses.NormalizedLoss,
  z_loss: Array | losses.NormalizedLoss | None = None,
  segment_ids: Mapping[str, Array] | None = None,
) -> MetricsMap:
  """Compute the metrics of one batch from its logits, <float>[batch, length, vocab]; see `metrics_of_batch`."""
  return metrics_of_batch(is_argmax(logits, targets), targets, mask, loss, z_loss, segment_ids)


def compute_metrics(
  logits: Array,
  targets: Array,
  weights: Array | None,
  loss: Array,
  weight_sum: Array,
  additional_metrics: MetricsMap,
) -> MetricsMap:
  """Return sums over one batch, and other metrics; for models written for older versions of T5X.

  The models of this package use `compute_base_metrics`.

  Args:
    logits: <float>[batch, length, vocab].
    targets: <int>[batch, length].
    weights: <float>[batch, length], or None for ones.
    loss: float32 scalar.
    weight_sum: float32 scalar.
    additional_metrics: metrics by name, which have precedence.

  Returns:
    `loss`, `accuracy` (sum of the weights of correct targets), `weight_sum`, `num_examples` (rows), `num_tokens`
    (positions), each a `Sum`, and `additional_metrics`.
  """
  correct, _ = compute_weighted_accuracy(logits, targets, weights)
  return {
    **metrics_lib.create_metrics_dict(
      {
        'loss': loss,
        'accuracy': correct,
        'weight_sum': weight_sum,
        'num_examples': targets.shape[0],
        'num_tokens': targets.size,
      }
    ),
    **additional_metrics,
  }


def metrics_of_batch(
  is_correct: Array,
  targets: Array,
  mask: Array | None,
  loss: Array | losses.NormalizedLoss,
  z_loss: Array | losses.NormalizedLoss | None = None,
  segment_ids: Mapping[str, Array] | None = None,
  token_sums: losses.TokenSums | None = None,
) -> MetricsMap:
  """Compute the metrics of one batch, with T5X's names.

  `loss`, `z_loss` and `cross_ent_loss` are means over batches of the normalized losses, by their weights; see
  `losses.NormalizedLoss`. `*_per_*` are the sums of the losses, before the division by the normalizing factor, per
  token, without padding rows. `accuracy` is the accuracy of the most probable token at positions whose mask is not 0.
  `effective_batch_size/*` counts packed examples, and `non_padding_fraction/*` tokens without padding. `timing/*` need
  a duration before they are computed: `seqs` are rows, `examples` packed examples, `target_tokens` positions of the
  targets, and `tokens` positions of all features in `segment_ids`.

  Args:
    is_correct: <bool>[batch, length], True where the target is the most probable token.
    targets: <int>[batch, length]; [batch] in a classifier, such as a dual encoder, whose mask has the same shape.
    mask: <float>[batch, length] loss weights, or None for ones.
    loss: the batch's loss; a float32 scalar is a sum, or a loss of unknown factor, and its mean is per batch.
    z_loss: z-loss contained in `loss`, with the same factor; or None.
    segment_ids: <int>[batch, length of the feature] by feature, 0 at padding.
    token_sums: sums for `*_per_*` where `mask` has other weights than the tokens; by default, those of the losses.

  Returns:
    Metrics by name.
  """
  if mask is None:
    mask = jnp.ones(targets.shape, jnp.float32)
  loss = _normalized(loss, mask)
  if z_loss is not None:
    z_loss = _normalized(z_loss, mask)
  # Positions of the rows that are not padding, so that it does not matter how a batch is filled up.
  is_real = losses.real_rows({'targets': targets, 'mask': mask, **(segment_ids or {})})
  num_real_targets = jnp.sum(is_real, dtype=jnp.float32) * math.prod(targets.shape[1:])
  num_seqs = targets.shape[0]
  # Token counts are floats: an int32 would overflow between two summaries of a large run.
  num_target_tokens = float(targets.size)
  num_devices = jax.device_count()
  mask_sum = jnp.sum(mask, dtype=jnp.float32)
  if token_sums is None:
    of_z = jnp.zeros([], jnp.float32) if z_loss is None else z_loss.total
    token_sums = losses.TokenSums(loss.total, of_z, mask_sum)
  is_counted = mask != 0
  num_correct = jnp.sum(is_correct & is_counted, dtype=jnp.float32)

  rate = metrics_lib.TimeRate.from_model_output
  # The fields of clu's classes are unknown to type checkers.
  average: Any = clu_metrics.Average
  accuracy: Any = clu_metrics.Accuracy
  num_counted = jnp.sum(is_counted, dtype=jnp.float32)
  metrics = {
    'accuracy': accuracy(total=num_correct, count=num_counted),
    'loss': loss.average(),
    'loss_per_nonpadding_target_token': average(total=token_sums.loss, count=token_sums.weight),
    'loss_per_all_target_tokens': average(total=token_sums.loss, count=num_real_targets),
    'timing/seqs_per_second': rate(numerator=num_seqs),
    'timing/steps_per_second': metrics_lib.StepsPerTime.from_model_output(),
    'timing/seconds': metrics_lib.Time(),
    'timing/seqs': metrics_lib.Sum(num_seqs),
    'timing/seqs_per_second_per_core': rate(numerator=num_seqs / num_devices),
    'timing/target_tokens_per_second': rate(numerator=num_target_tokens),
    'timing/target_tokens_per_second_per_core': rate(numerator=num_target_tokens / num_devices),
    'non_padding_fraction/loss_weights': average(total=mask_sum, count=num_target_tokens),
  }
  if z_loss is not None:
    cross_entropy = loss.with_value(loss.value - z_loss.value)
    metrics |= {
      'z_loss': z_loss.average(),
      'z_loss_per_all_target_tokens': average(total=token_sums.z_loss, count=num_real_targets),
      'cross_ent_loss': cross_entropy.average(),
      'cross_ent_loss_per_all_target_tokens': average(
        total=token_sums.loss - token_sums.z_loss, count=num_real_targets
      ),
    }

  if segment_ids:
    num_tokens = float(sum(ids.size for ids in segment_ids.values()))
    num_real = {
      feature: jnp.sum(ids != 0, dtype=jnp.float32) for feature, ids in segment_ids.items()
    }
    num_examples = {feature: count_packed_examples(ids) for feature, ids in segment_ids.items()}
    for feature, ids in segment_ids.items():
      metrics[f'effective_batch_size/{feature}'] = metrics_lib.AveragePerStep(
        total=num_examples[feature]
      )
      metrics[f'non_padding_fraction/{feature}'] = average(
        total=num_real[feature], count=float(ids.size)
      )
    metrics['non_padding_fraction/overall'] = average(
      total=sum(num_real.values()), count=num_tokens
    )
    # A feature may be empty in some examples, so the largest count is the number of examples.
    metrics['timing/examples_per_second'] = rate(
      numerator=jnp.stack(list(num_examples.values())).max()
    )
  else:
    num_tokens = num_target_tokens
    metrics['timing/examples_per_second'] = rate(numerator=num_seqs)
  metrics['timing/tokens_per_second'] = rate(numerator=num_tokens)
  return metrics


def _normalized(loss: Array | losses.NormalizedLoss, mask: Array) -> losses.NormalizedLoss:
  if isinstance(loss, losses.NormalizedLoss):
    return loss
  return losses.NormalizedLoss.of(jnp.asarray(loss, jnp.float32), mask, None)
