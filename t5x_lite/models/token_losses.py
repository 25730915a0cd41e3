"""Cross entropy of a batch, of entire logits or in chunks of tokens whose logits are never all in memory.

In training a chunk computes the gradients of its hidden states and of the output kernel together with its loss, so
nothing of the logits' size is kept for the backward pass and no product is computed twice, as in Hsu et al. 2024, Liger
Kernel, https://arxiv.org/abs/2410.10989 (fused linear cross entropy).
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from flax.core.spmd import get_logical_axis_rules
from flax.linen.spmd import logical_to_mesh_axes
from flax.linen.spmd import with_logical_constraint
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import layers
from t5x_lite import losses
from t5x_lite.layers import logits as products
from t5x_lite.layers.logits import OutputProjection
from t5x_lite.models import batch_metrics
from t5x_lite.networks.network import Network
from t5x_lite.partitioning import rules as rules_lib
from t5x_lite.types import Array

# Largest size of float32 logits on a device that the loss computes at once, unless `loss_chunk_size` is set.
MAX_LOGITS_BYTES = 2**27
# Least number of tokens of a chunk whose size is not set: with less, adding to the kernel's gradient takes longer than
# the products.
MIN_CHUNK_SIZE = 256

Outputs = Array | OutputProjection


def is_supported_by(*objects: Any) -> bool:
  """Return whether the class of each object declares in its body SUPPORTS_CHUNKED_LOSS = True.

  A declaration is not inherited, since an overridden method may change the logits.
  """
  return all(layer_stacks.declares(each, 'SUPPORTS_CHUNKED_LOSS') for each in objects)


def logits_arguments(model: Any, module: Any, metric_fns: Sequence[Any]) -> dict[str, Any]:
  """Return arguments of `compute_logits` for a loss that may be in chunks; {} if all logits are needed.

  Args:
    model: model of the loss.
    module: its network.
    metric_fns: functions of (logits, batch).
  """
  if is_supported_by(model, module) and not metric_fns:
    return {'return_logits': False}
  return {}


def check_chunk_size(model: Any, module: Any, owner: str, metric_fns: Sequence[Any]) -> None:
  """Raise if the network sets `loss_chunk_size` without effect, for a class or metrics that need all logits.

  Args:
    model: model of the loss.
    module: its network.
    owner: class that has the option `metric_fns`.
    metric_fns: functions of (logits, batch).

  Raises:
    ConfigError: the option has no effect.
  """
  if not isinstance(module, Network) or not module.loss_chunk_size:
    return
  remedy = 'Set the field of its config to None.'
  if metric_fns:
    reason = f'{owner}.metric_fns, which need all logits'
    remedy = 'Set the field of its config to None, or remove the metrics.'
  elif not is_supported_by(model):
    reason = f'the class {type(model).__name__}, which does not declare SUPPORTS_CHUNKED_LOSS'
  elif not is_supported_by(module):
    reason = f'the class {type(module).__name__}, which does not declare SUPPORTS_CHUNKED_LOSS'
  else:
    return
  raise checks.invalid(
    type(module).__name__,
    'loss_chunk_size',
    f'None with {reason},',
    module.loss_chunk_size,
    remedy,
  )


@dataclasses.dataclass(frozen=True)
class Chunks:
  """Division of the tokens of a batch into chunks, with the constants of their loss.

  Attributes:
    num_shards: number of devices that share the rows of the batch. Each divides its own tokens into chunks.
    num_chunks: number of chunks of a device.
    num_parts: number of parts of the kernel's gradient, along `embed`.
    label_smoothing: see `losses.token_cross_entropy`.
    z_loss: see `losses.token_cross_entropy`.
  """

  num_shards: int
  num_chunks: int
  num_parts: int
  label_smoothing: float
  z_loss: float

  def split(self, x: Array) -> Array:
    """Return [batch, length, ...] as [num_chunks, num_shards, tokens, ...], padded with zeros."""
    rest = x.shape[2:]
    x = x.reshape(self.num_shards, -1, *rest)
    num_tokens = x.shape[1]
    size = -(-num_tokens // self.num_chunks)
    x = jnp.pad(x, [(0, 0), (0, size * self.num_chunks - num_tokens), *[(0, 0)] * len(rest)])
    # Chunks first, because `lax.scan` loops over the first dim.
    x = jnp.moveaxis(x.reshape(self.num_shards, self.num_chunks, size, *rest), 1, 0)
    return with_logical_constraint(x, (None, 'batch', None, *[None] * len(rest)))

  def join(self, x: Array, batch: int, length: int) -> Array:
    """Return the inverse of `split`."""
    num_tokens = batch * length // self.num_shards
    x = jnp.moveaxis(x, 0, 1).reshape(self.num_shards, -1, *x.shape[3:])
    x = x[:, :num_tokens]  # without the padding
    return x.reshape(batch, length, *x.shape[2:])


def find_chunks(
  projection: OutputProjection, label_smoothing: float, z_loss: float
) -> Chunks | None:
  """Return the chunks of a loss for the mesh and the logical axis rules in context; None for all tokens at once.

  Args:
    projection: product that gives the logits.
    label_smoothing: see `losses.token_cross_entropy`.
    z_loss: see `losses.token_cross_entropy`.
  """
  batch, length, embed = projection.hidden.shape
  if jax.export.is_symbolic_dim(batch):
    return None  # an exported program for any batch size has no number of chunks
  if layers.counts_products():
    return None  # chunks are padded
  num_shards, vocab_shards = _num_shards(batch, projection.vocab_size)
  tokens = batch // num_shards * length
  token_bytes = 4 * projection.vocab_size // vocab_shards
  size = projection.chunk_size
  if size is None:
    if tokens * token_bytes <= MAX_LOGITS_BYTES:
      size = 0
    else:
      size = max(MAX_LOGITS_BYTES // token_bytes, MIN_CHUNK_SIZE)
  if size == 0 or size >= tokens:
    return None
  # A part of the gradient is not larger than the logits of a chunk, whose memory it takes.
  num_parts = 1
  while embed % num_parts != 0 or (num_parts < embed and embed // num_parts > size):
    num_parts += 1
  return Chunks(num_shards, -(-tokens // size), num_parts, label_smoothing, z_loss)


def _num_shards(batch: int, vocab_size: int) -> tuple[int, int]:
  """Return the numbers of shards of the rows of a batch and of the vocabulary; 1 for a dim that they do not divide."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return 1, 1
  entries = logical_to_mesh_axes(('batch', 'length', 'vocab'), get_logical_axis_rules())
  assert entries is not None  # It is None without names.
  rows = rules_lib.num_shards(entries[0], mesh.shape)
  vocab = rules_lib.num_shards(entries[2], mesh.shape)
  if batch % rows != 0:
    rows = 1
  if vocab_size % vocab != 0:
    vocab = 1
  return rows, vocab


