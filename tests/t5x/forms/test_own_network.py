"""Bindings of a base class in a project for T5X, which T5X does not apply to subclasses."""

import pathlib

import gin
import pytest

from t5x_lite.configuration import binding
from t5x_lite.configuration import syntax

_FOLDER = pathlib.Path(__file__).parent / 'own_network'
_TEXT = """\
from __gin__ import dynamic_registration
import images
images.TextNetwork.shared_embedder = 'shared'
NETWORK = @images.ImageNetwork()
"""


@pytest.mark.parametrize(
  'is_for_t5x, expected',
  [
    (True, None),
    (False, 'shared'),
  ],
)
def test_only_a_file_without_names_of_t5x_passes_bindings_to_subclasses(
  monkeypatch, is_for_t5x, expected
):
  monkeypatch.syspath_prepend(str(_FOLDER))
  binder = binding.Binder()
  try:
    binder.resolve([syntax.read_text(_TEXT, 'run.gin', is_flag=False)])
    binder.inherit(is_for_t5x)
    binding.bind(binder.table.values(), binder.import_statements.values())
    with gin.unlock_config():
      network = gin.query_parameter('NETWORK/gin.macro.value').scoped_configurable_fn()
    assert network.shared_embedder == expected
  finally:
    gin.clear_config()
