"""Hooks of optimizer states in trainer and commands: learning rates, metrics, parameters for evaluation."""

import itertools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import checkpoints
from t5x_lite import evaluation
from t5x_lite import optimizers
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.common import restore as restore_lib
from t5x_lite.apps.evaluate import run as evaluate_app
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.optimizers.base import state_hooks
from t5x_lite.trainer import summaries
from tests.apps.train import toy_run
from tests.models import toy_model
from tests.optimizers import toy_trainer


@pytest.mark.parametrize(
  'optimizer_def,rate_fn,two,fragment',
  [
    (optimizers.adamw(), toy_trainer.RATE, False, None),
    (optimizers.adamw(0.1), None, False, None),
    (optimizers.adamw(0.1), toy_trainer.RATE, True, 'has no effect'),
    (
      optimizers.chain([optax.clip(1.0), optimizers.adamw(0.1)]),
      toy_trainer.RATE,
      True,
      'has no effect',
    ),
    (optimizers.mechanize(optimizers.adamw(0.1)), toy_trainer.RATE, True, 'has no effect'),
    (optimizers.OptaxWrapper(optax.adamw(0.1)), toy_trainer.RATE, False, 'has no effect'),
    (optimizers.OptaxWrapper(optax.adamw(0.1)), None, False, None),
    (optimizers.lbfgs(), toy_trainer.RATE, False, 'has no effect'),
    (optimizers.rprop(0.1), toy_trainer.RATE, True, 'has no effect'),
    (optimizers.Adafactor(0.1), toy_trainer.RATE, True, 'no effect'),
  ],
)
def test_who_owns_the_learning_rate(optimizer_def, rate_fn, two, fragment, caplog):
  with caplog.at_level(logging.WARNING):
    trainer = toy_trainer.make_with_shapes(optimizer_def, rate_fn)
    trainer.partitioned_train_step()
  assert trainer.has_two_learning_rates == two
  assert (fragment in caplog.text) if fragment else not caplog.text


@pytest.mark.parametrize(
  'optimizer_def',
  [
    optimizers.adamw(),
    optimizers.prodigy(),
    optimizers.chain([optimizers.sgd()]),
    optimizers.Adafactor(),
  ],
)
def test_a_missing_learning_rate_is_rejected(optimizer_def):
  with pytest.raises(ConfigError, match='the trainer has none'):
    toy_trainer.make_with_shapes(optimizer_def, None)


def _raising(step):
  raise RuntimeError('no more')


_BAD_SCHEDULES = [
  (lambda step: jnp.ones([2]), r'to one real number.* returns an array of shape \[2\]'),
  (lambda step: (0.1, 0.2), r'to one real number.* returns \('),
  (lambda step: step > 3, 'to one real number.* dtype bool'),
  (lambda: 0.1, 'fails for a traced step'),
  (lambda step: 0.1 if step < 10 else 0.01, 'fails for a traced step'),
  (_raising, 'RuntimeError: no more'),
]


@pytest.mark.parametrize(
  'schedule,message', [*_BAD_SCHEDULES, (0.1, 'of type float'), ('constant', 'of type str')]
)
def test_invalid_schedules_are_rejected_by_the_trainer(schedule, message):
  with pytest.raises(ConfigError, match=f'`Trainer.learning_rate_fn` must .*{message}'):
    toy_trainer.make_with_shapes(optimizers.adamw(), schedule)


@pytest.mark.parametrize(
  'make', [optimizers.adamw, optimizers.rprop, optimizers.Adafactor, optimizers.prodigy]
)
@pytest.mark.parametrize('schedule,message', _BAD_SCHEDULES)
def test_invalid_schedules_are_rejected_by_optimizers(make, schedule, message):
  with pytest.raises(ConfigError, match=message):
    make(learning_rate=schedule)


class _NormState(NamedTuple):
  """State of `_norms`."""

  norm: Any


def _norms():
  return optax.GradientTransformation(
    lambda params: _NormState(jnp.float32(0)),
    lambda updates, state, params=None: (updates, _NormState(optax.tree.norm(updates))),
  )


@pytest.fixture
def _registered(rules, monkeypatch):
  """Register `_NormState` with its rule, metrics and report for one test."""
  # Users never remove hooks, so the package has no public function for it.
  monkeypatch.setattr(state_hooks, '_HOOKS', dict(state_hooks._HOOKS))
  rules.register(_NormState, norm='replicated')
  optimizers.register_state_metrics(
    _NormState,
    lambda state: {'norm': state.norm},
    report=lambda values: [f'norm {values["norm"]:.3g}'] if 'norm' in values else [],
  )


