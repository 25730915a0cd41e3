"""The runner of the pages' commands (`make test-docs`) on small pages, and the comments of today's pages."""

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

from tests.repository import docs_commands

_ROOT = pathlib.Path(__file__).parents[2]


def _fences(text):
  return docs_commands.read_fences('page.md', textwrap.dedent(text))


def _run(tmp_path, text, limit=60.0):
  """Runs a page in `tmp_path` and returns its results by the line of the fence."""
  (tmp_path / 'checkout').mkdir()
  page = docs_commands.Page(
    tmp_path / 'checkout', tmp_path / 'home', tmp_path / 'cache', fence_limit=limit
  )
  results = list(page.run(_fences(text), time.monotonic() + 60))
  return {result.fence.line: result for result in results}


_PAGE = """\
    Begin with `first.gin`:

    ```gin
    A = 1
    ```

    ```sh
    cat first.gin second.csv > order.txt
    echo sh 1 >> order.txt
    ```

    ```python
    import sys
    x = 5
    print('python', x, file=open('order.txt', 'a'))
    ```

    - In a list:

      ```sh
      grep -q 'python 5' order.txt
      echo "sh 2 $(cat)" >> order.txt
      ```

    ```csv
    not a command
    ```

    ```python
    with open('order.txt', 'a') as file:
      print('python', x + 1, sys.stdin.read(), file=file)
    ```

    `second.csv`:

    ```csv
    b,c
    ```

    And now `first.gin`:

    ```gin
    A = 2
    ```

    ```sh
    cat first.gin >> order.txt
    ```
    """


def test_fences_run_in_order_with_the_files_of_the_page(tmp_path):
  results = _run(tmp_path, _PAGE)
  assert [result.failure for result in results.values()] == [''] * 5
  order = (tmp_path / 'checkout/order.txt').read_text().split('\n')
  expected = ['A = 1', 'b,c', 'sh 1', 'python 5', 'sh 2 ', 'python 6 ', 'A = 2', '']
  assert order == expected
  assert (tmp_path / 'checkout/first.gin').read_text() == 'A = 2\n'


def test_failures_name_the_command_and_the_others_run(tmp_path):
  results = _run(
    tmp_path,
    """\
    ```sh
    echo before
    ls missing_folder \\
      --all
    echo after
    ```

    ```sh
    false | cat
    ```

    ```python
    x = 1

    raise ValueError('wrong')
    ```

    <!-- exit status: 3 -->
    ```sh
    exit 3
    ```

    <!-- exit status: 3 -->
    ```sh
    true
    ```

    ```python
    import os
    os._exit(7)
    ```

    ```python
    print(x)
    ```

    ```python
    import os
    os._exit(0)
    ```
    """,
  )
  failures = [result.failure.splitlines() for result in results.values()]
  assert failures[0][:2] == ['The exit status must be 0, got 2.', 'before']
  assert 'after' not in failures[0]
  assert failures[0][-1] in (
    'page.md:3: failed: ls missing_folder --all',
    'page.md:4: failed: ls missing_folder --all',  # other versions of bash
  )
  assert failures[1][0] == 'The exit status must be 0, got 1.'
  assert any('page.md", line 15' in line for line in failures[2])
  assert failures[2][-1] == 'ValueError: wrong'
  assert failures[3] == []
  assert failures[4] == ['The exit status must be 3, got 0.']
  assert failures[5] == ['The exit status must be 0, got 7.']
  assert failures[6][-1] == "NameError: name 'x' is not defined"  # in a new process
  assert failures[7] == ['The exit status must be 0, got 1.']  # the lines after it did not run


def test_a_fence_that_hangs_is_killed(tmp_path):
  results = _run(
    tmp_path,
    """\
    ```sh
    echo begun
    coproc sleep 60
    sleep 60
    ```

    ```python
    import time
    time.sleep(60)
    ```
    """,
    limit=1.0,
  )
  assert results[1].failure.splitlines() == ['It was killed after 1 s.', 'begun']
  assert results[7].failure == 'It was killed after 1 s.'
  assert sum(result.seconds for result in results.values()) < 30


