"""Checks of data configurations before anything is read."""

import dataclasses

import pytest

from t5x_lite import data
from t5x_lite.errors import ConfigError
from tests.data import builtin_cases as cases

# --- Checks before compute ------------------------------------------------------------------


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(source='seqoi'), "'seqoi'.*mean 'seqio'"),
    (dict(task_feature_lengths={'inputs': 0, 'targets': 8}), "to integers >= 1, got {'inputs': 0"),
    (
      dict(task_feature_lengths={'inputs': 8.5, 'targets': 8}),
      "to integers >= 1, got {'inputs': 8.5",
    ),
    (
      dict(runtime_preprocessors=[len]),
      'runtime_preprocessors` must be None or empty, got .*AirIO',
    ),
    (
      dict(num_prefetch_threads=-1),
      'num_prefetch_threads` must be an integer >= 0 or None, got -1',
    ),
    (
      dict(num_prefetch_threads=2),
      "num_prefetch_threads` must be unset with source = 'builtin', got 2.*'grain' only",
    ),
    (dict(batch_size=0), 'batch_size` must be an integer >= 1, got 0'),
    (dict(batch_size=True), 'batch_size.*got True'),
    (dict(batch_size=2**30), 'batch_size` must be below .*2.*31'),
    (dict(seed='1'), "seed` must be an integer in .* or None, got '1'"),
    (dict(seed=-1), 'seed.*got -1'),
    (dict(split=''), "split` must be a name such as 'train', got ''"),
    (dict(shuffle='yes'), "shuffle` must be True or False, got 'yes'"),
    (dict(pack=1), 'pack.*got 1'),
    (dict(use_custom_packing_ops=True), 'use_custom_packing_ops` must be False with pack = False'),
    (dict(use_custom_packing_ops=True, pack=True), "source = 'seqio' only"),
    (dict(use_cached=True), "source = 'seqio' only"),
  ],
)
def test_rejected_configurations(change, message):
  with pytest.raises(ConfigError, match=message):
    cases.make_cfg(**change).check()


def test_rejected_layouts_and_converters():
  with pytest.raises(ConfigError, match='batch_size` must be that of the layout, 16, got 8'):
    data.open_train_iterator(cases.make_cfg(), cases.layout(batch_size=16))
  with pytest.raises(ConfigError, match='batch_size` must be a multiple of 3, .* got 8'):
    data.open_train_iterator(cases.make_cfg(), cases.layout(0, 3))
  with pytest.raises(ConfigError, match="'encoder_decode'.*mean 'encoder_decoder'"):
    data.open_train_iterator(cases.make_cfg(), cases.layout(), feature_converter='encoder_decode')
  with pytest.raises(ConfigError, match="needs DatasetConfig.source = 'seqio'"):
    data.open_train_iterator(cases.make_cfg(), cases.layout(), feature_converter=dict)
  with pytest.raises(ConfigError, match='eval_steps` must be an integer >= 1 or None, got 0'):
    data.open_eval_iterators(cases.make_cfg(), cases.layout(), 0)


def test_vocabularies_of_model_and_data_must_match():
  @dataclasses.dataclass
  class Model:
    input_vocabulary: object
    output_vocabulary: object

  cfg = cases.make_cfg()
  assert data.get_vocabulary(cfg) == (cases.VOCABULARY, cases.VOCABULARY)
  data.verify_matching_vocabs(cfg, Model(data.ByteVocabulary(extra_ids=125), cases.VOCABULARY))
  with pytest.raises(
    ConfigError, match=r'output vocabulary.*ByteVocabulary\(125\), got ByteVocabulary\(100\)'
  ):
    data.verify_matching_vocabs(cfg, Model(cases.VOCABULARY, data.ByteVocabulary(100)))
