"""Final report of inference: paths, counts and first results."""

from collections.abc import Sequence
import dataclasses
import itertools
import textwrap
from typing import Any

from t5x_lite.apps.infer.paths import ResultPaths
from t5x_lite.formatting import format_cell
from t5x_lite.formatting import format_duration
from t5x_lite.formatting import format_number
from t5x_lite.formatting import format_table
from t5x_lite.storage import files
from t5x_lite.storage import json_lines

_NUM_SHOWN = 3


@dataclasses.dataclass(kw_only=True)
class Outcome:
  """Result of one task.

  Attributes:
    paths: paths of its results.
    file: file of results; None if they stay in chunks.
    first_file: file that begins with the first results of this shard or of all shards, or None.
    num_examples: number of examples of this shard.
    num_new: number of examples that this process has computed.
    seconds: time to compute them.
    num_skipped: number of invalid lines of the entire input.
    num_merged: number of examples of all shards after merging.
    num_cut: number of truncated examples, of all shards or of this one.
    num_unended: number of predictions without an end, likewise.
    missing_shards: shards that are not complete yet.
  """

  paths: ResultPaths
  file: files.Path | None = None
  first_file: files.Path | None = None
  num_examples: int = 0
  num_new: int = 0
  seconds: float = 0.0
  num_skipped: int = 0
  num_merged: int | None = None
  num_cut: int = 0
  num_unended: int = 0
  missing_shards: Sequence[int] = ()


def final_report(outcomes: Sequence[Outcome]) -> str:
  """Return the report: for each task the path of the results, counts, and the first results."""
  return '\n\n'.join('\n'.join(_lines(outcome)) for outcome in outcomes)


def _lines(outcome: Outcome) -> list[str]:
  paths = outcome.paths
  counts = _count(outcome.num_examples, 'example')
  if not outcome.num_new:
    counts += ', computed before'
  elif outcome.seconds:
    rate = format_number(outcome.num_new / outcome.seconds)
    if outcome.num_new != outcome.num_examples:
      counts += f', the last {outcome.num_new:,}'
    counts += f' in {format_duration(outcome.seconds)} ({rate} examples/s)'
  if outcome.num_merged is None:
    total = counts
  else:
    total = _count(outcome.num_merged, 'example')
  lines = [f'Results are in {outcome.file or paths.shard_folder}: {total}.']
  if outcome.num_skipped:
    lines.append(
      f'{_count(outcome.num_skipped, "line")} of the input {_verb(outcome.num_skipped)} invalid and '
      'skipped; see the warnings above.'
    )
  if outcome.num_cut:
    lines.append(
      f'{_count(outcome.num_cut, "example")} {_verb(outcome.num_cut)} longer than TASK_FEATURE_LENGTHS and '
      'truncated.'
    )
  if outcome.num_unended:
    lines.append(
      f'{_count(outcome.num_unended, "prediction")} {_verb(outcome.num_unended)} stopped at the length of the targets '
      'in TASK_FEATURE_LENGTHS, before an end: set a longer one, and another output.'
    )
  if outcome.missing_shards:
    missing = ', '.join(map(str, outcome.missing_shards))
    lines.append(
      f'This is shard {paths.shard_id} of {paths.num_shards}; {paths.merged} will be written when the '
      f'others are complete (missing: {missing}).'
    )
  elif outcome.num_merged is not None:
    lines.append(
      f'All {paths.num_shards} shards are complete; this one, {paths.shard_id}, has {counts}.'
    )
  rows = _first_results(outcome.first_file)
  if any(rows):
    known = set().union(*rows)
    columns = [name for name in ('prediction', 'score', 'targets', 'inputs') if name in known]
    table = [tuple(columns)]
    for row in rows:
      table.append(tuple(format_cell(row.get(name, '')) for name in columns))
    lines += ['', 'First results:', textwrap.indent(format_table(table), '  ')]
  return lines


def _count(number: int, what: str) -> str:
  text = f'{number:,} {what}'
  if number != 1:
    text += 's'
  return text


def _verb(number: int) -> str:
  if number == 1:
    return 'was'
  return 'were'


def _first_results(path: files.Path | None) -> list[dict[str, Any]]:
  """Return the first results as flat dicts; [] if a user's `write_fn` has another format."""
  if path is None:
    return []
  rows = []
  for _, row in itertools.islice(json_lines.read(path), _NUM_SHOWN):
    try:
      rows.append(_flat(row))
    except (KeyError, TypeError, AttributeError):
      return []
  return rows


def _flat(row: Any) -> dict[str, Any]:
  """Return what to show of a result in T5X's format, without empty values; raise for another format."""
  inputs = row['inputs']
  aux = row.get('aux') or {}
  shown = {
    'prediction': _best(row.get('prediction')),
    'score': _best(row.get('score', aux.get('scores'))),
  }
  for name in ('inputs', 'targets'):
    shown[name] = inputs.get(f'{name}_pretokenized', inputs.get(name, ''))
  return {name: value for name, value in shown.items() if value not in (None, '')}


def _best(values: Any) -> Any:
  """Return the last of several decodes, or the largest score of labels; any other value unchanged."""
  if isinstance(values, dict) and values:
    return max(values.values())
  if isinstance(values, list) and values and isinstance(values[-1], (str, float)):
    return values[-1]
  return values
