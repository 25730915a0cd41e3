"""Signs of broken connections, and calls that may never return."""

import signal
import socket
import subprocess
import sys
import threading

import jax
import pytest

from t5x_lite.errors import DataError
from t5x_lite.runtime import connections
from tests import processes
from tests.runtime.fake_store import FakeStore


@pytest.mark.parametrize(
  'error, expected',
  [
    (
      ValueError(
        'UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:20897'
      ),
      True,
    ),
    (jax.errors.JaxRuntimeError('UNAVAILABLE: Socket closed'), True),
    (jax.errors.JaxRuntimeError('DEADLINE_EXCEEDED: Barrier timed out'), True),
    (jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory'), False),
    (ValueError('shapes differ'), False),
    (RuntimeError('Connection reset by peer'), False),  # of a user's data source
  ],
)
def test_errors_of_connections_are_known(error, expected):
  assert connections.is_connection_error(error) is expected
  assert not connections.is_connection_error(DataError('UNAVAILABLE: the storage'))


def test_a_port_without_a_program_refuses():
  with socket.create_server(('127.0.0.1', 0)) as server:
    address = f'127.0.0.1:{server.getsockname()[1]}'
    assert not connections.refuses_connections(address)
  assert connections.refuses_connections(address)
  assert not connections.refuses_connections('no.such.host.invalid:1')


def test_a_call_is_waited_for_as_long_as_it_may_take():
  caller = connections.Caller(num_waiting=1)
  assert caller.returns_within(10, lambda: None)
  assert caller.returns_within(10, lambda: 1 / 0)
  may_end = threading.Event()
  for _ in range(3):  # Calls that hang do not add up.
    assert not caller.returns_within(0.05, may_end.wait)
  assert caller.returns_within(10, lambda: None)
  may_end.set()


def test_calls_are_made_while_python_ends():
  """From Python 3.12 on, no thread can be started then."""
  program = """
    import atexit
    import threading
    from t5x_lite.runtime import connections
    caller = connections.Caller()
    def end():
      print(caller.returns_within(0.05, threading.Event().wait))
      print(caller.returns_within(20, lambda: print('called')))
    atexit.register(end)
  """
  with processes.start(program) as process:
    assert process.communicate(timeout=60)[0] == 'False\ncalled\nTrue\n'


def test_threads_end_with_their_caller():
  before = set(threading.enumerate())
  caller = connections.Caller(num_waiting=3)
  threads = [
    thread for thread in set(threading.enumerate()) - before if thread.name == 't5x_lite-caller'
  ]
  assert len(threads) == 3 and all(thread.daemon for thread in threads)
  del caller
  for thread in threads:
    thread.join(10)
    assert not thread.is_alive()


def test_a_thread_that_aborts_leaves_time_to_end():
  """As JAX's client does in a thread of its own when it loses the store."""
  program = """
import ctypes, os, threading, time
from t5x_lite.runtime import connections
connections.hold_aborts()
threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
time.sleep(1)
os._exit(75)
"""
  assert subprocess.run([sys.executable, '-c', program], timeout=60).returncode == 75
  without = program.replace('connections.hold_aborts()', '')
  assert subprocess.run([sys.executable, '-c', without], timeout=60).returncode == -signal.SIGABRT


def test_only_signed_values_are_heard():
  store = FakeStore()
  own = connections.SignedStore(store, 'secret')
  own.key_value_set('beat/0', '{"é": 1}')
  own.key_value_set('beat/1', 'first')
  own.key_value_set('beat/1', 'second', True)
  with pytest.raises(RuntimeError, match='ALREADY_EXISTS'):
    own.key_value_set('beat/1', 'third')
  assert dict(own.key_value_dir_get('beat/')) == {'beat/0': '{"é": 1}', 'beat/1': 'second'}
  assert own.blocking_key_value_get('beat/0', 1) == '{"é": 1}'
  forged = [
    '',
    'short',
    'x' * 100,
    'é' * 100,
    store.values['beat/0'],  # of another key
    store.values['beat/1'] + ' ',
  ]
  other = FakeStore()
  connections.SignedStore(other, 'other').key_value_set('beat/2', 'x')
  for text in [*forged, other.values['beat/2']]:
    store.values['beat/2'] = text
    assert len(own.key_value_dir_get('beat/')) == 2
    with pytest.raises(connections.UnsignedValueError):
      own.blocking_key_value_get('beat/2', 1)
  with pytest.raises(RuntimeError, match='DEADLINE'):
    own.blocking_key_value_get('beat/3', 1)
