"""Steps, states and data that are not finite: the effect of each policy, and the files that remain."""

import errno
import functools
import json
import os

import clu.metrics
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import adafactor
from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import metrics
from t5x_lite import runtime
from t5x_lite.checkpoints import discovery
from t5x_lite.errors import (
  CheckpointDamagedError,
  CheckpointError,
  ConfigError,
  NonFiniteMetricError,
)
from t5x_lite.trainer import actions
from t5x_lite.trainer import non_finite
from t5x_lite.trainer import summaries
from t5x_lite.trainer.non_finite import NonFinitePolicy
from tests.apps.train import toy_run

# One evaluation-free configuration for all runs here, so that one compiled program of a policy serves many tests.
PLAIN = {
  'train_eval_dataset_cfg': None,
  'infer_eval_dataset_cfg': None,
  'eval_period': None,
  'stats_period': 4,
}


class PoisonedBatches(data.HostIterator):
  """The batches of the training data, in some of which (by number, from 1) every loss weight is NaN."""

  def __init__(self, cfg, layout, *, feature_converter, bad=(), removed=()):
    self._inner = data.open_train_iterator(cfg, layout, feature_converter=feature_converter)
    start = self._inner.get_state([])
    batches = [
      next(self._inner)['decoder_target_tokens'].tobytes()
      for _ in range(max((*bad, *removed), default=0))
    ]
    self._bad = {batches[number - 1] for number in bad}
    self._removed = {batches[number - 1] for number in removed}
    self._inner.set_state(start)

  @property
  def element_spec(self):
    shape = self._inner.element_spec['decoder_loss_weights'].shape
    return {
      **self._inner.element_spec,
      'decoder_loss_weights': jax.ShapeDtypeStruct(shape, np.float32),
    }

  def __next__(self):
    batch = dict(next(self._inner))
    while batch['decoder_target_tokens'].tobytes() in self._removed:
      batch = dict(next(self._inner))
    weights = batch['decoder_loss_weights'].astype(np.float32)
    batch['decoder_loss_weights'] = weights * (
      np.nan if batch['decoder_target_tokens'].tobytes() in self._bad else 1
    )
    return batch

  def get_state(self, undelivered=()):
    return self._inner.get_state(undelivered)

  def set_state(self, state):
    self._inner.set_state(state)

  def close(self):
    self._inner.close()


def train(
  model_dir,
  total_steps=12,
  *,
  bad=(),
  removed=(),
  policy=None,
  rate=toy_run.RATE,
  save=None,
  **kwargs,
):
  trainer_kwargs = {'learning_rate_fn': rate}
  if policy is not None:
    trainer_kwargs['non_finite_policy'] = policy
  return toy_run.train(
    model_dir,
    total_steps,
    save=save or {'period': 3},
    trainer_kwargs=trainer_kwargs,
    get_dataset_fn=functools.partial(PoisonedBatches, bad=bad, removed=removed),
    **{**PLAIN, **kwargs},
  )


def params(model_dir, step):
  found = checkpoints.load(checkpoints.get_checkpoint_dir(model_dir, step))
  return jax.tree.map(np.asarray, found)


