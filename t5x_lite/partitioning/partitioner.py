"""Partitioners: the one place that knows the mesh, and turns a function into one that runs on all of it.

A partitioner answers three questions. Where do the devices sit (`mesh`)? What does each process load
(`get_data_layout`)? How is every array of a train state sharded (`get_mesh_axes`)? `partition` then compiles a
function with those shardings. All else (optimizer, trainer, checkpoints) sees only PartitionSpecs.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
from typing import Any

from flax.linen import partitioning as flax_partitioning
import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
import numpy as np

from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.partitioning import explain as explain_lib
from t5x_lite.partitioning import layout
from t5x_lite.partitioning import mesh as mesh_lib
from t5x_lite.partitioning import rules as rules_lib
from t5x_lite.partitioning.chunks import LocalChunker, LocalChunkInfo
from t5x_lite.types import LogicalAxisRules, PyTree


class PjittedFnWithContext:
  """A jitted function that runs and lowers with a mesh and logical axis rules in context.

  The rules decide what Flax's logical sharding constraints in the traced code mean; without a mesh set by
  `jax.set_mesh` those constraints would vanish without a word. Calls may nest.
  """

  def __init__(self, pjitted_fn: Callable[..., Any], partition_mesh: Mesh,
               logical_axis_rules: Sequence[tuple[str, rules_lib.MeshAxis]] = ()):
    """Wraps a function.

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
    """Returns the lowered function for these arguments (arrays or `jax.ShapeDtypeStruct`s); see `jax.jit`."""
    with self._context():
      return self._pjitted_fn.lower(*args, **kwargs)

  def trace(self, *args, **kwargs):
    """Returns the traced function for these arguments (arrays or `jax.ShapeDtypeStruct`s); see `jax.jit`."""
    with self._context():
      return self._pjitted_fn.trace(*args, **kwargs)

  @contextlib.contextmanager
  def _context(self) -> Iterator[None]:
    """Sets the mesh and the logical axis rules that the traced code sees."""
    # Where this is traced, as part of another function, the mesh is set already, and `jax.set_mesh` may not be called.
    is_set = jax.sharding.get_abstract_mesh() == self._abstract_mesh
    with flax_partitioning.axis_rules(self._logical_axis_rules):
      with contextlib.nullcontext() if is_set else jax.set_mesh(self._mesh):
        yield


