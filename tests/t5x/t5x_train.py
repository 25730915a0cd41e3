"""T5X's program `t5x/train.py` with current packages: `PYTHON tests/t5x/t5x_train.py CHECKOUT FLAG ...`.

Runs in T5X's environment, so nothing of t5x_lite is imported here.
"""

import runpy
import sys
import types

import jax
import jax.experimental.pjit


def _prepare() -> None:
  """Add the names that T5X and its package jestimator import, and current packages do not have."""
  # jestimator 0.3.3, of 2022, imports it from here.
  jax.experimental.pjit.PartitionSpec = jax.sharding.PartitionSpec
  # AirIO is on no package index. T5X asks whether data is of these classes; the data of seqio is not.
  airio = types.ModuleType('airio')
  airio.core = types.ModuleType('airio.core')
  for name in ('AirIODatasetIterator', 'DatasetProviderBase', 'Mixture', 'Task'):
    setattr(airio.core, name, type(name, (), {}))
  sys.modules['airio'] = airio
  sys.modules['airio.core'] = airio.core


if __name__ == '__main__':
  _prepare()
  checkout = sys.argv[1]
  sys.path[0] = checkout
  sys.argv = [f'{checkout}/t5x/train.py', *sys.argv[2:]]
  runpy.run_path(sys.argv[0], run_name='__main__')
