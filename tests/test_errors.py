"""Remedies name the package of an index, or the command of a checkout."""

import importlib
import importlib.metadata
import pathlib

from packaging.requirements import Requirement
import pytest

from t5x_lite import errors

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
  'extra, package',
  [
    ('seqio', 'tensorflow'),
    ('plot', 'matplotlib'),
    ('grain', 'grain'),
    ('cuda', 'jax'),
    ('tpu', 'jax'),
  ],
)
def test_remedies_name_packages_of_an_index(extra, package):
  _, *quoted = errors.install_command(extra).removeprefix('pip ').split(' ')
  requirements = [Requirement(text.strip("'")) for text in quoted]
  assert package in {requirement.name for requirement in requirements}
  assert 't5x_lite' not in {requirement.name for requirement in requirements}
  text = (_ROOT / 'setup.py').read_text()
  assert all(requirement.name in text for requirement in requirements)


def test_remedy_in_a_checkout_that_is_not_installed(monkeypatch):
  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, 'requires', missing)
  assert errors.install_command('plot') == f"pip install -e '{_ROOT}[plot]'"
