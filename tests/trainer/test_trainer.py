"""Trainer: compilation, waiting, stopping, and equality with the step function."""

import concurrent.futures
import functools
import itertools
import logging
import types

import clu.metrics
import clu.values
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import schedules
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.trainer import non_finite
from t5x_lite.trainer import summaries
from t5x_lite.trainer import train_step
from t5x_lite.trainer import trainer as trainer_lib
from tests.models import toy_model

_RATE = schedules.create_learning_rate_scheduler('constant', base_learning_rate=0.1)


@functools.cache
def _partitioner():
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  mesh = jax.sharding.Mesh(devices, ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  return partitioning.PjitPartitioner(mesh=mesh)


_MODEL = toy_model.make_model(dropout_rate=0.1)


@functools.cache
def _host_state(model):
  return jax.device_get(toy_model.make_state(model))


def _state(model):
  return jax.tree.map(jnp.asarray, _host_state(model))


def _trainer(
  summary_dir=None,
  *,
  model=_MODEL,
  state=None,
  eval_names=(),
  trainer_cls=trainer_lib.Trainer,
  partitioner=None,
  **kwargs,
):
  state = _state(model) if state is None else state
  partitioner = partitioner or _partitioner()
  kwargs = {'learning_rate_fn': _RATE, **kwargs}
  return trainer_cls(
    model,
    state,
    partitioner,
    eval_names,
    summary_dir,
    partitioner.get_mesh_axes(state),
    jax.random.key(0),
    **kwargs,
  )


def _specs(batch):
  return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}


def _batches(start=0):
  return (toy_model.make_batch(seed=i) for i in itertools.count(start))


def _params(trainer):
  return jax.device_get(trainer.train_state.params)


def test_training_equals_the_step_called_by_hand(tmp_path):
  def rate_fn(step):
    return 0.1 / (1.0 + step)

  with _trainer(tmp_path, learning_rate_fn=rate_fn) as trainer:
    trainer.compile_train(_specs(toy_model.make_batch()))
    values = trainer.train(_batches(), 3).result()
    trained = _params(trainer)
    assert trainer.step == int(trainer.train_state.step) == 3
    trainer.flush()
  state, losses = _state(_MODEL), []
  step = jax.jit(functools.partial(train_step.train_with_lr, model=_MODEL, num_microbatches=None))
  for i, batch in zip(range(3), _batches(), strict=False):
    state, metrics = step(
      state, batch, jnp.float32(rate_fn(i)), jax.random.fold_in(jax.random.key(0), i)
    )
    losses.append(float(metrics['loss'].compute()))
  for name, value in trained.items():
    np.testing.assert_allclose(value, state.params[name], atol=2e-3)
  assert isinstance(values['loss'], clu.values.Scalar)
  assert float(values['loss'].value) == pytest.approx(np.mean(losses), rel=1e-5)
  assert float(values['learning_rate'].value) == pytest.approx(
    np.mean([rate_fn(i) for i in range(3)])
  )
  assert (
    float(values['timing/steps_per_second'].value) > 0 and float(values['timing/uptime'].value) > 0
  )
  rows = summaries.read_metrics(tmp_path / 'train/metrics.jsonl')
  assert [row['step'] for row in rows] == [3] and rows[0]['loss'] == float(values['loss'].value)


@pytest.mark.full  # by default, tests/apps/train/test_resume.py compares two halves
def test_two_halves_equal_the_entire_run_bitwise():
  whole, halves = _trainer(), _trainer()
  for trainer in (whole, halves):
    trainer.compile_train(_specs(toy_model.make_batch()))
  whole.train(_batches(), 6)
  halves.train(_batches(), 2)
  # The second half starts from a copy of the state in another trainer, as a restart does.
  resumed = _trainer(state=jax.tree.map(jnp.asarray, jax.device_get(halves.train_state)))
  assert resumed.step == 2
  resumed.compile_train(_specs(toy_model.make_batch()))
  resumed.train(_batches(2), 4)
  for a, b in zip(
    jax.tree.leaves(whole.train_state), jax.tree.leaves(resumed.train_state), strict=True
  ):
    np.testing.assert_array_equal(a, b)


def test_compiling_needs_shapes_only_and_the_state_may_come_later(monkeypatch):
  compiled, compile_fn = [], partitioning.PjitPartitioner.compile
  monkeypatch.setattr(
    partitioning.PjitPartitioner,
    'compile',
    lambda self, *args: compiled.append(args[-1]) or compile_fn(self, *args),
  )
  shapes = jax.eval_shape(
    lambda: toy_model.make_state(_MODEL)
  )  # not `_state`, which would keep the tracers
  trainer = _trainer(state=shapes, eval_names=['a', 'b', 'c'])
  spec = _specs(toy_model.make_batch())
  trainer.compile_train(spec)
  compiled.clear()
  other_spec = _specs(toy_model.make_batch(32))
  trainer.compile_eval({'a': spec, 'b': spec, 'c': other_spec})
  assert compiled == [spec, other_spec]  # 'a' and 'b' have one program.
  with pytest.raises(ConfigError, match='Set trainer.train_state'):
    trainer.train(_batches(), 1)
  trainer.train_state = _state(_MODEL)
  trainer.train(_batches(), 1).result()
  assert trainer.step == 1


