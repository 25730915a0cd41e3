"""Whole recipes, trained to their end from their seqio Tasks: what their headers promise (part of `make test-full`)."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]


def _train(recipe: str, model_dir: pathlib.Path, *flags: str) -> str:
  # A user's run: one device, no test configuration.
  env = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'} | {
    'PYTHONPATH': str(_ROOT)
  }
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      't5x_lite',
      'train',
      f'--gin_file=recipes/{recipe}.gin',
      f'--gin.MODEL_DIR={model_dir}',
      *flags,
    ],
    env=env,
    capture_output=True,
    text=True,
    check=False,
    cwd=model_dir.parent,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout


def _metrics(folder: pathlib.Path) -> list[dict[str, float]]:
  return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


@pytest.mark.full
@pytest.mark.parametrize(
  'recipe, source, bar',
  [
    ('keyword_cloze', 'seqio', 0.60),
    ('keyword_cloze', 'builtin', 0.60),
    ('keyword_cloze_long', 'seqio', 0.75),
    ('keyword_cloze_decoder_only', 'seqio', 0.70),
  ],
)
def test_cloze_recipes_learn(tmp_path, recipe, source, bar):
  shown = _train(recipe, tmp_path / 'run', f'--gin.DATA_SOURCE={source}')
  final = _metrics(tmp_path / 'run' / 'inference_eval' / 'python_keyword_cloze')[-1]
  assert final['exact_match'] >= bar
  # The output at the end: paths of the results, the metrics, and ten predictions with their targets.
  assert str(tmp_path / 'run') in shown
  assert f'exact_match {final["exact_match"]:.3g}' in shown
  assert shown.rstrip().count('<extra_id_0>') >= 10


@pytest.mark.full
@pytest.mark.parametrize(
  'recipe, task, num_steps',
  [
    ('docs_span_corruption', 'python_docs_span_corruption', 200),
    ('cloze_and_docs_mixture', 'python_docs_span_corruption', 200),
    ('function_cloze', 'python_function_cloze', 40),
  ],
)
def test_recipes_without_exact_answers_lower_the_loss(tmp_path, recipe, task, num_steps):
  _train(
    recipe,
    tmp_path / 'run',
    f'--gin.TRAIN_STEPS={num_steps}',
    f'--gin.EVAL_PERIOD={num_steps // 2}',
  )
  losses = [row['loss'] for row in _metrics(tmp_path / 'run' / 'training_eval' / task)]
  assert len(losses) == 2
  assert losses[-1] < 0.95 * losses[0]


@pytest.mark.full
def test_walk_of_the_page_on_weights(tmp_path):
  """Vocabulary, pretraining, conversion, fine-tuning with one binding: whole and of chosen parameters."""
  commands = [
    ['vocab', 'docs.model', '--corpus=python_docs', '--vocab_size=924', '--extra_ids=100'],
    [
      'train',
      '--gin_file=recipes/docs_span_corruption_sentencepiece.gin',
      '--gin.MODEL_DIR=runs/docs',
      '--gin.VOCABULARY_FILE=docs.model',
      '--gin.TRAIN_STEPS=200',
      '--gin.EVAL_PERIOD=200',
    ],
    ['convert', 'runs/docs', 'hf/docs', '--to=hugging_face', '--tokenizer=docs.model'],
    *(
      [
        'train',
        f'--gin_file=recipes/{recipe}.gin',
        f'--gin.MODEL_DIR=runs/{recipe}',
        '--gin.INITIAL_CHECKPOINT_PATH=hf/docs',
        '--gin.TRAIN_STEPS=250',
        '--gin.schedules.create_learning_rate_scheduler.base_learning_rate=0.01',
      ]
      for recipe in ('finetune_from_hf', 'finetune_chosen_params')
    ),
    ['convert', 'runs/finetune_from_hf', 'hf/cloze', '--to=hugging_face'],
  ]
  env = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'} | {
    'PYTHONPATH': str(_ROOT)
  }
  for command in commands:
    done = subprocess.run(
      [sys.executable, '-m', 't5x_lite', *command],
      env=env,
      capture_output=True,
      text=True,
      check=False,
      cwd=tmp_path,
    )
    assert done.returncode == 0, (command, done.stderr[-3000:])
  for recipe in ('finetune_from_hf', 'finetune_chosen_params'):
    metrics = _metrics(tmp_path / 'runs' / recipe / 'inference_eval' / 'python_keyword_cloze')
    assert metrics[-1]['exact_match'] >= 0.3, (recipe, metrics[-1])
  assert {'config.json', 'model.safetensors', 'spiece.model', 'tokenizer.json'} <= {
    path.name for path in (tmp_path / 'hf' / 'cloze').iterdir()
  }
