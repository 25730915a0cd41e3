"""Runs with an adapter: what their checkpoints have, and what the base may not become."""

import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from t5x_lite import adapters
from t5x_lite import checkpoints
from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.apps import evaluate
from t5x_lite.apps.convert import run as convert
from t5x_lite.checkpoints import builders
from t5x_lite.checkpoints import manifest as manifest_lib
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.folders import disk
from t5x_lite.errors import CheckpointDamagedError, CheckpointError, ConfigError, SaveError
from t5x_lite.networks import param_layouts
from t5x_lite.storage import files
from t5x_lite.storage import hub
from t5x_lite.trainer import averaging
from tests import hub_cache
from tests import processes
from tests import stores
from tests.apps.train import adapter_run
from tests.apps.train import toy_run

_ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return adapter_run.train_base(tmp_path_factory.mktemp('base'))


@pytest.fixture(scope='module')
def run(tmp_path_factory, base):
  """A run from step 2 to step 8, with checkpoints of steps 3, 6 and 8."""
  model_dir = tmp_path_factory.mktemp('run')
  adapter_run.train(model_dir, base=base)
  return model_dir


def _compare_all_bytes(path):
  sources.check_base(sources.recorded_base(path), path, all_bytes=True)


def _copy(run, tmp_path):
  shutil.copytree(run, tmp_path / 'run')
  return tmp_path / 'run'


def _params(path):
  found = checkpoints.load(path)['target']
  return tree_utils.flatten_dict(found)


def test_contents_of_checkpoints(run, base):
  path = run / 'checkpoint_8'
  own = sources.open_source(path).own
  of_base = set(checkpoints.open_source(base).shapes())
  params = {name for name in own.shapes() if name.startswith('target/')}
  assert params and not params & of_base
  assert {name.rpartition('/')[2] for name in params} == {'lora_a', 'lora_b'}
  assert own.manifest.num_data_processes == 1 and own.manifest.step == 8
  before, after = _params(base), _params(path)
  for name, value in before.items():
    np.testing.assert_array_equal(after[name], value)
  assert not np.all(after['decoder/layers_1/self_attention/query/lora_b'] == 0)


@pytest.mark.parametrize('layout', ['t5', 'scalable_t5', 'scan'])
def test_a_resumed_run_equals_an_uninterrupted_one(run, base, tmp_path, layout):
  options = {
    't5': {},
    'scalable_t5': {'layout': {'param_layout': 'scalable_t5'}},
    'scan': {'layout': {'scan_layers': True}},
  }[layout]
  whole = run
  if layout != 't5':
    whole = tmp_path / 'whole'
    adapter_run.train(whole, base=base, **options)
  for num_steps in (6, 8):
    adapter_run.train(tmp_path / 'run', num_steps, base=base, **options)
  toy_run.assert_same_run(whole, tmp_path / 'run', 8)
  names = set(sources.open_source(whole / 'checkpoint_8').own.shapes())
  has_stacks = any('/decoder/decoder/' in name for name in names)
  assert has_stacks == (layout == 'scalable_t5')


def test_the_log_line_of_a_save(run, base, tmp_path, capfd, monkeypatch):
  monkeypatch.chdir(os.path.dirname(os.path.dirname(base)))
  adapter_run.train(_copy(run, tmp_path), 9, base=base)
  shown = os.path.relpath(base)
  assert f'(adapter, 0.0 MiB; base {shown}): ' in capfd.readouterr().err


def test_a_moved_base(run, base, tmp_path):
  """The message of the missing base is followed to the letter; later checkpoints record the new path."""
  model_dir = _copy(run, tmp_path)
  moved = tmp_path / 'moved'
  shutil.copytree(base, moved)
  old = str(tmp_path / 'gone')
  _record(model_dir / 'checkpoint_8', path=old)
  with pytest.raises(CheckpointError, match=r'got a missing folder.*INITIAL_CHECKPOINT_PATH=PATH'):
    adapter_run.train(model_dir, 9)
  with pytest.raises(CheckpointError, match=r'got a missing folder'):
    adapter_run.train(model_dir, 9, base=old)  # the command of the first start
  adapter_run.train(model_dir, 9, base=moved)
  assert sources.recorded_base(model_dir / 'checkpoint_9')['path'] == str(moved)
  adapter_run.train(model_dir, 10)
  whole = tmp_path / 'whole'
  adapter_run.train(whole, 10, base=base)
  _assert_equal(whole / 'checkpoint_10', model_dir / 'checkpoint_10')


