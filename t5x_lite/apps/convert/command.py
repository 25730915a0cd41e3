"""`t5x_lite convert`: convert weights from and to the formats of T5X and Hugging Face."""

import argparse
import decimal
import re

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.errors import ExitCode
from t5x_lite.formatting import show

_DESCRIPTION = """\
Convert weights between formats, one tensor at a time: memory for a few of the largest tensors is enough. Nothing is
overwritten, and an interrupted command leaves no incomplete output: run it again. Formats:

  hugging_face   a folder with config.json and *.safetensors: T5 1.0 and 1.1 (including LM-adapted and Flan-T5), mT5,
                 umT5, ByT5, Switch Transformers
  t5x            a checkpoint of T5X: a file `checkpoint` and a folder per array; Orbax checkpoints of T5X are read too
  t5x_lite       a checkpoint of this package
  peft           the LoRA adapter of a run: adapter_config.json and adapter_model.safetensors

The format of SOURCE is detected. A training run can start from a SOURCE of any format without conversion: set
INITIAL_CHECKPOINT_PATH.
"""
_EPILOG = """\
examples:
  t5x_lite convert flan-t5-base runs/flan_t5_base --to=t5x_lite
  t5x_lite convert runs/mine mine_for_transformers --to=hugging_face --tokenizer=spiece.model
  t5x_lite convert runs/mine runs/mine_scanned --to=t5x_lite --param_layout=scalable_t5 --optimizer_state=drop
  t5x_lite convert t5x_runs/large large_half --to=hugging_face --dtype=bfloat16 --max_shard_size=2GB
  t5x_lite convert runs/lora adapter --to=peft
  t5x_lite convert adapter merged --base=flan-t5-base --to=hugging_face
"""
_OPTIONS = (
  'to',
  'dtype',
  'param_average',
  'base',
  'param_layout',
  'optimizer_state',
  'step',
  'merge',
  'family',
  'tokenizer',
  'max_shard_size',
  'push',
)
_UNITS = {
  '': 1,
  'B': 1,
  'KB': 10**3,
  'MB': 10**6,
  'GB': 10**9,
  'KIB': 2**10,
  'MIB': 2**20,
  'GIB': 2**30,
}
_SIZE = re.compile(r'(\d+(?:\.\d+)?) ?([a-zA-Z]*)')


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.description = _DESCRIPTION
  parser.epilog = _EPILOG
  parser.add_argument(
    'source',
    metavar='SOURCE',
    help='folder with weights, on a disk or in an object store (gs://, s3://); a run directory, of '
    'which the newest sound checkpoint is converted; or a model of the Hugging Face hub, '
    'hf://OWNER/NAME',
  )
  parser.add_argument(
    'output',
    metavar='OUTPUT',
    help='path of the result, which must not exist: a Hugging Face folder, or a run directory with '
    'one checkpoint_<step>',
  )
  parser.add_argument(
    '--to',
    required=True,
    metavar='FORMAT',
    help='t5x_lite, t5x, hugging_face, peft, or a format that MODULE registers. hugging_face merges the adapter of a '
    'run into its weights',
  )
  parser.add_argument(
    '--module', metavar='MODULE', help='Python module to import, which registers a format'
  )
  parser.add_argument(
    '--dtype',
    metavar='DTYPE',
    help='dtype of the parameters: float32, bfloat16 or float16; default: that of each tensor. The '
    'optimizer state keeps its dtypes',
  )
  parser.add_argument(
    '--param_average',
    action='store_true',
    help='convert the running average of the parameters instead of the parameters, without the '
    'optimizer state',
  )
  parser.add_argument(
    '--base',
    metavar='PATH',
    help='for a SOURCE that is an adapter of PEFT: the model with which it was trained, in any format; for a run with '
    'an adapter whose base has moved: its new path',
  )
  states = parser.add_argument_group('for --to=t5x_lite and --to=t5x')
  states.add_argument(
    '--param_layout',
    metavar='LAYOUT',
    help='t5 (a subtree per layer) or scalable_t5 (stacked layers); default: that of SOURCE',
  )
  states.add_argument(
    '--optimizer_state',
    metavar='KEEP|DROP',
    help='keep (default) or drop the optimizer state. To change the parameter layout, the state must '
    "have the parameters' shapes, like that of Adam",
  )
  states.add_argument(
    '--step',
    type=int,
    metavar='N',
    help='number of training steps to record; default: that of SOURCE, or 0',
  )
  states.add_argument(
    '--merge',
    action='store_true',
    default=None,
    help='only --to=t5x_lite: merge the adapter of SOURCE into its weights, in float32, and write a complete model',
  )
  folder = parser.add_argument_group('for --to=hugging_face')
  folder.add_argument(
    '--family',
    metavar='FAMILY',
    help='t5_1_0, t5_1_1, mt5, umt5, byt5 or switch; default: detected from the network and its '
    'vocabulary size',
  )
  folder.add_argument(
    '--tokenizer',
    metavar='PATH',
    help='tokenizer to copy: a sentencepiece model such as spiece.model, a Hugging Face folder or '
    'hf://OWNER/NAME; default: that of a Hugging Face SOURCE, or of the folder that the run of SOURCE started from',
  )
  folder.add_argument(
    '--max_shard_size',
    type=parse_num_bytes,
    metavar='SIZE',
    help='maximum size of a file of weights, e.g. 500MB; default: 5GB',
  )
  folder.add_argument(
    '--push',
    metavar='OWNER/NAME',
    help='also upload the folder to this repository of the Hugging Face hub, in one commit; the repository must be new '
    '(then it is private) or empty. Requires huggingface_hub, and the token of `hf auth login` or HF_TOKEN',
  )


def parse_num_bytes(text: str) -> int:
  """Return the number of bytes of a text such as '5GB' or '2GiB'."""
  match = _SIZE.fullmatch(text.strip())
  if match is None or match[2].upper() not in _UNITS:
    raise argparse.ArgumentTypeError(f'must be a size such as 5GB, 500MB or 2GiB, got {text!r}')
  return int(decimal.Decimal(match[1]) * _UNITS[match[2].upper()])


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  import jax

  # Conversion needs no accelerator.
  jax.config.update('jax_platforms', 'cpu')
  from t5x_lite import runtime
  from t5x_lite.apps.convert import report as convert_report
  from t5x_lite.apps.convert import run as convert
  from t5x_lite.configuration import module_imports

  if flags.module is not None:
    module_imports.import_module(flags.module, what='`--module`')
  progress = runtime.Progress(unit='tensor')
  try:
    done = convert.convert(
      flags.source,
      flags.output,
      progress=progress,
      **{name: getattr(flags, name) for name in _OPTIONS},
    )
  finally:
    progress.clear()
  show(convert_report.describe(done))
  return ExitCode.OK
