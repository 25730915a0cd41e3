"""Recipes that begin with a Hugging Face folder: sizes, weights and vocabulary from it, chosen parameters alone."""

import gzip
import json
import math
import pathlib
import re

import gin
import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import gin_utils
from t5x_lite import tree_utils
from t5x_lite.apps.convert import report as convert_report
from t5x_lite.apps.convert import run as convert
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints.hugging_face import network
from t5x_lite.command_line import cli
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.data import ByteVocabulary
from t5x_lite.data import tokenizer_folders
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.networks import t5
from tests import hub_cache

_ROOT = pathlib.Path(__file__).parents[2]
_CHOSEN = re.compile(r'norm/scale$|rel_embedding$|/encoder_decoder_attention/')
_TINY = dict(
  vocab_size=384,
  emb_dim=8,
  num_heads=2,
  head_dim=4,
  mlp_dim=16,
  num_encoder_layers=2,
  num_decoder_layers=1,
  mlp_activations=('gelu', 'linear'),
  logits_via_embedding=False,
)


_UNSCALED = dict(logits_via_embedding=True, scale_tied_logits=False)


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


def _write_folder(path, seed=0, **fields):
  """Writes a folder of random weights; returns them by our names."""
  architecture = hugging_face.Architecture(**_TINY | fields)
  rng = np.random.default_rng(seed)
  arrays = {
    rule.ours: rng.normal(size=rule.shape).astype(np.float32) / 8
    for rule in hugging_face.tensor_table(architecture)
  }
  hugging_face.write_folder(
    path, architecture, hugging_face.guess_family(architecture), arrays.__getitem__
  )
  return arrays


def _model(recipe, folder):
  flags = [
    gin_syntax.read_flag(name, value, name)
    for name, value in (('MODEL_DIR', 'x'), ('INITIAL_CHECKPOINT_PATH', str(folder)))
  ]
  return gin_utils.load('t5x_lite.apps.train.train', gin_utils.read([recipe], flags)).argument(
    'model'
  )


@pytest.mark.parametrize(
  'fields',
  [
    {},
    dict(logits_via_embedding=True, mlp_activations=('relu',)),
    dict(relpos_per_layer=True),
    _UNSCALED,
    dict(num_encoder_layers=3, relpos_num_buckets=16, relpos_max_distance=64),
  ],
)
def test_network_of_a_folder(tmp_path, fields):
  _write_folder(tmp_path / 'x', **fields)
  config = network.network_config(
    tmp_path / 'x', dtype='float32', dropout_rate=0.2, scan_layers=True
  )
  assert config == t5.T5Config(
    **{name: value for name, value in (_TINY | fields).items() if not name.startswith('relpos_')},
    dtype='float32',
    dropout_rate=0.2,
    scan_layers=True,
    num_relpos_buckets=fields.get('relpos_num_buckets', 32),
    max_relpos_distance=fields.get('relpos_max_distance', 128),
    relpos_bias_tables='per_layer' if 'relpos_per_layer' in fields else 'per_stack',
  )
  if fields == _UNSCALED:
    return  # Their config.json equals that of an untied model that transformers 5 saves.
  # To use a trained run again, config.json is enough.
  (tmp_path / 'x' / 'model.safetensors').unlink()
  assert (
    network.network_config(tmp_path / 'x', dtype='float32', dropout_rate=0.2, scan_layers=True)
    == config
  )


def test_a_model_of_the_hub(tmp_path, monkeypatch):
  _write_folder(tmp_path / 'x')
  folder = hub_cache.add(
    hub_cache.use(tmp_path / 'cache', monkeypatch), 'google/tiny', tmp_path / 'x'
  )
  name = 'hf://google/tiny'
  assert network.network_config(name) == network.network_config(folder)
  assert _model('recipes/finetune_from_hf.gin', name).input_vocabulary == ByteVocabulary(125)
  cfg = checkpoints.RestoreCheckpointConfig(path=name)
  assert checkpoints.get_first_valid_restore_config_and_paths([cfg]) == (cfg, [name])
  values, expected = checkpoints.load(name), checkpoints.load(folder)
  jax.tree.map(np.testing.assert_array_equal, values, expected)
  with pytest.raises(CheckpointError, match='hf download google/other --local-dir other'):
    checkpoints.load('hf://google/other')


