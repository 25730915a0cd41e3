"""Metrics of experts, from the sown values of sparse layers.

Names are T5X's where T5X has the metric: `experts/auxiliary_loss` and `experts/router_z_loss` (times the model's
factors), `experts/fraction_tokens_left_behind`, `experts/expert_usage`, `experts/router_confidence`, means over the
sparse layers. Each layer has `experts/<stack>/layers_<i>/<name>`:

- `load` [num_experts]: each expert's share of all choices, before drops;
- `max_over_mean_load`: largest load of an expert over the mean;
- `dead_experts`: number of experts without tokens in a step;
- `router_entropy` (nats), `router_confidence`, `fraction_tokens_left_behind`, `expert_usage`, `router_z_loss`,
  `auxiliary_loss` (the last two without the model's factors);
- `choices_dropped`: share of dropped choices; with expert choice, of tokens that no expert chose;
- `drops_by_position` [16]: the same by position in the sequence, in 16 parts; 0 for a part with only padding;
- `receive_drops`: share of the choices that exceeded a buffer of exchanged tokens.

Means over batches have the weights that layers sow, such as numbers of tokens; values without a weight, and the two
properties of the load of a batch, have weight 1, and 0 in a batch without tokens.

A step of several micro-batches has the values of the entire batch: micro-batches report `MicrobatchSums`, and
`metrics_of_sums` computes the metrics after they are merged.
"""

from collections.abc import Mapping
import operator
from typing import Any

from clu import metrics as clu_metrics
import flax.struct
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import metrics as metrics_lib
from t5x_lite.types import Array

MetricsMap = dict[str, clu_metrics.Metric]

PREFIX = 'experts'
# T5X's diversity metrics, means over the layers.
MOE_METRICS = (
  'auxiliary_loss',
  'router_z_loss',
  'fraction_tokens_left_behind',
  'expert_usage',
  'router_confidence',
)
# Names and numbers of dims of sown values.
SOWN = {
  **dict.fromkeys(MOE_METRICS, 0),
  'router_entropy': 0,
  'choices_dropped': 0,
  'receive_drops': 0,
  'expert_load': 1,
  'drops_by_position': 1,
}
# Name of the sown dict of weights, see `routing.TokenChoice.weights`. Without it batches have equal weights.
WEIGHTS = 'metric_weights'
_LOSSES = ('auxiliary_loss', 'router_z_loss')

Layers = dict[str, dict[str, Any]]

# Largest load over the mean, experts without tokens, and shares of tokens without an expert and of dropped exchanges.
metrics_lib.report_worst_layer(
  PREFIX,
  {
    'max_load': 'max_over_mean_load',
    'dead_experts': 'dead_experts',
    'left_behind': 'fraction_tokens_left_behind',
    'receive_drops': 'receive_drops',
  },
)


def sown_by_layer(intermediates: Mapping[str, Any]) -> Layers:
  """Return the sown values of each sparse layer, by `<stack>/layers_<i>` in the order of the layers.

  Args:
    intermediates: collection `intermediates`, nested dicts with tuples of arrays; layers are subtrees, or the first dim
      of the arrays of one subtree with the stack's name.

  Returns:
    Arrays by layer and name; names are those of `SOWN`, and `WEIGHTS` with its dict. If a layer has two sparse blocks,
    the block that is not `mlp` has the name `<stack>/layers_<i>/<path>`.
  """
  found: dict[tuple[str, int, str], dict[str, Any]] = {}
  for stack, subtree in intermediates.items():
    if not isinstance(subtree, Mapping):
      continue
    for child, layer_tree in subtree.items():
      if not isinstance(layer_tree, Mapping):
        continue
      blocks = _sparse_blocks(layer_tree)
      for block, values in blocks.items():
        if len(blocks) == 1 or block == 'mlp':
          which = ''
        else:
          which = f'/{block}'
        if child.startswith('layers_'):
          found[stack, int(child.removeprefix('layers_')), which] = values
        elif child == stack:
          num_layers = jax.tree.leaves(values)[0].shape[0]
          for i in range(num_layers):
            found[stack, i, which] = jax.tree.map(operator.itemgetter(i), values)
  result = {}
  for stack, i, which in sorted(found, key=lambda key: (key[0] != 'encoder', key)):
    result[f'{stack}/layers_{i}{which}'] = found[stack, i, which]
  return result


