"""Comparison of T5X's gin files with ours of the same paths.

    python -m tests.compat.t5x_gin T5X [PATH ...]

reads each file of a checkout of T5X and ours through our reader, with the same further files and values, and prints the
settings of the command that differ, without those that are the default of their parameter. `EXPECTED` has those that
differ on purpose.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import inspect
import pathlib
import re
import sys

import gin
from gin import config as gin_config

from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.configuration import t5x_macros
from t5x_lite.errors import T5xLiteError

# T5X has the form of its export in gin; ours is another one.
LEFT_OUT = ('configs/runs/export_seqio.gin', 'contrib/moe/configs/runs/export_seqio.gin')
ENTRIES = {
  'train': 't5x_lite.apps.train.train',
  'eval': 't5x_lite.apps.evaluate.evaluate',
  'infer': 't5x_lite.apps.infer.infer',
  'export': 't5x_lite.apps.export.save',
  'precompile': 't5x_lite.apps.precompile.precompile',
}
# Values of macros that a user must set, in gin's syntax.
VALUES = {
  'MODEL_DIR': "'runs/x'",
  'MIXTURE_OR_TASK_NAME': "'x'",
  'TRAIN_EVAL_MIXTURE_OR_TASK_NAME': "'y'",
  'TRAIN_STEPS': '3',
  'TASK_FEATURE_LENGTHS': "{'inputs': 64, 'targets': 12}",
  'DROPOUT_RATE': '0.1',
  'VOCAB_SIZE': '128',
  'INITIAL_CHECKPOINT_PATH': "'runs/y/checkpoint_3'",
  'CHECKPOINT_PATH': "'runs/y/checkpoint_3'",
  'EVAL_OUTPUT_DIR': "'runs/y/eval'",
  'INFER_OUTPUT_DIR': "'runs/y/infer'",
  'MODEL_OUTPUT_DIR': "'runs/y/export'",
  'MODEL_NAME': "'model'",
  'TF_EXAMPLE_FILE_PATHS': "['a.tfrecord']",
  'TF_EXAMPLE_FILE_TYPE': "'tfrecord'",
  'FEATURE_LENGTHS': "{'inputs': 64, 'targets': 12}",
  'BATCH_SIZE': '32',
}
# Settings that differ on purpose, and why.
EXPECTED = {
  'checkpoints.RestoreCheckpointConfig.dtype': "None is the run's dtype, float32 for T5X's networks",
  'checkpoints.RestoreCheckpointConfig.restore_dataset': 'as in T5X, whose default is False; ours is True',
  'checkpoints.SaveCheckpointConfig.save_dataset': 'a run that is started again resumes in its data',
  'train/data.DatasetConfig.seed': 'RANDOM_SEED instead of the clock',
  '(train_script.train|precompile_script.precompile).random_seed': '0 instead of the clock',
  'train_script.train.inference_evaluator_cls': "T5X's default, if infer_eval_dataset_cfg is set",
  'seqio.Evaluator.logger_cls': 'T5X has no loggers where no file sets them, and results would not be written',
  'partitioning.PjitPartitioner.backend': 'the devices of the machine',
  '(train|train_eval|infer_eval)/data.DatasetConfig.use_cached': 'tasks without a cache work',
  '(trainer.Trainer|moe.MoeTrainer).non_finite_policy': "with the action 'stop', the default",
  '(eval_script.evaluate|infer_script.infer).summarize_config_fn': 'config.gin next to the results',
  '(eval_script.evaluate|train_script.train).infer_eval_cfg': 'with the default options',
  'trainer.Trainer.num_microbatches': 'None for 0, which means the same',
  'partitioning.PjitPartitioner.num_partitions': 'T5X ignores it next to a submesh',
  'partitioning.PjitPartitioner.logical_axis_rules': 'the default rules',
  r'partitioner.MoePjitPartitioner.logical_axis_rules|'
  r'moe.head_logical_axis_rules.additional_rules': (
    'T5X replicates axes without a rule; here mlp_embed needs one'
  ),
}
# Files of T5X that cannot be compared, and why.
UNREADABLE = {
  'configs/runs/export.gin': 'the export of T5X has other parts',
  'contrib/moe/configs/runs/export.gin': 'the export of T5X has other parts',
  'contrib/moe/configs/runs/infer_from_tfexample_file.gin': 'broken: binds train_script without importing it',
  'contrib/moe/configs/runs/sparse_upcycle.gin': 'UpcycleCheckpointer is a builder here',
  'examples/scalable_t5/umt5/tydiqa_base.gin': 'broken: binds partitioning without importing it',
  'examples/t5/t5_1_1/examples/base_wmt_eval.gin': 'broken: no partitioner',
}


def t5x_paths(kind: str = '') -> list[str]:
  """Return the paths of our files that T5X has too, below `t5x/`."""
  ours_only = {
    'training.gin',
    'evaluator.gin',
    'export.gin',
    'vocabulary.gin',
    'beam_search.gin',
    'contrib/moe/partitioner.gin',
    'contrib/moe/trainer.gin',
    'examples/scalable_t5/encoder_decoder.gin',
    'configs/runs/pretrain_deterministic.gin',
  }
  paths = (name.removeprefix('t5x/') for name in gin_syntax.packaged_files('t5x'))
  return [path for path in paths if path not in ours_only and path.startswith(kind)]


def command(path: str) -> str:
  """Return the command that a file configures."""
  stem = pathlib.PurePath(path).stem
  if stem.startswith('test_train'):
    return 'train'
  return next((name for name in ENTRIES if re.search(rf'(^|_){name}(_|$)', stem)), 'train')


def companions(path: str) -> list[str]:
  """Return the paths of a file of T5X and of the files that it needs, in the order of application."""
  run, umt5 = 'configs/runs/finetune.gin', 'examples/scalable_t5/umt5/'
  if path.startswith('contrib/moe/'):
    return ['models/tokens_choose_tiny.gin', path]
  if path.startswith('configs/'):
    return ['examples/t5/t5_1_1/tiny.gin', path]
  if path.endswith('local_tiny.gin'):
    return [str(pathlib.PurePath(path).parent / 't5_1_1/base.gin'), run, path]
  if path.startswith(umt5 + 'runs/'):
    return ['examples/scalable_t5/mt5/small.gin', path]
  if path.startswith((umt5 + 'optimizer/', umt5 + 'architectures/', umt5 + 'vocab')):
    return ['examples/scalable_t5/mt5/small.gin', run, path]
  if '/examples/' in path or path.startswith(umt5):
    return [path]
  return [path, run]


def load(
  path: str, folder: str = '', macros: Mapping[str, str] | None = None
) -> gin_utils.Configuration:
  """Load a file of T5X's path with what it needs.

  Args:
    path: path below `t5x/`.
    folder: checkout of T5X whose files are read; '' for ours.
    macros: values of macros, as flags.
  """
  names = [
    name if name.startswith('models/') else str(pathlib.PurePath(folder or 'gin') / 't5x' / name)
    for name in companions(path)
  ]
  search_paths = [folder] if folder else []
  flags = [
    gin_syntax.read_flag(name, value, f'--gin.{name}={value}')
    for name, value in (macros or {}).items()
  ]
  texts = gin_utils.read(names, flags, search_paths, placeholders=VALUES)
  return gin_utils.load(ENTRIES[command(path)], texts)


def settings(configuration: gin_utils.Configuration) -> dict[str, str]:
  """Return the values of all bindings that the command reaches and that are not the default, as text by name."""
  found = {}
  for use in configuration.uses:
    if use.configurable.selector.startswith('gin.') or use.is_of_macro:
      continue
    parameters = inspect.signature(use.configurable.wrapped).parameters
    for name, row in use.bound.items():
      value = configuration.table.value(row)
      default = parameters[name].default if name in parameters else inspect.Parameter.empty
      is_default_fn = isinstance(value, gin_config.ConfigurableReference) and (
        not value.evaluate and not value.scopes and value.configurable.wrapped is default
      )
      if not is_default_fn and (value != default or type(value) is not type(default)):
        found[f'{use.name}.{name}'] = repr(value)
  return found


def differences(path: str, folder: str) -> list[tuple[str, str, str]]:
  """Return (setting, ours, T5X's) of each setting that differs; '-' for one that is not bound."""
  try:
    ours = settings(load(path))
    gin.clear_config()
    theirs = settings(load(path, folder))
  finally:
    gin.clear_config()
  return [
    (name, ours.get(name, '-'), theirs.get(name, '-'))
    for name in sorted({*ours, *theirs})
    if ours.get(name) != theirs.get(name)
  ]


def macros(folder: str) -> dict[str, list[str]]:
  """Return the macros of T5X's files, with those of the files that they include, by path below `t5x/`.

  For a file that T5X has not published, those of `pretrain.gin`, of which it is a form.
  """
  found = {}
  for path in t5x_paths():
    names = set()
    texts = [gin_syntax.read_file(f'{folder}/t5x/{path}', [folder])]
    while texts:
      text = texts.pop()
      if text.is_packaged():
        assert text.path is not None and text.path.name == 'pretrain_deterministic.gin', text.path
        text = gin_syntax.read_file(f'{folder}/t5x/configs/runs/pretrain.gin', [folder])
      texts += [each for each in text.statements if isinstance(each, gin_syntax.Text)]
      own = dataclasses.replace(
        text, statements=[s for s in text.statements if isinstance(s, gin_syntax.Binding)]
      )
      names |= gin_syntax.mentioned_macros([own])
      names |= {each.macro_name for each in gin_syntax.bindings_of([own]) if each.macro_name}
    found[path] = sorted(names - {gin_syntax.REQUIRED})
  return found


def main(arguments: Sequence[str]) -> int:
  """Print the differences of all files, or of those named; return the number of unexpected ones."""
  folder, *paths = arguments
  num_equal, unexpected = 0, []
  for path in paths or t5x_paths():
    try:
      found = differences(path, folder)
    except T5xLiteError as error:
      if path not in UNREADABLE:
        unexpected.append(f'{path}: {error}')
      continue
    found = [
      f'{path}: {name} = {ours} (T5X: {theirs})'
      for name, ours, theirs in found
      if not any(re.fullmatch(pattern, name) for pattern in EXPECTED)
    ]
    num_equal += not found
    unexpected += found
  if not paths:
    recorded = t5x_macros.macros_of_t5x()
    unexpected += [
      f'{path}: has the macros {names}, and t5x_lite/compat/macros.json others'
      for path, names in macros(folder).items()
      if recorded.get(f't5x/{path}') != set(names)
    ]
  print(
    f'{num_equal} files of T5X and ours give the same settings; {len(unexpected)} unexpected differences.',
    *unexpected,
    sep='\n',
  )
  return len(unexpected)


if __name__ == '__main__':
  sys.exit(min(main(sys.argv[1:]), 1))
