"""Commands that take a run's directory: a damaged newest checkpoint, and code that a run's config.gin names."""

import io
import pathlib
import shutil
import sys

import gin
import pytest

from moe import __main__ as moe_program
from t5x_lite import errors
from t5x_lite import notebook
from t5x_lite.apps.common import runs
from t5x_lite.command_line import cli
from t5x_lite.storage import files
from tests.apps.common import cloze_run


@pytest.fixture(scope='module')
def saved_run(tmp_path_factory):
  """A run's directory, as if trained: random parameters at steps 3 and 5, metrics, and the configuration."""
  model_dir = tmp_path_factory.mktemp('runs') / 'cloze'
  cloze_run.save(model_dir, {'inputs': 16, 'targets': 4}, run={'start_step': 2})
  (model_dir / 'train').mkdir()
  (model_dir / 'train/metrics.jsonl').write_text('{"step": 3, "wall_time": 0.0, "loss": 1.0}\n')
  return model_dir


@pytest.fixture
def run(saved_run, tmp_path):
  """A copy that may be spoilt."""
  yield shutil.copytree(saved_run, tmp_path / 'run')
  gin.clear_config()


def _damage(path: pathlib.Path) -> None:
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


# ---- A damaged newest checkpoint -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'program, words, shows_step',
  [
    pytest.param(
      't5x_lite',
      "export RUN --gin.export_lib.save.inference_mode='score'",
      'step 3',
      marks=pytest.mark.full,
    ),
    pytest.param('t5x_lite', 'chat RUN', '', marks=pytest.mark.full),
    ('t5x_lite', 'convert RUN OUT --to=t5x_lite', 'checkpoint_3'),
    ('t5x_lite', 'eval RUN --dry_run', 'checkpoint_3'),
    pytest.param(
      't5x_lite',
      'infer RUN --input=TEXTS --output=OUT.jsonl',
      'checkpoint_3',
      marks=pytest.mark.full,
    ),
    ('moe', 'surgery show RUN', ''),
  ],
)
def test_commands_take_the_newest_sound_checkpoint_of_a_run(
  run, tmp_path, capsys, monkeypatch, program, words, shows_step
):
  _damage(max((run / 'checkpoint_5/state/d').iterdir(), key=lambda path: path.stat().st_size))
  (tmp_path / 'texts').write_text('<extra_id_0> x\n')

  def call(folder):
    monkeypatch.setattr(
      sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'<extra_id_0> x\n'), encoding='utf-8')
    )
    argv = [
      word.replace('RUN', str(folder))
      .replace('TEXTS', f'{tmp_path}/texts')
      .replace('OUT', f'{tmp_path}/out')
      for word in words.split()
    ]
    status = cli.main(argv) if program == 't5x_lite' else cli.main(argv, moe_program.PROGRAM)
    return status, *capsys.readouterr()

  if (
    'show' not in words and 'dry_run' not in words
  ):  # These read no values of a checkpoint that is named.
    status, _, err = call(run / 'checkpoint_5')
    assert (
      status == 2
      and 'checkpoint_5' in err
      and 'is damaged' in err
      and 'Trying an older checkpoint' not in err
    )
  status, out, err = call(run)
  assert status == 0, err
  assert (
    f"warning: The checkpoint '{run}/checkpoint_5' is damaged" in err
    and 'Trying an older checkpoint.' in err
  )
  assert shows_step in out + err


def test_plot_counts_from_the_start_that_any_readable_checkpoint_says(run, tmp_path, capsys):
  _damage(run / 'checkpoint_5/manifest.json')
  assert cli.main(['plot', str(run), '--from_start', f'--out={tmp_path}/plot.svg']) == 0
  err = capsys.readouterr().err
  assert 'checkpoint_5' in err and 'An earlier checkpoint is read instead.' in err
  _damage(run / 'checkpoint_3/manifest.json')
  assert cli.main(['plot', str(run), '--from_start', f'--out={tmp_path}/plot.svg']) == 2
  assert (
    'Omit from_start (--from_start), or save a checkpoint in the run.' in capsys.readouterr().err
  )


def test_open_run_takes_the_newest_sound_checkpoint(run, caplog):
  _damage(run / 'checkpoint_5/manifest.json')
  assert notebook.open_run(str(run)).step == 3
  assert 'Trying an older checkpoint.' in caplog.text


# ---- Flags -----------------------------------------------------------------------------------------------------------


def test_search_paths_must_exist(run, capsys):
  for argv in (
    ['eval', str(run), '--dry_run'],
    ['train', '--gin_file=recipes/keyword_cloze.gin', '--dry_run'],
  ):
    assert cli.main([*argv, f'--gin_search_paths={run},/nope']) == 2
    assert (
      "`--gin_search_paths` must be existing folders, separated by commas, got '/nope'"
      in capsys.readouterr().err
    )


