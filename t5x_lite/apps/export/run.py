"""Hands a trained model on: its predictions and scores as programs that run without this package.

    python -m t5x_lite export --gin_file=recipes/keyword_cloze.gin --gin.CHECKPOINT_PATH=runs/cloze/checkpoint_500 \
      --gin.MODEL_OUTPUT_DIR=exports --gin.MODEL_NAME=cloze

An export is a folder, which is whole from the moment that it has its name:

    predict.stablehlo   ids of inputs to tokens and scores: StableHLO with its calling convention, as `jax.export` writes
    score.stablehlo     ids of inputs and targets to scores
    params.npz          the parameters, float32 or as 16-bit words
    manifest.json       shapes and types of all this, the platforms, the vocabularies, where it comes from
    run.py, README.md   ten lines that load and run it with jax and numpy alone
    *.sentencepiece     the vocabulary's model, where it has one
    saved_model/        the same for TensorFlow, where asked for

JAX promises to load such a program for at least six months after the version that wrote it, and runs it on any of the
platforms that it was written for.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.export
import numpy as np

import t5x_lite
from t5x_lite import checkpoints
from t5x_lite import files
from t5x_lite import layers
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite.apps.common import output_folder as export_folder
from t5x_lite.apps.common import restore as restore_lib
from t5x_lite.apps.export import functions as export_functions
from t5x_lite.data.features import get_converter
from t5x_lite.data.vocabularies import kind_of
from t5x_lite.errors import ConfigError, T5xLiteError
from t5x_lite.formatting import format_bytes

MANIFEST = 'manifest.json'
PARAMS_FILE = 'params.npz'
SCRIPT = 'run.py'
SAVED_MODEL = 'saved_model'
FORMAT = 't5x_lite.export'
PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')
_FORMAT_VERSION = 1
_BATCH = 'batch'
# NumPy's files know no other floating-point types.
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
inputs = np.zeros(({rows}, {inputs}), np.int32)
for row, ids in zip(inputs, rows): row[:len(ids)] = ids""",
    'score': """\
rows = json.load(sys.stdin)  # a list of pairs of lists of ids: inputs and targets, each with its end-of-sequence id
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

- `*.stablehlo`: programs for {platforms}, written by jax {jax_version}; read them with `jax.export.deserialize`. Under
  `functions`, `manifest.json` has the shapes and types of their arrays; the first argument of each is the dict of
  variables.
- `params.npz`: the variables by name.
- `manifest.json`: under `vocabularies`, what turns text into ids{files}.
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
  """Writes a model with its parameters as programs that need none of this package's code.

  The programs are for one device; jitted with sharded arguments they run on several. What they do is fixed: the decoding
  algorithm with its options, the lengths, the vocabulary's end of sequence.

  Args:
    model: the model; its parameters become an argument of the programs, not part of them.
    restore_checkpoint_cfg: the checkpoint; its `dtype` is that of the exported parameters. None for random ones.
    partitioner: where the parameters lie while they are restored.
    task_feature_lengths: lengths of `inputs` and `targets` in ids. `targets` is also the most tokens to decode; of a
      decoder-only model, the room behind the longest inputs.
    output_dir: the folder in which the export gets its own.
    model_name: the name of that.
    batch_size: rows of a call; None for any number of rows.
    inference_mode: 'predict', 'score', or both.
    native_lowering_platforms: the platforms that the programs run on, of cpu, cuda, rocm and tpu.
    seed_input: give the predictions a third argument, an int32 seed, for a decoding that draws. Without it such a
      decoding draws the same numbers at every call.
    saved_model: also write a SavedModel of TensorFlow.
    overwrite: replace an export of that name, once the new one is whole.
    fallback_init_rng: seed of random parameters; see `restore.restore_for_inference`.

  Returns:
    The folder of the export.

  Raises:
    ConfigError: an option is out of range, the export exists, or the model cannot be exported in this way.
    CheckpointError: there is no such checkpoint, or it does not fit the model.
  """
  # --- Options ------------------------------------------------------------------------------------------------------
  modes = [inference_mode] if isinstance(inference_mode, str) else list(inference_mode)
  _check_choices('inference_mode', modes, export_functions.MODES)
  _check_choices('native_lowering_platforms', native_lowering_platforms, PLATFORMS)
  export_functions.check_lengths(task_feature_lengths)
  export_functions.batch_fn(model)
  _check_options(batch_size, restore_checkpoint_cfg, modes, seed_input)
  target = _check_target(output_dir, model_name, overwrite)
  if saved_model:
    from t5x_lite.apps.export import saved_model as export_saved_model
    export_saved_model.check_tensorflow()

  # --- Parameters -----------------------------------------------------------------------------------------------------
  spec = get_converter(model.FEATURE_CONVERTER).element_spec(task_feature_lengths, partitioner.data_mesh_size, False)
  restored = next(restore_lib.restore_for_inference(
      model, restore_checkpoint_cfg, partitioner, {name: leaf.shape for name, leaf in spec.items()},
      {name: leaf.dtype for name, leaf in spec.items()}, fallback_init_rng))
  variables = {name: np.asarray(value) for name, value in export_functions.flat_variables(
      restored.train_state.params, restored.train_state.flax_mutables).items()}

  # --- Programs -------------------------------------------------------------------------------------------------------
  programs = [_export(mode, model, variables, task_feature_lengths, batch_size, tuple(native_lowering_platforms),
                      seed_input) for mode in modes]

  # --- Files: in a folder of another name, until all are there ------------------------------------------------------------
  with export_folder.writing(target) as temporary:
    _write_variables(temporary / PARAMS_FILE, variables)
    functions = {}
    for program in programs:
      content = program.exported.serialize()
      files.write(temporary / f'{program.name}.stablehlo', content, durable=False)
      functions[program.name] = _describe_program(program, len(variables), content)
    if saved_model:
      export_saved_model.write_saved_model(
          str(temporary / SAVED_MODEL), {p.name: p.exported for p in programs},
          {p.name: p.argument_names for p in programs}, variables)
    manifest = {
        'format': FORMAT, 'format_version': _FORMAT_VERSION, 'name': model_name,
        'versions': {'t5x_lite': t5x_lite.__version__, 'jax': jax.__version__},
        'model': type(model).__name__, 'checkpoint': restored.path, 'step': restored.step,
        'task_feature_lengths': dict(task_feature_lengths), 'batch_size': batch_size, 'functions': functions,
        'vocabularies': {'inputs': _vocabulary(model.input_vocabulary, 'inputs', temporary),
                         'targets': _vocabulary(model.output_vocabulary, 'targets', temporary)},
        'variables': {name: {'shape': list(value.shape), 'dtype': value.dtype.name}
                      for name, value in variables.items()},
    }
    _write_texts(temporary, manifest)
  return str(target)


def describe(folder: str) -> str:
  """Returns what an export holds, for people."""
  root = pathlib.Path(folder)
  manifest = json.loads((root / MANIFEST).read_text(encoding='utf-8'))
  size = sum(path.stat().st_size for path in root.rglob('*') if path.is_file())
  num_params = sum(int(np.prod(leaf['shape'])) for leaf in manifest['variables'].values())
  lines = [f'Exported {manifest["checkpoint"] or "random parameters"} (step {manifest["step"]:,}, {num_params:,} '
           f'parameters) to {folder}, {format_bytes(size)}:']
  for name, function in manifest['functions'].items():
    for way in ('inputs', 'outputs'):
      arrays = ', '.join(f'{array} {leaf["dtype"]}[{", ".join(map(str, leaf["shape"]))}]'
                         for array, leaf in function[way].items())
      lines.append(f'  {name if way == "inputs" else "":<8} {"from" if way == "inputs" else "to":<4} {arrays}')
  lines.append(f'for {", ".join(function["platforms"])}. {SCRIPT} and README.md show how to run it.')
  if (root / SAVED_MODEL).is_dir():
    lines.append(f'{SAVED_MODEL}/ is the same for TensorFlow.')
  return '\n'.join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# Programs


def _export(mode: str, model: models.BaseTransformerModel, variables: Mapping[str, np.ndarray],
            lengths: Mapping[str, int], batch_size: int | None, platforms: Sequence[str],
            seed_input: bool) -> _Program:
  (rows,) = jax.export.symbolic_shape(_BATCH) if batch_size is None else (batch_size,)
  arrays = {'inputs': jax.ShapeDtypeStruct((rows, lengths['inputs']), np.int32)}
  if mode == 'predict':
    fn = export_functions.predict_fn(model, lengths, seed_input=seed_input)
    if seed_input:
      arrays['seed'] = jax.ShapeDtypeStruct((), np.int32)
  else:
    fn = export_functions.score_fn(model)
    arrays['targets'] = jax.ShapeDtypeStruct((rows, lengths['targets']), np.int32)
  shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in variables.items()}
  try:
    with layers.portable_programs():
      exported = jax.export.export(jax.jit(fn), platforms=platforms)(shapes, *arrays.values())
  except T5xLiteError:
    raise
  except Exception as error:
    ways = [*(['a number for batch_size'] if batch_size is None else []),
            *(['fewer native_lowering_platforms'] if len(platforms) > 1 else [])]
    remedy = f'Try {", or ".join(ways)}. ' if ways else ''
    raise ConfigError(f'The model cannot be exported for {mode!r}: {type(error).__name__}: '
                      f'{str(error).strip().splitlines()[0]}. {remedy}--debug shows more.') from error
  return _Program(name=mode, exported=exported, argument_names=list(arrays))


def _describe_program(program: _Program, num_variables: int, content: bytes) -> dict[str, Any]:
  exported = program.exported

  def leaf(aval) -> dict[str, Any]:
    return {'shape': [dim if isinstance(dim, int) else _BATCH for dim in aval.shape], 'dtype': aval.dtype.name}

  outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
  return {
      'file': f'{program.name}.stablehlo', 'sha256': hashlib.sha256(content).hexdigest(),
      'platforms': list(exported.platforms), 'calling_convention_version': exported.calling_convention_version,
      'inputs': {name: leaf(aval) for name, aval in zip(
          program.argument_names, exported.in_avals[num_variables:], strict=True)},
      'outputs': {name: leaf(aval) for name, aval in outputs.items()},
  }


# ----------------------------------------------------------------------------------------------------------------------
# Files


def _write_variables(path: pathlib.Path, variables: Mapping[str, np.ndarray]) -> None:
  """Writes arrays into one file; types that NumPy's files do not know as words of their size."""

  def plain(value: np.ndarray) -> np.ndarray:
    if value.dtype.kind in 'iub' or value.dtype.name in _NUMPY_FLOATS:
      return value
    return np.ascontiguousarray(value).view(f'uint{8 * value.dtype.itemsize}')

  with open(path, 'wb') as file:
    np.savez(file, **{name: plain(value) for name, value in variables.items()})


