"""Every gin file that comes with t5x_lite resolves; recipes resolve to what `tests/golden/gin/` says.

After an intended change of a recipe, run `UPDATE_GOLDEN=1 python -m pytest tests/repository/test_gin_files.py` and read
the diff.
"""

import dataclasses
import math
import os
import pathlib
import re

import gin
import jax
import jax.numpy as jnp
import pytest

from t5x_lite import errors
from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.networks import decoder_only
from t5x_lite.networks import t5
from t5x_lite.optimizers import Adafactor
from t5x_lite.optimizers import OptaxWrapper

_ROOT = pathlib.Path(__file__).parents[2]
_GOLDEN = _ROOT / 'tests' / 'golden' / 'gin'
_ENTRY = 't5x_lite.apps.train.train'
_REQUIRED = {
  'MODEL_DIR': 'runs/x',
  'MIXTURE_OR_TASK_NAME': 'python_keyword_cloze',
  'TRAIN_STEPS': '3',
  'TASK_FEATURE_LENGTHS': "{'inputs': 64, 'targets': 12}",
  'DROPOUT_RATE': '0.1',
  'INITIAL_CHECKPOINT_PATH': 'runs/y/checkpoint_3',
  'NUM_EXPERTS': '8',
}
# Recipes that take the network's sizes from a Hugging Face folder, and one.
_FROM_FOLDER = {
  'recipes/finetune_from_hf.gin',
  'recipes/finetune_files.gin',
  'recipes/finetune_chosen_params.gin',
}
_FOLDER = 'tests/golden/hugging_face/byt5_tiny'
# Files that each kind of file is added to.
_COMPANIONS = {
  'models': lambda name: [name, 'runs/train.gin'],
  'runs': lambda name: ['models/t5_1_1_small.gin', name],
  'recipes': lambda name: [name],
  'optimizers': lambda name: ['recipes/keyword_cloze.gin', name],
  'partitioning': lambda name: ['recipes/keyword_cloze.gin', name],
  'data': lambda name: ['recipes/keyword_cloze.gin', name],
  'adapters': lambda name: ['recipes/keyword_cloze.gin', name],
}
# Runs of other commands, tested with these.
_OTHER_RUNS = ('runs/eval', 'runs/export', 'runs/infer', 'runs/track')
# Included by all models of an architecture, and none themselves.
_SHARED = (
  'models/encoder_decoder.gin',
  'models/decoder_only.gin',
  'models/sparse_blocks.gin',
  'models/sparse_decoder_only.gin',
  'models/sparse_encoder_decoder.gin',
)
# Models with experts, whose sizes tests/moe/test_gin_models.py compares.
_SPARSE = ('switch_', 'st_moe_', 'tokens_choose_', 'experts_choose_')
# Those of T5X's paths are in tests/compat/test_gin_files.py.
_COMPLETE = [
  name
  for name in gin_syntax.packaged_files()
  if name not in _SHARED and not name.startswith((*_OTHER_RUNS, 't5x/'))
]
# Published numbers, or numbers computed from the published dimensions, of weights in T5X's tree.
_NUM_PARAMETERS = {
  't5_1_0_tiny': 260_704,
  't5_1_0_small': 60_506_624,
  't5_1_0_base': 222_903_552,
  't5_1_0_large': 737_668_096,
  't5_1_0_xl': 2_851_598_336,
  't5_1_0_xxl': 11_307_321_344,
  't5_1_1_tiny': 518_240,
  't5_1_1_small': 76_961_152,
  't5_1_1_base': 247_577_856,
  't5_1_1_large': 783_150_080,
  't5_1_1_xl': 2_849_757_184,
  't5_1_1_xxl': 11_135_332_352,
  'byt5_small': 299_637_760,
  'byt5_base': 581_653_248,
  'byt5_large': 1_228_183_552,
  'byt5_xl': 3_737_801_728,
  'byt5_xxl': 12_906_899_328,
  'mt5_small': 300_176_768,
  'mt5_base': 582_401_280,
  'mt5_large': 1_229_581_312,
  'mt5_xl': 3_742_619_648,
  'mt5_xxl': 12_921_057_280,
  'umt5_small': 306_601_984,
  'umt5_base': 592_043_520,
  'umt5_xl': 3_768_356_864,
  'umt5_xxl': 12_972_531_712,
  'codet5_small': 60_492_288,
  'codet5_base': 222_882_048,
  'codet5_large': 737_639_424,
  'codet5p_220m': 222_882_048,
  'codet5p_770m': 737_639_424,
  'madlad400_3b': 2_940_374_016,
  'madlad400_7b': 8_296_829_952,
  'madlad400_10b': 10_712_586_240,
  'flan_ul2': 19_459_613_696,
  'decoder_only_tiny': 258_728,
  'decoder_only_small': 35_332_800,
  'decoder_only_base': 109_628_544,
  'decoder_only_large': 341_231_104,
  'decoder_only_xl': 1_223_527_424,
  'decoder_only_xxl': 4_762_310_656,
}


