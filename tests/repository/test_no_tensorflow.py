"""Without TensorFlow, seqio and t5 the core imports, builds models and trains on built-in data."""

import os
import pathlib
import platform
import subprocess
import sys
import textwrap

import pytest

_ROOT = pathlib.Path(__file__).parents[2]

# A finder that does not find these packages, for us and for third parties that would use them if present.
_ABSENT = textwrap.dedent("""
    import importlib.machinery, sys
    _NAMES = {'tensorflow', 'tensorflow_datasets', 'tensorflow_text', 'tensorboard', 'seqio', 't5', 'tfds', 'keras',
              'grain', 'sentencepiece'}
    class _Absent(importlib.machinery.PathFinder):
      @classmethod
      def find_spec(cls, name, path=None, target=None):
        if name.split('.')[0] in _NAMES:
          return None
        return super().find_spec(name, path, target)
    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = _Absent
""")


def _run(
  code: str, *args: str, cwd: pathlib.Path = _ROOT, timeout: int = 300
) -> subprocess.CompletedProcess:
  # Most of the time would go to the compiler's optimizations.
  env = {
    **os.environ,
    'PYTHONPATH': str(_ROOT),
    'JAX_PLATFORMS': 'cpu',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  }
  return subprocess.run(
    [sys.executable, '-c', code, *args],
    cwd=cwd,
    env=env,
    capture_output=True,
    text=True,
    timeout=timeout,
  )


@pytest.mark.full  # by default, test_packaging.py imports everything without TensorFlow
def test_everything_imports():
  code = _ABSENT + textwrap.dedent("""
      import importlib, pkgutil
      import t5x_lite, moe
      for package in (t5x_lite, moe):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):
          has_packages = found.name.split('.')[-1].startswith(('grain_', 'columnar', '__main__'))
          if '.data.seqio.' not in found.name and not has_packages:
            importlib.import_module(found.name)
      from t5x_lite import data
      for source in ('seqio', 'builtin', 'grain', 'synthetic'):
        data.DatasetConfig('a task', {'inputs': 4}, 'train', 1, False, 0, source=source)
      assert not {'tensorflow', 'seqio', 't5', 'grain'} & set(sys.modules)
      print('all imported')
  """)
  done = _run(code)
  assert done.returncode == 0, done.stderr[-3000:]
  assert 'all imported' in done.stdout


