"""Small tasks from files, and their batches by grain."""

import json

import numpy as np

from t5x_lite import data
from t5x_lite.data.files import grain_records
from t5x_lite.partitioning import DataLayout

LENGTHS = {'inputs': 64, 'targets': 12}
VOCABULARY = data.ByteVocabulary(extra_ids=125)
FORMATS = ('jsonl', 'array_record')


def layout(shard=0, num_shards=1, batch_size=64):
  return DataLayout(
    batch_size=batch_size, shard_id=shard, num_shards=num_shards, is_first_host_in_replica_set=True
  )


def make_cfg(task, **kwargs):
  defaults = dict(
    task_feature_lengths=LENGTHS,
    split='validation',
    batch_size=64,
    shuffle=False,
    seed=3,
    source='grain',
  )
  return data.DatasetConfig(task, **{**defaults, **kwargs})


def open(cfg, shard=0, num_shards=1):
  return data.open_train_iterator(cfg, layout(shard, num_shards, cfg.batch_size))


def take(iterator, num):
  return [{name: np.asarray(array) for name, array in next(iterator).items()} for _ in range(num)]


def write(path, examples, format='jsonl'):
  if format == 'jsonl':
    path.write_text(''.join(json.dumps(example) + '\n' for example in examples))
  else:
    grain_records.write_array_records(str(path), examples)
  return str(path)


def make_task(files, format='jsonl', name='from_files', **kwargs):
  return data.file_task(
    name=name,
    splits=files if isinstance(files, dict) else {'validation': files},
    format=format,
    vocabulary=kwargs.pop('vocabulary', VOCABULARY),
    **kwargs,
  )
