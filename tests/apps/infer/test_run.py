"""Inference with a toy model: order, remainders, shards, interruptions, and early errors."""

import copy
import functools
import io
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import errors
from t5x_lite import runtime
from t5x_lite.apps import infer as infer_package
from t5x_lite.apps.infer import loop
from t5x_lite.apps.infer import run as infer_app
from t5x_lite.apps.infer.jsonl import write_inferences_to_file
from t5x_lite.evaluation import PredictRunner
from t5x_lite.storage import files
from t5x_lite.trainer import state_init
from tests import stores
from tests.apps.infer import store_cases
from tests.apps.infer import toy_infer


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  return toy_infer.save_checkpoint(tmp_path_factory.mktemp('trained'))


@pytest.fixture
def lines(tmp_path):
  """A file of 23 lines: not a multiple of the batch, nor of the chunk."""
  path = tmp_path / 'in.txt'
  path.write_text('\n'.join(toy_infer.texts(23)) + '\n')
  return path


def _read(path):
  return [
    json.loads(line) for line in pathlib.Path(path).read_text(encoding='utf-8').split('\n')[:-1]
  ]


def _expected(texts, batch_size=4, seed=0):
  """Return the model's prediction for each text, computed here batch by batch."""
  found = []
  for number in range(-(-len(texts) // batch_size)):
    rows = np.zeros((batch_size, toy_infer.LENGTH), np.int32)
    batch = texts[number * batch_size : (number + 1) * batch_size]
    for row, text in zip(rows, batch, strict=False):
      ids = [*toy_infer.VOCABULARY.encode(text), 1]
      row[: len(ids)] = ids
    rng = jax.random.fold_in(jax.random.key(seed), number)
    tokens, aux = toy_infer.model().predict_batch_with_aux(
      toy_infer.params(), {'encoder_input_tokens': rows}, rng=rng
    )
    found += [
      (toy_infer.VOCABULARY.decode(t), float(s))
      for t, s in zip(tokens, aux['scores'], strict=False)
    ][: len(batch)]
  return found


def test_every_line_is_predicted_once_in_order(tmp_path, lines, checkpoint, capsys):
  (path,) = toy_infer.infer(toy_infer.text_cfg(lines), checkpoint, tmp_path / 'out')
  assert path == str(tmp_path / 'out' / 'in-predict.jsonl-00000-of-00001')
  texts = toy_infer.texts(23)
  expected = _expected(texts)
  assert _read(path) == [
    {'inputs': {'inputs_pretokenized': text}, 'prediction': prediction}
    for text, (prediction, _) in zip(texts, expected, strict=True)
  ]
  out = capsys.readouterr().out
  assert f'Results are in {path}: 23 examples' in out and 'examples/s' in out
  assert sum(text in out for text in texts[:4]) == 3 and expected[2][0] in out
  assert len({prediction for prediction, _ in expected}) > 15  # the draws make a difference
  before = pathlib.Path(path).stat().st_mtime_ns
  assert toy_infer.infer(toy_infer.text_cfg(lines), checkpoint, tmp_path / 'out') == [path]
  assert (
    'computed before' in capsys.readouterr().out and pathlib.Path(path).stat().st_mtime_ns == before
  )


def test_aux_scores_and_ids(tmp_path, lines, checkpoint):
  write_fn = functools.partial(
    write_inferences_to_file, output_ids=True, input_fields_to_include=['inputs']
  )
  (path,) = toy_infer.infer(
    toy_infer.text_cfg(lines),
    checkpoint,
    tmp_path,
    mode='predict_with_aux',
    write_fn=write_fn,
    random_seed=7,
    output_file='mine.jsonl',
  )
  assert path == str(tmp_path / 'mine.jsonl')
  for row, text, (prediction, score) in zip(
    _read(path), toy_infer.texts(23), _expected(toy_infer.texts(23), seed=7), strict=True
  ):
    assert row['prediction'] == prediction and row['aux'] == {
      'scores': pytest.approx(score, rel=1e-2)
    }
    assert row['prediction_tokens'] == [*toy_infer.VOCABULARY.encode(prediction), 1]
    ids = [*toy_infer.VOCABULARY.encode(text), 1]
    assert row['inputs'] == {'inputs_pretokenized': text, 'inputs': ids}


def test_scores_are_those_of_the_model(tmp_path, checkpoint):
  texts = toy_infer.texts(6)
  (tmp_path / 'in.jsonl').write_text(
    ''.join(json.dumps({'inputs': '', 'targets': text}) + '\n' for text in texts)
  )
  (path,) = toy_infer.infer(
    toy_infer.text_cfg(tmp_path / 'in.jsonl'), checkpoint, tmp_path, mode='score'
  )
  rows = np.zeros((6, toy_infer.LENGTH), np.int32)
  for row, text in zip(rows, texts, strict=True):
    row[: len(text) + 1] = [*toy_infer.VOCABULARY.encode(text), 1]
  batch = {
    'decoder_target_tokens': rows,
    'decoder_input_tokens': np.pad(rows, ((0, 0), (1, 0)))[:, :-1],
  }
  scores = toy_infer.model().score_batch(toy_infer.params(), jax.tree.map(jnp.asarray, batch))
  found = _read(path)
  assert [row['score'] for row in found] == pytest.approx(np.asarray(scores).tolist(), rel=1e-5)
  assert found[2]['inputs'] == {'inputs_pretokenized': '', 'targets_pretokenized': texts[2]}


@pytest.mark.parametrize('num_shards', [2, pytest.param(7, marks=pytest.mark.full)])
def test_shards_give_the_results_of_one_worker(tmp_path, lines, checkpoint, num_shards, capsys):
  cfg = toy_infer.text_cfg(lines)
  (one,) = toy_infer.infer(cfg, checkpoint, tmp_path / 'one')
  order = list(range(num_shards))
  random.Random(3).shuffle(order)
  for shard_id in order:
    capsys.readouterr()
    (path,) = toy_infer.infer(
      cfg, checkpoint, tmp_path / 'n', num_shards=num_shards, shard_id=shard_id
    )
  assert path == str(tmp_path / 'n' / 'in-predict.jsonl')
  assert pathlib.Path(path).read_bytes() == pathlib.Path(one).read_bytes()
  out = capsys.readouterr().out
  assert (
    f'in-predict.jsonl: 23 examples.\nAll {num_shards} shards are complete; this one, {order[-1]}, has '
    in out
  )
  shards = sorted((tmp_path / 'n').glob('*-of-*'))
  assert len(shards) == num_shards and sum(len(_read(shard)) for shard in shards) == 23


def test_interruptions_change_nothing(tmp_path, lines, checkpoint):
  seed = int(os.environ.get('T5X_LITE_TEST_SEED', random.SystemRandom().randrange(2**31)))
  print(f'T5X_LITE_TEST_SEED={seed} chooses where the process dies.')
  rng = random.Random(seed)
  cfg = toy_infer.text_cfg(lines)
  (whole,) = toy_infer.infer(cfg, checkpoint, tmp_path / 'whole')
  deaths = 0
  while deaths < 100:
    disk = store_cases.DyingDisk(rng.randrange(6, 30))
    try:
      with disk.in_use():
        (path,) = toy_infer.infer(
          cfg, checkpoint, tmp_path / 'killed', checkpoint_period=rng.randrange(1, 4)
        )
      break
    except store_cases.Killed:
      deaths += 1
  assert pathlib.Path(path).read_bytes() == pathlib.Path(whole).read_bytes(), seed
  assert deaths, seed


@stores.mostly('s3')
def test_a_store_gives_the_results_of_a_disk(tmp_path, lines, checkpoint, store):
  (whole,) = toy_infer.infer(toy_infer.text_cfg(lines), checkpoint, tmp_path / 'whole')
  files.write(f'{store.root}/in.txt', lines.read_bytes())
  cfg = toy_infer.text_cfg(f'{store.root}/in.txt')
  with pytest.raises(store_cases.Killed), store_cases.DyingDisk(12).in_use():
    toy_infer.infer(cfg, checkpoint, f'{store.root}/out')
  assert any('chunk-' in name for name in store.names())
  (path,) = toy_infer.infer(cfg, checkpoint, f'{store.root}/out')
  assert path == f'{store.root}/out/in-predict.jsonl-00000-of-00001'
  assert files.path(path).read_bytes() == pathlib.Path(whole).read_bytes()
  assert not any('chunk-' in name for name in store.names())


def test_a_signal_keeps_the_results(tmp_path, lines, checkpoint, monkeypatch, capsys):
  cfg = toy_infer.text_cfg(lines)
  (whole,) = toy_infer.infer(cfg, checkpoint, tmp_path / 'whole')
  calls = []
  run = PredictRunner.run

  def counting(self, kind, batches, *args, **kwargs):
    def counted():
      for batch in batches:
        calls.append(batch[1])
        if len(calls) == 3:
          os.kill(os.getpid(), signal.SIGTERM)
        yield batch

    return run(self, kind, counted(), *args, **kwargs)

  monkeypatch.setattr(PredictRunner, 'run', counting)
  with pytest.raises(errors.StoppedOnSignalError, match='Stopped after 12 examples') as stopped:
    toy_infer.infer(cfg, checkpoint, tmp_path / 'stopped')
  assert stopped.value.exit_code == 75 and calls == [0, 1, 2]
  assert 'by SIGTERM; the results so far are saved. To resume:\n  ' in str(stopped.value)
  (path,) = toy_infer.infer(cfg, checkpoint, tmp_path / 'stopped')
  assert calls[3:] == [3, 4, 5]  # nothing is computed twice
  assert 'the last 11' in capsys.readouterr().out
  assert pathlib.Path(path).read_bytes() == pathlib.Path(whole).read_bytes()


def test_a_signal_ends_the_wait_for_input_that_stalls(tmp_path, lines, checkpoint, monkeypatch):
  cfg = toy_infer.text_cfg(lines)
  (whole,) = toy_infer.infer(cfg, checkpoint, tmp_path / 'whole')
  released, encode, first = (
    threading.Event(),
    toy_infer.LetterVocabulary.encode,
    toy_infer.texts(23)[12],
  )

  def stall(self, text):
    if text == first:  # of batch 3
      threading.Timer(
        0.5, os.kill, (os.getpid(), signal.SIGTERM)
      ).start()  # the batches before are done by then
      released.wait()
    return encode(self, text)

  with monkeypatch.context() as patch:
    patch.setattr(toy_infer.LetterVocabulary, 'encode', stall)
    patch.setattr(loop, '_PATIENCE_SECONDS', 0.1)  # not an option, and seconds in reality
    try:
      with pytest.raises(errors.StoppedOnSignalError, match='Stopped after 12 examples'):
        toy_infer.infer(cfg, checkpoint, tmp_path / 'stopped', checkpoint_period=5)
    finally:
      released.set()
  (path,) = toy_infer.infer(cfg, checkpoint, tmp_path / 'stopped', checkpoint_period=5)
  assert pathlib.Path(path).read_bytes() == pathlib.Path(whole).read_bytes()


def test_a_write_fn_that_fails_leaves_the_chunks_before_it(tmp_path, lines, checkpoint):
  fails = [True]

  def write(path, inferences, examples, mode, vocabulary):
    if fails[0] and examples[0]['inputs_pretokenized'] == toy_infer.texts(23)[8]:
      raise OSError(28, 'No space left on device', path)
    write_inferences_to_file(path, inferences, examples, mode, vocabulary)

  cfg = toy_infer.text_cfg(lines)
  with pytest.raises(OSError, match='No space'):
    toy_infer.infer(cfg, checkpoint, tmp_path / 'a', write_fn=write)
  assert len(list((tmp_path / 'a').rglob('chunk-*.jsonl'))) == 1
  fails[0] = False
  (path,) = toy_infer.infer(cfg, checkpoint, tmp_path / 'a', write_fn=write)
  (whole,) = toy_infer.infer(cfg, checkpoint, tmp_path / 'whole')
  assert pathlib.Path(path).read_bytes() == pathlib.Path(whole).read_bytes()


def test_chunks_may_stay_apart_and_be_merged_later(tmp_path, lines, checkpoint, monkeypatch):
  cfg = toy_infer.text_cfg(lines)
  (folder,) = toy_infer.infer(cfg, checkpoint, tmp_path, merge_chunked_results=False)
  chunks = sorted(pathlib.Path(folder).glob('chunk-*.jsonl'))
  assert [len(_read(chunk)) for chunk in chunks] == [8, 8, 7]
  together = b''.join(chunk.read_bytes() for chunk in chunks)
  monkeypatch.setattr(PredictRunner, 'compile', None)  # nothing is left to compute
  assert toy_infer.infer(cfg, checkpoint, tmp_path, merge_chunked_results=False) == [folder]
  (path,) = toy_infer.infer(cfg, checkpoint, tmp_path)
  assert pathlib.Path(path).read_bytes() == together and not list(
    pathlib.Path(folder).glob('chunk-*')
  )


def test_tasks_of_a_mixture_and_the_latest_checkpoint(tmp_path, tmp_path_factory, capsys):
  runs = tmp_path_factory.mktemp('runs')
  toy_infer.save_checkpoint(runs, 3)
  toy_infer.save_checkpoint(runs, 9)
  names = [f'infer_task_{tmp_path.name}_{i}' for i in range(2)]
  for i, name in enumerate(names):
    data.register_builtin_task(
      data.text_task(
        name=name,
        texts_fn=lambda split, i=i: [(text, 'a') for text in toy_infer.texts(5 + i, seed=i)],
        splits=('test',),
        vocabulary=toy_infer.VOCABULARY,
      )
    )
  data.register_builtin_mixture(
    data.BuiltinMixture(name=f'{names[0]}_mix', rates=dict.fromkeys(names, 1.0))
  )
  cfg = data.DatasetConfig(
    f'{names[0]}_mix', toy_infer.LENGTHS, 'test', 4, False, 0, source='builtin'
  )
  restore = checkpoints.RestoreCheckpointConfig(path=str(runs), mode='latest')
  paths = toy_infer.infer(cfg, None, tmp_path, restore_checkpoint_cfg=restore)
  assert [pathlib.Path(path).name for path in paths] == [
    f'{name}-predict.jsonl-00000-of-00001' for name in names
  ]
  for i, path in enumerate(paths):
    assert [row['inputs']['inputs_pretokenized'] for row in _read(path)] == toy_infer.texts(
      5 + i, seed=i
    )
  assert 'checkpoint_9' in capsys.readouterr().err
  toy_infer.save_checkpoint(runs, 12)  # meanwhile, training has gone on
  with pytest.raises(errors.ConfigError, match='checkpoint.step: was 9, now 12'):
    toy_infer.infer(cfg, None, tmp_path, restore_checkpoint_cfg=restore)
  with pytest.raises(errors.ConfigError, match='output_file` requires a single task, got 2'):
    toy_infer.infer(cfg, None, tmp_path, restore_checkpoint_cfg=restore, output_file='x')


def test_lengths_that_are_none_are_those_of_the_longest_examples(tmp_path, checkpoint):
  texts = toy_infer.texts(9)
  task = data.text_task(
    name='infer_lengths',
    texts_fn=lambda split: [(text, 'a') for text in texts],
    splits=('test',),
    vocabulary=toy_infer.VOCABULARY,
  )
  found = [
    pathlib.Path(
      *toy_infer.infer(
        data.DatasetConfig(task, lengths, 'test', 4, False, 0, source='builtin'),
        checkpoint,
        tmp_path / name,
      )
    ).read_text(encoding='utf-8')
    for name, lengths in (('computed', None), ('given', {'inputs': 6, 'targets': 2}))
  ]
  assert found[0] == found[1] and max(map(len, texts)) == 5
  assert '"inputs": 6' in (tmp_path / 'computed' / 'feature_lengths.json').read_text()


def test_a_checkpoint_with_another_content_is_rejected(tmp_path, lines):
  state = {'target': jax.device_get(toy_infer.params()), 'state': {'step': np.int32(5)}}

  def save(value):
    cfg = checkpoints.SaveCheckpointConfig(period=1)
    with checkpoints.CheckpointManager(tmp_path / 'run', save_cfg=cfg) as manager:
      manager.save(5, jax.tree.map(lambda leaf: np.full_like(leaf, value), state))
      manager.wait()

  save(1)
  path = tmp_path / 'run' / 'checkpoint_5'
  toy_infer.infer(toy_infer.text_cfg(lines), path, tmp_path / 'out')
  path.rename(tmp_path / 'old')
  save(2)
  with pytest.raises(errors.ConfigError, match='checkpoint.content: was'):
    toy_infer.infer(toy_infer.text_cfg(lines), path, tmp_path / 'out')


def test_a_live_run_keeps_others_out(tmp_path, lines, checkpoint):
  folder = tmp_path / 'in-predict.jsonl.run' / 'shard-00000-of-00001'
  code = (
    'import sys, fcntl, pathlib; p = pathlib.Path(sys.argv[1]); p.mkdir(parents=True);'
    'f = open(p / ".lock", "w"); fcntl.flock(f, fcntl.LOCK_EX); print("held", flush=True); sys.stdin.read()'
  )
  with subprocess.Popen(
    [sys.executable, '-c', code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
  ) as p:
    assert p.stdout.readline() == b'held\n'
    with pytest.raises(
      errors.DirectoryInUseError, match='folder of the run .* is in use .*INFER_OUTPUT_DIR'
    ):
      toy_infer.infer(toy_infer.text_cfg(lines), checkpoint, tmp_path)
    p.stdin.close()


@pytest.mark.parametrize(
  'kwargs, fragments',
  [
    ({'mode': 'predct'}, ["'predct'", "mean 'predict'"]),
    ({'mode': None}, ['None', "'score'"]),
    ({'shard_id': 2, 'num_shards': 2}, ['shard_id` must be an integer in [0, 2)', 'got 2']),
    ({'shard_id': -1}, ['shard_id` must be', 'got -1.']),
    ({'num_shards': 0}, ['num_shards` must be', 'got 0.']),
    ({'num_shards': 1.5}, ['num_shards` must be', 'got 1.5.']),
    ({'checkpoint_period': 0}, ['checkpoint_period` must be', 'got 0.']),
    ({'checkpoint_period': True}, ['checkpoint_period` must be', 'got True.']),
    ({'random_seed': -1}, ['random_seed` must be', 'got -1.']),
    ({'random_seed': None}, ['random_seed` must be', 'got None.']),
    ({'output_file': 'a/b'}, ['output_file` must be', "got 'a/b'."]),
    ({'file_extension': ''}, ['file_extension` must be', "got ''."]),
    ({'batch_size': 3}, ['3', '2']),
    ({'mode': 'score'}, ['is a text file', 'targets']),
    (
      {'restore_checkpoint_cfg': checkpoints.RestoreCheckpointConfig(path='x', mode='all')},
      ['must be the configuration of one checkpoint', "mode='latest'"],
    ),
    (
      {
        'restore_checkpoint_cfg': checkpoints.RestoreCheckpointConfig(
          path='no/checkpoint_4', mode='specific'
        )
      },
      ['no/checkpoint_4'],
    ),
    (
      {
        'dataset_cfg': data.DatasetConfig(
          'python_keyword_cloze', toy_infer.LENGTHS, 'test', 4, False, 0, source='builtin'
        )
      },
      ['vocabulary'],
    ),
  ],
)
def test_rejected_before_anything_is_written_or_computed(
  tmp_path, lines, checkpoint, monkeypatch, kwargs, fragments
):
  monkeypatch.setattr(PredictRunner, 'compile', None)
  kwargs = dict(kwargs)
  cfg = kwargs.pop('dataset_cfg', None) or toy_infer.text_cfg(lines, kwargs.pop('batch_size', 4))
  with pytest.raises(errors.T5xLiteError) as caught:
    toy_infer.infer(cfg, checkpoint, tmp_path / 'out', **kwargs)
  assert caught.value.exit_code == errors.ExitCode.INVALID_INPUT
  for fragment in fragments:
    assert fragment in str(caught.value)
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('output_dir', ['', 'file/out', 'ftp://bucket/out', 'a\0b'])
def test_paths_that_cannot_be_written(tmp_path, lines, checkpoint, output_dir, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'file').write_text('a file')
  with pytest.raises(errors.T5xLiteError) as caught:
    toy_infer.infer(toy_infer.text_cfg(lines), checkpoint, output_dir)
  assert caught.value.exit_code == errors.ExitCode.INVALID_INPUT and 'MODEL_DIR' not in str(
    caught.value
  )


def test_a_checkpoint_of_another_model_is_rejected_by_name(tmp_path, lines):
  with checkpoints.CheckpointManager(
    tmp_path / 'run', save_cfg=checkpoints.SaveCheckpointConfig(period=1)
  ) as manager:
    params = jax.device_get(toy_infer.params())
    manager.save(
      5,
      {
        'target': {**params, 'hidden': np.zeros((3, 4), np.float32)},
        'state': {'step': np.int32(5)},
      },
    )
    manager.wait()
  with pytest.raises(errors.CheckpointError, match=r'hidden.*stored \(3, 4\), wanted \(8, 16\)'):
    toy_infer.infer(toy_infer.text_cfg(lines), tmp_path / 'run' / 'checkpoint_5', tmp_path / 'out')
  assert not (tmp_path / 'out').exists()


def test_results_without_a_row_for_each_example_are_rejected(
  tmp_path, lines, checkpoint, monkeypatch
):
  def predict(self, params, batch, rng=None, **kwargs):
    return batch['encoder_input_tokens'], {'x': jnp.zeros(3)}

  monkeypatch.setattr(toy_infer.LetterModel, 'predict_batch_with_aux', predict)
  with pytest.raises(
    errors.DataError,
    match=r"output predict_with_aux\[1\]\['x'\] must have 4 rows, .* got shape \(3,\)",
  ):
    toy_infer.infer(toy_infer.text_cfg(lines), checkpoint, tmp_path, mode='predict_with_aux')
  # Settings that compiling rejects are not recorded: the corrected command may have other settings.
  monkeypatch.undo()
  toy_infer.infer(
    toy_infer.text_cfg(lines), checkpoint, tmp_path, mode='predict_with_aux', random_seed=1
  )


def test_results_that_are_no_ids_are_written(tmp_path, lines, checkpoint, monkeypatch):
  """Predictions of a model of a user, such as a number for each example, have no end."""

  def predict(self, params, batch, rng=None, **kwargs):
    return batch['encoder_input_tokens'][:, 0] / 2, {}

  monkeypatch.setattr(toy_infer.LetterModel, 'predict_batch_with_aux', predict)
  cfg = toy_infer.text_cfg(lines)
  written = []

  def write(path, inferences, examples, mode, vocabulary):
    written.extend(inferences[0].tolist())
    with open(path, 'w', encoding='utf-8') as file:
      file.writelines('{}\n' for _ in examples)

  toy_infer.infer(cfg, checkpoint, tmp_path, write_fn=write)
  assert written and {type(value) for value in written} == {float}


def test_progress_counts_examples_and_says_how_long_it_takes():
  stream, now = io.StringIO(), [0.0]
  progress = runtime.Progress(stream=stream, clock=lambda: now[0], unit='example')
  progress.begin(1000, 200)
  now[0] = 10.0
  progress.update(400, {})
  progress.begin(0, 0)  # The number of examples is unknown.
  now[0] = 20.0
  progress.update(50, {}, last=True)
  assert stream.getvalue().splitlines() == [
    'example   400/1,000 ( 40%)  20 examples/s  ETA 0:30',
    'example 50  5 examples/s  took 0:10',
  ]


def test_app_has_the_names_of_t5x():
  for name in ('infer', 'write_inferences_to_file', 'create_task_from_tfexample_file'):
    assert callable(getattr(infer_app, name))


def test_a_function_merges_the_chunks(tmp_path, lines, checkpoint):
  cfg = toy_infer.text_cfg(lines)
  (usual,) = toy_infer.infer(cfg, checkpoint, tmp_path / 'usual')
  calls = []

  def merge(output_dir, output_fname, tmp_dir, step):
    calls.append(step)
    if len(calls) > 1:  # the first call writes nothing
      infer_package.merge_chunks_to_file(output_dir, output_fname, tmp_dir, step)
      (pathlib.Path(output_dir) / f'{output_fname}.more').write_text(output_fname)

  with pytest.raises(errors.ConfigError, match='merge_fn` must be a function that writes'):
    toy_infer.infer(cfg, checkpoint, tmp_path / 'own', merge_fn=merge)
  (own,) = toy_infer.infer(cfg, checkpoint, tmp_path / 'own', merge_fn=merge)
  assert calls == [5, 5] and pathlib.Path(own).read_bytes() == pathlib.Path(usual).read_bytes()
  assert pathlib.Path(f'{own}.more').read_text(encoding='utf-8') == pathlib.Path(own).name
  for shard_id in range(2):  # results of another form are not merged over shards
    paths = toy_infer.infer(
      cfg, checkpoint, tmp_path / 'shards', merge_fn=merge, shard_id=shard_id, num_shards=2
    )
  assert (
    paths[0].endswith('-00001-of-00002')
    and not pathlib.Path(paths[0].removesuffix('-00001-of-00002')).exists()
  )


def test_files_of_a_merge_function_replace_no_others(tmp_path, lines, checkpoint):
  def merge(output_dir, output_fname, tmp_dir, step):
    infer_package.merge_chunks_to_file(output_dir, output_fname, tmp_dir, step)
    (pathlib.Path(output_dir) / 'more').write_text(output_fname)

  cfg, folder = toy_infer.text_cfg(lines), tmp_path / 'shards'
  toy_infer.infer(cfg, checkpoint, folder, merge_fn=merge, shard_id=0, num_shards=2)
  before = (folder / 'more').read_text()
  with pytest.raises(
    errors.ConfigError, match="whose names no other shard or run has written, got 'more'"
  ):
    toy_infer.infer(cfg, checkpoint, folder, merge_fn=merge, shard_id=1, num_shards=2)
  assert (folder / 'more').read_text() == before


@pytest.mark.parametrize('keep', [False, True])
def test_a_write_fn_of_t5x_gets_its_examples_and_auxiliary_values(
  tmp_path, lines, checkpoint, keep
):
  found = []

  def write(path, inferences, task_ds, mode, vocabulary):
    predictions, aux = inferences
    assert mode == 'predict_with_aux' and vocabulary is inputs
    found.append(type(aux['scores']))
    write_inferences_to_file(path, (predictions, aux), task_ds, mode, vocabulary)
    assert [
      (i, example['inputs_pretokenized']) for i, example in task_ds.enumerate().as_numpy_iterator()
    ] == [*enumerate(example['inputs_pretokenized'] for example in task_ds)]

  model = copy.copy(toy_infer.model())
  inputs = model._input_vocabulary = copy.copy(model.input_vocabulary)
  (own,) = toy_infer.infer(
    toy_infer.text_cfg(lines),
    checkpoint,
    tmp_path / 'own',
    model=model,
    mode='predict_with_aux',
    write_fn=write,
    keep_aux_as_numpy=keep,
    output_vocab_feature_name='inputs',
    verify_matching_vocabs_fn=None,
  )
  assert {*found} == {np.ndarray if keep else list}
  (usual,) = toy_infer.infer(
    toy_infer.text_cfg(lines), checkpoint, tmp_path / 'usual', mode='predict_with_aux'
  )
  assert pathlib.Path(own).read_bytes() == pathlib.Path(usual).read_bytes()


def test_the_class_of_the_initializer_restores(tmp_path, lines, checkpoint):
  made = []

  class Initializer(state_init.TrainStateInitializer):
    def __init__(self, *args, **kwargs):
      made.append(None)
      super().__init__(*args, **kwargs)

  toy_infer.infer(
    toy_infer.text_cfg(lines), checkpoint, tmp_path, train_state_initializer_cls=Initializer
  )
  assert made


def test_measurements_reach_listeners():
  found = []

  def listen(name, value, **kwargs):
    return found.append((name, value, kwargs))

  jax.monitoring.register_scalar_listener(listen)
  try:
    infer_package.update_measurement_series('writing_total_sec', 3, 0.5)
  finally:
    jax.monitoring.unregister_scalar_listener(listen)
  assert found == [('writing_total_sec', 0.5, {'step': 3})]