def _assert_equal(a, b):
  found, expected = (tree_utils.flatten_dict(checkpoints.load(path)) for path in (a, b))
  assert set(found) == set(expected)
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)


def _record(folder, **changes):
  """Change the record of the base in a manifest."""
  found = manifest_lib.read(folder)
  metadata = {**found.metadata, 'base': {**found.metadata['base'], **changes}}
  manifest_lib.write(folder, dataclasses.replace(found, metadata=metadata))


@pytest.mark.parametrize('with_newer', [False, True])
def test_a_run_directory_as_base(tmp_path, base, with_newer):
  """A base is a single checkpoint: newer ones of its run do not count, and a moved run has it under its name."""
  of_base = tmp_path / 'base'
  shutil.copytree(os.path.dirname(base), of_base)
  cfg = adapter_run.restore_cfg(of_base, mode='latest')
  adapter_run.train(tmp_path / 'run', 5, restore=cfg)
  if with_newer:
    adapter_run.train_base(of_base, 4)
  adapter_run.train(tmp_path / 'run', 6, restore=cfg)
  moved = tmp_path / 'moved'
  shutil.move(of_base, moved)
  adapter_run.train(tmp_path / 'run', 7, restore=adapter_run.restore_cfg(moved, mode='latest'))
  recorded = sources.recorded_base(tmp_path / 'run' / 'checkpoint_7')
  assert recorded['path'] == str(moved / 'checkpoint_2')


def test_a_base_of_the_hub(tmp_path, base, monkeypatch):
  """The commit is recorded: a newer one of the same name does not count."""
  cache = hub_cache.use(tmp_path / 'cache', monkeypatch)
  folder = tmp_path / 'folder'
  convert.convert(base, str(folder), to='hugging_face')
  hub_cache.add(cache, 'google/toy', folder)
  adapter_run.train(tmp_path / 'run', 3, base='hf://google/toy')
  recorded = sources.recorded_base(tmp_path / 'run' / 'checkpoint_3')
  assert recorded['path'] == f'hf://google/toy@{hub_cache.COMMIT}'
  refs = cache / 'models--google--toy' / 'refs'
  newer = hub_cache.COMMIT[::-1]
  shutil.copytree(refs.parent / 'snapshots' / hub_cache.COMMIT, refs.parent / 'snapshots' / newer)
  (refs / 'main').write_text(newer)
  hub.local_folder.cache_clear()
  adapter_run.train(tmp_path / 'run', 4, base='hf://google/toy')
  assert sources.recorded_base(tmp_path / 'run' / 'checkpoint_4') == recorded


def test_another_base(run, base, tmp_path):
  model_dir = _copy(run, tmp_path)
  other = adapter_run.train_base(tmp_path / 'other', 3)
  with pytest.raises(CheckpointError) as error:
    adapter_run.train(model_dir, 9, base=other)
  for path in (base, other):
    identity = checkpoints.identify_base(checkpoints.open_source(path), str(path))
    assert identity['index_sha256'][:16] in str(error.value)
  adapter_run.train(model_dir, 9, base=base)


