"""Progress lines: on a terminal, on a narrow one, and in a file."""

import io
import logging
import time

import pytest

from t5x_lite import runtime


class _Clock:
  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


class _Terminal(io.StringIO):
  def isatty(self):
    return True

  def screen(self):
    """Return the text that a terminal shows: a carriage return goes to the start of the line, ESC[K clears the rest."""
    lines = []
    for line in self.getvalue().split('\n'):
      shown = ''
      for part in line.split('\r'):
        clears = '\x1b[K' in part
        part = part.replace('\x1b[K', '')
        shown = part if clears else part + shown[len(part) :]
      lines.append(shown)
    return lines


def test_one_line_in_place_on_a_terminal(monkeypatch):
  monkeypatch.setenv('COLUMNS', '120')
  clock, terminal = _Clock(), _Terminal()
  progress = runtime.Progress(stream=terminal, clock=clock)
  progress.note('starting')
  clock.now += 100
  progress.begin(2000, 1000, tokens_per_step=5000)
  for step in range(1001, 1101):
    clock.now += 0.5
    assert progress.due
    progress.update(step, {'loss': 2.34567, 'accuracy': 0.5})
    assert not progress.due
  assert terminal.screen() == [
    'step 1,100/2,000 ( 55%)  loss 2.346  accuracy 0.5  2 steps/s  10.0k tokens/s  ETA 7:30'
  ]
  progress.note('saving')
  assert terminal.screen() == ['saving']
  progress.log('evaluated')
  progress.update(2000, {'loss': 1.0}, last=True)
  assert terminal.screen()[0] == 'evaluated'
  assert (
    terminal.screen()[1].startswith('step 2,000/2,000 (100%)  loss 1')
    and 'took 0:50' in terminal.screen()[1]
  )
  assert terminal.screen()[2:] == ['']


def test_lines_do_not_wrap_on_a_narrow_terminal(monkeypatch):
  monkeypatch.setenv('COLUMNS', '20')
  terminal = _Terminal()
  progress = runtime.Progress(stream=terminal, clock=_Clock())
  progress.begin(10, 0)
  progress.update(5, {'loss': 1.0})
  assert len(terminal.screen()[0]) < 20


def test_lines_become_rarer_without_a_terminal():
  clock, stream = _Clock(), io.StringIO()
  progress = runtime.Progress(stream=stream, clock=clock)
  progress.begin(10**6, 0)
  progress.note('nothing of this')
  for step in range(1, 24 * 3600 // 5):
    clock.now += 5
    if progress.due:
      progress.update(step, {})
  lines = stream.getvalue().splitlines()
  assert '\r' not in stream.getvalue() and 'nothing' not in stream.getvalue()
  assert 200 < len(lines) < 600
  assert lines[0].startswith('step         2/1,000,000')
  assert runtime.Progress(enabled=False, stream=stream, clock=clock).due is False


def test_pauses_do_not_count_into_the_rate():
  clock, stream = _Clock(), io.StringIO()
  progress = runtime.Progress(stream=stream, clock=clock)
  progress.begin(100, 0)
  clock.now += 10
  progress.update(10, {})
  paused_at = progress.pause()
  clock.now += 1000
  progress.resume(paused_at)
  clock.now += 10
  progress.update(20, {})
  assert '  1 steps/s' in stream.getvalue().splitlines()[1]


def test_notes_become_lines_where_that_is_asked_for():
  clock, stream = _Clock(), io.StringIO()
  progress = runtime.Progress(stream=stream, clock=clock)
  for second in range(1, 25):
    clock.now += 1
    progress.note('busy')
    progress.note(f'second {second}', lines=True)
  assert stream.getvalue().splitlines() == ['second 10', 'second 20']


def test_long_work_is_a_line_without_a_terminal():
  stream = io.StringIO()
  progress = runtime.Progress(stream=stream, process=0)
  with progress.working('compiling', after_seconds=3600):
    pass
  assert not stream.getvalue()
  with progress.working('compiling', after_seconds=0.01):
    for _ in range(1000):
      if stream.getvalue():
        break
      time.sleep(0.01)
  assert stream.getvalue() == '[process 0] Compiling ...\n'


def test_the_plural_of_a_batch():
  clock, stream = _Clock(), io.StringIO()
  progress = runtime.Progress(stream=stream, clock=clock, unit='batch')
  progress.begin(10, 0)
  clock.now += 4
  progress.update(4, {}, last=True)
  assert '  1 batches/s' in stream.getvalue()


def test_lines_that_stay_have_process_and_step():
  terminal, stream = _Terminal(), io.StringIO()
  for shown in (terminal, stream):
    progress = runtime.Progress(stream=shown, clock=_Clock(), process=3)
    progress.log('opening')
    progress.step = 1200
    progress.begin(2000, 1200)
    progress.log('training')
    progress.log('step 1,000  evaluated')  # a line with its own step
    progress.update(1201, {'loss': 1.0}, last=True)
  lines = stream.getvalue().splitlines()
  assert terminal.screen() == [*lines, '']
  assert lines[:3] == [
    '[process 3] opening',
    '[process 3] step 1,200  training',
    '[process 3] step 1,000  evaluated',
  ]
  assert lines[3].startswith('[process 3] step 1,201/2,000 ( 60%)  loss 1')


@pytest.fixture
def log():
  """A logger of the package that writes to a terminal as the program does, and this terminal."""
  terminal, logger = _Terminal(), logging.getLogger('t5x_lite')
  handler = logging.StreamHandler(terminal)
  handler.setFormatter(logging.Formatter('{prefix}{message}', style='{', defaults={'prefix': ''}))
  before = logger.level, logger.propagate
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  logger.propagate = False
  yield logger, terminal
  logger.removeHandler(handler)
  logger.level, logger.propagate = before


def test_log_records_do_not_join_the_line_and_have_process_and_step(log):
  logger, terminal = log
  progress = runtime.Progress(stream=terminal, clock=_Clock(), process=0)
  with progress.above_line():
    progress.begin(10, 0)
    progress.step = 5
    progress.update(5, {})
    logger.getChild('somewhere').info('%d of %d files', 1, 2)
    logger.warning('step 3  optimizer: slow')
    progress.update(6, {})
  progress.clear()
  logger.info('afterwards')
  assert terminal.screen() == [
    '[process 0] step 5  1 of 2 files',
    '[process 0] step 3  optimizer: slow',
    'afterwards',
    '',
  ]


@pytest.mark.parametrize('level, shows', [('INFO', True), ('WARNING', False)])
def test_nothing_is_shown_above_the_level_of_the_log(log, level, shows):
  logger, terminal = log
  logger.setLevel(level)
  progress = runtime.Progress(stream=terminal, clock=_Clock())
  progress.begin(10, 0)
  progress.log('training')
  progress.note('saving')
  progress.update(5, {}, last=True)
  assert bool(terminal.getvalue()) == shows == progress.enabled
