"""Items of a part: what is measured, and the programs that are lowered for CUDA on machines without a GPU."""

from collections.abc import Callable, Iterator, Mapping
import concurrent.futures
import dataclasses
import statistics
import time
from typing import Any

# Figures of a row of a table, by column.
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Item:
  """One measurement of a part.

  Attributes:
    name: name in the results.
    measure: function that yields rows as they are measured.
    programs: function that returns the programs of the item by name: functions without arguments that return a
      `jax.stages.Traced`. They are traced from shapes, so that they need no memory.
    limit: seconds after which the item is ended.
  """

  name: str
  measure: Callable[[], Iterator[Row]]
  programs: Callable[[], Mapping[str, Callable[[], Any]]]
  limit: float = 120.0


def seconds_per_call(fn: Callable[[], Any], seconds: float = 0.2, turns: int = 3) -> float:
  """Return the median seconds of a call over turns of calls that are dispatched without waiting.

  Args:
    fn: function that returns arrays; it must have run once.
    seconds: approximate length of a turn.
    turns: number of turns.
  """
  import jax

  start = time.perf_counter()
  jax.block_until_ready(fn())
  calls = max(1, min(100, int(seconds / max(time.perf_counter() - start, 1e-5))))
  found = []
  for _ in range(turns):
    start = time.perf_counter()
    for _ in range(calls):
      result = fn()
    jax.block_until_ready(result)
    found.append((time.perf_counter() - start) / calls)
  return statistics.median(found)


def matmul_tflops(dtype: str, size: int) -> float:
  """Return the TFLOP/s of a `size`^3 product of random matrices."""
  import jax

  a = jax.random.normal(jax.random.key(0), (size, size), dtype)
  b = jax.random.normal(jax.random.key(1), (size, size), dtype)
  multiply = jax.jit(lambda a, b: a @ b)
  multiply(a, b).block_until_ready()
  return 2 * size**3 / seconds_per_call(lambda: multiply(a, b), 0.1) / 1e12


def is_out_of_memory(error: BaseException) -> bool:
  """Return whether an error of XLA, CUDA or its libraries says that the memory of the device does not suffice."""
  text = str(error).lower().replace('_', ' ')
  return any(words in text for words in ('resource exhausted', 'out of memory', 'alloc failed'))


def note_of(error: BaseException) -> str:
  """Return the type and the first line of an error, for a row."""
  return f'{type(error).__name__}: {error}'.splitlines()[0][:300]


def compile_together(
  traces: Mapping[str, Callable[[], Any]],
) -> dict[str, concurrent.futures.Future]:
  """Trace programs one after the other and compile them at the same time, which does not hold Python's lock.

  Args:
    traces: functions that return a `jax.stages.Traced`, by name.

  Returns:
    Name to a future that is done, with the compiled program or the error of the program.
  """
  found = {}
  with concurrent.futures.ThreadPoolExecutor() as pool:
    for name, trace in traces.items():
      try:
        found[name] = pool.submit(trace().lower().compile)
      except Exception as error:
        found[name] = concurrent.futures.Future()
        found[name].set_exception(error)
  return found


def program_bytes(program: Any) -> int:
  """Return the bytes that a compiled program needs: arguments, results that do not reuse them, and temporaries."""
  memory = program.memory_analysis()
  return (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )


def device_bytes() -> int | None:
  """Return the bytes that programs may use on the first device; None where the backend does not say."""
  import jax

  return (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')


def relative_error(got: Any, expected: Any) -> float:
  """Return the norm of the difference of two trees of arrays, relative to that of `expected`, in float64.

  NaN and infinity in `got` give NaN or infinity.
  """
  import jax
  import numpy as np

  squares = []
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    x = np.asarray(x).astype(np.float64)
    y = np.asarray(y).astype(np.float64)
    squares.append((np.sum((x - y) ** 2), np.sum(y**2)))
  difference, size = np.sum(squares, axis=0)
  return float(np.sqrt(difference / max(size, 1e-300)))


def random_like(shapes: Any, scale: float = 0.05) -> Any:
  """Return a tree of random normal arrays of these shapes, on the device; ones for scales of norms, zeros for integers.

  Equal shapes share a program: an initializer of all parameters takes longer to compile than a step.

  Args:
    shapes: tree of `jax.ShapeDtypeStruct`s.
    scale: standard deviation.
  """
  import functools

  import jax
  import jax.numpy as jnp

  @functools.partial(jax.jit, static_argnums=(1, 2))
  def normal(key, shape, dtype):
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)

  def array(index, path, leaf):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return jnp.zeros(leaf.shape, leaf.dtype)
    if 'scale' in jax.tree_util.keystr(path):
      return jnp.ones(leaf.shape, leaf.dtype)
    return normal(jax.random.key(index), leaf.shape, leaf.dtype)

  leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
  arrays = [array(index, *leaf) for index, leaf in enumerate(leaves)]
  return jax.tree.unflatten(structure, arrays)