def test_verification_of_all_bytes(run, base, tmp_path):
  model_dir = _copy(run, tmp_path)
  changed = tmp_path / 'changed'
  shutil.copytree(base, changed)
  data = max((f for f in changed.rglob('d/*') if f.is_file()), key=lambda f: f.stat().st_size)
  content = bytearray(data.read_bytes())
  content[len(content) // 2] ^= 1
  data.write_bytes(content)
  with pytest.raises(CheckpointDamagedError, match='changed contents'):
    adapter_run.train(model_dir, 9, base=changed, verify_base=True)
  assert not (model_dir / 'checkpoint_9').exists()
  adapter_run.train(model_dir, 9, base=base, verify_base=True)
  with pytest.raises(ConfigError, match=r'`train\.verify_base` must be False without an adapter'):
    toy_run.train(tmp_path / 'full', 2, verify_base=True)


def test_a_base_that_is_overwritten_during_the_run(base, tmp_path, caplog):
  """Nothing is lost: checkpoints then have all parameters, and the remedy of the warning resumes the run."""
  of_base = tmp_path / 'base'
  shutil.copytree(base, of_base)

  def overwrite(event):
    if event.kind == 'save_committed' and event.details['checkpoint'] == 3:
      shutil.rmtree(of_base)

  adapter_run.train(tmp_path / 'run', 9, base=of_base, event_fns=overwrite)
  assert 'All parameters are saved from now on' in caplog.text
  adapter_run.train(tmp_path / 'whole', 10, base=base)
  save = {'period': 3, 'save_base': True}
  adapter_run.train(tmp_path / 'run', 10, base=base, save=save)
  _assert_equal(tmp_path / 'run' / 'checkpoint_10', tmp_path / 'whole' / 'checkpoint_10')


def test_another_rank(run, base, tmp_path):
  model_dir = _copy(run, tmp_path)
  with pytest.raises(
    CheckpointError, match=r'The adapter has rank 2\. Set --gin\.adapters\.Lora\.rank=2'
  ):
    adapter_run.train(model_dir, 9, base=base, rank=4)
  adapter_run.train(model_dir, 9, base=base, rank=2)


def _unchanged(state_dict, target_state_dict, *, is_resuming):
  """Return the state; which arrays it returns is only known when it is called."""
  del target_state_dict, is_resuming
  return state_dict


@pytest.mark.parametrize(
  'lora', [{'alpha': 8.0}, {'rank_stabilized': True}, {'alpha_pattern': [('value', 32.0)]}]
)
def test_other_factors(base, tmp_path, lora):
  """No shape shows them. The message has those of the adapter, also of one in another layout."""
  first = {'alpha_pattern': [('query', 32.0)]}
  adapter_run.train(tmp_path / 'run', 3, base=base, lora=first)
  message = r'The factor of the adapter of .*which has alpha 16\.0, 32\.0 and rank_stabilized=False'
  with pytest.raises(CheckpointError, match=message):
    adapter_run.train(tmp_path / 'run', 4, base=base, lora=lora)
  cfg = adapter_run.restore_cfg(base, adapter_path=str(tmp_path / 'run'))
  layout = {'param_layout': 'scalable_t5'}
  with pytest.raises(CheckpointError, match=message):
    adapter_run.train(tmp_path / 'other', 3, restore=cfg, lora=lora, layout=layout)
  changed = dataclasses.replace(cfg, state_transformation_fns=[_unchanged])
  with pytest.raises(CheckpointError, match=message):
    adapter_run.train(tmp_path / 'other', 3, restore=changed, lora=lora)
  adapter_run.train(tmp_path / 'other', 3, restore=cfg, lora=first, layout=layout)
  adapter_run.train(tmp_path / 'run', 4, base=base, lora=first)


def test_an_adapter_that_is_only_on_one_side(run, base, tmp_path):
  """Both messages are followed."""
  with pytest.raises(CheckpointError, match='--gin_file=adapters/lora.gin'):
    toy_run.train(_copy(run, tmp_path), 9, model=adapter_run.model(), eval_period=None)
  of_base = tmp_path / 'base'
  shutil.copytree(os.path.dirname(base), of_base)
  with pytest.raises(CheckpointError, match=r'builders = \[@builders\.NewAdapter\(\)\]'):
    adapter_run.train(of_base, 4)
  adapter_run.train(tmp_path / 'new', 4, base=of_base / 'checkpoint_2')


def _changed(base, folder, change):
  """Return the path of a checkpoint of the parameters of the base, after `change` of a nested dict."""
  state = checkpoints.load(base)
  del state['state']['param_states']
  change(state['target'])
  with checkpoints.CheckpointManager(
    folder, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(2, state)
  return folder / 'checkpoint_2'


def _without_norm(params):
  del params['decoder']['decoder_norm']


def _with_another_norm(params):
  params['decoder']['another_norm'] = params['decoder']['decoder_norm']


def test_only_the_adapter_may_be_new(base, tmp_path):
  with pytest.raises(
    CheckpointError, match=r'1 missing from the checkpoint:\s+target/decoder/decoder_norm'
  ):
    adapter_run.train(tmp_path / 'run', 4, base=_changed(base, tmp_path / 'part', _without_norm))


def test_options_for_the_state_of_the_optimizer_keep_the_base(run, base, tmp_path):
  """As in recipes/keyword_cloze_finetune.gin, which adapters/lora.gin may follow."""
  rules = [('state/param_states/.*', None)]
  cfg = adapter_run.restore_cfg(base, assignment_map=rules, fallback_to_scratch=True)
  adapter_run.train(tmp_path / 'run', 3, restore=cfg)
  assert sources.recorded_base(tmp_path / 'run' / 'checkpoint_3')['path'] == str(base)
  _assert_equal(tmp_path / 'run' / 'checkpoint_3', run / 'checkpoint_3')


def _of_base(change=None, **options):
  def arguments(base, tmp_path):
    if change is not None:
      base = _changed(base, tmp_path / 'changed', change)
    return {'restore': adapter_run.restore_cfg(base, **options)}

  return arguments


def _in_model_dir(base, tmp_path):
  shutil.copytree(base, tmp_path / 'run' / 'checkpoint_2')
  os.remove(tmp_path / 'run' / 'checkpoint_2' / 'manifest.json')  # as of T5X
  return {'base': tmp_path / 'run' / 'checkpoint_2'}


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (lambda base, tmp_path: {}, r'no RestoreCheckpointConfig\.path'),
    (_in_model_dir, 'is in MODEL_DIR'),
    (_of_base(assignment_map=[(r'target/(.*scale)', r'target/\1')]), 'assignment_map'),
    (_of_base(_without_norm, fallback_to_scratch=True), 'lacks decoder/decoder_norm/scale'),
    (_of_base(_with_another_norm, strict=False), 'also has decoder/another_norm/scale'),
    (
      _of_base(builders=[builders.NewAdapter(), builders.Reinitialize(['.*norm/scale'])]),
      'Reinitialize',
    ),
    (
      lambda base, tmp_path: {'base': base, 'param_ema': averaging.ParamEma(decay=0.9)},
      r'train\.param_ema',
    ),
  ],
)
def test_what_the_base_cannot_give_again(base, tmp_path, options, message):
  """The message offers to save all parameters, which is followed."""
  given = options(base, tmp_path)
  with pytest.raises(ConfigError, match=message) as error:
    adapter_run.train(tmp_path / 'run', 4, **given)
  assert 'SaveCheckpointConfig.save_base=True' in str(error.value)
  assert not (tmp_path / 'run' / 'checkpoint_4').exists()
  adapter_run.train(tmp_path / 'run', 4, save={'period': 4, 'save_base': True}, **given)
  assert sources.recorded_base(tmp_path / 'run' / 'checkpoint_4') is None


