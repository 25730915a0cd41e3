"""The (`data`, `expert`, `model`) mesh: the data axis of a dense model's mesh, divided into `data` and `expert`.

A mesh whose extents within and over slices are given has the axis `replica` too, before these. Its expert axis is a
part of the data axis within a slice.
"""

from collections.abc import Sequence
import math

import jax
from jax.sharding import Mesh

from t5x_lite import checks
from t5x_lite import partitioning
from t5x_lite.partitioning import mesh as mesh_lib

AXIS_NAMES = ('data', 'expert', 'model')


def compute_num_model_partitions(
  num_model_partitions: int | None, model_parallel_submesh: partitioning.HardwareMesh | None
) -> int:
  """Return the number of model partitions.

  Args:
    num_model_partitions: the number, or None.
    model_parallel_submesh: hardware tile with the same number of devices, or None.

  Raises:
    ConfigError: both are None, or they differ.

  >>> compute_num_model_partitions(None, (2, 2, 1, 2)), compute_num_model_partitions(2, (1, 2))
  (8, 2)
  """
  sizes = set()
  if model_parallel_submesh is not None:
    sizes.add(math.prod(model_parallel_submesh))
  if num_model_partitions is not None:
    sizes.add(num_model_partitions)
  if len(sizes) != 1:
    raise checks.invalid(
      '',
      'num_model_partitions',
      'the number of devices of model_parallel_submesh if this is set, and otherwise a number',
      num_model_partitions,
      f'model_parallel_submesh is {model_parallel_submesh}. For no model parallelism, set 1.',
    )
  return sizes.pop()


def largest_divisor(number: int, at_most: int) -> int:
  """Return the largest divisor of `number` up to `at_most` (both at least 1).

  >>> largest_divisor(8, 6), largest_divisor(12, 6), largest_divisor(7, 6)
  (4, 6, 1)
  """
  return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def get_cpu_mesh() -> Mesh:
  """Return the mesh of the CPU devices with a row per process: (processes, devices of a process, 1)."""
  return _without_model_axis(mesh_lib.get_cpu_mesh())


def get_gpu_mesh() -> Mesh:
  """Return the mesh of the GPUs with the devices of a process along the expert axis: (processes, GPUs of each, 1)."""
  gpus_of_process = len(mesh_lib.devices_of('gpu')) // jax.process_count()
  return _without_model_axis(mesh_lib.get_gpu_mesh(gpus_of_process))


def _without_model_axis(base: Mesh) -> Mesh:
  """Return a (`data`, `model`) mesh whose second axis becomes the expert axis."""
  return mesh_lib.make_mesh(base.devices[..., None], AXIS_NAMES)


def default_moe_mesh(
  num_expert_partitions: int,
  num_partitions: int | None = None,
  model_parallel_submesh: partitioning.HardwareMesh | None = None,
  backend: str | None = None,
  ici_mesh_shape: Sequence[int] | None = None,
  dcn_mesh_shape: Sequence[int] | None = None,
) -> Mesh:
  """Return the mesh with an expert axis for the devices of this job.

  The data axis of `t5x_lite.partitioning.default_mesh` is divided into runs of neighbours, which form the expert axis:
  tokens are exchanged along it, so it has the faster links. Its size is the largest divisor of the data axis up to
  `num_expert_partitions`; of the data axis within a slice, if the extents within slices are given.

  Args:
    num_expert_partitions: largest number of devices among which the experts of a layer are divided.
    num_partitions: size of the model axis.
    model_parallel_submesh: hardware tile of the model axis; one of the two, or both with equal sizes.
    backend: platform whose devices to use; None for JAX's default.
    ici_mesh_shape: (replica, data, model) extents within a slice, instead of the two; needs `dcn_mesh_shape`.
    dcn_mesh_shape: (replica, data, model) extents over slices.

  Returns:
    A (`data`, `expert`, `model`) mesh of shape (data / expert, expert, model), or a (`replica`, `data`, `expert`,
    `model`) mesh if the two shapes are given.

  Raises:
    ConfigError: the arguments contradict each other or do not fit the devices.
  """
  checks.check(
    'default_moe_mesh', locals(), num_expert_partitions=checks.number(at_least=1, integer=True)
  )
  if ici_mesh_shape is not None and dcn_mesh_shape is not None:
    base = mesh_lib.hybrid_mesh(ici_mesh_shape, dcn_mesh_shape, backend)
    num_within_slice = ici_mesh_shape[1]
  else:
    size = compute_num_model_partitions(num_partitions, model_parallel_submesh)
    base = partitioning.default_mesh(size, model_parallel_submesh, backend)
    num_within_slice = base.shape['data']
  num_expert = largest_divisor(num_within_slice, num_expert_partitions)
  *num_replicas, num_data, num_model = base.devices.shape
  shape = (*num_replicas, num_data // num_expert, num_expert, num_model)
  axis_names = (*base.axis_names[:-2], *AXIS_NAMES)
  return mesh_lib.make_mesh(base.devices.reshape(shape), axis_names)
