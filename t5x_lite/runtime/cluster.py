"""Joining the cluster of a run: how many processes there are, which one this is, and where they meet.

The answer comes from flags, else from environment variables, which `t5x_lite launch` sets, else from JAX's detectors of
SLURM, Open MPI, Kubernetes and TPU pods.
"""

import atexit
from collections.abc import Iterable, Iterator, Mapping
import contextlib
import dataclasses
import errno
import functools
import hmac
import ipaddress
import logging
import os
import pathlib
import re
import shlex
import signal
import socket
import sys
import threading
import time
import types
from typing import Any
import warnings

from t5x_lite import checks
from t5x_lite.command_line.standard_streams import write_without_waiting
from t5x_lite.errors import ConfigError, ExitCode, StoppedOnSignalError
from t5x_lite.runtime import cluster_environment as names
from t5x_lite.runtime import connections
from t5x_lite.runtime import monitor as monitor_lib
from t5x_lite.runtime.cluster_environment import ADDRESS
from t5x_lite.runtime.cluster_environment import COUNT
from t5x_lite.runtime.cluster_environment import INDEX
from t5x_lite.runtime.cluster_environment import LAUNCHED
from t5x_lite.runtime.cluster_environment import LOCAL_DEVICES
from t5x_lite.runtime.cluster_environment import MODES
from t5x_lite.runtime.stop_requests import StopRequests

