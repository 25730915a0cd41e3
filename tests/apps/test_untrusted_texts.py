"""Texts of files and other processes reach the terminal and the log only in a form that controls neither."""

import importlib
import json
import logging
import shutil
import unicodedata

from flax import serialization
import numpy as np
import pytest

from moe import __main__ as moe_main
from t5x_lite.checkpoints.locks import lease
from t5x_lite.command_line import cli
from t5x_lite.errors import CheckpointError, did_you_mean
from t5x_lite.formatting import first_names
from t5x_lite.formatting import format_table
from t5x_lite.formatting import group_names
from t5x_lite.formatting import printable
from t5x_lite.runtime.failure import Failure
from t5x_lite.storage import json_lines
from tests.checkpoints.hugging_face.hugging_face_cases import write_safetensors

# Clears a terminal, sets its title, reverses what follows, and begins lines by all characters that some programs take
# for line breaks.
_EVIL = 'a\x1b[2J\x1b]0;t\x07\u202eb\x9b31m\x7f\u2066\u061c\nt5x_lite: forged\rt5x_lite:\u2028t5x_lite:\x85\x00'
_QUOTED = r'a\x1b[2J\x1b]0;t\x07\u202eb\x9b31m\x7f\u2066\u061c\nt5x_lite: forged\rt5x_lite:\u2028t5x_lite:\x85\x00'


def _check(text):
  assert not [c for c in text if unicodedata.category(c) in ('Cc', 'Cf', 'Zl', 'Zp') and c != '\n']
  assert not [line for line in text.splitlines() if line.startswith('t5x_lite: forged')]


def test_what_is_escaped_and_what_stays():
  assert printable(_EVIL) == _QUOTED
  assert printable('\udc80') == r'\udc80'
  for shown in ('naïve', '漢字\u3000仮名', 'a\xa0b', 'क्\u200dष', '👩\u200d🚀', 'שלום'):
    assert printable(shown) == shown
  assert printable('a\n\tb\x1b', keeps_lines=True) == 'a\n\tb\\x1b'


def test_lists_and_tables_of_names_quote_them():
  texts = [first_names([_EVIL]), did_you_mean('zzz', [_EVIL, 'b']), *group_names([_EVIL])]
  for text in (*texts, format_table([('name',), (_EVIL,)])):
    assert _QUOTED in text
    _check(text)


def _of_a_tensor(folder):
  write_safetensors(folder / 'model.safetensors', {_EVIL: np.zeros(2, np.float32)})


def _of_a_header(folder):
  header = json.dumps({_EVIL: {'dtype': _EVIL, 'shape': [_EVIL], 'data_offsets': [0, 1]}}).encode()
  (folder / 'model.safetensors').write_bytes(len(header).to_bytes(8, 'little') + header)


def _of_an_index(folder):
  text = json.dumps({'weight_map': {'x': _EVIL.replace('\0', '')}})
  (folder / 'model.safetensors.index.json').write_text(text)


def _of_a_shard(folder):
  shard = _EVIL.replace('\0', '')
  write_safetensors(folder / shard, {'y': np.zeros(2, np.float32)})
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': {'x': shard}}))


def _of_t5x(folder):
  (folder / 'config.json').unlink()
  index = {'version': 3, 'optimizer': {'target': {_EVIL: {'driver': _EVIL, 'kvstore': {}}}}}
  (folder / 'checkpoint').write_bytes(serialization.msgpack_serialize(index))


@pytest.mark.parametrize('damage', [_of_a_tensor, _of_a_header, _of_an_index, _of_a_shard, _of_t5x])
def test_names_in_weights(tmp_path, capsys, damage):
  folder = tmp_path / 'weights'
  shutil.copytree('tests/golden/hugging_face/byt5_tiny', folder)
  damage(folder)
  assert cli.main(['convert', '--to=t5x_lite', str(folder), str(tmp_path / 'out')]) == 2
  out, err = capsys.readouterr()
  _check(out + err)
  assert r'\x1b[2J' in err or damage is _of_a_tensor


