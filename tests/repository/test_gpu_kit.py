"""The kit for a GPU: its runner keeps results whatever its processes do, and its programs lower for CUDA without a GPU.

`make gpu SIZES=tiny` rehearses everything; here are the cheapest items and one program of each part.
"""

import dataclasses
import json
import os
import re
import sys
import textwrap

import jax
import numpy as np
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import attention
from benchmarks.gpu import correctness
from benchmarks.gpu import experts
from benchmarks.gpu import items
from benchmarks.gpu import lowering
from benchmarks.gpu import report
from benchmarks.gpu import runner
from benchmarks.gpu import runs
from benchmarks.gpu import training
from benchmarks.gpu import worker

# ---- Runner ----------------------------------------------------------------------------------------------------------

# A process of a part: `python -c _PROCESS part events skipped...`.
_PROCESS = textwrap.dedent("""
    import json, os, sys, time
    part, path, *skip = sys.argv[1:]

    def write(kind, **details):
      with open(path, 'a') as file:
        file.write(json.dumps({'event': kind, **details}) + '\\n')

    names = ['good', 'bad', 'killed', 'slow', 'last']
    write('items', names=names, limits=[60, 60, 60, 0.5, 60])
    write('device', device='a chip', platform='fake')
    write('matmul', size=8, bfloat16=2.0, float32=1.0)
    for name in names:
      if name in skip:
        continue
      write('begin', item=name)
      write('row', item=name, row={'ms': 1.5, 'passes': name != 'last'})
      if name == 'bad':
        write('failed', item=name, reason='ValueError: wrong')
        continue
      if name == 'killed':
        os._exit(7)
      if name == 'slow':
        time.sleep(300)
      write('end', item=name)
    """)
_SHARES = dict.fromkeys(worker.PARTS, 1.0)
_FACTS = {'command': 'kit', 'date': '2026-01-01', 'sizes': 'tiny'}


def _start(program):
  def start(part, events, skip):
    return [sys.executable, '-S', '-c', program, part, str(events), *skip], os.environ

  return start


def _results(folder):
  return json.loads((folder / 'results.json').read_text())


def test_the_other_items_go_on_after_errors_crashes_and_limits(tmp_path):
  kit = runner.Runner(tmp_path, tmp_path / 'work', _start(_PROCESS), 120.0, _SHARES, _FACTS)
  kit.run(['attention'])
  results = _results(tmp_path)
  assert results == json.loads(json.dumps(kit.results))
  found = results['parts']['attention']['items']
  assert {name: item['status'] for name, item in found.items()} == {
    'good': 'done',
    'bad': 'failed',
    'killed': 'failed',
    'slow': 'failed',
    'last': 'done',
  }
  assert found['bad']['reason'] == 'ValueError: wrong'
  assert found['killed']['reason'] == 'its process ended with status 7'
  assert found['slow']['reason'] == 'it took longer than its limit'
  # Rows that were measured before are kept.
  assert all(
    item['rows'] == [{'ms': 1.5, 'passes': name != 'last'}] for name, item in found.items()
  )
  assert len(runner.problems(results)) == 4
  page = (tmp_path / 'results.md').read_text()
  assert (
    '# a chip' in page and '| 1.5 | yes | killed |' in page and '| 1.5 | **no** | last |' in page
  )
  assert '- slow: failed, it took longer than its limit.' in page


def test_results_are_on_disk_before_a_part_ends(tmp_path):
  """The runner itself may be killed."""
  seen = []

  class Seeing(runner.Runner):
    def write(self):
      super().write()
      found = _results(tmp_path)['parts']['attention']['items']
      seen.append([item['status'] for item in found.values()])

  Seeing(tmp_path, tmp_path / 'work', _start(_PROCESS), 120.0, _SHARES, _FACTS).run(['attention'])
  assert any('running' in statuses and 'done' in statuses for statuses in seen)