def _vocabulary(vocabulary: Any, feature: str, folder: pathlib.Path) -> dict[str, Any]:
  """Returns what there is to say of a vocabulary, of ours or of seqio; copies its model file where it has one."""
  kind = kind_of(vocabulary)
  facts = {'kind': kind, 'size': vocabulary.vocab_size, 'pad_id': vocabulary.pad_id, 'eos_id': vocabulary.eos_id}
  if kind in ('ByteVocabulary', 'SentencePieceVocabulary'):
    facts |= {'unk_id': vocabulary.unk_id, 'extra_ids': vocabulary.extra_ids}
  if kind == 'SentencePieceVocabulary':
    name = f'{feature}.sentencepiece'
    try:
      shutil.copyfile(vocabulary.sentencepiece_model_file, folder / name)
    except OSError as error:
      raise ConfigError(f'The model file {vocabulary.sentencepiece_model_file!r} of the vocabulary cannot be copied: '
                        f'{error.strerror}. Name a local file (VOCABULARY_FILE).') from error
    facts['file'] = name
  return facts


def _write_texts(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
  """Writes the manifest, the script and what explains them."""
  files.write(folder / MANIFEST, json.dumps(manifest, indent=1) + '\n', durable=False)
  mode, function = next(iter(manifest['functions'].items()))
  arguments = ', '.join('np.int32(0)' if name == 'seed' else name for name in function['inputs'])
  feed = _FEED_TEXT[mode].format(rows=manifest['batch_size'] or 'len(rows)', **manifest['task_feature_lengths'])
  script = _SCRIPT_TEXT.format(mode=mode, feed=feed, arguments=arguments)
  files.write(folder / SCRIPT, script, durable=False)
  eos_id = manifest['vocabularies']['inputs']['eos_id']
  ids = str([5, 6, 7] if eos_id is None else [5, 6, 7, eos_id])
  copied = sorted(path.name for path in folder.glob('*.sentencepiece'))
  files.write(folder / 'README.md', _README_TEXT.format(
      name=manifest['name'], mode=mode, script=script, example=ids if mode == 'predict' else f'[{ids}, {ids}]',
      what=f'Step {manifest["step"]:,} of {manifest["checkpoint"] or "random parameters"}',
      platforms=', '.join(function['platforms']), jax_version=manifest['versions']['jax'],
      files=f', with {", ".join(copied)}' if copied else '',
      saved_model=f'- `{SAVED_MODEL}/`: the same for TensorFlow, with the signatures {", ".join(manifest["functions"])}.\n'
      if (folder / SAVED_MODEL).is_dir() else ''), durable=False)


def _check_options(batch_size: int | None, restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig | None,
                   modes: Sequence[str], seed_input: bool) -> None:
  if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
    raise ConfigError(f'batch_size is {batch_size!r}; expected a whole number of at least 1, or None for any number of '
                      'rows.')
  if restore_checkpoint_cfg is not None and restore_checkpoint_cfg.mode == 'all':
    raise ConfigError("RestoreCheckpointConfig.mode is 'all'; expected 'specific' or 'latest', one checkpoint to export.")
  if seed_input and 'predict' not in modes:
    raise ConfigError(f'seed_input is True, but inference_mode is {modes}: only predictions draw. Leave it out.')
  if jax.process_count() > 1:
    raise ConfigError(f'export runs in one process, got {jax.process_count()}: start one alone.')


def _check_target(output_dir: str, model_name: str, overwrite: bool) -> pathlib.Path:
  for option, value in (('output_dir', output_dir), ('model_name', model_name)):
    if not isinstance(value, str) or not value.strip():
      raise ConfigError(f'{option} is {value!r}; expected a name for the export\'s folder. Set '
                        f'{"MODEL_OUTPUT_DIR" if option == "output_dir" else "MODEL_NAME"}.')
  if os.path.basename(model_name) != model_name or model_name in ('.', '..'):
    raise ConfigError(f'model_name is {model_name!r}; expected a plain name, the folder within output_dir '
                      '(MODEL_OUTPUT_DIR).')
  target = pathlib.Path(output_dir) / model_name
  export_folder.clean(target)
  if target.exists():
    try:
      is_export = json.loads((target / MANIFEST).read_text(encoding='utf-8')).get('format') == FORMAT
    except (OSError, ValueError, AttributeError):
      is_export = False
    if not is_export:
      raise ConfigError(f'{str(target)!r} exists and is no export: it stays as it is. Choose another MODEL_NAME.')
    if not overwrite:
      raise ConfigError(f'{str(target)!r} exists: choose another MODEL_NAME, or pass --overwrite.')
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigError(f'output_dir is {output_dir!r}, which cannot be made: {error.strerror}. Set MODEL_OUTPUT_DIR to '
                      'another folder.') from error
  if not os.access(target.parent, os.W_OK | os.X_OK):
    raise ConfigError(f'output_dir is {output_dir!r}, which cannot be written. Set MODEL_OUTPUT_DIR to another folder.')
  return target


def _check_choices(option: str, chosen: Sequence[str], known: Sequence[str]) -> None:
  expected = f'expected some of {", ".join(known)}'
  if not chosen or isinstance(chosen, str):
    raise ConfigError(f'{option} is {chosen!r}; {expected} in a list.')
  for name in chosen:
    if name not in known:
      raise ConfigError(f'{option} has {name!r}; {expected}.')
  if len(set(chosen)) < len(chosen):
    raise ConfigError(f'{option} is {list(chosen)}, which names one twice; {expected}.')
