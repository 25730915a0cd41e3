"""PyTorch, transformers, PEFT and CTranslate2: the only module that imports them. `make test` does not import it."""

from collections.abc import Sequence
import copy
import importlib.util
import json
import pathlib
import tempfile
from typing import Any
import warnings

import ctranslate2
import numpy as np
import peft
import safetensors.numpy
import torch
import transformers
from transformers.models.t5 import modeling_t5

_PADDING = -100

torch.set_num_threads(1)
assert importlib.util.find_spec('tensorflow') is None, (
  'TensorFlow must not be installed next to PyTorch, because triton crashes after it. Use `make test-interop`.'
)


def versions() -> dict[str, str]:
  """Return the versions of the libraries."""
  import tokenizers

  return {
    'ctranslate2': ctranslate2.__version__,
    'peft': peft.__version__,
    'torch': torch.__version__,
    'transformers': transformers.__version__,
    'tokenizers': tokenizers.__version__,
  }


# ---- Models ---------------------------------------------------------------------------------------------------------


def make(kind: str, fields: dict[str, Any], tied: bool) -> Any:
  """Return a model with the weights of the initializers."""
  model = getattr(transformers, f'{kind}ForConditionalGeneration')(
    getattr(transformers, f'{kind}Config')(**fields)
  )
  if not tied:
    # `transformers` ties tables that its configuration cannot untie, and leaves separately loaded tables untied.
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
  return model.eval()


def structure(model: Any) -> dict[str, Any]:
  """Return names and shapes of the parameters in their order, the names of tied copies, and the configuration."""
  names = {id(value): name for name, value in model.named_parameters()}
  return {
    'parameters': [[name, list(value.shape)] for name, value in model.named_parameters()],
    'state': [[name, names[id(value)]] for name, value in model.state_dict(keep_vars=True).items()],
    'num_parameters': model.num_parameters(),
    'config': config_dict(model.config),
  }


def config_dict(config: Any) -> dict[str, Any]:
  """Return a configuration of `transformers` as JSON, without its origin."""
  found = json.loads(json.dumps(config.to_dict(), default=str))
  return {
    key: value
    for key, value in found.items()
    if key not in ('_name_or_path', 'transformers_version')
  }


def fill(model: Any, values: dict[str, np.ndarray]) -> None:
  """Set the parameters of a model."""
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      parameter.copy_(torch.from_numpy(values[name]))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
  """Return the values of a tensor, also of bfloat16."""
  tensor = tensor.detach().contiguous()
  if tensor.dtype == torch.bfloat16:
    import ml_dtypes

    return tensor.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
  return tensor.numpy().copy()


def state_dict(model: Any) -> dict[str, np.ndarray]:
  """Return a model's weights, with tied copies."""
  return {name: to_numpy(value) for name, value in model.state_dict().items()}


def cast(model: Any, dtype: str) -> Any:
  """Return a copy of a model with parameters of another dtype."""
  return copy.deepcopy(model).to(getattr(torch, dtype))


def with_tied_flag(model: Any, value: bool) -> Any:
  """Return a copy of a model whose configuration says that embeddings are tied, or not; this scales logits."""
  changed = copy.deepcopy(model)
  changed.config.tie_word_embeddings = value
  return changed


def load(folder: str) -> tuple[Any, dict[str, Any]]:
  """Return (a model as `transformers` loads it, what it noted meanwhile)."""
  model, notes = transformers.AutoModelForSeq2SeqLM.from_pretrained(
    folder, output_loading_info=True
  )
  return model.eval(), {
    'class': type(model).__name__,
    'notes': sorted(key for key, value in notes.items() if value),
    'dtype': str(model.dtype).removeprefix('torch.'),
    'is_tied': model.lm_head.weight is model.shared.weight,
  }


def read_config(folder: str) -> dict[str, Any]:
  """Return a folder's configuration as `transformers` reads it."""
  return config_dict(transformers.AutoConfig.from_pretrained(folder))


def forward(model: Any, batch: Any) -> torch.Tensor:
  """Return logits for a batch in our form, with attention masks made of its padding."""
  inputs, targets = (
    torch.from_numpy(np.asarray(batch[name], np.int64))
    for name in ('encoder_input_tokens', 'decoder_target_tokens')
  )
  return model(
    input_ids=inputs,
    attention_mask=(inputs > 0).long(),
    decoder_attention_mask=(targets > 0).long(),
    decoder_input_ids=torch.from_numpy(np.asarray(batch['decoder_input_tokens'], np.int64)),
    use_cache=False,
  ).logits


def logits(model: Any, batch: Any) -> np.ndarray:
  """Return float32 [batch, length, vocab]."""
  with torch.no_grad():
    return forward(model, batch).numpy()


