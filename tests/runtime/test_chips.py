"""Peak rates by the names of devices."""

import pytest

from t5x_lite import runtime


@pytest.mark.parametrize(
  ('device_kind', 'dtype', 'tflops'),
  [
    ('NVIDIA H100 80GB HBM3', 'bfloat16', 989.4),
    ('NVIDIA H100 80GB HBM3', 'float32', 494.7),
    ('NVIDIA H100 PCIe', 'bfloat16', 756),
    ('NVIDIA H200', 'float16', 989.4),
    ('NVIDIA B200', 'bfloat16', 2250),
    ('NVIDIA A100-SXM4-40GB', 'bfloat16', 312),
    ('NVIDIA A100 80GB PCIe', 'float32', 156),
    ('NVIDIA A10G', 'bfloat16', 70),
    ('NVIDIA L40S', 'bfloat16', 362.05),
    ('NVIDIA GeForce RTX 4090', 'bfloat16', 165.2),
    ('Tesla T4', 'float16', 65),
    ('Tesla V100-SXM2-16GB', 'float32', 15.7),
    ('TPU v3', 'bfloat16', 61.5),
    ('TPU v5 lite', 'bfloat16', 197),
    ('TPU v5', 'float32', 459),
    ('TPU v6 lite', 'bfloat16', 918),
    ('TPU7x', 'bfloat16', 1153.5),
  ],
)
def test_rates(device_kind, dtype, tflops):
  assert runtime.peak_flops(device_kind, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
  ('device_kind', 'dtype'),
  [
    ('cpu', 'float32'),
    # A part of a chip, another chip of a similar name, and dtypes without fast products.
    ('NVIDIA A100-SXM4-40GB MIG 1g.5gb', 'bfloat16'),
    ('NVIDIA GeForce RTX 4090 Laptop GPU', 'bfloat16'),
    ('Tesla T4', 'bfloat16'),
    ('NVIDIA H100 PCIe', 'float32_highest'),
  ],
)
def test_no_rate_is_known(device_kind, dtype):
  assert runtime.peak_flops(device_kind, dtype) is None
