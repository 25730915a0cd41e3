"""Progress lines: on a terminal, on a narrow one, and in a file."""

import io

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
        shown = part if clears else part + shown[len(part):]
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
      'step 1,100/2,000 ( 55%)  loss 2.346  accuracy 0.5  2 steps/s  10.0k tokens/s  ETA 7:30']
  progress.note('saving')
  assert terminal.screen() == ['saving']
  progress.log('evaluated')
  progress.update(2000, {'loss': 1.0}, last=True)
  assert terminal.screen()[0] == 'evaluated'
  assert terminal.screen()[1].startswith('step 2,000/2,000 (100%)  loss 1') and 'took 0:50' in terminal.screen()[1]
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


def test_the_plural_of_a_batch():
  clock, stream = _Clock(), io.StringIO()
  progress = runtime.Progress(stream=stream, clock=clock, unit='batch')
  progress.begin(10, 0)
  clock.now += 4
  progress.update(4, {}, last=True)
  assert '  1 batches/s' in stream.getvalue()
