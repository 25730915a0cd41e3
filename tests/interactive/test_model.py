"""Models in notebooks: training, prediction, scores, evaluation, saving, opening, and errors."""

import functools
import logging

import gin
import jax
import numpy as np
import pytest

from t5x_lite import adapters
from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import gin_utils
from t5x_lite import models
from t5x_lite import notebook
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import trainer
from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError, ConfigError, DataError
from t5x_lite.interactive import model as lib
from t5x_lite.networks import t5
from t5x_lite.storage import files
from t5x_lite.trainer import summaries
from tests import stores
from tests.apps.common import cloze_run
from tests.networks import network_cases as cases

VOCABULARY = data.ByteVocabulary(extra_ids=125)
LENGTHS = {'inputs': 12, 'targets': 6}
BATCH_SIZE = 4
EXAMPLES = [
  {'input': '<extra_id_0> x in y:', 'target': 'for'},
  {'input': 'x <extra_id_0> y', 'target': 'is'},
]


@functools.cache
def _model(adapter=None):
  network = t5.Transformer(
    t5.T5Config(
      vocab_size=384,
      emb_dim=16,
      num_heads=2,
      num_encoder_layers=1,
      num_decoder_layers=1,
      head_dim=8,
      mlp_dim=16,
      mlp_activations=('gelu', 'linear'),
      dropout_rate=0.0,
    )
  )
  return models.EncoderDecoderModel(
    network,
    VOCABULARY,
    VOCABULARY,
    optimizers.sgd(),
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
    adapter=adapter,
  )


