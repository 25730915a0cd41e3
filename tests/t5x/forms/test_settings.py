"""Settings of gin files that T5X accepts or rejects, and t5x_lite reads as T5X does, with a line in the log."""

import re

import pytest

from t5x_lite import adafactor
from t5x_lite import checks
from t5x_lite import optimizers
from t5x_lite.errors import ConfigError

_ACCEPTED = (
  '`DatasetConfig.use_custom_packing_ops` has no effect with pack=False.',
  'Trainer.learning_rate_fn overrides the learning rate of the optimizer, which has no effect.',
  '`Adafactor.dtype_momentum` has no effect with beta1=None.',
  '`Adafactor.max_parameter_scale` has no effect with multiply_by_parameter_scale=False.',
  'The output vocabulary has no eos_id: the token 1 ends sequences.',
  '`max_decode_steps` is reduced to 8, the length of the sequences.',
  "training_eval reads the 40 rows of 'reverse_words' once per evaluation; T5X repeats them until there are 6 batches.",
)


def test_what_t5x_accepts_is_logged_once_and_recorded(run_form, tmp_path, capfd):
  assert run_form('settings', 'train', 'accepted.gin', MODEL_DIR=tmp_path) == 0
  err = capfd.readouterr().err
  for sentence in _ACCEPTED:
    assert err.count(sentence) == 1, sentence
  # A thread samples the training data.
  assert 'data_sampled' in (tmp_path / 'events.jsonl').read_text()
  # The recorded configuration has the names of t5x_lite, and is read as it was.
  assert 'WRITTEN_FOR_T5X = True' in (tmp_path / 'config.gin').read_text()
  again = {'TRAIN_STEPS': 6, 'MODEL_DIR': tmp_path}
  assert run_form('settings', 'train', f'{tmp_path}/config.gin', **again) == 0
  assert capfd.readouterr().err.count(_ACCEPTED[0]) == 1


def test_other_commands_accept_it_too(run_form, capfd):
  assert run_form('settings', 'explain_sharding', 'accepted.gin') == 0
  assert _ACCEPTED[0] in capfd.readouterr().err


def test_the_same_values_in_files_of_t5x_lite_are_errors():
  with pytest.raises(ConfigError, match='dtype_momentum` has no effect with beta1=None. Remove'):
    optimizers.Adafactor(dtype_momentum='bfloat16')
  with checks.written_for_t5x(set()):
    # T5X rejects this one too.
    with pytest.raises(ConfigError, match='factor_map` has no effect with factored=False'):
      optimizers.Adafactor(factored=False, factor_map=adafactor.HParamMap(()))
  assert not checks.log_for_t5x('Outside of the context.')


def test_parts_with_a_learning_rate_keep_it_with_a_line_in_the_log(run_form, tmp_path, capfd):
  assert run_form('settings', 'train', 'parts.gin', MODEL_DIR=tmp_path) == 0
  err = capfd.readouterr().err
  assert err.count('has no effect on parts with a learning rate of their own (0). In T5X') == 1
  rates = (tmp_path / 'train/metrics.jsonl').read_text()
  assert re.search(r'"learning_rate": 0\.00999.*"optimizer/0/learning_rate": 0\.5,', rates)


def test_names_of_earlier_versions(run_form, tmp_path, capfd):
  options = {'MODEL_DIR': tmp_path}
  assert run_form('settings', 'train', 'former_names.gin', '--dry_run', **options) == 0
  err = capfd.readouterr().err
  assert (
    err.count('models.EncoderDecoderModel.loss_fn.z_loss is now models.EncoderDecoderModel.z_loss')
    == 1
  )
  assert 'partitioning.ModelBasedPjitPartitioner is now partitioning.PjitPartitioner' in err
  options['models.EncoderDecoderModel.z_loss'] = 0.1
  assert run_form('settings', 'train', 'former_names.gin', '--dry_run', **options) == 2
  assert 'is bound by another name too, in former_names.gin:' in capfd.readouterr().err


@pytest.mark.parametrize(
  'name, is_used',
  [
    ('network.T5Config.head_dim', True),
    ('network.TransformerConfig.head_dim', False),
    ('scalable_t5.network.T5Config.head_dim', False),
    ('layers.MlpBlock.intermediate_dim', False),
  ],
)
def test_a_class_of_a_network_that_nobody_imports_is_unknown(
  run_form, tmp_path, capfd, name, is_used
):
  """In a file without imports, which in T5X may bind what other files have used; T5X rejects others."""
  (tmp_path / 'others.gin').write_text(f'{name} = 4\n')
  flags = [f'--gin_file={tmp_path}/others.gin', f'--gin.MODEL_DIR={tmp_path}/run', '--dry_run']
  assert run_form('settings', 'train', 'pretrain.gin', *flags) == (0 if is_used else 2)
  message = f"others.gin:1: nothing is called '{name.rpartition('.')[0]}'"
  assert (message in capfd.readouterr().err) != is_used
