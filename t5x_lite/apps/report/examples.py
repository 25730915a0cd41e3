"""Examples of evaluations by decoding, those first whose prediction is least like the target."""

from collections.abc import Iterator, Mapping, Sequence
import json
import math
from typing import Any, NamedTuple

from t5x_lite.apps.common import run_files
from t5x_lite.apps.report.run_record import RunRecord
from t5x_lite.decoding import text_similarity

_INFERENCE = 'inference_eval/'
# Examples that are compared, and characters of a text that are compared and shown.
_NUM_COMPARED = 200
_MAX_TEXT = 1000


class Example(NamedTuple):
  """An example with its prediction.

  Attributes:
    texts: what is shown, by name: input, target (or several of which one is enough), prediction, chrF, score.
    similarity: chrF of the prediction, 0 to 100, with the target that is most like it; None without texts.
    score: log-probability of the target; None if it was not computed.
  """

  texts: Mapping[str, str]
  similarity: float | None
  score: float | None


class TaskExamples(NamedTuple):
  """Examples of a task at its newest evaluation.

  Attributes:
    task: name of the task.
    step: step of the evaluation.
    examples: the worst first: by `similarity`, or by `score` without predictions; without both in the file's order.
    order: the order in words.
  """

  task: str
  step: int
  examples: Sequence[Example]
  order: str


def newest(run: RunRecord) -> Iterator[TaskExamples]:
  """Yield the examples of each task that has a file of predictions."""
  for writer, metrics in run.metrics.items():
    if not writer.startswith(_INFERENCE):
      continue
    step = max(int(points[-1, 0]) for points in metrics.points.values())
    rows = run_files.predictions(run.path, writer, step, limit=_NUM_COMPARED)
    found = list(map(_example, rows))
    order = 'in the order of the file'
    for attribute, words in (('similarity', 'chrF'), ('score', 'score')):
      if any(getattr(example, attribute) is not None for example in found):
        order = f'those with the lowest {words} first'
        found.sort(key=lambda example, attribute=attribute: _rank(getattr(example, attribute)))
        break
    if found:
      yield TaskExamples(writer.removeprefix(_INFERENCE), step, found, order)


def _rank(value: float | None) -> float:
  """Return the key by which examples are sorted: NaN is bad, an unknown value is last."""
  if value is None:
    return math.inf
  return -math.inf if math.isnan(value) else value


def _example(row: Mapping[str, Any]) -> Example:
  targets = row.get('references') or row.get('targets')
  if not isinstance(targets, list):
    targets = [targets]
  prediction = row.get('prediction')
  if isinstance(prediction, list) and prediction:  # several decodes, the best last
    prediction = prediction[-1]
  texts = {'input': _shown(row.get('inputs')), 'target': '\n'.join(map(_shown, targets))}
  similarity = None
  if prediction is not None:
    texts['prediction'] = _shown(prediction) or '(empty)'
  comparable = [each for each in targets if isinstance(each, str)]
  if isinstance(prediction, str) and comparable:
    similarity = max(_chrf(prediction, target) for target in comparable)
    texts['chrF'] = f'{similarity:.1f}'
  score = row.get('score')
  if isinstance(score, float):
    texts['score'] = f'{score:.6g}'
  else:
    score = None
  return Example(texts, similarity, score)


def _chrf(prediction: str, target: str) -> float:
  if prediction == target:  # also empty texts, which have no characters
    return 100.0
  return float(text_similarity.pairwise_chrf([prediction[:_MAX_TEXT], target[:_MAX_TEXT]])[0, 1])


def _shown(value: Any) -> str:
  """Return a value as text, cut if it is long."""
  if value is None:
    return ''
  text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
  if len(text) <= _MAX_TEXT:
    return text
  return f'{text[:_MAX_TEXT]}… ({len(text):,} characters)'
