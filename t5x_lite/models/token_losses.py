"""Cross entropy of a batch, of entire logits or in chunks of tokens whose logits are never all in memory.

In training a chunk computes the gradients of its hidden states and of the output kernel together with its loss, so
nothing of the logits' size is kept for the backward pass and no product is computed twice, as in Hsu et al. 2024, Liger
Kernel, https://arxiv.org/abs/2410.10989 (fused linear cross entropy).
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import layers
from t5x_lite import losses
from t5x_lite.layers import logits as products
from t5x_lite.models import batch_metrics
from t5x_lite.networks.network import Network
from t5x_lite.partitioning import rules as rules_lib
from t5x_lite.types import Array

# Largest size of float32 logits on a device that the loss computes at once, unless `loss_chunk_size` is set.
MAX_LOGITS_BYTES = 2**27
# Least number of tokens of a chunk whose size is not set: with less, adding to the kernel's gradient takes longer than
# the products.
MIN_CHUNK_SIZE = 256

Outputs = Array | layers.OutputProjection


def is_supported_by(*objects: Any) -> bool:
  """Return whether the class of each object declares in its body SUPPORTS_CHUNKED_LOSS = True.

  A declaration is not inherited, since an overridden method may change the logits.
  """
  return all(layer_stacks.declares(each, 'SUPPORTS_CHUNKED_LOSS') for each in objects)


def logits_arguments(model: Any, module: Any, metric_fns: Sequence[Any]) -> dict[str, bool]:
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
  if isinstance(module, Network):
    size = module.loss_chunk_size
  else:
    size = None
  if not size:
    return
  if metric_fns:
    reason = f'{owner}.metric_fns, which need all logits'
  else:
    reason = next(
      (
        f'the class {type(each).__name__}, which does not declare SUPPORTS_CHUNKED_LOSS'
        for each in (model, module)
        if not is_supported_by(each)
      ),
      None,
    )
  if reason is not None:
    raise checks.invalid(
      type(module).__name__,
      'loss_chunk_size',
      f'None with {reason},',
      size,
      'Set the field of its config to None, or remove the metrics.'
      if metric_fns
      else 'Set the field of its config to None.',
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
    x = x.reshape(self.num_shards, -1, *x.shape[2:])
    size = -(-x.shape[1] // self.num_chunks)
    x = jnp.pad(x, [(0, 0), (0, size * self.num_chunks - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
    x = jnp.moveaxis(x.reshape(self.num_shards, self.num_chunks, size, *x.shape[2:]), 1, 0)
    return nn_partitioning.with_sharding_constraint(x, (None, 'batch', *[None] * (x.ndim - 2)))

  def join(self, x: Array, batch: int, length: int) -> Array:
    """Return the inverse of `split`."""
    x = jnp.moveaxis(x, 0, 1).reshape(self.num_shards, -1, *x.shape[3:])[
      :, : batch * length // self.num_shards
    ]
    return x.reshape(batch, length, *x.shape[2:])


def find_chunks(
  projection: layers.OutputProjection, label_smoothing: float, z_loss: float
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
  num_parts = next(
    n for n in range(1, embed + 1) if embed % n == 0 and (n == embed or embed // n <= size)
  )
  return Chunks(num_shards, -(-tokens // size), num_parts, label_smoothing, z_loss)


def _num_shards(batch: int, vocab_size: int) -> tuple[int, int]:
  """Return the numbers of shards of the rows of a batch and of the vocabulary; 1 for a dim that they do not divide."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return 1, 1
  entries = nn_partitioning.logical_to_mesh_axes(
    ('batch', 'length', 'vocab'), nn_partitioning.get_axis_rules()
  )
  rows, vocab = (rules_lib.num_shards(entry, mesh.shape) for entry in (entries[0], entries[2]))
  return (rows if batch % rows == 0 else 1), (vocab if vocab_size % vocab == 0 else 1)


