"""The command that starts a run again."""

import os
import shlex
import sys

from t5x_lite.runtime import cluster_environment as names


def test_a_launched_process_names_the_command_of_all(monkeypatch):
  own = shlex.join(sys.orig_argv)
  assert names.command_line() == own
  monkeypatch.setenv(names.COMMAND, 't5x_lite launch -n 2 -- train')
  monkeypatch.setenv(names.LAUNCHED, '1')  # an outer launch
  assert names.command_line() == own
  monkeypatch.setenv(names.LAUNCHED, str(os.getppid()))
  assert names.command_line() == 't5x_lite launch -n 2 -- train'
