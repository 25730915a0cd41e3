"""`python -m t5x_lite.compat.train` and the others, in place of T5X's programs."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize('program', ['train', 'eval', 'infer', 'precompile'])
def test_programs_are_the_commands(program):
  flags = [
    '-gin_file=recipes/keyword_cloz.gin',
    '--alsologtostderr',
    '--gin.MODEL_DIR="x"',
    '--multiprocess_gpu=false',
  ]
  done = [
    subprocess.run(
      [sys.executable, '-m', *start, *flags],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
    )
    for start in ([f't5x_lite.compat.{program}'], ['t5x_lite', program])
  ]
  assert done[0].returncode == done[1].returncode == 2
  assert (
    done[0].stderr == done[1].stderr
    and "Did you mean 'recipes/keyword_cloze.gin'?" in done[0].stderr
  )


def _run(arguments, folder):
  return subprocess.run(
    [sys.executable, *arguments],
    cwd=folder,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
    env={**os.environ, 'PYTHONPATH': str(_ROOT)},
  )


def _write(folder, **modules):
  for name, text in modules.items():
    path = folder / f'{name.replace("__", "/")}.py'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# The command `t5x_lite`, a script in another folder.
_COMMAND = 'from t5x_lite.__main__ import run\nif __name__ == "__main__":\n  run()\n'
_GIN = "import old_project\ninclude 'recipes/keyword_cloze.gin'\nNO_SUCH.x = 1\n"


@pytest.mark.parametrize(
  'command',
  [
    ['command.py'],
    ['-P', 'command.py'],
    ['-m', 't5x_lite'],
    ['command.py', 'launch', '-n', '1', '--'],
  ],
)
def test_modules_in_the_current_folder_may_import_t5x(tmp_path, command):
  """As with T5X's programs; also if T5X is installed."""
  is_safe = '-P' in command
  command = [str(tmp_path / part) if part == 'command.py' else part for part in command]
  _write(tmp_path, command=_COMMAND)
  project = tmp_path / 'project'
  _write(
    project,
    t5x____init__='raise AssertionError',
    optax='raise AssertionError',
    old_project='import optax\nfrom t5x import models\nassert models.__name__ == "t5x.models"\n',
  )
  (project / 'run.gin').write_text(_GIN)
  done = _run([*command, 'train', '--gin_file=run.gin', '--gin.MODEL_DIR=x'], project)
  assert done.returncode == 2, done.stderr
  assert (
    is_safe or 'Names of T5X in the module old_project mean those of t5x_lite.' in done.stderr
  ), done.stderr
  assert ("no module 'old_project'" if is_safe else "nothing is called 'NO_SUCH'") in done.stderr, (
    done.stderr
  )


@pytest.mark.parametrize(
  'flags, line', [([], 'warning: of mine'), (['--stderrthreshold=error'], '')]
)
def test_lines_of_packages_without_a_log_are_ours(tmp_path, flags, line):
  _write(tmp_path, old_project='import logging\nlogging.getLogger("mine").warning("of mine")\n')
  (tmp_path / 'run.gin').write_text(_GIN)
  done = _run(
    ['-m', 't5x_lite', 'train', '--gin_file=run.gin', '--gin.MODEL_DIR=x', *flags], tmp_path
  )
  assert [text for text in done.stderr.splitlines() if 'of mine' in text] == (
    [line] if line else []
  ), done.stderr


def test_the_current_folder_hides_no_package_that_another_finder_has(tmp_path):
  """As that of an editable installation."""
  _write(
    tmp_path,
    command=textwrap.dedent("""
      import importlib.machinery, sys
      class Editable:
        def find_spec(self, name, path=None, target=None):
          return importlib.machinery.PathFinder.find_spec(name, [sys.path[0] + '/editable']) if path is None else None
      sys.meta_path.append(Editable())
      """)
    + _COMMAND,
  )
  _write(tmp_path / 'editable', others='')
  _write(tmp_path / 'project', others='raise AssertionError', old_project='import others\n')
  (tmp_path / 'project/run.gin').write_text(_GIN)
  done = _run(
    [str(tmp_path / 'command.py'), 'train', '--gin_file=run.gin', '--gin.MODEL_DIR=x'],
    tmp_path / 'project',
  )
  assert done.returncode == 2 and "nothing is called 'NO_SUCH'" in done.stderr, done.stderr


def test_worker_processes_of_data_find_the_same_modules(tmp_path):
  pytest.importorskip('grain')  # Not available for all machines.
  _write(
    tmp_path / 'project', old_project='from t5x import models\n\n\nclass Task:\n  models = models\n'
  )
  code = f"""
      import multiprocessing, pickle
      from t5x_lite import compat
      from t5x_lite.data.sources import grain_source
      def receive(text):
        assert pickle.loads(text)._pieces.models.__name__ == 't5x.models'
      if __name__ == '__main__':
        compat.set_up_process({str(tmp_path / 'project')!r})
        import old_project
        process = multiprocessing.get_context('spawn').Process(
            target=receive, args=(pickle.dumps(grain_source._Sequence(old_project.Task(), 0)),))
        process.start()
        process.join()
        assert process.exitcode == 0
      """
  _write(tmp_path, program=textwrap.dedent(code))
  done = _run([str(tmp_path / 'program.py')], tmp_path)
  assert done.returncode == 0, done.stderr


def test_t5x_itself_that_lacks_its_requirements_is_recognised(tmp_path):
  """Where the command runs in a process of the user, which has not called `install`."""
  (tmp_path / 't5x').mkdir()
  (tmp_path / 't5x/__init__.py').write_text('import airio_of_t5x\n')
  (tmp_path / 'run.gin').write_text("import old_project\ninclude 'recipes/keyword_cloze.gin'\n")
  (tmp_path / 'old_project.py').write_text('import t5x\n')
  argv = ['train', '--gin_file=run.gin', '--gin.MODEL_DIR=x']
  code = f'import sys; from t5x_lite import cli; sys.exit(cli.main({argv}))'
  done = _run(['-c', code], tmp_path)
  assert done.returncode == 2 and "'airio_of_t5x'" in done.stderr, done.stderr
  assert 'After t5x_lite.compat.install(), t5x means t5x_lite' in done.stderr
