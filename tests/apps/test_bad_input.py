"""Invalid inputs: each is rejected before any compute, with status 2 and one short message with the remedy.

Every remedy of a message in the table is followed to the letter.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.apps.common import report
from t5x_lite.command_line import cli

_RECIPE = ['--gin_file=recipes/keyword_cloze.gin', '--gin.DATA_SOURCE=builtin']
_ROOT = pathlib.Path(__file__).parents[2]


class _File(NamedTuple):
  """A gin file of the user, which is read after the recipe."""

  text: bytes


class _Remedy(NamedTuple):
  r"""A proposal of a message.

  Attributes:
    pattern: regular expression of the proposal in the message.
    line: what a user types who follows it, as text of a shell, instead of the invalid flags; `\1` is the first group.
  """

  pattern: str
  line: str | _File


class _Row(NamedTuple):
  """An invalid command line.

  Attributes:
    what: name.
    flags: flags of `train` after the recipe; or an entire command line, as text of a shell. RUN is a new run directory.
    fragments: texts of the message.
    remedies: all proposals of the message; None for a message that only states what is expected.
  """

  what: str
  flags: list[str] | list[_File] | str
  fragments: list[str]
  remedies: list[_Remedy] | None


# Words of a message that propose something.
_PROPOSES = re.compile(
  r'\b(did you mean|write|set(?! '
  r'by)|use|add|remove|omit|call|change|bind|close|increase|install|choose|pass|replace|save|'
  r'leave out)\b',
  re.IGNORECASE,
)

# The last error of the command shows that everything else of it is right.
_RECIPE_REMEDY = _Remedy(
  r'Pass a recipe before them and set what is missing, e\.g\. (--gin_file=.*)\.$',
  r'train \1 --gin.EVAL_PERIOD=-1',
)

_ROWS = [
  _Row(
    'a misspelt parameter',
    ['--gin.train_script.train.eval_perod=3'],
    ["'eval_perod'", "mean 'eval_period'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'--gin.train_script.train.\1=%EVAL_PERIOD')],
  ),
  _Row(
    'a misspelt configurable',
    ['--gin.models.EncoderDecoderModl.z_loss=1.0'],
    ["mean 'EncoderDecoderModel'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'--gin.models.\1.z_loss=1.0')],
  ),
  _Row(
    'a misspelt macro',
    ['--gin.TRIAN_STEPS=5'],
    ["'TRIAN_STEPS'", "Did you mean 'TRAIN_STEPS'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'--gin.\1=5')],
  ),
  _Row(
    'a misspelt file',
    ['--gin_file=recipes/keyword_clozelong.gin'],
    ["mean 'recipes/keyword_cloze_long.gin'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'--gin_file=\1')],
  ),
  _Row(
    'a misspelt flag',
    ['--dryrun'],
    ["Did you mean '--dry_run'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'\1')],
  ),
  _Row(
    'a bare constant',
    ['--gin.PACK=true'],
    ['--gin.PACK=True'],
    [_Remedy(r'Write (--gin\.PACK=True), or \S+ for a string\.', r'\1')],
  ),
  _Row('a wrong type', ['--gin.TRAIN_STEPS=abc'], ['`TRAIN_STEPS` must be int', "got 'abc'"], None),
  _Row(
    'a fraction of rows', ['--gin.BATCH_SIZE=2.5'], ['`BATCH_SIZE` must be int', 'got 2.5'], None
  ),
  _Row(
    'a wrong type deep down',
    ['--gin.network.T5Config.emb_dim=wide'],
    ['emb_dim` must be int', "got 'wide'"],
    None,
  ),
  _Row('no rows', ['--gin.BATCH_SIZE=0'], ['batch_size', '0'], None),
  _Row(
    'no number of steps for a schedule',
    ['--gin.TRAIN_STEPS=None'],
    [
      '`TRAIN_STEPS` must be int for schedules.create_learning_rate_scheduler.steps_per_cycle, got None',
      'schedules.create_learning_rate_scheduler needs the total number of steps: set TRAIN_STEPS, or '
      '--gin.schedules.create_learning_rate_scheduler.steps_per_cycle to a number.',
    ],
    [
      _Remedy(r'set (TRAIN_STEPS), or (?=--gin)', r'--gin.\1=5'),
      _Remedy(r'(--gin\S+steps_per_cycle) to a number\.', r'--gin.TRAIN_STEPS=None \1=5'),
    ],
  ),
  _Row('fewer than no steps', ['--gin.TRAIN_STEPS=-1'], ['total_steps', '-1'], None),
  _Row('an evaluation every -1 steps', ['--gin.EVAL_PERIOD=-1'], ['eval_period', '-1'], None),
  _Row(
    'rows that do not divide over the devices',
    ['--gin.BATCH_SIZE=12'],
    ['12', '8'],
    [
      _Remedy(r'Use (\d+)', r'--gin.BATCH_SIZE=\1'),
      _Remedy(r' or (\d+), ', r'--gin.BATCH_SIZE=\1'),
      _Remedy(
        r'or more model partitions\.',
        r'--gin.BATCH_SIZE=12 --gin.partitioning.PjitPartitioner.num_partitions=2',
      ),
    ],
  ),
  _Row(
    'rows that do not divide over micro-batches',
    ['--gin.trainer.Trainer.num_microbatches=3'],
    ['64', '3'],
    [
      _Remedy(
        r'Set (BATCH_SIZE) to a multiple of 24, for instance (\d+) or \d+\.',
        r'--gin.trainer.Trainer.num_microbatches=3 --gin.\1=\2',
      )
    ],
  ),
  _Row(
    'a missing feature length',
    ["--gin.TASK_FEATURE_LENGTHS={'inputs': 64}"],
    ['targets'],
    [
      _Remedy(
        r"Add ('targets'): <number of ids>\.",
        r'''--gin.TASK_FEATURE_LENGTHS="{'inputs': 64, \1: 12}"''',
      )
    ],
  ),
  _Row(
    'an unknown feature length',
    ["--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 12, 'target': 3}"],
    ["'target'"],
    [
      _Remedy(
        r"Did you mean '([^']+)'\?", r'''--gin.TASK_FEATURE_LENGTHS="{'inputs': 64, '\1': 3}"'''
      )
    ],
  ),
  _Row(
    'a feature length of 0',
    ["--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 0}"],
    ["'targets'", '0'],
    None,
  ),
  _Row(
    'an unknown task',
    ['--gin.MIXTURE_OR_TASK_NAME=python_keyword_close'],
    ["Did you mean 'python_keyword_cloze'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'--gin.MIXTURE_OR_TASK_NAME=\1')],
  ),
  _Row(
    'an unknown split',
    ['--gin.train/data.DatasetConfig.split=trian'],
    ["'trian'", "Did you mean 'train'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'--gin.train/data.DatasetConfig.split=\1')],
  ),
  _Row(
    'an unknown evaluation split',
    ['--gin.infer_eval/data.DatasetConfig.split=valid'],
    ["'valid'"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'--gin.infer_eval/data.DatasetConfig.split=\1')],
  ),
  _Row(
    'an unknown source',
    ['--gin.DATA_SOURCE=buildin'],
    ["Did you mean 'builtin'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'--gin.DATA_SOURCE=\1')],
  ),
  _Row(
    'an unknown module',
    ['--gin.MIXTURE_OR_TASK_MODULE=my_absent_tasks'],
    ["'my_absent_tasks'"],
    [
      _Remedy(
        r'Install it, or run the command in its folder, or add the folder to (PYTHONPATH)\.',
        r'\1=MODULES --gin.MIXTURE_OR_TASK_MODULE=my_absent_tasks',
      )
    ],
  ),
  _Row(
    'a vocabulary larger than the embedding',
    ['--gin.network.T5Config.vocab_size=256'],
    ['384', '256'],
    [
      _Remedy(r"Increase (vocab_size) in the network's config, ", r'--gin.network.T5Config.\1=384'),
      _Remedy(
        r'or use a smaller vocabulary\.',
        r'--gin.network.T5Config.vocab_size=256 '
        r"--gin.VOCABULARY='@vocabularies.PassThroughVocabulary()' "
        r'--gin.vocabularies.PassThroughVocabulary.size=256',
      ),
    ],
  ),
  _Row(
    'an initial checkpoint without its macro',
    ['--gin.INITIAL_CHECKPOINT_PATH=x'],
    ["'INITIAL_CHECKPOINT_PATH' is not used", 'runs/finetune.gin and'],
    [
      _Remedy(
        r'(runs/finetune\.gin) and',
        r"""--gin_file=\1 --gin.MIXTURE_OR_TASK_NAME=python_keyword_cloze --gin.TRAIN_STEPS=10 """
        r"""--gin.TASK_FEATURE_LENGTHS="{'inputs': 64, 'targets': 12}" --gin.BATCH_SIZE=64 """
        r"""--gin.INITIAL_CHECKPOINT_PATH=x""",
      ),
      _Remedy(
        r'(runs/continue_pretrain\.gin) use it\.',
        r"""--gin_file=\1 --gin.MIXTURE_OR_TASK_NAME=python_keyword_cloze --gin.TRAIN_STEPS=10 """
        r"""--gin.TASK_FEATURE_LENGTHS="{'inputs': 64, 'targets': 12}" --gin.BATCH_SIZE=64 """
        r"""--gin.INITIAL_CHECKPOINT_PATH=x""",
      ),
      _Remedy(
        r'With other files, add (--gin\.\S+ --gin\.\S+ --gin\.\S+=specific)\.',
        r'--gin.INITIAL_CHECKPOINT_PATH=x \1',
      ),
    ],
  ),
  _Row(
    'an unknown restore path',
    'train --gin_file=recipes/keyword_cloze.gin --gin_file=runs/finetune.gin '
    '--gin.INITIAL_CHECKPOINT_PATH=no/such/checkpoint_5 --gin.MIXTURE_OR_TASK_NAME=python_keyword_cloze '
    '--gin.DATA_SOURCE=builtin --gin.TRAIN_STEPS=10 --gin.BATCH_SIZE=64 --gin.MODEL_DIR=RUN '
    "--gin.TASK_FEATURE_LENGTHS=\"{'inputs': 64, 'targets': 12}\"",
    ['no/such/checkpoint_5'],
    None,
  ),
  _Row(
    'mesh options that contradict',
    [
      '--gin.partitioning.PjitPartitioner.model_parallel_submesh=(1, 4)',
      '--gin.partitioning.PjitPartitioner.num_partitions=2',
    ],
    ['num_partitions', 'model_parallel_submesh'],
    None,
  ),
  _Row(
    'a mesh of more than the devices',
    ['--gin.partitioning.PjitPartitioner.num_partitions=3'],
    ['3', '8'],
    None,
  ),
  _Row(
    'a policy and a binding that replaces it',
    ['--gin.NON_FINITE_POLICY=skip', '--gin.trainer.NonFinitePolicy.action=stop'],
    [
      '--gin.NON_FINITE_POLICY=skip has no effect: --gin.trainer.NonFinitePolicy.action=stop replaces'
    ],
    [
      _Remedy(r'Remove one of the two\.', r'--gin.NON_FINITE_POLICY=skip'),
      _Remedy(r'Remove one of the two\.', r'--gin.trainer.NonFinitePolicy.action=stop'),
    ],
  ),
  _Row(
    'a norm of zero',
    ['--gin.GRADIENT_CLIP_NORM=0'],
    ['`Trainer.gradient_clip_norm` must be a number > 0 or None, got 0'],
    [
      _Remedy(r'(1\.0) is usual; ', r'--gin.GRADIENT_CLIP_NORM=\1'),
      _Remedy(r'(None) does not clip\.', r'--gin.GRADIENT_CLIP_NORM=\1'),
    ],
  ),
  _Row(
    'two learning rates',
    ['--gin.optimizers.adamw.learning_rate=0.1'],
    ['learning_rate'],
    [
      _Remedy(r'Remove learning_rate from the optimizer, ', r''),
      _Remedy(
        r'or set `(Trainer\.learning_rate_fn)` to (None)\.',
        r'--gin.optimizers.adamw.learning_rate=0.1 --gin.trainer.\1=\2',
      ),
    ],
  ),
  _Row(
    'use_cached without seqio',
    ['--gin.USE_CACHED_TASKS=True'],
    ['use_cached', 'source'],
    [_Remedy(r'Set use_cached = (False)\.', r'--gin.USE_CACHED_TASKS=\1')],
  ),
  _Row(
    'best checkpoints by no metric',
    ['--gin.checkpoints.SaveCheckpointConfig.keep_best=2'],
    ['keep_best', 'metric_name_to_monitor'],
    [
      _Remedy(
        r"Set both, e\.g\. (keep_best=3), (metric_name_to_monitor='\S+')\.",
        r'--gin.checkpoints.SaveCheckpointConfig.\1 --gin.checkpoints.SaveCheckpointConfig.\2',
      )
    ],
  ),
  _Row(
    'an unknown activation',
    ["--gin.network.T5Config.mlp_activations=('gelu', 'liner')"],
    ["'liner'"],
    [
      _Remedy(
        r"Did you mean '([^']+)'\?", r'''"--gin.network.T5Config.mlp_activations=('gelu', '\1')"'''
      )
    ],
  ),
  _Row(
    'an unknown dtype',
    ['--gin.network.T5Config.dtype=bfloat61'],
    ["'bfloat16'"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'--gin.network.T5Config.dtype=\1')],
  ),
  _Row(
    'an unknown remat policy',
    ['--gin.network.T5Config.remat_policy=minimum'],
    ["'minimal'"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'--gin.network.T5Config.remat_policy=\1')],
  ),
  _Row(
    'a constant in capitals',
    ['--gin.PACK=TRUE'],
    ['--gin.PACK=True'],
    [_Remedy(r'Write (--gin\.PACK=True), or \S+ for a string\.', r'\1')],
  ),
  _Row(
    'two statements in a flag',
    ['--gin.TRAIN_STEPS=5\nBATCH_SIZE = 8'],
    ['2 statements'],
    [
      _Remedy(r'Write one flag each, ', '--gin.TRAIN_STEPS=5 --gin.BATCH_SIZE=8'),
      _Remedy(r'or (--gin_bindings)=TEXT\.', '\\1="TRAIN_STEPS=5\nBATCH_SIZE = 8"'),
    ],
  ),
  _Row(
    'a value nested too deeply',
    [f'--gin.TASK_FEATURE_LENGTHS={"[" * 500}{"]" * 500}'],
    ['nested too deeply'],
    [
      _Remedy(
        r'Close brackets earlier\.',
        r'''--gin.TASK_FEATURE_LENGTHS="{'inputs': 64, 'targets': 12}"''',
      )
    ],
  ),
  _Row(
    'a macro made of itself',
    ['--gin.TRAIN_STEPS=%TRAIN_STEPS'],
    ['TRAIN_STEPS -> TRAIN_STEPS'],
    [_Remedy(r'Set one of them to a value\.', r'--gin.TRAIN_STEPS=5')],
  ),
  _Row(
    'two objects made of each other',
    [
      '--gin.OPTIMIZER=@optimizers.chain()',
      '--gin.optimizers.chain.transformations=[@optimizers.schedule_free()]',
      '--gin.optimizers.schedule_free.base_optimizer=@optimizers.chain()',
    ],
    ['is an argument of itself: ', 'optimizers.chain -> ', 'optimizers.schedule_free'],
    [
      _Remedy(
        r'Bind something else to one of them\.',
        r"--gin.OPTIMIZER='@optimizers.chain()' "
        r"--gin.optimizers.chain.transformations='[@optimizers.schedule_free()]' "
        r"--gin.optimizers.schedule_free.base_optimizer='@optimizers.sgd()'",
      )
    ],
  ),
  _Row(
    'None for a required object',
    ['--gin.MODEL=None'],
    ['must be BaseModel', 'NoneType'],
    [_Remedy(r'Remove it and add a file that sets it, e\.g\. (--gin_file=\S+)\.', r'\1')],
  ),
  _Row(
    'a string for an object',
    ['--gin.MODEL=t5'],
    ['must be BaseModel', "'t5'"],
    [_Remedy(r'Remove it and add a file that sets it, e\.g\. (--gin_file=\S+)\.', r'\1')],
  ),
  _Row(
    'an object of another kind',
    ['--gin.MODEL=@optimizers.adamw()'],
    ['must be of type BaseModel', 'OptaxWrapper'],
    None,
  ),
  _Row(
    'a function instead of its result',
    ['--gin.trainer.Trainer.learning_rate_fn=@schedules.create_learning_rate_scheduler'],
    ["Write --gin.trainer.Trainer.learning_rate_fn='@schedules.create_learning_rate_scheduler()'."],
    [_Remedy(r'Write (--gin\S+)\.$', r'\1')],
  ),
  _Row(
    'a number for a schedule',
    ['--gin.trainer.Trainer.learning_rate_fn=0.1'],
    ['LearningRateCallable', 'float'],
    [_Remedy(r'For a constant rate, write (--gin\S+ --gin\S+ --gin\S+)\.$', r'\1')],
  ),
  _Row(
    'an instance for its class',
    ['--gin.train_script.train.trainer_cls=@trainer.Trainer()'],
    ['Write --gin.train_script.train.trainer_cls=@trainer.Trainer without ().'],
    [_Remedy(r'Write (--gin\S+) without \(\)\.', r'\1')],
  ),
  _Row(
    'another class for a trainer',
    ['--gin.train_script.train.trainer_cls=@data.DatasetConfig'],
    ['`trainer_cls` must be a function of (model=, train_state=, ', 'got DatasetConfig: '],
    [
      _Remedy(
        r'Change its parameters, or bind them\.',
        r'--gin.train_script.train.trainer_cls=@trainer.Trainer',
      )
    ],
  ),
  _Row(
    'no optimizer',
    ['--gin.OPTIMIZER=None'],
    ['optimizer_def', 'optimizers.adamw()'],
    [
      _Remedy(
        r'the result of optimizers\.adamw\(\), got None\. Set OPTIMIZER, e\.g\. (--gin\S+)\.', r'\1'
      )
    ],
  ),
  _Row(
    'an optimizer that is not called',
    ['--gin.OPTIMIZER=@optimizers.adamw'],
    ['optimizer_def', 'OptimizerDef'],
    [_Remedy(r'Call it with parentheses, e\.g\. (--gin\S+)\.', r'\1')],
  ),
  _Row(
    'no vocabulary',
    ['--gin.VOCABULARY=None'],
    ['`input_vocabulary` must be a vocabulary', 'ByteVocabulary'],
    [_Remedy(r'Set VOCABULARY, e\.g\. (--gin\S+)\.', r'\1')],
  ),
  _Row('no task', ['--gin.MIXTURE_OR_TASK_NAME=None'], ['mixture_or_task_name', 'None'], None),
  _Row(
    'a file for a module',
    ['--gin.MIXTURE_OR_TASK_MODULE=tasks.py'],
    ['tasks.py', 'Omit the suffix .py'],
    [
      _Remedy(
        r'Install it, or run the command in its folder, or add the folder to (PYTHONPATH)\. '
        r'Omit the suffix \.py\.',
        r'\1=MODULES --gin.MIXTURE_OR_TASK_MODULE=my_absent_tasks',
      )
    ],
  ),
  _Row('an empty module', ['--gin.MIXTURE_OR_TASK_MODULE=""'], ['module` must be', "got ''"], None),
  _Row(
    'no lengths',
    ['--gin.TASK_FEATURE_LENGTHS={}'],
    ['task_feature_lengths` must be', 'got {}'],
    None,
  ),
  _Row(
    'more positions than an array has',
    ['--gin.BATCH_SIZE=800000000000'],
    ['800000000000', '2**31 - 1'],
    None,
  ),
  _Row(
    'more steps than a counter holds',
    ['--gin.TRAIN_STEPS=99999999999'],
    ['99999999999', '2147483648'],
    None,
  ),
  _Row(
    'a vocabulary of no machine',
    ['--gin.network.T5Config.vocab_size=100000000000'],
    ['vocab_size'],
    None,
  ),
  _Row('a negative rate', ['--gin.LEARNING_RATE=-1.0'], ['base_learning_rate`', 'got -1.0'], None),
  _Row('an infinite rate', ['--gin.LEARNING_RATE=1e999'], ['base_learning_rate`', 'got inf'], None),
  _Row('a seed of too many bits', ['--gin.RANDOM_SEED=99999999999999'], ['random_seed'], None),
  _Row(
    'a model of no layers',
    ['--gin.network.T5Config.num_encoder_layers=0'],
    ['num_encoder_layers', '0'],
    None,
  ),
  _Row(
    'a string as a constant of a string option',
    ['--gin.MIXTURE_OR_TASK_MODULE=true'],
    ['not a valid gin value'],
    [_Remedy(r'Write \S+, or (\S+) for a string\.', r'\1')],
  ),
  _Row(
    'factors in a list',
    ["--gin.schedules.create_learning_rate_scheduler.factors=['constant', 'cosine_decay']"],
    ['factors'],
    [_Remedy(r'Write (--gin\S+=.constant \* cosine_decay.)\.', r'\1')],
  ),
  _Row(
    'a number for factors',
    ['--gin.schedules.create_learning_rate_scheduler.factors=3'],
    ['factors'],
    [_Remedy(r'Write (--gin\S+)\.$', r'\1')],
  ),
  _Row(
    'a call without @',
    ['--gin.OPTIMIZER=optimizers.adamw()'],
    ['OPTIMIZER'],
    [
      _Remedy(
        r'a call must begin with @\. Write (--gin\.OPTIMIZER=\S+), or \S+ for a string\.', r'\1'
      )
    ],
  ),
  _Row(
    'a class without @',
    ['--gin.MODEL=models.EncoderDecoderModel()'],
    ['MODEL'],
    [_Remedy(r'a call must begin with @\. Write (--gin\.MODEL=\S+), or \S+ for a string\.', r'\1')],
  ),
  _Row(
    'the argument --TRAIN_STEPS=5',
    ['--TRAIN_STEPS=5'],
    ['--gin.TRAIN_STEPS=5'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument --learning_rate=0.1',
    ['--learning_rate=0.1'],
    ['--gin.LEARNING_RATE=0.1'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument --lr=0.1',
    ['--lr=0.1'],
    ['--gin.LEARNING_RATE=0.1'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument --batch-size=8',
    ['--batch-size=8'],
    ['--gin.BATCH_SIZE=8'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument --optimizers.adamw.b1=0.8',
    ['--optimizers.adamw.b1=0.8'],
    ['--gin.optimizers.adamw.b1=0.8'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument gin.TRAIN_STEPS=5',
    ['gin.TRAIN_STEPS=5'],
    ['--gin.TRAIN_STEPS=5'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument TRAIN_STEPS=5',
    ['TRAIN_STEPS=5'],
    ['--gin.TRAIN_STEPS=5'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument -gin.TRAIN_STEPS=5',
    ['-gin.TRAIN_STEPS=5'],
    ['--gin.TRAIN_STEPS=5'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument --gin-TRAIN_STEPS=5',
    ['--gin-TRAIN_STEPS=5'],
    ['--gin.TRAIN_STEPS=5'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument train/data.DatasetConfig.seed=5',
    ['train/data.DatasetConfig.seed=5'],
    ['--gin.train/data.DatasetConfig.seed=5'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument gin_file=optimizers/lion.gin',
    ['gin_file=optimizers/lion.gin'],
    ['--gin_file=optimizers/lion.gin'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument optimizers/lion.gin',
    ['optimizers/lion.gin'],
    ['--gin_file=optimizers/lion.gin'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument --max_steps=5',
    ['--max_steps=5'],
    ['--gin.TRAIN_STEPS=5'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument --num_train_epochs=3',
    ['--num_train_epochs=3'],
    ['--gin.NUM_EPOCHS=3'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'the argument --save_steps=5',
    ['--save_steps=5'],
    ['--gin.SAVING_PERIOD=5'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'a value after a space',
    ['--TRAIN_STEPS', '5'],
    ['--gin.TRAIN_STEPS=5'],
    [_Remedy(r'Did you mean (\S+)\?', r'\1')],
  ),
  _Row(
    'a dict after a space',
    ['--TASK_FEATURE_LENGTHS', "{'inputs': 64, 'targets': 12}"],
    ['TASK_FEATURE_LENGTHS'],
    [_Remedy(r'Did you mean (.*)\?', r'\1')],
  ),
  _Row(
    'a flag of gin with a space',
    ['--gin.TRAIN_STEPS', '5'],
    ['requires a value'],
    [_Remedy(r'Write (\S+)\.', r'\1')],
  ),
  _Row(
    'a flag of gin without a value',
    ['--gin.TRAIN_STEPS'],
    ['requires a value'],
    [_Remedy(r'Write (--gin.TRAIN_STEPS)=VALUE\.', r'\1=5')],
  ),
  _Row(
    'a macro of a file',
    ['--gin.NUM_PARTITIONS=2'],
    ['NUM_PARTITIONS'],
    [
      _Remedy(
        r'Add a file that uses it, e\.g\. (--gin_file=partitioning/\w+.gin)\.',
        r'\1 --gin.NUM_PARTITIONS=2',
      )
    ],
  ),
  _Row(
    'keys without quotes',
    ['--gin.TASK_FEATURE_LENGTHS={inputs: 64, targets: 12}'],
    ['TASK_FEATURE_LENGTHS'],
    [_Remedy(r'Write (--gin.TASK_FEATURE_LENGTHS=.*)\.$', r'\1')],
  ),
  _Row(
    'keys without quotes and spaces',
    ['--gin.TASK_FEATURE_LENGTHS={inputs:64,targets:12}'],
    ['TASK_FEATURE_LENGTHS'],
    [_Remedy(r'Write (--gin.TASK_FEATURE_LENGTHS=.*)\.$', r'\1')],
  ),
  _Row(
    'FALSE',
    ['--gin.PACK=FALSE'],
    ['--gin.PACK=False'],
    [_Remedy(r'Write (--gin.PACK=False), or \S+ for a string\.', r'\1')],
  ),
  _Row(
    'null',
    ['--gin.NUM_EPOCHS=null'],
    ['--gin.NUM_EPOCHS=None'],
    [_Remedy(r'Write (--gin.NUM_EPOCHS=None), or \S+ for a string\.', r'\1')],
  ),
  _Row(
    'a float of an integer',
    ['--gin.checkpoints.SaveCheckpointConfig.period=2.0'],
    ['Write 2'],
    [_Remedy(r'Write (2)\.', r'--gin.checkpoints.SaveCheckpointConfig.period=\1')],
  ),
  _Row('16 bits', ['--fp16'], ['dtype'], [_Remedy(r'Set (--gin\S+=bfloat16), which .*', r'\1')]),
  _Row('bfloat16', ['--bf16'], ['dtype'], [_Remedy(r'Set (--gin\S+=bfloat16)\.', r'\1')]),
  _Row(
    'rows of one device',
    ['--per_device_train_batch_size=8'],
    ['of all devices'],
    [_Remedy(r'set (--gin.BATCH_SIZE)=N\.', r'\1=8')],
  ),
  _Row(
    'a configuration',
    ['--config=optimizers/lion.gin'],
    ['--gin_file'],
    [_Remedy(r'Write (--gin_file)=FILE\.', r'\1=optimizers/lion.gin')],
  ),
  _Row(
    'a flag to resume',
    ['--resume_from_checkpoint'],
    ['resumes by itself'],
    [_Remedy(r'leave out the flag\.', r'')],
  ),
  _Row('an unknown flag', ['--frobnicate'], ['Values are set by --gin.NAME=VALUE'], None),
  _Row(
    'an optimizer alone',
    'train --gin_file=optimizers/lion.gin',
    ['configure no run'],
    [_RECIPE_REMEDY],
  ),
  _Row(
    'a mesh alone',
    'train --gin_file=partitioning/2d.gin',
    ['configure no run'],
    [_RECIPE_REMEDY],
  ),
  _Row(
    'a model alone',
    'train --gin_file=models/byt5_small.gin',
    ['configure no run'],
    [_RECIPE_REMEDY],
  ),
  _Row(
    'a model and a value alone',
    'train --gin_file=models/byt5_small.gin --gin.DROPOUT_RATE=0.0',
    ['configure no run'],
    [_RECIPE_REMEDY],
  ),
  _Row(
    'required values',
    'train --gin_file=runs/pretrain.gin',
    [
      '5 required values',
      'MIXTURE_OR_TASK_NAME: ',
      'MODEL: ',
      'TASK_FEATURE_LENGTHS: ',
      'TRAIN_STEPS: ',
    ],
    [
      _Remedy(
        r'(?s)(?=.*set (--gin.MIXTURE\S+))(?=.*add a model, e\.g\. (--gin_file=\S+))(?=.*set '
        r'(--gin.MODEL_DIR=\S+))(?=.*set (--gin.TASK\S+ [^(]+))(?=.*set (--gin.TRAIN\S+)).*',
        r'train --gin_file=runs/pretrain.gin \1 \2 \3 \4 \5 --gin.DROPOUT_RATE=0 --gin.EVAL_PERIOD=-1',
      )
    ],
  ),
  _Row(
    'a command of MoE',
    'moe report runs/x',
    ['python -m moe'],
    [_Remedy(r'Did you mean `(.*)`\?', r'\1')],
  ),
  _Row(
    'a recipe for a command',
    'recipes/keyword_cloze.gin --gin.EVAL_PERIOD=-1 --gin.MODEL_DIR=RUN',
    ['is not a command'],
    [_Remedy(r'Did you mean `t5x_lite (.*)`\?', r'\1')],
  ),
  _Row(
    'no command',
    '--gin_file=recipes/keyword_cloze.gin --gin.EVAL_PERIOD=-1 --gin.MODEL_DIR=RUN',
    ['command is missing'],
    [_Remedy(r'Did you mean `t5x_lite (.*)`\?', r'\1')],
  ),
  _Row(
    'a synonym of a command',
    'evaluate runs/x',
    ['is not a command'],
    [_Remedy(r"Did you mean '([^']+)'\?", r'\1 runs/x')],
  ),
  _Row(
    'the format hf',
    'convert a b --to=hf',
    ["Did you mean 'hugging_face'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'convert a b --to=\1')],
  ),
  _Row(
    'an export to hf',
    'export runs/x --to=hf',
    ['it writes programs'],
    [_Remedy(r'To write parameters in another format, write `t5x_lite (.*)`\.', r'\1')],
  ),
  _Row(
    'the format HuggingFace',
    'convert a b --to=HuggingFace',
    ["Did you mean 'hugging_face'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'convert a b --to=\1')],
  ),
  _Row(
    'an export to HuggingFace',
    'export runs/x --to=HuggingFace',
    ['it writes programs'],
    [_Remedy(r'To write parameters in another format, write `t5x_lite (.*)`\.', r'\1')],
  ),
  _Row(
    'the format transformers',
    'convert a b --to=transformers',
    ["Did you mean 'hugging_face'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'convert a b --to=\1')],
  ),
  _Row(
    'an export to transformers',
    'export runs/x --to=transformers',
    ['it writes programs'],
    [_Remedy(r'To write parameters in another format, write `t5x_lite (.*)`\.', r'\1')],
  ),
  _Row(
    'the format hugging-face',
    'convert a b --to=hugging-face',
    ["Did you mean 'hugging_face'?"],
    [_Remedy(r"Did you mean '([^']+)'\?", r'convert a b --to=\1')],
  ),
  _Row(
    'an export to hugging-face',
    'export runs/x --to=hugging-face',
    ['it writes programs'],
    [_Remedy(r'To write parameters in another format, write `t5x_lite (.*)`\.', r'\1')],
  ),
  _Row(
    'an export to a format after a space',
    'export runs/x --to hf',
    ['it writes programs'],
    [_Remedy(r'To write parameters in another format, write `t5x_lite (.*)`\.', r'\1')],
  ),
  _Row(
    'a missing platform',
    'JAX_PLATFORMS=gpu train --gin_file=recipes/keyword_cloze.gin '
    '--gin.DATA_SOURCE=builtin --gin.MODEL_DIR=RUN --dry_run',
    ['JAX_PLATFORMS must name'],
    [
      _Remedy(
        r'Unset JAX_PLATFORMS, or set (JAX_PLATFORMS=cpu), or install JAX for this platform with `.*`\.',
        r'\1 train --gin_file=recipes/keyword_cloze.gin --gin.DATA_SOURCE=builtin '
        r'--gin.MODEL_DIR=RUN --gin.EVAL_PERIOD=-1',
      )
    ],
  ),
  _Row(
    'a file that includes itself',
    [_File(b"include 'mine.gin'\n")],
    ['includes itself'],
    [_Remedy(r'Remove one of these includes\.', _File(b'TRAIN_STEPS = 5\n'))],
  ),
  _Row(
    'a misspelt import of gin',
    [_File(b'from __gin__ import dynamic_registrations\n')],
    ['from __gin__ import dynamic_registration`'],
    [_Remedy(r'Write `(from __gin__ import dynamic_registration)`\.', _File(b'\\1\n'))],
  ),
  _Row(
    'an import of names of __main__',
    [_File(b'from __gin__ import dynamic_registration\nfrom __main__ import train\n')],
    ['`import __main__ as NAME`'],
    [
      _Remedy(
        r'Write `import __main__ as NAME`, and NAME\.train for this one\.',
        _File(b'from __gin__ import dynamic_registration\nimport __main__ as NAME\n'),
      )
    ],
  ),
  _Row(
    'a name that a file does not import',
    [_File(b'from __gin__ import dynamic_registration\nnetwork.T5Config.emb_dim = 8\n')],
    ['not imported by this file'],
    [
      _Remedy(
        r'Add `(from \S+ import network)` ',
        _File(b'from __gin__ import dynamic_registration\n\\1\nnetwork.T5Config.emb_dim = 8\n'),
      ),
      _Remedy(
        r'or `(from \S+ import network)`\.',
        _File(b'from __gin__ import dynamic_registration\n\\1\nnetwork.T5Config.emb_dim = 8\n'),
      ),
    ],
  ),
  _Row(
    'macros of a file made of each other',
    [_File(b'A = %B\nB = %A\nTRAIN_STEPS = %A\n')],
    ['is defined by itself'],
    [_Remedy(r'Set one of them to a value\.', _File(b'A = %B\nB = 5\nTRAIN_STEPS = %A\n'))],
  ),
  _Row(
    'a file that is not text',
    [_File(b'TRAIN_STEPS = 5 # \xff')],
    ["can't decode byte"],
    [_Remedy(r'Save it as UTF-8\.', _File('TRAIN_STEPS = 5 # \u00ff'.encode()))],
  ),
  _Row(
    'a syntax error of a file',
    [_File(b"include 'recipes/keyword_cloze.gin'\n\nTRAIN_STEPS == 5\n")],
    ['mine.gin:3: not gin syntax'],
    None,
  ),
  _Row(
    'a macro without % in a file',
    [_File(b"include 'recipes/keyword_cloze.gin'\nEVAL_PERIOD = TRAIN_STEPS\n")],
    ["'TRAIN_STEPS' for a string"],
    [
      _Remedy(
        'Write EVAL_PERIOD = %TRAIN_STEPS for the macro',
        _File(b"include 'recipes/keyword_cloze.gin'\nEVAL_PERIOD = %TRAIN_STEPS\n"),
      )
    ],
  ),
]


def _run(capsys, tmp_path, words):
  """Run a command line and return the status and standard error; with variables of the"""
  """environment, as a process."""
  places = {'RUN': str(tmp_path / 'run'), 'MODULES': str(tmp_path / 'modules')}
  words = [re.sub(r'(?<==)(RUN|MODULES)$', lambda found: places[found[0]], word) for word in words]
  environment = {}
  while re.match(r'[A-Z_]+=', words[0]) and words[1:]:
    name, _, value = words.pop(0).partition('=')
    environment[name] = value
  if not environment and words[0] != 'python':
    return cli.main(words), capsys.readouterr().err
  if words[0] == 'python':
    words = words[1:]
  else:
    words = ['-m', 't5x_lite', *words]
  path = os.pathsep.join(filter(None, [str(_ROOT), environment.get('PYTHONPATH')]))
  done = subprocess.run(
    [sys.executable, *words],
    env=os.environ | environment | {'PYTHONPATH': path},
    capture_output=True,
    text=True,
    check=False,
  )
  return done.returncode, done.stderr


def _message(capsys, tmp_path, words):
  status, err = _run(capsys, tmp_path, words)
  assert status == errors.ExitCode.INVALID_INPUT == 2, err
  assert 'Traceback' not in err and ': error: ' in err
  # Log lines, such as that of bindings that a flag takes away from a recipe, are before the error.
  return err[err.index(': error: ') :].strip()


def _train(tmp_path, flags, late):
  """Return the command line of a training whose last error is `late`.

  Args:
    tmp_path: folder for its files.
    flags: flags, a file, or flags after variables of the environment.
    late: flag that is rejected after other flags, or the name of a run directory.
  """
  if isinstance(flags, _File):
    flags = [flags]
  if flags and isinstance(flags[0], _File):
    (tmp_path / 'mine.gin').write_bytes(flags[0].text)
    flags = [f'--gin_file={tmp_path / "mine.gin"}']
  flags = list(flags)
  environment = []
  while flags and re.match(r'PYTHONPATH=', flags[0]):
    environment.append(flags.pop(0))
  run = tmp_path / 'run'
  added = [late]
  if not late.startswith('--'):
    run = tmp_path / late / 'run'
    # Fewer layers are traced faster.
    added = [f'--gin.network.T5Config.num_{each}_layers=1' for each in ('encoder', 'decoder')]
  return [*environment, 'train', *_RECIPE, *flags, *added, f'--gin.MODEL_DIR={run}']


# Errors that come after others: of a flag, which is cheap, and of the run directory of another model, which comes after
# all errors of flags. A remedy works if the command with it ends with such an error.
_LATE_ERRORS = {
  '--gin.EVAL_PERIOD=-1': '`train.eval_period` must be an integer >= 0 or None, got -1',
  'other_model': 'stored (8,), wanted (64,)',
}


@pytest.mark.parametrize('row', _ROWS, ids=[row.what for row in _ROWS])
def test_rejected(capsys, tmp_path, row):
  (tmp_path / 'modules').mkdir()
  (tmp_path / 'modules' / 'my_absent_tasks.py').write_text('')
  message = ''
  late = ''
  if isinstance(row.flags, str):
    message = _message(capsys, tmp_path, shlex.split(row.flags))
  else:
    for late in _LATE_ERRORS:
      if not late.startswith('--'):
        _save_a_run(tmp_path / late)
      message = _message(capsys, tmp_path, _train(tmp_path, row.flags, late))
      if _has(message, row.fragments):
        break
  assert _has(message, row.fragments), message
  assert len(message) < 700 and len(message.splitlines()) <= 8
  assert not (tmp_path / 'run').exists()  # Rejected before anything was written.
  if not late.startswith('--') and late:
    assert not {path.name for path in (tmp_path / late / 'run').iterdir()} - {
      '.lock',
      'checkpoint_2',
    }
  rest = message
  found = []
  for remedy in row.remedies or []:
    found.append(re.search(remedy.pattern, message))
    assert found[-1], (remedy.pattern, message)
    rest = rest.replace(found[-1][0], '')
  assert not _PROPOSES.search(rest), f'The table has no remedy for: {rest}'
  for match, remedy in zip(found, row.remedies or [], strict=True):
    if isinstance(remedy.line, _File):
      line = _File(match.expand(remedy.line.text.decode()).encode())
    else:
      line = _shell_words(match.expand(remedy.line))
    if late:
      after = _message(capsys, tmp_path, _train(tmp_path, line, late))
      assert _LATE_ERRORS[late] in after, after
    else:
      _, after = _run(capsys, tmp_path, line)
      assert not _has(after, row.fragments) and 'Did you mean' not in after, after
      assert 'Traceback' not in after


def _shell_words(line):
  """Return the words of a command line, as a shell reads them."""
  lexer = shlex.shlex(line, posix=True, punctuation_chars='();<>|&*?[]{}$`!')
  lexer.whitespace_split = True
  lexer.commenters = ''
  words = shlex.split(line)
  # This lexer separates special characters, unless they are quoted.
  assert list(lexer) == words, f'Not quoted for a shell: {line}'
  return words


@pytest.mark.parametrize('line', ['--gin.A=@b()', '--gin.A=[1]', 'a; b', '--gin.A={1: 2}', '$A'])
def test_special_characters_of_a_shell_are_found(line):
  with pytest.raises(AssertionError, match='Not quoted'):
    _shell_words(line)
  assert _shell_words(shlex.quote(line)) == [line]


def _has(message, fragments):
  return all(fragment in message for fragment in fragments)


def test_a_misspelt_macro_of_a_file_is_warned_of(capsys, tmp_path):
  (tmp_path / 'mine.gin').write_bytes(
    b'\xef\xbb\xbfTRIAN_STEPS = 5\n'
  )  # also: a byte order mark does no harm
  message = _error_of_any(
    capsys,
    [
      *_RECIPE,
      f'--gin_file={tmp_path / "mine.gin"}',
      '--gin.TRAIN_STEPS=0',
      f'--gin.MODEL_DIR={tmp_path / "run"}',
    ],
  )
  assert 'warning: ' in message
  assert "mine.gin:1: the macro 'TRIAN_STEPS' is not used. Did you mean 'TRAIN_STEPS'?" in message


def _error_of_any(capsys, argv):
  assert cli.main(['train', *argv]) == 2
  err = capsys.readouterr().err
  assert 'Traceback' not in err
  return err


@pytest.mark.parametrize('path', ['', 'a\0b', 'a\udcff'])
def test_model_directories_with_no_name(capsys, tmp_path, monkeypatch, path):
  monkeypatch.chdir(tmp_path)
  _error_of_any(capsys, [*_RECIPE, f'--gin.MODEL_DIR={path!r}'])
  assert not list(tmp_path.iterdir())


def test_a_rejected_run_leaves_no_parent_folder(capsys, tmp_path):
  _error_of_any(
    capsys,
    [*_RECIPE, f'--gin.MODEL_DIR={tmp_path / "a" / "b"}', '--gin.MIXTURE_OR_TASK_NAME=none_such'],
  )
  assert not list(tmp_path.iterdir())


def _save_a_run(tmp_path):
  """Write a checkpoint as a run of the recipe's optimizer with another model would."""
  state = {
    'target': {'decoder': {'decoder_norm': {'scale': np.ones(8, np.float32)}}},
    'state': {'step': np.int32(2), 'param_states': {'0': {'count': np.int32(2)}}},
  }
  tmp_path.mkdir(exist_ok=True)
  with checkpoints.CheckpointManager(
    tmp_path / 'run', save_cfg=checkpoints.SaveCheckpointConfig(period=2)
  ) as manager:
    manager.save(2, state, metadata={'param_layout': 't5'})
    manager.wait()


