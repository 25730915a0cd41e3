"""seqio data: the same batches as the builtin source, exact positions, evaluation, and errors.

Importing seqio costs some ten CPU-seconds: every test that needs it is in this file.
"""

import dataclasses
import functools
import json
import threading
import time
import types

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data import corpora
from t5x_lite.data import vocabularies as vocabularies_lib
from t5x_lite.data.batches import global_batches
from t5x_lite.data.batches import philox
from t5x_lite.data.batches import span_corruption
from t5x_lite.errors import ConfigError, DataError, DataUnavailableError
from t5x_lite.partitioning import DataLayout
from t5x_lite.partitioning import PjitPartitioner
from tests.data.text.test_ids import train_model

pytest.importorskip('seqio')
pytest.importorskip('t5')

from t5x_lite.data.seqio import features as seqio_features  # noqa: E402
from t5x_lite.data.seqio import packages as seqio_import  # noqa: E402
from t5x_lite.data.seqio import source as seqio_source  # noqa: E402
from t5x_lite.data.seqio import tasks as seqio_tasks  # noqa: E402

seqio, tf = seqio_import.seqio, seqio_import.tf

_CLOZE = {'inputs': 64, 'targets': 12}
_BOTH = {'inputs': 64, 'targets': 32}


def _layout(shard=0, num_shards=1, batch_size=64):
  return DataLayout(
    batch_size=batch_size, shard_id=shard, num_shards=num_shards, is_first_host_in_replica_set=True
  )


def _cfg(name='python_keyword_cloze', lengths=None, **kwargs):
  defaults = dict(split='validation', batch_size=64, shuffle=False, seed=3)
  return data.DatasetConfig(name, lengths or _CLOZE, **{**defaults, **kwargs})


def _open(cfg, shard=0, num_shards=1, **kwargs):
  return data.open_train_iterator(cfg, _layout(shard, num_shards, cfg.batch_size), **kwargs)


def _take(iterator, num):
  return [{name: np.asarray(array) for name, array in next(iterator).items()} for _ in range(num)]


def _assert_equal(first, second):
  assert set(first) == set(second)
  for name in first:
    assert first[name].dtype == second[name].dtype
    np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def _task(name, preprocessors=(), dataset_fn=None, texts=('a', 'b', 'c'), **kwargs):
  """Returns an unregistered Task of the given texts."""
  if dataset_fn is None:

    def dataset_fn(split, shuffle_files, seed=None):
      return tf.data.Dataset.from_tensor_slices({'inputs': list(texts), 'targets': list(texts)})

  defaults = dict(
    output_features=seqio_tasks.OUTPUT_FEATURES, metric_fns=[], shuffle_buffer_size=10
  )
  return seqio.Task(
    name,
    source=seqio.FunctionDataSource(dataset_fn, splits=['train']),
    preprocessors=[seqio.preprocessors.tokenize, *preprocessors, seqio.preprocessors.append_eos],
    **{**defaults, **kwargs},
  )


# --- The builtin source gives the same -----------------------------------------------------


def test_a_sample_counts_ids_that_preprocessors_and_seqio_trim():
  """The same examples of the builtin source tell how much; there the counts are compared with the texts."""
  cfg = _cfg(lengths={'inputs': 40, 'targets': 5})
  iterator, other = _open(cfg), _open(cfg)
  sampled = iterator.sample_truncation()
  assert sampled == _open(dataclasses.replace(cfg, source='builtin')).sample_truncation()
  assert sampled.num_examples == 256 and sampled.num_cut['inputs'] > 50
  _assert_equal(next(iterator), next(other))
  # Only seqio's own cut: the preprocessors are told no lengths and need none. A mixture is sampled as a task is.
  seqio.MixtureRegistry.add(
    'cut_mixture', [_task('cut_task', texts=('a', 'b' * 30))], default_rate=1.0
  )
  mixed = _open(
    _cfg('cut_mixture', {'inputs': 10, 'targets': 40}, split='train', batch_size=1)
  ).sample_truncation()
  assert mixed.metrics == {
    'data/truncated_examples_fraction/inputs': 0.5,
    'data/truncated_tokens_fraction/inputs': pytest.approx(21 / 33),
  }
  # Span corruption cuts its own segments, whose lengths it must know: nothing is lost.
  assert _open(_cfg('python_docs_span_corruption', _BOTH)).sample_truncation().metrics == {}


