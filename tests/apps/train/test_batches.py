"""Training sources that stall or raise: the state is saved, and the resumed run is bitwise the same."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import runtime
from t5x_lite.apps.common import waiting
from t5x_lite.apps.train import batches as train_batches
from t5x_lite.command_line import errors as cli_errors
from t5x_lite.data.batches import global_batches
from t5x_lite.data.batches import positions
from t5x_lite.errors import (
  ConfigError,
  DataError,
  DataStalledError,
  DataUnavailableError,
  StoppedOnSignalError,
)
from tests.apps.train import toy_run

_STEPS = 9
_PATIENCE_SECONDS, _STALLED_CLOSE_SECONDS = 0.2, 0.01


class _Faulty(data.HostIterator):
  """The toy data with a fault before some batch. Without cheap states an error loses its position, as in tf.data."""

  def __init__(self, source, fault, has_cheap_state):
    self.source = source
    self.fault = fault
    self.has_cheap_state = has_cheap_state
    self._is_reading = False
    self.num_set = 0
    self.thread = None  # the thread that read last

  @property
  def element_spec(self):
    return self.source.element_spec

  @property
  def num_batches(self):
    """Number of batches before the position."""
    return positions.read_state(self.source.get_state())['num_batches']

  def __next__(self):
    number = self.num_batches + 1
    self.thread = threading.current_thread()
    self._is_reading = True
    try:
      self.fault(number)
    except Exception:
      if not self.has_cheap_state:
        next(self.source)
      raise
    finally:
      self._is_reading = False
    return next(self.source)

  def get_state(self, undelivered=()):
    assert not self._is_reading
    return self.source.get_state(undelivered)

  def set_state(self, state):
    assert not self._is_reading
    self.num_set += 1
    self.source.set_state(state)


class _Stall:
  """Blocks the reader of batch `at` until the test ends."""

  def __init__(self, at):
    self._at = at
    self.is_reached = False
    self.released = threading.Event()

  def __call__(self, number):
    if number == self._at:
      self.is_reached = True
      self.released.wait()
      raise OSError('The test is over.')


class _Raise:
  """Raises `error` for the batch `at`, `times` times."""

  def __init__(self, at, error, times):
    self._at = at
    self._error = error
    self.left = times

  def __call__(self, number):
    if number == self._at and self.left:
      self.left -= 1
      raise self._error


def _opener(fault, has_cheap_state):
  return lambda *args, **kwargs: _Faulty(
    data.open_train_iterator(*args, **kwargs), fault, has_cheap_state
  )


def _batches(fault, has_cheap_state, **kwargs):
  cfg, partitioner = toy_run.dataset('train'), toy_run.partitioner()
  source = _opener(fault, has_cheap_state)(cfg, partitioner.get_data_layout(cfg.batch_size))
  return data.GlobalBatches(source, partitioner, **kwargs), source


def _ids(batch):
  return np.asarray(batch['decoder_target_tokens'])


@pytest.fixture(scope='module')
def expected():
  """The first 12 batches of the toy data."""
  cfg = toy_run.dataset('train')
  source = data.open_train_iterator(cfg, toy_run.partitioner().get_data_layout(cfg.batch_size))
  return [next(source)['decoder_target_tokens'] for _ in range(12)]


@pytest.fixture
def delays(monkeypatch):
  """Make retries and save wait for milliseconds."""
  # These times are not options, and the real ones would make the tests slow.
  monkeypatch.setattr(global_batches, '_FIRST_DELAY_SECONDS', 0.001)
  monkeypatch.setattr(global_batches, '_PATIENCE_SECONDS', _PATIENCE_SECONDS)
  monkeypatch.setattr(global_batches, '_STALLED_SAVE_SECONDS', 0.01)
  monkeypatch.setattr(global_batches, '_STALLED_CLOSE_SECONDS', _STALLED_CLOSE_SECONDS)


# ---- The iterator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('has_cheap_state', [True, False])
@pytest.mark.parametrize('saved_after', [None, 3])
def test_the_position_is_known_while_the_source_stalls(
  expected, delays, has_cheap_state, saved_after
):
  stall = _Stall(at=7)
  batches, _ = _batches(stall, has_cheap_state, prefetch=2)
  for number in range(1, 7):
    np.testing.assert_array_equal(_ids(batches.take(60)), expected[number - 1])
    if number == saved_after:
      batches.get_state()
    if number == 5:
      while not stall.is_reached:
        pass
      early = batches.get_state()
  assert batches.take(0.01) is None
  late = batches.get_state()
  stall.released.set()
  batches.close()
  for state, number in ((early, 6), (late, 7)):
    # The position saved before anything was read is the same.
    for _ in range(2):
      resumed, _ = _batches(lambda number: None, has_cheap_state)
      with resumed:
        resumed.set_state(state)
        state = resumed.get_state()
        np.testing.assert_array_equal(_ids(next(resumed)), expected[number - 1])
        np.testing.assert_array_equal(_ids(next(resumed)), expected[number])


@pytest.mark.parametrize('at', [3, None])
def test_a_source_that_stalls_is_waited_for_once_and_closed_when_the_stall_ends(
  delays, monkeypatch, at
):
  stall, closed, timeouts, join = _Stall(at=at), [], [], threading.Thread.join
  batches, source = _batches(stall, has_cheap_state=False, prefetch=1)
  source.close = lambda: closed.append(threading.current_thread())
  batches.take(60), batches.take(60)
  while at is not None and not stall.is_reached:
    pass
  batches.get_state()  # where the source stalls, it waits for the position in vain
  thread = source.thread
  monkeypatch.setattr(
    threading.Thread, 'join', lambda self, timeout: timeouts.append(timeout) or join(self, timeout)
  )
  batches.close()
  if at is None:
    assert closed == [thread] and timeouts == [_PATIENCE_SECONDS]
    return
  assert not closed and timeouts == [_STALLED_CLOSE_SECONDS]
  stall.released.set()
  join(thread, 60)
  assert closed == [thread]


@pytest.mark.parametrize('has_cheap_state', [True, False])
@pytest.mark.parametrize('error', [ConnectionResetError('reset'), DataUnavailableError('away')])
def test_retries_give_the_batches_of_an_undisturbed_source(
  expected, delays, has_cheap_state, error, caplog
):
  # Batch 6 is read again in every attempt of a source that must be reopened at an earlier position.
  fault = _Raise(7, error, times=3)
  batches, source = _batches(fault, has_cheap_state, num_retries=3)
  with batches:
    for rows in expected:
      np.testing.assert_array_equal(_ids(next(batches)), rows)
  assert source.num_set == 3
  assert [record.args[2:5] for record in caplog.records] == [
    (1, 3, 0.001),
    (2, 3, 0.002),
    (3, 3, 0.004),
  ]


@pytest.mark.parametrize('has_cheap_state', [True, False])
def test_an_error_that_stays_ends_and_the_position_is_known(expected, delays, has_cheap_state):
  batches, source = _batches(_Raise(7, OSError('gone'), times=100), has_cheap_state, num_retries=2)
  for rows in expected[:6]:
    np.testing.assert_array_equal(_ids(next(batches)), rows)
  with pytest.raises(DataUnavailableError, match='after 2 retries .*: OSError: gone') as caught:
    next(batches)
  assert isinstance(caught.value.__cause__, OSError)
  assert source.num_set == 2
  state = batches.get_state()
  batches.close()
  resumed, _ = _batches(lambda number: None, has_cheap_state)
  with resumed:
    resumed.set_state(state)
    np.testing.assert_array_equal(_ids(next(resumed)), expected[6])


def test_a_save_and_the_end_do_not_wait_for_a_retry(expected, monkeypatch, caplog):
  monkeypatch.setattr(global_batches, '_FIRST_DELAY_SECONDS', 600.0)
  batches, _ = _batches(_Raise(3, OSError('gone'), times=1), False, num_retries=1)
  with batches:
    next(batches), next(batches)
    while not caplog.records:  # of the retry
      time.sleep(0.01)
    state = batches.get_state()
  resumed, _ = _batches(lambda number: None, False)
  with resumed:
    resumed.set_state(state)
    np.testing.assert_array_equal(_ids(next(resumed)), expected[2])


def test_programming_errors_and_unknown_positions_are_not_retried(delays):
  batches, source = _batches(_Raise(3, KeyError('text'), times=1), True, num_retries=3)
  with batches, pytest.raises(KeyError, match='text'):
    for _ in range(3):
      next(batches)
  assert source.num_set == 0
  batches, source = _batches(_Raise(3, OSError('once'), times=1), False, num_retries=3)

  def no_state(undelivered=()):
    raise NotImplementedError

  source.get_state = no_state
  with batches, pytest.raises(DataUnavailableError, match='after 0 retries .*: OSError: once'):
    for _ in range(3):
      next(batches)


def test_a_cause_of_input_is_retried(delays, expected):
  """Preprocessors and readers wrap errors of files."""
  wrapped = ValueError('line 3')
  wrapped.__cause__ = OSError(5, 'Input/output error')
  batches, _ = _batches(_Raise(2, wrapped, times=1), True, num_retries=1)
  with batches:
    next(batches)
    np.testing.assert_array_equal(_ids(next(batches)), expected[1])


def test_an_unknown_position_is_counted_from_the_previous_one(expected, delays, caplog):
  batches, source = _batches(lambda number: None, False)
  ask, is_disk_full = source.get_state, True

  def get_state(undelivered=()):
    if is_disk_full:
      raise OSError(28, 'No space left on device')
    return ask(undelivered)

  source.get_state = get_state
  with batches:
    # Without any position there is nothing to count from, neither before the first batch nor after it.
    for _ in range(2):
      with pytest.raises(OSError, match='No space left'):
        batches.get_state()
      next(batches)
    is_disk_full = False
    batches.get_state()
    next(batches), next(batches)
    is_disk_full = True
    assert not caplog.records
    state = batches.get_state()
    assert 'No space left on device). The position of 2 batches ago is used' in caplog.text
    # The source is intact, and tells its position when it can.
    np.testing.assert_array_equal(_ids(next(batches)), expected[4])
    is_disk_full = False
    assert set(batches.get_state()) == set(state) - {'skipped_batches.json'}
  assert len(caplog.records) == 1
  resumed, _ = _batches(lambda number: None, False)
  with resumed:
    resumed.set_state(state)
    for rows in expected[4:8]:
      np.testing.assert_array_equal(_ids(next(resumed)), rows)


class _ReadsAhead(_Faulty):
  """A source whose position after batch 5 or later holds the error of batch 7, as tf.data's does."""

  def get_state(self, undelivered=()):
    state = super().get_state(undelivered)
    self.states_with_error = getattr(self, 'states_with_error', [])
    if self.num_batches >= 5:
      self.states_with_error.append(state)
    return state

  def set_state(self, state):
    super().set_state(state)
    if state in getattr(self, 'states_with_error', []):
      self.fault.left = 1