def test_saving_the_base(run, base, tmp_path):
  """A run may begin to save all parameters; it cannot stop to do so, since the base is then unknown."""
  model_dir = _copy(run, tmp_path)
  save = {'period': 3, 'save_base': True}
  adapter_run.train(model_dir, 9, base=base, save=save)
  assert sources.recorded_base(model_dir / 'checkpoint_9') is None
  adapter_run.train(model_dir, 10, save=save)
  adapter_run.train(tmp_path / 'whole', 10, base=base)
  _assert_equal(model_dir / 'checkpoint_10', tmp_path / 'whole' / 'checkpoint_10')
  with pytest.raises(ConfigError, match='was saved with its base'):
    adapter_run.train(model_dir, 11, base=base)
  with pytest.raises(ConfigError, match=r'`SaveCheckpointConfig\.save_base` must be False without'):
    toy_run.train(tmp_path / 'full', 2, save=save)


def test_a_stored_adapter(run, base, tmp_path):
  """A run begins with the adapter of another one, also of another step, of a directory, or with another layout."""
  for layout in ({}, {'param_layout': 'scalable_t5'}):
    model_dir = tmp_path / str(layout)
    cfg = adapter_run.restore_cfg(base, adapter_path=str(run))
    adapter_run.train(
      model_dir, 3, restore=cfg, layout=layout, trainer_kwargs={'learning_rate_fn': _no_rate}
    )
    expected = _params(run / 'checkpoint_8')
    found = _params(model_dir / 'checkpoint_3')
    if layout:
      found = tree_utils.flatten_dict(
        param_layouts.convert(
          tree_utils.unflatten_dict(found), 'scalable_t5', 't5', adapter_run.model().module.config
        )
      )
    for name, value in expected.items():
      np.testing.assert_array_equal(found[name], value, err_msg=name)


