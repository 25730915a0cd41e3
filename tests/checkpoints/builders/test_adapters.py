"""A run begins with an adapter of PEFT, in either layout, and only with the factors with which it was trained."""

import types

import jax
import numpy as np
import pytest

from t5x_lite import adapters
from t5x_lite import checkpoints
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.apps.common import starting_point
from t5x_lite.checkpoints import builders
from t5x_lite.checkpoints import sources
from t5x_lite.errors import CheckpointError
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5
from t5x_lite.train_state import FlaxOptimTrainState
from tests.checkpoints.hugging_face import adapter_cases
from tests.checkpoints.hugging_face import hugging_face_cases as cases

_BATCH = {
  'encoder_input_tokens': (2, 3),
  'decoder_input_tokens': (2, 3),
  'decoder_target_tokens': (2, 3),
}


def _model(layout, **options):
  scanned = {}
  if layout != 't5':
    scanned = {'param_layout': layout, 'scan_layers': True, 'relpos_bias_tables': None}
  config = t5.T5Config(**cases.SMALL.network_config_kwargs() | scanned)
  vocabulary = types.SimpleNamespace(vocab_size=config.vocab_size, eos_id=1, pad_id=0)
  adapter = adapters.Lora(**{'rank': 2, 'alpha': 6.0} | options)
  return models.EncoderDecoderModel(
    t5.Transformer(config), vocabulary, vocabulary, optimizers.adamw(), adapter=adapter
  )


def _state_shape(model):
  def create():
    variables = model.get_initial_variables(jax.random.key(0), _BATCH)
    return FlaxOptimTrainState.create(model.optimizer_def, variables)

  return jax.eval_shape(create)


@pytest.mark.parametrize('layout', ['t5', 'scalable_t5'])
def test_a_run_begins_with_an_adapter_of_peft(tmp_path, layout):
  path = adapter_cases.make(tmp_path / 'adapter', adapter_cases.tensors(cases.SMALL))
  arrays = cases.values(cases.SMALL)
  base = tmp_path / 'base'
  cases.make_folder(
    base, cases.tensors(cases.SMALL, arrays), cases.config_of(cases.SMALL, 't5_1_1')
  )
  model = _model(layout)
  shape = _state_shape(model)
  cfg = checkpoints.RestoreCheckpointConfig(
    path=str(base), mode='specific', builders=[builders.Adapter(str(path))]
  )
  state = checkpoints.restore_checkpoint(
    str(base),
    {'target': shape.params, 'state': {'step': jax.ShapeDtypeStruct((), np.int32)}},
    restore_cfg=cfg,
    network=model.module.config,
  ).state['target']
  source = sources.open_peft(path, {f'target/{name}': value for name, value in arrays.items()}, 'x')
  for name in source.shapes():
    arrays[name.removeprefix('target/')] = source.read_array(name)
  want = tree_utils.unflatten_dict(arrays)
  if layout != 't5':
    want = param_layouts.convert(want, 't5', layout, model.module.config)
  got = tree_utils.flatten_dict(state)
  want = tree_utils.flatten_dict(want)
  assert set(got) == set(want)
  for name, value in want.items():
    np.testing.assert_array_equal(np.asarray(got[name]), value)

  start = starting_point.StartingPoint(path=str(base), restore_cfg=cfg)
  starting_point.check_start(start, shape, model)
  for options in ({'alpha': 3.0}, {'rank_stabilized': True}):
    other = _model(layout, **options)
    with pytest.raises(CheckpointError, match=r'must be \[?3\.0\]? as in .*adapter'):
      starting_point.check_start(start, _state_shape(other), other)
  other = _model(layout, rank=1, alpha=3.0)
  with pytest.raises(CheckpointError, match='does not fit'):
    starting_point.check_start(start, _state_shape(other), other)