@pytest.mark.parametrize('num_retries', [0, 2])
def test_an_error_inside_the_newest_position_is_left_by_the_one_before(
  expected, delays, num_retries
):
  cfg, partitioner = toy_run.dataset('train'), toy_run.partitioner()
  source = _ReadsAhead(
    data.open_train_iterator(cfg, partitioner.get_data_layout(cfg.batch_size)),
    _Raise(7, OSError('once'), times=1),
    False,
  )
  with data.GlobalBatches(source, partitioner, num_retries=num_retries, prefetch=1) as batches:
    for number, rows in enumerate(expected[:6], start=1):
      np.testing.assert_array_equal(_ids(next(batches)), rows)
      if number in (2, 4):
        while source.num_batches < number + 1:
          pass
        batches.get_state()
    assert source.states_with_error
    if num_retries:
      for rows in expected[6:]:
        np.testing.assert_array_equal(_ids(next(batches)), rows)
      assert source.num_set == 2
      return
    with pytest.raises(DataUnavailableError, match='once'):
      next(batches)
    # The position that is saved at the end must not be one at which no run can resume.
    state = batches.get_state()
    source.fault.left = 0
    batches.set_state(state)
    np.testing.assert_array_equal(_ids(next(batches)), expected[6])


class _Opening(_Faulty):
  """The toy data with a fault before it tells a position or goes to one."""

  def __init__(self, source, asking=lambda: None, setting=lambda: None):
    super().__init__(source, lambda number: None, has_cheap_state=False)
    self._asking = asking
    self._setting = setting

  def get_state(self, undelivered=()):
    self._asking()
    return super().get_state(undelivered)

  def set_state(self, state):
    super().set_state(state)
    self._setting()


