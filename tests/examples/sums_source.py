"""A source of sums: an endless stream of new sums for training, and 64 sums in each other split."""

import collections

import numpy as np

from t5x_lite import data
from t5x_lite.data.batches import positions
from t5x_lite.errors import ConfigError

VOCABULARY = data.ByteVocabulary(extra_ids=125)
SPLITS = ('validation', 'test')
LENGTHS = {'inputs': 6, 'targets': 4}  # of the longest example, end-of-sequence ids included


def draw(rng, num):
  """Returns `num` pairs of texts, such as ('17+4', '21')."""
  return [(f'{a}+{b}', str(a + b)) for a, b in rng.integers(0, 100, (num, 2)).tolist()]


def encode(text):
  return np.array([*VOCABULARY.encode(text), VOCABULARY.eos_id], np.int32)


class SumsIterator(data.HostIterator):
  """Batches of sums that were not seen before; the position is the state of NumPy's generator."""

  has_cheap_state = True
  handles_process_count = True  # the position is that of the global batch

  def __init__(self, cfg, layout, converter):
    self._lengths, self._converter = dict(cfg.task_feature_lengths), converter
    self._batch_size, self._own = layout.batch_size, data.shard_rows(layout)
    self._identity = {
      'source': cfg.source,
      'seed': cfg.effective_seed,
      'batch_size': layout.batch_size,
    }
    self._rng = np.random.Generator(np.random.PCG64(cfg.effective_seed))
    self._states_before = collections.deque(
      maxlen=positions.MAX_UNDELIVERED
    )  # each of the last batches

  @property
  def element_spec(self):
    return self._converter.element_spec(self._lengths, self._batch_size, False)

  def __next__(self):
    self._states_before.append(self._rng.bit_generator.state)
    pairs = draw(self._rng, self._batch_size)[self._own]
    rows = [({'inputs': encode(problem), 'targets': encode(result)},) for problem, result in pairs]
    return self._converter.convert(rows, self._lengths, False)

  def get_state(self, undelivered=()):
    state = self._states_before[-len(undelivered)] if undelivered else self._rng.bit_generator.state
    return positions.write_state(self._identity, generator=state)

  def set_state(self, state):
    saved = positions.read_state(state)
    positions.check_identity(saved['identity'], self._identity)
    self._rng.bit_generator.state = saved['generator']
    self._states_before.clear()


@data.register_source('sums')
class SumsSource(data.TableSource):
  """The tables of `tasks` are used for everything except training."""

  @classmethod
  def check(cls, cfg):
    super().check(cfg)
    if cfg.pack or any(
      cfg.task_feature_lengths.get(name, 0) < length for name, length in LENGTHS.items()
    ):
      raise ConfigError(
        f"DatasetConfig.source = 'sums' needs pack = False and task_feature_lengths of at least "
        f'{LENGTHS}, got pack = {cfg.pack} and {dict(cfg.task_feature_lengths)}.'
      )

  def tasks(self):
    return [
      data.text_task(
        name=self.cfg.name,
        splits=SPLITS,
        vocabulary=VOCABULARY,
        metric_fns=[data.exact_match],
        texts_fn=lambda split: draw(np.random.default_rng([1, SPLITS.index(split)]), 64),
      )
    ]

  def open_train_iterator(self, layout, feature_converter):
    return SumsIterator(self.cfg, layout, self.get_converter(feature_converter))
