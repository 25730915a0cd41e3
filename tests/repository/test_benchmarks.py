"""The peers of the benchmarks compute the same as the package; otherwise their times would mean nothing."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import trainer as trainer_lib
from t5x_lite.data import vocabularies
from t5x_lite.networks import t5
from t5x_lite.trainer import averaging
from t5x_lite.trainer import state_init
from t5x_lite.trainer import summaries
from tests import event_files
from tests.apps.train import toy_run
from tests.models import toy_model

_BENCHMARKS = pathlib.Path(__file__).parents[2] / 'benchmarks'
_CONFIG = t5.T5Config(
  vocab_size=40,
  emb_dim=16,
  num_heads=2,
  num_encoder_layers=1,
  num_decoder_layers=2,
  head_dim=8,
  mlp_dim=24,
  mlp_activations=('gelu', 'linear'),
  dropout_rate=0.0,
  logits_via_embedding=False,
)
_VOCABULARY = vocabularies.PassThroughVocabulary(40)


def _peer(monkeypatch, name):
  """Return the module of a script under another name: one script has the name of a package here."""
  monkeypatch.syspath_prepend(_BENCHMARKS)
  spec = importlib.util.spec_from_file_location(f'benchmark_{name}', _BENCHMARKS / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module


def _model(**options):
  return models.EncoderDecoderModel(
    t5.Transformer(_CONFIG), _VOCABULARY, _VOCABULARY, optimizers.sgd(0.1), z_loss=1e-4, **options
  )


def _batch():
  rng = np.random.default_rng(0)
  batch = {
    'encoder_input_tokens': rng.integers(1, 40, (3, 9)),
    'decoder_input_tokens': rng.integers(1, 40, (3, 6)),
    'decoder_target_tokens': rng.integers(1, 40, (3, 6)),
  }
  batch['encoder_input_tokens'][:, 7:] = 0
  batch['decoder_target_tokens'][1, 4:] = 0
  batch['decoder_loss_weights'] = batch['decoder_target_tokens'] > 0
  return {name: value.astype(np.int32) for name, value in batch.items()}


def _params():
  shapes = {name: x.shape for name, x in _batch().items()}
  return jax.jit(lambda key: _model().get_initial_variables(key, shapes)['params'])(
    jax.random.key(0)
  )


def test_peer_has_the_same_loss_and_gradients(monkeypatch):
  peer_t5 = _peer(monkeypatch, 'peer_t5')
  model, batch, params = _model(), _batch(), _params()
  ours, our_grads = jax.jit(jax.value_and_grad(lambda p: model.loss_fn(p, batch, None)[0]))(params)
  peer, peer_grads = jax.jit(
    jax.value_and_grad(lambda p: peer_t5.loss_fn(p, batch, _CONFIG, 1e-4))
  )(params)
  np.testing.assert_allclose(peer, ours, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(our_grads), jax.tree.leaves(peer_grads), strict=True):
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


@pytest.mark.full
@pytest.mark.parametrize('num_beams', [0, 3])
def test_peer_decodes_the_same_tokens(monkeypatch, num_beams):
  """Greedily, or with beams; no end token occurs."""
  peer_decode = _peer(monkeypatch, 'peer_decode')
  batch, params = _batch(), _params()
  params['token_embedder']['embedding'] *= 3  # so that the sequences are no constants
  model = _model(decode_fn=decoding.beam_search if num_beams else decoding.greedy_search)
  ours = jax.jit(
    lambda p: model.predict_batch_with_aux(
      p, batch, decoder_params={'eos_id': 40}, num_decodes=num_beams or 1, return_all_decodes=True
    )[0]
  )(params)

  def peer(params):
    inputs = batch['encoder_input_tokens']
    if num_beams:
      return peer_decode.beam_search(params, inputs, _CONFIG, length=6, num_beams=num_beams)
    return peer_decode.sample(
      params, inputs, jax.random.key(0), _CONFIG, length=6, temperature=0.0, topk=0
    )[:, None]

  theirs = jax.jit(peer)(params)
  np.testing.assert_array_equal(ours, theirs)
  assert len(np.unique(theirs)) > 5


def test_rebuilt_sampler_keeps_the_top_k_as_top_k_does(monkeypatch):
  """Rows of both signs, with equal entries at the cut, zeros of both signs and k of the whole row."""
  keep_top = _peer(monkeypatch, 'peer_decode').keep_top
  rng = np.random.default_rng(0)
  x = np.float32(rng.normal(size=(3, 50))) * np.float32([[1], [1e30], [1e-30]])
  x[0, ::7] = x[0].max()
  x = np.concatenate([x, -np.abs(x), np.float32([[0.0, -0.0] * 25])])
  for k in (1, 5, 50):
    kth = np.sort(x, axis=1)[:, -k, None]
    np.testing.assert_array_equal(
      jax.jit(keep_top, static_argnums=1)(x, k), np.where(x >= kth, x, np.float32(-1e7))
    )


# ---- a checkout of T5X -----------------------------------------------------------------------------------------------

# The few names of T5X that a checkpoint needs. Saving prints, which must not disturb the answers.
_FAKE_T5X = {
  '__init__': '',
  'trainer': '',
  'train_state': 'import types\nInferenceState = types.SimpleNamespace',
  'partitioning': """
