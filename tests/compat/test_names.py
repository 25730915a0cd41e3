"""The table of T5X's names: complete, and true of our modules."""

import importlib
import inspect

import pytest

from t5x_lite import data
from t5x_lite import errors
from t5x_lite import gin_utils
from t5x_lite.compat import names
from t5x_lite.compat import views


@pytest.mark.parametrize('module', names.MODULES)
def test_every_name_of_the_table_exists_here(module):
  row = names.MODULES[module]
  if row.here:
    importlib.import_module(row.here)
  for name in row.names:
    assert views.find(module, name) is not None, (
      f'{module}.{name}: {row.names[name]} does not exist'
    )


@pytest.mark.parametrize('module', names.MODULES)
def test_names_that_are_left_out_have_one_sentence_and_are_not_here(module):
  row = names.MODULES[module]
  for name, sentence in row.left_out.items():
    assert sentence.endswith('.') and len(sentence) > 20
    assert name not in row.names
    if '.' not in name:
      assert views.find(module, name) is None


def test_parameters_are_here_if_the_table_has_a_value_that_they_reject():
  for module, row in names.MODULES.items():
    for key in row.left_out:
      path, equals, _ = key.partition('=')
      if '.' not in path:
        continue
      name, *attributes, parameter = path.split('.')
      function = getattr(views.module(module), name)
      for attribute in attributes:
        function = getattr(function, attribute)
      is_here = parameter in inspect.signature(function).parameters or hasattr(function, parameter)
      assert is_here or not equals, f'{module}.{key}'
      assert equals or parameter not in inspect.signature(function).parameters, f'{module}.{key}'


def test_errors_have_the_sentences_of_the_table():
  for module, key, reject in (
    (
      't5x.utils',
      'DatasetConfig.runtime_preprocessors=[...]',
      lambda: data.DatasetConfig(
        'x', {'inputs': 8}, 'train', 8, False, 0, runtime_preprocessors=[1]
      ).check(),
    ),
    (
      't5x.utils',
      'get_training_eval_datasets.start_step=1',
      lambda: data.get_training_eval_datasets(
        data.DatasetConfig('x', {'inputs': 8}, 'train', 8, False, 0),
        0,
        1,
        1,
        'encoder_decoder',
        start_step=1,
      ),
    ),
    (
      't5x.gin_utils',
      'get_gin_config_str.show_provenance=True',
      lambda: gin_utils.get_gin_config_str(show_provenance=True),
    ),
  ):
    with pytest.raises(errors.ConfigError) as caught:
      reject()
    assert names.remedy(module, key) in str(caught.value), caught.value


def test_messages_name_the_alternative_of_a_module():
  assert 't5x_lite train, eval, infer' in names.why_no_module('t5x.main')
  assert 't5x.examples.t5' in names.why_no_module('t5x.contrib.gpu.t5.network')
  assert 't5x_lite export' in names.why_no_module('t5x.export') and not names.why_no_module(
    't5x.export_lib'
  )
  assert 'module of your own' in names.why_no_module('t5x.tasks')
  assert "Did you mean 'utils'?" in names.why_no_module('t5x.util')
  assert not names.why_no_module('t5x.contrib') and not names.why_no_module('t5x')


def test_aliases_exist_in_all_modules():
  for name, place in names.ALIASES.items():
    assert views.find('t5x.models', name) is not None, place
  assert (
    views.find('t5x.partitioning', 'with_sharding_constraint').module == 't5x_lite.partitioning'
  )
  assert views.find('t5x.examples.t5.layers', 'param_with_axes').module == 'flax.linen.partitioning'
  assert views.find('t5x.contrib', 'Array') is None


def test_types_for_annotations_are_here():
  for module, name in [
    ('trainer', 'BatchType'),
    ('trainer', 'MutableMetricMapType'),
    ('models', 'MetricsMap'),
    ('train_state', 'VariableDict'),
    ('partitioning', 'TrainState'),
    ('utils', 'InferStepCallable'),
    ('infer', 'MergeFn'),
    ('contrib.moe.trainer', 'LearningRateCallable'),
  ]:
    assert getattr(views.module(f't5x.{module}'), name) is not None
