"""Compare the recorded results of PyTorch, transformers and CTranslate2 with the libraries, or write the records.

usage: python -m tests.interop.record [--write] [PYTEST_OPTION ...]
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import sys

from tests.interop import records


def _describe() -> str:
  """Return which libraries are installed, and how large torch is, without importing them."""
  torch = importlib.util.find_spec('torch')
  assert torch is not None and torch.origin is not None, (
    'PyTorch is missing. Run `make test-interop`, which makes an environment with it.'
  )
  folder = pathlib.Path(torch.origin).parent
  cuda = [path for name in ('nvidia', 'triton') if (path := folder.parent / name).exists()]
  size, cuda_size = (
    sum(file.stat().st_size for path in paths for file in path.rglob('*') if file.is_file())
    for paths in ([folder], cuda)
  )
  build = f'a CUDA build, with {cuda_size / 1e6:,.0f} MB of libraries' if cuda else 'a CPU build'
  version = importlib.metadata.version
  others = ' and '.join(
    f'{name} {version(name)}' for name in ('transformers', 'peft', 'ctranslate2')
  )
  return f'torch {version("torch")} ({size / 1e6:,.0f} MB, {build}), {others}'


def main() -> int:
  """Run all tests of this folder with the libraries; return pytest's exit code."""
  import pytest

  arguments = sys.argv[1:]
  mode = records.Mode.COMPARE
  if '--write' in arguments:
    arguments.remove('--write')
    mode = records.Mode.WRITE
  os.environ[records.VARIABLE] = mode.value
  assert importlib.util.find_spec('tensorflow') is None, (
    'TensorFlow must not be installed next to PyTorch, because triton crashes after it. Use `make test-interop`.'
  )
  print(
    f'{mode.value.capitalize()} the records in tests/golden/interop with {_describe()}.', flush=True
  )
  if mode is records.Mode.COMPARE:
    recorded = records.Records(records.FOLDER, mode).versions
    print(f'Recorded with {recorded}.', flush=True)
  # Long tests too: their results are recorded.
  return pytest.main([os.path.dirname(os.path.abspath(__file__)), '-m', '', *arguments])


if __name__ == '__main__':
  sys.exit(main())
