"""Shared parts of benchmarks: facts of the machine, the rate of a matmul in the same run, and tables.

The speed of machines varies; a figure is only comparable relative to the matmul rate of the same run.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import platform
import statistics
import sys
import time
import types
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

# Variables that `start_like_commands` changes, and one that keeps their first values, since the process may restart.
_CHANGED = ('GLIBC_TUNABLES', 'XLA_FLAGS')
_FIRST_VALUES = 'T5X_LITE_BENCHMARK_ENVIRONMENT'


def positive(text: str) -> int:
  """Return the number that an argument of a command line is, an integer of at least 1."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'got {text!r}; expected an integer of at least 1')
  return int(text)


def matmul_gflops(size: int = 2048, repeats: int = 7) -> float:
  """Return the median GFLOP/s of a `size`^3 float32 matmul on the default device."""
  import jax
  import jax.numpy as jnp

  a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
  b = jax.random.normal(jax.random.key(1), (size, size), jnp.float32)
  multiply = jax.jit(jnp.matmul)
  multiply(a, b).block_until_ready()
  seconds = [timed(lambda: multiply(a, b).block_until_ready())[0] for _ in range(repeats)]
  return 2 * size**3 / statistics.median(seconds) / 1e9


def timed(fn: Callable[[], object]) -> tuple[float, object]:
  """Return (wall seconds, result) of one call."""
  start = time.perf_counter()
  result = fn()
  return time.perf_counter() - start, result


def seconds_per_call(fn: Callable[[], object], repeats: int = 1000) -> float:
  """Return the mean wall seconds of a call, after one that is not counted."""
  fn()
  start = time.perf_counter()
  for _ in range(repeats):
    fn()
  return (time.perf_counter() - start) / repeats


def in_turn(timed_fns: Sequence[Callable[[], float]], num_turns: int) -> list[list[float]]:
  """Return the seconds of each function, which they return, in turns of three calls of which the last two count.

  Steps of training follow each other. After a pause the system may have taken the memory of their temporaries, and the
  virtual machine that of the system.
  """
  seconds = [[] for _ in timed_fns]
  for _ in range(num_turns):
    for column, fn in zip(seconds, timed_fns, strict=True):
      column.extend([fn() for _ in range(3)][1:])
  return seconds


def start_like_commands() -> None:
  """Use huge pages and XLA's options as the commands that compute do, in a version whose commands do."""
  from t5x_lite import runtime

  values = {name: os.environ[name] for name in _CHANGED if name in os.environ}
  os.environ.setdefault(_FIRST_VALUES, json.dumps(values))
  for name in ('restart_with_huge_pages', 'compile_faster'):
    getattr(runtime, name, lambda: None)()


def given_environment() -> dict[str, str]:
  """Return the environment that a user gave, without the changes of `start_like_commands`."""
  environment = dict(os.environ)
  first_values = environment.pop(_FIRST_VALUES, None)
  if first_values is None:
    return environment
  for name in _CHANGED:
    environment.pop(name, None)
  return {**environment, **json.loads(first_values)}


def checkpoint_arrays(megabytes: int) -> dict:
  """Return float32 matrices with the shapes of T5 1.1 small, repeated up to a size in MiB, on the device."""
  import jax
  import numpy as np

  shapes = [(512, 384), (384, 512), (512, 1024), (1024, 512)]
  arrays, left, rng = {}, int(megabytes * 2**20 / 4), np.random.default_rng(0)
  while left > 0:
    index = len(arrays)
    shape = (32128, 512) if index < 2 else shapes[index % len(shapes)]
    arrays[f'kernel_{index:03d}'] = jax.device_put(rng.standard_normal(shape, np.float32))
    left -= shape[0] * shape[1]
  return arrays


