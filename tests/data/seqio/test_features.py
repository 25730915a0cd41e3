"""Lookup of tasks of seqio."""

import subprocess
import sys

import pytest

pytest.importorskip('seqio')

_PROGRAM = """
from t5x_lite import data

cfg = data.DatasetConfig(
  'python_keyword_cloze', {'inputs': 8, 'targets': 4}, 'train', 2, False, 0, source='seqio'
)
assert next(iter(data.get_dataset(cfg, 0, 1, 'encoder_decoder')))
print('opened')
"""


def test_embedded_tasks_are_registered_without_a_module():
  """In a process of its own: other tests import the module of the tasks."""
  done = subprocess.run(
    [sys.executable, '-c', _PROGRAM], capture_output=True, text=True, check=False
  )
  assert done.stdout == 'opened\n', done.stderr[-2000:]
