"""Texts that are longer than the feature lengths: cut, counted in a sample, or an error."""

import json
import types

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data.batches import truncation
from t5x_lite.errors import DataError
from t5x_lite.partitioning import DataLayout

_VOCABULARY = data.ByteVocabulary(extra_ids=3)
_LENGTHS = {'inputs': 12, 'targets': 6}


def _texts(seed, count, longest_input=20):
  rng = np.random.default_rng(seed)
  return [
    ('i' * int(rng.integers(1, longest_input)), 't' * int(rng.integers(1, 9))) for _ in range(count)
  ]


def _text_task(texts, name='texts'):
  return data.text_task(
    name=name, texts_fn=lambda split: texts, splits=('train',), vocabulary=_VOCABULARY
  )


def _file_task(texts, tmp_path, **kwargs):
  (tmp_path / 'train.jsonl').write_text(
    ''.join(json.dumps({'inputs': source, 'targets': target}) + '\n' for source, target in texts)
  )
  return data.file_task(
    name='records',
    splits={'train': str(tmp_path / 'train.jsonl')},
    format='jsonl',
    vocabulary=_VOCABULARY,
    **kwargs,
  )


def _open(task, **kwargs):
  options = {'shuffle': True, 'source': 'builtin', 'seed': 0, **kwargs}
  cfg = data.DatasetConfig(
    task, _LENGTHS, 'train', 4, options.pop('shuffle'), options.pop('seed'), **options
  )
  return data.open_train_iterator(
    cfg, DataLayout(batch_size=4, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)
  )


def _expected(texts, num_ends=1):
  """Returns the metrics of all of `texts`, counted one by one."""
  metrics = {}
  for number, (feature, length) in enumerate(_LENGTHS.items()):
    sizes = [len(pair[number]) + num_ends for pair in texts]
    metrics[f'data/truncated_examples_fraction/{feature}'] = sum(
      size > length for size in sizes
    ) / len(sizes)
    metrics[f'data/truncated_tokens_fraction/{feature}'] = sum(
      max(size - length, 0) for size in sizes
    ) / sum(sizes)
  return metrics


def _assert_equal(left, right):
  assert left.keys() == right.keys()
  for name, array in left.items():
    np.testing.assert_array_equal(array, right[name])


@pytest.mark.parametrize('kind', ['text', 'file', 'file_without_ends'])
def test_without_trimming_a_text_that_is_too_long_is_an_error(kind, tmp_path):
  fits, too_long = ('i' * 11, 't' * 5), ('i' * 12, 't')

  def make(texts):
    kwargs = {'add_eos': False} if kind == 'file_without_ends' else {}
    return _text_task(texts) if kind == 'text' else _file_task(texts, tmp_path, **kwargs)

  # Where all fit, the option changes nothing, whatever the length.
  _assert_equal(
    next(_open(make([fits] * 4), trim_output_features=False)), next(_open(make([fits] * 4)))
  )
  texts = [too_long] * 4 if kind != 'file_without_ends' else [('i' * 13, 't')] * 4
  batch = next(_open(make(texts)))
  expected = (
    [*_VOCABULARY.encode('i' * 11), 1]
    if kind != 'file_without_ends'
    else _VOCABULARY.encode('i' * 12)
  )
  np.testing.assert_array_equal(batch['encoder_input_tokens'][0], expected)
  with pytest.raises(
    DataError, match="An example must have at most 12 ids of 'inputs', got 13.*trim_output_features"
  ):
    next(_open(make(texts), trim_output_features=False))


def test_evaluation_and_inference_honour_the_option_too():
  cfg = data.DatasetConfig(
    _text_task([('i' * 30, 't')]),
    _LENGTHS,
    'train',
    4,
    False,
    0,
    source='builtin',
    trim_output_features=False,
  )
  layout = DataLayout(batch_size=4, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)
  with pytest.raises(DataError, match="ids of 'inputs', got 31"):
    data.open_eval_iterators(cfg, layout)


def test_trimming_does_not_change_fingerprints():
  # Runs that started before tasks stopped trimming their texts can resume.
  cut, whole = (
    _text_task([(text, 't')]).table('train', {'inputs': 12, 'targets': 6})
    for text in ('i' * 11, 'i' * 30)
  )
  assert cut.fingerprint == whole.fingerprint
  assert len(whole.examples(0, np.arange(1))[0]['inputs']) == 31


@pytest.mark.parametrize('kind', ['text', 'file', 'packed', 'grain'])
def test_a_sample_counts_trimmed_ids(kind, tmp_path):
  texts = _texts(1, 64)
  task = _text_task(texts) if kind in ('text', 'packed') else _file_task(texts, tmp_path)
  options = {'pack': kind == 'packed', 'source': 'grain' if kind == 'grain' else 'builtin'}
  iterator, other = (_open(task, **options) for _ in range(2))
  _assert_equal(next(iterator), next(other))
  sampled = iterator.sample_truncation()
  # 256 examples of an epoch of 64.
  assert sampled.num_examples == 256
  assert sampled.metrics == pytest.approx(_expected(texts))
  # Neither the position nor any batch is another one.
  assert iterator.get_state() == other.get_state()
  for _ in range(3):
    _assert_equal(next(iterator), next(other))
  iterator.close()
  other.close()


def test_the_tasks_of_a_mixture_count_by_their_rates():
  short, long = _text_task([('i', 't')], 'short'), _text_task([('i' * 30, 't')], 'long')
  for task in (short, long):
    data.register_builtin_task(task)
  mixture = data.BuiltinMixture(name='short_and_long', rates={'short': 3.0, 'long': 1.0})
  metrics = _open(mixture).sample_truncation().metrics
  assert metrics['data/truncated_examples_fraction/inputs'] == pytest.approx(0.25, abs=0.1)
  assert set(metrics) == {
    'data/truncated_examples_fraction/inputs',
    'data/truncated_tokens_fraction/inputs',
  }


def test_the_line_names_trimmed_features_and_the_option():
  texts = [('i' * 30, 't')] * 2 + [('i', 't')] * 6
  line = _open(_text_task(texts)).sample_truncation().describe()
  assert "25% have 'inputs' cut to 12 tokens, which loses 51% of its tokens" in line
  assert 'task_feature_lengths' in line and "'targets'" not in line
  fits = _open(_text_task([('i', 't')])).sample_truncation()
  assert fits.describe() == '' and fits.metrics == {}
  assert _open(_text_task(texts), trim_output_features=False).sample_truncation() is None


def test_a_slow_source_is_sampled_for_two_seconds(monkeypatch):
  now = 0.0

  def slow():
    nonlocal now
    while True:
      now += 0.3
      yield {'inputs': np.ones(20), 'targets': np.ones(2)}

  monkeypatch.setattr(truncation, 'time', types.SimpleNamespace(monotonic=lambda: now))
  assert truncation.sample_truncation(slow(), _LENGTHS).num_examples == 7
  assert truncation.sample_truncation([], _LENGTHS) is None
