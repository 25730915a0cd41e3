"""Task module of a T5X project: reverse the letters of words."""

import random

import seqio
import tensorflow as tf

VOCABULARY = seqio.ByteVocabulary()
LETTERS = 'abcdefgh'
SIZES = {'train': 512, 'validation': 40, 'test': 24}


def examples(split: str, shuffle_files: bool = False, seed: int | None = None) -> tf.data.Dataset:
  """Returns words and the same words backwards."""
  del shuffle_files, seed
  rng = random.Random(split)
  words = [''.join(rng.choices(LETTERS, k=rng.randint(2, 6))) for _ in range(SIZES[split])]
  return tf.data.Dataset.from_tensor_slices(
    {'inputs': words, 'targets': [word[::-1] for word in words]}
  )


def exact_match(targets: list[str], predictions: list[str]) -> dict[str, float]:
  """Returns the share of predictions that are right."""
  return {'exact_match': sum(map(str.__eq__, targets, predictions)) / max(len(targets), 1)}


seqio.TaskRegistry.add(
  'reverse_words',
  source=seqio.FunctionDataSource(examples, splits=tuple(SIZES), num_input_examples=SIZES),
  preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
  output_features={name: seqio.Feature(VOCABULARY, add_eos=True) for name in ('inputs', 'targets')},
  metric_fns=[exact_match],
)
