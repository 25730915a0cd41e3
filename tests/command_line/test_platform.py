"""Errors of XLA's flags and JAX's platforms become one message."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from t5x_lite.command_line import platform as cli_platform

_ROOT = pathlib.Path(__file__).parents[2]
_RECIPE = ('train', '--gin_file=recipes/keyword_cloze.gin', '--gin.MODEL_DIR=folder/run')
# Rejected after the devices are known, so that a command whose remedy works ends quickly.
_LATE_ERROR = ('--dry_run', '--gin.EVAL_PERIOD=-1')


def _environment(folder: pathlib.Path, **variables: str) -> dict[str, str]:
  kept = {
    name: value for name, value in os.environ.items() if name not in ('XLA_FLAGS', 'T5X_LITE_DEBUG')
  }
  return kept | {'PYTHONPATH': f'{_ROOT}{os.pathsep}{folder}', 'JAX_PLATFORMS': 'cpu'} | variables


@pytest.mark.parametrize(
  'variables, fragments, remedies',
  [
    (
      {'JAX_PLATFORMS': 'gpu'},
      ["JAX_PLATFORMS must name platforms that this machine has, got 'gpu'. Unset"],
      {'Unset JAX_PLATFORMS': {}, 'or set JAX_PLATFORMS=cpu': {'JAX_PLATFORMS': 'cpu'}},
    ),
    pytest.param(
      {'JAX_PLATFORMS': 'cuda'},
      [
        "JAX_PLATFORMS must name platforms that this machine has, got 'cuda'",
        "pip install 'jax[cuda",
      ],
      {'set JAX_PLATFORMS=cpu': {'JAX_PLATFORMS': 'cpu'}},
      marks=pytest.mark.full,
    ),
    pytest.param(
      {'JAX_PLATFORMS': 'cdua'},
      ["got 'cdua'", "Did you mean 'cuda'?", 'Unset JAX_PLATFORMS'],
      {'Unset JAX_PLATFORMS': {}},
      marks=pytest.mark.full,
    ),
    (
      {'XLA_FLAGS': '--xla_no_such_flag=1'},
      ["got '--xla_no_such_flag=1'", 'Unknown flag'],
      {'or unset it': {}},
    ),
    pytest.param(
      {'XLA_FLAGS': '--xla_force_host_platform_device_count=x'},
      ["Couldn't interpret value x"],
      {
        'Correct the environment variable': {
          'XLA_FLAGS': '--xla_force_host_platform_device_count=1'
        }
      },
      marks=pytest.mark.full,
    ),
    (
      {'JAX_DISABLE_JIT': '1'},
      ['`--jax_disable_jit` must be false'],
      {'unset JAX_DISABLE_JIT': {}},
    ),
    (
      {'XLA_FLAGS': 'no_such_file'},
      ["got 'no_such_file'", 'Could not open file'],
      {'or unset it': {}},
    ),
  ],
)
def test_broken_environment(tmp_path, variables, fragments, remedies):
  if variables.get('JAX_PLATFORMS') in ('cuda', 'gpu') and pathlib.Path('/dev/nvidia0').exists():
    pytest.skip('This machine has the platform.')
  message = _message_of(tmp_path, _environment(tmp_path, **variables))
  for fragment in fragments:
    assert fragment in message
  for remedy, changed in remedies.items():
    assert remedy in message
    environment = _environment(tmp_path, **changed)
    if not changed:
      for name in variables:
        environment.pop(name, None)
    assert 'eval_period` must be' in _message_of(tmp_path, environment, *_LATE_ERROR)


def _message_of(folder: pathlib.Path, environment: dict[str, str], *flags: str) -> str:
  done = subprocess.run(
    [sys.executable, '-m', 't5x_lite', *_RECIPE, *flags],
    cwd=folder,
    capture_output=True,
    text=True,
    env=environment,
    timeout=120,
    check=False,
  )
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith('t5x_lite: error: ') and len(done.stderr.splitlines()) == 1
  assert not list(folder.iterdir())  # No model directory of a run that cannot start.
  return done.stderr


@pytest.mark.parametrize(
  'flags, is_probed',
  [
    ('', False),
    ('--xla_force_host_platform_device_count=8', False),
    ('--xla_cpu_multi_thread_eigen=false', True),
  ],
)
def test_sound_xla_flags_pass_and_the_usual_ones_cost_nothing(monkeypatch, flags, is_probed):
  probes, run = [], subprocess.run
  monkeypatch.setattr(
    subprocess, 'run', lambda *args, **kwargs: probes.append(args) or run(*args, **kwargs)
  )
  monkeypatch.setenv('XLA_FLAGS', flags)
  cli_platform.check_xla_flags()
  assert len(probes) == is_probed


def test_errors_that_options_of_jax_ask_for():
  with pytest.raises(RuntimeError) as error, jax.transfer_guard('disallow'):
    jax.jit(lambda x: x + 1)(1.0)
  message, status = cli_platform.option_message(error.value)
  assert 'JAX_TRANSFER_GUARD forbids a host-to-device transfer' in message and status == 2
  # The remedy.
  with jax.transfer_guard('log'):
    jax.jit(lambda x: x + 1)(1.0)
  with pytest.raises(FloatingPointError) as error, jax.debug_nans(True):
    jnp.log(-1.0)
  message, status = cli_platform.option_message(error.value)
  assert 'encountered in log' in message and status == 3
  with pytest.raises(ValueError) as error, jax.numpy_rank_promotion('raise'):
    jnp.ones((2, 3)) + jnp.ones(3)
  message, status = cli_platform.option_message(error.value)
  assert 'JAX_NUMPY_RANK_PROMOTION forbids' in message and 'Set it to allow' in message
  with jax.numpy_rank_promotion('allow'):
    jnp.ones((2, 3)) + jnp.ones(3)
  with pytest.raises(ValueError) as error, jax.numpy_dtype_promotion('strict'):
    jnp.float32(1) + jnp.int32(1)
  message, status = cli_platform.option_message(error.value)
  assert 'JAX_NUMPY_DTYPE_PROMOTION forbids' in message and status == 2
  with jax.numpy_dtype_promotion('standard'):
    jnp.float32(1) + jnp.int32(1)
  assert cli_platform.option_message(RuntimeError('transfer')) is None
  assert cli_platform.option_message(ValueError('shapes')) is None


def test_errors_of_jax_elsewhere_are_not_about_platforms():
  try:
    raise RuntimeError("Unable to initialize backend 'cuda'")
  except RuntimeError as error:
    assert cli_platform.platform_message(error) is None
