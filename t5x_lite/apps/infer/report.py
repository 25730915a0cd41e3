"""What a run of inference says when it has ended: where the results are, how many, and the first of them."""

from collections.abc import Sequence
import dataclasses
import itertools
import pathlib
from typing import Any

from t5x_lite import json_lines
from t5x_lite.apps.infer.place import Place
from t5x_lite.formatting import format_cell, format_duration, format_number, format_table

_NUM_SHOWN = 3


@dataclasses.dataclass(kw_only=True)
class Outcome:
  """What came of one task.

  Attributes:
    place: where its results go.
    file: the file of results; None where they stay in chunks.
    first_file: a file that begins with the first results, those of this shard or of all, if there is any.
    num_examples: examples of this shard.
    num_new: of these, how many this process has worked on.
    seconds: the time that took.
    num_skipped: lines of the whole input that could not be used.
    num_merged: examples of all shards, once they are in one file.
    num_cut: examples, of all shards or of this one, that were longer than the model reads.
    missing_shards: shards that are not complete yet.
  """

  place: Place
  file: pathlib.Path | None = None
  first_file: pathlib.Path | None = None
  num_examples: int = 0
  num_new: int = 0
  seconds: float = 0.0
  num_skipped: int = 0
  num_merged: int | None = None
  num_cut: int = 0
  missing_shards: Sequence[int] = ()


def final_report(outcomes: Sequence[Outcome]) -> str:
  """Returns lines for people: of each task where its results are, counts, and the first results."""
  return '\n\n'.join('\n'.join(_lines(outcome)) for outcome in outcomes)


def _lines(outcome: Outcome) -> list[str]:
  place = outcome.place
  counts = _count(outcome.num_examples, 'example')
  if not outcome.num_new:
    counts += ', which were there before'
  elif outcome.seconds:
    rate = format_number(outcome.num_new / outcome.seconds)
    counts += '' if outcome.num_new == outcome.num_examples else f', the last {outcome.num_new:,}'
    counts += f' in {format_duration(outcome.seconds)} ({rate} examples/s)'
  total = counts if outcome.num_merged is None else _count(outcome.num_merged, 'example')
  lines = [f'Results are in {outcome.file or place.shard_folder}: {total}.']
  if outcome.num_skipped:
    lines.append(f'{_count(outcome.num_skipped, "line")} of the input could not be used and '
                 f'{_verb(outcome.num_skipped)} skipped; the messages above name them.')
  if outcome.num_cut:
    lines.append(f'{_count(outcome.num_cut, "example")} {_verb(outcome.num_cut)} longer than TASK_FEATURE_LENGTHS, and '
                 'cut.')
  if outcome.missing_shards:
    missing = ', '.join(map(str, outcome.missing_shards))
    lines.append(f'This is shard {place.shard_id} of {place.num_shards}; {place.whole} follows when the others are '
                 f'complete (missing: {missing}).')
  elif outcome.num_merged is not None:
    lines.append(f'All {place.num_shards} shards are complete; this one, {place.shard_id}, has {counts}.')
  rows = _first_results(outcome.first_file)
  if any(rows):
    columns = [name for name in ('prediction', 'score', 'targets', 'inputs') if any(name in row for row in rows)]
    table = [tuple(columns)] + [tuple(format_cell(row.get(name, '')) for name in columns) for row in rows]
    lines += ['', 'The first of them:', *(f'  {line}' for line in format_table(table).splitlines())]
  return lines


def _count(number: int, what: str) -> str:
  return f'{number:,} {what}' + ('' if number == 1 else 's')


def _verb(number: int) -> str:
  return 'was' if number == 1 else 'were'


def _first_results(path: pathlib.Path | None) -> list[dict[str, Any]]:
  """Returns the first results, flat; none where a `write_fn` of the user's writes in a form of its own."""
  rows = []
  if path is not None:
    for _, found in itertools.islice(json_lines.read(path), _NUM_SHOWN):
      try:
        inputs = found['inputs']
        texts = {name: inputs.get(f'{name}_pretokenized', inputs.get(name, '')) for name in ('inputs', 'targets')}
        score = found.get('score', (found.get('aux') or {}).get('scores'))
      except (KeyError, TypeError, AttributeError):
        return []
      shown = {'prediction': _best(found.get('prediction')), 'score': _best(score), **texts}
      rows.append({name: value for name, value in shown.items() if value not in (None, '')})
  return rows


def _best(values: Any) -> Any:
  """Returns what stands last, of several decodes; another value as it is."""
  return values[-1] if isinstance(values, list) and values and isinstance(values[-1], (str, float)) else values
