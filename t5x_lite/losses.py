"""Training losses: cross entropy with z-loss and label smoothing, and normalising factors.

The cross entropies have custom derivatives. Besides the logits, the backward pass needs two numbers per position (the
largest logit and the log of the sum), so that no softmax, log-softmax or one-hot array of the logits' size is kept in
memory between the two passes. Logits of any floating dtype are converted to float32.
"""

from collections.abc import Callable
import dataclasses
import enum
import functools
import math

from flax import struct
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import metrics as metrics_lib
from t5x_lite.types import Array, Batch

__all__ = [
  'NormalizedLoss',
  'SpecialLossNormalizingFactor',
  'compute_weighted_cross_entropy',
  'convert_special_loss_normalizing_factor_to_enum',
  'cross_entropy_with_logits',
  'get_loss_normalizing_factor_and_weights',
  'real_rows',
  'token_cross_entropy',
]


def _log_sum_exp_parts(logits: Array) -> tuple[Array, Array]:
  """Return (largest logit, log of the sum of exp(logit - largest)), each [..., 1] float32; their sum is log Z.

  They are separate because `logits - largest - log_sum` is exact to float32 rounding, whereas `logits - log_z` also has
  the rounding error of `log_z`.
  """
  # [..., 1]: subtracted first, so that no exponential overflows.
  largest = jnp.max(logits, axis=-1, keepdims=True)
  exponentials = jnp.exp(logits - largest)
  log_sum = jnp.log(jnp.sum(exponentials, axis=-1, keepdims=True))
  return largest, log_sum


# ---------------------------------------------------------------------------------------------------------------------
# Cross entropy against a distribution over the vocabulary
# ---------------------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def cross_entropy_with_logits(logits: Array, targets: Array, z_loss: float) -> tuple[Array, Array]:
  """Return the cross entropy against one-hot or soft targets, plus `z_loss * log(Z)**2`.

  The z-loss keeps the softmax normaliser Z near 1, which keeps logits small enough for low precision.
  If targets are ids, prefer `token_cross_entropy`, which needs no array of the targets' distribution.

  Args:
    logits: <float>[..., vocab].
    targets: <float>[..., vocab], target distribution; differentiable like the logits.
    z_loss: coefficient of the auxiliary loss; a constant without gradient.

  Returns:
    (loss, z): <float32>[...] each; `loss` includes `z`.

  Reference: Chowdhery et al., PaLM, https://arxiv.org/abs/2204.02311, section 5 (z-loss).
  """
  return _soft_forward(logits, targets, z_loss)[0]


def _soft_forward(logits, targets, z_loss):
  logits_32 = logits.astype(jnp.float32)
  targets_32 = targets.astype(jnp.float32)
  largest, log_sum = _log_sum_exp_parts(logits_32)
  # [..., vocab]: logarithm of each id's probability.
  log_softmax = logits_32 - largest - log_sum
  # [...]: coefficient * log(Z)**2 of each position.
  z = z_loss * jnp.square(largest + log_sum)[..., 0]
  loss = z - jnp.sum(targets_32 * log_softmax, axis=-1)
  return (loss, z), (logits, targets, largest, log_sum, z_loss)


def _soft_backward(residuals, cotangents):
  logits, targets, largest, log_sum, z_loss = residuals
  # [..., 1] each: gradients of the loss and of z.
  loss_bar, z_bar = (cotangent[..., None] for cotangent in cotangents)
  targets_32 = targets.astype(jnp.float32)
  log_softmax = logits.astype(jnp.float32) - largest - log_sum
  # [..., 1]: gradient of log(Z); z is also a part of the loss.
  z_slope = 2.0 * z_loss * (largest + log_sum) * (loss_bar + z_bar)
  # [..., 1]: 1 for a distribution, but targets may be any weights.
  target_mass = jnp.sum(targets_32, axis=-1, keepdims=True)
  # [..., vocab]: softmax - target for each id, plus the softmax times the gradient of log(Z).
  softmax_slope = loss_bar * target_mass + z_slope
  logits_bar = jnp.exp(log_softmax) * softmax_slope - loss_bar * targets_32
  targets_bar = -loss_bar * log_softmax
  return logits_bar.astype(logits.dtype), targets_bar.astype(targets.dtype), None


