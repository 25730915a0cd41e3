"""Flags and gin bindings of constraints reach decoding in every command that decodes."""

import json

import pytest

from t5x_lite import decoding
from t5x_lite.command_line import cli
from t5x_lite.models import generation

_BEAM = '--gin.models.EncoderDecoderModel.decode_fn=@decoding.beam_search'
_GIN = """
from __gin__ import dynamic_registration
from t5x_lite import decoding
from t5x_lite import models
models.EncoderDecoderModel.constraints = @decoding.Constraints()
decoding.Constraints:
  min_decode_len = 3
  repetition_penalty = 1.5
"""


@pytest.fixture
def outputs(tmp_path):
  path = tmp_path / 'labels.txt'
  path.write_text('yes\nno\n')
  return str(path)


@pytest.fixture
def processors(monkeypatch):
  """The logit processors of all decodings."""
  found, generate = [], generation.generate

  def spy(*args, logit_processor=None, **kwargs):
    found.append(logit_processor)
    return generate(*args, logit_processor=logit_processor, **kwargs)

  monkeypatch.setattr(generation, 'generate', spy)
  return found


@pytest.mark.parametrize('command', ['eval', 'infer', 'chat'])
def test_flags_are_added_to_the_constraints_of_the_configuration(
  command, command_line, tmp_path, processors
):
  (tmp_path / 'constraints.gin').write_text(_GIN)
  flags = [
    f'--gin_file={tmp_path}/constraints.gin',
    '--no_repeat_ngram_size=2',
    '--repetition_penalty=1',
  ]
  assert cli.main([*command_line(command), *flags]) == 0
  assert set(processors) == {decoding.Constraints(no_repeat_ngram_size=2, min_decode_len=3)}


def test_training_evaluates_with_the_constraints_of_its_configuration(
  command_line, tmp_path, processors
):
  (tmp_path / 'constraints.gin').write_text(_GIN)
  arguments = [*command_line('train'), f'--gin_file={tmp_path}/constraints.gin', '--dry_run']
  assert cli.main(arguments) == 0
  assert set(processors) == {decoding.Constraints(min_decode_len=3, repetition_penalty=1.5)}


def test_only_allowed_outputs_are_predicted(command_line, outputs, tmp_path, capsys):
  arguments = command_line('infer')
  flags = [_BEAM, f'--allowed_outputs={outputs}']
  assert cli.main([*arguments, *flags]) == 0
  rows = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
  assert len(rows) == 2 and {row['prediction'] for row in rows} <= {'yes', 'no'}
  # Two of three beams are outputs, and each of them once.
  arguments = command_line('chat')
  capsys.readouterr()
  assert cli.main([*arguments, '--beam=3', '--num_decodes=2', f'--allowed_outputs={outputs}']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2
  for line in lines:
    first, first_score, second, second_score = line.split('\t')
    assert {first, second} == {'yes', 'no'}
    assert float(first_score) > float(second_score) or len(first) != len(second)


def test_a_run_does_not_resume_with_other_constraints(command_line, outputs, capsys):
  arguments = [*command_line('infer'), f'--allowed_outputs={outputs}']
  assert cli.main(arguments) == 0
  assert cli.main(arguments) == 0
  assert 'computed before' in capsys.readouterr().out
  with open(outputs, 'a', encoding='utf-8') as file:
    file.write('maybe\n')
  for changed in (arguments, [*arguments[:-1], '--min_decode_len=2'], arguments[:-1]):
    assert cli.main(changed) == 2
    assert 'has other settings (constraints' in capsys.readouterr().err


@pytest.mark.parametrize('command', ['eval', 'infer', 'chat'])
@pytest.mark.parametrize(
  'flags, message',
  [
    (['--no_repeat_ngram_size=-1'], '`no_repeat_ngram_size` must be an integer >= 0, got -1'),
    (['--repetition_penalty=0'], '`repetition_penalty` must be a number > 0, got 0.0'),
    (['--min_decode_len=6'], '`min_decode_len` must be at most the number of tokens to decode, 5'),
    (['--allowed_outputs=missing.txt'], "with one output a line, got 'missing.txt': "),
  ],
)
def test_bad_flags_are_rejected(command, flags, message, command_line, capsys):
  assert cli.main([*command_line(command), *flags]) == 2
  assert message in capsys.readouterr().err


def test_scores_have_no_constraints(command_line, capsys):
  arguments = command_line('infer')
  assert cli.main([*arguments, '--gin.infer_script.infer.mode=score', '--min_decode_len=2']) == 2
  assert (
    "--min_decode_len must be used with predictions, got mode='score'" in capsys.readouterr().err
  )
