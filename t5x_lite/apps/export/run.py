"""Export a trained model: predictions and scores as programs that run without this package.

    python -m t5x_lite export --gin_file=recipes/keyword_cloze.gin --gin.CHECKPOINT_PATH=runs/cloze/checkpoint_500 \
      --gin.MODEL_OUTPUT_DIR=exports --gin.MODEL_NAME=cloze

An export is a folder, written atomically (in an object store, its manifest.json is written last):

    predict.stablehlo   input ids to tokens and scores: StableHLO with its calling convention, written by `jax.export`
    score.stablehlo     input and target ids to scores
    params.npz          the parameters; 16-bit types other than float16 are stored as uint16
    manifest.json       shapes and types of all arrays, platforms, vocabularies and checkpoint
    run.py, README.md   eleven lines that load and run a program with jax and numpy alone
    *.sentencepiece     model file of a SentencePiece vocabulary
    saved_model/        the same for TensorFlow, if requested

JAX guarantees to load such a program for at least six months after the version that wrote it.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import t5x_lite
from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import layers
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite.adapters import merging
from t5x_lite.apps.common import output_folder
from t5x_lite.apps.common import restore as restore_lib
from t5x_lite.apps.export import functions as export_functions
from t5x_lite.data import vocabularies
from t5x_lite.data.batches.features import get_converter
from t5x_lite.data.text.added_tokens import AddedTokensVocabulary
from t5x_lite.data.vocabularies import kind_of
from t5x_lite.errors import ConfigError, T5xLiteError
from t5x_lite.formatting import format_bytes
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

MANIFEST = 'manifest.json'
PARAMS_FILE = 'params.npz'
SCRIPT = 'run.py'
SAVED_MODEL = 'saved_model'
FORMAT = 't5x_lite.export'
PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')
_FORMAT_VERSION = 1
_BATCH = 'batch'
# Floating-point types that NumPy files support.
_NUMPY_FLOATS = ('float16', 'float32', 'float64')

_SCRIPT_TEXT = """\
import json, pathlib, sys
import jax, jax.export, numpy as np
folder = pathlib.Path(__file__).parent
manifest = json.loads((folder / 'manifest.json').read_text())
variables = {{k: v.view(manifest['variables'][k]['dtype']) for k, v in np.load(folder / 'params.npz').items()}}
program = jax.export.deserialize(bytearray((folder / '{mode}.stablehlo').read_bytes()))
{feed}
print({{k: v.tolist() for k, v in jax.jit(program.call)(variables, {arguments}).items()}})
"""
_FEED_TEXT = {
  'predict': """\
rows = json.load(sys.stdin)  # a list of lists of ids, each with its end-of-sequence id
if any(len(ids) > {inputs} for ids in rows): sys.exit('A row of inputs may have {inputs} ids at most.')
inputs = np.zeros(({rows}, {inputs}), np.int32)
for row, ids in zip(inputs, rows): row[:len(ids)] = ids""",
  'score': """\
rows = json.load(sys.stdin)  # a list of pairs of lists of ids: inputs and targets, each with its end-of-sequence id
if any(len(a) > {inputs} or len(b) > {targets} for a, b in rows): sys.exit('At most {inputs} and {targets} ids a pair.')
inputs, targets = np.zeros(({rows}, {inputs}), np.int32), np.zeros(({rows}, {targets}), np.int32)
for i, (a, b) in enumerate(rows): inputs[i, :len(a)], targets[i, :len(b)] = a, b""",
}
_README_TEXT = """\
# {name}

{what}. `run.py` runs `{mode}` on lists of ids with JAX and NumPy alone:

```sh
echo '[{example}]' | python run.py
```

```python
{script}```

- `*.stablehlo`: programs for {platforms}, written by jax {jax_version}; load them with `jax.export.deserialize`.
  `functions` in `manifest.json` lists the shapes and types of their arrays; the first argument of each program is the
  dict of variables.
