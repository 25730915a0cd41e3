"""`t5x_lite chat`: pipes, terminals, decoding options and errors."""

import dataclasses
import io
import os
import pathlib
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time

import gin
import pytest

from t5x_lite import decoding
from t5x_lite import notebook
from t5x_lite.apps.chat import run as chat_app
from t5x_lite.checkpoints.hugging_face import get_family
from t5x_lite.checkpoints.hugging_face import tokenizer_files
from t5x_lite.command_line import cli
from t5x_lite.errors import ConfigError
from tests import hub_cache
from tests.apps.common import cloze_run
from tests.checkpoints.hugging_face import hugging_face_cases as cases

_ROOT = pathlib.Path(__file__).parents[3]
_LENGTHS = {'inputs': 16, 'targets': 6}
_MORE = f"""{cloze_run.ONE_DEVICE}
from t5x_lite import decoding
from t5x_lite import models
models.EncoderDecoderModel.decode_fn = @decoding.greedy_search
"""
_LINES = ['<extra_id_0> x in y:', 'é', '']


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run's directory, as if trained: random parameters at steps 3 and 5, and the configuration."""
  model_dir = tmp_path_factory.mktemp('chat') / 'cloze'
  cloze_run.save(model_dir, _LENGTHS, _MORE)
  return model_dir


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


def _chat(capsys, monkeypatch, *argv, text=''):
  """Return (exit status, lines of standard output, standard error)."""
  raw = text if isinstance(text, bytes) else text.encode('utf-8')
  monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(raw), encoding='utf-8'))
  status = cli.main(['chat', *map(str, argv)])
  captured = capsys.readouterr()
  return status, captured.out.splitlines(), captured.err


# ---- Through a pipe --------------------------------------------------------------------------------------------------


def test_a_hugging_face_folder_is_asked_with_the_recipe(capsys, monkeypatch, tmp_path):
  folder = tmp_path / 'byt5'
  architecture = dataclasses.replace(cases.BY_FAMILY['byt5'], vocab_size=384)
  tensors = cases.tensors(architecture, cases.values(architecture, 'float32'))
  cases.make_folder(folder, tensors, cases.config_of(architecture, 'byt5'))
  tokenizer_files.write(folder, get_family('byt5'), None)
  assert notebook.find_run(str(folder)) == (str(folder), str(folder), 'specific')
  status, out, err = _chat(capsys, monkeypatch, folder)
  recipe = ['--gin_file=recipes/finetune_from_hf.gin', f'--gin.INITIAL_CHECKPOINT_PATH={folder}']
  assert status == 2 and not out and ' '.join(recipe) in err
  named = shlex.split(err.rpartition('e.g. ')[2])
  assert _chat(capsys, monkeypatch, folder, *named, text='a\n')[0] == 0
  lengths = "--gin.TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 3}"
  status, out, err = _chat(capsys, monkeypatch, folder, *recipe, lengths, text='a\n')
  assert status == 0 and len(out) == 1 and 'step 0' in err
  hub_cache.add(hub_cache.use(tmp_path / 'cache', monkeypatch), 'google/byt5-tiny', folder)
  name = 'hf://google/byt5-tiny'
  recipe = ['--gin_file=recipes/finetune_from_hf.gin', f'--gin.INITIAL_CHECKPOINT_PATH={name}']
  status, answers, err = _chat(capsys, monkeypatch, name, *recipe, lengths, text='a\n')
  assert status == 0 and answers == out and name in err


def test_each_line_of_a_pipe_is_answered_on_one_line(run, capsys, monkeypatch, tmp_path):
  status, out, err = _chat(capsys, monkeypatch, run, text='\n'.join(_LINES) + '\n')
  assert status == 0 and len(out) == 3
  assert (
    f'{run}/checkpoint_5' in err and 'step 5' in err and 'Compiled' in err and 'Type' not in err
  )
  # The same model in a notebook.
  opened = notebook.open_run(str(run), output_dir=str(tmp_path), batch_size=1)
  assert opened.step == 5
  pairs, aux = opened.predict_with_aux(_LINES)
  for answer, (_, text), log_prob in zip(out, pairs, aux['scores'], strict=True):
    shown, score = answer.split('\t')
    assert re.sub('<extra_id_[0-9]+>', '', shown) == chat_app.one_line(
      text
    )  # the vocabulary itself drops them
    assert float(score) == pytest.approx(log_prob, rel=1e-4)
  opened.close()


@pytest.mark.full
def test_beams(run, capsys, monkeypatch):
  status, out, err = _chat(
    capsys,
    monkeypatch,
    run / 'checkpoint_3',
    '--beam=4',
    '--num_decodes=2',
    '--max_length=4',
    '--gin.DROPOUT_RATE=0.1',
    text='abc',
  )
  assert status == 0 and 'step 3' in err and len(out) == 1
  first, p, second, q = out[0].split('\t')
  assert first != second and float(p) > float(q)