def test_rejected_networks(tmp_path):
  with pytest.raises(
    ConfigError, match='must be a Hugging Face folder with config.json.*add a model file'
  ):
    network.network_config(tmp_path)
  (tmp_path / 'config.json').write_text('{"model_type": "bert"}')
  with pytest.raises(CheckpointError, match="model_type. must be one of .*'t5'.* got 'bert'"):
    network.network_config(tmp_path)
  _write_folder(
    tmp_path / 'x',
    num_experts=4,
    sparse_encoder_layers=(1,),
    sparse_decoder_layers=(),
    mlp_activations=('relu',),
    logits_via_embedding=True,
  )
  with pytest.raises(
    ConfigError, match=r'4 experts.*--gin_file=models/switch_base.gin --gin\.\S+=.*NUM_EXPERTS=4'
  ):
    network.network_config(tmp_path / 'x')


@pytest.mark.parametrize('function', [network.network_config, network.decoder_start_id])
def test_a_missing_folder_is_an_error_that_says_where_to_run(function):
  # The path of a run that was started in another directory.
  with pytest.raises(ConfigError, match=r"folder` must .*got 'base'.*where the training ran, or"):
    function('base')


@pytest.mark.full  # by default, tests/optimizers/multi freezes parameters, and test_gin_files.py reads the recipe
def test_one_binding_fine_tunes_chosen_parameters(tmp_path, monkeypatch):
  """The others stay to the bit, and the optimizer has nothing for them.

  The folder is as transformers 5 ties T5 1.1: it stays one table, here and in the folder made from the run.
  """
  monkeypatch.setenv('XLA_FLAGS', '')
  arrays = _write_folder(tmp_path / 'folder', **_UNSCALED)
  run = tmp_path / 'run'
  assert (
    cli.main(
      [
        'train',
        '--gin_file=recipes/finetune_chosen_params.gin',
        f'--gin.MODEL_DIR={run}',
        f'--gin.INITIAL_CHECKPOINT_PATH={tmp_path / "folder"}',
        '--gin.TRAIN_STEPS=2',
        '--gin.BATCH_SIZE=8',
        '--gin.train_script.train.infer_eval_dataset_cfg=None',
        '--gin.train_script.train.train_eval_dataset_cfg=None',
      ]
    )
    == 0
  )
  state = tree_utils.flatten_dict(checkpoints.load(str(run / 'checkpoint_2')))
  chosen = {name for name in arrays if _CHOSEN.search(name)}
  assert {name.removeprefix('target/') for name in state if name.startswith('target/')} == set(
    arrays
  )
  for name, array in arrays.items():
    assert np.array_equal(state[f'target/{name}'], array) == (name not in chosen), name
  # Two moments of each chosen parameter and two counters, and nothing else.
  optimizer_state = {name: value for name, value in state.items() if name.startswith('state/')}
  assert (
    sum(value.size for value in optimizer_state.values())
    == 2 * sum(arrays[name].size for name in chosen) + 2
  )
  losses = [
    json.loads(line)['loss'] for line in (run / 'train' / 'metrics.jsonl').read_text().splitlines()
  ]
  assert losses and all(math.isfinite(loss) for loss in losses)
  network_fields = checkpoints.read_metadata(str(run / 'checkpoint_2'))['network']
  assert network_fields['logits_via_embedding'] and not network_fields['scale_tied_logits']
  back = hugging_face.HuggingFaceFolder(
    convert.convert(str(run), str(tmp_path / 'back'), to='hugging_face').path
  )
  assert back.architecture == hugging_face.Architecture(**_TINY | _UNSCALED)
  assert set(back.tensors.entries) == set(
    hugging_face.HuggingFaceFolder(tmp_path / 'folder').tensors.entries
  )


def _write_byte_level_bpe(folder):
  """Adds the stored byte-level BPE with 100 sentinels, in the files of CodeT5."""
  stored = _ROOT / 'tests' / 'golden' / 'interop' / 'byte_level_bpe.json.gz'
  model = json.loads(gzip.decompress(stored.read_bytes()))
  size = len(model['vocab'])
  sentinels = {f'<extra_id_{99 - i}>': size + i for i in range(100)}
  jsons = {
    'vocab': model['vocab'],
    'added_tokens': sentinels,
    'tokenizer_config': {'tokenizer_class': 'RobertaTokenizer'},
  }
  for name, value in jsons.items():
    (folder / f'{name}.json').write_text(json.dumps(value))
  (folder / 'merges.txt').write_text('\n'.join(map(' '.join, model['merges'])), encoding='utf-8')


