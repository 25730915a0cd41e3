"""The texts behind the examples of seqio Tasks; see `task_texts`."""

from t5x_lite.data import seqio_features
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.seqio_import import quiet, summary, tf
from t5x_lite.data.seqio_source import task_dataset
from t5x_lite.data.task_texts import check_features
from t5x_lite.errors import DataError


def read_task_texts(cfg: DatasetConfig, max_examples: int | None) -> dict[str, list[str]]:
  """See `task_texts.read_task_texts`."""
  provider = seqio_features.get_provider(cfg)
  seqio_features.check_split(provider, cfg.split)
  check_features(cfg, provider.name, provider.output_features)
  texts: dict[str, list[str]] = {feature: [] for feature in cfg.task_feature_lengths}
  for task in seqio_features.subtasks_with_split(provider, cfg.split):
    dataset = task_dataset(task, cfg, num_epochs=1).take(-1 if max_examples is None else max_examples)
    try:
      with quiet():
        examples = list(dataset.as_numpy_iterator())
    except tf.errors.OpError as error:
      raise DataError(f'The split {cfg.split!r} of {task.name!r} failed while reading: {summary(error)}') from error
    for feature, found in texts.items():
      vocabulary = task.output_features[feature].vocabulary
      for example in examples:
        text = example.get(f'{feature}_pretokenized')
        if text is None:
          text = vocabulary.decode([int(i) for i in example[feature]])
        found.append(text.decode('utf-8', errors='replace') if isinstance(text, bytes) else str(text))
  return texts
