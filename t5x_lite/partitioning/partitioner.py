"""Partitioners: own the mesh and compile functions that run on all of its devices.

A partitioner gives the mesh (`mesh`), the rows that each process loads (`get_data_layout`) and the sharding of every
array of a train state (`get_mesh_axes`); `partition` compiles a function with these shardings. All other code
(optimizer, trainer, checkpoints) sees only PartitionSpecs.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import logging
import math
from typing import Any

import flax.linen as nn
import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from jax.sharding import Sharding
import numpy as np

from t5x_lite import checks
from t5x_lite import multihost
from t5x_lite import tree_utils
from t5x_lite.partitioning import explain as explain_lib
from t5x_lite.partitioning import layout
from t5x_lite.partitioning import mesh as mesh_lib
from t5x_lite.partitioning import nan_search
from t5x_lite.partitioning import rules as rules_lib
from t5x_lite.types import ChoosesMesh, LogicalAxisRules, PyTree

_logger = logging.getLogger(__name__)

# Default of `PjitPartitioner.max_replicated_size`: 256 KiB in float32.
MAX_REPLICATED_SIZE = 2**16


class PjittedFnWithContext:
  """Jitted function that runs and lowers with a mesh and logical axis rules in context.

  The rules resolve Flax's logical sharding constraints in the traced code, which would be ignored silently without a
  mesh set by `jax.set_mesh`. Calls may nest.
  """

  def __init__(
    self,
    pjitted_fn: Callable[..., Any],
    partition_mesh: Mesh,
    logical_axis_rules: Sequence[tuple[str, rules_lib.MeshAxis]] = (),
  ):
    """Wrap a function.

    Args:
      pjitted_fn: result of `jax.jit`.
      partition_mesh: the mesh to set.
      logical_axis_rules: the rules to set.
    """
    self._pjitted_fn = pjitted_fn
    self._mesh = partition_mesh
    self._abstract_mesh = partition_mesh.abstract_mesh
    self._logical_axis_rules = tuple(logical_axis_rules)

  def __call__(self, *args, **kwargs):
    with self._context():
      return self._pjitted_fn(*args, **kwargs)

  def lower(self, *args, **kwargs):
    """Return the lowered function for these arguments (arrays or `jax.ShapeDtypeStruct`s); see `jax.jit`."""
    with self._context():
      if nan_search.searches_nan():
        lowered: Any = nan_search.SearchedLowered(self._pjitted_fn.trace(*args, **kwargs))
        return lowered
      return self._pjitted_fn.lower(*args, **kwargs)

  def trace(self, *args, **kwargs):
    """Return the traced function for these arguments (arrays or `jax.ShapeDtypeStruct`s); see `jax.jit`."""
    with self._context():
      return self._pjitted_fn.trace(*args, **kwargs)

  @contextlib.contextmanager
  def _context(self) -> Iterator[None]:
    """Set the mesh and the logical axis rules that the traced code sees."""
    with nn.logical_axis_rules(self._logical_axis_rules), self._mesh_context():
      yield

  def _mesh_context(self) -> contextlib.AbstractContextManager[Any]:
    # If this is traced as part of another function, the mesh is already set and `jax.set_mesh` is not allowed.
    if jax.sharding.get_abstract_mesh() == self._abstract_mesh:
      return contextlib.nullcontext()
    return jax.set_mesh(self._mesh)


def _uses_shardy() -> bool:
  """Return the value of JAX's option, which its `Config` gets at run time."""
  config: Any = jax.config
  return bool(config.jax_use_shardy_partitioner)


