"""What a user can say about an evaluation by decoding, besides what to evaluate on."""

import dataclasses

from t5x_lite.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceEvalConfig:
  """How to evaluate by decoding.

  Attributes:
    num_examples: the most examples of each task, the first ones; None is the whole split.
    num_examples_to_write: how many predictions to write at each evaluation; None writes all.
    batch_by_length: put examples of like length together and cut off the padding that none of them needs. Texts and
      metrics are those of the order of the examples, but for algorithms that draw: which numbers a row draws depends on
      its place. False takes the examples in order, in full length.
    max_num_lengths: the most lengths of inputs to compile for; fewer are used where more would not pay.

  Raises:
    ConfigError: a number is out of range.
  """

  num_examples: int | None = None
  num_examples_to_write: int | None = 1000
  batch_by_length: bool = True
  max_num_lengths: int = 4

  def __post_init__(self):
    for name, lowest, may_be_none in (('num_examples', 1, True), ('num_examples_to_write', 0, True),
                                      ('max_num_lengths', 1, False)):
      value = getattr(self, name)
      if value is None and may_be_none:
        continue
      if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(f'InferenceEvalConfig.{name} is {value!r}; expected a whole number of at least {lowest}'
                          f'{", or None for all" if may_be_none else ""}.')
    if not isinstance(self.batch_by_length, bool):
      raise ConfigError(f'InferenceEvalConfig.batch_by_length is {self.batch_by_length!r}; expected True or False.')
