"""Metrics by name against sacrebleu, rouge-score, scikit-learn, SciPy and T5's own functions, and at their edges."""

import math
import random
import subprocess
import sys
import textwrap

import gin
import numpy as np
import pytest

from t5x_lite import data
from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.data import text_metrics
from t5x_lite.errors import ConfigError, DataError

_NAMES = [
  'accuracy',
  'bleu',
  'bleu_t5',
  'cer',
  'chrf',
  'exact_match',
  'macro_f1',
  'matthews',
  'pearson',
  'perplexity',
  'rouge1',
  'rouge2',
  'rougeL',
  'rougeLsum',
  'spearman',
  'squad',
  'token_f1',
  'wer',
]
_WORDS = [
  'the',
  'a',
  'cat',
  'Cat',
  'sat,',
  'on',
  'mat.',
  'dog;',
  'ran',
  '3.5',
  '(far)',
  'away',
  '“now”',
  'naïve',
  '—',
]


def _text(rng, low=1):
  return ' '.join(rng.choices(_WORDS, k=rng.randint(low, 12)))


def _near(rng, text):
  words = text.split()
  for _ in range(rng.randint(0, 3)):
    words[rng.randrange(len(words))] = rng.choice(_WORDS)
  return ' '.join(words)


def _pairs(count=40, seed=0):
  rng = random.Random(seed)
  targets = [_text(rng) for _ in range(count)]
  return targets, [_near(rng, text) for text in targets]


def _value(name, targets, predictions, key=None):
  (metric,) = data.metrics(name)
  return metric(targets, predictions)[key or name]


@pytest.fixture(scope='module')
def t5_metrics():
  return pytest.importorskip('t5.evaluation.metrics')


# ----------------------------------------------------------------------------------------------------------------------
# References


@pytest.mark.parametrize(
  'name, theirs', [('squad/em', 'squad'), ('squad/f1', 'squad'), ('token_f1', 'squad')]
)
@pytest.mark.parametrize('num_references', [1, 3])
def test_squad_is_t5s(t5_metrics, name, theirs, num_references):
  targets, predictions = _pairs()
  rng = random.Random(1)
  targets = [[text, *(_near(rng, text) for _ in range(num_references - 1))] for text in targets]
  targets += [[''], ['the'], ['word'], ['']]
  predictions += ['', '!', '', 'word']
  expected = getattr(t5_metrics, theirs)(targets, predictions)
  name, _, key = name.partition('/')
  assert _value(name, targets, predictions, key) == pytest.approx(expected[key or 'f1'], rel=1e-12)


def test_bleu_t5_is_t5s_and_bleu_is_sacrebleus(t5_metrics):
  sacrebleu = pytest.importorskip('sacrebleu')
  targets, predictions = _pairs()
  ours = {name: _value(name, targets, predictions) for name in ('bleu', 'bleu_t5', 'chrf')}
  assert ours['bleu_t5'] == pytest.approx(t5_metrics.bleu(targets, predictions)['bleu'], rel=1e-12)
  assert ours['bleu'] == pytest.approx(
    sacrebleu.corpus_bleu(predictions, [targets]).score, rel=1e-12
  )
  assert ours['chrf'] == pytest.approx(
    sacrebleu.corpus_chrf(predictions, [targets]).score, rel=1e-12
  )
  assert abs(ours['bleu'] - ours['bleu_t5']) > 0.1  # the tokenizers differ on these texts
  signatures = {name: value.signature for name, value in ours.items()}
  assert signatures == {
    'bleu': f'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}',
    'bleu_t5': f'nrefs:1|case:mixed|eff:no|tok:intl|smooth:exp|version:{sacrebleu.__version__}',
    'chrf': f'nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{sacrebleu.__version__}',
  }


def test_sacrebleu_gets_all_references():
  sacrebleu = pytest.importorskip('sacrebleu')
  targets, predictions = _pairs()
  rng = random.Random(2)
  others = [_near(rng, text) for text in targets]
  both = [list(pair) for pair in zip(targets, others, strict=True)]
  both[0] = targets[0]  # a single text: one reference
  streams = [targets, [None, *others[1:]]]
  for name, theirs in (('bleu', sacrebleu.corpus_bleu), ('chrf', sacrebleu.corpus_chrf)):
    score = _value(name, both, predictions)
    assert score == pytest.approx(theirs(predictions, streams).score, rel=1e-12)
    assert score > _value(name, targets, predictions) and 'nrefs:var' in score.signature