def test_a_walk_with_a_byte_level_bpe(tmp_path, monkeypatch, capsys):
  """A folder of CodeT5's form is shown, trained and exported; a resumed run rejects another tokenizer."""
  pytest.importorskip('tokenizers')
  monkeypatch.setenv('XLA_FLAGS', '')
  folder = tmp_path / 'codet5'
  _write_folder(folder, vocab_size=700, eos_token_ids=(2,), **_UNSCALED)
  _write_byte_level_bpe(folder)

  def train(*flags):
    return cli.main(
      [
        'train',
        '--gin_file=recipes/finetune_from_hf.gin',
        f'--gin.MODEL_DIR={tmp_path / "run"}',
        f'--gin.INITIAL_CHECKPOINT_PATH={folder}',
        '--gin.BATCH_SIZE=8',
        '--gin.train_script.train.infer_eval_dataset_cfg=None',
        '--gin.train_script.train.train_eval_dataset_cfg=None',
        *flags,
      ]
    )

  assert train('--dry_run') == 0
  assert (
    'Vocabulary  vocab.json of codet5 (byte-level BPE): 700 ids, padding 0, end 2, start 0\n'
    in capsys.readouterr().out
  )
  assert train('--gin.TRAIN_STEPS=1') == 0
  assert cli.main(['convert', str(tmp_path / 'run'), f'{tmp_path}/out', '--to=hugging_face']) == 0
  assert f'The tokenizer is that of the run, {folder} (config.gin).' in capsys.readouterr().out
  for name in ('vocab.json', 'merges.txt', 'added_tokens.json', 'tokenizer_config.json'):
    assert (tmp_path / 'out' / name).read_bytes() == (folder / name).read_bytes()
  config = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert (config['eos_token_id'], config['tokenizer_class']) == (2, 'RobertaTokenizer')
  vocab = json.loads((folder / 'vocab.json').read_text())
  vocab['a'], vocab['b'] = vocab['b'], vocab['a']
  (folder / 'vocab.json').write_text(json.dumps(vocab))
  for flags in (['--gin.TRAIN_STEPS=2'], ['--gin.TRAIN_STEPS=2', '--dry_run']):
    assert train(*flags) == 2
    assert 'holds a position in other data than those of this run' in capsys.readouterr().err
  assert checkpoints.all_steps(tmp_path / 'run') == [1]


@pytest.mark.parametrize('fields, extra_ids', [({}, 100), (dict(relpos_per_layer=True), 300)])
def test_conversion_says_the_sentinels(tmp_path, fields, extra_ids):
  """A folder's spiece.model has none, and the file that the model files of T5 name has them; umT5's add 300."""
  _write_folder(tmp_path / 'x', vocab_size=600, **fields)
  import sentencepiece

  with open(tmp_path / 'x' / 'spiece.model', 'wb') as file:
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(['a b c d e'] * 20),
      model_writer=file,
      vocab_size=9,
      pad_id=0,
      eos_id=1,
      unk_id=2,
      bos_id=-1,
      minloglevel=2,
    )
  done = convert.convert(str(tmp_path / 'x'), str(tmp_path / 'y'), to='t5x_lite')
  text = convert_report.describe(done)
  assert f'--gin.VOCABULARY_FILE={tmp_path}/x/spiece.model' in text
  assert ('--gin.vocabularies.SentencePieceVocabulary.extra_ids=100' in text) == (extra_ids == 100)
  assert tokenizer_folders.hugging_face_vocabulary(str(tmp_path / 'x')).vocab_size == 9 + extra_ids


def test_state_of_chosen_parameters_in_a_released_size(tmp_path):
  """Numbers of docs/weights.md for T5 1.1 small: parameters, and bytes of the optimizer's state."""
  (tmp_path / 'config.json').write_text(
    json.dumps(
      {
        'model_type': 't5',
        'vocab_size': 32128,
        'd_model': 512,
        'num_heads': 6,
        'd_kv': 64,
        'd_ff': 1024,
        'num_layers': 8,
        'num_decoder_layers': 8,
        'feed_forward_proj': 'gated-gelu',
        'tie_word_embeddings': False,
        'tokenizer_class': 'ByT5Tokenizer',
      }
    )
  )
  model = _model('recipes/finetune_chosen_params.gin', tmp_path)
  assert model.input_vocabulary == ByteVocabulary(125)
  rules = hugging_face.tensor_table(
    hugging_face.Architecture.from_config_json(json.loads((tmp_path / 'config.json').read_text()))
  )
  shapes = tree_utils.unflatten_dict(
    {rule.ours: jax.ShapeDtypeStruct(rule.shape, np.dtype(np.float32)) for rule in rules}
  )
  state = jax.eval_shape(model.optimizer_def.init_state, shapes)
  chosen = sum(math.prod(rule.shape) for rule in rules if _CHOSEN.search(rule.ours))
  assert (tree_utils.num_elements(shapes), chosen) == (76_961_152, 6_313_344)
  assert tree_utils.num_bytes(state) == 8 * chosen + 8
