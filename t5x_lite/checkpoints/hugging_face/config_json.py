"""What a `config.json` of the T5 family says of a network, and the `config.json` that says it of a network of ours.

Files of all ages are read: keys that came later have their defaults, and derived keys (`dense_act_fn`, `is_gated_act`,
`scale_decoder_outputs`, `encoder_sparse_step`) win over what they are derived from, as in transformers.
"""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

from t5x_lite import untrusted
from t5x_lite.errors import CheckpointError

MODEL_TYPES = ('t5', 'mt5', 'umt5', 'switch_transformers')

# Names of transformers' activations to ours. Its `gelu` is the exact one, ours the approximation by tanh.
_OURS = {
    'relu': 'relu', 'gelu': 'gelu_exact', 'gelu_python': 'gelu_exact', 'gelu_new': 'gelu', 'gelu_fast': 'gelu',
    'gelu_accurate': 'gelu', 'gelu_pytorch_tanh': 'gelu', 'gelu_python_tanh': 'gelu', 'silu': 'silu', 'swish': 'silu',
    'sigmoid': 'sigmoid', 'tanh': 'tanh', 'linear': 'linear',
}
# 'gated-gelu' is read as the approximation; `gelu_python` is the name of the exact one that is not.
_THEIRS = {'relu': 'relu', 'gelu': 'gelu_new', 'gelu_exact': 'gelu_python', 'silu': 'silu', 'swish': 'silu',
           'sigmoid': 'sigmoid', 'tanh': 'tanh', 'linear': 'linear'}