class BasePartitioner(metaclass=abc.ABCMeta):
  """Interface of all partitioners, with what follows from a mesh alone."""

  def __init__(self,
               num_partitions: int | None = None,
               model_parallel_submesh: mesh_lib.HardwareMesh | None = None,
               params_on_devices: bool = True,
               backend: str | None = None,
               ici_mesh_shape: mesh_lib.HardwareMesh | None = None,
               dcn_mesh_shape: mesh_lib.HardwareMesh | None = None,
               *,
               mesh: Mesh | None = None,
               data_axes: str | Sequence[str] | None = None):
    """Configures the mesh, in one of four ways. Devices are looked at only when the mesh is first used.

    Args:
      num_partitions: size of the model axis; the layout is chosen for the devices at hand.
      model_parallel_submesh: (x, y, z, core) extents of the hardware tile that is the model axis, or (processes, local
        devices) for devices without coordinates.
      params_on_devices: whether parameters live in device memory. False keeps them as NumPy arrays in host memory
        until `move_params_to_devices`.
      backend: platform to take devices from, JAX's default if None.
      ici_mesh_shape: (replica, data, model) extents within a slice, for a mesh over several slices.
      dcn_mesh_shape: (replica, data, model) extents over slices; both or none of the two.
      mesh: the mesh itself, instead of the arguments above.
      data_axes: mesh axis or axes that a batch is sharded over, the first varying slowest. By default `data`, or
        (`replica`, `data`) for a mesh over several slices.

    Raises:
      ConfigError: not exactly one way was chosen, or the choices contradict each other.
    """
    if (ici_mesh_shape is None) != (dcn_mesh_shape is None):
      raise errors.ConfigError(
          f'ici_mesh_shape={ici_mesh_shape} and dcn_mesh_shape={dcn_mesh_shape}: expected both or none. For one slice '
          'give num_partitions alone.')
    ways = {'num_partitions': num_partitions, 'model_parallel_submesh': model_parallel_submesh,
            'ici_mesh_shape and dcn_mesh_shape': ici_mesh_shape, 'mesh': mesh}
    chosen = [name for name, value in ways.items() if value is not None]
    if not chosen:
      raise errors.ConfigError('No mesh was chosen; expected num_partitions or model_parallel_submesh. Use '
                               'num_partitions=1 for data parallelism alone.')
    if num_partitions is not None and (not isinstance(num_partitions, int) or num_partitions < 1):
      raise errors.ConfigError(f'num_partitions={num_partitions!r}; expected a positive number, or None with '
                               'model_parallel_submesh.')
    if ici_mesh_shape is not None and num_partitions is not None:
      # T5X configurations give the number of model partitions beside the two shapes: let it confirm them.
      size = ici_mesh_shape[-1] * dcn_mesh_shape[-1]
      if size != num_partitions:
        raise errors.ConfigError(
            f'num_partitions={num_partitions}, but ici_mesh_shape={tuple(ici_mesh_shape)} and dcn_mesh_shape='
            f'{tuple(dcn_mesh_shape)} make a model axis of {size}. Set num_partitions to {size} or None.')
      chosen.remove('num_partitions')
    if len(chosen) > 1:
      raise errors.ConfigError(f'{" and ".join(chosen)} are mutually exclusive; expected one of them. Set the others '
                               'to None.')
    if mesh is not None and backend is not None:
      raise errors.ConfigError(f'backend={backend!r} and mesh are mutually exclusive: a mesh brings its devices. Set '
                               'backend to None.')
    if data_axes is None:
      data_axes = 'data' if ici_mesh_shape is None else ('replica', 'data')
    self._num_partitions = num_partitions
    self._model_parallel_submesh = model_parallel_submesh
    self._ici_mesh_shape = ici_mesh_shape
    self._dcn_mesh_shape = dcn_mesh_shape
    self._backend = backend
    self._given_mesh = mesh
    self._data_axes = data_axes if isinstance(data_axes, str) else tuple(data_axes)
    self.params_on_devices = params_on_devices

  @property
  def use_shardy_partitioner(self) -> bool:
    """Whether JAX propagates shardings with Shardy."""
    return bool(jax.config.jax_use_shardy_partitioner)

  @property
  @abc.abstractmethod
  def mesh(self) -> Mesh:
    """The mesh of all devices."""

  @property
  def data_partition_spec(self) -> PartitionSpec:
    """How the arrays of a batch are sharded."""
    return PartitionSpec(self._data_axes)

  @property
  def data_mesh_size(self) -> int:
    """Number of devices along the data axes."""
    return rules_lib.num_shards(layout.batch_axes(self.data_partition_spec), self.mesh.shape)

  @property
  def data_shards(self) -> int:
    """Number of pieces that processes load a batch in."""
    return layout.shard_of_process(self.mesh, self.data_partition_spec, jax.process_index())[1]

  @property
  def data_shard_id(self) -> int:
    """Index of the piece that this process loads."""
    return layout.shard_of_process(self.mesh, self.data_partition_spec, jax.process_index())[0]

  @functools.cached_property
  def _local_chunker(self) -> LocalChunker:
    return LocalChunker(self.mesh)

  def get_data_layout(self, batch_size: int | None = None, host_index: int | None = None) -> layout.DataLayout:
    """Returns what a process loads of each batch.

    Args:
      batch_size: rows of the global batch; by default one per device along the data axes.
      host_index: the process, this one by default.

    Raises:
      ConfigError: the batch does not divide over the devices along the data axes, or processes have parts of each
        other's places along these axes.
    """
    process_index = jax.process_index() if host_index is None else host_index
    return layout.make_data_layout(self.mesh, self.data_partition_spec, process_index, batch_size)

  def get_rows(self, batch_size: int, host_index: int | None = None) -> np.ndarray:
    """Returns the rows of a global batch that the devices of a process hold; see `layout.rows_of_process`."""
    process_index = jax.process_index() if host_index is None else host_index
    return layout.rows_of_process(self.mesh, self.data_partition_spec, process_index, batch_size)

  def get_local_chunk_info(self, global_shape: Sequence[int],
                           mesh_axes: Sequence[rules_lib.MeshAxis]) -> LocalChunkInfo:
    """Returns the piece of a global array that this process holds; see `LocalChunker.get_local_chunk_info`.

    Raises:
      ConfigError: the process's devices are not a block of the mesh, or see there.
    """
    return self._local_chunker.get_local_chunk_info(global_shape, mesh_axes)

  def move_params_to_devices(self, train_state: PyTree, train_state_axes: PyTree) -> PyTree:
    """Returns `train_state` (NumPy or device arrays; consumed) sharded over the mesh as `train_state_axes` says."""
    shardings = self.get_shardings(train_state_axes)
    return jax.device_put(train_state, shardings, donate=True)

  def get_logical_axes(self, train_state: PyTree) -> PyTree:
    """Returns the logical axes of a train state; without a notion of them, empty specs of the same structure."""
    return jax.tree.map(lambda _: PartitionSpec(), train_state)

  @abc.abstractmethod
  def get_mesh_axes(self, train_state: PyTree) -> PyTree:
    """Returns a PartitionSpec of mesh axes for every array of `train_state`, in its structure."""

  def get_shardings(self, axis_resources: PyTree) -> PyTree:
    """Returns the shardings on this mesh for a pytree of PartitionSpecs; None, and no entry, mean replicated.

    Args:
      axis_resources: a pytree whose leaves are PartitionSpecs, None, or shardings (kept).

    Raises:
      ConfigError: a leaf is something else, or names an axis that the mesh lacks.
    """
    return tree_utils.map_with_names(self._sharding, axis_resources, is_leaf=_is_axis_resource)

  def _sharding(self, name: str, resource: Any) -> Sharding:
    if isinstance(resource, Sharding):
      return resource
    spec = PartitionSpec() if resource is None else resource
    if not isinstance(spec, PartitionSpec):
      raise errors.ConfigError(f'Axis resource {name or "given"} is {resource!r}; expected a PartitionSpec, a pytree '
                               'of them, or None (replicated).')
    for entry in spec:
      for axis in rules_lib.axes_of(entry):
        if axis not in self.mesh.shape:
          raise errors.ConfigError(f'Axis resource {name or "given"} is {spec}; the mesh has axes '
                                   f'{dict(self.mesh.shape)}.{errors.did_you_mean(str(axis), self.mesh.shape)}')
    return NamedSharding(self.mesh, spec)

  @abc.abstractmethod
  def partition(self,
                fn: Callable[..., Any],
                in_axis_resources: PyTree,
                out_axis_resources: PyTree,
                static_argnums: int | Sequence[int] = (),
                donate_argnums: int | Sequence[int] = ()) -> Callable[..., Any]:
    """Returns `fn`, jitted over the mesh with the given shardings."""

  @abc.abstractmethod
  def compile(self, partitioned_fn: Callable[..., Any], *args) -> Callable[..., Any]:
    """Returns the executable of a partitioned function for these arguments."""


