"""Where a process finds its place in a cluster. Real processes join in tests/multiprocess."""

import logging
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import pytest

from t5x_lite.errors import ConfigError
from t5x_lite.runtime import cluster
from t5x_lite.runtime.cluster import ClusterConfig
from t5x_lite.runtime.cluster import ProcessSpec

_ROOT = pathlib.Path(__file__).parents[2]
_SLURM = {
  'SLURM_JOB_ID': '4100',
  'SLURM_STEP_NODELIST': 'node[07-08],node12',
  'SLURM_NTASKS': '6',
  'SLURM_PROCID': '3',
  'SLURM_LOCALID': '1',
}
# Port of JAX's detector for this job.
_SLURM_ADDRESS = f'node07:{4100 % 2**12 + 65535 - 2**12 + 1}'
_ENVIRONMENT = {
  'JAX_COORDINATOR_ADDRESS': 'host:1234',
  'JAX_NUM_PROCESSES': '4',
  'JAX_PROCESS_ID': '2',
}
_FLAGS = {'coordinator_address': 'n0:99', 'process_count': 8, 'process_index': 7}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
  for name in os.environ:
    if name.startswith(
      (
        'SLURM_',
        'OMPI_',
        'KUBERNETES_',
        'TPU_',
        'MEGASCALE_',
        'JAX_COORDINATOR',
        'JAX_LOCAL_DEVICE',
        'JAX_NUM_PROCESSES',
        'JAX_PROCESS_ID',
        'T5X_LITE_LAUNCH',
        'CUDA_VISIBLE',
      )
    ):
      monkeypatch.delenv(name)


def _find(monkeypatch, environment, **options):
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  return cluster.find_process(ClusterConfig(**options))


def test_without_anything_a_process_is_alone(monkeypatch, caplog):
  assert _find(monkeypatch, {}) is None
  for mode in ('auto', 'on'):  # a script for many tasks also runs with one
    place = _find(monkeypatch, _SLURM | {'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'}, mode=mode)
    assert place == ProcessSpec(address=None, count=1, index=0, origin='SLURM')
  assert not caplog.records


@pytest.mark.parametrize(
  'environment, options, expected',
  [
    ({}, _FLAGS, ProcessSpec(address='n0:99', count=8, index=7, origin='flags')),
    (
      _ENVIRONMENT,
      {},
      ProcessSpec(address='host:1234', count=4, index=2, origin='environment variables'),
    ),
    (
      _ENVIRONMENT | {'T5X_LITE_LAUNCHED': '1'},
      {},
      ProcessSpec(address='host:1234', count=4, index=2, origin='launch'),
    ),
    (
      _SLURM,
      {},
      ProcessSpec(address=_SLURM_ADDRESS, count=6, index=3, local_devices=(1,), origin='SLURM'),
    ),
    # What is said explicitly wins, and the rest is completed.
    (
      _SLURM | _ENVIRONMENT | {'T5X_LITE_LAUNCHED': '1'},
      {},
      ProcessSpec(address='host:1234', count=4, index=2, origin='launch'),
    ),
    (_ENVIRONMENT, _FLAGS, ProcessSpec(address='n0:99', count=8, index=7, origin='flags')),
    (
      _SLURM | {'JAX_COORDINATOR_ADDRESS': 'other:5'},
      {},
      ProcessSpec(address='other:5', count=6, index=3, local_devices=(1,), origin='SLURM'),
    ),
    (
      _SLURM,
      {'coordinator_address': 'flag:5'},
      ProcessSpec(address='flag:5', count=6, index=3, local_devices=(1,), origin='SLURM'),
    ),
    (
      _SLURM | {'JAX_LOCAL_DEVICE_IDS': '0,1'},
      {},
      ProcessSpec(address=_SLURM_ADDRESS, count=6, index=3, local_devices=(0, 1), origin='SLURM'),
    ),
    # A task that sees only its own GPUs.
    (
      _SLURM | {'SLURM_GPUS_PER_TASK': '2', 'CUDA_VISIBLE_DEVICES': '0,1'},
      {},
      ProcessSpec(address=_SLURM_ADDRESS, count=6, index=3, origin='SLURM'),
    ),
    (
      _SLURM | {'CUDA_VISIBLE_DEVICES': '0'},
      {},
      ProcessSpec(address=_SLURM_ADDRESS, count=6, index=3, origin='SLURM'),
    ),
    (
      _SLURM | {'JAX_COORDINATOR_PORT': '77'},
      {},
      ProcessSpec(address='node07:77', count=6, index=3, local_devices=(1,), origin='SLURM'),
    ),
    (
      {
        'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911',
        'OMPI_COMM_WORLD_SIZE': '2',
        'OMPI_COMM_WORLD_RANK': '1',
        'OMPI_COMM_WORLD_LOCAL_RANK': '0',
      },
      {'mode': 'on'},
      ProcessSpec(
        address=f'10.96.0.1:{1531576320 // 2**12 % 2**12 + 65535 - 2**12 + 1}',
        count=2,
        index=1,
        local_devices=(0,),
        origin='Open MPI',
      ),
    ),
  ],
)
def test_places(monkeypatch, environment, options, expected):
  assert _find(monkeypatch, environment, **options) == expected


