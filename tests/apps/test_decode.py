"""`--decode=mbr` in all commands that decode, and the macro of training."""

import json

import pytest

from t5x_lite import decoding
from t5x_lite.command_line import cli

_OPTIONS = '--gin.decoding.MinimumBayesRisk.num_samples=3'


@pytest.fixture
def chosen(monkeypatch):
  """Samples of each choice."""
  found = []
  choose = decoding.MinimumBayesRisk.choose

  def spy(self, samples):
    found.append(samples)
    return choose(self, samples)

  monkeypatch.setattr(decoding.MinimumBayesRisk, 'choose', spy)
  return found


@pytest.mark.parametrize('command', ['train', 'eval', 'infer', 'chat'])
def test_commands_choose_among_samples(command, command_line, tmp_path, chosen):
  flags = {
    'train': ['--gin.EVAL_DECODE_FN=@decoding.MinimumBayesRisk()'],
    'eval': ['--decode=mbr'],
    'infer': ['--decode=mbr', '--gin.infer_script.infer.mode=predict_with_aux'],
    'chat': ['--decode=mbr'],
  }[command]
  arguments = [*command_line(command), *flags]
  assert cli.main([*arguments, _OPTIONS]) == 0
  assert chosen and {len(samples) for samples in chosen} == {3}
  if command == 'infer':
    first = (tmp_path / 'out.jsonl').read_text()
    for line, samples in zip(map(json.loads, first.splitlines()), chosen, strict=False):
      index, utility = decoding.MinimumBayesRisk(num_samples=3).choose(samples)
      assert line['aux']['utility'] == pytest.approx(utility, abs=1e-4)
      assert 'scores' in line['aux'] and isinstance(line['prediction'], str)
      del index
    # The same seed gives the same results; without the flag, the command does not mix results.
    again = [each.replace('out.jsonl', 'again.jsonl') for each in arguments]
    assert cli.main([*again, _OPTIONS]) == 0
    assert (tmp_path / 'again.jsonl').read_text() == first
    arguments.remove('--decode=mbr')
    assert cli.main(arguments) == 2


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--decode=mbr', '--beam=4'], '--decode and --beam=4 cannot be combined'),
    (['--decode=mbr', '--temperature=2'], 'options of --decode are gin parameters'),
    (['--decode=mbr', '--num_decodes=2'], '--decode and --num_decodes=2 cannot be combined'),
    (
      ['--decode=mbr', '--gin.decoding.MinimumBayesRisk.num_samples=1'],
      'num_samples` must be an integer >= 2',
    ),
    (
      ['--decode=mbr', '--gin.decoding.MinimumBayesRisk.utility=chrff'],
      "Did you mean 'chrf'",
    ),
  ],
)
def test_flags_that_contradict_each_other(flags, message, command_line, capsys):
  assert cli.main([*command_line('chat'), *flags]) == 2
  assert message in capsys.readouterr().err


def test_a_model_that_chooses_on_the_host_cannot_be_exported(command_line, capsys):
  decode_fn = '--gin.models.EncoderDecoderModel.decode_fn=@decoding.MinimumBayesRisk()'
  assert cli.main([*command_line('export'), decode_fn]) == 2
  assert 'to export' in capsys.readouterr().err


def test_constraints_apply_to_the_samples(command_line, tmp_path, chosen):
  (tmp_path / 'allowed.txt').write_text('for\nif\n')
  flags = [_OPTIONS, '--decode=mbr', f'--allowed_outputs={tmp_path}/allowed.txt']
  assert cli.main([*command_line('infer'), *flags]) == 0
  lines = (tmp_path / 'out.jsonl').read_text().splitlines()
  assert len(lines) == 2 and {json.loads(line)['prediction'] for line in lines} <= {'for', 'if'}
  assert {text for samples in chosen[:2] for text in samples} <= {'for', 'if'}
