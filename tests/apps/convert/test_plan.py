"""Plans of conversions: layouts, tables, dtypes, missing and surplus arrays."""

import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import tree_utils
from t5x_lite.apps.convert import plan as convert_plan
from t5x_lite.apps.convert import report as convert_report
from t5x_lite.apps.convert import run as convert
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5
from tests.apps.convert import convert_cases as given
from tests.checkpoints.hugging_face import hugging_face_cases as cases

pytestmark = pytest.mark.filterwarnings('ignore:.*has no manifest')


def _trees_like_params(*prefixes, architecture=cases.SMALL):
  return {
    f'{prefix}{name}': value
    for seed, prefix in enumerate(prefixes, start=1)
    for name, value in cases.values(architecture, seed=seed).items()
  }


def test_tied_logits_that_are_not_scaled_stay_one_array(tmp_path):
  folder, values = given.folder(
    tmp_path / 'folder', logits_via_embedding=True, scale_tied_logits=False
  )
  ours = convert.convert(folder, str(tmp_path / 'ours'), to='t5x_lite')
  assert ours.num_params == sum(value.size for value in values.values())
  text = convert_report.describe(ours)
  assert '--gin.network.T5Config.scale_tied_logits=False' in text and 'Careful' not in text
  back = convert.convert(ours.path, str(tmp_path / 'back'), to='hugging_face')
  assert given.tensor_bits(back.path) == given.tensor_bits(folder)

  def read(path):
    return json.loads((pathlib.Path(path) / 'config.json').read_text())

  assert read(back.path) == read(folder) and read(folder)['scale_decoder_outputs'] is False
  # T5X's form has no place to say it: a reader takes it for scaled.
  theirs = convert.convert(ours.path, str(tmp_path / 't5x'), to='t5x', param_layout='scalable_t5')
  assert any(
    'scale_tied_logits=False' in note and 'decoder_norm/scale by sqrt(emb_dim)' in note
    for note in theirs.notes
  )
  last = convert.convert(theirs.path, str(tmp_path / 'last'), to='hugging_face')
  assert any('set "scale_decoder_outputs": false' in note for note in last.notes)
  assert last.architecture.logits_via_embedding and last.architecture.scale_tied_logits


def test_the_epsilon_of_norms_is_kept(tmp_path):
  folder, _ = given.folder(tmp_path / 'folder', layer_norm_epsilon=1e-5)
  ours = convert.convert(folder, str(tmp_path / 'ours'), to='t5x_lite')
  assert checkpoints.read_metadata(ours.path)['network']['layer_norm_epsilon'] == 1e-5
  assert '--gin.network.T5Config.layer_norm_epsilon=1e-05' in convert_report.describe(ours)
  back = convert.convert(ours.path, str(tmp_path / 'back'), to='hugging_face')
  assert back.architecture.layer_norm_epsilon == 1e-5
  # T5X's form has no place to say it.
  theirs = convert.convert(ours.path, str(tmp_path / 't5x'), to='t5x')
  assert any('the norms of this network add 1e-05' in note for note in theirs.notes)


def test_special_ids_are_kept_and_what_t5x_cannot_represent_is_said(tmp_path):
  folder, _ = given.folder(
    tmp_path / 'folder', pad_token_id=1, eos_token_ids=(2,), decoder_start_token_id=3
  )
  # The end tokens are those that `generate` of transformers takes.
  (tmp_path / 'folder' / 'generation_config.json').write_text('{"eos_token_id": [2, 5]}')
  ours = convert.convert(folder, str(tmp_path / 'ours'), to='t5x_lite')
  report = convert_report.describe(ours)
  assert '--gin.models.EncoderDecoderModel.decoder_start_id=3' in report
  assert '"--gin.models.EncoderDecoderModel.stop_token_ids=(2, 5)"' in report
  back = convert.convert(ours.path, str(tmp_path / 'back'), to='hugging_face')
  ids = {'decoder_start_token_id': 3, 'eos_token_id': [2, 5], 'pad_token_id': 1}
  for name in ('config.json', 'generation_config.json'):
    assert json.loads((tmp_path / 'back' / name).read_text()).items() >= ids.items()
  assert back.architecture == ours.architecture
  theirs = convert.convert(ours.path, str(tmp_path / 't5x'), to='t5x')
  assert [note for note in theirs.notes if note.startswith('Warning')] == [
    'Warning: the decoder of this network starts with id 3 (decoder_start_token_id), which this format does not '
    "record. T5X's decoders start with id 0: their results differ."
  ]