def weighted_loss(
  outputs: Outputs,
  targets: Array,
  weights: Array | None,
  label_smoothing: float,
  z_loss: float,
  loss_normalizing_factor: float | Array | None,
) -> tuple[losses.NormalizedLoss, losses.NormalizedLoss, Array]:
  """Return the loss of `losses.compute_weighted_cross_entropy` and the positions with correct predictions.

  Args:
    outputs: <float>[batch, length, vocab] logits, or the product that gives them.
    targets: <int>[batch, length] token ids.
    weights: <float>[batch, length], or None for ones.
    label_smoothing: see `losses.token_cross_entropy`.
    z_loss: see `losses.token_cross_entropy`.
    loss_normalizing_factor: divisor of both sums; None means 1. An array is a factor computed from the batch.

  Returns:
    (loss, z_loss, is_correct): two losses, of which only `loss.value` has a gradient, and bool [batch, length], True
    where the target has the largest logit.

  Raises:
    ConfigError: see `losses.compute_weighted_cross_entropy`.
  """
  chunks = None
  if isinstance(outputs, OutputProjection):
    chunks = find_chunks(outputs, label_smoothing, z_loss)
  if chunks is None or not isinstance(outputs, OutputProjection):
    logits = _all_logits(outputs)
    loss, z, _ = losses.compute_weighted_cross_entropy(
      logits, targets, weights, label_smoothing, z_loss, loss_normalizing_factor
    )
    return (
      losses.NormalizedLoss.of(loss, weights, loss_normalizing_factor),
      losses.NormalizedLoss.of(jax.lax.stop_gradient(z), weights, loss_normalizing_factor),
      batch_metrics.is_argmax(logits, targets),
    )
  losses.check_targets((*outputs.hidden.shape[:2], outputs.vocab_size), targets, weights)
  if weights is None:
    divided = jnp.ones(targets.shape, jnp.float32)
  else:
    divided = weights.astype(jnp.float32)
  # Before the gradients, which may be rounded to half precision.
  if loss_normalizing_factor is not None:
    divided = divided / loss_normalizing_factor
  # Only the fields that are not arrays, since those are static arguments.
  projection = dataclasses.replace(outputs, hidden=None, kernel=None)
  results: Any = _loss_in_chunks(
    outputs.hidden, outputs.kernel, targets, divided, projection, chunks
  )
  loss, z, is_correct = results
  return (
    losses.NormalizedLoss.of(loss, weights, loss_normalizing_factor),
    losses.NormalizedLoss.of(jax.lax.stop_gradient(z), weights, loss_normalizing_factor),
    is_correct,
  )


