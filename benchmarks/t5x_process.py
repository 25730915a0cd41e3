"""A checkout of T5X as the peer of a benchmark: `--t5x=PATH`, a separate process that is measured on request.

T5X has other dependencies than this package, so it runs in a separate process, in this environment or in that of
`--t5x_python`. The process waits while this one measures, so both are timed in turn. It starts as T5X's users start it:
without the options of XLA and the huge pages that the commands of this package set, unless `--same_options`.
"""

import argparse
from collections.abc import Mapping
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import common

_WORKER = pathlib.Path(__file__).with_name('t5x_worker.py')


def _checkout(text: str) -> pathlib.Path:
  path = pathlib.Path(text).expanduser().absolute()
  if not (path / 't5x' / 'train_state.py').is_file():
    raise argparse.ArgumentTypeError(
      f'must be a checkout of T5X, the folder that contains t5x/train_state.py, got {text!r}. '
      'Clone https://github.com/google-research/t5x and give its path.'
    )
  return path


def _interpreter(text: str) -> str:
  found = shutil.which(os.path.expanduser(text))
  if found is None:
    raise argparse.ArgumentTypeError(
      f"must be a Python interpreter, got {text!r}. Give the path of bin/python in T5X's environment."
    )
  return os.path.abspath(found)


def parse_args(parser: argparse.ArgumentParser, has_options: bool = True) -> argparse.Namespace:
  """Return the arguments of the command line, with `t5x`, `t5x_python` and `same_options`, see the module.

  Args:
    parser: parser with the script's own arguments.
    has_options: False for a script without `common.start_like_commands`, which has no options to give to T5X.
  """
  parser.add_argument(
    '--t5x', type=_checkout, metavar='PATH', help='measure this checkout of T5X as the peer'
  )
  parser.add_argument(
    '--t5x_python',
    type=_interpreter,
    metavar='PYTHON',
    help="interpreter with T5X's dependencies, by default this one; it sees PYTHONPATH as well",
  )
  if has_options:
    parser.add_argument(
      '--same_options',
      action='store_true',
      help="T5X gets the options of XLA and the huge pages of this package's commands, which T5X does not set",
    )
  else:
    parser.set_defaults(same_options=False)
  args = parser.parse_args()
  for name in ('t5x_python', 'same_options'):
    value = getattr(args, name)
    if value and not args.t5x:
      parser.error(f'argument --{name}: must come with --t5x, got {value!r} alone. Add --t5x=PATH.')
  return args


class T5x:
  """Process that measures a checkout of T5X.

  Attributes:
    name: T5X and its commit, and the version of its JAX if it is another one, for tables.
    facts: what the process measured while it started, by name.
  """

  def __init__(
    self,
    args: argparse.Namespace,
    phase: str,
    options: Mapping[str, Any],
    arrays: Mapping[str, Any] | None = None,
  ):
    """Start the process.

    Args:
      args: see `parse_args`.
      phase: name of the class in `t5x_worker.py` that measures.
      options: its arguments, which JSON can represent.
      arrays: arrays that it gets in addition to `options`, by name.

    Raises:
      SystemExit: the process cannot import or run T5X.
    """
    self._checkout, self._python = args.t5x, args.t5x_python or sys.executable
    with contextlib.ExitStack() as files:
      folder = pathlib.Path(
        files.enter_context(tempfile.TemporaryDirectory(prefix='t5x_lite_bench_'))
      )
      if arrays is not None:
        import numpy as np

        np.savez(
          folder / 'arrays.npz', **{name: np.asarray(array) for name, array in arrays.items()}
        )
        options = {**options, 'arrays': str(folder / 'arrays.npz')}
      self._log = files.enter_context(
        open(folder / 'log', 'w+', encoding='utf-8', errors='replace')
      )
      environment = dict(os.environ)
      if not args.same_options:
        environment = common.given_environment()
      paths = [str(self._checkout), *filter(None, [environment.get('PYTHONPATH')])]
      self._process = subprocess.Popen(
        [self._python, str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self._log,
        text=True,
        env={**environment, 'PYTHONPATH': os.pathsep.join(paths), 'TF_CPP_MIN_LOG_LEVEL': '3'},
      )
      files.callback(self._end)
      self.facts = self('start', checkout=str(self._checkout), phase=phase, options=dict(options))
      self._files = files.pop_all()
    self.name = f'T5X {_commit(self._checkout)}'
    if args.same_options:
      self.name += ', same options'
    if self.facts['jax'] != sys.modules['jax'].__version__:
      self.name += f' with jax {self.facts["jax"]}'

  def __call__(self, method: str, **arguments: Any) -> Any:
    """Return the result of a method of the phase.

    Raises:
      SystemExit: T5X raised an error or its process ended.
    """
    try:
      print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = ''
    answer = (
      json.loads(line)
      if line
      else {'error': f'its process ended with status {self._process.wait()}'}
    )
    if 'error' in answer:
      self._log.seek(0)
      is_import = answer['error'].startswith(('ImportError', 'ModuleNotFoundError'))
      remedy = (
        "Install T5X's dependencies in that environment or put checkouts of them on PYTHONPATH."
        if is_import
        else 'Its output is above. Give another checkout, another environment or other options.'
      )
      raise SystemExit(
        f'{self._log.read()[-3000:]}\n--t5x must be a checkout that --t5x_python can run, got {self._checkout} and '
        f'{self._python}: {answer["error"]}. {remedy}'
      )
    return answer['result']

  def close(self) -> None:
    """End the process."""
    self._files.close()

  def _end(self) -> None:
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.close()
    self._process.stdout.close()
    self._process.wait()


def _commit(checkout: pathlib.Path) -> str:
  """Return the short commit of a checkout, or '(unknown commit)'."""
  if not (checkout / '.git').exists():  # git would name the commit of a repository around it
    return '(unknown commit)'
  done = subprocess.run(
    ['git', '-C', str(checkout), 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True
  )
  return done.stdout.strip() if done.returncode == 0 else '(unknown commit)'
