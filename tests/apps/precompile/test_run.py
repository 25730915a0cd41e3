"""`precompile`: programs of a run, their memory, and their use by the run through the cache."""

import dataclasses
import functools
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import jax
import pytest

from t5x_lite import data
from t5x_lite import runtime
from t5x_lite import trainer
from t5x_lite.apps.common import trainer_setup as parts
from t5x_lite.apps.precompile import run as precompile_lib
from t5x_lite.apps.train import run as train_lib
from t5x_lite.command_line import cli
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.trainer import state_init
from tests.apps.precompile.toy_precompile import GIN
from tests.apps.precompile.toy_precompile import kept_settings
from tests.apps.train import toy_run
from tests.models import toy_model

_ROOT = pathlib.Path(__file__).parents[3]
_RUN = [
  '--gin_file=models/t5_1_1_tiny.gin',
  '--gin_file=runs/precompile.gin',
  '--gin_file=data/synthetic.gin',
  '--gin_file=optimizers/sgd.gin',
  '--gin.BATCH_SIZE=8',
  "--gin.TASK_FEATURE_LENGTHS={'inputs': 16, 'targets': 8}",
  '--gin.DROPOUT_RATE=0.0',
  '--gin.VOCABULARY_SIZE=100',
  '--gin.network.T5Config.vocab_size=128',
  '--gin.network.T5Config.num_encoder_layers=1',
  '--gin.network.T5Config.num_decoder_layers=1',
]
_PROGRAMS = [
  'initial state',
  'training step',
  'evaluation step (letters)',
  'predict 8 x 6 (letters)',
]
_WITH_EVAL = {
  'train_eval_dataset_cfg': toy_run.dataset('validation'),
  'infer_eval_dataset_cfg': toy_run.dataset('validation'),
}


@pytest.fixture
def jax_cache_settings():
  with kept_settings():
    yield


def _precompile(tmp_path, **kwargs):
  arguments = dict(
    model=toy_run.model(),
    train_dataset_cfg=toy_run.dataset('train'),
    partitioner=toy_run.partitioner(),
    model_dir=str(tmp_path),
    random_seed=0,
    trainer_cls=functools.partial(
      trainer.Trainer, learning_rate_fn=toy_run.RATE, num_microbatches=2
    ),
  )
  return precompile_lib.precompile(**{**arguments, **kwargs})


def _state_shape():
  model = toy_run.model()
  return state_init.TrainStateInitializer(
    model.optimizer_def,
    model.get_initial_variables,
    {'decoder_input_tokens': (toy_run.BATCH_SIZE, toy_run.LENGTH)},
    toy_run.partitioner(),
  ).global_train_state_shape


@pytest.fixture(scope='module')
def compiled(tmp_path_factory):
  """The programs of a run with both evaluations, the cache that they are in, and the model directory."""
  root = tmp_path_factory.mktemp('compiled')
  with kept_settings():
    programs = _precompile(
      root, **_WITH_EVAL, compilation_cache_dir=str(root / 'cache'), write_hlo=True
    )
  return programs, root / 'cache', root


def test_costs(compiled):
  programs, _, _ = compiled
  assert [(p.name, p.cache) for p in programs] == [(name, 'written') for name in _PROGRAMS]
  init, step, evaluation, prediction = programs
  # Arguments of a device: its shards of the state (parameters and two moments) and 4 of the 8 rows.
  expected = toy_run.partitioner().explain(_state_shape()).totals().bytes_per_device
  assert step.argument_bytes == expected + 4 * (4 * toy_run.LENGTH) * 4
  assert init.output_bytes == pytest.approx(expected, abs=500)
  # The new state takes the place of the old one; an evaluation leaves it alone.
  assert step.alias_bytes == pytest.approx(expected, abs=500) and evaluation.alias_bytes == 0
  assert step.total_bytes < step.argument_bytes + step.output_bytes + step.temporary_bytes
  assert step.flops > evaluation.flops > 0 and step.temporary_bytes > 0
  weights = 8 * 16 + 16 * toy_model.VOCAB_SIZE
  assert step.model_flops == 6 * toy_run.BATCH_SIZE * toy_run.LENGTH * weights / 4
  assert init.model_flops is evaluation.model_flops is None
  # The moments are of no use to an evaluation, and are not given to it.
  assert prediction.argument_bytes < evaluation.argument_bytes < step.argument_bytes / 2
  with kept_settings():
    jax.config.update('jax_compilation_cache_dir', None)
    text = precompile_lib.describe(programs, toy_run.partitioner())
  assert 'data=2 x model=2' in text and 'No compilation cache' in text
  assert text.count(f' {step.model_flops / 1e9:.3g} ') == 1


def test_texts(compiled):
  programs, _, root = compiled
  names = {path.name for path in (root / 'precompile').iterdir()}
  assert (
    len(names) == 8 and {'training_step.stablehlo.mlir', 'training_step.optimized_hlo.txt'} <= names
  )
  before, after = (pathlib.Path(path).read_text(encoding='utf-8') for path in programs[1].hlo_files)
  assert 'stablehlo.dot_general' in before and 'num_partitions = 4' in before
  assert after.startswith('HloModule') and 'all-reduce' in after


