"""This version against an earlier commit: commands, compilation, step, decoding and saving, in turn in one run.

    python benchmarks/against_commit.py COMMIT [--phases step decode ...] [--pairs 9]

The commit is checked out into a temporary folder. For each phase both versions are set up in separate processes and
are then timed in turn, so that both have the same hours of the machine; the table gives the medians, and the median and
range of the ratios of the pairs. Only names that both versions have are used. Phases with the time and the largest
resident memory of a process: `libraries`, the imports of the libraries alone; `import`, until `train` may be called;
`dry_run` and `three_steps` of the command `train` with the keyword cloze; and commands on the 77 M-parameter T5 1.1
small with `runs/pretrain.gin`, of which each pair has its own folder and cache: `pretrain`, three steps;
`pretrain_again`, the same in a new folder when the cache is filled; `resume`, one more step; `other_layout`, one more
step from a checkpoint in the other parameter layout; `convert` to a Hugging Face folder. The other phases measure the
same model (`common.t5_small`) in a process that is set up before, whose peak memory `save` has too.
"""

import argparse
from collections.abc import Iterator
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import common

_ROOT = pathlib.Path(__file__).resolve().parent.parent
# Row of the table to its number, with the unit in the row's name.
Measured = dict[str, float]

_TRAIN = ['-m', 't5x_lite', 'train']
_CLOZE = [
  *_TRAIN,
  '--gin_file=recipes/keyword_cloze.gin',
  '--gin.DATA_SOURCE=builtin',
  '--gin.MODEL_DIR=FOLDER/run',
]


def _small(run: str, folder: str, steps: int, *more: str) -> list[str]:
  """Return the command that trains T5 1.1 small with `runs/{run}.gin` in FOLDER/`folder` up to step `steps`."""
  return [
    *_TRAIN,
    '--gin_file=models/t5_1_1_small.gin',
    f'--gin_file=runs/{run}.gin',
    '--gin_file=data/synthetic.gin',
    '--gin.DROPOUT_RATE=0.0',
    '--gin.BATCH_SIZE=8',
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 128, 'targets': 64}",
    '--gin.PACK=False',
    "--gin.network.T5Config.dtype='float32'",
    f"--gin.MODEL_DIR='FOLDER/{folder}'",
    f'--gin.TRAIN_STEPS={steps}',
    *more,
  ]


# Phase to commands, as arguments of Python with FOLDER for a new folder. The last one is measured.
_COMMANDS = {
  'libraries': [['-c', 'import jax, flax.linen, optax, orbax.checkpoint, gin; jax.devices()']],
  'import': [['-c', 'from t5x_lite.apps import train; train.train; import jax; jax.devices()']],
  'dry_run': [[*_CLOZE, '--dry_run']],
  'three_steps': [[*_CLOZE, '--gin.TRAIN_STEPS=3', '--gin.EVAL_STEPS=1']],
  'pretrain': [_small('pretrain', 'run', 3)],
  'pretrain_again': [_small('pretrain', 'first', 3), _small('pretrain', 'run', 3)],
  'resume': [_small('pretrain', 'run', 3), _small('pretrain', 'run', 4)],
  'other_layout': [
    _small('pretrain', 'run', 3),
    _small(
      'continue_pretrain',
      'other',
      4,
      "--gin.INITIAL_CHECKPOINT_PATH='FOLDER/run/checkpoint_3'",
      "--gin.network.T5Config.param_layout='scalable_t5'",
      "--gin.checkpoints.RestoreCheckpointConfig.assignment_map=[('state/param_states.*', None)]",
    ),
  ],
  'convert': [
    _small('pretrain', 'run', 3),
    ['-m', 't5x_lite', 'convert', 'FOLDER/run', 'FOLDER/hf', '--to=hugging_face'],
  ],
}