def test_layouts_and_back_with_moments_and_average(tmp_path):
  state = given.make_state() | _trees_like_params(
    'state/param_states/0/mu/', 'state/param_states/0/nu/', 'param_average/'
  )
  state['state/param_states/0/count'] = np.asarray(3, np.int32)
  network = {'relpos_bias_tables': 'per_stack', 'mlp_activations': ['silu', 'linear']}
  run = given.save(tmp_path / 'run', state, network=network)
  stacked = convert.convert(
    run, str(tmp_path / 'stacked'), to='t5x_lite', param_layout='scalable_t5'
  )
  metadata = checkpoints.read_metadata(stacked.path)
  assert metadata['param_layout'] == 'scalable_t5'
  assert metadata['network'] == {
    'relpos_bias_tables': 'per_layer',
    'mlp_activations': ['silu', 'linear'],
  }
  loaded = checkpoints.load(stacked.path)
  config = t5.T5Config(
    param_layout='scalable_t5',
    **{
      name: value
      for name, value in cases.SMALL.network_config_kwargs().items()
      if name != 'relpos_bias_tables'
    },
  )
  for own, path in (
    ('target/', ('target',)),
    ('param_average/', ('param_average',)),
    ('state/param_states/0/mu/', ('state', 'param_states', '0', 'mu')),
  ):
    tree = tree_utils.unflatten_dict(
      {k.removeprefix(own): v for k, v in state.items() if k.startswith(own)}
    )
    found = loaded
    for key in path:
      found = found[key]
    jax.tree.map(
      np.testing.assert_array_equal, found, param_layouts.convert(tree, 't5', 'scalable_t5', config)
    )
  back = convert.convert(stacked.path, str(tmp_path / 'back'), to='t5x_lite', param_layout='t5')
  assert given.bits(back.path) == given.bits(run)
  assert checkpoints.read_metadata(back.path)['network']['relpos_bias_tables'] == 'per_stack'
  assert (
    stacked.notes == ('The position in the training data is not converted.',) and back.notes == ()
  )
  folder = convert.convert(stacked.path, str(tmp_path / 'folder'), to='hugging_face')
  assert folder.family.name == 't5_1_1'
  direct = convert.convert(run, str(tmp_path / 'direct'), to='hugging_face')
  assert given.tensor_bits(folder.path) == given.tensor_bits(direct.path)
  assert (
    json.loads((tmp_path / 'folder' / 'config.json').read_text())['feed_forward_proj']
    == 'gated-silu'
  )


def test_tables_that_differ_stay_in_the_layers(tmp_path):
  folder, _ = given.folder(tmp_path / 'folder', 'umt5')
  stacked = convert.convert(folder, str(tmp_path / 'stacked'), to='t5x', param_layout='scalable_t5')
  single = convert.convert(stacked.path, str(tmp_path / 'single'), to='t5x', param_layout='t5')
  assert single.architecture.relpos_per_layer
  back = convert.convert(single.path, str(tmp_path / 'back'), to='hugging_face')
  assert back.family.name == 'umt5' and given.tensor_bits(back.path) == given.tensor_bits(folder)
  with pytest.raises(
    CheckpointError,
    match="must have relative position biases per stack, got them per layer. Choose family='umt5'",
  ):
    convert.convert(stacked.path, str(tmp_path / 'no'), to='hugging_face', family='t5_1_1')
  assert not (tmp_path / 'no').exists()