- `params.npz`: the variables by name.
- `manifest.json`: `vocabularies` describes the conversion between text and ids{files}.{rule}
{saved_model}"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
  name: str
  exported: jax.export.Exported
  argument_names: Sequence[str]


def save(
  *,
  model: models.BaseTransformerModel,
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig | None,
  partitioner: partitioning.PjitPartitioner,
  task_feature_lengths: Mapping[str, int],
  output_dir: str,
  model_name: str,
  batch_size: int | None = None,
  inference_mode: str | Sequence[str] = export_functions.MODES,
  native_lowering_platforms: Sequence[str] = ('cpu', 'cuda', 'tpu'),
  seed_input: bool = False,
  saved_model: bool = False,
  overwrite: bool = False,
  fallback_init_rng: int | None = None,
) -> str:
  """Write a model and its parameters as programs that run without this package.

  The programs are for one device; jitted with sharded arguments they run on several. Decoding algorithm and options,
  lengths and end-of-sequence id are constants of the programs.

  Args:
    model: the model; its parameters are an argument of the programs.
    restore_checkpoint_cfg: the checkpoint; its `dtype` is that of the exported parameters. None for random parameters.
    partitioner: partitioner of the parameters while they are restored.
    task_feature_lengths: number of tokens of `inputs` and `targets`. `targets` is also the maximum number of decoded
      tokens.
    output_dir: folder in which the folder of the export is created.
    model_name: name of the folder of the export.
    batch_size: number of rows per call; None for any number.
    inference_mode: 'predict', 'score', or both.
    native_lowering_platforms: platforms of the programs: cpu, cuda, rocm, tpu.
    seed_input: give predictions a third argument, an int32 sampling seed. Without it, sampling uses the same random
      numbers at every call.
    saved_model: also write a TensorFlow SavedModel.
    overwrite: replace an existing export once the new one is complete.
    fallback_init_rng: seed of random parameters; see `restore.restore_for_inference`.

  Returns:
    Path of the export.

  Raises:
    ConfigError: an option is out of range, the export exists, or the model cannot be exported with these options.
    CheckpointError: the checkpoint does not exist or does not match the model.
  """
  # --- Options ------------------------------------------------------------------------------------------------------
  if isinstance(inference_mode, str):
    modes = [inference_mode]
  else:
    modes = list(inference_mode)
  checks.check(
    'save',
    {**locals(), 'inference_mode': modes},
    inference_mode=_some_of(export_functions.MODES),
    native_lowering_platforms=_some_of(PLATFORMS),
    task_feature_lengths=export_functions.LENGTHS,
    batch_size=checks.number(
      at_least=1, integer=True, remedy='None allows any number of rows.'
    ).or_none(),
    output_dir=output_folder.directory('Set MODEL_OUTPUT_DIR.'),
    model_name=_FOLDER_NAME,
    seed_input=_BOOL
    if 'predict' in modes
    else checks.one_of((False,), 'Only predictions are sampled.'),
  )
  export_functions.batch_fn(model)
  _check_single(restore_checkpoint_cfg)
  target = _check_target(output_dir, model_name, overwrite)
  if saved_model:
    from t5x_lite.apps.export import saved_model as export_saved_model

    export_saved_model.check_tensorflow()

  # --- Parameters -----------------------------------------------------------------------------------------------------
  spec = get_converter(model.FEATURE_CONVERTER).element_spec(
    task_feature_lengths, partitioner.data_mesh_size, False
  )
  adapter = model.adapter
  restored_model = model
  cfg = restore_checkpoint_cfg
  if adapter is not None:
    # Sums of the original weights and the adapter are rounded once.
    restored_model = model.with_adapter(dataclasses.replace(adapter, base_dtype=None))
    cfg = cfg and cfg.changed(dtype='float32')
  restored = next(
    restore_lib.restore_for_inference(
      restored_model,
      cfg,
      partitioner,
      {name: leaf.shape for name, leaf in spec.items()},
      {name: leaf.dtype for name, leaf in spec.items()},
      fallback_init_rng,
    )
  )
  state = restored.train_state
  params = state.params
  if adapter is not None:
    model = model.with_adapter(None)
    dtype = jnp.dtype((restore_checkpoint_cfg and restore_checkpoint_cfg.dtype) or 'float32')
    params = merging.merged_params(adapter.metadata(params, state.params_axes), params, dtype)
  variables = {
    name: np.asarray(value)
    for name, value in export_functions.flat_variables(params, state.flax_mutables).items()
  }

  # --- Programs -------------------------------------------------------------------------------------------------------
  programs = [
    _export(
      mode,
      model,
      variables,
      task_feature_lengths,
      batch_size,
      tuple(native_lowering_platforms),
      seed_input,
    )
    for mode in modes
  ]

  # --- Files ----------------------------------------------------------------------------------------------------------
  with output_folder.replacing(target, last=MANIFEST) as temporary:
    _write_variables(temporary / PARAMS_FILE, variables)
    functions = {}
    for program in programs:
      content = bytes(program.exported.serialize())
      files.write(temporary / f'{program.name}.stablehlo', content, durable=False)
      functions[program.name] = _describe_program(program, len(variables), content)
    if saved_model:
      export_saved_model.write_saved_model(
        str(temporary / SAVED_MODEL),
        {p.name: p.exported for p in programs},
        {p.name: p.argument_names for p in programs},
        variables,
      )
    manifest = {
      'format': FORMAT,
      'format_version': _FORMAT_VERSION,
      'name': model_name,
      'versions': {'t5x_lite': t5x_lite.__version__, 'jax': jax.__version__},
      'model': type(model).__name__,
      'checkpoint': restored.origin,
      'step': restored.step,
      'task_feature_lengths': dict(task_feature_lengths),
      'batch_size': batch_size,
      'functions': functions,
      'vocabularies': {
        'inputs': _vocabulary(model.input_vocabulary, 'inputs', temporary),
        'targets': _vocabulary(model.output_vocabulary, 'targets', temporary),
      },
      'variables': {
        name: {'shape': list(value.shape), 'dtype': value.dtype.name}
        for name, value in variables.items()
      },
    }
    _write_texts(temporary, manifest)
  return str(target)


