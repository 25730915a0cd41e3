"""Logical axis rules of Mixtures of Experts, in both forms of expert parallelism.

In the first form the mesh has the axes `data` and `model`, and experts are sharded over `data`. With fewer experts than
devices and no model parallelism, each expert has copies on several devices along `model`, and a batch is sharded over
both axes ("two data axes"). In the second form experts have a separate axis in a (`data`, `expert`, `model`) mesh, and
a batch is always sharded over `expert` and `data`.
"""

from collections.abc import Mapping, Sequence
import math

import flax.core
from jax.sharding import PartitionSpec

from t5x_lite import adafactor
from t5x_lite import checks
from t5x_lite import partitioning
from t5x_lite.partitioning import mesh as mesh_lib
from t5x_lite.partitioning import rules as rules_lib
from t5x_lite.partitioning.rules import MeshAxis
from t5x_lite.types import LogicalAxisRules, PyTree

# (logical axis, mesh axis or axes).
Rule = tuple[str, MeshAxis]

# Mesh axes of a batch in the first form with two data axes, and in the second form; the first varies slowest.
TWO_DATA_AXES = ('data', 'model')
HEAD_DATA_AXES = ('expert', 'data')
# Mesh axis of the copies of the model, one per slice, which precedes the axes above.
REPLICA_AXIS = 'replica'


def uses_two_data_axes(
  num_experts: int,
  num_partitions: int | None,
  model_parallel_submesh: partitioning.HardwareMesh | None,
  backend: str | None = None,
) -> bool:
  """Return whether the first form uses `model` as a second data axis: fewer experts than devices, no model parallelism.

  It reads the number of devices, which starts JAX's backend.

  Args:
    num_experts: number of experts of a layer; 0 for a model without experts.
    num_partitions: number of model partitions.
    model_parallel_submesh: hardware tile of the model axis; give exactly one of the two.
    backend: platform whose devices are counted; None for JAX's default.

  Raises:
    ConfigError: both or none of the two are given, or an invalid number of experts.
  """
  checks.check(
    '',
    locals(),
    num_experts=checks.number(at_least=0, integer=True),
    num_partitions=checks.Expectation(
      'None if and only if model_parallel_submesh is given',
      lambda value: (value is None) != (model_parallel_submesh is None),
      '1 is for no model parallelism.',
    ),
  )
  if num_experts == 0 or len(mesh_lib.devices_of(backend)) <= num_experts:
    return False
  if model_parallel_submesh is not None:
    num_partitions = math.prod(model_parallel_submesh)
  assert num_partitions is not None  # The check above.
  return num_partitions <= 1


def data_partition_spec(two_data_axes: bool) -> PartitionSpec:
  """Return the sharding of a batch in the first form.

  Args:
    two_data_axes: True if `model` is a second data axis, see `uses_two_data_axes`.

  >>> data_partition_spec(False), data_partition_spec(True)
  (P('data',), P(('data', 'model'),))
  """
  if two_data_axes:
    return PartitionSpec(TWO_DATA_AXES)
  return PartitionSpec('data')


