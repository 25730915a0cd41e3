"""The training step compiles while the state is made, and errors and times of compilation reach the run."""

import contextlib
import subprocess
import sys
import threading

import jax
import pytest

from t5x_lite import partitioning
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.train.compilation import StepCompilation
from t5x_lite.trainer import state_init
from tests.apps.train import toy_run
from tests.models import toy_model


class _Subclass(trainer_lib.Trainer):
  """A trainer whose step may read the state."""


class _OwnPartitioner(partitioning.PjitPartitioner):
  """A partitioner that compiles in its own way."""

  def compile(self, partitioned_fn, *args):
    return super().compile(partitioned_fn, *args)


def _make(trainer_cls=trainer_lib.Trainer, partitioner=None, summary_dir=None):
  model, partitioner, batch = (
    toy_run.model(),
    partitioner or toy_run.partitioner(),
    toy_model.make_batch(),
  )
  initializer = state_init.TrainStateInitializer(
    model.optimizer_def,
    model.get_initial_variables,
    {name: x.shape for name, x in batch.items()},
    partitioner,
  )
  return (
    trainer_cls(
      model,
      initializer.global_train_state_shape,
      partitioner,
      [],
      summary_dir,
      initializer.train_state_axes,
      jax.random.key(0),
      lambda step: 1e-3,
    ),
    initializer,
    batch,
  )


def test_our_step_is_traced_here_and_compiles_in_a_thread_that_writes_nothing(
  tmp_path, monkeypatch
):
  trainer, _, batch = _make(summary_dir=str(tmp_path))
  begun, may_compile, lower_train = threading.Event(), threading.Event(), trainer.lower_train

  def lower_later(batch):
    assert threading.current_thread() is threading.main_thread()
    compile_fn = lower_train(batch)

    def compile_later():
      assert threading.current_thread() is not threading.main_thread()
      begun.set()
      assert may_compile.wait(60)
      compile_fn()

    return compile_later

  monkeypatch.setattr(trainer, 'lower_train', lower_later)
  with contextlib.closing(trainer), contextlib.ExitStack() as stack:
    compilation = StepCompilation(stack, trainer, batch)
    assert begun.wait(60) and trainer._compiled_train_step is None
    may_compile.set()
    assert str(compilation.finish()).startswith(
      ('Compiled the training step in ', 'Loaded the training step from ')
    )
    # Otherwise the process would end without Python's own clean-up.
    assert not any(
      thread.name.startswith('t5x_lite-compilation') for thread in threading.enumerate()
    )
    assert trainer._compiled_train_step is not None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  'trainer_cls, partitioner',
  [(_Subclass, None), (trainer_lib.Trainer, _OwnPartitioner(num_partitions=2))],
)
def test_what_others_compile_is_compiled_when_it_is_needed(trainer_cls, partitioner):
  trainer, _, batch = _make(trainer_cls, partitioner)
  with contextlib.closing(trainer), contextlib.ExitStack() as stack:
    compilation = StepCompilation(stack, trainer, batch)
    assert trainer._compiled_train_step is None and not any(
      thread.name.startswith('t5x_lite-compilation') for thread in threading.enumerate()
    )
    assert ' the training step ' in str(compilation.finish())
    assert trainer._compiled_train_step is not None


def test_an_error_of_compilation_is_raised_where_the_step_is_needed(monkeypatch):
  trainer, _, batch = _make()

  def fail():
    raise ValueError('cannot be compiled')

  monkeypatch.setattr(trainer, 'lower_train', lambda batch: fail)
  with contextlib.closing(trainer), contextlib.ExitStack() as stack:
    compilation = StepCompilation(stack, trainer, batch)
    with pytest.raises(ValueError, match='cannot be compiled'):
      compilation.finish()


def test_a_run_that_ends_before_the_first_step_does_not_wait(monkeypatch):
  trainer, _, batch = _make()
  may_compile = threading.Event()
  monkeypatch.setattr(trainer, 'lower_train', lambda batch: lambda: may_compile.wait(60))
  with contextlib.closing(trainer), pytest.raises(OSError, match='no such checkpoint'):
    with contextlib.ExitStack() as stack:
      compilation = StepCompilation(stack, trainer, batch)
      raise OSError('no such checkpoint')
  assert not may_compile.is_set() and not compilation._compiling.done()
  may_compile.set()
  compilation._compiling.result(60)


def test_a_process_ends_while_a_step_is_compiled():
  code = """
import concurrent.futures, sys, time
from t5x_lite.command_line import cli
executor = concurrent.futures.ThreadPoolExecutor(1, 't5x_lite-compilation')
executor.submit(time.sleep, 300)
sys.argv = ['t5x_lite', '--version']
cli.run_program()
"""
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, timeout=60, check=False
  )
  assert done.returncode == 0 and done.stdout.startswith('t5x_lite ')


def test_the_time_of_compilation_is_written_with_the_first_steps():
  trainer, initializer, batch = _make()
  written = []
  with contextlib.closing(trainer):
    trainer.compile_train(batch)
    trainer.train_metrics_manager.write_scalars = lambda step, values, **_: written.append(
      (step, *values)
    )
    trainer.train_state = initializer.from_scratch(jax.random.key(1))
    sharding = jax.NamedSharding(trainer.partitioner.mesh, trainer.partitioner.data_partition_spec)
    for _ in range(2):
      trainer.train(iter([jax.device_put(batch, sharding)]), 1)
  assert written == [(0, 'timing/compilation_seconds')]
