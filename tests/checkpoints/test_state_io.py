"""Real train states through a checkpoint: every optimizer's state, both parameter layouts."""

import asyncio
import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import optimizers
from t5x_lite import train_state
from t5x_lite import tree_utils
from t5x_lite.checkpoints import state_io
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5


def config(layout):
  return t5.T5Config(
    vocab_size=32,
    emb_dim=8,
    num_heads=2,
    num_encoder_layers=2,
    num_decoder_layers=1,
    head_dim=4,
    mlp_dim=16,
    mlp_activations=('gelu', 'linear'),
    param_layout=layout,
    relpos_bias_tables='per_layer',
  )


@pytest.fixture(scope='module', params=['t5', 'scalable_t5'])
def variables(request):
  tokens = jnp.ones((1, 4), jnp.int32)
  layout = request.param
  shapes = jax.eval_shape(
    lambda: t5.Transformer(config(layout)).init(
      jax.random.key(0), tokens, tokens, tokens, enable_dropout=False
    )
  )
  rng = np.random.default_rng(0)
  return layout, jax.tree.map(
    lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), shapes
  )


OPTIMIZERS = {
  'adamw': lambda: optimizers.adamw(learning_rate=1e-3),
  'sgd': lambda: optimizers.sgd(learning_rate=1e-3),
  'adafactor': lambda: optimizers.Adafactor(
    0.1, logical_factor_rules=optimizers.standard_logical_factor_rules()
  ),
}


def state_shapes(optimizer_def, variables):
  def create(variables):
    state = train_state.FlaxOptimTrainState.create(optimizer_def, variables)
    return state.replace(param_average=state.params)

  return jax.eval_shape(create, variables)


# A state without moments is for the long tests.
SOME_OPTIMIZERS = [
  pytest.param(name, marks=pytest.mark.full) if name == 'sgd' else name for name in OPTIMIZERS
]


@pytest.fixture(scope='module')
def states(variables):
  """A state of random numbers for each optimizer, at step 2."""
  rng = np.random.default_rng(1)

  def draw(leaf):
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.asarray(
      rng.standard_normal(leaf.shape) if floating else np.full(leaf.shape, 2), leaf.dtype
    )

  return {
    name: jax.tree.map(draw, state_shapes(make_optimizer(), variables[1]))
    for name, make_optimizer in OPTIMIZERS.items()
  }


def assert_equal(got, expected):
  got, expected = tree_utils.flatten_dict(got), tree_utils.flatten_dict(expected)
  assert set(got) == set(expected)
  for name, leaf in expected.items():
    np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(leaf), err_msg=name)


@pytest.mark.parametrize('name', SOME_OPTIMIZERS)
def test_round_trip(states, name, tmp_path):
  state = states[name]
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(2, state.state_dict())
    target = jax.eval_shape(lambda: state).state_dict()
    restored = manager.restore(None, target)
  assert restored.step == 2
  assert_equal(restored.state, state.state_dict())
  again = state.restore_state(restored.state)
  assert jax.tree.structure(again) == jax.tree.structure(state)
  assert_equal(again.state_dict(), state.state_dict())
  names = checkpoints.read_manifest(restored.path).arrays
  assert 'target/token_embedder/embedding' in names and 'state/step' in names
  # An inference state ignores optimizer state.
  inference = train_state.InferenceState.create({'params': state.params})
  restored = checkpoints.restore_checkpoint(restored.path, inference.state_dict())
  assert_equal(inference.restore_state(restored.state).params, state.params)


