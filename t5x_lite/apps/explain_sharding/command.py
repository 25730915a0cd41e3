"""`t5x_lite explain_sharding`: show the sharding and memory of each array of a model and its optimizer."""

import argparse

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import add_gin_arguments
from t5x_lite.apps.common.flags import add_num_devices
from t5x_lite.apps.common.flags import load_configuration
from t5x_lite.apps.common.flags import simulate_devices
from t5x_lite.errors import ExitCode

# Values of required macros that do not affect shardings.
PLACEHOLDERS = {
  'MIXTURE_OR_TASK_NAME': "'none'",
  'TASK_FEATURE_LENGTHS': "{'inputs': 512, 'targets': 114}",
  'TRAIN_STEPS': '1',
  'MODEL_DIR': "'none'",
  'INITIAL_CHECKPOINT_PATH': "'none'",
  'DROPOUT_RATE': '0.0',
}
# The vocabulary does not affect shardings either, and its file may be remote. The scope gives its arguments priority
# over those of a `PassThroughVocabulary` of the files.
_NO_VOCABULARY = """
from __gin__ import dynamic_registration
from t5x_lite.data import vocabularies
VOCABULARY = @placeholder/vocabularies.PassThroughVocabulary()
placeholder/vocabularies.PassThroughVocabulary.size = 1
placeholder/vocabularies.PassThroughVocabulary.eos_id = None
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the arguments of the command."""
  add_gin_arguments(parser, compiles=False, computes=False)
  add_num_devices(parser)
  parser.add_argument(
    '--full', action='store_true', help='print one line per array, without folding equal layers'
  )


def run_command(invocation: Invocation) -> int:
  """Run the command and return its exit status."""
  flags = invocation.flags
  simulate_devices(flags.num_devices)
  configuration = load_configuration(invocation, PLACEHOLDERS, _NO_VOCABULARY)
  from t5x_lite.apps.explain_sharding import run as explain_sharding

  parts = {
    name: configuration.argument(name) for name in ('model', 'partitioner', 'train_dataset_cfg')
  }
  with configuration.locating_errors():
    explained = explain_sharding.explain_sharding(**parts)
  print(explained.to_text(fold=not flags.full), end='')
  return ExitCode.OK
