"""Adapters are those of PEFT, in both directions: logits, a step of training, files, and merged weights."""

import functools
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from t5x_lite import adapters
from t5x_lite import checkpoints
from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.apps.common import starting_point as start
from t5x_lite.apps.convert import run as convert
from t5x_lite.checkpoints import sources
from t5x_lite.networks import param_layouts
from tests.interop import hf_models
from tests.interop import reference
from tests.networks import network_cases

_RATE = 0.01
_FAMILIES = ('t5_1_0', 't5_1_1', 'mt5', 'umt5', 'byt5', 'switch')
_TARGETS = ('query_value', 'all')
_DEFAULT = (('t5_1_1', 'query_value', 'scalable_t5'), ('switch', 'all', 't5'))
_CASES = [
  pytest.param(*case, id='-'.join(case), marks=[] if case in _DEFAULT else [pytest.mark.full])
  for name in _FAMILIES
  for targets in _TARGETS
  for case in ((name, targets, 't5'), (name, targets, 'scalable_t5'))
  if case != ('switch', targets, 'scalable_t5')
]


def _our_model(family, targets, layout):
  return reference.our_model(
    reference.our_module(family, layout),
    optimizer_def=optimizers.adamw(_RATE),
    adapter=adapters.Lora(rank=3, alpha=5.0, targets=targets, rank_stabilized=True),
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
  )


def _is_of_adapter(path):
  return path.endswith(('/lora_a', '/lora_b'))


def _random_adapter(family, targets):
  """Returns our arrays of an adapter, by path in the layout 't5'."""
  model = _our_model(family, targets, 't5')
  batch = reference.random_batch()
  shapes = {name: value.shape for name, value in batch.items()}
  variables = jax.eval_shape(
    lambda key: model.get_initial_variables(key, shapes), jax.random.key(0)
  )
  leaves = tree_utils.flatten_dict(tree_utils.to_dict(variables['params']))
  rng = np.random.default_rng(7)
  return {
    # Larger ones saturate the attention, and gradients are mostly rounding.
    path: (0.3 * rng.standard_normal(leaf.shape) * leaf.shape[-2] ** -0.5).astype(np.float32)
    for path, leaf in sorted(leaves.items())
    if _is_of_adapter(path)
  }


def _save(path, family, targets, layout, base, adapter):
  """Writes a checkpoint of a run with these parameters of the layout 't5'; returns (its directory, its parameters)."""
  model = _our_model(family, targets, layout)
  params = tree_utils.unflatten_dict(tree_utils.flatten_dict(base) | adapter)
  if layout != 't5':
    params = param_layouts.convert(params, 't5', layout, model.module.config)
  shapes = {name: value.shape for name, value in reference.random_batch().items()}
  axes = jax.eval_shape(lambda key: model.get_initial_variables(key, shapes), jax.random.key(0))
  state = {'target': params, 'state': {'step': np.int32(3)}}
  metadata = start.layout_metadata(model) | {
    'adapter': model.adapter.metadata(params, axes['params_axes'])
  }
  with checkpoints.CheckpointManager(path, save_cfg=checkpoints.SaveCheckpointConfig()) as manager:
    manager.save(3, state, metadata=metadata)
  return str(path), params


@functools.cache
def _ours(name, targets, layout):
  """Returns a compiled function from (parameters, batch) to (logits, loss, gradients of the adapter by path)."""
  family = reference.FAMILIES[name]
  model = _our_model(family, targets, layout)

  def run(params, batch):
    flat = tree_utils.flatten_dict(params)
    of_adapter = {path: leaf for path, leaf in flat.items() if _is_of_adapter(path)}

    def loss_fn(leaves):
      return model.loss_fn(tree_utils.unflatten_dict(flat | leaves), batch, None)[0]

    loss, grads = jax.value_and_grad(loss_fn)(of_adapter)
    tokens = {key: value for key, value in batch.items() if key.endswith('tokens')}
    logits = model.module.apply(
      {'params': model.network_params(params)}, **tokens, enable_dropout=False
    )
    return logits, loss, grads

  return reference.jit(run)


