"""MLflow with its file store, and with a server that does not answer."""

import json
import math
import pathlib
import socket
import time

import pytest

from t5x_lite import trackers
from t5x_lite.errors import ConfigError
from tests.trackers.tracker_cases import GrowingRun

mlflow_exceptions = pytest.importorskip('mlflow.exceptions')


@pytest.fixture
def run(tmp_path, monkeypatch):
  monkeypatch.setenv('MLFLOW_TRACKING_URI', (tmp_path / 'mlruns').as_uri())
  monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
  monkeypatch.setenv('MLFLOW_EXPERIMENT_NAME', 'my experiment')
  monkeypatch.setenv('MLFLOW_DISABLE_TELEMETRY', 'true')
  made = GrowingRun(tmp_path / 'runs/mine')
  made.start()
  return made


def _client():
  from mlflow import MlflowClient

  return MlflowClient()


def _runs():
  client = _client()
  experiment = client.get_experiment_by_name('my experiment')
  return client.search_runs([experiment.experiment_id])


def _send(run):
  follower = trackers.Follower(run.path, trackers.Mlflow())
  follower.finish(follower.send().status)


def test_a_run_and_its_continuation_are_one_run_with_each_step_once(run):
  text = f"TRAIN_STEPS = 5\nTEXT = '{'x' * 7000}'\na/mine.load.api_key = 'secret'\n"
  (run.path / 'config.gin').write_text(text)
  run.line(10, **{'loss': 1.0, 'norm': 2.0, 'norm/clipped share (%)': 0.5})
  run.line(10, 'inference_eval/a+b', bleu=3.0)
  run.predictions(10, 'a+b', [{'index': 0, 'inputs': 'x', 'targets': 'y', 'prediction': 'z'}])
  run.checkpoint(10)
  run.line(20, loss='NaN')
  _send(run)
  (found,) = _runs()
  assert found.info.status == 'RUNNING'
  (run.path / 'config.gin').write_text('TRAIN_STEPS = 6\nNEW = 1\n')
  run.line(30, loss=4.0)
  run.stop()
  _send(run)
  position = run.path / 'trackers/mlflow.json'
  position.write_text(json.dumps({**json.loads(position.read_text()), 'step': -1}))
  _send(run)
  (found,) = _runs()
  assert found.info.status == 'FINISHED'
  assert found.info.run_name == 'mine'
  history = _client().get_metric_history(found.info.run_id, 'train/loss')
  assert [metric.step for metric in history] == [10, 20, 30]
  assert history[0].value == 1.0 and math.isnan(history[1].value) and history[2].value == 4.0
  assert history[0].timestamp == 1700000003000  # of the last line of the step
  assert found.data.metrics['train/norm.clipped share ___'] == 0.5
  assert found.data.metrics['inference_eval/a_b/bleu'] == 3.0
  assert found.data.params['TRAIN_STEPS'] == '5'
  assert found.data.params['NEW'] == '1'
  assert found.data.params['a/mine.load.api_key'] == '***'
  assert len(found.data.params['TEXT']) == 6000
  assert set(found.data.tags) == {'mlflow.runName', 't5x_lite.run_id'}
  folder = pathlib.Path(found.info.artifact_uri.removeprefix('file://'))
  (path,) = folder.rglob('*.json')
  assert json.loads(path.read_text())['data'] == [[0, 'x', 'y', 'z']]


def test_a_server_that_does_not_answer_has_a_limited_time(run, monkeypatch, caplog):
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    monkeypatch.setenv('MLFLOW_TRACKING_URI', f'http://127.0.0.1:{port}')
    monkeypatch.setenv('MLFLOW_HTTP_REQUEST_MAX_RETRIES', '0')
    run.line(10)
    followers = trackers.FollowerThreads(run.path, [trackers.Mlflow()], end_seconds=1.0)
    with followers:
      start = time.monotonic()
      followers.start()
      assert time.monotonic() - start < 0.5
      connection, _ = server.accept()
      run.stop()
      start = time.monotonic()
    assert time.monotonic() - start < 3.0
    connection.close()
  (message,) = [
    record.getMessage() for record in caplog.records if record.name.startswith('t5x_lite')
  ]
  assert message.endswith(f't5x_lite track {run.path} --once --to=mlflow')


def test_without_a_place_the_error_names_the_variable(run, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  # MLflow uses a folder `mlruns` of the working directory if there is one, which needs the second variable.
  (tmp_path / 'mlruns/0').mkdir(parents=True)
  (tmp_path / 'mlruns/0/meta.yaml').write_text('')
  monkeypatch.delenv('MLFLOW_TRACKING_URI')
  monkeypatch.delenv('MLFLOW_ALLOW_FILE_STORE')
  with pytest.raises(ConfigError, match=r'MLFLOW_TRACKING_URI=https://SERVER, or for a folder'):
    trackers.Follower(run.path, trackers.Mlflow()).send()


def test_the_error_of_a_chosen_place_is_that_of_mlflow(run, monkeypatch):
  monkeypatch.delenv('MLFLOW_ALLOW_FILE_STORE')
  with pytest.raises(mlflow_exceptions.MlflowException, match='MLFLOW_ALLOW_FILE_STORE'):
    trackers.Follower(run.path, trackers.Mlflow()).send()