@pytest.mark.full  # by default, test_packaging.py trains without TensorFlow
@pytest.mark.parametrize(
  'flags',
  [
    (),
    ('--gin_file=data/synthetic.gin', '--gin.VOCABULARY_SIZE=384'),
  ],
  ids=['as it is', 'synthetic'],
)
def test_training_runs(tmp_path, flags):
  code = _ABSENT + textwrap.dedent("""
      from t5x_lite.command_line import cli
      sys.exit(cli.main(sys.argv[1:]))
  """)
  done = _run(
    code,
    'train',
    '--gin_file=recipes/keyword_cloze.gin',
    *flags,
    f'--gin.MODEL_DIR={tmp_path}/run',
    '--gin.TRAIN_STEPS=3',
    '--gin.BATCH_SIZE=8',
    '--gin.train_script.train.infer_eval_dataset_cfg=None',
    '--gin.train_script.train.train_eval_dataset_cfg=None',
    '--gin.network.T5Config.num_encoder_layers=1',
    '--gin.network.T5Config.num_decoder_layers=1',
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert (tmp_path / 'run' / 'checkpoint_3').is_dir()
  assert (tmp_path / 'run' / 'train' / 'metrics.jsonl').stat().st_size > 0


@pytest.fixture
def own_task(tmp_path):
  """Write array records of texts and a module with a task that reads them; return their folder."""
  if (platform.system(), platform.machine()) != ('Linux', 'x86_64'):
    pytest.importorskip('grain')
  from t5x_lite.data import corpora
  from t5x_lite.data.files import grain_records

  for split, num in (('train', 64), ('validation', 8)):
    grain_records.write_array_records(
      str(tmp_path / f'{split}.array_record'),
      [
        {'line': line, 'keyword': keyword}
        for line, keyword in corpora.python_keyword_cloze(split)[:num]
      ],
    )
  (tmp_path / 'own_task.py').write_text(
    textwrap.dedent(f"""
      from t5x_lite import data
      data.register_builtin_task(data.file_task(
          name='own_task', splits={{split: f'{tmp_path}/{{split}}.array_record' for split in ('train', 'validation')}},
          format='array_record', vocabulary=data.ByteVocabulary(125), keys={{'inputs': 'line', 'targets': 'keyword'}},
          metric_fns=[data.exact_match]))
      """)
  )
  return tmp_path


def test_files_are_read_with_grain(own_task):
  code = _ABSENT.replace("'grain', ", '') + textwrap.dedent("""
      sys.path.insert(0, sys.argv.pop())
      from t5x_lite import data
      from t5x_lite.partitioning import DataLayout
      cfg = data.DatasetConfig('own_task', {'inputs': 64, 'targets': 12}, 'train', 8, True, 0, source='grain',
                               module='own_task')
      layout = DataLayout(batch_size=8, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)
      batch = next(data.open_train_iterator(cfg, layout))
      assert batch['decoder_target_tokens'].shape == (8, 12) and batch['decoder_target_tokens'].any()
      assert 'grain' in sys.modules and not {'tensorflow', 'seqio', 't5'} & set(sys.modules)
      print('read')
  """)
  done = _run(code, str(own_task))
  assert done.returncode == 0 and 'read' in done.stdout, done.stderr[-3000:]


@pytest.mark.full  # by default, test_packaging.py trains without TensorFlow
def test_training_runs_on_files_with_grain(own_task):
  code = _ABSENT.replace("'grain', ", '') + textwrap.dedent("""
      sys.path.insert(0, sys.argv.pop())
      from t5x_lite.command_line import cli
      status = cli.main(sys.argv[1:])
      assert 'grain' in sys.modules and not {'tensorflow', 'seqio', 't5'} & set(sys.modules)
      sys.exit(status)
  """)
  done = _run(
    code,
    'train',
    '--gin_file=recipes/keyword_cloze.gin',
    '--gin.DATA_SOURCE=grain',
    '--gin.MIXTURE_OR_TASK_MODULE=own_task',
    '--gin.MIXTURE_OR_TASK_NAME=own_task',
    f'--gin.MODEL_DIR={own_task}/run',
    '--gin.TRAIN_STEPS=3',
    '--gin.BATCH_SIZE=8',
    '--gin.train_script.train.infer_eval_dataset_cfg=None',
    '--gin.train_script.train.train_eval_dataset_cfg=None',
    '--gin.network.T5Config.num_encoder_layers=1',
    '--gin.network.T5Config.num_decoder_layers=1',
    str(own_task),
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert (own_task / 'run' / 'checkpoint_3').is_dir()
  assert (own_task / 'run' / 'train' / 'metrics.jsonl').stat().st_size > 0


def test_import_is_light():
  """`import t5x_lite` adds under 0.5 CPU-seconds to its core dependencies: in fact it imports no module of weight."""
  code = textwrap.dedent("""
      import jax, flax, optax, sys, time
      before = set(sys.modules)
      start = time.process_time()
      import t5x_lite
      spent = time.process_time() - start
      new = {name.split('.')[0] for name in set(sys.modules) - before} - {'t5x_lite'}
      print(spent, sorted(new))
      assert spent < 0.5
      assert not new & {'orbax', 'gin', 'clu', 'tensorstore', 'tensorflow', 'matplotlib'}
  """)
  done = _run(code)
  assert done.returncode == 0, done.stdout + done.stderr


def test_help_does_not_import_jax():
  code = textwrap.dedent("""
      import sys
      from t5x_lite.command_line import cli
      try:
        cli.main(['--help'])
      except SystemExit as stop:
        assert not stop.code, stop.code
      assert 'jax' not in sys.modules and 'gin' not in sys.modules
  """)
  done = _run(code)
  assert done.returncode == 0, done.stderr
  assert 'train' in done.stdout
