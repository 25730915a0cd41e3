"""The log of events: phases on a simulated clock, the file, hooks and warnings."""

import logging
import sys
import threading
import time

import pytest

from t5x_lite import errors
from t5x_lite import runtime
from t5x_lite.runtime import event_log

_LOGGER = logging.getLogger('t5x_lite.test')


class _Clock:
  """Simulated seconds."""

  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return _Clock()


@pytest.fixture
def make(tmp_path, clock):
  return lambda **kwargs: runtime.EventLog(
    tmp_path / runtime.EVENTS_FILE, clock=clock, wall_clock=lambda: 1000.0 + clock.now, **kwargs
  )


def _events(tmp_path):
  return list(runtime.read_events(tmp_path / runtime.EVENTS_FILE))


def _wait(clock, seconds):
  clock.now += seconds


def test_phases_add_up_to_the_time_between_events(make, clock, tmp_path):
  logged = []
  with make(log_fn=logged.append) as log:
    _wait(clock, 2)
    with log.phase('compiling'):
      _wait(clock, 3)
    log.step = 4
    log.emit('restored', source='new parameters')
    log.open()
    _wait(clock, 1)
    with log.phase('step'):
      _wait(clock, 5)
      with log.phase('data'):
        _wait(clock, 0.5)
      log.on_step(5)
      _wait(clock, 7)
    _wait(clock, 0.25)
    with log.phase('evaluation'), log.phase('compiling'):
      _wait(clock, 1)
    log.stop('action')
    log.stop('completed')  # the first cause counts
  found = _events(tmp_path)
  assert [(event.kind, event.step, dict(event.seconds)) for event in found] == [
    ('start', None, {}),
    ('restored', 4, {'starting': 2.0, 'compiling': 3.0}),
    ('first_step', 5, {'starting': 1.0, 'step': 5.0, 'data': 0.5}),
    ('stop', 5, {'step': 7.0, 'other': 0.25, 'compiling': 1.0}),
    ('summary', 5, {}),
  ]
  assert [event.wall_time for event in found] == [1100.0, 1105.0, 1111.5, 1119.75, 1119.75]
  assert found[-2].details == {'cause': 'action'} and found[0].details['num_processes'] == 1
  assert found[-1].details['total_seconds'] == {
    'step': 12.0,
    'data': 0.5,
    'evaluation': 0.0,
    'saving': 0.0,
    'compiling': 4.0,
    'starting': 3.0,
    'other': 0.25,
    'repeated': 0.0,
    'down': 0.0,
  }
  assert logged == [
    'Time of the run 0:19: 60.8% training steps, 2.5% waiting for data, 20.2% compiling, '
    '15.2% starting, 1.3% other.'
  ]


def test_a_long_time_without_events_is_written(make, clock, tmp_path):
  with make() as log:
    log.open()
    for step in range(1, 9):
      _wait(clock, 0.9)
      log.on_step(step)
    _wait(
      clock, 86400
    )  # now a step without an event is short in comparison, but a minute is written
    for step in range(9, 14):
      log.on_step(step)
      _wait(clock, 25)
    with log.phase('evaluation'):
      for _ in range(3):
        _wait(clock, 35)
        log.tick()
  assert [(event.kind, event.step) for event in _events(tmp_path)] == [
    ('start', None),
    ('first_step', 1),
    ('progress', 4),
    ('progress', 7),
    ('progress', 9),
    ('progress', 12),
    ('progress', 13),
    ('progress', 13),
    ('stop', 13),
    ('summary', 13),
  ]


def test_a_start_that_fails_is_written_only_in_a_run_that_has_the_file(make, tmp_path):
  for is_run in (False, True):
    with pytest.raises(errors.ConfigError), make() as log:
      if is_run:
        log.open()
      raise errors.ConfigError('bad')
    assert (tmp_path / runtime.EVENTS_FILE).exists() == is_run
  with pytest.raises(KeyError), make():
    raise KeyError('x')
  assert [event.details.get('error') for event in _events(tmp_path) if event.kind == 'stop'] == [
    'ConfigError',
    'KeyError',
  ]


@pytest.mark.parametrize(
  'error, details',
  [
    (
      errors.StoppedOnSignalError('Stopped.', signal='SIGTERM'),
      {'cause': 'signal', 'signal': 'SIGTERM'},
    ),
    (
      errors.NonFiniteMetricError('nan'),
      {'cause': 'non_finite', 'error': 'NonFiniteMetricError', 'message': 'nan'},
    ),
    (OSError('gone' * 900), {'cause': 'error', 'error': 'OSError', 'message': 'gone' * 250}),
    (None, {'cause': 'completed'}),
  ],
)
def test_causes_of_a_stop(make, tmp_path, error, details):
  try:
    with make() as log:
      log.open()
      if error is not None:
        raise error
  except Exception as raised:  # pylint: disable=broad-exception-caught
    assert raised is error
  assert _events(tmp_path)[-2].details == details