@pytest.mark.parametrize(
  'environment, options, message',
  [
    (
      {},
      {'mode': 'on'},
      r'Pass --coordinator_address.*, --process_count.*, --process_index.*remove --distributed=on',
    ),
    (
      {},
      {'process_count': 2},
      r'\(flags\).*got no --coordinator_address \(JAX_COORDINATOR_ADDRESS\), --process_index',
    ),
    ({}, {**_FLAGS, 'process_index': 8}, r'got --process_index=8 and --process_count=8 \(flags\)'),
    ({'JAX_NUM_PROCESSES': '2'}, {}, r'\(environment variables\).*got no --coordinator_address'),
    (
      _ENVIRONMENT | {'JAX_COORDINATOR_ADDRESS': 'host'},
      {},
      r"JAX_COORDINATOR_ADDRESS must be HOST:PORT, got 'host'",
    ),
    (_ENVIRONMENT | {'JAX_NUM_PROCESSES': '99999999999'}, {}, r'--process_count=99999999999'),
    (_ENVIRONMENT | {'JAX_NUM_PROCESSES': '0'}, {}, r'--process_count=0 \(environment variables\)'),
    ({'JAX_NUM_PROCESSES': 'two'}, {}, r"variable JAX_NUM_PROCESSES must be a number, got 'two'"),
    (
      {'JAX_LOCAL_DEVICE_IDS': '0;1'},
      {},
      r"JAX_LOCAL_DEVICE_IDS must be numbers separated by commas, got '0;1'",
    ),
    (
      _SLURM | {'SLURM_NTASKS': 'x'},
      {'mode': 'on'},
      r'The cluster cannot be detected: ValueError.*Pass --coord',
    ),
  ],
)
def test_errors_of_places(monkeypatch, environment, options, message):
  with pytest.raises(ConfigError, match=message):
    _find(monkeypatch, environment, **options)


@pytest.mark.parametrize(
  'options, message',
  [
    ({'coordinator_address': 'host'}, r"--coordinator_address must be HOST:PORT, got 'host'"),
    ({'coordinator_address': 'http://x:99'}, r'--coordinator_address must be HOST:PORT'),
    ({'coordinator_address': '::1:99'}, r'--coordinator_address must be HOST:PORT'),
    ({'process_count': 99999999999}, r'`--process_count` must be an integer in'),
    (
      {'heartbeat_timeout_seconds': 9999999999},
      r'`--heartbeat_timeout_seconds` must be an integer in',
    ),
    ({'coordinator_address': 'host:0'}, r"--coordinator_address must be HOST:PORT, got 'host:0'"),
    ({'process_count': 0}, r'`--process_count` must be an integer in'),
    ({'process_index': -1}, r'`--process_index` must be an integer >= 0'),
    ({'initialization_timeout': 0}, r'`--initialization_timeout` must be'),
    ({'heartbeat_timeout_seconds': 1}, r'`--heartbeat_timeout_seconds` must be an integer in'),
    ({'mode': 'of'}, r'`ClusterConfig.mode` must be one of'),
    ({'mode': 'off', 'process_count': 2}, r'--distributed=off starts one process'),
  ],
)
def test_errors_of_options(options, message):
  with pytest.raises(ConfigError, match=message):
    ClusterConfig(**options)


@pytest.mark.parametrize(
  'environment',
  [
    _SLURM | {'SLURM_NTASKS': 'x'},
    {
      'KUBERNETES_SERVICE_HOST': '10.0.0.1'
    },  # without the package `kubernetes`, or without a cluster
  ],
)
def test_a_detector_that_fails_means_one_process_and_a_warning(monkeypatch, caplog, environment):
  assert _find(monkeypatch, environment) is None
  (record,) = caplog.records
  assert record.levelno == logging.WARNING
  assert (
    'this process runs alone' in record.getMessage() and '--distributed=off' in record.getMessage()
  )


