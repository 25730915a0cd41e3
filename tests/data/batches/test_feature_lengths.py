"""Task feature lengths that are None: those of the longest examples, kept with a run, equal in all processes."""

import dataclasses
import json
import logging

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data.batches import feature_lengths
from t5x_lite.errors import ConfigError
from tests import processes
from tests.data import builtin_cases as cases


class _Texts:
  """Texts of a task that a test may change."""

  def __init__(self, *lengths):
    self.lengths, self.num_reads = lengths, 0

  def __call__(self, split):
    del split
    self.num_reads += 1
    return [('x' * length, 'y' * (length // 2)) for length in self.lengths]


def _task(texts, name='lines', **kwargs):
  return data.text_task(
    name=name,
    texts_fn=texts,
    splits=('validation',),
    vocabulary=cases.VOCABULARY,
    metric_fns=(data.exact_match,),
    **kwargs,
  )


def _cfg(task, **kwargs):
  return cases.make_cfg(
    task, **{'task_feature_lengths': None, 'split': 'validation', 'shuffle': False, **kwargs}
  )


def _lengths(cfg, **kwargs):
  return data.with_feature_lengths(cfg, **kwargs).task_feature_lengths


def test_lengths_are_those_of_the_longest_examples_with_their_end():
  cfg = _cfg(_task(_Texts(3, 40, 9)))
  assert _lengths(cfg) == {'inputs': 41, 'targets': 21}
  assert _lengths(cfg, num_examples=1) == {'inputs': 4, 'targets': 2}
  assert _lengths(dataclasses.replace(cfg, pack=True), num_examples=1) == {
    'inputs': 41,
    'targets': 21,
  }
  assert _lengths(_cfg(_task(_Texts(0)))) == {'inputs': 1, 'targets': 1}
  given = dataclasses.replace(cfg, task_feature_lengths={'inputs': 4, 'targets': 4})
  assert data.with_feature_lengths(given) is given


def test_only_features_of_the_converter_and_tasks_with_metrics_count(monkeypatch):
  monkeypatch.setattr('t5x_lite.data.builtin_tasks._REGISTRY', {})
  data.register_builtin_task(_task(_Texts(3), 'judged'))
  data.register_builtin_task(dataclasses.replace(_task(_Texts(40), 'unjudged'), metric_fns=()))
  data.register_builtin_mixture(
    data.BuiltinMixture(name='both', rates={'judged': 1.0, 'unjudged': 1.0})
  )
  assert _lengths(_cfg('both')) == {'inputs': 41, 'targets': 21}
  assert _lengths(_cfg('both'), decodes=True) == {'inputs': 4, 'targets': 2}
  assert _lengths(_cfg('unjudged'), decodes=True) == {'inputs': 41, 'targets': 21}
  task = _task(_Texts(3))
  monkeypatch.setitem(task.vocabularies, 'notes', cases.VOCABULARY)
  assert _lengths(_cfg(task), feature_converter='prefix_lm') == {'inputs': 4, 'targets': 2}


def test_all_uses_compute_lengths():
  cfg = _cfg(_task(_Texts(3, 40, 9)))
  (batches,) = data.open_eval_iterators(cfg, cases.layout()).values()
  assert batches.element_spec['encoder_input_tokens'].shape == (8, 41)
  (task,) = data.open_eval_tasks(cfg, cases.layout(), num_examples=1)
  assert task.element_spec['decoder_target_tokens'].shape == (8, 2)

  class Model:
    FEATURE_CONVERTER = 'encoder_decoder'

  (source,) = data.open_example_sources(cfg, Model)
  assert source.element_spec(2)['encoder_input_tokens'].shape == (2, 41)
  for use in (
    lambda: data.open_train_iterator(cfg, cases.layout()),
    lambda: data.get_dataset(cfg, 0, 1, Model),
    lambda: data.read_task_texts(cfg),
  ):
    with pytest.raises(
      ConfigError, match='task_feature_lengths` must be a mapping .*got None. Set TASK_FEA'
    ):
      use()


def test_tasks_and_sources_that_need_lengths_say_so():
  with pytest.raises(
    ConfigError, match='for span corruption, got None. It makes examples of these lengths'
  ):
    _lengths(_cfg('python_docs_span_corruption'))
  with pytest.raises(ConfigError, match='for random data, got None'):
    _cfg(data.SyntheticSource(), source='synthetic').check()


def test_kept_lengths_are_used_until_the_data_changes(tmp_path, caplog, monkeypatch):
  texts = _Texts(3, 40)
  cfg = _cfg(_task(texts))
  with caplog.at_level(logging.INFO):
    found = _lengths(cfg, folder=str(tmp_path / 'run'))
  assert [record.getMessage() for record in caplog.records] == [
    "DatasetConfig.task_feature_lengths of 'lines' are None: reading the split 'validation' for its "
    'longest examples.',
    "task_feature_lengths of 'lines', split 'validation': {'inputs': 41, 'targets': 21}, those of the longest "
    f'examples (kept in {tmp_path / "run" / feature_lengths.LENGTHS_FILE}).',
  ]
  with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
    patch.setattr(feature_lengths._Measured, 'of', lambda cfg, split: pytest.fail('computed again'))
    assert _lengths(cfg, folder=str(tmp_path / 'run')) == found
  assert f'longest examples (from {tmp_path}' in caplog.text
  for change in (dict(shuffle=True), dict(seed=2), {}):
    if not change:
      texts.lengths = (3, 50)
    _lengths(dataclasses.replace(cfg, **change), folder=str(tmp_path / 'run'))
  path = tmp_path / 'run' / feature_lengths.LENGTHS_FILE
  assert [entry['task_feature_lengths']['inputs'] for entry in json.loads(path.read_text())] == [
    41,
    41,
    41,
    51,
  ]
  for damaged in ('[{"data"', '[' * 100_000):
    path.write_text(damaged)
    assert _lengths(cfg, folder=str(tmp_path / 'run')) == {'inputs': 51, 'targets': 26}
  assert len(json.loads(path.read_text())) == 1 and 'cannot be read and is replaced' in caplog.text


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path, caplog):
  (tmp_path / 'file').write_text('')
  with caplog.at_level(logging.INFO):
    assert _lengths(_cfg(_task(_Texts(3))), folder=str(tmp_path / 'file')) == {
      'inputs': 4,
      'targets': 2,
    }
  assert '(not kept: ' in caplog.text


def test_a_long_split_is_reported(caplog, monkeypatch):
  monkeypatch.setattr(feature_lengths, '_SECONDS_PER_LINE', -1)
  with caplog.at_level(logging.INFO):
    _lengths(_cfg(_task(_Texts(3, 40))))
  assert (
    "lines, split validation: read 2 examples, the longest have {'inputs': 41, 'targets': 21}."
    in caplog.text
  )


def test_preprocessors_see_no_limit(tmp_path):
  (tmp_path / 'lines.jsonl').write_text(
    '\n'.join(json.dumps({'text': 'z' * n}) for n in (5, 30)) + '\n'
  )

  def split_text(record, context):
    text = record['text'][: context.lengths['inputs']]
    return {'inputs': text, 'targets': text[:2]}

  task = data.file_task(
    name='limited',
    format='jsonl',
    splits={'validation': str(tmp_path / 'lines.jsonl')},
    vocabulary=cases.VOCABULARY,
    preprocessors=[split_text],
  )
  assert _lengths(_cfg(task)) == {'inputs': 31, 'targets': 3}


_PROGRAM = """
    import sys
    from t5x_lite import runtime
    process = runtime.join(runtime.ClusterConfig()).process
    from tests.data.batches import test_feature_lengths as cases
    # The lead process alone has a file, and the data differs.
    folder = sys.argv[1] if process == 0 else sys.argv[1] + '-other'
    cfg = cases._cfg(cases._task(cases._Texts(3 + process)))
    for _ in range(2):
      print('lengths', cases._lengths(cfg, folder=folder), flush=True)
"""


def test_all_processes_have_the_lengths_of_the_lead_process(tmp_path):
  outputs = processes.run(_PROGRAM, tmp_path / 'run', num_devices=1)
  for output in outputs:
    assert output.count("lengths {'inputs': 4, 'targets': 2}") == 2
  assert not (tmp_path / 'run-other').exists()


def test_reading_lengths_needs_no_more_than_a_block(monkeypatch):
  sizes = []
  table = data.StaticExamples(
    [{'inputs': np.ones(n % 7 + 1, np.int32), 'targets': np.ones(1, np.int32)} for n in range(600)],
    [{}] * 600,
  )
  before = data.StaticExamples.examples
  monkeypatch.setattr(
    data.StaticExamples,
    'examples',
    lambda self, seed, numbers: (sizes.append(len(numbers)), before(self, seed, numbers))[1],
  )
  task = data.BuiltinTask(
    name='many',
    splits=('validation',),
    table_fn=lambda split, lengths: table,
    vocabularies=dict.fromkeys(('inputs', 'targets'), cases.VOCABULARY),
  )
  assert _lengths(_cfg(task)) == {'inputs': 7, 'targets': 1} and sizes == [256, 256, 88]
