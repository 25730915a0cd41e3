"""T5X's functions of datasets with the sources without TensorFlow, and users' functions with T5X's signatures."""

import dataclasses
import functools
import inspect

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.errors import ConfigError, T5xLiteError
from tests.data import builtin_cases as cases


@dataclasses.dataclass
class _ShardInfo:
  index: int
  num_shards: int


def test_shards_have_the_batches_of_training():
  expected = cases.take(cases.open(cases.make_cfg(), 1, 2), 2)
  for found in (
    data.get_dataset(cases.make_cfg(), 1, 2, 'encoder_decoder'),
    data.get_dataset_inner(cases.make_cfg(seed=7), _ShardInfo(1, 2), 'encoder_decoder', 1),
  ):
    for batch, other in zip(cases.take(found, 2), expected, strict=False):
      cases.assert_equal(batch, other)
  assert (
    len(list(data.get_dataset(cases.make_cfg(), 0, 1, 'encoder_decoder', num_epochs=2)))
    == 2 * 21 // 8
  )
  cases.assert_equal(
    next(data.get_dataset_inner(cases.make_cfg(), _ShardInfo(0, 1), 'encoder_decoder')),
    next(cases.open(cases.make_cfg(seed=0))),
  )
  with pytest.raises(
    ConfigError, match='continue_from_last_checkpoint` must be False, got True. Set Restore'
  ):
    data.get_dataset(cases.make_cfg(), 0, 1, 'encoder_decoder', continue_from_last_checkpoint=True)
  with pytest.raises(ConfigError, match='batch_size` must be a multiple of 3'):
    data.get_dataset(cases.make_cfg(), 0, 3, 'encoder_decoder')


def test_evaluation_has_each_example_once():
  found = data.get_training_eval_datasets(cases.make_cfg(), 1, 2, 2, 'encoder_decoder')
  expected = data.open_eval_iterators(cases.make_cfg(), cases.layout(1, 2), 2)
  assert found.keys() == expected.keys() == {'digits'}
  for batch, other in zip(found['digits'].as_numpy_iterator(), expected['digits'], strict=True):
    cases.assert_equal(batch, other)
  for option, value in (('deterministic', True), ('model_dir', '/m'), ('start_step', 1)):
    with pytest.raises(
      ConfigError, match=rf'get_training_eval_datasets.{option}` must be .*, got .*[Dd]eterm'
    ):
      data.get_training_eval_datasets(
        cases.make_cfg(), 0, 1, 2, 'encoder_decoder', **{option: value}
      )


class _Counting:
  """Iterator with clu's methods that counts its batches."""

  def __init__(self, num_rows):
    self._rows, self.number = np.ones((num_rows, 2), np.int32), 0

  @property
  def element_spec(self):
    return {'x': self._rows}

  def __iter__(self):
    return self

  def __next__(self):
    self.number += 1
    return {'x': self._rows * self.number}

  def save(self, filename):
    filename.write_text(str(self.number))

  def restore(self, filename):
    self.number = int(filename.read_text())


