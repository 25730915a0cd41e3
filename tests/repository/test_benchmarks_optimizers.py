"""The optimizers' benchmark has every file of gin/optimizers/ in its table, and measures the announced quantities."""

import importlib
import pathlib

import jax
import numpy as np
import pytest

from t5x_lite import optimizers
from t5x_lite.configuration import syntax as gin_syntax

_BENCHMARKS = pathlib.Path(__file__).parents[2] / 'benchmarks'


@pytest.fixture(name='benchmark')
def _benchmark(monkeypatch):
  monkeypatch.syspath_prepend(_BENCHMARKS)
  return importlib.import_module('optimizers')


def test_every_file_has_a_row(benchmark):
  assert set(benchmark.names()) == {'scaled_adam_unclipped'} | {
    pathlib.PurePath(file).stem for file in gin_syntax.packaged_files('optimizers')
  }
  # Rows of files that do not exist have no effect that a public function shows.
  tables = (
    benchmark._INTERVALS,
    benchmark._BINDINGS,
    benchmark._FILES,
    benchmark._NEEDS,
    benchmark._PER_EXAMPLE,
  )
  assert {name for table in tables for name in table} <= set(benchmark.names())


def test_rows_are_the_files_with_the_bindings_of_the_table(benchmark):
  shapes, axes = benchmark.shapes_of('set')
  assert sum(x.size for x in jax.tree.leaves(shapes)) == 6_291_456
  assert isinstance(benchmark.make('adafactor', axes), optimizers.Adafactor)
  clipped, unclipped = (
    jax.eval_shape(benchmark.make(name, axes).init_state, shapes)
    for name in ('scaled_adam', 'scaled_adam_unclipped')
  )
  assert len(jax.tree.leaves(unclipped)) < len(
    jax.tree.leaves(clipped)
  )  # without the buffer of norms


def test_the_parameters_of_t5_small_have_axes(benchmark):
  shapes, axes = benchmark.shapes_of('t5_small')
  assert sum(x.size for x in jax.tree.leaves(shapes)) == 76_961_152
  assert axes['decoder']['layers_0']['mlp']['wo']['kernel'] == jax.P('mlp', 'embed')
  assert all(
    len(spec) == len(x.shape)
    for x, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(axes), strict=True)
  )


@pytest.mark.parametrize(
  'name, num_steps, num_bytes',
  [
    ('schedule_free', 3, 12 * 15),  # at first, one array serves as two
    pytest.param('sam', 4, 8 * 15, marks=pytest.mark.full),  # asks for gradients
    pytest.param('momo', 3, 4 * 15, marks=pytest.mark.full),  # for the loss
    pytest.param('dpsgd', 3, 0, marks=pytest.mark.full),  # and for one of each example
  ],
)
def test_measures_steps_compilation_and_state(benchmark, monkeypatch, name, num_steps, num_bytes):
  monkeypatch.setattr(
    benchmark,
    'shapes_of',
    lambda name: (
      {'a': jax.ShapeDtypeStruct((4, 3), np.float32), 'b': jax.ShapeDtypeStruct((3,), np.float32)},
      {'a': jax.P('embed', 'mlp'), 'b': jax.P('mlp')},
    ),
  )
  setting = benchmark.Setting('set')
  compile_seconds, seconds, reference_seconds, state_bytes = benchmark.measure(name, setting, 3)
  assert setting.num_params == 15
  assert compile_seconds > 0 and len(seconds) == len(reference_seconds) == num_steps
  assert min(seconds + reference_seconds) > 0
  assert num_bytes <= state_bytes <= num_bytes + 40  # and a few counters


@pytest.mark.parametrize(
  'argv, answer',
  [
    (['--only', 'adamx'], 'unknown optimizers adamx; there are acprop, '),
    (['--part', '4/3'], "got '4/3'; expected K/N"),
    (['--only', 'adam', '--part', '1/2'], 'part 1 of 2 is empty'),
    (['--steps', '0'], "got '0'; expected an integer of at least 1"),
    (['--params', 't5_large'], 'invalid choice'),
  ],
)
def test_bad_arguments_are_rejected(benchmark, capsys, argv, answer):
  with pytest.raises(SystemExit) as caught:
    benchmark.main(argv)
  assert caught.value.code == 2 and answer in capsys.readouterr().err


def test_parts_make_the_full_table(benchmark, monkeypatch):
  chosen = []
  # The parts are compared without measuring them, which takes minutes.
  monkeypatch.setattr(benchmark, '_print_rows', lambda *arguments: chosen.append(arguments))
  for number in range(1, 5):
    benchmark.main(['--part', f'{number}/4', '--params', 'set'])
  assert [name for _, names, _ in chosen for name in names] == benchmark.names() and len(
    chosen
  ) == 4
  assert {num_steps for *_, num_steps in chosen} == {24}
