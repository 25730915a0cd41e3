"""A small configuration of `precompile`, and JAX's settings of the compilation cache."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache

GIN = """
from __gin__ import dynamic_registration
from t5x_lite import schedules
from t5x_lite import trainer
from t5x_lite.apps import train as train_script
from tests.apps.train import toy_run
include 'runs/precompile.gin'
MIXTURE_OR_TASK_NAME = 'letters'
TASK_FEATURE_LENGTHS = {'inputs': 6, 'targets': 6}
train_script.train:
  model = @toy_run.model()
  train_dataset_cfg = @toy_run.dataset()
  partitioner = @toy_run.partitioner()
toy_run.dataset.split = 'train'
"""


@contextlib.contextmanager
def kept_settings():
  """Restores the settings that `use_compilation_cache` changes."""
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_persistent_cache_min_entry_size_bytes',
    'jax_enable_compilation_cache',
  )
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