def describe(folder: str) -> str:
  """Return a description of an export, for the command's output."""
  root = files.path(folder)
  manifest = json.loads((root / MANIFEST).read_text(encoding='utf-8'))
  size = untrusted.tree_bytes(root)
  num_params = sum(int(np.prod(leaf['shape'])) for leaf in manifest['variables'].values())
  lines = [
    f'Exported {manifest["checkpoint"] or "random parameters"} (step {manifest["step"]:,}, {num_params:,} '
    f'parameters) to {folder}, {format_bytes(size)}:'
  ]
  for name, function in manifest['functions'].items():
    lines.append(f'  {name:<8} from {_arrays_text(function["inputs"])}')
    lines.append(f'  {"":<8} to   {_arrays_text(function["outputs"])}')
  where = ' from a copy on a disk' if files.is_remote(root) else ''
  lines.append(
    f'Platforms: {", ".join(function["platforms"])}. {SCRIPT} and README.md show how to run it'
    f'{where}.'
  )
  if (root / SAVED_MODEL).is_dir():
    lines.append(f'{SAVED_MODEL}/ has the same programs for TensorFlow.')
  return '\n'.join(lines)


def _arrays_text(arrays: Mapping[str, Mapping[str, Any]]) -> str:
  """Return the names, dtypes and shapes of arrays."""
  texts = []
  for name, leaf in arrays.items():
    shape = ', '.join(map(str, leaf['shape']))
    texts.append(f'{name} {leaf["dtype"]}[{shape}]')
  return ', '.join(texts)


# ----------------------------------------------------------------------------------------------------------------------
# Programs


