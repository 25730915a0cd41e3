"""Checkpoints that were tampered with: each is rejected with file and field, and nothing outside it is opened."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import untrusted_cases

_ROOT = pathlib.Path(__file__).parents[2]
_NAMES = [(form, name) for form, cases in untrusted_cases.CASES.items() for name in cases]


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory):
  """Of all cases, from one process that may allocate 1 GiB more than it needs for sound checkpoints."""
  done = subprocess.run(
    [sys.executable, '-m', 'tests.untrusted_cases', str(tmp_path_factory.mktemp('cases'))],
    cwd=_ROOT,
    text=True,
    capture_output=True,
    timeout=300,
    env=os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'},
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize('form, name', _NAMES, ids=[f'{form}-{name}' for form, name in _NAMES])
def test_is_rejected_with_file_and_field(outcomes, form, name):
  kind, message = outcomes[f'{form}-{name}']
  assert kind == 'CheckpointError', (kind, message)
  assert re.search(untrusted_cases.CASES[form][name][1], message), message
  assert f'{form}-{name}/checkpoint_7' in message
