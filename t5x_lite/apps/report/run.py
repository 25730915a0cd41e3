"""Write one page about runs, which needs no other file and no network."""

from collections.abc import Iterator, Sequence
import itertools
import os
from typing import NamedTuple

import t5x_lite
from t5x_lite.apps.common import curves
from t5x_lite.apps.common import figures
from t5x_lite.apps.common import html_page
from t5x_lite.apps.common import metric_points
from t5x_lite.apps.report import run_record
from t5x_lite.apps.report import sections
from t5x_lite.apps.report.run_record import RunRecord
from t5x_lite.errors import ConfigError
from t5x_lite.storage import files

# Metrics of training that are drawn if they are known, after those that `plot` draws.
_MORE_METRICS = ('gradient_norm', 'timing/steps_per_second')


class _Curves(NamedTuple):
  """Title, caption, kinds of writers and further metrics of a figure."""

  title: str
  caption: str
  kinds: Sequence[str]
  more: Sequence[str] = ()


_CURVES = (
  _Curves(
    'Training curves',
    'A value is a mean over the steps since the value before. Of a long curve, each column of pixels shows the '
    'smallest and the largest value.',
    curves.TRAINING,
    _MORE_METRICS,
  ),
  _Curves(
    'Evaluation curves',
    'Loss and accuracy are those of the given targets (teacher forcing); metrics of inference compare decoded texts.',
    curves.EVALUATION,
  ),
)


def report(
  model_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None
) -> files.Path:
  """Write a page about runs; a run may still be training.

  Args:
    model_dirs: model directories; several runs are compared.
    out: file to write, which is replaced if it exists. None is `report.html` in the first directory.

  Returns:
    The file.

  Raises:
    ConfigError: matplotlib is missing, the name of the file does not end with .html, or it cannot be written or is a
      link.
    DataError: a directory has no metrics, or a file is not a regular file or too large.
  """
  path = files.path(model_dirs[0]) / 'report.html' if out is None else files.path(out)
  if path.suffix not in ('.html', '.htm'):
    raise ConfigError(
      f'`report.out` must be a file name that ends with .html, got {str(path)!r}. Pass e.g. --out=page.html.'
    )
  files.check_regular(path)
  names = metric_points.run_names(model_dirs)
  folders = dict(zip(names, model_dirs, strict=True))
  runs = [run_record.read(name, folder) for name, folder in folders.items()]
  text = page(runs)
  try:
    files.write(path, text)
  except OSError as error:
    raise ConfigError(
      f'Cannot write the report to {str(path)!r}: {error.strerror}. Choose another --out.'
    ) from error
  return path


def page(runs: Sequence[RunRecord]) -> str:
  """Return the page as text.

  Raises:
    ConfigError: matplotlib is missing.
  """
  title = f'Comparison of {len(runs)} runs'
  lead = ', '.join(html_page.code(run.name) for run in runs)
  if len(runs) == 1:
    title = runs[0].name
    lead = 'One training run of t5x_lite'
  made = html_page.utc_time(runs[0].read_at)
  parts = [
    sections.final_metrics(runs),
    _curves(runs),
    sections.predictions(runs),
    sections.routing(runs),
    sections.lengths(runs),
    sections.time_of_run(runs),
    sections.log(runs),
  ]
  # What differs between runs explains their metrics; the configuration of one run is for looking up.
  place = len(parts) if len(runs) == 1 else 0
  parts.insert(place, sections.configuration(runs))
  lines = [
    html_page.header(title, f'{lead} · {made}'),
    *sections.summary(runs),
    *itertools.chain.from_iterable(parts),
    f'<footer>Made by t5x_lite {t5x_lite.__version__} from the files of the runs, {made}. This page loads nothing '
    'from elsewhere.</footer>',
  ]
  return html_page.page(title, lines, sections.STYLE)


def _curves(runs: Sequence[RunRecord]) -> Iterator[str]:
  """Yield the curves of training and those of evaluation."""
  points = {}
  for run in runs:
    points[run.name] = {writer: metrics.points for writer, metrics in run.metrics.items()}
  chosen = metric_points.default_metrics(points)
  unit = metric_points.loss_unit([run.path for run in runs])
  with figures.figure_style(figures.page_style('t5x_lite.report')):
    for drawn in _CURVES:
      names = dict.fromkeys([*chosen, *drawn.more])
      elements = []
      for form in ('wide', 'narrow'):
        figure = curves.draw(
          points,
          list(names),
          step_label='training step',
          loss_unit=unit,
          sections=[drawn.kinds],
          has_title=False,
          is_narrow=form == 'narrow',
        )
        if figure is not None:
          name = f'{drawn.kinds[0]}-{form}'
          elements.append(figures.svg_element(figure, name, drawn.title))
      if elements:
        yield from html_page.figure(drawn.title, drawn.caption, *elements)
