"""A fork of T5X, whose own modules lie in the package `t5x` of the current folder."""

import re

import pytest

from t5x_lite.configuration import module_imports


@pytest.fixture(autouse=True)
def _unrestricted():
  yield
  module_imports.restrict(None)


def test_modules_that_t5x_does_not_have_are_those_of_the_fork(run_form, tmp_path, capfd):
  assert run_form('fork', 'train', 'run.gin', '--dry_run', MODEL_DIR=tmp_path) == 0
  out, err = capfd.readouterr()
  # The recorded configuration imports the modules of the fork, and otherwise t5x_lite.
  assert re.search(r'^t5x.standard_words_v4.schedule.peak = 0.25$', out, re.MULTILINE)
  assert re.search(r'^tiny_network.config.width = 16$', out, re.MULTILINE)
  assert re.search(r'^import t5x.standard_words_v4$', out, re.MULTILINE)
  assert 'from t5x_lite import models' in out
  # Files of T5X's names are not run, and one warning has the names that are missing here.
  warning = re.search('Files of the folder t5x with the names .*', err)[0]
  assert 't5x/utils.py (log_to_our_tracker)' in warning
  assert err.count('log_to_our_tracker') == 1


@pytest.mark.parametrize(
  'allowed, status',
  [('t5x.standard_words_v4,t5x.examples.t5.tiny_network,tests', 0), ('t5x,tests', 0), ('tests', 2)],
)
def test_modules_of_a_fork_are_those_of_the_user(run_form, tmp_path, capfd, allowed, status):
  flags = ['--dry_run', f'--allowed_modules={allowed}']
  assert run_form('fork', 'train', 'run.gin', *flags, MODEL_DIR=tmp_path) == status
  err = capfd.readouterr().err
  assert status == 0 or "must contain 't5x.standard_words_v4' to import it" in err, err


@pytest.mark.parametrize(
  'line, message',
  [
    (
      'from t5x import standard_words_v5',
      "T5X has no module 't5x.standard_words_v5'.*in the folder t5x of the current folder",
    ),
    ('import t5x.standard_words_v4\nt5x.standard_words_v4.scedule.peak = 1', "mean 'schedule'"),
    (
      'from t5x import utils\nutils.log_to_our_tracker.x = 1',
      't5x/utils.py defines it, and is not run. Move',
    ),
    ('from t5x import utils\nutils.nothing.x = 1', "t5x.utils has no 'nothing'"),
  ],
)
def test_errors(run_form, tmp_path, capfd, line, message):
  path = tmp_path / 'more.gin'
  path.write_text(f'from __gin__ import dynamic_registration\n{line}\n')
  flags = ['--dry_run', f'--gin_file={path}']
  assert run_form('fork', 'train', 'run.gin', *flags, MODEL_DIR=tmp_path) == 2
  err = capfd.readouterr().err
  assert re.search(message, err, re.DOTALL), err
