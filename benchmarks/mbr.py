"""Minimum Bayes risk against greedy search, beams and sampling: quality and seconds on a model trained in the same run.

    python benchmarks/mbr.py sentences [--steps 1000] [--examples 300]
    python benchmarks/mbr.py keywords [--steps 300] [--examples 512]

`sentences` trains a byte-level model to write the vowels into pieces of 6 to 12 words of the embedded Python
documentation: 'th rtrn vl s lst' has several likely answers, which share most letters. The test pieces are from
documents that training does not see. `keywords` trains the recipe `keyword_cloze`, whose answers are single words.
Prints BLEU and chrF of sacrebleu and exact match in percent, and the seconds without compilation, those of the choice
on the host also alone in one thread.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import csv
import functools
import pathlib
import random
import re
import tempfile

import common

_WORD = re.compile(r"[A-Za-z][a-z']*[,.]?")
_MOST_SAMPLES = 32
_LENGTHS = {'inputs': 72, 'targets': 112}


def main() -> None:
  """Train, decode and print the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('task', choices=['sentences', 'keywords'])
  parser.add_argument('--steps', type=common.positive)
  parser.add_argument('--examples', type=common.positive)
  args = parser.parse_args()
  common.start_like_commands()
  from t5x_lite import notebook
  from t5x_lite.command_line import cli

  steps = args.steps or {'sentences': 1000, 'keywords': 300}[args.task]
  num_examples = args.examples or {'sentences': 300, 'keywords': 512}[args.task]
  before = common.matmul_gflops()
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    flags = []
    if args.task == 'sentences':
      flags = _sentence_flags(folder)
    status = cli.main(
      [
        'train',
        '--gin_file=recipes/keyword_cloze.gin',
        f'--gin.MODEL_DIR={folder}/run',
        f'--gin.TRAIN_STEPS={steps}',
        '--gin.train_script.train.infer_eval_dataset_cfg=None',
        *flags,
      ]
    )
    if status:
      raise SystemExit(status)
    opened = notebook.open_run(folder / 'run', batch_size=64, output_dir=f'{folder}/notebook')
    rows = _decode_all(opened, _test_pairs(args.task)[:num_examples])
  common.print_table(
    f'{args.task}: {steps} steps, {num_examples} examples; matmul {before:.0f} GFLOP/s before, '
    f'{common.matmul_gflops():.0f} after',
    rows,
    ['decoding', 'BLEU', 'chrF', 'exact match', 's', 'choice on the host, s'],
  )


def _sentence_flags(folder: pathlib.Path) -> list[str]:
  """Write the training pairs as a table, and return the flags that train on them."""
  with (folder / 'train.csv').open('w', newline='', encoding='utf-8') as stream:
    writer = csv.writer(stream)
    writer.writerow(['without_vowels', 'sentence'])
    writer.writerows(_sentence_pairs('train'))
  return [
    f'--train_file={folder}/train.csv',
    '--inputs=without_vowels',
    '--targets=sentence',
    f'--gin.TASK_FEATURE_LENGTHS={_LENGTHS}',
    '--gin.BATCH_SIZE=32',
    '--gin.network.T5Config.mlp_dim=256',
    '--gin.LEARNING_RATE=0.004',
  ]


def _sentence_pairs(split: str) -> list[tuple[str, str]]:
  """Return (piece without vowels, piece) of the documents of a split, in a fixed random order."""
  from t5x_lite.data import corpora

  draw = random.Random(0)
  pieces = set()
  for text in corpora.python_docs(split):
    pieces.update(_pieces(text, draw))
  ordered = sorted(pieces)
  draw.shuffle(ordered)
  return [(_without_vowels(piece), piece) for piece in ordered]


def _pieces(text: str, draw: random.Random) -> Iterator[str]:
  """Yield pieces of 6 to 12 plain words that follow each other; a piece begins 3 words after the one before."""
  words = text.split()
  start = 0
  while start + 6 <= len(words):
    piece = words[start : start + draw.randint(6, 12)]
    if len(piece) >= 6 and all(_WORD.fullmatch(word) for word in piece):
      yield ' '.join(piece)
      start += 3
    else:
      start += 1


