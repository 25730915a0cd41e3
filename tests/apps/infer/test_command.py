"""`t5x_lite infer` as a person uses it: a run and a file, pipes, workers, gin files, and bad input."""

import io
import json
import pathlib
import subprocess
import sys
import types

import gin
import pytest

from t5x_lite.command_line import cli
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.data import corpora
from t5x_lite.runtime import monitor as monitor_lib
from tests.apps.common import cloze_run
from tests.apps.infer import toy_infer

_ROOT = pathlib.Path(__file__).parents[3]
_SMALL = [
  '--gin.network.T5Config.num_encoder_layers=1',
  '--gin.network.T5Config.num_decoder_layers=1',
  '--gin.network.T5Config.emb_dim=8',
  '--gin.network.T5Config.mlp_dim=8',
  '--gin.network.T5Config.head_dim=4',
  "--gin.TASK_FEATURE_LENGTHS={'inputs': 24, 'targets': 4}",
  '--gin.BATCH_SIZE=8',
]
_MODEL = ['--gin_file=recipes/keyword_cloze.gin', *_SMALL]
_RECIPE = [*_MODEL, '--gin.DATA_SOURCE=builtin']


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A directory as a training run leaves it: config.gin and a checkpoint; the parameters are random."""
  folder = tmp_path_factory.mktemp('run')
  configuration = cloze_run.write_config(folder, _RECIPE[1:])
  model = configuration.argument('model')
  shapes = {'encoder_input_tokens': (8, 24), 'decoder_input_tokens': (8, 4)}
  toy_infer.save_new_state(folder, model, shapes, 2)
  return folder


def _main(capsys, *argv):
  status = cli.main(['infer', *map(str, argv)])
  captured = capsys.readouterr()
  return status, captured.out, captured.err


def _read(path):
  return [
    json.loads(line) for line in pathlib.Path(path).read_text(encoding='utf-8').split('\n')[:-1]
  ]


def test_a_run_and_a_file_of_lines(tmp_path, run, capsys):
  (tmp_path / 'in.txt').write_bytes(b'<extra_id_0> x\nf\xff\nnaive \xc3\xa4\n' + b'y' * 30 + b'\n')
  status, out, err = _main(
    capsys, run, f'--input={tmp_path}/in.txt', f'--output={tmp_path}/out.jsonl'
  )
  assert status == 0
  rows = _read(tmp_path / 'out.jsonl')
  assert [row['inputs']['inputs_pretokenized'] for row in rows] == [
    '<extra_id_0> x',
    'naive ä',
    'y' * 30,
  ]
  assert all(isinstance(row['prediction'], str) for row in rows)
  assert f'{tmp_path}/in.txt, line 2 is skipped: not UTF-8' in err and 'checkpoint_2' in err
  for text in (
    'out.jsonl: 3 examples in ',
    '1 line of the input was invalid and skipped',
    '1 example was longer than TASK_FEATURE_LENGTHS',
    '3 predictions were stopped',
    'naive ä',
  ):
    assert text in out
  status, again, err = _main(
    capsys, run, f'--input={tmp_path}/in.txt', f'--output={tmp_path}/out.jsonl'
  )
  assert status == 0 and 'computed before' in again and 'ompil' not in err
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    'in.txt',
    'out.jsonl',
    'out.jsonl.run',
  ]


def test_predictions_that_end_are_not_reported_as_stopped(tmp_path, run, capsys):
  (tmp_path / 'in.txt').write_text('a line\n')
  any_token = f'--gin.models.EncoderDecoderModel.stop_token_ids={[*range(2, 384)]}'
  argv = (run, f'--input={tmp_path}/in.txt', f'--output={tmp_path}/out.jsonl', any_token)
  status, out, _ = _main(capsys, *argv)
  assert status == 0 and '1 example in' in out and 'stopped at' not in out


def test_named_files_and_a_run_without_config(tmp_path, run, capsys):
  (tmp_path / 'in.txt').write_text('a line\n')
  (tmp_path / 'beam.gin').write_text("""
