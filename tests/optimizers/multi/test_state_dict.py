"""State dicts of several optimizers: names, states of other mixes, checkpoints."""

import flax.core
import flax.linen.partitioning
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import adafactor
from t5x_lite import checkpoints
from t5x_lite import optimizers
from t5x_lite import train_state
from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5
from tests.apps.train import toy_run
from tests.optimizers.multi import multi_cases as cases


def test_state_dict_of_adafactors_is_that_of_t5x():
  optimizer_def = optimizers.MultiOptimizer(
    [
      ('kernel', adafactor.Adafactor(min_dim_size_to_factor=2)),
      ('scale', adafactor.Adafactor(factored=False, beta1=0.9)),
    ]
  )
  trained = optimizer_def.create({'layer': {**cases.small(), 'frozen': jnp.ones([2])}})
  trained = trained.apply_gradient({'layer': {**cases.small(), 'frozen': None}}, learning_rate=0.1)
  state_dict = trained.state_dict()
  names = {name: tuple(leaf.shape) for name, leaf in tree_utils.flatten_dict(state_dict).items()}
  assert names == {
    'target/layer/kernel': (2, 3),
    'target/layer/scale': (3,),
    'target/layer/frozen': (2,),
    'state/step': (),
    'state/param_states/layer/kernel/v_row': (2,),
    'state/param_states/layer/kernel/v_col': (3,),
    'state/param_states/layer/kernel/v': (1,),
    'state/param_states/layer/kernel/m': (1,),
    'state/param_states/layer/scale/v_row': (1,),
    'state/param_states/layer/scale/v_col': (1,),
    'state/param_states/layer/scale/v': (3,),
    'state/param_states/layer/scale/m': (3,),
  }
  # T5X has None for frozen parameters.
  state_dict['state']['param_states']['layer']['frozen'] = None
  fresh = optimizer_def.create(jax.tree.map(jnp.zeros_like, trained.target))
  cases.assert_same(fresh.restore_state(state_dict), trained)


@pytest.mark.parametrize(
  'make',
  [
    cases.mix,
    lambda: optimizers.MultiOptimizer(
      [('encoder', _mix_of_kernels()), ('decoder', optimizers.adam())]
    ),
    lambda: optimizers.partition(
      {'a': optimizers.chain([optax.clip(1.0), optimizers.adam()]), 'b': cases.make_adafactor()},
      [('encoder', 'a'), ('', 'b')],
    ),
  ],
)
def test_state_dicts_restore(make):
  fresh = cases.create(make())
  trained = cases.train(fresh)
  state_dict = trained.state_dict()
  flat = tree_utils.flatten_dict(state_dict, keep_empty=True)
  assert len(flat) == len(jax.tree.leaves(trained))
  restored = fresh.restore_state(state_dict)
  assert jax.tree.structure(restored) == jax.tree.structure(trained)
  cases.assert_same(restored, trained)
  for name in flat:
    damaged = dict(flat)
    del damaged[name]
    with pytest.raises(CheckpointError, match='is missing') as error:
      fresh.restore_state(tree_utils.unflatten_dict(damaged))
    assert name in str(error.value)


def _mix_of_kernels():
  return optimizers.MultiOptimizer(
    [('mlp', optimizers.adam()), ('attention', cases.make_adafactor())]
  )


@pytest.mark.parametrize(
  'other,message',
  [
    (
      lambda: optimizers.MultiOptimizer(
        [('kernel', adafactor.Adafactor()), ('scale', optimizers.sgd(momentum=0.9))]
      ),
      r"state/param_states/optimizer:1/0/count \(part '1' \(sgd on .*'scale'.* has no such value",
    ),
    (
      lambda: optimizers.MultiOptimizer([('kernel', adafactor.Adafactor())]),
      r'state/param_states/optimizer:1/0/count \(no part trains such a parameter or has this name\)',
    ),
    (
      lambda: optimizers.MultiOptimizer([('', optimizers.adam())]),
      r"state/param_states/kernel/v_row \(part '0' \(adam on .* trains this parameter and has its state at "
      'state/param_states/optimizer:0',
    ),
    (
      lambda: optimizers.MultiOptimizer([('', adafactor.Adafactor())]),
      'state/param_states/optimizer:1/0/count',
    ),
    (lambda: optimizers.adam(), 'state/param_states/kernel'),
    (lambda: adafactor.Adafactor(), 'state/param_states/optimizer:1'),
  ],
)
def test_state_of_another_mix_is_rejected(other, message):
  mix = optimizers.MultiOptimizer([('kernel', adafactor.Adafactor()), ('scale', optimizers.adam())])
  with pytest.raises(CheckpointError, match=message):
    other().create(cases.small()).restore_state(mix.create(cases.small()).state_dict())


def test_missing_state_names_its_part():
  def mix(scale):
    return optimizers.MultiOptimizer([('kernel', adafactor.Adafactor()), ('scale', scale)])

  state_dict = mix(optimizers.sgd()).create(cases.small()).state_dict()
  with pytest.raises(
    CheckpointError, match=r"optimizer:1/0/count is missing \(part '1' \(adam on "
  ):
    mix(optimizers.adam()).create(cases.small()).restore_state(state_dict)


def _variables():
  axes = jax.tree.map(lambda spec: flax.linen.partitioning.AxisMetadata(tuple(spec)), cases.AXES)
  return {'params': cases.random(0), 'params_axes': _suffixed(axes)}


