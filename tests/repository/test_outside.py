"""Files for GitHub, pre-commit and citations agree with the makefile, the locks and the version of the package."""

import pathlib
import re

import pytest
import yaml

import t5x_lite

_ROOT = pathlib.Path(__file__).parents[2]
_WORKFLOWS = sorted((_ROOT / '.github/workflows').glob('*.yml'))
_PINNED = re.compile(r'[\w-]+/[\w-]+@(v\d+|release/v\d+)|\./\.github/workflows/[\w-]+\.yml')


def _read(path):
  return yaml.safe_load((_ROOT / path).read_text(encoding='utf-8'))


def _jobs():
  """Returns (name of the workflow, name of the job, job) for all workflows."""
  return [(path.name, *item) for path in _WORKFLOWS for item in _read(path)['jobs'].items()]


def _steps():
  return [(file, name, step) for file, name, job in _jobs() for step in job.get('steps', [])]


def _pins(lock, package):
  text = (_ROOT / 'requirements' / lock).read_text()
  return re.findall(rf'^{package}==(\S+)', text, re.MULTILINE)


def test_there_is_a_workflow_for_each_task():
  assert [path.stem for path in _WORKFLOWS] == ['ci', 'docs', 'interop', 'release']


@pytest.mark.parametrize('path', _WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_has_few_permissions_and_an_end(path):
  workflow = _read(path)
  assert workflow['permissions'] == {'contents': 'read'}
  assert workflow['concurrency']['group'].startswith(f'{path.stem}-')
  for name, job in workflow['jobs'].items():
    assert 'uses' in job or job['timeout-minutes'] <= 60, name
    granted = set(job.get('permissions', ()))
    assert granted <= {'pages', 'id-token'}, name
    # A job that may publish runs no code of the checkout.
    uses_checkout = any('checkout' in step.get('uses', '') for step in job.get('steps', ()))
    assert not (granted and uses_checkout), name


def test_actions_are_pinned_by_their_major_version():
  used = [(file, job['uses']) for file, _, job in _jobs() if 'uses' in job]
  used += [(file, step['uses']) for file, _, step in _steps() if 'uses' in step]
  assert len(used) > 10
  assert not [item for item in used if not _PINNED.fullmatch(item[1])]
  for _, action in used:
    if action.startswith('./'):
      assert (_ROOT / action).is_file(), action
  for file, name, step in _steps():
    if step.get('uses', '').startswith('actions/checkout@'):
      assert step['with'] == {'persist-credentials': False}, (file, name)


def test_called_targets_exist():
  makefile = (_ROOT / 'Makefile').read_text()
  targets = set(re.findall(r'^([a-z][a-z0-9-]*):.*## ', makefile, re.MULTILINE))
  called = {
    (file, target)
    for file, _, step in _steps()
    for target in re.findall(r'\bmake ([a-z][a-z0-9-]*)', step.get('run', ''))
  }
  assert {target for _, target in called} == {
    'lint',
    'types',
    'test',
    'test-docs',
    'test-interop',
    'docs',
    'dist',
  }
  assert not {call for call in called if call[1] not in targets}


def test_each_python_has_a_lock():
  tested = _read('.github/workflows/ci.yml')['jobs']['test']['strategy']['matrix']['python']
  locks = {path.stem for path in (_ROOT / 'requirements').glob('lock-3.*.txt')}
  assert {f'lock-{version}' for version in tested} == locks and len(tested) == len(locks)
  used = {
    str(step['with']['python-version'])
    for _, _, step in _steps()
    if 'setup-python' in step.get('uses', '')
  }
  for version in {*tested, *used} - {'${{ matrix.python }}'}:
    assert (_ROOT / f'requirements/lock-{version}.txt').is_file(), version


def test_caches_depend_on_files_that_exist():
  for file, name, step in _steps():
    patterns = step.get('with', {}).get('cache-dependency-path', '')
    for pattern in patterns.replace('${{ matrix.python }}', '3.12').split():
      assert list(_ROOT.glob(pattern)), (file, name, pattern)


def test_interop_runs_on_changes_of_what_it_compares():
  # YAML 1.1 reads the key `on` as True.
  triggers = _read('.github/workflows/interop.yml')[True]
  assert triggers['schedule'] and triggers['push']['paths'] == triggers['pull_request']['paths']
  paths = triggers['push']['paths']
  for pattern in paths:
    assert list(_ROOT.glob(pattern.removesuffix('/**'))), pattern
  caches = [
    step.get('with', {}).get('cache-dependency-path', '')
    for file, _, step in _steps()
    if file == 'interop.yml'
  ]
  assert {'Makefile', 'setup.py', *' '.join(caches).split()} <= set(paths)


def test_a_bug_report_has_what_reproduces_it():
  form = _read('.github/ISSUE_TEMPLATE/bug.yml')
  fields = {field['id']: field for field in form['body']}
  assert {'command', 'gin', 'message', 'versions'} <= set(fields)
  assert 't5x_lite --version' in fields['versions']['attributes']['description']
  for name in ('bug', 'feature'):
    form = _read(f'.github/ISSUE_TEMPLATE/{name}.yml')
    assert form['name'] and form['description']
    for field in form['body']:
      assert field['type'] == 'textarea'
      assert field['attributes']['label'] and field['attributes']['description']
      assert isinstance(field['validations']['required'], bool)
  for link in _read('.github/ISSUE_TEMPLATE/config.yml')['contact_links']:
    assert set(link) == {'name', 'url', 'about'}


def test_pre_commit_has_the_linter_of_the_locks():
  hooks = [hook for repo in _read('.pre-commit-config.yaml')['repos'] for hook in repo['hooks']]
  assert [hook['id'] for hook in hooks] == ['ruff-check', 'ruff-format']
  pinned = {text for hook in hooks for text in hook['additional_dependencies']}
  locks = [
    path.name
    for path in (_ROOT / 'requirements').glob('lock-*.txt')
    if re.fullmatch(r'lock-3\.\d+\.txt', path.name)
  ]
  assert len(locks) >= 3
  for lock in locks:
    assert pinned == {f'ruff=={version}' for version in _pins(lock, 'ruff')}, lock


def test_citation_has_the_version():
  citation = _read('CITATION.cff')
  assert citation['cff-version'] == '1.2.0' and citation['title'].startswith('t5x_lite')
  assert citation['version'] == t5x_lite.__version__
  assert citation['authors'] == [{'name': 'The t5x_lite authors'}]


def test_changelog_is_short_and_has_the_version():
  lines = (_ROOT / 'CHANGELOG.md').read_text(encoding='utf-8').splitlines()
  assert f'## {t5x_lite.__version__}' in lines[2] and len(lines) <= 60
