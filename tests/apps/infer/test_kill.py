"""`kill -9` of `t5x_lite infer` at random moments: resumed runs write every line once, in order."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from t5x_lite import data
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite.networks import t5
from t5x_lite.storage import files
from t5x_lite.storage import json_lines
from tests import processes
from tests.apps.infer import toy_infer

_ROOT = pathlib.Path(__file__).parents[3]
_NUM_LINES = 12_000  # some seconds of work, in 750 chunks
_CONFIG = {
  'vocab_size': 384,
  'dtype': 'float32',
  'emb_dim': 8,
  'num_heads': 4,
  'num_encoder_layers': 1,
  'num_decoder_layers': 1,
  'head_dim': 4,
  'mlp_dim': 8,
  'mlp_activations': ('gelu', 'linear'),
  'logits_via_embedding': False,
}


def _save_checkpoint(folder):
  vocabulary = data.ByteVocabulary(extra_ids=125)
  model = models.EncoderDecoderModel(
    t5.Transformer(t5.T5Config(**_CONFIG)), vocabulary, vocabulary, optimizers.adamw()
  )
  shapes = {'encoder_input_tokens': (8, 16), 'decoder_input_tokens': (8, 6)}
  return toy_infer.save_new_state(folder, model, shapes, 1)


def _command(checkpoint, source, output, shard_id, num_shards):
  sizes = [f'--gin.network.T5Config.{name}={value!r}' for name, value in _CONFIG.items()]
  return [
    sys.executable,
    '-m',
    't5x_lite',
    'infer',
    '--gin_file=recipes/keyword_cloze.gin',
    *sizes,
    f'--gin.CHECKPOINT_PATH={checkpoint}',
    '--gin.BATCH_SIZE=8',
    f'--input={source}',
    f'--output={output}',
    "--gin.TASK_FEATURE_LENGTHS={'inputs': 16, 'targets': 6}",
    '--gin.infer_script.infer.checkpoint_period=2',
    '--gin.infer_script.infer.mode=predict_with_aux',
    f'--num_shards={num_shards}',
    f'--shard_id={shard_id}',
  ]


def _start(command):
  environment = {
    **os.environ,
    'PYTHONPATH': str(_ROOT),
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': processes.xla_flags(2),
  }
  return subprocess.Popen(
    command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  )


def _finish(command):
  process = _start(command)
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output
  return output


@pytest.mark.full
@pytest.mark.parametrize('num_shards, num_kills', [(1, 8), (2, 6)])
def test_kills_lose_and_double_nothing(tmp_path, num_shards, num_kills):
  seed = int(os.environ.get('T5X_LITE_TEST_SEED', random.SystemRandom().randrange(2**31)))
  print(f'T5X_LITE_TEST_SEED={seed} chooses the moments of the kills.')
  rng = random.Random(seed)
  checkpoint = _save_checkpoint(tmp_path / 'run')
  lines = [
    f'{i} {"".join(rng.choices("abcdef <>", k=rng.randrange(10)))}' for i in range(_NUM_LINES)
  ]
  (tmp_path / 'in.txt').write_text('\n'.join(lines) + '\n')
  _finish(_command(checkpoint, tmp_path / 'in.txt', tmp_path / 'whole.jsonl', 0, 1))
  kills = 0
  for number in range(num_kills):
    shard_id = number % num_shards
    process = _start(
      _command(checkpoint, tmp_path / 'in.txt', tmp_path / 'killed.jsonl', shard_id, num_shards)
    )
    folder = tmp_path / 'killed.jsonl.run'
    before = len(list(folder.rglob('chunk-*.json')))
    goal = before + rng.randrange(60)  # 0: while it starts
    while process.poll() is None and len(list(folder.rglob('chunk-*.json'))) < goal:
      time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.05 if goal > before else 3))
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), output
    kills += alive
    print(f'kill {number}: {len(list(folder.rglob("chunk-*.json")))} chunks')
  for shard_id in range(num_shards):
    _finish(
      _command(checkpoint, tmp_path / 'in.txt', tmp_path / 'killed.jsonl', shard_id, num_shards)
    )
  assert kills
  assert (tmp_path / 'killed.jsonl').read_bytes() == (tmp_path / 'whole.jsonl').read_bytes()
  rows = [
    json.loads(line)
    for line in (tmp_path / 'killed.jsonl').read_text(encoding='utf-8').split('\n')[:-1]
  ]
  assert [row['inputs']['inputs_pretokenized'] for row in rows] == lines
  assert not list(folder.rglob('chunk-*')) and not list(folder.rglob('*.tmp'))


@pytest.mark.full
def test_a_signal_prints_the_command_to_resume(tmp_path):
  checkpoint = _save_checkpoint(tmp_path / 'run')
  (tmp_path / 'in.txt').write_text('\n'.join(map(str, range(_NUM_LINES))) + '\n')
  command = _command(checkpoint, tmp_path / 'in.txt', tmp_path / 'out.jsonl', 0, 1)
  process = _start(command)
  while process.poll() is None and not list((tmp_path / 'out.jsonl.run').rglob('chunk-*.json')):
    time.sleep(0.01)
  process.send_signal(signal.SIGINT)
  output, _ = process.communicate(timeout=60)
  assert process.returncode == 75, output
  assert 'To resume:\n' in output and '--input=' in output.partition('To resume:\n')[2]
  assert 'the last ' in _finish(command)
  rows = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
  assert [row['inputs']['inputs_pretokenized'] for row in rows] == list(map(str, range(_NUM_LINES)))


@pytest.mark.full
def test_kills_with_results_in_a_store(tmp_path, store):
  checkpoint = _save_checkpoint(tmp_path / 'run')
  files.write(f'{store.root}/in.txt', '\n'.join(map(str, range(1_000))) + '\n')
  command = _command(checkpoint, f'{store.root}/in.txt', f'{store.root}/out.jsonl', 0, 1)
  for goal in (0, 3, 20):
    process = _start(command)
    while (
      process.poll() is None and len([name for name in store.names() if 'chunk-' in name]) <= goal
    ):
      time.sleep(0.01)
    assert process.poll() is None
    process.kill()
    process.communicate()
  assert 'the last ' in _finish(command)
  rows = [row for _, row in json_lines.read(f'{store.root}/out.jsonl')]
  assert [row['inputs']['inputs_pretokenized'] for row in rows] == list(map(str, range(1_000)))
  assert not any('chunk-' in name for name in store.names())
