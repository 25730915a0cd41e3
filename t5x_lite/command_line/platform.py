"""Messages about XLA's flags and JAX's platforms, for which JAX aborts the process or raises internal errors."""

import functools
import os
import pathlib
import re
import sys
import traceback

from t5x_lite import runtime
from t5x_lite.errors import ConfigError, ExitCode, did_you_mean, install_command

# Flag of every run on virtual devices, which needs no check.
_VIRTUAL_DEVICES = re.compile(r'--xla_force_host_platform_device_count=\d+')
# Reads XLA_FLAGS without opening a device, since several processes cannot open a TPU.
_PROBE = 'from jaxlib import xla_client; xla_client.CompileOptions().executable_build_options.debug_options'
_PROBE_SECONDS = 60
_PLATFORMS = ('cpu', 'cuda', 'gpu', 'rocm', 'tpu')
# Options of JAX that reject operations, and their values that do not.
_PROMOTIONS = {'jax_numpy_dtype_promotion': 'standard', 'jax_numpy_rank_promotion': 'allow'}
_JAX_PLATFORMS_MODULE = ('jax', '_src', 'xla_bridge.py')


def check_xla_flags() -> None:
  """Raise if XLA cannot parse the environment variable XLA_FLAGS; call this before JAX initializes its devices.

  XLA aborts the process at the first use of a device, without an exception, so that another process parses the flags
  first. This takes 0.2 s of CPU time, and no time if XLA_FLAGS is not set, only requests virtual devices, or only
  has the flag of `runtime.compile_faster`.

  Raises:
    ConfigError: a flag is unknown, a value is invalid, or a file of flags is missing.
  """
  flags = os.environ.get('XLA_FLAGS', '').replace(runtime.FAST_COMPILATION_FLAG, '').strip()
  if not all(map(_VIRTUAL_DEVICES.fullmatch, flags.split())):
    complaint = _complaint(flags)
  else:
    complaint = ''
  if complaint:
    raise ConfigError(
      f'XLA_FLAGS must be flags that XLA knows, or the path of a file of them, got {flags!r}: '
      f'{complaint}. Correct the environment variable or unset it.'
    )


@functools.cache
def _complaint(flags: str) -> str:
  """Return XLA's error message for `flags`, or ''."""
  import subprocess  # Most processes have no flags to check.

  environment = os.environ | {
    'XLA_FLAGS': flags,
    'ABSL_MIN_LOG_LEVEL': '0',
    'TF_CPP_MIN_LOG_LEVEL': '0',
  }
  try:
    done = subprocess.run(
      [sys.executable, '-c', _PROBE],
      env=environment,
      capture_output=True,
      text=True,
      stdin=subprocess.DEVNULL,
      errors='replace',
      timeout=_PROBE_SECONDS,
      check=False,
    )
  except (OSError, subprocess.TimeoutExpired):
    return ''  # An error of the probe itself.
  # Lines such as `F1122 17:47:33.436029  7791 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_foo=1`.
  lines = re.findall(r'(?:command_line_flags|parse_flags_from_env)\.cc:\d+\] (.+)', done.stderr)
  if done.returncode and lines:
    return lines[0].partition(' (We assumed')[0].rstrip('. ')
  return ''


def _finds_backends(frame: traceback.FrameSummary) -> bool:
  """Return whether a frame is that of JAX in which it finds its backends."""
  module = pathlib.PurePath(frame.filename).parts[-3:]
  return module == _JAX_PLATFORMS_MODULE and frame.name == 'backends'


def option_message(error: BaseException) -> tuple[str, ExitCode] | None:
  """Return (message, exit status) for an exception that one of JAX's options asks for; None for any other exception."""
  if isinstance(error, FloatingPointError) and 'encountered in' in str(error):
    return (
      f'--jax_debug_nans or --jax_debug_infs: {str(error).partition(chr(10))[0].rstrip(".")}. Correct the code or its '
      'inputs, or run without this option; --debug shows where.',
      ExitCode.NAN,
    )
  forbidden = re.search(r'Disallowed (\S+) transfer', str(error))
  if isinstance(error, RuntimeError) and forbidden:
    return (
      f'JAX_TRANSFER_GUARD forbids a {forbidden[1]} transfer, which this command needs. Set it to log, which shows all '
      'transfers, or unset it.',
      ExitCode.INVALID_INPUT,
    )
  for option, standard in _PROMOTIONS.items():
    if isinstance(error, ValueError) and f'{option}=' in str(error):
      return (
        f'{option.upper()} forbids an operation that this command needs: '
        f'{str(error).partition(". ")[0].rstrip(".")}. Set it to {standard}, or unset it.',
        ExitCode.INVALID_INPUT,
      )
  return None


def platform_message(error: BaseException) -> str | None:
  """Return the message for an exception of JAX about a missing platform; None for any other exception."""
  if not isinstance(error, (RuntimeError, AssertionError)):
    return None
  if not any(map(_finds_backends, traceback.extract_tb(error.__traceback__))):
    return None
  import jax

  wanted = jax.config.values['jax_platforms']
  reason = str(error).partition('\n')[0]
  reason = reason.partition(" (set JAX_PLATFORMS=''")[0].rstrip('. ')
  reason = re.sub("^Unable to initialize backend '.*?': ", '', reason)
  if not wanted:
    return f'JAX finds no usable device: {reason}. Set JAX_PLATFORMS=cpu to use the CPU.'
  unknown = [name for name in wanted.split(',') if name not in _PLATFORMS]
  hint = ''
  if unknown:
    hint = did_you_mean(unknown[0], _PLATFORMS)
  remedy = 'Unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu'
  if wanted == 'gpu':
    reason = ''  # JAX names ROCm, which few mean.
  if not hint and wanted in ('cuda', 'gpu', 'tpu'):
    extra = 'tpu' if wanted == 'tpu' else 'cuda'
    remedy += f', or install JAX for this platform with `{install_command(extra)}`'
  problem = f'JAX_PLATFORMS must name platforms that this machine has, got {wanted!r}'
  if reason:
    problem += f': {reason}'
  return f'{problem}.{hint} {remedy}.'
