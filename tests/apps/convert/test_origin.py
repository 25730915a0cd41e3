"""The origin of weights in the model card: the run, and the model that it started from."""

import pytest

from t5x_lite import checkpoints
from t5x_lite import tree_utils
from t5x_lite.apps.convert import run as convert
from tests import hub_cache
from tests.apps.convert import convert_cases as cases

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


def _run(folder, start):
  """Make a run with an evaluated checkpoint; return the run's directory."""
  save_cfg = checkpoints.SaveCheckpointConfig()
  with checkpoints.CheckpointManager(str(folder), save_cfg=save_cfg) as manager:
    manager.save(
      3,
      tree_utils.unflatten_dict(cases.make_state()),
      metadata={'param_layout': 't5', 'run': {'data': {'mixture_or_task_name': 'cloze'}}},
      metrics=_METRICS,
    )
  if start is not None:
    (folder / 'config.gin').write_text(f'A = 1\nINITIAL_CHECKPOINT_PATH = \\\n    {start!r}\n')
  return str(folder)


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