def _all_logits(outputs: Outputs) -> Array:
  if isinstance(outputs, OutputProjection):
    return outputs.logits()
  return outputs


def token_losses(outputs: Outputs, targets: Array) -> Array:
  """Return the cross entropy of each position without smoothing and z-loss, <float32>[batch, length].

  Gradients of chunks compute their logits again.

  Args:
    outputs: see `weighted_loss`.
    targets: <int>[batch, length] token ids.
  """
  chunks = None
  if isinstance(outputs, OutputProjection):
    chunks = find_chunks(outputs, 0.0, 0.0)
  if chunks is None or not isinstance(outputs, OutputProjection):
    return losses.token_cross_entropy(_all_logits(outputs), targets)[0]
  losses.check_targets((*outputs.hidden.shape[:2], outputs.vocab_size), targets)
  kernel = _gather_kernel(outputs.hidden, outputs.kernel, outputs.vocab_dim)

  @jax.checkpoint
  def of_chunk(chunk):
    # [num_shards, tokens, embed] and [num_shards, tokens]
    rows, ids = chunk
    logits = dataclasses.replace(outputs, hidden=rows, kernel=kernel).logits()
    return losses.token_cross_entropy(logits, ids)[0]

  loss = jax.lax.map(of_chunk, (chunks.split(outputs.hidden), chunks.split(targets)))
  return chunks.join(loss, *targets.shape)


def _gather_kernel(hidden: Array, kernel: Array, vocab_dim: int) -> Array:
  """Return the kernel in the dtype of products, sharded only over the vocabulary, so that no chunk gathers it."""
  return _constrain_kernel(kernel.astype(products.product_dtype(hidden, kernel)), vocab_dim)