cross_entropy_with_logits.defvjp(_soft_forward, _soft_backward)


# ---------------------------------------------------------------------------------------------------------------------
# Cross entropy against ids
# ---------------------------------------------------------------------------------------------------------------------


def _smoothed_masses(label_smoothing: float, vocab_size: int) -> tuple[float, float]:
  """Return (probability of the target, probability of each other id) with label smoothing."""
  if label_smoothing == 0.0:
    return 1.0, 0.0
  return 1.0 - label_smoothing, label_smoothing / (vocab_size - 1)


def token_cross_entropy(
  logits: Array, target_ids: Array, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Array, Array]:
  """Return the cross entropy against token ids with label smoothing, plus `z_loss * log(Z)**2`.

  Equal to `cross_entropy_with_logits` on smoothed one-hot targets, without such an array: the forward pass gathers the
  target's logit, and the backward pass needs only the logits and two float32 numbers per position.
  As with a one-hot array, an id outside of [0, vocab) has only the smoothing mass.

  Args:
    logits: <float>[..., vocab].
    target_ids: <int>[...].
    label_smoothing: probability mass, in [0, 1), moved from the target evenly to all other ids.
    z_loss: coefficient of the auxiliary loss.

  Returns:
    (loss, z): <float32>[...] each; `loss` includes `z`. The entropy of the smoothed target is not subtracted.

  Raises:
    ConfigError: `target_ids` are not integers.

  Reference: Szegedy et al., https://arxiv.org/abs/1512.00567, section 7 (label smoothing; here the target gets no part
  of the moved mass).
  """
  _check_integers(target_ids)
  # Ids are compared with vocabulary positions in this dtype; a narrower one could overflow.
  return _token_cross_entropy(
    logits, target_ids.astype(jnp.int32), float(label_smoothing), float(z_loss)
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _token_cross_entropy(logits, target_ids, label_smoothing, z_loss):
  return token_forward(logits, target_ids, label_smoothing, z_loss)[0]


def token_forward(logits, target_ids, label_smoothing, z_loss):
  """Return ((loss, z), residuals) of `token_cross_entropy`, for loss functions with another backward pass."""
  vocab_size = logits.shape[-1]
  on_mass, off_mass = _smoothed_masses(label_smoothing, vocab_size)
  logits_32 = logits.astype(jnp.float32)
  largest, log_sum = _log_sum_exp_parts(logits_32)

  # [...]: False for ids outside of the vocabulary, which have no target logit.
  is_id = (target_ids >= 0) & (target_ids < vocab_size)
  safe_ids = jnp.where(is_id, target_ids, 0)[..., None]
  target_logit = jnp.take_along_axis(logits, safe_ids, axis=-1, mode='promise_in_bounds')
  # [...]: logit of the target minus the largest, 0 for ids outside of the vocabulary.
  shifted = target_logit[..., 0].astype(jnp.float32) - largest[..., 0]
  shifted = jnp.where(is_id, shifted, 0.0)
  target_mass = _target_mass(is_id, on_mass, off_mass, vocab_size)
  # [...]: sum(targets * log_softmax), expanded so that only the smoothing term reads all logits again.
  loss = log_sum[..., 0] * target_mass - (on_mass - off_mass) * shifted
  if off_mass:
    loss -= off_mass * jnp.sum(logits_32 - largest, axis=-1)
  # Without a z-loss nothing is squared, because 0 * inf would be NaN after an overflow.
  if z_loss:
    z = z_loss * jnp.square(largest + log_sum)[..., 0]
  else:
    z = jnp.zeros_like(loss)
  return (loss + z, z), (logits, target_ids, largest, log_sum)


def token_backward(label_smoothing, z_loss, residuals, cotangents):
  """Return (gradient of the logits, None) from the residuals of `token_forward` and the gradients of (loss, z)."""
  logits, target_ids, largest, log_sum = residuals
  loss_bar, z_bar = (cotangent[..., None] for cotangent in cotangents)
  vocab_size = logits.shape[-1]
  on_mass, off_mass = _smoothed_masses(label_smoothing, vocab_size)
  is_id = (target_ids >= 0) & (target_ids < vocab_size)
  softmax = jnp.exp(logits.astype(jnp.float32) - largest - log_sum)
  # [..., 1]: gradient of log(Z); z is also a part of the loss.
  z_slope = 2.0 * z_loss * (largest + log_sum) * (loss_bar + z_bar)
  target_mass = _target_mass(is_id, on_mass, off_mass, vocab_size)[..., None]
  # [..., vocab]: the smoothed one-hot target, computed where it is used, so that it needs no memory.
  ids = jax.lax.broadcasted_iota(target_ids.dtype, logits.shape, logits.ndim - 1)
  targets = jnp.where(ids == target_ids[..., None], on_mass, off_mass)
  logits_bar = softmax * (loss_bar * target_mass + z_slope) - loss_bar * targets
  return logits_bar.astype(logits.dtype), None


def _target_mass(is_id: Array, on_mass: float, off_mass: float, vocab_size: int) -> Array:
  """Return the sum of each position's target distribution, <float32>[...]: 1 for valid ids."""
  mass = on_mass + (vocab_size - 1) * off_mass
  return jnp.where(is_id, mass, vocab_size * off_mass).astype(jnp.float32)


_token_cross_entropy.defvjp(token_forward, token_backward)


def check_targets(
  logits_shape: tuple[int, ...], targets: Array, weights: Array | None = None
) -> None:
  """Raise ConfigError unless targets and weights are those of the positions of logits [batch, length, vocab]."""
  shapes = [tuple(logits_shape), tuple(targets.shape)]
  if weights is not None:
    shapes.append(tuple(weights.shape))
  positions = shapes[0][:-1]
  if any(shape != positions for shape in shapes[1:]):
    raise errors.ConfigError(
      'Logits [batch, length, vocab], targets [batch, length] and weights [batch, length] must match, got the shapes '
      f'{", ".join(map(str, shapes))}. For one-hot targets use cross_entropy_with_logits.'
    )
  _check_integers(targets)


def _check_integers(target_ids: Array) -> None:
  if not jnp.issubdtype(target_ids.dtype, jnp.integer):
    raise errors.ConfigError(
      f'`token_cross_entropy.target_ids` must be integers, got dtype {target_ids.dtype}. For a '
      'distribution over the vocabulary use cross_entropy_with_logits.'
    )


def compute_weighted_cross_entropy(
  logits: Array,
  targets: Array,
  weights: Array | None = None,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
  loss_normalizing_factor: float | Array | None = None,
) -> tuple[Array, Array, Array]:
  """Return the summed cross entropy of a batch, weighted by position and divided by a normalising factor.

  The entropy of the smoothed targets, a constant, is subtracted, so that a perfect prediction has loss 0.
  Without weights every position counts, including padding.

  Args:
    logits: <float>[batch, length, vocab].
    targets: <int>[batch, length] token ids.
    weights: <float>[batch, length], or None for ones.
    label_smoothing: see `token_cross_entropy`.
    z_loss: see `token_cross_entropy`.
    loss_normalizing_factor: divisor of both sums; None means 1.

  Returns:
    (loss, z_loss, weight_sum), float32 scalars; `loss` includes the z-loss; `weight_sum` is not normalised.

  Raises:
    ConfigError: the shapes of logits, targets and weights do not match, or targets are not integers.
  """
  check_targets(logits.shape, targets, weights)
  loss, z = token_cross_entropy(logits, targets, label_smoothing=label_smoothing, z_loss=z_loss)
  loss -= smoothed_target_entropy(label_smoothing, logits.shape[-1])
  if weights is None:
    weight_sum = jnp.asarray(targets.size, jnp.float32)
  else:
    weights = weights.astype(jnp.float32)
    loss = loss * weights
    z = z * weights
    weight_sum = jnp.sum(weights)
  loss = jnp.sum(loss)
  z = jnp.sum(z)
  if loss_normalizing_factor is not None:
    loss = loss / loss_normalizing_factor
    z = z / loss_normalizing_factor
  return loss, z, weight_sum


def smoothed_target_entropy(label_smoothing: float, vocab_size: int) -> float:
  """Return the entropy, in nats, of a one-hot distribution after label smoothing."""
  on_mass, off_mass = _smoothed_masses(label_smoothing, vocab_size)
  total = 0
  for count, mass in ((1, on_mass), (vocab_size - 1, off_mass)):
    if mass > 0.0:
      total += count * mass * math.log(mass)
  return -total


# ---------------------------------------------------------------------------------------------------------------------
# Normalising factors
# ---------------------------------------------------------------------------------------------------------------------


@enum.unique
class SpecialLossNormalizingFactor(enum.Enum):
  """Normalizing factors computed from the batch.

  Attributes:
    NUM_REAL_TARGET_TOKENS: sum of the loss weights; in a batch without weights, the number of targets above 0.
    NUM_TOTAL_TARGET_TOKENS: number of target positions, including padding.
    AVERAGE_PER_SEQUENCE: token losses are averaged within each sequence, then over the sequences of the batch. In a
      packed batch, segments are the sequences.
  """

  NUM_REAL_TARGET_TOKENS = 1
  NUM_TOTAL_TARGET_TOKENS = 2
  AVERAGE_PER_SEQUENCE = 3


LossNormalizingFactor = float | int | str | SpecialLossNormalizingFactor | None
# Feature of a micro-batch: special factor of the entire batch.
FACTOR_OF_BATCH = 'batch/loss_normalizing_factor'
# Version of the definition of losses over several batches in files of results, see `NormalizedLoss.weight`. Files
# without it have version 1: means of the losses of batches.
MEANS_VERSION = 2
MEANS_CHANGED = (
  'losses over several batches are now the sum of all losses divided by the sum of all normalizing factors, and '
  'before were means of the losses of batches'
)
# Feature of a batch of an evaluation: bool[batch], False for padding rows; see `real_rows`.
REAL_ROWS = 'batch/real_rows'


def convert_special_loss_normalizing_factor_to_enum(x: str) -> SpecialLossNormalizingFactor:
  """Return the member of `SpecialLossNormalizingFactor` named `x`, in any case.

  >>> convert_special_loss_normalizing_factor_to_enum('average_per_sequence').name
  'AVERAGE_PER_SEQUENCE'

  Raises:
    ConfigError: an unknown name.
  """
  try:
    return SpecialLossNormalizingFactor[x.strip().upper()]
  except KeyError:
    names = [member.name for member in SpecialLossNormalizingFactor]
    raise checks.invalid(
      '',
      'loss_normalizing_factor',
      f'None, a number, or one of {", ".join(names)}',
      x,
      errors.did_you_mean(x, names).strip(),
    ) from None


def get_loss_normalizing_factor_and_weights(
  loss_normalizing_factor: LossNormalizingFactor, batch: Batch
) -> tuple[float | Array | None, Array | None]:
  """Return the normalising factor and the weights of a batch.

  Args:
    loss_normalizing_factor: None, a number, or a special factor (or its name).
    batch: `decoder_target_tokens` <int>[batch, length]; optionally `decoder_loss_weights` <float>[batch, length] and,
      if packed, `decoder_segment_ids` <int>[batch, length]. A micro-batch from `BaseModel.for_microbatches` also has
      `FACTOR_OF_BATCH`, which is the special factor. A batch of an evaluation has `REAL_ROWS`: its padding rows then
      belong to no factor, and in a batch without weights they get weight 0.

  Returns:
    (factor, weights). For None or a number: the same value, and the batch's weights or None. For a special factor: a
    float32 scalar (1 if the weights are all 0, so that a batch of padding has loss 0; T5X has NaN), and
    <float32>[batch, length] weights, which are the batch's or 1 where the target is above 0 (AVERAGE_PER_SEQUENCE
    divides them by their sum over each sequence, and those of padding, segment 0, become 0). Weights depend only on
    their row, so only the factor differs between a batch and its micro-batches.
  """
  weights = batch.get('decoder_loss_weights')
  is_real = batch.get(REAL_ROWS)
  if isinstance(loss_normalizing_factor, str):
    loss_normalizing_factor = convert_special_loss_normalizing_factor_to_enum(
      loss_normalizing_factor
    )
  if not isinstance(loss_normalizing_factor, SpecialLossNormalizingFactor):
    if weights is None and is_real is not None:
      targets = batch['decoder_target_tokens']
      weights = jnp.broadcast_to(is_real[:, None], targets.shape).astype(jnp.float32)
    return loss_normalizing_factor, weights

  factor, weights = _SPECIAL_FACTORS[loss_normalizing_factor](
    token_weights(batch), batch.get('decoder_segment_ids'), is_real
  )
  return batch.get(FACTOR_OF_BATCH, factor), weights


def token_weights(batch: Batch) -> Array:
  """Return the loss weights of a batch before any averaging, float32[batch, length]; see above."""
  weights = batch.get('decoder_loss_weights')
  if weights is None:
    weights = batch['decoder_target_tokens'] > 0
  return jnp.asarray(weights, jnp.float32)


def real_rows(batch: Batch) -> Array:
  """Return bool[batch], False for padding rows, which are zeros in every feature.

  >>> import numpy as np
  >>> print(real_rows({'inputs': np.array([[3, 0], [0, 0], [0, 0]]), 'targets': np.array([[5], [4], [0]])}))
  [ True  True False]

  Args:
    batch: arrays [batch, ...] by name.
  """
  found = [jnp.any(x != 0, axis=tuple(range(1, x.ndim))) for x in batch.values()]
  return functools.reduce(jnp.logical_or, found)


def _real_target_tokens(weights, segment_ids, is_real):
  del segment_ids, is_real
  return _sum_or_one(weights), weights


def _total_target_tokens(weights, segment_ids, is_real):
  del segment_ids
  if is_real is None:
    return jnp.asarray(weights.size, jnp.float32), weights
  return _sum_or_one(is_real.astype(jnp.float32)) * weights.shape[-1], weights


def _average_per_sequence(weights, segment_ids, is_real):
  del is_real
  if segment_ids is None:
    sequence_sum = jnp.sum(weights, axis=-1, keepdims=True)
  else:
    # [batch, length, length], which the compiler fuses with the sum. Segment 0 is padding, which is not a sequence even
    # if it has weights.
    is_real = (segment_ids != 0)[:, :, None]
    same_segment = (segment_ids[:, :, None] == segment_ids[:, None, :]) & is_real
    # [batch, length]: sum of the weights of each position's own sequence.
    sequence_sum = jnp.sum(jnp.where(same_segment, weights[:, None, :], 0.0), axis=-1)
  # A sequence without weights (padding) has weight 0.
  is_empty = sequence_sum == 0.0
  divisor = jnp.where(is_empty, 1.0, sequence_sum)
  weights = jnp.where(is_empty, 0.0, weights / divisor)
  return _sum_or_one(weights), weights


def _sum_or_one(weights):
  total = jnp.sum(weights)
  return jnp.where(total == 0.0, 1.0, total)


# Function of (weights, segment ids or None, real rows or None) that returns (factor, weights).
_FactorFn = Callable[[Array, Array | None, Array | None], tuple[Array, Array]]
_SPECIAL_FACTORS: dict[SpecialLossNormalizingFactor, _FactorFn] = {
  SpecialLossNormalizingFactor.NUM_REAL_TARGET_TOKENS: _real_target_tokens,
  SpecialLossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS: _total_target_tokens,
  SpecialLossNormalizingFactor.AVERAGE_PER_SEQUENCE: _average_per_sequence,
}


@struct.dataclass
class TokenSums:
  """Sums over the tokens of a batch with the weights of the batch, for the losses per token.

  Attributes:
    loss: float32 scalar, the sum of the losses.
    z_loss: float32 scalar, the part of it that is z-loss.
    weight: float32 scalar, the sum of the weights.
  """

  loss: Array
  z_loss: Array
  weight: Array


@struct.dataclass
class NormalizedLoss:
  """Sum of the losses of a batch divided by a normalizing factor, with its weight in means over batches.

  Attributes:
    value: float32 scalar, the sum divided by the factor.
    factor: float32 scalar, the divisor.
    weight: float32 scalar. For a factor that is computed from the batch, the factor: the mean over batches is the sum
      of all losses divided by the sum of all factors, for any batch size. For a number or None, 1: the mean is per
      batch. 0 for a batch without loss weights, such as one of only padding.
    share: share of a micro-batch in its batch, whose loss is the sum of the values; 1 for an entire batch.
    is_per_batch: True if the factor is a number or None.
  """

  value: Array
  factor: Array
  weight: Array
  share: float = struct.field(pytree_node=False, default=1.0)
  is_per_batch: bool = struct.field(pytree_node=False, default=True)

  @classmethod
  def of(
    cls, value: Array, weights: Array | None, loss_normalizing_factor: float | Array | None
  ) -> 'NormalizedLoss':
    """Return the loss of an entire batch.

    Args:
      value: float32 scalar, the sum divided by the factor.
      weights: <float>[batch, length] loss weights, or None for ones; or bool[batch], the rows that count without
        weights too.
      loss_normalizing_factor: a number or None; or an array, which is a factor computed from the batch.
    """
    if loss_normalizing_factor is None:
      factor = jnp.ones([], jnp.float32)
    else:
      factor = jnp.asarray(loss_normalizing_factor, jnp.float32)
    is_per_batch = not isinstance(loss_normalizing_factor, jax.Array)
    if is_per_batch:
      weight = jnp.ones([], jnp.float32)
    else:
      weight = factor
    if weights is not None:
      weight = jnp.where(jnp.any(weights != 0), weight, 0.0)
    return cls(value=value, factor=factor, weight=weight, is_per_batch=is_per_batch)

  def of_microbatch(
    self, share: float, loss_normalizing_factor: float | Array | None
  ) -> 'NormalizedLoss':
    """Return the loss of a micro-batch, also of one without loss weights.

    Args:
      share: share of the micro-batch in its batch.
      loss_normalizing_factor: factor of the entire batch, see `of`.
    """
    entire = type(self).of(self.value, None, loss_normalizing_factor)
    return dataclasses.replace(entire, weight=entire.weight * share, share=share)

  def with_value(self, value: Array) -> 'NormalizedLoss':
    """Return another loss of the same batch, a float32 scalar that is divided by the same factor."""
    return dataclasses.replace(self, value=value)

  @property
  def total(self) -> Array:
    """Sum of the losses, float32 scalar."""
    return self.value * self.factor

  def average(self) -> metrics_lib.AveragePerBatch | metrics_lib.WeightedAverage:
    """Return the metric of the mean over batches; merged over the micro-batches of a batch, its loss."""
    if self.is_per_batch:
      return metrics_lib.AveragePerBatch(total=self.value, steps=self.weight / self.share)
    return self.weighted_average()

  def weighted_average(self) -> metrics_lib.WeightedAverage:
    """Return `average` as a metric to which terms with other weights can be added."""
    return metrics_lib.WeightedAverage.from_model_output(self.value / self.share, self.weight)
