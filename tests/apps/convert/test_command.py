"""`t5x_lite convert`: output, errors, and files after a kill."""

import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from t5x_lite import checkpoints
from t5x_lite.apps.convert import formats
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.command_line import cli
from tests.checkpoints.hugging_face import hugging_face_cases as cases

_ROOT = pathlib.Path(__file__).parents[3]
_FORMS = ('t5x_lite', 't5x', 'hugging_face')
# 27 MB, so that writing takes a while.
_LARGER = dataclasses.replace(
  cases.SMALL,
  vocab_size=4000,
  emb_dim=128,
  num_heads=4,
  head_dim=32,
  mlp_dim=256,
  num_encoder_layers=12,
  num_decoder_layers=12,
)


def _main(capsys, *argv):
  """Return (exit status, standard output, standard error)."""
  status = cli.main(argv)
  captured = capsys.readouterr()
  return status, captured.out, captured.err


def _make_folder(path, architecture=cases.SMALL, family='t5_1_1'):
  values = cases.values(architecture)
  cases.make_folder(
    path, cases.tensors(architecture, values), cases.config_of(architecture, family)
  )
  return values


def test_help(capsys):
  status, text, _ = _main(capsys, 'convert', '--help')
  assert status == 0
  for words in (
    'SOURCE OUTPUT',
    '--to FORM',
    'Flan-T5',
    '--max_shard_size SIZE',
    '500MB',
    'INITIAL_CHECKPOINT_PATH',
    't5x_lite convert runs/mine mine_for_transformers --to=hugging_face',
  ):
    assert words in text, words
  assert max(map(len, text.splitlines())) <= 120


def test_there_and_back(tmp_path, capsys):
  values = _make_folder(tmp_path / 'folder')
  status, text, noise = _main(
    capsys,
    'convert',
    str(tmp_path / 'folder'),
    str(tmp_path / 'ours'),
    '--to=t5x_lite',
    '--step=12',
  )
  assert (
    status == 0
    and f'Wrote {tmp_path}/ours/checkpoint_12' in text
    and '--gin_file=models/t5_1_1_small.gin' in text
  )
  assert (
    'tensor ' not in noise and '\r' not in noise
  )  # no progress of a few tensors, no line that is drawn over
  status, text, _ = _main(
    capsys,
    'convert',
    str(tmp_path / 'ours'),
    str(tmp_path / 'back'),
    '--to=hugging_face',
    '--dtype=bfloat16',
    '--max_shard_size=1kB',
  )
  assert status == 0 and 'T5ForConditionalGeneration.from_pretrained' in text and 'bfloat16' in text
  back = hugging_face.HuggingFaceFolder(tmp_path / 'back')
  for name, value in values.items():
    assert back.read_array(name).tobytes() == value.astype('bfloat16').tobytes()


@pytest.mark.parametrize(
  'flags, words',
  [
    ([], 'The following arguments are required: --to'),
    (['--to=hf'], f'`--to` must be one of {", ".join(map(repr, formats.FORMATS))}'),
    (
      ['--to=hugging_face', '--max_shard_size=5 apples'],
      "must be a size such as 5GB, 500MB or 2GiB, got '5 apples'",
    ),
    (
      ['--to=t5x', '--max_shard_size=5GB'],
      '`--max_shard_size` must be absent with --to=t5x, got 5000000000. It requires --to=hugging_face',
    ),
    (['--to=t5x', '--optimizer_state=keep'], 'has no optimizer state. Remove the flag.'),
    (['--to=t5x', '--stepp=3'], "Did you mean '--step'?"),
    (['--to=t5x', '--gin.X=3'], 'convert has no gin configuration'),
  ],
)
def test_rejections(tmp_path, capsys, flags, words):
  _make_folder(tmp_path / 'folder')
  status, text, error = _main(
    capsys, 'convert', str(tmp_path / 'folder'), str(tmp_path / 'out'), *flags
  )
  assert (status, text) == (2, '') and words in error
  assert [path.name for path in tmp_path.iterdir()] == ['folder']


# ----------------------------------------------------------------------------------------------------------------------
# Processes that end before their time


