"""Partitioner of Mixtures of Experts, which shards experts and their optimizer state over devices.

It has two forms. `num_experts` is T5X's older form: experts are sharded over the data axis of a dense mesh.
With fewer experts than devices and no model parallelism each expert has copies, and the batch is sharded over experts
and copies. `num_expert_partitions` is the newer form: experts have a separate axis, of any size that divides their
number.

For several slices both forms have a further axis, `replica`, if the extents of the mesh within and over slices are
given: the model has a copy per slice, and experts are within a slice.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import logging
import math
from typing import Any, ClassVar

from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from moe import mesh as moe_mesh_lib
from moe import rules as moe_rules_lib
from moe import state_axes
from t5x_lite import checks
from t5x_lite import partitioning
from t5x_lite.errors import ConfigError
from t5x_lite.partitioning import mesh as mesh_lib
from t5x_lite.partitioning import partitioner as partitioner_lib
from t5x_lite.partitioning import rules as rules_lib
from t5x_lite.train_state import FlaxOptimTrainState
from t5x_lite.types import LogicalAxisRules, PyTree

_logger = logging.getLogger(__name__)

# Value of `num_expert_partitions` for an automatic size, and its upper bound, the number of devices with fast links.
AUTO = 'auto'
_AUTO_AT_MOST = 8


class MoePjitPartitioner(partitioning.PjitPartitioner):
  """`PjitPartitioner` for models with experts, in one of two forms.

  | | mesh | batch over | experts over |
  |---|---|---|---|
  | `num_experts` | (`data`, `model`) | `data` | `data` |
  | the same, fewer experts than devices, no model parallelism | (`data`: experts, `model`: copies) | both | `data` |
  | `num_expert_partitions` | (`data`, `expert`, `model`) | (`expert`, `data`) | `expert` |

  With `ici_mesh_shape` and `dcn_mesh_shape`, or with a `mesh` that has the axis, `replica` precedes the other axes of
  the mesh and of the batch.

  By default the rules are `standard_logical_axis_rules` for the first form and `head_logical_axis_rules` for the
  second. Devices are read when the mesh is first used.

  Attributes:
    INHERITS_BINDINGS: False, so that gin bindings of `PjitPartitioner` do not apply: they are rules and mesh of a model
      without experts. T5X's files for sparse models bind both classes.
  """

  INHERITS_BINDINGS: ClassVar[bool] = False

  def __init__(
    self,
    num_experts: int | None = None,
    num_partitions: int | None = None,
    model_parallel_submesh: partitioning.HardwareMesh | None = None,
    params_on_devices: bool = True,
    logical_axis_rules: Sequence[moe_rules_lib.Rule] | None = None,
    state_filter_fn: Callable[[str], bool] | None = None,
    *,
    num_expert_partitions: int | str | None = None,
    experts_per_layer: int | None = None,
    backend: str | None = None,
    ici_mesh_shape: Sequence[int] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    mesh: Mesh | None = None,
    max_replicated_size: int = partitioner_lib.MAX_REPLICATED_SIZE,
  ):
    """Configure mesh and rules.

    Args:
      num_experts: number of experts of a layer, for the first form: a multiple of the devices along the data axis, or,
        with `num_partitions=1`, a divisor of all devices. 0 for a model without experts.
      num_partitions: size of the model axis.
      model_parallel_submesh: hardware tile that is the model axis; set this or `num_partitions`, not both.
      params_on_devices: whether parameters live in device memory.
      logical_axis_rules: (logical axis, mesh axis) pairs in order of precedence; by default those above.
      state_filter_fn: function of the '/'-joined name within `param_states` (`explain_sharding --full` shows the names)
        that returns True for arrays of the optimizer state that need the axis `expert`, e.g.
        `moe.match_fn('.*expert.*/kernel/v_.*')`. None selects the arrays of experts' parameters whose axes the
        optimizer does not declare. The optimizers of `t5x_lite` need none.
      num_expert_partitions: maximal number of devices among which the experts of a layer are divided, for the second
        form. The largest divisor of the data axis up to this number is used; it must divide the number of experts.
        'auto': the largest number up to 8 that divides the data axis and `experts_per_layer`. With `mesh`, 'auto' or
        the size of its expert axis.
      experts_per_layer: number of experts of a layer, for the second form; the gin files of sparse models set it.
      backend: platform to take devices from; None is JAX's default.
      ici_mesh_shape: (replica, data, model) extents of the mesh within a slice; requires `dcn_mesh_shape`. The second
        form divides this data extent into `data` and `expert`, so experts are within a slice.
      dcn_mesh_shape: (replica, data, model) extents of the mesh over slices; requires `ici_mesh_shape`.
      mesh: the mesh itself, instead of the other arguments: with the axes (`data`, `model`) in the first form and
        (`data`, `expert`, `model`) in the second, and optionally `replica`.
      max_replicated_size: see `PjitPartitioner`.

    Raises:
      ConfigError: not exactly one of `num_experts` and `num_expert_partitions` is set, not exactly one of
        `num_partitions`, `model_parallel_submesh`, `ici_mesh_shape` with `dcn_mesh_shape`, and `mesh`, or a rule or an
        axis of `mesh` is invalid.
    """
    count = checks.number(at_least=1, integer=True)

    def is_num_partitions(value):
      if num_experts is not None:
        return value is None
      return value == AUTO or count.holds(value)

    if num_experts is None:
      layer_expectation = count.or_none()
    else:
      layer_expectation = checks.Expectation('None with num_experts', lambda value: value is None)
    checks.check(
      'MoePjitPartitioner',
      locals(),
      num_experts=checks.number(at_least=0, integer=True).or_none(),
      num_expert_partitions=checks.Expectation(
        f"None with num_experts, and otherwise {count.text} or '{AUTO}'",
        is_num_partitions,
        'Use num_experts for a (data, model) mesh, num_expert_partitions for a (data, expert, model) mesh.',
      ),
      experts_per_layer=layer_expectation,
      state_filter_fn=checks.Expectation(
        "a function from a name to True or False, such as moe.match_fn('.*expert.*/kernel/v_.*'),",
        callable,
      ).or_none(),
    )
    super().__init__(
      num_partitions,
      model_parallel_submesh,
      params_on_devices,
      backend,
      ici_mesh_shape,
      dcn_mesh_shape,
      logical_axis_rules,
      mesh=mesh,
      max_replicated_size=max_replicated_size,
    )
    self._num_experts = num_experts
    self._num_expert_partitions = num_expert_partitions
    self._experts_per_layer = experts_per_layer
    self._state_filter_fn = state_filter_fn
    self._has_default_rules = logical_axis_rules is None
    if mesh is not None:
      self._check_given_mesh(mesh)

  @classmethod
  def automatic_mesh(cls, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for a mesh without model parallelism; the second form chooses the size of the expert axis.

    Args:
      configured: the configured arguments by name.
    """
    arguments = super().automatic_mesh(configured)
    if configured.get('num_expert_partitions') is not None:
      arguments = arguments | {'num_expert_partitions': AUTO}
    return arguments

  @functools.cached_property
  def two_data_axes(self) -> bool:
    """True if `model` is a second data axis, along which experts have copies; only in the first form.

    False if the extents of the mesh are given: its axis `model` is then for model parallelism.
    """
    if self._num_experts is None or self._has_given_extents:
      return False
    return moe_rules_lib.uses_two_data_axes(
      self._num_experts, self._num_partitions, self._model_parallel_submesh, self._backend
    )

  @property
  def _has_given_extents(self) -> bool:
    return self._ici_mesh_shape is not None or self._given_mesh is not None

  @property
  def _has_replicas(self) -> bool:
    if self._given_mesh is not None:
      return moe_rules_lib.REPLICA_AXIS in self._given_mesh.axis_names
    return self._ici_mesh_shape is not None

  @property
  def data_partition_spec(self) -> PartitionSpec:
    """Sharding of the arrays of a batch."""
    if self._num_experts is None:
      spec = PartitionSpec(moe_rules_lib.HEAD_DATA_AXES)
    else:
      spec = moe_rules_lib.data_partition_spec(self.two_data_axes)
    if not self._has_replicas:
      return spec
    return PartitionSpec((moe_rules_lib.REPLICA_AXIS, *rules_lib.axes_of(spec[0])))

  @functools.cached_property
  def logical_axis_rules(self) -> LogicalAxisRules:
    """Rules in order of precedence.

    Raises:
      ConfigError: the rule of `batch` contradicts the form, as in the rules of the other form.
    """
    if not self._has_default_rules:
      rules = super().logical_axis_rules
    elif self._num_experts is None:
      rules = rules_lib.freeze_rules(moe_rules_lib.head_logical_axis_rules())
    else:
      standard = moe_rules_lib.standard_logical_axis_rules(
        self._num_experts, two_data_axes=self.two_data_axes
      )
      rules = rules_lib.freeze_rules(standard)
    if self._has_replicas:
      rules = moe_rules_lib.with_replica_axis(rules)
    expected = rules_lib.axes_of(self.data_partition_spec[0])
    batch_axes = [
      rules_lib.axes_of(mesh_axis) for logical_axis, mesh_axis in rules if logical_axis == 'batch'
    ]
    if batch_axes and batch_axes[0] != expected:
      raise checks.invalid(
        'MoePjitPartitioner',
        "logical_axis_rules['batch']",
        f'{expected} for {self._form}',
        batch_axes[0],
        f'Use {self._rules_function}.',
      )
    return rules

  def make_mesh(self) -> Mesh:
    """Return the mesh of the form.

    Raises:
      ConfigError: the numbers of experts, partitions and devices are not multiples of each other.
    """
    if self._num_experts is None:
      return self._given_mesh or self._mesh_with_expert_axis()
    if self.two_data_axes:
      mesh = self._two_data_axes_mesh(self._num_experts)
    else:
      mesh = super().make_mesh()
    mesh_axis = None
    for logical_axis, mesh_axis_of_rule in self.logical_axis_rules:
      if logical_axis == 'expert':
        mesh_axis = mesh_axis_of_rule
        break
    # A missing mesh axis raises in the check of all rules.
    mesh_shape = {**dict.fromkeys(rules_lib.axes_of(mesh_axis), 1), **mesh.shape}
    num_shards = rules_lib.num_shards(mesh_axis, mesh_shape)
    if self._num_experts % num_shards:
      if self._given_mesh is not None:
        remedy = 'Choose another size of the axis.'
      else:
        fitting = math.gcd(self._num_experts, num_shards)
        remedy = f'Alternatively, set num_expert_partitions={fitting} instead of num_experts.'
      raise checks.invalid(
        'MoePjitPartitioner',
        'num_experts',
        f'a multiple of {num_shards}, the devices along mesh axis {mesh_axis!r} of {dict(mesh.shape)}',
        self._num_experts,
        remedy,
      )
    return mesh

  def get_logical_axes(self, train_state: PyTree) -> PyTree:
    """Return the logical axes of every array, including `expert` for experts' optimizer state without declared axes.

    Args:
      train_state: train state, or inference state, which has no optimizer state.
    """
    logical_axes = super().get_logical_axes(train_state)
    if not isinstance(train_state, FlaxOptimTrainState):
      return logical_axes
    state_filter_fn = self._state_filter_fn or state_axes.infer_state_filter_fn(
      train_state, logical_axes
    )
    if state_filter_fn is None:
      return logical_axes
    return state_axes.prepend_expert_axis(train_state, logical_axes, state_filter_fn)

  def partition(
    self,
    fn: Callable[..., Any],
    in_axis_resources: PyTree,
    out_axis_resources: PyTree,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
  ) -> partitioning.PjittedFnWithContext:
    """Return `fn`, jitted over the mesh; see `PjitPartitioner.partition`.

    A raw `PartitionSpec('data')` means the data axes of the mesh, so that code for one data axis runs on any mesh. With
    two data axes a raw `PartitionSpec('model')` means replicated. Only a single spec, or specs directly in a tuple or
    list, are replaced.
    """
    replacements: dict[PartitionSpec, PartitionSpec | None] = {
      PartitionSpec('data'): self.data_partition_spec
    }
    if self.two_data_axes:
      replacements[PartitionSpec('model')] = None
    return super().partition(
      fn,
      moe_rules_lib.replace_raw_specs(in_axis_resources, replacements),
      moe_rules_lib.replace_raw_specs(out_axis_resources, replacements),
      static_argnums,
      donate_argnums,
    )

  def _mesh_with_expert_axis(self) -> Mesh:
    """Return the mesh of the second form."""
    make = functools.partial(
      moe_mesh_lib.default_moe_mesh,
      num_partitions=self._num_partitions,
      model_parallel_submesh=self._model_parallel_submesh,
      backend=self._backend,
      ici_mesh_shape=self._ici_mesh_shape,
      dcn_mesh_shape=self._dcn_mesh_shape,
    )
    if isinstance(self._num_expert_partitions, int):
      at_most = self._num_expert_partitions
    else:
      at_most = _AUTO_AT_MOST
    num_experts = self._experts_per_layer
    mesh = make(num_expert_partitions=at_most)
    size = mesh.shape['expert']
    if self._ici_mesh_shape is None:
      num_data = mesh.shape['data'] * size
    else:
      num_data = self._ici_mesh_shape[1]
    if self._num_expert_partitions == AUTO:
      # Exchanges of tokens use the fast links of a slice.
      within_slice = num_data
      if self._ici_mesh_shape is None:
        devices_of_slice = mesh.size // mesh_lib.num_slices(mesh)
        within_slice = math.gcd(num_data, devices_of_slice // mesh.shape['model'])
      divided = math.gcd(num_experts or within_slice, within_slice)
      fitting = moe_mesh_lib.largest_divisor(divided, _AUTO_AT_MOST)
      if fitting == size:
        return mesh
      _logger.info(
        'Expert axis of %d devices: the largest number up to %d that divides the %s experts of a layer and '
        'the data axis of %d in a slice.',
        fitting,
        size,
        num_experts,
        within_slice,
      )
      return make(num_expert_partitions=fitting)
    if num_experts is None or num_experts % size == 0:
      return mesh
    fitting = moe_mesh_lib.largest_divisor(math.gcd(num_experts, num_data), size)
    raise checks.invalid(
      'MoePjitPartitioner',
      'num_expert_partitions',
      'a number that makes the size of the expert axis, now '
      f'{size} of {num_data} devices, a divisor of the {num_experts} experts of a layer',
      self._num_expert_partitions,
      f"Use num_expert_partitions={fitting} or '{AUTO}'.",
    )

  def _two_data_axes_mesh(self, num_experts: int) -> Mesh:
    """Return the mesh with the experts along `data` and their copies along `model`."""
    num_devices = len(mesh_lib.devices_of(self._backend))
    if num_devices % num_experts:
      fitting = math.gcd(num_experts, num_devices)
      raise checks.invalid(
        'MoePjitPartitioner',
        'num_experts',
        f'a divisor or multiple of {num_devices} devices',
        num_experts,
        f'Alternatively, set num_expert_partitions={fitting} instead of num_experts.',
      )
    num_copies = num_devices // num_experts
    try:
      return mesh_lib.default_mesh(num_copies, backend=self._backend)
    except ConfigError as error:
      raise ConfigError(
        f'num_experts={num_experts} on {num_devices} devices needs {num_copies} devices '
        f'for the copies of each expert, but there is no mesh for them: {error} Set '
        f'num_expert_partitions={num_experts} instead of num_experts.'
      ) from error

  def _check_given_mesh(self, mesh: Mesh) -> None:
    """Raise ConfigError if the axes of `mesh` contradict the form, its number of partitions or of experts."""
    if self._num_experts is not None:
      names = ('data', 'model')
    else:
      names = moe_mesh_lib.AXIS_NAMES
    if {*mesh.axis_names} - {moe_rules_lib.REPLICA_AXIS} != {*names}:
      raise checks.invalid(
        'MoePjitPartitioner',
        'mesh',
        f'a mesh with the axes {names}, and optionally {moe_rules_lib.REPLICA_AXIS!r}',
        mesh.axis_names,
        'Axes of size 1 have no effect.',
      )
    if self._num_experts is not None:
      return
    size = mesh.shape['expert']
    expected = checks.Expectation(
      f'a multiple of {size}, the size of the expert axis of mesh,',
      lambda value: value % size == 0,
      'Choose another size of the axis.',
    )
    checks.check(
      'MoePjitPartitioner',
      {
        'num_expert_partitions': self._num_expert_partitions,
        'experts_per_layer': self._experts_per_layer,
      },
      num_expert_partitions=checks.one_of(
        (size, AUTO), f'The expert axis of mesh has the size {size}.'
      ),
      experts_per_layer=expected.or_none(),
    )

  @property
  def _form(self) -> str:
    if self._num_experts is None:
      return f'num_expert_partitions={self._num_expert_partitions}'
    if self.two_data_axes:
      axes = 'two data axes'
    else:
      axes = 'one data axis'
    num_devices = len(mesh_lib.devices_of(self._backend))
    return f'num_experts={self._num_experts} on {num_devices} devices ({axes})'

  @property
  def _rules_function(self) -> str:
    if self._num_experts is None:
      return 'moe.head_logical_axis_rules'
    if self._has_given_extents:
      return (
        f'moe.standard_logical_axis_rules(num_experts={self._num_experts}, two_data_axes=False)'
      )
    return (
      f'moe.standard_logical_axis_rules(num_experts={self._num_experts}, num_partitions={self._num_partitions}, '
      f'model_parallel_submesh={self._model_parallel_submesh})'
    )
