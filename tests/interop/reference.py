"""Random models of `transformers` by family, and an independent reading of their weights into our parameter trees.

What the library gives for them is recorded (`tests.interop.hf_models`).
The converter here walks from their names to ours by patterns and does not import `t5x_lite.checkpoints.hugging_face`,
so that the tests can compare that package with it.
"""

from collections.abc import Mapping
import dataclasses
import functools
import pathlib
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from moe import networks as moe_networks
from t5x_lite import checkpoints
from t5x_lite import decoding
from t5x_lite import models
from t5x_lite import tree_utils
from t5x_lite.apps.common import starting_point as start
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5
from tests.interop import hf_models
from tests.interop import records
from tests.networks import network_cases

NUM_EXPERTS = 4
VOCAB_SIZE = 96
_ENCODER_LENGTH, _DECODER_LENGTH = 19, 11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A kind of published model, at toy size.

  Attributes:
    name: for test ids.
    kind: prefix of the classes in `transformers`.
    gated: two input projections, tanh-gelu and linear; otherwise one, relu.
    tied: logits by the embedding table, divided by sqrt(d_model) by default.
    per_layer: a table of relative positions in each layer.
    num_encoder_layers: depth of the encoder.
    num_decoder_layers: depth of the decoder.
    sparse: layers 1, 3, ... have experts.
    options: further fields of the configuration of `transformers`.
    our_options: the same options in our configuration.
    end_amounts: what tests of generation add to the logit of the end token on average, in models of even and of odd
      seeds, so that some sequences end and some do not.
  """

  name: str
  kind: str = 'T5'
  gated: bool = True
  tied: bool = False
  per_layer: bool = False
  num_encoder_layers: int = 2
  num_decoder_layers: int = 2
  sparse: bool = False
  options: tuple[tuple[str, Any], ...] = ()
  our_options: tuple[tuple[str, Any], ...] = ()
  end_amounts: tuple[float, float] = (1.5, 4.0)


FAMILIES = {
  family.name: family
  for family in (
    Family(name='t5_1_0', gated=False, tied=True),
    Family(name='t5_1_1', num_decoder_layers=3),
    Family(
      name='tied_gated',
      tied=True,
      options=(('relative_attention_num_buckets', 8), ('relative_attention_max_distance', 14)),
      our_options=(('num_relpos_buckets', 8), ('max_relpos_distance', 14)),
    ),
    # T5 1.1 as transformers 5 makes it new: tied and not scaled, whatever it writes of `tie_word_embeddings`.
    Family(
      name='tied_unscaled',
      tied=True,
      options=(('tie_word_embeddings', False),),
      our_options=(('scale_tied_logits', False),),
      end_amounts=(50.0, 50.0),  # its logits are larger, that of the token before most of all
    ),
    Family(name='mt5', kind='MT5'),
    Family(name='umt5', kind='UMT5', per_layer=True),
    # Its tokenizer has 384 ids.
    Family(
      name='byt5',
      num_encoder_layers=3,
      num_decoder_layers=1,
      options=(('vocab_size', 384),),
      our_options=(('vocab_size', 384),),
    ),
    Family(name='switch', kind='SwitchTransformers', gated=False, tied=True, sparse=True),
  )
}
DENSE = [name for name, family in FAMILIES.items() if not family.sparse]


def cases(*default: tuple[str, str]) -> list[Any]:
  """Returns test parameters (family, layout): all there are, those that are not in `default` for the long tests."""
  found = [(name, 't5') for name in FAMILIES] + [(name, 'scalable_t5') for name in DENSE]
  return [
    pytest.param(*case, id='-'.join(case), marks=[] if case in default else [pytest.mark.full])
    for case in found
  ]


# ---- Their side -----------------------------------------------------------------------------------------------------


def hf_fields(family: Family, **overrides: Any) -> dict[str, Any]:
  """Return fields of a configuration of `transformers`, without dropout and jitter."""
  fields = dict(
    vocab_size=VOCAB_SIZE,
    d_model=32,
    d_kv=hf_models.HEAD_DIM,
    d_ff=40,
    num_heads=4,
    num_layers=family.num_encoder_layers,
    num_decoder_layers=family.num_decoder_layers,
    dropout_rate=0.0,
    decoder_start_token_id=0,
  )
  if family.sparse:
    fields.update(
      num_experts=NUM_EXPERTS,
      num_sparse_encoder_layers=family.num_encoder_layers // 2,
      num_sparse_decoder_layers=family.num_decoder_layers // 2,
      router_jitter_noise=0.0,
    )
  else:
    fields.update(
      feed_forward_proj='gated-gelu' if family.gated else 'relu', tie_word_embeddings=family.tied
    )
  return {**fields, **dict(family.options), **overrides}


def _has_wrong_flag(family: Family) -> bool:
  """Return whether `transformers` says of untied embeddings that they are tied."""
  return family.kind == 'UMT5' and not family.tied


def hf_model(family: Family, seed: int = 0, **overrides: Any) -> hf_models.HFModel:
  """Return a model of `transformers` with random weights."""
  name = ','.join([family.name, *(f'{key}={value}' for key, value in overrides.items())])
  return hf_models.made(
    name,
    family.kind,
    hf_fields(family, **overrides),
    family.tied,
    _has_wrong_flag(family),
    seed,
  )


# ---- Our side -------------------------------------------------------------------------------------------------------


def our_config(family: Family, **overrides: Any) -> t5.T5Config:
  """Returns our configuration of the same model."""
  fields = dict(
    vocab_size=VOCAB_SIZE,
    emb_dim=32,
    head_dim=hf_models.HEAD_DIM,
    mlp_dim=40,
    num_heads=4,
    num_encoder_layers=family.num_encoder_layers,
    num_decoder_layers=family.num_decoder_layers,
    dropout_rate=0.0,
    mlp_activations=('gelu', 'linear') if family.gated else ('relu',),
    logits_via_embedding=family.tied,
    relpos_bias_tables='per_layer' if family.per_layer else None,
  )
  return t5.T5Config(**{**fields, **dict(family.our_options), **overrides})


def our_module(family: Family, layout: str = 't5', **block_options: Any) -> t5.Transformer:
  """Returns our network of a family, with parameters in `layout`."""
  scanned = (
    dict(param_layout=layout, scan_layers=True, relpos_bias_tables=None)
    if layout == 'scalable_t5'
    else {}
  )
  config = our_config(family, **scanned)
  if not family.sparse:
    return t5.Transformer(config)
  block = moe_networks.SparseBlock(
    num_experts=NUM_EXPERTS,
    router=moe.TokensChooseRouter(NUM_EXPERTS, ignore_padding_tokens=False),
    **block_options,
  )
  return moe_networks.sparse_transformer(
    config, block, encoder_layout='every_2', decoder_layout='every_2'
  )


def end_if_writing() -> None:
  """End the test while records are written; tests ask for all results of the libraries before they compile ours."""
  if records.get().mode is records.Mode.WRITE:
    pytest.skip('the results of the libraries are recorded')


def jit(function: Any) -> Any:
  """Return a compiled function of ours; a call ends the test while records are written."""
  compiled = network_cases.jit(function)

  def call(*arguments):
    end_if_writing()
    return compiled(*arguments)

  return call


@functools.cache
def logits_fn(family: Family, layout: str = 't5'):
  """Returns a compiled function from (parameters, batch) to our logits."""
  module = our_module(family, layout)
  return jit(lambda params, batch: module.apply({'params': params}, **batch, enable_dropout=False))


def random_batch(seed: int = 0, rows: int = 3) -> hf_models.Batch:
  """Returns rows of several lengths, padded, with 0 as the start token."""
  rng = np.random.default_rng(seed)

  def tokens(length):
    lengths = np.concatenate([[length, 2], rng.integers(2, length, rows - 2)])
    return np.where(
      np.arange(length) < lengths[:, None], rng.integers(2, VOCAB_SIZE, (rows, length)), 0
    )

  inputs, targets = tokens(_ENCODER_LENGTH), tokens(_DECODER_LENGTH)
  shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
  arrays = dict(
    encoder_input_tokens=inputs, decoder_input_tokens=shifted, decoder_target_tokens=targets
  )
  label = f'batch{seed}' if rows == 3 else f'batch{seed}x{rows}'
  return hf_models.Batch(label, {name: value.astype(np.int32) for name, value in arrays.items()})


def our_model(module: t5.Transformer, end: int = 1, **options: Any) -> models.EncoderDecoderModel:
  """Return this package's model with an end token; `options` are its arguments."""
  vocabulary = types.SimpleNamespace(vocab_size=module.config.vocab_size, eos_id=end, pad_id=0)
  return models.EncoderDecoderModel(
    module, vocabulary, vocabulary, **{'optimizer_def': None, **options}
  )


