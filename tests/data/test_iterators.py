"""Iterators of evaluation data: each example once, packing, the cache in memory."""

import collections

import numpy as np
import pytest

from t5x_lite import data
from tests.data import builtin_cases as cases

# --- Evaluation --------------------------------------------------------------------------


def test_eval_iterators_show_each_example_once_and_fill_up():
  cfg = cases.make_cfg(shuffle=False)
  batches = data.open_eval_iterators(cfg, cases.layout())['digits']
  assert len(batches) == 3 and batches.num_examples == 21
  for _ in range(2):
    listed = list(batches)
    assert len(listed) == 3
    numbers = [
      n
      for b in listed
      for n in (int(cases.VOCABULARY.decode(row) or -1) for row in b['decoder_target_tokens'])
    ]
    assert numbers == [*range(21), -1, -1, -1]
  assert not any(array[5:].any() for array in listed[2].values())
  assert {name: spec.shape for name, spec in batches.element_spec.items()} == {
    k: v.shape for k, v in listed[0].items()
  }
  assert len(list(data.open_eval_iterators(cfg, cases.layout(), 2)['digits'])) == 2
  shards = [list(data.open_eval_iterators(cfg, cases.layout(i, 2))['digits']) for i in range(2)]
  for k, expected in enumerate(listed):
    cases.assert_equal(
      {n: np.concatenate([shard[k][n] for shard in shards]) for n in expected}, expected
    )


def test_eval_iterators_pack():
  batches = list(
    data.open_eval_iterators(cases.make_cfg(shuffle=False, pack=True), cases.layout(batch_size=8))[
      'digits'
    ]
  )
  nonempty = [
    {name: array[batch['encoder_input_tokens'].any(axis=1)] for name, array in batch.items()}
    for batch in batches
  ]
  assert [
    int(cases.VOCABULARY.decode(t)) for batch in nonempty for _, t in cases.unpack(batch)
  ] == list(range(21))
  assert len(data.open_eval_iterators(cases.make_cfg(pack=True), cases.layout(), 1)['digits']) == 1


@pytest.mark.parametrize('use_memory_cache', [True, False])
def test_memory_cache(use_memory_cache):
  calls = collections.Counter()

  class Counting(data.StaticExamples):
    def examples(self, seed, numbers):
      calls['examples'] += 1
      return super().examples(seed, numbers)

  example = {'inputs': np.array([3, 1], np.int32), 'targets': np.array([4, 1], np.int32)}
  task = data.BuiltinTask(
    name='counting',
    splits=('train',),
    table_fn=lambda split, lengths: Counting([example], [{}]),
    vocabularies={'inputs': cases.VOCABULARY, 'targets': cases.VOCABULARY},
  )
  batches = data.open_eval_iterators(
    cases.make_cfg(task, use_memory_cache=use_memory_cache), cases.layout()
  )['counting']
  passes = [list(batches) for _ in range(3)]
  cases.assert_equal(passes[0][0], passes[2][0])
  assert calls['examples'] == (1 if use_memory_cache else 4)
