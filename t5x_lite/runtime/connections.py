"""Connections between the processes of a run: signs that one is broken, and calls that may never return."""

from collections.abc import Callable
import contextlib
import ctypes
import functools
import hmac
import queue
import re
import signal
import socket
import threading
from typing import Protocol, TypeAlias
import weakref

# Errors of collectives and barriers when another process has gone.
_BROKEN = re.compile(
  r'gloo|nccl|connection (closed|reset|refused)|socket closed|broken pipe|UNAVAILABLE|DEADLINE_EXCEEDED|heartbeat|'
  r'coordination service|unhealthy',
  re.IGNORECASE,
)
_BROKEN_EAGERLY = re.compile(r'(gloo|nccl) \w+ failed', re.IGNORECASE)
# Length of an HMAC with SHA-256.
_SIGNATURE_DIGITS = 64
# Calls for the threads that wait; None ends one.
_Calls: TypeAlias = 'queue.SimpleQueue[Callable[[], None] | None]'


class Store(Protocol):
  """The methods of JAX's distributed runtime client that are used."""

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
    """Set a value; raise for an existing key, unless it may be overwritten."""
    ...

  def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
    """Return the keys below a folder, and their values."""
    ...

  def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
    """Return a value as soon as it exists; raise after the time."""
    ...


class UnsignedValueError(ValueError):
  """A value of the store is not signed with the secret of the run."""


class SignedStore:
  """Store whose values carry a signature of their key and text: HMAC with SHA-256 (RFC 2104).

  The port of the store is open to everyone who can reach it, so values without the signature are ignored.
  """

  def __init__(self, store: Store, secret: str):
    """Store the arguments; all processes have the same secret."""
    self._store = store
    self._secret = secret.encode()

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
    """See `Store`."""
    self._store.key_value_set(key, self._signature(key, value) + value, allow_overwrite)

  def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
    """See `Store`; without unsigned values."""
    values = []
    for name, text in self._store.key_value_dir_get(key):
      with contextlib.suppress(UnsignedValueError):
        values.append((name, self._verified(name, text)))
    return values

  def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
    """See `Store`; raises UnsignedValueError for an unsigned value."""
    return self._verified(key, self._store.blocking_key_value_get(key, timeout_in_ms))

  def _signature(self, key: str, value: str) -> str:
    """Return 64 hexadecimal digits."""
    return hmac.new(self._secret, f'{key}\n{value}'.encode(), 'sha256').hexdigest()

  def _verified(self, key: str, text: str) -> str:
    signature = text[:_SIGNATURE_DIGITS]
    value = text[_SIGNATURE_DIGITS:]
    if not hmac.compare_digest(signature.encode(), self._signature(key, value).encode()):
      raise UnsignedValueError(f'The value of {key!r} is not signed.')
    return value


class Caller:
  """Calls functions in threads of their own, so that one that hangs holds up nobody for longer than its limit.

  From Python 3.12 on, no thread can be started once the main program has ended. A few threads wait for that time.
  """

  def __init__(self, num_waiting: int = 8):
    """Start the threads that wait. At the end of the program, a call that never returns takes one of them away."""
    calls: _Calls = queue.SimpleQueue()
    for _ in range(num_waiting):
      threading.Thread(target=_call_all, args=(calls,), name='t5x_lite-caller', daemon=True).start()
    self._calls = calls
    weakref.finalize(self, _end_threads, calls, num_waiting).atexit = False

  def start(self, fn: Callable[[], object]) -> threading.Event:
    """Call a function, whose exceptions are dropped; return what is set after it."""
    done = threading.Event()
    call = functools.partial(_call, fn, done)
    try:
      threading.Thread(target=call, name='t5x_lite-call', daemon=True).start()
    except RuntimeError:  # The main program has ended, or the system has no more threads.
      self._calls.put(call)
    return done

  def returns_within(self, seconds: float, fn: Callable[[], object]) -> bool:
    """Call a function; return whether it ended within the time, also by an exception."""
    return self.start(fn).wait(seconds)


def _call(fn: Callable[[], object], done: threading.Event) -> None:
  try:
    with contextlib.suppress(Exception):
      fn()
  finally:
    done.set()


def _call_all(calls: _Calls) -> None:
  while call := calls.get():
    call()
    del call  # an idle thread keeps nothing alive


def _end_threads(calls: _Calls, num_waiting: int) -> None:
  for _ in range(num_waiting):
    calls.put(None)


def refuses_connections(address: str) -> bool:
  """Return whether the machine at `address` (host and port) says that no program listens there."""
  host, _, port = address.rpartition(':')
  try:
    socket.create_connection((host.strip('[]'), int(port)), 1.0).close()
  except ConnectionRefusedError:
    return True
  except OSError:  # it may come back
    return False
  return False


def is_connection_error(error: BaseException) -> bool:
  """Return whether an error may be that of another process: one of the runtime about a connection."""
  if type(error) is ValueError:  # of functions that JAX has not compiled
    return _BROKEN_EAGERLY.search(str(error)) is not None
  if {cls.__name__ for cls in type(error).__mro__} & {'JaxRuntimeError', 'XlaRuntimeError'}:
    return _BROKEN.search(str(error)) is not None
  return error.__cause__ is not None and is_connection_error(error.__cause__)


def hold_aborts() -> None:
  """Let a thread that calls `abort` sleep for 6 s before it ends the process.

  JAX's client calls it as soon as it loses process 0. Meanwhile, the monitor names the reason and ends the process with
  a status that schedulers restart on. The handler is a function of the C library, since no Python may run in it: the
  number of the signal, 6, is its argument.
  """
  with contextlib.suppress(OSError, AttributeError, ValueError):
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(int(signal.SIGABRT), ctypes.cast(library.sleep, ctypes.c_void_p))