def assert_same(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


def rows(model_dir, name='loss'):
  return {
    row['step']: row[name] for row in summaries.read_metrics(model_dir / 'train' / 'metrics.jsonl')
  }


def spiking_rate(step_of_spike):
  """A schedule that throws the parameters far away in one step: they are finite, and the next loss is not."""
  return lambda step: jnp.where(step == step_of_spike - 1, 1e30, 0.01)


# ---- The test inside the step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'loss, grad, expected',
  [
    (1.0, [1.0, 2.0], (0, 0)),
    (np.nan, [1.0, 2.0], (1, 0)),
    (np.inf, [np.nan, 2.0], (1, 0)),
    (1.0, [1.0, np.nan], (0, 1)),
    (1.0, [-np.inf, np.inf], (0, 1)),
    (1.0, [1e25, 0.0], (0, 0)),
    (1.0, [3e38, 3e38], (0, 1)),
    (-3e38, [1e18, -1e18], (0, 0)),
  ],
)
def test_the_count_of_a_step(loss, grad, expected):
  grads = {
    'a': jnp.ones((2, 3)),
    'b': jnp.asarray(grad),
    'c': jnp.float32(0),
    'd': jnp.ones((2, 2), jnp.bfloat16),
  }
  count = jax.jit(non_finite.count_of_step)(jnp.float32(loss), grads)
  assert (int(count.loss), int(count.gradient)) == expected
  assert int(count.merge(count).compute()) == 2 * sum(expected)


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'skip_nan_updates': True},
    {'factored': False},
    {'beta1': 0.9},
    {'global_norm_clip_threshold': 1.0},
  ],
)
@pytest.mark.parametrize('bad', [None, np.nan, np.inf])
def test_statistics_of_adafactor_tell_of_bad_gradients(options, bad):
  params = {'matrix': jnp.ones((256, 130)), 'vector': jnp.ones(3)}
  definition = adafactor.Adafactor(1e-2, **options)
  for name in params if bad is not None else ['matrix']:
    grads = jax.tree.map(lambda x: 0.1 * x, params)
    if bad is not None:
      grads[name] = grads[name].at[(0,) * grads[name].ndim].set(bad)
    state = definition.init_state(params)
    _, new_state = definition.apply_gradient(definition.hyper_params, params, state, grads)
    evidence = definition.gradient_evidence(grads, new_state)
    assert int(non_finite.count_of_step(jnp.float32(1), evidence).compute()) == int(bad is not None)
    size = sum(x.size for x in jax.tree.leaves(evidence))
    assert (size < 300) == ('skip_nan_updates' not in options and 'factored' not in options)


@pytest.mark.parametrize('layer', [0, 1, 2])
@pytest.mark.parametrize('name', ['matrix', 'vector'])
def test_statistics_of_adafactor_tell_of_each_layer(layer, name):
  params = {
    f'layers_{i}': {'matrix': jnp.ones((130, 128)), 'vector': jnp.ones(3)} for i in range(3)
  }
  grads = jax.tree.map(lambda x: 0.1 * x, params)
  grads[f'layers_{layer}'][name] = grads[f'layers_{layer}'][name].at[0].set(np.nan)
  definition = adafactor.Adafactor(1e-2)
  _, new_state = definition.apply_gradient(
    definition.hyper_params, params, definition.init_state(params), grads
  )
  evidence = definition.gradient_evidence(grads, new_state)
  assert int(non_finite.count_of_step(jnp.float32(1), evidence).gradient) == 1
  assert len(evidence) == 4  # a sum over the layers for each parameter's two arrays


def test_complex_gradients_count_by_both_parts():
  for value, expected in ((1 + 2j, 0), (complex(0, np.inf), 1)):
    assert (
      int(
        non_finite.count_of_step(jnp.float32(1), [jnp.full((2,), value, jnp.complex64)]).compute()
      )
      == expected
    )


def test_non_finite_arrays_of_a_state_are_named():
  state = {
    'target': {'w': jnp.ones((2, 2)), 'scale': jnp.float32(1), 'empty': jnp.zeros((0, 2))},
    'state': {
      'step': jnp.int32(3),
      'param_states': {'best': jnp.float32(np.inf), 'm': jnp.zeros(3)},
    },
  }
  assert non_finite.find_in_state(state) == []  # several optimizers begin a minimum at infinity
  state['target']['scale'] = jnp.float32(-np.inf)
  state['state']['param_states'] = {'best': jnp.float32(np.nan), 'm': jnp.asarray([0, np.inf, 0])}
  assert non_finite.find_in_state(state) == [
    'target/scale',
    'state/param_states/best',
    'state/param_states/m',
  ]


