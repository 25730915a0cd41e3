"""Bindings of base classes that apply to subclasses."""

import dataclasses
import logging

import pytest

from t5x_lite.configuration import inheritance
from tests.configuration import configuration_cases as cases
from tests.configuration import gin_program
from tests.configuration.configuration_cases import program_files  # noqa: F401

_CLASSES = """
import dataclasses
from tests.configuration import gin_program


class Focal(gin_program.Model):
  def __init__(self, *args, gamma=2.0, **kwargs):
    super().__init__(*args, **kwargs)
    self.gamma = gamma


class Deep(Focal):
  pass


class Closed(gin_program.Model):
  def __init__(self, rate=0.5):
    super().__init__(1, rate)


class Own(gin_program.Model):
  def __init__(self, *args, **kwargs):
    super().__init__(*args, rate=0.7, **kwargs)


class Rows(gin_program.DatasetConfig):
  pass


@dataclasses.dataclass(frozen=True)
class MoreRows(gin_program.DatasetConfig):
  limit: int = 3


class Trainer(gin_program.Trainer):
  pass
"""
_HEAD = """\
from __gin__ import dynamic_registration
import inherited_classes as mine
from tests.configuration import gin_program as data
from tests.configuration import gin_program as models
from tests.configuration import gin_program as script
"""


@pytest.fixture(autouse=True)
def classes(tmp_path, monkeypatch, program_files):  # noqa: F811
  (tmp_path / 'inherited_classes.py').write_text(_CLASSES)
  monkeypatch.syspath_prepend(tmp_path)


def _load(tmp_path, body, *flags):
  (tmp_path / 'mine.gin').write_text(_HEAD + body)
  return cases.load(*flags, files=('run.gin', 'model.gin', 'mine.gin'))


@pytest.mark.parametrize(
  'body, argument, expected',
  [
    ('MODEL = @mine.Focal()', 'model', {'width': 32, 'rate': 0.1, 'gamma': 2.0}),
    ('MODEL = @mine.Deep()', 'model', {'width': 32, 'gamma': 2.0}),
    # A later binding of the base, a macro, and a reference.
    ('MODEL = @mine.Focal()\nmodels.Model.rate = 0.3', 'model', {'rate': 0.3}),
    ('MODEL = @mine.Focal()\nWIDTH = 5', 'model', {'width': 5}),
    ('MODEL = @mine.Focal()\nmodels.Model.dtype = @models.schedule', 'model', {'width': 32}),
    # Of several base classes, the nearest.
    (
      'MODEL = @mine.Deep()\nmodels.Model.rate = 0.3\nmine.Focal.rate = 0.4\nmine.Focal.gamma = 1.0',
      'model',
      {'rate': 0.4, 'gamma': 1.0},
    ),
    # Its own binding.
    ('MODEL = @mine.Focal()\nmine.Focal.width = 7', 'model', {'width': 7}),
    # Scopes, of references and of macros.
    ('script.train.eval_cfg = @eval/mine.Rows()', 'eval_cfg', {'shuffle': False, 'batch_size': 8}),
    (
      'script.train.train_cfg = @train/mine.MoreRows()',
      'train_cfg',
      {'shuffle': True, 'batch_size': 8, 'limit': 3},
    ),
  ],
)
def test_a_subclass_has_the_bindings_of_its_base(tmp_path, body, argument, expected):
  value = vars(_load(tmp_path, body).argument(argument))
  assert {name: value[name] for name in expected} == expected


def test_priority(tmp_path):
  """A binding of the class has priority over those of base classes, also over those in a narrower scope."""
  body = 'script.train.eval_cfg = @eval/mine.Rows()\nmine.Rows.shuffle = True\n'
  assert _load(tmp_path, body).argument('eval_cfg').shuffle
  body += 'eval/mine.Rows.shuffle = False\n'
  assert not _load(tmp_path, body).argument('eval_cfg').shuffle


def test_a_class_that_is_called_later_has_the_bindings_of_its_base(tmp_path):
  configuration = _load(tmp_path, 'script.train.trainer_cls = @mine.Trainer')
  trainer = configuration.argument('trainer_cls')(model=None)
  assert isinstance(trainer, gin_program.Trainer) and trainer.learning_rate_fn(5) == 0.5


def test_a_flag_of_the_base_has_an_effect(tmp_path):
  configuration = _load(tmp_path, 'MODEL = @mine.Focal()', 'models.Model.rate=0.25')
  assert configuration.argument('model').rate == 0.25


@pytest.mark.parametrize(
  'cls, value',
  [('Closed', 0.5), ('Own', 0.7)],
)
def test_a_warning_names_the_bindings_that_do_not_apply(tmp_path, caplog, cls, value):
  body = f'models.Model.rate = 0.3\nMODEL = @mine.{cls}()\n'
  assert _load(tmp_path, body).argument('model').rate == (0.3 if cls == 'Closed' else value)
  lost = {'Closed': 'models.Model.width (model.gin:6)', 'Own': 'models.Model.rate (mine.gin:6)'}
  (warning,) = [each for each in caplog.messages if 'to apply to' in each]
  assert warning.replace('gin_program', 'models').startswith(f'{lost[cls]} must be accepted by')


def test_a_method_of_the_base_is_warned_of(tmp_path, caplog):
  _load(tmp_path, 'MODEL = @mine.Focal()\nmodels.Model.predict.num_decodes = 4\n')
  assert 'Model.predict.num_decodes (mine.gin:7)' in caplog.text


def test_inherited_bindings_are_logged(tmp_path, caplog):
  with caplog.at_level(logging.INFO, 't5x_lite'):
    _load(tmp_path, 'MODEL = @mine.Focal()')
  (line,) = [each for each in caplog.messages if each.startswith('Bindings of')]
  assert line == 'Bindings of models.Model apply to mine.Focal: width.'


def test_a_recorded_configuration_gives_the_same(tmp_path):
  first = _load(tmp_path, 'MODEL = @mine.Focal()')
  assert 'Focal.width' not in first.text
  (tmp_path / 'config.gin').write_text(first.text)
  again = cases.load('WIDTH=9', files=('config.gin',), defaults=())
  assert again.argument('model').width == 9 and again.text != first.text


class _Base:
  def __init__(self, width=1, rate=2):
    del width, rate


class _Passes(_Base):
  def __init__(self, extra=0, **kwargs):
    super().__init__(**kwargs)
    del extra


class _PassesItsOwn(_Base):
  def __init__(self, **kwargs):
    super().__init__(rate=3, **kwargs)


class _Renames(_Passes):
  def __init__(self, width):
    super().__init__(width=width)


@dataclasses.dataclass
class _Fields(_Base):
  rate: int = 1


@pytest.mark.parametrize(
  'cls, accepted',
  [
    (_Passes, {'width', 'rate'}),
    (_PassesItsOwn, {'width'}),
    (_Renames, {'width'}),
    (_Fields, {'rate'}),
    (type('Plain', (_PassesItsOwn,), {}), {'width'}),
  ],
)
def test_accepted_parameters(cls, accepted):
  found = {name for name in ('width', 'rate') if inheritance.accepts(cls, _Base, name)}
  assert found == accepted
