"""Runs of the small projects, each of which is a folder here."""

import pathlib
import sys

import gin
import pytest

from t5x_lite import compat
from t5x_lite.command_line import cli

_FORMS = pathlib.Path(__file__).parent
# Files of the projects are imported by the commands, where `t5x` means t5x_lite.
collect_ignore_glob = ['*/*.py']


@pytest.fixture
def run_form(monkeypatch):
  """Return a function that runs a command in the folder of a project, with the files of the samples."""

  def run(name, command, file, *flags, **macros):
    monkeypatch.chdir(_FORMS / name)
    monkeypatch.syspath_prepend(_FORMS / name)
    compat.install()
    paths = f'--gin_search_paths={_FORMS.parents[1] / "compat/samples"}'
    values = [f'--gin.{key}={value}' for key, value in macros.items()]
    return cli.main([command, f'--gin_file={file}', paths, *values, *flags])

  yield run
  gin.clear_config()
  # gin knows the functions of the projects, whose modules stay.
  for name in [name for name in sys.modules if name.partition('.')[0] == 't5x']:
    del sys.modules[name]
