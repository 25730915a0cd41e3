"""The source 'seqio': Tasks and Mixtures of seqio. TensorFlow and seqio are imported when data is opened."""

from typing import Any

from t5x_lite.data.interfaces import EvalBatches
from t5x_lite.data.interfaces import EvalTask
from t5x_lite.data.interfaces import ExampleSource
from t5x_lite.data.interfaces import HostIterator
from t5x_lite.data.interfaces import SplitLengths
from t5x_lite.data.sources import base


class SeqioSource(base.DataSource):
  """Tasks and Mixtures of seqio."""

  options = ('use_cached', 'use_custom_packing_ops', 'num_epochs')
  supports_seqio_evaluator = True

  def get_vocabulary(self) -> tuple[Any, Any]:
    """See base class."""
    from t5x_lite.data.seqio import features as seqio_features

    return seqio_features.get_vocabulary(self.cfg)

  def open_train_iterator(self, layout: Any, feature_converter: Any) -> HostIterator:
    """See base class."""
    from t5x_lite.data.seqio import source as seqio_source

    return seqio_source.SeqioIterator(self.cfg, layout, feature_converter)

  def open_eval_iterators(
    self, layout: Any, eval_steps: int | None, feature_converter: Any
  ) -> dict[str, EvalBatches]:
    """See base class."""
    from t5x_lite.data.seqio import evaluation as seqio_evaluation

    return seqio_evaluation.open_eval_iterators(self.cfg, layout, eval_steps, feature_converter)

  def open_eval_tasks(
    self, layout: Any, feature_converter: Any, num_examples: int | None
  ) -> list[EvalTask]:
    """See base class."""
    from t5x_lite.data.seqio import evaluation as seqio_evaluation

    return seqio_evaluation.open_eval_tasks(self.cfg, layout, feature_converter, num_examples)

  def open_example_sources(self, feature_converter: Any) -> list[ExampleSource]:
    """See base class."""
    from t5x_lite.data.seqio import inference as seqio_inference

    return seqio_inference.open_example_sources(self.cfg, feature_converter)

  def measure(
    self, feature_converter: Any, num_examples: int | None, decodes: bool
  ) -> SplitLengths:
    """See base class."""
    from t5x_lite.data.seqio import lengths as seqio_lengths

    return seqio_lengths.measure(self.cfg, feature_converter, num_examples, decodes)

  def get_dataset(self, layout: Any, feature_converter: Any) -> Any:
    """See base class; a `tf.data.Dataset`."""
    from t5x_lite.data.seqio import source as seqio_source

    return seqio_source.open_dataset(self.cfg, layout, feature_converter)[0]

  def get_converter_cls(self, feature_converter: str) -> Any:
    """See base class; seqio's class."""
    from t5x_lite.data.seqio import features as seqio_features

    return seqio_features.get_converter_cls(feature_converter)

  def read_task_texts(self, max_examples: int | None) -> dict[str, list[str]]:
    """See base class."""
    from t5x_lite.data.seqio import inference as seqio_inference

    return seqio_inference.read_task_texts(self.cfg, max_examples)