def test_non_finite_arrays_of_stacked_layers_are_named_by_layer():
  matrices, best = np.ones((3, 2, 4)), np.asarray([np.inf, 1, np.nan])
  matrices[1, 1, 3] = matrices[2, 0, 0] = np.nan
  state = {
    'target': {'encoder': {'layers_0,2,4': {'w': jnp.asarray(matrices), 'scale': jnp.ones(3)}}},
    'state': {'param_states': {'encoder': {'layers_0,2,4': {'best': jnp.asarray(best)}}}},
  }
  assert non_finite.find_in_state(state) == [
    'target/encoder/layers_2/w',
    'target/encoder/layers_4/w',
    'state/param_states/encoder/layers_4/best',
  ]
  state['target']['encoder']['layers_0,2,4'] = {'scale': jnp.asarray([np.inf, 1, 2])}
  assert non_finite.find_in_state(state)[0] == 'target/encoder/layers_0/scale'


def test_metrics_of_a_skipped_step_are_passed_over():
  good = {
    'loss': clu.metrics.Average.from_model_output(jnp.asarray([2.0])),
    'n': non_finite.NonFiniteSteps(loss=jnp.float32(0), gradient=jnp.float32(0)),
    'count': clu.metrics.Average.from_model_output(jnp.asarray([7])),
  }
  bad = {**good, 'loss': clu.metrics.Average.from_model_output(jnp.asarray([np.nan]))}
  count = non_finite.NonFiniteSteps(loss=jnp.float32(1), gradient=jnp.float32(0))
  kept = non_finite.drop_non_finite(count, bad)
  assert float(good['loss'].merge(kept['loss']).compute()) == 2.0
  assert float(kept['count'].compute()) == 7
  assert np.isnan(
    float(non_finite.drop_non_finite(good['n'], bad)['loss'].compute())
  )  # a good step is left alone
  parts = non_finite.drop_non_finite(count, {'joined': metrics.OfLastStep.join(bad)})[
    'joined'
  ].separate()
  assert float(parts['loss'].total) == 0 and float(parts['count'].compute()) == 7


@pytest.mark.parametrize(
  'kwargs, words',
  [
    ({'action': 'rollback'}, "Did you mean 'roll_back'"),
    ({'max_roll_backs': 2}, "None with action='stop', got 2. Or set action='roll_back'"),
    ({'action': 'skip', 'max_skips_in_a_row': 0}, 'must be an integer >= 1'),
    ({'action': 'skip', 'max_roll_backs': 1}, "None with action='skip', got 1. Or set"),
  ],
)
def test_policies_without_effect_are_rejected(kwargs, words):
  with pytest.raises(ConfigError, match=words):
    NonFinitePolicy(**kwargs)


# ---- stop ------------------------------------------------------------------------------------------------------------


def test_divergence_deletes_no_good_checkpoint(tmp_path):
  """The fault of the issue: twelve good checkpoints, then a rate of 1e30 with keep=1."""
  train(tmp_path, 12, save={'period': 1})
  assert checkpoints.all_steps(tmp_path) == list(range(1, 13))
  before = params(tmp_path, 12)
  with pytest.raises(
    NonFiniteMetricError,
    match='the loss of step 14 is not finite.*resumes from step 12, the newest sound',
  ) as raised:
    train(tmp_path, 24, save={'period': 1, 'keep': 1}, rate=lambda step: 1e30)
  assert raised.value.exit_code == 3
  # The state after step 13 was finite, so it was saved; step 14 showed that it is bad, and it is marked.
  assert checkpoints.all_steps(tmp_path) == list(range(1, 14))
  assert 'step 14' in (tmp_path / 'checkpoint_13' / 'UNSOUND').read_text()
  assert_same(params(tmp_path, 12), before)
  # The same command with a sane rate resumes from the sound one, replaces the wreck, and only then lets go.
  step, _ = train(tmp_path, 16, save={'period': 2, 'keep': 1})
  assert step == 16 and checkpoints.newest_sound_step(tmp_path) == 16
  assert [s for s in checkpoints.all_steps(tmp_path) if s not in (13, 16)] == [
    14
  ]  # 16 had no step after it


def test_a_checkpoint_counts_as_sound_after_a_finite_loss(tmp_path):
  """With keep=1 the older checkpoint goes when the step after the newer one, or an evaluation before it, was finite."""
  train(tmp_path, 9, save={'period': 3, 'keep': 1})
  assert checkpoints.all_steps(tmp_path) == [6, 9]  # nothing has shown yet that 9 is sound
  evaluated = tmp_path / 'evaluated'
  train(
    evaluated,
    9,
    save={'period': 3, 'keep': 1},
    train_eval_dataset_cfg=toy_run.dataset('validation'),
    eval_period=3,
  )
  assert checkpoints.all_steps(evaluated) == [9]


