"""`t5x_lite chat`: answers what is typed by a trained model."""

import argparse

from t5x_lite.apps.common.flags import Command, add_gin_arguments
from t5x_lite.apps.common.runs import find_run, load_run
from t5x_lite.errors import ExitCode


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('run', metavar='RUN',
                      help="a run's directory, for its newest checkpoint, or one of its checkpoints; config.gin in the "
                      'directory says what the model is, and each --gin_file is read on top of it')
  group = parser.add_argument_group("decoding; by default the model's own")
  group.add_argument('--num_decodes', type=int, default=1, metavar='N',
                     help='show N answers, the best first: sampled, or with --beam those of the best beams')
  group.add_argument('--temperature', type=float, metavar='T', help='sample at this temperature')
  group.add_argument('--topk', type=int, metavar='K', help='sample from the K most probable tokens')
  group.add_argument('--topp', type=float, metavar='P',
                     help='sample from the most probable tokens whose probabilities sum up to P')
  group.add_argument('--beam', type=int, metavar='N', help='search with N beams')
  group.add_argument('--seed', type=int, default=0, metavar='N', help='of what is sampled')
  group.add_argument('--max_length', type=int, metavar='N',
                     help="the most ids of an answer; by default the run's length of targets")
  group.add_argument('--max_input_length', type=int, metavar='N', help='the same for inputs, which are cut')
  add_gin_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
  run = find_run(arguments.run)
  configuration = load_run(run, arguments)
  from t5x_lite import checkpoints
  from t5x_lite.apps.chat import run as chat
  options = chat.DecodingOptions(
      num_decodes=arguments.num_decodes, temperature=arguments.temperature, topk=arguments.topk, topp=arguments.topp,
      beam_size=arguments.beam, seed=arguments.seed)
  chat.chat(
      model=configuration.argument('model'), partitioner=configuration.argument('partitioner'),
      task_feature_lengths=configuration.argument('train_dataset_cfg').task_feature_lengths,
      restore_checkpoint_cfg=checkpoints.RestoreCheckpointConfig(path=run.checkpoint, mode=run.mode), options=options,
      max_input_length=arguments.max_input_length, max_length=arguments.max_length)
  return ExitCode.OK


COMMAND = Command('answer what is typed, or piped in, by a trained model', _add_arguments, _run,
                  entry='t5x_lite.apps.train.train')
