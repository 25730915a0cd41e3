"""Mesh rules: selectors, which rule applies and over what, what a run records, and errors."""

import sys

import gin
import pytest

from t5x_lite import gin_utils
from t5x_lite.configuration import mesh_rules
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError
from tests.configuration import configuration_cases as cases
from tests.configuration.configuration_cases import program_files  # noqa: F401

_H100 = 'gpu-h100-8'


def _load(rules, *flags, selector=_H100, more='', files=('run.gin', 'model.gin')):
  """Load the small program with MESH_RULES in rules.gin; flags replace its macros."""
  with open('rules.gin', 'w', encoding='utf-8') as file:
    file.write(f'{more}\nMESH_RULES = {rules}\n')
  flags = ['STEPS=10', 'MODEL_DIR=runs/a', *flags]
  texts = [gin_syntax.read_flag(*flag.split('=', 1), f'--gin.{flag}') for flag in flags]
  return gin_utils.load(cases.ENTRY, gin_utils.read([*files, 'rules.gin'], texts), selector)


def _macro(name):
  return gin.query_parameter(f'{name}/gin.macro.value')


def _reload(text, *flags, selector):
  """Load a recorded configuration."""
  with open('config.gin', 'w', encoding='utf-8') as file:
    file.write(text)
  texts = [gin_syntax.read_flag(*flag.split('=', 1), f'--gin.{flag}') for flag in flags]
  return gin_utils.load(cases.ENTRY, gin_utils.read(['config.gin'], texts), selector)


# Selectors


@pytest.mark.parametrize(
  'platform, kind, number, expected',
  [
    ('cpu', 'cpu', 8, 'cpu-8'),
    ('gpu', 'NVIDIA H100 80GB HBM3', 8, 'gpu-h100-8'),
    ('gpu', 'NVIDIA H100 PCIe', 1, 'gpu-h100-1'),
    ('gpu', 'NVIDIA A100-SXM4-40GB', 16, 'gpu-a100-16'),
    ('gpu', 'Tesla V100-SXM2-16GB', 4, 'gpu-v100-4'),
    ('gpu', 'NVIDIA GeForce RTX 4090', 2, 'gpu-rtx4090-2'),
    ('gpu', 'NVIDIA GH200 480GB', 1, 'gpu-gh200-1'),
    ('gpu', 'AMD Instinct MI300X', 8, 'gpu-mi300x-8'),
    ('tpu', 'TPU v3', 8, 'tpu-v3-8'),
    ('tpu', 'TPU v5 lite', 256, 'tpu-v5e-256'),
    ('tpu', 'TPU v5', 128, 'tpu-v5p-128'),
    ('tpu', 'TPU v5p', 128, 'tpu-v5p-128'),
    ('tpu', 'TPU v6 lite', 4, 'tpu-v6e-4'),
    ('tpu', 'TPU7x', 4, 'tpu-v7x-4'),
    ('gpu', 'NVIDIA', 1, 'gpu-1'),
  ],
)
def test_hardware_selector(platform, kind, number, expected):
  assert mesh_rules.hardware_selector(platform, kind, number) == expected


def test_detected_selector_counts_all_devices():
  assert mesh_rules.detected_selector() == 'cpu-8'


# Which rule applies, and over what

_RULES = """[('gpu-.*-8', 'BATCH_SIZE = 64'), ('gpu-.*', 'BATCH_SIZE = 32'), ('cpu-8', 'BATCH_SIZE = 16')]"""


@pytest.mark.parametrize(
  'selector, batch_size, words',
  [
    (
      _H100,
      64,
      "Mesh selector 'gpu-h100-8' (--mesh_selector): rule 'gpu-.*-8' sets BATCH_SIZE = 64",
    ),
    ('gpu-h100-16', 32, "rule 'gpu-.*' sets BATCH_SIZE = 32"),
    ('gpu-h100-81', 32, "rule 'gpu-.*'"),
    ('my-gpu-h100-8', 8, "'my-gpu-h100-8' (--mesh_selector): no rule of MESH_RULES matches"),
    ('cpu-80', 8, 'no rule'),
    (None, 16, "Mesh selector 'cpu-8' (detected): rule 'cpu-8' sets BATCH_SIZE = 16"),
  ],
)
def test_the_first_match_of_the_entire_selector_decides(selector, batch_size, words):
  configuration = _load(_RULES, selector=selector)
  assert configuration.call()['train_cfg'].batch_size == batch_size
  assert words in configuration.mesh_rule


