"""seqio's Evaluator instead of this package's: equal metrics of every kind, its loggers, and invalid configurations."""

import contextlib
import functools
import json
import logging
import time

import jax
import numpy as np
import pytest

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite.data.seqio import evaluator as seqio_evaluator
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import tf
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.evaluation import judging
from t5x_lite.networks import t5
from t5x_lite.storage import files
from t5x_lite.trainer import state_init
from t5x_lite.trainer import summaries
from tests import stores

seqio = pytest.importorskip('seqio')

with quiet():
  from t5.evaluation import metrics as t5_metrics

_VOCABULARY = seqio.ByteVocabulary(extra_ids=125)
_TEXTS = ['if', 'for', 'while', 'x', 'return a', 'yes', 'no', 'def f', 'lambda', 'try', 'i']
_BATCH_SIZE = 4


def _dataset(split, shuffle_files, seed=None):
  del split, shuffle_files, seed
  inputs = [f'{text} ' * (1 + i) for i, text in enumerate(_TEXTS)]
  return tf.data.Dataset.from_tensor_slices(
    {'inputs': inputs, 'targets': _TEXTS, 'label': [i % 2 for i in range(11)]}
  )


def _score_spread(targets, scores):
  return {
    'score_spread': float(np.max(scores) - np.min(scores)),
    'score_sum': seqio.metrics.Scalar(np.sum(scores)),
  }


def _weighted_length(targets, predictions, aux_values):
  lengths = np.array([len(prediction) for prediction in predictions])
  return {'weighted_length': float(np.sum(lengths * aux_values['scores']))}


def _report(targets, predictions):
  return {
    'report': seqio.metrics.Text(f'{len(predictions)} predictions'),
    'first': seqio.metrics.Scalar(len(predictions[0])),
  }


def _postprocess(text, example=None, is_target=False):
  # Like postprocessors of T5, it reads bytes.
  assert isinstance(example['inputs_pretokenized'], bytes)
  return text.strip().lower() + ('' if is_target or int(example['label']) else '!')


def _register(name, metric_fns, metric_objs=(), postprocess_fn=_postprocess):
  with quiet():
    seqio.TaskRegistry.add(
      name,
      source=seqio.FunctionDataSource(_dataset, splits=('validation',)),
      preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
      output_features={f: seqio.Feature(_VOCABULARY) for f in ('inputs', 'targets')},
      metric_fns=metric_fns,
      metric_objs=list(metric_objs),
      postprocess_fn=postprocess_fn,
    )
  return name


@functools.cache
def _names():
  """Registers a task with every kind of metric, one of T5's kind, one without metrics, and their mixture."""
  passthrough = seqio.metrics.PassthroughLegacyMetric
  objects = [
    passthrough.from_metric_fn(
      lambda targets, predictions: {'object_lengths': np.mean([len(p) for p in predictions])},
      _postprocess,
    ).empty(),
    passthrough.from_metric_fn(_object_aux).empty(),
  ]
  names = [
    _register(
      'evaluator_all',
      [
        t5_metrics.bleu,
        t5_metrics.accuracy,
        _score_spread,
        _weighted_length,
        _report,
        *data.metrics('bleu_t5', 'token_f1'),
      ],
      objects,
    ),
    _register(
      'evaluator_t5', [t5_metrics.sequence_accuracy, t5_metrics.edit_distance, t5_metrics.rouge]
    ),
    _register('evaluator_squad', [t5_metrics.squad], postprocess_fn=_squad),
  ]
  _register('evaluator_none', [])
  with quiet():
    seqio.MixtureRegistry.add(
      'evaluator_mixture', [(name, 1.0) for name in (*names, 'evaluator_none')]
    )
  return names


def _object_aux(targets, predictions, aux_values):
  return {'object_aux': float(np.max(aux_values['scores']))}


def _squad(text, example=None, is_target=False):
  return [text] if is_target else text


