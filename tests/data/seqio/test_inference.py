"""Inference from seqio: Tasks give the examples of the source without TensorFlow; Tasks of TFExample files."""

import itertools
import json
import pathlib

import gin
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import errors
from t5x_lite import gin_utils
from t5x_lite import optimizers
from t5x_lite.apps.infer import run as infer_app
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.data.text import examples as text_examples
from tests.apps.infer import toy_infer
from tests.models import toy_model

seqio = pytest.importorskip('seqio')
tf = pytest.importorskip('tensorflow')
_BYTES = data.ByteVocabulary(extra_ids=125)
_LENGTHS = {'inputs': 24, 'targets': 8}


class _EchoModel(toy_model.ToyModel):
  """Predicts the inputs."""

  def predict_batch_with_aux(self, params, batch, rng=None, *, flax_mutables=None):
    return batch['encoder_input_tokens'], {}


def _model(converter='encoder_decoder'):
  model = _EchoModel(toy_model.ToyNetwork(), _BYTES, _BYTES, optimizers.adamw())
  model.FEATURE_CONVERTER = converter
  return model


def _cfg(source, **kwargs):
  return data.DatasetConfig(
    'python_keyword_cloze', _LENGTHS, 'validation', 4, False, 0, source=source, **kwargs
  )


@pytest.mark.parametrize(
  'converter', [pytest.param('prefix_lm', marks=pytest.mark.full), seqio.EncDecFeatureConverter]
)
def test_a_task_gives_the_examples_of_the_builtin_source(converter):
  (ours,) = data.open_example_sources(
    _cfg('builtin'), _model(converter if isinstance(converter, str) else 'encoder_decoder')
  )
  (seqios,) = data.open_example_sources(_cfg('seqio'), _model(converter))
  assert (
    seqios.name == ours.name
    and not seqios.is_exact
    and seqios.num_examples == ours.num_examples == 1000
  )
  for first in (0, 7):
    batches = []
    for source in (ours, seqios):
      examples = [source.prepare(record) for record in itertools.islice(source.records(first), 3)]
      batches.append(
        (
          source.convert(examples, 4),
          [
            {
              name: value
              for name, value in example.fields.items()
              if name.endswith('_pretokenized')
            }
            for example in examples
          ],
        )
      )
    (batch, texts), (other_batch, other_texts) = batches
    assert texts == other_texts
    for name, rows in batch.items():
      np.testing.assert_array_equal(rows, other_batch[name], err_msg=name)
      assert seqios.element_spec(4)[name] == ours.element_spec(4)[name]
  assert sum(1 for _ in seqios.records(990)) == 10


def test_a_task_without_the_split_or_examples():
  with pytest.raises(errors.DataError, match="no split 'test'"):
    data.open_example_sources(
      data.DatasetConfig('python_keyword_cloze', _LENGTHS, 'test', 4, False, 0), _model()
    )
  task = seqio.Task(
    'nothing',
    seqio.FunctionDataSource(
      lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(
        {'inputs': np.zeros((0, 2), np.int32), 'targets': np.zeros((0, 2), np.int32)}
      ),
      splits=['test'],
    ),
    dict.fromkeys(_LENGTHS, seqio.Feature(seqio.ByteVocabulary(125))),
    [],
  )
  with pytest.raises(errors.DataError, match="'nothing' is empty"):
    data.open_example_sources(data.DatasetConfig(task, _LENGTHS, 'test', 4, False, 0), _model())


def _write_tfrecords(folder, texts):
  for part, chunk in enumerate((texts[:3], texts[3:])):
    with tf.io.TFRecordWriter(str(folder / f'part-{part}.tfrecord')) as writer:
      for text in chunk:
        features = {
          'question': tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()])),
          'answer': tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.upper().encode()])),
        }
        writer.write(
          tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
        )
  return str(folder / 'part-*.tfrecord')


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  return toy_infer.save_checkpoint(tmp_path_factory.mktemp('trained'))


def _task(paths, targets_key, **kwargs):
  features = dict.fromkeys(
    ('inputs', 'targets'), seqio.Feature(_BYTES)
  )  # this package's vocabulary
  return infer_app.create_task_from_tfexample_file(
    paths, 'tfrecord', 'question', targets_key, features, **kwargs
  )


def _infer(task, checkpoint, folder, **kwargs):
  cfg = data.DatasetConfig(task, _LENGTHS, 'infer', 4, False, 0)
  (path,) = toy_infer.infer(cfg, checkpoint, folder, model=_model(), checkpoint_period=1, **kwargs)
  return [json.loads(line) for line in pathlib.Path(path).read_text(encoding='utf-8').splitlines()]


def test_sentinels_of_tfexamples_are_those_of_text_files(tmp_path):
  texts = ['<extra_id_0> x in ü:', 'a <extra_id_124>b <extra_id_125>', 'too long ' * 9]
  (source,) = data.open_example_sources(
    data.DatasetConfig(
      _task(_write_tfrecords(tmp_path, texts), 'answer'),
      {'inputs': 64, 'targets': 64},
      'infer',
      4,
      False,
      0,
    ),
    _model(),
  )
  for text, record in zip(texts, source.records(), strict=True):
    assert source.prepare(record).fields['inputs'].tolist() == [
      *text_examples.encode_text(text, _BYTES)[:63],
      1,
    ]
  assert text_examples.encode_text(texts[0], _BYTES)[0] == 383


