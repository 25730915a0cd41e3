"""Reading and writing the fields of a `config.json` of the T5 family.

Files of all versions of transformers are read: missing keys have their defaults, and derived keys (`dense_act_fn`,
`is_gated_act`, `scale_decoder_outputs`, `encoder_sparse_step`) take precedence over the keys that they are derived
from, as in transformers.
"""

from collections.abc import Mapping
import functools
import logging
from typing import Any

from t5x_lite import checks
from t5x_lite.checks import Expectation
from t5x_lite.errors import CheckpointError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

GENERATION_CONFIG_FILE = 'generation_config.json'
MODEL_TYPES = ('t5', 'mt5', 'umt5', 'switch_transformers')

# transformers' names of activations to ours. `gelu` is exact there and the approximation by tanh here.
_OURS = {
  'relu': 'relu',
  'gelu': 'gelu_exact',
  'gelu_python': 'gelu_exact',
  'gelu_new': 'gelu',
  'gelu_fast': 'gelu',
  'gelu_accurate': 'gelu',
  'gelu_pytorch_tanh': 'gelu',
  'gelu_python_tanh': 'gelu',
  'silu': 'silu',
  'swish': 'silu',
  'sigmoid': 'sigmoid',
  'tanh': 'tanh',
  'linear': 'linear',
}
# transformers reads 'gated-gelu' as the approximation, so the exact function is written as `gelu_python`.
_THEIRS = {
  'relu': 'relu',
  'gelu': 'gelu_new',
  'gelu_exact': 'gelu_python',
  'silu': 'silu',
  'swish': 'silu',
  'sigmoid': 'sigmoid',
  'tanh': 'tanh',
  'linear': 'linear',
}
# Default values of missing keys, by type of model.
_DEFAULTS = {
  't5': {'feed_forward_proj': 'relu', 'tie_word_embeddings': True},
  'mt5': {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
  'umt5': {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False},
  'switch_transformers': {'tie_word_embeddings': True},
}
# transformers' default of a missing key.
_LAYER_NORM_EPSILON = 1e-6
# Much more than any model has: a damaged file must not fill the memory with names.
_MAX_LAYERS = 10_000
_MAX_SIZE = 2**31 - 1
_DIMS = {
  'vocab_size': 'vocab_size',
  'emb_dim': 'd_model',
  'num_heads': 'num_heads',
  'head_dim': 'd_kv',
  'mlp_dim': 'd_ff',
}
# Suffixes of classes whose head is not that of a language model.
_OTHER_HEADS = (
  'EncoderModel',
  'ForSequenceClassification',
  'ForTokenClassification',
  'ForQuestionAnswering',
  'ForForecasting',
)


def _other_heads(architectures: Any) -> list[str]:
  """Return the classes, among those of config.json, that have no language model head."""
  names = architectures if isinstance(architectures, list | tuple) else (architectures,)
  return [str(name) for name in names if str(name).endswith(_OTHER_HEADS)]


def _head_remedy(architectures: Any) -> str:
  other = ' and '.join(_other_heads(architectures))
  return (
    f'Our networks have no other heads, such as that of {other}. Choose a folder of a model '
    'ForConditionalGeneration.'
  )


_TYPE_EXPECTATIONS = {
  # Before `is_encoder_decoder`, which says less about the folder of an encoder.
  'architectures': Expectation(
    'a model ForConditionalGeneration',
    lambda architectures: not _other_heads(architectures),
    _head_remedy,
  ),
  'model_type': checks.one_of(MODEL_TYPES, 'Choose a model of the T5 family.'),
  'is_encoder_decoder': Expectation(
    'true', lambda value: value is not False, 'Choose an encoder-decoder.'
  ),
  'is_decoder': Expectation('false', lambda value: value is not True, 'Choose an encoder-decoder.'),
  'quantization_config': Expectation(
    'empty',
    lambda value: not value,
    'Dequantize the weights with transformers, then call save_pretrained.',
  ),
}
_SPECIAL_IDS = {
  # Padding is masked, and id 0 in our batches: whether texts may have id 0 is checked with the tokenizer.
  'pad_token_id': checks.number(at_least=0, integer=True).or_none(),
  'decoder_start_token_id': checks.number(at_least=0, integer=True).or_none(),
  'eos_token_id': Expectation(
    'an id above 0, or a list of such ids', lambda value: _are_ends(value)
  ),
}
_ROUTER_DTYPE = Expectation("'float32', the dtype of our routers", lambda value: value == 'float32')


def _are_ends(value: Any) -> bool:
  ids = value if isinstance(value, list) else [1 if value is None else value]
  return bool(ids) and all(untrusted.is_count(i, _MAX_SIZE) and i > 0 for i in ids)


def special_ids(config: Mapping[str, Any]) -> dict[str, Any]:
  """Return the special ids of a `config.json` by their names in `Architecture`; without a key, those of T5.

  Raises:
    CheckpointError: an id is invalid.
  """
  values = {key: config.get(key) for key in _SPECIAL_IDS}
  checks.check('config.json', values, CheckpointError, **_SPECIAL_IDS)
  ends = values['eos_token_id']
  if ends is None:
    ends = 1
  if not isinstance(ends, list):
    ends = [ends]
  return {
    'pad_token_id': values['pad_token_id'] or 0,
    'eos_token_ids': tuple(ends),
    'decoder_start_token_id': values['decoder_start_token_id'] or 0,
  }


def model_type(config: Mapping[str, Any]) -> str:
  """Return the type of the model of `config`, one of `MODEL_TYPES`.

  Raises:
    CheckpointError: the type is unknown, or the model is not an encoder-decoder with the head of a language model.
  """
  found = config.get('model_type')
  if found is None and 'T5' in str(config.get('architectures', '')):
    found = 't5'  # early versions of transformers do not write the type
  values = {key: config.get(key) for key in _TYPE_EXPECTATIONS} | {'model_type': found}
  checks.check('config.json', values, CheckpointError, **_TYPE_EXPECTATIONS)
  return str(found)


def _is_of_transformers_5(config: Mapping[str, Any]) -> bool:
  """Return True if transformers 5 or later wrote the folder."""
  major = str(config.get('transformers_version', '0')).split('.')[0]
  return major.isdecimal() and int(major) >= 5


def output_head(config: Mapping[str, Any], has_head: bool | None = None) -> str:
  """Return which weights compute the logits.

  transformers 5 decides by type of model. T5 and Switch scale the decoder's outputs by emb_dim**-0.5 if the logits are
  tied; T5 stores this in `scale_decoder_outputs` and always writes `tie_word_embeddings: true`. mT5 never scales. umT5
  always writes that it is tied, and a folder with both tables belongs to an untied model. Folders written by t5x_lite
  have `scale_decoder_outputs: false` if tied logits are not scaled, for every type of model.

  Args:
    config: contents of `config.json`.
    has_head: whether there is an `lm_head.weight`; None if unknown.

  Returns:
    'embedding' (the token embedding, scaled: our `logits_via_embedding`), 'own' (`lm_head.weight`), 'unscaled' (the
    token embedding, with `scale_tied_logits=False`), or 'compare': 'embedding' if the two are equal, else 'own'.

  Raises:
    CheckpointError: versions of transformers read the folder differently.
  """
  kind = model_type(config)
  tied = config.get('tie_word_embeddings', _DEFAULTS[kind]['tie_word_embeddings'])
  modern = _is_of_transformers_5(config)
  if kind == 't5':
    if config.get('scale_decoder_outputs', tied is not False):
      return 'embedding'
    if has_head is False and 'scale_decoder_outputs' in config:
      return 'unscaled'
    return 'own'
  if config.get('scale_decoder_outputs') is False and not has_head:
    return 'unscaled'
  if kind == 'switch_transformers':
    if tied:
      return 'embedding'
    return 'own'
  if has_head is None:
    if tied and kind == 'umt5' and not modern:
      return 'embedding'
    return 'own'
  if kind == 'umt5':
    if has_head:
      if tied:
        return 'compare'
      return 'own'
    if tied:
      return 'embedding'
    return 'own'
  if has_head or not tied:
    return 'own'
  if not modern:
    raise CheckpointError(
      'config.json of an mT5 has tie_word_embeddings=true, the folder has no lm_head.weight, and versions before '
      'transformers 5 scale its logits by d_model**-0.5, later versions do not. In config.json, set "model_type": '
      '"t5" if its logits are scaled, or "scale_decoder_outputs": false if they are not.'
    )
  return 'unscaled'


def tied_fields(head: str) -> dict[str, bool]:
  """Return the fields of an `Architecture` that follow from `head`, a result of `output_head` except 'compare'."""
  return {
    'logits_via_embedding': head in ('embedding', 'unscaled'),
    'scale_tied_logits': head != 'unscaled',
  }


def _activations(config: Mapping[str, Any], kind: str) -> tuple[str, ...]:
  """Return the activations of a feed-forward block, by our names."""
  is_switch = kind == 'switch_transformers'
  if is_switch:
    form = 'relu'
  else:
    form = str(config.get('feed_forward_proj', _DEFAULTS[kind]['feed_forward_proj']))
  prefix, _, last = form.rpartition('-')
  gated = config.get('is_gated_act', prefix == 'gated')
  name = config.get('dense_act_fn', 'gelu_new' if form == 'gated-gelu' else last)
  if (
    prefix not in ('', 'gated')
    or not isinstance(name, str)
    or name not in _OURS
    or (is_switch and gated)
  ):
    raise CheckpointError(
      f'feed_forward_proj of config.json must be one of {", ".join(_OURS)}'
      f'{", not gated" if is_switch else ", or gated- and one of them"}, got {form!r}, with dense_act_fn={name!r} '
      f'and is_gated_act={gated}.'
    )
  if gated:
    return (_OURS[name], 'linear')
  return (_OURS[name],)


def sparse_layers(num_layers: int, step: int) -> tuple[int, ...]:
  """Return the sparse layers of a Switch Transformer: every layer i of `num_layers` with i % step = 1.

  >>> sparse_layers(6, 2), sparse_layers(6, 1), sparse_layers(6, 0), sparse_layers(6, 6)
  ((1, 3, 5), (0, 1, 2, 3, 4, 5), (), (1,))
  """
  if step <= 1:
    if step == 1:
      return tuple(range(num_layers))
    return ()
  return tuple(range(1, num_layers, step))


def _sparse_fields(config: Mapping[str, Any], num_layers: Mapping[str, int]) -> dict[str, Any]:
  """Return the fields of an `Architecture` that only Switch Transformers have."""
  fields = {
    'num_experts': _integer(config, 'num_experts', 8),
    'router_bias': bool(config.get('router_bias', False)),
    'router_jitter_noise': float(_number(config, 'router_jitter_noise', 0.01, at_least=0, below=1)),
    'expert_capacity': _integer(config, 'expert_capacity', 64),
  }
  for stack in ('encoder', 'decoder'):
    number = _integer(config, f'num_sparse_{stack}_layers', 3, at_least=0)
    # As in transformers, the step without sparse layers is the depth, which makes one layer sparse.
    if number:
      step = num_layers[stack] // number
    else:
      step = num_layers[stack]
    step = _integer(config, f'{stack}_sparse_step', step, at_least=0)
    fields[f'sparse_{stack}_layers'] = sparse_layers(num_layers[stack], step)
  return fields


def _number(config: Mapping[str, Any], key: str, default: float | None, **bounds: Any) -> Any:
  value = config.get(key)
  if value is None:
    value = default
  checks.check('config.json', {key: value}, CheckpointError, **{key: checks.number(**bounds)})
  return value


def _integer(
  config: Mapping[str, Any],
  key: str,
  default: int | None = None,
  *,
  at_least: int = 1,
  at_most: int = _MAX_SIZE,
) -> int:
  return _number(config, key, default, at_least=at_least, at_most=at_most, integer=True)


def fields_of_config(config: Mapping[str, Any], has_head: bool | None = None) -> dict[str, Any]:
  """Return the fields of an `Architecture` that a `config.json` describes.

  Args:
    config: contents of the file.
    has_head: whether there is an `lm_head.weight`; see `output_head`.

  Raises:
    CheckpointError: our networks cannot express the model, or the file lacks a required key.
  """
  kind = model_type(config)
  if kind == 'switch_transformers':  # others have no routers
    dtype = config.get('router_dtype', 'float32')
    checks.check(
      'config.json', {'router_dtype': dtype}, CheckpointError, router_dtype=_ROUTER_DTYPE
    )
  fields: dict[str, Any] = {ours: _integer(config, theirs) for ours, theirs in _DIMS.items()}
  fields['num_encoder_layers'] = _integer(config, 'num_layers', at_most=_MAX_LAYERS)
  # transformers reads a missing key of a Switch Transformer as 12, and null as the encoder's number.
  default = fields['num_encoder_layers']
  if kind == 'switch_transformers' and 'num_decoder_layers' not in config:
    default = 12
  fields['num_decoder_layers'] = _integer(
    config, 'num_decoder_layers', default, at_most=_MAX_LAYERS
  )
  num_layers = {'encoder': fields['num_encoder_layers'], 'decoder': fields['num_decoder_layers']}
  fields |= {
    'mlp_activations': _activations(config, kind),
    **tied_fields(output_head(config, has_head)),
    **special_ids(config),
    'relpos_per_layer': kind == 'umt5',
    'relpos_num_buckets': _integer(config, 'relative_attention_num_buckets', 32),
    'relpos_max_distance': _integer(config, 'relative_attention_max_distance', 128),
    'layer_norm_epsilon': float(
      _number(config, 'layer_norm_epsilon', _LAYER_NORM_EPSILON, at_least=1e-12, below=1)
    ),
  }
  if kind == 'switch_transformers':
    fields |= _sparse_fields(config, num_layers)
  return fields


def feed_forward_proj(activations: tuple[str, ...]) -> dict[str, Any]:
  """Return the keys of a `config.json` that represent our `activations`.

  >>> feed_forward_proj(('gelu', 'linear'))
  {'feed_forward_proj': 'gated-gelu', 'dense_act_fn': 'gelu_new', 'is_gated_act': True}
  """
  name = _THEIRS[activations[0]]
  gated = len(activations) == 2
  if not gated:
    form = name
  elif name == 'gelu_new':
    form = 'gated-gelu'
  else:
    form = f'gated-{name}'
  return {'feed_forward_proj': form, 'dense_act_fn': name, 'is_gated_act': gated}


def is_expressible(activations: tuple[str, ...]) -> bool:
  """Return True if transformers supports a feed-forward block with our `activations`."""
  gate = activations[1:]
  return activations[0] in _THEIRS and gate in ((), ('linear',))


def sparse_step(num_layers: int, layers: tuple[int, ...]) -> int | None:
  """Return the step for which `sparse_layers` gives `layers`, or None."""
  for step in range(num_layers + 1):
    if sparse_layers(num_layers, step) == layers:
      return step
  return None


def log_open_fields(config: Mapping[str, Any], folder: files.Path) -> None:
  """Log, once for a folder, the value of a field that its `config` has as null."""
  if config.get('layer_norm_epsilon', 0) is None:
    _log_null_epsilon(str(folder))


# A run opens its folder several times.
@functools.cache
def _log_null_epsilon(folder: str) -> None:
  logging.getLogger(__name__).info(
    '%s: layer_norm_epsilon of config.json is null: the norms add %s.', folder, _LAYER_NORM_EPSILON
  )


def read_config(folder: files.Path) -> dict[str, Any]:
  """Return the `config.json` of a folder, with the end and start tokens of its `generation_config.json`, if any.

  Raises:
    CheckpointError: a file is damaged, or the two have different start tokens.
  """
  config = read(folder, 'config.json')
  if not (folder / GENERATION_CONFIG_FILE).is_file():
    return config
  generation = read(folder, GENERATION_CONFIG_FILE)
  found = {key: generation.get(key) for key in _SPECIAL_IDS}
  checks.check(GENERATION_CONFIG_FILE, found, CheckpointError, **_SPECIAL_IDS)
  start = config.get('decoder_start_token_id')
  if start is not None and found['decoder_start_token_id'] not in (None, start):
    # transformers trains with one and decodes with the other; our models have one for both.
    raise checks.invalid(
      str(folder / GENERATION_CONFIG_FILE),
      'decoder_start_token_id',
      f'{start}, as in config.json',
      found['decoder_start_token_id'],
      'Set both to the id with which the model was trained.',
      CheckpointError,
    )
  del found['pad_token_id']
  return config | {key: value for key, value in found.items() if value is not None}


def read(folder: files.Path, name: str) -> dict[str, Any]:
  """Return the JSON object in the file `name` of a folder.

  Raises:
    CheckpointError: the file holds no JSON object, or must not be read; see `untrusted.read_limited`.
  """
  return untrusted.parse_object(untrusted.read_limited(folder, name), str(folder / name))