def _export(
  mode: str,
  model: models.BaseTransformerModel,
  variables: Mapping[str, np.ndarray],
  lengths: Mapping[str, int],
  batch_size: int | None,
  platforms: Sequence[str],
  seed_input: bool,
) -> _Program:
  rows: Any = batch_size
  if batch_size is None:
    (rows,) = jax.export.symbolic_shape(_BATCH)
  arrays = {'inputs': jax.ShapeDtypeStruct((rows, lengths['inputs']), np.int32)}
  if mode == 'predict':
    fn = export_functions.predict_fn(model, lengths, seed_input=seed_input)
    if seed_input:
      arrays['seed'] = jax.ShapeDtypeStruct((), np.int32)
  else:
    fn = export_functions.score_fn(model)
    arrays['targets'] = jax.ShapeDtypeStruct((rows, lengths['targets']), np.int32)
  shapes = {
    name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in variables.items()
  }
  try:
    with layers.portable_programs():
      exported = jax.export.export(jax.jit(fn), platforms=platforms)(shapes, *arrays.values())
  except T5xLiteError:
    raise
  except Exception as error:
    ways = []
    if batch_size is None:
      ways.append('a number for batch_size')
    if len(platforms) > 1:
      ways.append('fewer native_lowering_platforms')
    remedy = ''
    if ways:
      remedy = f'Try {", or ".join(ways)}. '
    reason = str(error).strip().splitlines()[0]
    raise ConfigError(
      f'The model cannot be exported for {mode!r}: {type(error).__name__}: {reason}. {remedy}'
      '--debug shows more.'
    ) from error
  return _Program(name=mode, exported=exported, argument_names=list(arrays))


def _describe_program(program: _Program, num_variables: int, content: bytes) -> dict[str, Any]:
  exported = program.exported

  def leaf(aval) -> dict[str, Any]:
    return {
      'shape': [dim if isinstance(dim, int) else _BATCH for dim in aval.shape],
      'dtype': aval.dtype.name,
    }

  outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
  inputs = zip(program.argument_names, exported.in_avals[num_variables:], strict=True)
  return {
    'file': f'{program.name}.stablehlo',
    'sha256': hashlib.sha256(content).hexdigest(),
    'platforms': list(exported.platforms),
    'calling_convention_version': exported.calling_convention_version,
    'inputs': {name: leaf(aval) for name, aval in inputs},
    'outputs': {name: leaf(aval) for name, aval in outputs.items()},
  }


# ----------------------------------------------------------------------------------------------------------------------
# Files


def _write_variables(path: pathlib.Path, variables: Mapping[str, np.ndarray]) -> None:
  """Write arrays to one file; types that NumPy files do not support are written as unsigned integers of their size."""

  def plain(value: np.ndarray) -> np.ndarray:
    if value.dtype.kind in 'iub' or value.dtype.name in _NUMPY_FLOATS:
      return value
    return np.ascontiguousarray(value).view(f'uint{8 * value.dtype.itemsize}')

  with open(path, 'wb') as file:
    arrays: dict[str, Any] = {name: plain(value) for name, value in variables.items()}
    np.savez(file, **arrays)


def _vocabulary(vocabulary: Any, feature: str, folder: pathlib.Path) -> dict[str, Any]:
  """Return the facts about a vocabulary of t5x_lite or seqio; copy its model file, if any, to `folder`."""
  kind = kind_of(vocabulary)
  if isinstance(vocabulary, AddedTokensVocabulary):
    tokens = [dataclasses.asdict(token) for token in vocabulary.tokens]
    base = _vocabulary(vocabulary.base, feature, folder)
    return {**base, 'size': vocabulary.vocab_size, 'added_tokens': tokens}
  facts = {
    'kind': kind,
    'size': vocabulary.vocab_size,
    'pad_id': vocabulary.pad_id,
    'eos_id': vocabulary.eos_id,
  }
  if kind in ('ByteVocabulary', 'SentencePieceVocabulary'):
    facts |= {'unk_id': vocabulary.unk_id, 'extra_ids': vocabulary.extra_ids}
  if kind == 'SentencePieceVocabulary':
    name = f'{feature}.sentencepiece'
    (folder / name).write_bytes(vocabularies.read_model_file(vocabulary.sentencepiece_model_file))
    facts['file'] = name
  return facts


