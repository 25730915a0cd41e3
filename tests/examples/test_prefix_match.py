"""A custom metric of predictions: the example of docs/extending.md, with the gin file of the page."""

import pathlib
import re
import sys

import gin
import pytest

from t5x_lite import data
from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax
from tests.data import registries

_FOLDER = pathlib.Path(__file__).parent


def test_the_task_of_the_page_has_the_metric(monkeypatch):
  monkeypatch.syspath_prepend(str(_FOLDER))
  registries.isolate(monkeypatch, 'keyword_cloze_prefix')
  monkeypatch.delitem(sys.modules, 'prefix_match', raising=False)
  page = (_FOLDER.parents[1] / 'docs' / 'extending.md').read_text(encoding='utf-8')
  (shown,) = re.findall(r'`prefix_match.gin`:\n\n```gin\n(.*?)```', page, re.DOTALL)
  shown = gin_syntax.read_text(shown + "MODEL_DIR = 'runs/x'\n", 'own.gin', is_flag=False)
  configuration = gin_utils.load('t5x_lite.apps.train.train', [shown])
  (task,) = data.get_source(configuration.argument('infer_eval_dataset_cfg')).tasks()
  gin.clear_config()
  exact_match, prefix_match = task.metric_fns
  targets, predictions = ['if', 'for', 'while'], ['if', 'form', 'if']
  assert prefix_match(targets, predictions) == {'prefix_match': pytest.approx(2 / 3)}
  assert exact_match(targets, predictions) == {'exact_match': pytest.approx(1 / 3)}
  assert task.table('validation', {'inputs': 64, 'targets': 12})