@pytest.fixture(autouse=True)
def _clear(monkeypatch):
  monkeypatch.chdir(_ROOT)  # for `_FOLDER`
  yield
  gin.clear_config()


# In place of a sentencepiece model, which does not come with t5x_lite.
_NO_VOCABULARY = """
from __gin__ import dynamic_registration
from t5x_lite.data import vocabularies
VOCABULARY = @vocabularies.PassThroughVocabulary()
vocabularies.PassThroughVocabulary.size = 100
"""


def _load(files, **macros):
  texts = [gin_syntax.read_file(name) for name in files]
  values = {name: _REQUIRED[name] for name in gin_syntax.missing_macros(texts) if name in _REQUIRED}
  flags = [
    gin_syntax.read_flag(name, value, f'--gin.{name}={value}')
    for name, value in {**values, **macros}.items()
  ]
  return gin_utils.load(_ENTRY, gin_utils.read(files, flags))


def _make_model(files):
  """Returns the model that the files configure, whatever its vocabulary."""
  texts = [gin_syntax.read_text(_NO_VOCABULARY, 'vocabulary', is_flag=False)]
  placeholders = {
    name: value if name in ('TRAIN_STEPS', 'TASK_FEATURE_LENGTHS', 'DROPOUT_RATE') else repr(value)
    for name, value in _REQUIRED.items()
  }
  return gin_utils.load(_ENTRY, gin_utils.read(files, placeholders=placeholders) + texts).argument(
    'model'
  )


def _load_kind(name, **macros):
  if name in _FROM_FOLDER:
    macros['INITIAL_CHECKPOINT_PATH'] = _FOLDER
  return _load(_COMPANIONS[name.split('/')[0]](name), **macros)


def _num_parameters(config: t5.T5Config | decoder_only.TransformerConfig) -> int:
  network_cls, num_inputs = (
    (t5.Transformer, 3) if isinstance(config, t5.T5Config) else (decoder_only.DecoderWrapper, 2)
  )
  network = network_cls(
    dataclasses.replace(config, scan_layers=True)
  )  # the same parameters, traced once a stack
  tokens = [jnp.ones((1, 4), jnp.int32)] * num_inputs
  variables = jax.eval_shape(
    lambda key: network.init(key, *tokens, enable_dropout=False), jax.random.key(0)
  )
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables['params']))


# There is a file for every optimizer, all of one form.
_SOME_OPTIMIZERS = [
  f'optimizers/{name}.gin' for name in ('adafactor', 'adamw', 'lbfgs', 'multi_optimizer', 'sam')
]
# So there is for the sizes of a model.
_LARGE = ('_large.gin', '_xl.gin', '_xxl.gin')


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=pytest.mark.full)
    if (name.startswith('optimizers/') and name not in _SOME_OPTIMIZERS or name.endswith(_LARGE))
    else name
    for name in _COMPLETE
  ],
)
def test_resolves_and_repeats_itself(name, tmp_path):
  configuration = _load_kind(name)
  path = gin_utils.write_config(tmp_path, configuration.text, 0)
  assert gin_utils.load(_ENTRY, gin_utils.read([str(path)])).text == configuration.text
  # Cheap objects are made: datasets, checkpoints, the partitioner, the model with network and optimizer.
  for argument in (
    'train_dataset_cfg',
    'train_eval_dataset_cfg',
    'infer_eval_dataset_cfg',
    'checkpoint_cfg',
    'partitioner',
    'trainer_cls',
  ):
    configuration.argument(argument)
  _make_model([str(path)])