def _no_rate(step):
  return 0.0 * step


def test_unsuitable_stored_adapters(run, base, tmp_path):
  cfg = adapter_run.restore_cfg(base, adapter_path=str(run))
  with pytest.raises(CheckpointError, match=r'adapter .*does not fit(.|\n)*Lora\.rank=2'):
    adapter_run.train(tmp_path / 'rank', 3, restore=cfg, rank=4)
  with pytest.raises(CheckpointError, match='must be a checkpoint with an adapter'):
    cfg = adapter_run.restore_cfg(base, adapter_path=base)
    adapter_run.train(tmp_path / 'none', 3, restore=cfg)
  norms = {'also_train': ('norm/scale$',)}
  adapter_run.train(tmp_path / 'norms', 4, base=base, lora=norms)
  own = sources.open_source(tmp_path / 'norms' / 'checkpoint_4').own.shapes()
  assert 'target/decoder/decoder_norm/scale' in own
  cfg = adapter_run.restore_cfg(base, adapter_path=str(tmp_path / 'norms'))
  with pytest.raises(ConfigError, match=r'has also trained .*scale.*also_train'):
    adapter_run.train(tmp_path / 'others', 3, restore=cfg)
  adapter_run.train(tmp_path / 'others', 3, restore=cfg, lora=norms)


def test_parameters_that_are_not_trained_any_more(base, tmp_path):
  """Without a state of the optimizer nothing else differs, and later checkpoints would lose them."""
  layout = {'optimizer_def': optimizers.sgd()}
  norms = {'also_train': ('norm/scale$',)}
  adapter_run.train(tmp_path / 'run', 3, base=base, lora=norms, layout=layout)
  with pytest.raises(ConfigError, match=r'checkpoint_3 has also trained .*scale.*also_train'):
    adapter_run.train(tmp_path / 'run', 4, base=base, layout=layout)
  adapter_run.train(tmp_path / 'with_state', 3, base=base)
  with pytest.raises(
    CheckpointError, match=r'Lora.also_train` selected 0 parameters, and now \d+: set it as before'
  ):
    adapter_run.train(tmp_path / 'with_state', 4, base=base, lora=norms)
  adapter_run.train(tmp_path / 'run', 4, base=base, lora=norms, layout=layout)


@pytest.mark.parametrize(
  ('parts', 'layout'),
  [
    (('query', 'value'), {}),
    (('query', 'value'), {'param_layout': 'scalable_t5'}),
    (('layers_0', 'layers_1'), {}),
  ],
)
def test_kernels_with_the_factors_of_each_other(base, tmp_path, parts, layout):
  """Kernels are compared one by one, also with an adapter in another layout."""

  def lora(*alphas):
    return {'alpha_pattern': tuple(zip(parts, alphas, strict=True))}

  adapter_run.train(tmp_path / 'run', 3, base=base, lora=lora(4.0, 8.0))
  cfg = adapter_run.restore_cfg(base, adapter_path=str(tmp_path / 'run'))
  options = {'restore': cfg, 'layout': layout}
  with pytest.raises(
    CheckpointError, match=rf'adapter of \S*{parts[0]}\S* must be \[?2\.0.*got \[?4\.0'
  ):
    adapter_run.train(tmp_path / 'other', 3, lora=lora(8.0, 4.0), **options)
  adapter_run.train(tmp_path / 'other', 3, lora=lora(4.0, 8.0), **options)