@pytest.mark.usefixtures('_registered')
def test_metrics_of_states_are_found_everywhere():
  params = {'a': jnp.full([3], 2.0), 'b': jnp.ones([2])}
  one = optimizers.OptaxWrapper(
    optax.masked(optax.chain(_norms(), optax.sgd(1.0)), {'a': True, 'b': False})
  )
  two = optimizers.OptaxWrapper(
    optax.chain(_norms(), optax.scale(0.5), optax.MultiSteps(_norms(), 1).gradient_transformation())
  )
  for optimizer_def, expected, lines in (
    (one, {'norm': 12.0**0.5}, ['norm 3.46']),
    (two, {'0/norm': 14.0**0.5, '1/norm': 14.0**0.5 / 2}, ['0: norm 3.74', '1: norm 1.87']),
    (optimizers.adamw(0.1), {}, []),
  ):
    updated = optimizer_def.create(params).apply_gradient(params)
    metrics = optimizer_def.metrics(updated.state)
    assert jax.tree.map(float, metrics) == pytest.approx(expected)
    assert optimizer_def.report(jax.tree.map(float, metrics)) == lines


@pytest.mark.usefixtures('_registered')
def test_a_module_that_is_loaded_twice_reports_once():
  again = NamedTuple('_NormState', [('norm', Any)])  # noqa: UP014 (as a second load of this module makes it)
  again.__module__, again.__qualname__ = _NormState.__module__, _NormState.__qualname__
  optimizers.register_state_metrics(
    again, lambda state: {'norm': state.norm}, report=lambda values: [f'norm {values["norm"]:.2g}']
  )
  assert state_hooks.report_of({'norm': 3.0}) == ['norm 3']
  # States of the old class keep their metrics.
  for state_class in (_NormState, again):
    assert state_hooks.metrics_of((state_class(3.0),)) == {'norm': 3.0}


@pytest.mark.usefixtures('_registered')
def test_metrics_are_summarised_and_reported_in_the_log(tmp_path, caplog):
  optimizer_def = optimizers.chain([_norms(), optimizers.sgd()])
  with (
    caplog.at_level(logging.INFO),
    toy_trainer.make(optimizer_def, summary_dir=tmp_path) as trainer,
  ):
    values = trainer.train((toy_model.make_batch(seed=i) for i in itertools.count()), 3).result()
    norm = float(trainer.train_state.param_states[0].norm)
    trainer.flush()
  assert values['optimizer/norm'].value == pytest.approx(norm) and norm > 0
  assert summaries.read_metrics(tmp_path / 'train' / 'metrics.jsonl')[-1][
    'optimizer/norm'
  ] == pytest.approx(norm)
  assert f'step 3  optimizer: norm {norm:.3g}' in caplog.text


def test_schedule_free_evaluates_the_average():
  params = {
    'a': jnp.asarray(np.random.default_rng(0).normal(size=[4]), jnp.float32),
    'b': jnp.ones([2], jnp.bfloat16),
  }
  masked = optax.masked(optax.contrib.schedule_free_sgd(0.3), {'a': True, 'b': False})
  for optimizer_def, average_of in (
    (optimizers.schedule_free_sgd(0.3, b1=0.8), {'a', 'b'}),
    (
      optimizers.chain([optax.clip(1.0), optimizers.schedule_free(optimizers.sgd(0.3), 0.3)]),
      {'a', 'b'},
    ),
    (optimizers.OptaxWrapper(masked), {'a'}),
    (
      optimizers.MultiOptimizer(
        [('a', optimizers.schedule_free_sgd(0.3)), ('b', optimizers.sgd(0.3))]
      ),
      {'a'},
    ),
  ):
    optimizer = optimizer_def.create(params)
    # Plain averaging of what SGD makes: x_t is the mean of z_1 .. z_t at a constant rate.
    steps, z = [], params
    for seed in range(4):
      grads = jax.tree.map(
        lambda p, seed=seed: jnp.asarray(
          np.random.default_rng(seed).normal(size=p.shape) * 0.2, p.dtype
        ),
        params,
      )
      optimizer = optimizer.apply_gradient(grads)
      z = jax.tree.map(lambda p, g: p.astype(jnp.float32) - 0.3 * g.astype(jnp.float32), z, grads)
      steps.append(z)
    got = optimizer_def.eval_params(optimizer.target, optimizer.state)
    for name, tolerance in (('a', 1e-5), ('b', 2e-2)):
      assert got[name].dtype == params[name].dtype
      expected = (
        np.mean([step[name] for step in steps], axis=0)
        if name in average_of
        else optimizer.target[name]
      )
      np.testing.assert_allclose(
        np.asarray(got[name], np.float32), np.asarray(expected, np.float32), rtol=tolerance
      )


