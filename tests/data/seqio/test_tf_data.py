"""T5X's functions with seqio, and users' functions that return a `tf.data.Dataset`."""

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.errors import DataError
from t5x_lite.partitioning import DataLayout

seqio = pytest.importorskip('seqio')
pytest.importorskip('t5')

_CFG = data.DatasetConfig(
  'python_keyword_cloze', {'inputs': 64, 'targets': 12}, 'train', 8, True, 3
)


def _layout(shard=0, num_shards=1):
  return DataLayout(
    batch_size=8, shard_id=shard, num_shards=num_shards, is_first_host_in_replica_set=True
  )


def _get_dataset(
  cfg,
  shard_id,
  num_shards,
  feature_converter_cls,
  num_epochs=None,
  continue_from_last_checkpoint=False,
):
  """Doubles the loss weights of T5X's dataset."""
  assert feature_converter_cls is seqio.EncDecFeatureConverter
  dataset = data.get_dataset(
    cfg, shard_id, num_shards, feature_converter_cls, num_epochs, continue_from_last_checkpoint
  )
  return dataset.map(
    lambda batch: {**batch, 'decoder_loss_weights': 2 * batch['decoder_loss_weights']}
  )


def test_the_dataset_of_t5x_has_the_batches_of_training():
  for shard in range(2):
    dataset = data.get_dataset(_CFG, shard, 2, seqio.EncDecFeatureConverter)
    iterator = data.open_train_iterator(_CFG, _layout(shard, 2))
    for batch in dataset.take(2).as_numpy_iterator():
      for name, rows in next(iterator).items():
        np.testing.assert_array_equal(batch[name], rows)
  assert data.get_zeros_batch_like_dataset(dataset, 3)['encoder_input_tokens'].shape == (3, 64)


def test_a_users_dataset_trains_with_an_exact_position():
  iterator = data.open_train_data(_get_dataset, _CFG, _layout(), 'encoder_decoder')
  assert iterator.element_spec['decoder_loss_weights'].shape == (8, 12)
  taken = [next(iterator) for _ in range(4)]
  assert taken[0]['decoder_loss_weights'].max() == 2
  other = data.open_train_data(_get_dataset, _CFG, _layout(), 'encoder_decoder')
  other.set_state(iterator.get_state(taken[2:]))
  for batch in [*taken[2:], next(iterator)]:
    np.testing.assert_array_equal(
      next(other)['encoder_input_tokens'], batch['encoder_input_tokens']
    )
  with pytest.raises(DataError, match='saved'):
    data.open_train_iterator(_CFG, _layout()).set_state(iterator.get_state())


def test_a_users_evaluation_datasets():
  def get_eval_datasets(cfg, shard_id, num_shards, eval_steps, feature_converter_cls):
    return {
      'own': data.get_dataset(cfg, shard_id, num_shards, feature_converter_cls, 1).take(eval_steps)
    }

  (batches,) = data.open_eval_data(
    get_eval_datasets, _CFG, _layout(1, 2), 3, 'encoder_decoder'
  ).values()
  assert len(batches) == 3 and batches.element_spec['encoder_input_tokens'].shape == (8, 64)
  assert [batch['encoder_input_tokens'].shape for batch in batches] == [(4, 64)] * 3
