"""Output that cannot be written: the run continues, saves, and keeps its exit status."""

import contextlib
import fcntl
import io
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from t5x_lite import checkpoints
from t5x_lite.apps import commands
from t5x_lite.command_line import cli
from t5x_lite.command_line import standard_streams
from tests import processes

_ROOT = pathlib.Path(__file__).parents[2]
# Buffered output, as is usual: an error may come as late as at the end.
_ENVIRONMENT = {
  **os.environ,
  'PYTHONPATH': str(_ROOT),
  'JAX_PLATFORMS': 'cpu',
  'XLA_FLAGS': '',
  'PYTHONUNBUFFERED': '',
}

# A command that writes in every way that libraries do, then leaves proof that it came to its end.
_WRITES = """
    import contextlib, logging, subprocess, sys, threading, warnings
    from t5x_lite import cli, errors
    from t5x_lite.command_line import standard_streams
    from t5x_lite.apps import commands

    def write():
      print('text')
      print('é' * 10_000, flush=True)
      print('part', end='', flush=True)
      sys.stdout.buffer.write(b'bytes')
      sys.stdout.flush()
      sys.stderr.write('error\\n')
      sys.stderr.isatty()
      sys.stderr.buffer.write(b'bytes')
      sys.stderr.buffer.flush()
      logging.getLogger('t5x_lite').warning('log')
      warnings.warn('warning')
      thread = threading.Thread(target=lambda: print('thread', file=sys.stderr, flush=True))
      thread.start()
      thread.join()

    def run(arguments):
      news = standard_streams.lossy_output('stdout', 'stderr') if sys.argv[2] == 'news' else contextlib.nullcontext()
      with news:
        with open(sys.argv[1], 'w') as f:  # its descriptor must not be one of the standard streams'
          write()
          if sys.argv[3] == 'later':
            sys.stdin.read()
            print('', flush=True)
            print('', file=sys.stderr)
            for number in (1, 2):  # a child process would end by SIGPIPE
              subprocess.run(['sh', '-c', f'echo child >&{number}'], check=True)
          write()
          f.write(f'the end {f.fileno() > 2}')
        if sys.argv[4] == 'defect':
          raise ZeroDivisionError('a defect')
        raise errors.StoppedOnSignalError('Stopped.')

    commands.COMMANDS['fake'] = commands.Command('write', lambda parser: None, run)
    sys.exit(cli.main(['fake']))
    """


def _start(code, *arguments, redirection='', environment=None, **kwargs):
  return subprocess.Popen(
    [
      'sh',
      '-c',
      f'exec "$0" -c "$@" {redirection}',
      sys.executable,
      textwrap.dedent(code),
      *map(str, arguments),
    ],
    cwd=_ROOT,
    env=environment or _ENVIRONMENT,
    **kwargs,
  )


def _dead_pipe():
  reader, writer = os.pipe()
  os.close(reader)
  return writer


def _dead_terminal():
  master, slave = os.openpty()
  os.close(master)
  return slave


def _full_pipe():
  """Return the writing end of a pipe that is never read and that does not block; keep the other end open."""
  reader, writer = os.pipe()
  os.dup(reader)
  fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
  os.set_blocking(writer, False)
  os.write(writer, b'x' * 4096)
  return writer


@pytest.mark.parametrize('end, status', [('request', 75), ('defect', 1)])
@pytest.mark.parametrize(
  'output', [_dead_pipe, _dead_terminal, _full_pipe, '>/dev/full 2>&1', '<&- >&- 2>&-']
)
def test_work_ends_with_its_own_status_whatever_becomes_of_its_output(
  tmp_path, output, end, status
):
  out = tmp_path / 'out'
  fd = os.open(os.devnull, os.O_WRONLY) if isinstance(output, str) else output()
  process = _start(
    _WRITES,
    out,
    'news',
    'now',
    end,
    redirection=output if isinstance(output, str) else '',
    stdin=subprocess.DEVNULL,
    stdout=fd,
    stderr=fd,
  )
  os.close(fd)
  process.wait(timeout=60)
  assert process.returncode == status
  assert out.read_text() == 'the end True'


