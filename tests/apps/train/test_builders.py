"""Runs by the command whose first state is built by a chain: average, prefix, larger vocabulary, experts."""

import logging
import re
import shutil

import gin
import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import gin_utils
from t5x_lite import tree_utils
from t5x_lite.apps.common import runs
from t5x_lite.command_line import cli
from t5x_lite.configuration import syntax as gin_syntax

_TINY = {
  'network.T5Config.emb_dim': '8',
  'network.T5Config.num_heads': '2',
  'network.T5Config.head_dim': '4',
  'network.T5Config.mlp_dim': '8',
  'BATCH_SIZE': '8',
  'TASK_FEATURE_LENGTHS': "{'inputs': 16, 'targets': 4}",
  'LEARNING_RATE': '0.0',
  'train_script.train.infer_eval_dataset_cfg': 'None',
  'train_script.train.train_eval_dataset_cfg': 'None',
}
_CHAIN = """
from __gin__ import dynamic_registration

import moe
from t5x_lite import checkpoints
from t5x_lite.checkpoints import builders
from t5x_lite.networks import t5 as network

checkpoints.CheckpointConfig.restore = @checkpoints.RestoreCheckpointConfig()
checkpoints.RestoreCheckpointConfig.builders = [
    @builders.Average(), @builders.Subtree(), @builders.NewVocabulary(), @moe.upcycle()]
builders.Average:
  path = '{dense}'
  last = 3
builders.Subtree.prefix = 'wrapped/model'
network.T5Config.vocab_size = 400
EXPERT_MLP_DIM = 8
NUM_EXPERTS = 4
"""
_EVAL = """
from __gin__ import dynamic_registration

from t5x_lite import checkpoints
from t5x_lite.checkpoints import builders

eval/checkpoints.RestoreCheckpointConfig:
  path = None
  builders = [@builders.Average()]
builders.Average:
  path = ['{first}', '{second}']
  last = None
"""


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
  """A directory with the steps 5, 10, 20 and 30 of a dense model inside another one; and the parameters by step."""
  flags = [
    gin_syntax.read_flag(name, value, f'--gin.{name}={value}')
    for name, value in {**_TINY, 'MODEL_DIR': "'x'"}.items()
  ]
  try:
    model = gin_utils.load(
      runs.ENTRY, gin_utils.read(['recipes/keyword_cloze.gin'], flags)
    ).argument('model')
  finally:
    gin.clear_config()
  batch = {
    'encoder_input_tokens': (1, 8),
    'decoder_input_tokens': (1, 4),
    'decoder_target_tokens': (1, 4),
  }
  shapes = jax.eval_shape(
    lambda key: model.get_initial_variables(key, batch)['params'], jax.random.key(0)
  )
  rng, params, folder = np.random.default_rng(0), {}, tmp_path_factory.mktemp('dense')
  with checkpoints.CheckpointManager(
    folder, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    for step in (5, 10, 20, 30):
      tree = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype) / 4, shapes
      )
      params[step] = tree_utils.flatten_dict(tree)
      manager.save(
        step,
        {
          'target': {'wrapped': {'model': tree, 'head': {'w': np.zeros(3, np.float32)}}},
          'state': {'step': np.int32(step), 'param_states': {'x': np.zeros(2, np.float32)}},
        },
      )
  return folder, params


def _train(folder, run, *flags, steps=1):
  (run.parent / 'chain.gin').write_text(_CHAIN.format(dense=folder))
  tiny = [f'--gin.{name}={value}' for name, value in {**_TINY, 'TRAIN_STEPS': steps}.items()]
  return cli.main(
    [
      'train',
      '--gin_file=recipes/keyword_cloze_moe.gin',
      f'--gin_file={run.parent}/chain.gin',
      f'--gin.MODEL_DIR={run}',
      *tiny,
      *flags,
    ]
  )


def _assert_almost_equal(array, expected):
  # The schedule's least learning rate is 1e-8.
  np.testing.assert_allclose(array, expected, rtol=0, atol=3e-8)


