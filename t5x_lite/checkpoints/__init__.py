"""Checkpoints, written atomically while training continues and verified when they are restored.

`CheckpointManager` saves and restores below a model directory; `restore_checkpoint` and `load` read any checkpoint. The
configurations have the options; `discovery` describes the layout on disk.
"""

from t5x_lite.checkpoints.choice import get_first_valid_restore_config_and_paths, newest_of_others, newest_sound_step
from t5x_lite.checkpoints.commit import remove_dataset_checkpoint
from t5x_lite.checkpoints.config import CheckpointConfig, RestoreCheckpointConfig, SaveCheckpointConfig
from t5x_lite.checkpoints.discovery import (
    all_dataset_checkpoint_steps,
    all_steps,
    get_checkpoint_dir,
    get_checkpoint_prefix,
    get_step_from_checkpoint_dir,
    is_pinned_checkpoint,
    latest_step,
    pin_checkpoint,
    pinned_checkpoint_filepath,
    remove_checkpoint_dir,
    unpin_checkpoint,
)
from t5x_lite.checkpoints.layout import check_other_layout_fits, param_layout_fns
from t5x_lite.checkpoints.lock import ModelDirLock, lock_model_dir
from t5x_lite.checkpoints.manager import CheckpointManager, ParameterInfo
from t5x_lite.checkpoints.manifest import Manifest
from t5x_lite.checkpoints.manifest import read as read_manifest
from t5x_lite.checkpoints.manifest import verify as verify_checkpoint
from t5x_lite.checkpoints.policies import AnySavePolicy, AtSteps, EveryNSteps, KeepAll, KeepBest, KeepEvery, KeepLast
from t5x_lite.checkpoints.policies import OnRequest, RetentionPolicy, SavePolicy, steps_to_delete
from t5x_lite.checkpoints.restore import (
    RestoredCheckpoint,
    check_fits,
    load,
    read_metadata,
    read_shapes,
    restore_checkpoint,
)
from t5x_lite.checkpoints.sources import StateSource, T5xNativeWriter, detect_format, open_source
from t5x_lite.checkpoints.transforms import (
    AcceptsShapes,
    RestoreStateTransformationFn,
    SaveStateTransformationFn,
    ValuesNeededError,
    apply_assignment_map,
    convert_param_trees,
    flatten_state_dict,
    get_name_tree,
    intersect_state,
    merge_state,
    transform_shapes,
)

__all__ = (
    'AcceptsShapes', 'AnySavePolicy', 'AtSteps', 'CheckpointConfig', 'CheckpointManager', 'EveryNSteps', 'KeepAll',
    'KeepBest', 'KeepEvery', 'KeepLast', 'Manifest', 'ModelDirLock', 'OnRequest', 'ParameterInfo',
    'RestoreCheckpointConfig', 'RestoreStateTransformationFn', 'RestoredCheckpoint', 'RetentionPolicy',
    'SaveCheckpointConfig', 'SavePolicy', 'SaveStateTransformationFn', 'StateSource', 'T5xNativeWriter',
    'ValuesNeededError', 'all_dataset_checkpoint_steps', 'all_steps', 'apply_assignment_map', 'check_fits',
    'check_other_layout_fits', 'convert_param_trees', 'detect_format', 'flatten_state_dict', 'get_checkpoint_dir',
    'get_checkpoint_prefix', 'get_first_valid_restore_config_and_paths', 'get_name_tree',
    'get_step_from_checkpoint_dir', 'intersect_state', 'is_pinned_checkpoint', 'latest_step', 'load',
    'lock_model_dir', 'merge_state', 'newest_of_others', 'newest_sound_step', 'open_source', 'param_layout_fns',
    'pin_checkpoint', 'pinned_checkpoint_filepath', 'read_manifest', 'read_metadata', 'read_shapes',
    'remove_checkpoint_dir', 'remove_dataset_checkpoint', 'restore_checkpoint', 'steps_to_delete', 'transform_shapes',
    'unpin_checkpoint', 'verify_checkpoint',
)
