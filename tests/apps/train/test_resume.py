"""A run that is stopped and resumed equals an uninterrupted run, bitwise."""

import functools
import os
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import optimizers
from t5x_lite import runtime
from t5x_lite.errors import StoppedOnSignalError
from t5x_lite.trainer.actions import BaseAction
from tests.apps.train import toy_run


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run of 20 steps without a pause."""
  model_dir = tmp_path_factory.mktemp('whole')
  assert toy_run.train(model_dir)[0] == 20
  return model_dir


def test_ten_and_ten_steps_equal_twenty(whole, tmp_path):
  assert toy_run.train(tmp_path, 10)[0] == 10
  assert [row['step'] for row in toy_run.lines(tmp_path)['train']] == [4, 6, 8, 10]
  assert toy_run.train(tmp_path, 20)[0] == 20
  toy_run.assert_same_run(tmp_path, whole, 20)


@pytest.mark.parametrize('is_bfloat16', [False, True])
def test_clipped_steps_resume_bitwise(tmp_path, is_bfloat16):
  model = toy_run.model()
  if is_bfloat16:
    model = _rounding_model(True)
  train = functools.partial(toy_run.train, model=model, trainer_kwargs={'gradient_clip_norm': 0.05})
  train(tmp_path / 'whole', 20)
  train(tmp_path / 'parts', 10)
  train(tmp_path / 'parts', 20)
  toy_run.assert_same_run(tmp_path / 'whole', tmp_path / 'parts', 20)
  (*_, row) = toy_run.lines(tmp_path / 'whole')['train']
  assert row['gradient_norm/clipped_share'] > 0


@functools.cache
def _rounding_model(rounds):
  return toy_run.model(
    optimizers.with_update_options(
      optimizers.adamw(),
      param_dtype='bfloat16',
      stochastic_rounding=rounds,
      weight_decay_scales=[('logits', 0.0)],
    )
  )


def test_bfloat16_parameters_with_stochastic_rounding_resume_bitwise(tmp_path):
  train = functools.partial(toy_run.train, infer_eval_dataset_cfg=None, train_eval_dataset_cfg=None)
  dtype = {'period': 3, 'dtype': 'bfloat16'}
  _, whole = train(tmp_path / 'whole', 9, model=_rounding_model(True))
  train(tmp_path / 'parts', 3, model=_rounding_model(True), save=dtype)
  train(tmp_path / 'parts', 9, model=_rounding_model(True), save=dtype)
  assert {leaf.dtype for leaf in jax.tree.leaves(whole.params)} == {np.dtype(jnp.bfloat16)}
  (stored, _), (narrow, _) = (toy_run.saved(tmp_path / name, 9) for name in ('whole', 'parts'))
  for left, right in zip(
    jax.tree.leaves(stored['target']), jax.tree.leaves(narrow['target']), strict=True
  ):
    assert left.dtype == np.float32 and right.dtype == jnp.bfloat16  # SaveCheckpointConfig.dtype
    np.testing.assert_array_equal(left, right.astype(np.float32))
  jax.tree.map(np.testing.assert_array_equal, stored['state'], narrow['state'])
  _, nearest = train(tmp_path / 'nearest', 9, model=_rounding_model(False))
  assert any(
    map(lambda a, b: np.any(a != b), jax.tree.leaves(whole.params), jax.tree.leaves(nearest.params))
  )


def test_lines_written_after_the_last_checkpoint_are_written_once(whole, tmp_path):
  """As after a kill between two checkpoints: the files are ahead of the state."""
  toy_run.train(tmp_path, 10)
  shutil.rmtree(tmp_path / 'checkpoint_10')
  with (tmp_path / 'train/metrics.jsonl').open('a') as f:
    f.write('{"step": 11, "wall_time": 1.0, "lo')
  toy_run.train(tmp_path)
  toy_run.assert_same_run(tmp_path, whole, 20)


class _Raiser:
  """Sends this process a signal when asked for the `count`-th time."""

  def __init__(self, count):
    self.left = count

  def __call__(self):
    self.left -= 1
    if self.left == 0:
      os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
  'count', [5, *(pytest.param(count, marks=pytest.mark.full) for count in (1, 11))]
)
def test_a_signal_in_training(whole, tmp_path, count, capsys):
  raiser = _Raiser(count)

  def open_iterator(*args, **kwargs):
    iterator = data.open_train_iterator(*args, **kwargs)
    step = iterator.__next__

    class Signalling(type(iterator)):
      def __next__(self):
        raiser()
        return step()

    iterator.__class__ = Signalling
    return iterator

  with pytest.raises(StoppedOnSignalError, match='of 20 by SIGTERM') as stopped:
    toy_run.train(tmp_path, get_dataset_fn=open_iterator)
  assert stopped.value.exit_code == 75
  *_, stop, summary = runtime.read_events(tmp_path / 'events.jsonl')
  assert stop.kind == 'stop' and stop.details == {'cause': 'signal', 'signal': 'SIGTERM'}
  assert summary.details['num_starts'] == 1
  assert 'To resume:\n' in str(stopped.value) and 'To resume' not in capsys.readouterr().err
  step = checkpoints.latest_step(tmp_path)
  assert step is None or 0 < step <= count
  toy_run.train(tmp_path)
  rows, expected = toy_run.lines(tmp_path), toy_run.lines(whole)
  # The step of the stop has an additional summary, which splits that of the period; evaluations are the same.
  assert {k: v for k, v in rows.items() if k != 'train'} == {
    k: v for k, v in expected.items() if k != 'train'
  }
  (state, position), (expected_state, expected_position) = (
    toy_run.saved(tmp_path, 20),
    toy_run.saved(whole, 20),
  )
  jax.tree.map(np.testing.assert_array_equal, state, expected_state)
  assert position == expected_position


@pytest.mark.parametrize(
  'count, step',
  [
    pytest.param(2, 10, marks=pytest.mark.full),
    (3 + 2, 10),
    pytest.param(6 + 1, 20, marks=pytest.mark.full),
    pytest.param(6 + 3 + 2, 20, marks=pytest.mark.full),
  ],
)
def test_a_signal_in_an_evaluation_postpones_it(whole, tmp_path, count, step):
  raiser = _Raiser(count)  # There are 3 batches in each of the two evaluations.
  to_global_arrays = data.to_global_arrays
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(data, 'to_global_arrays', lambda *args: raiser() or to_global_arrays(*args))
    with pytest.raises(StoppedOnSignalError, match=f'after step {step} of 20'):
      toy_run.train(tmp_path)
  assert checkpoints.latest_step(tmp_path) == step
  toy_run.train(tmp_path)
  toy_run.assert_same_run(tmp_path, whole, 20)


class _Steps(BaseAction):
  """Remembers the steps of the evaluations that it has looked at."""

  def __init__(self):
    self.steps = []

  def run(self, train_state, metrics_by_task):
    self.steps.append(int(train_state.step))
    return False

  def get_state(self):
    return self.steps

  def set_state(self, state):
    self.steps = list(state)


def test_an_action_remembers_an_evaluation_once(tmp_path):
  """A signal while texts are decoded comes after the actions for given targets; both evaluations are made again."""
  raiser = _Raiser(3 + 2)
  to_global_arrays = data.to_global_arrays
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(data, 'to_global_arrays', lambda *args: raiser() or to_global_arrays(*args))
    with pytest.raises(StoppedOnSignalError, match='after step 10 of 20'):
      toy_run.train(tmp_path, actions={'TRAIN_EVAL': [_Steps()]})
  action = _Steps()
  toy_run.train(tmp_path, actions={'TRAIN_EVAL': [action]})
  assert action.steps == [10, 20]


def test_a_signal_before_the_first_step(tmp_path):
  def open_iterator(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGINT)
    return data.open_train_iterator(*args, **kwargs)

  with pytest.raises(StoppedOnSignalError, match='SIGINT before the first step'):
    toy_run.train(tmp_path, get_dataset_fn=open_iterator)
  assert checkpoints.latest_step(tmp_path) is None


def test_no_signal_handler_outside_the_main_thread(tmp_path):
  failed = []

  def run():
    try:
      toy_run.train(tmp_path, 2)
    except BaseException as error:  # pylint: disable=broad-exception-caught
      failed.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert not failed and checkpoints.latest_step(tmp_path) == 2


def test_the_best_value_of_an_interrupted_evaluation_is_known_after_the_restart(tmp_path):
  best = {'policies': [checkpoints.WhenBest('training_eval/letters/loss', 'max')]}
  train = functools.partial(toy_run.train, total_steps=25, save=best, infer_eval_dataset_cfg=None)
  train(tmp_path / 'whole')
  raiser = _Raiser(2)
  to_global_arrays = data.to_global_arrays
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(data, 'to_global_arrays', lambda *args: raiser() or to_global_arrays(*args))
    with pytest.raises(StoppedOnSignalError, match='after step 10'):
      train(tmp_path / 'stopped')
  train(tmp_path / 'stopped')
  assert (
    checkpoints.all_steps(tmp_path / 'stopped')
    == checkpoints.all_steps(tmp_path / 'whole')
    == [10, 25]
  )
