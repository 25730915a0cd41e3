"""Tasks and a schedule of a fork of T5X, in the package itself.

In T5X the file is a module like all others of the fork: `import t5x.standard_words_v4` runs it, and `t5x.utils` is the
file next to it.
"""

from t5x import utils
import t5x.losses
import word_rates

from tests.compat.samples import words

NUM_EXAMPLES = words.SIZES['train']


def schedule(peak: float = 0.5):
  """Return a constant rate, made by a function of T5X."""
  assert t5x.losses.compute_weighted_cross_entropy
  return utils.create_learning_rate_scheduler(
    factors=word_rates.FACTORS, base_learning_rate=peak, warmup_steps=1
  )