# Values that a key has where the file does not say, by type of model.
_DEFAULTS = {
    't5': {'feed_forward_proj': 'relu', 'tie_word_embeddings': True},
    'mt5': {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
    'umt5': {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
    'switch_transformers': {'tie_word_embeddings': True},
}
_LAYER_NORM_EPSILON = 1e-6
# Far beyond any model: a damaged file is not to fill the memory with names.
_MOST_LAYERS = 10_000
_DIMS = {'vocab_size': 'vocab_size', 'emb_dim': 'd_model', 'num_heads': 'num_heads', 'head_dim': 'd_kv',
         'mlp_dim': 'd_ff'}
# Heads other than that of a language model, by the name of the class that has them.
_OTHER_HEADS = ('EncoderModel', 'ForSequenceClassification', 'ForTokenClassification', 'ForQuestionAnswering')


def model_type(config: Mapping[str, Any]) -> str:
  """Returns the type of the model of `config`.

  Raises:
    CheckpointError: it is none of `MODEL_TYPES`, or a model of another form.
  """
  found = config.get('model_type')
  if found is None and str(config.get('architectures', '')).find('T5') >= 0:
    found = 't5'  # files of the first years
  if found not in MODEL_TYPES:
    raise CheckpointError(f'config.json has model_type={found!r}; expected one of {", ".join(MODEL_TYPES)}: other '
                          'models have other layers, which our networks do not have. Choose a model of the T5 family.')
  if config.get('is_encoder_decoder') is False or config.get('is_decoder') is True:
    raise CheckpointError('config.json is of an encoder or a decoder alone (is_encoder_decoder='
                          f'{config.get("is_encoder_decoder")}, is_decoder={config.get("is_decoder")}); expected an '
                          'encoder-decoder.')
  architectures = config.get('architectures') or ()
  for name in architectures if isinstance(architectures, list | tuple) else (architectures,):
    if str(name).endswith(_OTHER_HEADS):
      raise CheckpointError(f'config.json is of a {name}; expected a model ForConditionalGeneration: heads of other '
                            'kinds have no place in our networks.')
  if config.get('quantization_config'):
    raise CheckpointError(f'config.json has quantization_config={config["quantization_config"]!r}; expected weights '
                          'that are numbers. Dequantize them with transformers, and save_pretrained the result.')
  return found


def _is_of_transformers_5(config: Mapping[str, Any]) -> bool:
  """Returns whether a folder was written by transformers 5 or a later one."""
  major = str(config.get('transformers_version', '0')).split('.')[0]
  return major.isdecimal() and int(major) >= 5


def output_head(config: Mapping[str, Any], has_head: bool | None = None) -> str:
  """Returns where the weights of the logits are.

  transformers 5 decides by type of model. T5 and Switch scale the decoder's outputs by emb_dim**-0.5 if they are tied;
  T5 keeps that in `scale_decoder_outputs` and writes `tie_word_embeddings: true` whatever held. mT5 never scales.
  umT5 says it is tied whatever the weights are, and a folder that has both tables is of an untied model. Folders written
  here say `scale_decoder_outputs: false` of every type of model whose tied logits are not scaled.

  Args:
    config: of a folder.
    has_head: whether there is an `lm_head.weight`; None if it is not known: the usual.

  Returns:
    'embedding' (the token embedding, scaled: our `logits_via_embedding`), 'own' (`lm_head.weight`), 'unscaled' (the
    token embedding, not scaled: with `scale_tied_logits=False`), or 'compare': 'embedding' if the two are equal, else
    'own'.

  Raises:
    CheckpointError: old and new transformers read the folder differently.
  """
  kind = model_type(config)
  tied = config.get('tie_word_embeddings', _DEFAULTS[kind]['tie_word_embeddings'])
  modern = _is_of_transformers_5(config)
  if kind == 't5':
    if config.get('scale_decoder_outputs', tied is not False):
      return 'embedding'
    return 'unscaled' if has_head is False and 'scale_decoder_outputs' in config else 'own'
  if config.get('scale_decoder_outputs') is False and not has_head:
    return 'unscaled'
  if kind == 'switch_transformers':
    return 'embedding' if tied else 'own'
  if has_head is None:
    return 'embedding' if tied and kind == 'umt5' and not modern else 'own'
  if kind == 'umt5':
    if has_head:
      return 'compare' if tied else 'own'
    return 'embedding' if tied else 'own'
  if has_head or not tied:
    return 'own'
  if not modern:
    raise CheckpointError(
        'the folder of an mT5 has tie_word_embeddings=true, no lm_head.weight, and is older than transformers 5: older '
        'ones scale the logits of such a model by d_model**-0.5, newer ones do not. Load it with the transformers it '
        'was made with; or in config.json set "model_type": "t5" if its logits are scaled, '
        '"scale_decoder_outputs": false if they are not.')
  return 'unscaled'


def tied_fields(head: str) -> dict[str, bool]:
  """Returns the fields of an `Architecture` that `head`, a result of `output_head` except 'compare', decides."""
  return {'logits_via_embedding': head in ('embedding', 'unscaled'), 'scale_tied_logits': head != 'unscaled'}


def _activations(config: Mapping[str, Any], kind: str) -> tuple[str, ...]:
  """Returns the activations of a feed-forward block, by our names."""
  if kind == 'switch_transformers':
    gated, name = False, config.get('dense_act_fn', 'relu')
    if config.get('is_gated_act') or '-' in str(name):
      raise CheckpointError(f'config.json of a Switch Transformer has dense_act_fn={name!r} and is_gated_act='
                            f'{config.get("is_gated_act")}; expected a block that is not gated: transformers has no '
                            'other.')
  else:
    form = str(config.get('feed_forward_proj', _DEFAULTS[kind]['feed_forward_proj']))
    parts = form.split('-')
    if len(parts) > 2 or (len(parts) == 2 and parts[0] != 'gated'):
      raise CheckpointError(f"config.json has feed_forward_proj={form!r}; expected an activation, or 'gated-' and one.")
    gated = config.get('is_gated_act', len(parts) == 2)
    name = config.get('dense_act_fn', 'gelu_new' if form == 'gated-gelu' else parts[-1])
  if not isinstance(name, str) or name not in _OURS:
    raise CheckpointError(f'config.json has the activation {name!r}, which our networks do not have; expected one of '
                          f'{", ".join(_OURS)}.')
  return (_OURS[name], 'linear') if gated else (_OURS[name],)


def sparse_layers(num_layers: int, step: int) -> tuple[int, ...]:
  """Returns which of `num_layers` layers are sparse in a Switch Transformer with `step`: every layer i, i % step = 1.

  >>> sparse_layers(6, 2), sparse_layers(6, 1), sparse_layers(6, 0), sparse_layers(6, 6)
  ((1, 3, 5), (0, 1, 2, 3, 4, 5), (), (1,))
  """
  if step <= 1:
    return tuple(range(num_layers)) if step == 1 else ()
  return tuple(range(1, num_layers, step))


def _sparse_fields(config: Mapping[str, Any], num_layers: Mapping[str, int]) -> dict[str, Any]:
  """Returns the fields of an `Architecture` that Switch Transformers have."""
  if config.get('router_dtype', 'float32') != 'float32':
    raise CheckpointError(f'config.json has router_dtype={config["router_dtype"]!r}; expected float32, in which our '
                          'routers compute.')
  fields = {
      'num_experts': _integer(config, 'num_experts', 8),
      'router_bias': bool(config.get('router_bias', False)),
      'router_jitter_noise': _number(config, 'router_jitter_noise', 0.01),
      'expert_capacity': _integer(config, 'expert_capacity', 64),
  }
  for stack in ('encoder', 'decoder'):
    number = _integer(config, f'num_sparse_{stack}_layers', 3, least=0)
    # Without a sparse layer the step is the depth, which makes one layer sparse: that is what transformers does.
    step = num_layers[stack] // number if number else num_layers[stack]
    step = _integer(config, f'{stack}_sparse_step', step, least=0)
    fields[f'sparse_{stack}_layers'] = sparse_layers(num_layers[stack], step)
  return fields


def _integer(
    config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
  value = config.get(key)
  value = default if value is None else value
  if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
    raise CheckpointError(f'config.json has {key}={value!r}; expected an integer from {least} to {most}.')
  return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
  value = config.get(key, default)
  if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
    raise CheckpointError(f'config.json has {key}={value!r}; expected a number in [0, 1).')
  return float(value)


def fields_of_config(config: Mapping[str, Any], has_head: bool | None = None) -> dict[str, Any]:
  """Returns the fields of an `Architecture` that a `config.json` says.

  Args:
    config: the file.
    has_head: whether there is an `lm_head.weight`; see `output_head`.

  Raises:
    CheckpointError: a model that our networks cannot express, or a file that lacks what it must say.
  """
  kind = model_type(config)
  epsilon = config.get('layer_norm_epsilon', _LAYER_NORM_EPSILON)
  if epsilon != _LAYER_NORM_EPSILON:
    raise CheckpointError(f'config.json has layer_norm_epsilon={epsilon!r}; expected {_LAYER_NORM_EPSILON}, that of '
                          'our norms.')
  for key in ('pad_token_id', 'decoder_start_token_id'):
    if config.get(key) not in (0, None):
      raise CheckpointError(f'config.json has {key}={config[key]!r}; expected 0: in our networks the id 0 is padding, '
                            'and begins what a decoder writes. Choose a model that was trained so, as T5 was.')
  if config.get('eos_token_id') not in (1, [1], None):
    raise CheckpointError(f"config.json has eos_token_id={config['eos_token_id']!r}; expected 1, which ends texts in "
                          'all vocabularies of T5, and which the folders written here say. Choose a model that was '
                          'trained so.')
  fields = {ours: _integer(config, theirs) for ours, theirs in _DIMS.items()}
  fields['num_encoder_layers'] = _integer(config, 'num_layers', most=_MOST_LAYERS)
  # Switch's 12 is for files without the key; null stands for the encoder's number everywhere.
  is_12 = kind == 'switch_transformers' and 'num_decoder_layers' not in config
  fields['num_decoder_layers'] = _integer(
      config, 'num_decoder_layers', 12 if is_12 else fields['num_encoder_layers'], most=_MOST_LAYERS)
  fields |= {
      'mlp_activations': _activations(config, kind),
      **tied_fields(output_head(config, has_head)),
      'relpos_per_layer': kind == 'umt5',
      'relpos_num_buckets': _integer(config, 'relative_attention_num_buckets', 32),
      'relpos_max_distance': _integer(config, 'relative_attention_max_distance', 128),
      'layer_norm_epsilon': epsilon,
  }
  if kind == 'switch_transformers':
    fields |= _sparse_fields(
        config, {'encoder': fields['num_encoder_layers'], 'decoder': fields['num_decoder_layers']})
  return fields


def feed_forward_proj(activations: tuple[str, ...]) -> dict[str, Any]:
  """Returns the keys of a `config.json` that stand for our `activations`.

  >>> feed_forward_proj(('gelu', 'linear'))
  {'feed_forward_proj': 'gated-gelu', 'dense_act_fn': 'gelu_new', 'is_gated_act': True}
  """
  name, gated = _THEIRS[activations[0]], len(activations) == 2
  form = name if not gated else 'gated-gelu' if name == 'gelu_new' else f'gated-{name}'
  return {'feed_forward_proj': form, 'dense_act_fn': name, 'is_gated_act': gated}


def is_expressible(activations: tuple[str, ...]) -> bool:
  """Returns whether transformers has a feed-forward block with our `activations`."""
  gate = activations[1:]
  return activations[0] in _THEIRS and gate in ((), ('linear',))


def sparse_step(num_layers: int, layers: tuple[int, ...]) -> int | None:
  """Returns the step that makes `layers` of `num_layers` sparse, None if there is none; inverse of `sparse_layers`."""
  for step in range(num_layers + 1):
    if sparse_layers(num_layers, step) == layers:
      return step
  return None


def read(folder: pathlib.Path, name: str) -> dict[str, Any]:
  """Returns the JSON object in the file `name` of a folder.

  Raises:
    CheckpointError: it is none, or must not be read; see `untrusted.read_limited`.
  """
  return parse(untrusted.read_limited(folder, name).decode('utf-8', errors='replace'), str(folder / name))


def parse(text: str, path: str) -> dict[str, Any]:
  """Returns the JSON object in `text`, the contents of `path`.

  Raises:
    CheckpointError: it is none.
  """
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise CheckpointError(f'{path} is no JSON ({error}); expected an object. Download it again.') from error
  if not isinstance(value, dict):
    raise CheckpointError(f'{path} holds a {type(value).__name__}; expected a JSON object. Download it again.')
  return value