def _sparse_blocks(tree: Mapping[str, Any], path: str = '') -> Layers:
  """Return the sown values of the sparse blocks of a layer, by their '/'-joined path in the layer."""
  values = {}
  for name, node in tree.items():
    if name not in SOWN or isinstance(node, Mapping):
      continue
    if isinstance(node, tuple):
      # Of a block with several calls, only the values of the last call count.
      node = node[-1]
    values[name] = node
  if values:
    # Values sown by custom experts are not included.
    if WEIGHTS in tree:
      values[WEIGHTS] = tree[WEIGHTS][-1]
    return {path: values}
  blocks = {}
  for name, node in tree.items():
    if isinstance(node, Mapping):
      child = f'{path}/{name}'.removeprefix('/')
      blocks |= _sparse_blocks(node, child)
  return blocks


def expert_losses_and_metrics(
  intermediates: Mapping[str, Any],
  aux_loss_factor: float,
  router_z_loss_factor: float,
) -> tuple[Array | float, MetricsMap]:
  """Return (the weighted sum of the routers' losses, a float32 scalar; metrics by name).

  Args:
    intermediates: sown values of the network.
    aux_loss_factor: weight of the mean load-balancing loss of the layers.
    router_z_loss_factor: weight of the mean router z-loss of the layers.

  Raises:
    ConfigError: a factor is not 0, but no layer has its loss.
  """
  layers = sown_by_layer(intermediates)
  factors = _factors(aux_loss_factor, router_z_loss_factor)
  _check_factors(factors, layers)
  return _loss(layers, factors), _metrics(layers, _weights(layers), factors)


def loss_terms(
  intermediates: Mapping[str, Any], aux_loss_factor: float, router_z_loss_factor: float
) -> metrics_lib.WeightedAverage | None:
  """Return the losses of the routers, each with its weight in means over batches, as one metric; None without layers.

  Args:
    intermediates: sown values of the network.
    aux_loss_factor: weight of the mean load-balancing loss of the layers.
    router_z_loss_factor: weight of the mean router z-loss of the layers.
  """
  layers = sown_by_layer(intermediates)
  if not layers:
    return None
  weights = _weights(layers)
  first, second = (
    _average_over_layers(layers, weights, name, factor)
    for name, factor in _factors(aux_loss_factor, router_z_loss_factor).items()
  )
  return first.add_terms(second)


@flax.struct.dataclass
class MicrobatchSums(clu_metrics.Metric):
  """Metrics of sparse layers over the micro-batches of one step: sums of values times weights, and of weights.

  Attributes:
    totals: sum of values times weights, by layer and name.
    weights: sum of weights, by layer and name.
  """

  totals: Layers
  weights: Layers

  def merge(self, other: 'MicrobatchSums') -> 'MicrobatchSums':
    """Return the sums of both."""
    return jax.tree.map(jnp.add, self, other)

  def compute(self) -> Layers:
    """Return the means, arrays by layer and name."""

    def mean(total, weight):
      # Weights are numbers of tokens or choices; if a weight is 0, the total is 0.
      return total / jnp.maximum(weight, 1.0)

    return jax.tree.map(mean, self.totals, self.weights)


def microbatch_losses_and_sums(
  intermediates: Mapping[str, Any],
  aux_loss_factor: float,
  router_z_loss_factor: float,
  num_microbatches: int,
  num_tokens: Mapping[str, Array],
) -> tuple[Array | float, dict[str, MicrobatchSums]]:
  """Return the losses of one micro-batch, whose mean over micro-batches is that of the batch, and its sums.

  Args:
    intermediates: sown values of the network.
    aux_loss_factor: weight of the mean load-balancing loss of the layers.
    router_z_loss_factor: weight of the mean router z-loss of the layers.
    num_microbatches: number of micro-batches of the batch.
    num_tokens: number of tokens in the entire batch without padding, float32 [] by stack.

  Returns:
    (the weighted sum of the routers' losses, `MicrobatchSums` under the name `PREFIX`; without sparse layers, {}).

  Raises:
    ConfigError: see `expert_losses_and_metrics`; or `num_tokens` has no entry for a loss that is a mean over tokens.
  """
  layers = sown_by_layer(intermediates)
  factors = _factors(aux_loss_factor, router_z_loss_factor)
  _check_factors(factors, layers)
  if not layers:
    return 0.0, {}
  weights = _weights(layers)
  totals = {}
  for layer, of_layer in weights.items():
    totals[layer] = {name: layers[layer][name] * weight for name, weight in of_layer.items()}
  shares = {}
  for layer, values in layers.items():
    shares[layer] = {name: values[name] for name in _LOSSES}
    for name in set(_LOSSES) & set(values.get(WEIGHTS, {})):
      stack = layer.split('/')[0]
      if stack not in num_tokens:
        raise errors.ConfigError(
          f'`padding_in_losses` of the router of {layer} must be True with micro-batches, got False: the number of '
          'tokens of the entire batch is known only for sparse_transformer and sparse_decoder_only. Set '
          'padding_in_losses=True, or num_microbatches=None.'
        )
      shares[layer][name] = (
        totals[layer][name] * num_microbatches / jnp.maximum(num_tokens[stack], 1.0)
      )
  return _loss(shares, factors), {PREFIX: MicrobatchSums(totals, weights)}


