"""Results as JSONL, one object per example, in T5X's format."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import json
from typing import Any

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite.data.sources.example_sources import KEPT_FIELDS
from t5x_lite.errors import ConfigError
from t5x_lite.storage import files
from t5x_lite.storage.json_lines import JsonEncoder
from t5x_lite.storage.json_lines import to_line
from t5x_lite.types import PyTree

# Predictions or scores of examples, and auxiliary outputs; the first axis of every array is the example.
Inferences = tuple[Sequence[Any], Mapping[str, Any]]
_PRETOKENIZED = '_pretokenized'


class Examples(list):
  """List of examples with the methods of a tf.data.Dataset that functions written for T5X's `infer` call."""

  def as_numpy_iterator(self) -> Iterator[Any]:
    """Return an iterator over the examples."""
    return iter(self)

  def enumerate(self, start: int = 0) -> 'Examples':
    """Return the pairs of number and example."""
    return Examples(enumerate(self, start))


def write_inferences_to_file(
  path: str,
  inferences: Inferences,
  task_ds: Iterable[Mapping[str, Any]],
  mode: str,
  vocabulary: Any = None,
  json_encoder_cls: type[json.JSONEncoder] = JsonEncoder,
  include_all_inputs: bool = False,
  input_fields_to_include: Sequence[str] | None = None,
  output_ids: bool = False,
) -> None:
  """Write one JSON object per line, in UTF-8.

  An object has `inputs`, the texts of the example (`inputs_pretokenized`, `targets_pretokenized`) if it has them, and
  depending on the mode:

  - `prediction`: the decoded text; a list, best last, for several decodes; ids if the vocabulary has no texts;
  - `score`: the log-likelihood of the targets;
  - `aux`: auxiliary outputs of the model, such as `scores` of the predictions;
  - before these, the fields of the record that `--keep_fields` names.

  Args:
    path: path of the file.
    inferences: (predictions or scores, auxiliary outputs); the first axis of every array is the example.
    task_ds: examples, each a mapping of feature name to value; a tf.data.Dataset, or any iterable.
    mode: 'predict', 'predict_with_aux' or 'score'.
    vocabulary: vocabulary that decodes predictions.
    json_encoder_cls: encoder for types that `json` does not support.
    include_all_inputs: write all fields of the example to `inputs`, including ids.
    input_fields_to_include: write these fields of the example, and `<field>_pretokenized`.
    output_ids: also write the ids of predictions, up to the first 0, as `prediction_tokens`.

  Raises:
    ConfigError: an unknown mode, predictions without a vocabulary, or `include_all_inputs` and
      `input_fields_to_include` are both given.
  """
  checks.check(
    'write_inferences_to_file',
    locals(),
    mode=checks.one_of(('predict', 'predict_with_aux', 'score')),
    vocabulary=checks.Expectation(
      'a vocabulary to decode predictions', lambda given: given is not None or mode == 'score'
    ),
  )
  if include_all_inputs and input_fields_to_include is not None:
    raise ConfigError(
      'write_inferences_to_file: include_all_inputs and input_fields_to_include cannot be combined. '
      'Remove one of them.'
    )
  predictions, aux = inferences
  examples: Any = task_ds
  if hasattr(examples, 'as_numpy_iterator'):
    examples = examples.as_numpy_iterator()
  if input_fields_to_include is not None:
    wanted = {
      *input_fields_to_include,
      *(f'{name}{_PRETOKENIZED}' for name in input_fields_to_include),
    }

  def lines() -> Iterator[str]:
    for i, (example, found) in enumerate(zip(examples, predictions, strict=True)):
      kept = example.get(KEPT_FIELDS, {})
      if kept:
        example = {name: value for name, value in example.items() if name != KEPT_FIELDS}
      if include_all_inputs:
        inputs = dict(example)
      elif input_fields_to_include is not None:
        inputs = {name: value for name, value in example.items() if name in wanted}
      else:
        inputs = {name: value for name, value in example.items() if name.endswith(_PRETOKENIZED)}
      line: dict[str, Any] = {**kept, 'inputs': inputs}
      if mode == 'score':
        line['score'] = float(found)
      else:
        line['prediction'] = _decode(found, vocabulary)
        if output_ids:
          line['prediction_tokens'] = _tokens(found)
      if mode == 'predict_with_aux' or aux:
        line['aux'] = _row(aux, i)
      yield to_line(line, cls=json_encoder_cls)

  if files.is_remote(path):
    files.write(path, ''.join(lines()))
    return
  with open(path, 'w', encoding='utf-8', newline='\n') as file:
    file.writelines(lines())


def _row(aux: PyTree, i: int) -> PyTree:
  """Return the values of an example, of arrays or lists of values per example."""
  return jax.tree.map(lambda values: values[i], aux, is_leaf=lambda node: isinstance(node, list))


def _decode(ids: Any, vocabulary: Any) -> Any:
  ids = np.asarray(ids)
  if ids.ndim > 1:
    return [_decode(row, vocabulary) for row in ids]
  return vocabulary.decode(ids.tolist())


def _tokens(ids: Any) -> list[Any]:
  ids = np.asarray(ids)
  if ids.ndim > 1:
    return [_tokens(row) for row in ids]
  if (ids == 0).any():
    return ids[: np.argmax(ids == 0)].tolist()
  return ids.tolist()
