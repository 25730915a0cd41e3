"""Environment of the tests that compare with PyTorch and transformers: by default with their recorded results."""

import os

import pytest

from tests.interop import records

# Nothing is asked of the network, and two cores serve two workers.
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')

# Doctests would import the libraries.
collect_ignore = ['libraries.py']


@pytest.fixture(scope='session', autouse=True)
def finish_records(request):
  """Write the records after all tests, or check that none is left over; not with `-k` or `-m`."""
  yield
  known = records.get()
  if (
    known.mode is records.Mode.READ
    or request.config.option.keyword
    or request.config.option.markexpr
  ):
    return
  if known.mode is records.Mode.WRITE:
    assert not request.session.testsfailed, 'The records are only written if all tests pass.'
    from tests.interop import libraries

    known.write(libraries.versions())
  else:
    unused = sorted(known.names - known.asked)
    assert not unused, f'No test asks for these records; write them again: {unused}'