def test_steps_are_reported_one_late_and_in_order():
  trainer = _trainer()
  seen, asked = [], []

  def should_stop():
    asked.append([step for step, _ in seen])
    return False

  def on_step(step, metrics):
    return seen.append((step, float(metrics['loss'].compute())))

  trainer.train(_batches(), 3, on_step=on_step, should_stop=should_stop)
  # Before step 3 is dispatched, step 1 alone has been waited for; the last stays in flight.
  assert asked == [[], [], [1]] and [step for step, _ in seen] == [1, 2]
  trainer.train(_batches(3), 1, on_step=on_step)
  assert [step for step, _ in seen] == [1, 2, 3]
  trainer.finish_steps(on_step)
  assert [step for step, _ in seen] == [1, 2, 3, 4]
  assert len({loss for _, loss in seen}) == 4


class _OnDevice:
  """A value of a step that records who waits for it or reads it."""

  def __init__(self, step, events):
    self._step, self._events = step, events

  def block_until_ready(self):
    self._events.append(('wait', self._step))
    return self

  def __array__(self, dtype=None, copy=None):
    del copy
    self._events.append(('read', self._step))
    return np.asarray(0, dtype)

  def __float__(self):
    return float(np.asarray(self))

  def __index__(self):
    return int(float(self))

  def __bool__(self):
    return bool(float(self))


@pytest.mark.parametrize('action', ['ignore', 'stop', 'skip'])
def test_no_value_of_a_step_is_read_before_the_next_is_dispatched(monkeypatch, action):
  events, num_steps = [], 5
  trainer = _trainer(non_finite_policy=non_finite.NonFinitePolicy(action=action))
  optimizer_def = trainer.train_state.optimizer_def

  def step_fn(state, batch):
    del state, batch
    step = 1 + sum(kind == 'dispatch' for kind, _ in events)
    events.append(('dispatch', step))
    values = [_OnDevice(step, events) for _ in range(6)]
    state = types.SimpleNamespace(
      step=values[0], params=values[1], param_states=values[2], optimizer_def=optimizer_def
    )
    count = types.SimpleNamespace(loss=values[3], gradient=values[4])
    return state, {
      'loss': clu.metrics.LastValue(values[5], values[5]),
      non_finite.NON_FINITE_STEPS: count,
    }

  monkeypatch.setattr(trainer_lib, 'merge_metrics', lambda a, b: b)
  monkeypatch.setattr(trainer, 'make_train_step', lambda: step_fn)
  summary = concurrent.futures.Future()
  summary.set_result({})
  monkeypatch.setattr(trainer.train_metrics_manager, 'write_metrics_summary', lambda *args: summary)
  trainer.train(_batches(), num_steps, on_step=lambda step, metrics: float(metrics['loss'].total))
  assert [step for kind, step in events if kind == 'dispatch'] == list(range(1, num_steps + 1))
  for i, (kind, step) in enumerate(events):
    before = events[:i]
    assert kind == 'dispatch' or ('dispatch', step + 1) in before, events
    assert kind != 'read' or ('wait', step) in before, events
  assert ('read', num_steps - 1) in events
  trainer.close()


def test_stopping_between_steps():
  trainer = _trainer()
  values = trainer.train(_batches(), 10, should_stop=lambda: trainer.step >= 2).result()
  assert trainer.step == 2 and float(values['timing/seqs'].value) == 32
  trainer.stop_training = True
  assert trainer.train(_batches(), 10).result() == {} and trainer.step == 2


def test_exhausted_data_says_so():
  with pytest.raises(DataError, match='must repeat, .* after 2 of 5 steps'):
    _trainer().train(itertools.islice(_batches(), 2), 5)


def test_evaluation_averages_over_batches_and_leaves_the_state(tmp_path):
  with _trainer(tmp_path, eval_names=['task', 'other']) as trainer:
    before = _params(trainer)
    results = trainer.eval({'task': [toy_model.make_batch(seed=i) for i in range(3)]})
    losses = [float(_MODEL.eval_fn(before, toy_model.make_batch(seed=i))[0]) for i in range(3)]
    assert float(results['task']['loss'].value) == pytest.approx(np.mean(losses), rel=1e-5)
    for name, value in before.items():
      np.testing.assert_array_equal(value, _params(trainer)[name])
    with pytest.raises(DataError, match="'other' is empty"):
      trainer.eval({'other': []})
  rows = summaries.read_metrics(tmp_path / 'training_eval/task/metrics.jsonl')
  assert [row['step'] for row in rows] == [0]
  assert not (tmp_path / 'training_eval/other').exists()


