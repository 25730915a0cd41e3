"""The test of a module is where its name says, or in the file that the table names."""

import pathlib

_ROOT = pathlib.Path(__file__).parents[2]
# Modules without a test file of their name, and the file whose tests run them: through the function of their package
# that users call, or together with the module that they are a part of.
_TESTED_IN = {
  'moe/commands/report.py': 'moe/tools/report/test_report.py',
  'moe/commands/surgery.py': 'moe/tools/test_surgery_files.py',
  'moe/dispatch/capacity.py': 'moe/dispatch/test_apply.py',
  'moe/dispatch/exchange.py': 'moe/dispatch/test_expert_parallel.py',
  'moe/dispatch/grouped.py': 'moe/dispatch/test_apply.py',
  'moe/dispatch/mlp.py': 'moe/dispatch/test_apply.py',
  'moe/dispatch/sharding.py': 'moe/dispatch/test_memory.py',
  'moe/dispatch/tiles.py': 'moe/dispatch/test_apply.py',
  'moe/dispatch/types.py': 'moe/dispatch/test_apply.py',
  'moe/expert_state.py': 'moe/tools/test_surgery.py',
  'moe/experts.py': 'moe/test_layers.py',
  'moe/grouping.py': 'moe/test_layers.py',
  'moe/__main__.py': 'moe/commands/test_plan.py',
  'moe/routing/base.py': 'moe/routing/test_token_routers.py',
  'moe/routing/capacity.py': 'moe/routing/test_token_choice.py',
  'moe/routing/expert_choice.py': 'moe/routing/test_token_choice.py',
  'moe/routing/hashing.py': 'moe/routing/test_token_routers.py',
  'moe/routing/losses.py': 'moe/routing/test_golden.py',
  'moe/routing/plan.py': 'moe/dispatch/test_apply.py',
  'moe/routing/positions.py': 'moe/routing/test_token_choice.py',
  'moe/routing/result.py': 'examples/test_soft_router.py',
  'moe/routing/sinkhorn.py': 'moe/routing/test_token_routers.py',
  'moe/routing/types.py': 'moe/routing/test_token_choice.py',
  'moe/rules.py': 'moe/test_partitioner.py',
  'moe/state_axes.py': 'moe/test_partitioner_state.py',
  'moe/tools/capacity_plan.py': 'moe/commands/test_plan.py',
  **{
    f'moe/tools/report/{name}.py': 'moe/tools/report/test_report.py'
    for name in ('curves', 'data', 'figures', 'findings', 'maps', 'page', 'style')
  },
  't5x_lite/__main__.py': 'test_cli.py',
  't5x_lite/adafactor.py': 'optimizers/adafactor_rule/test_optimizer.py',
  't5x_lite/apps/chat/command.py': 'apps/chat/test_run.py',
  't5x_lite/apps/commands.py': 'test_cli.py',
  't5x_lite/apps/common/flags.py': 'test_cli.py',
  't5x_lite/apps/common/parts.py': 'apps/precompile/test_run.py',
  't5x_lite/apps/common/report.py': 'apps/train/test_run.py',
  't5x_lite/apps/convert/formats.py': 'apps/convert/test_command.py',
  't5x_lite/apps/convert/hugging_face.py': 'apps/convert/test_run.py',
  't5x_lite/apps/convert/source_network.py': 'apps/convert/test_run.py',
  't5x_lite/apps/convert/state_plan.py': 'apps/convert/test_plan.py',
  't5x_lite/apps/convert/targets.py': 'apps/convert/test_run.py',
  't5x_lite/apps/evaluate/config.py': 'apps/evaluate/test_run.py',
  't5x_lite/apps/evaluate/record.py': 'apps/evaluate/test_run.py',
  't5x_lite/apps/explain_sharding/run.py': 'apps/explain_sharding/test_command.py',
  't5x_lite/apps/export/command.py': 'apps/export/test_run.py',
  't5x_lite/apps/export/functions.py': 'apps/export/test_run.py',
  't5x_lite/apps/export/saved_model.py': 'apps/export/test_run.py',
  't5x_lite/apps/infer/config.py': 'apps/infer/test_run.py',
  't5x_lite/apps/infer/loop.py': 'apps/infer/test_run.py',
  't5x_lite/apps/infer/report.py': 'apps/infer/test_command.py',
  't5x_lite/apps/jsonl_to_array_record/command.py': 'data/test_grain_records.py',
  't5x_lite/apps/plot/command.py': 'apps/plot/test_run.py',
  't5x_lite/apps/precompile/command.py': 'apps/precompile/test_run.py',
  't5x_lite/apps/train/command.py': 'apps/test_bad_input.py',
  't5x_lite/apps/train/open_run.py': 'apps/train/test_run.py',
  't5x_lite/checkpoints/builders/base.py': 'checkpoints/builders/test_chain.py',
  't5x_lite/checkpoints/choice.py': 'apps/common/test_start.py',
  't5x_lite/checkpoints/folders/base.py': 'checkpoints/folders/test_disk.py',
  't5x_lite/checkpoints/folders/store.py': 'checkpoints/test_store_save.py',
  't5x_lite/checkpoints/hugging_face/network.py': 'repository/test_finetune_recipes.py',
  't5x_lite/checkpoints/layout.py': 'apps/common/test_start.py',
  't5x_lite/checkpoints/process_save.py': 'checkpoints/test_store_save.py',
  't5x_lite/checkpoints/sources/base.py': 'checkpoints/sources/test_sources.py',
  't5x_lite/checkpoints/sources/hugging_face.py': 'checkpoints/sources/test_sources.py',
  't5x_lite/checkpoints/sources/orbax.py': 'checkpoints/sources/test_sources.py',
  **{
    f't5x_lite/compat/{name}.py': 'compat/test_programs.py'
    for name in ('train', 'eval', 'infer', 'precompile')
  },
  't5x_lite/data/example_sources.py': 'data/test_text_sources.py',
  't5x_lite/data/interfaces.py': 'data/test_iterators.py',
  't5x_lite/data/positions.py': 'data/test_streams.py',
  't5x_lite/data/seqio_evaluation.py': 'data/test_seqio_source.py',
  't5x_lite/data/seqio_examples.py': 'data/test_text_examples.py',
  't5x_lite/data/seqio_features.py': 'data/test_seqio_source.py',
  't5x_lite/data/seqio_tasks.py': 'data/test_seqio_source.py',
  't5x_lite/data/seqio_tfexample.py': 'data/test_seqio_inference.py',
  't5x_lite/data/sources/seqio.py': 'data/test_seqio_source.py',
  't5x_lite/data/table_iterator.py': 'data/sources/test_table.py',
  't5x_lite/data/text_metrics.py': 'data/test_builtin_tasks.py',
  't5x_lite/data/tokenizer_json.py': 'data/test_tokenizer_folders.py',
  't5x_lite/data/trimming.py': 'data/test_truncation.py',
  't5x_lite/decoding/loop.py': 'decoding/test_sampling.py',
  't5x_lite/decoding/options.py': 'decoding/test_sampling.py',
  't5x_lite/interactive/opening.py': 'apps/common/test_runs.py',
  't5x_lite/interactive/tasks.py': 'interactive/test_model.py',
  't5x_lite/interactive/texts.py': 'apps/chat/test_run.py',
  't5x_lite/interactive_model.py': 'interactive/test_model.py',
  't5x_lite/layers/platforms.py': 'layers/test_attention_kernels.py',
  't5x_lite/lazy_names.py': 'repository/test_no_tensorflow.py',
  't5x_lite/multihost.py': 'apps/train/test_two_processes.py',
  't5x_lite/networks/network.py': 'networks/test_t5.py',
  't5x_lite/networks/param_layouts.py': 'networks/test_scan.py',
  't5x_lite/networks/stacks.py': 'networks/test_t5.py',
  't5x_lite/networks/t5_blocks.py': 'networks/test_t5.py',
  't5x_lite/networks/t5_config.py': 'networks/test_t5.py',
  't5x_lite/notebook.py': 'apps/common/test_runs.py',
  't5x_lite/optimizers/base/scalars.py': 'optimizers/test_rates.py',
  't5x_lite/optimizers/optax_adapter/calls.py': 'optimizers/optax_adapter/test_factories.py',
  't5x_lite/optimizers/optax_adapter/constructors.py': 'optimizers/test_rates.py',
  't5x_lite/optimizers/scaled_adam_rule/sizes.py': 'optimizers/scaled_adam_rule/test_transformation.py',
  't5x_lite/optimizers/shampoo/grafting.py': 'optimizers/shampoo/test_update.py',
  't5x_lite/tree_utils.py': 'test_train_state.py',
  't5x_lite/types.py': 'repository/test_layering.py',
  't5x_lite/weight_metrics.py': 'test_train_step.py',
}