def test_a_run_with_an_adapter_as_base(run, base, tmp_path):
  """Its adapter and optimizer state are kept; the new checkpoints need both runs."""
  adapter_run.train(
    tmp_path / 'second',
    9,
    base=run / 'checkpoint_8',
    trainer_kwargs={'learning_rate_fn': _no_rate},
  )
  path = tmp_path / 'second' / 'checkpoint_9'
  assert sources.recorded_base(path)['path'] == str(run / 'checkpoint_8')
  found = _params(path)
  for name, value in _params(run / 'checkpoint_8').items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_average_of_checkpoints(run, base, tmp_path):
  cfg = checkpoints.RestoreCheckpointConfig(builders=[builders.Average(str(run))])
  save = {'period': 9, 'save_base': True}
  adapter_run.train(
    tmp_path / 'mean', 9, restore=cfg, save=save, trainer_kwargs={'learning_rate_fn': _no_rate}
  )
  found = _params(tmp_path / 'mean' / 'checkpoint_9')
  steps = checkpoints.all_steps(run)
  inputs = [_params(run / f'checkpoint_{step}') for step in steps]
  for name, value in found.items():
    mean = np.mean([params[name] for params in inputs], axis=0, dtype=np.float64)
    np.testing.assert_array_equal(value, mean.astype(np.float32), err_msg=name)


def test_a_base_in_bfloat16(base, tmp_path):
  """It is rounded when it is read; checkpoints have the adapter in float32, and reading them the base's own values."""
  adapter_run.train(tmp_path / 'run', 4, base=base, lora={'base_dtype': 'bfloat16'})
  adapter_run.train(tmp_path / 'run', 5, base=base, lora={'base_dtype': 'bfloat16'})
  path = tmp_path / 'run' / 'checkpoint_5'
  assert all(leaf.dtype != 'bfloat16' for leaf in sources.open_source(path).own.shapes().values())
  found = _params(path)
  for name, value in _params(base).items():
    np.testing.assert_array_equal(found[name], value)
  _, state = adapter_run.train(tmp_path / 'run', 6, base=base, lora={'base_dtype': 'bfloat16'})
  params = tree_utils.flatten_dict(state.params)
  name = 'decoder/layers_0/mlp/wo/kernel'
  assert params[name].dtype == 'bfloat16'
  np.testing.assert_array_equal(params[name], found[name].astype(params[name].dtype))


def test_retention_and_damaged_checkpoints(base, tmp_path):
  adapter_run.train(tmp_path / 'run', 9, base=base, save={'period': 1, 'keep': 2})
  assert checkpoints.all_steps(tmp_path / 'run') == [7, 8, 9]  # the last one is not confirmed
  data = next(f for f in (tmp_path / 'run' / 'checkpoint_9').rglob('d/*') if f.is_file())
  data.write_bytes(b'')
  adapter_run.train(tmp_path / 'run', 10, base=base, save={'period': 1, 'keep': 2})
  adapter_run.train(tmp_path / 'whole', 10, base=base)
  _assert_equal(tmp_path / 'run' / 'checkpoint_10', tmp_path / 'whole' / 'checkpoint_10')


def test_evaluation_of_all_checkpoints(run, base, tmp_path):
  arguments = {
    'model': adapter_run.model(adapters.Lora(rank=2)),
    'dataset_cfg': toy_run.dataset('validation'),
    'partitioner': toy_run.partitioner(),
    'output_dir': str(tmp_path / 'eval'),
  }
  cfg = checkpoints.RestoreCheckpointConfig(str(run), mode='all')
  results = evaluate.evaluate(restore_checkpoint_cfg=cfg, **arguments)
  assert list(results) == checkpoints.all_steps(run)
  moved = tmp_path / 'moved'
  shutil.copytree(base, moved)
  model_dir = _copy(run, tmp_path)
  for step in results:
    _record(model_dir / f'checkpoint_{step}', path=str(tmp_path / 'gone'))
  arguments['output_dir'] = str(tmp_path / 'eval_of_moved')
  with pytest.raises(CheckpointError, match=r'INITIAL_CHECKPOINT_PATH=PATH'):
    evaluate.evaluate(
      restore_checkpoint_cfg=checkpoints.RestoreCheckpointConfig(str(model_dir)), **arguments
    )
  cfg = checkpoints.RestoreCheckpointConfig(str(model_dir), mode='all', base_path=str(moved))
  assert evaluate.evaluate(restore_checkpoint_cfg=cfg, **arguments) == results


