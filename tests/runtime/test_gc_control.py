"""Garbage is collected at the pauses of a run only."""

import gc

from tests.apps.train import toy_run


def test_garbage_is_collected_at_the_pauses_only(tmp_path, monkeypatch):
  collected = []
  monkeypatch.setattr(gc, 'collect', lambda: collected.append(gc.isenabled()))
  toy_run.train(tmp_path, 6, gc_period=2, infer_eval_dataset_cfg=None, train_eval_dataset_cfg=None)
  assert len(collected) == 1 + 3 and collected[1:] == [False] * 3
  assert gc.isenabled()
