"""Models and tokenizers of `transformers` as the tests see them: weights, files and results, recorded or computed.

Weights come from a seed or from a folder, so records need none of them. The records have what only the libraries can
say: names, shapes and order of parameters, the files that `save_pretrained` writes (for weights their hashes), what
`from_pretrained` loads from a folder of which exactly these bytes are recorded, and results.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import importlib
import json
import pathlib
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

from tests.interop import records

_CODES = {
  'F32': np.dtype(np.float32),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F16': np.dtype(np.float16),
}
_NAMES = {np.dtype(dtype).name: code for code, dtype in _CODES.items()}
HEAD_DIM = 6
TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'spiece.model',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
)


def _libraries() -> Any:
  """Import PyTorch, transformers and CTranslate2; only called in functions that compute results."""
  return importlib.import_module('tests.interop.libraries')


def process_scores(
  name: str, constraints: Mapping[str, Any], ids: np.ndarray, scores: np.ndarray, eos_id: int
) -> dict[str, np.ndarray]:
  """Return what `libraries.process_scores` returns; `name` is that of the constraints."""
  return records.get().ask(
    f'processed_scores/{name}',
    {'constraints': constraints, 'ids': ids, 'scores': scores, 'eos_id': eos_id},
    lambda: _libraries().process_scores(constraints, ids, scores, eos_id),
  )


class Batch(dict):
  """A batch of arrays with a label for names of results."""

  def __init__(self, label: str, arrays: Mapping[str, np.ndarray]):
    super().__init__(arrays)
    self.label = label


jax.tree_util.register_pytree_node(
  Batch,
  lambda batch: (tuple(batch[name] for name in sorted(batch)), tuple(sorted(batch))),
  lambda names, arrays: dict(zip(names, arrays, strict=True)),
)


# ---- Files ----------------------------------------------------------------------------------------------------------


def read_tensors(folder: Any) -> dict[str, np.ndarray]:
  """Return all tensors of a folder, from one file or from shards; read by the library safetensors."""
  found = {}
  for path in sorted(pathlib.Path(folder).glob('*.safetensors')):
    for name, tensor in safetensors.deserialize(path.read_bytes()):
      assert name not in found
      found[name] = np.frombuffer(tensor['data'], _CODES[tensor['dtype']]).reshape(tensor['shape'])
  return found


def _to_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
  """Return a file of tensors as `transformers` writes it."""
  values = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
  return safetensors.numpy.save(values, {'format': 'pt'})


def _tensor_names(path: pathlib.Path) -> list[str]:
  return sorted(name for name, _ in safetensors.deserialize(path.read_bytes()))


def _texts(folder: Any, names: Sequence[str]) -> dict[str, Any]:
  """Return the contents of a folder's files among `names`; JSON is parsed."""
  found = {}
  for name in names:
    path = pathlib.Path(folder) / name
    if path.exists():
      content = path.read_bytes()
      found[name] = json.loads(content) if name.endswith('.json') else content
  return found


