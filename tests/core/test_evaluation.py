"""Evaluation by decoding: batches by length, both halves, what is written, names of metrics."""

import contextlib
import functools
import json
import threading

import clu.values
import jax
import numpy as np
import pytest

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import state_init
from t5x_lite import summaries
from t5x_lite.data.interfaces import EvalTask, IndexedBatches
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.evaluation import batching
from t5x_lite.evaluation import judging
from tests.core import toy_model
from tests.core import toy_run


# ---- Batches by length -----------------------------------------------------------------------------------------------


def _rows(input_lengths, target_lengths, input_length=64, target_length=16):
  def padded(lengths, full):
    return (np.arange(full) < np.asarray(lengths)[:, None]).astype(np.int32) * 5
  targets = padded(target_lengths, target_length)
  return {'encoder_input_tokens': padded(input_lengths, input_length), 'decoder_target_tokens': targets,
          'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1], 'decoder_loss_weights': targets // 5}


@pytest.mark.parametrize('kind', ['predict', 'predict_with_aux', 'score', 'score_with_intermediates'])
@pytest.mark.parametrize('num_examples, batch_size, max_num_lengths', [(300, 4, 4), (37, 8, 4), (3, 8, 4), (64, 1, 2)])
def test_every_example_is_in_one_batch_and_nothing_of_it_is_cut_off(kind, num_examples, batch_size, max_num_lengths):
  rng = np.random.default_rng(0)
  needed, targets = rng.integers(1, 61, num_examples), rng.integers(0, 11, num_examples)
  rows = _rows(needed, targets)
  planned = batching.by_length(rows, batch_size, kind, max_num_lengths=max_num_lengths)
  indices = np.concatenate([batch.indices for batch in planned])
  assert sorted(indices[indices >= 0]) == list(range(num_examples))
  assert all(batch.indices.shape == (batch_size,) and batch.indices.dtype == np.int32 for batch in planned)
  # At most one batch is not full.
  assert sum((batch.indices < 0).any() for batch in planned) <= 1 and len(planned) == -(-num_examples // batch_size)
  for batch in planned:
    real = batch.indices[batch.indices >= 0]
    for name, length in batch.lengths.items():
      assert not rows[name][real, length:].any() and length <= rows[name].shape[1]
    assert kind == 'score' or all(name == 'encoder_input_tokens' for name in batch.lengths)
  lengths = [batch.lengths.get('encoder_input_tokens', 64) for batch in planned]
  assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) <= max_num_lengths
  if kind == 'score_with_intermediates':
    assert all(not batch.lengths for batch in planned)
  elif num_examples == 300:
    assert len(set(lengths)) == 2


def test_lengths_are_the_best_ones():
  rng = np.random.default_rng(1)
  needs = np.concatenate([rng.integers(1, 20, 500), rng.integers(200, 250, 40), [500]])

  def positions(lengths):
    return sum(min(length for length in lengths if length >= need) for need in needs.tolist())

  found = batching.choose_lengths(needs, 512, max_num_lengths=3)
  ladder = list(range(8, 505, 8))
  best = min(positions((a, b, 504)) for a in ladder for b in ladder if a < b < 504)
  assert positions(found) == best and len(found) == 3 and found[-1] == 504
  # Where it saves little, there is one length.
  assert batching.choose_lengths(np.full(100, 400), 512, max_num_lengths=4) == [400]
  assert batching.choose_lengths(np.arange(493, 513), 512, max_num_lengths=4) == [512]
  assert batching.choose_lengths(np.array([0]), 5, max_num_lengths=4) == [5]


def test_decoder_only_rows_are_cut_for_scores_alone():
  rows = {name: array for name, array in _rows([1] * 40, [3] * 40, target_length=64).items()
          if name.startswith('decoder')} | {'decoder_causal_attention': np.ones((40, 64), np.int32)}
  rows['decoder_causal_attention'][:, 5:] = 0
  assert all(not batch.lengths for batch in batching.by_length(rows, 4, 'predict', max_num_lengths=4))
  assert all(set(batch.lengths) == set(rows) and set(batch.lengths.values()) == {8}
             for batch in batching.by_length(rows, 4, 'score', max_num_lengths=4))


@pytest.mark.parametrize('extra', [{'my_feature': np.ones((40, 8))},
                                   {'decoder_causal_attention': np.ones((40, 8, 3), np.int32)}])
def test_what_is_not_known_is_not_cut(extra):
  planned = batching.by_length(_rows([1] * 40, [3] * 40) | extra, 4, 'score', max_num_lengths=4)
  assert [batch.indices.tolist() for batch in planned] == np.arange(40).reshape(10, 4).tolist()
  assert all(not batch.lengths for batch in planned)


# ---- The device's half and the host's --------------------------------------------------------------------------------


@functools.cache
def _state(width=8):
  model = toy_model.make_model(width=width)
  initializer = state_init.TrainStateInitializer(
      None, model.get_initial_variables, {'decoder_input_tokens': (8, 6)}, toy_run.partitioner())
  return model, initializer.from_scratch(jax.random.key(3)), initializer.train_state_axes


def _task(name='letters', count=20, **kwargs):
  kwargs = {'metric_fns': (data.exact_match,), **kwargs}
  rng = np.random.default_rng(count)
  examples, texts, vocabulary = [], [], toy_model.ToyVocabulary()
  for _ in range(count):
    targets = np.append(rng.integers(2, toy_model.VOCAB_SIZE, rng.integers(1, 6)), 1).astype(np.int32)
    examples.append({'inputs': targets[::-1].copy(), 'targets': targets})
    texts.append({'targets_pretokenized': vocabulary.decode(targets)})
  return data.BuiltinTask(name=name, splits=('validation',), vocabularies={'inputs': vocabulary, 'targets': vocabulary},
                          table_fn=lambda split, lengths: data.StaticExamples(examples, texts), **kwargs)


def _evaluator(task, model_dir=None, *, model=None, use_memory_cache=True, concurrent_metrics=False, **kwargs):
  cfg = data.DatasetConfig(task, {'inputs': 6, 'targets': 6}, 'validation', 8, False, 0, source='builtin',
                           use_memory_cache=use_memory_cache)
  return evaluation.InferenceEvaluator(
      cfg, None, model or _state()[0], toy_run.partitioner(), model_dir, None,
      cfg=evaluation.InferenceEvalConfig(**kwargs), concurrent_metrics=concurrent_metrics)


def _predictions(model_dir, task='letters', step=7):
  path = model_dir / 'inference_eval' / task / f'predictions-{step}.jsonl'
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize('kwargs', [{}, {'batch_by_length': False}, {'use_memory_cache': False},
                                    {'concurrent_metrics': True}, {'max_num_lengths': 1}])
def test_each_example_is_predicted_once_however_they_are_batched(tmp_path, kwargs):
  model, state, axes = _state()
  evaluator = _evaluator(_task(), tmp_path, **kwargs)
  notes = []
  metrics = evaluator.evaluate(state, axes, step=7, note_fn=notes.append).result()
  evaluator.flush()
  evaluator.close()
  assert evaluator.num_batches == len(notes) == 3 and notes[1] == 'decoding letters: batch 2 of 3'
  rows = _predictions(tmp_path)
  task = evaluator.eval_tasks[0]
  params = jax.device_get(state.params)
  for row, example in zip(rows, task.examples, strict=True):
    inputs = np.pad(example['targets'], (1, 5 - len(example['targets'])))[None] if len(example['targets']) < 6 else (
        np.pad(example['targets'][:-1], (1, 0))[None])
    expected = model.predict_batch(params, {'decoder_input_tokens': inputs})
    assert row['prediction'] == toy_model.ToyVocabulary().decode(np.asarray(expected)[0].tolist())
    assert row['targets'] == example['targets_pretokenized']
  right = np.mean([row['prediction'] == row['targets'] for row in rows])
  assert {name: value.value for name, value in metrics['letters'].items()} == {'exact_match': right}
  line, = summaries.read_metrics(tmp_path / 'inference_eval/letters/metrics.jsonl')
  assert line['step'] == 7 and line['exact_match'] == right


def test_numbers_of_examples(tmp_path):
  _, state, axes = _state()
  seen = []

  def count(targets, predictions):
    seen.append(len(targets))
    return {'count': len(predictions)}

  evaluator = _evaluator(_task(metric_fns=[count]), tmp_path, num_examples=5, num_examples_to_write=2)
  assert evaluator.evaluate(state, axes, step=7).result()['letters']['count'].value == 5.0
  evaluator.close()
  assert seen == [5] and [row['index'] for row in _predictions(tmp_path)] == [0, 1]


def test_means_over_tasks_are_those_of_the_tasks_that_have_the_metric(tmp_path):
  _, state, axes = _state()
  data_tasks = []
  for name, values in (('a', {'f1': 0.5, 'em': 1.0}), ('b', {'f1': 1.0}), ('c', {'note': clu.values.Text('x')})):
    data_tasks.append(_task(f'mean_{name}', metric_fns=[lambda targets, predictions, values=values: values]))
  for task in data_tasks:
    data.register_builtin_task(task)
  mixture = data.BuiltinMixture(name='mean_of_three', rates={task.name: 1.0 for task in data_tasks})
  evaluator = _evaluator(mixture, tmp_path)
  metrics = evaluator.evaluate(state, axes, step=7).result()
  evaluator.flush()
  evaluator.close()
  assert set(metrics) == {'mean_a', 'mean_b', 'mean_c'}
  line, = summaries.read_metrics(tmp_path / 'inference_eval/mean/metrics.jsonl')
  assert {k: v for k, v in line.items() if k != 'wall_time'} == {'step': 7, 'f1': 0.75, 'em': 1.0}
  assert evaluation.full_names('inference_eval', metrics) == {
      'inference_eval/mean_a/f1': 0.5, 'inference_eval/mean_a/em': 1.0, 'inference_eval/mean_b/f1': 1.0,
      'inference_eval/mean/f1': 0.75, 'inference_eval/mean/em': 1.0}


def test_the_host_works_while_the_device_turns_to_what_comes_next():
  _, state, axes = _state()
  may_go_on, judged = threading.Event(), []

  def slow(targets, predictions):
    assert may_go_on.wait(30)
    judged.append(threading.current_thread().name)
    return {'count': len(predictions)}

  evaluator = _evaluator(_task(metric_fns=[slow]), concurrent_metrics=True)
  future = evaluator.evaluate(state, axes, step=1)
  assert not future.done() and not judged
  jax.block_until_ready(jax.tree.map(lambda x: x + 1, state.params))  # the device is free meanwhile
  may_go_on.set()
  assert future.result()['letters']['count'].value == 20.0
  assert judged[0].startswith('inference-eval')
  evaluator.close()


@pytest.mark.parametrize('concurrent_metrics', [False, True])
def test_what_a_metric_raises_comes_out(concurrent_metrics):
  def broken(targets, predictions):
    raise KeyError('mine')

  _, state, axes = _state()
  evaluator = _evaluator(_task(metric_fns=[broken]), concurrent_metrics=concurrent_metrics)
  with pytest.raises(KeyError, match='mine'):
    evaluator.evaluate(state, axes, step=1).result()
  if concurrent_metrics:
    with pytest.raises(KeyError, match='mine'):
      evaluator.flush()
  evaluator.close()


@pytest.mark.parametrize('concurrent_metrics', [False, True])
def test_results_wait_for_a_disk_with_room(tmp_path, concurrent_metrics):
  _, state, axes = _state()
  evaluator = _evaluator(_task(), tmp_path, concurrent_metrics=concurrent_metrics)
  blocker = tmp_path / 'inference_eval'
  blocker.write_text('')  # No folder can be made.
  found = [evaluator.evaluate(state, axes, step=step).result()['letters']['exact_match'].value for step in (7, 8)]
  for _ in range(2):
    with pytest.raises(OSError, match='inference_eval'):
      evaluator.flush()
  blocker.unlink()
  # Room for the folder, but not for the file of one step: no partial file remains, and nothing is written out of order.
  (blocker / 'letters/predictions-7.jsonl').mkdir(parents=True)
  with pytest.raises(OSError, match='predictions-7'):
    evaluator.flush()
  assert [path.name for path in (blocker / 'letters').glob('predictions*')] == ['predictions-7.jsonl']
  (blocker / 'letters/predictions-7.jsonl').rmdir()
  found.append(evaluator.evaluate(state, axes, step=9).result()['letters']['exact_match'].value)
  evaluator.flush()
  assert [(row['step'], row['exact_match']) for row in summaries.read_metrics(blocker / 'letters/metrics.jsonl')] == [
      (step, number) for step, number in zip((7, 8, 9), found, strict=True)]
  assert _predictions(tmp_path, step=7) == _predictions(tmp_path, step=8) == _predictions(tmp_path, step=9) != []
  evaluator.close()


def test_an_exception_of_the_note_ends_the_evaluation():
  _, state, axes = _state()

  def note(text):
    if 'batch 2' in text:
      raise KeyboardInterrupt

  evaluator = _evaluator(_task())
  with pytest.raises(KeyboardInterrupt):
    evaluator.evaluate(state, axes, step=1, note_fn=note)
  evaluator.close()


# ---- Kinds of metrics ------------------------------------------------------------------------------------------------


class _RichModel(toy_model.ToyModel):
  """Gives auxiliary values, several decodes or a malformed output."""

  what = 'aux'

  def predict_batch_with_aux(self, params, batch, rng=None, *, flax_mutables=None):
    tokens, _ = super().predict_batch_with_aux(params, batch)
    if self.what == 'decodes':
      tokens = np.array([1, 2])[None, :, None] * 0 + tokens[:, None]
    number = batch['decoder_target_tokens'].sum(axis=-1)
    return tokens, {'number': number if self.what != 'scalar' else number.sum()}


def _rich_model(what):
  vocabulary = toy_model.ToyVocabulary()
  model = _RichModel(toy_model.ToyNetwork(), vocabulary, vocabulary, None)
  model.what = what
  return model


def _with_fns(task, **fns):
  """Returns the opened task with further metrics, as seqio's tasks have them."""
  return EvalTask(**{**{name: getattr(task, name) for name in EvalTask.__dataclass_fields__}, **fns})


def _outputs(what='aux', change_state=lambda state: state, **fns):
  _, *states = _state()
  state, axes = map(change_state, states)
  evaluator = _evaluator(_task())
  task = _with_fns(evaluator.eval_tasks[0], **fns)
  evaluator.close()
  runner = evaluation.OutputRunner(_rich_model(what), toy_run.partitioner(), evaluation.InferenceEvalConfig())
  return task, runner.run(task, state, axes)


def test_metrics_of_predictions_scores_and_auxiliary_values():
  def aux(targets, predictions, aux_values):
    assert aux_values['number'].dtype == np.int64 and len(predictions) == 20
    return {'aux': aux_values['number'].sum()}

  def score(targets, scores):
    assert scores.dtype == np.float64 and scores.shape == (20,)
    return {'mean_score': scores.mean()}

  task, outputs = _outputs(score_metric_fns=[score], predict_with_aux_metric_fns=[aux], output_metrics=[
      data.OutputMetric(kind='predict_with_aux', compute_fn=lambda found: {'raw': found[1]['number'].max()})])
  assert set(outputs) == {'predict', 'score', 'predict_with_aux'}
  result = evaluation.judge(task, outputs, 3)
  numbers = [int(example['targets'].sum()) for example in task.examples]
  assert result.metrics['aux'].value == sum(numbers) and result.metrics['raw'].value == max(numbers)
  assert [row['aux'] for row in result.predictions] == [{'number': n} for n in numbers[:3]]
  model, state, _ = _state()
  params = jax.device_get(state.params)
  for row, example in zip(result.predictions, task.examples):
    targets = np.pad(example['targets'], (0, 6 - len(example['targets'])))[None]
    batch = {'decoder_target_tokens': targets, 'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1]}
    assert row['score'] == pytest.approx(float(model.score_batch(params, batch)[0]), rel=1e-5)


@pytest.mark.parametrize('kinds', [('predict', 'score'), ('predict_with_aux', 'score_with_intermediates')])
def test_outputs_are_those_of_the_parameters_to_evaluate(kinds):
  metrics = dict(metric_fns=(), output_metrics=[data.OutputMetric(kind=kind, compute_fn=len) for kind in kinds])
  _, outputs = _outputs(change_state=toy_model.evaluates_double, **metrics)
  _, expected = _outputs(change_state=lambda state: state.replace_params(
      jax.tree.map(lambda x: 2 * x if isinstance(x, jax.Array) else x, state.params)), **metrics)
  assert set(outputs) == set(kinds)
  jax.tree.map(np.testing.assert_array_equal, outputs, expected)


def test_a_task_of_scores_alone_is_not_decoded(tmp_path):
  _, state, axes = _state()
  notes = []
  task = _task(metric_fns=(), score_metric_fns=[lambda targets, scores: {'best': scores.max()}])
  evaluator = _evaluator(task, tmp_path)
  metrics = evaluator.evaluate(state, axes, step=7, note_fn=notes.append).result()
  evaluator.close()
  assert notes[0] == 'scoring letters: batch 1 of 3' and len(notes) == 3
  rows = _predictions(tmp_path)
  assert metrics['letters']['best'].value == pytest.approx(max(row['score'] for row in rows))
  assert 'prediction' not in rows[0]


def test_several_decodes_are_lists_of_texts():
  def first(targets, predictions):
    return {'num_decodes': len(predictions[0])}

  task, outputs = _outputs('decodes', metric_fns=[first])
  result = evaluation.judge(task, outputs)
  assert result.metrics['num_decodes'].value == 2.0
  assert len(result.predictions) == 20 and result.predictions[0]['prediction'][0] == result.predictions[0][
      'prediction'][1]


def test_intermediate_values_come_with_scores():
  task = _with_fns(_evaluator(_task()).eval_tasks[0], metric_fns=(), output_metrics=[data.OutputMetric(
      kind='score_with_intermediates', compute_fn=lambda found: {'sown': found[1]['x'][0].shape[0]})])

  class Sowing(toy_model.ToyModel):

    def score_batch(self, params, batch, return_intermediates=False, *, flax_mutables=None):
      scores = super().score_batch(params, batch)
      return (scores, {'x': (scores[:, None],)}) if return_intermediates else scores

  vocabulary = toy_model.ToyVocabulary()
  _, state, axes = _state()
  runner = evaluation.OutputRunner(Sowing(toy_model.ToyNetwork(), vocabulary, vocabulary, None), toy_run.partitioner(),
                                   evaluation.InferenceEvalConfig())
  outputs = runner.run(task, state, axes)
  result = evaluation.judge(task, outputs)
  assert result.metrics['sown'].value == 20.0 and 'score' in result.predictions[0]


def test_outputs_without_rows_are_refused():
  with pytest.raises(DataError, match=r"predict_with_aux\[1\]\['number'\] has shape \(\); expected 8 rows"):
    _outputs('scalar', predict_with_aux_metric_fns=[lambda targets, predictions, aux_values: {}])


@pytest.mark.parametrize('fns, fragment', [
    ([lambda targets, predictions: 0.5], 'expected a mapping'),
    ([lambda targets, predictions: {'x': [1, 2]}], "'x' is a list"),
    ([lambda targets, predictions: {'x': clu.values.Histogram([1], 2)}], 'seqio.Evaluator'),
    ([data.exact_match, data.exact_match], "called 'exact_match'")])
def test_bad_metrics(fns, fragment):
  task, outputs = _outputs(metric_fns=fns)
  with pytest.raises(DataError, match=fragment):
    evaluation.judge(task, outputs)


def test_values_of_every_kind():
  class Text:
    textdata = b'caf\xc3\xa9'

  values = {'a': 1, 'b': np.float32(0.5), 'c': np.array([2.0]), 'd': clu.values.Scalar(3.0), 'e': jax.numpy.ones(())}
  assert [judging.as_value(name, value).value for name, value in values.items()] == [1.0, 0.5, 2.0, 3.0, 1.0]
  assert judging.as_value('t', Text()).value == 'café' and judging.as_value('t', clu.values.Text('x')).value == 'x'


def test_batches_that_are_not_in_memory_are_read_by_the_function_given():
  task, doing = _evaluator(_task()).eval_tasks[0], []
  _, state, axes = _state()
  runner = evaluation.OutputRunner(_state()[0], toy_run.partitioner(), evaluation.InferenceEvalConfig())

  def read(batches, what):
    doing.append(what)
    return iter(batches)

  expected, found = (runner.run(t, state, axes, read_fn=read) for t in (task, _with_fns(task, rows=None)))
  assert doing == ["reading a batch of the evaluation data 'letters'"]
  np.testing.assert_array_equal(found['predict'], expected['predict'])


def test_batches_that_leave_examples_out_are_refused():
  task = _evaluator(_task()).eval_tasks[0]
  short = IndexedBatches(lambda: iter(list(task.batches)[:1]), 1)
  _, state, axes = _state()
  runner = evaluation.OutputRunner(_state()[0], toy_run.partitioner(), evaluation.InferenceEvalConfig())
  with pytest.raises(DataError, match='left out 12 of 20 examples, the first number 8'):
    runner.run(_with_fns(task, rows=None, batches=short), state, axes)


class _DrawingModel(toy_model.ToyModel):
  """Predicts what it draws."""

  def predict_batch_with_aux(self, params, batch, rng=None, *, times=1, flax_mutables=None):
    return times * jax.random.randint(rng, batch['inputs'].shape[:1], 0, 1000), {}


def test_programs_are_kept_by_options_and_shape_and_serve_all_seeds():
  vocabulary = toy_model.ToyVocabulary()
  model = _DrawingModel(toy_model.ToyNetwork(), vocabulary, vocabulary, None)
  runner = evaluation.PredictRunner(model, toy_run.partitioner())
  _, state, axes = _state()
  compiled = []

  @contextlib.contextmanager
  def compiling():
    compiled.append(None)
    yield

  def run(seed=0, num_rows=8, **options):
    batches = [(f'batch {k}', k, {'inputs': jax.numpy.zeros((num_rows, 3))}) for k in (4, 5)]
    found = list(runner.run(
        'predict_with_aux', batches, state, axes, seed=seed, options=options, compiling_fn=compiling))
    assert [given for given, _ in found] == ['batch 4', 'batch 5']
    return [outputs[0] for _, outputs in found], len(compiled)

  for seed in (0, 2**31, 2**32 - 1):
    drawn, num_compiled = run(seed)
    for number, each in zip((4, 5), drawn, strict=True):
      np.testing.assert_array_equal(
          each, jax.random.randint(jax.random.fold_in(jax.random.key(seed), number), (8,), 0, 1000))
    assert num_compiled == 1
  doubled, num_compiled = run(seed, times=2)
  assert num_compiled == 2 and (doubled[0] == 2 * drawn[0]).all()
  assert run(times=2)[1] == 2 and run(times=2.0)[0][0].dtype == np.float32
  assert run(num_rows=16)[1] == 4


# ---- Options and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('kwargs', [{'num_examples': 0}, {'num_examples': True}, {'num_examples_to_write': -1},
                                    {'max_num_lengths': 0}, {'max_num_lengths': None}, {'batch_by_length': 'yes'}])