@pytest.mark.parametrize(
  'name, lengths, pack, num',
  [
    # The validation split has 1,000 lines: 18 batches of 64 go into the second epoch.
    pytest.param('python_keyword_cloze', _CLOZE, False, 18, marks=pytest.mark.full),
    pytest.param(
      'python_keyword_cloze', {'inputs': 30, 'targets': 24}, True, 8, marks=pytest.mark.full
    ),
    pytest.param(
      'python_function_cloze', {'inputs': 2048, 'targets': 512}, False, 4, marks=pytest.mark.full
    ),
    # 128 documents make some 1,000 segments, the last of which is shorter; the second epoch has new noise.
    ('python_docs_span_corruption', _BOTH, False, 20),
    pytest.param(
      'python_docs_span_corruption',
      {'inputs': 200, 'targets': 100},
      True,
      6,
      marks=pytest.mark.full,
    ),
  ],
)
def test_identical_batches_unshuffled(name, lengths, pack, num):
  seqio_cfg = _cfg(name, lengths, pack=pack)
  ours, theirs = _open(dataclasses.replace(seqio_cfg, source='builtin')), _open(seqio_cfg)
  assert theirs.element_spec == ours.element_spec
  for first, second in zip(_take(ours, num), _take(theirs, num), strict=True):
    _assert_equal(first, second)


@pytest.mark.parametrize(
  'converter, lengths, pack',
  [
    pytest.param('decoder_only', _CLOZE, False, marks=pytest.mark.full),
    pytest.param('decoder_only', {'targets': 40}, True, marks=pytest.mark.full),
    pytest.param('prefix_lm', {'inputs': 90, 'targets': 60}, True, marks=pytest.mark.full),
    ('prefix_lm_with_loss_on_inputs', _CLOZE, False),
  ],
)
def test_identical_batches_of_decoder_only_models(converter, lengths, pack):
  cfg = _cfg(lengths=lengths, pack=pack)
  ours, theirs = (
    _open(c, feature_converter=converter) for c in (dataclasses.replace(cfg, source='builtin'), cfg)
  )
  assert theirs.element_spec == ours.element_spec
  assert ('decoder_causal_attention' in ours.element_spec) == ('inputs' in lengths)
  num = 3 if pack else 17
  for first, second in zip(_take(ours, num), _take(theirs, num), strict=True):
    _assert_equal(first, second)


@pytest.mark.parametrize(
  'name, lengths',
  [
    ('python_keyword_cloze', _CLOZE),
    pytest.param('python_docs_span_corruption', _BOTH, marks=pytest.mark.full),
  ],
)
def test_same_examples_per_epoch_shuffled(name, lengths):
  cfg = _cfg(name, lengths, shuffle=True)
  dataset = seqio_source.task_dataset(seqio.TaskRegistry.get(name), cfg, num_epochs=1)
  theirs = [
    tuple(example['inputs']) + (-1,) + tuple(example['targets'])
    for example in dataset.as_numpy_iterator()
  ]
  batch = next(_open(dataclasses.replace(cfg, source='builtin', batch_size=len(theirs))))
  ours = [
    tuple(i[i > 0]) + (-1,) + tuple(t[t > 0])
    for i, t in zip(batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True)
  ]
  assert sorted(ours) == sorted(theirs) and ours != theirs


def test_random_numbers_are_those_of_tensorflow():
  seeds = np.array([(0, 1), (123, -5), (2**31 - 1, 4 * 10**9)], np.int64)
  ours = philox.uniform(seeds.astype(np.uint64), 13)
  ours_split = philox.split(seeds.astype(np.uint64), 6).astype(np.int64)
  for i, seed in enumerate(seeds):
    np.testing.assert_array_equal(tf.random.stateless_uniform([13], seed=seed).numpy(), ours[i])
    np.testing.assert_array_equal(
      tf.random.experimental.stateless_split(seed, 6).numpy(), ours_split[i]
    )
  stream = list(tf.data.Dataset.random(44).take(11).as_numpy_iterator())
  np.testing.assert_array_equal(philox.stream_values(44, np.arange(11)), stream)


