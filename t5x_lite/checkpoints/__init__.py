"""Checkpoints, written atomically while training continues and verified when they are restored.

`CheckpointManager` saves and restores below a model directory; `restore_checkpoint` and `load` read any checkpoint;
`builders` make the first state of a run from checkpoints. The configurations have the options; `discovery` describes
the layout on disk.
"""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(globals(), {
    't5x_lite.checkpoints.builders': ('StateBuilder',),
    't5x_lite.checkpoints.checkpointer': ('Checkpointer', 'CheckpointerConstructor', 'SaveBestCheckpointer'),
    't5x_lite.checkpoints.choice': (
        'get_first_valid_restore_config_and_paths', 'newest_of_others', 'newest_sound_step'),
    't5x_lite.checkpoints.commit': ('remove_dataset_checkpoint',),
    't5x_lite.checkpoints.config': (
        'CheckpointConfig', 'RestoreCheckpointConfig', 'SaveCheckpointConfig', 'check_standard', 'is_standard'),
    't5x_lite.checkpoints.discovery': (
        'all_dataset_checkpoint_steps', 'all_steps', 'all_steps_of_any_program', 'get_checkpoint_dir',
        'get_checkpoint_prefix',
        'get_step_from_checkpoint_dir', 'is_pinned_checkpoint', 'latest_step', 'latest_step_of_any_program',
        'pin_checkpoint',
        'pinned_checkpoint_filepath', 'remove_checkpoint_dir', 'unpin_checkpoint'),
    't5x_lite.checkpoints.event_metrics': ('populate_metrics_for_steps',),
    't5x_lite.checkpoints.layout': ('check_other_layout_fits', 'param_layout_fns'),
    't5x_lite.checkpoints.legacy': (
        'LegacyCheckpointManager', 'LegacyCheckpointer', 'create_checkpoint_manager_and_restore',
        'create_orbax_checkpoint_manager', 'get_fallback_state', 'restore_checkpointer'),
    't5x_lite.checkpoints.loading': (
        'CheckpointTypes', 'detect_checkpoint_type', 'find_checkpoint', 'get_restore_parameters',
        'load_t5x_checkpoint', 'register_ts_spec_for_serialization'),
    't5x_lite.checkpoints.lock': ('check_is_shared', 'ModelDirLock', 'lock_model_dir'),
    't5x_lite.checkpoints.manager': ('CheckpointManager',),
    't5x_lite.checkpoints.manager_interface': ('CheckpointManagerConstructor', 'OrbaxCheckpointManagerInterface'),
    't5x_lite.checkpoints.manifest': ('Manifest', 'read as read_manifest', 'verify as verify_checkpoint'),
    't5x_lite.checkpoints.policies': (
        'AnySavePolicy', 'AtSteps', 'EveryNMinutes', 'EveryNSteps', 'KeepAll', 'KeepBest', 'KeepEvery', 'KeepLast',
        'OnRequest', 'RetentionPolicy', 'SavePoint', 'SavePolicy', 'WhenBest', 'find_first_checkpoint_step',
        'find_next_checkpoint_step', 'metric_names', 'save_policies_from_config', 'steps_to_delete'),
    't5x_lite.checkpoints.restore': (
        'RestoredCheckpoint', 'check_fits', 'check_keeps_dtypes', 'load', 'read_metadata', 'read_shapes',
        'restore_checkpoint'),
    't5x_lite.checkpoints.sources': ('StateSource', 'T5xNativeWriter', 'detect_format', 'open_source'),
    't5x_lite.checkpoints.spool': ('recover as recover_spooled',),
    't5x_lite.checkpoints.train_states': ('get_local_data', 'restore_train_state', 'save_train_state'),
    't5x_lite.checkpoints.transforms': (
        'AcceptsShapes', 'AssignmentMap', 'ParameterInfo', 'RestoreStateTransformationFn', 'SaveStateTransformationFn',
        'ValuesNeededError', 'apply_assignment_map', 'convert_param_trees', 'flatten_state_dict', 'get_name_tree',
        'intersect_state', 'merge_state', 'tensorstore_leaf', 'transform_shapes'),
})
