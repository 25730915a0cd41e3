"""`--dry_run` of an upcycling: the builder runs on shapes, and raises the errors of the run."""

import gin
import jax
import numpy as np
import pytest

from moe import upcycling
from t5x_lite import errors
from t5x_lite import gin_utils
from t5x_lite import train_state
from t5x_lite import tree_utils
from t5x_lite.apps.common import starting_point
from t5x_lite.checkpoints import builders
from t5x_lite.command_line import cli
from t5x_lite.configuration import syntax as gin_syntax
from tests.moe import test_upcycling
from tests.moe import upcycling_cases as up

_UPCYCLE = """
from __gin__ import dynamic_registration

import moe
from t5x_lite import checkpoints

checkpoints.CheckpointConfig.restore = @checkpoints.RestoreCheckpointConfig()
checkpoints.RestoreCheckpointConfig:
  path = '{path}'
  mode = 'specific'
  dtype = 'float32'
  restore_dataset = False
  builders = [@moe.upcycle()]
"""


@pytest.fixture(scope='module')
def upcycle_file(tmp_path_factory):
  """A gin file that upcycles a checkpoint of the dense recipe's model, of zeros."""
  folder = tmp_path_factory.mktemp('dense')
  flags = [
    gin_syntax.read_flag(name, value, f'--gin.{name}={value}')
    for name, value in dict(MODEL_DIR="'x'", DATA_SOURCE="'builtin'").items()
  ]
  try:
    configured = gin_utils.load(
      't5x_lite.apps.train.train', gin_utils.read(['recipes/keyword_cloze.gin'], flags)
    )
    model = configured.argument('model')
  finally:
    gin.clear_config()
  shapes = {
    'encoder_input_tokens': (1, 8),
    'decoder_input_tokens': (1, 4),
    'decoder_target_tokens': (1, 4),
  }
  state = jax.eval_shape(
    lambda key: train_state.FlaxOptimTrainState.create(
      model.optimizer_def, model.get_initial_variables(key, shapes)
    ),
    jax.random.key(0),
  )
  path = up.save(
    jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state),
    folder,
    metadata=starting_point.layout_metadata(model),
  )
  (folder / 'upcycle.gin').write_text(_UPCYCLE.format(path=path))
  return folder / 'upcycle.gin'


def _train(capsys, file, tmp_path, *flags):
  """Return exit status, output and errors of `t5x_lite train`."""
  status = cli.main(
    [
      'train',
      '--gin_file=recipes/keyword_cloze_moe.gin',
      f'--gin_file={file}',
      '--gin.DATA_SOURCE=builtin',
      f'--gin.MODEL_DIR={tmp_path}/run',
      *flags,
    ]
  )
  return status, *capsys.readouterr()


def test_a_dry_run_has_the_errors_of_the_run(upcycle_file, tmp_path, capsys):
  wrong = '--gin.moe.upcycle.granularity=3'
  status, _, err = _train(capsys, upcycle_file, tmp_path, wrong, '--dry_run')
  assert status == errors.ExitCode.INVALID_INPUT == 2
  assert (
    'Cannot upcycle ' in err
    and 'granularity=3 must divide' in err
    and not (tmp_path / 'run').exists()
  )
  run_status, _, run_err = _train(capsys, upcycle_file, tmp_path, wrong)
  assert run_status == status
  assert run_err.splitlines()[-1] == err.splitlines()[-1]


@pytest.mark.full  # by default, the shapes below, and the errors of a dry run
def test_a_dry_run_of_a_valid_upcycling(upcycle_file, tmp_path, capsys):
  status, out, err = _train(
    capsys, upcycle_file, tmp_path, '--gin.moe.upcycle.granularity=2', '--dry_run'
  )
  assert status == 0 and 'Plan' in out and 'cannot tell' not in err, err


# ---- Shapes ---------------------------------------------------------------------------------------------------------


def _structs(tree):
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), tree)


@pytest.mark.parametrize('optimizer', test_upcycling._OPTIMIZERS)
@pytest.mark.parametrize('granularity', [1, 2])
def test_shapes_are_those_of_the_values(optimizer, granularity):
  make = test_upcycling._OPTIMIZERS[optimizer]
  sparse = up.sparse_network(
    't5_1_1',
    granularity=granularity,
    router=dict(bias_update_rate=0.1),
    block=dict(shared_expert_dim=32, expert_bias=True),
  )
  stored = up.state_of(up.dense_network('t5_1_1'), make()).state_dict()
  wanted = up.state_shapes(sparse, make()).state_dict()
  fn = upcycling.upcycle(granularity, noise_stddev=0.1)
  expected = tree_utils.flatten_dict(fn(stored, wanted))
  target = builders.TargetState(
    state_dict=wanted, wanted=tree_utils.flatten_dict(wanted), has_values=False
  )
  got = builders.BuiltState(arrays=tree_utils.flatten_dict(_structs(stored)))
  got = fn.build(got, target).arrays
  assert {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in got.items()} == {
    name: (np.shape(leaf), leaf.dtype) for name, leaf in expected.items()
  }
  assert not any(isinstance(leaf, np.ndarray | jax.Array) for leaf in got.values())