def test_sam_evaluates_unperturbed_parameters():
  descend, ascend = optax.sgd(0.1), optax.sgd(0.5)
  optimizer = optimizers.sam(descend, ascend, sync_period=2).create(
    {'p': jnp.full([2], 3.0, jnp.bfloat16)}
  )
  reached = 3.0
  for round_ in range(2):
    np.testing.assert_allclose(
      np.asarray(
        optimizer.optimizer_def.eval_params(optimizer.target, optimizer.state)['p'], np.float32
      ),
      reached,
    )
    for _ in range(2):
      optimizer = optimizer.apply_gradient({'p': jnp.full([2], 1.0, jnp.bfloat16)})
      evaluated = optimizer.optimizer_def.eval_params(optimizer.target, optimizer.state)['p']
      assert evaluated.dtype == jnp.bfloat16
      reached = reached if int(optimizer.state.step) % 2 else float(optimizer.target['p'][0])
      np.testing.assert_allclose(np.asarray(evaluated, np.float32), reached)
    np.testing.assert_allclose(reached, 3.0 - 0.1 * (round_ + 1), rtol=1e-2)
  opaque = optimizers.sam(descend, ascend, opaque_mode=True).create({'p': jnp.ones([2])})
  assert opaque.optimizer_def.eval_params(opaque.target, opaque.state) is opaque.target


def test_other_optimizers_evaluate_the_trained_parameters():
  for optimizer_def in (optimizers.adamw(), optimizers.Adafactor(), optimizers.lbfgs()):
    state = toy_model.make_state(toy_model.make_model(optimizer_def))
    assert state.eval_params is state.params and not state.evaluates_other_params
    assert state.for_inference().eval_params is state.params


@pytest.fixture(scope='module')
def schedule_free_run(tmp_path_factory):
  """A run with Schedule-Free AdamW, evaluated at its checkpoints of the steps 4 and 8."""
  model = toy_run.model(optimizers.schedule_free_adamw())
  model_dir = tmp_path_factory.mktemp('schedule_free')
  _, state = toy_run.train(model_dir, 8, model=model, save={'period': 4}, eval_period=4)
  return model, model_dir, state


def _restore(model, path, **kwargs):
  cfg = checkpoints.RestoreCheckpointConfig(str(path), mode='latest', **kwargs)
  return next(
    restore_lib.restore_for_inference(
      model, cfg, toy_run.partitioner(), {'decoder_input_tokens': (8, 6)}
    )
  ).train_state


def test_a_checkpoint_is_evaluated_as_in_training(schedule_free_run, tmp_path):
  model, model_dir, _ = schedule_free_run
  results = evaluate_app.evaluate(
    model=model,
    dataset_cfg=toy_run.dataset('validation'),
    partitioner=toy_run.partitioner(),
    training_evaluator_cls=trainer_lib.Trainer,
    output_dir=str(tmp_path),
    restore_checkpoint_cfg=checkpoints.RestoreCheckpointConfig(str(model_dir), mode='all'),
  )
  for kind in (evaluation.TRAINING_EVAL, evaluation.INFERENCE_EVAL):
    for row in summaries.read_metrics(model_dir / kind / 'letters' / 'metrics.jsonl'):
      for name, value in row.items():
        if f'{kind}/letters/{name}' in results[row['step']] and not name.startswith('timing'):
          assert results[row['step']][f'{kind}/letters/{name}'] == pytest.approx(value, rel=1e-5), (
            kind,
            name,
          )


def test_restored_parameters_are_the_averages(schedule_free_run):
  model, model_dir, state = schedule_free_run
  restored = _restore(model, model_dir)
  expected = jax.device_get(state.eval_params)
  for name, value in jax.device_get(restored.params).items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)
    assert not np.allclose(value, state.params[name], atol=1e-4)


def test_wrong_parameters_are_not_silently_evaluated(schedule_free_run, tmp_path):
  model, model_dir, state = schedule_free_run
  with pytest.raises(
    CheckpointError, match='trained with the optimizer schedule_free_adamw.*optimizer is adamw'
  ):
    _restore(toy_run.model(), model_dir)
  # Saved manually, without a record of the optimizer: the model's optimizer applies.
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(8, state.state_dict())
  np.testing.assert_allclose(
    _restore(model, tmp_path).params['hidden'], state.eval_params['hidden'], rtol=1e-5
  )
  # Parameters trained by another optimizer are evaluated unchanged, whatever optimizer the model has.
  other = toy_model.make_state(toy_run.model())
  with checkpoints.CheckpointManager(
    tmp_path / 'b', save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(
      1,
      other.state_dict(),
      metadata={'optimizer': {'name': 'adamw', 'evaluates_other_params': False}},
    )
  np.testing.assert_array_equal(
    _restore(model, tmp_path / 'b').params['hidden'], other.params['hidden']
  )


def test_a_run_does_not_resume_with_another_optimizer(schedule_free_run):
  _, model_dir, _ = schedule_free_run
  for optimizer_def, name in ((optimizers.sgd(), 'sgd'), (optimizers.Adafactor(), 'Adafactor')):
    with pytest.raises(
      CheckpointError, match=f'saved with the optimizer schedule_free_adamw; this run uses {name}'
    ):
      toy_run.train(model_dir, 12, model=toy_run.model(optimizer_def))
