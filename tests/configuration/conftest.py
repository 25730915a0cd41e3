"""The program of the tests, `gin_program`, stands for the package, whose annotations are checked."""

import pytest

from t5x_lite.configuration import validation


@pytest.fixture(autouse=True)
def checked_packages(monkeypatch):
  monkeypatch.setattr(validation, '_CHECKED', (*validation._CHECKED, 'tests'))