@pytest.mark.parametrize('length', [1, 2, 3, 4, 7, 19, 33, 100, 190])
@pytest.mark.parametrize('density, mean_length', [(0.15, 3.0), (0.5, 2.0)])
def test_span_corruption_is_t5s(length, density, mean_length):
  from t5.data import preprocessors

  tokens = np.arange(3, 3 + length, dtype=np.int32)
  seed = np.array([length, 77], np.int64)
  features = preprocessors.single_example_denoise(
    {'targets': tf.constant(tokens)},
    tf.constant(seed),
    output_features=seqio_tasks.OUTPUT_FEATURES,
    noise_density=density,
    noise_mask_fn=functools.partial(
      preprocessors.random_spans_noise_mask, mean_noise_span_length=mean_length
    ),
    inputs_fn=preprocessors.noise_span_to_unique_sentinel,
    targets_fn=preprocessors.nonnoise_span_to_unique_sentinel,
  )
  ((inputs, targets),) = span_corruption.corrupt(
    [tokens],
    seed[None].astype(np.uint64),
    first_sentinel=383,
    noise_density=density,
    mean_noise_span_length=mean_length,
  )
  np.testing.assert_array_equal(inputs, features['inputs'].numpy())
  np.testing.assert_array_equal(targets, features['targets'].numpy())
  assert span_corruption.random_spans_lengths(
    length + 5, density, mean_length
  ) == preprocessors.random_spans_helper(length + 5, density, mean_length, 1, 1)


# --- Position ------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def run():
  """The mixture, with small shuffle buffers, and packed: the batches of one run, and the state between them."""
  tasks = [
    seqio.TaskRegistry.get(name).replace(name=f'small_{name}', shuffle_buffer_size=256)
    for name in ('python_keyword_cloze', 'python_docs_span_corruption')
  ]
  seqio.MixtureRegistry.add('small_cloze_and_docs', tasks, default_rate=1.0)
  cfg = _cfg('small_cloze_and_docs', _BOTH, split='train', shuffle=True, pack=True, batch_size=16)
  partitioner = PjitPartitioner(num_partitions=1)
  with data.GlobalBatches(_open(cfg), partitioner, prefetch=3) as batches:
    before = _take(batches, 5)
    deadline = time.monotonic() + 60
    # Some batches must be prepared, so that they are part of the position.
    while 'undelivered.npz' not in (state := batches.get_state()) and time.monotonic() < deadline:
      time.sleep(0.05)
    after = _take(batches, 8)
  return cfg, partitioner, before, state, after


def test_resumes_exactly_with_prefetch(run):
  cfg, partitioner, before, state, after = run
  assert 'undelivered.npz' in state
  # A few megabytes: the buffers for shuffling, of 256 examples each, and of the tasks' own preprocessors.
  assert sum(map(len, state.values())) < 10e6
  with data.GlobalBatches(_open(cfg), partitioner, prefetch=2) as resumed:
    resumed.set_state(state)
    _assert_equal(_take(resumed, 1)[0], after[0])
    # Saved again while batches of the first state still wait.
    second_state = resumed.get_state()
  again = _open(cfg)
  for expected in before[:2]:
    _assert_equal(_take(again, 1)[0], expected)
  again.set_state(second_state)
  for expected in after[1:]:
    _assert_equal(_take(again, 1)[0], expected)


def test_positions_of_other_processes_and_data_are_rejected(run):
  mixture_cfg, _, _, mixture_state, _ = run
  cfg = _cfg(batch_size=16)
  state = _open(cfg, 0, 2).get_state()
  iterator = _open(cfg, 1, 2)
  with pytest.raises(DataError, match='position of shard 0 of 2.*reads shard 1'):
    iterator.set_state(state)
  with pytest.raises(
    DataError,
    match='saved with 1 data shards, this run has 2.*Run with 1 shards.*'
    "restore_dataset = False.*source = 'builtin'",
  ):
    iterator.set_state(mixture_state)
  own_state = iterator.get_state()
  for saved, now in (
    ('"seed": 3', '"seed": 4'),
    ('"batch_size": 16', '"batch_size": 32'),
    ('"shuffle": false', '"shuffle": true'),
  ):
    changed = own_state['data_state.json'].decode().replace(saved, now)
    with pytest.raises(DataError, match=saved.split('"')[1] + ': saved .*restore_dataset = False'):
      iterator.set_state({**own_state, 'data_state.json': changed.encode()})
  builtin = _open(
    dataclasses.replace(mixture_cfg, mixture_or_task_name='python_cloze_and_docs', source='builtin')
  )
  with pytest.raises(DataError, match="source 'seqio'.*reads the source 'builtin'. Resume with"):
    builtin.set_state(mixture_state)
  with pytest.raises(DataError, match="source 'builtin'.*reads the source 'seqio'. Resume with"):
    iterator.set_state(builtin.get_state())
  # TensorFlow's error for a position in a pipeline of another structure.
  swapped = {
    name: content for name, content in mixture_state.items() if name.startswith('tf_iterator')
  }
  with pytest.raises(DataError, match='cannot be opened at the saved position.*have changed'):
    iterator.set_state({'data_state.json': own_state['data_state.json'], **swapped})


