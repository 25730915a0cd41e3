"""Tasks without seqio: features of examples, mixtures, evaluation, metrics."""

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.partitioning import DataLayout
from tests.data import builtin_cases as cases

# --- Batches ---------------------------------------------------------------------


def test_features_of_one_example():
  batch = next(cases.open(cases.make_cfg(shuffle=False)))
  inputs = [*cases.VOCABULARY.encode('1 xxxxx'), 1]
  np.testing.assert_array_equal(batch['encoder_input_tokens'][1], inputs + [0] * (16 - len(inputs)))
  targets = [*cases.VOCABULARY.encode('1'), 1]
  np.testing.assert_array_equal(batch['decoder_target_tokens'][1], targets + [0] * 6)
  np.testing.assert_array_equal(batch['decoder_input_tokens'][1], [0, *targets, 0, 0, 0, 0, 0])
  np.testing.assert_array_equal(batch['decoder_loss_weights'][1], [1, 1] + [0] * 6)
  assert set(batch) == {
    'encoder_input_tokens',
    'decoder_input_tokens',
    'decoder_target_tokens',
    'decoder_loss_weights',
  }


def test_long_features_are_trimmed_and_keep_their_end():
  batch = next(
    cases.open(cases.make_cfg(shuffle=False, task_feature_lengths={'inputs': 4, 'targets': 2}))
  )
  np.testing.assert_array_equal(
    batch['encoder_input_tokens'][1], [*cases.VOCABULARY.encode('1 x'), 1]
  )


def test_too_long_features_are_rejected_on_request():
  class Long(data.ExampleTable):
    fingerprint = 'long'

    def __len__(self):
      return 1

    def examples(self, seed, numbers):
      return [{'inputs': np.ones(20, np.int32), 'targets': np.ones(1, np.int32)} for _ in numbers]

  task = data.BuiltinTask(
    name='long',
    splits=('train',),
    table_fn=lambda split, lengths: Long(),
    vocabularies={'inputs': cases.VOCABULARY, 'targets': cases.VOCABULARY},
  )
  assert next(cases.open(cases.make_cfg(task)))['encoder_input_tokens'].shape == (8, 16)
  with pytest.raises(DataError, match="at most 16 ids of 'inputs', got 20"):
    next(cases.open(cases.make_cfg(task, trim_output_features=False)))


def test_mixture_errors(mixture):
  with pytest.raises(ConfigError, match='taken by another'):
    data.register_builtin_mixture(mixture)
  with pytest.raises(ConfigError, match="to positive numbers, .* got {'test_few': 0}"):
    data.BuiltinMixture(name='m', rates={'test_few': 0})
  with pytest.raises(ConfigError, match='positive number'):
    data.BuiltinMixture(name='m', rates={'test_few': 1, 'test_many': float('inf')})
  with pytest.raises(ConfigError, match='to positive numbers, .* got {}'):
    data.BuiltinMixture(name='m', rates={})
  with pytest.raises(
    ConfigError, match='`Mixture m.rates` must be numbers of at least 1/65536 of their sum'
  ):
    cases.open(
      cases.make_cfg(data.BuiltinMixture(name='m', rates={'test_few': 1, 'test_many': 1e6}))
    )
  with pytest.raises(DataError, match="'test_fwe'.*mean 'test_few'"):
    data.register_builtin_mixture(data.BuiltinMixture(name='m', rates={'test_fwe': 1}))


