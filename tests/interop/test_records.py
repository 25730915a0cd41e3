"""Records notice other inputs, other results of the libraries, missing and unused results, and small differences."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.interop import hf_models
from tests.interop import records
from tests.interop import reference

_INPUTS = {'tokens': np.arange(6, dtype=np.int32).reshape(2, 3), 'rate': 0.5}


def _result():
  return {
    'logits': np.linspace(-1, 1, 7, dtype=np.float32),
    'tokens': np.arange(3),
    'loss': 0.25,
    'text': 'a long text ' * 50,
    'config': {'kind': 'x', 'transformers_version': '1'},
  }


@pytest.fixture
def folder(tmp_path):
  written = records.Records(tmp_path, records.Mode.WRITE)
  written.ask('result', _INPUTS, _result)
  written.write({'torch': '1'})
  return tmp_path


def _never():
  raise AssertionError('computed')


def test_records_are_read_without_computing(folder):
  known = records.Records(folder, records.Mode.READ)
  found = known.ask('result', _INPUTS, _never)
  want = _result()
  for name in ('logits', 'tokens'):
    np.testing.assert_array_equal(found[name], want[name])
    assert found[name].dtype == want[name].dtype
  assert {name: found[name] for name in ('loss', 'text', 'config')} == {
    name: want[name] for name in ('loss', 'text', 'config')
  }
  assert known.asked == known.names == {'result'} and known.versions == {'torch': '1'}


@pytest.mark.parametrize('mode', [records.Mode.READ, records.Mode.COMPARE])
@pytest.mark.parametrize(
  'inputs, differing',
  [
    ({'tokens': _INPUTS['tokens'] + 1}, "['tokens']"),
    ({'tokens': _INPUTS['tokens'].T}, "['tokens']"),
    ({'tokens': _INPUTS['tokens'].astype(np.int64)}, "['tokens']"),
    ({'rate': 0.25}, "['rate']"),
    ({'more': 1}, "['more']"),
  ],
)
def test_other_inputs_are_noticed(folder, mode, inputs, differing):
  known = records.Records(folder, mode)
  with pytest.raises(AssertionError, match='recorded hashes, got others of') as caught:
    known.ask('result', {**_INPUTS, **inputs}, _result)
  assert differing in str(caught.value)
  with pytest.raises(AssertionError, match="no result 'other'"):
    known.ask('other', _INPUTS, _result)


@pytest.mark.parametrize(
  'change',
  [
    {'logits': np.linspace(-1, 1.0001, 7, dtype=np.float32)},
    {'logits': np.linspace(-1, 1, 7)},
    {'logits': np.linspace(-1, 1, 7, dtype=np.float32)[None]},
    {'tokens': np.array([0, 2, 1])},
    {'loss': 0.2501},
    {'text': 'another text ' * 50},
    {'config': {'kind': 'y'}},
    {'more': 1},
  ],
)
def test_other_results_of_the_libraries_are_noticed(folder, change):
  known = records.Records(folder, records.Mode.COMPARE)
  with pytest.raises(AssertionError, match='result'):
    known.ask('result', _INPUTS, lambda: {**_result(), **change})
  known = records.Records(folder, records.Mode.COMPARE)
  # Rounding, and the version in a file, may differ.
  known.ask(
    'result',
    _INPUTS,
    lambda: {
      **_result(),
      'logits': np.linspace(-1, 1.000001, 7, dtype=np.float32),
      'config': {'kind': 'x', 'transformers_version': '2'},
    },
  )


def test_two_results_of_one_name_are_noticed(tmp_path):
  written = records.Records(tmp_path, records.Mode.WRITE)
  written.ask('result', _INPUTS, _result)
  with pytest.raises(AssertionError, match='two results have the name result'):
    written.ask('result', {}, _result)


def test_sums_with_signs_notice_what_arrays_notice():
  rng = np.random.default_rng(0)
  tree = {
    'matrix': rng.standard_normal((40, 40)).astype(np.float32),
    'other': rng.standard_normal((40, 40)).astype(np.float32),
    'scale': rng.standard_normal(8).astype(np.float32),
  }
  whole = records.RecordedTree.of(tree)
  stored = records.RecordedTree(whole.sums, whole.layout)
  norm = np.linalg.norm(tree['matrix'])
  noise = rng.standard_normal((40, 40))
  noise *= 3e-5 * norm / np.linalg.norm(noise)
  one = np.zeros((40, 40))
  one[3, 5] = 2e-4 * norm
  faults = {
    'none': (tree, False),
    'rounding': ({**tree, 'matrix': tree['matrix'] + noise}, False),
    'more than rounding': ({**tree, 'matrix': tree['matrix'] + 5 * noise}, True),
    'one value': ({**tree, 'matrix': tree['matrix'] + one}, True),
    'scaled': ({**tree, 'matrix': tree['matrix'] * 1.0002}, True),
    'transposed': ({**tree, 'matrix': tree['matrix'].T}, True),
    'permuted': ({**tree, 'matrix': tree['matrix'][::-1]}, True),
    'exchanged': ({**tree, 'matrix': tree['other'], 'other': tree['matrix']}, True),
    'small array': ({**tree, 'scale': tree['scale'] * 1.0002}, True),
    'missing': ({'matrix': tree['matrix'], 'other': tree['other']}, True),
    'shape': ({**tree, 'scale': tree['scale'][None]}, True),
  }
  for name, (changed, is_noticed) in faults.items():
    for recorded in (whole, stored):
      try:
        recorded.assert_close(changed, rtol=1e-4)
      except AssertionError:
        assert is_noticed, name
      else:
        assert not is_noticed, name


@pytest.fixture
def stored():
  """The records of the repository, which are incomplete while they are written."""
  if records.get().mode is records.Mode.WRITE:
    pytest.skip('the records are being written')
  return records.Records(records.FOLDER, records.Mode.READ)


@pytest.mark.usefixtures('stored')
def test_a_folder_is_loaded_only_as_it_was_recorded(tmp_path):
  """A changed value, a missing tensor, another name, or another field of config.json is another folder."""
  family = reference.FAMILIES['umt5']
  # A folder of which test_logits records that it is loaded.
  model = reference.hf_model(family).with_tied_flag(True)

  def load(folder):
    return reference.load_theirs(f'{model.name}/saved', folder, family)

  folder = tmp_path / 'theirs'
  model.save(folder)
  load(folder)
  config = json.loads((folder / 'config.json').read_text())
  for change in ({'num_heads': 5}, {'more': 1}):
    (folder / 'config.json').write_text(json.dumps({**config, **change}))
    with pytest.raises(AssertionError, match="recorded hashes, got others of \\['json'\\]"):
      load(folder)
  (folder / 'config.json').write_text(json.dumps(config))
  tensors = hf_models.read_tensors(folder)
  name = 'encoder.final_layer_norm.weight'
  others = {key: value for key, value in tensors.items() if key != name}
  for changed in (
    others,
    {**others, 'other': tensors[name]},
    {**others, name: np.nextafter(tensors[name], np.float32(9))},
  ):
    (folder / 'model.safetensors').write_bytes(hf_models._to_bytes(changed))
    with pytest.raises(AssertionError, match="recorded hashes, got others of \\['tensors'\\]"):
      load(folder)


def test_records_are_small_and_complete(stored):
  files = {path.name: path.stat().st_size for path in records.FOLDER.iterdir()}
  assert files.keys() == {'records.json', 'arrays.npz', 'byte_level_bpe.json.gz', 'docs.model.gz'}
  assert sum(files.values()) < 1.6e6, files
  assert stored.versions.keys() == {'ctranslate2', 'peft', 'torch', 'transformers', 'tokenizers'}


@pytest.mark.usefixtures('stored')
def test_the_tests_import_neither_library():
  """Reading records imports neither PyTorch nor transformers, even where they are installed."""
  code = (
    'import importlib.abc, sys\n'
    'class Finder(importlib.abc.MetaPathFinder):\n'
    '  def find_spec(self, name, path, target=None):\n'
    "    assert name.partition('.')[0] not in ('ctranslate2', 'peft', 'torch', 'transformers', 'tensorflow'), name\n"
    'sys.meta_path.insert(0, Finder())\n'
    'import tests.interop.test_logits, tests.interop.test_tokenizers, tests.interop.test_round_trips\n'
    'from tests.interop import reference\n'
    "reference.hf_model(reference.FAMILIES['mt5']).logits(reference.random_batch())\n"
  )
  root = records.FOLDER.parents[2]
  env = {key: value for key, value in os.environ.items() if key != records.VARIABLE}
  subprocess.run([sys.executable, '-c', code], cwd=root, env=env, check=True)
