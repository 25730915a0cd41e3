"""The training step compiles while the state is made, and errors and times of compilation reach the run."""

import contextlib
import threading

import jax
import pytest

from t5x_lite import state_init
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.train.compilation import StepCompilation
from tests.apps.train import toy_run
from tests.models import toy_model


class _Subclass(trainer_lib.Trainer):
  """A trainer whose step may read the state."""


def _make(trainer_cls, tmp_path):
  model, partitioner, batch = toy_run.model(), toy_run.partitioner(), toy_model.make_batch()
  initializer = state_init.TrainStateInitializer(
      model.optimizer_def, model.get_initial_variables, {name: x.shape for name, x in batch.items()}, partitioner)
  return trainer_cls(
      model, initializer.global_train_state_shape, partitioner, [], str(tmp_path), initializer.train_state_axes,
      jax.random.key(0), lambda step: 1e-3), initializer, batch


@pytest.mark.parametrize('trainer_cls, in_thread', [(trainer_lib.Trainer, True), (_Subclass, False)])
def test_our_trainer_compiles_in_a_thread_and_writes_nothing(tmp_path, monkeypatch, trainer_cls, in_thread):
  trainer, _, batch = _make(trainer_cls, tmp_path)
  threads, may_compile, compile_train = [], threading.Event(), trainer.compile_train

  def compile_later(batch):
    threads.append(threading.current_thread())
    assert may_compile.wait(60)
    compile_train(batch)

  monkeypatch.setattr(trainer, 'compile_train', compile_later)
  with contextlib.closing(trainer), contextlib.ExitStack() as stack:
    compilation = StepCompilation(stack, trainer, batch)
    may_compile.set()  # in a thread, compilation has begun without `finish`
    line = compilation.finish()
    assert line.startswith(('Compiled the training step in ', 'Loaded the training step from '))
    assert [thread is not threading.main_thread() for thread in threads] == [in_thread]
    assert trainer._compiled_train_step is not None and not list(tmp_path.iterdir())


def test_an_error_of_compilation_is_raised_where_the_step_is_needed(tmp_path, monkeypatch):
  trainer, _, batch = _make(trainer_lib.Trainer, tmp_path)

  def fail(batch):
    raise ValueError('cannot be compiled')

  monkeypatch.setattr(trainer, 'compile_train', fail)
  with contextlib.closing(trainer), contextlib.ExitStack() as stack:
    compilation = StepCompilation(stack, trainer, batch)
    with pytest.raises(ValueError, match='cannot be compiled'):
      compilation.finish()


def test_the_time_of_compilation_is_written_with_the_first_steps(tmp_path):
  trainer, initializer, batch = _make(trainer_lib.Trainer, tmp_path)
  written = []
  with contextlib.closing(trainer):
    trainer.compile_train(batch)
    trainer.train_metrics_manager.write_scalars = lambda step, values, **_: written.append((step, *values))
    trainer.train_state = initializer.from_scratch(jax.random.key(1))
    sharding = jax.NamedSharding(trainer.partitioner.mesh, trainer.partitioner.data_partition_spec)
    for _ in range(2):
      trainer.train(iter([jax.device_put(batch, sharding)]), 1)
  assert written == [(0, 'timing/compilation_seconds')]
