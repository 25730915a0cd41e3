"""Settings of gin files that T5X accepts or rejects, and t5x_lite reads as T5X does, with a line in the log."""

import logging
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import adafactor
from t5x_lite import checks
from t5x_lite import decoding
from t5x_lite import gin_utils
from t5x_lite import models
from t5x_lite import networks
from t5x_lite import optimizers
from t5x_lite.errors import ConfigError
from tests import compat as compat_tests
from tests.models import model_cases

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


@pytest.mark.parametrize('name', ['task_ds', 'mode', 'vocabulary'])
def test_arguments_that_a_program_passes_have_no_effect(tmp_path, caplog, name):
  """T5X's `infer` calls `write_fn` by position, so that gin ignores the bindings of these parameters."""
  file = tmp_path / 'run.gin'
  macros = '\n'.join(f'{macro} = "x"' for macro in ('CHECKPOINT_PATH', 'INFER_OUTPUT_DIR'))
  bindings = f'infer.write_inferences_to_file.{name} = True'
  text = f"from t5x import infer\ninclude 'infer.gin'\n{macros}\n{bindings}\n"

  def load(text):
    file.write_text(f'from __gin__ import dynamic_registration\n{text}')
    paths = [str(pathlib.Path(compat_tests.__file__).parent / 'samples')]
    texts = gin_utils.read([str(file)], search_paths=paths)
    return gin_utils.load('t5x_lite.apps.infer.infer', texts)

  caplog.set_level(logging.INFO)
  assert load(text)
  passes = 'write_inferences_to_file.{} has no effect: {}.infer passes {} itself.'.format
  assert caplog.text.count(passes(name, 'infer_script', name)) == 1
  # A parameter that is not passed is checked, and files of t5x_lite get the error.
  with pytest.raises(ConfigError, match='output_ids` must be bool, got 3'):
    load(f'{text}\ninfer.write_inferences_to_file.output_ids = 3')
  ours = (
    "from t5x_lite.apps import infer\ninclude 'models/byt5_small.gin'\ninclude 'runs/infer.gin'\n"
  )
  tasks = 'DROPOUT_RATE = 0.0\nMIXTURE_OR_TASK_NAME = "x"\nTASK_FEATURE_LENGTHS = {"inputs": 1, "targets": 1}'
  with pytest.raises(ConfigError, match=f'{passes(name, "infer_script", name)} Remove'):
    load(f'{ours}{macros}\n{tasks}\n{bindings}')


def _encoder_decoder():
  return model_cases.make_model(decode_fn=decoding.temperature_sample), model_cases.make_batch()


def _decoder_only():
  vocabulary = model_cases.Vocabulary()
  config = networks.TransformerConfig(
    vocab_size=24, emb_dim=8, num_heads=1, head_dim=8, mlp_dim=8, num_layers=1
  )
  model = models.DecoderOnlyModel(
    networks.DecoderWrapper(config),
    vocabulary,
    None,
    decode_fn=decoding.temperature_sample,
    inputs_bidirectional_attention=True,
  )
  inputs = jnp.asarray([[0, 5, 6, 0, 0, 0], [0, 7, 0, 0, 0, 0]], jnp.int32)
  prefix = jnp.asarray([[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]], jnp.int32)
  return model, {'decoder_input_tokens': inputs, 'decoder_causal_attention': prefix}


@pytest.mark.parametrize('make', [_encoder_decoder, _decoder_only])
def test_more_decoding_steps_than_the_length_are_reduced(make, caplog):
  """T5X raises for a number, and reduces one that has a hard limit or is an argument of the compiled function."""
  model, batch = make()
  params = model.get_initial_variables(jax.random.key(0), model_cases.shapes_of(batch))['params']

  def predict(**options):
    options = {'temperature': 0.0, **options}
    return model.predict_batch_with_aux(params, batch, decoder_params=options)[0]

  def predict_with(steps):
    return predict(max_decode_steps=steps)

  caplog.set_level(logging.INFO)
  expected = predict()
  numbers = ({}, {'max_decode_steps_hard_limit': 50})
  for more in numbers:
    with pytest.raises(ConfigError, match='max_decode_steps` must be an integer from 1 to 6'):
      predict(max_decode_steps=99, **more)
  with checks.written_for_t5x(set()):
    for more in numbers:
      np.testing.assert_array_equal(predict(max_decode_steps=99, **more), expected)
  assert caplog.text.count('`max_decode_steps` is reduced to 6, the length of the sequences.') == 1
  np.testing.assert_array_equal(jax.jit(predict_with)(99), expected)