def label_scores(model: Any, inputs: Any, labels: Sequence[Sequence[int]]) -> np.ndarray:
  """Return float32 [batch, labels], the log-likelihood of each label, of all its tokens."""
  rows = torch.from_numpy(inputs).long()
  scores = []
  with torch.no_grad():
    for label in labels:
      targets = torch.tensor([label] * len(rows))
      outputs = model(input_ids=rows, attention_mask=(rows > 0).long(), labels=targets)
      log_probs = outputs.logits.log_softmax(-1).gather(-1, targets[..., None])
      scores.append(log_probs.sum(dim=(1, 2)))
  return torch.stack(scores, dim=1).numpy()


# ---- Training -------------------------------------------------------------------------------------------------------


def _labels(batch: Any) -> torch.Tensor:
  targets = torch.from_numpy(batch['decoder_target_tokens']).long()
  return torch.where(targets > 0, targets, _PADDING)


def _mean_loss(model: Any, batch: Any) -> torch.Tensor:
  """Return the loss of `transformers` for this package's batch: the mean over target tokens."""
  inputs = torch.from_numpy(batch['encoder_input_tokens']).long()
  # The decoder's inputs are made of the labels there.
  return model(input_ids=inputs, attention_mask=(inputs > 0).long(), labels=_labels(batch)).loss


def _summed_loss(model: Any, batch: Any, z_loss: float) -> torch.Tensor:
  """Return the cross entropy with a z-loss, summed over target tokens, in PyTorch."""
  found, labels = forward(model, batch), _labels(batch)
  cross_entropy = torch.nn.functional.cross_entropy(
    found.flatten(0, 1), labels.flatten(), reduction='sum'
  )
  log_z = torch.logsumexp(found, dim=-1)[labels != _PADDING]
  return cross_entropy + z_loss * torch.sum(log_z**2)


def loss_and_gradients(
  model: Any, batch: Any, z_loss: float | None
) -> tuple[float, dict[str, np.ndarray]]:
  """Return the loss (the mean, or with `z_loss` the sum) and gradients by name, of tied tensors once."""
  model = copy.deepcopy(model)
  loss = _mean_loss(model, batch) if z_loss is None else _summed_loss(model, batch, z_loss)
  loss.backward()
  # An expert without tokens has none.
  return loss.item(), {
    name: np.zeros(parameter.shape, np.float32)
    if parameter.grad is None
    else parameter.grad.numpy()
    for name, parameter in model.named_parameters()
  }


_OPTIMIZERS = {
  'sgd': lambda params, rate: torch.optim.SGD(params, rate, momentum=0.9),
  'adamw': lambda params, rate: torch.optim.AdamW(
    params, rate / 10, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1
  ),
  'adafactor': lambda params, rate: transformers.Adafactor(
    params, rate, relative_step=False, scale_parameter=True
  ),
}


def train(model: Any, optimizer: str, rate: float, batches: Any) -> dict[str, np.ndarray]:
  """Return the weights after a step for each batch."""
  model = copy.deepcopy(model)
  made = _OPTIMIZERS[optimizer](model.parameters(), rate)
  for batch in batches:
    made.zero_grad()
    _mean_loss(model, batch).backward()
    made.step()
  return state_dict(model)


# ---- Adapters -------------------------------------------------------------------------------------------------------


def train_adapter(
  model: Any, folder: str, optimizer: str, rate: float, batch: Any
) -> dict[str, Any]:
  """Return what PEFT makes of a model and the folder of its adapter.

  Returns:
    `logits`; `loss`, the mean; by tensors of the adapter, `gradients` and the values `trained` by one step; by tensors
    of the model, the weights `merged`; `config`, the text that PEFT saves, and `saved`, the tensors.
  """
  adapted = _with_adapter(model, folder, is_trainable=True).eval()
  found: dict[str, Any] = {'logits': logits(adapted, batch)}
  made = _OPTIMIZERS[optimizer]([each for each in adapted.parameters() if each.requires_grad], rate)
  loss = _mean_loss(adapted, batch)
  loss.backward()
  found['loss'] = loss.item()

  def tensors(value_fn: Any) -> dict[str, np.ndarray]:
    return {
      name.replace('.default.', '.'): to_numpy(value_fn(each)).astype(np.float32)
      for name, each in adapted.named_parameters()
      if each.requires_grad
    }

  # An expert without tokens has no gradient.
  found['gradients'] = tensors(
    lambda each: torch.zeros_like(each) if each.grad is None else each.grad
  )
  with tempfile.TemporaryDirectory() as saved:
    adapted.save_pretrained(saved)
    path = pathlib.Path(saved)
    found['config'] = (path / 'adapter_config.json').read_text()
    found['saved'] = safetensors.numpy.load_file(path / 'adapter_model.safetensors')
  made.step()
  found['trained'] = tensors(lambda each: each)
  merged = _with_adapter(model, folder)
  with warnings.catch_warnings():
    # Models with logits of their own were never tied.
    warnings.simplefilter('ignore', UserWarning)
    found['merged'] = state_dict(merged.merge_and_unload())
  return found