def test_a_killed_run_equals_an_uninterrupted_one(run, base, tmp_path):
  model_dir = tmp_path / 'run'
  process = subprocess.Popen(
    [
      sys.executable,
      '-m',
      'tests.apps.train.adapter_run',
      model_dir,
      'num_steps=1000',
      f'base={base!r}',
    ],
    cwd=_ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(_ROOT)},
  )
  while process.poll() is None and not (model_dir / 'checkpoint_3').exists():
    time.sleep(0.001)
  process.kill()
  assert process.wait() == -signal.SIGKILL
  for step in checkpoints.all_steps(model_dir)[2:]:
    shutil.rmtree(model_dir / f'checkpoint_{step}')  # later than the end of the whole run
  adapter_run.train(model_dir, base=base)
  _assert_equal(run / 'checkpoint_8', model_dir / 'checkpoint_8')


@stores.mostly('s3')
def test_a_run_in_a_store(store, run, base):
  """The base is on a disk or in the store."""
  of_base = f'{store.root}/base/checkpoint_2'
  for name in sorted(p for p in pathlib.Path(base).rglob('*') if p.is_file()):
    files.write(files.path(of_base) / str(name.relative_to(base)), name.read_bytes())
  for name, path in {'disk': base, 'store': of_base}.items():
    model_dir = f'{store.root}/{name}'
    for num_steps in (6, 8):
      adapter_run.train(model_dir, num_steps, base=path)
    _assert_equal(run / 'checkpoint_8', f'{model_dir}/checkpoint_8')
    assert sources.recorded_base(f'{model_dir}/checkpoint_8')['path'] == path
    _compare_all_bytes(f'{model_dir}/checkpoint_8')


def test_a_checkpoint_in_the_spool_folder(run, base, tmp_path, monkeypatch):
  """It has no base either, and the next run copies it."""
  model_dir = tmp_path / 'run'
  spool_dir = str(tmp_path / 'spool')
  adapter_run.train(model_dir, 6, base=base)
  begin = disk.DiskFolder.begin

  def fail(self, pending):
    if str(pending.final).startswith(str(model_dir)):
      raise OSError(28, 'No space left on device')
    begin(self, pending)

  with monkeypatch.context() as patched:
    patched.setattr(disk.DiskFolder, 'begin', fail)
    with pytest.raises(SaveError, match='kept in'):
      adapter_run.train(model_dir, 8, base=base, spool_dir=spool_dir)
  assert checkpoints.all_steps(model_dir)[-1] == 6
  adapter_run.train(model_dir, 8, base=base, spool_dir=spool_dir)
  _assert_equal(run / 'checkpoint_8', model_dir / 'checkpoint_8')


_PROGRAM = """
    import sys
    from t5x_lite import runtime
    runtime.join(runtime.ClusterConfig())
    from t5x_lite import partitioning
    from tests.apps.train import adapter_run
    model_dir, base = sys.argv[1:]
    for num_steps in (6, 8):
      adapter_run.train(model_dir, num_steps, base=base, partitioner=partitioning.PjitPartitioner(num_partitions=2))
"""


def test_two_processes(run, base, tmp_path):
  processes.run(_PROGRAM, tmp_path / 'run', base, num_devices=2)
  found, expected = (_params(path / 'checkpoint_8') for path in (tmp_path / 'run', run))
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, atol=2e-6, err_msg=name)
  recorded = sources.recorded_base(tmp_path / 'run' / 'checkpoint_8')
  assert recorded == sources.recorded_base(run / 'checkpoint_8')
