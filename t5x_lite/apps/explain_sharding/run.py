"""Show the sharding of each array of a train state from its shapes, without data, checkpoints or device memory."""

from t5x_lite.data import DatasetConfig
from t5x_lite.data.batches.features import get_converter
from t5x_lite.models import BaseModel
from t5x_lite.partitioning import PjitPartitioner
from t5x_lite.partitioning import ShardingReport
from t5x_lite.trainer import state_init


def explain_sharding(
  *, model: BaseModel, partitioner: PjitPartitioner, train_dataset_cfg: DatasetConfig
) -> ShardingReport:
  """Return the sharding of a model's parameters and optimizer state on the partitioner's mesh.

  Args:
    model: the model with its optimizer.
    partitioner: the mesh and the sharding rules.
    train_dataset_cfg: training data, for the shapes of a batch; no data is read.

  Raises:
    ConfigError: the batch or an array is not divisible by its mesh axes, or an axis has no rule.
  """
  train_dataset_cfg.validated('train_dataset_cfg').check_lengths_are_given('training')
  partitioner.get_data_layout(train_dataset_cfg.batch_size)
  spec = get_converter(model.FEATURE_CONVERTER).element_spec(
    train_dataset_cfg.task_feature_lengths, train_dataset_cfg.batch_size, train_dataset_cfg.pack
  )
  initializer = state_init.TrainStateInitializer(
    model.optimizer_def,
    model.get_initial_variables,
    {name: feature.shape for name, feature in spec.items()},
    partitioner,
    {name: feature.dtype for name, feature in spec.items()},
  )
  return partitioner.explain(initializer.global_train_state_shape)