def test_rules_override_files_and_flags_override_rules():
  rules = """[('gpu-.*', '''
      BATCH_SIZE = 64
      models.Model:
        width = 7
        names = ['a', 'b']
      eval/data.DatasetConfig.batch_size = 3
      script.Trainer.learning_rate_fn = @script.schedule()
      script.schedule.base = 4.0
      ''')]"""
  result = _load(rules, 'BATCH_SIZE=2', 'models.Model.width=9').call()
  assert (result['train_cfg'].batch_size, result['eval_cfg'].batch_size) == (2, 3)
  assert (result['model'].width, list(result['model'].names), result['rate']) == (
    9,
    ['a', 'b'],
    2.0,
  )


def test_a_rule_reads_files_next_to_its_own(tmp_path):
  (tmp_path / 'folder').mkdir()
  # `models` is another module in this file than in the others.
  (tmp_path / 'folder/wide.gin').write_text(
    'from __gin__ import dynamic_registration\nfrom tests.configuration import gin_program as data\n'
    "include 'base.gin'\ndata.Model.width = 128\n"
  )
  (tmp_path / 'folder/base.gin').write_text(
    'from __gin__ import dynamic_registration\nfrom tests.configuration import gin_program as other\n'
    'other.Model.rate = 0.5\nother.Model.width = 1\nUNUSED = 3\n'
  )
  (tmp_path / 'folder/rules.gin').write_text(
    "MESH_RULES = [('gpu-.*', ['wide.gin', 'BATCH_SIZE = 5'])]\n"
  )
  configuration = _load(None, selector=None)
  assert not configuration.mesh_rule
  flags = [
    gin_syntax.read_flag(name, value, name) for name, value in (('STEPS', '1'), ('MODEL_DIR', 'a'))
  ]
  files = ['run.gin', 'model.gin', 'folder/rules.gin']
  first = gin_utils.load(cases.ENTRY, gin_utils.read(files, flags), _H100)
  result = first.call()
  assert (result['model'].width, result['model'].rate, result['train_cfg'].batch_size) == (
    128,
    0.5,
    5,
  )
  # Bindings may use the names of the files before them in their rule.
  assert (
    _load(
      "[('gpu-.*', ['folder/wide.gin', 'other.Model.rate = 0.75\\nmodels.Model.names = ()'])]",
      more='',
    )
    .call()['model']
    .rate
    == 0.75
  )
  # The recorded configuration needs none of the files.
  for name in ('wide.gin', 'base.gin', 'rules.gin'):
    (tmp_path / 'folder' / name).unlink()
  again = _reload(first.text, selector=_H100).call()
  assert (again['model'].width, again['model'].rate, again['train_cfg'].batch_size) == (128, 0.5, 5)
  assert 'gin_program as other' not in first.text.partition('MESH_RULES')[0]
  other = _reload(first.text, selector='cpu-8').call()
  assert (other['model'].width, other['model'].rate, other['train_cfg'].batch_size) == (32, 0.1, 8)


def test_rules_may_set_required_macros():
  configuration = _load("[('gpu-.*', 'MODEL = @models.Model()')]", more='MODEL = %gin.REQUIRED')
  assert configuration.call()['model'].width == 32
  with pytest.raises(ConfigError, match='A required value is missing: MODEL'):
    _load("[('gpu-.*', 'MODEL = @models.Model()')]", more='MODEL = %gin.REQUIRED', selector='cpu-8')


def test_placeholders_do_not_override_rules():
  for rules, expected in (
    ('None', 'none'),
    ("[('gpu-.*', 'MODEL_DIR = \"of a rule\"')]", 'of a rule'),
  ):
    with open('rules.gin', 'w', encoding='utf-8') as file:
      file.write(f'STEPS = 1\nMESH_RULES = {rules}\n')
    texts = gin_utils.read(
      ['run.gin', 'model.gin', 'rules.gin'], placeholders={'MODEL_DIR': "'none'"}
    )
    configuration = gin_utils.load(cases.ENTRY, texts, None if rules == 'None' else _H100)
    assert configuration.call()['model_dir'] == expected


def test_devices_are_detected_only_for_rules_without_selector_and_after_imports(
  monkeypatch, tmp_path
):
  (tmp_path / 'joins_a_cluster.py').write_text('')
  monkeypatch.syspath_prepend(tmp_path)
  seen = []

  def detected():
    # A module of the configuration may initialize several processes, which must come before devices are asked for.
    seen.append('joins_a_cluster' in sys.modules)
    return 'cpu-1'

  monkeypatch.setattr(mesh_rules, 'detected_selector', detected)
  cases.load()
  _load(_RULES)
  _load('[]', selector=None)
  assert not seen
  _load(_RULES, selector=None, more='import joins_a_cluster')
  assert seen == [True]


def test_a_flag_may_set_or_remove_rules():
  assert _load(_RULES, "MESH_RULES=[('.*', 'BATCH_SIZE = 1')]").call()['train_cfg'].batch_size == 1
  assert _load(_RULES, 'MESH_RULES=None', selector=None).call()['train_cfg'].batch_size == 8


