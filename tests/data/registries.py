"""Registries of tasks and sources as the package has them, for one test."""

from t5x_lite import lazy_names
from t5x_lite.data import builtin_tasks
from t5x_lite.data.sources import base


def isolate(monkeypatch, *names):
  """Remove registered sources of other modules than the package's, and undo registrations after the test.

  Tasks with these names are removed too: an earlier test of the process may have registered them.
  """
  # Names are registered for the life of a process; the package has no public function that removes them.
  tasks = {name: task for name, task in builtin_tasks._REGISTRY.items() if name not in names}
  monkeypatch.setattr(builtin_tasks, '_REGISTRY', tasks)
  monkeypatch.setattr(base, '_SOURCES', lazy_names.LazyClasses(base.BUILT_IN))