def _opening(cfg=None, layout=None, feature_converter='encoder_decoder', **faults):
  cfg = cfg or toy_run.dataset('train')
  layout = layout or toy_run.partitioner().get_data_layout(cfg.batch_size)
  return _Opening(
    data.open_train_iterator(cfg, layout, feature_converter=feature_converter), **faults
  )


@pytest.mark.parametrize('times', [3, 4])
def test_going_to_a_position_is_retried(expected, delays, times):
  with _batches(lambda number: None, False)[0] as batches:
    next(batches)
    state = batches.get_state()
  fault = _Raise(0, OSError('gone'), times=times)
  source = _opening(setting=lambda: fault(0))
  with data.GlobalBatches(source, toy_run.partitioner(), num_retries=3) as batches:
    batches.set_state(state)
    if times == 4:
      with pytest.raises(DataUnavailableError, match='after 3 retries .*: OSError: gone'):
        batches.open()
      batches.set_state(state)  # The source is there again.
    assert batches.open() and source.num_set == 4 + (times == 4)
    assert source.num_batches == 1  # Nothing is read before the first batch is wanted.
    assert batches.get_state() == state
    np.testing.assert_array_equal(_ids(next(batches)), expected[1])


def test_an_error_in_the_first_position_is_raised_where_the_data_is_opened(delays):
  fault = _Raise(0, DataError('cannot be saved'), times=1)
  with data.GlobalBatches(_opening(asking=lambda: fault(0)), toy_run.partitioner()) as batches:
    with pytest.raises(DataError, match='cannot be saved'):
      batches.open()
    assert batches.open()


