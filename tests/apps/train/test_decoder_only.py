"""A run of a decoder-only model by the train app: packed training, decoding, another layout from its files."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import decoding
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import runtime
from t5x_lite.apps.common import restore
from t5x_lite.apps.common import waiting
from t5x_lite.apps.train.batches import TrainBatches
from t5x_lite.errors import ConfigError
from t5x_lite.networks import DecoderWrapper
from t5x_lite.networks import TransformerConfig
from tests.apps.train import toy_run
from tests.models import toy_model
from tests.networks import network_cases as cases


def _model(bidirectional=True, **fields):
  config = TransformerConfig(
    vocab_size=toy_model.VOCAB_SIZE,
    emb_dim=8,
    num_heads=2,
    num_layers=1,
    head_dim=4,
    mlp_dim=8,
    dropout_rate=0.0,
    **fields,
  )
  vocabulary = toy_run.TASK.vocabularies['targets']
  return models.DecoderOnlyModel(
    DecoderWrapper(config),
    vocabulary,
    optimizers.adamw(),
    decode_fn=decoding.temperature_sample,
    inputs_bidirectional_attention=bidirectional,
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
  )


@pytest.mark.full  # by default, models, evaluations and layouts are tested apart
def test_a_run_and_its_checkpoint_in_another_layout(tmp_path):
  model = _model()
  step, state = toy_run.train(
    tmp_path,
    total_steps=2,
    model=model,
    train_dataset_cfg=toy_run.dataset('train', pack=True),
    train_eval_dataset_cfg=None,
    eval_period=2,
    stats_period=2,
    trainer_kwargs={'num_microbatches': None},
  )
  assert step == 2
  lines = toy_run.lines(tmp_path)
  assert [row['step'] for row in lines['inference_eval/letters']] == [2]
  assert 0 <= lines['inference_eval/letters'][0]['exact_match'] <= 1
  assert math.isfinite(lines['train'][-1]['loss'])
  assert (tmp_path / 'inference_eval/letters/predictions-2.jsonl').read_text().count('\n') == 20
  # The same numbers from the files in a network that keeps its layers stacked.
  layout = toy_run.partitioner().get_data_layout(toy_run.BATCH_SIZE)
  (batches,) = data.open_eval_iterators(
    toy_run.dataset('validation'), layout, 1, feature_converter=model.FEATURE_CONVERTER
  ).values()
  batch = next(iter(batches))
  stacked = _model(param_layout='scalable_t5')
  (restored,) = restore.restore_for_inference(
    stacked,
    checkpoints.RestoreCheckpointConfig(path=str(tmp_path), mode='latest'),
    toy_run.partitioner(),
    {name: spec.shape for name, spec in batches.element_spec.items()},
  )
  assert set(restored.train_state.params['decoder']) == {
    'decoder',
    'decoder_norm',
    'logits_dense',
    'token_embedder',
  }
  np.testing.assert_allclose(
    cases.jit(stacked.score_batch)(restored.train_state.params, batch),
    cases.jit(model.score_batch)(jax.device_get(state.params), batch),
    rtol=1e-4,
  )


def test_a_task_of_targets_alone_trains_but_is_not_decoded(tmp_path):
  targets_alone = dataclasses.replace(
    toy_run.dataset('train'), task_feature_lengths={'targets': toy_run.LENGTH}
  )
  cfgs = {'train_dataset_cfg': targets_alone, 'train_eval_dataset_cfg': None}
  with pytest.raises(
    ConfigError, match="inputs_bidirectional_attention. must be False.*length for 'inputs'"
  ):
    toy_run.train(tmp_path, total_steps=1, model=_model(), infer_eval_dataset_cfg=None, **cfgs)
  causal = _model(bidirectional=False)
  toy_run.train(
    tmp_path, total_steps=1, model=causal, infer_eval_dataset_cfg=None, dry_run=True, **cfgs
  )
  with pytest.raises(
    ConfigError, match="need the feature 'decoder_causal_attention'.*length for 'inputs'"
  ):
    toy_run.train(
      tmp_path,
      total_steps=1,
      model=causal,
      infer_eval_dataset_cfg=dataclasses.replace(targets_alone, split='validation', shuffle=False),
      **cfgs,
    )
  assert not list(tmp_path.glob('checkpoint_*'))


def test_progress_counts_each_position_once():
  partitioner = toy_run.partitioner()
  source = data.open_train_iterator(
    toy_run.dataset('train'),
    partitioner.get_data_layout(toy_run.BATCH_SIZE),
    feature_converter='decoder_only',
  )
  with data.GlobalBatches(source, partitioner) as batches:
    train_batches = TrainBatches(
      batches,
      should_stop=lambda: False,
      facts={},
      first_step=0,
      waits=waiting.DataWaits(runtime.StopSignals()),
    )
    assert train_batches.tokens_per_step == toy_run.BATCH_SIZE * 2 * toy_run.LENGTH