@functools.cache
def _partitioner():
  devices = np.array(jax.devices()[:2]).reshape(2, 1)
  return partitioning.PjitPartitioner(
    mesh=jax.sharding.Mesh(devices, ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  )


def _make(output_dir, checkpoint_path='', restore_mode='latest', **kwargs):
  arguments = {
    'batch_size': BATCH_SIZE,
    'task_feature_lengths': LENGTHS,
    'partitioner': _partitioner(),
    'model': _model(),
    'dtype': 'float32',
    'save_period': None,
    'trainer_cls': functools.partial(trainer.Trainer, learning_rate_fn=lambda step: 0.5),
    **kwargs,
  }
  return lib.InteractiveModel(
    output_dir=str(output_dir),
    restore_mode=restore_mode,
    checkpoint_path=str(checkpoint_path),
    **arguments,
  )


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A model after a training loop on two examples, the loop's results, and the loss before it."""
  made = _make(tmp_path_factory.mktemp('trained'))
  made.train_step(EXAMPLES)
  first_loss = float(made.train_summary['loss'].value)
  results = made.train_loop(
    40,
    eval_period=20,
    train_batches=EXAMPLES,
    predict_batches=EXAMPLES,
    score_batches=[EXAMPLES[:1], EXAMPLES[1:]],
    eval_batches=EXAMPLES,
    metrics_fns=[data.exact_match],
  )
  yield made, results, first_loss
  made.close()


def _params(made):
  return jax.device_get(tree_utils.to_dict(made.train_state.params))


def _ids(text, length):
  ids = [
    383 if part == '\0' else byte + 3
    for part in text.replace('<extra_id_0>', '\0')
    for byte in part.encode()
  ]
  return (ids[: length - 1] + [1] + [0] * length)[:length]


def _batch(examples):
  """Return model features by hand."""
  targets = np.array([_ids(e['target'], LENGTHS['targets']) for e in examples], np.int32)
  return {
    'encoder_input_tokens': np.array(
      [_ids(e['input'], LENGTHS['inputs']) for e in examples], np.int32
    ),
    'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
    'decoder_target_tokens': targets,
    'decoder_loss_weights': (targets > 0).astype(np.int32),
  }


# ---- Training --------------------------------------------------------------------------------------------------------


def test_train_loop_learns_two_examples(trained):
  made, (predictions, scores, metrics), first_loss = trained
  assert made.step == int(made.train_state.step) == 41
  assert float(made.train_summary['loss'].value) < 0.3 * first_loss
  assert [text for _, text in predictions] == ['for', 'is'] and metrics == {'exact_match': 1.0}
  assert [example['targets_pretokenized'] for example, _ in scores] == ['for', 'is']
  # After the first step of the loop, after 20 more, and at its end.
  rows = summaries.read_metrics(
    summaries.metrics_files(made.output_dir)['inference_eval/interactive']
  )
  assert [row['step'] for row in rows] == [2, 22, 41] and rows[-1]['exact_match'] == 1.0


def test_rows_that_fill_a_batch_do_not_count(tmp_path):
  made = _make(tmp_path, save_period=2)
  rows = _batch(EXAMPLES)

  def loss_by_hand():
    return -sum(score for _, score in made.score(EXAMPLES)) / rows['decoder_loss_weights'].sum()

  expected = loss_by_hand()
  made.train_step(EXAMPLES)
  np.testing.assert_allclose(float(made.train_summary['cross_ent_loss'].value), expected, rtol=1e-5)
  assert not checkpoints.all_steps(tmp_path)
  # The same examples as model features that somebody else has made.
  expected = loss_by_hand()
  made.train_step_from_batch_iterator(
    iter([{name: np.pad(x, ((0, 2), (0, 0))) for name, x in rows.items()}])
  )
  np.testing.assert_allclose(float(made.train_summary['cross_ent_loss'].value), expected, rtol=1e-5)
  for _ in range(2):
    made.train_step(EXAMPLES)
  assert checkpoints.all_steps(tmp_path) == [made.step] == [4]
  made.close()


# ---- Inference -------------------------------------------------------------------------------------------------------


def test_score_is_the_models(trained):
  made, _, _ = trained
  examples = [
    *EXAMPLES,
    {'input': 'a', 'target': 'b'},
    {'input': 'c', 'target': ''},
    {'input': 'long ' * 9, 'target': 'word ' * 9},
  ]
  pairs = made.score(examples)
  expected = cases.jit(_model().score_batch)(_params(made), _batch(examples))
  np.testing.assert_allclose([score for _, score in pairs], expected, rtol=1e-5)
  assert (
    pairs[4][0]['inputs'].tolist() == _ids('long ' * 9, 12) and len(pairs[0][0]['targets']) == 4
  )


def test_prediction_is_the_models(trained):
  made, _, _ = trained
  texts = [*(e['input'] for e in EXAMPLES), 'a', b'bc', 'x = y']
  pairs, aux = made.predict_with_aux(texts)
  batch = _batch([{'input': t if isinstance(t, str) else t.decode(), 'target': ''} for t in texts])
  tokens, scores = cases.jit(lambda p, b: _model().predict_batch_with_aux(p, b))(
    _params(made), batch
  )
  assert [text for _, text in pairs] == [
    VOCABULARY.decode(row) for row in np.asarray(tokens).tolist()
  ]
  np.testing.assert_allclose(aux['scores'], scores['scores'], rtol=1e-5)
  assert [e['inputs_pretokenized'] for e, _ in pairs] == [*texts[:3], 'bc', 'x = y']


def test_options_of_inference(trained):
  made, _, _ = trained
  _, sown = made.infer_with_preprocessors(
    lib.InferenceType.SCORE, EXAMPLES, [], return_intermediates=True
  )
  (tokens,) = sown['decoder']['target_tokens']
  np.testing.assert_array_equal(tokens, _batch(EXAMPLES)['decoder_target_tokens'])
  with pytest.raises(ConfigError, match='must be numbers, strings or functions'):
    made.infer_with_preprocessors(
      lib.InferenceType.SCORE, EXAMPLES, [], return_intermediates=np.ones(2)
    )


def test_preprocessors_in_plain_python(trained):
  made, _, _ = trained
  raw = [{'question': 'X', 'answers': ['for', 'while']}, {'question': 'drop me', 'answers': []}]
  preprocessors = [
    lib.over_examples(lambda examples: [e for e in examples if e['answers']]),
    lib.map_over_examples(lambda e: {'inputs': e['question'].lower(), 'targets': e['answers'][0]}),
  ]
  pairs, _ = made.infer_with_preprocessors(lib.InferenceType.SCORE, raw, preprocessors)
  assert [score for _, score in pairs] == [
    score for _, score in made.score([{'input': 'x', 'target': 'for'}])
  ]
  # Ids are taken as they are.
  ids = {'inputs': [123, 1], 'targets': np.array([105, 114, 117, 1])}
  assert made.score([ids])[0][1] == pairs[0][1]


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def test_metrics_of_all_kinds(trained):
  made, _, _ = trained
  seen = {}

  def scored(targets, scores):
    seen['scores'] = scores
    return {'mean_score': float(np.mean(scores))}

  def with_aux(targets, predictions, aux_values, power=2):
    return {'num_targets': len(targets), 'num_scores': len(aux_values['scores'])}

  def upper(text, example, is_target):
    return text.upper() if is_target else example['targets_pretokenized'].upper()

  metrics = made.evaluate(EXAMPLES, [data.exact_match, scored, with_aux])
  assert metrics == {
    'exact_match': 1.0,
    'mean_score': np.mean(seen['scores']),
    'num_targets': 2,
    'num_scores': 2,
  }
  assert seen['scores'] == [score for _, score in made.score(EXAMPLES)]
  num_ids = sum(len(example['target']) + 1 for example in EXAMPLES)  # bytes and the end
  assert made.evaluate(EXAMPLES, data.metrics('perplexity')) == {
    'perplexity': pytest.approx(np.exp(-sum(seen['scores']) / num_ids))
  }
  wrong = [{'input': e['input'], 'target': 'no'} for e in EXAMPLES]
  assert made.evaluate(wrong, [data.exact_match]) == {'exact_match': 0.0}
  assert made.evaluate_with_preprocessors(wrong, [], [data.exact_match], upper) == {
    'exact_match': 1.0
  }
  with pytest.raises(DataError, match='exact_match'):
    made.evaluate(EXAMPLES, [data.exact_match, data.exact_match])
  for fn in (lambda a, b: {}, lambda targets: {}):
    with pytest.raises(ConfigError, match=r'\(targets, predictions\)'):
      made.evaluate(EXAMPLES, [fn])


# ---- Saving and opening ----------------------------------------------------------------------------------------------


def test_saved_and_opened_again(trained, tmp_path):
  made, (predictions, _, _), _ = trained
  made.save_checkpoint()
  path, mode = made.checkpoint
  for again in (_make(tmp_path, path, mode), _make(tmp_path, made.output_dir)):
    assert again.step == 41
    jax.tree.map(
      np.testing.assert_array_equal,
      jax.device_get(again.train_state.state_dict()),
      jax.device_get(made.train_state.state_dict()),
    )
    again.close()
  assert [t for _, t in again.predict_with_aux(EXAMPLES)[0]] == [text for _, text in predictions]


def test_an_adapter_of_a_restored_model(trained, tmp_path):
  """A checkpoint without an adapter gets a new one, which alone is trained; its own checkpoints keep theirs."""
  made, _, _ = trained
  made.save_checkpoint()
  model = _model(adapters.Lora(rank=2))
  tuned = _make(tmp_path, made.checkpoint[0], 'specific', model=model)
  before = _params(tuned)
  tuned.train_step(EXAMPLES)
  tuned.save_checkpoint()
  changed = {
    path
    for (path, old), new in zip(
      tree_utils.named_leaves(before), jax.tree.leaves(_params(tuned)), strict=True
    )
    if not np.array_equal(old, new)
  }
  assert changed and all(path.endswith('/lora_b') for path in changed)
  again = _make(tmp_path, tuned.checkpoint[0], 'specific', model=model)
  jax.tree.map(np.testing.assert_array_equal, _params(again), _params(tuned))


def test_only_its_own_checkpoints_are_deleted(tmp_path):
  for steps in ((1, 2), range(3, 9)):
    made = _make(tmp_path)
    for step in steps:
      made.trainer.train_state = made.train_state.replace_step(step)
      made.save_checkpoint()
    assert made.checkpoint == (str(tmp_path / f'checkpoint_{step}'), 'specific')
    made.close()
  assert checkpoints.all_steps(tmp_path) == [1, 2, 4, 5, 6, 7, 8]


def test_a_new_model_has_nothing_to_show_and_preemption_saves_it(tmp_path):
  made = _make(tmp_path)
  train_step = made.train_step_from_batch_iterator
  with pytest.raises(ConfigError, match='save_checkpoint'):
    lib.get_gin_config_from_interactive_model(made, lib.T5XScriptType.INFERENCE, 'task', '', '')
  with pytest.raises(ConfigError, match='train_step'):
    made.train_summary

  def batches():
    raise trainer.PreemptionError('the machine goes away')
    yield

  made.train_step_from_batch_iterator = lambda iterator: train_step(batches())
  with pytest.raises(trainer.PreemptionError, match='the machine goes away'):
    made.train_step(EXAMPLES)
  assert checkpoints.all_steps(tmp_path) == [0]
  made.close()


# ---- Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'examples, error, fragments',
  [
    ([], DataError, ['empty']),
    ('one text', DataError, ['non-empty list of texts', "'one text'"]),
    ([3], DataError, ['Example 0 must be a text', '3 of type int']),
    ([{'inptu': 'a', 'target': 'b'}], ConfigError, ["'inptu'", "Did you mean 'input'?"]),
    ([{'input': 'a', 'inputs': 'b'}], DataError, ['with each feature once', "'inputs': 'b'"]),
    ([{'input': [1.5]}], DataError, ["'inputs' of example 0"]),
    (['a', {'input': [384]}], DataError, ['example 1', '384']),
    ([b'\xff'], DataError, ['utf-8', '0xff']),
    (['\ud800'], DataError, ['surrogate']),
    (EXAMPLES * 3, DataError, ['got 6', 'at most 4 examples, one batch', 'train_loop']),
  ],
)
def test_bad_examples_are_rejected(trained, examples, error, fragments):
  made, _, _ = trained
  with pytest.raises(error) as caught:
    made.train_step(examples)
  for fragment in fragments:
    assert fragment in str(caught.value)
  assert made.step == 41