def test_a_reader_that_ends_in_the_meantime(tmp_path):
  out = tmp_path / 'out'
  reader, writer = os.pipe()
  process = _start(
    _WRITES, out, 'news', 'later', 'request', stdin=subprocess.PIPE, stdout=writer, stderr=writer
  )
  os.close(writer)
  with open(reader, encoding='utf-8') as f:
    assert f.readline() == 'text\n'
  process.communicate(timeout=60)
  assert process.returncode == 75 and out.read_text() == 'the end True'


def test_output_comes_back_with_its_space(monkeypatch):
  reader, writer = os.pipe()
  fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
  os.set_blocking(writer, False)
  with open(reader, 'rb') as read, open(writer, 'w', encoding='utf-8') as stream:
    monkeypatch.setattr(sys, 'stderr', stream)
    with standard_streams.lossy_output('stderr', patience_seconds=0.1):
      assert sys.stderr.fileno() == writer and sys.stderr.encoding == stream.encoding
      print('x' * 4096, end='', file=sys.stderr, flush=True)
      print('lost', file=sys.stderr, flush=True)
      assert read.read(4096) == b'x' * 4096
      print('é\udcff', file=sys.stderr)
    assert sys.stderr is stream
    lost = 't5x_lite: 1 line of output could not be written.\n'
    assert os.read(reader, 100) == f'\n{lost}é\\udcff\n'.encode()


def _read_all(fd):
  """Return what a pipe or a terminal holds, with the line ends of files."""
  os.set_blocking(fd, False)
  parts = []
  with contextlib.suppress(BlockingIOError):
    while part := os.read(fd, 2**16):
      parts.append(part)
  return b''.join(parts).replace(b'\r\n', b'\n').decode()


@pytest.mark.parametrize('make', [os.pipe, os.openpty])
def test_a_reader_that_does_not_read_is_waited_for_once(monkeypatch, make):
  reader, writer = make()
  line = 'x' * 999
  with open(writer, 'w', encoding='utf-8') as stream:
    monkeypatch.setattr(sys, 'stderr', stream)
    with standard_streams.lossy_output('stderr', patience_seconds=0.2):
      begin = time.monotonic()
      for _ in range(200):  # more than the kernel holds
        print(line, file=sys.stderr, flush=True)
      assert 0.2 <= time.monotonic() - begin < 10
      first = _read_all(reader)
      print('again', file=sys.stderr, flush=True)
      num_written = first.count(line + '\n')
      assert 0 < num_written < 200
      assert _read_all(reader).endswith(
        f't5x_lite: {200 - num_written} lines of output could not be written.\nagain\n'
      )
  os.close(reader)


@pytest.mark.parametrize('make', [os.pipe, os.openpty])
def test_a_line_that_is_drawn_again_is_waited_for_once(monkeypatch, make):
  reader, writer = make()
  # With PYTHONUNBUFFERED, each flush writes nothing once more.
  with io.TextIOWrapper(io.FileIO(writer, 'wb'), encoding='utf-8', write_through=True) as stream:
    monkeypatch.setattr(sys, 'stderr', stream)
    with standard_streams.lossy_output('stderr', patience_seconds=0.5):
      begin = time.monotonic()
      for _ in range(100):
        print('\r' + 'x' * 999, end='', file=sys.stderr, flush=True)
      assert 0.5 <= time.monotonic() - begin < 10
  os.close(reader)


@pytest.mark.parametrize('make', [os.pipe, os.openpty])
def test_a_signal_does_not_wait_for_a_reader(make):
  code = """
      import os, sys, time
      from t5x_lite import runtime
      with runtime.StopSignals() as signals:
        os.set_blocking(2, False)
        try:
          while os.write(2, b'x' * 4096 if sys.argv[1] == 'pipe' else b'x'): pass
        except BlockingIOError:
          os.set_blocking(2, True)
        print('ready', flush=True)
        while not signals.requested: time.sleep(0.01)
      """
  reader, writer = make()
  process = _start(code, make.__name__, stdout=subprocess.PIPE, stderr=writer, text=True)
  os.close(writer)
  assert process.stdout.readline() == 'ready\n'
  process.terminate()
  assert process.wait(30) == 0
  process.stdout.close()
  os.close(reader)


