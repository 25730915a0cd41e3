"""`t5x_lite chat`: answer typed inputs with a trained model."""

import argparse

from t5x_lite.apps.common.constraints import add_constraint_arguments
from t5x_lite.apps.common.constraints import constrained_model
from t5x_lite.apps.common.flags import DECODE_FNS
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import add_decode_argument
from t5x_lite.apps.common.flags import add_gin_arguments
from t5x_lite.apps.common.runs import find_run
from t5x_lite.apps.common.runs import load_run
from t5x_lite.apps.common.runs import moved_base
from t5x_lite.errors import ExitCode

# The configuration of a training has no other parameter for a decoding function that is not part of the model.
_DECODE = """
from __gin__ import dynamic_registration
from t5x_lite import decoding
from t5x_lite import evaluation
from t5x_lite.apps import train as train_script
train_script.train.infer_eval_cfg = @decode/evaluation.InferenceEvalConfig()
decode/evaluation.InferenceEvalConfig.decode_fn = """


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument(
    'run',
    metavar='RUN',
    help='run directory, whose newest checkpoint is used, or path of one checkpoint. The config.gin '
    'of the run defines the model; each --gin_file is read after it',
  )
  group = parser.add_argument_group("decoding; default: the model's decoding algorithm")
  group.add_argument(
    '--num_decodes',
    type=int,
    default=1,
    metavar='N',
    help='print N answers, best first: samples, or with --beam the best beams',
  )
  group.add_argument('--temperature', type=float, metavar='T', help='sample with this temperature')
  group.add_argument('--topk', type=int, metavar='K', help='sample from the K most probable tokens')
  group.add_argument(
    '--topp',
    type=float,
    metavar='P',
    help='sample from the most probable tokens with total probability P',
  )
  add_decode_argument(group)
  group.add_argument('--beam', type=int, metavar='N', help='search with N beams')
  group.add_argument('--seed', type=int, default=0, metavar='N', help='seed of sampling')
  group.add_argument(
    '--max_length',
    type=int,
    metavar='N',
    help="maximum length of an answer in tokens; default: the run's length of targets",
  )
  group.add_argument(
    '--max_input_length',
    type=int,
    metavar='N',
    help="maximum length of an input in tokens; longer inputs are truncated. Default: the run's",
  )
  parser.add_argument(
    '--literal_sentinels',
    action='store_true',
    help='encode <extra_id_0> in an input like any other text, as a task with this option',
  )
  add_constraint_arguments(parser)
  add_gin_arguments(parser)


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  run = find_run(flags.run)
  overrides = ''
  if flags.decode is not None:
    overrides = _DECODE + DECODE_FNS[flags.decode] + '\n'
  configuration = load_run(run, invocation, overrides)
  from t5x_lite import checkpoints
  from t5x_lite.apps.chat import run as chat

  decode_fn = None
  if flags.decode is not None:
    decode_fn = configuration.argument('infer_eval_cfg').decode_fn
  options = chat.DecodingOptions(
    decode_fn=decode_fn,
    num_decodes=flags.num_decodes,
    temperature=flags.temperature,
    topk=flags.topk,
    topp=flags.topp,
    beam_size=flags.beam,
    seed=flags.seed,
  )
  with configuration.locating_errors():
    chat.chat(
      model=constrained_model(configuration, flags),
      partitioner=configuration.argument('partitioner'),
      task_feature_lengths=configuration.argument('train_dataset_cfg').task_feature_lengths,
      restore_checkpoint_cfg=checkpoints.RestoreCheckpointConfig(
        path=run.checkpoint, mode=run.mode, base_path=moved_base(configuration)
      ),
      options=options,
      max_input_length=flags.max_input_length,
      max_length=flags.max_length,
      literal_sentinels=flags.literal_sentinels,
    )
  return ExitCode.OK
