"""Table of the commands, in the order of `t5x_lite --help`."""

import argparse
import importlib

from t5x_lite.apps.common.flags import Command
from t5x_lite.apps.common.flags import Invocation


def _command(
  folder: str, help_line: str, entry: str | None = None, passes_on: bool = False
) -> Command:
  """Return the command of a folder; its module `command` is imported when the command is used."""

  def add_arguments(parser: argparse.ArgumentParser) -> None:
    importlib.import_module(f't5x_lite.apps.{folder}.command').add_arguments(parser)

  def run(invocation: Invocation) -> int:
    return importlib.import_module(f't5x_lite.apps.{folder}.command').run_command(invocation)

  return Command(help_line, add_arguments, run, entry, passes_on)


COMMANDS: dict[str, Command] = {
  'train': _command('train', 'train a model, or resume training', 't5x_lite.apps.train.train'),
  'eval': _command(
    'evaluate',
    'evaluate checkpoints by decoding: one, the newest or all',
    't5x_lite.apps.evaluate.evaluate',
  ),
  'infer': _command(
    'infer',
    'predict, or score, every example of a task, a file or standard input',
    't5x_lite.apps.infer.infer',
  ),
  'chat': _command(
    'chat', 'answer typed or piped inputs with a trained model', 't5x_lite.apps.train.train'
  ),
  'export': _command(
    'export',
    'export a trained model as programs that run without this package',
    't5x_lite.apps.export.save',
  ),
  'convert': _command('convert', 'convert weights from and to the formats of T5X and Hugging Face'),
  'vocab': _command(
    'vocab', "train a SentencePiece vocabulary with T5's ids, or check one against a task"
  ),
  'jsonl_to_array_record': _command(
    'jsonl_to_array_record', 'convert JSONL files to an array record file'
  ),
  'precompile': _command(
    'precompile',
    'compile the programs of a run ahead of time, and show their memory',
    't5x_lite.apps.train.train',
  ),
  'launch': _command(
    'launch', 'start several processes of a command on this machine', passes_on=True
  ),
  'plot': _command('plot', 'draw the metrics of runs'),
  'track': _command(
    'track', 'send a run to wandb, MLflow or TensorBoard', 't5x_lite.apps.track.track'
  ),
  'report': _command('report', 'write a page about runs: curves, metrics, examples, warnings'),
  'explain_sharding': _command(
    'explain_sharding',
    'show the sharding and memory of each array of a model and its optimizer',
    't5x_lite.apps.train.train',
  ),
  'completion': _command('completion', 'print a script for tab completion in bash, zsh or fish'),
}