# ---- Models ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFModel:
  """A model of `transformers`.

  Attributes:
    name: for names of results.
    parameters: weights by name, in the order of the library.
    state: name in the state dict -> name of the parameter, which tied copies share.
    config: the configuration as JSON.
    num_parameters: as the library counts them.
    notes: of a loaded model, its class and dtype, and whether it is tied.
    live: the library's model; None where results are recorded.
  """

  name: str
  parameters: Mapping[str, np.ndarray]
  state: Mapping[str, str]
  config: Mapping[str, Any]
  num_parameters: int
  notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  live: Any = None

  @property
  def tensors(self) -> dict[str, np.ndarray]:
    """The state dict, with tied copies."""
    return {name: self.parameters[source] for name, source in self.state.items()}

  @property
  def num_bytes(self) -> int:
    """Size of all parameters."""
    return sum(value.nbytes for value in self.parameters.values())

  def _inputs(self, **inputs: Any) -> dict[str, Any]:
    return {'config': self.config, 'weights': self.parameters, **inputs}

  def logits(self, batch: Batch) -> np.ndarray:
    """Return float32 [batch, length, vocab]; zeros at padding."""
    where = np.asarray(batch['decoder_target_tokens']) > 0
    values = records.get().ask(
      f'{self.name}/logits/{batch.label}',
      self._inputs(batch=batch),
      lambda: {'logits': _libraries().logits(self.live, batch)[where]},
    )['logits']
    found = np.zeros((*where.shape, values.shape[-1]), np.float32)
    found[where] = values
    return found

  def loss_and_gradients(
    self, batch: Batch, z_loss: float | None, to_tree: Any
  ) -> tuple[float, records.RecordedTree]:
    """Return the loss, the mean or with `z_loss` the sum, and its gradients as `to_tree` makes them of the tensors."""
    kind = 'mean' if z_loss is None else f'z_loss={z_loss}'
    trees: list[records.RecordedTree] = []

    def compute():
      loss, gradients = _libraries().loss_and_gradients(self.live, batch, z_loss)
      trees.append(records.RecordedTree.of(to_tree(gradients)))
      return {'loss': loss, 'sums': trees[0].sums, 'layout': trees[0].layout}

    found = records.get().ask(
      f'{self.name}/gradients/{kind}/{batch.label}',
      self._inputs(batch=batch, z_loss=z_loss),
      compute,
    )
    return found['loss'], trees[0] if trees else records.RecordedTree(
      found['sums'], found['layout']
    )

  def train(
    self, optimizer: str, rate: float, batches: Sequence[Batch], to_tree: Any
  ) -> records.RecordedTree:
    """Return the weights after a step for each batch, as `to_tree` makes them of the tensors."""
    trees: list[records.RecordedTree] = []

    def compute():
      trees.append(
        records.RecordedTree.of(to_tree(_libraries().train(self.live, optimizer, rate, batches)))
      )
      return {'sums': trees[0].sums, 'layout': trees[0].layout}

    found = records.get().ask(
      f'{self.name}/trained/{optimizer}',
      self._inputs(batches=batches, rate=rate, optimizer=optimizer),
      compute,
    )
    return trees[0] if trees else records.RecordedTree(found['sums'], found['layout'])

  def train_adapter(
    self, name: str, folder: Any, rate: float, batch: Batch, to_rows: Any
  ) -> dict[str, Any]:
    """Return what `libraries.train_adapter` returns for a step of AdamW, as sums that are small enough to record.

    Args:
      name: of the adapter, for names of results.
      folder: folder of the adapter; the record is valid for its files only.
      rate: see `train`.
      batch: a batch.
      to_rows: returns the tree of arrays to compare, of the results.

    Returns:
      `rows`: a `RecordedTree`; `loss`; `config`: contents of the adapter_config.json that PEFT saves, with the tensors
      of the folder.
    """
    trees: list[records.RecordedTree] = []
    path = pathlib.Path(folder)
    config = json.loads((path / 'adapter_config.json').read_text())
    tensors = safetensors.numpy.load_file(path / 'adapter_model.safetensors')
    # What PEFT takes over; it saves modules in any order, and its version.
    taken_over = {'base_model_name_or_path': None, 'peft_version': None, 'target_modules': None}

    def compute():
      found = _libraries().train_adapter(self.live, str(folder), 'adamw', rate, batch)
      trees.append(records.RecordedTree.of(to_rows(found)))
      assert records.digest(found['saved']) == records.digest(tensors)
      saved = json.loads(found['config'])
      assert sorted(saved['target_modules']) == sorted(config['target_modules'])
      return {
        'sums': trees[0].sums,
        'layout': trees[0].layout,
        'loss': found['loss'],
        'config': dict(sorted((saved | taken_over).items())),
      }

    inputs = {'batch': batch, 'rate': rate, 'config': config, 'tensors': tensors}
    found = records.get().ask(f'{self.name}/adapter/{name}', self._inputs(inputs=inputs), compute)
    rows = trees[0] if trees else records.RecordedTree(found['sums'], found['layout'])
    saved = found['config'] | {key: config.get(key) for key in taken_over}
    return {'rows': rows, 'loss': found['loss'], 'config': saved}

  def that_ends(self, batch: Batch, amount: float) -> 'HFModel':
    """Return a model that gives the end token often: on average its logit is larger by about `amount`."""
    row = records.get().ask(
      f'{self.name}/end_row/{batch.label}',
      self._inputs(batch=batch, amount=amount),
      lambda: {'row': _libraries().end_row(self.live, batch, amount)},
      prefer_record=True,
    )['row']
    name = self.state['lm_head.weight']
    table = self.parameters[name].copy()
    table[self.config['eos_token_id']] = row
    return self._with(f'{self.name}.ends', {**self.parameters, name: table})

  def _with(self, name: str, parameters: Mapping[str, np.ndarray]) -> 'HFModel':
    """Return this model with other weights."""
    if self.live is not None:
      live = _libraries().cast(self.live, 'float32')
      _libraries().fill(live, parameters)
    else:
      live = None
    return dataclasses.replace(self, name=name, parameters=parameters, live=live)

  def generate(self, batch: Batch, length: int, **options: Any) -> dict[str, np.ndarray]:
    """Return what `libraries.generate` returns."""
    label = ','.join(f'{key}={value}' for key, value in options.items())
    return records.get().ask(
      f'{self.name}/generated/{label}',
      self._inputs(inputs=batch['encoder_input_tokens'], length=length, options=options),
      lambda: _libraries().generate(self.live, batch['encoder_input_tokens'], length, **options),
      rtol=3e-5,
    )

  def label_scores(self, batch: Batch, labels: Sequence[Sequence[int]]) -> np.ndarray:
    """Return float32 [batch, labels], log-likelihoods of labels, which are token ids with the end token."""
    inputs = batch['encoder_input_tokens']
    return records.get().ask(
      f'{self.name}/label_scores',
      self._inputs(inputs=inputs, labels=labels),
      lambda: {'scores': _libraries().label_scores(self.live, inputs, labels)},
    )['scores']

  def agrees(self, batch: Batch, length: int, ours: Any) -> dict[str, bool]:
    """Return whether logits and greedy tokens are ours, of weights that vary between machines.

    Args:
      batch: a batch.
      length: number of new tokens.
      ours: returns (logits, greedy tokens of the decoding) of the same weights; only called with the libraries.
    """

    def compute():
      logits, tokens = ours()
      where = np.asarray(batch['decoder_target_tokens']) > 0
      want = _libraries().logits(self.live, batch)
      error = np.abs(logits - want)[where].max() / np.abs(want[where]).max()
      found = _libraries().generate(self.live, batch['encoder_input_tokens'], length)
      return {
        'logits': bool(error < records.RTOL),
        'tokens': bool(np.array_equal(found['tokens'][:, 0], tokens)),
      }

    return records.get().ask(
      f'{self.name}/agrees/{batch.label}',
      {'config': self.config, 'batch': batch, 'length': length},
      compute,
    )

  def cast(self, dtype: str) -> 'HFModel':
    """Return this model with weights of another dtype; `save` checks that PyTorch rounds as this does."""
    return dataclasses.replace(
      self,
      name=f'{self.name}.{dtype}',
      parameters={
        name: value.astype(_CODES[_NAMES[dtype]]) for name, value in self.parameters.items()
      },
      live=None if self.live is None else _libraries().cast(self.live, dtype),
    )

  def with_tied_flag(self, value: bool) -> 'HFModel':
    """Return this model with another `config.tie_word_embeddings`, which scales logits or not."""
    return dataclasses.replace(
      self,
      name=f'{self.name}.tied={value}',
      config={**self.config, 'tie_word_embeddings': value},
      live=None if self.live is None else _libraries().with_tied_flag(self.live, value),
    )

  def save(self, folder: pathlib.Path, shards: int = 1) -> str:
    """Write the folder that `save_pretrained` writes, byte for byte; return its path."""
    max_shard_size = None if shards == 1 else self.num_bytes // shards

    def compute():
      options = {} if max_shard_size is None else {'max_shard_size': max_shard_size}
      self.live.save_pretrained(folder, **options)
      files = sorted(folder.iterdir())
      assert {path.suffix for path in files} == {'.json', '.safetensors'}
      tensors = [path for path in files if path.suffix == '.safetensors']
      return {
        'json_files': [path.name for path in files if path.suffix == '.json'],
        **{path.name: path.read_text() for path in files if path.suffix == '.json'},
        'tensor_files': {path.name: _tensor_names(path) for path in tensors},
        'hashes': {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tensors},
      }

    found = records.get().ask(
      f'{self.name}/saved/{shards}',
      self._inputs(max_shard_size=max_shard_size),
      compute,
      has_effects=True,
    )
    contents = {name: found[name].encode() for name in found['json_files']}
    for name, tensors in found['tensor_files'].items():
      contents[name] = _to_bytes({tensor: self.tensors[tensor] for tensor in tensors})
      # The weights of the seed, rounded here, are in the file that the library wrote.
      assert hashlib.sha256(contents[name]).hexdigest() == found['hashes'][name], (self.name, name)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
      if self.live is None:
        (folder / name).write_bytes(content)
      else:
        assert (folder / name).read_bytes() == content, name
    return str(folder)


