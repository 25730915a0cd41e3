"""Run every command of README and docs in the order and the environment in which a reader meets it: `make test-docs`.

Each page gets a copy of the checkout, as it is after `make train`, in build/test_docs. The files that a page shows
under their names (a line that ends with "`name.gin`:" before the fence) are written first. Then each `sh` fence runs in
a `bash -e` of its own, and each other `python` fence in one Python process per page. Comments directly before a fence:

- `<!-- not run: REASON -->`: the fence does not run, for one of `REASONS`;
- `<!-- exit status: N -->`: the fence must end with this status instead of 0.

Where the next fence of the page is `text`, it shows the output: each of its lines must have the form of a line of the
output, with other numbers. A line `...` stands for lines that are left out, and rows of tables may differ.

What would not run, or could fail without a sign, is an error: another name of a language, such as `bash`, and what
hides the status of a command, such as `||`.
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time

from tests.mutation import __main__ as mutation_runner

_ROOT = pathlib.Path(__file__).parents[2]
REASONS = ('network', 'accelerator', 'store', 'program')
MAX_NOT_RUN = 15
# Seconds of a fence, and of all pages, on 2 cores that do nothing else.
FENCE_LIMIT = 180.0
TOTAL_LIMIT = 900.0
_SHOWN_LINES = 20
# A line before a fence that shows a file, and the languages of such fences by the suffix of the file.
_NAME = re.compile(r'`([\w./-]+\.(gin|py|csv|tsv|jsonl|sbatch|yaml))`:$')
_LANGUAGES = {'gin': ('gin',), 'py': ('python',), 'sbatch': ('bash',), 'yaml': ('yaml',)}
_DATA_LANGUAGES = ('', 'csv', 'json', 'jsonl', 'text', 'tsv')
# Languages of fences that are shown only; `{` begins a directive of the site.
_SHOWN_LANGUAGES = re.compile(r'|console|csv|gin|json|jsonl|text|toml|tsv|yaml|\{.*')
_OTHER_FENCE = re.compile(r'[\s>]*(```|~~~)')
# `bash -e` continues after these: `||`, `&&` before another command, `!`, a command in the background, `set +e`.
_HIDING = re.compile(r'\|\||&&.*\n\s*\S|^\s*!\s|(?<![&>])&(?=\s)|\bset \+', re.MULTILINE)
_COMMENT = re.compile(r'<!-- (not run|exit status): (.*?) -->$')
_NUMBER = re.compile(r'[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?[kMGT]?\b')
_TABLE_RULE = re.compile(r'[- ]*--[- ]*')
_COPIED_VARIABLES = ('LANG', 'LC_ALL', 'PYTHONPATH', 'USER')
# A page's Python process: it gets [file, line, text] from its standard input, and answers with a status.
_PYTHON = """\
import json, os, sys, traceback, types
requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), 'w')
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
module = sys.modules['__main__'] = types.ModuleType('__main__')
for request in requests:
  file, line, text = json.loads(request)
  status = 0
  try:
    exec(compile('\\n' * line + text, file, 'exec'), vars(module))
  except BaseException:
    traceback.print_exc()
    status = 1
  sys.stdout.flush()
  print(status, file=replies, flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Fence:
  """A fenced block of a page.

  Attributes:
    page: path of the page, relative to the checkout.
    line: number of the line that opens the fence, from 1.
    language: text after the backquotes, such as `sh`.
    text: contents, without the indentation of the fence.
    name: file that the fence shows; empty for others.
    reason: why the fence does not run; empty for others.
    status: exit status with which a command must end.
    output: the output of a command that the page shows; empty if it shows none.
  """

  page: str
  line: int
  language: str
  text: str
  name: str = ''
  reason: str = ''
  status: int = 0
  output: str = ''

  @property
  def place(self) -> str:
    """Page and line."""
    return f'{self.page}:{self.line}'

  @property
  def is_command(self) -> bool:
    """True if the fence runs unless it has a reason."""
    return self.language == 'sh' or (self.language == 'python' and not self.name)


def pages() -> list[str]:
  """Return the pages whose commands run, relative to the checkout."""
  found = [_ROOT / 'README.md', *sorted((_ROOT / 'docs').glob('*.md'))]
  return [path.relative_to(_ROOT).as_posix() for path in found]


def read_fences(page: str, text: str) -> list[Fence]:
  """Return the fences of a page in their order.

  Args:
    page: path of the page for messages.
    text: the page.

  Raises:
    ValueError: a fence is not closed, has another language or form, or hides a failure; or a comment is not directly
      before a fence or has an invalid value.
  """
  fences = []
  lines = iter(enumerate(text.splitlines(), start=1))
  named = None
  comments = {}
  number = 0
  for number, line in lines:
    opening = re.fullmatch(r'( *)(`{3,})(.*)', line)
    if opening is None:
      if _OTHER_FENCE.match(line):
        raise ValueError(f'{page}:{number}: a fence must begin with spaces and ```, got {line!r}.')
      if line.strip():
        if comments:
          raise ValueError(f'{page}:{number}: a fence must follow the comment directly.')
        named = _NAME.search(line)
      if comment := _COMMENT.search(line.strip()):
        comments[comment[1]] = comment[2]
      continue
    indent, backquotes, language = opening.groups()
    contents = []
    for _, inner in lines:
      if inner.strip() == backquotes:
        break
      contents.append(inner.removeprefix(indent) + '\n')
    else:
      raise ValueError(f'{page}:{number}: the fence is not closed.')
    reason = comments.get('not run', '')
    if 'not run' in comments and reason not in REASONS:
      raise ValueError(
        f'{page}:{number}: a fence is not run for one of {", ".join(REASONS)}, got {reason!r}.'
      )
    status = comments.get('exit status', '0')
    if not status.isdecimal():
      raise ValueError(f'{page}:{number}: an exit status must be a number, got {status!r}.')
    name = ''
    if named and language in _LANGUAGES.get(named[2], _DATA_LANGUAGES):
      name = named[1]
    fence = Fence(page, number, language, ''.join(contents), name, reason, int(status))
    if not (fence.is_command or fence.name or _SHOWN_LANGUAGES.fullmatch(language)):
      raise ValueError(
        f'{page}:{number}: the language must be sh, python or one of data, got {language!r}.'
      )
    if language == 'sh':
      _check_commands(fence)
    if language == 'text' and not name and fences and fences[-1].is_command:
      fences[-1] = dataclasses.replace(fences[-1], output=fence.text)
    if comments and not fence.is_command:
      raise ValueError(f'{page}:{number}: the fence is no command, so a comment has no effect.')
    fences.append(fence)
    named = None
    comments = {}
  if comments:
    raise ValueError(f'{page}:{number}: a fence must follow the comment directly.')
  return fences


def _check_commands(fence: Fence) -> None:
  text = fence.text.replace('\\\n', '')
  if (hiding := _HIDING.search(text)) and not fence.reason:
    raise ValueError(f'{fence.place}: {hiding[0].split()[0]!r} hides the failure of a command.')
  if fence.status and len(text.splitlines()) > 1:
    raise ValueError(
      f'{fence.place}: a fence with an exit status must have one command, which ends with it.'
    )


def form(line: str) -> str:
  """Return a line of output with 0 for each number, and single spaces."""
  return ' '.join(_NUMBER.sub('0', line).split())


def lines_of_another_form(shown: str, printed: str) -> list[str]:
  """Return the lines of a shown output that do not have the form of a printed line.

  Args:
    shown: output on a page, which may be shortened.
    printed: output of the program.
  """
  forms = {form(line) for line in printed.splitlines()}
  others = []
  is_row = False
  for line in shown.splitlines():
    if is_row and line.strip():
      continue
    is_row = _TABLE_RULE.fullmatch(line) is not None
    expected = form(line)
    beginning = expected.removesuffix('...')
    if expected.endswith('...') and any(each.startswith(beginning.rstrip()) for each in forms):
      continue
    if expected and expected not in forms:
      others.append(line)
  return others


def not_run(fences: Sequence[Fence]) -> list[Fence]:
  """Return the fences that have a reason not to run.

  Raises:
    ValueError: there are more than `MAX_NOT_RUN`.
  """
  found = [fence for fence in fences if fence.reason]
  if len(found) > MAX_NOT_RUN:
    places = ', '.join(fence.place for fence in found)
    raise ValueError(f'At most {MAX_NOT_RUN} fences may not run, got {len(found)}: {places}.')
  return found


def write_files(fences: Sequence[Fence], folder: pathlib.Path) -> None:
  """Write the files that fences show; of several with one name, the first."""
  written = set()
  for fence in fences:
    if fence.name and fence.name not in written:
      _write_file(fence, folder)
      written.add(fence.name)


def _write_file(fence: Fence, folder: pathlib.Path) -> None:
  path = folder / fence.name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(fence.text, encoding='utf-8')


@dataclasses.dataclass(frozen=True)
class Result:
  """How a fence has run.

  Attributes:
    fence: the fence.
    seconds: duration.
    failure: why it has failed, with the end of the output; empty if it has not.
  """

  fence: Fence
  seconds: float
  failure: str


class Page:
  """Runs the fences of a page in its folder."""

  def __init__(
    self, folder: pathlib.Path, home: pathlib.Path, cache: pathlib.Path, fence_limit: float
  ):
    """Store the arguments.

    Args:
      folder: copy of the checkout; commands run in it.
      home: an empty folder for everything that programs keep of a user.
      cache: folder of caches that pages share.
      fence_limit: seconds after which a fence is killed.
    """
    self._folder = folder
    self._fence_limit = fence_limit
    self._log = home / 'output.txt'
    self._shell: subprocess.Popen | None = None
    self._python: subprocess.Popen | None = None
    self._is_stopped = False
    self._temporary = home / 'tmp'
    self._environment = {
      name: os.environ[name] for name in _COPIED_VARIABLES if name in os.environ
    } | {
      'HOME': str(home),
      'HTTPS_PROXY': 'http://127.0.0.1:9',  # no network: nothing listens at this port
      'HTTP_PROXY': 'http://127.0.0.1:9',
      'JAX_PLATFORMS': 'cpu',
      'NO_PROXY': 'localhost,127.0.0.1',
      'PATH': os.pathsep.join([os.path.join(sys.prefix, 'bin'), os.environ['PATH']]),
      'PIP_NO_INDEX': '1',
      'TMPDIR': str(self._temporary),
      'XDG_CACHE_HOME': str(cache),
    }

  def run(self, fences: Sequence[Fence], deadline: float) -> Iterator[Result]:
    """Run the commands among `fences` in their order, also after one has failed.

    Args:
      fences: all fences of the page.
      deadline: value of `time.monotonic()` at which running commands are killed, and no other is started.
    """
    self._temporary.mkdir(parents=True)
    write_files(fences, self._folder)
    try:
      for fence in fences:
        if self._is_stopped:
          return
        if fence.name:
          _write_file(fence, self._folder)
        elif fence.is_command and not fence.reason:
          yield self._run(fence, deadline)
    finally:
      if self._python is not None:
        _kill(self._python)

  def stop(self) -> None:
    """Kill what runs, in another thread, and start nothing else."""
    self._is_stopped = True
    for process in (self._shell, self._python):
      if process is not None:
        _kill(process)

  def _run(self, fence: Fence, deadline: float) -> Result:
    self._log.write_bytes(b'')
    begin = time.monotonic()
    limit = min(self._fence_limit, deadline - begin)
    if limit <= 0:
      return Result(fence, 0.0, 'The time of all pages is over.')
    if fence.language == 'sh':
      status = self._run_shell(fence, limit)
    else:
      status = self._run_python(fence, limit)
    failure = ''
    output = self._log.read_text(encoding='utf-8', errors='replace')
    if status is None:
      failure = f'It was killed after {limit:.0f} s.'
    elif status != fence.status:
      failure = f'The exit status must be {fence.status}, got {status}.'
    elif others := lines_of_another_form(fence.output, output):
      failure = '\n'.join(
        ['These lines of the page are not in the output:', *others, 'The output:']
      )
    if failure:
      failure = '\n'.join([failure, *output.splitlines()[-_SHOWN_LINES:]])
    return Result(fence, time.monotonic() - begin, failure)

  def _run_shell(self, fence: Fence, limit: float) -> int | None:
    """Return the exit status of a fence; None if it was killed."""
    # The trap and the text begin in line 1 of the script, which is the first line within the fence.
    trap = (
      f'trap \'echo "{fence.page}:$((LINENO + {fence.line})): failed: $BASH_COMMAND" >&2\' ERR; '
    )
    with open(self._log, 'ab') as log:
      process = subprocess.Popen(
        ['bash', '-eo', 'pipefail', '-c', trap + fence.text],
        cwd=self._folder,
        env=self._environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
      )
    self._shell = process
    try:
      return process.wait(limit)
    except subprocess.TimeoutExpired:
      return None
    finally:
      _kill(process)  # also what the fence has left in the background

  def _run_python(self, fence: Fence, limit: float) -> int | None:
    """Return 0, or another status if the fence raises or ends the process.

    None if it was killed, and with it the page's namespace.
    """
    if self._python is None:
      with open(self._log, 'ab') as log:
        self._python = subprocess.Popen(
          [sys.executable, '-c', _PYTHON],
          cwd=self._folder,
          env=self._environment,
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=log,
          start_new_session=True,
        )
    python = self._python
    request = json.dumps([str(self._folder / fence.page), fence.line, fence.text])
    try:
      python.stdin.write(f'{request}\n'.encode())
      python.stdin.flush()
      is_ready, _, _ = select.select([python.stdout], [], [], limit)
      reply = python.stdout.readline() if is_ready else b''
    except BrokenPipeError:
      reply = b''
    if reply:
      return int(reply)
    _kill(python)
    self._python = None
    return (python.returncode or 1) if is_ready else None


def _kill(process: subprocess.Popen) -> None:
  """Kill a process and its group."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()
  for stream in (process.stdin, process.stdout):
    if stream is not None:
      stream.close()


def copy_checkout(target: pathlib.Path) -> None:
  """Copy the files of the checkout that git does not ignore, and what `make train` has made.

  Raises:
    FileNotFoundError: `make train` did not run.
  """
  run = 'runs/keyword_cloze'
  if not (_ROOT / run).is_dir():
    raise FileNotFoundError(f'{run} is missing. Run `make train`, then rerun the command.')
  mutation_runner.copy_checkout(target)
  shutil.copytree(_ROOT / run, target / run)
  # `make` finds an environment, and can delete no more than these links.
  environment = target / '.venv'
  environment.mkdir()
  for name in ('bin', 'lib'):
    (environment / name).symlink_to(os.path.join(sys.prefix, name))
  shutil.copy(os.path.join(sys.prefix, 'pyvenv.cfg'), environment)
  (environment / '.installed').write_text(f'{target}\n')


def _run_page(runner: Page, page: str, fences: Sequence[Fence], deadline: float) -> list[Result]:
  """Run a page, print its failures and a line about it, and return its results."""
  results = []
  for result in runner.run(fences, deadline):
    results.append(result)
    if result.failure:
      text = f'{result.fence.place}: {result.failure}\n\nThe fence:\n{result.fence.text}'
      print(text, flush=True)
  seconds = sum(result.seconds for result in results)
  failed = sum(bool(result.failure) for result in results)
  end = f', {failed} failed' if failed else ''
  print(f'{page:<40} {len(results):3} fences run {seconds:6.1f} s{end}', flush=True)
  return results


def main(argv: Sequence[str] | None = None) -> int:
  """Run the commands of pages and return 1 if one has failed."""
  parser = argparse.ArgumentParser(description='Run the commands of README and docs.')
  parser.add_argument('pages', nargs='*', help='pages such as docs/storage.md; default: all')
  parser.add_argument('--jobs', type=int, default=2, help='number of pages at a time')
  parser.add_argument(
    '--patience', type=float, default=1.0, help='factor of all limits of time, for a busy machine'
  )
  args = parser.parse_args(argv)
  if unknown := sorted(set(args.pages) - set(pages())):
    parser.error(f'pages must be among {", ".join(pages())}; got {", ".join(unknown)}.')
  begin = time.monotonic()
  fences = {page: read_fences(page, (_ROOT / page).read_text('utf-8')) for page in pages()}
  skipped = not_run([fence for page in fences.values() for fence in page])
  chosen = list(dict.fromkeys(args.pages)) or list(fences)
  # Long pages first, so that none is left alone at the end.
  chosen.sort(key=lambda page: -sum(fence.is_command for fence in fences[page]))
  work = _ROOT / 'build/test_docs'
  deadline = begin + args.patience * TOTAL_LIMIT
  shutil.rmtree(work / 'pages', ignore_errors=True)
  (work / 'cache').mkdir(parents=True, exist_ok=True)
  runners = {}
  for page in chosen:
    folder = work / 'pages' / page.removesuffix('.md').replace('/', '_')
    copy_checkout(folder / 'checkout')
    limit = args.patience * FENCE_LIMIT
    runners[page] = Page(folder / 'checkout', folder / 'home', work / 'cache', limit)
  with futures.ThreadPoolExecutor(args.jobs) as pool:
    jobs = [
      pool.submit(_run_page, runner, page, fences[page], deadline)
      for page, runner in runners.items()
    ]
    try:
      results = [result for job in jobs for result in job.result()]
    except KeyboardInterrupt:
      for runner in runners.values():
        runner.stop()
      raise
  failed = [result.fence.place for result in results if result.failure]
  print(f'\n{len(skipped)} of at most {MAX_NOT_RUN} fences are not run:')
  for fence in skipped:
    print(f'  {fence.place} ({fence.reason}): {fence.text.splitlines()[0]}')
  seconds = time.monotonic() - begin
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  print(
    f'{len(results)} fences of {len(chosen)} pages in {seconds:.0f} s, '
    f'with {used.ru_utime + used.ru_stime:.0f} s of processor time.'
  )
  if failed:
    print(f'{len(failed)} failed, with the reasons above: {", ".join(failed)}.')
  return int(bool(failed))


if __name__ == '__main__':
  # `timeout` and CI end programs by this signal; the fences are in sessions of their own, and would remain.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  sys.exit(main())
