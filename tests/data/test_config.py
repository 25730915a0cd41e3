"""Checks of data configurations before anything is read."""

import dataclasses

import pytest

from t5x_lite import data
from t5x_lite.errors import ConfigError
from tests.data import builtin_cases as cases

# --- Checks before compute ------------------------------------------------------------------


@pytest.mark.parametrize('change, message', [
    (dict(source='seqoi'), "'seqoi'.*mean 'seqio'"),
    (dict(task_feature_lengths={'inputs': 0, 'targets': 8}), r"\['inputs'\] is 0"),
    (dict(task_feature_lengths={'inputs': 8.5, 'targets': 8}), 'expected an integer'),
    (dict(task_feature_lengths=None), 'expected a mapping'),
    (dict(batch_size=0), 'batch_size is 0'), (dict(batch_size=True), 'batch_size is True'),
    (dict(seed='1'), "seed is '1'"), (dict(seed=-1), 'seed is -1'), (dict(split=''), 'split'),
    (dict(shuffle='yes'), 'shuffle'), (dict(pack=1), 'pack is 1'),
    (dict(use_custom_packing_ops=True), 'pack is False'),
    (dict(use_custom_packing_ops=True, pack=True), "source = 'seqio' only"),
    (dict(use_cached=True), "source = 'seqio' only")])
def test_refused_configurations(change, message):
  with pytest.raises(ConfigError, match=message):
    cases.make_cfg(**change)


def test_refused_layouts_and_converters():
  with pytest.raises(ConfigError, match='batch_size is 8, but the layout is for batches of 16'):
    data.open_train_iterator(cases.make_cfg(), cases.layout(batch_size=16))
  with pytest.raises(ConfigError, match='8 does not divide over 3'):
    data.open_train_iterator(cases.make_cfg(), cases.layout(0, 3))
  with pytest.raises(ConfigError, match="'encoder_decode'.*mean 'encoder_decoder'"):
    data.open_train_iterator(cases.make_cfg(), cases.layout(), feature_converter='encoder_decode')
  with pytest.raises(ConfigError, match="needs DatasetConfig.source = 'seqio'"):
    data.open_train_iterator(cases.make_cfg(), cases.layout(), feature_converter=dict)
  with pytest.raises(ConfigError, match='eval_steps is 0'):
    data.open_eval_iterators(cases.make_cfg(), cases.layout(), 0)


def test_vocabularies_of_model_and_data_must_match():
  @dataclasses.dataclass
  class Model:
    input_vocabulary: object
    output_vocabulary: object

  cfg = cases.make_cfg()
  assert data.get_vocabulary(cfg) == (cases.VOCABULARY, cases.VOCABULARY)
  data.verify_matching_vocabs(cfg, Model(data.ByteVocabulary(extra_ids=125), cases.VOCABULARY))
  with pytest.raises(ConfigError, match=r'output vocabulary.*ByteVocabulary\(125\).*ByteVocabulary\(100\)'):
    data.verify_matching_vocabs(cfg, Model(cases.VOCABULARY, data.ByteVocabulary(100)))
