"""A trainer that prunes a model: masked parameters are zeros in losses and evaluations, and are not updated.

T5X's trainer reads the properties `_partitioned_train_step` and `_partitioned_eval_step`, made by a partitioner for
(state, batch), and calls the former in each step. A trainer of one's own reads the attributes of T5X's.
"""

import functools

import jax
from t5x import trainer


def pruned(params, masks):
  return jax.tree.map(lambda param, mask: param * mask, params, masks)


class MaskedTrainer(trainer.Trainer):
  def __init__(self, *args, masks, **kwargs):
    self._masks = masks
    super().__init__(*args, **kwargs)

  @functools.cached_property
  def _partitioned_train_step(self):
    def train_step(train_state, batch):
      state = train_state.replace_params(pruned(train_state.params, self._masks))
      grads, metrics, _ = trainer.accumulate_grads_microbatched(
        self._model,
        state,
        batch,
        self._get_step_rng(state.step),
        self._num_microbatches,
        self._partitioner.data_partition_spec,
      )
      rate = self._learning_rate_fn(state.step)
      grads = pruned(grads, self._masks)
      return trainer.apply_grads(state, grads, metrics, rate, self._weight_metrics_computer)

    return self._partitioner.partition(
      train_step,
      in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
      out_axis_resources=(self._train_state_axes, None),
      donate_argnums=(0,),
    )

  @functools.cached_property
  def _partitioned_eval_step(self):
    def eval_step(train_state, batch):
      state = train_state.replace_params(pruned(train_state.params, self._masks))
      return trainer.eval_step(self._model, state, batch)

    return self._partitioner.partition(
      eval_step,
      in_axis_resources=(self._train_state_axes, self._partitioner.data_partition_spec),
      out_axis_resources=None,
    )
