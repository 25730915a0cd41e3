"""The optimizers' benchmark has every public factory in its table, and measures what it says."""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest

from t5x_lite import optimizers

_BENCHMARKS = pathlib.Path(__file__).parent.parent / 'benchmarks'


@pytest.fixture(name='benchmark')
def _benchmark(monkeypatch):
  monkeypatch.syspath_prepend(_BENCHMARKS)
  return importlib.import_module('optimizers')


def test_every_name_of_the_table_makes_an_optimizer(benchmark):
  table = benchmark.factories()
  assert {'Adafactor', 'adamw', 'lbfgs', 'partition', 'scaled_adam', 'scaled_adam_unclipped'} <= set(table)
  for name, factory in table.items():
    assert isinstance(factory(), optimizers.OptimizerDef), name
  assert set(benchmark._NEEDS) | set(benchmark._PER_EXAMPLE) <= set(table)


def test_the_parameters_are_those_of_the_docstring(benchmark):
  assert sum(x.size for x in jax.tree.leaves(benchmark.shapes_of('set'))) == 6_291_456
  assert sum(x.size for x in jax.tree.leaves(benchmark.shapes_of('t5_small'))) == 76_961_152


def test_measures_steps_compilation_and_state(benchmark):
  shapes = {'a': jax.ShapeDtypeStruct((4, 3), jnp.float32), 'b': jax.ShapeDtypeStruct((3,), jnp.float32)}
  compile_seconds, seconds, reference_seconds, num_bytes = benchmark.measure(
      'scaled_adam', benchmark.factories()['scaled_adam'], shapes, 3)
  assert compile_seconds > 0 and len(seconds) == len(reference_seconds) == 3 and min(seconds + reference_seconds) > 0
  # Two float32 per element, four per parameter, the latest norms, a few counters and what is reported.
  assert 4 * (2 * 15 + 4 * 2 + 100) <= num_bytes <= 4 * (2 * 15 + 4 * 2 + 100 + 30)
