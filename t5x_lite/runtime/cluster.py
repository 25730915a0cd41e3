"""Joining the cluster of a run: how many processes there are, which one this is, and where they meet.

The answer comes from flags, else from environment variables, which `t5x_lite launch` sets, else from JAX's own detectors
of SLURM, Open MPI, Kubernetes and TPU pods.
"""

import atexit
from collections.abc import Iterator, Mapping
import contextlib
import ctypes
import dataclasses
import errno
import functools
import logging
import os
import re
import signal
import socket
import sys
import threading
import types
from typing import Any
import warnings

from t5x_lite import checks
from t5x_lite.errors import ClusterError, ConfigError, ExitCode, StoppedOnSignalError
from t5x_lite.runtime import connections
from t5x_lite.runtime import monitor as monitor_lib
from t5x_lite.runtime.cluster_environment import ADDRESS, COUNT, INDEX, LAUNCHED, LOCAL_DEVICES

MODES = ('auto', 'on', 'off')
_PR_SET_PDEATHSIG = 1
# JAX aborts processes, with a stack of C++, after these seconds more than we wait.
_JAX_MARGIN = 30
# Seconds after which a process says that it waits.
_PATIENCE = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
  """Options of a cluster, those of the command line.

  Attributes:
    mode: 'auto' starts several processes only if more than one is found; 'on' raises without a cluster; 'off' starts
      one.
    coordinator_address: host and port of process 0, which all processes must reach.
    process_count: number of processes.
    process_index: index of this process, from 0.
    initialization_timeout: seconds until all processes must have joined.
    heartbeat_timeout_seconds: seconds of silence after which a process counts as lost, and all others end.
  """

  mode: str = 'auto'
  coordinator_address: str | None = None
  process_count: int | None = None
  process_index: int | None = None
  initialization_timeout: int = 300
  heartbeat_timeout_seconds: int = 30

  def __post_init__(self):
    whole = checks.number(at_least=1, integer=True)
    count = whole.or_none()
    checks.check(
        '', {f'--{name}': value for name, value in vars(self).items()},
        **{'--process_count': count, '--initialization_timeout': whole,
           '--heartbeat_timeout_seconds': checks.number(at_least=5, integer=True),
           '--process_index': checks.number(at_least=0, integer=True).or_none()})
    if self.coordinator_address is not None and not _is_address(self.coordinator_address):
      raise ConfigError(f'--coordinator_address must be HOST:PORT, got {self.coordinator_address!r}. Use the host of '
                        'process 0 and a free port, e.g. node1:8476.')
    if self.mode == 'off' and self.is_explicit:
      raise ConfigError('--distributed=off starts one process, and --coordinator_address, --process_count or '
                        '--process_index asks for several. Remove one of them.')

  @property
  def is_explicit(self) -> bool:
    """True if a flag says where this process is."""
    return not (self.coordinator_address is self.process_count is self.process_index is None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Place of a process in its cluster.

  Attributes:
    address: host and port of process 0.
    count: number of processes.
    index: index of this process.
    local_devices: numbers of the devices of this machine that the process uses; None for all.
    origin: who says so.
  """

  address: str | None
  count: int | None
  index: int | None
  local_devices: tuple[int, ...] | None = None
  origin: str


def join(cfg: ClusterConfig) -> monitor_lib.Monitor | None:
  """Join the cluster of this process and start its monitor. Call this before JAX initializes its devices.

  Returns:
    The monitor; None for a process that is alone, or whose program has called `jax.distributed.initialize`.

  Raises:
    ConfigError: options contradict each other, or there is no cluster and `mode` is 'on'.
    ClusterError: the port of process 0 is in use. If the other processes do not come within `initialization_timeout`,
      the process ends with status 75.
  """
  import jax
  if cfg.mode == 'off' or monitor_lib.current_monitor() is not None or jax.distributed.is_initialized():
    return monitor_lib.current_monitor()
  place = find_place(cfg)
  if place is None or place.count == 1:
    return None
  _check_share(place)
  # Stops are agreed by the monitor.
  jax.config.update('jax_enable_preemption_service', False)
  _end_with_launcher()
  if place.index == 0:
    _check_port(place.address)
  with _waiting_for_others(place, cfg.initialization_timeout):
    jax.distributed.initialize(
        coordinator_address=place.address, num_processes=place.count, process_id=place.index,
        local_device_ids=place.local_devices, cluster_detection_method='deactivate',
        initialization_timeout=cfg.initialization_timeout + _JAX_MARGIN,
        heartbeat_timeout_seconds=cfg.heartbeat_timeout_seconds + _JAX_MARGIN)
  _interrupt_on_signals()
  # JAX has no public name for the store.
  from jax._src import distributed
  monitor = monitor_lib.Monitor(
      distributed.global_state.client, place.index, place.count,
      heartbeat_timeout_seconds=cfg.heartbeat_timeout_seconds,
      is_gone_fn=functools.partial(connections.refuses_connections, place.address))
  connections.hold_aborts()
  monitor.start()
  monitor_lib.set_current_monitor(monitor)
  _end_with_program(monitor)
  if place.index == 0:
    logging.getLogger(__name__).info('%d processes (%s), which meet at %s.', place.count, place.origin, place.address)
  return monitor


def find_place(cfg: ClusterConfig, environment: Mapping[str, str] = os.environ) -> Place | None:
  """Return the place of this process; None if it is alone.

  Args:
    cfg: options.
    environment: environment variables; JAX's detectors read those of the process.

  Raises:
    ConfigError: see `join`.
  """
  place = Place(address=cfg.coordinator_address, count=cfg.process_count, index=cfg.process_index,
                local_devices=_numbers(environment, LOCAL_DEVICES), origin='flags')
  is_launched = environment.get(COUNT) is not None or environment.get(ADDRESS) is not None
  if not cfg.is_explicit:
    place = dataclasses.replace(
        place, origin='launch' if environment.get(LAUNCHED) else 'environment variables' if is_launched else 'none')
  place = dataclasses.replace(
      place, address=place.address or environment.get(ADDRESS), count=_first(place.count, _number(environment, COUNT)),
      index=_first(place.index, _number(environment, INDEX)))
  if None in (place.address, place.count, place.index) and place.count != 1:
    place = _complete(place, cfg)
  if place.count == 1 and not place.index:
    return place
  missing = [name for name, value in (
      ('--coordinator_address', place.address), ('--process_count', place.count), ('--process_index', place.index))
             if value is None]
  if len(missing) == 3 and cfg.mode == 'auto':
    return None
  if missing:
    raise ConfigError(
        f'A cluster must have --coordinator_address, --process_count and --process_index, got no {", ".join(missing)}, '
        'and no scheduler that JAX knows gives them. Pass the flags, or start all processes of one machine with '
        '`t5x_lite launch -n N -- COMMAND`' + ('' if cfg.is_explicit else ', or remove --distributed=on') + '.')
  if not place.index < place.count:
    raise ConfigError(f'--process_index must be below --process_count={place.count}, got {place.index} ('
                      f'{place.origin}). Number the processes from 0.')
  return place


def _complete(place: Place, cfg: ClusterConfig) -> Place:
  """Return a place with what JAX's detectors know in addition; a detector that fails means one process."""
  # A detector without the package that it needs warns and finds nothing.
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    try:
      found = _detect(place, cfg.initialization_timeout)
      problem = ' '.join(str(caught[0].message).split()) if caught and found is None else ''
    except Exception as error:  # a scheduler may set anything, and JAX may rename its detectors
      found, problem = None, f'{type(error).__name__}: {error}'
  if problem and (cfg.mode == 'on' or cfg.is_explicit):
    raise ConfigError(f'The cluster cannot be detected: {problem.rstrip(".")}. Pass --coordinator_address, '
                      '--process_count and --process_index.')
  if problem:
    logging.getLogger(__name__).warning(
        'The cluster cannot be detected, so this process runs alone (%s). Pass --coordinator_address, --process_count '
        'and --process_index for several processes, or --distributed=off for one.', problem)
  return place if found is None else found


def _detect(place: Place, timeout: int) -> Place | None:
  """Return the place that JAX's first applicable detector finds; None without a detector, or with one process."""
  from jax._src import clusters
  for detector in clusters.ClusterEnv._cluster_types:
    if detector.opt_in_only_method or not detector.is_env_present():
      continue
    count = _first(place.count, detector.get_process_count())
    if count == 1 and place.address is None:
      return Place(address=None, count=1, index=0, origin=_NAMES.get(detector.__name__, detector.__name__))
    local = detector.get_local_process_id()
    return Place(
        address=place.address or detector.get_coordinator_address(
            timeout_secs=timeout, override_coordinator_port=os.environ.get('JAX_COORDINATOR_PORT')),
        count=count, index=_first(place.index, detector.get_process_id()),
        # A scheduler of TPUs gives each process its own ones.
        local_devices=place.local_devices or (None if local is None else (local,)),
        origin=_NAMES.get(detector.__name__, detector.__name__))
  return None


_NAMES = {'SlurmCluster': 'SLURM', 'OmpiCluster': 'Open MPI', 'K8sCluster': 'Kubernetes', 'GkeTpuCluster': 'TPU pod',
          'GceTpuCluster': 'TPU pod'}


def _check_share(place: Place, environment: Mapping[str, str] = os.environ) -> None:
  """Warn if SLURM gave this node more GPUs than its processes use; JAX gives each process one."""
  num_gpus = _number(environment, 'SLURM_GPUS_ON_NODE')
  tasks = _tasks_of_node(environment)
  if place.origin != 'SLURM' or place.local_devices is None or num_gpus is None or tasks is None:
    return
  used = tasks * len(place.local_devices)
  if used < num_gpus:
    logging.getLogger(__name__).warning(
        'Process %d uses %d of the %d GPUs of its node, which has %d task(s). Start one task for each GPU '
        '(--ntasks-per-node=%d), or set %s=%s for a task with all of them.', place.index, len(place.local_devices),
        num_gpus, tasks, num_gpus, LOCAL_DEVICES, ','.join(map(str, range(num_gpus))))


def _tasks_of_node(environment: Mapping[str, str]) -> int | None:
  """Return the number of tasks of this node: SLURM writes '2(x3),1' for three nodes with two tasks and one with one."""
  counts = []
  for count, times in re.findall(r'(\d+)(?:\(x(\d+)\))?', environment.get('SLURM_STEP_TASKS_PER_NODE', '')):
    counts += [int(count)] * int(times or 1)
  node = _number(environment, 'SLURM_NODEID')
  return counts[node] if node is not None and node < len(counts) else None


def _check_port(address: str) -> None:
  """Raise if the port of process 0 is in use; JAX would end the process without a message."""
  port = int(address.rpartition(':')[2])
  for family, host in ((socket.AF_INET6, '::'), (socket.AF_INET, '0.0.0.0')):
    with contextlib.suppress(OSError), socket.socket(family) as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # A run that has ended does not count.
      try:
        probe.bind((host, port))
      except OSError as error:
        if error.errno == errno.EADDRINUSE:
          raise ClusterError(
              f'The port of --coordinator_address={address} must be free on the machine of process 0, got one that '
              'another program uses, perhaps a second process with the index 0. Choose another port, or correct '
              '--process_index.') from None


@contextlib.contextmanager
def _waiting_for_others(place: Place, timeout: int) -> Iterator[None]:
  """Context of JAX's call that waits for the other processes: it ends the process in time, and lets signals do so."""
  has_joined = threading.Event()
  who = f'process {place.index} of {place.count} ({place.origin}), which meet at {place.address},'

  def limit() -> None:
    if has_joined.wait(min(_PATIENCE, timeout)):
      return
    os.write(2, f't5x_lite: {who} waits for the others.\n'.encode())
    if not has_joined.wait(timeout - min(_PATIENCE, timeout)):
      os.write(2, (f't5x_lite: error: {who} has waited {timeout} s for the others (--initialization_timeout). Check '
                   'that all of them were started, each with its own index, and that process 0 runs on this host and '
                   'can be reached at this port. Then rerun the command on all machines.\n').encode())
      os._exit(ExitCode.RESTART)

  threading.Thread(target=limit, name='t5x_lite-cluster', daemon=True).start()
  is_main = threading.current_thread() is threading.main_thread()
  # JAX does not return to Python, whose handler would wait.
  before = signal.signal(signal.SIGINT, signal.SIG_DFL) if is_main else None
  try:
    yield
  finally:
    has_joined.set()
    if is_main:
      signal.signal(signal.SIGINT, before)


def _interrupt_on_signals() -> None:
  """Let SIGTERM and SIGHUP raise until the run watches for them; without this, they would end the process silently."""
  if threading.current_thread() is not threading.main_thread():
    return

  def handle(number: int, frame: Any) -> None:
    del frame
    name = signal.Signals(number).name
    raise StoppedOnSignalError(f'Stopped by {name} before the run began; there is nothing to save.', signal=name)

  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_DFL:
      signal.signal(number, handle)


def _end_with_program(monitor: monitor_lib.Monitor) -> None:
  """Report the exception that ends the program, and wait for the other processes at its end.

  The monitor's threads must not run when Python finalizes, which would abort the process.
  """
  print_exception = sys.excepthook

  def report(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    print_exception(kind, error, trace)
    if not (isinstance(error, StoppedOnSignalError) and monitor.stops.has_agreed):
      monitor.report(error, int(getattr(error, 'exit_code', ExitCode.ERROR)))

  def end() -> None:
    if monitor.failure is not None:
      monitor.leave(monitor.failure.status)
    if monitor.finish():
      import jax
      jax.distributed.shutdown()

  sys.excepthook = report
  atexit.register(end)


def _end_with_launcher() -> None:
  """Let Linux send SIGTERM to this process when `launch` ends without doing so, e.g. because it was killed."""
  if os.environ.get(LAUNCHED) == str(os.getppid()):
    with contextlib.suppress(OSError, AttributeError):  # not Linux
      ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _is_address(text: str) -> bool:
  host, _, port = text.rpartition(':')
  return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _first(*values: Any) -> Any:
  return next((value for value in values if value is not None), None)


def _number(environment: Mapping[str, str], name: str) -> int | None:
  text = environment.get(name)
  if text is None or text == '':
    return None
  if not text.isdecimal():
    raise ConfigError(f'The environment variable {name} must be a number, got {text!r}. Correct or unset it.')
  return int(text)


def _numbers(environment: Mapping[str, str], name: str) -> tuple[int, ...] | None:
  text = environment.get(name)
  if not text:
    return None
  if not re.fullmatch(r'\d+(,\d+)*', text):
    raise ConfigError(f'The environment variable {name} must be numbers separated by commas, got {text!r}. Correct or '
                      'unset it.')
  return tuple(map(int, text.split(',')))
