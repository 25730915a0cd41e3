"""`t5x_lite convert`: weights from and to the forms of T5X and Hugging Face."""

import argparse
import dataclasses
import decimal
import re

from t5x_lite.apps.common.flags import Command
from t5x_lite.errors import ExitCode

_DESCRIPTION = """\
Converts weights between the forms that people have them in, one tensor at a time: memory for a few of the largest is
enough. Nothing is overwritten, and an interrupted command leaves nothing that looks whole: run it again. Forms:

  hugging_face   a folder with config.json and *.safetensors: T5 1.0 and 1.1 (LM-adapted and Flan-T5 among them), mT5,
                 umT5, ByT5, Switch Transformers
  t5x            a checkpoint of T5X: a file `checkpoint` and a folder for each array; those in Orbax's form are read
  t5x_lite       a checkpoint of this package

SOURCE is recognised by what lies in it. A training run can begin with a SOURCE of any form without conversion:
INITIAL_CHECKPOINT_PATH names it.
"""
_EPILOG = """\
examples:
  t5x_lite convert flan-t5-base runs/flan_t5_base --to=t5x_lite
  t5x_lite convert runs/mine mine_for_transformers --to=hugging_face --tokenizer=spiece.model
  t5x_lite convert runs/mine runs/mine_scanned --to=t5x_lite --param_layout=scalable_t5 --optimizer_state=drop
  t5x_lite convert t5x_runs/large large_half --to=hugging_face --dtype=bfloat16 --max_shard_size=2GB
"""
_UNITS = {'': 1, 'B': 1, 'KB': 10**3, 'MB': 10**6, 'GB': 10**9, 'KIB': 2**10, 'MIB': 2**20, 'GIB': 2**30}
_SIZE = re.compile(r'(\d+(?:\.\d+)?) ?([a-zA-Z]*)')


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.description, parser.epilog = _DESCRIPTION, _EPILOG
  parser.add_argument('source', metavar='SOURCE',
                      help='a folder with weights, or a directory of checkpoints, whose newest sound one is taken')
  parser.add_argument('output', metavar='OUTPUT',
                      help='what to make, which must not exist: a Hugging Face folder, or a model directory that gets '
                      'one checkpoint_<step>')
  parser.add_argument('--to', required=True, metavar='FORM', help='t5x_lite, t5x or hugging_face')
  parser.add_argument('--dtype', metavar='DTYPE',
                      help="float32, bfloat16 or float16 for the parameters; by default each tensor keeps its own. The "
                      "optimizer's state always does")
  states = parser.add_argument_group('for --to=t5x_lite and --to=t5x')
  states.add_argument('--param_layout', metavar='LAYOUT',
                      help="t5 (a subtree for each layer) or scalable_t5 (stacked layers); by default the source's own")
  states.add_argument('--optimizer_state', metavar='KEEP|DROP',
                      help="keep (default) or drop the optimizer's state. It follows a change of layout only if it is "
                      'shaped like the parameters, as Adam\'s is')
  states.add_argument('--step', type=int, metavar='N',
                      help="number of training steps to record; by default the source's, or 0 if it has none")
  folder = parser.add_argument_group('for --to=hugging_face')
  folder.add_argument('--family', metavar='FAMILY',
                      help='t5_1_0, t5_1_1, mt5, umt5, byt5 or switch; by default recognised by the network and the '
                      'size of its vocabulary')
  folder.add_argument('--tokenizer', metavar='PATH',
                      help="what the folder's tokenizer is taken from: a sentencepiece model such as spiece.model, or "
                      "a Hugging Face folder; by default that of a SOURCE which is one")
  folder.add_argument('--max_shard_size', type=parse_num_bytes, metavar='SIZE',
                      help='the most that a file of weights has, e.g. 500MB; 5GB by default')


def parse_num_bytes(text: str) -> int:
  """Returns the number of bytes that a text such as '5GB' or '2GiB' names."""
  match = _SIZE.fullmatch(text.strip())
  unit = None if match is None else _UNITS.get(match[2].upper())
  if unit is None:
    raise argparse.ArgumentTypeError(f'{text!r} is no size such as 5GB, 500MB or 2GiB')
  return int(decimal.Decimal(match[1]) * unit)


def _run(arguments: argparse.Namespace) -> int:
  import jax
  # Nothing is computed, and an accelerator would only be kept from others.
  jax.config.update('jax_platforms', 'cpu')
  from t5x_lite import runtime
  from t5x_lite.apps.convert import run as convert, report as convert_report
  progress = runtime.Progress(unit='tensor')
  try:
    done = convert.convert(arguments.source, arguments.output, progress=progress, **{
        field.name: getattr(arguments, field.name) for field in dataclasses.fields(convert.ConvertConfig)})
  finally:
    progress.clear()
  print(convert_report.describe(done))
  return ExitCode.OK


COMMAND = Command('convert weights from and to the forms of T5X and Hugging Face', _add_arguments, _run)
