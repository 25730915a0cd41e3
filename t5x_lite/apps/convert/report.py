"""Final report of a conversion: the output, and how to use it."""

import dataclasses
import re
import shlex

from t5x_lite.apps.convert import formats
from t5x_lite.apps.convert.targets import Conversion
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.hugging_face import Family
from t5x_lite.checkpoints.hugging_face import GinSuggestion
from t5x_lite.data import tokenizer_folders
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.formatting import format_bytes
from t5x_lite.storage import files


def describe(done: Conversion) -> str:
  """Return the report."""
  if done.family is None:
    family = ''
  else:
    family = f', {done.family.title}'
  target = formats.target_class(done.format)
  source_title = sources.source_class(done.source_format).title
  lines = [f'Wrote {done.path} ({target.title}) from {done.source} ({source_title}{family}):']
  dtypes = ', '.join(sorted(done.dtypes))
  if len(done.dtypes) > 1:
    dtypes = ' and '.join(f'{number} in {name}' for name, number in sorted(done.dtypes.items()))
  size = format_bytes(done.num_bytes)
  lines.append(
    f'  {done.num_arrays:,} {target.unit}, {size}; {done.num_params:,} parameters, {dtypes}'
  )
  lines += [f'  {note}' for note in done.notes]
  use = target.usage(done) or _gin_lines(done)
  return '\n'.join([*lines, '', *use])


def _gin_lines(done: Conversion) -> list[str]:
  if done.architecture is None:
    return [
      'To start a run from it: --gin_file=runs/finetune.gin, the --gin_file of its model, and',
      f'  {_quoted(_path_flag(done))}',
    ]
  suggested = hugging_face.suggest_gin(done.architecture, _family(done))
  flags = [
    *suggested.flags,
    *_layout_flags(done),
    '--gin_file=runs/finetune.gin',
    *(['--gin_file=adapters/lora.gin'] if done.has_adapter else []),
    *suggested.flags_after_run,
    _path_flag(done),
  ]
  lines = [
    'To fine-tune it, with the flags of your task (see t5x_lite train --help):',
    '  t5x_lite train \\',
  ]
  lines += [f'    {_quoted(flag)} \\' for flag in [*flags, *_vocabulary_flags(done, suggested)]]
  lines[-1] = lines[-1].removesuffix(' \\')
  if suggested.problem is not None:
    lines.append(f'  {suggested.problem[0].upper()}{suggested.problem[1:]}.')
  return lines


def _family(done: Conversion) -> Family:
  if done.family is not None:
    return done.family
  architecture = done.architecture
  assert architecture is not None  # otherwise `_gin_lines` suggests no flags
  if done.param_layout == 'scalable_t5':  # This layout has a table per layer in every family.
    architecture = dataclasses.replace(architecture, relpos_per_layer=False)
  return hugging_face.guess_family(architecture)


def _path_flag(done: Conversion) -> str:
  return f'--gin.INITIAL_CHECKPOINT_PATH={done.path}'


def _layout_flags(done: Conversion) -> list[str]:
  if done.param_layout == 'scalable_t5':
    return ['--gin.network.T5Config.param_layout=scalable_t5']
  architecture = done.architecture
  if architecture is None or not architecture.relpos_per_layer:
    return []
  if _family(done).name != 'umt5':
    return ['--gin.network.T5Config.relpos_bias_tables=per_layer']
  return []


def _vocabulary_flags(done: Conversion, suggested: GinSuggestion) -> list[str]:
  if _family(done).name == 'byt5':
    return []
  folder = files.path(done.source).absolute()
  if suggested.vocabulary_macro == 'VOCABULARY_FOLDER':
    is_folder = done.source_format == 'hugging_face'
    return [f'--gin.VOCABULARY_FOLDER={folder if is_folder else "/path/to/its/folder"}']
  path = folder / tokenizer_folders.MODEL_FILE
  if not path.is_file():
    return ['--gin.VOCABULARY_FILE=/path/to/its/spiece.model']
  flags = [f'--gin.VOCABULARY_FILE={path}']
  try:
    extra_ids = tokenizer_folders.hugging_face_vocabulary(done.source).extra_ids
  except (ConfigError, CheckpointError):
    # The tokenizer cannot be read; the weights were converted anyway.
    extra_ids = _family(done).extra_ids
  # The model files of T5 and Switch include the sentinels, as T5X's file does; umT5's has 300 sentinels in addition.
  if extra_ids != (300 if _family(done).name == 'umt5' else 0):
    flags.append(f'--gin.vocabularies.SentencePieceVocabulary.extra_ids={extra_ids}')
  return flags


def _quoted(flag: str) -> str:
  """Return `flag` quoted for a shell, if necessary."""
  if re.fullmatch(r'[\w./:=@%+,-]+', flag):
    return flag
  if re.search(r'["$`\\!]', flag):
    return shlex.quote(flag)
  return f'"{flag}"'
