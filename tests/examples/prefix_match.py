"""A metric of predictions, and the task of keywords with it."""

import dataclasses

from t5x_lite import data


def prefix_match(targets, predictions):
  """Returns the fraction of predictions that begin with their target."""
  pairs = zip(targets, predictions, strict=True)
  num_matches = sum(prediction.startswith(target) for target, prediction in pairs)
  return {'prefix_match': num_matches / len(targets)}


keyword_cloze = data.get_builtin('python_keyword_cloze')
data.register_builtin_task(
  dataclasses.replace(
    keyword_cloze,
    name='keyword_cloze_prefix',
    metric_fns=[*keyword_cloze.metric_fns, prefix_match],
  )
)
