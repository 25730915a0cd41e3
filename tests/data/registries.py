"""Registries of tasks and sources as the package has them, for one test."""

from t5x_lite import lazy_names
from t5x_lite.data import builtin_tasks
from t5x_lite.data.sources import base


def isolate(monkeypatch):
  """Remove registered sources of other modules than the package's, and undo registrations after the test."""
  # Names are registered for the life of a process; the package has no public function that removes them.
  monkeypatch.setattr(builtin_tasks, '_REGISTRY', dict(builtin_tasks._REGISTRY))
  monkeypatch.setattr(base, '_SOURCES', lazy_names.LazyClasses(base.BUILT_IN))