def _without_vowels(text: str) -> str:
  """Return the text without its vowels; a word of vowels only becomes '-'."""
  words = [re.sub('[aeiouAEIOU]', '', word) or '-' for word in text.split()]
  return ' '.join(words)


def _test_pairs(task: str) -> list[tuple[str, str]]:
  """Return (input, target) of the validation split."""
  from t5x_lite.data import corpora

  if task == 'sentences':
    return _sentence_pairs('validation')
  return [(example.line, example.keyword) for example in corpora.python_keyword_cloze('validation')]


def _algorithms() -> dict[str, tuple[object, Mapping[str, object]]]:
  """Return the decoding function and the options of the prediction by name."""
  from t5x_lite import decoding

  sample = functools.partial(decoding.temperature_sample, temperature=1.0, topk=0)
  algorithms = {
    'greedy search': (decoding.greedy_search, {}),
    'beam search, 4 beams': (decoding.beam_search, {'num_decodes': 4}),
    'one sample': (sample, {}),
  }
  for utility in ('chrf', 'bleu'):
    for num_samples in (16, _MOST_SAMPLES):
      rule = decoding.MinimumBayesRisk(num_samples=num_samples, utility=utility)
      algorithms[f'minimum Bayes risk, {num_samples} samples, {utility}'] = (rule, {})
  return algorithms


def _text_inference(opened, decode_fn):
  """Return a `TextInference` of the run with another decoding function."""
  from t5x_lite.interactive import texts

  return texts.TextInference(
    opened.model.with_decode_fn(decode_fn),
    opened.partitioner,
    opened.train_state_axes,
    opened.task_feature_lengths,
    64,
  )


def _samples(opened, inputs: Sequence[str]) -> list[list[str]]:
  """Return the largest number of samples of each input, to measure the choice alone."""
  from t5x_lite import decoding

  sample = functools.partial(decoding.temperature_sample, temperature=1.0, topk=0)
  inference = _text_inference(opened, sample)
  ids, _ = inference.predict(
    opened.train_state,
    inference.reader.read(inputs),
    num_decodes=_MOST_SAMPLES,
    return_all_decodes=True,
  )
  return [inference.text(each) for each in ids]


def _decode_all(opened, pairs: Sequence[tuple[str, str]]) -> list[list[object]]:
  """Return a row of the table for each algorithm.

  Args:
    opened: the `InteractiveModel` of the run.
    pairs: (input, target) of each example.
  """
  from t5x_lite.data import text_metrics
  from t5x_lite.decoding import MinimumBayesRisk

  metric_fns = text_metrics.metrics('bleu', 'chrf', 'exact_match')
  targets = [target for _, target in pairs]
  inputs = [text for text, _ in pairs]
  samples = _samples(opened, inputs)
  rows = []
  for name, (decode_fn, options) in _algorithms().items():
    inference = _text_inference(opened, decode_fn)
    examples = inference.reader.read(inputs)
    predict = functools.partial(inference.predict, opened.train_state, **options)
    predict(examples[:1])  # compiles the program, whose batches have 64 rows
    seconds, (ids, _) = common.timed(lambda predict=predict, examples=examples: predict(examples))
    predictions = [inference.text(each) for each in ids]
    bleu, chrf, exact_match = (
      float(next(iter(metric_fn(targets, predictions).values()))) for metric_fn in metric_fns
    )
    choice = '-'
    if isinstance(decode_fn, MinimumBayesRisk):
      choice, _ = common.timed(
        lambda rule=decode_fn: [rule.choose(each[: rule.num_samples]) for each in samples]
      )
    rows.append([name, bleu, chrf, 100 * exact_match, seconds, choice])
    print(f'{name}: BLEU {bleu:.2f}  chrF {chrf:.2f}', flush=True)
  return rows


if __name__ == '__main__':
  main()
