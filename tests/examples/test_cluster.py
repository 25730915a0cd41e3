"""The files of examples/cluster: a SLURM job of real processes, a Kubernetes manifest, scripts, and a Dockerfile."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.apps.launch import run as launch
from t5x_lite.command_line import cli
from t5x_lite.runtime import cluster
from tests import processes
from tests.apps.common import cloze_run
from tests.examples import fake_slurm

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / 'examples/cluster'
_SCRIPTS = ('train.sbatch', 'rerun.sh', 'tpu_pod.sh')
# Statuses after which a command is started again.
_RESTARTED = set(filter(launch.is_mendable, range(256)))
_TRAIN = [
  '--gin_file=recipes/keyword_cloze.gin',
  *(
    f'--gin.{binding}'
    for binding in (
      *cloze_run.bindings("{'inputs': 16, 'targets': 8}"),
      'TRAIN_STEPS=100',
      'BATCH_SIZE=4',
      'SAVING_PERIOD=50',
      'EVAL_PERIOD=None',
      'train.infer_eval_dataset_cfg=None',
      'train.train_eval_dataset_cfg=None',
    )
  ),
]


@pytest.fixture
def programs(tmp_path, monkeypatch):
  """Folder that is first in PATH, with a program `t5x_lite`; other programs are added by tests."""
  folder = tmp_path / 'bin'
  folder.mkdir()
  _write(folder / 't5x_lite', f'exec {sys.executable} -m t5x_lite "$@"')
  monkeypatch.setenv('PATH', f'{folder}:{os.environ["PATH"]}')
  monkeypatch.setenv('PYTHONPATH', str(_ROOT))
  monkeypatch.setenv('XLA_FLAGS', processes.xla_flags(1))
  monkeypatch.setenv('RESTART_SECONDS', '0')
  return folder


def _write(path, text):
  path.write_text(f'#!/bin/bash\n{text}\n')
  path.chmod(0o755)


def _call(*command, timeout=200):
  """Runs a program; returns its status and its output."""
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
  ) as process:
    try:
      output = process.communicate(timeout=timeout)[0]
    finally:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
  return process.returncode, output


# ----------------------------------------------------------------------------------------------------------------------
# Scripts


def _shellcheck():
  found = shutil.which(
    'shellcheck', path=f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}'
  )
  return found or pytest.skip('shellcheck is missing: install requirements/lock-3.*.txt')


@pytest.mark.parametrize('name', _SCRIPTS)
def test_shellcheck(name):
  status, output = _call(_shellcheck(), '--severity=style', '--shell=bash', str(_FOLDER / name))
  assert status == 0, output
  assert os.access(_FOLDER / name, os.X_OK)


@pytest.mark.parametrize('name', ['train.sbatch', 'rerun.sh'])
def test_scripts_restart_on_the_statuses_of_launch(name):
  statuses = re.search(r'^ +(4 \| .*)\) ;;$', (_FOLDER / name).read_text(), re.MULTILINE)[1]
  program = f'for s in {{0..255}}; do case $s in {statuses}) echo $s ;; esac; done'
  assert set(map(int, _call('bash', '-c', program)[1].split())) == _RESTARTED
  # No progress, a failed save, saved on a signal, aborted, killed, damaged memory, terminated; not Ctrl-C.
  assert {4, 74, 75, 134, 137, 139, 143} <= _RESTARTED and not {0, 1, 2, 3, 5, 130} & _RESTARTED


def _ends_with(programs, statuses):
  """Makes a program `t5x_lite` that ends with one status after the other; returns the file that counts its starts."""
  count = programs / 'starts'
  _write(
    programs / 't5x_lite',
    f'echo start >> {count}\n'
    f'statuses=({" ".join(map(str, statuses))})\nexit "${{statuses[$(wc -l < {count}) - 1]}}"',
  )
  return count


@pytest.mark.parametrize(
  'statuses, status, starts',
  [
    ([75, 137, 0], 0, 3),
    ([143, 4, 2], 2, 3),
    ([1], 1, 1),
    ([3], 3, 1),
    ([5], 5, 1),
    ([130], 130, 1),
    ([75, 75, 75, 75], 75, 3),
  ],
)
def test_rerun(programs, monkeypatch, statuses, status, starts):
  monkeypatch.setenv('MAX_RESTARTS', '2')
  count = _ends_with(programs, statuses)
  assert _call(str(_FOLDER / 'rerun.sh'), 't5x_lite', 'train')[0] == status
  assert count.read_text().count('start') == starts


@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM'])
def test_a_signal_to_rerun_stops_the_command_for_good(programs, name):
  _write(
    programs / 't5x_lite',
    "trap 'echo saved; exit 75' TERM\necho runs\nwhile :; do sleep 0.05; done",
  )
  with subprocess.Popen(
    [_FOLDER / 'rerun.sh', 't5x_lite'], stdout=subprocess.PIPE, text=True, start_new_session=True
  ) as process:
    try:
      assert process.stdout.readline() == 'runs\n'
      process.send_signal(getattr(signal, name))
      assert process.communicate(timeout=10)[0] == 'saved\n'
    finally:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
  assert process.returncode == 75


def test_tpu_pod_passes_arguments_through_the_shell_of_each_machine(
  programs, monkeypatch, tmp_path
):
  _write(programs / 'gcloud', 'printf "%s\\n" "$@"')
  monkeypatch.setenv('TPU_NAME', 'pod')
  monkeypatch.setenv('ZONE', 'here')
  argument = "--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 12}"
  status, output = _call(str(_FOLDER / 'tpu_pod.sh'), '--gin.MODEL_DIR=/shared/a', argument)
  *words, command = output.splitlines()
  assert status == 0 and words == [
    'compute',
    'tpus',
    'tpu-vm',
    'ssh',
    'pod',
    '--zone=here',
    '--worker=all',
  ]
  assert shlex.split(command.removeprefix('--command=')) == [
    'cd',
    't5x_lite',
    '&&',
    'examples/cluster/rerun.sh',
    '.venv/bin/t5x_lite',
    'train',
    '--distributed=on',
    '--gin.MODEL_DIR=/shared/a',
    argument,
  ]


# ----------------------------------------------------------------------------------------------------------------------
# SLURM


@pytest.fixture
def slurm(programs, tmp_path, monkeypatch):
  """Function that submits the job with two tasks, and returns (status, output, log of the fake SLURM).

  Its further arguments are faults, and the text that triggers each, see `fake_slurm`.
  """
  folder = tmp_path / 'slurm'
  folder.mkdir()
  fake_slurm.install(programs)
  monkeypatch.setenv('FAKE_SLURM', str(folder))

  def submit(*arguments, **faults):
    for name, text in faults.items():
      (folder / name).write_text(text)
    status, output = _call(
      'sbatch',
      '--nodes=1',
      '--ntasks-per-node=2',
      '--gpus-per-node=2',
      str(_FOLDER / 'train.sbatch'),
      *arguments,
    )
    return status, output, (folder / 'log').read_text().splitlines()

  return submit


def test_slurm_job_saves_before_its_limit_is_requeued_and_resumes(slurm, tmp_path):
  status, output, log = slurm(*_TRAIN, f'--gin.MODEL_DIR={tmp_path / "run"}', limit='step 5  loss')
  assert status == 0, output
  assert log == [
    'job starts',
    'tasks end with [75, 75]',
    'requeue',
    'job starts',
    'tasks end with [0, 0]',
  ]
  assert output.count('2 processes (SLURM)') == 2
  (saved,) = re.findall(
    r'Stopped after step (\d+) of 100 by SIGTERM to process [01]; step \1 is saved', output
  )
  assert 5 <= int(saved) < 100
  assert f'checkpoint_{saved} (this run) at step {saved}, to step 100' in output
  assert checkpoints.all_steps(tmp_path / 'run')[-1] == 100


def test_slurm_job_with_an_invalid_configuration_is_not_requeued(slurm):
  status, output, log = slurm(*_TRAIN)
  assert status == 2 and 'MODEL_DIR: set --gin.MODEL_DIR=' in output
  assert log == ['job starts', 'tasks end with [2, 2]']


@pytest.mark.parametrize(
  'statuses, status, starts', [([75, 137, 0], 0, 3), ([75, 3], 3, 2), ([75, 75, 75, 0], 75, 3)]
)
def test_slurm_requeues_on_statuses_that_a_rerun_can_mend(
  slurm, programs, monkeypatch, statuses, status, starts
):
  monkeypatch.setenv('MAX_RESTARTS', '2')
  # Both tasks count.
  _ends_with(programs, [one for each in statuses for one in (0, each)])
  found, _, log = slurm('--gin.MODEL_DIR=x')
  assert found == status
  assert log.count('job starts') == starts and log.count('requeue') == starts - 1


@pytest.mark.full  # by default, the script gets the statuses, and the faults are tested without a scheduler
def test_slurm_job_with_a_killed_task_is_requeued(slurm, tmp_path):
  status, output, log = slurm(
    *_TRAIN, '--gin.TRAIN_STEPS=300', f'--gin.MODEL_DIR={tmp_path / "run"}', kill='step 100  loss'
  )
  assert status == 0, output
  assert log == [
    'job starts',
    'tasks end with [-9, 75]',
    'requeue',
    'job starts',
    'tasks end with [0, 0]',
  ]
  assert 'ends because process 1 has given no sign of life' in output
  assert checkpoints.all_steps(tmp_path / 'run')[-1] == 300


# ----------------------------------------------------------------------------------------------------------------------
# Kubernetes


def _manifest():
  yaml = pytest.importorskip('yaml')
  return yaml.safe_load((_FOLDER / 'jobset.yaml').read_text())


def _errors(manifest):
  jsonschema = pytest.importorskip('jsonschema')
  schema = json.loads((pathlib.Path(__file__).parent / 'jobset_schema.json').read_text())
  return [
    error.json_path for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)
  ]


def _job(manifest):
  (replicated,) = manifest['spec']['replicatedJobs']
  return replicated['template']['spec']


def test_jobset_has_the_form_of_its_public_definition():
  manifest = _manifest()
  assert _errors(manifest) == []
  _job(manifest)['template']['spec']['containers'][0]['argz'] = []
  _job(manifest)['parallelism'] = '4'
  _job(manifest)['podFailurePolicy']['rules'][0].pop('action')
  assert len(_errors(manifest)) == 3


def test_jobset_restarts_as_the_scripts_do():
  manifest = _manifest()
  job = _job(manifest)
  assert job['template']['spec']['restartPolicy'] == 'Never'  # podFailurePolicy requires it
  (rule,) = job['podFailurePolicy']['rules']
  (container,) = job['template']['spec']['containers']
  assert rule['action'] == 'FailJob' and rule['onExitCodes']['containerName'] == container['name']
  assert rule['onExitCodes']['operator'] == 'In'
  assert set(rule['onExitCodes']['values']) == set(map(int, errors.ExitCode)) - _RESTARTED - {0}
  (rule,) = manifest['spec']['failurePolicy']['rules']
  assert (rule['action'], rule['onJobFailureReasons']) == ('FailJobSet', ['PodFailurePolicy'])
  assert job['backoffLimit'] == 0  # any other failure is one of the JobSet, which restarts all pods


def test_jobset_gives_each_process_its_place():
  manifest = _manifest()
  job = _job(manifest)
  (container,) = job['template']['spec']['containers']
  environment = {}
  for variable in container['env']:
    if 'value' in variable:
      environment[variable['name']] = variable['value']
    else:
      assert variable['valueFrom'] == {
        'fieldRef': {
          'fieldPath': "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
      }
      environment[variable['name']] = '3'
  place = cluster.find_process(cluster.ClusterConfig(mode='on'), environment)
  name, replicated = manifest['metadata']['name'], manifest['spec']['replicatedJobs'][0]['name']
  port = container['ports'][0]['containerPort']
  assert place.address == f'{name}-{replicated}-0-0.{name}:{port}'
  assert place.count == job['completions'] == job['parallelism'] and place.index == 3
  assert job['completionMode'] == 'Indexed'


def test_jobset_arguments_are_those_of_the_command():
  (container,) = _job(_manifest())['template']['spec']['containers']
  arguments = cli.parse(container['args'])
  assert arguments.command == 'train' and arguments.distributed == 'on'
  (mount,) = container['volumeMounts']
  assert any(
    flag.startswith(f'--gin.MODEL_DIR={mount["mountPath"]}/') for flag in arguments.gin_flags
  )


# ----------------------------------------------------------------------------------------------------------------------
# Docker


def _instructions():
  """Returns (instruction, arguments) of each line of the Dockerfile."""
  text = re.sub(r'^#.*\n', '', (_FOLDER / 'Dockerfile').read_text(), flags=re.MULTILINE)
  return [tuple(line.split(' ', 1)) for line in text.replace('\\\n', ' ').splitlines() if line]


def test_dockerfile_copies_what_the_package_is_made_of():
  ignored = (_FOLDER / 'Dockerfile.dockerignore').read_text().split()
  copied = [
    source
    for name, arguments in _instructions()
    if name == 'COPY'
    for source in arguments.split()[:-1]
  ]
  for source in copied:
    assert (_ROOT / source).exists() and source not in ignored, source
  assert {'t5x_lite', 'moe', 'gin', 'setup.py', 'requirements'} <= set(copied)
  for name, arguments in _instructions():
    if name == 'RUN':
      assert all(
        (_ROOT / file).exists() for file in re.findall(r'requirements/\S+?\.txt', arguments)
      )


def test_commands_of_the_dockerfile_pass_shellcheck(tmp_path):
  (tmp_path / 'run.sh').write_text(
    'DEVICE=cpu\n'
    + '\n'.join(arguments for name, arguments in _instructions() if name == 'RUN')
    + '\n'
  )
  status, output = _call(_shellcheck(), '--shell=sh', str(tmp_path / 'run.sh'))
  assert status == 0, output


def test_lock_for_cuda_pins_the_plugin_of_the_locked_jax():
  pins = [
    dict(
      line.split('==')
      for line in (_ROOT / f'requirements/lock-{name}.txt').read_text().splitlines()
      if not line.startswith('#')
    )
    for name in ('3.12', 'cuda')
  ]
  assert not pins[0].keys() & pins[1].keys()
  assert (
    pins[1]['jax-cuda13-plugin']
    == pins[1]['jax-cuda13-pjrt']
    == pins[0]['jax']
    == pins[0]['jaxlib']
  )
  # The rest is of NVIDIA, and a CPU has no use for it.
  assert all(name.startswith(('jax-cuda13-', 'nvidia-')) for name in pins[1])


@pytest.mark.full  # downloads all packages of the lock
def test_instructions_of_the_dockerfile_install_the_command(tmp_path):
  """Carries them out for a CPU in a new environment instead of a container."""
  version = f'{sys.version_info.major}.{sys.version_info.minor}'
  subprocess.run([sys.executable, '-m', 'venv', tmp_path / 'env'], check=True)
  environment = {name: value for name, value in os.environ.items() if not name.startswith('PYTHON')}
  environment |= {'PATH': f'{tmp_path}/env/bin:{os.environ["PATH"]}', 'DEVICE': 'cpu'}
  work = tmp_path / 'work'
  work.mkdir()
  for name, arguments in _instructions():
    if name == 'COPY':
      *sources, target = arguments.split()
      for source in sources:
        copy = shutil.copytree if (_ROOT / source).is_dir() else shutil.copy
        copy(_ROOT / source, work / target if copy is shutil.copytree else work)
    elif name == 'RUN':
      subprocess.run(
        ['sh', '-c', arguments.replace('lock-3.12', f'lock-{version}')],
        cwd=work,
        env=environment,
        check=True,
      )
  (entry,) = [json.loads(arguments) for name, arguments in _instructions() if name == 'ENTRYPOINT']
  done = subprocess.run(
    [
      tmp_path / 'env/bin' / entry[0],
      'train',
      '--gin_file=recipes/keyword_cloze.gin',
      '--gin.MODEL_DIR=x',
      '--dry_run',
    ],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  )
  assert 'Plan' in done.stdout