def test_commands_see_nothing_of_the_user(tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--of_the_user')
  results = _run(
    tmp_path,
    f"""\
    ```sh
    test -z "$XLA_FLAGS"
    test "$HOME" = {tmp_path}/home
    test "$JAX_PLATFORMS" = cpu
    command -v python
    ```
    """,
  )
  assert results[1].failure == ''


def test_a_fence_after_a_name_is_the_file_only_in_its_language():
  (fence,) = _fences('The log of `recipes/mine.gin`:\n\n```text\nstep 1\n```')
  assert not fence.name
  (fence,) = _fences('Run `recipes/mine.gin`:\n\n```sh\nls\n```')
  assert not fence.name and fence.is_command


def test_reasons_are_read_and_counted():
  reasons = docs_commands.REASONS
  text = '\n\n'.join(f'<!-- not run: {reason} -->\n```sh\nfalse\n```' for reason in reasons)
  fences = _fences(text)
  assert [fence.reason for fence in docs_commands.not_run(fences)] == list(reasons)
  assert [fence.line for fence in fences] == [2, 7, 12, 17]
  with pytest.raises(ValueError, match='At most 15 fences may not run, got 16: page.md:2, '):
    docs_commands.not_run(fences * 4)


def test_fences_with_a_reason_do_not_run(tmp_path):
  assert _run(tmp_path, '<!-- not run: network -->\n```sh\nfalse\n```') == {}


@pytest.mark.parametrize(
  'text, message',
  [
    ('<!-- not run: too slow -->\n```sh\nfalse\n```', "page.md:2: .*, got 'too slow'"),
    ('<!-- exit status: three -->\n```sh\nfalse\n```', "page.md:2: .*, got 'three'"),
    ('<!-- not run: network -->\nText\n\n```sh\nfalse\n```', 'page.md:2: a fence must follow'),
    ('<!-- not run: network -->\n```text\nfalse\n```', 'page.md:2: .* no command'),
    ('<!-- not run: network -->\n', 'page.md:1: a fence must follow'),
    ('Text\n\n```sh\nfalse\n', 'page.md:3: the fence is not closed'),
    ('```bash\nfalse\n```', "page.md:1: the language must be sh, .*, got 'bash'"),
    ('```Python\n1 / 0\n```', "page.md:1: .*, got 'Python'"),
    ('~~~sh\nfalse\n~~~', "page.md:1: a fence must begin with .*, got '~~~sh'"),
    ('> ```sh\n> false\n> ```', 'page.md:1: a fence must begin with'),
    ('-\ta\n\n\t```sh\n\tfalse\n\t```', 'page.md:3: a fence must begin with'),
    ('```sh\nfalse || true\n```', "page.md:1: '\\|\\|' hides"),
    ('```sh\nfalse && \\\n  ls\nls\n```', "page.md:1: '&&' hides"),
    ('```sh\n! false\n```', "page.md:1: '!' hides"),
    ('```sh\nfalse &\nwait\n```', "page.md:1: '&' hides"),
    ('```sh\nset +e\nfalse\n```', "page.md:1: 'set' hides"),
    ('<!-- exit status: 1 -->\n```sh\nfalse\nfalse\n```', 'page.md:2: .* must have one command'),
  ],
)
def test_invalid_comments_and_fences(text, message):
  with pytest.raises(ValueError, match=message):
    _fences(text)


def test_commands_whose_failure_shows():
  for text in ('ls >& log', 'ls > log 2>&1', 'cd a && \\\n  ls', 'for a in b; do\n  ls\ndone'):
    assert _fences(f'```sh\n{text}\n```')[0].is_command


def test_the_end_of_the_runner_ends_its_commands(tmp_path):
  """By `timeout` or CI, which send SIGTERM."""
  for name in ('repository/__init__.py', 'repository/docs_commands.py', 'mutation'):
    target = tmp_path / 'tests' / name
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copytree if (_ROOT / 'tests' / name).is_dir() else shutil.copy
    copy(_ROOT / 'tests' / name, target)
  (tmp_path / 'runs/keyword_cloze').mkdir(parents=True)
  pid = tmp_path / 'pid'
  (tmp_path / 'README.md').write_text(
    f'```sh\necho $$ > {pid}.new\nmv {pid}.new {pid}\nexec sleep 300\n```\n'
  )
  subprocess.run(['git', 'init', '-q', tmp_path], check=True)
  runner = subprocess.Popen(
    [sys.executable, '-m', 'tests.repository.docs_commands'],
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': str(tmp_path)},
    stderr=subprocess.DEVNULL,
  )
  end = time.monotonic() + 60
  while not pid.exists():
    assert runner.poll() is None and time.monotonic() < end
    time.sleep(0.05)
  runner.terminate()
  assert runner.wait(60) != 0
  with pytest.raises(ProcessLookupError):
    os.kill(int(pid.read_text()), 0)


def test_unknown_pages(capsys):
  with pytest.raises(SystemExit):
    docs_commands.main(['docs/no_page.md'])
  assert 'got docs/no_page.md.' in capsys.readouterr().err


def test_todays_pages_have_few_fences_that_do_not_run():
  fences = [
    fence
    for page in docs_commands.pages()
    for fence in docs_commands.read_fences(page, (_ROOT / page).read_text(encoding='utf-8'))
  ]
  assert sum(fence.is_command for fence in fences) > 50
  docs_commands.not_run(fences)


_SHOWN = """\
    ```sh
    echo '[process 0] step 500/500 (100%)  loss 0.2105  27.5k tokens/s  took 2:06'
    echo 'target  prediction'
    echo '------  ----------'
    echo 'if      else'
    echo 'Saved.'
    ```

    The output:

    ```text
    SHOWN
    ```
    """


@pytest.mark.parametrize(
  'shown, is_found',
  [
    ('[process 0] step 500/500 (100%)  loss 2.1e-05  305k tokens/s  took 12:06', True),
    ('[process 0] step 500/500 ...', True),
    ('...', True),
    ('[process 0] step 500/500 (100%)  accuracy 0.2105  27.5k tokens/s  took 2:06', False),
    ('[process 0] stop 500/500 ...', False),
    ('Saved it.', False),
  ],
)
def test_shown_lines_have_the_form_of_the_output(tmp_path, shown, is_found):
  failure = _run(tmp_path, _SHOWN.replace('SHOWN', shown))[1].failure
  assert bool(failure) != is_found
  assert is_found or shown in failure


def test_rows_of_shown_tables_may_differ(tmp_path):
  rows = 'target  prediction\n    ------  ----------\n    for     while\n\n    Saved.'
  assert not _run(tmp_path, _SHOWN.replace('SHOWN', rows))[1].failure


def test_the_program_prints_pages_failures_and_reasons(tmp_path, monkeypatch, capsys):
  (tmp_path / 'docs').mkdir()
  (tmp_path / 'README.md').write_text('```sh\ntrue\n```\n')
  (tmp_path / 'docs/page.md').write_text(
    '<!-- not run: network -->\n```sh\nfalse\n```\n\n```sh\necho wrong && false\n```\n'
  )
  monkeypatch.setattr(docs_commands, '_ROOT', tmp_path)
  monkeypatch.setattr(docs_commands, 'copy_checkout', lambda target: target.mkdir(parents=True))
  assert docs_commands.main(['README.md']) == 0
  assert docs_commands.main([]) == 1
  lines = capsys.readouterr().out.splitlines()
  assert any(line.startswith('README.md ') and ' 1 fences run ' in line for line in lines)
  assert any(line.startswith('docs/page.md ') and line.endswith(', 1 failed') for line in lines)
  assert 'docs/page.md:6: The exit status must be 0, got 1.' in lines and 'wrong' in lines
  assert '  docs/page.md:2 (network): false' in lines
  assert lines[-1] == '1 failed, with the reasons above: docs/page.md:6.'