def _own_test(module):
  """Returns where the test of a module is by its name, relative to `tests/`."""
  path = pathlib.PurePath(module)
  folder = path.parent if path.parts[0] == 'moe' else path.parent.relative_to('t5x_lite')
  return str(folder / f'test_{path.name}')


def test_every_module_has_a_test():
  modules = {
    str(path.relative_to(_ROOT))
    for top in ('t5x_lite', 'moe')
    for path in (_ROOT / top).rglob('*.py')
    if path.name != '__init__.py'
  }
  without = {module for module in modules if not (_ROOT / 'tests' / _own_test(module)).exists()}
  missing = {module: f'tests/{_own_test(module)}' for module in without - _TESTED_IN.keys()}
  assert not missing, (
    f'Write these tests, or name in _TESTED_IN the file that tests the module: {missing}'
  )
  stale = sorted(_TESTED_IN.keys() - without)
  assert not stale, (
    f'Remove these from _TESTED_IN: the module is gone or has a test of its name: {stale}'
  )
  gone = sorted({file for file in _TESTED_IN.values() if not (_ROOT / 'tests' / file).exists()})
  assert not gone, f'_TESTED_IN names files that do not exist: {gone}'


def test_every_folder_of_tests_is_one_of_the_package():
  other = {'examples', 'golden', 'interop', 'multiprocess', 'mutation', 'repository'}
  folders = {
    str(path.parent.relative_to(_ROOT / 'tests')) for path in (_ROOT / 'tests').rglob('test_*.py')
  }
  strange = sorted(
    folder
    for folder in folders
    if folder.split('/')[0] not in other
    and not (_ROOT / 't5x_lite' / folder).is_dir()
    and not (_ROOT / folder).is_dir()
  )
  assert not strange, f'Move these to the folder of the tested package: {strange}'