def test_the_time_of_all_parts_is_limited(tmp_path):
  program = _PROCESS.replace('[60, 60, 60, 0.5, 60]', '[600] * 5').replace('os._exit(7)', 'pass')
  kit = runner.Runner(tmp_path, tmp_path / 'work', _start(program), 8.0, _SHARES, _FACTS)
  kit.run(['attention', 'experts'])
  parts = _results(tmp_path)['parts']
  assert parts['attention']['items']['slow']['reason'] == 'the time of the part was over'
  assert parts['attention']['items']['last']['status'] == 'not run'
  assert parts['experts']['items']['good']['status'] == 'done'


def test_a_process_that_begins_nothing_is_not_started_again(tmp_path):
  program = 'import sys; sys.exit("no JAX here")'
  kit = runner.Runner(tmp_path, tmp_path / 'work', _start(program), 60.0, _SHARES, _FACTS)
  kit.run(['runs'])
  assert runner.problems(kit.results) == ['runs: its process ended with status 1: no JAX here.']


# ---- Report ----------------------------------------------------------------------------------------------------------


def test_tables_have_the_columns_of_all_rows():
  shown = report.table([{'a': 1, 'b': 0.1}, {'b': None, 'c': 'x|y\n z'}])
  assert shown.splitlines() == [
    '| a | b | c |',
    '|---|---|---|',
    '| 1 | 0.1 |  |',
    '|  |  | x\\|y z |',
  ]


def test_thresholds_are_where_a_kernel_stays_ahead():
  def row(length, kernel, ms):
    return {'form': 'packed', 'length': length, 'kernel': kernel, 'ms': ms}

  # 'blockwise' wins at 512 by chance, loses at 1024, and wins from 2048 on.
  rows = [row(length, 'dot', 1.0) for length in (512, 1024, 2048, 4096)]
  rows += [
    row(length, 'blockwise', ms)
    for length, ms in ((512, 0.9), (1024, 1.2), (2048, 0.8), (4096, 0.5))
  ]
  rows.append({'form': 'packed', 'length': 4096, 'kernel': 'cudnn', 'note': 'not here'})
  fastest, threshold = attention.thresholds(rows)
  assert fastest == (
    'Fastest with packed: blockwise at 512, dot at 1024, blockwise at 2048, blockwise at 4096.'
  )
  assert "as fast as 'dot' from 2048^2 = 4,194,304 scores" in threshold


# ---- Items -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('part', worker.PARTS)
@pytest.mark.parametrize('sizes', ['real', 'tiny'])
def test_items_have_names_of_their_own(part, sizes):
  found = worker.make_items(part, sizes)
  assert found and len({item.name for item in found}) == len(found)


def test_a_part_writes_events_of_each_item(tmp_path, monkeypatch):
  monkeypatch.setattr(attention, '_SIZES', {'tiny': ((32,), 64)})
  path = tmp_path / 'events.jsonl'
  worker.run('attention', 'tiny', worker.Events(path), skip=['32, position biases'])
  events = [json.loads(line) for line in path.read_text().splitlines()]
  kinds = [event['event'] for event in events]
  assert kinds == ['items', 'device', 'matmul', 'begin', *['row'] * 3, 'end', 'matmul']
  rows = {event['row']['kernel']: event['row'] for event in events if event['event'] == 'row'}
  for kernel in ('dot', 'blockwise'):
    assert rows[kernel]['ms'] > 0
    assert 0 < rows[kernel]['error of output'] < 0.02
    assert 0 < rows[kernel]['error of gradients'] < 0.03 and rows[kernel]['passes'] is True
  assert 'NVIDIA GPU' in rows['cudnn']['note'] and not {'ms', 'passes'} & set(rows['cudnn'])


def test_no_item_follows_one_after_which_the_device_does_not_compute(tmp_path, monkeypatch):
  def fail():
    raise RuntimeError('CUDA_ERROR_ILLEGAL_ADDRESS')

  found = [items.Item(name, lambda: iter([{'ms': 1.0}]), dict) for name in ('bad', 'next')]
  monkeypatch.setattr(worker, 'make_items', lambda part, sizes: found)
  monkeypatch.setattr(worker, 'check_device', fail)
  path = tmp_path / 'events.jsonl'
  with pytest.raises(RuntimeError, match='ILLEGAL_ADDRESS'):
    worker.run('experts', 'tiny', worker.Events(path))
  events = [json.loads(line) for line in path.read_text().splitlines()]
  assert [event['event'] for event in events[-3:]] == ['begin', 'row', 'end']
  assert events[-1]['item'] == 'bad'