# With a limit on the size of files.
_LIMITED = """
import resource, sys
from t5x_lite.command_line import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
sys.exit(cli.main(sys.argv[1:]))
"""


# So slow that there is time for a signal.
_SLOW = """
import sys, time
from t5x_lite.command_line import cli
from t5x_lite.checkpoints import hugging_face
read = hugging_face.HuggingFaceFolder.read_array
hugging_face.HuggingFaceFolder.read_array = lambda self, name: time.sleep(0.05) or read(self, name)
sys.exit(cli.main(sys.argv[1:]))
"""


def _start(tmp_path, output, to, program=('-m', 't5x_lite')):
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(_ROOT), 'XLA_FLAGS': ''}
  return subprocess.Popen(
    [
      sys.executable,
      *program,
      'convert',
      str(tmp_path / 'source'),
      str(tmp_path / output),
      f'--to={to}',
    ],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def _wait_for_its_folder(process, tmp_path, output):
  while process.poll() is None and not list(tmp_path.glob(f'.{output}-*')):
    time.sleep(0.005)


def _check_sound(tmp_path, output, to, values):
  path = tmp_path / output
  if to == 't5x_lite':
    assert checkpoints.verify_checkpoint(path / 'checkpoint_0') is not None
  path = path if to == 'hugging_face' else path / 'checkpoint_0'
  source = sources.open_source(path)
  assert source.format == to
  read = source.read({f'target/{name}': (value.dtype, None) for name, value in values.items()})
  for name, value in values.items():
    assert read[f'target/{name}'].tobytes() == value.tobytes(), name


def _check_kills(tmp_path, num_kills, seconds):
  seed = int(os.environ.get('T5X_LITE_TEST_SEED', random.SystemRandom().randrange(2**31)))
  print(f'T5X_LITE_TEST_SEED={seed} chooses the moments of the kills.')
  rng = random.Random(seed)
  values = _make_folder(tmp_path / 'source', _LARGER)
  kills = 0
  while kills < num_kills:
    to = _FORMS[kills % 3] if num_kills > 1 else rng.choice(_FORMS)
    process = _start(tmp_path, to, to)
    _wait_for_its_folder(process, tmp_path, to)
    time.sleep(rng.uniform(0.0, seconds))
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), output
    kills += 1
    if (tmp_path / to).exists():  # A folder with this name is complete.
      _check_sound(tmp_path, to, to, values)
      if kills < num_kills:
        (tmp_path / to).rename(tmp_path / f'whole_{kills}')
  forms = _FORMS if num_kills > 1 else [to]
  for form in forms:
    left = list(tmp_path.glob(f'.{form}-*'))
    if (tmp_path / form).exists():
      continue
    process = _start(tmp_path, form, form)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert all(f'Removing {folder}, which a killed process has left' in output for folder in left)
    _check_sound(tmp_path, form, form, values)
    assert not list(tmp_path.glob(f'.{form}-*'))


def test_a_kill(tmp_path):
  _check_kills(tmp_path, 1, 0.3)


@pytest.mark.full
def test_many_kills(tmp_path):
  _check_kills(tmp_path, 15, 2.0)


def test_ctrl_c(tmp_path):
  _make_folder(tmp_path / 'source', _LARGER)
  process = _start(tmp_path, 'out', 't5x_lite', ['-c', _SLOW])
  _wait_for_its_folder(process, tmp_path, 'out')
  process.send_signal(signal.SIGINT)
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 130, output
  assert output.endswith('t5x_lite: interrupted.\n') and 'Traceback' not in output
  assert [path.name for path in tmp_path.iterdir()] == ['source']


@pytest.mark.parametrize(
  'to', ['t5x_lite', *(pytest.param(to, marks=pytest.mark.full) for to in _FORMS[1:])]
)
def test_files_that_may_not_be_so_large(tmp_path, to):
  _make_folder(tmp_path / 'source', _LARGER)
  process = _start(tmp_path, 'out', to, ['-c', _LIMITED])
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 2, output
  assert 'File too large' in output and 'rerun the command' in output and 'Traceback' not in output
  assert [path.name for path in tmp_path.iterdir()] == ['source']