@pytest.mark.parametrize(
  'output, status, error',
  [(_dead_pipe, 0, ''), ('>/dev/full', 74, 't5x_lite: error: No space left on device')],
)
def test_a_result_that_cannot_be_written_is_an_error_unless_its_reader_has_enough(
  output, status, error
):
  code = """
      import sys
      from t5x_lite.command_line import cli
      from t5x_lite.apps import commands
      commands.COMMANDS['fake'] = commands.Command('write', lambda parser: None, lambda arguments: print('result') or 0)
      sys.exit(cli.main(['fake']))
      """
  fd = subprocess.DEVNULL if isinstance(output, str) else output()
  process = _start(
    code,
    redirection=output if isinstance(output, str) else '',
    stdout=fd,
    stderr=subprocess.PIPE,
    text=True,
  )
  if fd != subprocess.DEVNULL:
    os.close(fd)
  _, err = process.communicate(timeout=60)
  assert (
    process.returncode == status and err.startswith(error) and len(err.splitlines()) == bool(error)
  ), err


def test_a_broken_pipe_of_a_data_source_is_an_error(capsys, monkeypatch):

  def run(arguments):
    raise BrokenPipeError(32, 'Broken pipe')  # as of a worker that died

  monkeypatch.setitem(commands.COMMANDS, 'fake', commands.Command('read', lambda parser: None, run))
  assert cli.main(['fake']) != 0  # it was taken for a reader of standard output that has gone
  assert 'Broken pipe' in capsys.readouterr().err


# ---- Whole runs ------------------------------------------------------------------------------------------------------

_TRAINS = """
    import sys
    from t5x_lite.command_line import cli
    from t5x_lite.apps import commands
    from tests.apps.train import toy_run

    def run(arguments):
      toy_run.train(sys.argv[1], int(sys.argv[2]), save={'period': None}, train_eval_dataset_cfg=None,
                    infer_eval_dataset_cfg=None, eval_period=None, stats_period=1)
      return 0

    commands.COMMANDS['toy'] = commands.Command('train', lambda parser: None, run)
    sys.exit(cli.main(['toy']))
    """


@pytest.fixture
def environment():
  return {**_ENVIRONMENT, 'XLA_FLAGS': processes.xla_flags(4)}


@pytest.mark.full  # by default, work below has outputs that break, and a run without any
def test_a_run_survives_the_reader_of_its_output(tmp_path, environment):
  reader, writer = os.pipe()
  process = _start(_TRAINS, tmp_path, 4, environment=environment, stdout=writer, stderr=writer)
  os.close(writer)
  with open(reader, encoding='utf-8') as f:  # head -2
    lines = (line for line in f if '  Making the state ' not in line)  # of a slow machine
    assert '  Training in ' in next(lines) and '  Starting from ' in next(lines)
  assert process.wait(timeout=300) == 0
  assert checkpoints.all_steps(tmp_path) == [4]


def test_a_run_without_output_saves_when_its_terminal_closes(tmp_path, environment):
  process = _start(_TRAINS, tmp_path, 10**6, environment=environment, redirection='>&- 2>/dev/full')
  metrics = tmp_path / 'train/metrics.jsonl'
  deadline = time.monotonic() + 300
  while (
    process.poll() is None
    and not (metrics.exists() and metrics.stat().st_size)
    and time.monotonic() < deadline
  ):
    time.sleep(0.05)
  process.send_signal(signal.SIGHUP)
  process.send_signal(signal.SIGHUP)
  assert process.wait(timeout=300) == 75
  assert len(checkpoints.all_steps(tmp_path)) == 1


@pytest.mark.full
@pytest.mark.parametrize(
  'redirection, status',
  [('2>&1 | head -2', 0), ('>&- 2>&-', 0), ('>/dev/full 2>&1', 0), ('2>&1 >&- | true', 0)],
)
def test_a_recipe_survives_its_output(tmp_path, environment, redirection, status):
  flags = [
    '--gin_file=recipes/keyword_cloze.gin',
    '--gin.DATA_SOURCE=builtin',
    f'--gin.MODEL_DIR={tmp_path}/run',
    '--gin.TRAIN_STEPS=3',
    '--gin.EVAL_PERIOD=2',
    '--gin.SAVING_PERIOD=1',
    '--gin.BATCH_SIZE=8',
  ]
  command = f'{{ "$0" -m t5x_lite train "$@"; echo $? >{tmp_path}/status; }} {redirection}'
  subprocess.run(
    ['sh', '-c', command, sys.executable, *flags], cwd=_ROOT, env=environment, timeout=600
  )
  assert int((tmp_path / 'status').read_text()) == status
  assert checkpoints.all_steps(tmp_path / 'run') == [1, 2, 3]
