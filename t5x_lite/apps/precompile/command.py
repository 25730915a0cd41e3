"""`t5x_lite precompile`: compile the programs of a run, and show their memory."""

import argparse

from t5x_lite.apps.common.file_flags import add_file_arguments
from t5x_lite.apps.common.file_flags import load_for_training
from t5x_lite.apps.common.flags import NO_CACHE
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import add_gin_arguments
from t5x_lite.apps.common.flags import add_num_devices
from t5x_lite.apps.common.flags import add_seqio_arguments
from t5x_lite.apps.common.flags import binds_model
from t5x_lite.apps.common.flags import simulate_devices
from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.formatting import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  add_file_arguments(parser)
  add_gin_arguments(parser)
  add_seqio_arguments(parser)
  add_num_devices(parser)
  parser.add_argument(
    '--write_hlo',
    action='store_true',
    help='write the programs as text, before and after optimization, to MODEL_DIR/precompile; always '
    'done if a gin file configures `precompile` instead of `train`',
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  if flags.num_devices is not None:
    if flags.compilation_cache_dir not in (None, NO_CACHE):
      raise ConfigError(
        f'--num_devices={flags.num_devices} cannot be combined with --compilation_cache_dir: no '
        'run on this machine could use programs for simulated devices. Remove one of the flags.'
      )
    invocation = invocation._replace(compilation_cache_dir=NO_CACHE, distributed='off')
  simulate_devices(flags.num_devices)
  # T5X's run file configures `precompile` instead of `train`; T5X then always writes the programs.
  write_hlo = flags.write_hlo
  if binds_model(invocation, 'precompile'):
    invocation = invocation._replace(entry='t5x_lite.apps.precompile.precompile')
    write_hlo = True
  # The run directory is only used for the text of the programs.
  placeholders = None if write_hlo else {'MODEL_DIR': "'none'"}
  configuration = load_for_training(invocation, placeholders)
  from t5x_lite import multihost
  from t5x_lite import runtime
  from t5x_lite.apps.precompile import run as precompile

  bound = configuration.uses[0].bound
  # Arguments of the entry point that determine the programs.
  parts = {
    name: configuration.argument(name) for name in precompile.TRAIN_ARGUMENTS if name in bound
  }
  progress = runtime.Progress(enabled=multihost.is_lead())
  try:
    with configuration.locating_errors():
      programs = precompile.precompile(**parts, write_hlo=write_hlo, note_fn=progress.note)
  finally:
    progress.clear()
  if multihost.is_lead():
    show(precompile.describe(programs, parts['partitioner']))
  return ExitCode.OK