def greedy_tokens(
  module: t5.Transformer, params: Any, inputs: np.ndarray, length: int, end: int = 1, start: int = 0
) -> np.ndarray:
  """Return what our greedy search decodes.

  Args:
    module: our network.
    params: its parameters.
    inputs: int32[rows, input length], ids of the encoder.
    length: number of decoded tokens.
    end: end token.
    start: first input of the decoder.

  Returns:
    int32[rows, length], with 0 behind the end.
  """
  model = our_model(module, end, decode_fn=decoding.greedy_search, decoder_start_id=start)
  batch = {
    'encoder_input_tokens': inputs,
    'decoder_input_tokens': np.zeros((len(inputs), length), np.int32),
  }
  return np.asarray(network_cases.jit(model.predict_batch)(params, batch))


def param_shapes(module: t5.Transformer) -> dict[str, Any]:
  """Returns the shapes and dtypes of a network's parameters."""
  init = functools.partial(module.init, **network_cases.tiny_batch(), enable_dropout=False)
  return tree_utils.to_dict(jax.eval_shape(init, jax.random.key(0))['params'])


def random_params(family: Family, seed: int = 0, layout: str = 't5') -> dict[str, Any]:
  """Returns parameters of our network that no model of theirs had a part in; norm scales are not 1."""
  shapes = param_shapes(our_module(family, layout))
  rng = np.random.default_rng(seed)

  def draw(name, leaf):
    value = rng.standard_normal(leaf.shape)
    if name.endswith('scale'):
      value = 1 + 0.4 * value
    elif 'embed' not in name:
      value *= 1.4 * (leaf.shape[-2] * (hf_models.HEAD_DIM if '/query/' in name else 1)) ** -0.5
    return value.astype(np.float32)

  return tree_utils.map_with_names(draw, shapes)