def standard_logical_axis_rules(
  num_experts: int,
  num_partitions: int | None = None,
  model_parallel_submesh: partitioning.HardwareMesh | None = None,
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: Sequence[Rule] | None = None,
  *,
  two_data_axes: bool | None = None,
) -> list[Rule]:
  """Return the rules of the first form, for `MoePjitPartitioner(num_experts=...)` with the same three arguments.

  These are `t5x_lite.partitioning.standard_logical_axis_rules` with experts over `data` and their hidden units over
  `model`. With two data axes `batch` is sharded over both, `expert_replicas` over `model`, and all other dims that
  would be sharded over `model` are replicated, since the devices along it have copies.

  `parameter_partitioning_dims=2`, which T5X does not support, divides parameters among all devices. `embed` is sharded
  over the axes of the batch that no other dim of the array has, where experts have precedence:

  | | dense arrays | experts' arrays |
  |---|---|---|
  | one data axis | `embed` -> `data` | none, since experts and hidden units are sharded over all devices |
  | two data axes | `embed` -> (`data`, `model`) | `embed` -> `model`, among the copies of an expert |

  Unless `two_data_axes` is given, the function reads the number of devices, which starts JAX's backend.

  Args:
    num_experts: number of experts of a layer; 0 for a model without experts.
    num_partitions: number of model partitions.
    model_parallel_submesh: hardware tile of the model axis; give exactly one of the two.
    activation_partitioning_dims: 1, or 2 to shard `embed` of activations over `model`.
    parameter_partitioning_dims: 1, or 2 to shard `embed` of parameters, see above.
    additional_rules: rules appended to the standard ones, which have precedence.
    two_data_axes: False for a partitioner with `ici_mesh_shape` and `dcn_mesh_shape` or with `mesh`, instead of
      `num_partitions` and `model_parallel_submesh`. None determines it from these.

  Returns:
    (logical axis, mesh axis or axes or None) pairs in order of precedence.

  Raises:
    ConfigError: both or none of the two arguments of the model axis without `two_data_axes`, or one of them with it, a
      number of dims other than 1 or 2, or an invalid additional rule.

  Reference: Fedus et al. 2021, "Switch Transformers", section 5, https://arxiv.org/abs/2101.03961.
  """
  if two_data_axes is None:
    two_data_axes = uses_two_data_axes(num_experts, num_partitions, model_parallel_submesh)
  else:
    unused = checks.Expectation('None with two_data_axes', lambda value: value is None)
    checks.check(
      'standard_logical_axis_rules',
      locals(),
      two_data_axes=checks.one_of((True, False)).or_none(),
      num_partitions=unused,
      model_parallel_submesh=unused,
    )
  mesh_axis_of: dict[MeshAxis, MeshAxis] = {}
  batch_axis: MeshAxis = 'data'
  embed_axes: tuple[MeshAxis, ...] = ('data',)
  mlp_axis: MeshAxis = 'model'
  replicas_axis: MeshAxis = None
  if two_data_axes:
    mesh_axis_of = {'model': None}
    batch_axis = TWO_DATA_AXES
    embed_axes = (TWO_DATA_AXES, 'model')
    mlp_axis = None
    replicas_axis = 'model'
  moe_rules: list[Rule] = [
    ('expert', 'data'),
    ('expert_mlp', mlp_axis),
    ('expert_group', None),
    ('expert_replicas', replicas_axis),
    ('unmodeled', None),
  ]
  rules = _join(
    activation_partitioning_dims,
    parameter_partitioning_dims,
    moe_rules,
    batch_axis=batch_axis,
    embed_axes=embed_axes,
    mesh_axis_of=mesh_axis_of,
  )
  for logical_axis, mesh_axis in rules_lib.freeze_rules(additional_rules or ()):
    if logical_axis == 'batch' and two_data_axes:
      rules.append((logical_axis, batch_axis))
    else:
      rules.append((logical_axis, mesh_axis_of.get(mesh_axis, mesh_axis)))
  return rules


def head_logical_axis_rules(
  activation_partitioning_dims: int = 2,
  parameter_partitioning_dims: int = 1,
  additional_rules: Sequence[Rule] | None = None,
) -> list[Rule]:
  """Return the rules of the second form, for `MoePjitPartitioner(num_expert_partitions=...)`.

  These are `t5x_lite.partitioning.standard_logical_axis_rules` with a batch over `expert` and `data`, experts over
  `expert`, their copies over `data`, and their hidden units over `model`. Later versions of T5X name the function
  `standard_logical_axis_rules`.

  `activation_partitioning_dims=2`, T5X's default here, shards `embed` over `model`, also in experts' arrays, whose
  hidden units are then replicated; 1 shards the hidden units over `model` instead. With
  `parameter_partitioning_dims=2`, which fails in T5X, `embed` of dense arrays is sharded over `expert` and `data`, and
  `embed` of experts' arrays over `data`, in addition to their experts and hidden units.

  Args:
    activation_partitioning_dims: 1 or 2.
    parameter_partitioning_dims: 1 or 2.
    additional_rules: rules appended to the standard ones, which have precedence.

  Returns:
    (logical axis, mesh axis or axes or None) pairs in order of precedence.

  Raises:
    ConfigError: a number of dims other than 1 or 2, or an invalid additional rule.
  """
  moe_rules = [
    ('expert', 'expert'),
    ('expert_mlp', 'model'),
    ('expert_replicas', 'data'),
    ('unmodeled', None),
  ]
  rules = _join(
    activation_partitioning_dims,
    parameter_partitioning_dims,
    moe_rules,
    batch_axis=HEAD_DATA_AXES,
    embed_axes=(HEAD_DATA_AXES, 'data'),
    mesh_axis_of={},
  )
  return rules + list(rules_lib.freeze_rules(additional_rules or ()))


