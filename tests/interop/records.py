"""Results of PyTorch, transformers and CTranslate2, recorded in `tests/golden/interop`: read, compared or written.

A test asks for a result by name, with the inputs and a function that computes the result with the libraries. `make
test` reads the record and never calls the function, so it needs no library; inputs whose hashes are not those of
the record are an error. `make test-interop` calls the function and compares the result with the record.
`python -m tests.interop.record --write` writes the records.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import enum
import hashlib
import json
import os
import pathlib
from typing import Any
import zlib

import numpy as np

from t5x_lite import tree_utils
from tests.networks import network_cases

FOLDER = pathlib.Path(__file__).parents[1] / 'golden' / 'interop'
VARIABLE = 'T5X_LITE_INTEROP'
# Largest difference of recorded and computed arrays of floats, over the largest recorded value.
RTOL = 1e-5
_NUM_SIGNS = 32
_LONG_TEXT = 200
# What says which version of transformers wrote a file, and nothing about the model.
_UNCOMPARED = ('transformers_version',)


class Mode(enum.Enum):
  """Use of the records, from the environment variable T5X_LITE_INTEROP."""

  READ = 'read'
  COMPARE = 'compare'
  WRITE = 'write'


def digest(value: Any) -> str:
  """Return a hash of arrays, texts, numbers, and sequences and mappings of them, equal on all machines."""
  found = hashlib.sha256()
  _update(found, value)
  return found.hexdigest()[:32]


def _update(found: Any, value: Any) -> None:
  if isinstance(value, np.ndarray | np.generic):
    value = np.ascontiguousarray(value)
    found.update(f'array {value.dtype.name} {value.shape};'.encode())
    found.update(value.tobytes())
  elif isinstance(value, Mapping):
    found.update(f'mapping {len(value)};'.encode())
    for key in sorted(value):
      _update(found, key)
      _update(found, value[key])
  elif isinstance(value, bytes):
    found.update(f'bytes {len(value)};'.encode())
    found.update(value)
  elif isinstance(value, Sequence) and not isinstance(value, str):
    found.update(f'sequence {len(value)};'.encode())
    for each in value:
      _update(found, each)
  else:
    assert value is None or isinstance(value, str | bool | int | float), type(value)
    found.update(f'{json.dumps(value)};'.encode())


class Records:
  """Recorded results by name.

  Attributes:
    mode: what `ask` does.
    asked: names of the results that were asked for.
  """

  def __init__(self, folder: pathlib.Path, mode: Mode):
    self.mode = mode
    self.asked: set[str] = set()
    self._folder = folder
    self._entries: dict[str, Any] = {}
    self._arrays: dict[str, np.ndarray] = {}
    self.versions: dict[str, str] = {}
    if mode is not Mode.WRITE:
      stored = json.loads((folder / 'records.json').read_text())
      self.versions = stored['versions']
      self._entries = stored['records']
      with np.load(folder / 'arrays.npz') as arrays:
        self._arrays = {key: arrays[key] for key in arrays.files}

  @property
  def names(self) -> frozenset[str]:
    """Names of all recorded results."""
    return frozenset(self._entries)

  @property
  def is_live(self) -> bool:
    """True if results are computed with the libraries."""
    return self.mode is not Mode.READ

  def ask(
    self,
    name: str,
    inputs: Mapping[str, Any],
    compute: Callable[[], Mapping[str, Any]],
    *,
    rtol: float = RTOL,
    prefer_record: bool = False,
    has_effects: bool = False,
  ) -> dict[str, Any]:
    """Return a result: the record, or in the other modes the computed result.

    Args:
      name: name of the result, of these inputs only.
      inputs: inputs by name; `digest` must support them.
      compute: returns arrays, texts, and JSON values by name.
      rtol: largest difference of arrays of floats, over the largest absolute value; all else must be equal.
      prefer_record: return the record after the comparison too, for what later inputs are made of.
      has_effects: compute the result each time, because `compute` also makes models or files.

    Raises:
      AssertionError: there is no record, its inputs have other hashes, or the computed result differs.
    """
    is_repeated = name in self.asked and not has_effects
    self.asked.add(name)
    hashes = {key: digest(value) for key, value in inputs.items()}
    if self.mode is Mode.WRITE:
      if is_repeated and self._entries[name]['inputs'] == hashes:
        return self._result(name)
      result = dict(compute())
      entry = {
        'inputs': hashes,
        'values': {key: self._encode(value) for key, value in result.items()},
      }
      known = self._entries.setdefault(name, entry)
      # The same result, asked for by several tests, may differ by rounding.
      assert known['inputs'] == hashes, f'two results have the name {name}: {known} and {entry}'
      return self._result(name) if prefer_record else result
    assert name in self._entries, (
      f'tests/golden/interop has no result {name!r}. Record it: python -m tests.interop.record --write'
    )
    recorded = self._entries[name]['inputs']
    differing = sorted(key for key in {*recorded, *hashes} if recorded.get(key) != hashes.get(key))
    assert not differing, (
      f'inputs of the recorded result {name!r} must have the recorded hashes, got others of {differing}. If the change '
      'is intended, record the result again: python -m tests.interop.record --write'
    )
    if self.mode is Mode.READ or is_repeated:
      return self._result(name)
    result, want = dict(compute()), self._result(name)
    assert result.keys() == want.keys(), (name, result.keys(), want.keys())
    for key, value in want.items():
      assert_agree(f'{name}: {key}', result[key], value, rtol)
    return want if prefer_record else result

  def _result(self, name: str) -> dict[str, Any]:
    return {key: self._decode(value) for key, value in self._entries[name]['values'].items()}

  def _encode(self, value: Any) -> Any:
    if isinstance(value, np.ndarray):
      kind = 'array'
    else:
      text = json.dumps(value)
      if len(text) <= _LONG_TEXT:
        return json.loads(text)
      kind = 'json'
      value = np.frombuffer(text.encode(), np.uint8)
    # Equal values are stored once, compressed.
    key = digest(value)
    self._arrays[key] = value
    return {kind: key}

  def _decode(self, value: Any) -> Any:
    if isinstance(value, dict) and len(value) == 1:
      if 'array' in value:
        return self._arrays[value['array']].copy()
      if 'json' in value:
        return json.loads(self._arrays[value['json']].tobytes())
    return value

  def write(self, versions: Mapping[str, str]) -> None:
    """Write all results that were asked for."""
    self._folder.mkdir(parents=True, exist_ok=True)
    lines = ',\n'.join(
      f'{json.dumps(name)}: {json.dumps(self._entries[name], separators=(",", ":"))}'
      for name in sorted(self._entries)
    )
    (self._folder / 'records.json').write_text(
      f'{{"versions": {json.dumps(dict(versions))},\n"records": {{\n{lines}\n}}}}\n'
    )
    np.savez_compressed(
      self._folder / 'arrays.npz', **{key: self._arrays[key] for key in sorted(self._arrays)}
    )


def assert_agree(name: str, got: Any, want: Any, rtol: float) -> None:
  """Assert that a computed value is the recorded one.

  Args:
    name: for the message.
    got: computed array, text or JSON value.
    want: recorded value.
    rtol: see `Records.ask`.
  """
  if isinstance(want, np.ndarray):
    assert isinstance(got, np.ndarray), name
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (name, got.shape, got.dtype)
    if want.dtype.kind == 'f' and want.size:
      error = np.abs(got.astype(np.float64) - want).max() / max(np.abs(want).max(), 1e-30)
      assert error <= rtol, (
        f'{name}: the libraries differ from the record by {error:.1e}, more than {rtol:.0e}'
      )
    else:
      np.testing.assert_array_equal(got, want, err_msg=name)
  elif isinstance(want, float):
    assert abs(got - want) <= rtol * abs(want), (name, got, want)
  else:
    assert _comparable(got) == _comparable(want), (
      f'{name}: the libraries give {got!r}, recorded is {want!r}'
    )


def _comparable(value: Any) -> Any:
  """Return a value without the versions in it; texts of JSON are parsed."""
  if isinstance(value, str) and value.startswith('{'):
    try:
      value = json.loads(value)
    except ValueError:
      return value
  if isinstance(value, dict):
    return {key: _comparable(each) for key, each in value.items() if key not in _UNCOMPARED}
  if isinstance(value, list | tuple):
    return [_comparable(each) for each in value]
  return value


@dataclasses.dataclass(frozen=True)
class RecordedTree:
  """A tree of arrays, or sums of its values with random signs, which are small enough to record.

  The mean square of the sums of a difference with random signs estimates the difference's squared norm, to about 25
  percent: a change of one value, a transposition or a permutation is noticed as in the arrays themselves.

  Attributes:
    sums: float32 [arrays, 1 + 32], by order of names: the norm, and the sums with signs.
    layout: names and shapes, one line per array.
    tree: the arrays themselves, None where they were recorded.
  """

  sums: np.ndarray
  layout: str
  tree: Any = None

  @classmethod
  def of(cls, tree: Any) -> 'RecordedTree':
    """Return the sums of a tree, with the tree."""
    leaves = sorted((name, np.asarray(leaf)) for name, leaf in tree_utils.named_leaves(tree))
    return cls(
      np.stack([_signed_sums(name, leaf) for name, leaf in leaves]).astype(np.float32),
      '\n'.join(f'{name} {list(leaf.shape)}' for name, leaf in leaves),
      tree,
    )

  def assert_close(self, got: Any, rtol: float) -> None:
    """Assert the names and shapes, and per array a difference of at most `rtol` of the recorded norm."""
    if self.tree is not None:
      network_cases.assert_trees_close(got, self.tree, rtol)
    other = RecordedTree.of(got)
    assert other.layout == self.layout
    rows = (sums.astype(np.float64) for sums in (other.sums, self.sums))
    for line, ours, want in zip(self.layout.split('\n'), *rows, strict=True):
      error = np.sqrt(np.mean((ours[1:] - want[1:]) ** 2))
      assert error <= rtol * want[0] + 1e-30, (line, error / max(want[0], 1e-30))
      assert abs(ours[0] - want[0]) <= rtol * want[0] + 1e-30, (line, ours[0], want[0])


def _signed_sums(name: str, array: np.ndarray) -> np.ndarray:
  """Return the norm of an array, and sums of its values with signs that depend on its name and shape."""
  seed = zlib.crc32(f'{name} {array.shape}'.encode())
  signs = np.random.default_rng(seed).integers(0, 2, (_NUM_SIGNS, array.size)) * 2 - 1
  values = array.astype(np.float64).ravel()
  return np.concatenate([[np.linalg.norm(values)], signs @ values])


RECORDS: Records | None = None


def get() -> Records:
  """Return the records of this process, in the mode that the environment says."""
  global RECORDS
  if RECORDS is None:
    RECORDS = Records(FOLDER, Mode(os.environ.get(VARIABLE, 'read')))
  return RECORDS
