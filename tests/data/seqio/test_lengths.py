"""Lengths of seqio Tasks are those that seqio's Evaluator finds."""

import dataclasses

import pytest

from t5x_lite import data
from t5x_lite.errors import ConfigError

seqio = pytest.importorskip('seqio')
pytest.importorskip('t5')

from t5x_lite.data.seqio import packages as seqio_import  # noqa: E402
from t5x_lite.data.seqio import tasks as seqio_tasks  # noqa: E402

tf = seqio_import.tf


def _register(name, texts, preprocessors=(), features=seqio_tasks.OUTPUT_FEATURES, **kwargs):
  dataset = tf.data.Dataset.from_tensor_slices(
    {'inputs': texts, 'targets': [text[:3] for text in texts]}
  )
  with seqio_import.quiet():
    seqio.TaskRegistry.remove(name)
    return seqio.TaskRegistry.add(
      name,
      source=seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: dataset, splits=['validation']
      ),
      preprocessors=[
        seqio.preprocessors.tokenize,
        *preprocessors,
        seqio.preprocessors.append_eos_after_trim,
      ],
      output_features=features,
      **{'metric_fns': [lambda targets, predictions: {}], **kwargs},
    )


def _cfg(name, **kwargs):
  return data.DatasetConfig(name, None, 'validation', 4, False, 0, **kwargs)


def _lengths(cfg, **kwargs):
  return data.with_feature_lengths(cfg, **kwargs).task_feature_lengths


def _of_seqio(name, **kwargs):
  with seqio_import.quiet():
    return {
      feature: shape[0]
      for feature, shape in seqio.Evaluator(
        name,
        seqio.EncDecFeatureConverter(pack=False),
        'validation',
        sequence_length=None,
        logger_cls=(),
        **kwargs,
      ).model_feature_shapes.items()
    }


def test_lengths_are_those_of_seqios_evaluator():
  _register('measured_a', ['a' * n for n in (5, 60, 7)])
  _register('measured_b', ['a' * n for n in (90, 2)], metric_fns=[])
  seqio.MixtureRegistry.add('measured', ['measured_a', 'measured_b'], default_rate=1.0)
  for options in ({}, {'num_examples': 1}):
    found, expected = (
      _lengths(_cfg('measured'), decodes=True, **options),
      _of_seqio('measured', **options),
    )
    assert found == {
      'inputs': expected['encoder_input_tokens'],
      'targets': expected['decoder_target_tokens'],
    }
  assert _lengths(_cfg('measured')) == {'inputs': 91, 'targets': 4}
  task = seqio.TaskRegistry.get('measured_a')
  assert _lengths(_cfg(task), feature_converter='decoder_only') == {'targets': 4, 'inputs': 61}
  (tasks,) = (data.open_eval_tasks(dataclasses.replace(_cfg(task)), _layout()),)
  assert tasks[0].element_spec['encoder_input_tokens'].shape == (4, 61)


def _layout():
  from t5x_lite.partitioning import DataLayout

  return DataLayout(batch_size=4, shard_id=0, num_shards=1, is_first_host_in_replica_set=True)


