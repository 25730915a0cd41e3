"""Test session setup: 8 virtual CPU devices, set before JAX starts."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
_DEVICES = '--xla_force_host_platform_device_count=8'
if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
# TensorFlow only feeds data; its start-up chatter is not a warning of ours.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
