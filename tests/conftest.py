"""Test session setup: 8 virtual CPU devices, set before JAX starts."""

import atexit
import gc
from importlib import metadata
import os
import pathlib
import shutil
import signal
import sys
import tempfile

import gin
from gin import config as gin_config
from packaging import version
import pytest

from t5x_lite import runtime
from t5x_lite.configuration import module_imports
from tests import stores

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
_DEVICES = '--xla_force_host_platform_device_count=8'
if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_DEVICES}'.strip()
# Tests compile much and compute little: programs are compiled with few optimizations, in one piece each (in parallel
# pieces they cost a third more) and without XLA's newer code generator for fusions, which costs a quarter more (JAX
# 0.11 and later have no other, and XLA's preset FAST_COMPILE is not faster), and equal programs only once, in this
# process, its workers and the programs that tests start, which have the flag of the commands. TensorFlow reads the same
# variable and ends a process for a flag that its own XLA does not know. JAX_COMPILATION_CACHE_DIR keeps the
# programs from one session to the next (`make test` sets it).
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', 'true')
# No test reads which line of Python an operation comes from.
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')
_FAST_COMPILE = ['--xla_cpu_parallel_codegen_split_count=1']
if version.parse(metadata.version('jaxlib')) < version.parse('0.11'):
  _FAST_COMPILE.append('--xla_cpu_use_fusion_emitters=false')
for _flag in _FAST_COMPILE:
  if _flag.split('=')[0] not in os.environ['XLA_FLAGS']:
    os.environ['XLA_FLAGS'] += f' {_flag}'
runtime.compile_faster()
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  _CACHE = tempfile.mkdtemp(prefix='t5x_lite_tests_')
  atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE
# Programs leave signals that were ignored at their start ignored; tests may run with `nohup` or in the background.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
# TensorFlow only feeds data; its messages at start-up are not this package's warnings.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


# Imports and the collection of tests make millions of objects that stay.
gc.disable()


def pytest_sessionstart():
  """Delete programs of `make test` that were written in part, and the oldest if they take more than 1 GB."""
  from t5x_lite.runtime import compilation_cache

  folder = pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR'])
  # Not a folder that other programs may use.
  is_ours = folder == pathlib.Path(sys.prefix, 'compiled')
  if is_ours and folder.is_dir() and 'PYTEST_XDIST_WORKER' not in os.environ:
    compilation_cache.clean(folder, 2**30)


def pytest_collection_finish():
  """Exclude all objects of the collection (modules and tests) from garbage collections."""
  gc.freeze()
  gc.set_threshold(100_000, 50, 100)
  gc.enable()


@pytest.fixture(scope='module', autouse=True)
def empty_gin_configuration():
  """Each file of tests begins without bindings, unlocked and unrestricted, whatever the file before it has left."""
  gin.clear_config()
  # gin keeps the names under which gin files have first imported classes and functions.
  for selector, configurable in list(gin_config._REGISTRY.items()):
    if configurable.import_source is not None:
      gin_config._REGISTRY.pop(selector)
      gin_config._INVERSE_REGISTRY.pop(configurable.wrapped, None)
  module_imports.restrict(None)


@pytest.fixture(scope='module', autouse=True)
def shared_compiled_programs():
  """Give the next file of tests the shared folder again, which `--compilation_cache_dir=off` takes away."""
  yield
  import jax  # after the settings above
  from jax.experimental.compilation_cache import compilation_cache

  folder = os.environ['JAX_COMPILATION_CACHE_DIR']
  if jax.config.jax_compilation_cache_dir != folder:
    jax.config.update('jax_compilation_cache_dir', folder)
    compilation_cache.reset_cache()


@pytest.fixture(params=stores.KINDS)
def store(request, monkeypatch):
  """An empty folder of an object store, of each kind, which this process and those that it starts can reach."""
  with stores.opened(request.param, monkeypatch) as opened:
    yield opened


@pytest.fixture
def gcs_store(monkeypatch):
  """An empty folder of Google Cloud Storage, see `store`."""
  with stores.opened('gcs', monkeypatch) as opened:
    yield opened


@pytest.fixture
def s3_store(monkeypatch):
  """An empty folder of S3, see `store`."""
  with stores.opened('s3', monkeypatch) as opened:
    yield opened
