"""Fixtures of the tests of examples."""

import gin
import pytest


@pytest.fixture(autouse=True)
def registered_again():
  """Tests of pages import the same examples from copies; gin would not register a name for two functions."""
  gin.enter_interactive_mode()
  yield
  gin.exit_interactive_mode()
