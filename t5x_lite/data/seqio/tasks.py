"""The embedded tasks, registered in seqio; also an example for custom tasks.

A seqio Task defines the source of the examples, their tokenization, and the metrics. For a custom task, write a module
like this one in the current folder, and set the module and the task in the configuration:

  train/DatasetConfig.module = 'my_tasks'
  MIXTURE_OR_TASK_NAME = 'my_task'

Four things make a Task:

1. A *source*. Text files: `seqio.TextLineDataSource`; TFRecords: `seqio.TFExampleDataSource`; TensorFlow Datasets:
   `seqio.TfdsDataSource`; other data: a function that returns a `tf.data.Dataset`, as below. Build the dataset from
   tensors or files: TensorFlow cannot save the position of `from_generator` and `py_function`, so that a run with them
   cannot resume.
2. *Preprocessors*: functions dataset -> dataset. Their result has ids `inputs` and `targets`, each with an
   end-of-sequence id.
3. *Output features*: the vocabulary of each, and whether it ends with an end-of-sequence id.
4. *Metric functions*: `fn(targets, predictions) -> {name: value}`, of decoded text.

Importing this module registers the tasks. t5x_lite imports it when a run reads seqio data.
"""

import functools
from typing import Any

from t5x_lite.data import corpora
from t5x_lite.data.batches import span_corruption
from t5x_lite.data.builtin_tasks import MEAN_NOISE_SPAN_LENGTH
from t5x_lite.data.builtin_tasks import NOISE_DENSITY
from t5x_lite.data.seqio.packages import dataset_of
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import seqio
from t5x_lite.data.seqio.packages import tf
from t5x_lite.data.text_metrics import edit_similarity
from t5x_lite.data.text_metrics import exact_match
from t5x_lite.data.vocabularies import sentinel_id
from t5x_lite.errors import needs_packages

# ByT5's vocabulary: padding, end of sequence, unknown, 256 bytes, and 125 sentinels `<extra_id_0>` ...: 384 ids.
VOCABULARY = seqio.ByteVocabulary(extra_ids=125)

OUTPUT_FEATURES = {
  'inputs': seqio.Feature(vocabulary=VOCABULARY, add_eos=True),
  'targets': seqio.Feature(vocabulary=VOCABULARY, add_eos=True),
}


# --- Python cloze: find the missing keyword or function body -------------------


def _cloze_dataset(
  split: str, shuffle_files: bool, seed: int | None = None, *, texts_fn
) -> tf.data.Dataset:
  """Return the examples of `split` as texts; seqio passes the first three arguments to every such function.

  The examples are in memory, so `shuffle_buffer_size` below shuffles them instead of the files.
  """
  del shuffle_files, seed
  inputs, targets = zip(*texts_fn(split), strict=True)
  return dataset_of({'inputs': list(inputs), 'targets': list(targets)})


def _tokenize_with_sentinel(dataset: tf.data.Dataset, output_features) -> tf.data.Dataset:
  """Convert texts to ids, with one id for `<extra_id_0>` in the input, T5's first sentinel.

  seqio passes `output_features` and `sequence_length` to every preprocessor with arguments of these names. For inputs
  without sentinels use `seqio.preprocessors.tokenize`.
  """
  vocabulary = output_features['inputs'].vocabulary
  # The last id of the vocabulary, as in t5.data.preprocessors.sentinel_id.
  sentinel = sentinel_id(vocabulary)

  def tokenize(example):
    before_and_after = tf.strings.split(example['inputs'], corpora.SENTINEL_TEXT)
    inputs = tf.concat(
      [
        vocabulary.encode_tf(before_and_after[0]),
        [sentinel],
        vocabulary.encode_tf(before_and_after[1]),
      ],
      axis=0,
    )
    return {
      'inputs': inputs,
      'targets': output_features['targets'].vocabulary.encode_tf(example['targets']),
      # For results and metrics; not features of the model.
      'inputs_pretokenized': example['inputs'],
      'targets_pretokenized': example['targets'],
    }

  return dataset.map(tokenize, num_parallel_calls=tf.data.AUTOTUNE)


def _register_cloze(name: str, texts_fn, metric_fns) -> None:
  source: Any = seqio.FunctionDataSource(
    functools.partial(_cloze_dataset, texts_fn=texts_fn),
    splits=corpora.SPLITS,
    num_input_examples={split: len(texts_fn(split)) for split in corpora.SPLITS},
  )
  seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[
      _tokenize_with_sentinel,
      # seqio's cache job can compute the preprocessors before this line once (USE_CACHED_TASKS = True).
      seqio.CacheDatasetPlaceholder(),
      # Trims to TASK_FEATURE_LENGTHS before it appends the end-of-sequence id.
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features=OUTPUT_FEATURES,
    metric_fns=metric_fns,
    # Examples from which the next one is drawn; every checkpoint stores them.
    shuffle_buffer_size=4096,
  )


# --- Span corruption over Python's documentation: pretraining ----------------------


def _docs_dataset(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
  """Return the documents of `split` as texts."""
  del shuffle_files, seed
  return dataset_of({'text': list(corpora.python_docs(split))})


def _span_corruption(dataset: tf.data.Dataset, sequence_length, output_features) -> tf.data.Dataset:
  """Apply T5's pretraining objective; imports the package t5 when the task is read."""
  span_corruption.check_feature_lengths(sequence_length)
  segment_length, _ = span_corruption.random_spans_lengths(
    sequence_length['inputs'], NOISE_DENSITY, MEAN_NOISE_SPAN_LENGTH
  )
  span_corruption.check_sentinels(
    output_features['targets'].vocabulary,
    segment_length,
    NOISE_DENSITY,
    MEAN_NOISE_SPAN_LENGTH,
  )
  with (
    quiet(),
    needs_packages(
      'The task python_docs_span_corruption',
      'the package t5 without its dependencies',
      command='pip install --no-deps t5==0.9.4',
      otherwise='set --gin.DATA_SOURCE=builtin',
    ),
  ):
    from t5.data import preprocessors
  return preprocessors.span_corruption(dataset, sequence_length, output_features)


def _register_docs() -> None:
  source: Any = seqio.FunctionDataSource(
    _docs_dataset,
    splits=corpora.SPLITS,
    num_input_examples={split: len(corpora.python_docs(split)) for split in corpora.SPLITS},
  )
  seqio.TaskRegistry.add(
    'python_docs_span_corruption',
    source=source,
    preprocessors=[
      # Span corruption makes the inputs from the targets.
      functools.partial(seqio.preprocessors.rekey, key_map={'inputs': None, 'targets': 'text'}),
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
      _span_corruption,
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features=OUTPUT_FEATURES,
    # Without metric functions, evaluation by decoding omits this task: pretraining is evaluated by its loss.
    metric_fns=[],
    shuffle_buffer_size=4096,
  )


# --- A mixture: each next example comes from a task drawn in proportion to its rate --------------


def _register_mixture() -> None:
  seqio.MixtureRegistry.add(
    'python_cloze_and_docs', [('python_keyword_cloze', 1.0), ('python_docs_span_corruption', 1.0)]
  )


with quiet():
  _register_cloze('python_keyword_cloze', corpora.python_keyword_cloze, [exact_match])
  _register_cloze(
    'python_function_cloze', corpora.python_function_cloze, [exact_match, edit_similarity]
  )
  _register_docs()
  _register_mixture()