def test_options_out_of_range(kwargs):
  with pytest.raises(ConfigError, match=f'InferenceEvalConfig.{next(iter(kwargs))} is'):
    evaluation.InferenceEvalConfig(**kwargs)


def test_a_task_of_the_means_name():
  for name in ('mean', 'no_mean'):
    data.register_builtin_task(_task(name))
  with pytest.raises(ConfigError, match="called 'mean'"):
    _evaluator(data.BuiltinMixture(name='x', rates={'mean': 1.0, 'no_mean': 1.0}))
  _evaluator(_task('mean')).close()


def test_seqios_evaluator_needs_seqios_tasks():
  cfg = toy_run.dataset('validation')
  for cls, options, fragment in ((dict, {}, "source is 'builtin'"), ('seqio', {}, 'expected None or a class')):
    with pytest.raises(ConfigError, match=fragment):
      evaluation.check_evaluator_cls(cls, cfg, evaluation.InferenceEvalConfig(**options))
  with pytest.raises(ConfigError, match='set seqio.Evaluator.num_examples'):
    evaluation.check_evaluator_cls(dict, None, evaluation.InferenceEvalConfig(num_examples=3))


def test_names_of_metrics_before_anything_is_predicted():
  task = _evaluator(_task()).eval_tasks[0]
  assert evaluation.names_of_metrics(task) == {'exact_match'}
  scored = _with_fns(task, score_metric_fns=[lambda targets, scores: {'s': scores[0]}])
  assert evaluation.names_of_metrics(scored) == {'exact_match', 's'}
  particular = _with_fns(task, metric_fns=[lambda targets, predictions: {'x': predictions[0]['a']}])
  assert evaluation.names_of_metrics(particular) is None


