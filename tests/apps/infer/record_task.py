"""Task of files whose records have other keys than 'inputs' and 'targets'; imported by its name."""

from t5x_lite import data

data.register_builtin_task(
  data.file_task(
    name='questions_of_records',
    splits={'train': 'no_such_file.jsonl'},
    format='jsonl',
    keys={'inputs': 'question', 'targets': 'answer'},
    vocabulary=data.ByteVocabulary(extra_ids=125),
  )
)