def test_the_average_instead_of_the_parameters(tmp_path):
  state = given.make_state() | _trees_like_params('state/param_states/0/mu/', 'param_average/')
  run = given.save(tmp_path / 'run', state)
  done = convert.convert(run, str(tmp_path / 'average'), to='t5x_lite', param_average=True)
  found = tree_utils.flatten_dict(checkpoints.load(done.path))
  wanted = {
    f'target/{name.removeprefix("param_average/")}': value
    for name, value in state.items()
    if name.startswith('param_average/')
  }
  assert set(found) == {*wanted, 'state/step'}
  for name, value in wanted.items():
    np.testing.assert_array_equal(found[name], value)
  assert 'optimizer' not in checkpoints.read_metadata(done.path)
  folder = convert.convert(run, str(tmp_path / 'folder'), to='hugging_face', param_average=True)
  direct = convert.convert(done.path, str(tmp_path / 'direct'), to='hugging_face')
  assert given.tensor_bits(folder.path) == given.tensor_bits(direct.path)
  assert [note for note in folder.notes if 'average' in note] == [
    'The parameters are the running average (param_average).'
  ]
  assert not any('average' in note for note in direct.notes)
  assert any(
    'add --param_average' in note
    for note in convert.convert(run, str(tmp_path / 'trained'), to='hugging_face').notes
  )
  with pytest.raises(CheckpointError, match='must have a running average of the parameters'):
    convert.convert(done.path, str(tmp_path / 'no'), to='hugging_face', param_average=True)
  with pytest.raises(
    ConfigError, match="--optimizer_state` must be absent or 'drop' with --param_average"
  ):
    convert.convert(
      run, str(tmp_path / 'no'), to='t5x_lite', param_average=True, optimizer_state='keep'
    )


# dtypes


def test_dtype_is_that_of_parameters_alone(tmp_path):
  state = given.make_state() | _trees_like_params('state/param_states/0/mu/', 'param_average/')
  run = given.save(tmp_path / 'run', state)
  done = convert.convert(run, str(tmp_path / 'half'), to='t5x_lite', dtype='bfloat16')
  loaded = tree_utils.flatten_dict(checkpoints.load(done.path))
  for name, value in state.items():
    is_cast = name.startswith(('target/', 'param_average/'))
    expected = value.astype(ml_dtypes.bfloat16) if is_cast else value
    assert loaded[name].dtype == expected.dtype and np.array_equal(loaded[name], expected), name


def _plan(state, metadata=None, to='t5x_lite', **options):
  return convert_plan.plan_state(given.FakeSource(state, metadata), to=to, **options)


def test_optimizer_state():
  state = given.make_state(
    **{'state/param_states/encoder/encoder_norm/scale/v': np.ones(6, np.float32)}
  )
  assert _plan(state).with_optimizer_state
  assert (
    'state/param_states/encoder/encoder_norm/scale/v'
    in _plan(state, to='t5x', optimizer_state='keep').arrays
  )
  dropped = _plan(state, optimizer_state='drop')
  assert (
    not dropped.with_optimizer_state
    and 'is not converted (--optimizer_state=drop)' in dropped.notes[0]
  )
  folder = _plan(state, to='hugging_face')
  assert set(folder.arrays) == {name for name in state if name.startswith('target/')}
  assert 'a Hugging Face folder has no optimizer state' in folder.notes[0]
  with pytest.raises(
    ConfigError,
    match=r'cannot be converted to another parameter layout: .*/v\. .*--optimizer_state=drop',
  ):
    _plan(state, param_layout='scalable_t5')
  assert (
    _plan(state, param_layout='scalable_t5', optimizer_state='drop').param_layout == 'scalable_t5'
  )
  with pytest.raises(ConfigError, match='has no optimizer state'):
    _plan(given.make_state(), optimizer_state='keep')