@pytest.mark.parametrize('name', [name for name in _COMPLETE if name.startswith('recipes/')])
def test_resolved_recipe_is_golden(name):
  text = _load_kind(name).text
  golden = _GOLDEN / f'{pathlib.PurePath(name).stem}.gin'
  if os.environ.get('UPDATE_GOLDEN'):
    golden.parent.mkdir(parents=True, exist_ok=True)
    golden.write_text(text, encoding='utf-8')
  assert text == golden.read_text(encoding='utf-8')


@pytest.mark.parametrize(
  'name',
  [  # The dims of all are compared with the published ones in test_released_sizes.py.
    name
    if name.endswith(('_tiny', '_small', '1_1_xxl'))
    else pytest.param(name, marks=pytest.mark.full)
    for name in sorted(_NUM_PARAMETERS)
  ],
)
def test_published_dimensions(name):
  _load_kind(f'models/{name}.gin')
  config_cls = decoder_only.TransformerConfig if name.startswith('decoder_only') else t5.T5Config
  config = gin.get_configurable(config_cls)()
  assert _num_parameters(config) == _NUM_PARAMETERS[name]
  assert config.dropout_rate == 0.1 and config.dtype == 'bfloat16'
  # The tables of CodeT5 were published with 32,100 rows.
  assert config.vocab_size % 128 == 0 or name.startswith('codet5')


def test_all_sizes_are_there():
  dense = {
    name
    for name in gin_syntax.packaged_files('models')
    if not name.removeprefix('models/').startswith(_SPARSE)
  }
  assert dense - set(_SHARED) == {f'models/{name}.gin' for name in _NUM_PARAMETERS}


@pytest.mark.parametrize(
  'order',
  [
    ['models/t5_1_1_small.gin', 'runs/pretrain.gin'],
    ['runs/pretrain.gin', 'models/t5_1_1_small.gin'],
  ],
)
def test_model_and_run_go_in_either_order(order):
  with_flags = _load(order)
  assert with_flags.argument('train_dataset_cfg').batch_size == 128


@pytest.mark.parametrize('name', [n for n in _COMPLETE if n.startswith('recipes/')])
def test_recipes_say_how_to_run_them(name):
  header = (
    gin_syntax.find_file(name).read_text().partition('\n\nfrom ')[0].partition('\n\ninclude ')[0]
  )
  assert re.search(
    rf'^#   t5x_lite train --gin_file={re.escape(name)} --gin\.MODEL_DIR=runs/',
    header,
    re.MULTILINE,
  )


@pytest.mark.parametrize('name', [n for n in _COMPLETE if n.startswith('recipes/')])
@pytest.mark.parametrize('source', [None, 'grain'])
def test_recipes_need_no_tensorflow_and_one_binding_switches_their_source(name, source):
  configuration = _load_kind(name, **({'DATA_SOURCE': source} if source else {}))
  for argument in ('train_dataset_cfg', 'train_eval_dataset_cfg'):
    assert configuration.argument(argument).source == (source or 'builtin')


@pytest.mark.parametrize(
  'name, config_cls, number',
  [
    ('keyword_cloze', t5.T5Config, 246_784),
    ('function_cloze', t5.T5Config, 689_920),
    ('keyword_cloze_decoder_only', decoder_only.TransformerConfig, 213_696),
  ],
)
def test_cloze_recipes_have_the_size_that_was_tried(name, config_cls, number):
  _load_kind(f'recipes/{name}.gin')
  assert _num_parameters(gin.get_configurable(config_cls)()) == number


