"""Names of T5X in subclasses."""

import pytest

from t5x_lite import errors, models, trainer


@pytest.mark.parametrize('base, name, ours', [
    (models.EncoderDecoderModel, '_compute_logits', 'compute_logits'),
    (models.DecoderOnlyModel, 'FEATURE_CONVERTER_CLS', 'FEATURE_CONVERTER'),
    (trainer.Trainer, '_partitioned_train_step', 'partitioned_train_step'),
])
def test_names_that_only_t5x_calls_are_rejected(base, name, ours):
  with pytest.raises(errors.ConfigError, match=rf'^Mine.{name} of T5X has no effect in t5x_lite. Define {ours}\b'):
    type('Mine', (base,), {name: None})
  type('Mine', (base,), {ours: getattr(base, ours)})