def max_error(got: Any, want: Any, batch: Mapping[str, np.ndarray]) -> float:
  """Returns the largest difference of logits at positions that are not padding, over the largest logit there."""
  where = np.asarray(batch['decoder_target_tokens']) > 0
  got, want = np.asarray(got, np.float64)[where], np.asarray(want, np.float64)[where]
  return float(np.abs(got - want).max() / np.abs(want).max())


# ---- Weights --------------------------------------------------------------------------------------------------------

_ATTENTION = {
  'SelfAttention': {'encoder': 'attention', 'decoder': 'self_attention'},
  'EncDecAttention': {'decoder': 'encoder_decoder_attention'},
}
_PROJECTIONS = {'q': 'query', 'k': 'key', 'v': 'value', 'o': 'out'}
_NORMS = {
  'encoder': ('pre_attention_layer_norm', 'pre_mlp_layer_norm'),
  'decoder': (
    'pre_self_attention_layer_norm',
    'pre_cross_attention_layer_norm',
    'pre_mlp_layer_norm',
  ),
}
_COPIES = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')


def our_tree(
  tensors: Mapping[str, np.ndarray], family: Family, layout: str = 't5'
) -> dict[str, Any]:
  """Returns our parameters, in `layout`, of the tensors of a `transformers` model (or of their gradients)."""
  flat: dict[str, np.ndarray] = {}
  experts: dict[str, dict[int, np.ndarray]] = {}
  for name, tensor in tensors.items():
    if name in _COPIES or (family.tied and name == 'lm_head.weight'):
      continue
    ours, value, expert = _one(name, tensor, family)
    if expert is None:
      flat[ours] = value
    else:
      experts.setdefault(ours, {})[expert] = value
  for ours, parts in experts.items():
    flat[ours] = np.stack([parts[i] for i in range(NUM_EXPERTS)])
  tree = tree_utils.unflatten_dict(flat)
  if layout == 't5':
    return tree
  return param_layouts.convert(tree, 't5', layout, our_module(family, layout).config)