@pytest.mark.full  # by default, tests/evaluation/test_runner.py has seeds
def test_sampling_repeats_and_its_seed_counts(run, capsys, monkeypatch):
  outs = []
  for seed in (0, 0, 1):
    status, out, err = _chat(
      capsys, monkeypatch, run / 'checkpoint_3', '--num_decodes=3', f'--seed={seed}', text='a\na\n'
    )
    assert status == 0 and 'step 3' in err
    assert all(float(score) < 0 for line in out for score in line.split('\t')[1::2])
    assert {line.count('\t') for line in out} <= {1, 3, 5}
    outs.append(out)
  assert outs[0] == outs[1] != outs[2]
  assert outs[0][0] != outs[0][1]  # Each line uses new random numbers.


def test_lines_that_are_not_text_are_named_and_the_rest_is_done(run, capsys, monkeypatch):
  status, out, err = _chat(capsys, monkeypatch, run, text=b'a\n\xff\xfe\na\r\n')
  assert status == 0 and len(out) == 3 and out[0] == out[2] != '' and out[1] == ''
  assert 'Line 2 is not UTF-8' in err


def test_an_empty_pipe_says_so(run, capsys, monkeypatch):
  status, out, err = _chat(capsys, monkeypatch, run)
  assert status == 0 and not out and 'empty' in err


# ---- On a terminal, with a model that answers with capitals ----------------------------------------------------------


class _Loud:
  """In the place of a `Chat`."""

  def answer(self, text):
    return [chat_app.Answer(text.upper(), -0.5), chat_app.Answer(text.title(), -1.5)][
      : text.count(' ') + 1
    ]

  def score(self, text, target):
    return -float(len(text) + len(target))


def _type(monkeypatch, lines, end=EOFError):
  """Return the terminal's output after each typed line, until `end` is raised."""
  shown, out = [], io.StringIO()

  def typed(prompt, waiting=iter(lines)):
    assert prompt == '> '
    shown.append(out.getvalue())
    out.seek(0), out.truncate()
    try:
      return next(waiting)
    except StopIteration:
      raise end from None

  monkeypatch.setattr('builtins.input', typed)
  chat_app.on_terminal(_Loud(), out)
  return [*shown[1:], out.getvalue()]


def test_typed_lines_and_commands(monkeypatch):
  shown = _type(
    monkeypatch,
    [':score x', 'hi', 'to you', '', ':score two', '::help', ':help', ':scor', ':quit', 'never'],
  )
  assert shown[0] == 'No input yet: type an input first.\n'
  assert shown[1] == 'HI  [-0.5]\n'
  assert shown[2] == '1. TO YOU  [-0.5]\n2. To You  [-1.5]\n'
  assert shown[3] == '' and shown[4] == '[-9]\n'
  assert shown[5] == ':HELP  [-0.5]\n'
  assert all(name in shown[6] for name in (':score TARGET', ':help', ':quit', '::TEXT'))
  assert ":scor is not a command. Did you mean ':score'?" in shown[7]
  assert len(shown) == 9 and shown[8] == ''


@pytest.mark.parametrize('end', [EOFError, KeyboardInterrupt])
def test_the_terminal_is_left_cleanly(monkeypatch, end):
  assert _type(monkeypatch, ['a'], end) == ['A  [-0.5]\n', '\n']


@pytest.mark.full
def test_a_real_terminal(run):
  master, slave = pty.openpty()
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(_ROOT), 'TERM': 'dumb'}
  process = subprocess.Popen(
    [sys.executable, '-m', 't5x_lite', 'chat', str(run)],
    cwd=_ROOT,
    env=env,
    stdin=slave,
    stdout=slave,
    stderr=slave,
    start_new_session=True,
  )
  os.close(slave)

  def read_until(pattern):
    seen, deadline = '', time.monotonic() + 240
    while not re.search(pattern, seen):
      assert time.monotonic() < deadline, seen
      if select.select([master], [], [], 1.0)[0]:
        try:
          seen += os.read(master, 4096).decode()
        except OSError:  # closed by its end
          assert re.search(pattern, seen), seen
    return seen

  try:
    assert 'checkpoint_5' in read_until(r'Type an input.*\n> $')
    os.write(master, b'abc\n')
    assert re.search(r'\[-\d', read_until(r'\]\r\n> $'))
    os.write(master, b':score d\n')
    read_until(r'\[-\d.*\]\r\n> $')
    os.write(master, b'\x04')
    assert process.wait(60) == 0
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
    os.close(master)


# ---- Decoding options ------------------------------------------------------------------------------------------------