@pytest.mark.parametrize('at', ['asking', 'setting'])
def test_another_position_is_set_while_opening_stalls(expected, delays, at):
  stall = _Stall(at=0)
  source = _opening(**{at: lambda: stall(0)})
  with data.GlobalBatches(source, toy_run.partitioner()) as batches:
    state = source.source.get_state()
    if at == 'setting':
      batches.set_state(state)
    assert not batches.open(0.01) and not batches.open(0.01)
    batches.set_state(state)
    assert not batches.open(0.01)
    stall._at = None
    stall.released.set()  # The error of the stalled call is not raised.
    np.testing.assert_array_equal(_ids(next(batches)), expected[0])


@pytest.mark.parametrize('num_retries', [-1, 12, 1.5, True])
def test_num_retries_is_checked(num_retries):
  with pytest.raises(ConfigError, match='num_retries` must be'):
    _batches(None, True, num_retries=num_retries)


# ---- The wait --------------------------------------------------------------------------------------------------------


class _Scripted:
  """Iterator that gives batches after given waits on a simulated clock."""

  is_endless = True

  def __init__(self, *waits):
    self._waits = list(waits)
    self.now = 0.0
    self.stopped = 0.0  # seconds of the next wait in which the process is stopped

  def take(self, timeout):
    if self._waits[0] > timeout:
      self._waits[0] -= timeout
      self.now += timeout + self.stopped
      self.stopped = 0.0
      return None
    self.now += self._waits.pop(0)
    return {'batch': self.now}


def _train_batches(source, *, clock=time.monotonic, on_wait=lambda: None, **kwargs):
  waits = waiting.DataWaits(runtime.StopSignals(), clock=clock, on_wait=on_wait)
  return train_batches.TrainBatches(
    source, should_stop=lambda: False, facts={}, first_step=0, waits=waits, **kwargs
  )


def _reports(monkeypatch):
  printed = []
  monkeypatch.setattr(runtime, 'print_stacks', printed.append)
  return printed


def test_a_slow_source_is_reported_every_five_minutes(monkeypatch):
  printed, source = _reports(monkeypatch), _Scripted(700, 299, 1000, 1)
  beats = []
  batches = _train_batches(
    source, clock=lambda: source.now, on_wait=lambda: beats.append(source.now)
  )
  next(batches), next(batches)
  assert [line.partition(' for ')[2].partition(' s.')[0] for line in printed] == ['300', '600']
  assert all('does not limit the first batch' in line for line in printed)
  assert len(beats) > 999 / waiting.POLL_SECONDS - 5
  next(batches), next(batches)
  assert [line.partition(' for ')[2].partition(' s.')[0] for line in printed[2:]] == [
    '300',
    '600',
    '900',
  ]
  assert all('set `max_batch_seconds` to limit' in line for line in printed[2:])
  assert batches.error is None


