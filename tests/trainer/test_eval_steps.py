"""Steps of teacher-forced evaluations: which ones share a program, and with which metrics."""

import clu.metrics
import jax.numpy as jnp
import pytest

from t5x_lite import partitioning
from t5x_lite import trainer as trainer_lib
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from tests.models import toy_model
from tests.trainer import test_trainer


def largest_logit(logits, batch):
  return {'largest_logit': clu.metrics.Average(total=jnp.max(logits), count=jnp.float32(1))}


def num_rows(logits, batch):
  return {'num_rows': clu.metrics.Average(total=jnp.float32(len(logits)), count=jnp.float32(1))}


def test_each_evaluation_has_its_metrics_and_equal_ones_share_a_program(monkeypatch):
  compiled, compile_fn = [], partitioning.PjitPartitioner.compile
  monkeypatch.setattr(
    partitioning.PjitPartitioner,
    'compile',
    lambda self, *args: compiled.append(args[-1]) or compile_fn(self, *args),
  )
  model = toy_model.make_model(metric_fns=[num_rows])
  trainer = test_trainer._trainer(model=model, eval_names=['model', 'a', 'b', 'none'])
  spec, batch = tree_utils.shapes(toy_model.make_batch()), toy_model.make_batch()
  trainer.compile_eval({'model': spec})
  trainer.compile_eval({'a': spec, 'b': spec}, [largest_logit])
  trainer.compile_eval({'none': spec}, [])
  trainer.compile_eval({'a': spec}, [largest_logit])
  assert len(compiled) == 3
  found = trainer.eval({name: [batch] for name in ('model', 'a', 'b', 'none')})
  of_functions = {
    name: {'largest_logit', 'num_rows'} & set(metrics) for name, metrics in found.items()
  }
  assert of_functions == {
    'model': {'num_rows'},
    'a': {'largest_logit'},
    'b': {'largest_logit'},
    'none': set(),
  }
  expected = float(jnp.max(model.compute_logits(trainer.train_state.params, batch)[0]))
  assert float(found['a']['largest_logit'].value) == pytest.approx(expected, rel=1e-5)
  assert len({float(metrics['loss'].value) for metrics in found.values()}) == 1


def test_a_trainer_whose_step_does_not_take_them(tmp_path):

  class OwnTrainer(trainer_lib.Trainer):
    def partitioned_eval_step(self):
      return super().partitioned_eval_step()

  trainer = test_trainer._trainer(trainer_cls=OwnTrainer)
  trainer.eval_steps.make()
  with pytest.raises(
    ConfigError, match=r'^`OwnTrainer.partitioned_eval_step` must be a function of \(metric_fns\)'
  ):
    trainer.eval_steps.make([largest_logit])
