"""Fine-tuning on an own table: processor time and exact match of t5x_lite and of transformers' Seq2SeqTrainer.

    python benchmarks/finetune_trial.py --peer_python=/path/to/python [--seeds 5] [--steps 500] [--records 800]
        [--adapter_rank 8]

Both programs fine-tune the same folder on the same table with the same settings, one after the other, as a user does: a
process that reads the files, trains, and decodes the test records greedily. A seed makes the parameters and the
records, and is that of both programs. `--peer_python` is the Python of an environment with transformers, torch and
accelerate. With `--adapter_rank`, which needs peft there, both train low-rank adapters of all kernels of a base that
the peer has trained to give the words of the answers in the other order. Processor time is that of all threads of the
process, from its start to its end, with compilation.
"""

import argparse
import csv
import json
import os
import pathlib
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile

import common

_LEARNING_RATE = 1.5e-3
_ADAPTER_LEARNING_RATE = 5e-3
_ANIMALS = ('cats', 'dogs', 'hens', 'cows', 'bees', 'ants', 'owls', 'rats', 'bats', 'elks')


def write_records(
  path: pathlib.Path, num_records: int, seed: int, answer: str = '{count} {animal}'
) -> None:
  """Write a table of questions and answers."""
  draw = random.Random(seed)
  with path.open('w', newline='', encoding='utf-8') as stream:
    writer = csv.writer(stream)
    writer.writerow(['id', 'question', 'answer'])
    for number in range(num_records):
      animal = draw.choice(_ANIMALS)
      count = draw.randrange(10, 24)
      writer.writerow(
        [
          number,
          f'How many {animal}? There are {count}.',
          answer.format(count=count, animal=animal),
        ]
      )


def learning_rate(args: argparse.Namespace) -> float:
  """Return the learning rate of both programs."""
  if args.adapter_rank:
    return _ADAPTER_LEARNING_RATE
  return _LEARNING_RATE


def our_command(folder: pathlib.Path, args: argparse.Namespace, seed: int) -> list[str]:
  """Return the command that trains and evaluates with t5x_lite."""
  adapter = []
  if args.adapter_rank:
    adapter = [
      '--gin_file=adapters/lora.gin',
      f'--gin.LORA_RANK={args.adapter_rank}',
      f'--gin.LORA_ALPHA={2.0 * args.adapter_rank}',
      "--gin.LORA_TARGETS='all'",
    ]
  return [
    *(sys.executable, '-m', 't5x_lite', 'train', '--gin_file=recipes/finetune_files.gin'),
    *adapter,
    f'--gin.MODEL_DIR={folder}/ours',
    f'--gin.INITIAL_CHECKPOINT_PATH={folder}/base',
    f'--train_file={folder}/train.csv',
    f'--validation_file={folder}/test.csv',
    *('--inputs=question', '--targets=answer'),
    f'--gin.TRAIN_STEPS={args.steps}',
    f'--gin.EVAL_PERIOD={args.steps}',
    f'--gin.SAVING_PERIOD={args.steps}',
    f'--gin.LEARNING_RATE={learning_rate(args)}',
    f'--gin.RANDOM_SEED={seed}',
  ]


def measured(command: list[str], folder: pathlib.Path) -> tuple[float, str]:
  """Run a command without stored programs; return the seconds of its process, and its standard output."""
  environment = {**os.environ, 'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled')}
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found.stdout


def train_base(peer: list[str], folder: pathlib.Path, args: argparse.Namespace, seed: int) -> None:
  """Replace the folder `base` by a model that has learnt another task."""
  with tempfile.TemporaryDirectory() as name:
    other = pathlib.Path(name)
    (folder / 'base').rename(other / 'base')
    for table in ('train.csv', 'test.csv'):
      write_records(other / table, args.records, seed + 2000, '{animal} {count}')
    options = [str(2 * args.steps), str(_LEARNING_RATE), str(seed), '0']
    subprocess.run([*peer, 'train', str(other), *options], check=True, stdout=subprocess.DEVNULL)
    shutil.copytree(other / 'peer', folder / 'base')


def run_seed(args: argparse.Namespace, seed: int) -> dict[str, float]:
  """Return the figures of both programs for a seed."""
  peer = [args.peer_python, str(pathlib.Path(__file__).with_name('finetune_peer.py'))]
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    write_records(folder / 'train.csv', args.records, seed)
    write_records(folder / 'test.csv', args.test_records, seed + 1000)
    subprocess.run([*peer, 'make', str(folder / 'base'), str(seed)], check=True)
    if args.adapter_rank:
      train_base(peer, folder, args, seed)
    our_seconds, _ = measured(our_command(folder, args, seed), folder)
    lines = (folder / 'ours' / 'inference_eval' / 'train' / 'metrics.jsonl').read_text()
    ours = json.loads(lines.splitlines()[-1])
    options = [str(args.steps), str(learning_rate(args)), str(seed), str(args.adapter_rank)]
    peer_seconds, output = measured([*peer, 'train', str(folder), *options], folder)
  return {
    'our_seconds': our_seconds,
    'peer_seconds': peer_seconds,
    'our_match': ours['exact_match'],
    'peer_match': json.loads(output.splitlines()[-1])['exact_match'],
  }


def main() -> None:
  """Print a table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--peer_python', required=True)
  parser.add_argument('--seeds', type=common.positive, default=5)
  parser.add_argument('--steps', type=common.positive, default=500)
  parser.add_argument('--records', type=common.positive, default=800)
  parser.add_argument('--test_records', type=common.positive, default=1000)
  parser.add_argument('--adapter_rank', type=int, default=0, help='0: train all parameters')
  args = parser.parse_args()
  os.environ['PYTHONPATH'] = str(pathlib.Path(__file__).resolve().parent.parent)
  before = common.matmul_gflops()
  found = [run_seed(args, seed) for seed in range(args.seeds)]
  rows = []
  for seed, figures in enumerate(found):
    rows.append((seed, *figures.values(), figures['our_seconds'] / figures['peer_seconds']))
  means = [statistics.mean(column) for column in zip(*rows, strict=True)]
  rows.append(('mean', *means[1:]))
  rates = f'{before:.0f}, {common.matmul_gflops():.0f} GFLOP/s'
  common.print_table(
    f'Fine-tuning ({args.records} records, {args.steps} steps; matmul 2048^3 before, after: {rates})',
    rows,
    (
      'seed',
      'ours, s',
      'transformers, s',
      'ours, exact match',
      'transformers, exact match',
      'ratio of s',
    ),
  )


if __name__ == '__main__':
  main()
