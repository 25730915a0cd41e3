"""Gradients of experts as in T5X: multiplied by the number of expert partitions."""

from collections.abc import Callable, Sequence
import re
from typing import Any

from moe.state_axes import match_fn
from t5x_lite import checks
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.schedules import LearningRateCallable
from t5x_lite.train_state import TrainState
from t5x_lite.trainer import trainer
from t5x_lite.trainer import weight_metrics
from t5x_lite.trainer.step_params import ParamNoise
from t5x_lite.types import Array, PyTree


def tree_map_with_names(
  f: Callable[[Any], Any],
  param_tree: PyTree,
  match_name_fn: Callable[[str], bool] = lambda name: True,
) -> PyTree:
  """Return a tree with `f` applied to the leaves whose names match.

  Args:
    f: function of a leaf.
    param_tree: nested dicts of parameters.
    match_name_fn: predicate on the '/'-joined name of a leaf.
  """

  def apply_if_matching(name, leaf):
    if match_name_fn(name):
      return f(leaf)
    return leaf

  return tree_utils.map_with_names(apply_if_matching, param_tree)


def scale_sharded_grads(
  grads: PyTree, sharded_match_fn: Callable[[str], bool] | None, scale_factor: float
) -> PyTree:
  """Return gradients, of which those with matching names are multiplied by a factor.

  Args:
    grads: nested dicts of gradients.
    sharded_match_fn: predicate on the '/'-joined name of a parameter; None matches no name.
    scale_factor: the factor.
  """
  if sharded_match_fn is None:
    return grads
  return tree_map_with_names(lambda grad: grad * scale_factor, grads, sharded_match_fn)


def scale_expert_gradients(
  num_expert_partitions: int, match: str = r'.*expert.*'
) -> Callable[[PyTree], PyTree]:
  """Return a `Trainer.gradient_transform` that multiplies experts' gradients by the number of expert partitions.

  T5X's trainer of sparse models always does this. Use it to repeat runs of T5X; by default it is off, since gradients
  are those of the loss on every mesh, and with the factor a run depends on its mesh. It has little effect on optimizers
  that normalize gradients, but it affects clipping by a global norm.

  Args:
    num_expert_partitions: factor of the gradients.
    match: regular expression for the entire '/'-joined name of a parameter.

  Raises:
    ConfigError: an invalid number or expression; when called, an expression that no parameter matches.
  """
  checks.check(
    'scale_expert_gradients',
    locals(),
    num_expert_partitions=checks.number(at_least=1, integer=True),
  )
  try:
    pattern = re.compile(match)
  except re.error as error:
    raise checks.invalid(
      'scale_expert_gradients', 'match', f'a regular expression ({error})', match
    ) from error

  def transform(grads: PyTree) -> PyTree:
    names = [name for name, _ in tree_utils.named_leaves(grads)]
    if not any(map(pattern.fullmatch, names)):
      raise checks.invalid(
        'scale_expert_gradients',
        'match',
        'a regular expression that matches the full name of '
        f'at least one parameter, such as {names[0]!r}',
        match,
      )
    return scale_sharded_grads(
      grads, lambda name: pattern.fullmatch(name) is not None, num_expert_partitions
    )

  return transform


class MoeTrainer(trainer.Trainer):
  """`Trainer` that multiplies the gradients of experts, as T5X's trainer of sparse models does.

  `Trainer` itself trains sparse models with the gradients of the loss, on every mesh; see `scale_expert_gradients`.
  """

  ACCEPTS_STACKED_LAYERS = True

  def __init__(
    self,
    model: models.BaseModel,
    train_state: TrainState,
    partitioner: partitioning.BasePartitioner,
    eval_names: Sequence[str],
    summary_dir: str | None,
    train_state_axes: PyTree,
    rng: Array,
    learning_rate_fn: LearningRateCallable | None,
    num_microbatches: int | None,
    num_expert_partitions: int,
    sharded_match_fn: Callable[[str], bool] | None = match_fn(r'.*expert.*'),
    weight_metrics_computer: weight_metrics.WeightMetricsComputer | None = None,
    *,
    gradient_clip_norm: float | None = None,
    non_finite_policy: trainer.NonFinitePolicy = trainer.NonFinitePolicy(),
    train_dtype: Any = None,
    param_noise: ParamNoise | None = None,
  ):
    """Construct the trainer; see `Trainer` for the other arguments.

    Args:
      model, train_state, partitioner, eval_names, summary_dir, train_state_axes, rng: see `BaseTrainer`.
      learning_rate_fn, num_microbatches: see `Trainer`.
      num_expert_partitions: factor of the gradients.
      sharded_match_fn: predicate on the '/'-joined names of the parameters whose gradients are multiplied; None for
        none.
      weight_metrics_computer, gradient_clip_norm, non_finite_policy, train_dtype, param_noise: see `Trainer`.

    Raises:
      ConfigError: see `Trainer`; or `num_expert_partitions` or `sharded_match_fn` is invalid.
    """
    checks.check(
      'MoeTrainer',
      locals(),
      num_expert_partitions=checks.number(at_least=1, integer=True),
      sharded_match_fn=checks.Expectation(
        "a function from a name to True or False, such as moe.match_fn('.*expert.*'),", callable
      ).or_none(),
    )
    super().__init__(
      model,
      train_state,
      partitioner,
      eval_names,
      summary_dir,
      train_state_axes,
      rng,
      learning_rate_fn,
      num_microbatches,
      weight_metrics_computer,
      gradient_clip_norm=gradient_clip_norm,
      non_finite_policy=non_finite_policy,
      train_dtype=train_dtype,
      param_noise=param_noise,
    )
    # Attributes of T5X's class, which steps of subclasses read.
    self.data_partition_spec = partitioner.data_partition_spec
    self._num_expert_partitions = num_expert_partitions
    self._sharded_match_fn = sharded_match_fn

  def partitioned_train_step(self) -> trainer.PartitionedTrainCallable:
    """See base class; the step of a subclass scales the gradients itself."""
    self._gradient_transform = lambda grads: scale_sharded_grads(
      grads, self._sharded_match_fn, self._num_expert_partitions
    )
    return super().partitioned_train_step()