from __gin__ import dynamic_registration
from t5x_lite import decoding
from t5x_lite import models
from t5x_lite.apps import infer as infer_script

models.EncoderDecoderModel.decode_fn = @decoding.beam_search
models.EncoderDecoderModel.default_decoder_params = @models.DecoderParams()
models.DecoderParams.num_decodes = 3
infer_script.infer.mode = 'predict_with_aux'
""")
  files = [f'--input={tmp_path}/in.txt', f'--gin_file={tmp_path}/beam.gin']
  assert _main(capsys, run, *files, f'--output={tmp_path}/a.jsonl')[0] == 0
  # Naming config.gin too changes nothing.
  assert (
    _main(capsys, run, f'--gin_file={run}/config.gin', *files, f'--output={tmp_path}/b.jsonl')[0]
    == 0
  )
  (tmp_path / 'moved').mkdir()
  (tmp_path / 'moved/checkpoint_2').symlink_to(run / 'checkpoint_2')
  assert _main(capsys, tmp_path / 'moved', *_MODEL, *files, f'--output={tmp_path}/c.jsonl')[0] == 0
  rows = _read(tmp_path / 'a.jsonl')
  assert 'scores' in rows[0]['aux'] and rows == _read(tmp_path / 'b.jsonl') == _read(
    tmp_path / 'c.jsonl'
  )
  assert all(
    'beam_search' in next(tmp_path.glob(f'{x}.jsonl.run/*/config.gin')).read_text() for x in 'abc'
  )
  status, _, err = _main(
    capsys, tmp_path / 'moved', f'--input={tmp_path}/in.txt', f'--output={tmp_path}/d.jsonl'
  )
  assert status == 2 and 'has no config.gin' in err


def test_json_lines_with_the_keys_of_the_run_and_labels_of_any_type(tmp_path, run, capsys):
  own = tmp_path / 'own'
  own.mkdir()
  (own / 'checkpoint_2').symlink_to(run / 'checkpoint_2')
  config = (run / 'config.gin').read_text() + (
    "MIXTURE_OR_TASK_NAME = 'questions_of_records'\nDATA_SOURCE = 'grain'\n"
    "MIXTURE_OR_TASK_MODULE = 'PLACE'\n"
  )
  rows = [{'question': 'a', 'answer': 'b', 'inputs': 'c'}, {'question': 'd', 'answer': [5]}]
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  (tmp_path / 'in.jsonl').write_text(text)
  flags = [f'--input={tmp_path}/in.jsonl', f'--output={tmp_path}/out.jsonl']
  (own / 'config.gin').write_text(config.replace('PLACE', 'tests.apps.infer.record_task'))
  status, out, err = _main(capsys, own, *flags)
  assert status == 0 and '[5]' in out, err
  assert [row['inputs'] for row in _read(tmp_path / 'out.jsonl')] == [
    {'inputs_pretokenized': 'a', 'targets_pretokenized': 'b'},
    {'inputs_pretokenized': 'd', 'targets_pretokenized': [5]},
  ]
  # A machine without the module of the task reads the usual keys and says so, once no key is given.
  (own / 'config.gin').write_text(config.replace('PLACE', 'no_such_module'))
  (tmp_path / 'in.jsonl').write_text('{"inputs": "c", "targets": {"x": 1}}\n')
  flags[1] = f'--output={tmp_path}/other.jsonl'
  status, _, err = _main(capsys, own, *flags)
  assert status == 0 and 'keys of JSON lines in the task of the run are unknown' in err
  assert "so that inputs have the key 'inputs' and targets 'targets'" in err
  assert _read(tmp_path / 'other.jsonl')[0]['inputs']['targets_pretokenized'] == {'x': 1}
  (tmp_path / 'in.jsonl').write_text(text)
  flags[1] = f'--output={tmp_path}/given.jsonl'
  keys = [
    f'--gin.data.TextFileConfig.{key}' for key in ('inputs_key=question', 'targets_key=answer')
  ]
  status, _, err = _main(capsys, own, *flags, *keys)
  assert status == 0 and 'keys of JSON lines' not in err
  found = [row['inputs']['inputs_pretokenized'] for row in _read(tmp_path / 'given.jsonl')]
  assert found == ['a', 'd']


class _SecondProcess:
  """Monitor of the second of two processes whose lead knows the keys of the task."""

  process = 1
  num_processes = 2

  def value_of_lead(self, value):
    if json.loads(value)[0] is None:
      return json.dumps([{'inputs': ['question'], 'targets': ['answer']}, ''])
    return value

  def report(self, error):
    print(error, file=sys.stderr)
    return types.SimpleNamespace(status=2)


def test_processes_have_the_same_keys_of_json_lines(tmp_path, run, capsys):
  own = tmp_path / 'own'
  own.mkdir()
  (own / 'checkpoint_2').symlink_to(run / 'checkpoint_2')
  (own / 'config.gin').write_text(
    (run / 'config.gin').read_text()
    + "MIXTURE_OR_TASK_NAME = 'questions_of_records'\nDATA_SOURCE = 'grain'\n"
    "MIXTURE_OR_TASK_MODULE = 'no_such_module'\n"
  )
  (tmp_path / 'in.jsonl').write_text('{"question": "a", "inputs": "c"}\n')
  before = monitor_lib.current_monitor()
  monitor_lib.set_current_monitor(_SecondProcess())
  try:
    status, _, err = _main(
      capsys, own, f'--input={tmp_path}/in.jsonl', f'--output={tmp_path}/out.jsonl'
    )
  finally:
    monitor_lib.set_current_monitor(before)
  assert status == 2 and 'must be the same on all processes, got ' in err
  assert (
    'no_such_module' in err
    and "{'inputs': ['question'], 'targets': ['answer']} in process 0" in err
  )


def test_pipes(tmp_path, run, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  text = '{"question": "a <extra_id_0>", "id": 3}\nbroken\n'
  monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(text.encode()), encoding='utf-8'))
  status, out, err = _main(
    capsys,
    run,
    '--input=-',
    '--input_format=jsonl',
    '--output=-',
    '--gin.data.TextFileConfig.inputs_key=question',
    '--gin.infer_script.infer.mode=predict_with_aux',
    "--gin.infer_script.write_inferences_to_file.input_fields_to_include=['id', 'inputs_pretokenized']",
  )
  assert status == 0
  (row,) = map(json.loads, out.splitlines())  # no other output
  assert row['inputs'] == {'inputs_pretokenized': 'a <extra_id_0>', 'id': 3}
  assert isinstance(row['aux']['scores'], float)
  assert (
    'Results are in standard output: 1 example in' in err
    and 'standard input, line 2 is skipped' in err
  )
  assert not list(tmp_path.iterdir())


@pytest.mark.full  # by default, test_run.py has workers
def test_workers_of_a_task_by_gin_files(tmp_path, run, capsys):
  flags = [
    *_RECIPE,
    f'--gin.CHECKPOINT_PATH={run / "checkpoint_2"}',
    '--gin.MIXTURE_OR_TASK_SPLIT=validation',
    '--gin.infer_script.infer.mode=score',
    '--num_shards=2',
    f'--gin.INFER_OUTPUT_DIR={tmp_path}',
  ]
  status, out, _ = _main(capsys, *flags, '--shard_id=0')
  name = 'python_keyword_cloze-score.jsonl'
  assert status == 0 and f'{name} will be written when the others are complete (missing: 1)' in out
  status, out, _ = _main(capsys, *flags, '--shard_id=1')
  assert status == 0 and f'{name}: 1,000 examples.\n' in out
  assert 'All 2 shards are complete; this one, 1, has 496 examples in ' in out
  # Those of the merged file, which begins with the other shard's.
  assert next(iter(corpora.python_keyword_cloze('validation')))[0].strip()[:30] in out
  rows = _read(tmp_path / name)
  assert (
    len(rows) == 1000
    and len({(r['inputs']['inputs_pretokenized'], r['score']) for r in rows}) > 990
  )
  assert [r['inputs']['inputs_pretokenized'] for r in rows] == [
    source for source, _ in corpora.python_keyword_cloze('validation')
  ]


@pytest.mark.parametrize(
  'flags, fragments',
  [
    ([], ['RUN is missing', 't5x_lite infer runs/my_run']),
    (['{run}x'], ['got a missing path', 'Did you mean']),
    (
      ['{run}', '--gin.CHECKPOINT_PATH=x'],
      ['--gin.CHECKPOINT_PATH=x', 'must choose a checkpoint, got both'],
    ),
    (['{run}', '--input={in}'], ['INFER_OUTPUT_DIR', '--output=FILE']),
    (['{run}', '--input={in}', '--output={tmp}/'], ['must be the path of a file']),
    (
      ['{run}', '--input={in}', '--output=-', '--num_shards=2', '--shard_id=0'],
      ['--output=- cannot be combined'],
    ),
    (
      ['{run}', '--input={in}', '--output=-', '--shard_id=0', '--gin_file={workers}'],
      ['--output=- cannot be combined'],
    ),
    (['{run}', '--input={tmp}/inn.txt', '--output={out}'], ['inn.txt', "Did you mean 'in.txt'?"]),
    (
      ['{run}', '--input={tmp}/no.csv', '--output={out}'],
      ['--input: no file matches', 'no.csv', 'Write the files first'],
    ),
    (
      ['{run}', '--input={empty}', '--output={out}'],
      ['empty.txt', 'at least one usable line, but it is empty'],
    ),
    (
      ['{run}', '--input={table}', '--output={out}'],
      ["in.csv has no column 'inputs'", 'name its columns with --columns'],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--input_format=jsonl'],
      ['all 1 lines are unusable', '1: not JSON'],
    ),
    (['{run}', '--input={in}', '--output={out}', '--input_format=xls'], ["invalid choice: 'xls'"]),
    (['{run}', '--input_format=text', '--output={out}'], ['--input_format=text', '--input']),
    (
      ['{run}', '--input={in}', '--output={out}', '--shard_id=1'],
      ['shard_id` must be an integer in [0, 1)', 'got 1'],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--num_shards=2'],
      ['shard_id` must be an integer in [0, 2)', 'got None', '--shard_id'],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--gin.infer_script.infer.num_shards=3'],
      ['shard_id` must be an integer in [0, 3)', 'got None', '--shard_id'],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--gin_file={workers}'],
      ['shard_id` must be an integer in [0, 4)', 'got None', '--shard_id'],
    ),
    (['{run}', '--input={in}', '--output={out}', '--gin.BATCH_SIZE=9'], ['9', '8']),
    (['{run}', '--input={in}', '--output={out}', '--gin.MODEL_DIR=x'], ['infer does not use it']),
    (
      ['{run}', '--input={in}', '--output={out}', '--gin.infer_script.infer.mode=predicted'],
      ["mean 'predict'"],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--gin.infer_script.infer.mode=score'],
      ['is a text file', 'targets'],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--gin.infer_script.infer.checkpoint_period=0'],
      ['checkpoint_period` must be', 'got 0.'],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--gin.infer_script.infer.modes=score'],
      ["mean 'mode'"],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--gin.infer_script.infer.merge_func=None'],
      ["no parameter 'merge_func'"],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--gin.INFER_OUTPUT_DIR=x'],
      ['INFER_OUTPUT_DIR', 'no effect'],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--gin.MIXTURE_OR_TASK_NAME=x'],
      ['MIXTURE_OR_TASK_NAME', 'no effect'],
    ),
    (
      ['{run}', '--input={in}', '--output={in}'],
      ['in.txt exists and was not written by this command'],
    ),
    (
      ['{run}', '--input={in}', '--output={in}/out.jsonl'],
      ['cannot be written', 'INFER_OUTPUT_DIR or --output'],
    ),
    (
      ['{run}', '--gin.INFER_OUTPUT_DIR={out}'],
      ["no split 'test'", 'train, validation', '--gin.MIXTURE_OR_TASK_SPLIT=validation'],
    ),
    (
      ['{run}', '--input={in}', '--output={out}', '--gin.network.T5Config.emb_dim=16'],
      ['does not fit', 'stored (8,), wanted (16,)'],
    ),
    (
      [
        '{run}',
        '--input={in}',
        '--output={out}',
        '--gin.vocabularies.ByteVocabulary.extra_ids=500',
      ],
      ['759', '384'],
    ),
    (
      [*_MODEL, '--gin.CHECKPOINT_PATH={run}', '--input={in}', '--output={out}'],
      ['is a run directory'],
    ),
    (
      [*_MODEL, '--gin.CHECKPOINT_PATH={tmp}/checkpoint_1', '--input={in}', '--output={out}'],
      ['got a missing path'],
    ),
    (
      [
        *_MODEL,
        '--gin.CHECKPOINT_MODE=lates',
        '--gin.CHECKPOINT_PATH={run}',
        '--input={in}',
        '--output={out}',
      ],
      ["mean 'latest'"],
    ),
  ],
)
def test_bad_input_is_rejected_before_any_compute(tmp_path, run, capsys, flags, fragments):
  (tmp_path / 'in.txt').write_text('a line\n')
  (tmp_path / 'empty.txt').write_text('')
  (tmp_path / 'in.csv').write_text('question,answer\na,b\n')
  (tmp_path / 'workers.gin').write_text(
    'from __gin__ import dynamic_registration\nfrom t5x_lite.apps import infer as infer_script\n'
    'infer_script.infer.num_shards = 4\n'
  )
  places = {
    '{run}': run,
    '{tmp}': tmp_path,
    '{in}': tmp_path / 'in.txt',
    '{empty}': tmp_path / 'empty.txt',
    '{table}': tmp_path / 'in.csv',
    '{out}': tmp_path / 'out',
    '{workers}': tmp_path / 'workers.gin',
  }

  def fill(flag):
    for name, place in places.items():
      flag = flag.replace(name, str(place))
    return flag

  status, out, err = _main(capsys, *map(fill, flags))
  assert status == 2 and not out
  message = err[err.index('t5x_lite: error: ') :]
  assert len(message) < 900 and 'Traceback' not in err and 'ompil' not in err
  for fragment in fragments:
    assert fragment in message
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    'empty.txt',
    'in.csv',
    'in.txt',
    'workers.gin',
  ]
  assert (tmp_path / 'in.txt').read_text() == 'a line\n'


def test_a_run_does_not_resume_with_other_decoding_options(tmp_path, run, capsys):
  (tmp_path / 'in.txt').write_text('a line\n')
  flags = [run, f'--input={tmp_path}/in.txt', f'--output={tmp_path}/out.jsonl']
  assert _main(capsys, *flags)[0] == 0
  status, _, err = _main(
    capsys, *flags, '--gin.infer_script.write_inferences_to_file.output_ids=True'
  )
  assert status == 2
  assert "--gin.infer_script.write_inferences_to_file.output_ids: was None, now 'True'" in err


def test_required_values_are_those_of_t5x():
  for name, wanted in (
    (
      'runs/infer.gin',
      {
        'MIXTURE_OR_TASK_NAME',
        'TASK_FEATURE_LENGTHS',
        'CHECKPOINT_PATH',
        'INFER_OUTPUT_DIR',
        'MODEL',
      },
    ),
    (
      'runs/infer_from_tfexample_file.gin',
      {'TF_EXAMPLE_FILE_PATHS', 'FEATURE_LENGTHS', 'CHECKPOINT_PATH', 'INFER_OUTPUT_DIR', 'MODEL'},
    ),
  ):
    assert set(gin_syntax.missing_macros([gin_syntax.read_file(name)])) == wanted


def test_script_and_command_are_one_program():
  outs = [
    subprocess.run(
      [sys.executable, *start, '--help'], cwd=_ROOT, capture_output=True, text=True, timeout=60
    ).stdout
    for start in (['scripts/infer.py'], ['-m', 't5x_lite', 'infer'])
  ]
  assert outs[0] == outs[1] and '--shard_id' in outs[0]
