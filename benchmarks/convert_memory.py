"""Conversion of weights: seconds, and memory in addition to the size of the weights, for a model on disk.

    python benchmarks/convert_memory.py [--only NAME ...] [--scale 1] [--folder /tmp]

Each conversion runs in a new process, which reports its peak memory relative to the memory before. A folder in Hugging
Face's form with random numbers is made first; everything is removed at the end. `--scale 4` divides the widths by 4.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import common

# A billion parameters, between T5 1.1 large and xl.
_WIDTH, _HEADS, _HIDDEN, _LAYERS = 1152, 18, 3328, 24
# Name -> (source, result, options); a source is one that is made, or the result of an earlier case.
_CASES = {
  'Hugging Face to t5x_lite': ('folder', 'own', ['--to=t5x_lite']),
  't5x_lite to Hugging Face': ('own', 'back', ['--to=hugging_face']),
  'Hugging Face to T5X': ('folder', 't5x', ['--to=t5x']),
  'T5X to Hugging Face': ('t5x', 'from_t5x', ['--to=hugging_face']),
  'Hugging Face to t5x_lite, scalable_t5': (
    'folder',
    'stacked',
    ['--to=t5x_lite', '--param_layout=scalable_t5'],
  ),
  't5x_lite, scalable_t5, to Hugging Face': (
    'stacked',
    'unstacked',
    ['--to=hugging_face', '--family=t5_1_1'],
  ),
  'Hugging Face to t5x_lite, bfloat16': ('folder', 'half', ['--to=t5x_lite', '--dtype=bfloat16']),
}


def _measure(arguments: list[str]) -> dict[str, float]:
  """Run a conversion in this process; return its seconds and bytes."""
  from t5x_lite.apps.convert import report as convert_report  # Before the measurement.
  from t5x_lite.apps.convert import run as convert  # Before the measurement.
  from t5x_lite.command_line import cli

  del convert, convert_report
  before = _resident()
  start = time.perf_counter()
  status = cli.main(['convert', *arguments])
  assert status == 0, status
  return {
    'seconds': time.perf_counter() - start,
    'before': before / 1e6,
    'peak': common.peak_memory_mb(),
  }


def _resident() -> int:
  """Return the bytes of this process that are in memory now, in bytes; on Linux alone."""
  return int(pathlib.Path('/proc/self/statm').read_text(encoding='utf-8').split()[1]) * os.sysconf(
    'SC_PAGE_SIZE'
  )


def _make_folder(path: pathlib.Path, scale: int) -> int:
  """Write random weights; return their bytes."""
  import numpy as np

  from t5x_lite.checkpoints import hugging_face
  from t5x_lite.checkpoints.hugging_face import writer

  architecture = hugging_face.Architecture(
    vocab_size=32128 // scale,
    emb_dim=_WIDTH // scale,
    num_heads=_HEADS,
    head_dim=64 // scale,
    mlp_dim=_HIDDEN // scale,
    num_encoder_layers=_LAYERS,
    num_decoder_layers=_LAYERS,
    mlp_activations=('gelu', 'linear'),
    logits_via_embedding=False,
  )
  shapes = {rule.ours: rule.shape for rule in hugging_face.tensor_table(architecture)}
  rng = np.random.default_rng(0)
  writer.write_folder(
    path,
    architecture,
    hugging_face.get_family('t5_1_1'),
    lambda name: rng.standard_normal(shapes[name], np.float32),
  )
  return 4 * sum(int(np.prod(shape)) for shape in shapes.values())


def main() -> None:
  if sys.argv[1:2] == ['--measure']:  # In a separate process.
    print(json.dumps(_measure(sys.argv[2:])))
    return
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', nargs='+', choices=_CASES, default=list(_CASES))
  parser.add_argument(
    '--scale', type=common.positive, default=1, help='divide widths by this, for a try'
  )
  parser.add_argument(
    '--folder', help='where to put the files, 30 GB; by default where temporary files go'
  )
  args = parser.parse_args()
  folder = pathlib.Path(tempfile.mkdtemp(prefix='convert-', dir=args.folder))
  try:
    num_bytes = _make_folder(folder / 'folder', args.scale)
    rows = [_row(folder, name, num_bytes) for name in _CASES if name in args.only]
  finally:
    shutil.rmtree(folder)
  print(f'weights: {num_bytes / 1e9:.2f} GB of float32')
  common.print_table(
    'Conversion', rows, ('what', 's', 'before MB', 'peak MB', 'peak above before, of the weights')
  )


def _row(folder: pathlib.Path, name: str, num_bytes: int) -> tuple:
  source, result, options = _CASES[name]
  if not (folder / source).exists():
    _run([folder / _CASES[_maker(source)][0], folder / source, *_CASES[_maker(source)][2]])
  found = _run([folder / source, folder / result, *options])
  if not any(result == other for other, _, _ in _CASES.values()):
    shutil.rmtree(folder / result)
  return (
    name,
    found['seconds'],
    found['before'],
    found['peak'],
    (found['peak'] - found['before']) * 1e6 / num_bytes,
  )


def _maker(result: str) -> str:
  return next(name for name, (_, made, _) in _CASES.items() if made == result)


def _run(arguments: list) -> dict[str, float]:
  environment = {**os.environ, 'PYTHONPATH': str(common._ROOT), 'JAX_PLATFORMS': 'cpu'}
  output = subprocess.run(
    [sys.executable, __file__, '--measure', *map(str, arguments)],
    check=True,
    env=environment,
    stdout=subprocess.PIPE,
    text=True,
  ).stdout
  return json.loads(output.splitlines()[-1])


if __name__ == '__main__':
  main()
