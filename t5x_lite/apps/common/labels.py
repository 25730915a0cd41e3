"""Flag of labels to score, and the decoding algorithm that the flags of a command choose."""

from typing import Any

from t5x_lite.apps.common.constraints import given_constraints
from t5x_lite.apps.common.flags import DECODE_FNS
from t5x_lite.errors import ConfigError


def add_labels_argument(parser: Any) -> None:
  """Add the flag `--labels_file` to a parser or a group of it."""
  parser.add_argument(
    '--labels_file',
    metavar='FILE',
    help='classify: compute the log-likelihood of each label of this file, which has one on each line, and predict the '
    'best. --gin.decoding.LabelScores.normalize_by_target_length=True divides by the number of tokens of a label',
  )


def decode_bindings(flags: Any, parameter: str) -> str:
  """Return gin text that binds the decoding algorithm of `--decode` or `--labels_file`; '' without both.

  Args:
    flags: flags of a command that decodes with labels and constraints.
    parameter: parameter that gets the algorithm.

  Raises:
    ConfigError: other flags of decoding contradict `--labels_file`.
  """
  if flags.labels_file is None:
    if flags.decode is None:
      return ''
    return f'{parameter} = {DECODE_FNS[flags.decode]}\n'
  others = list(given_constraints(flags))
  if flags.decode is not None:
    others.append('decode')
  if others:
    raise ConfigError(
      f'--labels_file and --{others[0]} cannot be combined: labels are scored instead of decoding texts. Remove one of '
      'them.'
    )
  return (
    f'{parameter} = @decoding.LabelScores()\ndecoding.LabelScores.labels = {flags.labels_file!r}\n'
  )
