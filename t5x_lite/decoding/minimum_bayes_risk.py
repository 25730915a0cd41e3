"""Minimum Bayes risk decoding: of several samples, the one that is most similar to all of them.

See Kumar and Byrne 2004, "Minimum Bayes-risk decoding for statistical machine translation", and Eikema and Aziz 2022,
"Sampling-based approximations to minimum Bayes risk decoding for neural machine translation"
(https://arxiv.org/abs/2108.04718), where the samples are candidates and pseudo-references at once.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np

from t5x_lite import checks
from t5x_lite.decoding import text_similarity
from t5x_lite.decoding.sampling import temperature_sample
from t5x_lite.decoding.state import contract_of
from t5x_lite.decoding.state import declare
from t5x_lite.errors import ConfigError
from t5x_lite.types import Array

# (candidates, references), two lists of equal length -> one similarity for each pair.
UtilityFn = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
_PAIRWISE = {'chrf': text_similarity.pairwise_chrf, 'bleu': text_similarity.pairwise_bleu}
_SET_HERE = ('temperature', 'topk', 'topp')
_utility = checks.one_of(tuple(_PAIRWISE))


@declare(
  padding_mask=True,
  options=tuple(
    name for name in contract_of(temperature_sample).options or () if name not in _SET_HERE
  ),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class MinimumBayesRisk:
  """Decoding algorithm that samples on the devices, and chooses one sample of each example on the host.

  The choice is the sample with the largest mean utility, its similarity to all samples as references; of equal ones the
  one with the largest log-probability. `evaluation.PredictRunner` asks for the samples and chooses, so that all
  evaluations, `infer`, `chat` and `InteractiveModel` support it, but not exported programs.

  Attributes:
    num_samples: number of samples of each example.
    utility: 'chrf' or 'bleu', sentence scores as those of sacrebleu; or a function of (candidates, references), two
      lists of equal length, that returns one similarity for each pair. It is called from several threads.
    temperature: see `temperature_sample`.
    topk: see `temperature_sample`; by default all tokens.
    topp: see `temperature_sample`.

  Raises:
    ConfigError: an option is out of range, or sacrebleu is missing for 'bleu'.
  """

  num_samples: int = 16
  utility: str | UtilityFn = 'chrf'
  temperature: float = 1.0
  topk: int = 0
  topp: float = 0.0

  def __post_init__(self) -> None:
    checks.check(
      'MinimumBayesRisk',
      vars(self),
      num_samples=checks.number(
        at_least=2, integer=True, remedy='Set it to 16, or use decoding.temperature_sample.'
      ),
      utility=checks.Expectation(
        f'{_utility.text}, or a function of (candidates, references)',
        lambda utility: callable(utility) or _utility.holds(utility),
        _utility.remedy,
      ),
      temperature=checks.number(above=0, remedy='1.0 samples from the distribution of the model.'),
      topk=checks.number(at_least=0, integer=True, remedy='0 draws from all tokens.'),
      topp=checks.number(
        at_least=0, at_most=1 if not self.topk else 0, remedy='Set topk=0 to sample with topp.'
      ),
    )
    if self.utility == 'bleu':
      text_similarity.pairwise_bleu([''])  # raises if sacrebleu is missing

  @property
  def identity(self) -> dict[str, Any]:
    """Everything that the choices depend on, as JSON values."""
    fields = dict(vars(self))
    if callable(self.utility):
      name = getattr(self.utility, '__qualname__', type(self.utility).__name__)
      fields['utility'] = f'{self.utility.__module__}.{name}'
    return {'minimum_bayes_risk': fields}

  def __call__(self, inputs: Array, *, num_decodes: int, **options: Any) -> tuple[Array, Array]:
    """Sample; see `temperature_sample`.

    Args:
      inputs: see `temperature_sample`.
      num_decodes: must be `num_samples`, as `PredictRunner` sets it.
      **options: arguments of `temperature_sample`.

    Raises:
      ConfigError: the caller does not choose one of `num_samples` samples.
    """
    if num_decodes != self.num_samples:
      raise checks.invalid(
        '',
        'num_decodes',
        f'{self.num_samples}, MinimumBayesRisk.num_samples, which evaluations, `infer` and `chat` set',
        num_decodes,
        'Remove num_decodes; to export or to call the model itself, choose another decode_fn.',
      )
    return temperature_sample(
      inputs,
      num_decodes=num_decodes,
      temperature=self.temperature,
      topk=self.topk,
      topp=self.topp,
      **options,
    )

  def choose(self, samples: Sequence[str]) -> tuple[int, float]:
    """Return (index, mean utility) of the best sample; of equally good ones the first.

    Args:
      samples: texts of the samples of an example. Equal texts are compared once.

    Raises:
      ConfigError: the utility function does not return a finite number for each pair.
    """
    repeats = collections.Counter(samples)
    texts = list(repeats)
    # [n], number of samples with each text, in the order of the first ones.
    weights = np.array(list(repeats.values()), np.float64)
    means = self._similarities(texts) @ (weights / len(samples))
    # Similarities that are equal in exact arithmetic are equal.
    best = int(np.argmax(np.round(means, 9)))
    return samples.index(texts[best]), float(means[best])

  def _similarities(self, texts: Sequence[str]) -> np.ndarray:
    """Return <float64>[n, n], the utility of text i as a candidate for text j as the reference."""
    if isinstance(self.utility, str):
      return _PAIRWISE[self.utility](texts)
    candidates = [text for text in texts for _ in texts]
    references = [text for _ in texts for text in texts]
    found = np.asarray(self.utility(candidates, references), np.float64)
    if found.shape != (len(candidates),) or not np.isfinite(found).all():
      raise ConfigError(
        f'`MinimumBayesRisk.utility` must return a finite number for each of {len(candidates)} pairs, got an array of '
        f'shape {found.shape} from {self.identity["minimum_bayes_risk"]["utility"]}. Return a list with one number for '
        'each candidate and its reference.'
      )
    return found.reshape(len(texts), len(texts))


def minimum_bayes_risk_of(decode_fn: Any) -> MinimumBayesRisk | None:
  """Return the `MinimumBayesRisk` that a decoding function is, or has inside its partials; None for all others."""
  while isinstance(decode_fn, functools.partial):
    decode_fn = decode_fn.func
  if isinstance(decode_fn, MinimumBayesRisk):
    return decode_fn
  return None