def test_eval_tasks():
  task = cases.make_task(
    metric_fns=[data.exact_match],
    postprocess_fn=lambda text, *, example, is_target: (text, len(example['inputs']), is_target),
  )
  (opened,) = data.open_eval_tasks(cases.make_cfg(task, shuffle=False), cases.layout())
  indices, batches = zip(*opened.batches, strict=True)
  np.testing.assert_array_equal(np.concatenate(indices), [*range(21), -1, -1, -1])
  assert len(opened.batches) == 3 and indices[0].dtype == np.int32
  for i, batch in zip(indices, batches, strict=True):
    for index, row in zip(i, batch['encoder_input_tokens'], strict=True):
      assert (
        index < 0 or cases.VOCABULARY.decode(row) == opened.examples[index]['inputs_pretokenized']
      )
  assert opened.targets()[1] == ('1', len('1 xxxxx') + 1, True)
  assert opened.metric_fns[0](['a', 'b'], ['a', 'c']) == {'exact_match': 0.5}
  assert opened.output_vocabulary == cases.VOCABULARY and opened.element_spec[
    'encoder_input_tokens'
  ].shape == (8, 16)
  (read_again,) = data.open_eval_tasks(
    cases.make_cfg(task, shuffle=False, use_memory_cache=False), cases.layout()
  )
  for (i, batch), again, whole in zip(read_again.batches, indices, batches, strict=True):
    np.testing.assert_array_equal(i, again)
    cases.assert_equal(batch, whole)
  second = data.open_eval_tasks(cases.make_cfg(task, shuffle=False), cases.layout(1, 2))[0]
  np.testing.assert_array_equal(next(iter(second.batches))[0], [4, 5, 6, 7])
  with pytest.raises(
    ConfigError, match='`DatasetConfig.pack` must be False for evaluation by decoding'
  ):
    data.open_eval_tasks(cases.make_cfg(task, pack=True), cases.layout())
  with pytest.raises(ConfigError, match="supports evaluation by decoding, got 'synthetic'"):
    data.open_eval_tasks(cases.make_cfg('synthetic', source='synthetic'), cases.layout())


def test_exact_match():
  assert data.exact_match(['a', 'b', 'c', 'd'], ['a', 'x', 'c', 'd']) == {'exact_match': 0.75}
  assert data.exact_match([], []) == {'exact_match': 0.0}
  with pytest.raises(ValueError, match='longer than argument 1'):
    data.exact_match(['a'], ['a', 'b'])


def test_edit_similarity():
  assert data.edit_similarity(['abcd', 'kitten', ''], ['abed', 'sitting', '']) == {
    'edit_similarity': pytest.approx((0.75 + 4 / 7 + 1) / 3)
  }
  assert (
    data.edit_similarity(['', 'ab'], ['abc', ''])
    == data.edit_similarity([], [])
    == {'edit_similarity': 0.0}
  )
  with pytest.raises(ValueError, match='longer than argument 1'):
    data.edit_similarity(['a'], ['a', 'b'])

  def distance(a, b):  # the definition
    if not a or not b:
      return len(a or b)
    return min(
      distance(a[1:], b[1:]) + (a[0] != b[0]), distance(a[1:], b) + 1, distance(a, b[1:]) + 1
    )

  rng = np.random.default_rng(0)
  for _ in range(20):
    a, b = (''.join(rng.choice(['x', 'y', 'z'], rng.integers(1, 7))) for _ in range(2))
    expected = 1 - distance(a, b) / max(len(a), len(b))
    assert data.edit_similarity([a], [b])['edit_similarity'] == pytest.approx(expected)


def test_function_bodies_are_packed():
  cfg = data.DatasetConfig(
    'python_function_cloze',
    {'inputs': 4096, 'targets': 1024},
    'train',
    2,
    True,
    0,
    pack=True,
    source='builtin',
  )
  layout = DataLayout(batch_size=2, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)
  batch = next(data.open_train_iterator(cfg, layout))
  # One sentinel an example, in its own segment of the row.
  for ids, segments, targets in zip(
    batch['encoder_input_tokens'],
    batch['encoder_segment_ids'],
    batch['decoder_segment_ids'],
    strict=True,
  ):
    assert segments[ids == 383].tolist() == [1, 2] == sorted(set(targets[targets > 0]))


def test_tasks_without_metrics_are_named(caplog):
  layout = DataLayout(batch_size=4, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)
  cfg = data.DatasetConfig(
    'python_cloze_and_docs',
    {'inputs': 64, 'targets': 16},
    'validation',
    4,
    False,
    0,
    source='builtin',
  )
  (task,) = data.open_eval_tasks(cfg, layout, num_examples=4)
  assert task.name == 'python_keyword_cloze'
  assert [record.getMessage() for record in caplog.records] == [
    'python_docs_span_corruption has no metrics: omitted from the evaluation by decoding.'
  ]
