"""Make the pictures of the documentation from today's code: `make pictures`, after `make train`.

Runs that a picture needs are kept in runs/pictures, so that a second call only draws. Reports are drawn by Chromium
through Playwright: that of the environment variable CHROMIUM, else one on the path, else Playwright's own
(`python -m playwright install chromium`).
"""

import os
import pathlib
import shutil
import subprocess
import sys

from playwright import sync_api

_ROOT = pathlib.Path(__file__).parents[1]
# Relative to _ROOT, since reports show the paths of runs.
_IMAGES = pathlib.Path('docs/images')
_RUNS = pathlib.Path('runs/pictures')
_TRAINED = pathlib.Path('runs/keyword_cloze')  # by `make train`
_WINDOW = {'width': 1200, 'height': 800}  # pixels


def main() -> None:
  """Draw all pictures."""
  slow = _train('keyword_cloze', 'slow', '--gin.LEARNING_RATE=0.001')
  experts = _train('keyword_cloze_moe', 'experts')
  _run('t5x_lite', 'plot', _TRAINED, f'--out={_IMAGES}/plot_metrics.png')
  report = _RUNS / 'report.html'
  _run('t5x_lite', 'report', _TRAINED, slow, f'--out={report}')
  routing = _RUNS / 'routing'
  _run('moe', 'report', experts, f'--out={routing}')
  with sync_api.sync_playwright() as playwright:
    chromium = (
      os.environ.get('CHROMIUM') or shutil.which('chromium') or shutil.which('google-chrome')
    )
    browser = playwright.chromium.launch(executable_path=chromium)
    _draw(browser, report, 'report')
    _draw(browser, routing / 'index.html', 'moe_report')
    browser.close()


def _train(recipe: str, name: str, *flags: str) -> pathlib.Path:
  """Return the folder of a run of a recipe, which is trained or resumed unless it has ended."""
  folder = _RUNS / name
  _run(
    't5x_lite',
    'train',
    f'--gin_file=recipes/{recipe}.gin',
    f'--gin.MODEL_DIR={folder}',
    '--gin.DATA_SOURCE=builtin',
    *flags,
  )
  return folder


def _run(program: str, *arguments: str | pathlib.Path) -> None:
  subprocess.run([sys.executable, '-m', program, *map(str, arguments)], cwd=_ROOT, check=True)


def _draw(browser: sync_api.Browser, page: pathlib.Path, name: str) -> None:
  """Draw the top of a page."""
  tab = browser.new_page(viewport=_WINDOW)
  tab.goto((_ROOT / page).as_uri())
  tab.screenshot(path=_ROOT / _IMAGES / f'{name}.png')
  print(f'docs/images/{name}.png')


if __name__ == '__main__':
  main()
