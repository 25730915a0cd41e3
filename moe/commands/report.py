"""`python -m moe report`: write a page and plots about the routing of a run."""

import argparse

from t5x_lite.apps.common.flags import Command
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.errors import ExitCode
from t5x_lite.formatting import show
from t5x_lite.storage import files

# Folder in the model directory, with one folder for each writer.
_FOLDER = 'routing_report'


def _add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    'run', metavar='RUN', help='model directory of a sparse model; the run may still be training'
  )
  parser.add_argument(
    '--out',
    metavar='FOLDER',
    help=f'folder of index.html and the figures; default: RUN/{_FOLDER}/WRITER',
  )
  parser.add_argument(
    '--writer',
    default='train',
    metavar='NAME',
    help='writer of the metrics: train (the default) or training_eval/TASK',
  )


def _run(invocation: Invocation) -> int:
  arguments = invocation.flags
  from moe.tools import report
  from moe.tools.report import findings

  history = report.read(arguments.run, arguments.writer)
  if arguments.out is None:
    out = files.path(arguments.run) / _FOLDER / arguments.writer
  else:
    out = arguments.out
  path = report.write(history, out)
  for finding in findings.findings(history, findings.layer_states(history)):
    show(f'{finding.title}: {finding.text}')
  show(str(path))
  return ExitCode.OK


COMMAND = Command('write a page and plots about the routing of a run', _add_arguments, _run)