class BasePjitPartitioner(BasePartitioner):
  """Compiles with `jax.jit`; subclasses say how a train state is sharded."""

  @property
  def logical_axis_rules(self) -> LogicalAxisRules:
    """The rules, in order of precedence; none, so that logical constraints in the traced code have no effect."""
    return ()

  def make_mesh(self) -> Mesh:
    """Returns the mesh that the constructor's arguments say; a subclass with other axes makes its own."""
    if self._given_mesh is not None:
      return self._given_mesh
    return mesh_lib.default_mesh(self._num_partitions or 1, self._model_parallel_submesh, self._backend,
                                 self._ici_mesh_shape, self._dcn_mesh_shape)

  @functools.cached_property
  def mesh(self) -> Mesh:
    """The mesh of all devices, made when first asked for."""
    mesh = self.make_mesh()
    for axis in layout.batch_axes(self.data_partition_spec):
      if axis not in mesh.shape:
        raise errors.ConfigError(f'The data axis {axis!r} is none of the mesh\'s {dict(mesh.shape)}. Change data_axes.'
                                 + errors.did_you_mean(str(axis), mesh.shape))
    rules_lib.check_rules(self.logical_axis_rules, mesh.axis_names)
    return mesh

  def partition(self,
                fn: Callable[..., Any],
                in_axis_resources: PyTree,
                out_axis_resources: PyTree,
                static_argnums: int | Sequence[int] = (),
                donate_argnums: int | Sequence[int] = ()) -> PjittedFnWithContext:
    """Returns `fn`, jitted over the mesh with the given shardings, for use within this partitioner's rules.

    Args:
      fn: a pure function of positional arguments.
      in_axis_resources: PartitionSpecs for the non-static arguments: a tuple with one pytree, or pytree prefix, per
        argument, or one PartitionSpec for all. None anywhere means replicated.
      out_axis_resources: the same for the outputs.
      static_argnums: positions of arguments that are compile-time constants.
      donate_argnums: positions of arguments whose buffers the call may overwrite.

    Returns:
      A callable with `.lower(*args)`, which works on the whole mesh.
    """
    # jit remembers traces by function, not by rules or partitioner: a function of our own keeps them apart.
    @functools.wraps(fn)
    def fn_of_this_partitioner(*args, **kwargs):
      return fn(*args, **kwargs)

    jitted = jax.jit(
        fn_of_this_partitioner,
        in_shardings=self.get_shardings(in_axis_resources),
        out_shardings=self.get_shardings(out_axis_resources),
        static_argnums=static_argnums,
        donate_argnums=donate_argnums)
    return PjittedFnWithContext(jitted, self.mesh, self.logical_axis_rules)

  def compile(self, partitioned_fn: PjittedFnWithContext, *args) -> jax.stages.Compiled:
    """Returns the executable of a partitioned function for arguments like these (arrays or ShapeDtypeStructs)."""
    return partitioned_fn.lower(*args).compile()