class PjitPartitioner:
  def __init__(self, num_partitions, logical_axis_rules): pass
def standard_logical_axis_rules(): pass
""",
  'checkpoints': """
import pathlib
class Checkpointer:
  def __init__(self, state, partitioner, folder): self.path = pathlib.Path(folder) / 'saved'
  def save(self, state): print('saving', flush=True); self.path.write_text(repr(sorted(state.params)))
  def restore(self, step): return self.path.read_text()
class OrbaxCheckpointManagerInterface(Checkpointer):
  def __init__(self, folder, state, partitioner): super().__init__(state, partitioner, folder)
  def wait_until_finished(self): pass
  def close(self): pass
""",
}


def _fake_checkout(folder, **files):
  (folder / 't5x').mkdir(parents=True)
  for name, text in {**_FAKE_T5X, **files}.items():
    (folder / 't5x' / f'{name}.py').write_text(text)
  return folder


def _run(monkeypatch, script, *argv):
  module = _peer(monkeypatch, script)
  monkeypatch.setattr(sys, 'argv', [f'{script}.py', *argv])
  monkeypatch.setattr(module.common, 'matmul_gflops', lambda: 100.0)
  module.main()


def test_a_checkout_is_measured_in_turn(monkeypatch, capfd, tmp_path):
  checkout = _fake_checkout(tmp_path / 'checkout')
  _run(monkeypatch, 'bench_checkpoint', '--megabytes', '1', '--runs', '1', '--t5x', str(checkout))
  shown = capfd.readouterr().out
  assert re.search(
    r'\| T5X \(unknown commit\), Orbax interface, save: until committed \| [\d.e-]+ \|', shown
  ), shown
  assert (
    'T5X (unknown commit), Checkpointer, restore' in shown
    and 'restore, every hash verified' in shown
  )


@pytest.mark.parametrize(
  'trainer, reason',
  [
    (
      'import airio_of_nobody',
      "ModuleNotFoundError: No module named 'airio_of_nobody'. Install T5X's dependencies",
    ),
    ("raise ValueError('too old')", 'ValueError: too old. Its output is above.'),
    ('import os; os._exit(7)', 'its process ended with status 7. Its output is above.'),
  ],
)
def test_a_checkout_that_cannot_run_is_an_error(monkeypatch, tmp_path, trainer, reason):
  checkout = _fake_checkout(tmp_path / 'checkout', trainer=trainer)
  with pytest.raises(SystemExit) as caught:
    _run(monkeypatch, 'bench_checkpoint', '--megabytes', '1', '--t5x', str(checkout))
  message = str(caught.value)
  assert (
    f'--t5x must be a checkout that --t5x_python can run, got {checkout} and {sys.executable}: {reason}'
    in message
  )


_PRINTS_ITS_OPTIONS = """
import os
raise ValueError([os.environ.get(name) for name in ('XLA_FLAGS', 'GLIBC_TUNABLES')])
"""
_STARTS_T5X = """
import argparse, os, pathlib
import common, t5x_process
common.start_like_commands()
ours = [os.environ.get(name) for name in ('XLA_FLAGS', 'GLIBC_TUNABLES')]
args = argparse.Namespace(
  t5x=pathlib.Path({checkout!r}), t5x_python=None, same_options={same_options}
)
try:
  t5x_process.T5x(args, 'Checkpoint', {{}})
except SystemExit as error:
  print(ours)
  print(str(error).rpartition('ValueError: ')[2].partition('. Its output')[0])
