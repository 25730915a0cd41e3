"""The registry of partition rules for one test."""

import pytest

from t5x_lite import optimizers


@pytest.fixture
def rules(monkeypatch):
  """Return the rules; registrations of a test are undone after it."""
  # Users never undo a registration, so the package has no public function for it.
  monkeypatch.setattr(
    optimizers.OptaxStatePartitionRules, '_rules', dict(optimizers.OptaxStatePartitionRules._rules)
  )
  return optimizers.OptaxStatePartitionRules


@pytest.fixture
def forget_rules(rules):
  """Return a function that removes all rules, also those for optax, as before the first look-up."""
  return lambda: rules._rules.clear()  # `rules` has replaced the mapping.