def test_t5x_function_applies_rules(tmp_path):
  _load(_RULES)
  gin_utils.parse_gin_flags(
    [], ['run.gin', 'model.gin', 'rules.gin'], ['STEPS = 1', "MODEL_DIR = 'a'"]
  )
  assert _macro('BATCH_SIZE') == 16


_MESH = """
from __gin__ import dynamic_registration
from tests.configuration import gin_program as script
script.Model.dtype = @script.Mesh()
script.Mesh.extents = (2, 2)
script.Mesh.names = 'x'
"""


def test_none_is_the_automatic_choice_of_the_configured_class():
  mesh = _load("[('gpu-.*', None)]", more=_MESH).call()['model'].dtype
  assert (mesh.extents, mesh.num_partitions, mesh.names) == (None, -1, 'x')
  mesh = (
    _load(
      "[('gpu-.*', [None, 'script.Mesh.names = \"y\"'])]",
      'script.Mesh.num_partitions=3',
      more=_MESH,
    )
    .call()['model']
    .dtype
  )
  assert (mesh.extents, mesh.num_partitions, mesh.names) == (None, 3, 'y')
  with pytest.raises(
    ConfigError, match="Mesh rule 'gpu-.*': None requires a configured partitioner. Bind num"
  ):
    _load("[('gpu-.*', None)]")


# What a run records


def test_a_recorded_configuration_applies_its_rules_on_other_hardware():
  rules = """[
      ('gpu-.*', "models.Model.names = ['it\\\\'s', 'a\\\\\\\\b', '%']"),
      ('tpu-.*', '''
          BATCH_SIZE = 64
          script.Trainer.learning_rate_fn = @script.schedule()
          models.Model.rate = 0.25
      '''),
      ('cpu-.*', [None, 'BATCH_SIZE = 4'])]"""
  first = _load(rules, 'script.schedule.base=3.0', more=_MESH)
  assert list(first.call()['model'].names) == ["it's", 'a\\b', '%']
  same = _reload(first.text, selector=_H100)
  assert same.text == first.text and list(same.call()['model'].names) == ["it's", 'a\\b', '%']
  tpu = _reload(first.text, selector='tpu-v4-8')
  result = tpu.call()
  assert (result['train_cfg'].batch_size, result['model'].rate, result['rate']) == (64, 0.25, 1.5)
  assert result['model'].names == () and result['model'].dtype.extents == (2, 2)
  cpu = _reload(tpu.text, selector='cpu-8').call()
  assert (cpu['train_cfg'].batch_size, cpu['model'].rate, cpu['model'].dtype.extents) == (
    4,
    0.1,
    None,
  )
  # Only the comment on the rule that applied differs.
  uncommented = [
    [line for line in text.splitlines() if not line.startswith('# ')]
    for text in (first.text, tpu.text)
  ]
  assert uncommented[0] == uncommented[1]
  assert (
    "# Mesh selector 'tpu-v4-8' (--mesh_selector): rule 'tpu-.*', which changes these values of the "
    'configuration below:\n#   BATCH_SIZE = 64\n#   models.Model.rate = 0.25\n'
  ) in tpu.text


def test_two_macros_are_two_values():
  rules = "[('gpu-.*', 'data.DatasetConfig.batch_size = %SMALL_BATCH')]"
  first = _load(rules, more='SMALL_BATCH = 2')
  assert (
    first.call()['train_cfg'].batch_size == 2
    and 'sets data.DatasetConfig.batch_size = %SMALL' in first.mesh_rule
  )
  assert _reload(first.text, selector='cpu-8').call()['train_cfg'].batch_size == 8
  assert _reload(first.text, selector=_H100).call()['train_cfg'].batch_size == 2


def test_flags_of_a_run_stay_above_its_rules_on_other_hardware():
  rules = """[('gpu-.*', 'BATCH_SIZE = 64'), ('cpu-.*', None),
              ('tpu-.*', 'BATCH_SIZE = 32\\nmodels.Model.width = 5')]"""
  first = _load(rules, 'BATCH_SIZE=2', 'script.Mesh.num_partitions=3', more=_MESH)
  assert first.call()['train_cfg'].batch_size == 2
  assert _reload(first.text, selector=_H100).text == first.text
  tpu = _reload(first.text, selector='tpu-v4-8').call()
  assert (tpu['train_cfg'].batch_size, tpu['model'].width) == (2, 5)
  mesh = _reload(first.text, selector='cpu-1').call()['model'].dtype
  assert (mesh.extents, mesh.num_partitions) == (None, 3)
  # Flags of the new command override all of it.
  assert (
    _reload(first.text, 'BATCH_SIZE=1', selector='tpu-v4-8').call()['train_cfg'].batch_size == 1
  )