def _run(tree: pathlib.Path, phase: str) -> Measured:
  """Return seconds and peak memory of the last command of a phase, of the version in `tree`."""
  with tempfile.TemporaryDirectory(prefix='t5x_lite_bench_') as folder:
    # A user has byte code too.
    environment = {
      **os.environ,
      'PYTHONPATH': str(tree),
      'PYTHONDONTWRITEBYTECODE': '',
      'XDG_CACHE_HOME': f'{folder}/cache',
    }
    for command in _COMMANDS[phase]:
      arguments = [argument.replace('FOLDER', folder) for argument in command]
      with open(f'{folder}/log', 'w+', encoding='utf-8') as log:
        start = time.perf_counter()
        process = subprocess.Popen(
          [sys.executable, *arguments], cwd=tree, env=environment, stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
        spent = time.perf_counter() - start
        if status:
          log.seek(0)
          raise SystemExit(
            f'{" ".join(arguments)} of {tree} ended with wait status {status}:\n{log.read()[-2000:]}'
          )
  return {f'{phase}, s': spent, f'{phase}, peak memory, MB': common.peak_memory_mb(usage)}


def _setup() -> tuple:
  """Return (namespace of `common.t5_small`, new state, training step as a partitioned function)."""
  import jax
  import jax.numpy as jnp

  from t5x_lite import train_step  # An earlier version has it at the top.

  setup = common.t5_small(
    argparse.Namespace(layers=8, batch=8, inputs=128, targets=64, optimizer='adafactor')
  )
  state = jax.block_until_ready(setup.initializer.from_scratch(jax.random.key(0)))

  def step(state, batch):
    return train_step.train_with_lr(state, batch, jnp.float32(1e-3), None, setup.model, None)

  axes = setup.initializer.train_state_axes
  return (
    setup,
    state,
    setup.partitioner.partition(
      step, (axes, setup.partitioner.data_partition_spec), (axes, None), donate_argnums=(0,)
    ),
  )


def _step() -> Iterator[Measured]:
  import jax

  setup, state, step = _setup()
  step = step.lower(state, setup.batch).compile()

  def run():
    nonlocal state
    spent, (state, _) = common.timed(lambda: jax.block_until_ready(step(state, setup.batch)))
    return spent

  while True:
    (seconds,) = common.in_turn([run], 1)
    yield {'step of training, s': statistics.mean(seconds)}


def _statistics(num_steps: int = 10) -> Iterator[Measured]:
  """Yield the seconds of the steps before a line of metrics, with and without statistics of every parameter."""
  import itertools

  import jax

  from t5x_lite import trainer

  setup, state, _ = _setup()
  trainers = {}
  for name, computer in (
    ('', None),
    (', statistics of parameters', trainer.WeightMetricsComputer()),
  ):
    copied = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, state)
    trainers[f'{num_steps} steps of Trainer{name}, s'] = trainer.Trainer(
      setup.model,
      copied,
      setup.partitioner,
      [],
      None,
      setup.initializer.train_state_axes,
      jax.random.key(0),
      lambda step: 1e-3,
      None,
      computer,
    )
  while True:
    yield {
      name: common.timed(
        lambda: (
          running.train(itertools.repeat(setup.batch), num_steps),
          jax.block_until_ready(running.train_state),
        )
      )[0]
      for name, running in trainers.items()
    }


def _compile(
  layers: int, has_statistics: bool = False, **config_fields: object
) -> Iterator[Measured]:
  """Yield the seconds for tracing and compiling the step of `Trainer` for `layers` layers in each stack."""
  import jax

  from t5x_lite import trainer

  setup = common.t5_small(
    argparse.Namespace(layers=layers, batch=8, inputs=128, targets=64, optimizer='adafactor'),
    **config_fields,
  )
  state, axes = setup.initializer.global_train_state_shape, setup.initializer.train_state_axes
  computer = trainer.WeightMetricsComputer() if has_statistics else None
  name = (
    f'trace and compilation, {layers}+{layers} layers'
    + ', statistics of parameters' * has_statistics
  )
  name += ''.join(f', {field}={value}' for field, value in config_fields.items())
  while True:
    jax.clear_caches()
    compiling = trainer.Trainer(
      setup.model, state, setup.partitioner, [], None, axes, jax.random.key(0), None, None, computer
    )
    yield {f'{name}, s': common.timed(lambda: compiling.compile_train(setup.batch))[0]}
    compiling.close()


def _decode() -> Iterator[Measured]:
  import jax

  from t5x_lite import decoding
  from t5x_lite import layers

  setup, state, _ = _setup()
  never_ends = {'eos_id': setup.config.vocab_size}
  # A version that converts weights for each product is faster with float32 weights, so it keeps them.
  has_products = hasattr(layers, 'operand_dtype')
  half = jax.tree.map(lambda x: x.astype('bfloat16' if has_products else x.dtype), state.params)
  programs = {}
  for name, decode_fn, num_decodes in (
    ('greedy search, 64 tokens', decoding.greedy_search, 1),
    ('beam search, 4 beams', decoding.beam_search, 4),
  ):
    model = type(setup.model)(
      setup.model.module,
      setup.model.input_vocabulary,
      setup.model.output_vocabulary,
      None,
      decode_fn,
    )

    def predict(params, batch, model=model, num_decodes=num_decodes):
      return model.predict_batch_with_aux(
        params, batch, rng=jax.random.key(2), num_decodes=num_decodes, decoder_params=never_ends
      )[0]

    for title, params in (
      (name, state.params),
      (f'{name}, weights in bfloat16 if it has such products', half),
    ):
      programs[title] = functools.partial(
        jax.jit(predict).lower(params, setup.batch).compile(), params, setup.batch
      )
  while True:
    yield {
      f'{name}, s': common.timed(lambda: jax.block_until_ready(run()))[0]
      for name, run in programs.items()
    }


