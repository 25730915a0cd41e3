"""Views: T5X's modules with our objects."""

import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import models
from t5x_lite.apps import evaluate as eval_app
from t5x_lite.apps import train as train_app
from t5x_lite.compat import names
from t5x_lite.compat import views
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.adafactor_rule import update


def test_attributes_are_our_objects():
  t5x = views.module('t5x')
  assert t5x.utils.DatasetConfig is data.DatasetConfig
  assert t5x.models.EncoderDecoderModel is models.EncoderDecoderModel
  assert t5x.examples.t5.network is views.module('t5x.examples.t5.network')
  assert {'DatasetConfig', 'SaveCheckpointConfig'} <= {*dir(t5x.utils)}
  assert {'examples', 'utils'} <= {*dir(t5x)}
  assert t5x.__spec__.name == 't5x' and t5x.utils.__spec__.submodule_search_locations is None


def test_main_is_the_program_that_has_the_name():
  main = views.module('__main__')
  assert main.train is train_app.train
  assert main.evaluate is eval_app.evaluate


def test_missing_names_tell_the_nearest_one_or_the_alternative():
  with pytest.raises(
    AttributeError, match="t5x.utils has no 'DataConfig'. Did you mean 'DatasetConfig'?"
  ):
    views.module('t5x.utils').DataConfig
  with pytest.raises(AttributeError, match='no equivalent in t5x_lite. Include'):
    views.module('t5x.export_lib').ExportableModule
  with pytest.raises(ConfigError, match="'t5x.nothing'"):
    views.module('t5x.nothing')


def test_private_names_are_those_of_the_table():
  adafactor = views.module('t5x.adafactor')
  assert adafactor._AdafactorParamState is update.AdafactorParamState
  with pytest.raises(
    AttributeError, match="t5x.adafactor of t5x_lite has no '_Adafactor': docs/from"
  ):
    adafactor._Adafactor
  assert not hasattr(adafactor, '__wrapped__')


def test_a_name_of_a_module_in_its_package_is_the_module():
  t5x = views.module('t5x')
  assert t5x.checkpointing is t5x.checkpoints
  assert t5x.checkpointing.latest_step is checkpoints.latest_step_of_any_program


def test_selectors_resolve_through_modules_and_classes():
  t5x = views.module('t5x')
  assert views.resolve(t5x, ['utils', 'DatasetConfig']) == (
    names.Place('t5x_lite.data', 'DatasetConfig'),
    '',
  )
  assert views.resolve(t5x.models, ['EncoderDecoderModel', 'predict_batch_with_aux']) == (
    names.Place('t5x_lite.models', 'EncoderDecoderModel.predict_batch_with_aux'),
    '',
  )
  assert (
    views.resolve(t5x, ['utils'])[1] == 't5x.utils is a module. Name a function or class in it.'
  )
  assert "Did you mean 'loss_fn'?" in views.resolve(t5x.models, ['BaseModel', 'los_fn'])[1]