def _joined(arrays):
  """Returns the values of arrays in the order of their names, as one vector."""
  flat = dict(tree_utils.named_leaves(arrays))
  return np.concatenate([np.asarray(flat[name]).ravel() for name in sorted(flat)])


def _in_t5_layout(arrays, params, family, layout):
  """Returns arrays of an adapter, by path, in the layout 't5'."""
  if layout == 't5':
    return {path: np.asarray(value) for path, value in arrays.items()}
  tree = tree_utils.unflatten_dict(tree_utils.flatten_dict(params) | dict(arrays))
  flat = tree_utils.flatten_dict(reference.to_t5_layout(tree, family, add_tables=False))
  return {path: value for path, value in flat.items() if _is_of_adapter(path)}


@pytest.mark.parametrize('name, targets, layout', _CASES)
def test_adapters_of_peft(name, targets, layout, tmp_path):
  family = reference.FAMILIES[name]
  theirs, batch = reference.hf_model(family), reference.random_batch()
  base = reference.our_tree(theirs.tensors, family)
  adapter = _random_adapter(family, targets)
  run, params = _save(tmp_path / 'run', family, targets, layout, base, adapter)
  folder = convert.convert(run, str(tmp_path / 'adapter'), to='peft').path
  tensors = safetensors.numpy.load_file(f'{folder}/adapter_model.safetensors')
  reference.assert_same_bits(reference.our_adapter(tensors, family), adapter)
  where = batch['decoder_target_tokens'] > 0

  def rows(found):
    return {
      'gradients': _joined(reference.our_adapter(found['gradients'], family)),
      'logits': found['logits'][where],
      'merged': _joined(reference.our_tree(found['merged'], family)),
      'trained': _joined(reference.our_adapter(found['trained'], family)),
    }

  want = theirs.train_adapter(targets, folder, _RATE, batch, rows)
  merged = convert.convert(run, str(tmp_path / 'merged'), to='hugging_face').path
  reference.end_if_writing()

  # What PEFT saves is read as what we wrote.
  saved = tmp_path / 'saved'
  saved.mkdir()
  safetensors.numpy.save_file(tensors, saved / 'adapter_model.safetensors', {'format': 'pt'})
  (saved / 'adapter_config.json').write_text(json.dumps(want['config']))
  shapes = {f'target/{path}': leaf for path, leaf in tree_utils.named_leaves(base)}
  source = sources.open_peft(str(saved), shapes, 'the base')
  read = {path: source.read_array(f'target/{path}') for path in adapter}
  reference.assert_same_bits(read, adapter)
  described = sources.open_peft(folder, shapes, 'the base').metadata
  assert source.metadata == described
  if layout == 't5':
    assert described['adapter'] == checkpoints.read_metadata(f'{run}/checkpoint_3')['adapter']

  weights = (batch['decoder_target_tokens'] > 0).astype(np.float32)
  logits, loss, grads = _ours(name, targets, layout)(
    params, {**batch, 'decoder_loss_weights': weights}
  )
  np.testing.assert_allclose(loss, want['loss'], rtol=1e-5)
  optimizer = optimizers.adamw(_RATE / 10, b2=0.99, eps=1e-4, weight_decay=0.1)
  leaves = {path: value for path, value in tree_utils.flatten_dict(params).items() if path in grads}
  state = optimizer.create(leaves)
  trained = network_cases.jit(lambda state, grads: state.apply_gradient(grads))(state, grads).target
  got = {
    'gradients': _joined(_in_t5_layout(grads, params, family, layout)),
    'logits': np.asarray(logits)[where],
    'merged': _joined(reference.our_tree(hf_models.read_tensors(merged), family)),
    'trained': _joined(_in_t5_layout(trained, params, family, layout)),
  }
  # The gradients of experts with few tokens are small, and AdamW makes much of their rounding.
  want['rows'].assert_close(got, rtol=3e-5 if family.sparse else 1e-5)
  assert np.abs(got['trained'] - _joined(adapter)).max() > 1e-5
