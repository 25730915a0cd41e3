"""pytest plugin: T5X's own tests, whose `import t5x` gives t5x_lite's objects.

Use: `python -m pytest -p tests.t5x.plugin PATH/t5x/losses_test.py`; `tests.t5x.own_tests` runs all of them.
"""

import importlib.util
import os
import pathlib
import sys
import types
import unittest

from absl import flags
from absl.testing import parameterized
import jax
import numpy as np

from t5x_lite import compat
from tests.t5x import private_names


def pytest_configure(config) -> None:
  """Install t5x_lite's objects as T5X, with those parts of T5X that only its tests use."""
  flags.FLAGS(['pytest'])
  # One of T5X's tests sets this when it is imported; for all tests to have the same devices, it is set before them.
  os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'
  jax.devices()
  compat.install()
  _stand_in(
    'chex',
    TestCase=parameterized.TestCase,
    assert_trees_all_equal=_assert_trees_all_equal,
    assert_trees_all_equal_structs=_assert_same_structure,
    assert_tree_all_finite=_assert_finite,
  )
  _stand_in('airio')
  sys.modules['airio'].core = _stand_in('airio.core')
  sys.modules['airio'].pygrain_common = _stand_in('airio.pygrain_common')
  argument = pathlib.Path(config.args[0])
  checkout = next(
    folder for folder in (argument, *argument.parents) if (folder / 'test_utils.py').exists()
  )
  # T5X's __init__ and test_utils import these; no test uses them.
  _stand_in('t5x.checkpoint_importer', LazyArray=sys.modules['t5x.checkpoints'].LazyArray)
  _stand_in('t5x.version', __version__='')
  private_names.install()
  spec = importlib.util.spec_from_file_location('t5x.test_utils', checkout / 'test_utils.py')
  module = importlib.util.module_from_spec(spec)
  sys.modules['t5x.test_utils'] = sys.modules['t5x'].test_utils = module
  spec.loader.exec_module(module)


def _stand_in(name: str, **names) -> types.ModuleType:
  """Return the module `name`; one with `names` where it is not installed."""
  try:
    found = importlib.util.find_spec(name)
  except (ModuleNotFoundError, ValueError):
    found = None
  if found is not None:
    return importlib.import_module(name)
  module = sys.modules[name] = types.ModuleType(name)
  vars(module).update(names)
  return module


def _assert_same_structure(*trees) -> None:
  structures = [jax.tree.structure(tree) for tree in trees]
  unittest.TestCase().assertEqual(structures, structures[:1] * len(trees))


def _assert_trees_all_equal(*trees) -> None:
  _assert_same_structure(*trees)
  for tree in trees[1:]:
    jax.tree.map(np.testing.assert_array_equal, trees[0], tree)


def _assert_finite(tree) -> None:
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree))