def test_the_directory_of_another_model_is_rejected_before_compiling(capsys, tmp_path):
  _save_a_run(tmp_path)
  before = sorted(path.name for path in (tmp_path / 'run').iterdir())
  message = _error_of_any(capsys, [*_RECIPE, f'--gin.MODEL_DIR={tmp_path / "run"}'])
  assert 'stored (8,), wanted (64,)' in message and 'another MODEL_DIR' in message
  assert (
    'ompil' not in message and sorted(path.name for path in (tmp_path / 'run').iterdir()) == before
  )


def test_fewer_steps_than_were_taken_are_rejected(capsys, tmp_path):
  _save_a_run(tmp_path)
  message = _error_of_any(
    capsys, [*_RECIPE, f'--gin.MODEL_DIR={tmp_path / "run"}', '--gin.TRAIN_STEPS=1']
  )
  assert 'checkpoint_2 is at step 2, past the end of the run at step 1' in message


def test_a_damaged_checkpoint_is_named_to_the_user(capsys, tmp_path):
  _save_a_run(tmp_path)
  (tmp_path / 'run' / 'checkpoint_2' / 'manifest.json').write_text('{')
  message = _error_of_any(capsys, [*_RECIPE, f'--gin.MODEL_DIR={tmp_path / "run"}'])
  assert 'checkpoint_2' in message and 'damaged' in message and 'another MODEL_DIR' in message


