"""Candidates of command lines, from the parsers and files that the commands read."""

import pytest

from t5x_lite.apps.commands import COMMANDS
from t5x_lite.apps.completion import candidates
from t5x_lite.configuration import syntax as gin_syntax


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  (tmp_path / 'runs/cloze').mkdir(parents=True)
  (tmp_path / 'runs/mesh').mkdir()
  (tmp_path / 'recipe.gin').write_text(
    "include 'recipes/keyword_cloze.gin'\nMY_FLAG = False  # own\nMY_RATE = 0.5\n"
  )
  (tmp_path / '$(touch y)').mkdir()
  left_out = ('with space.gin', '$(touch x).gin', '.hidden.gin', '~root', '=ls', '--help')
  for name in ('recipe.txt', '$(touch y)/a.gin', *left_out):
    (tmp_path / name).write_text('')
  monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
  'line, expected',
  [
    ('t5x_lite tr', ['train', 'track']),
    ('A=1 B=2 /a/t5x_lite tr', ['train', 'track']),
    ('t5x_lite launch -n 2 -- tr', ['train', 'track']),
    ('t5x_lite --v', ['--version']),
    ('t5x_lite train --gin_s', ['--gin_search_paths=']),
    ('t5x_lite train --dry', ['--dry_run']),
    ('t5x_lite train --gin', ['--gin_file=', '--gin.', '--gin_bindings=', '--gin_search_paths=']),
    ('t5x_lite plot runs --gin', []),
    ('t5x_lite train --log_level=w', ['--log_level=warning']),
    ('t5x_lite train --log_level w', ['warning']),
    ('t5x_lite track x --to=', ['--to=wandb', '--to=mlflow', '--to=tensorboard']),
    ('t5x_lite completion ', ['bash', 'zsh', 'fish']),
    ('t5x_lite chat ru', ['runs/']),
    ('t5x_lite chat runs/', ['runs/cloze/', 'runs/mesh/']),
    ('t5x_lite chat "runs/', ['runs/cloze/', 'runs/mesh/']),
    ('t5x_lite chat runs/cloze ', ['recipe.gin', 'recipe.txt', 'runs/']),
    ('t5x_lite train --gin.MODEL_DIR=runs/m', ['--gin.MODEL_DIR=runs/mesh/']),
    ('t5x_lite train --gin_file=rec', ['--gin_file=recipe.gin', '--gin_file=recipes/']),
    ('t5x_lite train --gin_file rec', ['recipe.gin', 'recipes/']),
    (
      't5x_lite train --gin_file=recipes/keyword_cloze_f',
      ['--gin_file=recipes/keyword_cloze_finetune.gin'],
    ),
    ('t5x_lite train --gin_file=recipe.gin --gin.MY', ['--gin.MY_FLAG=', '--gin.MY_RATE=']),
    (
      't5x_lite train --gin_file=recipe.gin --gin.MY_FLAG=',
      ['--gin.MY_FLAG=False', '--gin.MY_FLAG=True'],
    ),
    ('t5x_lite train --gin_file=recipe.gin --gin.TRAIN_S', ['--gin.TRAIN_STEPS=']),
    ('t5x_lite train --gin_file recipe.gin --gin.TRAIN_S', ['--gin.TRAIN_STEPS=']),
    ('t5x_lite unknown ru', ['runs/']),
    ("t5x_lite chat '$(touch y)'/", []),
    ("t5x_lite train '--gin.$(touch y)'=ru", []),
    ('t5x_lite chat with\\ ', []),
    ('t5x_lite chat \\', ['recipe.gin', 'recipe.txt', 'runs/']),
    ('t5x_lite', []),
    ('', []),
  ],
)
def test_candidates(line, expected):
  assert candidates.candidates(line) == expected


def test_commands_have_the_order_of_help():
  assert candidates.candidates('t5x_lite ') == [*COMMANDS, '--help', '--version']


def test_macros_without_files_are_those_of_all_packaged_files():
  found = candidates.candidates('t5x_lite train --gin.')
  assert {'--gin.TRAIN_STEPS=', '--gin.NUM_PARTITIONS=', '--gin.NUM_EXPERTS='} <= set(found)
  assert '--gin.MY_RATE=' not in found and found == sorted(found)


def test_packaged_files_are_completed_folder_by_folder():
  name = 'partitioning/tensor_parallel.gin'
  assert name in gin_syntax.packaged_files()
  assert candidates.candidates('t5x_lite train --gin_file=part') == ['--gin_file=partitioning/']
  assert f'--gin_file={name}' in candidates.candidates('t5x_lite train --gin_file=partitioning/')
