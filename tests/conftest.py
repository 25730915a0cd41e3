"""Test session setup: 8 virtual CPU devices, set before JAX starts."""

import os
import signal

import gin
import pytest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
_DEVICES = '--xla_force_host_platform_device_count=8'
if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
# Programs leave signals that were ignored at their start ignored; tests may run with `nohup` or in the background.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
# TensorFlow only feeds data; its start-up chatter is not a warning of ours.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


@pytest.fixture(scope='module', autouse=True)
def empty_gin_configuration():
  """Each file of tests begins without bindings and unlocked, whatever the file before it in this process has left."""
  gin.clear_config()