def test_config_gin_holds_the_rules(tmp_path):
  configuration = _load(_RULES)
  gin_utils.summarize_gin_config(str(tmp_path / 'run'), None, 0)
  text = (tmp_path / 'run/config.gin').read_text()
  assert text == configuration.text and 'BATCH_SIZE = 8\n' in text
  cases.load()  # A configuration without rules leaves nothing of them.
  assert 'MESH_RULES' not in gin_utils.get_gin_config_str()


def test_changes_that_the_command_does_not_use_are_named():
  words = _load("""[('gpu-.*', 'script.unused.value = 3\\nBATCH_SIZE = 2')]""").mesh_rule
  assert 'sets script.unused.value = 3 (not used by this command), BATCH_SIZE = 2' in words
  assert _load("[('gpu-.*', 'BATCH_SIZE = 8')]").mesh_rule.endswith("rule 'gpu-.*' changes nothing")
  many = '\\n'.join(
    f'models.Model.{name} = {value}'
    for name, value in (('width', 1), ('rate', 0.5), ('names', '()'))
  )
  many += '\\n' + '\\n'.join(
    f'script.{name}' for name in ('schedule.base = 2.0', 'schedule.steps = 3')
  )
  words = _load(f"[('gpu-.*', '{many}\\nBATCH_SIZE = 1\\nWIDTH = 2')]").mesh_rule
  assert words.endswith('BATCH_SIZE = 1, and 1 more')


# Errors


@pytest.mark.parametrize(
  'rules, fragments',
  [
    (
      "'gpu-.*'",
      [
        'rules.gin:2: `MESH_RULES` must be a list of pairs',
        "got 'gpu-.*'",
        'Example: MESH_RULES = [(',
      ],
    ),
    ('%WIDTH', ['a list of pairs', 'got %WIDTH']),
    ("[('gpu-.*', None), 'cpu-.*']", ['`MESH_RULES[1]` must be a pair', "got 'cpu-.*'"]),
    (
      "[('gpu-*(', None)]",
      ['rules.gin:2: `MESH_RULES[0]` must be a regular expression', "got 'gpu-*('", "'.*'"],
    ),
    (
      "[('gpu-.*', 8)]",
      ["rules.gin:2 (mesh rule 'gpu-.*'): `change` must be the name of a gin file, gin", 'got 8'],
    ),
    (
      "[('cpu-.*', 'modle.gin')]",
      [
        "rules.gin:2 (mesh rule 'cpu-.*'): The gin file 'modle.gin' does not exist",
        "Did you mean 'model.gin'?",
      ],
    ),
    (
      "[('cpu-.*', 'BATCH_SIZE 3')]",
      [
        "The gin file 'BATCH_SIZE 3' does not exist",
        "A change without '=' is the name of a gin file.",
      ],
    ),
    ("[('cpu-.*', 'BATCH_SIZE = = 3')]", ["rules.gin:2 (mesh rule 'cpu-.*'):1: not gin syntax"]),
    (
      "[('cpu-.*', 'BATCH_SIZES = 3')]",
      [
        "rules.gin:2 (mesh rule 'cpu-.*'):1: the macro 'BATCH_SIZES' is not used",
        "Did you mean 'BATCH_SIZE'?",
      ],
    ),
    (
      "[('gpu-.*', 'models.Model.widht = 3')]",
      ["(mesh rule 'gpu-.*'):1: models.Model has no parameter 'widht'", "Did you mean 'width'?"],
    ),
    (
      "[('gpu-.*', 'models.Modle.width = 3')]",
      ["(mesh rule 'gpu-.*'):1: models has no 'Modle'", "'Model'"],
    ),
    (
      "[('gpu-.*', 'model.Model.width = 3')]",
      ["(mesh rule 'gpu-.*'):1: nothing is called 'model.Model'"],
    ),
    (
      "[('gpu-.*', 'models.Model.width = \"wide\"')]",
      ["rules.gin:2 (mesh rule 'gpu-.*'):1", "'wide'"],
    ),
    ("[('gpu-.*', 'MESH_RULES = None')]", ['a rule cannot set MESH_RULES', 'Name another file']),
  ],
)
def test_rejected(rules, fragments):
  with pytest.raises(ConfigError) as caught:
    _load(rules)
  for fragment in fragments:
    assert fragment in str(caught.value)


def test_a_selector_without_rules_is_rejected():
  with pytest.raises(
    ConfigError, match='--mesh_selector=gpu-h100-8 has no effect: .* has no MESH_RULES'
  ):
    _load('None')


def test_a_misspelt_name_of_the_rules_is_a_warning(caplog):
  with open('typo.gin', 'w', encoding='utf-8') as file:
    file.write("MESH_RULE = [('.*', 'BATCH_SIZE = 1')]\n")
  cases.load(files=('run.gin', 'model.gin', 'typo.gin'))
  assert "the macro 'MESH_RULE' is not used. Did you mean 'MESH_RULES'?" in caplog.text