def test_a_step_with_a_finite_loss_alone_shows_nothing():
  def metrics(loss, gradient):
    return {
      'non_finite_steps': non_finite.NonFiniteSteps(
        loss=jnp.float32(loss), gradient=jnp.float32(gradient)
      )
    }

  monitor = non_finite.Monitor(NonFinitePolicy(action='skip'))
  monitor.observe(4, metrics(0, 0))
  monitor.observe(5, metrics(0, 1))  # the wreck of a rate of 1e38 gives finite losses
  assert (monitor.newest_finite_step, monitor.bad_steps_in_a_row, monitor.finding) == (4, 1, None)
  monitor.observe(6, metrics(0, 0))
  assert (monitor.newest_finite_step, monitor.bad_steps_in_a_row) == (6, 0)


def test_a_run_whose_checkpoints_are_all_unsound_overwrites_nothing(tmp_path):
  train(tmp_path, 3)
  checkpoints.discovery.mark_unsound(tmp_path / 'checkpoint_3', 'a test')
  with pytest.raises(CheckpointDamagedError, match='marked UNSOUND.*another MODEL_DIR'):
    train(tmp_path, 6)


def test_a_start_with_infinite_parameters_is_rejected(tmp_path):
  train(tmp_path / 'wreck', 3, bad=(2,), policy=NonFinitePolicy(action='ignore'))
  restore = checkpoints.RestoreCheckpointConfig(str(tmp_path / 'wreck'))
  with pytest.raises(CheckpointError, match='has non-finite values in target/'):
    train(tmp_path / 'tuned', 6, restore=restore)


def test_older_checkpoints_are_deleted_when_a_newer_one_is_confirmed(tmp_path):
  state = {'target': {'w': jnp.ones(3)}, 'state': {'step': jnp.int32(1)}}
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig(keep=1)
  ) as manager:
    manager.save(1, state)
    manager.save(2, state, is_sound=False)
    manager.wait()
    assert manager.all_steps() == [1, 2]
    manager.confirm(2)
    manager.wait()
    assert manager.all_steps() == [2]
    manager.save(3, state, is_sound=False)
    manager.confirm(3)  # perhaps before it is on the disk
    manager.wait()
    assert manager.all_steps() == [3]
    manager.save(4, state, is_sound=False)
    assert manager.mark_unsound(3, 4, 'a reason') == [4]  # 3 was confirmed
    assert checkpoints.newest_sound_step(tmp_path) == 3
    manager.save(4, state)
    manager.wait()
    assert manager.all_steps() == [4] and checkpoints.newest_sound_step(tmp_path) == 4


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
  def rate(step):
    return jnp.where(step == 5, jnp.inf, 0.01)  # step 6 has a finite loss and infinite parameters

  with pytest.raises(
    NonFiniteMetricError,
    match=r'state after step 6 \(target/.*\) is not finite.*resumes from step 3, the newest sound',
  ):
    train(tmp_path, 12, rate=rate)
  assert checkpoints.all_steps(tmp_path) == [3] and checkpoints.newest_sound_step(tmp_path) == 3


def test_a_step_function_without_the_test_trains_as_before(tmp_path):
  policy = NonFinitePolicy(action='ignore')
  step, state = train(tmp_path, 6, bad=(2,), policy=policy, save={'period': 3, 'keep': 1})
  assert step == 6 and not np.isfinite(jax.tree.leaves(state.params)[0]).all()
  assert checkpoints.all_steps(tmp_path)[-1] == 6
  assert 'non_finite_steps' not in json.loads(
    (tmp_path / 'train/metrics.jsonl').read_text().splitlines()[0]
  )


# ---- skip ------------------------------------------------------------------------------------------------------------


