"""Search for the operation of a compiled program that gives the first NaN, for JAX's options jax_debug_nans and _infs.

JAX tests the results of functions that it compiles at their first call, and runs such a function again, operation by
operation. Programs that are compiled before they run have neither. Here a program whose results have a NaN is compiled
again with a flag per operation, and runs once more on the same arguments; loops over layers keep one flag per operation
and iteration. The operation is found backwards from the results, so a NaN that `where` replaces is not reported.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.extend import core
from jax.extend import source_info_util
import jax.numpy as jnp

from t5x_lite.errors import NonFiniteMetricError

# Operations with a program as a parameter that is evaluated like a part of the program around it.
_CALLS = (
  'jit',
  'pjit',
  'closed_call',
  'core_call',
  'checkpoint',
  'remat2',
  'custom_jvp_call',
  'custom_vjp_call',
)
_PROGRAMS = ('jaxpr', 'call_jaxpr', 'fun_jaxpr')


def searches_nan() -> bool:
  """Return whether one of JAX's options asks for the search."""
  return bool(jax.config.values['jax_debug_nans'] or jax.config.values['jax_debug_infs'])


class SearchedLowered:
  """Lowered function whose compiled form raises at the first NaN; else like `jax.stages.Lowered`."""

  def __init__(self, traced: jax.stages.Traced):
    self._traced = traced
    self._lowered = traced.lower()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._lowered, name)

  def compile(self) -> 'SearchedProgram':
    """Compile the function."""
    return SearchedProgram(self._traced, self._lowered.compile())


class SearchedProgram:
  """Compiled function that raises at the first NaN; else like `jax.stages.Compiled`."""

  def __init__(self, traced: jax.stages.Traced, compiled: jax.stages.Compiled):
    self._traced = traced
    self._compiled = compiled

  def __getattr__(self, name: str) -> Any:
    return getattr(self._compiled, name)

  def __call__(self, *args: Any) -> Any:
    """Return the results.

    Raises:
      NonFiniteMetricError: a result has a NaN, or with jax_debug_infs also an infinity; names the operation.
    """
    # An infinity is often gone in the results: its product with zero is a NaN. So this option includes the other.
    tests_inf = bool(jax.config.values['jax_debug_infs'])
    # Without JAX's own test, which knows only the name of the program.
    with jax.debug_nans(False), jax.debug_infs(False):
      results = self._compiled(*args)
      if _has_bad(jax.tree.leaves(results), tests_inf):
        search = _Search(tests_inf)
        leaves = jax.tree.leaves(args)
        evaluate = jax.jit(
          functools.partial(search.run, self._traced.jaxpr), out_shardings=_replicated(leaves)
        )
        flags = evaluate(*leaves)
        found = search.culprit(jax.device_get(flags))
        if found is not None:
          raise NonFiniteMetricError(_message(self._traced.fun_name, found, tests_inf))
    return results


def _replicated(arguments: list[Any]) -> jax.sharding.Sharding | None:
  """Return the sharding of flags that every process can read, or None for arguments without a mesh."""
  for argument in arguments:
    sharding = getattr(argument, 'sharding', None)
    if isinstance(sharding, jax.sharding.NamedSharding):
      return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
  return None


def _message(name: str, found: 'Operation', tests_inf: bool) -> str:
  kind = 'infinite number or NaN' if tests_inf else 'NaN'
  option = 'jax_debug_infs' if tests_inf else 'jax_debug_nans'
  where = ''
  if 'transpose(' in found.module:
    where = ', in the backward pass'
  if found.module:
    where += f', in {found.module}'
  return (
    f'--{option}: the first {kind} of the program {name!r} is a result of the operation {found.name!r} at '
    f'{found.source}{where}. Correct this code or its inputs, or run without --{option}.'
  )


@dataclasses.dataclass(frozen=True)
class Operation:
  """Operation that gives a NaN from inputs without one.

  Attributes:
    name: name of JAX's primitive, such as 'log', or 'argument' for a NaN in the arguments of the program.
    source: file, line and function that calls it.
    module: path of the Flax module, within the names of transformations such as `transpose(jvp(...))`.
  """

  name: str
  source: str
  module: str


@dataclasses.dataclass
class _Step:
  """Evaluated operation.

  Attributes:
    operation: its description.
    inputs: number of each input in the flags.
    outputs: number of each output in the flags.
    body: search of the body of a loop, or None.
    is_reversed: whether the loop begins at the last iteration.
  """

  operation: Operation
  inputs: list[int]
  outputs: list[int]
  body: '_Search | None' = None
  is_reversed: bool = False