def made(
  name: str, kind: str, fields: Mapping[str, Any], tied: bool, untied_flag: bool, seed: int
) -> HFModel:
  """Return a model with random weights, none of which is as initializers leave it: norm scales are not 1 either.

  Args:
    name: for names of results; of this kind and these fields only.
    kind: prefix of the classes in `transformers`.
    fields: of the configuration.
    tied: logits by the embedding table; otherwise by a table of their own, whatever the configuration says.
    untied_flag: clear `tie_word_embeddings` after the model is made.
    seed: of the weights.
  """
  live: list[Any] = []

  def compute():
    live.append(_libraries().make(kind, dict(fields), tied))
    return _libraries().structure(live[0])

  found = records.get().ask(
    f'{name}/structure',
    {'kind': kind, 'fields': fields, 'tied': tied},
    compute,
    has_effects=True,
  )
  parameters = _random_weights(found['parameters'], seed)
  if live:
    _libraries().fill(live[0], parameters)
  model = HFModel(
    name=f'{name}.{seed}',
    parameters=parameters,
    state=dict(found['state']),
    config=found['config'],
    num_parameters=found['num_parameters'],
    live=live[0] if live else None,
  )
  if untied_flag:
    model = dataclasses.replace(model.with_tied_flag(False), name=model.name)
  return model