@pytest.mark.parametrize('mesh', [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1)])
def test_the_loss_of_an_evaluation_does_not_depend_on_batch_size_and_mesh(mesh):
  model = toy_model.make_model(loss_normalizing_factor='NUM_REAL_TARGET_TOKENS')
  devices = np.array(jax.devices()[: np.prod(mesh)]).reshape(mesh)
  axis_types = (jax.sharding.AxisType.Auto,) * 2
  partitioner = partitioning.PjitPartitioner(
    mesh=jax.sharding.Mesh(devices, ('data', 'model'), axis_types=axis_types)
  )
  rows = toy_model.make_batch(13)
  params = _host_state(model).params
  logits = np.asarray(model.compute_logits(params, rows)[0], np.float64)
  own = np.take_along_axis(logits, rows['decoder_target_tokens'][..., None], -1)[..., 0]
  weights = rows['decoder_loss_weights']
  losses = np.sum((np.log(np.exp(logits).sum(-1)) - own) * weights)
  batch_sizes = [size for size in (13, 4, 1) if size % mesh[0] == 0]
  with _trainer(model=model, eval_names=['task'], partitioner=partitioner) as trainer:
    for size in batch_sizes:
      num_batches = -(-13 // size)
      filled = {name: np.pad(x, [(0, num_batches * size - 13), (0, 0)]) for name, x in rows.items()}
      batches = [
        {name: x[k * size : (k + 1) * size] for name, x in filled.items()}
        for k in range(num_batches)
      ]
      loss = trainer.eval({'task': batches})['task']['loss'].value
      assert float(loss) == pytest.approx(losses / weights.sum(), rel=1e-5), size


@pytest.mark.parametrize('num_microbatches', [None, 2])
@pytest.mark.parametrize('factor', ['NUM_REAL_TARGET_TOKENS', 'AVERAGE_PER_SEQUENCE', None])
def test_the_loss_of_several_steps_is_the_sum_of_losses_over_the_sum_of_factors(
  factor, num_microbatches
):
  model = toy_model.make_model(loss_normalizing_factor=factor)
  batches = []
  for seed, length in enumerate((6, 3, 1)):
    batch = toy_model.make_batch(seed=seed)
    batches.append({name: x * (np.arange(6) < length) for name, x in batch.items()})
  losses = []
  with _trainer(model=model, num_microbatches=num_microbatches) as trainer:

    def add(step, metrics):
      del step
      losses.append(float(metrics['loss'].compute()))

    result = trainer.train(iter(batches), 3, on_step=add)
    trainer.finish_steps(add)
    value = float(result.result()['loss'].value)
  factors = {
    'NUM_REAL_TARGET_TOKENS': [batch['decoder_loss_weights'].sum() for batch in batches],
    'AVERAGE_PER_SEQUENCE': [16, 16, 16],
    None: [1, 1, 1],
  }[factor]
  assert value == pytest.approx(np.average(losses, weights=factors), rel=1e-5)


def test_indivisible_batches_are_rejected_before_compiling():
  trainer = _trainer(num_microbatches=3)
  with pytest.raises(
    ConfigError, match=r'16 rows cannot be divided into 3 micro-batches on 2 device\(s\)'
  ):
    trainer.compile_train(_specs(toy_model.make_batch()))
  with pytest.raises(ConfigError, match='num_microbatches` must be an integer >= 0'):
    _trainer(num_microbatches=-1)
  assert _trainer(num_microbatches=0).num_microbatches == 1  # as in files of T5X
  with pytest.raises(ConfigError, match='5 rows cannot be divided'):
    _trainer(eval_names=['a']).compile_eval({'a': _specs(toy_model.make_batch(5))})


def test_who_owns_the_learning_rate(caplog):
  with pytest.raises(ConfigError, match='learning_rate_fn'):
    _trainer(learning_rate_fn=None)
  own = toy_model.make_model(optimizers.sgd(0.5))
  with caplog.at_level(logging.WARNING):
    trainer = _trainer(model=own)
    assert trainer.has_two_learning_rates
    # The reported rate is the effective one.
    assert float(trainer.train(_batches(), 2).result()['learning_rate'].value) == 0.5
  assert caplog.text.count('has no effect') == 1
  assert not _trainer(model=own, learning_rate_fn=None).has_two_learning_rates


@pytest.mark.parametrize('compiled', [False, True])
def test_weight_metrics_are_those_of_the_last_step_and_do_not_change_it(compiled):
  runs = [
    _trainer(weight_metrics_computer=train_step.WeightMetricsComputer(), num_microbatches=2)
    for _ in range(2)
  ]
  if compiled:
    for trainer in runs:
      trainer.compile_train(_specs(toy_model.make_batch()))
  whole, by_step = runs
  seen, each = [], []
  values = whole.train(_batches(), 3, on_step=lambda step, metrics: seen.append(metrics)).result()
  for i in range(3):
    each.append(by_step.train(_batches(i), 1).result())
  names = {name for name in values if name.startswith('weight_')}
  assert len(names) == 5 * len(_params(whole)) + 1
  for name in names:
    assert float(values[name].value) == float(each[2][name].value) != float(each[1][name].value)
    # Other steps do not compute them.
    assert [float(metrics['weight_metrics'].separate()[name].total) for metrics in seen] == [0, 0]
  for a, b in zip(
    jax.tree.leaves(whole.train_state), jax.tree.leaves(by_step.train_state), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  stopped = whole.train(_batches(3), 9, should_stop=lambda: whole.step >= 5).result()
  assert whole.step == 5 and 'loss' in stopped and not names & stopped.keys()


@pytest.mark.parametrize('value', [0, -1.0, float('nan'), float('inf'), '1.0', True])
def test_invalid_norms_are_rejected(value):
  with pytest.raises(
    ConfigError,
    match='`Trainer.gradient_clip_norm` must be a number > 0 or None, got .*None does not clip',
  ):
    _trainer(gradient_clip_norm=value)


@pytest.mark.parametrize(
  'optimizer_def, names',
  [
    (optimizers.adamw(), None),
    (optimizers.chain([optax.scale(2.0), optimizers.adamw()]), None),
    (optimizers.Adafactor(), None),
    (
      optimizers.Adafactor(global_norm_clip_threshold=1.0),
      'Adafactor.global_norm_clip_threshold',
    ),
    (optimizers.scaled_adam(), None),
    (optimizers.scaled_adam(clipping_scale=2.0), 'scaled_adam.clipping_scale'),
    (
      optimizers.chain([optax.clip_by_global_norm(2.0), optax.clip(1.0), optimizers.sgd()]),
      'optax.clip_by_global_norm, optax.clip',
    ),
    (
      optimizers.MultiOptimizer(
        [
          ('hidden', optimizers.Adafactor(global_norm_clip_threshold=1.0)),
          ('logits', optimizers.chain([optax.clip_by_block_rms(1.0), optimizers.sgd()])),
        ]
      ),
      'Adafactor.global_norm_clip_threshold, optax.clip_by_block_rms',
    ),
    (
      optimizers.with_update_options(
        optimizers.chain([optax.adaptive_grad_clip(0.1), optimizers.sgd()]),
        learning_rate_scales=[('hidden', 0.5)],
      ),
      'optax.adaptive_grad_clip',
    ),
  ],
)
def test_a_line_says_that_the_optimizer_clips_too(optimizer_def, names, caplog):
  caplog.set_level('INFO')
  model = toy_model.make_model(optimizer_def)
  for clip_norm in (None, 0.5):
    with _trainer(model=model, gradient_clip_norm=clip_norm) as trainer:
      trainer.partitioned_train_step()
  lines = [line for line in caplog.messages if 'clipped' in line]
  expected = []
  if names is not None:
    expected.append(
      'Gradients are clipped to the norm 0.5 by Trainer.gradient_clip_norm, and then again by the '
      f'optimizer: {names}.'
    )
  assert lines == expected


def test_clipping_reaches_the_step_and_its_metrics_are_means():
  runs = [_trainer(gradient_clip_norm=1e-3, num_microbatches=2) for _ in range(2)]
  whole, by_step = runs
  values = whole.train(_batches(), 2).result()
  each = [by_step.train(_batches(i), 1).result()['gradient_norm'].value for i in range(2)]
  assert float(values['gradient_norm/clipped_share'].value) == 1
  assert each[0] != each[1] and min(each) > 1e-3
  np.testing.assert_allclose(values['gradient_norm'].value, np.mean(each), rtol=1e-6)


def test_weight_metrics_and_gradient_transform_reach_the_step():
  trainer = _trainer(
    weight_metrics_computer=train_step.WeightMetricsComputer(),
    gradient_transform=lambda grads: jax.tree.map(jnp.zeros_like, grads),
    num_microbatches=2,
  )
  values = trainer.train(_batches(), 2).result()
  assert float(values['weight_gradient_norm'].value) == 0
  assert float(values['weight_rms/hidden'].value) > 0
