"""Versions for bug reports, read from the metadata of installed packages; none of the packages is imported."""

import importlib.metadata
import platform

import t5x_lite

_REQUIRED = (
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'tensorstore',
  'numpy',
  'absl-py',
  'clu',
  'gin-config',
  'protobuf',
  'sentencepiece',
  'tensorboardX',
)
# TensorFlow's CPU build has a name of its own.
_OPTIONAL = (
  'jax-cuda12-plugin',
  'jax-cuda13-plugin',
  'libtpu',
  'seqio',
  't5',
  'tensorflow',
  'tensorflow-cpu',
  'tensorflow-datasets',
  'tensorflow-text',
  'tensorboard',
  'grain',
  'gcsfs',
  's3fs',
  'huggingface_hub',
  'matplotlib',
  'torch',
  'triton',
)


def installed_versions() -> dict[str, str]:
  """Return versions by distribution: t5x_lite, Python, required packages, and the optional ones that are installed."""
  versions = {'t5x_lite': t5x_lite.__version__, 'python': platform.python_version()}
  for name in (*_REQUIRED, *_OPTIONAL):
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      if name in _REQUIRED:
        versions[name] = 'not installed'
  return versions


def describe() -> str:
  """Return the versions and the platform, one per line."""
  lines = [f'{name} {version}' for name, version in installed_versions().items()]
  return '\n'.join((*lines, f'platform {platform.system()} {platform.machine()}'))
