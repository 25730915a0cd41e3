"""The optimizers' benchmark has every file of gin/optimizers/ in its table, and measures the announced quantities."""

import importlib
import pathlib
import types

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


@pytest.fixture(name='records')
def _records(monkeypatch):
  monkeypatch.syspath_prepend(_BENCHMARKS)
  return importlib.import_module('optimizer_records')


def test_every_file_has_a_row(benchmark):
  assert set(benchmark.names()) == {'scaled_adam_unclipped'} | {
    pathlib.PurePath(file).stem for file in gin_syntax.packaged_files('optimizers')
  }
  # Rows of files that do not exist have no effect that a public function shows.
  tables = (
    benchmark._INTERVALS,
    benchmark._BINDINGS,
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


def test_parts_make_the_full_table(benchmark, monkeypatch, records):
  chosen = []

  def measure_all(params_name, names, num_steps, command):
    del params_name, command
    chosen.append((names, num_steps))
    return [_record(records, 'adam', 'set')]

  # The parts are compared without measuring them, which takes minutes.
  monkeypatch.setattr(benchmark, 'measure_all', measure_all)
  for number in range(1, 5):
    benchmark.main(['--part', f'{number}/4', '--params', 'set'])
  assert [name for names, _ in chosen for name in names] == benchmark.names()
  assert [num_steps for _, num_steps in chosen] == [24] * 4


def test_a_record_has_what_was_measured_and_the_command(benchmark, monkeypatch, records):
  monkeypatch.setattr(benchmark, 'Setting', lambda name: types.SimpleNamespace(num_params=15))
  monkeypatch.setattr(benchmark.common, 'matmul_gflops', lambda: 400.0)
  monkeypatch.setattr(
    benchmark, 'measure', lambda *_: (0.5, [0.002, 0.003, 0.007], [0.002] * 3, 60)
  )
  written = []
  monkeypatch.setattr(records, 'save', written.extend)
  argv = ['--only', 'lion', 'sam', '--params', 'set']
  benchmark.main(argv)
  assert not written
  benchmark.main([*argv, '--record'])
  lion, sam = written
  assert (lion.optimizer, lion.params, lion.num_params, lion.num_steps) == ('lion', 'set', 15, 3)
  assert (lion.step_ms, lion.slowest_ms, lion.ratio) == (3.0, 7.0, 1.5)
  assert (lion.compile_s, lion.bytes_per_param, lion.matmul_gflops) == (0.5, 4, [400.0, 400.0])
  assert lion.command == 'python benchmarks/optimizers.py --only lion sam --params set --record'
  assert sam.step_ms == 4.0  # the mean, since it works at every other step


def _record(records, name, params, **changes):
  measured = dict(
    num_params=100,
    num_steps=24,
    step_ms=24.6,
    slowest_ms=150.0,
    adam_ms=2.0,
    compile_s=0.25,
    state_bytes=1200,
    matmul_gflops=[400.0, 410.0],
    date='2026-11-29',
    command='python benchmarks/optimizers.py --record',
    machine='2 cores',
  )
  return records.Record(optimizer=name, params=params, **{**measured, **changes})


def test_recording_replaces_its_optimizer(records, tmp_path):
  adan = [
    _record(records, 'adan', 'set'),
    _record(records, 'adan', 't5_small', step_ms=3.9, state_bytes=1),
  ]
  records.save([_record(records, 'lion', 'set')], tmp_path)
  records.save([_record(records, 'adan', 'set', step_ms=99.0)], tmp_path)
  records.save(adan, tmp_path)
  read = records.read(tmp_path)
  assert list(read.values()) == [*adan, _record(records, 'lion', 'set')]
  # The tables have those that are measured on both sets.
  assert records.table(read).splitlines()[2:] == [
    '| `adan` | 24.6 | 150 | 12.3 | 0.25 | 12 | 3.9 | 150 | 1.95 | 0.25 | 0.01 |'
  ]
  (tmp_path / 'gin/optimizers').mkdir(parents=True)
  (tmp_path / 'gin/optimizers/adan.gin').write_text(
    "# Adan (arXiv:2208.06677).\n# Long. Uses the trainer's learning rate; start with 1e-3.\n#\n# More.\n\n"
    'OPTIMIZER = @optimizers.adan()\n'
  )
  assert records.overview(read, tmp_path).splitlines()[2:] == [
    '| `adan` | Adan ([arXiv:2208.06677](https://arxiv.org/abs/2208.06677)). Long. | 1e-3 | 12 | 12 | 1.9 |'
  ]