@pytest.mark.parametrize('name', ['d[1]', 'a\\b[!c]', 'a\\b'])
def test_files_of_tfexamples_in_a_folder_with_the_characters_of_patterns(name, tmp_path):
  for each in (name, 'd1'):
    (tmp_path / each).mkdir()
    _write_tfrecords(tmp_path / each, [f'{each} {i}' for i in range(4)])
  paths = [str(tmp_path / name / f'part-{part}.tfrecord') for part in range(2)]
  task = seqio.get_mixture_or_task(_task(paths, 'answer'))
  assert list(task.source.list_shards('infer')) == paths


def test_files_of_tfexamples(tmp_path, checkpoint):
  texts = ['one', 'zwei ü', 'three', 'four', 'five', 'six', 'seven']
  paths = _write_tfrecords(tmp_path, texts)
  task = _task([paths], None)
  assert task == _task(paths, None) and task.startswith('infer_')
  rows = _infer(task, checkpoint, tmp_path / 'out')
  assert [row['prediction'] for row in rows] == texts
  assert [row['inputs'] for row in rows] == [
    {'inputs_pretokenized': text} for text in texts
  ]  # no empty targets
  with pytest.raises(errors.ConfigError, match='Scoring needs targets.*targets_key'):
    _infer(task, checkpoint, tmp_path / 'out', mode='score')
  with_targets = _task(paths, 'answer')
  assert with_targets != task
  rows = _infer(with_targets, checkpoint, tmp_path / 'out', mode='score')
  assert rows[1]['inputs'] == {'inputs_pretokenized': 'zwei ü', 'targets_pretokenized': 'ZWEI Ü'}
  assert all(row['score'] < 0 for row in rows)


@pytest.mark.parametrize(
  'kwargs, fragments',
  [
    ({'file_type': 'sstable'}, ["'sstable'", "'tfrecord'"]),
    (
      {'features': {'inputs': seqio.Feature(_BYTES)}},
      ["'inputs' and 'targets' to seqio.Feature", "got {'inputs'"],
    ),
    (
      {'paths': ['no/such/*.tfrecord']},
      ["no file matches 'no/such/*.tfrecord'", 'TF_EXAMPLE_FILE_PATHS'],
    ),
  ],
)
def test_rejected_tfexample_files(tmp_path, kwargs, fragments):
  features = dict.fromkeys(('inputs', 'targets'), seqio.Feature(_BYTES))
  arguments = {
    'paths': [_write_tfrecords(tmp_path, ['a'])],
    'file_type': 'tfrecord',
    'inputs_key': 'question',
    'targets_key': None,
    'features': features,
    **kwargs,
  }
  with pytest.raises((errors.ConfigError, errors.DataError)) as caught:
    infer_app.create_task_from_tfexample_file(**arguments)
  for fragment in fragments:
    assert fragment in str(caught.value)


def test_files_without_the_key_are_named_by_the_reader(tmp_path):
  task = _task(_write_tfrecords(tmp_path, ['a']), 'missing', task_id=f'missing_{tmp_path.name}')
  with pytest.raises(errors.DataError, match='failed while reading example 0: .*missing'):
    data.open_example_sources(data.DatasetConfig(task, _LENGTHS, 'infer', 4, False, 0), _model())


def test_gin_file_of_tfexamples_binds_the_task_and_the_vocabulary(tmp_path):
  paths = _write_tfrecords(tmp_path, ['a'])
  flags = {
    'TF_EXAMPLE_FILE_PATHS': f'["{paths}"]',
    'FEATURE_LENGTHS': "{'inputs': 9, 'targets': 5}",
    'MODEL_DIR': 'x',
    'CHECKPOINT_PATH': 'x/checkpoint_1',
    'INFER_OUTPUT_DIR': 'y',
    'infer_script.create_task_from_tfexample_file.inputs_key': 'question',
  }
  try:
    configuration = gin_utils.load(
      't5x_lite.apps.infer.infer',
      gin_utils.read(
        ['runs/infer_from_tfexample_file.gin', 'recipes/keyword_cloze.gin'],
        [
          gin_syntax.read_flag(name, value, name)
          for name, value in flags.items()
          if name != 'MODEL_DIR'
        ],
        placeholders={'MODEL_DIR': "'none'"},
      ),
    )
    cfg = configuration.argument('dataset_cfg')
    assert configuration.argument('restore_checkpoint_cfg') == checkpoints.RestoreCheckpointConfig(
      path='x/checkpoint_1', mode='specific', dtype='float32'
    )
  finally:
    gin.clear_config()
  assert (cfg.split, cfg.source, dict(cfg.task_feature_lengths)) == (
    'infer',
    'seqio',
    {'inputs': 9, 'targets': 5},
  )
  (source,) = data.open_example_sources(cfg, _model())
  assert source.prepare(next(source.records())).fields['inputs'].tolist() == [
    *_BYTES.encode('a'),
    1,
  ]