def metrics_of_sums(
  sums: MicrobatchSums, aux_loss_factor: float, router_z_loss_factor: float
) -> MetricsMap:
  """Return the metrics of a batch from the merged sums of its micro-batches.

  Args:
    sums: merged sums.
    aux_loss_factor: weight of the mean load-balancing loss of the layers.
    router_z_loss_factor: weight of the mean router z-loss of the layers.
  """
  factors = _factors(aux_loss_factor, router_z_loss_factor)
  return _metrics(sums.compute(), sums.weights, factors)


def _factors(aux_loss_factor: float, router_z_loss_factor: float) -> dict[str, float]:
  return dict(zip(_LOSSES, (aux_loss_factor, router_z_loss_factor), strict=True))


def _mean_over_layers(layers: Layers, name: str) -> Array:
  return jnp.mean(jnp.stack([values[name] for values in layers.values()]))


def _loss(layers: Layers, factors: Mapping[str, float]) -> Array | float:
  if layers:
    return sum(factor * _mean_over_layers(layers, name) for name, factor in factors.items())
  return 0.0


def _weights(layers: Layers) -> Layers:
  """Return the weights of the sown values in means over batches and micro-batches, by layer and name."""
  weights = {}
  for layer, values in layers.items():
    own = values.get(WEIGHTS, {})
    names = [name for name in SOWN if name in values]
    weights[layer] = {name: own.get(name, jnp.ones([], jnp.float32)) for name in names}
  return weights


def _average_over_layers(
  layers: Layers, weights: Layers, name: str, factor: float
) -> metrics_lib.WeightedAverage:
  """Return `factor` times the mean over layers, each of which has its own weight in means over batches."""
  values = [jnp.mean(of_layer[name]) for of_layer in layers.values()]
  own = [jnp.mean(of_layer[name]) for of_layer in weights.values()]
  average = metrics_lib.WeightedAverage.from_model_output(jnp.stack(values), jnp.stack(own))
  return average.scale(factor / len(values))


def _metrics(layers: Layers, weights: Layers, factors: Mapping[str, float]) -> MetricsMap:
  if not layers:
    return {}
  metrics: MetricsMap = {}
  for name in MOE_METRICS:
    factor = factors.get(name, 1.0)
    metrics[f'{PREFIX}/{name}'] = _average_over_layers(layers, weights, name, factor)
  for layer, values in layers.items():
    for name, value in _layer_metrics(values, weights[layer]).items():
      metrics[f'{PREFIX}/{layer}/{name}'] = value
  return metrics


def _layer_metrics(values: Mapping[str, Array], weights: Mapping[str, Array]) -> MetricsMap:
  average = metrics_lib.WeightedAverage.from_model_output
  metrics: MetricsMap = {}
  for name, weight in weights.items():
    if SOWN[name] == 0:
      # Flaxformer's layers sow numbers as arrays with one element, and no load.
      metrics[name] = average(jnp.mean(values[name]), jnp.mean(weight))
    elif name != 'expert_load':
      metrics[name] = metrics_lib.ArrayAverage.from_model_output(values[name], weight)
  if 'expert_load' in weights:
    load = values['expert_load']
    # The load of a batch of only padding is 0.
    has_tokens = jnp.any(load > 0)
    weight = weights['expert_load'] * has_tokens
    metrics['load'] = metrics_lib.ArrayAverage.from_model_output(load, weight)
    metrics['max_over_mean_load'] = average(jnp.max(load) * load.size, has_tokens)
    metrics['dead_experts'] = average(jnp.sum(load == 0), has_tokens)
  return metrics


def _check_factors(factors: Mapping[str, float], layers: Layers) -> None:
  for name, factor in factors.items():
    if factor and not layers:
      option = {'auxiliary_loss': 'aux_loss_factor'}.get(name, f'{name}_factor')
      raise checks.invalid(
        '',
        option,
        '0 for a network without sparse layers',
        factor,
        'Alternatively, give the network a moe.SparseFeedForward.',
      )