@pytest.mark.parametrize(
  'name, kind', [('adafactor', Adafactor), ('adamw', OptaxWrapper), ('sgd', OptaxWrapper)]
)
def test_optimizer_files_change_the_optimizer(name, kind):
  optimizer_def = _load_kind(f'optimizers/{name}.gin').argument('model').optimizer_def
  assert isinstance(optimizer_def, kind)
  assert optimizer_def.uses_learning_rate


@pytest.mark.parametrize(
  'name, flags, mesh, embed',
  [
    ('fsdp', {}, {'data': 8, 'model': 1}, 'data'),
    ('tensor_parallel', {}, {'data': 4, 'model': 2}, None),
    ('tensor_parallel', {'NUM_PARTITIONS': '4'}, {'data': 2, 'model': 4}, None),
    ('2d', {'NUM_PARTITIONS': '4'}, {'data': 2, 'model': 4}, 'model'),
  ],
)
def test_partitioning_files_change_the_mesh_and_rules(name, flags, mesh, embed):
  partitioner = _load_kind(f'partitioning/{name}.gin', **flags).argument('partitioner')
  assert dict(partitioner.mesh.shape) == mesh
  assert (
    next((axis for logical, axis in partitioner.logical_axis_rules if logical == 'embed'), None)
    == embed
  )


def test_t5x_macros_have_t5x_defaults_but_for_the_changed_ones():
  pretrain = _load(['models/t5_1_1_small.gin', 'runs/pretrain.gin'])
  cfg = pretrain.argument('train_dataset_cfg')
  assert (cfg.batch_size, cfg.pack, cfg.shuffle, cfg.split, cfg.module) == (
    128,
    True,
    True,
    'train',
    None,
  )
  assert (cfg.use_cached, cfg.seed) == (False, 0)  # changed: T5X has True and None
  assert pretrain.argument('eval_steps') == 20 and pretrain.argument('eval_period') == 1000
  assert pretrain.argument('random_seed') == 0  # changed: T5X has None
  checkpoint_cfg = pretrain.argument('checkpoint_cfg')
  assert (checkpoint_cfg.save.period, checkpoint_cfg.save.keep, checkpoint_cfg.restore) == (
    1000,
    None,
    None,
  )
  assert checkpoint_cfg.save.save_dataset  # changed: T5X has False
  assert pretrain.argument('infer_eval_dataset_cfg') is None
  for text in (
    'Z_LOSS = 0.0001',
    'LABEL_SMOOTHING = 0.0',
    'LOSS_NORMALIZING_FACTOR = None',
    "factors = 'constant * rsqrt_decay'",
    'base_learning_rate = 1.0',
    'warmup_steps = 10000',
  ):
    assert text in pretrain.text
  finetune = _load(['models/t5_1_1_small.gin', 'runs/finetune.gin'])
  restore = finetune.argument('checkpoint_cfg').restore
  assert (restore.path, restore.mode) == ('runs/y/checkpoint_3', 'specific')
  assert restore.dtype is None  # changed: T5X has 'float32'
  assert finetune.argument('checkpoint_cfg').save.period == 5000
  assert finetune.argument('infer_eval_dataset_cfg').split == 'validation'
  for text in (
    'DROPOUT_RATE = 0.1',
    'BATCH_SIZE = 128',
    "factors = 'constant'",
    'base_learning_rate = 0.001',
  ):
    assert text in finetune.text


@pytest.mark.parametrize('name, value', [('num_decodes', '2'), ('eos_id', '5')])
def test_arguments_that_a_model_passes_to_its_decode_fn_cannot_be_bound(name, value):
  flags = [
    gin_syntax.read_flag('MODEL_DIR', 'x', '--gin.MODEL_DIR'),
    gin_syntax.read_flag(f'decoding.greedy_search.{name}', value, '--gin.decoding'),
  ]
  message = (
    f'decoding.greedy_search.{name} has no effect: models.EncoderDecoderModel passes {name} itself'
  )
  with pytest.raises(errors.ConfigError, match=message):
    gin_utils.load(
      't5x_lite.apps.train.train', gin_utils.read(['recipes/keyword_cloze.gin'], flags)
    )
