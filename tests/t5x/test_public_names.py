"""The table of T5X's names is compared with a checkout; a small folder stands for it here."""

from t5x_lite.checkpoints import config
from tests.t5x import public_names


def test_names_without_a_row_and_modules_that_do_not_exist_are_counted(tmp_path, capsys):
  folder = tmp_path / 't5x'
  folder.mkdir()
  (folder / 'utils.py').write_text(
    'import os\n'
    'X, get_vocabulary = 1, 2\n'
    'FLAGS: int = 3\n'
    'def _private(): pass\n'
    'if X:\n  def get_dataset(): pass\n'
    'class Unknown: pass\n'
    "if __name__ == '__main__':\n  main = 1\n"
  )
  methods = [name for name in (*config.CALLED, *config.NOT_CALLED) if name != 'latest_step']
  lines = [f'  def {name}(self): pass\n' for name in (*methods, '_new_step')]
  (folder / 'checkpoints.py').write_text(f'class SaveBestCheckpointer:\n{"".join(lines)}')
  (folder / 'new_module.py').write_text('')
  (folder / 'utils_test.py').write_text('A = 1\n')
  count = public_names.check(str(tmp_path))
  first, *wrong = capsys.readouterr().out.splitlines()
  assert first.startswith('3 of ') and '1 have a sentence' in first
  wrong = [line.strip() for line in wrong]
  assert len(wrong) == count
  assert [line for line in wrong if 'in the table, and not a module' not in line] == [
    '_new_step is only in checkpoints.config, or only in T5X: a method that a class overrides',
    'latest_step is only in checkpoints.config, or only in T5X: a method that a class overrides',
    't5x.new_module is a module of T5X, and not in the table',
    't5x.utils.X is neither here nor in the table',
    't5x.utils.Unknown is neither here nor in the table',
    "Files of the folder t5x with the names of T5X's are not run: t5x_lite has their functions. These define names "
    'that it does not have: t5x/utils.py (Unknown). Move what you need to a module with another name.',
    't5x.new_module counts as a module of a fork',
  ]
  assert 't5x.train is in the table, and not a module of T5X' in wrong
