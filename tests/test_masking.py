"""Secrets of a command line are in no record and no log line."""

import logging
import sys

import pytest

from t5x_lite import cli
from t5x_lite import gin_utils
from t5x_lite import masking
from t5x_lite import runtime


@pytest.mark.parametrize(
  'words, masked',
  [
    (['--api_key=abc'], ['--api_key=***']),
    (['--apikey', 'abc', 'x'], ['--apikey', '***', 'x']),
    (['--gin.mine.load.access_token="abc"'], ['--gin.mine.load.access_token=***']),
    (['--gin.train/mine.load.clientSecret=abc'], ['--gin.train/mine.load.clientSecret=***']),
    (['--gin.API_KEYS=("a", "b")'], ['--gin.API_KEYS=***']),
    (['--gin_bindings=DB_PASSWORD = "a b"'], ['--gin_bindings=DB_PASSWORD =***']),
    (
      ['--gin_bindings', 'A = 1\nDB_CREDENTIALS = "a"\nB = 2'],
      ['--gin_bindings', 'A = 1\nDB_CREDENTIALS =***\nB = 2'],
    ),
    (['--gin.A={"api_key": "abc", "b": "c"}'], ['--gin.A={"api_key": "***", "b": "c"}']),
    (
      ['env', 'HF_TOKEN=abc', 'AWS_SECRET_ACCESS_KEY=abc'],
      ['env', 'HF_TOKEN=***', 'AWS_SECRET_ACCESS_KEY=***'],
    ),
    (['--gin.A="s3://me:a@b@host/x"'], ['--gin.A="s3://me:***@host/x"']),
    (['https://host/x?a=1&token=abc&b=2'], ['https://host/x?a=1&token=***&b=2']),
    (
      ['--gin.mine.text_password=abc', '--gin.key=abc'],
      ['--gin.mine.text_password=***', '--gin.key=***'],
    ),
    (['--pin_password=1234', '--secret', '12'], ['--pin_password=***', '--secret', '***']),
  ],
)
def test_masked(words, masked):
  assert masking.masked_words(words) == masked


@pytest.mark.parametrize(
  'word',
  [
    '--gin_file=recipes/keyword_cloze.gin',
    '--gin.MIXTURE_OR_TASK_NAME="python_keyword_cloze"',
    '--cluster_secret_file=/shared/secret',
    '--gin.infer_script.create_task_from_tfexample_file.inputs_key="inputs"',
    '--gin.NUM_TOKENS=128',
    '--gin.moe.TokensChooseRouter.ignore_padding_tokens=True',
    '--gin.moe.TokensChooseRouter.num_selected_experts="a"',
    '--gin.MY_KEY=%OTHER',
    '--key=question',
    '--gin.data.SpanCorruption.key="content"',
    '--gin.mine/data.file_task.keys={"inputs": "words", "targets": "digits"}',
    '--gin.data.TextFileConfig.task_keys={"inputs": ["words"]}',
    '--gin.mine.task.text_key="content"',
    '--gin.mine.task.label_keys=("a", "b")',
    '--gin.EOS_TOKEN="</s>"',
    '--gin.mine.task.token_type="word"',
    "--gin.LOSS_NORMALIZING_FACTOR='NUM_REAL_TARGET_TOKENS'",
    '--gin.MODEL_DIR=gs://bucket/runs',
    '/mnt/a@b:c/key=1',
  ],
)
def test_kept(word):
  assert masking.masked_words([word, 'x']) == [word, 'x']
  assert masking.masked_text(f'got {word}', [word]) == f'got {word}'


@pytest.mark.parametrize(
  'word',
  [
    '--gin.PATH=https://host/x?token=abcdefgh&a=1&password=qwertyui',
    "--gin_bindings=mine.api_key='abcdefgh'\nmine.a = 1\nmine.password='qwertyui'",
    '--gin.A={"api_key": "abcdefgh", "secret": "qwertyui"}',
  ],
)
def test_messages_have_no_secret_of_a_word_with_several(word):
  text = 'got abcdefgh for a=1 and qwertyui'
  assert masking.masked_text(text, [word]) == 'got *** for a=1 and ***'


def test_records_and_commands_to_resume(tmp_path, monkeypatch):
  argv = ['python', '-m', 't5x_lite', 'train', '--gin.API_KEY="sk-123456"', '--gin.A="a b"']
  monkeypatch.setattr(sys, 'orig_argv', argv)
  command = "python -m t5x_lite train '--gin.API_KEY=***' '--gin.A=\"a b\"'"
  monkeypatch.setenv('JAX_TEST_TOKEN', 'sk-123456')
  assert runtime.command_line().endswith(command)
  assert "JAX_TEST_TOKEN='***' " in runtime.command_line()
  path = tmp_path / 'events.jsonl'
  with pytest.raises(ValueError, match='sk-'), runtime.EventLog(path) as log:
    log.open()
    logging.getLogger('t5x_lite').warning('The key %s is wrong.', 'sk-123456')
    raise ValueError('got sk-123456')
  events = list(runtime.read_events(path))
  assert events[0].details['command'] == command
  assert [event.details.get('message') for event in events[1:3]] == [
    'The key *** is wrong.',
    'got ***',
  ]
  assert 'sk-' not in path.read_text()


def test_log_lines_and_errors(tmp_path, capsys):
  def run(invocation):
    logging.getLogger('t5x_lite').warning('%s', invocation.flags.out)
    raise cli.ConfigError(f'got {invocation.flags.out!r}.')

  command = cli.T5X_LITE.commands['plot']._replace(run=run)
  program = cli.T5X_LITE._replace(commands={'plot': command})
  out = f'--out=s3://me:pass@{tmp_path}?token=abcdefgh'
  assert cli.main(['plot', 'run', out, '--debug'], program) == 2
  err = capsys.readouterr().err
  assert 'warning: s3://me:***@' in err and "error: got 's3://me:***@" in err
  assert 'pass@' not in err and 'abcdefgh' not in err


def test_an_error_that_repeats_the_value_of_a_flag(tmp_path, capsys):
  argv = ['train', '--gin_file=recipes/keyword_cloze.gin', f'--gin.MODEL_DIR={tmp_path}']
  assert cli.main([*argv, '--gin.data.DatasetConfig.hub_token="hf_1234567"', '--dry_run']) == 2
  assert cli.main([*argv, '--hub_token="hf_1234567"']) == 2
  assert cli.main([*argv, '--gin.HUB_TOKEN="hf_1234567']) == 2
  err = capsys.readouterr().err
  assert err.count('error:') == 3 and 'hf_1234567' not in err


def test_recorded_settings(tmp_path, monkeypatch):
  (tmp_path / 'mine_for_masking.py').write_text("def run(api_key='', url='', num_tokens=1): ...\n")
  (tmp_path / 'a.gin').write_text(
    'from __gin__ import dynamic_registration\n'
    'import mine_for_masking as mine\n'
    "mine.run.api_key = 'a'\n"
    "mine.run.url = 's3://me:a@host'\n"
    'mine.run.num_tokens = 2\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  configuration = gin_utils.load('mine_for_masking.run', gin_utils.read([str(tmp_path / 'a.gin')]))
  assert configuration.settings(['jax']) == {
    'mine.run.api_key': '***',
    'mine.run.url': "'s3://me:***@host'",
    'mine.run.num_tokens': '2',
  }
