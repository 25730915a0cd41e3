"""Errors of the environment, of files, and of user code.

Each case is a real process of `t5x_lite`. Most are forks of one that has imported JAX and not started it, which saves
the import; those that set JAX's environment start a new process.
"""

import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite import errors
from t5x_lite import partitioning
from t5x_lite.apps import commands
from t5x_lite.command_line import cli
from t5x_lite.command_line import errors as cli_errors
from t5x_lite.evaluation import judging

_ROOT = pathlib.Path(__file__).parents[2]
_RECIPE = ('train', '--gin_file=recipes/keyword_cloze.gin', '--gin.MODEL_DIR=run', '--dry_run')
# A run of the toy model, which compiles quickly, on a user's task.
_TOY = ('train', '--gin_file=toy.gin', '--gin.MODEL_DIR=run')
_FILES = {
  'broken.py': '"""A task."""\n\ndef texts(split:\n  return []\n',
  'tasks.py': """
        from t5x_lite import data

        VOCABULARY = data.ByteVocabulary(extra_ids=125)


        def register(name, texts_fn):
          data.register_builtin_task(data.text_task(
              name=name, texts_fn=texts_fn, splits=('train', 'validation'), vocabulary=VOCABULARY))


        def number(text):
          return int(text)  # raises


        register('raises', lambda split: [('one', str(number('one')))])
        register('tab', lambda split: data.read_tsv('lines.tsv'))
        data.register_builtin_task(data.file_task(
            name='records', splits={'train': 'records.jsonl'}, format='jsonl', vocabulary=VOCABULARY))
        """,
  'toy_tasks.py': """
        import dataclasses
        import threading

        from t5x_lite import data
        from tests.apps.train import toy_run


        class Table(data.ExampleTable):
          fingerprint = 'toy'

          def __len__(self):
            return 64

          def examples(self, seed, numbers):
            assert threading.current_thread() is threading.main_thread() or max(numbers) < 32, 'too far'
            return [self.texts(0) | {'inputs': [3, 1], 'targets': [4, 1]} for _ in numbers]


        def metric(targets, predictions):
          return {'ratio': len(targets) / (len(predictions) - len(targets))}


        def preprocess(record, context):
          return {**record, 'inputs': [int(record['inputs'])]}


        data.register_builtin_task(dataclasses.replace(toy_run.TASK, name='late', table_fn=lambda *_: Table()))
        data.register_builtin_task(dataclasses.replace(toy_run.TASK, name='metric', metric_fns=[metric]))
        data.register_builtin_task(data.file_task(
            name='preprocessor', splits={'train': 'late.jsonl', 'validation': 'late.jsonl'}, format='jsonl',
            vocabulary=toy_run.TASK.vocabularies['targets'], add_eos=False, preprocessors=[preprocess]))
        """,
  'toy.gin': """
        from __gin__ import dynamic_registration
        from tests.apps.train import toy_run
        from t5x_lite.apps import train as train_script
        include 'runs/train.gin'
        MODEL = @toy_run.model()
        DATA_SOURCE = 'builtin'
        MIXTURE_OR_TASK_MODULE = 'toy_tasks'
        TASK_FEATURE_LENGTHS = {'inputs': 6, 'targets': 6}
        BATCH_SIZE = 8
        PACK = False
        SHUFFLE_TRAIN_EXAMPLES = False
        TRAIN_STEPS = 8
        EVAL_PERIOD = 2
        """,
  'late.gin': """
        from __gin__ import dynamic_registration
        from t5x_lite.data import vocabularies as first
        from __gin__ import dynamic_registration
        """,
  'lines.tsv': 'one\t1\n\ntwo 2\n',
  'records.jsonl': '{"inputs": "a", "targets": "1"}\n{"inputs": "b", "targets": 2}\n',
  'late.jsonl': '{"inputs": "3", "targets": [3]}\n' * 20 + '{"inputs": "x", "targets": [3]}\n',
}


@dataclasses.dataclass(frozen=True)
class _Case:
  """Command line, with its expected output and exit status."""

  flags: tuple[str, ...]
  fragments: tuple[str, ...]
  status: int = 2