class _Search:
  """Evaluation of a program that records a flag for each value."""

  def __init__(self, tests_inf: bool):
    self._tests_inf = tests_inf
    self._values: list[Any] = []
    self._numbers: dict[int, int] = {}
    self._steps: list[_Step] = []
    self._results: list[int] = []

  def run(self, program: core.ClosedJaxpr, *args: Any) -> dict[str, Any]:
    """Evaluate a program, and return its flags: bool [values], and those of the bodies of loops, by step."""
    return self.evaluate(program, args)[1]

  def evaluate(self, program: core.ClosedJaxpr, args: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return (results, flags) of a program."""
    bodies: dict[str, Any] = {}
    results = self._evaluate(program.jaxpr, program.consts, args, '', bodies)
    self._results = [self._number(value) for value in results]
    flags = [_is_bad(value, self._tests_inf) for value in self._values]
    return results, {'values': jnp.stack([jnp.zeros((), bool), *flags]), 'bodies': bodies}

  def _number(self, value: Any) -> int:
    """Return the number of a value in the flags; index 0 is for values that cannot be bad."""
    key = id(value)
    if key not in self._numbers:
      self._values.append(value)  # Also keeps the value, so that no other gets its id.
      self._numbers[key] = len(self._values)
    return self._numbers[key]

  def _evaluate(self, jaxpr: Any, consts: Any, args: Any, module: str, bodies: Any) -> list[Any]:
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
      if isinstance(atom, core.Literal):
        return atom.val
      return env[atom]

    for eqn in jaxpr.eqns:
      inputs = [read(atom) for atom in eqn.invars]
      stack = str(eqn.source_info.name_stack)
      path = '/'.join(filter(None, (module, stack)))
      inner = called_program(eqn)
      if inner is not None:
        outputs = self._evaluate(inner.jaxpr, inner.consts, inputs, path, bodies)
      else:
        step = _Step(
          Operation(eqn.primitive.name, source_info_util.summarize(eqn.source_info), path),
          [self._number(value) for value in inputs],
          [],
        )
        sizes = scan_sizes(eqn)
        if sizes is not None:
          step.body = _Search(self._tests_inf)
          step.is_reversed = eqn.params['reverse']
          outputs, bodies[str(len(self._steps))] = _scan(eqn, inputs, sizes, step.body)
        else:
          outputs = _bind(eqn, inputs)
        step.outputs = [self._number(value) for value in outputs]
        self._steps.append(step)
      env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def culprit(self, flags: Any) -> Operation | None:
    """Return the operation that gives the first bad value of the results; None if only arguments are infinite."""
    found, from_argument = self._trace(flags)
    if found is None and from_argument and not self._tests_inf:
      return Operation('argument', 'its call', '')
    return found

  def _trace(self, flags: Any) -> tuple[Operation | None, bool]:
    """Return the first operation that gives a bad value of the results, and whether one comes from an argument."""
    is_bad = flags['values']
    producers = {}
    for step, numbered in enumerate(self._steps):
      for number in numbered.outputs:
        producers.setdefault(number, step)
    waiting = [number for number in self._results if is_bad[number]]
    seen = set(waiting)
    found = []
    from_argument = False
    while waiting:
      number = waiting.pop()
      if number not in producers:
        from_argument = True
        continue
      step = self._steps[producers[number]]
      bad = [each for each in step.inputs if is_bad[each]]
      if not bad:
        found.append(producers[number])
      new = set(bad) - seen
      seen |= new
      waiting += new
    if not found:
      return None, from_argument
    first = min(found)
    step = self._steps[first]
    inner = step.body and step.body.first_in_loop(flags['bodies'][str(first)], step.is_reversed)
    return inner or step.operation, from_argument

  def first_in_loop(self, flags: Any, is_reversed: bool) -> Operation | None:
    """Return the operation that gives the first bad result of an iteration from good inputs of the iteration.

    Args:
      flags: flags of the body with a leading dim of iterations.
      is_reversed: whether the loop begins at the last of them.
    """
    iterations = range(len(flags['values']))
    for i in reversed(iterations) if is_reversed else iterations:
      found, _ = self._trace(jax.tree.map(lambda x, i=i: x[i], flags))
      if found is not None:
        return found
    return None


def _is_bad(value: Any, tests_inf: bool) -> jax.Array:
  """Return whether a value has a NaN, or with `tests_inf` also an infinity: bool []."""
  if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
    return jnp.zeros((), bool)
  if tests_inf:
    return ~jnp.all(jnp.isfinite(value))
  return jnp.any(jnp.isnan(value))


@functools.partial(jax.jit, static_argnums=1)
def _has_bad(values: list[Any], tests_inf: bool) -> jax.Array:
  flags = [_is_bad(value, tests_inf) for value in values]
  return jnp.any(jnp.stack([jnp.zeros((), bool), *flags]))


def called_program(eqn: Any) -> core.ClosedJaxpr | None:
  """Return the program that an operation (`JaxprEqn`) calls once, or None."""
  if eqn.primitive.name not in _CALLS:
    return None
  for name in _PROGRAMS:
    program = eqn.params.get(name)
    if isinstance(program, core.ClosedJaxpr):
      return program
    if isinstance(program, core.Jaxpr) and not program.constvars:
      return core.ClosedJaxpr(program, ())
  return None


def _bind(eqn: Any, inputs: list[Any]) -> list[Any]:
  """Return the results of an operation."""
  params = eqn.primitive.get_bind_params(eqn.params)
  with eqn.ctx.manager:
    outputs = eqn.primitive.bind(*inputs, **params)
  if eqn.primitive.multiple_results:
    return list(outputs)
  return [outputs]


def scan_sizes(eqn: Any) -> tuple[int, int] | None:
  """Return the numbers of constants and of carried values of a `lax.scan` (`JaxprEqn`); None for another operation."""
  if eqn.primitive.name != 'scan':
    return None
  if 'num_carry' in eqn.params:
    return eqn.params['num_consts'], eqn.params['num_carry']
  consts, carry, _ = eqn.params['ft_in'].unpack()
  return len(consts), len(carry)


def _scan(
  eqn: Any, inputs: list[Any], sizes: tuple[int, int], body: _Search
) -> tuple[list[Any], dict[str, Any]]:
  """Return the results of a `lax.scan`, and the flags of its body with a leading dim of iterations."""
  num_consts, num_carry = sizes
  consts = inputs[:num_consts]
  carry = inputs[num_consts : num_consts + num_carry]
  program = eqn.params['jaxpr']

  def step(carry: Any, xs: Any) -> Any:
    outputs, flags = body.evaluate(program, [*consts, *carry, *xs])
    return outputs[:num_carry], (outputs[num_carry:], flags)

  carry, (ys, flags) = jax.lax.scan(
    step,
    carry,
    inputs[num_consts + num_carry :],
    length=eqn.params['length'],
    reverse=eqn.params['reverse'],
  )
  return [*carry, *ys], flags
