"""A trainer with a mixin that scales the learning rate.

T5X's `Trainer` reads `_learning_rate_fn` when it makes its step, so a subclass may replace it after the constructor.
"""

from t5x import trainer


class ScaledRate:
  scale = 0.25

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    schedule = self._learning_rate_fn
    self._learning_rate_fn = lambda step: self.scale * schedule(step)


class Trainer(ScaledRate, trainer.Trainer):
  scale = 0.5
