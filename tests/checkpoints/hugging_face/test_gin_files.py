"""The table of released sizes is that of the files in gin/models."""

import pathlib
import re

import pytest

from t5x_lite.checkpoints.hugging_face import FAMILIES
from t5x_lite.checkpoints.hugging_face import Architecture
from t5x_lite.checkpoints.hugging_face import suggest_gin
from t5x_lite.checkpoints.hugging_face.gin_files import FORMS
from t5x_lite.checkpoints.hugging_face.gin_files import SIZES

_MODELS = pathlib.Path(__file__).parents[3] / 'gin' / 'models'
_FIELD = re.compile(r'^(?:  |network\.T5Config\.)(\w+) = ([^#\n]+)', re.MULTILINE)
_MACRO = re.compile(r'^([A-Z_]+) = ([^#\n]+)', re.MULTILINE)


def _config(name: str) -> dict:
  """Returns the T5Config of a model file, its includes read before it."""
  text = (_MODELS / name).read_text()
  result = {}
  for included in re.findall(r"^include 'models/(\w+\.gin)'", text, re.MULTILINE):
    result |= _config(included)
  block = re.search(r'^network\.T5Config:\n((?:  .*\n)+)', text, re.MULTILINE)
  lines = (block[1] if block else '') + ''.join(
    re.findall(r'^network\.T5Config\.\w+ = .*\n', text, re.MULTILINE)
  )
  for key, value in [*_FIELD.findall(lines), *_MACRO.findall(text)]:
    if not value.startswith(('%', '@')):
      result[key] = eval(value, {})  # pylint: disable=eval-used
    elif key not in result:
      result[key] = value.strip()
  return {
    key: result.get(str(value)[1:], value) if str(value).startswith('%') else value
    for key, value in result.items()
  }


@pytest.mark.parametrize(
  'family, size', [(family, size) for family in SIZES for size in SIZES[family]]
)
def test_the_file_of_a_size_has_no_other_bindings(family, size):
  config = _config(f'{family}_{size}.gin')
  fields = {
    key: config[key]
    for key in (
      'vocab_size',
      'emb_dim',
      'num_heads',
      'head_dim',
      'mlp_dim',
      'mlp_activations',
      'logits_via_embedding',
    )
  }
  for stack in ('encoder', 'decoder'):
    layers = config[f'NUM_{stack.upper()}_LAYERS' if family == 'switch' else f'num_{stack}_layers']
    fields[f'num_{stack}_layers'] = layers
    if family == 'switch':
      fields[f'sparse_{stack}_layers'] = tuple(range(1, layers, 2))
      assert config[f'NUM_{stack.upper()}_SPARSE_LAYERS'] == layers // 2
  if family == 'switch':
    fields['num_experts'] = config['NUM_EXPERTS']
  arch = Architecture(relpos_per_layer=family == 'umt5', **fields)
  suggested = suggest_gin(arch, FAMILIES[family])
  assert suggested.flags == (f'--gin_file=models/{family}_{size}.gin',)
  assert bool(suggested.files_after_run) == (family == 'switch')
  assert all((_MODELS.parent / file).is_file() for file in suggested.files_after_run)


@pytest.mark.parametrize('name', [name for forms in FORMS.values() for name in forms])
def test_the_file_of_a_form_has_the_macro_of_its_vocabulary(name):
  own = next(forms[name] for forms in FORMS.values() if name in forms)
  assert own.get('vocabulary_macro', 'VOCABULARY_FILE') in _config(f'{name}.gin')


def test_every_released_size_has_a_file():
  files = {
    path.stem
    for path in _MODELS.glob('*.gin')
    if path.stem.startswith(tuple(f'{name}_' for name in SIZES))
  }
  tests = {'t5_1_0_tiny', 't5_1_1_tiny'}
  assert {f'{family}_{size}' for family in SIZES for size in SIZES[family]} == files - tests