@pytest.mark.parametrize('name', SOME_OPTIMIZERS)
def test_into_the_other_layout(variables, states, name, tmp_path):
  layout, _ = variables
  other = {'t5': 'scalable_t5', 'scalable_t5': 't5'}[layout]
  state = states[name]
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(2, state.state_dict())
  path = tmp_path / 'checkpoint_2'
  assert checkpoints.param_layout_fns(path, config(layout)) == ()
  fns = checkpoints.param_layout_fns(path, config(other))
  assert len(fns) == 1

  tokens = jnp.ones((1, 4), jnp.int32)
  shapes = jax.eval_shape(
    lambda: t5.Transformer(config(other)).init(
      jax.random.key(0), tokens, tokens, tokens, enable_dropout=False
    )
  )
  wanted = state_shapes(OPTIMIZERS[name](), shapes)

  def convert(tree):
    return param_layouts.convert(jax.tree.map(np.asarray, tree), layout, other, config(other))

  if name == 'adafactor':
    with pytest.raises(
      errors.CheckpointError, match='cannot be converted to another param_layout.*assignment_map'
    ):
      checkpoints.restore_checkpoint(path, wanted.state_dict(), transformation_fns=fns)
    with pytest.raises(
      errors.CheckpointError,
      match='Keep the param_layout .* = the MODEL_DIR of this run, mode = .latest',
    ):
      checkpoints.restore_checkpoint(
        path, wanted.state_dict(), transformation_fns=fns, is_resuming=True
      )
    fresh = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), wanted.state_dict())
    restored = checkpoints.restore_checkpoint(
      path,
      wanted.state_dict(),
      transformation_fns=fns,
      initial_state_fn=lambda: fresh,
      restore_cfg=checkpoints.RestoreCheckpointConfig(
        'x', assignment_map=[('state/param_states.*', None)], fallback_to_scratch=True
      ),
    ).state
    assert_equal(restored['state']['param_states'], fresh['state']['param_states'])
  else:
    restored = checkpoints.restore_checkpoint(
      path, wanted.state_dict(), transformation_fns=fns
    ).state
  assert_equal(restored['target'], convert(state.params))
  assert_equal(restored['param_average'], convert(state.param_average))
  if name == 'adamw':
    stored = state.state_dict()['state']['param_states']
    moments = [
      key for key in tree_utils.flatten_dict(stored) if key.endswith('/mu/token_embedder/embedding')
    ]
    prefix = moments[0].split('/')[:-3]
    for moment in ('mu', 'nu'):
      ours, theirs = restored['state']['param_states'], stored
      for key in (*prefix, moment):
        ours, theirs = ours[key], theirs[key]
      assert_equal(ours, convert(theirs))


def _save(folder):
  with checkpoints.CheckpointManager(
    folder, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(
      1,
      {
        'target': {'a': np.arange(6.0, dtype=np.float32).reshape(2, 3)},
        'state': {'step': np.int32(1)},
      },
    )
  return folder / 'checkpoint_1'


@pytest.mark.parametrize(
  'message, is_logged',
  [
    (
      'OUT_OF_RANGE: Error reading "w/c/0" in OCDBT database at local file "/x/": File too large',
      False,
    ),
    ('another error', True),
  ],
)
def test_only_later_errors_of_a_failed_read_are_not_logged(message, is_logged, caplog):
  state_io.orbax()

  async def drop_a_failed_future():
    asyncio.get_running_loop().create_future().set_exception(ValueError(message))

  asyncio.run(drop_a_failed_future())
  gc.collect()
  assert ('never retrieved' in caplog.text) == is_logged


def test_folders_may_have_the_characters_of_urls(tmp_path):
  for name in ('a#b', 'a?b', '100%', 'a%20b', 'a|b'):
    (tmp_path / name).mkdir()
    loaded = checkpoints.load(_save(tmp_path / name))
    np.testing.assert_array_equal(
      tree_utils.flatten_dict(loaded)['target/a'], np.arange(6.0).reshape(2, 3)
    )


@pytest.mark.parametrize(
  'change',
  [
    {'shape': 'ab'},
    {'shape': [None, 2]},
    {'shape': [2.5, 2]},
    {'shape': [2**40, 2**20]},
    {'data_type': 'O'},
    {'data_type': None},
    {'codecs': 5},
    {'chunk_grid': {'configuration': {'chunk_shape': 5}}},
    {'chunk_grid': {'configuration': {'chunk_shape': [2**30, 2**20]}}},
  ],
  ids=str,
)
def test_a_forged_index_is_an_error(change, tmp_path):
  import tensorstore

  directory = state_io.state_dir(_save(tmp_path))
  assert state_io.read_shapes_of(directory, ['target/a', 'target/b']) == {
    'target/a': jax.ShapeDtypeStruct((2, 3), jnp.float32)
  }
  index = tensorstore.KvStore.open(
    {'driver': 'ocdbt', 'base': {'driver': 'file', 'path': f'{directory}/'}}
  ).result()
  entry = json.loads(index.read('target.a/zarr.json').result().value)
  index.write('target.a/zarr.json', json.dumps({**entry, **change}).encode()).result()
  with pytest.raises(errors.CheckpointError, match='cannot be read'):
    state_io.read_shapes_of(directory, ['target/a'])