def test_options_choose_the_algorithm(run):
  model = cloze_run.load(run, _LENGTHS, _MORE).argument('model')
  options = chat_app.DecodingOptions
  assert options().apply(model) == (model, {})
  beams, arguments = options(beam_size=3, num_decodes=2).apply(model)
  assert beams.decode_fn is decoding.beam_search and arguments['num_decodes'] == 3
  assert model.decode_fn is not beams.decode_fn
  for given, drawn in (
    ({'num_decodes': 2}, {'temperature': 1.0, 'topk': 0, 'topp': 0.0}),
    ({'temperature': 0.5}, {'temperature': 0.5, 'topk': 0, 'topp': 0.0}),
    ({'topk': 5}, {'temperature': 1.0, 'topk': 5, 'topp': 0.0}),
    ({'topp': 0.9, 'temperature': 2}, {'temperature': 2.0, 'topk': 0, 'topp': 0.9}),
  ):
    sampling, arguments = options(**given).apply(model)
    assert (
      sampling.decode_fn is decoding.temperature_sample and arguments['decoder_params'] == drawn
    )


@pytest.mark.parametrize(
  'of_training, lengths',
  [
    ({'inputs': 16, 'targets': 6}, {'inputs': 16, 'targets': 6}),
    ({'targets': 9}, {'inputs': 4, 'targets': 5}),
    ({'targets': 1}, {'inputs': 1, 'targets': 1}),
  ],
)
def test_lengths(of_training, lengths):
  assert chat_app.feature_lengths(of_training, None, None) == lengths
  assert chat_app.feature_lengths(of_training, 7, 2) == {'inputs': 7, 'targets': 2}
  with pytest.raises(ConfigError, match='max_length` must be .* got 0'):
    chat_app.feature_lengths(of_training, None, 0)


def test_a_run_without_lengths_needs_both():
  with pytest.raises(
    ConfigError, match='`--max_length` must be .*no length of targets .*Set --max_input'
  ):
    chat_app.feature_lengths({}, 7, None)
  assert chat_app.feature_lengths({}, 7, 2) == {'inputs': 7, 'targets': 2}


# ---- Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'flags, fragments',
  [
    (['--beam=0'], ['`--beam` must be', 'got 0']),
    (['--num_decodes=0'], ['num_decodes', '0']),
    (['--num_decodes=3', '--beam=2'], ['--num_decodes=3 and --beam=2 cannot be combined']),
    (['--beam=2', '--topk=3'], ['beam=2', 'topk=3']),
    (['--topk=3', '--topp=0.5'], ['topk=3', 'topp=0.5']),
    (['--temperature=-1'], ['temperature', '-1']),
    (['--temperature=nan'], ['temperature']),
    (['--topp=1.5'], ['topp', '1.5']),
    (['--seed=-1'], ['seed']),
    (['--max_length=0'], ['max_length']),
    (['--max_lenght=3'], ["Did you mean '--max_length'?"]),
    (['--gin.TRAIN_STEPSS=3'], ["Did you mean 'TRAIN_STEPS'?"]),
    (['--gin.network.T5Config.emb_dim=16'], ['checkpoint_5', 'another shape', 'stored', 'wanted']),
    (['--gin.vocabularies.ByteVocabulary.extra_ids=200'], ['459', '384']),
  ],
)
def test_bad_flags_are_rejected(run, capsys, monkeypatch, flags, fragments):
  status, out, err = _chat(capsys, monkeypatch, run, *flags, text='a\n')
  assert status == 2 and not out and err.count('error: ') == 1 and 'Traceback' not in err
  for fragment in fragments:
    assert fragment in err


def test_bad_paths_are_rejected(run, tmp_path, capsys, monkeypatch):
  (tmp_path / 'a_file').write_text('')
  (tmp_path / 'empty').mkdir()
  copied = tmp_path / 'without_config' / 'checkpoint_5'
  copied.parent.mkdir()
  copied.symlink_to(run / 'checkpoint_5')
  for path, fragments in (
    (run / 'checkpoint_6', ['got a missing path', "Did you mean 'checkpoint_"]),
    (tmp_path / 'a_file', ['a file']),
    (tmp_path / 'empty', ['no checkpoint']),
    (copied.parent, ['config.gin', '--gin_file=']),
    (run.parent, ['no checkpoint']),
  ):
    status, out, err = _chat(capsys, monkeypatch, path, text='a\n')
    assert status == 2 and not out and len(err.splitlines()) == 1
    for fragment in fragments:
      assert fragment in err


@pytest.mark.full  # by default, tests/apps/infer/test_command.py has a run without config.gin
def test_gin_files_instead_of_config_gin(run, capsys, monkeypatch, tmp_path):
  (tmp_path / 'checkpoint_5').symlink_to(run / 'checkpoint_5')
  (tmp_path / 'more.gin').write_text(_MORE)
  flags = [
    '--gin_file=recipes/keyword_cloze.gin',
    f'--gin_file={tmp_path}/more.gin',
    *(f'--gin.{flag}' for flag in cloze_run.bindings(_LENGTHS)),
  ]
  status, out, _ = _chat(capsys, monkeypatch, tmp_path, *flags, text='abc\n')
  assert status == 0 and out == _chat(capsys, monkeypatch, run, text='abc\n')[1]