def add_t5_small_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments that choose the model, batch and optimizer of `t5_small`."""
  parser.add_argument('--layers', type=positive, default=8)
  parser.add_argument('--batch', type=positive, default=8)
  parser.add_argument('--inputs', type=positive, default=128)
  parser.add_argument('--targets', type=positive, default=64)
  parser.add_argument('--optimizer', default='adafactor', choices=['adafactor', 'adamw'])


def t5_small(
  args: argparse.Namespace,
  *,
  trained: str | None = None,
  model_options: dict | None = None,
  **config_fields: object,
) -> types.SimpleNamespace:
  """Build the training of T5 1.1 small (77 M parameters), by default without dropout and in float32.

  Args:
    args: see `add_t5_small_arguments`.
    trained: expression of the paths of the parameters that the optimizer trains; None for all.
    model_options: more arguments of the model.
    **config_fields: fields of `T5Config` that replace or follow the default ones.

  Returns:
    A namespace of the `config`, the `model`, the `partitioner`, the `initializer` of the state, and a `batch` of random
    tokens on the device.
  """
  import jax.numpy as jnp

  from t5x_lite import adafactor
  from t5x_lite import models
  from t5x_lite import optimizers
  from t5x_lite import partitioning
  from t5x_lite.data import vocabularies
  from t5x_lite.networks import t5

  config = t5.T5Config(
    **{
      **dict(
        vocab_size=32128,
        dtype=jnp.float32,
        emb_dim=512,
        num_heads=6,
        num_encoder_layers=args.layers,
        num_decoder_layers=args.layers,
        head_dim=64,
        mlp_dim=1024,
        mlp_activations=('gelu', 'linear'),
        dropout_rate=0.0,
        logits_via_embedding=False,
      ),
      **config_fields,
    }
  )
  vocabulary = vocabularies.PassThroughVocabulary(32128)
  if args.optimizer == 'adafactor':
    optimizer_def = adafactor.Adafactor(
      1e-3, logical_factor_rules=adafactor.standard_logical_factor_rules()
    )
  else:
    optimizer_def = optimizers.adamw(1e-3)
  if trained is not None:
    optimizer_def = optimizers.MultiOptimizer([(trained, optimizer_def)])
  model = models.EncoderDecoderModel(
    t5.Transformer(config),
    vocabulary,
    vocabulary,
    optimizer_def,
    z_loss=1e-4,
    **(model_options or {}),
  )
  lengths = {
    'encoder_input_tokens': args.inputs,
    'decoder_input_tokens': args.targets,
    'decoder_target_tokens': args.targets,
    'decoder_loss_weights': args.targets,
  }
  shapes = {name: (args.batch, length) for name, length in lengths.items()}
  found = training(model, partitioning.PjitPartitioner(num_partitions=1), shapes, 32000)
  found.config = config
  return found


def training(
  model: Any, partitioner: Any, shapes: Mapping[str, tuple[int, int]], num_ids: int
) -> types.SimpleNamespace:
  """Return the training of a model on random tokens.

  Args:
    model: the model.
    partitioner: the partitioner.
    shapes: shapes of a batch, by feature.
    num_ids: exclusive bound of the tokens' ids.

  Returns:
    A namespace of the `model`, the `partitioner`, the `initializer` of the state, and a `batch` on the device, whose
    loss weights are ones.
  """
  import jax
  import jax.numpy as jnp

  from t5x_lite import state_init  # Earlier versions have it at the top.

  initializer = state_init.TrainStateInitializer(
    model.optimizer_def,
    model.get_initial_variables,
    shapes,
    partitioner,
    dict.fromkeys(shapes, jnp.int32),
  )
  keys = jax.random.split(jax.random.key(1), len(shapes))
  batch = {
    name: jax.random.randint(key, shape, 2, num_ids)
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }
  if 'decoder_loss_weights' in batch:
    batch['decoder_loss_weights'] = jnp.ones_like(batch['decoder_loss_weights'])
  batch = jax.device_put(
    batch, jax.sharding.NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
  )
  return types.SimpleNamespace(
    model=model, partitioner=partitioner, initializer=initializer, batch=batch
  )


def trainer(
  setup: types.SimpleNamespace, learning_rate_fn: Callable[[Any], Any] | None = None
) -> Any:
  """Return a `Trainer` of the result of `training`, without a state and without metrics."""
  import jax

  from t5x_lite import trainer as trainer_lib

  return trainer_lib.Trainer(
    setup.model,
    setup.initializer.global_train_state_shape,
    setup.partitioner,
    [],
    None,
    setup.initializer.train_state_axes,
    jax.random.key(0),
    learning_rate_fn,
  )


def program_facts(program: Any) -> dict[str, float]:
  """Return the `gflop` that XLA counts in a compiled program, and its `temporaries` in MB (10^6 bytes)."""
  return {
    'gflop': program.cost_analysis().get('flops', float('nan')) / 1e9,
    'temporaries': program.memory_analysis().temp_size_in_bytes / 1e6,
  }


def peak_memory_mb(usage: Any = None) -> float:
  """Return the largest resident size in MB (10^6 bytes) of this process so far.

  Args:
    usage: a `resource.struct_rusage`, whose size is returned instead.
  """
  import resource

  scale = 1 if sys.platform == 'darwin' else 1024
  return (usage or resource.getrusage(resource.RUSAGE_SELF)).ru_maxrss * scale / 1e6


def machine() -> str:
  """Return one line about this machine and the versions that decide speed."""
  import jax
  import jaxlib

  device = jax.devices()[0]
  cpu = platform.processor() or platform.machine()
  for line in _lines('/proc/cpuinfo'):
    if line.startswith('model name'):
      cpu = line.split(':', 1)[1].strip()
      break
  return (
    f'{os.cpu_count()} cores {cpu}; {len(jax.devices())} x {device.device_kind}; jax {jax.__version__}, '
    f'jaxlib {jaxlib.__version__}; Python {platform.python_version()}'
  )


def _lines(path: str) -> list[str]:
  try:
    return pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  except OSError:
    return []


def print_table(title: str, rows: Sequence[Sequence[object]], header: Sequence[str]) -> None:
  """Print a Markdown table, ready for docs/benchmarks.md."""
  print(f'\n### {title}\n\n{machine()}\n')
  print('| ' + ' | '.join(header) + ' |')
  print('|' + '---|' * len(header))
  for row in rows:
    print(
      '| '
      + ' | '.join(f'{cell:.4g}' if isinstance(cell, float) else str(cell) for cell in row)
      + ' |'
    )
  print()