def _with_adapter(model: Any, folder: str, **options: Any) -> Any:
  """Return a copy of a model with the adapter of a folder."""
  with warnings.catch_warnings():
    # PEFT asks transformers for what it will call otherwise.
    warnings.simplefilter('ignore', FutureWarning)
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder, **options)


# ---- Generation -----------------------------------------------------------------------------------------------------


def end_row(model: Any, batch: Any, amount: float) -> np.ndarray:
  """Return the row of the logits' table for the end token that adds about `amount` to its logit on average."""
  hidden: list[torch.Tensor] = []
  with torch.no_grad():
    head = model.lm_head.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    forward(model, batch)
    head.remove()
    mean = hidden[0].mean((0, 1))
    return to_numpy(
      model.lm_head.weight[model.config.eos_token_id] + mean * (amount / (mean @ mean))
    )


class _BrevityPenalty(float):
  """An exponent that makes T5X's penalty of `n ** exponent`."""

  def __rpow__(self, length):
    return ((5 + length) / 6) ** float(self)


class _AllCandidatesMayEnd:
  """Rule 1 of `test_generation` undone: replaces a model's `_update_finished_beams`, and notes the changed rows."""

  def __init__(self, model: Any, num_rows: int):
    self._update = model._update_finished_beams
    self.rows = np.zeros(num_rows, bool)

  def __call__(
    self,
    *,
    top_num_beam_mask,
    next_token_hits_stopping_criteria,
    is_early_stop_heuristic_unsatisfied,
    **options,
  ):
    late = torch.any(next_token_hits_stopping_criteria & ~top_num_beam_mask, dim=1, keepdim=True)
    self.rows |= torch.any(late & is_early_stop_heuristic_unsatisfied, dim=1).numpy()
    return self._update(
      top_num_beam_mask=torch.ones_like(top_num_beam_mask),
      next_token_hits_stopping_criteria=next_token_hits_stopping_criteria,
      is_early_stop_heuristic_unsatisfied=is_early_stop_heuristic_unsatisfied,
      **options,
    )


def generate(
  model: Any,
  encoder_inputs: np.ndarray,
  length: int,
  *,
  num_beams: int = 1,
  alpha: float | None = None,
  all_may_end: bool = False,
  **constraints: Any,
) -> dict[str, np.ndarray]:
  """Return int32 tokens [rows, decodes, length] with 0 behind the end, best first, and with beams their scores.

  Args:
    model: a model.
    encoder_inputs: token ids.
    length: number of new tokens.
    num_beams: number of beams, all of which are returned; 1 is greedy search.
    alpha: exponent of T5X's brevity penalty, for beams.
    all_may_end: undo rule 1, and return in which rows this made a difference, as `changed_rows`.
    **constraints: options of `generate` that make logit processors.
  """
  model, num_rows = copy.deepcopy(model), len(encoder_inputs)
  options: dict[str, Any] = dict(constraints)
  if num_beams > 1:
    options |= dict(
      num_return_sequences=num_beams,
      early_stopping='never',
      length_penalty=_BrevityPenalty(alpha),
    )
  changed = None
  if all_may_end:
    model._update_finished_beams = changed = _AllCandidatesMayEnd(model, num_rows)
  inputs = torch.from_numpy(encoder_inputs).long()
  result = model.generate(
    input_ids=inputs,
    attention_mask=(inputs > 0).long(),
    max_new_tokens=length,
    do_sample=False,
    use_cache=False,
    return_dict_in_generate=True,
    output_scores=True,
    num_beams=num_beams,
    **options,
  )
  tokens = result.sequences.numpy()[:, 1:]
  tokens = np.pad(tokens, ((0, 0), (0, length - tokens.shape[1]))).reshape(num_rows, -1, length)
  is_end = tokens == model.config.eos_token_id
  found = {'tokens': np.where(np.cumsum(is_end, axis=-1) > is_end, 0, tokens).astype(np.int32)}
  if (scores := result.get('sequences_scores')) is not None:
    found['scores'] = scores.numpy().reshape(num_rows, -1)
  if changed is not None:
    found['changed_rows'] = changed.rows
  return found