def our_adapter(tensors: Mapping[str, np.ndarray], family: Family) -> dict[str, np.ndarray]:
  """Return our arrays of an adapter, by path in the layout 't5', of the tensors of one of PEFT (or of gradients)."""
  found: dict[str, np.ndarray] = {}
  experts: dict[str, dict[int, np.ndarray]] = {}
  for name, tensor in tensors.items():
    module, letter = re.fullmatch(r'base_model\.model\.(.+)\.lora_([AB])\.weight', name).groups()
    kernel, value, expert = _one(f'{module}.weight', tensor, family)
    ours = f'{kernel.removesuffix("kernel")}lora_{letter.lower()}'
    if expert is None:
      found[ours] = value
    else:
      experts.setdefault(ours, {})[expert] = value
  stacked = {
    name: np.stack([parts[i] for i in range(NUM_EXPERTS)]) for name, parts in experts.items()
  }
  return found | stacked


def to_t5_layout(params: Any, family: Family, add_tables: bool) -> dict[str, Any]:
  """Returns stacked parameters, or gradients of them, in the layout 't5'.

  Args:
    params: in the layout 'scalable_t5'.
    family: of the network.
    add_tables: make one table of relative positions of each stack, the sum of those of its layers.
  """
  config = dataclasses.replace(our_config(family), relpos_bias_tables='per_layer')
  tree = param_layouts.convert(jax.tree.map(np.asarray, params), 'scalable_t5', 't5', config)
  if add_tables:
    for stack in ('encoder', 'decoder'):
      tables = [
        tree[stack][f'layers_{i}'].pop('relpos_bias') for i in range(config.num_layers_of(stack))
      ]
      tree[stack]['relpos_bias'] = jax.tree.map(lambda *each: np.sum(each, axis=0), *tables)
  return tree


def _one(name: str, tensor: np.ndarray, family: Family) -> tuple[str, np.ndarray, int | None]:
  """Returns (our name, our array, number of the expert that it is of) for one of their tensors."""
  if name == 'shared.weight':
    return 'token_embedder/embedding', tensor, None
  if name == 'lm_head.weight':
    return 'decoder/logits_dense/kernel', tensor.T, None
  if match := re.fullmatch(r'(encoder|decoder)\.final_layer_norm\.weight', name):
    return f'{match[1]}/{match[1]}_norm/scale', tensor, None
  stack, layer, part, rest = re.fullmatch(
    r'(\w+)\.block\.(\d+)\.layer\.(\d+)\.(.*)\.weight', name
  ).groups()
  prefix = f'{stack}/layers_{layer}/'
  match rest.split('.'):
    case ['layer_norm']:
      return f'{prefix}{_NORMS[stack][int(part)]}/scale', tensor, None
    case ['SelfAttention', 'relative_attention_bias']:
      where = prefix if family.per_layer else f'{stack}/'
      return f'{where}relpos_bias/rel_embedding', tensor.T, None
    case [attention, projection] if attention in _ATTENTION:
      return (
        f'{prefix}{_ATTENTION[attention][stack]}/{_PROJECTIONS[projection]}/kernel',
        tensor.T,
        None,
      )
    case ['DenseReluDense' | 'mlp', kernel]:
      return f'{prefix}mlp/{kernel}/kernel', tensor.T, None
    case ['mlp', 'router', 'classifier']:
      return f'{prefix}mlp/router/router_weights/w/kernel', tensor.T, None
    case ['mlp', 'experts', expert, kernel]:
      return f'{prefix}mlp/expert/{kernel}/kernel', tensor.T, int(expert.removeprefix('expert_'))
  raise AssertionError(f'a tensor that is not known: {name}')


