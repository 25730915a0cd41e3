"""Versions that `t5x_lite --version` prints for bug reports."""

import importlib.metadata
import pathlib
import platform
import re

import t5x_lite
from t5x_lite.command_line import versions

_ROOT = pathlib.Path(__file__).parents[2]


def test_required_versions_are_those_of_the_modules():
  found = versions.installed_versions()
  assert [*found][:2] == ['t5x_lite', 'python']
  assert found['t5x_lite'] == t5x_lite.__version__
  assert found['python'] == platform.python_version()
  for name in ('jax', 'jaxlib', 'flax', 'optax', 'numpy'):
    assert found[name] == __import__(name).__version__
  assert found['orbax-checkpoint'] == importlib.metadata.version('orbax-checkpoint')


def test_all_packages_of_setup_are_known(monkeypatch):
  setup = (_ROOT / 'setup.py').read_text()
  required = re.search(r'install_requires=\[(.*?)\n  \]', setup, re.DOTALL)[1]
  extras = [
    re.search(rf"'{name}': \[(.*?)\]", setup, re.DOTALL)[1]
    for name in ('seqio', 'gcs', 's3', 'hub', 'plot', 'grain')
  ]
  monkeypatch.setattr(importlib.metadata, 'version', lambda name: '1.0')
  named = re.findall(r"'([A-Za-z0-9_-]+)>=", '\n'.join([required, *extras]))
  assert len(named) > 15 and not set(named) - set(versions.installed_versions())


def test_optional_packages_are_left_out_and_required_ones_are_named_if_missing(monkeypatch):
  installed = {'jax': '0.12.0', 'grain': '0.2.18'}

  def version(name):
    if name not in installed:
      raise importlib.metadata.PackageNotFoundError(name)
    return installed[name]

  monkeypatch.setattr(importlib.metadata, 'version', version)
  found = versions.installed_versions()
  assert found['jax'] == '0.12.0' and found['grain'] == '0.2.18'
  assert found['flax'] == 'not installed'
  assert not {'seqio', 'tensorflow', 'tensorflow-cpu', 'libtpu'} & set(found)


def test_description_has_a_line_for_each():
  lines = versions.describe().splitlines()
  assert lines[0] == f't5x_lite {t5x_lite.__version__}'
  assert lines[-1] == f'platform {platform.system()} {platform.machine()}'
  assert {line.partition(' ')[0] for line in lines[:-1]} == set(versions.installed_versions())