def test_too_long_warns_once(tmp_path, caplog):
  made = _make(tmp_path)
  with caplog.at_level(logging.WARNING):
    made.score([{'input': 'a' * 20, 'target': 'b'}, {'input': 'c' * 30, 'target': 'd'}])
  assert len(caplog.records) == 1 and '21 ids and is truncated to 12' in caplog.text
  made.close()


@pytest.mark.parametrize(
  'kwargs, error, fragments',
  [
    ({'batch_size': 3}, ConfigError, ['3', '2']),
    ({'batch_size': 0}, ConfigError, ['batch_size']),
    ({'task_feature_lengths': {'inputs': 8}}, ConfigError, ['targets']),
    ({'task_feature_lengths': {'inputs': 8, 'targets': 8, 'target': 3}}, ConfigError, ["'target'"]),
    ({'save_period': 0}, ConfigError, ['save_period']),
    (
      {'checkpoint_path': 'no/such/checkpoint_3', 'restore_mode': 'specific'},
      CheckpointError,
      ['no/such'],
    ),
    ({'checkpoint_path': 'no/such'}, CheckpointError, ['no/such', 'checkpoint_path']),
    ({'checkpoint_path': 'no/such', 'restore_mode': 'all'}, ConfigError, ["'all'", "'latest'"]),
    ({'checkpoint_path': 'no/such', 'restore_mode': 'newest'}, ConfigError, ["'newest'"]),
  ],
)
def test_bad_arguments_are_rejected(tmp_path, kwargs, error, fragments):
  with pytest.raises(error) as caught:
    _make(tmp_path / 'out', **kwargs)
  for fragment in fragments:
    assert fragment in str(caught.value)
  assert not (tmp_path / 'out').exists()