@pytest.mark.parametrize(
  'environment, warned',
  [
    (
      {'SLURM_GPUS_ON_NODE': '8', 'SLURM_STEP_TASKS_PER_NODE': '1(x2)', 'SLURM_NODEID': '1'},
      '1 of the 8 GPUs',
    ),
    ({'SLURM_GPUS_ON_NODE': '8', 'SLURM_STEP_TASKS_PER_NODE': '8(x2)', 'SLURM_NODEID': '1'}, None),
    (
      {'SLURM_GPUS_ON_NODE': '8', 'SLURM_STEP_TASKS_PER_NODE': '8(x2),4', 'SLURM_NODEID': '2'},
      '1 of the 8 GPUs',
    ),
    (
      {
        'SLURM_GPUS_ON_NODE': '8',
        'SLURM_STEP_TASKS_PER_NODE': '1(x2)',
        'SLURM_NODEID': '1',
        'JAX_LOCAL_DEVICE_IDS': '0,1,2,3,4,5,6,7',
      },
      None,
    ),
    ({'SLURM_STEP_TASKS_PER_NODE': '1(x2)', 'SLURM_NODEID': '1'}, None),
  ],
)
def test_a_task_that_sees_less_than_its_share_is_reported(monkeypatch, caplog, environment, warned):
  cluster._check_share(_find(monkeypatch, _SLURM | environment))
  messages = [record.getMessage() for record in caplog.records]
  assert [warned in message and '--ntasks-per-node=8' in message for message in messages] == [
    True
  ] * bool(warned)


_PROGRAM = """
import sys, time
from t5x_lite import runtime
monitor = runtime.join(runtime.ClusterConfig())
if monitor.process == 1 and sys.argv[1] == 'raise':
  raise ValueError('of process 1')
time.sleep(60 if sys.argv[1] == 'raise' else monitor.process)
print('the end of', monitor.process)
"""


@pytest.mark.parametrize('what', ['end', 'raise'])
def test_programs_of_users_end_together(what):
  env = {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'}
  launch = [
    sys.executable,
    '-m',
    't5x_lite',
    'launch',
    '-n',
    '2',
    '--',
    sys.executable,
    '-c',
    _PROGRAM,
    what,
  ]
  started = time.monotonic()
  done = subprocess.run(
    launch, cwd=_ROOT, env=os.environ | env, capture_output=True, text=True, timeout=120
  )
  output = done.stdout + done.stderr
  assert 'terminate called' not in output and 'FATAL' not in output, output
  if what == 'end':
    assert done.returncode == 0 and 'the end of 0' in output and 'the end of 1' in output, output
  else:
    assert done.returncode == 1 and time.monotonic() - started < 50, output
    assert output.count('Traceback') == 1, output
    assert '[process 0] ends because process 1 failed: ValueError: of process 1' in output, output


def test_one_process_joins_nothing(monkeypatch):
  def fail(**kwargs):
    raise AssertionError(kwargs)

  monkeypatch.setattr(jax.distributed, 'initialize', fail)
  assert cluster.join(ClusterConfig()) is None
  assert cluster.join(ClusterConfig(process_count=1)) is None
  for name, value in _ENVIRONMENT.items():
    monkeypatch.setenv(name, value)
  assert cluster.join(ClusterConfig(mode='off')) is None
  with pytest.raises(AssertionError, match="'num_processes': 4.*'process_id': 2.*'deactivate'"):
    cluster.join(ClusterConfig())


def test_the_port_of_process_0_must_be_free(monkeypatch):
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **kwargs: 1 / 0)
  with socket.create_server(('127.0.0.1', 0)) as server:
    address = f'127.0.0.1:{server.getsockname()[1]}'
    with pytest.raises(ConfigError, match=f'port of --coordinator_address={address} must be free'):
      cluster.join(ClusterConfig(coordinator_address=address, process_count=2, process_index=0))
    with pytest.raises(ZeroDivisionError):
      cluster.join(ClusterConfig(coordinator_address=address, process_count=2, process_index=1))
  with pytest.raises(ZeroDivisionError):
    cluster.join(ClusterConfig(coordinator_address=address, process_count=2, process_index=0))


@pytest.mark.parametrize('index, is_heard', [(0, True), (1, True), (1, False)])
def test_a_process_does_not_wait_for_ever_for_the_others(index, is_heard):
  with socket.create_server(('127.0.0.1', 0)) as server:
    address = f'127.0.0.1:{server.getsockname()[1]}'
  program = f"""
from t5x_lite.runtime import cluster
cluster.join(cluster.ClusterConfig(
    coordinator_address={address!r}, process_count=2, process_index={index}, initialization_timeout=2))
"""
  if is_heard:
    done = subprocess.run(
      [sys.executable, '-c', program], capture_output=True, text=True, timeout=60
    )
  else:
    reader, dead = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, '-c', program], stderr=dead, timeout=60)
    os.close(dead)
  assert done.returncode == 75
  if not is_heard:
    return
  assert (
    f'process {index} of 2 (flags, address {address}) has waited 2 s for the others' in done.stderr
  )
  assert 'stack trace' not in done.stderr


