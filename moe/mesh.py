"""The (`data`, `expert`, `model`) mesh: the data axis of a usual mesh, divided into one for experts and the rest."""

import math

from jax.sharding import Mesh

from moe import rules as rules_lib
from t5x_lite import partitioning
from t5x_lite.errors import ConfigError
from t5x_lite.partitioning import mesh as mesh_lib

AXIS_NAMES = ('data', 'expert', 'model')


def compute_num_model_partitions(
    num_model_partitions: int | None, model_parallel_submesh: partitioning.HardwareMesh | None) -> int:
  """Return the number of model partitions that either argument, or both in agreement, say.

  Args:
    num_model_partitions: the number.
    model_parallel_submesh: hardware tile with as many devices.

  Raises:
    ConfigError: none was given, or two that differ.

  >>> compute_num_model_partitions(None, (2, 2, 1, 2)), compute_num_model_partitions(2, (1, 2))
  (8, 2)
  """
  if num_model_partitions is None and model_parallel_submesh is None:
    raise ConfigError('Neither num_model_partitions nor model_parallel_submesh was given; expected one of them. Use '
                      'num_model_partitions=1 for no model parallelism.')
  if model_parallel_submesh is None:
    return num_model_partitions
  size = math.prod(model_parallel_submesh)
  if num_model_partitions is not None and num_model_partitions != size:
    raise ConfigError(
        f'num_model_partitions={num_model_partitions}, but model_parallel_submesh={tuple(model_parallel_submesh)} has '
        f'{size} devices; expected equal numbers. Leave one of the two out.')
  return size


def largest_divisor(number: int, at_most: int) -> int:
  """Return the largest divisor of `number` that is not above `at_most` (both at least 1).

  >>> largest_divisor(8, 6), largest_divisor(12, 6), largest_divisor(7, 6)
  (4, 6, 1)
  """
  return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def default_moe_mesh(
    num_expert_partitions: int,
    num_partitions: int | None = None,
    model_parallel_submesh: partitioning.HardwareMesh | None = None,
    backend: str | None = None) -> Mesh:
  """Return the (`data`, `expert`, `model`) mesh for the devices at hand.

  The devices are laid out as `t5x_lite.partitioning.default_mesh` does. Its data axis is then cut into runs of
  neighbours, which are the expert axis: tokens go from device to device along it, so it has the faster links. It is as
  long as the largest divisor of the data axis that is not above `num_expert_partitions`.

  Args:
    num_expert_partitions: the most devices to divide the experts of a layer among.
    num_partitions: size of the model axis.
    model_parallel_submesh: hardware tile of the model axis; one of the two, or both in agreement.
    backend: platform to take devices from, JAX's default if None.

  Returns:
    A mesh of shape (data / expert, expert, model).

  Raises:
    ConfigError: the arguments do not fit each other or the devices.
  """
  rules_lib.check_count('num_expert_partitions', num_expert_partitions, at_least=1)
  size = compute_num_model_partitions(num_partitions, model_parallel_submesh)
  base = partitioning.default_mesh(size, model_parallel_submesh, backend)
  num_data, num_model = base.devices.shape
  num_expert = largest_divisor(num_data, num_expert_partitions)
  return mesh_lib.make_mesh(
      base.devices.reshape(num_data // num_expert, num_expert, num_model), AXIS_NAMES)
