"""A task without a validation split or metrics is trained without evaluation, unless one is asked for by name."""

import dataclasses
import json

import pytest

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite.data import vocabularies
from t5x_lite.errors import ConfigError, DataError
from tests.apps.train import toy_run
from tests.models import toy_model

_TRAIN_ONLY = dataclasses.replace(toy_run.TASK, name='train_only', splits=('train',))
_RECORDS = [{'inputs': [5, 4, 3], 'targets': [3, 4, 5]}, {'inputs': [7], 'targets': [7]}]


def _builtin(tmp_path):
  del tmp_path
  return _TRAIN_ONLY


def _file(tmp_path):
  path = tmp_path / 'train.jsonl'
  path.write_text(''.join(json.dumps(record) + '\n' for record in _RECORDS))
  return data.file_task(
    name='train_only',
    splits={'train': str(path)},
    format='jsonl',
    vocabulary=vocabularies.PassThroughVocabulary(size=toy_model.VOCAB_SIZE, eos_id=1),
    metric_fns=[data.exact_match],
  )


def _seqio(tmp_path, splits=('train',)):
  del tmp_path
  seqio = pytest.importorskip('seqio')
  import tensorflow as tf

  def read(split, shuffle_files, seed=None):
    del split, shuffle_files, seed
    return tf.data.Dataset.from_tensor_slices(
      {name: tf.ragged.constant([each[name] for each in _RECORDS]) for name in _RECORDS[0]}
    ).map(lambda example: {name: tf.cast(ids, tf.int32) for name, ids in example.items()})

  feature = seqio.Feature(
    seqio.PassThroughVocabulary(size=toy_model.VOCAB_SIZE, eos_id=1), add_eos=True
  )
  return seqio.Task(
    'train_only',
    source=seqio.FunctionDataSource(read, splits=splits),
    preprocessors=[seqio.preprocessors.append_eos],
    output_features={'inputs': feature, 'targets': feature},
    metric_fns=[],
    shuffle_buffer_size=2,
  )


def _dataset(split, task=_TRAIN_ONLY, source='builtin'):
  return dataclasses.replace(
    toy_run.dataset(split), mixture_or_task_name=task, source=source, pack=False
  )


def _train(tmp_path, task=_TRAIN_ONLY, source='builtin', **kwargs):
  arguments = {
    'train_dataset_cfg': _dataset('train', task, source),
    'train_eval_dataset_cfg': _dataset('validation', task, source),
    'infer_eval_dataset_cfg': _dataset('validation', task, source),
    'verify_matching_vocabs_fn': None,
    **kwargs,
  }
  return toy_run.train(tmp_path / 'run', 2, **arguments)


@pytest.mark.parametrize('has_lengths', [True, False])
@pytest.mark.parametrize(
  'make_task, source',
  [(_builtin, 'builtin'), (_file, 'builtin'), (_file, 'grain'), (_seqio, 'seqio')],
)
def test_it_trains_with_one_log_line(tmp_path, caplog, make_task, source, has_lengths):
  task = make_task(tmp_path)
  evaluated = _dataset('validation', task, source)
  if not has_lengths:
    evaluated = dataclasses.replace(evaluated, task_feature_lengths=None)
  options = {'train_eval_dataset_cfg': evaluated, 'infer_eval_dataset_cfg': evaluated}
  with caplog.at_level('INFO'):
    step, _ = _train(
      tmp_path, task, source, run_eval_before_training=True, infer_eval_period=1, **options
    )
  run = tmp_path / 'run'
  assert step == 2 and (run / 'checkpoint_2').is_dir()
  assert not (run / 'training_eval').exists() and not (run / 'inference_eval').exists()
  lines = [line for line in caplog.messages if 'validation' in line]
  assert lines == [
    "No training_eval and inference_eval during training: 'train_only' has no split 'validation'."
  ]


@pytest.mark.parametrize(
  'make_task, source', [(_builtin, 'builtin'), (_file, 'builtin'), (_seqio, 'seqio')]
)
def test_what_is_asked_for_by_name_is_an_error(tmp_path, make_task, source):
  task = make_task(tmp_path)
  with pytest.raises(DataError, match="'train_only' has no split 'test'. Known names: train"):
    _train(tmp_path, task, source, infer_eval_dataset_cfg=_dataset('test', task, source))
  named = evaluation.Evaluation(name='mine', dataset_cfg=_dataset('validation', task, source))
  with pytest.raises(DataError, match="'train_only' has no split 'validation'"):
    _train(tmp_path, task, source, evaluations=[named])


def test_what_is_asked_for_on_another_task_or_watched_is_an_error(tmp_path):
  another = _dataset('validation', dataclasses.replace(_TRAIN_ONLY, name='another'))
  with pytest.raises(DataError, match="'another' has no split 'validation'"):
    _train(tmp_path, train_eval_dataset_cfg=another)
  monitored = {
    'period': 1,
    'keep': 1,
    'metric_name_to_monitor': 'inference_eval/train_only/exact_match',
  }
  with pytest.raises(ConfigError, match='exact_match'):
    _train(tmp_path, save=monitored)


@pytest.mark.parametrize('source', ['builtin', 'seqio', 'Evaluator'])
def test_a_task_without_metrics_is_not_decoded(tmp_path, caplog, source, request):
  """As in T5X, where infer_eval_dataset_cfg of such a task has no effect."""
  task = dataclasses.replace(toy_run.TASK, name='train_only', metric_fns=())
  options = {}
  if source == 'Evaluator':
    seqio = pytest.importorskip('seqio')
    source = 'seqio'
    task = _seqio(tmp_path, ('train', 'validation'))
    seqio.TaskRegistry.add_provider('train_only', task)
    request.addfinalizer(lambda: seqio.TaskRegistry.remove('train_only'))
    options['inference_evaluator_cls'] = seqio.Evaluator
    options['infer_eval_dataset_cfg'] = _dataset('validation', 'train_only', source)
  elif source == 'seqio':
    task = _seqio(tmp_path, ('train', 'validation'))
  with caplog.at_level('INFO'):
    step, _ = _train(tmp_path, task, source, infer_eval_period=1, **options)
  run = tmp_path / 'run'
  assert step == 2 and (run / 'training_eval').exists() and not (run / 'inference_eval').exists()
  (line,) = [line for line in caplog.messages if 'metrics' in line]
  assert line.startswith("No inference_eval during training: No task of 'train_only' has metrics")
  named = evaluation.Evaluation(
    name='mine', dataset_cfg=_dataset('validation', task, source), decode=True
  )
  with pytest.raises(evaluation.NoMetricsError):
    _train(tmp_path / 'named', task, source, evaluations=[named])
