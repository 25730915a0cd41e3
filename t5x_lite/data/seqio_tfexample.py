"""A seqio Task made on the spot of files of TFExamples that hold texts."""

import dataclasses
import functools
import glob
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5x_lite.data import text_examples
from t5x_lite.data.seqio_examples import as_seqio_vocabulary
from t5x_lite.data.seqio_import import quiet, seqio, tf
from t5x_lite.errors import ConfigError, DataError, did_you_mean

# Kinds of files, and what reads them. T5X's other kinds have no reader outside Google.
_READERS = {'tfrecord': tf.data.TFRecordDataset}
SPLIT = 'infer'
_WITHOUT_TARGETS: set[str] = set()


def create_task_from_tfexample_file(paths: Sequence[str], file_type: str, inputs_key: str, targets_key: str | None,
                                    features: Mapping[str, Any], task_id: str | None = None) -> str:
  """Registers a Task over files of TFExamples, with the split 'infer', and returns its name.

  Called again with the same arguments, it returns the name it gave before.

  Args:
    paths: the files, or patterns of them; a string is one path.
    file_type: 'tfrecord'.
    inputs_key: the key of the inputs' text in a TFExample.
    targets_key: the key of the targets' text, or None where there are none.
    features: 'inputs' and 'targets' to `seqio.Feature`; their vocabularies tokenize the texts, and may be ours.
    task_id: names the task `infer_<task_id>`; by default a hash of paths and keys.

  Raises:
    ConfigError: another file type, or features that lack one of the two.
    DataError: no such file.
  """
  if file_type not in _READERS:
    raise ConfigError(f'file_type is {file_type!r}; expected {" or ".join(map(repr, _READERS))}.'
                      f'{did_you_mean(str(file_type), _READERS)}')
  paths = [paths] if isinstance(paths, str) else list(paths)
  files = []
  for path in paths:
    found = sorted(glob.glob(path))
    if not found:
      raise DataError(f'There is no file {path!r}; expected TFExample files to read. Correct TF_EXAMPLE_FILE_PATHS.')
    files += found
  for name in ('inputs', 'targets'):
    if name not in features:
      raise ConfigError(f'features has no {name!r}, only {", ".join(sorted(features))}; expected a seqio.Feature for '
                        "'inputs' and for 'targets'.")
  if task_id is None:
    task_id = hashlib.sha256('\n'.join([*files, inputs_key, targets_key or '']).encode()).hexdigest()[:10]
  name = f'infer_{task_id}'
  if name in seqio.TaskRegistry.names():
    return name
  keys = {'inputs': inputs_key} | ({} if targets_key is None else {'targets': targets_key})
  output_features = {key: dataclasses.replace(feature, vocabulary=as_seqio_vocabulary(feature.vocabulary))
                     for key, feature in features.items()}
  with quiet():
    seqio.TaskRegistry.add(
        name,
        source=seqio.TFExampleDataSource(
            split_to_filepattern={SPLIT: files}, reader_cls=_READERS[file_type],
            feature_description={key: tf.io.FixedLenFeature([], tf.string) for key in keys.values()}),
        preprocessors=[functools.partial(_rename, keys=keys), functools.partial(_tokenize, with_text=tuple(keys)),
                       seqio.preprocessors.append_eos_after_trim],
        output_features=output_features)
  if targets_key is None:
    _WITHOUT_TARGETS.add(name)
  return name


def lacks_targets(name: str) -> bool:
  """Whether a Task was made here of files without targets, so that the targets which it gives are empty."""
  return name in _WITHOUT_TARGETS


def _rename(dataset: tf.data.Dataset, keys: Mapping[str, str]) -> tf.data.Dataset:
  """Gives the texts the names of task features; one that the files do not have is empty."""
  return dataset.map(lambda example: {name: example[keys[name]] if name in keys else tf.constant('')
                                      for name in ('inputs', 'targets')})


def _tokenize(dataset: tf.data.Dataset, output_features: Mapping[str, seqio.Feature],
              with_text: Sequence[str]) -> tf.data.Dataset:
  """Makes ids of texts, sentinels included, as sources without TensorFlow do; keeps the texts that the files have."""
  def encoded(text: tf.Tensor, vocabulary: seqio.Vocabulary) -> tf.Tensor:
    # seqio's vocabulary of bytes would spell the sentinels, which the others read by themselves.
    if not isinstance(vocabulary, seqio.ByteVocabulary):
      return vocabulary.encode_tf(text)
    ids = tf.numpy_function(lambda value: np.asarray(
        text_examples.encode_text(value.decode('utf-8', errors='replace'), vocabulary), np.int32), [text], tf.int32)
    return tf.ensure_shape(ids, [None])

  return dataset.map(lambda example: {
      **{f'{name}_pretokenized': example[name] for name in with_text},
      **{name: encoded(text, output_features[name].vocabulary) for name, text in example.items()}})
