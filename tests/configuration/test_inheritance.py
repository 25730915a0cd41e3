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


class Decodes(gin_program.Model):
  def predict(self, num_decodes=2, scale=10):
    return scale * super().predict(num_decodes)


class Passes(Decodes):
  def predict(self, **kwargs):
    return super().predict(**kwargs)


class One(gin_program.Model):
  def predict(self):
    return super().predict(num_decodes=1)


class Apart(Focal):
  INHERITS_BINDINGS = False

  def __init__(self, width=0, rate=0.2, gamma=3.0):
    super().__init__(width, rate, gamma=gamma)


class OfApart(Apart):
  pass


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
    # A class that declares that it gets none, and a subclass of it.
    ('MODEL = @mine.Apart()\nmine.Focal.gamma = 1.0', 'model', {'width': 0, 'gamma': 3.0}),
    ('MODEL = @mine.OfApart()\nmine.Apart.gamma = 1.0', 'model', {'width': 0, 'gamma': 1.0}),
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


_METHOD = 'models.Model.predict.num_decodes = 4\n'


@pytest.mark.parametrize(
  'body, expected',
  [
    (_METHOD + 'MODEL = @mine.Focal()', 4),
    ('MODEL = @mine.Focal()\n' + _METHOD, 4),
    (_METHOD + 'MODEL = @mine.Deep()', 4),
    ('MODEL = @models.Model()\n' + _METHOD, 4),
    # Bindings of one class do not change another one with the same method.
    (_METHOD + 'MODEL = @mine.Focal()\nmine.Focal.predict.num_decodes = 3', 3),
    ('mine.Focal.predict.num_decodes = 3\nMODEL = @mine.Focal()\n' + _METHOD, 3),
    ('mine.Focal.predict.num_decodes = 3\n' + _METHOD + 'MODEL = @models.Model()', 4),
    ('mine.Focal.predict.num_decodes = 3\n' + _METHOD + 'MODEL = @mine.Deep()', 3),
    ('mine.Focal.predict.num_decodes = 3\nMODEL = @models.Model()', 1),
    # Overridden methods with the parameter, or with other keyword arguments.
    (_METHOD + 'MODEL = @mine.Decodes()', 40),
    (_METHOD + 'MODEL = @mine.Decodes()\nmine.Decodes.predict.scale = 100', 400),
    (_METHOD + 'MODEL = @mine.Passes()', 40),
    (_METHOD + 'MODEL = @mine.Passes()\nmine.Decodes.predict.scale = 100', 400),
    # Macros, read when the method is called.
    ('models.Model.predict.num_decodes = %WIDTH\nWIDTH = 6\nMODEL = @mine.Focal()', 6),
  ],
)
def test_a_subclass_has_the_bindings_of_methods_of_its_base(tmp_path, caplog, body, expected):
  configuration = _load(tmp_path, body)
  model = configuration.argument('model')
  assert model.predict() == expected
  assert 'to apply to' not in caplog.text
  assert type(model).__name__ in ('Model', 'Focal', 'Deep', 'Decodes', 'Passes')


def test_a_flag_of_a_method_of_the_base_has_an_effect(tmp_path):
  configuration = _load(tmp_path, 'MODEL = @mine.Focal()', 'models.Model.predict.num_decodes=5')
  assert configuration.argument('model').predict() == 5
  (tmp_path / 'config.gin').write_text(configuration.text)
  again = cases.load(files=('config.gin',), defaults=())
  assert again.argument('model').predict() == 5 and again.text == configuration.text


def test_a_method_that_does_not_accept_the_parameter_is_warned_of(tmp_path, caplog):
  assert _load(tmp_path, _METHOD + 'MODEL = @mine.One()').argument('model').predict() == 1
  (warning,) = [each for each in caplog.messages if 'to apply to' in each]
  assert 'Model.predict.num_decodes (mine.gin:6) must be accepted by' in warning
  assert 'inherited_classes.One.predict to apply to mine.One' in warning.replace(
    'gin_program', 'models'
  )


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


class _Reads(_Base):
  def __init__(self, **kwargs):
    kwargs.setdefault('width', 3)
    rate = kwargs.pop('rate', 1)
    super().__init__(rate=2 * rate, **kwargs)


class _Merges(_Base):
  def __init__(self, **kwargs):
    if 'width' not in kwargs:
      kwargs['width'] = 3
    super().__init__(**{'rate': 3, **kwargs})


class _Joins(_Base):
  def __init__(self, **options):
    super().__init__(**({'rate': options.get('rate')} | options | {'width': 3}))


class _Replaces(_Base):
  def __init__(self, **kwargs):
    kwargs.pop('width', None)
    kwargs['rate'] = 3
    super().__init__(width=1, **kwargs)


class _PassesAll(_Base):
  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)


class _ByPosition(_PassesAll):
  def __init__(self, size, *args, **kwargs):
    super().__init__(size, *args, **kwargs)


class _AllByPosition(_ByPosition):
  def __init__(self, **kwargs):
    super().__init__(4, 5, **kwargs)


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
    (_PassesAll, {'width', 'rate'}),
    (_ByPosition, {'rate'}),
    (_AllByPosition, set()),
    (_Reads, {'width', 'rate'}),
    (_Merges, {'width', 'rate'}),
    (_Joins, {'rate'}),
    (_Replaces, set()),
    (_Fields, {'rate'}),
    (type('Plain', (_PassesItsOwn,), {}), {'width'}),
  ],
)
def test_accepted_parameters(cls, accepted):
  found = set()
  for name in ('width', 'rate'):
    if inheritance.rejecting_class(cls, _Base, name) is None:
      found.add(name)
  assert found == accepted


def test_a_base_class_that_replaces_a_parameter_is_named():
  plain = type('Plain', (_PassesItsOwn,), {})
  assert inheritance.rejecting_class(plain, _Base, 'rate') is _PassesItsOwn
