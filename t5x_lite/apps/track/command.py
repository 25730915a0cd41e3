"""`t5x_lite track`: send a run to a tracker of experiments."""

import argparse

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import add_gin_arguments
from t5x_lite.apps.common.flags import load_configuration
from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.formatting import show
from t5x_lite.trackers import TRACKERS

_RUN_FILE = 'runs/track.gin'
_HEADER = """
from __gin__ import dynamic_registration
from t5x_lite import trackers
from t5x_lite.apps import track as track_script
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument('run', metavar='RUN', help='model directory, also of a run that is training')
  parser.add_argument(
    '--to',
    choices=tuple(TRACKERS),
    help='tracker; its options are those of trackers.Wandb, trackers.Mlflow and trackers.TensorBoard, e.g. '
    '--gin.trackers.Wandb.project=mine. --gin.TRACKER sets any other tracker',
  )
  parser.add_argument(
    '--once',
    action='store_true',
    help='end when everything so far is sent; default: when the run ends',
  )
  parser.add_argument(
    '--state_dir',
    metavar='FOLDER',
    help='folder that keeps how much is sent, e.g. for a RUN that cannot be written; default: RUN/trackers',
  )
  add_gin_arguments(parser, compiles=False, computes=False)


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  of_gin = [flag for flag in invocation.gin_flags if flag.startswith('--gin.TRACKER=')]
  if (flags.to is None) == (not of_gin):
    got = ' and '.join(of_gin + [f'--to={flags.to}'] * (flags.to is not None))
    raise ConfigError(
      f'Exactly one of --to and --gin.TRACKER must choose a tracker, got {got or "neither"}. Pass one of '
      f'{", ".join(f"--to={name}" for name in TRACKERS)}.'
    )
  text = f'{_HEADER}track_script.track.run = {flags.run!r}\n'
  if flags.to is not None:
    text += f'TRACKER = @trackers.{TRACKERS[flags.to]}()\n'
  invocation = invocation._replace(gin_files=[_RUN_FILE, *invocation.gin_files])
  configuration = load_configuration(invocation, overrides=text)
  show(configuration.call(once=flags.once, state_dir=flags.state_dir))
  return ExitCode.OK