def test_shards_partition_the_examples():
  parts = [_take(_open(_cfg(batch_size=100), i, 2), 10) for i in range(2)]
  rows = [tuple(row) for part in parts for batch in part for row in batch['encoder_input_tokens']]
  assert len(rows) == len(set(rows)) == 1000


@pytest.mark.parametrize(
  'make',
  [
    pytest.param(
      lambda: _task(
        'generator',
        dataset_fn=lambda split, shuffle_files, seed=None: tf.data.Dataset.from_generator(
          lambda: iter([{'inputs': 'a', 'targets': 'b'}] * 100),
          output_signature={f: tf.TensorSpec((), tf.string) for f in ('inputs', 'targets')},
        ),
      ),
      marks=pytest.mark.full,
    ),
    lambda: _task(
      'py_function',
      [
        lambda ds: ds.map(
          lambda ex: {
            **ex,
            'inputs': tf.ensure_shape(
              tf.py_function(lambda ids: ids, [ex['inputs']], tf.int32), [None]
            ),
          }
        )
      ],
    ),
    pytest.param(
      lambda: _task(
        'random',
        [
          lambda ds: ds.map(
            lambda ex: {**ex, 'inputs': ex['inputs'] + tf.random.uniform([], 0, 2, tf.int32)}
          )
        ],
      ),
      marks=pytest.mark.full,
    ),
  ],
)
@pytest.mark.parametrize('shuffle', [pytest.param(False, marks=pytest.mark.full), True])
def test_pipelines_without_a_position_say_so(make, shuffle):
  iterator = _open(_cfg(make(), split='train', batch_size=4, shuffle=shuffle))
  # Also before the first batch, so that a run fails before any computation.
  with pytest.raises(DataError, match='from_generator, py_function.*save_dataset = False'):
    iterator.get_state()
  next(iterator)
  with pytest.raises(DataError, match='from_generator, py_function.*save_dataset = False'):
    iterator.get_state()


def test_a_position_asked_for_before_the_first_batch_is_that_of_a_fresh_run():
  cfg = _cfg(
    _task('letters', texts='abcdefghijklmnopqrst'), split='train', shuffle=True, batch_size=16
  )
  expected = _take(_open(cfg), 6)
  partitioner = PjitPartitioner(num_partitions=1)
  with data.GlobalBatches(_open(cfg), partitioner, prefetch=2) as batches:
    at_zero = batches.get_state()
    _assert_equal(_take(batches, 1)[0], expected[0])
    at_one = batches.get_state()
    for batch in expected[1:3]:
      _assert_equal(_take(batches, 1)[0], batch)
    for state, number in ((at_zero, 0), (at_one, 1)):
      assert json.loads(state['data_state.json'])['num_batches'] == number
      # In the run that saved it, in one that has already looked ahead itself, and in one that has not.
      batches.set_state(state)
      looked_ahead, fresh = _open(cfg), _open(cfg)
      looked_ahead.get_state()
      looked_ahead.set_state(state)
      fresh.set_state(state)
      for batch in expected[number : number + 3]:
        for iterator in (batches, looked_ahead, fresh):
          _assert_equal(_take(iterator, 1)[0], batch)


def test_a_full_temporary_folder_is_not_blamed_on_the_pipeline(monkeypatch):
  iterator = _open(_cfg(split='train', batch_size=4))

  def disk_full(*args):
    raise tf.errors.ResourceExhaustedError(None, None, 'No space left on device')

  monkeypatch.setattr(tf.train.Checkpoint, 'write', disk_full)
  with pytest.raises(DataError, match='the position cannot be saved: .*No space left.*TMPDIR'):
    iterator.get_state()


