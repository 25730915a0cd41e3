"""Events as values and as lines."""

import json

from t5x_lite import runtime


def test_events_survive_the_file_and_lines_that_a_kill_cut_off_are_omitted(tmp_path):
  events = [
    runtime.Event(
      kind='start',
      wall_time=1.25,
      details={'host': 'a\u2028b', 'command': "python -m t5x_lite 'x y'"},
    ),
    runtime.Event(
      kind='save_begun',
      wall_time=2.5,
      step=7,
      process=3,
      seconds={'step': 1.5, 'data': 0.25},
      details={'checkpoint': 7},
    ),
  ]
  path = tmp_path / runtime.EVENTS_FILE
  lines = [event.to_line() for event in events]
  assert json.loads(lines[1]) == {
    'event': 'save_begun',
    'wall_time': 2.5,
    'step': 7,
    'process': 3,
    'seconds': {'step': 1.5, 'data': 0.25},
    'checkpoint': 7,
  }
  path.write_text(
    lines[0] + '{"event": "stop", "wall_ti\n' + '[1]\n{"event": "x"}\n' + lines[1] + lines[1][:-9]
  )
  assert list(runtime.read_events(path)) == events
