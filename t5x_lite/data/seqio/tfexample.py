"""Registration of a seqio Task for files of TFExamples with texts."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import glob
import hashlib
import re
from typing import Any

import numpy as np

from t5x_lite import checks
from t5x_lite.data.files import records
from t5x_lite.data.seqio.examples import as_seqio_vocabulary
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import seqio
from t5x_lite.data.seqio.packages import tf
from t5x_lite.data.text import ids as text_ids

# File types and their readers. T5X's other types have no reader outside Google.
_READERS: dict[str, Any] = {'tfrecord': tf.data.TFRecordDataset}
SPLIT = 'infer'
_WITHOUT_TARGETS: set[str] = set()


def create_task_from_tfexample_file(
  paths: Sequence[str],
  file_type: str,
  inputs_key: str,
  targets_key: str | None,
  features: Mapping[str, Any],
  task_id: str | None = None,
) -> str:
  """Register a Task of files of TFExamples, with the split 'infer', and return its name.

  A repeated call with the same arguments returns the same name.

  Args:
    paths: files or file patterns; a string is one path.
    file_type: 'tfrecord'.
    inputs_key: key of the input text in a TFExample.
    targets_key: key of the target text; None without targets.
    features: 'inputs' and 'targets' to `seqio.Feature`, with vocabularies of seqio or t5x_lite.
    task_id: suffix of the name `infer_<task_id>`; a hash of paths and keys by default.

  Raises:
    ConfigError: the file type is not supported, or 'inputs' or 'targets' is missing in `features`.
    DataError: a file does not exist.
  """
  checks.check(
    'create_task_from_tfexample_file',
    {'file_type': file_type, 'features': features},
    file_type=checks.one_of(_READERS),
    features=checks.Expectation(
      "a mapping of 'inputs' and 'targets' to seqio.Feature", {'inputs', 'targets'}.issubset
    ),
  )
  files = records.find_files(paths, 'TF_EXAMPLE_FILE_PATHS')
  if task_id is None:
    task_id = hashlib.sha256(
      '\n'.join([*files, inputs_key, targets_key or '']).encode()
    ).hexdigest()[:10]
  name = f'infer_{task_id}'
  if name in seqio.TaskRegistry.names():
    return name
  keys = {'inputs': inputs_key}
  if targets_key is not None:
    keys['targets'] = targets_key
  output_features = {
    key: dataclasses.replace(feature, vocabulary=as_seqio_vocabulary(feature.vocabulary))
    for key, feature in features.items()
  }
  with quiet():
    source: Any = seqio.TFExampleDataSource(
      split_to_filepattern={SPLIT: list(map(_escaped, files))},
      reader_cls=_READERS[file_type],
      feature_description={key: tf.io.FixedLenFeature([], tf.string) for key in keys.values()},
    )
    seqio.TaskRegistry.add(
      name,
      source=source,
      preprocessors=[
        functools.partial(_rename, keys=keys),
        functools.partial(_tokenize, with_text=tuple(keys)),
        seqio.preprocessors.append_eos_after_trim,
      ],
      output_features=output_features,
    )
  if targets_key is None:
    _WITHOUT_TARGETS.add(name)
  return name


def _escaped(path: str) -> str:
  """Return the pattern with which seqio finds only the file `path`."""
  if not glob.has_magic(path):  # Then it is not a pattern for seqio.
    return path
  return re.sub(r'([][*?\\])', r'\\\1', path)


def lacks_targets(name: str) -> bool:
  """Return True if `create_task_from_tfexample_file` made the Task from files without targets."""
  return name in _WITHOUT_TARGETS


def _rename(dataset: tf.data.Dataset, keys: Mapping[str, str]) -> tf.data.Dataset:
  """Rename the texts to task features; a missing text is empty."""
  return dataset.map(
    lambda example: {
      name: example[keys[name]] if name in keys else tf.constant('')
      for name in ('inputs', 'targets')
    }
  )


def _tokenize(
  dataset: tf.data.Dataset, output_features: Mapping[str, Any], with_text: Sequence[str]
) -> tf.data.Dataset:
  """Convert texts to ids, with sentinels, like sources without TensorFlow; keeps the texts of the files."""

  def encoded(text: tf.Tensor, vocabulary: seqio.Vocabulary) -> tf.Tensor:
    # seqio's byte vocabulary would encode sentinels as bytes; other vocabularies encode them as one id.
    if not isinstance(vocabulary, seqio.ByteVocabulary):
      return vocabulary.encode_tf(text)
    ids = tf.numpy_function(
      lambda value: np.asarray(
        text_ids.encode_text(value.decode('utf-8', errors='replace'), vocabulary), np.int32
      ),
      [text],
      tf.int32,
    )
    return tf.ensure_shape(ids, [None])

  return dataset.map(
    lambda example: {
      **{f'{name}_pretokenized': example[name] for name in with_text},
      **{name: encoded(text, output_features[name].vocabulary) for name, text in example.items()},
    }
  )