# --- Evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'converter', ['encoder_decoder', pytest.param('decoder_only', marks=pytest.mark.full)]
)
def test_evaluation_is_that_of_the_builtin_source(converter):
  cfg = _cfg('python_cloze_and_docs', _BOTH)
  ours = dataclasses.replace(cfg, source='builtin')
  (theirs_task,), (ours_task,) = (
    data.open_eval_tasks(c, _layout(1, 2), feature_converter=converter) for c in (cfg, ours)
  )
  assert theirs_task.name == ours_task.name == 'python_keyword_cloze'
  assert theirs_task.targets() == ours_task.targets() and len(theirs_task.examples) == 1000
  assert (
    theirs_task.examples[7]['inputs_pretokenized'] == ours_task.examples[7]['inputs_pretokenized']
  )
  assert len(theirs_task.batches) == len(ours_task.batches) == 16
  for (theirs_indices, theirs_batch), (ours_indices, ours_batch) in zip(
    theirs_task.batches, ours_task.batches, strict=True
  ):
    np.testing.assert_array_equal(theirs_indices, ours_indices)
    _assert_equal(theirs_batch, ours_batch)
  assert theirs_task.metric_fns[0](theirs_task.targets(), theirs_task.targets()) == {
    'exact_match': 1.0
  }
  theirs, ours = (
    data.open_eval_iterators(
      dataclasses.replace(c, pack=True, use_memory_cache=False),
      _layout(),
      3,
      feature_converter=converter,
    )
    for c in (cfg, ours)
  )
  assert set(theirs) == set(ours) == {'python_keyword_cloze', 'python_docs_span_corruption'}
  for name, batches in theirs.items():
    assert batches.num_examples == ours[name].num_examples
    for first, second in zip(batches, ours[name], strict=True):
      _assert_equal(first, second)


def test_postprocessors_and_score_metrics():
  def postprocess(text, example=None, is_target=False):
    return (text.upper(), is_target, len(example['targets']))

  def score_metric(targets, scores):
    return {'score': 0.0}

  task = _task(
    'judged',
    texts=('a', 'bb'),
    postprocess_fn=postprocess,
    metric_fns=[data.exact_match, score_metric, *data.metrics('perplexity')],
  )
  (opened,) = data.open_eval_tasks(_cfg(task, split='train', batch_size=4), _layout(batch_size=4))
  assert opened.targets() == [('A', True, 2), ('BB', True, 3)]
  assert opened.postprocess('x', example=opened.examples[0], is_target=False) == ('X', False, 2)
  assert opened.metric_fns == (data.exact_match,)
  assert opened.score_metric_fns == (score_metric, *data.metrics('perplexity'))
  ((indices, _),) = opened.batches
  np.testing.assert_array_equal(indices, [0, 1, -1, -1])


# --- Errors before compute --------------------------------------------------------------------------


@pytest.mark.parametrize(
  'change, error, message',
  [
    (
      dict(name='python_keyword_close'),
      DataError,
      "mean 'python_keyword_cloze'.*DatasetConfig.module",
    ),
    (dict(name=object()), DataError, 'seqio has no task or mixture <object'),
    (dict(split='valid'), DataError, "no split 'valid'.*mean 'validation'"),
    (dict(lengths={'inputs': 64}), ConfigError, "with the feature 'targets'"),
    (
      dict(lengths={'inputs': 64, 'targets': 12, 'target': 3}),
      ConfigError,
      "'target'.*mean 'targets'",
    ),
    (dict(module='no_such_module_here'), ConfigError, "no module 'no_such_module_here'"),
    (
      dict(use_cached=True),
      DataError,
      'does not exist in any of the task cache directories.*--seqio_additional_cache_dirs .* USE_CACHED_TASKS=False',
    ),
    (
      dict(pack=True, use_custom_packing_ops=True),
      ConfigError,
      'Remove it, or install tensor2tensor',
    ),
    (dict(name='python_docs_span_corruption'), DataError, 'Expected targets length'),
    (
      dict(name='python_docs_span_corruption', lengths={'targets': 32}, converter='decoder_only'),
      ConfigError,
      "with the feature 'inputs' for 'span corruption'",
    ),
    (
      dict(lengths={'targets': 32}, converter='prefix_lm'),
      ConfigError,
      "with the feature 'inputs'",
    ),
    (
      dict(lengths={'targets': 32, 'input': 3}, converter='decoder_only'),
      ConfigError,
      "'input'.*mean 'inputs'",
    ),
    (
      dict(lengths={'targets': 32, 'suffixes': 3}, converter='decoder_only'),
      ConfigError,
      "without the feature 'suffixes'",
    ),
  ],
)
def test_rejected(change, error, message):
  converter = change.pop('converter', 'encoder_decoder')
  with pytest.raises(error, match=message):
    _open(_cfg(**change), feature_converter=converter)


def test_a_task_that_cannot_be_cached_is_a_warning(caplog):
  cfg = _cfg(
    _task('not_cacheable'),
    {'inputs': 4, 'targets': 4},
    use_cached=True,
    split='train',
    batch_size=1,
  )
  for _ in range(2):
    next(_open(cfg))
  assert caplog.text.count("use_cached has no effect on the task 'not_cacheable'") == 1


