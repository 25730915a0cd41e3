"""The recipe on long inputs: its memory with both kernels of attention, and the baselines of its results.

    python benchmarks/function_cloze.py [--steps 3] [--limit_gb 4] [--tables memory baselines]

The table `memory` trains the first steps of recipes/function_cloze.gin with the default kernel and with the plain one,
each in a separate process, without a limit and with --limit_gb GB (10^9 bytes) of address space, as after `ulimit -v`.
The peak is the largest resident size. The table `baselines` predicts the targets of validation from
those of training: accuracy of the most frequent byte after the last n - 1 bytes, and loss of the n-gram interpolated
with the shorter ones (Witten and Bell 1991).
"""

import argparse
import collections
import math
import os
import pathlib
import resource
import subprocess
import sys
import tempfile

import common

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_RECIPE = 'recipes/function_cloze.gin'
_KERNELS = ('auto', 'dot')


def _train(kernel: str, num_steps: int, limit: int | None) -> tuple[int, float, str]:
  """Return (exit status, peak resident size in MB, log) of a training run with a limit of `limit` bytes."""
  with (
    tempfile.TemporaryDirectory() as folder,
    open(pathlib.Path(folder) / 'log', 'w+', encoding='utf-8') as log,
  ):
    command = [
      sys.executable,
      '-m',
      't5x_lite',
      'train',
      f'--gin_file={_RECIPE}',
      f'--gin.MODEL_DIR={folder}/run',
      f'--gin.TRAIN_STEPS={num_steps}',
      f"--gin.network.T5Config.attention_kernel='{kernel}'",
      '--gin.train_script.train.train_eval_dataset_cfg=None',
      '--gin.train_script.train.infer_eval_dataset_cfg=None',
      '--gin.train_script.train.infer_eval_period=None',
    ]
    process = subprocess.Popen(
      command,
      env=os.environ | {'PYTHONPATH': str(_ROOT)},
      stdout=log,
      stderr=subprocess.STDOUT,
      preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
      if limit
      else None,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    log.seek(0)
    return process.returncode, common.peak_memory_mb(usage), log.read()


def _memory(args: argparse.Namespace) -> None:
  """Print the peaks of training with both kernels, and the first error of a run that ends with one."""
  table = []
  for limit in (None, int(args.limit_gb * 1e9)):
    for kernel in _KERNELS:
      status, peak, log = _train(kernel, args.steps, limit)
      lines = log.splitlines()
      shown = (
        next((line for line in lines if 'out of memory' in line.lower()), lines[-1])
        if status
        else 'trained'
      )
      table.append(
        [
          kernel,
          'none' if limit is None else f'{args.limit_gb:g} GB',
          f'{peak:,.0f}',
          status,
          shown[:150],
        ]
      )
  common.print_table(
    f'{args.steps} steps of {_RECIPE}',
    table,
    ['attention_kernel', 'limit', 'peak MB', 'exit status', 'result'],
  )


def _baselines() -> None:
  """Print the loss per target byte and the accuracy of n-grams, and the similarity of unrelated bodies."""
  from t5x_lite import data
  from t5x_lite.data import corpora

  train, validation = (
    [example.body.encode() + b'\0' for example in corpora.python_function_cloze(split)]
    for split in corpora.SPLITS
  )
  table = []
  for order in range(1, 6):
    counts: list = [collections.defaultdict(collections.Counter) for _ in range(order)]
    for body in train:
      for end in range(len(body)):
        for length in range(min(order - 1, end) + 1):
          counts[length][body[end - length : end]][body[end]] += 1
    loss, num_equal, num = 0.0, 0, 0
    for body in validation:
      for end in range(len(body)):
        probability, guess = 1 / 257, None
        for length in range(min(order - 1, end) + 1):
          seen = counts[length].get(body[end - length : end])
          if seen:
            total = seen.total()
            probability = (seen[body[end]] + len(seen) * probability) / (total + len(seen))
            guess = seen.most_common(1)[0][0]
        loss, num_equal, num = (
          loss - math.log(probability),
          num_equal + (guess == body[end]),
          num + 1,
        )
    table.append([order, loss / num, num_equal / num])
  common.print_table(
    'Byte n-grams of the targets, on the validation split', table, ['n', 'loss', 'accuracy']
  )
  bodies = [example.body for example in corpora.python_function_cloze('validation')]
  print(
    'edit_similarity of each target and the next one: '
    f'{data.edit_similarity(bodies, bodies[1:] + bodies[:1])["edit_similarity"]:.3f}'
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--steps', type=common.positive, default=3)
  parser.add_argument('--limit_gb', type=float, default=4)
  parser.add_argument(
    '--tables', nargs='+', default=['memory', 'baselines'], choices=['memory', 'baselines']
  )
  args = parser.parse_args()
  if 'memory' in args.tables:
    _memory(args)
  if 'baselines' in args.tables:
    _baselines()


if __name__ == '__main__':
  main()