def test_bad_loops_are_rejected(trained):
  made, _, _ = trained
  for kwargs, message in (
    ({'num_steps': 0}, 'num_steps` must be .* got 0'),
    ({'num_steps': 2, 'eval_period': 0}, 'eval_period'),
    ({'num_steps': 2, 'eval_batches': EXAMPLES}, 'eval_batches'),
  ):
    with pytest.raises(ConfigError, match=message):
      made.train_loop(**kwargs)
  assert made.step == 41


# ---- To the commands -------------------------------------------------------------------------------------------------


_IMPORTS = "from t5x_lite import partitioning\ninclude 'models/t5_1_1_tiny.gin'"


@pytest.mark.parametrize('kind', list(lib.T5XScriptType))
def test_gin_files_for_the_commands(trained, tmp_path, kind):
  made, _, _ = trained
  made.save_checkpoint()
  text = lib.get_gin_config_from_interactive_model(
    made,
    kind,
    'python_keyword_cloze',
    'partitioning.PjitPartitioner.num_partitions = 2',
    'VOCABULARY_FILE = "x.model"',
    train_steps=7,
    imports_str=_IMPORTS,
  )
  command = {lib.T5XScriptType.INFERENCE: 'infer', lib.T5XScriptType.EVALUATION: 'eval'}.get(
    kind, 'train'
  )
  entry = {
    'eval': 't5x_lite.apps.evaluate.evaluate',
    'infer': 't5x_lite.apps.infer.infer',
    'train': 't5x_lite.apps.train.train',
  }[command]
  path = tmp_path / 'run.gin'
  path.write_text(text)
  configuration = gin_utils.load(entry, gin_utils.read([str(path)]))
  assert configuration.argument('partitioner').mesh.shape['model'] == 2
  if command == 'train':
    assert configuration.argument('total_steps') == 41 + 7
    restore = configuration.argument('checkpoint_cfg').restore
  else:
    restore = configuration.argument('restore_checkpoint_cfg')
  assert (restore.path, restore.mode) == made.checkpoint
  gin.clear_config()


@stores.mostly('gcs')
def test_a_run_in_a_store(store):
  folder = f'{store.root}/run'
  cloze_run.save(files.path(folder), {'inputs': 16, 'targets': 4})
  model = notebook.open_run(folder, batch_size=2)
  assert model.output_dir == f'{folder}-interactive' and model.step == 5
  model.save_checkpoint()
  saved = f'{model.output_dir}/checkpoint_5'
  assert notebook.open_run(folder, checkpoint_path=saved, restore_mode='specific').step == 5
  assert 'run-interactive/model-info.txt' in store.names()
  gin.clear_config()