def test_rejected_converters():
  with pytest.raises(ConfigError, match="'encoder_decode'.*mean 'encoder_decoder'"):
    data.open_train_iterator(_cfg(), _layout(), feature_converter='encoder_decode')
  with pytest.raises(ConfigError, match="without the feature 'inputs'"):
    data.open_train_iterator(_cfg(), _layout(), feature_converter=seqio.LMFeatureConverter)


def test_empty_and_exhausted_sources_say_so():
  empty = _task('empty', [lambda ds: ds.filter(lambda ex: False)])
  with pytest.raises(DataError, match="'train' of 'empty' is empty"):
    next(_open(_cfg(empty, split='train', batch_size=4)))
  with pytest.raises(DataError, match="'train' of 'empty' is empty"):
    data.open_eval_iterators(_cfg(empty, split='train', batch_size=4), _layout(batch_size=4))
  finite = _open(_cfg(_task('finite', [lambda ds: ds.take(10)]), split='train', batch_size=4))
  _take(finite, 2)
  with pytest.raises(DataError, match="'finite' is exhausted after 2 batches"):
    next(finite)


def test_data_ends_after_its_epochs():
  task = _task('ends', texts='abcdefg')
  cfg = _cfg(task, {'inputs': 2, 'targets': 2}, split='train', batch_size=4, num_epochs=3)
  shuffled = [
    row
    for batch in _open(dataclasses.replace(cfg, shuffle=True))
    for row in batch['encoder_input_tokens']
  ]
  counts = np.unique(np.stack(shuffled)[:, 0], return_counts=True)[1]
  assert sorted(counts) == [2] + 6 * [3]  # of 21 examples, the last does not fill a batch
  iterator, endless = _open(cfg), _open(dataclasses.replace(cfg, num_epochs=None))
  batches = _take(iterator, 3)
  middle = iterator.get_state()
  batches += list(iterator)
  assert len(batches) == 5 and next(iterator, None) is None
  for batch in batches:
    _assert_equal(batch, next(endless))
  resumed = _open(cfg)
  resumed.set_state(iterator.get_state())
  assert next(resumed, None) is None
  with pytest.raises(DataError, match='num_epochs: saved 3, now 4'):
    _open(dataclasses.replace(cfg, num_epochs=4)).set_state(middle)
  # Shards of 4 and 3 examples need not end together.
  shards = [_open(cfg, index, 2) for index in range(2)]
  assert (
    [len(list(shard)) for shard in shards] == [6, 4]
    and not shards[0].ends_together
    and iterator.ends_together
  )


def test_a_model_without_an_end_of_sequence_has_its_ids_in_the_message(tmp_path):
  vocabulary = seqio.SentencePieceVocabulary(train_model(tmp_path / 'x.model', eos_id=-1), 10)
  feature = seqio.Feature(vocabulary, required=False)
  task = _task('no_end', output_features={'inputs': feature, 'targets': feature})
  cfg = _cfg(task, {'inputs': 8, 'targets': 8}, split='train', batch_size=1)
  model = types.SimpleNamespace(input_vocabulary=vocabulary, output_vocabulary=vocabulary)
  with pytest.raises(ConfigError, match='pad_id = 0, eos_id = -1.*t5x_lite vocab'):
    data.verify_matching_vocabs(cfg, model)


def test_the_vocabulary_of_a_model_whose_file_is_missing_is_named(tmp_path):
  paths = train_model(tmp_path / 'x.model'), str(tmp_path / 'missing.model')
  of_data, of_model = (seqio.SentencePieceVocabulary(path, 10) for path in paths)
  feature = seqio.Feature(of_data, required=False)
  task = _task('other_file', output_features={'inputs': feature, 'targets': feature})
  cfg = _cfg(task, {'inputs': 8, 'targets': 8}, split='train', batch_size=1)
  model = types.SimpleNamespace(input_vocabulary=of_model, output_vocabulary=of_model)
  with pytest.raises(ConfigError, match=r"got SentencePieceVocabulary\('.*/missing.model', 10, "):
    data.verify_matching_vocabs(cfg, model)


def test_failing_preprocessors_are_named():
  def fail(ds):
    return ds.map(lambda ex: {**ex, 'inputs': tf.ensure_shape(ex['inputs'], [7])})

  with pytest.raises(
    DataError, match="'train' of 'failing' failed while reading: .*Shape"
  ) as caught:
    _open(_cfg(_task('failing', [fail]), split='train', batch_size=4))
  assert '\n' not in str(caught.value)


