"""Small tasks of the builtin source, and batches of them."""

import numpy as np

from t5x_lite import data
from t5x_lite.partitioning import DataLayout

LENGTHS = {'inputs': 16, 'targets': 8}
VOCABULARY = data.ByteVocabulary(extra_ids=125)


def layout(shard=0, num_shards=1, batch_size=8):
  return DataLayout(
    batch_size=batch_size, shard_id=shard, num_shards=num_shards, is_first_host_in_replica_set=True
  )


def make_task(name='digits', num=21, **kwargs):
  """Inputs '<i> xxx' of various lengths, target '<i>': every example tells its number."""
  texts = [(f'{i} ' + 'x' * (i * 5 % 7), str(i)) for i in range(num)]
  return data.text_task(
    name=name, texts_fn=lambda split: texts, splits=('train',), vocabulary=VOCABULARY, **kwargs
  )


def make_cfg(task=None, **kwargs):
  defaults = dict(
    task_feature_lengths=LENGTHS,
    split='train',
    batch_size=8,
    shuffle=True,
    seed=1,
    source='builtin',
  )
  return data.DatasetConfig(task or make_task(), **{**defaults, **kwargs})


def open(cfg, shard=0, num_shards=1):
  return data.open_train_iterator(cfg, layout(shard, num_shards, cfg.batch_size))


def take(iterator, num):
  return [next(iterator) for _ in range(num)]


def numbers(batch):
  """Return the number of each example of a batch of `make_task`."""
  return [int(VOCABULARY.decode(row)) for row in batch['decoder_target_tokens']]


def assert_equal(first, second):
  assert set(first) == set(second)
  for name in first:
    assert first[name].dtype == second[name].dtype
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)


# --- Packing ----------------------------------------------------------------------


def unpack(batch):
  """Returns the (inputs, targets) ids of every segment, after checking the packing features against each other."""
  for r in range(len(batch['encoder_input_tokens'])):
    row = {name: array[r] for name, array in batch.items()}
    for side, tokens in (('encoder', 'encoder_input_tokens'), ('decoder', 'decoder_target_tokens')):
      segments = row[f'{side}_segment_ids']
      assert ((segments > 0) == (row[tokens] > 0)).all()
      used = segments[segments > 0]
      assert (np.diff(used) >= 0).all() and set(used) == set(range(1, used.max() + 1))
      for s in set(used):
        np.testing.assert_array_equal(
          row[f'{side}_positions'][segments == s], np.arange((segments == s).sum())
        )
    assert row['encoder_segment_ids'].max() == row['decoder_segment_ids'].max()
    np.testing.assert_array_equal(row['decoder_loss_weights'], row['decoder_target_tokens'] > 0)
    for s in range(1, row['encoder_segment_ids'].max() + 1):
      inputs = row['encoder_input_tokens'][row['encoder_segment_ids'] == s]
      where = row['decoder_segment_ids'] == s
      targets = row['decoder_target_tokens'][where]
      np.testing.assert_array_equal(row['decoder_input_tokens'][where], [0, *targets[:-1]])
      yield inputs, targets


# --- Mixtures -----------------------------------------------------------------------