class BasePartitioner(ChoosesMesh):
  """Interface of all partitioners, with the methods that depend only on the mesh.

  Attributes:
    params_on_devices: True to keep parameters in device memory; may be set.
  """

  params_on_devices: bool = True

  def __init__(
    self,
    num_partitions: int | None = None,
    model_parallel_submesh: mesh_lib.HardwareMesh | None = None,
    params_on_devices: bool = True,
    backend: str | None = None,
    ici_mesh_shape: Sequence[int] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    *,
    mesh: Mesh | None = None,
    data_axes: str | Sequence[str] | None = None,
  ):
    """Configure the mesh, in one of four ways. The devices are read when the mesh is first used.

    Args:
      num_partitions: size of the model axis; the layout depends on the devices. Next to a submesh, 1 or the size of the
        submesh has no effect.
      model_parallel_submesh: (x, y, z, core) extents of the hardware tile that is the model axis, or (processes, local
        devices) for devices without coordinates.
      params_on_devices: True to keep parameters in device memory. False keeps them as NumPy arrays in host memory
        until `move_params_to_devices`.
      backend: platform whose devices to use; None for JAX's default.
      ici_mesh_shape: (replica, data, model) extents within a slice, for a mesh over several slices.
      dcn_mesh_shape: (replica, data, model) extents over slices; given if and only if `ici_mesh_shape` is.
      mesh: the mesh itself, instead of the arguments above.
      data_axes: mesh axis or axes that a batch is sharded over, the first varying slowest. By default `data`, or
        (`replica`, `data`) for a mesh over several slices.

    Raises:
      ConfigError: none or several ways are given, or the arguments contradict each other.
    """
    hybrid_shape = dcn_mesh_shape
    if hybrid_shape is None:
      hybrid_shape = ici_mesh_shape
    ways = {
      'num_partitions': num_partitions,
      'model_parallel_submesh': model_parallel_submesh,
      'ici_mesh_shape with dcn_mesh_shape': hybrid_shape,
      'mesh': mesh,
    }
    chosen = [name for name, value in ways.items() if value is not None]
    expected = checks.number(at_least=1, integer=True)
    if num_partitions is not None and (ici_mesh_shape, model_parallel_submesh) != (None, None):
      # T5X's configurations give `num_partitions` next to the other extents, and its run files set 1.
      chosen.remove('num_partitions')
      if ici_mesh_shape is not None:
        size = ici_mesh_shape[-1] * (dcn_mesh_shape or (1,))[-1]
        expected = checks.one_of(
          (size,),
          f'It is the size of the model axis of ici_mesh_shape={ici_mesh_shape} and '
          f'dcn_mesh_shape={dcn_mesh_shape}.',
        )
      elif model_parallel_submesh is not None:
        expected = checks.one_of(
          (1, math.prod(model_parallel_submesh)),
          f'model_parallel_submesh={model_parallel_submesh} sets the size of the model axis.',
        )
    checks.check(
      'BasePartitioner', {'num_partitions': num_partitions}, num_partitions=expected.or_none()
    )
    if ici_mesh_shape is None and model_parallel_submesh is not None:
      num_partitions = None
    if (
      len(chosen) != 1
      or (ici_mesh_shape is None) != (dcn_mesh_shape is None)
      or (mesh is not None and backend is not None)
    ):
      given = {
        'num_partitions': num_partitions,
        'model_parallel_submesh': model_parallel_submesh,
        'ici_mesh_shape': ici_mesh_shape,
        'dcn_mesh_shape': dcn_mesh_shape,
        'mesh': mesh,
        'backend': backend,
      }
      raise checks.about(
        'BasePartitioner',
        {name: value for name, value in given.items() if value is not None},
        f'A partitioner must get exactly one of {", ".join(ways)} (without backend), got {ways} and '
        f'backend={backend!r}',
        'Use num_partitions=1 for data parallelism alone.',
      )
    if data_axes is None:
      if ici_mesh_shape is None:
        data_axes = 'data'
      else:
        data_axes = ('replica', 'data')
    self._num_partitions = num_partitions
    self._model_parallel_submesh = model_parallel_submesh
    self._ici_mesh_shape = ici_mesh_shape
    self._dcn_mesh_shape = dcn_mesh_shape
    self._backend = backend
    self._given_mesh = mesh
    if isinstance(data_axes, str):
      self._data_axes = data_axes
    else:
      self._data_axes = tuple(data_axes)
    self.params_on_devices = params_on_devices

  @classmethod
  def automatic_mesh(cls, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for a mesh with all devices along the data axis, which every number of devices has.

    Args:
      configured: the configured arguments by name.
    """
    others = ('model_parallel_submesh', 'ici_mesh_shape', 'dcn_mesh_shape', 'mesh', 'data_axes')
    return {'num_partitions': 1, **{name: None for name in others if name in configured}}

  @property
  def use_shardy_partitioner(self) -> bool:
    """True if JAX propagates shardings with Shardy."""
    return _uses_shardy()

  @property
  @abc.abstractmethod
  def mesh(self) -> Mesh:
    """The mesh of all devices."""

  @property
  def data_partition_spec(self) -> PartitionSpec:
    """Sharding of the arrays of a batch."""
    return PartitionSpec(self._data_axes)

  @property
  def data_mesh_size(self) -> int:
    """Number of devices along the data axes."""
    return rules_lib.num_shards(layout.batch_axes(self.data_partition_spec), self.mesh.shape)

  @property
  def data_shards(self) -> int:
    """Number of pieces in which processes load a batch."""
    return layout.shard_of_process(self.mesh, self.data_partition_spec, jax.process_index())[1]

  @property
  def data_shard_id(self) -> int:
    """Index of the piece that this process loads."""
    return layout.shard_of_process(self.mesh, self.data_partition_spec, jax.process_index())[0]

  @functools.cached_property
  def _local_chunker(self) -> layout.LocalChunker:
    return layout.LocalChunker(self.mesh)

  def get_data_layout(
    self, batch_size: int | None = None, host_index: int | None = None
  ) -> layout.DataLayout:
    """Return the piece of each batch that a process loads.

    Args:
      batch_size: rows of the global batch; by default one per device along the data axes.
      host_index: the process; by default the current one.

    Raises:
      ConfigError: the batch size is not divisible by the number of devices along the data axes, or two processes share
        only some positions along these axes.
    """
    if host_index is None:
      process_index = jax.process_index()
    else:
      process_index = host_index
    return layout.make_data_layout(self.mesh, self.data_partition_spec, process_index, batch_size)

  def get_rows(self, batch_size: int, host_index: int | None = None) -> np.ndarray:
    """Return the rows of a global batch that the devices of a process hold; see `layout.rows_of_process`."""
    if host_index is None:
      process_index = jax.process_index()
    else:
      process_index = host_index
    return layout.rows_of_process(self.mesh, self.data_partition_spec, process_index, batch_size)

  def get_local_chunk_info(
    self, global_shape: Sequence[int], mesh_axes: Sequence[rules_lib.MeshAxis]
  ) -> layout.LocalChunkInfo:
    """Return the piece of a global array that this process holds; see `LocalChunker.get_local_chunk_info`.

    Raises:
      ConfigError: the devices of the process are not a block of the mesh, or see there.
    """
    return self._local_chunker.get_local_chunk_info(global_shape, mesh_axes)

  def move_params_to_devices(self, train_state: PyTree, train_state_axes: PyTree) -> PyTree:
    """Return `train_state` (NumPy or device arrays; donated) sharded over the mesh as in `train_state_axes`."""
    shardings = self.get_shardings(train_state_axes)
    return jax.device_put(train_state, shardings, donate=True)

  def get_logical_axes(self, train_state: PyTree) -> PyTree:
    """Return the logical axes of a train state; by default empty specs in the state's structure."""
    return jax.tree.map(lambda _: PartitionSpec(), train_state)

  @abc.abstractmethod
  def get_mesh_axes(self, train_state: PyTree) -> PyTree:
    """Return a PartitionSpec of mesh axes for every array of `train_state`, in its structure."""

  def get_shardings(self, axis_resources: PyTree) -> PyTree:
    """Return the shardings on this mesh for a pytree of PartitionSpecs; None means replicated.

    Args:
      axis_resources: pytree whose leaves are PartitionSpecs, None, or shardings (returned unchanged).

    Raises:
      ConfigError: a leaf of another type.
      ValueError: a leaf names an axis that the mesh does not have.
    """
    return tree_utils.map_with_names(self._sharding, axis_resources, is_leaf=_is_axis_resource)

  def _sharding(self, name: str, resource: Any) -> Sharding:
    if isinstance(resource, Sharding):
      return resource
    spec = resource
    if spec is None:
      spec = PartitionSpec()
    if not isinstance(spec, PartitionSpec):
      raise checks.invalid(
        '', name or 'axis_resources', 'a PartitionSpec, a pytree of these, or None', spec
      )
    return NamedSharding(self.mesh, spec)

  @abc.abstractmethod
  def partition(
    self,
    fn: Callable[..., Any],
    in_axis_resources: PyTree,
    out_axis_resources: PyTree,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
  ) -> Callable[..., Any]:
    """Return `fn`, jitted over the mesh with the given shardings."""

  @abc.abstractmethod
  def compile(self, partitioned_fn: Callable[..., Any], *args) -> Callable[..., Any]:
    """Return the executable of a partitioned function for these arguments."""


class BasePjitPartitioner(BasePartitioner):
  """Partitioner that compiles with `jax.jit`; subclasses define the sharding of a train state."""

  @property
  def logical_axis_rules(self) -> LogicalAxisRules:
    """Rules in order of precedence; empty by default, so that logical constraints in traced code have no effect."""
    return ()

  def make_mesh(self) -> Mesh:
    """Return the mesh that the constructor's arguments define; subclasses with other axes override this."""
    if self._given_mesh is not None:
      return self._given_mesh
    return mesh_lib.default_mesh(
      self._num_partitions or 1,
      self._model_parallel_submesh,
      self._backend,
      self._ici_mesh_shape,
      self._dcn_mesh_shape,
    )

  @functools.cached_property
  def mesh(self) -> Mesh:
    """The mesh of all devices, made at first use."""
    mesh = self.make_mesh()
    rules_lib.check_mesh_axes('data_axes', self.data_partition_spec, mesh.axis_names)
    rules_lib.check_rules(self.logical_axis_rules, mesh.axis_names)
    return mesh

  def partition(
    self,
    fn: Callable[..., Any],
    in_axis_resources: PyTree,
    out_axis_resources: PyTree,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
  ) -> PjittedFnWithContext:
    """Return `fn`, jitted over the mesh with the given shardings and this partitioner's rules.

    Args:
      fn: a pure function of positional arguments.
      in_axis_resources: PartitionSpecs for the non-static arguments: a tuple with one pytree, or pytree prefix, per
        argument, or one PartitionSpec for all. None anywhere means replicated.
      out_axis_resources: the same for the outputs.
      static_argnums: positions of arguments that are compile-time constants.
      donate_argnums: positions of arguments whose buffers the call may overwrite.

    Returns:
      A callable with a method `lower(*args)`, which runs on the entire mesh.
    """

    if nan_search.searches_nan():  # The search needs the arguments after the call.
      donate_argnums = ()

    # jit caches traces by function, not by rules or partitioner, so each partitioner needs its own function.
    @functools.wraps(fn)
    def fn_of_this_partitioner(*args, **kwargs):
      return fn(*args, **kwargs)

    jitted = jax.jit(
      fn_of_this_partitioner,
      in_shardings=self.get_shardings(in_axis_resources),
      out_shardings=self.get_shardings(out_axis_resources),
      static_argnums=static_argnums,
      donate_argnums=donate_argnums,
    )
    return PjittedFnWithContext(jitted, self.mesh, self.logical_axis_rules)

  def compile(self, partitioned_fn: PjittedFnWithContext, *args) -> jax.stages.Compiled:
    """Return the executable of a partitioned function for arguments of these shapes (arrays or ShapeDtypeStructs)."""
    return partitioned_fn.lower(*args).compile()


class PjitPartitioner(BasePjitPartitioner):
  """Default partitioner: rules map logical axis names to mesh axes."""

  def __init__(
    self,
    num_partitions: int | None = None,
    model_parallel_submesh: mesh_lib.HardwareMesh | None = None,
    params_on_devices: bool = True,
    backend: str | None = None,
    ici_mesh_shape: Sequence[int] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    logical_axis_rules: Sequence[tuple[str, rules_lib.MeshAxis]] | None = None,
    *,
    mesh: Mesh | None = None,
    data_axes: str | Sequence[str] | None = None,
    max_replicated_size: int = MAX_REPLICATED_SIZE,
  ):
    """Configure mesh and rules.

    Args:
      num_partitions: size of the model axis; the remaining devices form the data axis.
      model_parallel_submesh: (x, y, z, core) extents of the hardware tile that is the model axis.
      params_on_devices: False keeps new or restored parameters in host memory until the train state is complete.
      backend: platform to take devices from; None is JAX's default.
      ici_mesh_shape: (replica, data, model) extents of the mesh within a slice; requires `dcn_mesh_shape`.
      dcn_mesh_shape: (replica, data, model) extents of the mesh over slices; requires `ici_mesh_shape`.
      logical_axis_rules: (logical axis, mesh axis) pairs in order of precedence, `standard_logical_axis_rules()` by
        default. For a mesh over several slices, `batch` -> `data` is read as `batch` -> (`replica`, `data`).
      mesh: the mesh itself, instead of the arguments above.
      data_axes: mesh axis or axes that a batch is sharded over.
      max_replicated_size: number of elements up to which a parameter is replicated along a dim that none of its rules
        divides, with a warning, such as norms and relative position tables. Larger ones raise. 0: all raise.

    Raises:
      ConfigError: see `BasePartitioner`; or an invalid rule or size.
    """
    checks.check(
      'PjitPartitioner', locals(), max_replicated_size=checks.number(at_least=0, integer=True)
    )
    super().__init__(
      num_partitions,
      model_parallel_submesh,
      params_on_devices,
      backend,
      ici_mesh_shape,
      dcn_mesh_shape,
      mesh=mesh,
      data_axes=data_axes,
    )
    if logical_axis_rules is None:
      rules = rules_lib.standard_logical_axis_rules()
    else:
      rules = logical_axis_rules
    frozen = []
    for name, axis in rules_lib.freeze_rules(rules):
      if ici_mesh_shape is not None and (name, axis) == ('batch', 'data'):
        axis = ('replica', 'data')
      frozen.append((name, axis))
    self._logical_axis_rules = tuple(frozen)
    self._max_replicated_size = max_replicated_size
    self._use_shardy_partitioner = _uses_shardy()
    self._shown_warnings: set[str] = set()

  @property
  def use_shardy_partitioner(self) -> bool:
    """True if JAX propagated shardings with Shardy when this partitioner was made."""
    return self._use_shardy_partitioner

  @property
  def logical_axis_rules(self) -> LogicalAxisRules:
    """Rules in order of precedence."""
    return self._logical_axis_rules

  def partition(
    self,
    fn: Callable[..., Any],
    in_axis_resources: PyTree,
    out_axis_resources: PyTree,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
  ) -> PjittedFnWithContext:
    """Return `fn`, jitted over the mesh; see `BasePjitPartitioner.partition`.

    Raises:
      ConfigError: `jax_use_shardy_partitioner` has changed since this partitioner was made.
    """
    if _uses_shardy() != self._use_shardy_partitioner:
      raise checks.invalid(
        '',
        'jax_use_shardy_partitioner',
        f'{self._use_shardy_partitioner}, as when the partitioner was made',
        not self._use_shardy_partitioner,
        'Set it before making the partitioner.',
      )
    return super().partition(
      fn, in_axis_resources, out_axis_resources, static_argnums, donate_argnums
    )

  def get_logical_axes(self, train_state: PyTree) -> PyTree:
    """Return the logical axes of every array of `train_state`; see its `as_logical_axes`."""
    return train_state.as_logical_axes()

  def get_mesh_axes(self, train_state: PyTree) -> PyTree:
    """Return a PartitionSpec of mesh axes for every array of `train_state`, in its structure.

    Args:
      train_state: a train or inference state of arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ConfigError: a logical axis without a rule, a dim of a parameter above `max_replicated_size` that is not
        divisible by its mesh axes, or logical axes of another structure than the state's; the message names the array.
    """
    rows = self.explain(train_state).rows
    return jax.tree.structure(train_state).unflatten([row.mesh_axes for row in rows])

  def explain(self, train_state: PyTree) -> explain_lib.ShardingReport:
    """Return the report on the sharding of every array of `train_state` (arrays or shapes).

    Log one warning, in the lead process, about parameters that the mesh axes of a rule do not divide.
    """
    report = explain_lib.make_report(
      train_state,
      self.get_logical_axes(train_state),
      self.logical_axis_rules,
      self.mesh,
      self.data_partition_spec,
      self._max_replicated_size,
    )
    text = report.indivisible_to_text()
    if text and text not in self._shown_warnings and multihost.is_lead():
      _logger.warning(
        '%d parameter(s) have a dim that is not a multiple of its mesh axes in %s. The next rule for the dim '
        'applies, or the dim is replicated, also in the optimizer state:\n%s',
        report.num_indivisible,
        dict(self.mesh.shape),
        text,
      )
    self._shown_warnings.add(text)
    return report


def _is_axis_resource(node: Any) -> bool:
  return node is None or isinstance(node, (PartitionSpec, Sharding))


def host_local_array_to_global_array(arr_tree: PyTree, mesh: Mesh, pspecs: PyTree) -> PyTree:
  """Return global arrays made of the pieces of each process.

  Args:
    arr_tree: pytree of this process's pieces, NumPy or device arrays.
    mesh: the mesh of all devices.
    pspecs: PartitionSpecs of the global arrays, a pytree or prefix; None means replicated.
  """

  def given_or_replicated(spec):
    if spec is None:
      return PartitionSpec()
    return spec

  specs = jax.tree.map(given_or_replicated, pspecs, is_leaf=_is_axis_resource)
  return multihost_utils.host_local_array_to_global_array(arr_tree, mesh, specs)
