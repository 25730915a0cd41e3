"""The origin of weights: the tokenizer of the run, and the model card: the run, and the model that it started from."""

import dataclasses
import json
import re
import sys
import types

import pytest

from t5x_lite import checkpoints
from t5x_lite import tree_utils
from t5x_lite.apps.convert import run as convert
from t5x_lite.errors import ConfigError
from tests import hub_cache
from tests.apps.convert import convert_cases as cases
from tests.checkpoints.hugging_face import hugging_face_cases

_METRICS = {
  'inference_eval/cloze/exact_match': 0.4751,
  'inference_eval/mean/exact_match': 0.1234,
  'training_eval/cloze/loss': 0.8652,
  'training_eval/cloze/non_padding_fraction/overall': 0.4321,
}
_CARD = '---\nlanguage: en\nlicense: apache-2.0\nbase_model: {base}\n---\n# A model\n'


def _card(source, output):
  convert.convert(source, str(output), to='hugging_face')
  return (output / 'README.md').read_text()


# As gin writes it; the vocabulary of the model counts, whatever other bindings there are.
_VOCABULARY = """FOLDER = %INITIAL_CHECKPOINT_PATH
VOCABULARY = @tokenizer_folders.hugging_face_vocabulary()
models.EncoderDecoderModel.output_vocabulary = %VOCABULARY
tokenizer_folders.hugging_face_vocabulary.folder = \\
    %FOLDER
"""


def _run(folder, start, architecture=hugging_face_cases.SMALL):
  """Make a run with an evaluated checkpoint; return the run's directory."""
  save_cfg = checkpoints.SaveCheckpointConfig()
  with checkpoints.CheckpointManager(str(folder), save_cfg=save_cfg) as manager:
    manager.save(
      3,
      tree_utils.unflatten_dict(cases.make_state(architecture)),
      metadata={'param_layout': 't5', 'run': {'data': {'mixture_or_task_name': 'cloze'}}},
      metrics=_METRICS,
    )
  if start is not None:
    (folder / 'config.gin').write_text(f'A = 1\nINITIAL_CHECKPOINT_PATH = \\\n    {start!r}\n')
  return str(folder)


def test_an_exported_run_has_the_tokenizer_of_its_folder(tmp_path, monkeypatch):
  folder, _ = cases.folder(
    tmp_path / 'source', vocab_size=40, eos_token_ids=(2,), decoder_start_token_id=3
  )
  tokenizer = {
    'tokenizer.json': '{"model": {"vocab": {"a": 0}}, "added_tokens": [] } ',
    'tokenizer_config.json': '{ "eos_token": "a"}',
  }
  for name, text in tokenizer.items():
    (tmp_path / 'source' / name).write_text(text)
  architecture = dataclasses.replace(hugging_face_cases.SMALL, vocab_size=40)
  run = _run(tmp_path / 'run', folder, architecture)
  path = tmp_path / 'run' / 'config.gin'
  path.write_text(path.read_text() + _VOCABULARY)
  done = convert.convert(run, str(tmp_path / 'out'), to='hugging_face')
  assert f'The tokenizer is that of the run, {folder} (config.gin).' in done.notes
  assert done.has_tokenizer
  for name, text in tokenizer.items():
    assert (tmp_path / 'out' / name).read_text() == text
  config = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert (config['eos_token_id'], config['decoder_start_token_id']) == (2, 3)
  # Another vocabulary of the model, and a folder that is gone.
  path.write_text(path.read_text().replace('= @tokenizer', '= @vocabularies.Other()  # @tokenizer'))
  done = convert.convert(run, str(tmp_path / 'other'), to='hugging_face')
  assert not done.has_tokenizer and any('--tokenizer=PATH' in note for note in done.notes)
  path.write_text(f'INITIAL_CHECKPOINT_PATH = {str(tmp_path / "gone")!r}\n{_VOCABULARY}')
  with pytest.raises(
    ConfigError, match="gone' in its config.gin, must exist: got none. .*--tokenizer=PATH"
  ):
    convert.convert(run, str(tmp_path / 'gone_out'), to='hugging_face')
  assert not (tmp_path / 'gone_out').exists()
  convert.convert(run, str(tmp_path / 'named'), to='hugging_face', tokenizer=folder)
  # The code of the card, with a model that repeats its inputs.
  monkeypatch.setitem(sys.modules, 'transformers', _fake_transformers())
  names = {}
  card = (tmp_path / 'named' / 'README.md').read_text()
  exec(re.search('```python\n(.*?)```', card, re.DOTALL)[1], names)  # pylint: disable=exec-used
  assert names['answer']('a text') == 'a text'