def _task(name: str) -> tuple[str, ...]:
  return (*_RECIPE, '--gin.MIXTURE_OR_TASK_MODULE=tasks', f'--gin.MIXTURE_OR_TASK_NAME={name}')


_CASES = {
  'a module with a syntax error, in gin': _Case(
    (*_RECIPE, '--gin_bindings=import broken'), ('broken.py:3: ', '`def texts(split:`')
  ),
  'a module with a syntax error, of the task': _Case(
    (*_RECIPE, '--gin.MIXTURE_OR_TASK_MODULE=broken'), ('broken.py:3: ', '`def texts(split:`')
  ),
  'a syntax error with --debug': _Case(
    (*_RECIPE, '--gin_bindings=import broken', '--debug'), ('Traceback', 'error: ', 'broken.py:3: ')
  ),
  'from __gin__ in a flag': _Case(
    (*_RECIPE, '--gin_bindings=from __gin__ import dynamic_registration'),
    ('--gin_bindings=from __gin__', 'Remove it'),
  ),
  'from __gin__ after other imports': _Case(
    (*_RECIPE, '--gin_file=late.gin'), ('late.gin:3: ', 'Move it before')
  ),
  'a vocabulary of random bytes': _Case(
    (
      'train',
      '--gin_file=recipes/docs_span_corruption_sentencepiece.gin',
      '--gin.MODEL_DIR=run',
      '--dry_run',
      '--gin.VOCABULARY_FILE=random.model',
    ),
    ("'random.model'", 'sentencepiece model', 't5x_lite vocab'),
  ),
  'a TSV line without a tab': _Case(
    _task('tab'), ('lines.tsv, line 3 must have 2 fields', "'two 2'", 'tasks.py')
  ),
  'a record of the wrong type': _Case(
    _task('records'), ("records.jsonl, line 2: 'targets' must be a text", 'got 2 of type int.')
  ),
  'a task that raises': _Case(
    _task('raises'),
    (
      "your code raised ValueError: invalid literal for int() with base 10: 'one'",
      'tasks.py", line 12, in number\n    return int(text)  # raises',
      '--debug',
    ),
    1,
  ),
  'a task that raises, with --debug': _Case(
    (*_task('raises'), '--debug'), ('Traceback', 'builtin_tasks.py', 'your code'), 1
  ),
}
_WHOLE_RUNS = {
  'a task that raises in the data thread': _Case(
    (*_TOY, '--gin.MIXTURE_OR_TASK_NAME=late'),
    ('AssertionError: too far', 'toy_tasks.py", line 15, in examples'),
    1,
  ),
  'a metric that raises': _Case(
    (*_TOY, '--gin.MIXTURE_OR_TASK_NAME=metric'),
    ('your code raised ZeroDivisionError: ', 'toy_tasks.py", line 20, in metric\n    return'),
    1,
  ),
  'a preprocessor that raises late': _Case(
    (
      *_TOY,
      '--gin.MIXTURE_OR_TASK_NAME=preprocessor',
      '--gin.train_script.train.train_eval_dataset_cfg=None',
      '--gin.train_script.train.infer_eval_dataset_cfg=None',
    ),
    (
      'late.jsonl, line 21: the preprocessor preprocess of the task',
      'ValueError: invalid literal for int()',
      'toy_tasks.py", line 24, in preprocess',
    ),
  ),
}
_FORKS = """
import json, os, runpy, sys
from t5x_lite import cli, gin_utils
from t5x_lite.apps import train
import t5x_lite.models, t5x_lite.networks.t5
for number, argv in enumerate(json.load(sys.stdin)):
  pid = os.fork()
  if not pid:
    with open(f'out{number}', 'w') as out, open(f'err{number}', 'w') as err:
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
    sys.argv[1:] = [argument.replace('MODEL_DIR=run', f'MODEL_DIR=run{number}') for argument in argv]
    runpy.run_module('t5x_lite', run_name='__main__')
  print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def _environment(folder: pathlib.Path, **variables: str) -> dict[str, str]:
  kept = {
    name: value for name, value in os.environ.items() if name not in ('XLA_FLAGS', 'T5X_LITE_DEBUG')
  }
  return kept | {'PYTHONPATH': f'{_ROOT}{os.pathsep}{folder}', 'JAX_PLATFORMS': 'cpu'} | variables


def _run(cases: dict[str, _Case], folder: pathlib.Path) -> dict[str, tuple[int, str]]:
  """Return exit status and standard error of each case."""
  for name, text in _FILES.items():
    (folder / name).write_text(textwrap.dedent(text).lstrip('\n'))
  (folder / 'random.model').write_bytes(bytes((i * i + 7 * i + 201) % 256 for i in range(3000)))
  done = subprocess.run(
    [sys.executable, '-c', _FORKS],
    cwd=folder,
    env=_environment(folder),
    capture_output=True,
    text=True,
    input=json.dumps([case.flags for case in cases.values()]),
    timeout=300,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return {
    name: (int(status), (folder / f'err{number}').read_text())
    for number, (name, status) in enumerate(zip(cases, done.stdout.split(), strict=True))
  }


@pytest.fixture(scope='module')
def ended(tmp_path_factory):
  return _run(_CASES, tmp_path_factory.mktemp('first_contact'))


@pytest.mark.parametrize('name', _CASES)
def test_one_message(ended, name):
  _check(_CASES[name], *ended[name])


@pytest.mark.full
def test_one_message_of_a_run_that_has_begun(tmp_path):
  for name, (status, err) in _run(_WHOLE_RUNS, tmp_path).items():
    _check(_WHOLE_RUNS[name], status, err)


def _check(case: _Case, status: int, err: str) -> None:
  assert status == case.status, err
  for fragment in case.fragments:
    assert fragment in err
  assert err.count('t5x_lite: error: ') == 1
  if '--debug' not in case.flags:
    assert 'Traceback' not in err
    assert str(_ROOT / 't5x_lite') not in err  # none of our frames


@pytest.mark.parametrize(
  'error, process, status, text',
  [
    (KeyboardInterrupt(), None, 130, 't5x_lite: interrupted.'),
    (SystemExit(7), 1, 7, 't5x_lite: [process 1] error: your code called sys.exit(7).'),
    (SystemExit(None), 1, 1, 't5x_lite: [process 1] error: your code called sys.exit(None).'),
    (errors.ConfigError('hf_1234567.'), 1, 2, 't5x_lite: [process 1] error: ***.'),
    (errors.StoppedOnSignalError('saved.'), None, 75, 't5x_lite: saved.'),
    (ZeroDivisionError('hf_1234567'), None, 1, 'ZeroDivisionError: ***'),
    (
      ZeroDivisionError('hf_1234567'),
      1,
      1,
      'ZeroDivisionError: ***\nt5x_lite: [process 1] error: an exception in the code of t5x_lite, see above.',
    ),
  ],
)
def test_an_ending_without_secrets(error, process, status, text):
  found = cli_errors.ending(
    error, name='t5x_lite', own_paths=(), argv=['--hub_token=hf_1234567'], process=process
  )
  assert found == (text, status, isinstance(error, ZeroDivisionError))


_USERS_CODE = """
from t5x_lite.data.vocabularies import round_vocab_size_to_multiple as round_up
from t5x_lite import models

