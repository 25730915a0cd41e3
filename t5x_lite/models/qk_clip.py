"""QK-clip: after an update, query and key kernels of heads with large attention scores are scaled down.

A head whose largest score S in the batch of the step exceeds the threshold t gets both kernels times sqrt(t / S), so
that S would have been t. Kimi Team 2025, https://arxiv.org/abs/2507.20534, section 2.1, for plain multi-head attention.
"""

from collections.abc import Collection, Mapping
import dataclasses
from typing import Any

import clu.metrics
from flax import struct
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import T5xLiteError
from t5x_lite.layers.attention import ATTENTION_SCORES
from t5x_lite.layers.low_rank import LORA_A
from t5x_lite.networks.t5_config import StackConfig
from t5x_lite.types import Array, ArrayLike, Params

# Names of the metrics.
MAX_SCORE = 'qk_clip/max_score'
CLIPPED_HEADS = 'qk_clip/clipped_heads'


@struct.dataclass
class MaxScore(clu.metrics.Metric):
  """Largest attention score of the merged batches; 0 if all are negative.

  Attributes:
    scores: float32 [attentions, heads], the largest score of each head.
  """

  scores: Array

  def merge(self, other: 'MaxScore') -> 'MaxScore':
    """Return the metric of both."""
    return dataclasses.replace(self, scores=jnp.maximum(self.scores, other.scores))

  def compute(self) -> ArrayLike:
    """Return the largest score, float32."""
    return jnp.max(self.scores)


@struct.dataclass
class ClippedHeads(MaxScore):
  """Number of heads that were clipped in one of the merged steps.

  Attributes:
    paths: path of each attention, a module; that of stacked layers is repeated for each layer.
    threshold: largest score that is not clipped.
  """

  paths: tuple[str, ...] = struct.field(pytree_node=False)
  threshold: float = struct.field(pytree_node=False)

  def compute(self) -> ArrayLike:
    """Return the number of heads, int32."""
    return jnp.sum(self.scores > self.threshold, dtype=jnp.int32)


def clip(
  params: Params,
  config: StackConfig,
  metrics: Mapping[str, Any],
  frozen: Collection[str],
  stored: Mapping[str, str],
) -> Params:
  """Return the parameters after an update with scaled query and key kernels.

  Args:
    params: tree of parameters; equal layers may be stacked, see `layer_stacks`.
    config: configuration with a threshold.
    metrics: metrics of the step, with those of `metrics_of_scores`.
    frozen: '/'-joined paths of parameters that are not trained.
    stored: see `OptimizerDef.stored_params`.

  Raises:
    ConfigError: the metrics are missing; a query or key kernel is not trained, has an adapter, or is not scaled for
      longer than a step.
  """
  if CLIPPED_HEADS not in metrics:
    raise _invalid(config, 'None for a model without scores of attention')
  of_step = metrics[CLIPPED_HEADS]
  # [attentions, heads]
  largest = jnp.maximum(of_step.scores, of_step.threshold)
  # An infinite score would leave kernels of zeros, which get no gradients.
  factors = jnp.where(jnp.isfinite(largest), jnp.sqrt(of_step.threshold / largest), 1.0)
  paths = {path for path, _ in tree_utils.named_leaves(params)}

  def scale(path: str, param: Array) -> Array:
    attention, _, name = path.removesuffix('/kernel').rpartition('/')
    rows = []
    for single in layer_stacks.paths_of(attention):
      rows += [i for i, each in enumerate(of_step.paths) if each == single]
    if name not in ('query', 'key') or not rows:
      return param
    if path in frozen or f'{attention}/{name}/{LORA_A}' in paths:
      raise _invalid(config, f'None if {path} is frozen or has an adapter')
    if path in stored:
      raise _invalid(config, f'None if {stored[path]} trains {path}, whose next update undoes it')
    # [layers, heads]; one layer if none are stacked.
    factor = factors[jnp.array(rows)]
    if param.ndim - layer_stacks.is_stacked(path) == 2:
      # For a kernel [embed, heads * kv]; of stacked layers [layers, embed, heads * kv].
      head_dim = param.shape[-1] // factor.shape[-1]
      factor = jnp.repeat(factor, head_dim, axis=-1).reshape(*param.shape[:-2], 1, -1)
    else:
      # For a kernel [embed, layers, heads, kv].
      factor = factor[..., None]
    return (param * factor).astype(param.dtype)

  return tree_utils.map_with_names(scale, params)


def config_of(module: Any) -> StackConfig | None:
  """Return the field `config` of a network if it has a threshold, else None.

  Raises:
    ConfigError: the network has custom blocks of attention.
  """
  config = getattr(module, 'config', None)
  if not isinstance(config, StackConfig) or config.qk_clip_threshold is None:
    return None
  if 'attention_fn' in getattr(module, 'custom_blocks', ()):
    # Their scores may not depend on the sizes of the kernels.
    raise _invalid(config, 'None with a custom attention_fn')
  return config


def metrics_of_scores(
  config: StackConfig, collections: Mapping[str, Any]
) -> dict[str, clu.metrics.Metric]:
  """Return the metrics of a pass by name; none for a network without `layers.MultiHeadDotProductAttention`.

  Args:
    config: configuration with a threshold.
    collections: collections that the pass wrote.
  """
  scores = []
  paths = []
  sown_scores = collections.get(ATTENTION_SCORES, {})
  for path, sown in tree_utils.flatten_dict(sown_scores).items():
    # An attention that is called several times has a score for each call. [layers, heads] each in stacked layers.
    largest = jnp.atleast_2d(jnp.max(jnp.stack(sown), axis=0))
    scores.append(largest)
    paths.extend([path.rpartition('/')[0]] * len(largest))
  if not scores:
    return {}
  # [attentions, heads]
  table = jnp.concatenate(scores)
  threshold = config.qk_clip_threshold
  assert threshold is not None  # `config_of` returns no other.
  clipped = ClippedHeads(scores=table, paths=tuple(paths), threshold=threshold)
  return {MAX_SCORE: MaxScore(scores=table), CLIPPED_HEADS: clipped}


def _invalid(config: StackConfig, expectation: str) -> T5xLiteError:
  owner = type(config).__name__
  value = config.qk_clip_threshold
  return checks.invalid(owner, 'qk_clip_threshold', expectation, value, 'Set it to None.')