def _kernels(prefix):
  trees = _trees_like_params(prefix)
  return {name: array for name, array in trees.items() if name.endswith('kernel')}


@pytest.mark.parametrize(
  'states, stuck',
  [
    (_kernels('state/param_states/muon/mu/'), None),
    ({'state/param_states/muon/ns_coeffs': np.zeros(3, np.float32)}, None),
    ({'state/param_states/count': np.int32(1)}, None),
    # One number per parameter, in the order of the parameters or at its path.
    ({'state/param_states/sizes': np.zeros(9, np.float32)}, 'sizes'),
    ({'state/param_states/nu/encoder/encoder_norm/scale': np.float32(1)}, 'nu/encoder/.*'),
  ],
  ids=['part', 'coefficients', 'counter', 'list', 'numbers'],
)
def test_optimizer_state_into_another_layout(states, stuck):
  state = given.make_state(**states)
  if stuck:
    message = f'parameter layout: state/param_states/{stuck}. It must consist of .*=drop'
    with pytest.raises(ConfigError, match=message):
      _plan(state, param_layout='scalable_t5')
    return
  arrays = _plan(state, param_layout='scalable_t5').arrays
  converted = {name for name in arrays if name.startswith('state/param_states/')}
  moments = {name.partition('/mu/')[2] for name in converted}
  if moments != {''}:
    assert moments == {
      name.removeprefix('target/')
      for name in arrays
      if name.startswith('target/') and name.endswith('kernel')
    }
  else:
    assert converted == states.keys()


def test_average_mutables_and_other_parameters():
  state = given.make_state(
    **_trees_like_params('param_average/'),
    **{'flax_mutables/router_state/bias': np.zeros(3, np.float32)},
  )
  kept = _plan(state)
  assert {'flax_mutables/router_state/bias', 'param_average/token_embedder/embedding'} < set(
    kept.arrays
  )
  assert any('mutable arrays' in note for note in kept.notes)
  t5x = _plan(state, to='t5x')
  assert not any(name.startswith('param_average') for name in t5x.arrays)
  assert any('T5X does not support it' in note for note in t5x.notes)
  assert any('fallback_to_scratch' in note for note in t5x.notes)
  with pytest.raises(ConfigError, match='mutable collections .*flax_mutables/router_state/bias'):
    _plan(state, to='hugging_face')
  with pytest.raises(ConfigError, match='does not support mutable collections'):
    _plan(state, param_layout='scalable_t5')
  del state['flax_mutables/router_state/bias']
  assert any('running average' in note for note in _plan(state, to='hugging_face').notes)
  optimizer = {'optimizer': {'name': 'schedule_free', 'evaluates_other_params': True}}
  assert any(
    'schedule_free, derives the parameters to evaluate' in note
    for note in _plan(given.make_state(), optimizer, to='hugging_face').notes
  )


def test_missing_and_surplus_arrays_are_named_on_both_sides(tmp_path):
  state = given.make_state()
  del state['target/decoder/layers_1/mlp/wo/kernel']
  run = given.save(tmp_path / 'run', state)
  with pytest.raises(CheckpointError) as caught:
    convert.convert(run, str(tmp_path / 'out'), to='hugging_face')
  assert (
    'decoder/layers_1/mlp/wo/kernel (10, 6) <-> decoder.block.1.layer.2.DenseReluDense.wo.weight (6, 10)'
    in str(caught.value)
  )
  surplus = {'target/encoder/layers_0/mlp/extra/kernel': np.zeros((2, 2), np.float32)}
  run = given.save(tmp_path / 'other', given.make_state(**surplus))
  with pytest.raises(CheckpointError, match=r'encoder/layers_0/mlp/extra/kernel.*\(2, 2\)'):
    convert.convert(run, str(tmp_path / 'out'), to='hugging_face')