_FOLLOWS = """
import os, signal, sys, time
from t5x_lite.runtime import cluster
received = []
for number in (signal.SIGHUP, signal.SIGTERM):
  signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
if sys.argv[1] == 'nohup':
  signal.signal(signal.SIGHUP, signal.SIG_IGN)
assert cluster.join(cluster.ClusterConfig()) is None
time.sleep(1.0)
print('joined', received, flush=True)
sys.stdin.readline()
time.sleep(2.0)
print('received', received)
"""


@pytest.mark.parametrize('how, name', [('', 'SIGHUP'), ('nohup', 'SIGTERM')])
def test_a_process_whose_launcher_was_killed_is_asked_to_stop_once(how, name):
  with subprocess.Popen(['sleep', '600']) as launcher:
    environment = {
      cluster.LAUNCHED: str(launcher.pid),
      cluster.COUNT: '1',
      cluster.INDEX: '0',
      cluster.ADDRESS: 'localhost:8476',
    }
    process = subprocess.Popen(
      [sys.executable, '-c', _FOLLOWS, how],
      cwd=_ROOT,
      env=os.environ | environment | {'PYTHONPATH': str(_ROOT)},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    assert process.stdout.readline() == 'joined []\n'
    launcher.kill()  # Nobody waits for it yet, so that it becomes a zombie.
    out, _ = process.communicate('killed\n', timeout=60)
  assert out == f"received ['{name}']\n"


@pytest.mark.parametrize(
  'address, expected',
  [
    ('127.0.0.1:80', {'127.0.0.1:80'}),
    ('[::1]:80', {'[::1]:80', '[::]:80'}),  # the second without IPv6
    ('localhost:80', {'127.0.0.1:80', '[::1]:80'}),
    ('192.0.2.1:80', {'[::]:80'}),  # reserved for documentation: of no machine
    ('no.such.host.invalid:80', {'[::]:80'}),
    ('own-name:80', {'[::]:80'}),
  ],
)
def test_process_0_listens_only_where_it_must(monkeypatch, address, expected):
  resolve = socket.getaddrinfo

  def own_name(host, *args, **kwargs):
    return resolve('127.0.1.1' if host == 'own-name' else host, *args, **kwargs)

  monkeypatch.setattr(socket, 'getaddrinfo', own_name)
  assert cluster.find_bind_address(address) in expected


def test_a_secret_comes_from_a_private_file_or_from_launch(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert cluster.read_secret(None, {}) == ''
  assert cluster.read_secret(None, {'T5X_LITE_CLUSTER_SECRET': 'abc'}) == 'abc'
  with pytest.raises(ConfigError, match='must be a file that can be read') as caught:
    cluster.read_secret('my secret')
  subprocess.run(['sh', '-c', str(caught.value).partition('with: ')[2].rstrip('.')], check=True)
  secret = cluster.read_secret('my secret', {'T5X_LITE_CLUSTER_SECRET': 'abc'})
  assert len(secret) >= 32 and secret == cluster.read_secret('my secret')
  os.chmod('my secret', 0o644)
  with pytest.raises(ConfigError, match='with the permissions 644') as caught:
    cluster.read_secret('my secret')
  subprocess.run(['sh', '-c', str(caught.value).partition('by: ')[2].rstrip('.')], check=True)
  assert cluster.read_secret('my secret') == secret
  # A secret that Kubernetes mounts for a user who is not root: the group of the volume may read root's file.
  os.chmod('my secret', 0o440)
  with pytest.raises(ConfigError, match='write `defaultMode: 0400`'):
    cluster.read_secret('my secret')
  user = os.geteuid()
  monkeypatch.setattr(os, 'geteuid', lambda: user + 1)
  assert cluster.read_secret('my secret') == secret
  for mode in (0o444, 0o460):
    os.chmod('my secret', mode)
    with pytest.raises(ConfigError, match='with the permissions 4'):
      cluster.read_secret('my secret')
  os.chmod('my secret', 0o600)
  monkeypatch.setattr(os, 'geteuid', lambda: user)
  pathlib.Path('my secret').write_text('short\n', encoding='utf-8')
  with pytest.raises(ConfigError, match='at least 16 bytes, got 5') as caught:
    cluster.read_secret('my secret')
  subprocess.run(['sh', '-c', str(caught.value).partition('with: ')[2].rstrip('.')], check=True)
  assert len(cluster.read_secret('my secret')) >= 32