def weighted_loss(
  outputs: Outputs,
  targets: Array,
  weights: Array | None,
  label_smoothing: float,
  z_loss: float,
  loss_normalizing_factor: float | Array | None,
) -> tuple[Array, Array, Array]:
  """Return the loss of `losses.compute_weighted_cross_entropy` and the positions with correct predictions.

  Args:
    outputs: <float>[batch, length, vocab] logits, or the product that gives them.
    targets: <int>[batch, length] token ids.
    weights: <float>[batch, length], or None for ones.
    label_smoothing: see `losses.token_cross_entropy`.
    z_loss: see `losses.token_cross_entropy`.
    loss_normalizing_factor: divisor of both sums; None means 1.

  Returns:
    (loss, z_loss, is_correct): float32 scalars, of which only `loss` has a gradient, and bool [batch, length], True
    where the target has the largest logit.

  Raises:
    ConfigError: see `losses.compute_weighted_cross_entropy`.
  """
  if isinstance(outputs, layers.OutputProjection):
    chunks = find_chunks(outputs, label_smoothing, z_loss)
  else:
    chunks = None
  if chunks is None:
    if isinstance(outputs, layers.OutputProjection):
      logits = outputs.logits()
    else:
      logits = outputs
    loss, z, _ = losses.compute_weighted_cross_entropy(
      logits, targets, weights, label_smoothing, z_loss, loss_normalizing_factor
    )
    return loss, jax.lax.stop_gradient(z), batch_metrics.is_argmax(logits, targets)
  losses.check_targets((*outputs.hidden.shape[:2], outputs.vocab_size), targets, weights)
  if weights is None:
    weights = jnp.ones(targets.shape, jnp.float32)
  else:
    weights = weights.astype(jnp.float32)
  if (
    loss_normalizing_factor is not None
  ):  # before the gradients, which may be rounded to half precision
    weights = weights / loss_normalizing_factor
  projection = outputs.replace(hidden=None, kernel=None)
  loss, z, is_correct = _loss_in_chunks(
    outputs.hidden, outputs.kernel, targets, weights, projection, chunks
  )
  return loss, jax.lax.stop_gradient(z), is_correct


def token_losses(outputs: Outputs, targets: Array) -> Array:
  """Return the cross entropy of each position without smoothing and z-loss, <float32>[batch, length].

  Gradients of chunks compute their logits again.

  Args:
    outputs: see `weighted_loss`.
    targets: <int>[batch, length] token ids.
  """
  if isinstance(outputs, layers.OutputProjection):
    chunks = find_chunks(outputs, 0.0, 0.0)
  else:
    chunks = None
  if chunks is None:
    if isinstance(outputs, layers.OutputProjection):
      logits = outputs.logits()
    else:
      logits = outputs
    return losses.token_cross_entropy(logits, targets)[0]
  losses.check_targets((*outputs.hidden.shape[:2], outputs.vocab_size), targets)
  kernel = _gather_kernel(outputs.hidden, outputs.kernel, outputs.vocab_dim)

  @jax.checkpoint
  def of_chunk(chunk):
    rows, ids = chunk
    return losses.token_cross_entropy(outputs.replace(hidden=rows, kernel=kernel).logits(), ids)[0]

  loss = jax.lax.map(of_chunk, (chunks.split(outputs.hidden), chunks.split(targets)))
  return chunks.join(loss, *targets.shape)


def _gather_kernel(hidden: Array, kernel: Array, vocab_dim: int) -> Array:
  """Return the kernel in the dtype of products, sharded only over the vocabulary, so that no chunk gathers it."""
  return _constrain_kernel(kernel.astype(products.product_dtype(hidden, kernel)), vocab_dim)


def _constrain_kernel(kernel: Array, vocab_dim: int) -> Array:
  """Constrain an array like the kernel, perhaps with a first dim for the shards of the batch."""
  axes = ('vocab', None) if vocab_dim == 0 else (None, 'vocab')
  return nn_partitioning.with_sharding_constraint(
    kernel, ('batch', *axes) if kernel.ndim == 3 else axes
  )


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
  outputs = jnp.sum(loss * weights), jnp.sum(z * weights), is_correct
  # Residuals are arrays, so an empty one has the dtype.
  return outputs, (*gradients, loss, jnp.zeros(0, kernel.dtype))


