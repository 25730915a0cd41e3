"""Options of an evaluation by decoding."""

import dataclasses

from t5x_lite import checks

_COUNT = checks.number(at_least=1, integer=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceEvalConfig:
  """Options of an evaluation by decoding.

  Attributes:
    num_examples: number of examples of each task, from the beginning; None for the entire split.
    num_examples_to_write: number of predictions to write at each evaluation; None for all.
    batch_by_length: group examples of similar length, and cut padding. Texts and metrics do not change, except with
      sampling, whose random numbers depend on the row. False keeps the order and the full length.
    max_num_lengths: maximum number of lengths of inputs to compile; fewer are used if more would save little.

  Raises:
    ConfigError: a number is out of range.
  """

  num_examples: int | None = None
  num_examples_to_write: int | None = 1000
  batch_by_length: bool = True
  max_num_lengths: int = 4

  def __post_init__(self):
    checks.check(
        'InferenceEvalConfig', vars(self), num_examples=_COUNT.or_none(), max_num_lengths=_COUNT,
        num_examples_to_write=checks.number(at_least=0, integer=True).or_none(),
        batch_by_length=checks.instance(bool, 'True or False'))