class PjitPartitioner(BasePjitPartitioner):
  """The partitioner to use: shardings follow from logical axis names by rules."""

  def __init__(self,
               num_partitions: int | None = None,
               model_parallel_submesh: mesh_lib.HardwareMesh | None = None,
               params_on_devices: bool = True,
               backend: str | None = None,
               ici_mesh_shape: mesh_lib.HardwareMesh | None = None,
               dcn_mesh_shape: mesh_lib.HardwareMesh | None = None,
               logical_axis_rules: Sequence[tuple[str, rules_lib.MeshAxis]] | None = None,
               *,
               mesh: Mesh | None = None,
               data_axes: str | Sequence[str] | None = None):
    """Configures mesh and rules.

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

    Raises:
      ConfigError: see `BasePartitioner`; or a malformed rule.
    """
    super().__init__(num_partitions, model_parallel_submesh, params_on_devices, backend, ici_mesh_shape,
                     dcn_mesh_shape, mesh=mesh, data_axes=data_axes)
    rules = rules_lib.standard_logical_axis_rules() if logical_axis_rules is None else logical_axis_rules
    if ici_mesh_shape is not None:
      rules = [(name, ('replica', 'data') if name == 'batch' and axis == 'data' else axis) for name, axis in rules]
    self._logical_axis_rules = rules_lib.freeze_rules(rules)
    self._use_shardy_partitioner = bool(jax.config.jax_use_shardy_partitioner)

  @property
  def use_shardy_partitioner(self) -> bool:
    """Whether JAX propagated shardings with Shardy when this partitioner was made."""
    return self._use_shardy_partitioner

  @property
  def logical_axis_rules(self) -> LogicalAxisRules:
    """The rules, in order of precedence."""
    return self._logical_axis_rules

  def partition(self,
                fn: Callable[..., Any],
                in_axis_resources: PyTree,
                out_axis_resources: PyTree,
                static_argnums: int | Sequence[int] = (),
                donate_argnums: int | Sequence[int] = ()) -> PjittedFnWithContext:
    """See `BasePjitPartitioner.partition`.

    Raises:
      ConfigError: `jax_use_shardy_partitioner` was changed since this partitioner was made.
    """
    if bool(jax.config.jax_use_shardy_partitioner) != self._use_shardy_partitioner:
      raise errors.ConfigError(
          f'jax_use_shardy_partitioner is {not self._use_shardy_partitioner} now; expected '
          f'{self._use_shardy_partitioner} as when the partitioner was made. Set it before making the partitioner.')
    return super().partition(fn, in_axis_resources, out_axis_resources, static_argnums, donate_argnums)

  def get_logical_axes(self, train_state: PyTree) -> PyTree:
    """Returns the logical axes of every array of `train_state`, as the state itself derives them."""
    return train_state.as_logical_axes()

  def get_mesh_axes(self, train_state: PyTree) -> PyTree:
    """Returns a PartitionSpec of mesh axes for every array of `train_state`, in its structure.

    Args:
      train_state: a train or inference state of arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ConfigError: a logical axis without a rule, an array whose dims do not divide by the mesh axes they get, or
        logical axes whose structure differs from the state's; each names the array.
    """
    placements = self.explain(train_state).rows
    return jax.tree.structure(train_state).unflatten([row.mesh_axes for row in placements])

  def explain(self, train_state: PyTree) -> explain_lib.ShardingReport:
    """Returns where every array of `train_state` (arrays or shapes) goes, what it costs and which rule decided."""
    return explain_lib.make_report(train_state, self.get_logical_axes(train_state), self.logical_axis_rules, self.mesh,
                                   self.data_partition_spec)


def _is_axis_resource(node: Any) -> bool:
  return node is None or isinstance(node, (PartitionSpec, Sharding))


def host_local_array_to_global_array(arr_tree: PyTree, mesh: Mesh, pspecs: PyTree) -> PyTree:
  """Returns global arrays made of the pieces that each process has.

  Args:
    arr_tree: pytree of this process's pieces.
    mesh: the mesh of all devices.
    pspecs: PartitionSpecs of the global arrays, a pytree or prefix; None means replicated.
  """
  specs = jax.tree.map(lambda spec: PartitionSpec() if spec is None else spec, pspecs, is_leaf=_is_axis_resource)
  return multihost_utils.host_local_array_to_global_array(arr_tree, mesh, specs)