_KNOWN = {'training_eval/a': {'loss', 'accuracy'}, 'inference_eval/a': {'exact_match'}, 'inference_eval/b': {'f1'}}


@pytest.mark.parametrize('name', ['training_eval/a/loss', 'training_eval/mean/accuracy', 'inference_eval/mean/f1',
                                  'inference_eval/a/exact_match'])
def test_known_metrics_pass(name):
  evaluation.check_metric_name('best_metric', name, _KNOWN)


@pytest.mark.parametrize('name, fragment', [
    ('inference_eval/a/exact_mach', "Did you mean 'inference_eval/a/exact_match'"), ('f1', 'inference_eval/b/f1'),
    ('inference_eval/b/exact_match', 'Did you mean'), ('train/loss', 'no metric of this run'), (3, 'full name')])
def test_unknown_metrics_are_refused(name, fragment):
  with pytest.raises(ConfigError, match=fragment):
    evaluation.check_metric_name('best_metric', name, _KNOWN)


def test_a_task_whose_metrics_are_not_known_beforehand():
  known = {'inference_eval/a': None}
  for name in ('inference_eval/a/anything', 'inference_eval/mean/anything'):
    evaluation.check_metric_name('best_metric', name, known)
  for name in ('inference_eval/b/anything', 'training_eval/a/loss'):
    with pytest.raises(ConfigError, match='inference_eval/a'):
      evaluation.check_metric_name('best_metric', name, known)
  with pytest.raises(ConfigError, match='Nothing is evaluated'):
    evaluation.check_metric_name('best_metric', 'inference_eval/b/anything', {})
