"""The number of decodes that a configuration binds reaches decoding in every command, or is an error before a run."""

import json

import gin
import pytest

from t5x_lite import layer_stacks
from t5x_lite.command_line import cli
from t5x_lite.models import generation
from t5x_lite.models import token_losses
from tests.apps.common import cloze_run

_METHOD = '--gin.models.EncoderDecoderModel.predict_batch_with_aux'
_BEAM = '--gin.models.EncoderDecoderModel.decode_fn=@decoding.beam_search'


@pytest.mark.parametrize('command', ['train', 'eval', 'infer', 'chat', 'export'])
def test_bound_decodes_reach_decoding(command, command_line, tmp_path, monkeypatch):
  found, generate = [], generation.generate

  def spy(*args, num_decodes, **kwargs):
    found.append(num_decodes)
    return generate(*args, num_decodes=num_decodes, **kwargs)

  monkeypatch.setattr(generation, 'generate', spy)
  flags = [_BEAM, f'{_METHOD}.num_decodes=3', f'{_METHOD}.return_all_decodes=True']
  if command == 'train':
    flags.append('--dry_run')
  assert cli.main([*command_line(command), *flags]) == 0
  assert set(found) == {3}
  if command == 'infer':
    rows = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
    assert [len(row['prediction']) for row in rows] == [3, 3]


def test_greedy_search_rejects_decodes_before_the_run(command_line, tmp_path, capsys):
  assert cli.main([*command_line('train'), f'{_METHOD}.num_decodes=3']) == 2
  message = capsys.readouterr().err
  assert (
    '`num_decodes` must be' in message
    and 'got 3' in message
    and 'decode_fn=greedy_search' in message
  )
  assert 'Compiled the training step' not in message and not list(
    (tmp_path / 'run').glob('checkpoint_*')
  )


def test_a_bound_method_keeps_the_declarations_of_the_class(tmp_path):
  more = 'from t5x_lite import models\nmodels.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 1\n'
  model = cloze_run.load(tmp_path, cloze_run.DECODED_LENGTHS, cloze_run.ONE_DEVICE + more).argument(
    'model'
  )
  assert layer_stacks.is_accepted_by(model, model.module) and token_losses.is_supported_by(model)
  changed = type('Changed', (type(model).__base__,), {})
  assert not layer_stacks.is_accepted_by(changed.__new__(changed))
  gin.clear_config()