def _suffixed(tree):
  return {
    f'{key}_axes' if not isinstance(value, dict) else key: _suffixed(value)
    if isinstance(value, dict)
    else value
    for key, value in tree.items()
  }


def test_a_checkpoint_of_a_mix_resumes_bitwise(tmp_path):
  state = train_state.FlaxOptimTrainState.create(cases.mix(), _variables())

  @jax.jit
  def step_fn(state, seed):
    grads = jax.tree.map(lambda p: jnp.sin(p + seed), state.params)
    return state.apply_gradient(grads, learning_rate=0.05)

  for seed in range(2):
    state = step_fn(state, seed)
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(2, state.state_dict())
    restored = manager.restore(None, jax.eval_shape(lambda: state).state_dict())
  fresh = train_state.FlaxOptimTrainState.create(cases.mix(), _variables())
  again = fresh.restore_state(restored.state)
  cases.assert_same(again, state)
  for seed in range(2, 5):
    state, again = step_fn(state, seed), step_fn(again, seed)
  cases.assert_same(again, state)
  # Another mix does not fit.
  other = train_state.FlaxOptimTrainState.create(
    optimizers.MultiOptimizer(
      [('kernel$', cases.make_adafactor()), ('scale$', optimizers.adamw())]
    ),
    _variables(),
  )
  with pytest.raises(
    CheckpointError, match='state/param_states/optimizer:2/0/trace/token_embedder/embedding'
  ):
    checkpoints.restore_checkpoint(restored.path, jax.eval_shape(lambda: other).state_dict())


@pytest.mark.full
def test_a_run_resumes_bitwise(tmp_path):

  def model():
    optimizer_def = optimizers.MultiOptimizer(
      [
        ('logits', adafactor.Adafactor(min_dim_size_to_factor=4)),
        ('embedding', optimizers.adamw(0.01)),
      ]
    )
    return toy_run.model(optimizer_def)

  kwargs = dict(train_eval_dataset_cfg=None, infer_eval_dataset_cfg=None, save={'period': 4})
  toy_run.train(tmp_path / 'whole', 8, model=model(), **kwargs)
  toy_run.train(tmp_path / 'halves', 4, model=model(), **kwargs)
  toy_run.train(tmp_path / 'halves', 8, model=model(), **kwargs)
  whole, halves = (
    checkpoints.load(tmp_path / name / 'checkpoint_8') for name in ('whole', 'halves')
  )
  cases.assert_same(halves, whole)
  names = tree_utils.flatten_dict(whole['state']['param_states'])
  assert any(name.startswith('optimizer:1/0/mu/') for name in names) and any(
    n.endswith('/v_row') for n in names
  )


@pytest.mark.parametrize(
  'pairs,unsupported',
  [
    ([('.', optimizers.adamw)], None),
    ([('kernel$', optimizers.adamw), ('^encoder.*scale$', optimizers.lion)], None),
    ([('.', optimizers.muon)], None),
    (
      [('kernel$', optimizers.adamw), ('scale$', cases.make_adafactor)],
      'state/param_states/decoder/layers_0/',
    ),
    ([('(layers_0|decoder/decoder)/.*kernel$', optimizers.adamw)], '0/mu/decoder/layers_0/'),
    # Its lists of numbers have the order of the parameters.
    ([('.', optimizers.scaled_adam)], 'groups/default/'),
    ([('decoder/.*kernel$', cases.make_adafactor)], 'state/param_states/decoder/layers_0/'),
  ],
)
def test_into_the_other_parameter_layout(pairs, unsupported):
  tokens = jnp.ones((1, 4), jnp.int32)

  def create(layout):
    config = t5.T5Config(
      vocab_size=8,
      emb_dim=4,
      num_heads=1,
      num_encoder_layers=2,
      num_decoder_layers=2,
      head_dim=4,
      mlp_dim=8,
      mlp_activations=('relu',),
      param_layout=layout,
      relpos_bias_tables='per_layer',
    )
    optimizer_def = optimizers.MultiOptimizer([(pattern, make()) for pattern, make in pairs])
    shapes = jax.eval_shape(
      lambda: train_state.FlaxOptimTrainState.create(
        optimizer_def,
        t5.Transformer(config).init(
          jax.random.key(0), tokens, tokens, tokens, enable_dropout=False
        ),
      )
    )
    rng = np.random.default_rng(0)
    return config, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes)

  (_, stored), (config, wanted) = create('t5'), create('scalable_t5')

  def fn(tree):
    return param_layouts.convert(tree, 't5', 'scalable_t5', config)

  transform = checkpoints.convert_param_trees(fn)
  if unsupported:
    message = f'cannot be converted to another param_layout: .*{unsupported}.*assignment_map'
    with pytest.raises(CheckpointError, match=message):
      transform(stored.state_dict(), wanted.state_dict())
    return
  converted = wanted.restore_state(transform(stored.state_dict(), wanted.state_dict()))

  def moments(state):
    arrays = tree_utils.flatten_dict(state.state_dict()['state']['param_states'])
    named = [(name.partition('mu/')[2], array) for name, array in arrays.items()]
    return tree_utils.unflatten_dict({path: array for path, array in named if path})

  cases.assert_same(moments(converted), fn(moments(stored)))
