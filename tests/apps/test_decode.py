"""`--decode=mbr` in all commands that decode, and the macro of training."""

import io
import json

import gin
import pytest

from t5x_lite import decoding
from t5x_lite.command_line import cli
from tests.apps.common import cloze_run

_LENGTHS = {'inputs': 16, 'targets': 4}
_OPTIONS = '--gin.decoding.MinimumBayesRisk.num_samples=3'


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('run') / 'cloze'
  cloze_run.save(folder, _LENGTHS)
  return str(folder)


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
def test_commands_choose_among_samples(command, run, tmp_path, monkeypatch, chosen):
  monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO(b'x\n'), encoding='utf-8'))
  (tmp_path / 'in.txt').write_text('x\ny\n')
  few = '--gin.evaluation.InferenceEvalConfig.num_examples=8'
  arguments = {
    'train': [
      '--gin_file=recipes/keyword_cloze.gin',
      *(f'--gin.{each}' for each in cloze_run.bindings(_LENGTHS)),
      '--gin.BATCH_SIZE=8',
      f'--gin.MODEL_DIR={tmp_path}/run',
      '--gin.TRAIN_STEPS=1',
      '--gin.EVAL_STEPS=1',
      '--gin.EVAL_DECODE_FN=@decoding.MinimumBayesRisk()',
      few,
    ],
    'eval': [run, few, f'--gin.EVAL_OUTPUT_DIR={tmp_path}/eval', '--decode=mbr'],
    'infer': [
      run,
      f'--input={tmp_path}/in.txt',
      f'--output={tmp_path}/out.jsonl',
      '--gin.infer_script.infer.mode=predict_with_aux',
      '--decode=mbr',
    ],
    'chat': [run, '--decode=mbr'],
  }[command]
  assert cli.main([command, *arguments, _OPTIONS]) == 0
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
    assert cli.main([command, *again, _OPTIONS]) == 0
    assert (tmp_path / 'again.jsonl').read_text() == first
    assert cli.main([command, *arguments[:-1]]) == 2


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
def test_flags_that_contradict_each_other(flags, message, run, capsys):
  assert cli.main(['chat', run, *flags]) == 2
  assert message in capsys.readouterr().err


def test_a_model_that_chooses_on_the_host_cannot_be_exported(run, tmp_path, capsys):
  decode_fn = '--gin.models.EncoderDecoderModel.decode_fn=@decoding.MinimumBayesRisk()'
  assert cli.main(['export', run, f'--gin.MODEL_OUTPUT_DIR={tmp_path}', decode_fn]) == 2
  assert 'to export' in capsys.readouterr().err


def test_constraints_apply_to_the_samples(run, tmp_path, chosen):
  (tmp_path / 'in.txt').write_text('x\ny\n')
  (tmp_path / 'allowed.txt').write_text('for\nif\n')
  arguments = [run, f'--input={tmp_path}/in.txt', f'--output={tmp_path}/out.jsonl', _OPTIONS]
  flags = ['--decode=mbr', f'--allowed_outputs={tmp_path}/allowed.txt']
  assert cli.main(['infer', *arguments, *flags]) == 0
  lines = (tmp_path / 'out.jsonl').read_text().splitlines()
  assert len(lines) == 2 and {json.loads(line)['prediction'] for line in lines} <= {'for', 'if'}
  assert {text for samples in chosen[:2] for text in samples} <= {'for', 'if'}
