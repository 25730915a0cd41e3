"""The command vocab."""

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.command_line import cli
from t5x_lite.data import builtin_tasks
from t5x_lite.storage import files


def test_command(tmp_path, capsys):
  model = str(tmp_path / 'docs.model')
  assert (
    cli.main(
      [
        'vocab',
        model,
        '--corpus=python_docs',
        '--split=validation',
        '--vocab_size=400',
        '--task=python_keyword_cloze',
        '--max_examples=50',
      ]
    )
    == 0
  )
  out = capsys.readouterr().out
  assert '400 pieces, 500 ids with 100 sentinels' in out and 'vocab_size = 512' in out
  assert [
    line.split()[:2] for line in out.splitlines() if line.startswith(('inputs ', 'targets '))
  ] == [['inputs', '50'], ['targets', '50']]
  # Looking alone; a keyword with its end does not fit into one id.
  assert (
    cli.main(
      [
        'vocab',
        model,
        '--task=python_keyword_cloze',
        '--max_examples=50',
        "--task_feature_lengths={'targets': 1}",
      ]
    )
    == 0
  )
  out = capsys.readouterr().out
  assert '100.00 %' in out and '50 of 50 texts are longer than 1' in out


@pytest.mark.parametrize(
  'flags, fragment',
  [
    (['--corpus=python_docs', '--text=x'], 'cannot be combined'),
    (['--corpus=python_docs'], 'requires --vocab_size'),
    (['--vocab_size=10'], 'requires text to train on'),
    ([], 'does not exist'),
    (['--text=none.txt', '--vocab_size=9'], "'none.txt': No such file"),
    (['--corpus=python_docs', '--vocab_size=400', '--task_feature_lengths=5'], 'must be a mapping'),
    (
      ['--corpus=python_docs', '--vocab_size=400', '--task=python_keyword_close'],
      'python_keyword_cloze',
    ),
    (['--corpus=python_docs', '--vocab_size=400', '--gin.X=1'], 'no gin'),
  ],
)
def test_command_rejects(tmp_path, capsys, flags, fragment):
  assert cli.main(['vocab', str(tmp_path / 'a.model'), *flags]) == 2
  captured = capsys.readouterr()
  assert fragment in captured.err and not captured.out and not list(tmp_path.iterdir())


def test_recipe_uses_the_vocabulary_of_its_header(tmp_path, capsys):
  model = tmp_path / 'python_docs.model'
  assert (
    cli.main(['vocab', str(model), '--corpus=python_docs', '--vocab_size=924', '--extra_ids=100'])
    == 0
  )
  out = capsys.readouterr().out
  assert (
    'network.T5Config.vocab_size = 1024' in out and 'network.TransformerConfig.vocab_size' in out
  )
  vocabulary = data.SentencePieceVocabulary(str(model), extra_ids=100)
  task = builtin_tasks.docs_span_corruption_task(vocabulary=vocabulary)
  example = task.table('train', {'inputs': 64, 'targets': 14}).examples(0, np.arange(1))[0]
  # Three spans are hidden, behind the first three sentinels, which are the last ids.
  assert [i for i in example['inputs'] if i > 1000] == [1023, 1022, 1021]
  assert (
    len(example['inputs']) == 64 and example['inputs'][-1] == 1 and len(example['targets']) == 14
  )
  # The run has the vocabulary of its data, and one of another size would not pass.
  run = [
    'train',
    '--gin_file=recipes/docs_span_corruption_sentencepiece.gin',
    f'--gin.VOCABULARY_FILE={model}',
    f'--gin.MODEL_DIR={tmp_path}/run',
    '--dry_run',
  ]
  assert cli.main(run) == 0
  assert 'token_embedder/embedding' in capsys.readouterr().out
  assert cli.main([*run, '--gin.network.T5Config.vocab_size=1000']) == 2
  assert '1024' in capsys.readouterr().err


def test_files_in_a_store(store, capsys):
  files.write(f'{store.root}/text.txt', 'some words of a text, and some more\n' * 20)
  files.write(f'{store.root}/text.jsonl', '{"text": "some words of a text, and some more"}\n' * 20)
  for text in (f'--text={store.root}/text.txt', f'--json_lines={store.root}/text.jsonl'):
    argv = ['vocab', f'{store.root}/v/{text[2:6]}.model', text, '--vocab_size=20']
    assert cli.main(argv) == 0 and 'vocab_size = 128' in capsys.readouterr().out
  assert cli.main(argv) == 2 and 'exists' in capsys.readouterr().err
  assert [name for name in store.names() if name.startswith('v/')] == [
    'v/json.model',
    'v/json.model.json',
    'v/text.model',
    'v/text.model.json',
  ]
  assert (
    cli.main(['vocab', f'{store.root}/v/none.model']) == 2
    and 'does not exist' in capsys.readouterr().err
  )