def _random_weights(
  parameters: Sequence[tuple[str, Sequence[int]]], seed: int
) -> dict[str, np.ndarray]:
  """Draw all weights of a model, of sizes at which every one of them matters to the logits."""
  rng = np.random.default_rng(seed)
  found = {}
  for name, shape in parameters:
    value = rng.standard_normal(shape)
    if name.endswith('norm.weight'):
      value = 1 + 0.4 * value
    elif name.endswith('relative_attention_bias.weight'):
      value = 0.8 * value
    elif not name.endswith('shared.weight'):
      # Attention scores are not divided by sqrt(d_kv). Were they large, rounding alone would move logits by 1e-4.
      value *= 1.4 * (shape[1] * (HEAD_DIM if name.endswith('.q.weight') else 1)) ** -0.5
    found[name] = value.astype(np.float32)
  return found


def loaded(
  name: str, folder: Any, kind: str, untied_flag: bool, weights_vary: bool = False
) -> HFModel:
  """Return the model that `from_pretrained` loads of a folder; all of its weights must be in the folder, and no others.

  Args:
    name: for names of results, of this folder only.
    folder: path; the record is valid for its configuration and tensors only, to the last bit.
    kind: expected prefix of the class.
    untied_flag: clear `tie_word_embeddings` after loading.
    weights_vary: the record is valid for other values of the tensors too, as training gives.
  """
  tensors = read_tensors(folder)
  live: list[Any] = []

  def compute():
    model, notes = _libraries().load(str(folder))
    live.append(model)
    values = _libraries().state_dict(model)
    # Of equal tensors, the first by name: the order in a file varies.
    by_digest = {
      records.digest(value.astype(dtype)): tensor
      for tensor, value in sorted(tensors.items(), reverse=True)
      for dtype in (np.float32, value.dtype)
    }
    # Every loaded array is a tensor of the folder; with float16, transformers keeps some in float32.
    sources = [
      [name, by_digest[records.digest(value)], value.dtype.name] for name, value in values.items()
    ]
    return {**notes, **_libraries().structure(model), 'sources': sources}

  if weights_vary:
    described = {key: [value.dtype.name, list(value.shape)] for key, value in tensors.items()}
  else:
    described = tensors
  found = records.get().ask(
    f'{name}/loaded',
    {
      'files': sorted(path.name for path in pathlib.Path(folder).glob('*.safetensors*')),
      'json': _texts(
        folder, ('config.json', 'generation_config.json', 'model.safetensors.index.json')
      ),
      'tensors': described,
    },
    compute,
    has_effects=True,
  )
  assert (found['class'], found['notes']) == (f'{kind}ForConditionalGeneration', []), found
  values = {
    key: tensors[source].astype(_CODES[_NAMES[dtype]]) for key, source, dtype in found['sources']
  }
  model = HFModel(
    name=f'{name}.loaded',
    parameters={key: values[key] for key, _ in found['parameters']},
    state=dict(found['state']),
    config=found['config'],
    num_parameters=found['num_parameters'],
    notes={key: found[key] for key in ('dtype', 'is_tied')},
    live=live[0] if live else None,
  )
  assert all(value.tobytes() == model.tensors[key].tobytes() for key, value in values.items())
  if untied_flag:
    model = dataclasses.replace(model.with_tied_flag(False), name=model.name)
  return model


def read_config(name: str, folder: Any) -> dict[str, Any]:
  """Return a folder's configuration as `transformers` reads it."""
  return records.get().ask(
    f'{name}/config',
    {'json': _texts(folder, ('config.json',))},
    lambda: {'config': _libraries().read_config(str(folder))},
  )['config']