def _constrain_kernel(kernel: Array, vocab_dim: int) -> Array:
  """Constrain an array like the kernel, perhaps with a first dim for the shards of the batch."""
  if vocab_dim == 0:
    axes = ('vocab', None)
  else:
    axes = (None, 'vocab')
  if kernel.ndim == 3:
    axes = ('batch', *axes)
  return with_logical_constraint(kernel, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss_in_chunks(hidden, kernel, targets, weights, projection, chunks):
  """Return (loss, z_loss, is_correct) of `weighted_loss` without the normalizing factor; only `loss` has a gradient.

  The loss is a scalar, so its gradients are those of the forward pass times its later gradient, also for a micro-batch
  or with auxiliary losses.
  """
  loss, z, is_correct, _ = _scan_chunks(
    hidden, kernel, targets, weights, projection, chunks, with_gradients=False
  )
  return jnp.sum(loss * weights), jnp.sum(z * weights), is_correct


def _forward(hidden, kernel, targets, weights, projection, chunks):
  loss, z, is_correct, gradients = _scan_chunks(
    hidden, kernel, targets, weights, projection, chunks, with_gradients=True
  )
  assert gradients is not None
  outputs = jnp.sum(loss * weights), jnp.sum(z * weights), is_correct
  # Residuals are arrays, so an empty one has the dtype.
  return outputs, (*gradients, loss, jnp.zeros(0, kernel.dtype))


def _backward(projection, chunks, residuals, cotangents):
  del projection, chunks
  hidden_bar, kernel_bar, loss, kernel_like = residuals
  # []: later gradient of the scalar loss, by which the gradients of the forward pass are scaled.
  loss_bar = cotangents[0]
  hidden_bar = (hidden_bar * loss_bar).astype(hidden_bar.dtype)
  kernel_bar = (kernel_bar * loss_bar).astype(kernel_like.dtype)
  return hidden_bar, kernel_bar, None, loss * loss_bar


_loss_in_chunks.defvjp(_forward, _backward)


def _scan_chunks(hidden, kernel, targets, weights, projection, chunks, with_gradients):
  """Return (loss, z_loss, is_correct), [batch, length] each, and the gradients of hidden states and kernel or None."""
  dtype = products.product_dtype(hidden, kernel)
  kernel = _gather_kernel(hidden, kernel, projection.vocab_dim)
  entropy = losses.smoothed_target_entropy(
    chunks.label_smoothing, kernel.shape[projection.vocab_dim]
  )

  def body(kernel_bar, chunk):
    # [num_shards, tokens, embed], and [num_shards, tokens] twice.
    rows, ids, ids_weights = chunk
    # float32 [num_shards, tokens, vocab]: the only array of this size, of one chunk.
    logits = dataclasses.replace(projection, hidden=rows, kernel=kernel).logits()
    (loss, z), residuals = losses.token_forward(logits, ids, chunks.label_smoothing, chunks.z_loss)
    hidden_bar = None
    if with_gradients:
      # The loss is the sum of the tokens' losses by their weights; the z-loss has no gradient of its own.
      loss_bars = (ids_weights, jnp.zeros_like(ids_weights))
      logits_bar = losses.token_backward(
        chunks.label_smoothing, chunks.z_loss, residuals, loss_bars
      )[0]
      logits_bar = logits_bar / jnp.float32(projection.divisor)
      # [num_shards * tokens, vocab]
      logits_bar = logits_bar.reshape(-1, logits.shape[-1])
      hidden_bar = products.hidden_gradient(logits_bar, kernel, projection.vocab_dim, dtype)
      hidden_bar = hidden_bar.reshape(rows.shape).astype(rows.dtype)
      kernel_bar = _add_kernel_gradient(
        kernel_bar, rows, logits_bar, projection.vocab_dim, dtype, chunks
      )
    return kernel_bar, (loss - entropy, z, batch_metrics.is_argmax(logits, ids), hidden_bar)

  kernel_bar = None
  if with_gradients:
    shape = kernel.shape
    if chunks.num_shards > 1:
      shape = (chunks.num_shards, *shape)
    # The kernel's shape, per shard of the batch; float32, because all chunks are added to it.
    kernel_bar = _constrain_kernel(jnp.zeros(shape, jnp.float32), projection.vocab_dim)
  operands = (chunks.split(hidden), chunks.split(targets), chunks.split(weights))
  kernel_bar, outputs = jax.lax.scan(body, kernel_bar, operands)
  loss, z, is_correct, hidden_bar = jax.tree.map(lambda x: chunks.join(x, *targets.shape), outputs)
  if kernel_bar is None:
    return loss, z, is_correct, None
  if chunks.num_shards > 1:
    # Devices add their gradients of the kernel once, not in each chunk.
    kernel_bar = kernel_bar.sum(axis=0)
  return loss, z, is_correct, (hidden_bar, kernel_bar)


def _add_kernel_gradient(kernel_bar, rows, logits_bar, vocab_dim, dtype, chunks):
  """Return `kernel_bar` plus the gradient of the kernel of a chunk, computed in parts along `embed`."""
  num_shards = None
  if chunks.num_shards > 1:
    num_shards = chunks.num_shards
  # [num_shards * tokens, embed]
  rows = rows.reshape(-1, rows.shape[-1])
  if chunks.num_parts == 1:
    gradient = products.kernel_gradient(rows, logits_bar, vocab_dim, dtype, num_shards)
    return kernel_bar + _constrain_kernel(gradient, vocab_dim)
  size = rows.shape[-1] // chunks.num_parts
  embed_dim = kernel_bar.ndim - 1 - vocab_dim

  def add_part(i, kernel_bar):
    first = i * size
    # [num_shards * tokens, size]: `size` columns of the hidden states give as many rows of the gradient.
    columns = jax.lax.dynamic_slice_in_dim(rows, first, size, axis=1)
    part = products.kernel_gradient(columns, logits_bar, vocab_dim, dtype, num_shards)
    part += jax.lax.dynamic_slice_in_dim(kernel_bar, first, size, axis=embed_dim)
    return jax.lax.dynamic_update_slice_in_dim(kernel_bar, part, first, axis=embed_dim)

  return jax.lax.fori_loop(0, chunks.num_parts, add_part, kernel_bar)
