"""`t5x_lite precompile`: compiles what a run will need, and says what it costs."""

import argparse

from t5x_lite.apps.common.flags import (
    Command,
    add_gin_arguments,
    add_num_devices,
    load_configuration,
    suppose_devices,
)
from t5x_lite.errors import ConfigError, ExitCode


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  add_gin_arguments(parser)
  add_num_devices(parser)
  parser.add_argument('--write_hlo', action='store_true',
                      help='write the programs as text, before and after optimization, into MODEL_DIR/precompile')


def _run(arguments: argparse.Namespace) -> int:
  if arguments.num_devices is not None and arguments.compilation_cache_dir is not None:
    raise ConfigError(f'--num_devices={arguments.num_devices} and --compilation_cache_dir exclude each other: no run on '
                      'this machine would find what was compiled for supposed devices. Leave one of them out.')
  suppose_devices(arguments.num_devices)
  # The model directory is only where programs are written.
  configuration = load_configuration(arguments, None if arguments.write_hlo else {'MODEL_DIR': "'none'"})
  from t5x_lite import multihost
  from t5x_lite import runtime
  from t5x_lite.apps.precompile import run as precompile
  bound = configuration.uses[0].bound
  # Of the training's configuration, what decides about its programs.
  parts = {name: configuration.argument(name) for name in precompile.TRAIN_ARGUMENTS if name in bound}
  progress = runtime.Progress(enabled=multihost.is_lead())
  try:
    programs = precompile.precompile(**parts, write_hlo=arguments.write_hlo, note_fn=progress.note)
  finally:
    progress.clear()
  if multihost.is_lead():
    print(precompile.describe(programs, parts['partitioner']))
  return ExitCode.OK


COMMAND = Command('compile what a run will need ahead of time, and show what it costs in memory', _add_arguments, _run,
                  entry='t5x_lite.apps.train.train')
