"""Part 'runs': decoding, and the command `train`: its start, compilation, `kill -9` and the resumed run.

The command trains on synthetic data, which need no files. Its processes share a folder of compiled programs, since a
second compilation may choose other kernels, and all runs must execute the same ones to have equal bits.
"""

from collections.abc import Iterator
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.gpu import items
from benchmarks.gpu import training

# (case, rows, tokens to decode) by size.
_DECODING = {
  'real': ((training.BASE, 8, 128), (training.BASE, 64, 128)),
  'tiny': ((training.TINY, 2, 4),),
}
_NUM_BEAMS = 4
# Model file, lengths, batch, steps between saves and steps of the command.
_COMMANDS = {
  'real': ('models/t5_1_1_small.gin', {'inputs': 512, 'targets': 128}, 64, 50, 150),
  'tiny': ('models/t5_1_1_tiny.gin', {'inputs': 16, 'targets': 8}, 2, 5, 30),
}

# Of XLA on GPUs: no sums in an order that changes from run to run.
_DETERMINISTIC = '--xla_gpu_deterministic_ops=true'


# ---- Decoding -------------------------------------------------------------------------------------------------------


def _decode(params, tokens, *, case: training.Case, num_tokens: int):
  """Return the tokens of beam search, which does not end early."""
  import jax.numpy as jnp

  from t5x_lite import decoding

  batch = {
    'encoder_input_tokens': tokens,
    'decoder_input_tokens': jnp.zeros((tokens.shape[0], num_tokens), jnp.int32),
  }
  model = training.model_of(case, decoding.beam_search)
  return model.predict_batch_with_aux(
    params,
    batch,
    decoder_params={'eos_id': case.vocab_size},
    num_decodes=_NUM_BEAMS,
  )[0]


def _decode_shapes(case: training.Case, rows: int) -> tuple[Any, Any]:
  import jax
  import jax.numpy as jnp

  model = training.model_of(case)
  shapes = training.shapes_of(case, rows)
  params = jax.eval_shape(
    lambda key: model.get_initial_variables(key, shapes)['params'], jax.random.key(0)
  )
  params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
  return params, jax.ShapeDtypeStruct((rows, case.lengths[0]), jnp.int32)


def _trace_decoding(case: training.Case, rows: int, num_tokens: int):
  import jax

  fn = functools.partial(_decode, case=case, num_tokens=num_tokens)
  return jax.jit(fn).trace(*_decode_shapes(case, rows))


def _measure_decoding(case: training.Case, rows: int, num_tokens: int) -> Iterator[items.Row]:
  import jax
  import jax.numpy as jnp

  params, tokens = _decode_shapes(case, rows)
  params = items.random_like(params)
  tokens = jax.random.randint(jax.random.key(1), tokens.shape, 2, case.vocab_size, jnp.int32)
  start = time.perf_counter()
  program = _trace_decoding(case, rows, num_tokens).lower().compile()
  compile_seconds = time.perf_counter() - start
  jax.block_until_ready(program(params, tokens))
  seconds = items.seconds_per_call(functools.partial(program, params, tokens))
  yield {
    'beams': _NUM_BEAMS,
    'rows': rows,
    'tokens': num_tokens,
    'seconds': seconds,
    'sequences/s': rows / seconds,
    'compile, s': compile_seconds,
  }


def _decoding_programs(case: training.Case, rows: int, num_tokens: int):
  return {'beam search': functools.partial(_trace_decoding, case, rows, num_tokens)}


# ---- The command ----------------------------------------------------------------------------------------------------


def command(sizes: str, model_dir: pathlib.Path, is_endless: bool = False) -> list[str]:
  """Return the command line of the run; one that is killed must not end before."""
  model, lengths, batch, period, num_steps = _COMMANDS[sizes]
  settings = {
    'MODEL_DIR': repr(str(model_dir)),
    'TASK_FEATURE_LENGTHS': repr(lengths),
    'BATCH_SIZE': batch,
    'PACK': False,
    'DROPOUT_RATE': 0.1,
    'TRAIN_STEPS': 10**6 if is_endless else num_steps,
    'SAVING_PERIOD': period,
    'EVAL_PERIOD': num_steps,
    'train_script.train.train_eval_dataset_cfg': None,
  }
  files = ('runs/pretrain.gin', 'data/synthetic.gin')
  return [
    sys.executable,
    *('-m', 't5x_lite', 'train', f'--gin_file={model}'),
    *(f'--gin_file={file}' for file in files),
    *(f'--gin.{name}={value}' for name, value in settings.items()),
  ]