def test_a_users_function_with_t5xs_signature_opens_the_data():
  seen = []

  def get_dataset(
    cfg,
    shard_id,
    num_shards,
    feature_converter_cls,
    num_epochs=None,
    continue_from_last_checkpoint=False,
  ):
    seen.append((shard_id, num_shards, feature_converter_cls))
    return _Counting(cfg.batch_size // num_shards)

  iterator = data.open_train_data(
    get_dataset, cases.make_cfg(), cases.layout(1, 2), 'encoder_decoder'
  )
  assert seen == [(1, 2, 'encoder_decoder')] and iterator.element_spec['x'].shape == (8, 2)
  first, second, third = cases.take(iterator, 3)
  assert first['x'].shape == (4, 2) and third['x'].max() == 3
  state = iterator.get_state([second, third])
  other = data.open_train_data(get_dataset, cases.make_cfg(), cases.layout(1, 2), 'encoder_decoder')
  other.set_state(state)
  assert [batch['x'].max() for batch in cases.take(other, 4)] == [2, 3, 4, 5]
  with pytest.raises(
    ConfigError, match='get_dataset_fn` must be a function that returns a tf.data.Dataset.*got 3'
  ):
    data.open_train_data(
      lambda cfg, shard_id, num_shards, feature_converter_cls: 3,
      cases.make_cfg(),
      cases.layout(),
      'encoder_decoder',
    )


def test_names_of_the_parameters_of_a_users_function_do_not_matter():
  def get_dataset(config, shard, shards, converter, epochs=None, resumes=True):
    return _Counting(config.batch_size // shards)

  iterator = data.open_train_data(
    get_dataset, cases.make_cfg(), cases.layout(1, 2), 'encoder_decoder'
  )
  assert next(iterator)['x'].shape == (4, 2)
  opened = data.open_train_data(
    lambda *args, **kwargs: data.open_train_iterator(*args, **kwargs),
    cases.make_cfg(),
    cases.layout(),
    'encoder_decoder',
  )
  cases.assert_equal(next(opened), next(cases.open(cases.make_cfg())))


def test_functions_of_t5x_and_of_this_package_open_the_same():
  wrapped = functools.wraps(data.get_dataset)(
    lambda *args, **kwargs: pytest.fail('positions of tf.data')
  )  # as by gin
  for fn in (data.get_dataset, wrapped, data.open_train_iterator):
    opened = data.open_train_data(fn, cases.make_cfg(), cases.layout(), 'encoder_decoder')
    cases.assert_equal(next(opened), next(cases.open(cases.make_cfg())))
  for fn in (data.get_training_eval_datasets, data.open_eval_iterators):
    (batches,) = data.open_eval_data(
      fn, cases.make_cfg(task_feature_lengths=None), cases.layout(), 2, 'encoder_decoder'
    ).values()
    assert len(batches) == 2 and batches.element_spec['encoder_input_tokens'].shape == (8, 10)


def test_batches_of_a_users_function_for_evaluation_are_counted():
  def get_eval_datasets(cfg, shard_id, num_shards, eval_steps, feature_converter_cls):
    return {
      'own': [{'x': np.full((cfg.batch_size // num_shards, 3), i)} for i in range(eval_steps)]
    }

  (batches,) = data.open_eval_data(
    get_eval_datasets, cases.make_cfg(), cases.layout(0, 2), 5, 'encoder_decoder'
  ).values()
  assert (
    len(batches) == 5 and batches.num_examples == 40 and batches.element_spec['x'].shape == (8, 3)
  )
  assert (
    [batch['x'].max() for batch in batches]
    == [batch['x'].max() for batch in batches]
    == [0, 1, 2, 3, 4]
  )


@pytest.mark.parametrize(
  'batches, message',
  [
    (
      iter([{'x': np.ones((8, 2))}]),
      'train_eval_get_dataset_fn` must be .*several times, got .*Return the dataset',
    ),
    ([], 'own'),
  ],
)
def test_batches_of_a_users_function_that_cannot_be_evaluated_are_an_error(batches, message):
  with pytest.raises(T5xLiteError, match=message):
    data.open_eval_data(
      lambda cfg, shard_id, num_shards, eval_steps, feature_converter_cls: {'own': batches},
      cases.make_cfg(),
      cases.layout(),
      5,
      'encoder_decoder',
    )


def test_protocols_have_the_parameters_of_the_functions():
  def names(fn):
    return [name for name in inspect.signature(fn).parameters if name != 'self']

  assert names(data.GetDatasetCallable.__call__) == names(data.get_dataset)
  assert names(data.GetEvalDatasetCallable.__call__) == names(data.get_training_eval_datasets)[:5]


@pytest.mark.parametrize(
  'shard, message',
  [
    ((0, 0), 'num_shards` must be an integer >= 1, got 0'),
    ((2, 2), r'shard_id` must be an integer in \[0, 2\), got 2'),
    (('0', 1), "shard_id` must be an integer .*got '0'"),
  ],
)
def test_invalid_shards_are_rejected(shard, message):
  with pytest.raises(ConfigError, match=message):
    data.get_dataset(cases.make_cfg(), *shard, 'encoder_decoder')
  with pytest.raises(ConfigError, match=message):
    data.get_training_eval_datasets(cases.make_cfg(), *shard, 1, 'encoder_decoder')


def test_functions_with_other_parameters_are_rejected():
  with pytest.raises(ConfigError, match='`train.get_dataset_fn` must be a function of'):
    data.open_train_data(data.get_vocabulary, cases.make_cfg(), cases.layout(), 'encoder_decoder')
  with pytest.raises(ConfigError, match='`train.train_eval_get_dataset_fn` must be a function of'):
    data.open_eval_data(data.get_vocabulary, cases.make_cfg(), cases.layout(), 1, 'encoder_decoder')


def test_zeros_need_a_row():
  dataset = data.get_dataset(cases.make_cfg(), 0, 1, 'encoder_decoder')
  with pytest.raises(
    ConfigError, match='get_zeros_batch_like_dataset.batch_size` must be an integer >= 1'
  ):
    data.get_zeros_batch_like_dataset(dataset, 0)