def _fake_transformers():
  class Tokenizer:
    def __call__(self, text, return_tensors):
      assert return_tensors == 'pt'
      return {'input_ids': [text]}

    def decode(self, ids, skip_special_tokens):
      assert skip_special_tokens
      return ids

  model = types.SimpleNamespace(generate=lambda input_ids, max_new_tokens: input_ids)
  return types.SimpleNamespace(
    AutoModelForSeq2SeqLM=types.SimpleNamespace(from_pretrained=lambda folder: model),
    AutoTokenizer=types.SimpleNamespace(from_pretrained=lambda folder: Tokenizer()),
  )


def test_the_card_names_the_task_and_the_metrics_of_the_run(tmp_path):
  card = _card(_run(tmp_path / 'run', None), tmp_path / 'out')
  assert 'Trained on the task `cloze`.' in card
  assert '| inference_eval/cloze/exact_match | 0.4751 |' in card
  assert '| training_eval/cloze/loss | 0.8652 |' in card
  assert '0.1234' not in card and '0.4321' not in card
  # Not known here.
  assert 'license' not in card and 'base_model' not in card
  # Deleted in transformers 5.
  assert 'text2text' not in card and 'AutoModelForSeq2SeqLM.from_pretrained(folder)' in card


def test_a_chain_of_runs_has_the_base_model_of_its_start(tmp_path):
  folder, _ = cases.folder(tmp_path / 'source')
  (tmp_path / 'source/README.md').write_text(_CARD.format(base='google/t5-v1_1-small'))
  first = _run(tmp_path / 'first', folder)
  card = _card(_run(tmp_path / 'second', f'{first}/checkpoint_3'), tmp_path / 'out')
  head = card.split('---\n')[1].splitlines()
  assert {'base_model: google/t5-v1_1-small', 'license: apache-2.0'} <= set(head)
  # Also through a converted checkpoint, and without a run.
  convert.convert(folder, str(tmp_path / 'converted'), to='t5x_lite')
  for number, source in enumerate([str(tmp_path / 'converted'), folder]):
    assert head == _card(source, tmp_path / f'out_{number}').split('---\n')[1].splitlines()


def test_the_name_on_the_hub_is_the_base_model(tmp_path, monkeypatch):
  cache = hub_cache.use(tmp_path / 'cache', monkeypatch)
  cases.folder(tmp_path / 'source')
  (tmp_path / 'source/README.md').write_text(_CARD.format(base='google/older'))
  hub_cache.add(cache, 'google/tiny', tmp_path / 'source')
  card = _card('hf://google/tiny@main', tmp_path / 'out')
  assert 'base_model: google/tiny\nlicense: apache-2.0\n' in card


@pytest.mark.parametrize('start', ['missing/folder', 'hf://google/missing'])
def test_a_start_that_is_gone_leaves_the_license_out(tmp_path, monkeypatch, start):
  hub_cache.use(tmp_path / 'cache', monkeypatch)
  card = _card(_run(tmp_path / 'run', start), tmp_path / 'out')
  assert 'license' not in card and ('google/missing' in card) == start.startswith('hf://')
