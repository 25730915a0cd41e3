"""Model FLOPs, their rates and MFU in the log and the metrics of a run."""

import types

import numpy as np
import pytest

from t5x_lite.apps.common import speed
from t5x_lite.trainer import model_flops
from t5x_lite.trainer import summaries
from tests.apps.train import toy_run
from tests.models import toy_model
from tests.trainer import test_trainer as trainer_cases


def _trainer(device_kind, count_fn, num_devices=4):
  device = types.SimpleNamespace(device_kind=device_kind)
  mesh = types.SimpleNamespace(devices=np.array([[device] * num_devices]), size=num_devices)
  return types.SimpleNamespace(
    partitioner=types.SimpleNamespace(mesh=mesh),
    count_flops=count_fn,
    step_flops=None,
    peak_flops=None,
  )


def _flops(batch):
  del batch
  return model_flops.ModelFlops({'bfloat16': 3 * 10**12, 'float32': 10**12})


def test_mfu_of_a_known_chip():
  trainer = _trainer('TPU v6 lite', _flops)
  speed.count_flops(trainer, {})
  assert trainer.peak_flops == 918e12
  # 4 TFLOP on 4 devices in 2 ms: 500 TFLOP/s each.
  assert speed.describe(trainer, 1000, 0.002) == (
    '500.0k tokens/s  500 TFLOP/s per device  MFU 54.47 %'
  )
  assert speed.describe(trainer, 1000, 0.0) == ''


def test_no_mfu_of_an_unknown_chip(caplog):
  trainer = _trainer('Abacus', _flops)
  with caplog.at_level('INFO'):
    speed.count_flops(trainer, {})
  assert 'A step has 4 model TFLOPs' in caplog.text and 'Abacus device: unknown' in caplog.text
  assert speed.describe(trainer, 1000, 0.002) == '500.0k tokens/s  500 TFLOP/s per device'


def test_a_loss_that_cannot_be_counted_trains(caplog):
  def fail(batch):
    raise model_flops.UncountableError("'while' has products")

  trainer = _trainer('TPU v4', fail)
  speed.count_flops(trainer, {})
  assert 'model FLOPs are unknown' in caplog.text and "'while'" in caplog.text
  assert trainer.step_flops is None
  assert speed.describe(trainer, 1000, 0.002) == '500.0k tokens/s'
  # As without a trainer that knows its loss, and without products.
  for count_fn in (lambda batch: None, lambda batch: model_flops.ModelFlops({})):
    trainer = _trainer('TPU v4', count_fn)
    speed.count_flops(trainer, {})
    assert trainer.step_flops is None


def test_metrics_of_the_steps_between_two_lines(tmp_path):
  with trainer_cases._trainer(tmp_path) as trainer:
    trainer.step_flops = trainer.count_flops(toy_model.make_batch())
    trainer.peak_flops = 1e9
    values = trainer.train(trainer_cases._batches(), 3).result()
  values = {name: float(np.asarray(value.value)) for name, value in values.items()}
  seconds = values['timing/seconds']
  per_device = 3 * trainer.step_flops.total / 4 / seconds
  assert values['timing/model_tflops_per_second_per_core'] == pytest.approx(per_device / 1e12)
  assert values['timing/mfu'] == pytest.approx(per_device / 1e9)
  assert values['timing/non_padding_tokens_per_second'] == pytest.approx(
    values['timing/tokens_per_second'] * values['non_padding_fraction/overall'], rel=1e-4
  )


def test_a_run_counts_its_step(tmp_path):
  toy_run.train(tmp_path, 4, infer_eval_dataset_cfg=None)
  rows = summaries.read_metrics(tmp_path / 'train/metrics.jsonl')
  assert rows[-1]['timing/model_tflops_per_second_per_core'] > 0
  assert 'timing/mfu' not in rows[-1]  # of a CPU