@pytest.mark.parametrize('name', ['rouge1', 'rouge2', 'rougeL', 'rougeLsum'])
def test_rouge_is_t5s(t5_metrics, name):
  targets, predictions = _pairs(30)
  # Sentences of tokenized texts are lines of rougeLsum.
  targets = [f'{a} . {b}' for a, b in zip(targets, reversed(targets), strict=True)]
  predictions = [f'{b} . {a}' for a, b in zip(predictions, reversed(predictions), strict=True)]
  values = [_value(name, [t], [p]) for t, p in zip(targets, predictions, strict=True)]
  # T5 samples examples with replacement: of one example, the value is that of the example.
  expected = [
    t5_metrics.rouge([t], [p], score_keys=(name,))[name]
    for t, p in zip(targets, predictions, strict=True)
  ]
  assert values == pytest.approx(expected, rel=1e-12) and len(set(values)) > 10
  assert _value(name, targets, predictions) == pytest.approx(np.mean(values), rel=1e-12)
  references = [[t, p] for t, p in zip(targets, predictions, strict=True)]
  assert _value(name, references, predictions) == pytest.approx(
    np.mean([_value(name, [p], [p]) for p in predictions])
  )


def test_metrics_of_labels_are_scikit_learns(t5_metrics):
  sklearn_metrics = pytest.importorskip('sklearn.metrics')
  rng = random.Random(0)
  targets = rng.choices(['yes', 'no', 'maybe'], k=50)
  predictions = [rng.choice([t, t, 'yes', 'unclear']) for t in targets]
  names = sorted(set(targets))
  assert _value('accuracy', targets, predictions) == pytest.approx(
    t5_metrics.accuracy(targets, predictions)['accuracy']
  )
  assert _value('macro_f1', targets, predictions) == pytest.approx(
    100 * sklearn_metrics.f1_score(targets, predictions, labels=names, average='macro')
  )
  assert _value('matthews', targets, predictions) == pytest.approx(
    100 * sklearn_metrics.matthews_corrcoef(targets, predictions)
  )
  numbers = [[names.index(label) if label in names else -1 for label in column]
             for column in (targets, predictions)]  # fmt: skip
  assert _value('macro_f1', *numbers) == pytest.approx(
    t5_metrics.mean_multiclass_f1(num_classes=3)(*numbers)['mean_3class_f1']
  )