# JAX aborts processes, with a stack of C++, after these seconds more than we wait.
_JAX_MARGIN = 30
# Time in which all processes, which have done their work, leave JAX's cluster.
_SHUTDOWN_SECONDS = 5.0
# Limits against mistyped numbers, for which JAX raises internal errors.
_MAX_PROCESSES = 10**6
_MAX_SECONDS = 10**8
# Seconds after which a process says that it waits.
_SILENT_SECONDS = 10
# Sizes of a secret.
_MAX_SECRET_BYTES = 4096
_MIN_SECRET_DIGITS = 32
# Seconds between two looks at the launcher.
_LAUNCHER_SECONDS = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
  """Options of a cluster, those of the command line.

  Attributes:
    mode: 'auto' starts several processes only if more than one is found; 'on' raises without a cluster; 'off' starts
      one.
    coordinator_address: host and port of process 0, which all processes must reach.
    process_count: number of processes.
    process_index: index of this process, from 0.
    cluster_secret_file: file with the secret with which the processes sign their messages; None takes that of `launch`.
    initialization_timeout: seconds until all processes must have joined.
    heartbeat_timeout_seconds: seconds of silence after which a process counts as lost, and all others end.
  """

  mode: str = 'auto'
  coordinator_address: str | None = None
  process_count: int | None = None
  process_index: int | None = None
  cluster_secret_file: str | None = None
  initialization_timeout: int = names.INITIALIZATION_TIMEOUT
  heartbeat_timeout_seconds: int = names.HEARTBEAT_TIMEOUT

  def __post_init__(self):
    seconds = functools.partial(checks.number, at_most=_MAX_SECONDS, integer=True)
    checks.check('ClusterConfig', vars(self), mode=checks.one_of(MODES))
    checks.check(
      '',
      {f'--{name}': value for name, value in vars(self).items()},
      **{
        '--process_count': checks.number(
          at_least=1, at_most=_MAX_PROCESSES, integer=True
        ).or_none(),
        '--initialization_timeout': seconds(at_least=1),
        '--heartbeat_timeout_seconds': seconds(at_least=5),
        '--process_index': checks.number(at_least=0, integer=True).or_none(),
      },
    )
    if self.coordinator_address is not None and not is_address(self.coordinator_address):
      raise ConfigError(
        f'--coordinator_address must be HOST:PORT, got {self.coordinator_address!r}. Use the host of '
        'process 0 and a free port, e.g. node1:8476.'
      )
    if self.mode == 'off' and self.is_explicit:
      raise ConfigError(
        '--distributed=off starts one process, and --coordinator_address, --process_count or '
        '--process_index asks for several. Remove one of them.'
      )

  @property
  def is_explicit(self) -> bool:
    """True if a flag says where this process is."""
    flags = (self.coordinator_address, self.process_count, self.process_index)
    return any(value is not None for value in flags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSpec:
  """Number of a process in its cluster, and where the cluster is.

  Attributes:
    address: host and port of process 0.
    count: number of processes.
    index: index of this process.
    local_devices: numbers of the devices of this machine that the process uses; None for all.
    origin: source of these values, for messages, e.g. 'flags' or 'SLURM'.
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
    ConfigError: options contradict each other, there is no cluster and `mode` is 'on', or the port of process 0 is in
      use. If the other processes do not come within `initialization_timeout`, the process ends with status 75.
  """
  if cfg.mode == 'off' or monitor_lib.current_monitor() is not None:
    return monitor_lib.current_monitor()
  import jax

  if jax.distributed.is_initialized():
    return None
  spec = find_process(cfg)
  if spec is None:
    return None
  _follow_launcher()
  if spec.count == 1:
    logging.getLogger(__name__).info('1 process (%s).', spec.origin)
    return None
  # See `find_process`.
  assert spec.address is not None and spec.index is not None and spec.count is not None
  _check_share(spec)
  secret = read_secret(cfg.cluster_secret_file)
  bind_address = None
  if spec.index == 0:
    bind_address = find_bind_address(spec.address)
    _warn_of_open_port(bind_address, secret)
  # Stops are agreed by the monitor.
  jax.config.update('jax_enable_preemption_service', False)
  if spec.index == 0:
    _check_port(spec.address)
  with _waiting_for_others(spec, cfg.initialization_timeout):
    jax.distributed.initialize(
      coordinator_address=spec.address,
      coordinator_bind_address=bind_address,
      num_processes=spec.count,
      process_id=spec.index,
      local_device_ids=spec.local_devices,
      cluster_detection_method='deactivate',
      initialization_timeout=cfg.initialization_timeout + _JAX_MARGIN,
      heartbeat_timeout_seconds=cfg.heartbeat_timeout_seconds + _JAX_MARGIN,
    )
  _interrupt_on_signals()
  # JAX has no public name for the store.
  from jax._src import distributed

  store = distributed.global_state.client
  assert store is not None
  _check_secrets(store, spec, secret, cfg.initialization_timeout)
  if secret:
    store = connections.SignedStore(store, secret)
  monitor = monitor_lib.Monitor(
    store,
    spec.index,
    spec.count,
    heartbeat_timeout_seconds=cfg.heartbeat_timeout_seconds,
    is_gone_fn=functools.partial(connections.refuses_connections, spec.address),
  )
  connections.hold_aborts()
  monitor.start()
  monitor_lib.set_current_monitor(monitor)
  _end_with_program(monitor)
  num_devices = jax.device_count()  # All processes wait for each other here.
  if spec.index == 0:
    logging.getLogger(__name__).info(
      '%d processes (%s) with %d devices, address %s.',
      spec.count,
      spec.origin,
      num_devices,
      spec.address,
    )
  return monitor


def end(status: int = 0) -> None:
  """Wait for the other processes at the end of the program, or end this process with them if one has failed.

  Args:
    status: exit status of this process.
  """
  monitor = monitor_lib.current_monitor()
  if monitor is None:
    return
  if monitor.failure is not None:
    monitor.leave(monitor.failure.status)
  import jax

  try:
    if not monitor.finish():
      monitor.leave(status)
    # Another process may be killed before it comes to this barrier.
    is_shut_down = monitor.caller.returns_within(_SHUTDOWN_SECONDS, jax.distributed.shutdown)
  except (KeyboardInterrupt, StoppedOnSignalError):
    monitor.leave(status)  # Everything is done, and nobody needs to be waited for.
  if not is_shut_down:
    os._exit(status)
  monitor_lib.set_current_monitor(None)


def find_process(
  cfg: ClusterConfig, environment: Mapping[str, str] = os.environ
) -> ProcessSpec | None:
  """Return the number and index of this process; None if it is alone, and nothing says so.

  Args:
    cfg: options.
    environment: environment variables; JAX's detectors read those of the process.

  Raises:
    ConfigError: see `join`.
  """
  spec = ProcessSpec(
    address=cfg.coordinator_address,
    count=cfg.process_count,
    index=cfg.process_index,
    local_devices=_numbers(environment, LOCAL_DEVICES),
    origin='flags',
  )
  if not cfg.is_explicit:
    spec = dataclasses.replace(spec, origin=_origin(environment))
  spec = dataclasses.replace(
    spec,
    address=_first(spec.address, environment.get(ADDRESS) or None),
    count=_first(spec.count, _number(environment, COUNT)),
    index=_first(spec.index, _number(environment, INDEX)),
  )
  if None in (spec.address, spec.count, spec.index) and spec.count != 1:
    spec = _complete(spec, cfg)
  if not spec.origin and cfg.mode == 'auto':
    return None
  if spec.count == 1 and not spec.index:
    return spec
  missing = []
  if spec.address is None:
    missing.append(f'--coordinator_address ({ADDRESS})')
  if spec.count is None:
    missing.append(f'--process_count ({COUNT})')
  if spec.index is None:
    missing.append(f'--process_index ({INDEX})')
  if not spec.origin:
    raise ConfigError(
      '--distributed=on must be used in a cluster, and neither flags, environment variables nor a scheduler that JAX '
      f'knows describe one. Pass {", ".join(missing)}, start all processes of one machine with `t5x_lite launch -n N '
      '-- COMMAND`, or remove --distributed=on or --multiprocess_gpu.'
    )
  if spec.address is None or spec.count is None or spec.index is None:
    raise ConfigError(
      f'A cluster ({spec.origin}) must have an address, a number of processes and an index of this '
      f'process, got no {", ".join(missing)}. Set it, or unset the others.'
    )
  if not is_address(spec.address):
    raise ConfigError(
      f'The environment variable {ADDRESS} must be HOST:PORT, got {spec.address!r}. Correct or unset '
      'it.'
    )
  if not spec.index < spec.count <= _MAX_PROCESSES:
    raise ConfigError(
      f'The index of a process must be below the number of processes, got --process_index={spec.index} '
      f'and --process_count={spec.count} ({spec.origin}). Number the processes from 0.'
    )
  return spec


def _origin(environment: Mapping[str, str]) -> str:
  """Return the origin of the values of environment variables; empty if none is set."""
  if not any(environment.get(name) for name in (COUNT, ADDRESS, INDEX)):
    return ''
  if environment.get(LAUNCHED):
    return 'launch'
  return 'environment variables'


def _complete(spec: ProcessSpec, cfg: ClusterConfig) -> ProcessSpec:
  """Return a spec with what JAX's detectors know in addition; a detector that fails means one process."""
  # A detector without the package that it needs warns and finds nothing.
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    try:
      problem = ''
      found = _detect(spec, cfg.initialization_timeout)
      if caught and found is None:
        problem = ' '.join(str(caught[0].message).split())
    except Exception as error:  # a scheduler may set anything, and JAX may rename its detectors
      found = None
      problem = f'{type(error).__name__}: {error}'
  if problem and (cfg.mode == 'on' or cfg.is_explicit):
    raise ConfigError(
      f'The cluster cannot be detected: {problem.rstrip(".")}. Pass --coordinator_address, '
      '--process_count and --process_index.'
    )
  if problem:
    logging.getLogger(__name__).warning(
      'The cluster cannot be detected, so this process runs alone (%s). Pass --coordinator_address, --process_count '
      'and --process_index for several processes, or --distributed=off for one.',
      problem,
    )
  if found is None:
    return spec
  return found


def _detect(spec: ProcessSpec, timeout: int) -> ProcessSpec | None:
  """Return the spec that JAX's first applicable detector finds; None without a detector, or with one process."""
  from jax._src import clusters

  for detector in clusters.ClusterEnv._cluster_types:
    if detector.opt_in_only_method or not detector.is_env_present():
      continue
    origin = _NAMES.get(detector.__name__, detector.__name__)
    count = _first(spec.count, detector.get_process_count())
    address = spec.address
    if count == 1 and address is None:
      return ProcessSpec(address=None, count=1, index=0, origin=origin)
    # A scheduler of TPUs gives each process its own ones.
    local_devices = spec.local_devices
    local = None if _has_own_gpus() else detector.get_local_process_id()
    if not local_devices and local is not None:
      local_devices = (local,)
    if not address:
      port = os.environ.get('JAX_COORDINATOR_PORT')
      address = detector.get_coordinator_address(
        timeout_secs=timeout, override_coordinator_port=port
      )
    index = _first(spec.index, detector.get_process_id())
    return ProcessSpec(
      address=address, count=count, index=index, local_devices=local_devices, origin=origin
    )
  return None


def _has_own_gpus(environment: Mapping[str, str] = os.environ) -> bool:
  """Return whether the scheduler shows this task only its own GPUs, whose numbers then begin with 0 in each task."""
  return bool(environment.get('SLURM_GPUS_PER_TASK')) or len(names.gpus(environment)) == 1


_NAMES = {
  'SlurmCluster': 'SLURM',
  'OmpiCluster': 'Open MPI',
  'K8sCluster': 'Kubernetes',
  'GkeTpuCluster': 'TPU pod',
  'GceTpuCluster': 'TPU pod',
}


def _check_share(spec: ProcessSpec, environment: Mapping[str, str] = os.environ) -> None:
  """Warn if the processes of this node use fewer GPUs than it has for them; JAX gives each process one."""
  num_gpus = _first(_number(environment, 'SLURM_GPUS_ON_NODE'), len(names.gpus(environment)))
  tasks = _first(_tasks_of_node(environment), _number(environment, 'OMPI_COMM_WORLD_LOCAL_SIZE'))
  if spec.local_devices is None or tasks is None:
    return
  num_used = len(spec.local_devices)
  if tasks * num_used < num_gpus:
    logging.getLogger(__name__).warning(
      'Process %d uses %d of the %d GPUs of its node, which has %d task(s). Start one task for each GPU (SLURM: '
      '--ntasks-per-node=%d), or set %s=%s for a task with all of them.',
      spec.index,
      num_used,
      num_gpus,
      tasks,
      num_gpus,
      LOCAL_DEVICES,
      ','.join(map(str, range(num_gpus))),
    )


def _tasks_of_node(environment: Mapping[str, str]) -> int | None:
  """Return the number of tasks of this node: SLURM writes '2(x3),1' for three nodes with two tasks and one with one."""
  counts = []
  text = environment.get('SLURM_STEP_TASKS_PER_NODE', '')
  for count, times in re.findall(r'(\d+)(?:\(x(\d+)\))?', text):
    counts += [int(count)] * int(times or 1)
  node = _number(environment, 'SLURM_NODEID')
  if node is not None and node < len(counts):
    return counts[node]
  return None


def read_secret(path: str | None, environment: Mapping[str, str] = os.environ) -> str:
  """Return the secret of the run: that of a file, else that of `launch`; empty without both.

  Raises:
    ConfigError: the file cannot be read, is short, or others may read it.
  """
  if path is None:
    return environment.get(names.SECRET, '')
  try:
    with open(path, 'rb') as f:
      status = os.fstat(f.fileno())
      secret = f.read(_MAX_SECRET_BYTES).strip().hex()
  except OSError as error:
    raise ConfigError(
      f'--cluster_secret_file must be a file that can be read, got {path!r} ({error.strerror}). Write one with: '
      f'(umask 077; head -c 32 /dev/urandom > {shlex.quote(path)}).'
    ) from None
  # A secret that Kubernetes mounts belongs to root, and to a group of which the process is the only user's.
  forbidden = 0o077 if status.st_uid == os.geteuid() else 0o027
  if status.st_mode & forbidden:
    raise ConfigError(
      f'--cluster_secret_file must be a file that only you can read, got {path!r} with the permissions '
      f'{status.st_mode & 0o777:o}. In Kubernetes write `defaultMode: 0400` into the volume of the Secret; change the '
      f'permissions of another file by: chmod 600 {shlex.quote(path)}.'
    )
  if len(secret) < _MIN_SECRET_DIGITS:
    raise ConfigError(
      f'--cluster_secret_file must have at least {_MIN_SECRET_DIGITS // 2} bytes, got {len(secret) // 2} in '
      f'{path!r}. Write it again with: (umask 077; head -c 32 /dev/urandom > {shlex.quote(path)}).'
    )
  return secret


def _check_secrets(
  store: connections.Store, spec: ProcessSpec, secret: str, timeout_seconds: int
) -> None:
  """Raise ConfigError unless this process has the secret of process 0; process 0 checks all others.

  Otherwise each would ignore what the other one says, and take it for lost.
  """
  own = hmac.new(secret.encode(), b'secret of the run', 'sha256').hexdigest()
  store.key_value_set(f't5x_lite/secret/{spec.index}', own)
  others: Iterable[int] = (0,)
  if spec.index == 0:
    others = range(1, spec.count or 1)
  for other in others:
    theirs = store.blocking_key_value_get(f't5x_lite/secret/{other}', timeout_seconds * 1000)
    if theirs != own:
      raise ConfigError(
        f'--cluster_secret_file must be a file with the same content on all processes, got another one on process '
        f'{other} than on process {spec.index}. Pass the same file to all of them, or to none.'
      )


def find_bind_address(address: str) -> str:
  """Return the host and port at which process 0 listens: those of `address` if the host is an address of this machine.

  Otherwise, as behind a translated address, all interfaces. JAX's own default is always all of them.
  """
  host, _, port = address.rpartition(':')
  host = host.strip('[]')
  try:
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
  except OSError:
    found = []
  for family, kind, protocol, _, place in found:
    name = str(place[0])
    # Many machines have their own name as a loopback address, while others know the real one.
    if _is_loopback(name) and host not in ('localhost', name):
      continue
    with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
      probe.bind((name, 0))
      if family == socket.AF_INET6:
        return f'[{name}]:{port}'
      return f'{name}:{port}'
  return f'[::]:{port}'


def _is_loopback(host: str) -> bool:
  return ipaddress.ip_address(host.partition('%')[0]).is_loopback


def _warn_of_open_port(address: str, secret: str) -> None:
  """Warn once if everyone in the network can send messages to the processes."""
  host = address.rpartition(':')[0].strip('[]')
  if host != '::' and (secret or _is_loopback(host)):
    return
  if secret:
    text = "its messages are signed, but JAX's service is open"
  else:
    text = 'the messages of the processes are not signed: use --cluster_secret_file'
  logging.getLogger(__name__).warning(
    'Process 0 listens at %s, and %s. Keep the port behind a firewall, see docs/cluster.md.',
    address,
    text,
  )


def _check_port(address: str) -> None:
  """Raise if the port of process 0 is in use; JAX would end the process without a message."""
  port = int(address.rpartition(':')[2])
  for family, host in ((socket.AF_INET6, '::'), (socket.AF_INET, '0.0.0.0')):
    with contextlib.suppress(OSError), socket.socket(family) as probe:
      # A run that has ended does not count.
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      try:
        probe.bind((host, port))
      except OSError as error:
        if error.errno == errno.EADDRINUSE:
          raise ConfigError(
            f'The port of --coordinator_address={address} must be free on the machine of process 0, got one that '
            'another program uses, perhaps a second process with the index 0. Choose another port, or correct '
            '--process_index.'
          ) from None


@contextlib.contextmanager
def _waiting_for_others(spec: ProcessSpec, timeout: int) -> Iterator[None]:
  """Context of JAX's call that waits for the other processes: it ends the process in time, and lets signals do so."""
  has_joined = threading.Event()
  who = f'process {spec.index} of {spec.count} ({spec.origin}, address {spec.address})'

  def limit() -> None:
    if has_joined.wait(min(_SILENT_SECONDS, timeout)):
      return
    write_without_waiting(f't5x_lite: {who} waits for the others.\n')
    if not has_joined.wait(timeout - min(_SILENT_SECONDS, timeout)):
      write_without_waiting(
        f't5x_lite: error: {who} has waited {timeout} s for the others (--initialization_timeout). Check '
        'that all of them were started, each with its own index, and that process 0 runs on this host and '
        'can be reached at this port. Then rerun the command on all machines.\n'
      )
      os._exit(ExitCode.RESTART)

  threading.Thread(target=limit, name='t5x_lite-cluster', daemon=True).start()
  # JAX does not return to Python, whose handler would wait.
  handler = signal.getsignal(signal.SIGINT)
  is_main = threading.current_thread() is threading.main_thread()
  is_replaced = is_main and handler not in (signal.SIG_IGN, None)
  if is_replaced:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    yield
  finally:
    has_joined.set()
    if is_replaced:
      signal.signal(signal.SIGINT, handler)


def _interrupt_on_signals() -> None:
  """Let SIGTERM and SIGHUP raise until the run watches for them; without this, they would end the process silently."""
  if threading.current_thread() is not threading.main_thread():
    return

  requests = StopRequests()

  def handle(number: int, frame: Any) -> None:
    del frame
    is_first = not requests.count
    if not requests.add(number) and not is_first:
      return  # the same request again
    name = signal.Signals(number).name
    raise StoppedOnSignalError(
      f'Stopped by {name} outside of the steps of a run; there is nothing to save.', signal=name
    )

  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_DFL:
      signal.signal(number, handle)


def _end_with_program(monitor: monitor_lib.Monitor) -> None:
  """Report the exception that ends a program, and call `end` after it.

  The monitor's threads must not run when Python finalizes, which would abort the process.
  """
  print_exception = sys.excepthook

  def report(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
  ) -> None:
    if isinstance(error, StoppedOnSignalError) and monitor.stops.has_agreed:
      print_exception(kind, error, trace)
    else:
      monitor.report(error)

  sys.excepthook = report
  atexit.register(end)


def _follow_launcher(environment: Mapping[str, str] = os.environ) -> None:
  """Ask this process to stop within a second once `launch`, which has started it, does not run any more.

  The kernel's own notice (PR_SET_PDEATHSIG) reaches only children, not what a script between has started.
  """
  launcher = _number(environment, LAUNCHED)
  if launcher is None or not pathlib.Path('/proc/self').exists():
    return

  def follow() -> None:
    while _runs(launcher):
      time.sleep(_LAUNCHER_SECONDS)
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # below nohup
    os.kill(os.getpid(), signal.SIGTERM if ignores else signal.SIGHUP)

  threading.Thread(target=follow, name='t5x_lite-launcher', daemon=True).start()


def _runs(process: int) -> bool:
  """Return whether a process of this machine exists and is not a zombie, which nobody has waited for."""
  try:
    status = pathlib.Path(f'/proc/{process}/stat').read_text(encoding='utf-8')
  except OSError:
    return False
  # The name, in parentheses, may have spaces; the state follows it.
  return status.rpartition(')')[2].split()[0] not in ('Z', 'X')


def is_address(text: str) -> bool:
  """Return whether a text is HOST:PORT; an IPv6 address has brackets."""
  found = re.fullmatch(r'([\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})', text)
  return found is not None and 0 < int(found[2]) < 2**16


def _first(*values: Any) -> Any:
  for value in values:
    if value is not None:
      return value
  return None


def _number(environment: Mapping[str, str], name: str) -> int | None:
  text = environment.get(name)
  if text is None or text == '':
    return None
  if not text.isdecimal():
    raise ConfigError(
      f'The environment variable {name} must be a number, got {text!r}. Correct or unset it.'
    )
  return int(text)


def _numbers(environment: Mapping[str, str], name: str) -> tuple[int, ...] | None:
  text = environment.get(name)
  if not text:
    return None
  if not re.fullmatch(r'\d+(,\d+)*', text):
    raise ConfigError(
      f'The environment variable {name} must be numbers separated by commas, got {text!r}. Correct or '
      'unset it.'
    )
  return tuple(map(int, text.split(',')))