@functools.cache
def _model():
  vocabulary = data.ByteVocabulary(extra_ids=125)
  network = t5.Transformer(
    t5.T5Config(
      vocab_size=384,
      emb_dim=8,
      num_heads=2,
      num_encoder_layers=1,
      num_decoder_layers=1,
      head_dim=4,
      mlp_dim=16,
      mlp_activations=('gelu', 'linear'),
      dropout_rate=0.0,
    )
  )
  return models.EncoderDecoderModel(network, vocabulary, vocabulary, None)


@functools.cache
def _partitioner():
  return partitioning.PjitPartitioner(
    mesh=jax.sharding.Mesh(
      np.array(jax.devices()[:2]).reshape(2, 1),
      ('data', 'model'),
      axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )
  )


@functools.cache
def _state():
  shapes = {
    'encoder_input_tokens': (4, 64),
    'decoder_input_tokens': (4, 8),
    'decoder_target_tokens': (4, 8),
  }
  initializer = state_init.TrainStateInitializer(
    None, _model().get_initial_variables, shapes, _partitioner()
  )
  return initializer.from_scratch(jax.random.key(1)), initializer.train_state_axes


def _cfg(name='evaluator_mixture', **kwargs):
  _names()
  return data.DatasetConfig(
    **{
      'mixture_or_task_name': name,
      'task_feature_lengths': {'inputs': 64, 'targets': 8},
      'split': 'validation',
      'batch_size': _BATCH_SIZE,
      'shuffle': False,
      'seed': 42,
      **kwargs,
    }
  )


def _evaluate(
  log_dir,
  cls,
  name='evaluator_mixture',
  cfg=evaluation.InferenceEvalConfig(),
  dataset=None,
  **kwargs,
):
  with contextlib.closing(
    evaluation.InferenceEvaluator(
      _cfg(name, **(dataset or {})), cls, _model(), _partitioner(), log_dir, cfg=cfg, **kwargs
    )
  ) as evaluator:
    metrics = evaluator.evaluate(*_state(), step=5).result()
    evaluator.flush()
  return {task: {k: v.value for k, v in values.items()} for task, values in metrics.items()}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
  """Metrics of our judge, of seqio's, and the folder of each."""
  ours, theirs = tmp_path_factory.mktemp('ours'), tmp_path_factory.mktemp('theirs')
  cls = functools.partial(
    seqio.Evaluator, logger_cls=[seqio.PyLoggingLogger, seqio.TensorBoardLogger, seqio.JSONLogger]
  )
  return ours, _evaluate(ours, None), theirs, _evaluate(theirs, cls, concurrent_metrics=True)


def test_equal_metrics(results):
  _, ours, _, theirs = results
  assert ours == theirs
  assert set(ours) == {'evaluator_all', 'evaluator_t5', 'evaluator_squad'}
  assert set(ours['evaluator_all']) == {
    'bleu',
    'bleu_t5',
    'bleu_t5_signature',
    'token_f1',
    'accuracy',
    'score_spread',
    'score_sum',
    'weighted_length',
    'report',
    'first',
    'object_lengths',
    'object_aux',
  }
  assert {'sequence_accuracy', 'rouge1'} <= set(ours['evaluator_t5']) and set(
    ours['evaluator_squad']
  ) == {'em', 'f1'}
  assert ours['evaluator_all']['report'] == '11 predictions'
  assert ours['evaluator_all']['bleu_t5'] == ours['evaluator_all']['bleu']
  assert 'tok:intl' in ours['evaluator_all']['bleu_t5_signature']


def test_lengths_that_are_none_are_those_of_seqios_evaluator(tmp_path, caplog, monkeypatch):
  def judge(
    mixture_or_task_name,
    feature_converter,
    eval_split,
    use_cached,
    seed,
    sequence_length,
    log_dir,
    use_memory_cache,
    **options,
  ):
    assert sequence_length is None and use_memory_cache is False
    end = time.monotonic() + 30
    while "has been reading the split 'validation' of 'evaluator_t5'" not in caplog.text:
      assert time.monotonic() < end
      time.sleep(0.01)
    return seqio.Evaluator(
      mixture_or_task_name,
      feature_converter,
      eval_split,
      use_cached,
      seed,
      sequence_length,
      log_dir=log_dir,
      use_memory_cache=use_memory_cache,
      num_examples=3,
      **options,
    )

  monkeypatch.setattr(seqio_evaluator, '_SECONDS_PER_LINE', 0.01)
  computed = {'task_feature_lengths': None, 'use_memory_cache': False}
  with caplog.at_level(logging.INFO, 't5x_lite'):
    theirs = _evaluate(None, judge, 'evaluator_t5', dataset=computed)
    ours = _evaluate(
      tmp_path,
      None,
      'evaluator_t5',
      evaluation.InferenceEvalConfig(num_examples=3),
      dataset=computed,
    )
  assert ours == theirs
  assert (
    "'encoder_input_tokens': (19,)" in caplog.text and "{'inputs': 19, 'targets': 6}" in caplog.text
  )


