"""Task, model and faults of the runs of this folder, for `letters.gin`.

The environment variable FAULTS has faults as JSON, a list of objects:

    process  the process in which it happens
    at       kind of an event of the run ('restored', 'evaluation_begun', 'save_begun', ...), 'import' of this module,
             'open' of the training data, one of their batches ('batch') or of those of an evaluation ('evaluation'),
             'metric' of predictions, 'encode' of a text, 'write' or 'finish' of the arrays of a checkpoint; 'listing'
             or 'contents'
    number   the first, second, ... time; default 1
    do       'raise', 'sleep', 'fill_disk', or the name of a signal that the process sends itself; for 'listing', the
             path of a checkpoint that the process does not see, and for 'contents', of one that is damaged for it

SECONDS is the time that the source takes for a batch. RECORD is a folder to which each process writes its batches.
"""

import errno
import json
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import data
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest
from t5x_lite.trainer import actions
from tests.apps.infer import toy_infer
from tests.apps.train import toy_run
from tests.models import toy_model

_FAULTS = json.loads(os.environ.get('FAULTS', '[]'))
_SECONDS = float(os.environ.get('SECONDS', 0))
_counts: dict[str, int] = {}


def exact_match(targets, predictions):
  """Metric with faults."""
  happens('metric')
  return data.exact_match(targets, predictions)


class _Vocabulary(toy_infer.LetterVocabulary):
  """Vocabulary with faults."""

  def encode(self, text):
    """See base class."""
    time.sleep(_SECONDS)
    happens('encode')
    return super().encode(text)


VOCABULARY = _Vocabulary()
data.register_builtin_task(
  data.BuiltinTask(
    name='letters',
    splits=toy_run.TASK.splits,
    table_fn=toy_run._table,
    metric_fns=[exact_match],
    vocabularies={'inputs': VOCABULARY, 'targets': VOCABULARY},
  )
)

_MESSAGE = 'first line\nsecond line'


class RaisedByTest(Exception):
  """Error of user code."""


class _Model(toy_model.ToyModel):
  """Predicts the inputs without their first letter."""

  def predict_batch_with_aux(self, params, batch, rng=None, *, flax_mutables=None):
    return jnp.roll(batch['encoder_input_tokens'], -1, axis=1), {}


def model(optimizer_def):
  """Return the model."""
  return _Model(
    toy_model.ToyNetwork(dropout_rate=0.1),
    VOCABULARY,
    VOCABULARY,
    optimizer_def,
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
  )


def happens(at):
  """Cause the faults of this process that are due now."""
  _counts[at] = _counts.get(at, 0) + 1
  for fault in _FAULTS:
    if (fault['process'], fault['at'], fault.get('number', 1)) != (
      jax.process_index(),
      at,
      _counts[at],
    ):
      continue
    print(f'FAULT {fault["do"]} at {at} {_counts[at]}', file=sys.stderr, flush=True)
    if fault['do'] == 'raise':
      raise RaisedByTest(_MESSAGE)
    if fault['do'] == 'fill_disk':
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fault['do'] == 'sleep':
      time.sleep(600)
    os.kill(os.getpid(), getattr(signal, fault['do']))


def _write_parts(directory, state, write_parts=array_io.write_parts):
  """Write the arrays of this process, with the faults."""
  happens('write')
  write_parts(directory, state)
  happens('finish')


array_io.write_parts = _write_parts


def on_event(event):
  """Hook of a run's events."""
  happens(event.kind)


def open_eval_iterators(*args, **kwargs):
  """Open the data of evaluations, with the faults."""
  opened = data.open_eval_iterators(*args, **kwargs)
  for batches in opened.values():
    batches_fn = batches._batches_fn
    batches._batches_fn = lambda fn=batches_fn: (happens('evaluation') or batch for batch in fn())
  return opened


def open_train_iterator(*args, **kwargs):
  """Open the training data, with the faults."""
  happens('open')
  iterator = data.open_train_iterator(*args, **kwargs)

  class Faulty(type(iterator)):
    """Data with faults."""

    def __next__(self):
      time.sleep(_SECONDS)
      happens('batch')
      batch = super().__next__()
      if 'RECORD' in os.environ:
        path = (
          pathlib.Path(os.environ['RECORD']) / f'{self._num_batches:04}-{jax.process_index()}.npy'
        )
        np.save(path, batch['decoder_target_tokens'])
      return batch

  iterator.__class__ = Faulty
  return iterator


class StopAt(actions.BaseAction):
  """Action that asks to stop after some calls, in the process that calls it."""

  def __init__(self, num_calls):
    self._num_calls = num_calls

  def run(self, train_state, metrics_by_task):
    self._num_calls -= 1
    print('action called', file=sys.stderr, flush=True)
    return self._num_calls == 0


def _deceive():
  """Let this process see another folder than the others see."""
  folders = {
    at: [
      fault['do']
      for fault in _FAULTS
      if (fault['process'], fault['at']) == (jax.process_index(), at)
    ]
    for at in ('listing', 'contents')
  }
  all_steps, find_damage = discovery.all_steps, manifest._find_damage
  if folders['listing']:
    discovery.all_steps = lambda folder, **kwargs: [
      step
      for step in all_steps(folder, **kwargs)
      if discovery.get_checkpoint_dir(folder, step) not in folders['listing']
    ]
  if folders['contents']:
    manifest._find_damage = lambda root, found: (
      f'{root} is damaged here' if str(root) in folders['contents'] else find_damage(root, found)
    )


print('pid', os.getpid(), file=sys.stderr, flush=True)
_deceive()
happens('import')
