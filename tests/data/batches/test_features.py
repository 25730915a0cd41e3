"""Batches of decoder-only models from the sources without TensorFlow; `test_seqio_data` compares them with seqio's."""

import dataclasses

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data.batches.features import CONVERTERS
from t5x_lite.errors import ConfigError
from t5x_lite.partitioning import DataLayout

_LENGTHS = {'inputs': 7, 'targets': 8}
_EXAMPLES = [
  {'inputs': [7, 8, 5, 1], 'targets': [3, 9, 1]},
  {'inputs': [8, 4, 9, 3, 1], 'targets': [4, 1]},
]


def _rows():
  examples = [
    {name: np.array(ids, np.int32) for name, ids in example.items()} for example in _EXAMPLES
  ]
  return examples


def _lists(batch):
  assert all(array.dtype == np.int32 for array in batch.values())
  return {name: array.tolist() for name, array in batch.items()}


def test_packed_prefix_language_model():
  converter = CONVERTERS['prefix_lm']
  assert converter.pack_group_size(_LENGTHS) == 15
  rows = converter.pack(_rows(), _LENGTHS)
  assert [len(row) for row in rows] == [
    2
  ]  # 4 + 3 + 5 + 2 ids fit into 15, though the inputs' 9 do not into 7
  expected = {
    'decoder_target_tokens': [[7, 8, 5, 1, 3, 9, 1, 8, 4, 9, 3, 1, 4, 1, 0]],
    'decoder_input_tokens': [[0, 7, 8, 5, 1, 3, 9, 0, 8, 4, 9, 3, 1, 4, 0]],
    'decoder_loss_weights': [[0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0]],
    'decoder_positions': [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0]],
    'decoder_segment_ids': [[1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0]],
    'decoder_causal_attention': [[1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]],
  }
  assert _lists(converter.convert(rows, _LENGTHS, True)) == expected
  assert _lists(CONVERTERS['decoder_only'].convert(rows, _LENGTHS, True)) == expected
  with_loss = _lists(CONVERTERS['prefix_lm_with_loss_on_inputs'].convert(rows, _LENGTHS, True))
  assert with_loss == expected | {'decoder_loss_weights': [[1] * 14 + [0]]}


def test_unpacked_prefix_language_model_and_filling_rows():
  batch = CONVERTERS['decoder_only'].convert([_rows()[1:], ()], {'inputs': 6, 'targets': 4}, False)
  assert _lists(batch) == {
    'decoder_target_tokens': [[8, 4, 9, 3, 1, 4, 1, 0, 0, 0], [0] * 10],
    'decoder_input_tokens': [[0, 8, 4, 9, 3, 1, 4, 1, 0, 0], [0] * 10],
    'decoder_loss_weights': [[0, 0, 0, 0, 0, 1, 1, 0, 0, 0], [0] * 10],
    'decoder_causal_attention': [[1, 1, 1, 1, 1, 1, 0, 0, 0, 0], [0] * 10],
  }


def test_plain_language_model_reads_the_targets_alone():
  converter, lengths = CONVERTERS['decoder_only'], {'targets': 6}
  examples = [{'targets': example['targets']} for example in _rows()]
  rows = converter.pack(examples, lengths)
  assert _lists(converter.convert(rows, lengths, True)) == {
    'decoder_target_tokens': [[3, 9, 1, 4, 1, 0]],
    'decoder_input_tokens': [[0, 3, 9, 0, 4, 0]],
    'decoder_loss_weights': [[1, 1, 1, 1, 1, 0]],
    'decoder_positions': [[0, 1, 2, 0, 1, 0]],
    'decoder_segment_ids': [[1, 1, 1, 2, 2, 0]],
  }


@pytest.mark.parametrize(
  'source, task, lengths',
  [
    ('builtin', 'python_keyword_cloze', {'inputs': 64, 'targets': 12}),
    ('builtin', 'python_keyword_cloze', {'targets': 12}),
    ('builtin', 'python_docs_span_corruption', {'inputs': 64, 'targets': 32}),
    ('synthetic', 'synthetic', {'inputs': 12, 'targets': 8}),
    ('synthetic', 'synthetic', {'targets': 8}),
  ],
)
@pytest.mark.parametrize('pack', [pytest.param(False, marks=pytest.mark.full), True])
def test_batches_have_the_shapes_that_were_announced(source, task, lengths, pack):
  layout = DataLayout(batch_size=4, shard_id=1, num_shards=2, is_first_host_in_replica_set=True)
  cfg = data.DatasetConfig(task, lengths, 'train', 4, True, 0, pack=pack, source=source)
  opened = data.open_train_iterator(cfg, layout, feature_converter='decoder_only')
  (evaluated,) = data.open_eval_iterators(
    dataclasses.replace(cfg, use_memory_cache=False), layout, 2, feature_converter='decoder_only'
  ).values()
  for batch, spec in (
    (next(opened), opened.element_spec),
    (next(iter(evaluated)), evaluated.element_spec),
  ):
    assert {name: (2, sum(lengths.values())) for name in spec} == {
      name: array.shape for name, array in batch.items()
    }
    assert {leaf.shape for leaf in spec.values()} == {(4, sum(lengths.values()))}
    segments = batch.get('decoder_segment_ids', batch['decoder_target_tokens'] > 0)
    np.testing.assert_array_equal(segments > 0, batch['decoder_target_tokens'] > 0)
    assert (batch['decoder_loss_weights'] <= (batch['decoder_target_tokens'] > 0)).all()


@pytest.mark.parametrize(
  'converter, task, lengths, message',
  [
    (
      'prefix_lm',
      'python_keyword_cloze',
      {'targets': 12},
      "with the feature 'inputs' .*got {'targets': 12}",
    ),
    (
      'decoder_only',
      'python_keyword_cloze',
      {'inputs': 12},
      "with the feature 'targets'.*Add 'targets'",
    ),
    ('decoder_only', 'python_keyword_cloze', {'targets': 12, 'input': 3}, "'input'.*mean 'inputs'"),
    (
      'decoder_only',
      'python_docs_span_corruption',
      {'targets': 12},
      "with the feature 'inputs' for 'span corruption'",
    ),
    ('prefix_ml', 'python_keyword_cloze', {'targets': 12}, "mean 'prefix_lm'"),
  ],
)
def test_rejected(converter, task, lengths, message):
  layout = DataLayout(batch_size=4, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)
  cfg = data.DatasetConfig(task, lengths, 'train', 4, True, 0, source='builtin')
  with pytest.raises(ConfigError, match=message):
    data.open_train_iterator(cfg, layout, feature_converter=converter)


def test_lengths_for_features_that_the_task_has_not_are_rejected():
  task = data.BuiltinTask(
    name='targets_only',
    splits=('train',),
    vocabularies={'targets': data.ByteVocabulary()},
    table_fn=lambda split, lengths: pytest.fail('was read'),
  )
  cfg = data.DatasetConfig(task, {'inputs': 4, 'targets': 4}, 'train', 4, True, 0, source='builtin')
  layout = DataLayout(batch_size=4, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)
  with pytest.raises(
    ConfigError, match="without the feature 'inputs' .*'targets_only' has the features targets"
  ):
    data.open_train_iterator(cfg, layout, feature_converter='decoder_only')
