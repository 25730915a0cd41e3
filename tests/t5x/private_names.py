"""Private names of T5X that only its tests use, by functions of t5x_lite that do the same."""

import concurrent.futures
import importlib
import inspect
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from moe import metrics as moe_metrics
from moe import models as moe_models
from moe import state_axes
from moe import training
from t5x_lite import decoding
from t5x_lite import losses
from t5x_lite import tree_utils
from t5x_lite.decoding import sampling
from t5x_lite.trainer import summaries
from t5x_lite.trainer import train_step
from t5x_lite.trainer import trainer


def _sample(inputs, cache, tokens_to_logits, eos_id, prng_key, num_decodes=1, topk=20, **options):
  """Sample one sequence for each row; return <int32>[batch, length] and <float32>[batch]."""
  del num_decodes  # the rows are repeated already
  for name in ('initial_index', 'max_decode_steps'):
    if options.get(name) is not None:
      options[name] = jnp.asarray(options[name], jnp.int32)
  sequences, log_probs = decoding.temperature_sample(
    jnp.asarray(inputs, jnp.int32), cache, tokens_to_logits, eos_id, prng_key, topk=topk, **options
  )
  return sequences[:, 0], log_probs[:, 0]


def _sum_weights(positions, segment_ids, weights):
  """Return the sum of the weights of the sequence of each position, [batch, length]."""
  del positions
  batch = {'decoder_loss_weights': weights, 'decoder_segment_ids': segment_ids}
  batch['decoder_target_tokens'] = jnp.ones_like(segment_ids)
  _, normalized = losses.get_loss_normalizing_factor_and_weights('AVERAGE_PER_SEQUENCE', batch)
  return jnp.where(normalized > 0, weights / normalized, 0.0)


def _sown(diversity_metrics):
  """Return the sown values of a network, whose layers have the values of arrays."""
  num_layers = len(diversity_metrics['auxiliary_loss'])
  layers = {}
  for i in range(num_layers):
    layers[f'layers_{i}'] = {name: values[i] for name, values in diversity_metrics.items()}
  return {'encoder': layers}


def _expert_losses(diversity_metrics, auxiliary_loss_factor, router_z_loss_factor):
  """Return both losses of routers."""
  sown = _sown(diversity_metrics)
  auxiliary_loss, _ = moe_metrics.expert_losses_and_metrics(sown, auxiliary_loss_factor, 0.0)
  router_z_loss, _ = moe_metrics.expert_losses_and_metrics(sown, 0.0, router_z_loss_factor)
  return auxiliary_loss, router_z_loss


def _expert_metrics(diversity_metrics, total_loss, z_loss, **_):
  """Return metrics of experts; those of the loss are the model's."""
  del total_loss, z_loss
  _, metrics = moe_metrics.expert_losses_and_metrics(_sown(diversity_metrics), 1.0, 1.0)
  return metrics


def _extract_diversity_metrics(state):
  """Return the sown values of all sparse layers, whose names are those of ours here."""
  named = {name.removeprefix('moe_'): values for name, values in state['intermediates'].items()}
  sown = {'encoder': {name.replace('layer', 'layers'): values for name, values in named.items()}}
  moe_metrics.expert_losses_and_metrics(sown, 1.0, 1.0)  # raises without layers
  layers = moe_metrics.sown_by_layer(sown).values()
  return {name: jnp.stack([each[name] for each in layers]) for name in moe_metrics.MOE_METRICS}


def _moe_loss_fn(batch, logits, state, **options):
  """Return loss and metrics of a model whose network gives logits and the sown values of one layer."""
  sown = {'intermediates': {'encoder': {'layers_0': state['intermediates']}}}

  class Model(moe_models.MoeEncoderDecoderModel):
    def compute_logits(self, *_, **__):
      return logits, sown

  vocabulary = types.SimpleNamespace(vocab_size=3, eos_id=1)
  return Model(None, vocabulary, vocabulary, None, **options).loss_fn({}, batch, None)


_draw_as_released = sampling._draw


def _draw(rng, logits, kept, noise_rows, rescale):
  """Draw by `jax.random.categorical`, which T5X's tests replace; ours is the same with a faster arg-max."""
  if noise_rows is not None:
    return _draw_as_released(rng, logits, kept, noise_rows, rescale)
  token = jax.random.categorical(rng, kept).astype(jnp.int32)
  log_probs = jax.nn.log_softmax(kept if rescale else logits)
  return token, jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]