def test_skip_leaves_the_bad_updates_out(tmp_path):
  policy = NonFinitePolicy(action='skip')
  step, state = train(tmp_path, 12, bad=(5, 11), policy=policy)
  assert step == int(state.step) == 12
  assert sum(rows(tmp_path, 'non_finite_steps').values()) == 2 and all(
    np.isfinite(list(rows(tmp_path).values()))
  )
  # A run that is stopped after the first bad step and resumed is bitwise the same.
  resumed = tmp_path / 'resumed'
  train(resumed, 5, bad=(5, 11), policy=policy)
  train(resumed, 12, bad=(5, 11), policy=policy)
  assert_same(params(resumed, 12), params(tmp_path, 12))


def test_skip_keeps_everything_but_the_step(tmp_path, capsys):
  policy = NonFinitePolicy(action='skip')
  train(tmp_path, 4, bad=(4,), policy=policy, save={'period': 1})
  line = '1 step(s) with a non-finite loss or gradient norm, including the last 1'
  assert line in ' '.join(capsys.readouterr().out.split())
  before, after = params(tmp_path, 3), params(tmp_path, 4)
  assert before['state'].pop('step') == 3 and after['state'].pop('step') == 4
  assert_same(before, after)


@pytest.mark.parametrize(
  'period, sound, unsound',
  [
    # Step 10 was already started, and its loss, with the parameters of 6 and 8, was finite.
    pytest.param(2, 8, [], marks=pytest.mark.full),
    (3, 3, ['checkpoint_6']),
  ],
)
def test_skip_ends_after_the_limit_in_a_row(tmp_path, period, sound, unsound):
  policy = NonFinitePolicy(action='skip', max_skips_in_a_row=3)
  with pytest.raises(
    NonFiniteMetricError,
    match=f'the loss of step 7 .*3 bad steps in a row.*resumes from step {sound}, the newest sound',
  ):
    train(tmp_path, 12, bad=(4, 5, 7, 8, 9), policy=policy, save={'period': period})
  assert [path.parent.name for path in tmp_path.glob('*/UNSOUND')] == unsound


# ---- roll_back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'bad, num',
  [
    ((5, 6, 11), 3),
    pytest.param((5,), 1, marks=pytest.mark.full),
    pytest.param((2,), 1, marks=pytest.mark.full),
  ],
)
def test_roll_back_leaves_out_the_bad_batches(tmp_path, bad, num):
  """The run is bitwise that on data without the bad batches, also if it is stopped and resumed after a roll-back."""
  policy = NonFinitePolicy(action='roll_back')
  step, _ = train(tmp_path / 'rolled', 12, bad=bad, policy=policy)
  assert step == 12
  train(tmp_path / 'without', 12, removed=bad, policy=policy)
  train(tmp_path / 'resumed', 7, bad=bad, policy=policy)
  train(tmp_path / 'resumed', 12, bad=bad, policy=policy)
  for name in ('rolled', 'resumed'):
    assert_same(params(tmp_path / name, 12), params(tmp_path / 'without', 12))
  assert rows(tmp_path / 'rolled') == rows(tmp_path / 'without')
  facts = checkpoints.read_metadata(checkpoints.get_checkpoint_dir(tmp_path / 'rolled', 12))['run']
  assert (facts['num_roll_backs'], facts['left_out_batches'], facts['batch_number']) == (
    num,
    list(bad),
    12 + len(bad),
  )
  events = list(runtime.read_events(tmp_path / 'rolled' / runtime.EVENTS_FILE))
  rollbacks = [event for event in events if event.kind == 'rollback']
  assert len(rollbacks) == num and all(
    event.details['to_step'] <= event.step for event in rollbacks
  )
  assert events[-1].details['total_seconds']['repeated'] > 0


class _Disk(actions.BaseAction):
  """Has the disk full for lines of metrics from step 4 to step 8."""

  def __init__(self, monkeypatch):
    self._is_full = False
    write = os.write  # writes lines of metrics, and nothing else of a run

    def write_or_fail(file, content):
      if self._is_full:
        raise OSError(errno.ENOSPC, 'No space left on device')
      return write(file, content)

    monkeypatch.setattr(os, 'write', write_or_fail)

  def run(self, train_state, metrics_by_task):
    self._is_full = 4 <= int(train_state.step) < 8