@pytest.mark.full  # by default, tests/evaluation/test_evaluator.py batches in many ways
def test_equal_metrics_one_example_at_a_time_and_in_order(results):
  _, ours, _, _ = results
  plain = _evaluate(None, None, cfg=evaluation.InferenceEvalConfig(batch_by_length=False))
  for task, values in ours.items():
    for name, value in values.items():
      assert plain[task][name] == (
        value if isinstance(value, str) else pytest.approx(value, rel=1e-5)
      ), name


def test_our_files_and_those_of_seqio(results):
  ours, _, theirs, _ = results
  for name in ('evaluator_all', 'evaluator_t5', 'mean'):
    first, second = (
      summaries.read_metrics(folder / f'inference_eval/{name}/metrics.jsonl')
      for folder in (ours, theirs)
    )
    assert len(first) == 1
    assert [{**row, 'wall_time': 0} for row in first] == [{**row, 'wall_time': 0} for row in second]
    if name != 'mean':
      path = f'inference_eval/{name}/predictions-5.jsonl'
      assert (ours / path).read_bytes() == (theirs / path).read_bytes()
      # JSONLogger's, in a folder that it does not make itself.
      (line,) = (theirs / f'inference_eval/{name}-metrics.jsonl').read_text().splitlines()
      assert json.loads(line)['step'] == 5
      lines = (theirs / f'inference_eval/{name}-000005.jsonl').read_text().splitlines()
      assert len(lines) == 11 and 'prediction' in json.loads(lines[0])
      # Ours, seqio's, and nothing else.
      assert len(list((theirs / f'inference_eval/{name}').glob('events.out.tfevents.*'))) == 2
  lines = (
    (ours / 'inference_eval/evaluator_all/predictions-5.jsonl')
    .read_text(encoding='utf-8')
    .splitlines()
  )
  rows = [json.loads(line) for line in lines]
  assert [row['targets'] for row in rows] == _TEXTS and set(rows[0]) == {
    'index',
    'inputs',
    'targets',
    'prediction',
    'score',
    'aux',
  }


@pytest.mark.full  # by default, the loggers below, of some examples
def test_options_of_seqios_evaluator_and_its_log(tmp_path, caplog):
  cls = functools.partial(
    seqio.Evaluator, num_examples=3, use_memory_cache=False, logger_cls=[seqio.PyLoggingLogger]
  )
  with caplog.at_level(logging.INFO, 't5x_lite'):
    metrics = _evaluate(
      tmp_path / 'new' / 'folder',
      cls,
      'evaluator_all',
      evaluation.InferenceEvalConfig(batch_by_length=False),
    )
  assert metrics['evaluator_all']['report'] == '3 predictions'
  said = [
    record.getMessage()
    for record in caplog.records
    if record.name == 't5x_lite.data.seqio.evaluator'
  ]
  assert 'evaluator_all/report at step 5: 3 predictions' in said and len(said) == 9
  first_three = _evaluate(
    None,
    None,
    'evaluator_all',
    evaluation.InferenceEvalConfig(num_examples=3, batch_by_length=False),
  )
  assert first_three == metrics


