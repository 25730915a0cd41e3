"""Checks before a program is called: values that are missing, and what annotations leave open."""

from t5x_lite.configuration import validation as gin_check
from tests.configuration import configuration_cases as cases
from tests.configuration.configuration_cases import program_files  # noqa: F401


def test_all_missing_values_are_named_at_once():
  message = cases.error_of(defaults=(), files=('run.gin',))
  assert message.startswith('3 required values are missing: MODEL, MODEL_DIR, STEPS.')
  assert '--gin.MODEL_DIR=runs/my_run (required by run.gin:7)' in message
  assert '--gin_file=models/' in message and '--gin.STEPS=VALUE (required by run.gin:6)' in message


def test_a_later_file_that_requires_a_value_again_is_named(tmp_path):
  (tmp_path / 'mine.gin').write_text('STEPS = 7\n')
  message = cases.error_of(defaults=('MODEL_DIR=x',), files=('mine.gin', 'run.gin', 'model.gin'))
  assert (
    'mine.gin:1 sets it, but run.gin:6, which is read later, requires it again: pass that file first, or repeat the '
    'value with --gin.STEPS=VALUE' in message
  )


def test_a_file_that_requires_what_its_include_sets_needs_a_flag(tmp_path):
  (tmp_path / 'mine.gin').write_text('STEPS = 7\n')
  (tmp_path / 'own.gin').write_text("include 'mine.gin'\nSTEPS = %gin.REQUIRED\n")
  message = cases.error_of(defaults=('MODEL_DIR=x',), files=('run.gin', 'model.gin', 'own.gin'))
  assert 'STEPS: set --gin.STEPS=VALUE (required by own.gin:2)' in message


def test_unbound_required_parameter_is_named_before_the_call(tmp_path):
  (tmp_path / 'run.gin').write_text(
    cases.RUN.replace("train/data.DatasetConfig.name = 'rows'\n", '')
  )
  message = cases.error_of()
  assert message.startswith('train/data.DatasetConfig requires name, which is not bound.')
  assert '--gin.train/data.DatasetConfig.name=VALUE' in message


def test_checks_accept_undecidable_annotations():
  assert gin_check.fits('bfloat16', object) and gin_check.fits('x', 'unresolved')
  assert gin_check.fits((1, 2), tuple[int, int]) and not gin_check.fits((1,), tuple[int, int])
  assert gin_check.fits([1], tuple[int, ...]) and gin_check.fits(None, None)


_OWN = """\
import dataclasses
from tests.configuration import gin_program

class Model(gin_program.Model):
  def __init__(self, width: int, names: dict, act: gin_program.Model = None):
    super().__init__(width, names=names)
    self.act = act

class SameConstructor(gin_program.Model):
  pass

@dataclasses.dataclass(frozen=True)
class Config(gin_program.DatasetConfig):
  own: int = 0
"""


def test_annotations_of_users_are_not_compared(tmp_path, monkeypatch):
  (tmp_path / 'own_annotations.py').write_text(_OWN)
  (tmp_path / 'own.gin').write_text(
    'from __gin__ import dynamic_registration\nimport own_annotations\n'
    'from tests.configuration import gin_program\n'
    'MODEL = @own_annotations.Model()\nWIDTH = 32\n'
    "own_annotations.Model.width = 'wide'\nown_annotations.Model.names = ('a',)\n"
    'own_annotations.Model.act = @gin_program.schedule\n'
    'gin_program.train.train_cfg = @train/own_annotations.Config()\n'
    "own_annotations.Config.own = 'x'\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  files = ('run.gin', 'model.gin', 'own.gin')
  found = cases.load(files=files).call()
  assert (found['model'].width, found['model'].names) == ('wide', ('a',))
  assert found['train_cfg'].own == 'x'
  # A constructor that a class inherits has the annotations of the base class.
  message = cases.error_of(
    'MODEL=@own_annotations.SameConstructor()', 'models.Model.width="wide"', files=files
  )
  assert 'must be int' in message and "got 'wide' of type str" in message


def test_a_flag_that_sets_a_required_macro_is_needed_although_the_run_does_not_read_it(tmp_path):
  (tmp_path / 'required.gin').write_text(
    'from __gin__ import dynamic_registration\n'
    'from tests.configuration import gin_program as data\n'
    'CHECKPOINT = %gin.REQUIRED\n'
    'other/data.DatasetConfig.name = %CHECKPOINT\n'
  )
  files = ('run.gin', 'model.gin', 'required.gin')
  assert 'A required value is missing: CHECKPOINT' in cases.error_of(files=files)
  cases.load('CHECKPOINT=None', files=files)