def _save() -> Iterator[Measured]:
  import jax

  from t5x_lite import checkpoints

  _, state, _ = _setup()
  state_dict = state.state_dict()
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_dict
  )
  while True:
    with tempfile.TemporaryDirectory(prefix='t5x_lite_bench_') as folder:
      manager = checkpoints.CheckpointManager(
        folder, save_cfg=checkpoints.SaveCheckpointConfig(period=1, keep=None)
      )
      start = time.perf_counter()
      manager.save(1, state_dict)
      blocking = time.perf_counter() - start
      manager.wait()
      committed = time.perf_counter() - start
      restored = common.timed(lambda: jax.block_until_ready(manager.restore(1, target=shapes)))[0]
      manager.close()
    yield {
      'save, blocking, s': blocking,
      'save, until committed, s': committed,
      'restore, s': restored,
      'save, peak memory, MB': common.peak_memory_mb(),
    }


_SCALABLE = {'scan_layers': True, 'param_layout': 'scalable_t5'}
_PHASES = {
  'step': _step,
  'statistics': _statistics,
  'compile': lambda: _compile(8, scan_layers=False),
  'compile_scan': lambda: _compile(8, scan_layers=True),
  'compile_scan_32': lambda: _compile(32, scan_layers=True),
  'compile_scalable': lambda: _compile(8, **_SCALABLE),
  'compile_scalable_32': lambda: _compile(32, **_SCALABLE),
  'compile_statistics': lambda: _compile(8, has_statistics=True),
  'decode': _decode,
  'save': _save,
}


class _Worker:
  """Phase of one version in a separate process, measured on request."""

  def __init__(self, tree: pathlib.Path, phase: str):
    self._process = subprocess.Popen(
      [sys.executable, __file__, '-', '--phases', phase, '--worker', str(tree)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def measure(self) -> Measured:
    print(file=self._process.stdin, flush=True)
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit(
        f'A version ended before it had measured, with status {self._process.wait()}; see above.'
      )
    return json.loads(line)

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def _work(tree: pathlib.Path, phase: str) -> None:
  """Answer each line of standard input with one measurement."""
  sys.path.insert(0, str(tree))
  import t5x_lite

  found = pathlib.Path(t5x_lite.__file__).parent.parent
  if found != tree:
    raise SystemExit(f'{found} was imported instead of {tree}')
  common.start_like_commands()
  measurements = _PHASES[phase]()
  for _ in sys.stdin:
    print(json.dumps(next(measurements)), flush=True)


def _measure(
  phase: str, trees: tuple[pathlib.Path, pathlib.Path], num_pairs: int
) -> tuple[list[Measured], ...]:
  """Return the measurements of both versions, pair by pair; the first pair is not counted."""
  if phase in _COMMANDS:
    measured = [[_run(tree, phase) for tree in trees] for _ in range(num_pairs + 1)]
  else:
    workers = [_Worker(tree, phase) for tree in trees]
    try:
      measured = [[worker.measure() for worker in workers] for _ in range(num_pairs + 1)]
    finally:
      for worker in workers:
        worker.close()
  return tuple(list(version) for version in zip(*measured[1:], strict=True))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('commit', help='the earlier version')
  parser.add_argument(
    '--phases', nargs='+', choices=[*_COMMANDS, *_PHASES], default=[*_COMMANDS, *_PHASES]
  )
  parser.add_argument('--pairs', type=common.positive, default=9)
  parser.add_argument('--worker', type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    return _work(args.worker, args.phases[0])
  rows = []
  with tempfile.TemporaryDirectory(prefix='t5x_lite_bench_') as folder:
    earlier = pathlib.Path(folder) / 'earlier'
    git = ['git', '-C', str(_ROOT), 'worktree']
    subprocess.run([*git, 'add', '--quiet', '--detach', str(earlier), args.commit], check=True)
    try:
      for phase in args.phases:
        ours, theirs = _measure(phase, (_ROOT, earlier), args.pairs)
        for name in ours[0]:
          ratios = [a[name] / b[name] for a, b in zip(ours, theirs, strict=True)]
          rows.append(
            (
              name,
              statistics.median(a[name] for a in ours),
              statistics.median(b[name] for b in theirs),
              statistics.median(ratios),
              f'{min(ratios):.3f} to {max(ratios):.3f}',
            )
          )
    finally:
      subprocess.run([*git, 'remove', '--force', str(earlier)], check=True)
  rate = common.matmul_gflops()
  common.print_table(
    f'Against {args.commit}, {args.pairs} pairs, matmul 2048^3 {rate:.0f} GFLOP/s',
    rows,
    ('what', 'this version', 'earlier', 'ratio', 'range'),
  )


if __name__ == '__main__':
  main()
