"""Names of T5X in subclasses."""

import pytest

from t5x_lite import errors
from t5x_lite import models
from t5x_lite import trainer
from tests.models import model_cases as cases


@pytest.mark.parametrize(
  'base, name, ours',
  [
    (models.EncoderDecoderModel, '_compute_logits', 'compute_logits'),
    (trainer.Trainer, '_partitioned_train_step', 'partitioned_train_step'),
  ],
)
def test_names_that_only_t5x_calls_are_rejected(base, name, ours):
  with pytest.raises(
    errors.ConfigError, match=rf'^Mine.{name} of T5X has no effect in t5x_lite. Define {ours}\b'
  ):
    type('Mine', (base,), {name: None})
  type('Mine', (base,), {ours: getattr(base, ours)})


def test_calls_of_names_that_only_t5x_has_name_ours():
  class Mine(cases.make_model().__class__):
    @property
    def broken(self):
      raise AttributeError('of the property')

  model = cases.make_model(model_cls=Mine)
  for name, message in (
    ('_compute_logits', 'Mine has no _compute_logits of T5X. Use compute_logits of t5x_lite'),
    ('broken', '^of the property$'),
    ('absent', "'Mine' object has no attribute 'absent'"),
  ):
    with pytest.raises(AttributeError, match=message):
      getattr(model, name)


def test_the_feature_converter_of_t5x_is_that_of_the_model():
  class Mine(cases.make_model().__class__):
    FEATURE_CONVERTER_CLS = dict  # in place of a class of seqio

  model = cases.make_model(model_cls=Mine)
  assert model.FEATURE_CONVERTER is model.FEATURE_CONVERTER_CLS is dict
  model.FEATURE_CONVERTER_CLS = list
  assert model.FEATURE_CONVERTER is list
  assert cases.make_model().FEATURE_CONVERTER_CLS == 'encoder_decoder'