def test_a_run_loads_precompiled_programs(compiled, tmp_path, jax_cache_settings):
  _, cache, _ = compiled
  filled = set(cache.iterdir())
  code = textwrap.dedent("""
      import jax
      from tests.apps.train import toy_run
      events = []  # of all threads
      jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
      toy_run.main()
      print('hits', events.count('/jax/compilation_cache/cache_hits'))
  """)
  # JAX reads these environment variables; the flag of the commands is tested below.
  environment = {
    **os.environ,
    'JAX_COMPILATION_CACHE_DIR': str(cache),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }
  done = subprocess.run(
    [sys.executable, '-c', code, str(tmp_path / 'run'), 'total_steps=10'],
    cwd=_ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert int(re.search(r'^hits (\d+)$', done.stdout, re.MULTILINE)[1]) >= len(_PROGRAMS)
  # Only small programs, e.g. sums of metrics, were compiled in addition.
  names = [
    {re.sub(r'-[0-9a-f]+-.*', '', path.name) for path in paths}
    for paths in (filled, set(cache.iterdir()) - filled)
  ]
  large = {'jit_init_train_state', 'jit_step_fn', 'jit_fn_of_this_partitioner'}
  assert large <= names[0] and not large & names[1] and 'jit_merge_metrics' in names[1]


def test_the_seed_is_part_of_a_step_with_dropout(compiled, tmp_path, jax_cache_settings):
  _, cache, _ = compiled
  programs = _precompile(tmp_path, **_WITH_EVAL, compilation_cache_dir=str(cache), random_seed=1)
  assert [p.cache for p in programs] == ['found', 'written', 'found', 'found']


@pytest.mark.parametrize(
  'flags', [['--gin_file={toy}'], pytest.param(_RUN, marks=pytest.mark.full)], ids=['toy', 't5']
)
def test_command(tmp_path, capsys, jax_cache_settings, flags):
  (tmp_path / 'toy.gin').write_text(GIN)
  flags = [flag.replace('{toy}', str(tmp_path / 'toy.gin')) for flag in flags]
  assert cli.main(['precompile', *flags, f'--compilation_cache_dir={tmp_path}/cache']) == 0
  out = capsys.readouterr().out
  assert re.search(r'^initial state +[\d.]+ +written +', out, re.MULTILINE)
  assert re.search(r'^training step +[\d.]+ +written +', out, re.MULTILINE)
  assert {'jit_step_fn', 'jit_init_train_state'} <= {
    path.name.split('-')[0] for path in (tmp_path / 'cache').iterdir()
  }


_T5X = """
from __gin__ import dynamic_registration
import __main__ as train_script
from tests.apps.train import toy_run
MODEL_DIR = %gin.REQUIRED
train_script.precompile:
  model = @toy_run.model()
  train_dataset_cfg = @toy_run.dataset()
  partitioner = @toy_run.partitioner()
  model_dir = %MODEL_DIR
  random_seed = None
toy_run.dataset.split = 'train'
"""


def test_a_file_of_t5x_that_configures_precompile(tmp_path, capsys, jax_cache_settings):
  (tmp_path / 't5x.gin').write_text(_T5X)
  flags = [
    'precompile',
    f'--gin_file={tmp_path}/t5x.gin',
    f'--compilation_cache_dir={tmp_path}/cache',
  ]
  assert cli.main(flags) == 2
  assert 'MODEL_DIR' in capsys.readouterr().err
  assert cli.main([*flags, f'--gin.MODEL_DIR={tmp_path}/run']) == 0
  # Without a trainer, the step has a constant learning rate.
  assert re.search(r'^training step +[\d.]+ +written +', capsys.readouterr().out, re.MULTILINE)
  assert (tmp_path / 'run' / 'precompile' / 'training_step.stablehlo.mlir').exists()


def test_defaults_are_those_of_training():
  of_train = inspect.signature(train_lib.train).parameters
  for field in dataclasses.fields(parts.RunConfig):
    # Required arguments have no defaults that could differ.
    default = of_train[field.name].default
    if default is not inspect.Parameter.empty:
      assert field.default == default, field.name


def test_rejected(tmp_path, capsys, jax_cache_settings):
  with pytest.raises(DataError, match='Did you mean'):
    _precompile(
      tmp_path,
      train_dataset_cfg=data.DatasetConfig(
        'python_keyword_close', {'inputs': 16, 'targets': 8}, 'train', 16, True, 0, source='builtin'
      ),
    )
  with pytest.raises(
    ConfigError, match="^precompile: got an unexpected .* 'eval_step'. Did you mean 'eval_steps'"
  ):
    _precompile(tmp_path, eval_step=2)
  with pytest.raises(
    ConfigError, match="^precompile: got an unexpected keyword argument 'num_retries'"
  ):
    _precompile(tmp_path, num_retries=2)
  with pytest.raises(TypeError, match="missing 4 required .* 'model'"):
    precompile_lib.precompile()
  (tmp_path / 'file').write_text('')
  with pytest.raises(FileExistsError, match="File exists: '.*file'"):
    runtime.use_compilation_cache(str(tmp_path / 'file'))
  assert cli.main(['precompile', *_RUN, '--num_devices=8', '--compilation_cache_dir=x']) == 2
  assert 'cannot be combined' in capsys.readouterr().err
  assert cli.main(['precompile', *_RUN, '--write_hlo']) == 2
  assert 'MODEL_DIR' in capsys.readouterr().err
  assert cli.main(['explain_sharding', *_RUN, '--compilation_cache_dir=x']) == 2
  assert '--compilation_cache_dir' in capsys.readouterr().err