def _join(
  activation_dims: int,
  parameter_dims: int,
  moe_rules: Sequence[Rule],
  *,
  batch_axis: MeshAxis,
  embed_axes: Sequence[MeshAxis],
  mesh_axis_of: Mapping[MeshAxis, MeshAxis],
) -> list[Rule]:
  """Return the rules of dense models together with those for experts.

  Args:
    activation_dims: `activation_partitioning_dims`.
    parameter_dims: `parameter_partitioning_dims`.
    moe_rules: the rules for experts.
    batch_axis: mesh axes of a batch.
    embed_axes: mesh axes of `embed` of parameters if `parameter_dims` is 2, in order of precedence.
    mesh_axis_of: replacements of mesh axes of the dense rules.
  """
  rules: list[Rule] = []
  dense_rules = partitioning.standard_logical_axis_rules(activation_dims, parameter_dims)
  for logical_axis, mesh_axis in dense_rules:
    if logical_axis == 'batch':
      rules.append((logical_axis, batch_axis))
      if parameter_dims == 2:
        # Experts have precedence over `embed`.
        rules += moe_rules
    elif (logical_axis, mesh_axis) == ('embed', 'data'):
      rules += [(logical_axis, choice) for choice in embed_axes]
    elif (logical_axis, parameter_dims) == ('embed', 2) and mesh_axis in mesh_axis_of:
      # The batch of activations has this axis, so `embed` is replicated without a rule.
      continue
    else:
      rules.append((logical_axis, mesh_axis_of.get(mesh_axis, mesh_axis)))
  if parameter_dims == 1:
    rules += moe_rules
  return rules


def with_replica_axis(rules: LogicalAxisRules) -> LogicalAxisRules:
  """Return `rules` for a mesh with the axis `replica`, over which batches and copies of experts are divided first.

  >>> with_replica_axis((('batch', ('expert', 'data')), ('expert', 'expert'), ('expert_replicas', None)))
  (('batch', ('replica', 'expert', 'data')), ('expert', 'expert'), ('expert_replicas', ('replica',)))
  """
  result = []
  for name, axis in rules:
    axes = rules_lib.axes_of(axis)
    if name in ('batch', 'expert_replicas') and REPLICA_AXIS not in axes:
      axis = (REPLICA_AXIS, *axes)
    result.append((name, axis))
  return tuple(result)


def logical_factor_rules() -> flax.core.FrozenDict[str, adafactor.FactorDim]:
  """Return the factor rules of Adafactor by logical axis: those of dense models, and separate factors per expert.

  For `t5x_lite.adafactor.Adafactor(logical_factor_rules=...)`. T5X has it in `contrib.moe.adafactor_utils`.
  """
  factor_dim = adafactor.FactorDim
  return adafactor.standard_logical_factor_rules().copy(
    {
      'expert': factor_dim.BATCH,
      'expert_mlp': factor_dim.COLUMN,
      'mlp_embed': factor_dim.ROW,
      'unmodeled': factor_dim.NONE,
    }
  )


def override_partition_specs(resources: PyTree) -> PyTree:
  """Return axis resources with `PartitionSpec('data')` replaced by the data axes of the second form.

  Only a single spec, or specs directly in a tuple or list, are raw specs of batches; nested specs belong to train
  states and come from rules.

  Args:
    resources: `in_axis_resources` or `out_axis_resources` of `partition`.

  >>> override_partition_specs((PartitionSpec('data'), None, {'kernel': PartitionSpec('data')}))
  (P(('expert', 'data'),), None, {'kernel': P('data',)})
  """
  return replace_raw_specs(resources, {PartitionSpec('data'): PartitionSpec(HEAD_DATA_AXES)})


def replace_raw_specs(
  resources: PyTree, replacements: Mapping[PartitionSpec, PartitionSpec | None]
) -> PyTree:
  """Return axis resources with raw specs replaced by `replacements`; see `override_partition_specs`."""
  if type(resources) in (tuple, list):
    return type(resources)(_replaced(resource, replacements) for resource in resources)
  return _replaced(resources, replacements)


def _replaced(
  resource: PyTree, replacements: Mapping[PartitionSpec, PartitionSpec | None]
) -> PyTree:
  if isinstance(resource, PartitionSpec):
    return replacements.get(resource, resource)
  return resource