def relative_position_buckets(
  distances: np.ndarray, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
  """Return the buckets of relative positions of `transformers`."""
  options = dict(bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance)
  return records.get().ask(
    f'buckets/{",".join(map(str, options.values()))}',
    {'distances': distances, **options},
    lambda: {'buckets': _libraries().relative_position_buckets(distances, **options)},
  )['buckets']


def ctranslate2_results(
  name: str, folder: Any, batch: Batch, length: int, has_own_head: bool
) -> dict[str, np.ndarray]:
  """Return what `libraries.ctranslate2_results` returns; `name` is for names of results, of this folder only."""
  return records.get().ask(
    f'{name}/ctranslate2/{"own_head" if has_own_head else "as_it_is"}',
    {
      'json': _texts(folder, ('config.json', 'generation_config.json', *TOKENIZER_FILES)),
      'tensors': read_tensors(folder),
      'batch': batch,
      'length': length,
    },
    lambda: _libraries().ctranslate2_results(str(folder), batch, length, has_own_head),
    rtol=3e-5,
  )


# ---- Tokenizers -----------------------------------------------------------------------------------------------------


def train_byte_level_bpe(texts: Sequence[str]) -> bytes:
  """Return {'vocab': id by token, 'merges': pairs} of a byte-level BPE of 600 tokens, as JSON."""
  return _libraries().byte_level_bpe(texts)


class HFTokenizer:
  """A tokenizer of `transformers`, of a folder or as its class makes it."""

  def __init__(self, name: str, loader: str, folder: Any = None):
    """Load a tokenizer.

    Args:
      name: for names of results, of this folder only.
      loader: class of `transformers`.
      folder: path; records are valid for its files only. None for the class without arguments.
    """
    self._name = f'{name}/{loader}'
    self._files = {} if folder is None else _texts(folder, ('config.json', *TOKENIZER_FILES))
    self._loader = loader
    self._folder = folder
    self._live: Any = None
    if records.get().is_live:
      self._live = _libraries().tokenizer(loader, None if folder is None else str(folder))

  def _ask(self, what: str, compute: Any, **inputs: Any) -> dict[str, Any]:
    return records.get().ask(
      f'{self._name}/{what}',
      {'loader': self._loader, 'files': self._files, **inputs},
      compute,
      has_effects=what == 'saved',
    )

  def special_ids(self) -> tuple[int, int, int, int]:
    """Return the ids of padding, the end and unknown tokens, and the number of ids."""
    found = self._ask(
      'special_ids',
      lambda: {
        'ids': [
          self._live.pad_token_id,
          self._live.eos_token_id,
          self._live.unk_token_id,
          len(self._live),
        ]
      },
    )
    return tuple(found['ids'])

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    """Return `input_ids` of texts."""

    def compute():
      ids = [self._live(text).input_ids for text in texts]
      return {
        'ids': np.array([each for row in ids for each in row], np.int32),
        'ends': np.cumsum([len(row) for row in ids]).astype(np.int32),
      }

    found = self._ask(f'encoded {records.digest(list(texts))[:6]}', compute, texts=list(texts))
    return [row.tolist() for row in np.split(found['ids'], found['ends'])[:-1]]

  def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of sequences of ids."""
    ids = [[int(each) for each in row] for row in ids]
    found = self._ask(
      f'decoded {records.digest(ids)[:6]}',
      lambda: {'texts': json.dumps([self._live.decode(row) for row in ids])},
      ids=ids,
    )
    return json.loads(found['texts'])

  def token_ids(self, tokens: Sequence[str]) -> list[int]:
    """Return `convert_tokens_to_ids` of tokens."""
    found = self._ask(
      'token_ids',
      lambda: {'ids': self._live.convert_tokens_to_ids(list(tokens))},
      tokens=list(tokens),
    )
    return found['ids']

  def save(self, folder: pathlib.Path) -> None:
    """Write the files that `save_pretrained` writes."""

    def compute():
      self._live.save_pretrained(folder)
      files = sorted(
        path for path in folder.iterdir() if path.suffix == '.json' and 'token' in path.name
      )
      return {path.name: path.read_text() for path in files}

    for name, text in self._ask('saved', compute).items():
      folder.mkdir(parents=True, exist_ok=True)
      if self._live is None:
        (folder / name).write_text(text)
      else:
        assert (folder / name).exists()

  def generate_texts(self, model: HFModel, texts: Sequence[str]) -> dict[str, Any]:
    """Return the ids of texts, and how many texts a model, with any weights, generates for them."""
    return self._ask(
      f'generated/{model.name}',
      lambda: _libraries().generate_texts(model.live, self._live, list(texts)),
      texts=list(texts),
      config=model.config,
    )