# ---- Code that a configuration names ---------------------------------------------------------------------------------

_PLANTED = """
import subprocess
import t5x_lite.command_line.cli
STOLEN = @planted/subprocess.check_output()
planted/subprocess.check_output.args = ['touch', {target!r}]
t5x_lite.apps.train.train.random_seed = %STOLEN
"""


def _plant(run, target, text=_PLANTED):
  """Add text to the run's config.gin, before its first binding."""
  path = run / 'config.gin'
  lines = path.read_text().splitlines()
  last = max(i for i, line in enumerate(lines) if line.startswith(('import ', 'from ')))
  added = text.format(target=str(target)).splitlines()
  imports = [line for line in added if line.startswith(('import ', 'from '))]
  path.write_text(
    '\n'.join(
      [
        *lines[: last + 1],
        *imports,
        *lines[last + 1 :],
        *(line for line in added if line not in imports),
      ]
    )
    + '\n'
  )
  return next(i for i, line in enumerate(path.read_text().splitlines(), 1) if line == imports[0])


def test_modules_that_a_run_imports_are_logged_and_can_be_restricted(run, tmp_path, capsys):
  line = _plant(run, tmp_path / 'touched')
  argv = ['eval', str(run), '--dry_run']
  assert cli.main([*argv, '--allowed_modules=tests']) == 2
  err = capsys.readouterr().err
  assert (
    f"config.gin:{line}: `--allowed_modules` must contain 'subprocess'" in err
    and "got 'tests'" in err
  )
  assert 'importing subprocess' not in err
  cli.main(argv)
  assert f'config.gin:{line}: importing subprocess, which runs its code.' in capsys.readouterr().err
  assert cli.main([*argv, '--allowed_modules=a b']) == 2
  assert '`--allowed_modules` must be names of modules' in capsys.readouterr().err


@pytest.mark.parametrize(
  'name, home',
  [
    ('t5x_lite.command_line.cli.os.system', 'posix'),
    ('t5x_lite.command_line.errors.sysconfig.sys.exit', 'sys'),
    ('t5x_lite.command_line.cli.contextlib.redirect_stdout', 'contextlib'),
  ],
)
def test_imports_of_an_allowed_module_are_not_allowed(run, capsys, name, home):
  _plant(run, None, f'import t5x_lite.command_line.cli\nSTOLEN = @{name}()\n')
  assert cli.main(['eval', str(run), '--dry_run', '--allowed_modules=tests']) == 2
  assert f'must contain {home!r}, where {name} is defined' in capsys.readouterr().err


def test_a_valid_run_opens_with_its_modules(run, tmp_path, capsys, monkeypatch):
  argv = ['eval', str(run), '--dry_run', '--allowed_modules=tests.partitioning']
  assert cli.main(argv) == 0
  err = capsys.readouterr().err
  assert 'importing tests.partitioning.one_device' in err
  assert 'importing t5x_lite' not in err and 'importing jax' not in err
  (tmp_path / 'planted_tasks.py').write_text(f'open({str(tmp_path / "touched")!r}, "w")\n')
  monkeypatch.syspath_prepend(tmp_path)
  assert cli.main([*argv, '--gin.MIXTURE_OR_TASK_MODULE=planted_tasks']) == 2
  assert (
    "DatasetConfig.module: `--allowed_modules` must contain 'planted_tasks'"
    in capsys.readouterr().err
  )
  assert not (tmp_path / 'touched').exists()


# ---- Stores ----------------------------------------------------------------------------------------------------------


def test_a_run_in_a_store(saved_run, store):
  folder = f'{store.root}/runs/cloze'
  for path in saved_run.rglob('*'):
    if path.is_file():
      files.write(f'{folder}/{path.relative_to(saved_run).as_posix()}', path.read_bytes())
  found = runs.find_run(f'{folder}/')
  assert found.model_dir == folder and found.mode == 'latest'
  assert runs.find_run(f'{folder}/checkpoint_3') == (folder, f'{folder}/checkpoint_3', 'specific')
  named = ['runs/eval.gin', f'{folder}/config.gin', 'models/t5_1_1_small.gin']
  assert runs.gin_files_of(found, named) == [
    'runs/eval.gin',
    f'{folder}/config.gin',
    'models/t5_1_1_small.gin',
  ]
  with pytest.raises(
    errors.ConfigError,
    match="/cloz' must be a run directory .* missing path. Did you mean 'cloze'?",
  ):
    runs.find_run(f'{store.root}/runs/cloz')
  files.path(f'{folder}/config.gin').unlink()
  with pytest.raises(errors.ConfigError, match="/runs/cloze' has no config.gin"):
    runs.gin_files_of(found, [])
