"""Reports of conversions."""

import dataclasses

import pytest

from t5x_lite.apps.convert import plan as convert_plan
from t5x_lite.apps.convert import report as convert_report
from t5x_lite.apps.convert import run as convert
from t5x_lite.apps.convert import targets
from t5x_lite.formatting import format_bytes
from tests.apps.convert import convert_cases as given

pytestmark = pytest.mark.filterwarnings('ignore:.*has no manifest')


def test_report_of_each_form(tmp_path):
  folder, values = given.folder(tmp_path / 'folder', 'umt5')
  (tmp_path / 'folder' / 'spiece.model').write_bytes(b'')
  size = sum(value.nbytes for value in values.values())
  text = convert_report.describe(convert.convert(folder, str(tmp_path / 'ours'), to='t5x_lite'))
  assert f'Wrote {tmp_path}/ours/checkpoint_0' in text and 'Hugging Face, umT5' in text
  assert (
    f'{len(values) + 1} arrays, {format_bytes(size + 4)}; {size // 4:,} parameters, float32' in text
  )
  assert (
    '--gin_file=models/umt5_small.gin' in text
    and '--gin.network.T5Config.num_decoder_layers=2' in text
  )
  assert f'--gin.INITIAL_CHECKPOINT_PATH={tmp_path}/ours/checkpoint_0' in text
  assert f'--gin.VOCABULARY_FILE={tmp_path}/folder/spiece.model' in text
  done = convert.convert(str(tmp_path / 'ours'), str(tmp_path / 'back'), to='hugging_face')
  text = convert_report.describe(done)
  assert f"UMT5ForConditionalGeneration.from_pretrained('{tmp_path}/back')" in text
  assert 'model.config.tie_word_embeddings = False' in text and '--tokenizer=PATH' in text
  stacked = convert.convert(
    str(tmp_path / 'ours'), str(tmp_path / 'stacked'), to='t5x', param_layout='scalable_t5'
  )
  assert '--gin.network.T5Config.param_layout=scalable_t5' in convert_report.describe(stacked)
  assert 'moe_expert_partitions' not in text
  switch, _ = given.folder(tmp_path / 'switch', 'switch')
  text = convert_report.describe(convert.convert(switch, str(tmp_path / 'sparse'), to='t5x_lite'))
  assert (
    '--gin_file=partitioning/moe_expert_partitions.gin' in text.partition('runs/finetune.gin')[2]
  )
  mixed = dataclasses.replace(done, dtypes={'float32': 3, 'bfloat16': 2})
  assert 'parameters, 2 in bfloat16 and 3 in float32' in convert_report.describe(mixed)


def test_a_file_with_a_folder_of_its_vocabulary_has_its_macro(tmp_path):
  folder, _ = given.folder(
    tmp_path / 'folder', vocab_size=256000, pad_token_id=1, eos_token_ids=(2,)
  )
  ours = convert.convert(folder, str(tmp_path / 'ours'), to='t5x_lite')
  text = convert_report.describe(ours)
  assert '--gin_file=models/madlad400_3b.gin' in text and 'VOCABULARY_FILE' not in text
  assert f'--gin.VOCABULARY_FOLDER={tmp_path}/folder' in text
  again = convert.convert(ours.path, str(tmp_path / 'again'), to='t5x_lite')
  assert '--gin.VOCABULARY_FOLDER=/path/to/its/folder' in convert_report.describe(again)


def test_unknown_activations_are_reported():
  source = given.FakeSource(given.make_state())
  plan = convert_plan.plan_state(source, to='hugging_face')
  from t5x_lite.apps.convert import hugging_face as convert_hugging_face

  job = targets.Job(
    source=source,
    plan=plan,
    num_arrays=len(plan.arrays),
    family=None,
    architecture=None,
    notes=(),
  )
  prepared = convert_hugging_face.HuggingFaceTarget().prepare(job)
  assert any("config.json has T5's values: gelu, linear and 128" in note for note in prepared.notes)