def test_the_next_process_appends_to_a_line_that_was_cut_off(make, tmp_path):
  path = tmp_path / runtime.EVENTS_FILE
  path.write_text(runtime.Event(kind='start', wall_time=1090.0).to_line() + '{"event": "progr')
  with make() as log:
    log.step = 0
    log.open()
  kinds = [event.kind for event in _events(tmp_path)]
  assert kinds == ['start', 'start', 'stop', 'summary'] and len(path.read_text().splitlines()) == 5
  assert _events(tmp_path)[-1].details['total_seconds']['down'] == 10.0


@pytest.mark.parametrize('seconds', ['5', '{"step": NaN}', '{"step": 1e999}', '{"step": "a"}'])
def test_a_changed_file_does_not_end_the_run(make, tmp_path, seconds, caplog):
  (tmp_path / runtime.EVENTS_FILE).write_text(
    f'{{"event": "progress", "wall_time": 1, "step": 1, "process": 0, "seconds": {seconds}}}\n'
  )
  with make() as log:
    log.step = 0
    log.open()
  assert 'goodput is unknown' in caplog.text


def test_only_the_lead_process_writes_and_hooks_are_called_in_each(make, tmp_path):
  seen = []
  with make(process=1, event_fns=[seen.append]) as log:
    log.open()
  assert not (tmp_path / runtime.EVENTS_FILE).exists()
  assert [(event.kind, event.process) for event in seen] == [('start', 1), ('stop', 1)]


def test_a_hook_that_raises_is_reported_once_and_the_others_are_called(make, tmp_path, caplog):
  seen = []

  def fail(event):
    raise ValueError(f'cannot send {event.kind}')

  with make(event_fns=[fail, seen.append]) as log:
    log.open()
    log.emit('progress')
  # The warning comes after the hooks of the event, so that all hooks get it.
  assert [event.kind for event in seen] == ['start', 'warning', 'progress', 'stop', 'summary']
  assert [record.getMessage().partition('. ')[0] for record in caplog.records] == [
    "A function of `train.event_fns` failed for the event 'start' (ValueError: cannot send start)"
  ]
  assert [event.kind for event in _events(tmp_path)] == [
    'start',
    'warning',
    'progress',
    'stop',
    'summary',
  ]


def test_warnings_are_events_also_in_hooks_and_threads(make, tmp_path):
  called = []

  def warn(event):
    called.append(event.kind)
    _LOGGER.warning('hook of %s', event.kind)  # without end if it were an event for hooks

  with make(event_fns=[warn]) as log:
    log.open()
    _LOGGER.info('not shown')
    thread = threading.Thread(target=_LOGGER.error, args=('broken: %d', 7))
    thread.start()
    thread.join()
  _LOGGER.warning('after the run')
  assert called == ['start', 'warning', 'stop', 'summary']
  found = [event.details for event in _events(tmp_path) if event.kind == 'warning']
  assert {'level': 'error', 'logger': 't5x_lite.test', 'message': 'broken: 7'} in found
  assert [details['message'] for details in found] == [
    'hook of start',
    'broken: 7',
    'hook of warning',
    'hook of stop',
    'hook of summary',
  ]


def _run_in_thread(fn, *args):
  thread = threading.Thread(target=fn, args=args, daemon=True)
  thread.start()
  thread.join(20)
  assert not thread.is_alive()


def test_a_hook_may_wait_for_a_thread_that_warns(make, tmp_path):
  called = []

  def hook(event):
    called.append((event.kind, event.details.get('message')))
    _run_in_thread(_LOGGER.warning, 'while the hook of %s waits', event.kind)

  def run():
    with make(event_fns=[hook]) as log:
      log.open()
      _LOGGER.warning('of the run')  # The handler of the logger calls the hooks.

  _run_in_thread(run)
  # A warning during the hooks of a warning is written, and not passed to the hooks, or they would be called for ever.
  in_order = [
    ('start', None),
    ('warning', 'while the hook of start waits'),
    ('warning', 'of the run'),
    ('stop', None),
    ('warning', 'while the hook of stop waits'),
    ('summary', None),
    ('warning', 'while the hook of summary waits'),
  ]
  assert called == in_order
  found = [(event.kind, event.details.get('message')) for event in _events(tmp_path)]
  assert [each for each in found if each[1] != 'while the hook of warning waits'] == in_order
  assert len(found) == len(in_order) + 4