def _replaceable(make_step):
  """Return a property with a compiled step, which tests replace by one that counts calls."""
  name = f'/{make_step.__name__}'

  def get(self):
    if name not in vars(self):
      put(self, make_step(self))
    return vars(self)[name]

  def put(self, step):
    vars(self)[name] = step

  return property(get, put)


def _accepting_none(trainer_cls):
  """Return a subclass that accepts None for the axes of an array, as PartitionSpec(), and numbers as arrays.

  Its learning rate is passed to each optimizer.
  """

  class Trainer(trainer_cls):
    def __init__(self, *args, **kwargs):
      bound = inspect.signature(trainer_cls).bind(*args, **kwargs)
      bound.arguments['train_state'] = jax.tree.map(np.asarray, bound.arguments['train_state'])
      bound.arguments['train_state_axes'] = jax.tree.map(
        lambda axes: PartitionSpec() if axes is None else axes,
        bound.arguments['train_state_axes'],
        is_leaf=lambda axes: axes is None,
      )
      super().__init__(*bound.args, **bound.kwargs)
      # T5X computes the rate also for an optimizer with its own.
      self._learning_rate_is_ignored = False

  # Set after the class was made, since classes that define one of these names get the other from it.
  Trainer.partitioned_train_step = lambda self: self._partitioned_train_step
  Trainer.partitioned_eval_step = lambda self, metric_fns=None: self._partitioned_eval_step
  Trainer._partitioned_train_step = _replaceable(trainer_cls.partitioned_train_step)
  Trainer._partitioned_eval_step = _replaceable(trainer_cls.partitioned_eval_step)
  return Trainer


def _train_with_lr(
  train_state, batch, *, learning_rate, dropout_rng, model, num_microbatches, **options
):
  """Return the result of a step by the functions of the module `t5x.trainer`, which T5X's tests replace."""
  functions = importlib.import_module('t5x.trainer')
  spec = options['data_partition_spec']
  grads, metrics, mutables = functions.accumulate_grads_microbatched(
    model, train_state, batch, dropout_rng, num_microbatches, spec
  )
  if options['gradient_transform'] is not None:
    grads = options['gradient_transform'](grads)
  others = {'flax_mutables': mutables} if mutables else None
  computer = options['weight_metrics_computer']
  return functions.apply_grads(train_state, grads, metrics, learning_rate, computer, others)


def _eval_step(*arguments):
  """Return the metrics by the function of the module `t5x.trainer`, which T5X's tests replace."""
  return importlib.import_module('t5x.trainer').eval_step(*arguments)


def _timer(manager):
  """Return an object whose `_start_future` is done, since ours waits for no array."""
  del manager
  start = concurrent.futures.Future()
  start.set_result(None)
  return types.SimpleNamespace(_start_future=start)


_NAMES: dict[str, dict[str, Any]] = {
  't5x.contrib.moe.models': {
    '_expert_losses': _expert_losses,
    '_expert_metrics': _expert_metrics,
    '_extract_diversity_metrics': _extract_diversity_metrics,
    '_moe_loss_fn': _moe_loss_fn,
  },
  't5x.contrib.moe.partitioning': {
    '_infer_state_filter_fn': lambda state: state_axes.infer_state_filter_fn(
      state, state.as_logical_axes()
    )
  },
  't5x.contrib.moe.trainer': {'MoeTrainer': _accepting_none(training.MoeTrainer)},
  't5x.contrib.moe.training_utils': {
    '_tree_flatten_with_names': lambda tree: (list(tree_utils.named_leaves(tree)), None)
  },
  't5x.decoding': {'_temperature_sample_single_trial': _sample},
  't5x.losses': {'_sum_weights_per_segment': _sum_weights},
  't5x.trainer': {
    'Trainer': _accepting_none(trainer.Trainer),
    '_time': time.time,
    'eval_step': train_step.eval_step,
  },
}


def install() -> None:
  """Add the names to the modules of `compat`."""
  for module, names in _NAMES.items():
    vars(importlib.import_module(module)).update(names)
  sampling._draw = _draw
  trainer.train_with_lr = _train_with_lr
  trainer.eval_step = _eval_step
  summaries.MetricsManager._duration_timer = property(_timer)
  # T5X's tests replace this clock.
  clock = importlib.import_module('t5x.trainer')
  summaries.time = types.SimpleNamespace(**vars(time))
  summaries.time.perf_counter = lambda: clock._time()