def test_loggers_on_a_full_disk_lose_their_output_alone(tmp_path, caplog):
  (tmp_path / 'inference_eval').mkdir()
  (tmp_path / 'inference_eval/evaluator_all-metrics.jsonl.tmp').symlink_to('/dev/full')
  cls = functools.partial(
    seqio.Evaluator, num_examples=3, logger_cls=[seqio.JSONLogger, seqio.PyLoggingLogger]
  )
  with contextlib.closing(
    evaluation.InferenceEvaluator(_cfg('evaluator_all'), cls, _model(), _partitioner(), tmp_path)
  ) as evaluator:
    for step in (5, 6):
      assert (
        evaluator.evaluate(*_state(), step=step).result()['evaluator_all']['report'].value
        == '3 predictions'
      )
  (said,) = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
  assert said.startswith(
    "seqio's JSONLogger could not write the results of evaluator_all at step 5, which are lost: "
  )
  assert len(summaries.read_metrics(tmp_path / 'inference_eval/evaluator_all/metrics.jsonl')) == 2


def test_tasks_without_metrics_are_named(caplog):
  with contextlib.closing(
    evaluation.InferenceEvaluator(_cfg(), seqio.Evaluator, _model(), _partitioner())
  ) as evaluator:
    assert 'evaluator_none' not in [task.name for task in evaluator.eval_tasks]
  said = [record.getMessage() for record in caplog.records]
  assert 'evaluator_none has no metrics: omitted from the evaluation by decoding.' in said


@pytest.mark.parametrize(
  'cls, cfg, error, fragment',
  [
    (
      seqio.Evaluator,
      {'mixture_or_task_name': 'evaluator_al'},
      DataError,
      "Did you mean 'evaluator_all'",
    ),
    (seqio.Evaluator, {'split': 'test'}, DataError, "no split 'test'"),
    (seqio.Evaluator, {'mixture_or_task_name': 'evaluator_none'}, DataError, 'has metrics'),
    (seqio.Evaluator, {'pack': True}, ConfigError, "packing can't be used"),
    (
      functools.partial(seqio.Evaluator, logger_cls=3),
      {},
      ConfigError,
      "seqio's Evaluator does not accept",
    ),
  ],
)
def test_rejected(tmp_path, cls, cfg, error, fragment):
  with pytest.raises(error, match=fragment):
    evaluation.InferenceEvaluator(_cfg(**cfg), cls, _model(), _partitioner(), tmp_path, None)


def test_a_task_that_is_not_registered_is_rejected():
  _names()
  task = seqio.TaskRegistry.get('evaluator_all')
  with pytest.raises(ConfigError, match='Register the Task'):
    evaluation.InferenceEvaluator(_cfg(task), seqio.Evaluator, _model(), _partitioner(), None, None)


def test_values_of_seqio_are_those_of_clu():
  scalar = seqio.metrics.Scalar(0.5)
  assert judging.as_value('f1', scalar).value == 0.5 and judging.as_number('f1', scalar) == 0.5
  assert judging.as_value('sample', seqio.metrics.Text(b'caf\xc3\xa9')).value == 'caf\xe9'
  with pytest.raises(DataError, match='got a Histogram'):
    judging.as_value('lengths', seqio.metrics.Histogram(np.ones(2)))


@stores.mostly('s3')
def test_loggers_write_to_a_store(store, tmp_path):
  cls = functools.partial(
    seqio.Evaluator, num_examples=3, logger_cls=[seqio.JSONLogger, seqio.TensorBoardLogger]
  )
  for folder in (tmp_path, store.root):
    for step in (5, 6):  # two evaluations, also of one run that is resumed
      with contextlib.closing(
        evaluation.InferenceEvaluator(_cfg('evaluator_all'), cls, _model(), _partitioner(), folder)
      ) as evaluator:
        evaluator.evaluate(*_state(), step=step).result()
        evaluator.flush()
  root, events = files.path(store.root), 'events.out.tfevents'
  names = {name for name in root.find() if events not in name}
  ours = {
    str(path.relative_to(tmp_path))
    for path in tmp_path.rglob('*')
    if path.is_file() and events not in path.name
  }
  assert names - {name for name in names if '.part-' in name} == ours
  for name in ours:
    if '/evaluator_all-' in name:
      assert (root / name).read_bytes() == (tmp_path / name).read_bytes()
  assert sum(events in name for name in root.find()) >= 4
