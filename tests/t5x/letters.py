"""Task of seqio for `tests.t5x.losses`: words of letters, backwards. T5X imports this module too."""

import random

import seqio
import tensorflow as tf


def _words(split, shuffle_files=False, seed=None):
  """Return 400 words of different lengths, so that batches have padding and packed rows have several words."""
  rng = random.Random(split)
  words = [''.join(rng.choices('abcdefgh', k=rng.randint(2, 14))) for _ in range(400)]
  return tf.data.Dataset.from_tensor_slices(
    {'inputs': words, 'targets': [word[::-1] for word in words]}
  )


seqio.TaskRegistry.add(
  'letters',
  source=seqio.FunctionDataSource(_words, splits=('train',)),
  preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
  output_features={
    side: seqio.Feature(seqio.ByteVocabulary(), add_eos=True) for side in ('inputs', 'targets')
  },
)
