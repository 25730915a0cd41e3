"""The benchmark of expert layers compares like with like."""

import dataclasses
import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest


@pytest.fixture(name='benchmark')
def _benchmark(monkeypatch):
  folder = pathlib.Path(__file__).parents[2] / 'benchmarks'
  monkeypatch.syspath_prepend(folder)
  # Not by its name, which is the package's.
  found = importlib.util.spec_from_file_location('moe_benchmark', folder / 'moe.py')
  module = importlib.util.module_from_spec(found)
  monkeypatch.setitem(sys.modules, found.name, module)  # Where its dataclass looks for names.
  found.loader.exec_module(module)
  return module


@pytest.mark.full  # by default, test_benchmarks.py compares the dense model
def test_a_layer_of_one_expert_is_its_dense_peer(benchmark):
  """With one expert all gates are 1 and all tokens are its own; only the router's losses are more."""
  case = benchmark.Case(32, 8, 12, 1, 1, activations=('gelu', 'linear'))
  layer, _, x, weights = benchmark.make_arrays(case)
  dense = {'wi': [kernel[0] for kernel in layer['experts'].wi], 'wo': layer['experts'].wo[0]}
  grads = jax.jit(jax.grad(lambda dense: benchmark.dense_loss(dense, x, weights, case)))(dense)
  layer_grads = jax.jit(
    jax.grad(lambda layer: benchmark.layer_loss(layer, x, weights, case, 'grouped'))
  )(layer)['experts']
  for a, b in zip((*grads['wi'], grads['wo']), (*layer_grads.wi, layer_grads.wo), strict=True):
    np.testing.assert_allclose(a, b[0], atol=1e-6)


@pytest.mark.full
def test_measures_every_method(benchmark):
  results = benchmark.measure(
    benchmark.Case(64, 8, 12, 4, 2, zipf=1.0), ('grouped', 'capacity', 'einsum'), 1
  )
  assert sorted(results) == ['capacity', 'dense', 'einsum', 'grouped']
  assert all(seconds > 0 and megabytes > 0 for seconds, megabytes in results.values())


@pytest.mark.full
def test_routing_of_uneven_loads_runs_in_turn(benchmark):
  seconds = benchmark.measure_routing(benchmark.Case(64, 8, 12, 4, 1), 'grouped', (0.0, 2.0), 3)
  assert {zipf: len(values) for zipf, values in seconds.items()} == {0.0: 3, 2.0: 3}


def test_the_exponent_makes_loads_uneven(benchmark):
  even = benchmark.Case(64, 8, 12, 4, 1)
  uneven = dataclasses.replace(even, zipf=8.0)
  layer, _, x, _ = benchmark.make_arrays(even)
  loads = [
    np.bincount(np.argmax(benchmark.router_logits(layer, x, case), -1).ravel(), minlength=4)
    for case in (even, uneven)
  ]
  assert loads[0].max() < 40 and loads[1].max() > 60
