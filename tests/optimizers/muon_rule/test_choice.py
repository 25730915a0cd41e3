"""Arrays whose updates Muon orthogonalizes."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.muon_rule import choice as choice_lib
from tests.optimizers.muon_rule import muon_cases as cases


def _choice(matrices=(), axes=None):
  return choice_lib.MatrixChoice.of(matrices, axes, set())


def _chosen(choice, params):
  labels = tree_utils.named_leaves(choice.labels(params))
  return {path for path, label in labels if label == choice_lib.MUON}


@pytest.mark.parametrize('layout', ['t5', 'scalable_t5', 'stacked'])
def test_kernels_of_all_layers_and_experts_are_matrices(layout):
  params = cases.random_params(0)
  layers = [f'layers_{i}' for i in range(cases.NUM_LAYERS)]
  axes = cases.axes('t5')
  if layout == 'scalable_t5':
    params, layers, axes = cases.to_scalable(params), ['layers'], cases.axes(layout)
  elif layout == 'stacked':
    params, layers = cases.STACKS.stack(params), ['layers_0,1,2']
  expected = {f'encoder/{layer}/{kernel}' for layer in layers for kernel in cases.KERNELS}
  assert _chosen(_choice(axes=axes), params) == expected


@pytest.mark.parametrize(
  'axes,is_matrix',
  [
    (('embed', 'mlp'), True),
    (('embed', 'heads', 'kv'), True),
    (('heads', 'layers', 'kv', 'embed'), True),
    (('expert', 'expert_mlp', 'layers', 'embed'), True),
    (('lora_rank', 'joined_kv'), True),
    (('own_inputs', 'own_outputs'), True),
    (('vocab', 'embed'), False),
    (('embed', 'vocab'), False),
    (('lora_rank', 'vocab'), False),
    (('heads', 'relpos_buckets'), False),
    (('heads', 'layers', 'relpos_buckets'), False),
    (('abspos_buckets', 'embed'), False),
    (('length', 'embed'), False),
    (('embed', 'unmodeled'), False),
    (('heads', 'kv'), False),
    (('embed', 'layers'), False),
    (('expert', 'expert_mlp'), False),
    (('embed', 'mlp_activations', 'mlp'), False),
    (('embed',), False),
    ((), False),
  ],
  ids=str,
)
def test_logical_axes_decide(axes, is_matrix):
  params = {'array': jax.ShapeDtypeStruct(range(2, 2 + len(axes)), jnp.float32)}
  assert bool(_chosen(_choice(axes={'array': P(*axes)}), params)) == is_matrix


def test_two_dims_and_no_axes_take_arrays_as_they_are():
  params = cases.to_scalable(cases.random_params(0))
  matrices = {path for path, array in tree_utils.named_leaves(params) if array.ndim == 2}
  assert 'token_embedder/embedding' in matrices and 'encoder/layers/norm/scale' in matrices
  assert _chosen(_choice('two_dims', cases.axes('scalable_t5')), params) == matrices
  assert _chosen(_choice(), params) == matrices


def test_the_first_expression_that_is_found_decides():
  rules = [('logits', True), ('^decoder|/wi/', False), ('wi', True)]
  params = cases.random_params(0)
  axes = cases.axes('t5')
  changed = _chosen(_choice(rules[:2], axes), params) ^ _chosen(_choice(axes=axes), params)
  expected = {f'encoder/layers_{i}/mlp/wi/kernel' for i in range(cases.NUM_LAYERS)}
  assert changed == {'decoder/logits/kernel', *expected}
  stacked = cases.STACKS.stack(params)
  assert 'encoder/layers_0,1,2/mlp/wi/kernel' not in _chosen(_choice(rules[:2], axes), stacked)
  with pytest.raises(
    ConfigError, match=r"first match of a parameter .*, got \('wi', True\)\. Corr"
  ):
    optimizers.muon(matrices=rules).with_param_axes(axes).init_state(params)


@pytest.mark.parametrize(
  'rule,message',
  [
    (('kernl', False), r"got \('kernl', False\)\. Correct it, move it up, or remove it\."),
    (
      ('norm/scale', True),
      r"False for 'encoder/layers_0/norm/scale', which consists of arrays of the shape \[6\], and not",
    ),
  ],
)
def test_expressions_without_a_matrix_are_rejected(rule, message):
  optimizer_def = optimizers.muon(matrices=[rule]).with_param_axes(cases.axes('t5'))
  with pytest.raises(ConfigError, match=f'^`muon.matrices` must be .*{message}'):
    optimizer_def.create(cases.random_params(0))


def test_the_axes_decide_within_a_part_of_the_parameters():
  optimizer_def = optimizers.MultiOptimizer(
    [('kernel$', optimizers.muon()), ('(?<!kernel)$', optimizers.sgd())]
  ).with_param_axes(cases.axes('t5'))
  shapes = jax.eval_shape(optimizer_def.create, cases.random_params(0))
  names = [name for name in tree_utils.flatten_dict(shapes.state_dict()) if '/muon/' in name]
  assert any('/mu/' in name for name in names) and not any('logits' in name for name in names)


def test_the_choice_is_logged_once(caplog):
  caplog.set_level('INFO', 't5x_lite')
  optimizer_def = optimizers.muon()
  for _ in range(2):
    optimizer_def.with_param_axes(cases.axes('t5')).create(cases.random_params(0))
  params = cases.random_params(0)
  named = dict(tree_utils.named_leaves(params))
  labels = _choice(axes=cases.axes('t5')).labels(params)
  chosen = [path for path, label in tree_utils.named_leaves(labels) if label == choice_lib.MUON]
  share = sum(named[path].size for path in chosen) / sum(array.size for array in named.values())
  assert caplog.messages == [
    f'Muon orthogonalizes the updates of 15 arrays ({chosen[0]}, {chosen[1]}, {chosen[2]} and 12 more) with '
    f'{share:.1%} of the parameters; AdamW updates 12 arrays.'
  ]


def test_the_remedy_of_a_state_with_other_arrays():
  def state_of(matrices):
    optimizer_def = optimizers.muon(0.1, matrices=matrices).with_param_axes(cases.axes('t5'))
    return tree_utils.flatten_dict(optimizer_def.create(cases.random_params(0)).state_dict())

  default = state_of(())
  remedy = optimizers.muon().restore_remedy
  found = remedy(state_of('two_dims'), default)
  assert found.startswith("Muon had other arrays. Set `muon.matrices` to 'two_dims', which ")
  assert 'Set `muon.matrices` as before' in remedy(state_of([('wi', False)]), default)
  assert remedy(default, default) is None
  parts = optimizers.partition({'all': optimizers.muon(), 'none': None}, [('', 'all')])
  stored = {
    name.replace('param_states/', 'param_states/optimizer:0/'): array
    for name, array in state_of([('wi', False)]).items()
  }
  assert 'as before' in parts.restore_remedy(stored, default)
