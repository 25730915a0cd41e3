"""Examples as a person types them: ids, texts and sentinels; and the same through seqio where TensorFlow is present."""

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data.batches import features
from t5x_lite.data.text import examples as text_examples
from t5x_lite.errors import ConfigError, DataError

BYTES = data.ByteVocabulary(extra_ids=125)
LENGTHS = {'inputs': 8, 'targets': 4}


def _reader(converter='encoder_decoder', vocabulary=BYTES, lengths=None, add_eos=True):
  feature = text_examples.TextFeature(vocabulary=vocabulary, add_eos=add_eos)
  return text_examples.ExampleReader(
    features.get_converter(converter), {'inputs': feature, 'targets': feature}, lengths or LENGTHS
  )


@pytest.mark.parametrize(
  'text, ids',
  [
    ('', []),
    ('ab', [100, 101]),
    ('a<extra_id_0>', [100, 383]),
    ('<extra_id_124><extra_id_1>é', [259, 382, 198, 172]),
    ('<extra_id_125>', [b + 3 for b in b'<extra_id_125>']),
    ('<extra_id_>', [b + 3 for b in b'<extra_id_>']),
  ],
)
def test_sentinels_are_one_id(text, ids):
  assert text_examples.encode_text(text, BYTES) == ids
  assert text_examples.decode_ids([*ids, 1, 100], BYTES) == text


def test_no_sentinels_in_a_vocabulary_without():
  plain = data.ByteVocabulary()
  assert text_examples.encode_text('<extra_id_0>', plain) == [b + 3 for b in b'<extra_id_0>']
  assert text_examples.decode_ids([100, 258], plain) == 'a'  # the last byte is not a sentinel


def test_supported_forms_of_examples():
  texts = [
    'ab',
    b'ab',
    {'input': 'ab'},
    {'inputs': 'ab', 'targets': ''},
    {'inputs': [100, 101, 1], 'targets': [1]},
  ]
  for example in _reader().read(texts):
    assert example['inputs'].tolist() == [100, 101, 1] and example['targets'].tolist() == [1]
    assert example['inputs'].dtype == np.int32 and example.get('inputs_pretokenized', 'ab') == 'ab'
  # A plain text of a model that reads targets alone.
  (example,) = _reader('decoder_only', lengths={'targets': 4}).read(['ab'])
  assert example['targets'].tolist() == [100, 101, 1] and 'inputs' not in example
  (example,) = _reader(add_eos=False).read(['abcdefghij'])
  assert example['inputs'].tolist() == list(range(100, 108)) and example['targets'].size == 0


@pytest.mark.parametrize(
  'vocabulary, error, message',
  [
    (
      data.PassThroughVocabulary(9),
      ConfigError,
      'add_eos` must be False without an end-of-sequence id',
    ),
    (
      data.PassThroughVocabulary(9, eos_id=1),
      DataError,
      "example 0 must be a flat list of ids .*got 'a' of type str",
    ),
  ],
)
def test_vocabularies_that_cannot(vocabulary, error, message):
  with pytest.raises(error, match=message):
    _reader(vocabulary=vocabulary).read(['a'])


def test_preprocessors_that_leave_nothing():
  with pytest.raises(DataError, match='must keep at least one example'):
    _reader().read(['a'], [text_examples.over_examples(lambda examples: [])])
  with pytest.raises(ConfigError, match='got both kinds'):
    _reader().read(['a'], [text_examples.map_over_examples(dict), len])


# ---- With seqio ------------------------------------------------------------------------------------------------------


@pytest.fixture
def seqio():
  pytest.importorskip('tensorflow')
  from t5x_lite.data.seqio import packages as seqio_import

  return seqio_import.seqio


def test_seqios_preprocessors_give_the_same(seqio):
  texts = [
    {'input': 'ab é', 'target': 'x'},
    {'input': b'', 'target': 'xyz'},
    {'input': 'abcdefghijk', 'target': 'w' * 9},
  ]
  theirs = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim]
  for ours, other in zip(_reader().read(texts), _reader().read(texts, theirs), strict=True):
    assert ours.keys() == other.keys()
    for name, value in ours.items():
      np.testing.assert_array_equal(value, other[name])
  # T5X's list cuts the end-of-sequence id with the text.
  cut = _reader().read(texts, [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos])[2]
  assert cut['inputs'].tolist() == list(range(100, 108))


def test_errors_of_seqio_are_reported(seqio):
  for preprocessors in ([lambda example: {**example}], [seqio.preprocessors.append_eos]):
    with pytest.raises(DataError, match='tf.data.Dataset each; wrap a function of plain Python'):
      _reader().read(['a'], preprocessors)


def test_tasks_of_examples_and_examples_of_tasks(seqio):
  from t5x_lite.interactive import model as lib

  class Model:
    features = _reader().features

  examples = [{'input': f'in {i}', 'target': str(i)} for i in range(5)]
  theirs = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
  task = lib.get_seqio_task_from_examples(
    'typed_examples', Model(), examples, theirs, [data.exact_match]
  )
  try:
    assert set(task.splits) == {'train', 'validation'} and task.metric_fns == [data.exact_match]
    batches = lib.get_batches_from_seqio('typed_examples', 'validation', 2, 2, shuffle=False)
    assert batches == [examples[:2], examples[2:4]]
    ((first,),) = lib.get_batches_from_seqio(
      'typed_examples', 'train', 1, 1, False, LENGTHS, shuffle=False
    )
    assert first == {'input': [108, 113, 35, 51, 1], 'target': [51, 1]}
    dataset = lib.get_dataset_from_natural_text_examples(
      ['abcdefgh', 'a'], theirs, {'inputs': 3, 'targets': 3}, task.output_features
    )
    assert [example['inputs'].tolist() for example in dataset.as_numpy_iterator()] == [
      [100, 101, 102],
      [100, 1],
    ]
    dataset = lib.get_dataset_from_natural_text_examples(
      [first], [], None, {}
    )  # nothing is asked of it
    assert [example['inputs'].tolist() for example in dataset.as_numpy_iterator()] == [
      first['input']
    ]
    with pytest.raises(ConfigError, match='taken|already'):
      lib.get_seqio_task_from_examples('typed_examples', Model(), examples, theirs)
    for arguments, message in (
      (('typed_example', 'train', 1, 1), "Did you mean 'typed_examples'"),
      (('typed_examples', 'test', 1, 1), "no split 'test'"),
      (('typed_examples', 'train', 3, 2), 'must have at least 6 examples, .*, got 5'),
    ):
      with pytest.raises(DataError, match=message):
        lib.get_batches_from_seqio(*arguments)
  finally:
    seqio.TaskRegistry.remove('typed_examples')
