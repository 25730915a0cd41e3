"""The registry of partition rules for one test."""

import pytest

from t5x_lite import optimizers


@pytest.fixture
def rules(monkeypatch):
  """Return the rules; registrations of a test are undone after it."""
  # A user has no reason to undo a registration: there is no public function for it.
  monkeypatch.setattr(optimizers.OptaxStatePartitionRules, '_RULES', dict(optimizers.OptaxStatePartitionRules._RULES))
  return optimizers.OptaxStatePartitionRules
