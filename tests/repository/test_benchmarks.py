"""The peers of the benchmarks compute the same as the package; otherwise their times would mean nothing."""

import importlib.util
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite.data import vocabularies
from t5x_lite.networks import t5

_BENCHMARKS = pathlib.Path(__file__).parents[2] / 'benchmarks'
_CONFIG = t5.T5Config(vocab_size=40, emb_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=2, head_dim=8,
                      mlp_dim=24, mlp_activations=('gelu', 'linear'), dropout_rate=0.0, logits_via_embedding=False)
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
      t5.Transformer(_CONFIG), _VOCABULARY, _VOCABULARY, optimizers.sgd(0.1), z_loss=1e-4, **options)


def _batch():
  rng = np.random.default_rng(0)
  batch = {'encoder_input_tokens': rng.integers(1, 40, (3, 9)), 'decoder_input_tokens': rng.integers(1, 40, (3, 6)),
           'decoder_target_tokens': rng.integers(1, 40, (3, 6))}
  batch['encoder_input_tokens'][:, 7:] = 0
  batch['decoder_target_tokens'][1, 4:] = 0
  batch['decoder_loss_weights'] = batch['decoder_target_tokens'] > 0
  return {name: value.astype(np.int32) for name, value in batch.items()}


def _params():
  shapes = {name: x.shape for name, x in _batch().items()}
  return jax.jit(lambda key: _model().get_initial_variables(key, shapes)['params'])(jax.random.key(0))


def test_peer_has_the_same_loss_and_gradients(monkeypatch):
  peer_t5 = _peer(monkeypatch, 'peer_t5')
  model, batch, params = _model(), _batch(), _params()
  ours, our_grads = jax.jit(jax.value_and_grad(lambda p: model.loss_fn(p, batch, None)[0]))(params)
  peer, peer_grads = jax.jit(jax.value_and_grad(lambda p: peer_t5.loss_fn(p, batch, _CONFIG, 1e-4)))(params)
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
  ours = jax.jit(lambda p: model.predict_batch_with_aux(
      p, batch, decoder_params={'eos_id': 40}, num_decodes=num_beams or 1, return_all_decodes=True)[0])(params)

  def peer(params):
    inputs = batch['encoder_input_tokens']
    if num_beams:
      return peer_decode.beam_search(params, inputs, _CONFIG, length=6, num_beams=num_beams)
    return peer_decode.sample(params, inputs, jax.random.key(0), _CONFIG, length=6, temperature=0.0, topk=0)[:, None]

  theirs = jax.jit(peer)(params)
  np.testing.assert_array_equal(ours, theirs)
  assert len(np.unique(theirs)) > 5


# ---- commands --------------------------------------------------------------------------------------------------------


def _scripts():
  """Returns the stems of what `make bench` runs, in its order."""
  makefile = (_BENCHMARKS.parent / 'Makefile').read_text()
  patterns = re.search(
      r'^bench:.*\n\tfor script in (.*); do \$\(PY\) \$\$script \|\| exit 1; done$', makefile, re.MULTILINE)
  return [path.stem for pattern in patterns[1].split() for path in sorted(_BENCHMARKS.parent.glob(pattern))]


def test_make_bench_runs_every_script():
  runnable = {path.stem for path in _BENCHMARKS.glob('*.py') if "if __name__ == '__main__'" in path.read_text()}
  runnable -= {'against_commit'}  # it needs the name of a commit
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


@pytest.mark.parametrize('script, argv, answer', [
    ('bench_checkpoint', ['--runs', '0'], "argument --runs: got '0'; expected an integer of at least 1"),
    ('bench_input', ['--batches', '-3'], "argument --batches: got '-3'; expected an integer of at least 1"),
    ('bench_startup', ['--runs', 'many'], "argument --runs: got 'many'; expected an integer of at least 1"),
    ('bench_train_step', ['--steps', '0'], "argument --steps: got '0'; expected an integer of at least 1"),
    ('bench_train_step', ['--optimizer', 'adamx'], 'invalid choice'),
    ('decode', ['--beams', '0'], "argument --beams: got '0'; expected an integer of at least 1"),
    ('shampoo', ['--blok', '3'], 'unrecognized arguments'),
    ('shampoo', ['--block', '0'], "argument --block: got '0'; expected an integer of at least 1"),
    ('shampoo', ['--interval', '2'], "argument --interval: got '2'; expected an integer of at least 3"),
])
def test_bad_arguments_are_rejected(monkeypatch, capsys, script, argv, answer):
  assert _exit_status(monkeypatch, script, *argv) == 2
  assert answer in capsys.readouterr().err