@pytest.mark.parametrize('name', ['pearson', 'spearman'])
def test_correlations_are_t5s(t5_metrics, name):
  rng = np.random.default_rng(0)
  targets = rng.integers(0, 6, 40) / 2  # with equal values
  predictions = targets + rng.normal(size=40).round(1)
  texts = [str(number) for number in targets], [f' {number}' for number in predictions]
  expected = getattr(t5_metrics, f'{name}_corrcoef')(targets, predictions)[f'{name}_corrcoef']
  assert _value(name, *texts) == pytest.approx(expected, rel=1e-9)
  assert _value(name, targets, 1e200 * predictions) == pytest.approx(expected, rel=1e-9)
  valid = np.arange(40) % 4 > 0
  guessed = [text if ok else 'no idea' for ok, text in zip(valid, texts[1], strict=True)]
  filled = np.where(valid, predictions, predictions[valid].mean())
  expected = getattr(t5_metrics, f'{name}_corrcoef')(targets, filled)[f'{name}_corrcoef']
  assert _value(name, texts[0], guessed) == pytest.approx(expected, rel=1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# Values that follow from the definition


@pytest.mark.parametrize(
  'name, targets, predictions, expected',
  [
    ('exact_match', ['a', ['b', 'c'], ['d']], ['a', 'c', 'x'], 2 / 3),
    ('exact_match', [['a', 'b']], [['a', 'b']], 1.0),  # postprocessed to lists
    ('token_f1', ['The cat, sat!'], ['a CAT sat down'], 80.0),
    ('token_f1', [['x', 'cat sat']], ['cat'], 200 / 3),
    ('accuracy', ['a', ['b', 'c'], 'a'], ['a', 'c', 'b'], 200 / 3),
    ('matthews', [['a', 'b'], 'a', 'b'], ['b', 'a', 'b'], 100.0),
    # Labels that only predictions have are wrong, and no labels of the mean: f1 of a is 2/3, of b 0.
    ('macro_f1', ['a', 'a', 'b'], ['a', 'x', 'y'], 100 / 3),
    ('cer', ['abcd', 'xy'], ['abed', 'xyz'], 2 / 6),
    ('cer', ['a'], ['bcd'], 3.0),  # more errors than characters
    ('wer', ['the cat sat', 'on  it'], ['the dog sat', 'on it'], 1 / 5),
    ('wer', [['x', 'the cat sat']], ['the cat'], 1 / 3),
    ('spearman', ['1', '2', '3'], ['10', '200', '1e9'], 100.0),
    ('pearson', ['1', '2'], ['nan', 'inf'], 0.0),
    ('pearson', ['1', '2', '3'], ['-1', '', '-3'], -100.0),
    ('pearson', ['1', '2', '3'], [['-1'], None, '5'], 0.0),
  ],
)
def test_values(name, targets, predictions, expected):
  assert _value(name, targets, predictions) == pytest.approx(expected, rel=1e-12)


# BLEU and chrF: the value of sacrebleu for nothing in common.
_EDGES = dict.fromkeys(_NAMES, (0.0, 0.0, 0.0)) | {
  'accuracy': (0.0, 0.0, 100.0),
  'cer': (0.0, 1.0, 0.0),
  'exact_match': (0.0, 0.0, 1.0),
  'macro_f1': (0.0, 0.0, 100.0),
  'wer': (0.0, 1.0, 0.0),
}
_TEXT_NAMES = sorted({*_NAMES} - {'pearson', 'spearman', 'perplexity', 'squad'})


@pytest.mark.parametrize('name', _TEXT_NAMES)
def test_empty_texts_and_no_examples(name):
  found = tuple(
    _value(name, *pair) for pair in (([], []), (['a', 'b'], ['', '']), (['', ''], ['', '']))
  )
  assert found == _EDGES[name]
  assert math.isfinite(_value(name, ['', ''], ['a', 'b']))
  # Of one label there is no correlation.
  if name not in ('matthews',):
    assert _value(name, ['a b c d e'] * 2, ['a b c d e'] * 2) in (
      1.0,
      100.0,
      0.0,
      pytest.approx(100),
    )
  else:
    assert _value(name, ['a', 'a'], ['a', 'a']) == 0.0


@pytest.mark.parametrize('name', ['pearson', 'spearman'])
@pytest.mark.parametrize(
  'targets, predictions',
  [([], []), (['1'], ['2']), (['1', '1'], ['2', '3']), (['1', '2'], ['x'] * 2)],
)
def test_constant_columns_have_no_correlation(name, targets, predictions):
  assert _value(name, targets, predictions) == 0.0


def test_perplexity_is_per_id():
  (metric,) = data.metrics('perplexity')
  scores = [-3.0, -5.0]
  assert metric(['a', 'b'], scores, num_tokens=[3, 1]) == {'perplexity': pytest.approx(math.exp(2))}
  assert metric([], [], num_tokens=[]) == {'perplexity': 1.0}
  assert metric(['a'], [-1e6], num_tokens=[1]) == {'perplexity': math.inf}
  with pytest.raises(DataError, match='Set inference_evaluator_cls = None'):
    metric(['a'], [-1.0])


# ----------------------------------------------------------------------------------------------------------------------
# Names and errors


def test_all_names_are_known_and_listed():
  assert sorted(text_metrics._FACTORIES) == _NAMES
  documented = text_metrics.metrics.__doc__
  assert not [name for name in _NAMES if name not in documented]
  assert len(data.metrics(_NAMES)) == len(data.metrics(*_NAMES)) == len(_NAMES)
  assert len(data.metrics('bleu, chrf', 'bleu')) == 2
  assert data.metric_names('bleu,rougeL,bleu') == ('bleu', 'rougeL')


@pytest.mark.parametrize(
  'names, message',
  [
    ('blue', "`data.metrics.names` must be names of metrics, got 'blue'. Did you mean 'bleu'?"),
    (['bleu', 'rouge-l'], "got 'rouge-l'. Did you mean 'rougeL'?"),
    ('bleu,', "got ''. Known names: accuracy, bleu,"),
    ([], "got ''. Known names: accuracy, bleu,"),
    ([data.exact_match], 'Known names: accuracy, bleu,'),
  ],
)
def test_unknown_names_are_rejected(names, message):
  with pytest.raises(ConfigError) as raised:
    data.metrics(names)
  assert message in str(raised.value)


@pytest.mark.parametrize(
  'name, targets, predictions, message',
  [
    ('bleu', ['a'], [['a', 'b']], "The metric 'bleu' needs texts, got ['a', 'b'] of type list."),
    ('squad', [3], ['a'], "The metric 'squad' needs texts, got 3 of type int."),
    (
      'rouge1',
      [[]],
      ['a'],
      "The metric 'rouge1' needs a reference for each prediction, got an empty",
    ),
    ('accuracy', [[]], ['a'], "The metric 'accuracy' needs a reference for each prediction"),
    ('macro_f1', ['a'], [['a']], "The metric 'macro_f1' needs one label as prediction, got ['a']."),
    (
      'pearson',
      ['1', 'x'],
      ['1', '2'],
      "The metric 'pearson' needs a finite number as target, got 'x'.",
    ),
  ],
)
def test_values_of_other_kinds_are_rejected(name, targets, predictions, message):
  with pytest.raises(DataError) as raised:
    _value(name, targets, predictions)
  assert str(raised.value).startswith(message)


@pytest.mark.parametrize('name', _TEXT_NAMES)
def test_numbers_of_examples_must_agree(name):
  with pytest.raises(ValueError, match='longer than argument 1'):
    _value(name, ['a'], ['a', 'b'])


def test_without_the_packages():
  code = textwrap.dedent("""
      import sys
      for name in ('sacrebleu', 'rouge_score', 'tensorflow', 't5', 'seqio', 'sklearn', 'scipy.stats'):
        sys.modules[name] = None
      from t5x_lite import data
      from t5x_lite.errors import ConfigError
      for name in ('bleu', 'chrf', 'rougeL'):
        try:
          data.metrics(name)
        except ConfigError as error:
          print(error)
      print(len(data.metrics(sys.argv[1])))
  """)
  others = [name for name in _NAMES if not name.startswith(('bleu', 'chrf', 'rouge'))]
  done = subprocess.run(
    [sys.executable, '-c', code, ','.join(others)],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  *errors, last = done.stdout.splitlines()
  assert int(last) == len(others) and len(errors) == 3
  for error, (name, package) in zip(
    errors, [('bleu', 'sacrebleu'), ('chrf', 'sacrebleu'), ('rougeL', 'rouge-score')], strict=True
  ):
    assert error.startswith(f"The metric '{name}' needs {package}, which cannot be imported")
    assert 'Install with `pip install' in error and ('[metrics]' in error or package in error)


def test_gin_names_metrics(tmp_path):
  (tmp_path / 'metrics.gin').write_text(
    textwrap.dedent("""
      from __gin__ import dynamic_registration
      from t5x_lite import data
      from t5x_lite import evaluation
      evaluation.InferenceEvalConfig.metric_fns = @data.metrics()
      data.metrics.names = ['exact_match', 'cer']
    """)
  )
  for changes, names in (
    ([], ['exact_match', 'cer']),
    ([gin_syntax.read_flag('data.metrics.names', "'wer, bleu'", '')], ['wer', 'bleu']),
  ):
    texts = gin_utils.read([str(tmp_path / 'metrics.gin')], changes)
    configuration = gin_utils.load('t5x_lite.evaluation.config.InferenceEvalConfig', texts)
    metric_fns = configuration.call().metric_fns
    gin.clear_config()
    assert [[*metric(['a'], ['a'])] for metric in metric_fns] == [[name] for name in names]
