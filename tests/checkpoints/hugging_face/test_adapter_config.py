"""Configurations of adapters that are written: modules or their ends, and patterns only if they are used."""

import json
import time

import pytest

from t5x_lite.checkpoints.hugging_face import adapter_config
from t5x_lite.errors import CheckpointError
from t5x_lite.storage import files
from tests.checkpoints.hugging_face import adapter_cases as adapters
from tests.checkpoints.hugging_face import hugging_face_cases as cases

_Q = 'encoder.block.0.layer.0.SelfAttention.q'


def _make(adapters_of_modules, **options):
  linear = [*adapters.modules(cases.SMALL, adapters.ALL), 'lm_head']
  options = {'lora_dropout': 0.1, 'base_model_name_or_path': 'base'} | options
  return adapter_config.make(adapters_of_modules, linear, **options)


def test_ends_of_modules():
  modules = adapters.modules(cases.SMALL)
  assert _make(dict.fromkeys(modules, (2, 6.0))) == adapters.CONFIG


def test_each_module_if_ends_would_match_others_and_patterns(tmp_path):
  own = dict.fromkeys(adapters.modules(cases.SMALL), (2, 6.0))
  del own[_Q]
  own['encoder.block.1.layer.0.SelfAttention.q'] = (4, 6.0)
  own['encoder.block.1.layer.0.SelfAttention.v'] = (2, 3.0)
  config = _make(own, use_rslora=True)
  assert config['target_modules'] == sorted(own)
  assert config['rank_pattern'] == {'encoder.block.1.layer.0.SelfAttention.q': 4}
  assert config['alpha_pattern'] == {'encoder.block.1.layer.0.SelfAttention.v': 3.0}
  assert config['use_rslora'] is True
  (tmp_path / 'adapter_config.json').write_text(json.dumps(config))
  read = adapter_config.read(files.path(tmp_path))
  for module, (rank, alpha) in own.items():
    assert adapter_config.is_target(read, module)
    assert adapter_config.rank_and_alpha(read, module) == (rank, alpha)
  assert not adapter_config.is_target(read, _Q)


def _read(folder, **changes):
  (folder / 'adapter_config.json').write_text(json.dumps(adapters.CONFIG | changes))
  return adapter_config.read(files.path(folder))


@pytest.mark.parametrize(
  'expression',
  [
    r'(a+)+$',
    r'(?:.+)+[!]',
    r'(.*)*(?:x)',
    r'([^]+)]+)+!',
    r'(a|aa|.){2,}',
    r'(?x:(.+) +)!',
    r'(.+)(?#hidden)+!',
    r'.+)+(?:',
    '.*' * 40,
    '.?' * 40,
    '(.|.)' * 40,
  ],
)
@pytest.mark.parametrize('key', ['target_modules', 'rank_pattern', 'alpha_pattern'])
def test_expressions_that_may_take_years_are_rejected(tmp_path, key, expression):
  value = expression if key == 'target_modules' else {expression: 2}
  with pytest.raises(
    CheckpointError, match=r'at most four repetitions.*list the modules instead\.'
  ):
    _read(tmp_path, **{key: value})


def test_many_slow_expressions_are_rejected_and_many_names_are_not(tmp_path):
  slow = {f'.*.*.*.*[{i}]': 2 for i in range(2)}
  with pytest.raises(CheckpointError, match='at most four repetitions'):
    _read(tmp_path, rank_pattern=slow)
  names = {f'encoder.block.{i}.layer.0.SelfAttention.q': 2 for i in range(1000)}
  assert _read(tmp_path, rank_pattern=names)['rank_pattern'] == names


@pytest.mark.parametrize(
  'expression',
  [
    r'(encoder|decoder)\.block\.\d+\..*Attention\.(q|v)',
    r'.*decoder.*(SelfAttention|EncDecAttention).*(q|v)$',
    r'^(?!.*lm_head).*\.(q|k|v|o|wi_0|wi_1|wo)',
    r'(?:.*?)[+*(]?\(\+\)+',
    '.*.*.*[!].*',
    '.*.*.*(.|.)(.|.)(.|.)(.|.)(.|.)[!]',
  ],
)
def test_accepted_expressions_are_fast(tmp_path, expression):
  config = _read(tmp_path, target_modules=expression)
  name = 'encoder.block.10.layer.1.mlp.experts.expert_127.wi_0'
  begin = time.perf_counter()
  adapter_config.is_target(config, name)
  assert time.perf_counter() - begin < 1  # it takes up to 0.05 s
