"""Checkpoints, written atomically while training continues and verified when they are restored.

`CheckpointManager` saves and restores below a model directory; `restore_checkpoint` and `load` read any checkpoint;
`builders` make the first state of a run from checkpoints. The configurations have the options; `discovery` describes
the layout on disk.
"""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(globals(), {
    't5x_lite.checkpoints.builders': ('StateBuilder',),
    't5x_lite.checkpoints.choice': (
        'get_first_valid_restore_config_and_paths', 'newest_of_others', 'newest_sound_step'),
    't5x_lite.checkpoints.commit': ('remove_dataset_checkpoint',),
    't5x_lite.checkpoints.config': ('CheckpointConfig', 'RestoreCheckpointConfig', 'SaveCheckpointConfig'),
    't5x_lite.checkpoints.discovery': (
        'all_dataset_checkpoint_steps', 'all_steps', 'get_checkpoint_dir', 'get_checkpoint_prefix',
        'get_step_from_checkpoint_dir', 'is_pinned_checkpoint', 'latest_step', 'pin_checkpoint',
        'pinned_checkpoint_filepath', 'remove_checkpoint_dir', 'unpin_checkpoint'),
    't5x_lite.checkpoints.layout': ('check_other_layout_fits', 'param_layout_fns'),
    't5x_lite.checkpoints.lock': ('check_is_shared', 'ModelDirLock', 'lock_model_dir'),
    't5x_lite.checkpoints.manager': ('CheckpointManager',),
    't5x_lite.checkpoints.manifest': ('Manifest', 'read as read_manifest', 'verify as verify_checkpoint'),
    't5x_lite.checkpoints.policies': (
        'AnySavePolicy', 'AtSteps', 'EveryNMinutes', 'EveryNSteps', 'KeepAll', 'KeepBest', 'KeepEvery', 'KeepLast',
        'OnRequest', 'RetentionPolicy', 'SavePoint', 'SavePolicy', 'WhenBest', 'metric_names',
        'save_policies_from_config', 'steps_to_delete'),
    't5x_lite.checkpoints.restore': (
        'RestoredCheckpoint', 'check_fits', 'check_keeps_dtypes', 'load', 'read_metadata', 'read_shapes',
        'restore_checkpoint'),
    't5x_lite.checkpoints.sources': ('StateSource', 'T5xNativeWriter', 'detect_format', 'open_source'),
    't5x_lite.checkpoints.spool': ('recover as recover_spooled',),
    't5x_lite.checkpoints.transforms': (
        'AcceptsShapes', 'ParameterInfo', 'RestoreStateTransformationFn', 'SaveStateTransformationFn',
        'ValuesNeededError', 'apply_assignment_map', 'convert_param_trees', 'flatten_state_dict', 'get_name_tree', 'intersect_state',
        'merge_state', 'transform_shapes'),
})