def test_roll_back_on_a_full_disk(tmp_path, monkeypatch, caplog):
  policy = NonFinitePolicy(action='roll_back')
  train(tmp_path / 'rolled', 12, bad=(6,), policy=policy, actions={'TRAIN': [_Disk(monkeypatch)]})
  assert (
    'rolling back to' in caplog.text and 'metrics up to step 6 could not be written' in caplog.text
  )
  train(tmp_path / 'without', 12, removed=(6,), policy=policy)
  assert_same(params(tmp_path / 'rolled', 12), params(tmp_path / 'without', 12))
  assert rows(tmp_path / 'rolled') == rows(tmp_path / 'without')


def test_roll_back_without_a_checkpoint_begins_again(tmp_path):
  policy = NonFinitePolicy(action='roll_back')
  step, _ = train(tmp_path, 6, bad=(2,), policy=policy)
  assert step == 6 and sorted(rows(tmp_path))[-1] == 6 and np.isfinite(rows(tmp_path)[6])


def test_roll_back_forgets_best_values_of_later_steps(tmp_path):
  options = {
    'policy': NonFinitePolicy(action='roll_back'),
    'eval_period': 3,
    'eval_steps': None,
    'train_eval_dataset_cfg': toy_run.dataset('validation'),
    'save': {'policies': [checkpoints.WhenBest('training_eval/letters/loss', 'min')]},
  }
  train(tmp_path / 'rolled', 12, bad=(7,), **options)
  train(tmp_path / 'without', 12, removed=(7,), **options)
  sound = [
    [
      step
      for step in checkpoints.all_steps(run)
      if not discovery.is_marked_unsound(checkpoints.get_checkpoint_dir(run, step))
    ]
    for run in (tmp_path / 'rolled', tmp_path / 'without')
  ]
  assert sound[0] == sound[1] and 6 in sound[0]


def test_roll_back_ends_after_the_limit(tmp_path):
  policy = NonFinitePolicy(action='roll_back', max_roll_backs=2)
  # The parameters, not the data, are at fault: every way leads there.
  with pytest.raises(
    NonFiniteMetricError,
    match='the loss of step 6 is not finite.*resumes from step 3, the newest sound',
  ):
    train(tmp_path, 12, policy=policy, rate=spiking_rate(5))
  facts = checkpoints.read_metadata(checkpoints.get_checkpoint_dir(tmp_path, 3))['run']
  assert facts.get('num_roll_backs', 0) == 0  # it was saved before the first


def test_roll_back_passes_over_a_checkpoint_of_bad_parameters(tmp_path):
  policy = NonFinitePolicy(action='roll_back', max_roll_backs=1)
  with pytest.raises(NonFiniteMetricError, match='resumes from step 3, the newest sound'):
    train(
      tmp_path, 12, policy=policy, rate=spiking_rate(6)
    )  # saved at 6: finite, and its next loss is not
  assert (tmp_path / 'checkpoint_6' / 'UNSOUND').exists()


def test_roll_back_forgets_the_best_values_of_the_steps_after_it(tmp_path, monkeypatch):
  # Step 7 is bad, so the checkpoint of step 6 is unsound, and the run returns to step 3.
  name, values, full_names = (
    'training_eval/letters/loss',
    [0.1, 0.9, 0.5, 0.3, 0.2],
    evaluation.full_names,
  )
  monkeypatch.setattr(
    evaluation,
    'full_names',
    lambda folder, results: full_names(folder, results) | {name: values.pop(0)},
  )
  train(
    tmp_path,
    bad=[7],
    policy=NonFinitePolicy(action='roll_back'),
    eval_period=3,
    save={'policies': [checkpoints.WhenBest(name)]},
    train_eval_dataset_cfg=toy_run.dataset('validation'),
  )
  facts = checkpoints.read_metadata(checkpoints.get_checkpoint_dir(tmp_path, 12))['run']
  assert facts['best_metrics'] == [[name, 'max', 0.5]]
  assert checkpoints.all_steps(tmp_path) == [3, 6, 12]