def assert_same_bits(got: Any, want: Any) -> None:
  """Asserts that two trees have the same names, and arrays of the same dtypes, shapes and bits."""
  got, want = (dict(tree_utils.named_leaves(tree)) for tree in (got, want))
  assert got.keys() == want.keys()
  for name, value in want.items():
    have, value = np.asarray(got[name]), np.asarray(value)
    assert have.dtype == value.dtype and have.shape == value.shape, (
      name,
      have.dtype,
      have.shape,
      value.shape,
    )
    assert have.tobytes() == value.tobytes(), name


def as_jax(batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
  """Returns a batch on the device."""
  return {name: jnp.asarray(value) for name, value in batch.items()}


# ---- Files ----------------------------------------------------------------------------------------------------------


def load_theirs(
  name: str, path: Any, family: Family, weights_vary: bool = False
) -> hf_models.HFModel:
  """Return a model as `transformers` loads it; all of its weights must be in the folder, and no others."""
  return hf_models.loaded(
    name, path, family.kind, _has_wrong_flag(family), weights_vary=weights_vary
  )


def save_ours(
  params: Any, path: pathlib.Path, module: t5.Transformer, step: int = 7, end: int = 1
) -> str:
  """Write a checkpoint as a run with an end token does; return the model directory."""
  state = {'target': params, 'state': {'step': np.int32(step)}}
  with checkpoints.CheckpointManager(path, save_cfg=checkpoints.SaveCheckpointConfig()) as manager:
    manager.save(step, state, metadata=start.layout_metadata(our_model(module, end)))
  return str(path)


def restore(path: str, family: Family, layout: str = 't5') -> dict[str, Any]:
  """Returns the parameters of a checkpoint in any form, restored as a run restores them: for a network in `layout`."""
  module = our_module(family, layout)
  cfg = checkpoints.RestoreCheckpointConfig(path=path, mode='specific')
  _, (found,) = checkpoints.get_first_valid_restore_config_and_paths([cfg])
  target = {'target': param_shapes(module), 'state': {'step': jax.ShapeDtypeStruct((), jnp.int32)}}
  restored = checkpoints.restore_checkpoint(
    found,
    target,
    restore_cfg=cfg,
    transformation_fns=checkpoints.param_layout_fns(found, module.config),
  )
  return restored.state['target']


def tensor_bits(folder: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
  """Return name -> (dtype, shape, bits) of all tensors of a folder of theirs, from one file or from shards."""
  return {
    name: (str(tensor.dtype), tensor.shape, tensor.tobytes())
    for name, tensor in hf_models.read_tensors(folder).items()
  }


def config_of(name: str, folder: Any) -> dict[str, Any]:
  """Return a folder's configuration as `transformers` reads it, without what says how it was saved."""
  config = hf_models.read_config(name, folder)
  # Ours writes its activation as all of the T5 family do, too: to Switch Transformers, `dense_act_fn` says it.
  unread = (
    ('feed_forward_proj', 'is_gated_act') if config['model_type'] == 'switch_transformers' else ()
  )
  return {
    key: value
    for key, value in config.items()
    if key not in ('tokenizer_class', 'dropout_rate', *unread)
  }
