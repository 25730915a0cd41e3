"""T5X's recorded decodes: beam search, sampling with its draws, and the masks of top-k and top-p."""

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from tests import golden_data
from tests.decoding.decoding_cases import jit
from tests.decoding.decoding_cases import lengths

_BEAM, _BEAM_ARRAYS = golden_data.load('t5x/decode_beam')
_SAMPLE, _SAMPLE_ARRAYS = golden_data.load('t5x/decode_sample')
_MASKS, _MASK_ARRAYS = golden_data.load('t5x/decode_masks')


def _tabulated(arrays):
  """Return (network's step, cache): logits are sums of table rows of the token, the position and the row's context."""
  token_VV, position_PV, context_CV = (jnp.asarray(arrays[name]) for name in 'TPC')

  def step(state):
    logits = (
      token_VV[state.cur_token[:, 0]]
      + position_PV[state.cur_index]
      + context_CV[state.cache['ctx']]
    )
    return logits, state.cache

  return step, {'ctx': jnp.arange(3)}


@pytest.mark.parametrize('index', range(len(_BEAM['cases'])))
def test_beam_search(index):
  case, arrays = _BEAM['cases'][index], _BEAM_ARRAYS
  options = dict(case['kwargs'])
  if case['use_initial_index']:
    options['initial_index'] = lengths(case['prompts'])
  step, cache = _tabulated(arrays)
  search = jit(lambda inputs: decoding.beam_search(inputs, cache, step, _BEAM['eos_id'], **options))
  sequences, scores = search(arrays[f'case{index}/inputs'])
  np.testing.assert_array_equal(sequences, arrays[f'case{index}/seqs'])
  assert sequences.dtype == jnp.int32 and scores.dtype == jnp.float32
  np.testing.assert_allclose(
    scores, arrays[f'case{index}/scores'], rtol=0, atol=_BEAM['tol']['scores']
  )


@pytest.mark.parametrize(
  'index',
  [
    pytest.param(index, marks=pytest.mark.full) if index % 2 else index
    for index in range(len(_SAMPLE['cases']))
  ],
)
def test_temperature_sample(index):
  case, arrays = dict(_SAMPLE['cases'][index]), _SAMPLE_ARRAYS
  prompts = case.pop('prompts', None)
  if case.pop('use_initial_index', False):
    case['initial_index'] = lengths(prompts)
  banned = case.pop('ban_token', None)
  if banned is not None:
    case['logit_callback_fn'] = lambda logits, state: logits.at[:, banned].set(
      decoding.NEG_INF_VALUE
    )
  if isinstance(case.get('temperature'), list):
    case['temperature'] = jnp.asarray(case['temperature'])
  case.pop('seed', None)
  step, cache = _tabulated(arrays)
  sample = jit(
    lambda inputs, rng: decoding.temperature_sample(
      inputs, cache, step, _SAMPLE['eos_id'], decode_rng=rng, **case
    )
  )
  sequences, log_probs = sample(arrays[f'case{index}/inputs'], arrays[f'case{index}/rng'])
  np.testing.assert_array_equal(sequences, arrays[f'case{index}/seqs'])
  np.testing.assert_allclose(
    log_probs, arrays[f'case{index}/log_prob'], rtol=0, atol=_SAMPLE['tol']['log_prob']
  )


@pytest.mark.parametrize(
  'kind, mask_fn, number', [('topk', decoding.topk_mask, int), ('topp', decoding.topp_mask, float)]
)
def test_masks(kind, mask_fn, number):
  limits = {name: number(name.split('/')[1]) for name in _MASK_ARRAYS if name.startswith(kind)}
  assert len(limits) == 3
  x, replace_val = _MASK_ARRAYS['x'], _MASKS['replace_val']
  of_known = jit(
    lambda x: {name: mask_fn(x, limit, replace_val) for name, limit in limits.items()}
  )(x)
  of_traced = jit(lambda x, limit: mask_fn(x, limit, replace_val))
  for name, limit in limits.items():
    np.testing.assert_array_equal(of_known[name], _MASK_ARRAYS[name])
    np.testing.assert_array_equal(of_traced(x, limit), _MASK_ARRAYS[name])