def test_a_part_has_one_gpu_and_a_share_of_its_memory(tmp_path, monkeypatch):
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3,5')
  # JAX raises for both names.
  monkeypatch.setenv('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.1')
  monkeypatch.setenv('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  found = command._environment('training', 'real', tmp_path)
  assert found['CUDA_VISIBLE_DEVICES'] == '3' and found['XLA_CLIENT_MEM_FRACTION'] == '0.95'
  assert not [name for name in found if name.startswith('XLA_PYTHON_CLIENT')]
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES')
  assert command._environment('runs', 'real', tmp_path)['CUDA_VISIBLE_DEVICES'] == '0'


@pytest.mark.parametrize(
  'message, expected',
  [
    ('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.', True),
    ('INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory', True),
    ('INTERNAL: CUDNN_STATUS_ALLOC_FAILED', True),
    ('INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered', False),
  ],
)
def test_errors_of_memory_are_known_by_their_texts(message, expected):
  assert items.is_out_of_memory(RuntimeError(message)) is expected


def test_programs_that_cannot_be_traced_do_not_end_the_others():
  def fail():
    raise ValueError('wrong')

  found = items.compile_together(
    {'bad': fail, 'good': lambda: jax.jit(lambda x: 2 * x).trace(np.float32(1))}
  )
  with pytest.raises(ValueError, match='wrong'):
    found['bad'].result()
  assert found['good'].result()(np.float32(3)) == 6


def test_a_model_that_fails_does_not_end_the_others(monkeypatch):
  def measure(case, batch_size, num_steps):
    if case.num_experts == 8:
      raise ValueError('wrong')
    return {'fits': True, 'sequences/s': 100.0 - case.num_experts}

  monkeypatch.setattr(training, 'measure_batch', measure)
  dense, failed, last = experts._measure_models('real')
  assert dense['sequences/s'] == 100.0
  assert failed == {'model': '8 experts', 'note': 'ValueError: wrong', 'passes': False}
  assert last['speed / dense twin'] == pytest.approx(0.36)


def test_results_are_compared_with_those_of_the_cpu(monkeypatch):
  (case,) = (case for case in correctness.cases('tiny') if case.name == 'two steps of adamw')
  program = correctness.trace(case, 'float32').lower().compile()
  expected = correctness.compute(case, program)

  class Reference:
    def __init__(self, factor):
      self.factor = factor

    def leaves(self, index):
      return [leaf * self.factor for leaf in expected]

  (row,) = correctness._measure(case, 0, Reference(1.0))
  assert row['passes'] is True and row['error'] == 0.0
  (row,) = correctness._measure(case, 0, Reference(1.01))
  assert row['passes'] is False and row['error'] == pytest.approx(0.01, rel=0.02)
  # NaN in the last array of several, too.
  got = [*expected, expected[0] * np.nan]
  assert np.isnan(correctness.error_of(got, [*expected, expected[0]]))


def test_a_step_has_its_rates(monkeypatch):
  case = dataclasses.replace(training.TINY, goal=7.0)
  # A row for each of the devices of the tests.
  row = training.measure_batch(case, 8, 1)
  assert row['fits'] is True and row['goal on one H100'] == 7.0 and 4 < row['loss'] < 8
  seconds = row['step, ms'] / 1e3
  assert row['sequences/s'] == pytest.approx(8 / seconds)
  flops = training.Step(case, 8).rates(seconds)
  assert row['model TFLOP/s'] == pytest.approx(flops['model TFLOP/s']) and 'MFU' not in row
  # The time is kept without them.
  monkeypatch.setattr(training.Step, 'rates', lambda *_: 1 / 0)
  row = training.measure_batch(case, 8, 1)
  assert row['sequences/s'] > 0 and row['note'].startswith('ZeroDivisionError')


@pytest.mark.parametrize(
  'fits, memory, limit, expected',
  [
    (True, 30.0, 80e9, 512),  # 2.6 times as much fits
    (True, 47.0, 80e9, 512),  # 1.65 times: parameters do not grow
    (True, 60.0, 80e9, None),
    (False, 100.0, 80e9, 128),
    (False, 200.0, 80e9, 64),
    (False, 60.0, 80e9, 128),  # out of memory in spite of the program's size
    (True, 1.0, None, 512),
    (False, 1.0, None, 128),
  ],
)
def test_batches_are_searched_by_memory(fits, memory, limit, expected):
  row = {'batch': 256, 'fits': fits, 'memory, GB': memory}
  assert training.next_batch(row, limit) == expected


def test_the_search_ends_before_the_limit(monkeypatch):
  now = 0.0

  def measure(case, batch_size, num_steps):
    nonlocal now
    now += 40.0
    return {'batch': batch_size, 'fits': True}

  monkeypatch.setattr(training, 'measure_batch', measure)
  monkeypatch.setattr(training.time, 'monotonic', lambda: now)
  # A third batch would end after 120 of 100 seconds.
  first, last = training._measure(training.TINY, 1, 4096)
  assert 'note' not in first
  assert last == {'batch': 4, 'fits': True, 'note': 'no time was left for a batch of 8'}


class _Program:
  """A step of 10 kB that has too little memory, or another error, when it gets its state."""

  batch_size = 4
  error: Exception = RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes')

  def __init__(self, case, batch_size):
    del case, batch_size

  def trace(self):
    return self

  lower = compile = memory_analysis = trace
  argument_size_in_bytes = output_size_in_bytes = alias_size_in_bytes = 5000
  temp_size_in_bytes = 5000

  def state(self):
    raise self.error


def test_programs_without_enough_memory_do_not_fit(monkeypatch):
  monkeypatch.setattr(training, 'Step', _Program)
  row = training.measure_batch(training.TINY, 4, 1)
  assert row['fits'] is False and row['memory, GB'] == 1e-5
  # Not run: it would need more than the device has.
  monkeypatch.setattr(_Program, 'error', ValueError('wrong'))
  monkeypatch.setattr(items, 'device_bytes', lambda: 10_000)
  assert training.measure_batch(training.TINY, 4, 1)['fits'] is False
  monkeypatch.setattr(items, 'device_bytes', lambda: 20_000)
  with pytest.raises(ValueError, match='wrong'):
    training.measure_batch(training.TINY, 4, 1)


def test_runs_must_be_equal_with_a_fixed_order_of_sums(monkeypatch):
  def passes_of(different):
    """Return what the rows of the comparisons say, for the XLA flags with which arrays differ."""

    def compare(sizes, flags):
      del sizes
      yield {'what': 'train, first start'}
      yield {'what': 'train, resumed', 'passes': flags not in different}

    monkeypatch.setattr(runs, '_compare_runs', compare)
    rows = list(runs._measure_command('tiny'))
    return [row.get('passes') for row in rows if row['what'] == 'train, resumed']

  assert passes_of([]) == [True]
  assert passes_of(['']) == [None, True]
  assert passes_of(['', runs._DETERMINISTIC]) == [None, False]


# ---- Programs --------------------------------------------------------------------------------------------------------


def _item(part, name):
  (found,) = (item for item in part.make_items('real') if item.name == name)
  return found


@pytest.mark.parametrize(
  'part, item, program, calls',
  [
    (correctness, 'network, packed rows', 'bfloat16', r'__cudnn\$fmhaSoftmax'),
    (attention, '8192, packed', 'cudnn', r'__cudnn\$fmhaSoftmaxBackward'),
    (training, 'xl', 'step, batch 32', r'__cudnn\$fmhaScaleBiasSoftmaxBackward'),
    (experts, 'layer with 8 experts', 'mosaic_gpu', '@mosaic_gpu'),
    (runs, 'decoding, 8 rows', 'beam search', 'stablehlo.while'),
  ],
)
def test_programs_lower_for_cuda(part, item, program, calls):
  text = lowering.lower(_item(part, item), [program])[program]
  assert re.search(calls, text)
