"""Tests against PyTorch and transformers. If these are not installed, every module here is skipped with a message.

`make test` installs them from `requirements/lock-interop-*.txt`; the test modules import them without a check.
"""

import importlib
import os
import pathlib

import pytest

_FOLDER = pathlib.Path(__file__).parent
# Nothing is asked of the network, and two cores serve two workers.
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')


def _find_missing() -> str | None:
  """Returns why the tests cannot run, None if they can."""
  for name in ('torch', 'transformers'):
    try:
      importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a library that torch is linked to
      return f'needs the extra [test-interop] (`make test` installs it), but {name} cannot be imported: {error}'
  importlib.import_module('torch').set_num_threads(1)
  return None


# Only when a module is collected: a run of other tests does not import torch.
_MISSING: list[str | None] = []


class _Skipped(pytest.Module):
  """A test module that cannot be imported."""

  def _getobj(self):
    raise pytest.skip.Exception(_MISSING[0], allow_module_level=True)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: pathlib.Path, parent: pytest.Collector):
  """Stands in for modules whose imports would fail, of tests and doctests."""
  collectors = yield
  if not _MISSING:
    _MISSING.append(_find_missing())
  if (
    _MISSING[0] is None
    or file_path.suffix != '.py'
    or file_path.name in ('__init__.py', 'conftest.py')
  ):
    return collectors
  return (
    [_Skipped.from_parent(parent, path=file_path)] if file_path.name.startswith('test_') else []
  )