class _WithOwnHead(ctranslate2.converters.TransformersConverter):
  """Converter of models with a separate table for logits, which transformers 5 takes for tied after loading, too."""

  def load_model(self, *args, **options):
    model = super().load_model(*args, **options)
    model.config.tie_word_embeddings = False
    return model


def ctranslate2_results(
  folder: str, batch: Any, length: int, has_own_head: bool
) -> dict[str, np.ndarray]:
  """Return what CTranslate2 computes from its conversion of a folder.

  Args:
    folder: path of a model with its tokenizer.
    batch: a batch in our form.
    length: number of new tokens.
    has_own_head: convert without the scale of tied logits.

  Returns:
    `tokens`: int32 [rows, length], decoded greedily, with 0 behind the end; `log_probs`: float32 [target tokens], the
    log-probabilities of the targets.
  """
  cls = _WithOwnHead if has_own_head else ctranslate2.converters.TransformersConverter
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  with tempfile.TemporaryDirectory() as converted:
    cls(folder).convert(converted, force=True)
    translator = ctranslate2.Translator(converted, compute_type='float32', intra_threads=1)

  def texts(rows):
    return [tokenizer.convert_ids_to_tokens(row[row > 0].tolist()) for row in rows]

  inputs = texts(batch['encoder_input_tokens'])
  found = translator.translate_batch(
    inputs,
    beam_size=1,
    max_decoding_length=length,
    min_decoding_length=0,
    return_end_token=True,
  )
  tokens = np.zeros((len(inputs), length), np.int32)
  for row, result in zip(tokens, found, strict=True):
    ids = tokenizer.convert_tokens_to_ids(result.hypotheses[0])
    row[: len(ids)] = ids
  # The end token is added to the targets.
  targets = [row[:-1] for row in texts(batch['decoder_target_tokens'])]
  scores = translator.score_batch(inputs, targets)
  log_probs = np.array([each for result in scores for each in result.log_probs], np.float32)
  return {'tokens': tokens, 'log_probs': log_probs}


def process_scores(
  constraints: dict[str, Any], ids: np.ndarray, scores: np.ndarray, eos_id: int
) -> dict[str, np.ndarray]:
  """Return the scores after the first, the first two, ... tokens as processors change them, and the excluded ones.

  Excluded scores are 0 in the result.

  Args:
    constraints: options of `generate`.
    ids: int [rows, length], tokens, the start token included.
    scores: float32 [length, rows, vocab], logits or log-probabilities.
    eos_id: end token.
  """
  config = transformers.GenerationConfig(eos_token_id=eos_id, **constraints)
  config._eos_token_tensor = torch.tensor([eos_id])
  sizes = dict(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
  model = transformers.T5ForConditionalGeneration(
    transformers.T5Config(vocab_size=scores.shape[-1], **sizes)
  )
  processors = model._get_logits_processor(config, input_ids_seq_length=1)
  found = np.stack(
    [
      processors(torch.from_numpy(ids[:, : i + 1]).long(), torch.from_numpy(each.copy())).numpy()
      for i, each in enumerate(scores)
    ]
  )
  is_excluded = np.isneginf(found)
  return {'scores': np.where(is_excluded, 0, found), 'is_excluded': is_excluded}


def relative_position_buckets(
  distances: np.ndarray, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
  """Return the buckets of relative positions."""
  return modeling_t5.T5Attention._relative_position_bucket(
    torch.from_numpy(distances), bidirectional, num_buckets, max_distance
  ).numpy()


# ---- Tokenizers -----------------------------------------------------------------------------------------------------


def tokenizer(loader: str, folder: str | None) -> Any:
  """Return a tokenizer of a class of `transformers`, of a folder or as the class makes it."""
  cls = getattr(transformers, loader)
  return cls() if folder is None else cls.from_pretrained(folder)


def generate_texts(model: Any, made: Any, texts: list[str]) -> dict[str, Any]:
  """Return the ids of texts, and the number of texts that beam search generates for them."""
  inputs = made(texts, padding=True, return_tensors='pt')
  with torch.no_grad():
    outputs = model.generate(**inputs, max_new_tokens=8, num_beams=2)
  return {'ids': inputs.input_ids.numpy(), 'num_texts': len(made.batch_decode(outputs))}


def byte_level_bpe(texts: Any) -> bytes:
  """Return the vocabulary and the merges of a byte-level BPE of 600 tokens with CodeT5's special ids, as JSON."""
  import tokenizers

  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=600,
    special_tokens=['<pad>', '<s>', '</s>', '<unk>', '<mask>'],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  model = json.loads(tokenizer.to_str())['model']
  return json.dumps({'vocab': model['vocab'], 'merges': model['merges']}).encode()