def test_the_wait_for_data_begins_when_the_device_has_finished():
  """A batch that is ready, or ready before the device is, costs nothing."""
  source, waits = _Scripted(0, 2.5, 6), []

  @contextlib.contextmanager
  def phase(name):
    begun = source.now
    yield
    waits.append((name, round(source.now - begun, 1)))

  batches = _train_batches(
    source, clock=lambda: source.now, is_computing=lambda: source.now < 5, phase_fn=phase
  )
  assert [round(next(batches)['batch'], 1) for _ in range(3)] == [0, 2.5, 8.5]
  assert waits == [('data', 3.5)]


def test_max_batch_seconds_exempts_the_first_batch(monkeypatch):
  printed, source = _reports(monkeypatch), _Scripted(100, 9, 11)
  batches = _train_batches(source, max_batch_seconds=10, clock=lambda: source.now)
  next(batches)
  source.stopped = 1000.0
  next(batches)
  assert not printed
  with pytest.raises(StopIteration):
    next(batches)
  assert (
    isinstance(batches.error, DataStalledError)
    and batches.error.exit_code == 4
    and batches.should_stop()
  )
  assert len(printed) == 1 and 'max_batch_seconds' in str(batches.error)


def test_the_first_batch_after_going_back_is_exempt(monkeypatch):
  source = _Scripted(1, 1, 100, 9, 11)
  source.set_state = lambda state: None
  batches = _train_batches(source, max_batch_seconds=10, clock=lambda: source.now)
  _reports(monkeypatch)
  next(batches), next(batches)
  batches.rewind({}, {}, 0, bad_step_age=1)
  next(batches)
  assert (
    source._waits == [11] and batches.error is None
  )  # The batch of the bad step, and its replacement.
  assert next(batches, None) is None and isinstance(batches.error, DataStalledError)


# ---- Whole runs ------------------------------------------------------------------------------------------------------


_QUICK = {'train_eval_dataset_cfg': None, 'infer_eval_dataset_cfg': None}