def test_surplus_tensors_are_quoted():
  from t5x_lite.checkpoints.hugging_face import names

  with pytest.raises(CheckpointError) as caught:
    names.raise_problems([f'surplus {_EVIL} (2,)'], 'folder')
  _check(str(caught.value))


@pytest.mark.parametrize(
  'argv, status', [(['plot', '--metric=nope'], 2), (['plot'], 0), (['report'], 0)]
)
def test_names_of_metrics(tmp_path, capsys, argv, status):
  (tmp_path / 'run' / 'train').mkdir(parents=True)
  name = 'loss'
  if argv[0] == 'report':
    name = 'experts/encoder/layers_1/load'
  with open(tmp_path / 'run' / 'train' / 'metrics.jsonl', 'w', encoding='utf-8') as file:
    for step in range(3):
      row = {'step': step, 'wall_time': step, _EVIL: 1.0, f'{name}{_EVIL}': 2.0, name: [0.5, 0.5]}
      if argv[0] == 'plot':
        row[name] = 0.5
      file.write(json.dumps(row) + '\n')
  program = cli.T5X_LITE
  if argv[0] == 'report':
    program = moe_main.PROGRAM
  argv = [argv[0], str(tmp_path / 'run'), f'--out={tmp_path / "out.png"}', *argv[1:]]
  assert cli.main(argv, program) == status
  out, err = capsys.readouterr()
  _check(out + err)
  assert status == 0 or r'\x1b[2J' in err


@pytest.mark.parametrize(
  'flag',
  [
    f'--gin.MIXTURE_OR_TASK_NAME={_EVIL!r}',
    "--gin.MIXTURE_OR_TASK_NAME='\x1b[2J\u202e",
    '--gin.train_script.tr\x9bin.x=1',
    '--gin_file=\x1b[2J.gin',
  ],
)
def test_names_in_a_configuration(tmp_path, capsys, flag):
  argv = ['train', '--gin_file=recipes/keyword_cloze.gin', f'--gin.MODEL_DIR={tmp_path / "run"}']
  assert cli.main([*argv, flag, '--dry_run', f'--log_dir={tmp_path / "log"}']) == 2
  out, err = capsys.readouterr()
  [log] = (tmp_path / 'log').iterdir()
  _check(out + err + log.read_text())


def test_messages_of_other_processes():
  content = json.dumps({'pid': _EVIL, 'host': _EVIL, 'since': _EVIL})  # of a lock
  assert _QUOTED in lease.holder_name(content)
  _check(lease.holder_name(content))
  failure = Failure.from_message({'process': 1, 'status': 75, 'error': _EVIL, 'phase': _EVIL})
  _check(str(failure))
  assert _QUOTED in str(failure)


def test_log_lines_and_exceptions_of_any_library(tmp_path, capsys, monkeypatch):
  (tmp_path / 'reads_a_file.py').write_text("def read(): raise ValueError('\\x1b[2J')\n")
  monkeypatch.syspath_prepend(tmp_path)

  def run(arguments):
    del arguments
    logging.getLogger('t5x_lite').warning('two\nlines %s', '\x1b[2J')
    logging.getLogger('moe.tools').error('\x9b31m')
    importlib.import_module('reads_a_file').read()

  command = cli.T5X_LITE.commands['plot']._replace(run=run)
  program = cli.T5X_LITE._replace(commands={'plot': command})
  assert cli.main(['plot', 'run', '--out=x.png', '--debug'], program) == 1
  err = capsys.readouterr().err
  _check(err)
  assert 'warning: two\nlines \\x1b[2J\n' in err
  assert '\\x9b31m' in err


def test_json_lines_escape_what_json_does_not():
  line = json_lines.to_line({'text': _EVIL + 'é\u200d'})
  _check(line.replace('\u200d', ''))
  assert json.loads(line) == {'text': _EVIL + 'é\u200d'}