def test_average_prefix_vocabulary_and_experts(dense, tmp_path, capsys, caplog):
  folder, params = dense
  run, copied = tmp_path / 'run', tmp_path / 'copied'
  shutil.copytree(folder, copied)
  assert _train(copied, run, '--dry_run') == 0
  out = capsys.readouterr().out
  chain = (
    f'the average of 3 checkpoints ({", ".join(f"{copied}/checkpoint_{step}" for step in (10, 20, 30))}), then '
    'the parameters wrapped/model as all parameters, then a new vocabulary, then upcycling'
  )
  assert f'start        {chain}' in out and not run.exists()

  with caplog.at_level(logging.INFO, 't5x_lite'):
    assert _train(copied, run) == 0
  assert f'Starting from {chain} at step 0, to step 1.' in capsys.readouterr().err
  # The learning rate is 0, so the checkpoint has the parameters that were built.
  state = checkpoints.load(run / 'checkpoint_1')
  mean = {
    name: np.mean([params[step][name].astype(np.float64) for step in (10, 20, 30)], axis=0).astype(
      np.float32
    )
    for name in params[5]
  }
  built, moments = (
    tree_utils.flatten_dict(state['target']),
    state['state']['param_states']['0']['mu'],
  )
  sparse = {
    f'{stack}/layers_1/mlp/{name}/kernel'
    for stack in ('encoder', 'decoder')
    for name in ('wi_0', 'wi_1', 'wo')
  }
  for name, value in mean.items():
    if name in sparse:
      experts = built.pop(name.replace('/mlp/', '/mlp/expert/'))
      _assert_almost_equal(experts, np.stack([value] * 4))
    elif name in ('token_embedder/embedding', 'decoder/logits_dense/kernel'):
      axis = 0 if name.endswith('embedding') else 1
      new = np.repeat(
        value.mean(axis, dtype=np.float64, keepdims=True).astype(np.float32), 16, axis
      )
      _assert_almost_equal(built.pop(name), np.concatenate([value, new], axis))
    else:
      _assert_almost_equal(built.pop(name), value)
  assert sorted(built) == [
    f'{stack}/layers_1/mlp/router/router_weights/w/kernel' for stack in ('decoder', 'encoder')
  ]
  assert (
    jax.tree.structure(moments) == jax.tree.structure(state['target'])
    and state['state']['step'] == 1
  )

  # The run resumes from its own checkpoint, without the others.
  shutil.rmtree(copied)
  assert _train(copied, run, steps=2) == 0
  assert (
    f'Starting from {run}/checkpoint_1 (this run) at step 1, to step 2.' in capsys.readouterr().err
  )
  # An evaluation restores the run's checkpoints, unless it has builders too.
  evaluate = ['eval', str(run), f'--gin.EVAL_OUTPUT_DIR={tmp_path}/out', '--dry_run']
  assert cli.main(evaluate) == 0
  assert f'{run}/checkpoint_2' in capsys.readouterr().out
  paths = {name: str(run / f'checkpoint_{step}') for name, step in (('first', 1), ('second', 2))}
  (tmp_path / 'eval.gin').write_text(_EVAL.format(**paths))
  assert cli.main([*evaluate, f'--gin_file={tmp_path}/eval.gin']) == 0
  out = capsys.readouterr().out
  assert re.search(
    r'1 built state.s. will be evaluated on \d+ batches each:\n  the average of 2', out
  )


def test_a_prefix_that_does_not_fit_is_an_error_before_the_first_step(dense, tmp_path, capsys):
  for flags, message in (
    (["--gin.builders.Subtree.prefix='wrap'"], "got 'wrap'. At the top it has wrapped."),
    (
      ["--gin.builders.Subtree.prefix='wrapped'"],
      'Cannot upcycle: the models differ not only in their experts',
    ),
    (['--gin.builders.Average.last=9'], 'with at least 9 checkpoint(s), got'),
  ):
    assert _train(dense[0], tmp_path / 'run', *flags, '--dry_run') == 2, flags
    assert message in capsys.readouterr().err