def _train(model_dir, **kwargs):
  return toy_run.train(model_dir, _STEPS, **_QUICK, **{'save': {'period': 4}, **kwargs})


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run without faults."""
  model_dir = tmp_path_factory.mktemp('whole')
  _train(model_dir)
  return model_dir


def _assert_equal(model_dir, whole):
  (state, position), (expected_state, expected_position) = (
    toy_run.saved(run, _STEPS) for run in (model_dir, whole)
  )
  jax.tree.map(np.testing.assert_array_equal, state, expected_state)
  # Both runs were saved by a source that knew its position.
  assert position == expected_position


@pytest.mark.full  # by default, a process gets the signal, below
def test_sigterm_saves_a_run_whose_source_stalls(whole, tmp_path, delays, monkeypatch):
  stall, take = _Stall(at=7), data.GlobalBatches.take

  def take_or_signal(self, timeout):
    batch = take(self, timeout)
    if batch is None and stall.is_reached:
      os.kill(os.getpid(), signal.SIGTERM)
    return batch

  with monkeypatch.context() as patch:
    patch.setattr(data.GlobalBatches, 'take', take_or_signal)
    with pytest.raises(StoppedOnSignalError, match='Stopped after step 6 of 9 by SIGTERM'):
      _train(tmp_path, get_dataset_fn=_opener(stall, False))
  stall.released.set()
  assert checkpoints.all_steps(tmp_path) == [4, 6]
  assert [row['step'] for row in toy_run.lines(tmp_path)['train']] == [4, 6]
  _train(tmp_path, get_dataset_fn=_opener(lambda number: None, False))
  _assert_equal(tmp_path, whole)


def _stall_and_signal(released):
  os.kill(os.getpid(), signal.SIGTERM)
  assert released.wait(60)


@pytest.mark.parametrize(
  'at, doing',
  [
    ('opening', 'opening the training data'),
    ('asking', 'reading the position'),
    ('setting', 'restoring the position'),
    ('evaluation', 'opening the evaluation data'),
  ],
)
def test_sigterm_ends_a_run_whose_source_stalls_while_it_is_opened(
  whole, tmp_path, delays, at, doing, capfd
):
  released = threading.Event()

  def stall():
    return _stall_and_signal(released)

  def open_iterator(*args, **kwargs):
    if at == 'opening':
      stall()
    return _opening(*args, **kwargs, **({at: stall} if at in ('asking', 'setting') else {}))

  shutil.copytree(whole, tmp_path / 'run')
  files = sorted(tmp_path.rglob('*'))
  evaluation = (
    {
      'train_eval_dataset_cfg': toy_run.dataset('validation'),
      'train_eval_get_dataset_fn': lambda *args, **kwargs: stall(),
    }
    if at == 'evaluation'
    else {}
  )
  try:
    with pytest.raises(
      StoppedOnSignalError,
      match=f'SIGTERM before the first step, while {doing}.*; there is nothing',
    ):
      toy_run.train(
        tmp_path / 'run',
        12,
        **{**_QUICK, **evaluation},
        save={'period': 4},
        get_dataset_fn=open_iterator,
      )
  finally:
    released.set()
  assert sorted(tmp_path.rglob('*')) == files
  assert (
    'SIGTERM: ending before the first step; send SIGTERM again to exit immediately.'
    in capfd.readouterr().err
  )


def test_sigterm_postpones_an_evaluation_whose_data_stalls(whole, tmp_path, delays):
  released = threading.Event()

  def open_evaluation(*args, **kwargs):
    ((name, batches),) = data.open_eval_iterators(*args, **kwargs).items()

    def stalling():
      yield next(iter(batches))
      _stall_and_signal(released)

    return {
      name: data.EvalBatches(stalling, batches.element_spec, len(batches), batches.num_examples)
    }

  try:
    with pytest.raises(
      StoppedOnSignalError, match='Stopped after step 4 of 9 by SIGTERM; step 4 is saved'
    ):
      toy_run.train(
        tmp_path,
        _STEPS,
        save={'period': 4},
        eval_period=4,
        infer_eval_dataset_cfg=None,
        train_eval_get_dataset_fn=open_evaluation,
      )
  finally:
    released.set()
  assert checkpoints.read_metadata(tmp_path / 'checkpoint_4')['run']['evaluation_due'] == [
    'training_eval'
  ]


def test_the_wait_for_evaluation_data_does_not_count_as_evaluation(
  whole, tmp_path, delays, monkeypatch
):
  """The limit of an evaluation ends the process without a save, so a source that is slow must not run into it."""
  ended = []
  monkeypatch.setattr(
    runtime, 'Watchdog', functools.partial(runtime.Watchdog, on_timeout=ended.append)
  )

  def open_evaluation(*args, **kwargs):
    ((name, batches),) = data.open_eval_iterators(*args, **kwargs).items()

    def slow():
      time.sleep(1.5)
      yield from batches

    return {name: data.EvalBatches(slow, batches.element_spec, len(batches), batches.num_examples)}

  toy_run.train(
    tmp_path,
    4,
    eval_period=4,
    infer_eval_dataset_cfg=None,
    max_evaluation_seconds=1.0,
    train_eval_get_dataset_fn=open_evaluation,
  )
  assert not ended and checkpoints.latest_step(tmp_path) == 4


def test_a_run_whose_source_raises_is_saved_and_resumes(whole, tmp_path, delays, capsys):
  with pytest.raises(KeyError, match='text'):
    _train(tmp_path, get_dataset_fn=_opener(_Raise(7, KeyError('text'), times=1), False))
  assert checkpoints.all_steps(tmp_path) == [4, 6]
  err = capsys.readouterr().err
  assert f'The training data failed after step 6; step 6 is saved in {tmp_path}. To resume:' in err
  # An error at once, before a step: the checkpoint stays as it is.
  with pytest.raises(DataUnavailableError, match='gone'):
    _train(tmp_path, get_dataset_fn=_opener(_Raise(7, OSError('gone'), times=9), False))
  assert checkpoints.all_steps(tmp_path) == [4, 6]
  _train(tmp_path, get_dataset_fn=_opener(lambda number: None, False))
  _assert_equal(tmp_path, whole)


def test_an_error_of_the_data_ends_a_run_with_its_own_status():
  statuses = []
  for error in (
    DataError('bad'),
    DataUnavailableError('away'),
    DataStalledError('stuck'),
    KeyError('text'),
    OSError('gone'),
  ):
    batches, _ = _batches(_Raise(1, error, times=1), True)
    with batches:
      stopping = _train_batches(batches)
      assert next(stopping, None) is None
    own_paths = [os.path.dirname(data.__path__[0])]
    ending = cli_errors.ending(stopping.error, name='t5x_lite', own_paths=own_paths, argv=[])
    statuses.append(ending.status)
  assert statuses == [2, 2, 4, 1, 2]
  # The source is at fault, and its frames are shown.
  assert ending.text.startswith('t5x_lite: error: The training data could not be read')
  assert 'in __call__' in ending.text


def test_a_run_whose_source_raises_once_is_the_undisturbed_run(whole, tmp_path, delays):
  # Lost positions: after the save of step 4 the source is reopened there, and the batches until the fault are dropped.
  _train(tmp_path, get_dataset_fn=_opener(_Raise(7, OSError('once'), times=1), False))
  toy_run.assert_same_run(tmp_path, whole, _STEPS)


def test_a_run_whose_source_stalls_too_long_is_saved(whole, tmp_path, delays, capsys):
  stall = _Stall(at=7)
  with pytest.raises(DataStalledError, match='max_batch_seconds'):
    _train(tmp_path, get_dataset_fn=_opener(stall, True), max_batch_seconds=0.3)
  stall.released.set()
  assert checkpoints.all_steps(tmp_path) == [4, 6]
  err = capsys.readouterr().err
  assert "Thread 't5x_lite-data'" in err and 'in __call__' in err
  _train(tmp_path)
  _assert_equal(tmp_path, whole)


def test_an_error_of_our_own_ends_a_process_whose_source_stalls():
  program = textwrap.dedent("""
      import concurrent.futures, threading
      from t5x_lite.command_line import cli

      def fail():
        threading.Thread(target=threading.Event().wait, name='t5x_lite-data', daemon=True).start()
        concurrent.futures.ThreadPoolExecutor().submit(threading.Event().wait)
        raise RuntimeError('ours')

      cli.main = fail
      cli.run_program()
      """)
  environment = {**os.environ, 'PYTHONPATH': str(pathlib.Path(__file__).parents[3])}
  done = subprocess.run(
    [sys.executable, '-c', program], env=environment, capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 1 and done.stderr.endswith('RuntimeError: ours\n'), done.stderr


def test_a_process_whose_source_stalls_ends_with_the_status_of_the_signal(whole, tmp_path):
  """Also if a pool of threads stalls, which Python would wait for at its end."""
  program = textwrap.dedent(f"""
      import concurrent.futures, sys, threading
      from t5x_lite.command_line import cli
      from tests.apps.train import test_batches as faults

      class Stall(faults._Stall):
        def __call__(self, number):
          if number == 7:
            print('stalls', flush=True)
            concurrent.futures.ThreadPoolExecutor().submit(threading.Event().wait).result()

      def run(arguments):
        faults._train({str(tmp_path)!r}, get_dataset_fn=faults._opener(Stall(at=7), True))

      command = cli.T5X_LITE.commands['train']._replace(run=run, entry=None)
      cli.T5X_LITE.commands['train'] = command
      sys.argv = ['t5x_lite', 'train']
      cli.run_program()
      """)
  environment = {**os.environ, 'PYTHONPATH': str(pathlib.Path(__file__).parents[3])}
  process = subprocess.Popen(
    [sys.executable, '-c', program],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stdout.readline() == 'stalls\n'
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == 75, err
  assert checkpoints.latest_step(tmp_path) in (4, 5, 6) and 'step' in err
  _train(tmp_path)
  _assert_equal(tmp_path, whole)


# ---- Other data at a restart -----------------------------------------------------------------------------------------


def _changes(caplog):
  messages = [record.getMessage() for record in caplog.records]
  caplog.clear()
  return [
    message.partition(': ')[2].partition('. ')[0]
    for message in messages
    if 'training data differs' in message
  ]


def test_another_batch_size_or_order_at_a_restart_is_reported_once(whole, tmp_path, caplog):
  shutil.copytree(whole, tmp_path / 'a')
  _train(tmp_path / 'a')
  assert not _changes(caplog)
  _train(tmp_path / 'a', train_dataset_cfg=toy_run.dataset('train', batch_size=16))
  assert _changes(caplog) == ['batch_size was 8 and is 16']
  # Without a saved position nothing else compares the order.
  toy_run.train(tmp_path / 'b', 1, **_QUICK, save={'save_dataset': False})
  other = dataclasses.replace(toy_run.dataset('train'), seed=5, shuffle=False)
  for total_steps, changes in (2, ['seed was 0 and is 5, shuffle was True and is False']), (3, []):
    toy_run.train(
      tmp_path / 'b', total_steps, **_QUICK, save={'save_dataset': False}, train_dataset_cfg=other
    )
    assert _changes(caplog) == changes