def test_kept_lengths_depend_on_the_examples_and_the_files(tmp_path, monkeypatch):
  folder = str(tmp_path / 'run')
  _register(
    'not_kept', ['a' * 5, 'b' * 9]
  )  # Nothing shows that the function's examples have changed.
  assert _lengths(_cfg('not_kept'), folder=folder) == {'inputs': 10, 'targets': 4}
  _register('not_kept', ['a' * 5, 'b' * 20])
  assert _lengths(_cfg('not_kept'), folder=folder)['inputs'] == 21
  path = tmp_path / 'lines.tsv'
  path.write_text('aaaa\tb\naa\tc\n')
  with seqio_import.quiet():
    seqio.TaskRegistry.add(
      'kept_file',
      source=seqio.TextLineDataSource({'validation': str(path)}),
      preprocessors=[
        lambda ds: ds.map(lambda line: {'inputs': line, 'targets': line}),
        seqio.preprocessors.tokenize,
      ],
      output_features=seqio_tasks.OUTPUT_FEATURES,
      metric_fns=[],
    )
  assert _lengths(_cfg('kept_file'), folder=folder)['inputs'] == 6
  with monkeypatch.context() as patch:
    patch.setattr(
      't5x_lite.data.batches.feature_lengths._Measured.of',
      lambda cfg, split: pytest.fail('computed again'),
    )
    assert _lengths(_cfg('kept_file'), folder=folder)['inputs'] == 6
    patch.setattr(
      't5x_lite.data.seqio.lengths._code_files', lambda task: [str(path)]
    )  # Another preprocessor.
    with pytest.raises(pytest.fail.Exception, match='computed again'):
      _lengths(_cfg('kept_file'), folder=folder)
  path.write_text('aaaa\tb\naa\tcdefgh\n')  # the first example is the same
  assert _lengths(_cfg('kept_file'), folder=folder)['inputs'] == 9


def test_lengths_of_tasks_without_files_are_not_kept(tmp_path):
  for longest in (9, 20):  # The first example and the number of examples are the same.
    _register('not_kept', ['a' * 5, 'b' * longest])
    assert _lengths(_cfg('not_kept'), folder=str(tmp_path))['inputs'] == longest + 1
  assert not list(tmp_path.iterdir())


def test_a_source_may_know_the_number_of_examples_of_other_splits_only(monkeypatch):
  task = _register('number_unknown', ['a' * 5])
  monkeypatch.setattr(task.source, '_num_input_examples', {'train': 1})
  assert _lengths(_cfg('number_unknown'))['inputs'] == 6


def test_preprocessors_that_fail_without_lengths_are_explained():
  def cut(dataset, sequence_length=None):
    return dataset.map(
      lambda example: {name: ids[: sequence_length[name]] for name, ids in example.items()}
    )

  _register('fails_without_lengths', ['a'], [cut])
  with pytest.raises(
    ConfigError,
    match="preprocessors of 'fails_without_lengths' failed with sequence_length=None: "
    "TypeError: 'NoneType' object is not subscriptable. Set TASK_FEATURE_LENGTHS",
  ):
    _lengths(_cfg('fails_without_lengths'))


def test_preprocessors_that_need_lengths_are_named():
  def cut(dataset, sequence_length):
    return dataset.map(
      lambda example: {name: ids[: sequence_length[name]] for name, ids in example.items()}
    )

  _register('needs_lengths', ['a'], [cut])
  with pytest.raises(
    ConfigError,
    match="a mapping for 'needs_lengths', since its preprocessor cut needs the lengths, "
    'got None. Set TASK_FEATURE_LENGTHS',
  ):
    _lengths(_cfg('needs_lengths'))


def test_vocabularies_of_tasks_without_inputs():
  ids = seqio.Feature(seqio.PassThroughVocabulary(10))
  text, other = (seqio.Feature(seqio.ByteVocabulary(extra_ids=n)) for n in (125, 0))
  for name, features, expected in (
    ('one', {'label': ids, 'targets': text}, text.vocabulary),
    ('ids', {'label': ids}, ids.vocabulary),
    ('two', {'targets': text, 'more': other}, None),
  ):
    task = _register(f'vocabularies_{name}', ['a'], features=features, metric_fns=[])
    if expected is not None:
      assert data.get_vocabulary(_cfg(task)) == (expected, expected)
    else:
      with pytest.raises(
        ConfigError, match="output_features of 'vocabularies_two'` must be one vocabulary, or"
      ):
        data.get_vocabulary(_cfg(task))


@pytest.mark.parametrize('converter', [None, seqio.EncDecFeatureConverter(pack=False)])
def test_a_converter_that_is_not_a_class_is_rejected(converter):
  _register('wrong_converter', ['a'])
  with pytest.raises(
    ConfigError, match='`feature_converter_cls` must be a function of .pack=, use_'
  ):
    _lengths(_cfg('wrong_converter'), feature_converter=converter)