def _write_texts(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  """Write the manifest, the script and README.md."""
  files.write(folder / MANIFEST, json.dumps(manifest, indent=1) + '\n', durable=False)
  mode, function = next(iter(manifest['functions'].items()))
  arguments = ', '.join('np.int32(0)' if name == 'seed' else name for name in function['inputs'])
  feed = _FEED_TEXT[mode].format(
    rows=manifest['batch_size'] or 'len(rows)', **manifest['task_feature_lengths']
  )
  script = _SCRIPT_TEXT.format(mode=mode, feed=feed, arguments=arguments)
  files.write(folder / SCRIPT, script, durable=False)
  eos_id = manifest['vocabularies']['inputs']['eos_id']
  ids = [5, 6, 7]
  if eos_id is not None:
    ids.append(eos_id)
  example = str(ids)
  if mode != 'predict':
    example = f'[{ids}, {ids}]'
  copied = ', '.join(sorted(path.name for path in folder.glob('*.sentencepiece')))
  rule = ''
  if manifest['vocabularies']['inputs']['kind'] == 'ByteVocabulary':
    rule = ' In a ByteVocabulary the id of a byte of UTF-8 is its value plus 3.'
  saved_model = ''
  if (folder / SAVED_MODEL).is_dir():
    signatures = ', '.join(manifest['functions'])
    saved_model = f'- `{SAVED_MODEL}/`: the same for TensorFlow; signatures: {signatures}.\n'
  files.write(
    folder / 'README.md',
    _README_TEXT.format(
      name=manifest['name'],
      mode=mode,
      script=script,
      example=example,
      what=f'Step {manifest["step"]:,} of {manifest["checkpoint"] or "random parameters"}',
      platforms=', '.join(function['platforms']),
      jax_version=manifest['versions']['jax'],
      files=f', with {copied}' if copied else '',
      rule=rule,
      saved_model=saved_model,
    ),
    durable=False,
  )


def _some_of(names: Sequence[str]) -> checks.Expectation:
  """Expect a non-empty list of distinct names."""
  return checks.Expectation(
    f'a list of {", ".join(names)} without duplicates',
    lambda value: (
      isinstance(value, (list, tuple))
      and len(value) > 0
      and all(name in names for name in value)
      and len(set(value)) == len(value)
    ),
  )


_BOOL = checks.instance(bool, 'True or False')
_FOLDER_NAME = checks.Expectation(
  'a plain folder name',
  lambda value: (
    isinstance(value, str)
    and value.strip() not in ('', '.', '..')
    and os.path.basename(value) == value
  ),
  'Set MODEL_NAME.',
)


def _check_single(restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig | None) -> None:
  if restore_checkpoint_cfg is None:
    mode = None
  else:
    mode = restore_checkpoint_cfg.mode
  if mode == 'all' or jax.process_count() > 1:
    raise ConfigError(
      "Export requires one checkpoint (RestoreCheckpointConfig.mode 'specific' or 'latest') and one "
      f'process (without launch, and with --distributed=off), got mode={mode!r} and '
      f'{jax.process_count()} process(es).'
    )


def _check_target(output_dir: str, model_name: str, overwrite: bool) -> files.Path:
  """Return the path of the export; raise if it exists and must not be replaced, or cannot be written."""
  target = files.path(output_dir) / model_name
  output_folder.remove_leftovers(target)
  if target.exists():
    try:
      is_export = json.loads(untrusted.read_regular(target / MANIFEST)).get('format') == FORMAT
    except (OSError, ValueError, AttributeError):
      is_export = False
    if not is_export:
      raise ConfigError(f'{str(target)!r} exists and is not an export. Choose another MODEL_NAME.')
    if not overwrite:
      raise ConfigError(f'{str(target)!r} exists. Choose another MODEL_NAME, or pass --overwrite.')
  files.make_writable(target.parent)
  return target