"""


@pytest.mark.parametrize('given', [{}, {'XLA_FLAGS': '--xla_cpu_enable_fast_math=false'}])
@pytest.mark.parametrize('same_options', [False, True])
def test_a_checkout_starts_without_our_options(tmp_path, given, same_options):
  checkout = _fake_checkout(tmp_path / 'checkout', trainer=_PRINTS_ITS_OPTIONS)
  script = tmp_path / 'script.py'
  script.write_text(_STARTS_T5X.format(checkout=str(checkout), same_options=same_options))
  names = ('XLA_FLAGS', 'GLIBC_TUNABLES', 'T5X_LITE_RESTARTED_PROCESS')
  environment = {name: value for name, value in os.environ.items() if name not in names}
  environment |= {**given, 'PYTHONPATH': str(_BENCHMARKS)}
  shown = subprocess.run(
    [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120
  )
  ours, theirs = shown.stdout.splitlines()
  expected = str([given.get('XLA_FLAGS'), None])
  assert ours != expected
  assert theirs == (ours if same_options else expected), shown


def test_without_a_checkout_the_peer_is_named_rebuilt(monkeypatch, capsys):
  _run(
    monkeypatch,
    'decode',
    '--layers',
    '1',
    '--batch',
    '1',
    '--inputs',
    '2',
    '--tokens',
    '2',
    '--repeats',
    '1',
    '--vocab',
    '40',
    '--only',
    'greedy, batch',
    '--beams',
    '1',
  )
  shown = capsys.readouterr().out
  assert '| rebuilt peer, s | ratio |' in shown and '| greedy, batch 1 |' in shown


# ---- records ---------------------------------------------------------------------------------------------------------


def test_rows_of_records_make_their_records_in_every_step(monkeypatch, tmp_path):
  model, partitioner, batch = toy_run.model(), toy_run.partitioner(), toy_model.make_batch()

  def make_trainer(param_ema):
    initializer = state_init.TrainStateInitializer(
      model.optimizer_def,
      model.get_initial_variables,
      {name: x.shape for name, x in batch.items()},
      partitioner,
      param_ema=param_ema,
    )
    return trainer_lib.Trainer(
      model,
      initializer.from_scratch(jax.random.key(0)),
      partitioner,
      [],
      None,
      initializer.train_state_axes,
      jax.random.key(0),
      lambda step: 1e-3,
    )

  trainer, averaging_trainer = make_trainer(None), make_trainer(averaging.ParamEma(decay=0.9))
  rows = _peer(monkeypatch, 'observation')._rows(trainer, averaging_trainer, batch, str(tmp_path))

  def written():
    steps = [
      step
      for step, name, _ in event_files.scalars(tmp_path / 'train')
      if name == 'timing/average_step_seconds'
    ]
    return [row['step'] for row in summaries.read_metrics(tmp_path / 'train/metrics.jsonl')], steps

  for row in rows:
    row.train(2)
  # Two steps before the rows, and two of each row.
  assert [row.name for row in rows] == ['nothing', 'summaries', 'log lines', 'both', 'average']
  assert (trainer.step, averaging_trainer.step) == (10, 4)
  assert written() == ([5, 6, 9, 10], [7, 8, 9, 10])
  rows[3].work()
  rows[4].work()
  trainer.train_metrics_manager.flush()
  assert written() == ([5, 6, 9, 10, 2], [7, 8, 9, 10, 2])
  trainer.close()


# ---- commands --------------------------------------------------------------------------------------------------------


def _scripts():
  """Returns the stems of what `make bench` runs, in its order."""
  makefile = (_BENCHMARKS.parent / 'Makefile').read_text()
  listed = re.search(r'^BENCHMARKS := \\\n((?:  \w+ \\\n)*  \w+)\n', makefile, re.MULTILINE)
  return listed[1].replace('\\', '').split()


def test_operations_of_a_profile_are_those_of_the_program(monkeypatch):
  profile = _peer(monkeypatch, 'profile_step')

  def fn(x, layers):
    def layer(x, kernel):
      return jnp.tanh(x @ kernel), None

    return jnp.sum(jax.lax.scan(layer, x, layers)[0])

  arguments = (jnp.ones((8, 16)), jnp.ones((3, 16, 16)))
  program = jax.jit(jax.grad(fn)).lower(*arguments).compile()
  parts = profile.operations(program.as_text())
  # Each product of a loop's body once: 2 * 8 * 16 * 16 operations forward and in the derivative of x.
  flops = [operation.flops for operation in parts.values() if operation.flops > 0]
  assert set(flops) == {2 * 8 * 16 * 16}
  products = {operation.source for operation in parts.values() if operation.flops > 0}
  assert {source.split(':')[0] for source in products} == {'forward', 'backward'}
  # A product of [8, 16] and [16, 16] reads both and writes [8, 16].
  assert {operation.num_bytes for operation in parts.values() if operation.flops > 0} == {
    4 * (8 * 16 + 16 * 16 + 8 * 16)
  }
  # Two steps of two calls: the fastest one of each call.
  name, operation = next(item for item in parts.items() if item[1].flops > 0)
  events = {name: [1.0, 5.0, 3.0, 4.0], 'unknown': [9.0]}
  part = profile.sum_parts(events, parts, 2)[operation.source]
  assert (part.milliseconds, part.calls, part.flops) == (5.0, 2, 2 * operation.flops)


def test_make_bench_runs_every_script():
  runnable = {
    path.stem
    for path in _BENCHMARKS.glob('*.py')
    if "if __name__ == '__main__'" in path.read_text()
  }
  # One needs the name of a commit, one writes tables without measuring, one is started by `--t5x`, and two need
  # transformers.
  runnable -= {
    'against_commit',
    'optimizer_records',
    't5x_worker',
    'finetune_trial',
    'finetune_peer',
  }
  assert sorted(_scripts()) == sorted(runnable) and len(runnable) >= 7


def _exit_status(monkeypatch, script, *argv):
  module = _peer(monkeypatch, script)
  monkeypatch.setattr(sys, 'argv', [f'{script}.py', *argv])
  with pytest.raises(SystemExit) as caught:
    module.main()
  return caught.value.code


@pytest.mark.parametrize('script', _scripts())
def test_scripts_explain_themselves(monkeypatch, capsys, script):
  assert _exit_status(monkeypatch, script, '--help') == 0
  shown = capsys.readouterr().out
  flags = set(re.findall(r'--[\w-]+', shown)) - {'--help'}
  assert flags and shown.startswith(f'usage: {script}.py')
  # The docstring of a script names no flag that there is not.
  assert set(re.findall(r'--[\w-]+', sys.modules[f'benchmark_{script}'].__doc__)) <= flags


@pytest.mark.parametrize(
  'script, argv, answer',
  [
    (
      'bench_checkpoint',
      ['--runs', '0'],
      "argument --runs: got '0'; expected an integer of at least 1",
    ),
    (
      'bench_input',
      ['--batches', '-3'],
      "argument --batches: got '-3'; expected an integer of at least 1",
    ),
    (
      'bench_startup',
      ['--runs', 'many'],
      "argument --runs: got 'many'; expected an integer of at least 1",
    ),
    (
      'bench_train_step',
      ['--steps', '0'],
      "argument --steps: got '0'; expected an integer of at least 1",
    ),
    ('bench_train_step', ['--optimizer', 'adamx'], 'invalid choice'),
    (
      'bench_train_step',
      ['--sweep', 'steps', '3'],
      'argument --sweep: must be one of layers, batch,',
    ),
    ('bench_train_step', ['--sweep', 'batch'], "and its values, got 'batch'"),
    (
      'bench_train_step',
      ['--sweep', 'batch', '8', '0'],
      "argument --sweep: got '0'; expected an integer of at least 1",
    ),
    (
      'decode',
      ['--t5x', 'nowhere'],
      'argument --t5x: must be a checkout of T5X, the folder that contains '
      "t5x/train_state.py, got 'nowhere'. Clone https://github.com/google-research/t5x and give its path.",
    ),
    (
      'decode',
      ['--t5x_python', 'no_python'],
      "argument --t5x_python: must be a Python interpreter, got 'no_python'.",
    ),
    ('decode', ['--t5x_python', sys.executable], 'argument --t5x_python: must come with --t5x'),
    ('bench_checkpoint', ['--same_options'], 'unrecognized arguments: --same_options'),
    (
      'decode',
      ['--same_options'],
      'argument --same_options: must come with --t5x, got True alone.',
    ),
    ('decode', ['--beams', '0'], "argument --beams: got '0'; expected an integer of at least 1"),
    (
      'profile_step',
      ['--num_experts', '0'],
      "argument --num_experts: got '0'; expected an integer of at least 1",
    ),
    ('shampoo', ['--blok', '3'], 'unrecognized arguments'),
    ('shampoo', ['--block', '0'], "argument --block: got '0'; expected an integer of at least 1"),
    (
      'shampoo',
      ['--interval', '2'],
      "argument --interval: got '2'; expected an integer of at least 3",
    ),
  ],
)
def test_bad_arguments_are_rejected(monkeypatch, capsys, script, argv, answer):
  assert _exit_status(monkeypatch, script, *argv) == 2
  assert answer in capsys.readouterr().err
