"""Profiles of chosen steps: which ones, by which processes, and what is in their files."""

import contextlib
import gzip
import json
import logging

import jax
import jax.numpy as jnp
import pytest

from t5x_lite import runtime
from t5x_lite.errors import ConfigError
from tests.apps.train import toy_run


def _steps(folder):
  """Return the numbers of completed steps before each step of a profile, from the file for Perfetto."""
  (path,) = folder.glob('*.trace.json.gz')
  events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
  return sorted(
    int(event['args']['step_num']) for event in events if 'step_num' in event.get('args', {})
  )


def test_profiles_of_a_run_have_exactly_their_steps(tmp_path, caplog):
  caplog.set_level(logging.INFO, 't5x_lite')
  profile = runtime.ProfileConfig(start_steps=(6, 2, 3), host_tracer_level=1)
  toy_run.train(
    tmp_path,
    10,
    profile_steps=profile,
    stats_period=10,
    infer_eval_dataset_cfg=None,
    train_eval_dataset_cfg=None,
  )
  folder = tmp_path / 'train/plugins/profile'
  assert {path.name: _steps(path) for path in folder.iterdir()} == {
    'step_2': [2, 3, 4],
    'step_6': [6, 7, 8],
  }
  # TensorBoard reads the other file.
  assert all(list(path.glob('*.xplane.pb')) for path in folder.iterdir())
  assert [row['step'] for row in toy_run.lines(tmp_path)['train']] == [2, 5, 6, 9, 10]
  assert 'No profile starts after step 3: each must start at least 3 steps after' in caplog.text
  assert (
    'Profiling the steps 3 to 5.' in caplog.text
    and f'The profile is in {folder}/step_6.' in caplog.text
  )


def test_a_pair_is_one_profile():
  assert runtime.StepProfiler((2, 4), 'x').pause_steps == (2, 4)
  assert runtime.StepProfiler(runtime.ProfileConfig(start_steps=[5, 8]), 'x').pause_steps == (
    5,
    8,
    8,
    11,
  )
  assert runtime.StepProfiler(None, 'x').pause_steps == ()


def test_the_chosen_process_alone_writes_after_waiting(tmp_path, monkeypatch):
  profiler = runtime.StepProfiler(
    runtime.ProfileConfig(start_steps=[4], num_steps=2, processes=[1]), str(tmp_path)
  )
  waits = []

  def profile():
    profiler.before(4, lambda: waits.append('before'))
    jax.block_until_ready(jnp.ones(3) + 1)
    for step in (5, 6):
      profiler.after(step, lambda step=step: waits.append(step))

  profile()
  assert not waits and not list(tmp_path.iterdir())
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  profile()
  assert waits == ['before', 6] and list(tmp_path.rglob('*.xplane.pb'))


@pytest.mark.parametrize(
  'options, message',
  [
    ({'start_steps': []}, 'ProfileConfig.start_steps` must be a list of integers >= 0'),
    (
      {'start_steps': [1], 'num_steps': 0},
      'ProfileConfig.num_steps` must be an integer >= 1, got 0',
    ),
    (
      {'start_steps': [1], 'host_tracer_level': 4},
      'ProfileConfig.host_tracer_level` must be one of 0, 1, 2, 3, got 4',
    ),
    (
      {'start_steps': [1], 'python_tracer_level': 2},
      'ProfileConfig.python_tracer_level` must be one of 0, 1, got 2',
    ),
  ],
)
def test_options_out_of_range(options, message):
  with pytest.raises(ConfigError, match=message):
    runtime.ProfileConfig(**options)


def test_steps_and_processes_that_the_run_does_not_have():
  for cfg, message in (
    (
      {'start_steps': [1, 18]},
      r'within the steps of the run, 0 to 20, got \(18, 21\)\. '
      'Choose other steps, or raise TRAIN_STEPS.',
    ),
    ({'start_steps': [1], 'processes': [0, 1]}, r'indices of processes of the run, below 1, got'),
  ):
    with pytest.raises(ConfigError, match=message):
      runtime.StepProfiler(runtime.ProfileConfig(**cfg), 'x').check(0, 20)


@pytest.mark.parametrize(
  'name, words', [('start_trace', 'not started'), ('stop_trace', 'not written')]
)
def test_a_profile_that_fails_does_not_end_the_run(tmp_path, monkeypatch, caplog, name, words):
  def fail(*args, **kwargs):
    raise RuntimeError('FAILED_PRECONDITION')

  for function in ('start_trace', 'stop_trace'):
    monkeypatch.setattr(
      jax.profiler, function, fail if function == name else lambda *args, **kwargs: None
    )
  profiler = runtime.StepProfiler((1, 2), str(tmp_path))
  profiler.before(1, lambda: None)
  profiler.after(2, lambda: None)
  profiler.close()
  assert caplog.text.count(words) == 1 and 'FAILED_PRECONDITION' in caplog.text


def test_a_profile_is_copied_to_a_store(store, caplog):
  profiler = runtime.StepProfiler((1, 2), f'{store.root}/train')
  for _path, effects in (('step_1', None), (None, {'status': 403})):
    with contextlib.ExitStack() as stack:
      if effects:
        stack.enter_context(store.proxy.fault(operation='write', **effects))
        store.proxy.requests.clear()
        profiler = runtime.StepProfiler((1, 2), f'{store.root}/other')
      profiler.before(1, lambda: None)
      jnp.ones(3).block_until_ready()
      profiler.after(2, lambda: None)
    names = store.names()
    assert any(
      name.startswith('train/plugins/profile/step_1/') and name.endswith('.xplane.pb')
      for name in names
    )
    assert not any(name.startswith('other') for name in names)
  assert 'The profile that starts after step 1 was not written (PermissionError' in caplog.text
