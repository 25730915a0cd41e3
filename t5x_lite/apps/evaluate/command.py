"""`t5x_lite eval`: evaluate one, the newest or all checkpoints."""

import argparse
import os
from typing import Any

from t5x_lite.apps.common.constraints import add_constraint_arguments
from t5x_lite.apps.common.constraints import constrained_model
from t5x_lite.apps.common.file_flags import EVAL_FLAGS
from t5x_lite.apps.common.file_flags import add_file_arguments
from t5x_lite.apps.common.file_flags import check_reads_files
from t5x_lite.apps.common.file_flags import file_bindings
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import add_decode_argument
from t5x_lite.apps.common.flags import add_gin_arguments
from t5x_lite.apps.common.flags import add_seqio_arguments
from t5x_lite.apps.common.flags import load_configuration
from t5x_lite.apps.common.flags import with_run_file
from t5x_lite.apps.common.labels import add_labels_argument
from t5x_lite.apps.common.labels import decode_bindings
from t5x_lite.apps.common.runs import FoundRun
from t5x_lite.apps.common.runs import resolve_run
from t5x_lite.errors import ConfigError, ExitCode
from t5x_lite.formatting import show
from t5x_lite.storage import files

_RUN_FILE = 'runs/eval.gin'
# Values of required macros that do not affect evaluation.
_PLACEHOLDERS = {
  'MODEL_DIR': "'none'",
  'TRAIN_STEPS': '1',
  'DROPOUT_RATE': '0.0',
  'INITIAL_CHECKPOINT_PATH': "'none'",
}
_DECODE_HEADER = """
from __gin__ import dynamic_registration
from t5x_lite import decoding
from t5x_lite import evaluation
"""
# Modules that change no result, or whose values are compared with those of former results in another way.
_NOT_SETTINGS = (
  't5x_lite.apps.evaluate',
  't5x_lite.data.config',
  't5x_lite.evaluation',
  't5x_lite.partitioning',
  't5x_lite.checkpoints',
  't5x_lite.optimizers',
  't5x_lite.schedules',
  't5x_lite.trainer',
  't5x_lite.gin_utils',
  'gin',
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  parser.add_argument(
    'run',
    nargs='?',
    metavar='RUN',
    help='run directory, whose newest checkpoint is used, or path of one checkpoint. The config.gin '
    'of the run defines model and task; each --gin_file is read after it. Replaces CHECKPOINT_PATH; '
    'the default of EVAL_OUTPUT_DIR is RUN/eval',
  )
  parser.add_argument(
    '--all', action='store_true', help='evaluate all checkpoints of RUN, in ascending order of step'
  )
  parser.add_argument(
    '--dry_run',
    action='store_true',
    help='print the configuration and the checkpoints to evaluate, without evaluating',
  )
  add_decode_argument(parser)
  add_labels_argument(parser)
  add_constraint_arguments(parser)
  add_file_arguments(parser, EVAL_FLAGS)
  add_gin_arguments(parser)
  add_seqio_arguments(parser)


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  placeholders = dict(_PLACEHOLDERS)
  overrides = ''
  run = None
  if flags.run is not None:
    run, invocation = resolve_run(invocation)
  problem = ''
  if flags.all and (run is None or run.mode == 'specific'):
    problem = (
      f'--all requires a run directory, got {"no RUN" if run is None else repr(flags.run)}. Pass one, '
      'e.g. `t5x_lite eval runs/my_run --all`, or set --gin.CHECKPOINT_MODE=all.'
    )
  elif run is None and not invocation.gin_files:
    problem = (
      'RUN is missing. Pass a run directory, e.g. `t5x_lite eval runs/my_run`, or --gin_file, '
      '--gin.CHECKPOINT_PATH and --gin.EVAL_OUTPUT_DIR.'
    )
  if problem:
    raise ConfigError(problem)
  if run is not None:
    overrides = _configure_run(run, flags, placeholders)
  decode = decode_bindings(flags, 'evaluation.InferenceEvalConfig.decode_fn')
  if decode:
    overrides += _DECODE_HEADER + decode
  invocation = with_run_file(invocation, _RUN_FILE, 'evaluate')
  bindings = file_bindings(flags)
  configuration = load_configuration(invocation, placeholders, overrides, bindings)
  if bindings:
    check_reads_files(configuration)
  if flags.dry_run:
    from t5x_lite import multihost

    if multihost.is_lead():
      show(configuration.text)
  configuration.call(
    dry_run=flags.dry_run,
    settings=configuration.settings(_NOT_SETTINGS),
    model=constrained_model(configuration, flags),
  )
  return ExitCode.OK


def _configure_run(run: FoundRun, flags: Any, placeholders: dict[str, str]) -> str:
  """Return gin text for the checkpoints of a run; add the default output directory to `placeholders`."""
  folder = flags.run
  if files.is_remote(folder):
    folder = run.model_dir
  elif run.mode == 'specific' and os.path.abspath(run.checkpoint) != run.model_dir:
    folder = os.path.dirname(os.path.normpath(folder))
  placeholders |= {'CHECKPOINT_PATH': 'None', 'EVAL_OUTPUT_DIR': repr(os.path.join(folder, 'eval'))}
  mode = 'all' if flags.all else run.mode
  return f'CHECKPOINT_PATH = {run.checkpoint!r}\nCHECKPOINT_MODE = {mode!r}\n'