def _backward(projection, chunks, residuals, cotangents):
  del projection, chunks
  hidden_bar, kernel_bar, loss, kernel_like = residuals
  loss_bar = cotangents[0]
  return (
    (hidden_bar * loss_bar).astype(hidden_bar.dtype),
    (kernel_bar * loss_bar).astype(kernel_like.dtype),
    None,
    loss * loss_bar,
  )


_loss_in_chunks.defvjp(_forward, _backward)


def _scan_chunks(hidden, kernel, targets, weights, projection, chunks, with_gradients):
  """Return (loss, z_loss, is_correct), [batch, length] each, and the gradients of hidden states and kernel or None."""
  dtype = products.product_dtype(hidden, kernel)
  kernel = _gather_kernel(hidden, kernel, projection.vocab_dim)
  entropy = losses.smoothed_target_entropy(
    chunks.label_smoothing, kernel.shape[projection.vocab_dim]
  )

  def body(kernel_bar, chunk):
    rows, ids, ids_weights = chunk
    logits = projection.replace(hidden=rows, kernel=kernel).logits()
    (loss, z), residuals = losses.token_forward(logits, ids, chunks.label_smoothing, chunks.z_loss)
    hidden_bar = None
    if with_gradients:
      logits_bar = losses.token_backward(
        chunks.label_smoothing, chunks.z_loss, residuals, (ids_weights, jnp.zeros_like(ids_weights))
      )[0]
      logits_bar = (logits_bar / jnp.float32(projection.divisor)).reshape(-1, logits.shape[-1])
      hidden_bar = products.hidden_gradient(logits_bar, kernel, projection.vocab_dim, dtype)
      hidden_bar = hidden_bar.reshape(rows.shape).astype(rows.dtype)
      kernel_bar = _add_kernel_gradient(
        kernel_bar, rows, logits_bar, projection.vocab_dim, dtype, chunks
      )
    return kernel_bar, (loss - entropy, z, batch_metrics.is_argmax(logits, ids), hidden_bar)

  kernel_bar = None
  if with_gradients:
    shards = (chunks.num_shards,) if chunks.num_shards > 1 else ()
    kernel_bar = _constrain_kernel(
      jnp.zeros((*shards, *kernel.shape), jnp.float32), projection.vocab_dim
    )
  kernel_bar, outputs = jax.lax.scan(
    body, kernel_bar, tuple(map(chunks.split, (hidden, targets, weights)))
  )
  loss, z, is_correct, hidden_bar = jax.tree.map(lambda x: chunks.join(x, *targets.shape), outputs)
  if not with_gradients:
    return loss, z, is_correct, None
  # Devices add their gradients of the kernel once, not in each chunk.
  return (
    loss,
    z,
    is_correct,
    (hidden_bar, kernel_bar.sum(axis=0) if chunks.num_shards > 1 else kernel_bar),
  )


def _add_kernel_gradient(kernel_bar, rows, logits_bar, vocab_dim, dtype, chunks):
  """Return `kernel_bar` plus the gradient of the kernel of a chunk, computed in parts along `embed`."""
  if chunks.num_shards > 1:
    num_shards = chunks.num_shards
  else:
    num_shards = None
  rows = rows.reshape(-1, rows.shape[-1])
  if chunks.num_parts == 1:
    return kernel_bar + _constrain_kernel(
      products.kernel_gradient(rows, logits_bar, vocab_dim, dtype, num_shards), vocab_dim
    )
  size = rows.shape[-1] // chunks.num_parts
  embed_dim = kernel_bar.ndim - 1 - vocab_dim

  def add_part(i, kernel_bar):
    part = products.kernel_gradient(
      jax.lax.dynamic_slice_in_dim(rows, i * size, size, axis=1),
      logits_bar,
      vocab_dim,
      dtype,
      num_shards,
    )
    part += jax.lax.dynamic_slice_in_dim(kernel_bar, i * size, size, axis=embed_dim)
    return jax.lax.dynamic_update_slice_in_dim(kernel_bar, part, i * size, axis=embed_dim)

  return jax.lax.fori_loop(0, chunks.num_parts, add_part, kernel_bar)