def test_a_file_with_the_name_of_a_folder_of_the_run(capsys, tmp_path):
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'train').write_text('a file')
  message = _error_of_any(capsys, [*_RECIPE, f'--gin.MODEL_DIR={tmp_path / "run"}'])
  assert str(tmp_path / 'run' / 'train') in message


def test_control_characters_do_not_break_the_table_of_predictions():
  lines = report.prediction_table([{'targets': 'if', 'prediction': 'a\x00\x1b[2J\r\n\udc80'}])
  assert all(line.isprintable() for line in lines) and r'a\x00\x1b[2J\r\n\udc80' in lines[-1]


@pytest.mark.parametrize('below', [False, True])
def test_a_model_directory_that_cannot_be_one(capsys, tmp_path, below):
  file = tmp_path / 'file'
  file.write_text('a file')
  path = file / 'below' if below else file
  status = cli.main(['train', *_RECIPE, f'--gin.MODEL_DIR={path}'])
  err = capsys.readouterr().err
  assert status == 2 and 'Traceback' not in err and str(path) in err
  assert 'it is a file, or in one' in err and 'Choose another MODEL_DIR' in err


def test_a_model_directory_of_another_scheme_is_rejected(capsys):
  status = cli.main(['train', *_RECIPE, '--gin.MODEL_DIR=ftp://bucket/run'])
  err = capsys.readouterr().err
  assert status == 2 and 'ftp://bucket/run' in err