def test_mixture_without_usable_rates():
  with pytest.raises(
    ConfigError, match='`Mixture zero.rates` must be numbers >= 0, one of them > 0'
  ):
    seqio_features.rates(seqio.Mixture('zero', [(_task('a'), 0.0)]))
  with pytest.raises(ConfigError, match='`Mixture none.rates` must be numbers.*default_rate'):
    seqio_features.rates(seqio.Mixture('none', [(_task('a'), None)]))


def test_module_registers_a_task(tmp_path, monkeypatch):
  (tmp_path / 'seqio_tasks_of_a_user.py').write_text(
    'import seqio\n'
    'from t5x_lite.data.seqio import tasks as seqio_tasks\n'
    "seqio.MixtureRegistry.add('users_mixture', [('python_keyword_cloze', 2.0)])\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  cfg = _cfg('users_mixture', module='seqio_tasks_of_a_user')
  _assert_equal(_take(_open(cfg), 1)[0], _take(_open(_cfg()), 1)[0])


def test_texts_behind_a_task():
  lines, keywords = zip(*corpora.python_keyword_cloze('validation')[:4], strict=True)
  assert data.read_task_texts(_cfg(), 4) == {'inputs': list(lines), 'targets': list(keywords)}
  # One that keeps no texts gives what its vocabulary decodes; of a mixture, task by task.
  texts = data.read_task_texts(_cfg('python_cloze_and_docs', _BOTH), 2)
  ours = data.read_task_texts(_cfg('python_cloze_and_docs', _BOTH, source='builtin'), 2)
  assert ours['inputs'][:2] == list(lines[:2]) and len(ours['inputs']) == 4
  assert {name: sorted(of_feature) for name, of_feature in texts.items()} == {
    name: sorted(of_feature) for name, of_feature in ours.items()
  }
  with pytest.raises(ConfigError, match="without the feature 'input' .*Did you mean 'inputs'"):
    data.read_task_texts(_cfg(lengths={'input': 4}), 4)


# --- Vocabularies ---------------------------------------------------------------------------------------


def test_byte_vocabularies_agree():
  ours, theirs = data.ByteVocabulary(125), seqio.ByteVocabulary(125)
  assert data.get_vocabulary(_cfg()) == (theirs, theirs)
  for name in ('vocab_size', 'eos_id', 'unk_id', 'pad_id', 'extra_ids'):
    assert getattr(ours, name) == getattr(theirs, name)
  rng = np.random.default_rng(0)
  for _ in range(200):
    ids = rng.integers(0, 384, rng.integers(0, 20)).tolist()
    assert ours.decode(ids) == theirs.decode(ids)
  for line in corpora.python_docs('validation')[:20]:
    assert ours.encode(line) == list(theirs.encode(line))
  from t5.data.preprocessors import sentinel_id

  assert (
    vocabularies_lib.sentinel_id(theirs)
    == vocabularies_lib.sentinel_id(ours)
    == sentinel_id(theirs)
    == 383
  )


def test_vocabularies_are_compared_across_families(tmp_path):
  import sentencepiece

  sentences = corpora.python_docs('validation')[0].splitlines() * 2
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(sentences),
    model_prefix=str(tmp_path / 'tiny'),
    vocab_size=60,
    hard_vocab_limit=False,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
  )
  path = str(tmp_path / 'tiny.model')
  pairs = [
    (data.ByteVocabulary(125), seqio.ByteVocabulary(125), seqio.ByteVocabulary(100)),
    (
      data.PassThroughVocabulary(9, 1),
      seqio.PassThroughVocabulary(9, 1),
      seqio.PassThroughVocabulary(9),
    ),
    (
      data.SentencePieceVocabulary(path, 5),
      seqio.SentencePieceVocabulary(path, 5),
      seqio.SentencePieceVocabulary(path, 6),
    ),
  ]
  for ours, same, other in pairs:
    assert data.same_vocabulary(ours, same) and data.same_vocabulary(same, ours)
    assert not data.same_vocabulary(ours, other) and not data.same_vocabulary(other, ours)
  ours, theirs, _ = pairs[2]
  text = 'The statement <extra_id_0> is <extra_id_4>'
  ids = theirs.encode(text)
  assert (
    ours.encode(text) == ids
    and ours.decode(ids) == theirs.decode(ids)
    and ours.vocab_size == theirs.vocab_size
  )

  @dataclasses.dataclass
  class Model:
    input_vocabulary: object
    output_vocabulary: object

  data.verify_matching_vocabs(_cfg(), Model(data.ByteVocabulary(125), data.ByteVocabulary(125)))
  with pytest.raises(ConfigError, match='input vocabulary'):
    data.verify_matching_vocabs(_cfg(), Model(data.ByteVocabulary(100), data.ByteVocabulary(125)))