from t5x_lite import data


class Table(data.ExampleTable):
  fingerprint = 'users'

  def __len__(self):
    return 64

  def examples(self, seed, numbers):
    if max(numbers) >= 16:
      raise KeyError('far')
    return [{'inputs': [3, 1], 'targets': [4, 1]} for _ in numbers]


def metric(targets, predictions):
  return {'first': targets[0] / 2}


def metric_that_calls_t5x_lite(targets, predictions):
  return {'gap': round_up('text', 2)}


def metric_with_a_wrong_name(targets, predictions):
  return {'gap': models.missing_name}
"""


def test_frames_of_a_user_in_the_data_thread_and_in_metrics(tmp_path, monkeypatch, capsys):
  (tmp_path / 'users_code_of_this_test.py').write_text(_USERS_CODE)
  monkeypatch.syspath_prepend(tmp_path)
  users_code = importlib.import_module('users_code_of_this_test')
  vocabulary = data.ByteVocabulary(extra_ids=125)
  task = data.BuiltinTask(
    name='users',
    splits=('train',),
    vocabularies={'inputs': vocabulary, 'targets': vocabulary},
    table_fn=lambda *_: users_code.Table(),
  )
  cfg = data.DatasetConfig(
    task, {'inputs': 4, 'targets': 4}, 'train', 8, False, 0, source='builtin'
  )
  partitioner = partitioning.PjitPartitioner(num_partitions=1)

  def read(arguments):
    with data.GlobalBatches(
      data.open_train_iterator(cfg, partitioner.get_data_layout(8)), partitioner
    ) as batches:
      for _ in range(3):
        next(batches)

  def evaluate(metric):
    judged = data.EvalTask(
      name='users',
      batches=None,
      examples=[{'targets_pretokenized': 'a'}],
      metric_fns=[metric],
      postprocess=lambda text, **_: text,
      output_vocabulary=vocabulary,
      element_spec={},
    )
    judging.compute_metrics(judged, {'predict': np.array([[100, 1]])})

  for run, message, raised_in, remedy in (
    (read, "KeyError: 'far'", (), 'Correct this code, then rerun'),
    (
      lambda _: evaluate(users_code.metric),
      'TypeError: unsupported operand',
      (),
      'Correct this code, then rerun',
    ),
    (
      lambda _: evaluate(users_code.metric_that_calls_t5x_lite),
      "AttributeError: 'str' object",
      ('round_vocab_size_to_multiple',),
      'or report a defect of t5x_lite if the call of round_vocab_size_to_multiple is right',
    ),
    (
      lambda _: evaluate(users_code.metric_with_a_wrong_name),
      "AttributeError: module 't5x_lite.models' has no attribute 'missing_name'",
      (),
      'Correct this code, then rerun',
    ),
  ):
    monkeypatch.setitem(
      commands.COMMANDS, 'fake', commands.Command('fake', lambda parser: None, run)
    )
    assert cli.main(['fake']) == errors.ExitCode.ERROR == 1
    err = capsys.readouterr().err
    assert err.startswith(f't5x_lite: error: your code raised {message}') and remedy in err
    assert err.count('  File "') == 1 + len(raised_in)
    assert all(f', in {name}\n' in err for name in raised_in)
    assert f'File "{tmp_path}/users_code_of_this_test.py", line ' in err


@pytest.mark.parametrize(
  'texts, message',
  [
    (
      [('a', 'b'), ('c',)],
      r"task 'x', split 'train', example 2: it must be a pair .* got \('c',\)",
    ),
    ([('a', 5)], r"split 'train', example 1: target must be a text, got \('a', 5\)"),
    ([(b'a', 'b')], r"example 1: input must be a text, got \(b'a', 'b'\)"),
    (None, r"split 'train', example 1: it must be a pair \(input, target\) of texts, got None"),
  ],
)
def test_texts_of_a_task_are_checked(texts, message):
  task = data.text_task(
    name='x', texts_fn=lambda split: texts, splits=('train',), vocabulary=data.ByteVocabulary(125)
  )
  with pytest.raises(errors.DataError, match=message):
    task.table('train', {'inputs': 4, 'targets': 4})


def test_texts_may_be_ids_where_the_vocabulary_takes_ids():
  vocabulary = data.PassThroughVocabulary(10, eos_id=1)
  task = data.text_task(
    name='x', texts_fn=lambda split: [([3, 4], [5])], splits=('train',), vocabulary=vocabulary
  )
  (example,) = task.table('train', {'inputs': 4, 'targets': 4}).examples(0, np.array([0]))
  assert example['inputs'].tolist() == [3, 4, 1] and example['targets'].tolist() == [5, 1]


# Help and remedies


@pytest.mark.parametrize('command', ['train', 'eval', 'infer'])
def test_help_shows_flags_as_they_must_be_written(capsys, command):
  assert cli.main([command, '--help']) == 0
  out = capsys.readouterr().out
  assert '--gin.NAME=VALUE' in out and '--gin.NAME VALUE' not in out


def test_a_gin_flag_without_equals_sign_says_how_it_is_written(capsys):
  assert cli.main(['train', '--gin_file=recipes/keyword_cloze.gin', '--gin.TRAIN_STEPS', '5']) == 2
  expected = '--gin.TRAIN_STEPS requires a value. Write --gin.TRAIN_STEPS=5.'
  assert expected in capsys.readouterr().err
