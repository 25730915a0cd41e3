"""Speed of a run: its model FLOPs, their rate, and the share of the devices' peak rate, MFU."""

from collections.abc import Mapping
import logging
from typing import Any

from t5x_lite import runtime
from t5x_lite.formatting import format_number
from t5x_lite.trainer import trainer as trainer_lib

_logger = logging.getLogger(__name__)


def count_flops(trainer: trainer_lib.BaseTrainer, batch: Mapping[str, Any]) -> None:
  """Set `step_flops` and `peak_flops` of a trainer, as far as they are known, and log them.

  Args:
    trainer: trainer with a state or its shapes.
    batch: `jax.ShapeDtypeStruct` of a global batch, by feature.
  """
  try:
    flops = trainer.count_flops(batch)
  except Exception as error:
    # Code of users may need the mesh, and no run depends on this number.
    _logger.warning('The model FLOPs are unknown, so TFLOP/s and MFU are left out: %s', error)
    return
  if flops is None or not flops.total:
    return
  trainer.step_flops = flops
  device_kind = trainer.partitioner.mesh.devices.flat[0].device_kind
  trainer.peak_flops = runtime.peak_flops(device_kind, flops.dtype)
  peak = 'unknown'
  if trainer.peak_flops is not None:
    peak = f'{format_number(trainer.peak_flops / 1e12)} TFLOP/s'
  _logger.info(
    'A step has %s model TFLOPs, most of them in %s; peak rate of a %s device: %s.',
    format_number(flops.total / 1e12),
    flops.dtype,
    device_kind,
    peak,
  )


def describe(trainer: trainer_lib.BaseTrainer, tokens_per_step: int, seconds: float) -> str:
  """Return the rates of tokens and model FLOPs, and MFU if the peak rate is known; '' for 0 seconds.

  Args:
    trainer: trainer with the FLOPs of a step.
    tokens_per_step: number of positions of a batch, with padding.
    seconds: duration of a step.
  """
  if not seconds:
    return ''
  parts = [f'{format_number(tokens_per_step / seconds)} tokens/s']
  if trainer.step_flops is not None:
    rate = trainer.step_flops.total / trainer.partitioner.mesh.size / seconds
    parts.append(f'{format_number(rate / 1e12)} TFLOP/s per device')
    if trainer.peak_flops is not None:
      parts.append(f'MFU {format_number(100 * rate / trainer.peak_flops)} %')
  return '  '.join(parts)