# --- Faults -------------------------------------------------------------------------------


def _faulty_task(name, fault):
  """Returns a Task whose pipeline calls `fault` with the number of each example, in the background."""

  def dataset_fn(split, shuffle_files, seed=None):
    dataset = tf.data.Dataset.range(4000).map(
      lambda i: tf.ensure_shape(tf.numpy_function(fault, [i], tf.int64), ()), num_parallel_calls=2
    )
    options = tf.data.Options()
    # Like pipelines that call Python and can be saved.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    dataset = dataset.with_options(options)
    return dataset.map(
      lambda i: {'inputs': tf.strings.as_string(i), 'targets': tf.strings.as_string(i + 1)}
    )

  return _task(name, dataset_fn=dataset_fn)


def test_a_missing_file_is_not_a_change_of_the_pipeline(tmp_path, monkeypatch):
  path, away = tmp_path / 'lines.txt', tmp_path / 'away.txt'
  path.write_text('\n'.join(map(str, range(400))))
  iterator = _open(
    _cfg(
      _task(
        'lines',
        dataset_fn=lambda split, shuffle_files, seed=None: tf.data.TextLineDataset([str(path)]).map(
          lambda line: {'inputs': line, 'targets': line}
        ),
      ),
      split='train',
      batch_size=4,
      shuffle=True,
    )
  )
  state = iterator.get_state()
  expected = _take(iterator, 3)
  path.rename(away)
  # Opening a position opens its files.
  with pytest.raises(
    DataUnavailableError, match=r'cannot be opened at the saved position: .*No such file[^.]*\.$'
  ):
    iterator.set_state(state)
  away.rename(path)
  iterator.set_state(state)
  for first, second in zip(_take(iterator, 3), expected, strict=True):
    _assert_equal(first, second)

  def unavailable(*args):
    raise tf.errors.UnavailableError(None, None, 'Socket closed')

  monkeypatch.setattr(tf.train.Checkpoint, 'read', unavailable)
  with pytest.raises(DataUnavailableError, match='Socket closed'):
    iterator.set_state(state)


@pytest.mark.full
def test_a_pipeline_that_fails_once_or_stalls_keeps_its_order(monkeypatch, caplog):
  # These times are not options, and the real ones would make the test slow.
  monkeypatch.setattr(global_batches, '_FIRST_DELAY_SECONDS', 0.01)
  monkeypatch.setattr(global_batches, '_PATIENCE_SECONDS', 0.5)
  monkeypatch.setattr(global_batches, '_STALLED_CLOSE_SECONDS', 0.01)
  partitioner, faults, released = PjitPartitioner(num_partitions=1), [], threading.Event()

  def fault(number):
    if number == 2000 and faults:
      if faults.pop() == 'stall':
        released.wait()
      else:
        raise OSError(5, 'Input/output error')
    return number

  cfg = _cfg(_faulty_task('faulty', fault), split='train', batch_size=8, shuffle=True)

  def opened(**kwargs):
    return data.GlobalBatches(_open(cfg), partitioner, **kwargs)

  with opened() as batches:
    expected = [np.asarray(next(batches)['decoder_target_tokens']) for _ in range(300)]
  faults.append('fail')
  with opened(num_retries=1) as batches:
    for number, rows in enumerate(expected):
      np.testing.assert_array_equal(next(batches)['decoder_target_tokens'], rows)
      if number == 20:
        batches.get_state()
  assert not faults
  # Saved when TensorFlow has met the error ahead of the batches: the first retry meets it again, the second does not.
  faults.append('fail')
  caplog.clear()
  with opened(num_retries=2, prefetch=1) as batches:
    is_saved = False
    for number, rows in enumerate(expected):
      np.testing.assert_array_equal(next(batches)['decoder_target_tokens'], rows)
      if number == 20 or not faults and not is_saved:
        is_saved = not faults
        batches.get_state()
  assert [record.args[2] for record in caplog.records] == [1, 2]
  faults.append('stall')
  batches, number = opened(), 0
  state = batches.get_state()
  while batches.take(2.0) is not None:
    number += 1
  assert not faults and 100 < number < 260
  state = batches.get_state()
  assert b'"num_batches": %d' % number in state['skipped_batches.json']
  with opened() as resumed:
    resumed.set_state(state)
    for rows in expected[number:]:
      np.testing.assert_array_equal(next(resumed)['decoder_target_tokens'], rows)
  released.set()
  batches.close()
