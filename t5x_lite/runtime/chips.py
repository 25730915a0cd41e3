"""Peak rates of chips, the denominators of MFU: dense matrix products with sums in float32, per `jax.Device`.

Sources, with rates that makers give with sparsity halved:

- TPUs: https://docs.cloud.google.com/tpu/docs (the pages v2 to v6e and tpu7x), per chip. A device of v2, v3 and 7x is
  one of the two TensorCores of a chip, a device of the others an entire chip.
- V100, T4, A100, L4, L40S, H100, H200: data sheets of NVIDIA.
- A10G: https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference, from the data sheet of the A10G.
- B200, GB200: https://resources.nvidia.com/en-us-blackwell-architecture, for 1,000 and 1,200 W.
- GeForce: appendices of the white papers of the Ada and RTX Blackwell architectures.
"""

from collections.abc import Mapping
import re

# Regular expression for an entire `jax.Device.device_kind`, and dtype to TFLOP/s. 'float32' has the default precision:
# TF32 on NVIDIA's chips since A100, bfloat16 on TPUs.
_Chip = tuple[str, Mapping[str, float]]


def _tpu(kinds: str, rate: float) -> _Chip:
  return kinds, {'bfloat16': rate, 'float32': rate}


def _nvidia(kinds: str, rate: float, tf32: float) -> _Chip:
  return kinds, {'bfloat16': rate, 'float16': rate, 'float32': tf32}


def _before_a100(kinds: str, float16: float, float32: float) -> _Chip:
  return kinds, {'float16': float16, 'float32': float32}


# Variants of one name have different rates, and a part of a chip (MIG) has less, so the entire name must match.
_CHIPS = (
  _tpu('TPU v2', 45 / 2),
  _tpu('TPU v3', 123 / 2),
  _tpu('TPU v4', 275),
  _tpu('TPU v5e|TPU v5 lite', 197),
  _tpu('TPU v5p?', 459),
  _tpu('TPU v6e|TPU v6 lite', 918),
  _tpu('TPU7x', 2307 / 2),
  _before_a100('Tesla V100-SXM2[^ ]*', 125, 15.7),
  _before_a100('Tesla V100-PCIE[^ ]*', 112, 14),
  _before_a100('(Tesla|NVIDIA) T4', 65, 8.1),
  _nvidia('(NVIDIA )?A100-(SXM4|PCIE)[^ ]*|NVIDIA A100 80GB PCIe', 312, 156),
  _nvidia('NVIDIA A10G', 70, 35),
  _nvidia('NVIDIA L4', 121, 60),
  _nvidia('NVIDIA L40S', 362.05, 183),
  _nvidia('NVIDIA H100 80GB HBM3|NVIDIA GH200 [^ ]*', 989.4, 494.7),
  _nvidia('NVIDIA H100 PCIe', 756, 378),
  _nvidia('NVIDIA (H100|H200) NVL', 835.5, 417.5),
  _nvidia('NVIDIA H200', 989.4, 494.7),
  _nvidia('NVIDIA B200', 2250, 1100),
  _nvidia('NVIDIA GB200', 2500, 1250),
  _nvidia('NVIDIA GeForce RTX 4090', 165.2, 82.6),
  _nvidia('NVIDIA GeForce RTX 5090', 209.5, 104.8),
)


def peak_flops(device_kind: str, dtype: str) -> float | None:
  """Return the peak rate of a device in FLOP/s; None for an unknown chip, or a dtype without a rate.

  Args:
    device_kind: `jax.Device.device_kind`.
    dtype: dtype of the operands of products, as `trainer.model_flops.ModelFlops.dtype`.

  >>> peak_flops('NVIDIA A100-SXM4-80GB', 'bfloat16') / 1e12
  312.0
  """
  for kinds, rates in _CHIPS:
    if dtype in rates and re.fullmatch(kinds, device_kind):
      return rates[dtype] * 1e12
  return None