class _Run:
  """A process of the command, whose output goes to a file in `folder`."""

  def __init__(
    self,
    sizes: str,
    model_dir: pathlib.Path,
    folder: pathlib.Path,
    flags: str = '',
    is_endless: bool = False,
  ):
    self._model_dir = model_dir
    self._log = folder / f'{model_dir.name}.log'
    self.began = time.time()
    environment = {
      **os.environ,
      'JAX_COMPILATION_CACHE_DIR': str(folder / 'programs'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {flags}'.strip(),
    }
    with self._log.open('ab') as output:
      self._process = subprocess.Popen(
        command(sizes, model_dir, is_endless),
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
      )

  def __enter__(self) -> '_Run':
    return self

  def __exit__(self, *exc_info) -> None:
    if self._process.poll() is None:
      self._process.kill()
      self._process.wait()

  def _failure(self, expectation: str) -> RuntimeError:
    lines = self._log.read_text(errors='replace').splitlines()
    status = self._process.returncode
    return RuntimeError(f'{expectation}, status {status}: ' + ' | '.join(lines[-3:])[:300])

  def finish(self) -> None:
    """Wait for the end of the run."""
    if self._process.wait() != 0:
      raise self._failure('the run failed')

  def kill_after(self, step: int) -> None:
    """Send SIGKILL once the checkpoint of `step` is committed."""
    while not (self._model_dir / f'checkpoint_{step}').is_dir():
      if self._process.poll() is not None:
        raise self._failure(f'the run ended before step {step}')
      time.sleep(0.02)
    self._process.send_signal(signal.SIGKILL)
    self._process.wait()

  def figures(self) -> items.Row:
    """Return the seconds from the start of the process to the end of compilation, and to the first step."""
    from t5x_lite import runtime

    found: items.Row = {}
    for event in runtime.read_events(self._model_dir / runtime.EVENTS_FILE):
      since = event.wall_time - self.began
      if since < 0:
        continue
      if event.kind == 'compiled':
        found['compiled after, s'] = since
      elif event.kind == 'first_step':
        found['first step after, s'] = since
    return found


def different_arrays(first: pathlib.Path, second: pathlib.Path) -> tuple[int, int]:
  """Return (number of arrays of two checkpoints that differ in a bit, number of all)."""
  import numpy as np

  from t5x_lite import checkpoints

  states = [checkpoints.load(str(path)) for path in (first, second)]
  leaves = [_leaves(state) for state in states]
  assert leaves[0].keys() == leaves[1].keys(), 'the checkpoints have different arrays'
  different = [
    name
    for name, value in leaves[0].items()
    if np.asarray(value).tobytes() != np.asarray(leaves[1][name]).tobytes()
  ]
  return len(different), len(leaves[0])


def _leaves(state: Any) -> dict[str, Any]:
  import jax

  paths, _ = jax.tree_util.tree_flatten_with_path(state)
  return {jax.tree_util.keystr(path): leaf for path, leaf in paths}


def _measure_command(sizes: str) -> Iterator[items.Row]:
  """Yield rows of an uninterrupted run, of one that is killed, and of the resumed one with the comparison.

  If arrays differ, the runs are repeated with kernels that have a fixed order of sums, whose arrays must not.
  """
  for flags in ('', _DETERMINISTIC):
    is_equal = True
    for row in _compare_runs(sizes, flags):
      is_equal = row.get('passes', True)
      if not is_equal and not flags:
        del row['passes']
      yield row
    if is_equal:
      return


def _compare_runs(sizes: str, flags: str) -> Iterator[items.Row]:
  *_, period, num_steps = _COMMANDS[sizes]
  last = f'checkpoint_{num_steps}'
  folder = pathlib.Path(tempfile.mkdtemp(prefix='gpu_runs_'))
  uninterrupted = folder / 'uninterrupted'
  killed = folder / 'killed'
  start = functools.partial(_Run, sizes, folder=folder, flags=flags)
  try:
    with start(uninterrupted) as run:
      run.finish()
      yield {'what': 'train, first start', **run.figures()}
    with start(killed, is_endless=True) as run:
      run.kill_after(period)
      if (killed / last).is_dir():
        raise RuntimeError('the run took too many steps before it was killed')
      yield {'what': 'train, programs in the cache, then kill -9', **run.figures()}
    with start(killed) as run:
      run.finish()
      row = {'what': 'train, resumed', **run.figures(), 'XLA_FLAGS': flags}
    different, number = different_arrays(uninterrupted / last, killed / last)
    yield {**row, 'different arrays': f'{different} of {number}', 'passes': different == 0}
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def make_items(sizes: str) -> list[items.Item]:
  """Return the items of this part."""
  found = []
  for case, rows, num_tokens in _DECODING[sizes]:
    arguments = (case, rows, num_tokens)
    found.append(
      items.Item(
        name=f'decoding, {rows} rows',
        measure=functools.partial(_measure_decoding, *arguments),
        programs=functools.partial(_decoding_programs, *arguments),
        limit=60.0,
      )
    )
  # Before the last item, which may be cut off by the limit of the part.
  command_item = items.Item(
    name='train: start, kill -9, resume',
    measure=functools.partial(_measure_command, sizes),
    programs=dict,
    limit=150.0,
  )
  return [*found[:1], command_item, *found[1:]]
