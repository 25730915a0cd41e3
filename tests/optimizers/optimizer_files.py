"""Optimizers as the files of gin/optimizers/ configure them."""

import pathlib

import gin

from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax

FILES = sorted({pathlib.PurePath(name).stem for name in gin_syntax.packaged_files('optimizers')})


def definition(stem, **bindings):
  """Return a new optimizer as `optimizers/<stem>.gin` configures it, with changed bindings, '__' for '.' in names."""
  flags = {
    'MODEL_DIR': "'runs/x'",
    **{name.replace('__', '.'): str(value) for name, value in bindings.items()},
  }
  texts = gin_utils.read(
    ['recipes/keyword_cloze.gin', f'optimizers/{stem}.gin'],
    [gin_syntax.read_flag(key, value, f'--gin.{key}={value}') for key, value in flags.items()],
  )
  try:
    return gin_utils.load('t5x_lite.apps.train.train', texts).argument('model').optimizer_def
  finally:
    gin.clear_config()