def test_hooks_get_the_events_of_all_threads_one_at_a_time_and_in_order(make, tmp_path):
  called, running = [], []

  def hook(event):
    assert not running
    running.append(event)
    time.sleep(0.001)
    called.append(event)
    running.pop()

  with make(event_fns=[hook]) as log:
    log.open()
    threads = [
      threading.Thread(target=lambda: [log.emit('progress', number=i) for i in range(40)])
      for _ in range(4)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  # Also those whose hooks another thread calls when the log is left.
  assert [event.to_line() for event in called] == [event.to_line() for event in _events(tmp_path)]
  assert len(called) == 4 * 40 + 3


def test_leaving_waits_for_hooks_in_another_thread(make):
  called, is_calling = [], threading.Event()

  def hook(event):
    if event.kind == 'progress':
      is_calling.set()
      time.sleep(0.2)
    called.append(event.kind)

  with make(event_fns=[hook]) as log:
    thread = threading.Thread(target=log.emit, args=('progress',))
    thread.start()
    assert is_calling.wait(20)
  assert called == ['start', 'progress', 'stop']


def test_hooks_are_called_again_after_one_that_exits(make):
  called = []

  def hook(event):
    called.append(event.kind)
    if event.kind == 'progress':
      sys.exit(3)

  with pytest.raises(SystemExit), make(event_fns=[hook]) as log:
    log.emit('progress')
  assert called == ['start', 'progress', 'stop']


def test_two_threads_that_warn_and_emit_do_not_wait_for_each_other(make):
  with make(event_fns=[lambda event: _LOGGER.warning('hook')]) as log:
    threads = [
      threading.Thread(target=lambda: [_LOGGER.warning('thread') for _ in range(300)], daemon=True)
      for _ in range(2)
    ]
    for thread in threads:
      thread.start()
    for _ in range(300):
      log.emit('progress')
    for thread in threads:
      thread.join(60)
      assert not thread.is_alive()


def test_a_disk_that_is_full_does_not_end_the_run(make, tmp_path, monkeypatch):
  is_full = [True]
  write = event_log.files.os.write

  def full(fd, content):
    if is_full[0]:
      raise OSError(28, 'No space left on device')
    return write(fd, content)

  with make() as log:
    with monkeypatch.context() as patch:
      patch.setattr(event_log.files.os, 'write', full)
      log.open()
      log.emit('progress')
      is_full[0] = False
    log.emit('progress')
  assert [event.kind for event in _events(tmp_path)] == [
    'start',
    'progress',
    'progress',
    'stop',
    'summary',
  ]


def test_events_in_a_store(store, clock):
  lines, path = [], f'{store.root}/{runtime.EVENTS_FILE}'
  for _ in range(2):
    with runtime.EventLog(
      path, clock=clock, wall_clock=lambda: 1000.0 + clock.now, log_fn=lines.append
    ) as log:
      log.open()
      log.on_step(1)
  kinds = ['start', 'first_step', 'stop', 'summary']
  assert [event.kind for event in runtime.read_events(path)] == 2 * kinds
  assert store.names() == ['events.jsonl', 'events.jsonl.part-00001'] and len(lines) == 2


def test_a_deleted_file_continues_with_an_event_that_says_what_is_missing(
  make, clock, tmp_path, caplog
):
  with make() as log:
    log.open()
    log.on_step(7)
    _wait(clock, 1.0)
    (tmp_path / runtime.EVENTS_FILE).unlink()
    log.emit('progress')
  missing, *others = _events(tmp_path)
  assert [event.kind for event in others] == ['progress', 'warning', 'stop', 'summary']
  assert (missing.kind, missing.wall_time) == ('missing', 1101.0)
  assert missing.details == {
    'cause': 'was deleted or renamed',
    'to_step': 7,
    'to_wall_time': 1100.0,
  }
  assert caplog.text.count('was deleted or renamed while the run writes to it') == 1


def test_events_that_cannot_be_written_at_the_end_are_warned_of(make, tmp_path, caplog):
  path = tmp_path / runtime.EVENTS_FILE
  with make() as log:
    log.open()
    path.unlink()
    path.mkdir()  # in the way of a new file
    log.emit('restored')
  assert caplog.text.count(f'The newest events could not be written to {path}: ') == 1


def test_events_are_not_written_to_the_target_of_a_link(make, tmp_path):
  (tmp_path / 'other').write_text('of the user')
  (tmp_path / runtime.EVENTS_FILE).symlink_to('other')
  with pytest.raises(errors.LinkedFileError, match="a link to 'other'"):
    with make() as log:
      log.open()
  assert (tmp_path / 'other').read_text() == 'of the user'
