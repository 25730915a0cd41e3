"""Configurations of adapters that are written: modules or their ends, and patterns only if they are used."""

import json

from t5x_lite.checkpoints.hugging_face import adapter_config
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
    assert adapter_config.rank_of(read, module) == rank
    assert adapter_config.alpha_of(read, module) == alpha
  assert not adapter_config.is_target(read, _Q)
