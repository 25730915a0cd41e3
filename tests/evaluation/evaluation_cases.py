"""Tasks, states and evaluators of the toy model."""

import functools
import json

import jax
import numpy as np

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite.data.interfaces import EvalTask
from t5x_lite.trainer import state_init
from tests.apps.train import toy_run
from tests.models import toy_model

_VOCABULARY = toy_model.ToyVocabulary()  # Tasks of a mixture have equal vocabularies.


@functools.cache
def make_state(width=8):
  model = toy_model.make_model(width=width)
  initializer = state_init.TrainStateInitializer(
    None, model.get_initial_variables, {'decoder_input_tokens': (8, 6)}, toy_run.partitioner()
  )
  return model, initializer.from_scratch(jax.random.key(3)), initializer.train_state_axes


def make_task(name='letters', count=20, **kwargs):
  kwargs = {'metric_fns': (data.exact_match,), **kwargs}
  rng = np.random.default_rng(count)
  examples, texts, vocabulary = [], [], _VOCABULARY
  for _ in range(count):
    targets = np.append(rng.integers(2, toy_model.VOCAB_SIZE, rng.integers(1, 6)), 1).astype(
      np.int32
    )
    examples.append({'inputs': targets[::-1].copy(), 'targets': targets})
    texts.append({'targets_pretokenized': vocabulary.decode(targets)})
  return data.BuiltinTask(
    name=name,
    splits=('validation',),
    vocabularies={'inputs': vocabulary, 'targets': vocabulary},
    table_fn=lambda split, lengths: data.StaticExamples(examples, texts),
    **kwargs,
  )


def make_evaluator(
  task, model_dir=None, *, model=None, use_memory_cache=True, concurrent_metrics=False, **kwargs
):
  cfg = data.DatasetConfig(
    task,
    {'inputs': 6, 'targets': 6},
    'validation',
    8,
    False,
    0,
    source='builtin',
    use_memory_cache=use_memory_cache,
  )
  return evaluation.InferenceEvaluator(
    cfg,
    None,
    model or make_state()[0],
    toy_run.partitioner(),
    model_dir,
    None,
    cfg=evaluation.InferenceEvalConfig(**kwargs),
    concurrent_metrics=concurrent_metrics,
  )


def predictions(model_dir, task='letters', step=7):
  path = model_dir / 'inference_eval' / task / f'predictions-{step}.jsonl'
  return [json.loads(line) for line in path.read_text().splitlines()]


class RichModel(toy_model.ToyModel):
  """Gives auxiliary values, several decodes or a malformed output."""

  what = 'aux'

  def predict_batch_with_aux(self, params, batch, rng=None, *, flax_mutables=None):
    tokens, _ = super().predict_batch_with_aux(params, batch)
    if self.what == 'decodes':
      tokens = np.array([1, 2])[None, :, None] * 0 + tokens[:, None]
    number = batch['decoder_target_tokens'].sum(axis=-1)
    return tokens, {'number': number if self.what != 'scalar' else number.sum()}


def rich_model(what):
  vocabulary = toy_model.ToyVocabulary()
  model = RichModel(toy_model.ToyNetwork(), vocabulary, vocabulary, None)
  model.what = what
  return model


def with_fns(task, **fns):
  """Return the opened task with further metrics, as seqio's tasks have them."""
  return EvalTask(
    **{**{name: getattr(task, name) for name in EvalTask.__dataclass_fields__}, **fns}
  )


def outputs(what='aux', change_state=lambda state: state, **fns):
  _, *states = make_state()
  state, axes = map(change_state, states)
  evaluator = make_evaluator(make_task())
  task = with_fns(evaluator.eval_tasks[0], **fns)
  evaluator.close()
  runner = evaluation.OutputRunner(
    rich_model(what), toy_run.partitioner(), evaluation.InferenceEvalConfig()
  )
  return task, runner.run(task, state, axes)
