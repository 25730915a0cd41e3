"""Fixtures of the core's tests."""

import jax
import pytest


@pytest.fixture(scope='session')
def compilation_cache_dir(tmp_path_factory):
  """A folder for compiled programs, shared by the runs of this session, in this process or in others."""
  return tmp_path_factory.mktemp('compiled')


@pytest.fixture(scope='module')
def compilation_cache(compilation_cache_dir):
  """While a module runs, equal programs are compiled once: its tests start whole runs again and again."""
  options = {'jax_compilation_cache_dir': str(compilation_cache_dir), 'jax_persistent_cache_min_compile_time_secs': 0,
             'jax_persistent_cache_min_entry_size_bytes': -1}
  before = {name: getattr(jax.config, name) for name in options}
  for name, value in options.items():
    jax.config.update(name, value)
  yield compilation_cache_dir
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope='module')
def fast_compilation():
  """While a module runs, programs are compiled with few optimizations: its tests compile much and compute little."""
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', before)
