"""What a model reports about its experts, from the values that its layers have sown.

Names are T5X's where T5X has the metric: `experts/auxiliary_loss` and `experts/router_z_loss` (times the model's
factors), `experts/fraction_tokens_left_behind`, `experts/expert_usage`, `experts/router_confidence`, means over the
sparse layers. Of each layer there are `experts/<stack>/layers_<i>/<name>`:

- `load` [num_experts]: share of all choices that each expert got, before any were dropped;
- `max_over_mean_load`: load of the busiest expert over the mean;
- `dead_experts`: number of experts that nothing chose in a pass (of micro-batches, like all here: the mean of theirs);
- `router_entropy` (nats), `router_confidence`, `fraction_tokens_left_behind`, `expert_usage`, `router_z_loss`,
  `auxiliary_loss` (the last two without the model's factors);
- `choices_dropped`: share of the choices that found no place in their expert's buffer; where experts choose, of the
  tokens that none chose;
- `drops_by_position` [16]: the same by place in the sequence, cut into 16 parts, 0 for a part of padding alone;
- `receive_drops`: share of the choices that found no place in a buffer of exchanged tokens.
"""

from collections.abc import Mapping
from typing import Any

from clu import metrics as clu_metrics
import jax.numpy as jnp

from t5x_lite import errors
from t5x_lite import metrics as metrics_lib
from t5x_lite.types import Array

MetricsMap = dict[str, clu_metrics.Metric]

PREFIX = 'experts'
# T5X's diversity metrics, means over the layers.
MOE_METRICS = (
    'auxiliary_loss', 'router_z_loss', 'fraction_tokens_left_behind', 'expert_usage', 'router_confidence')
# What layers sow, and how many dims each has.
SOWN = {**dict.fromkeys(MOE_METRICS, 0), 'router_entropy': 0, 'choices_dropped': 0, 'receive_drops': 0,
        'expert_load': 1, 'drops_by_position': 1}


def sown_by_layer(intermediates: Mapping[str, Any]) -> dict[str, dict[str, Array]]:
  """Returns what each sparse layer has sown, by `<stack>/layers_<i>` in the order of the layers.

  Args:
    intermediates: the collection of that name: nested dicts with tuples of arrays; layers are subtrees, or the first
      dim of the arrays of one subtree that has the stack's name.

  Returns:
    Layer to name to array; names are those of `SOWN`, others are left out. If a layer has two sparse blocks, the other
    one than `mlp` stands behind as `<stack>/layers_<i>/<its path>`.
  """
  found: dict[tuple[str, int, str], dict[str, Array]] = {}
  for stack, subtree in intermediates.items():
    if not isinstance(subtree, Mapping):
      continue
    for child, layer_tree in subtree.items():
      if not isinstance(layer_tree, Mapping):
        continue
      blocks = _sparse_blocks(layer_tree)
      for block, values in blocks.items():
        which = '' if len(blocks) == 1 or block == 'mlp' else f'/{block}'
        if child.startswith('layers_'):
          found[stack, int(child.removeprefix('layers_')), which] = values
        elif child == stack:
          for i in range(next(iter(values.values())).shape[0]):
            found[stack, i, which] = {name: value[i] for name, value in values.items()}
  in_order = sorted(found, key=lambda key: (key[0] != 'encoder', key))
  return {f'{stack}/layers_{i}{which}': found[stack, i, which] for stack, i, which in in_order}


def _sparse_blocks(tree: Mapping[str, Any], path: str = '') -> dict[str, dict[str, Array]]:
  """Returns what the sparse blocks of a layer have sown, by their '/'-joined path, wherever they are within it."""
  # A block that was called more than once: the last pass is the one whose output counts.
  values = {name: node[-1] if isinstance(node, tuple) else node
            for name, node in tree.items() if name in SOWN and not isinstance(node, Mapping)}
  if values:
    # What its experts sow is theirs.
    return {path: values}
  blocks = {}
  for name, node in tree.items():
    if isinstance(node, Mapping):
      blocks |= _sparse_blocks(node, f'{path}/{name}' if path else name)
  return blocks


def expert_losses_and_metrics(
    intermediates: Mapping[str, Any], aux_loss_factor: float, router_z_loss_factor: float,
) -> tuple[Array | float, MetricsMap]:
  """Returns (the weighted sum of the routers' losses, metrics).

  Args:
    intermediates: what the network has sown.
    aux_loss_factor: weight of the mean load-balancing loss of the layers.
    router_z_loss_factor: weight of the mean router z-loss of the layers.

  Raises:
    ConfigError: a factor is not 0 and no layer has such a loss.
  """
  layers = sown_by_layer(intermediates)
  factors = {'auxiliary_loss': aux_loss_factor, 'router_z_loss': router_z_loss_factor}
  if not layers:
    _refuse_unused_factors(factors)
    return 0.0, {}
  means = {name: jnp.mean(jnp.stack([values[name] for values in layers.values()])) for name in MOE_METRICS}
  means |= {name: factor * means[name] for name, factor in factors.items()}
  metrics = {f'{PREFIX}/{name}': _mean(value) for name, value in means.items()}
  for layer, values in layers.items():
    for name, value in _layer_metrics(values).items():
      metrics[f'{PREFIX}/{layer}/{name}'] = value
  return means['auxiliary_loss'] + means['router_z_loss'], metrics


def _layer_metrics(values: Mapping[str, Array]) -> MetricsMap:
  values = dict(values)
  load = values.pop('expert_load')
  scalars = {name: value for name, value in values.items() if SOWN[name] == 0}
  # A batch of nothing but padding has no load; then nobody is the busiest.
  scalars['max_over_mean_load'] = jnp.max(load) * load.size
  scalars['dead_experts'] = jnp.sum(load == 0, dtype=jnp.float32)
  arrays = {'load': load} | {name: value for name, value in values.items() if SOWN[name] == 1}
  return {**{name: _mean(value) for name, value in scalars.items()},
          **{name: metrics_lib.ArrayAverage.from_model_output(value) for name, value in arrays.items()}}


def _mean(value: Array) -> clu_metrics.Average:
  """Returns a metric that averages over steps and micro-batches alike."""
  return clu_metrics.Average(total=jnp.asarray(value, jnp.float32), count=jnp.ones([], jnp.float32))


def _refuse_unused_factors(factors: Mapping[str, float]) -> None:
  for name, factor in factors.items():
    if factor:
      option = {'auxiliary_loss': 'aux_loss_factor'}.get(name, f'{name}_factor')
      raise errors.ConfigError(
          f'got {option}={factor}, but no layer of the network has a router; expected a network with sparse layers. '
          f'Give the network a moe.SparseFeedForward, or set {option}=0.')
