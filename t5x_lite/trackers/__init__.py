"""Trackers of experiments: they get what a run has written, by a follower that reads the files of the run.

`base` has the interface, `follower` the reading and the position, `threads` the followers of a run that trains.
`weights_and_biases`, `mlflow_tracker` and `tensor_board` are trackers; wandb and mlflow are imported when they are
used.
"""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.trackers.base': ('RunInfo', 'Tracker', 'make_tracker'),
    't5x_lite.trackers.follower': ('Follower',),
    't5x_lite.trackers.mlflow_tracker': ('Mlflow',),
    't5x_lite.trackers.tensor_board': ('TensorBoard',),
    't5x_lite.trackers.threads': ('FollowerThreads',),
    't5x_lite.trackers.weights_and_biases': ('Wandb',),
  },
)

# Name to the class here. The commands read it before they import anything large.
TRACKERS = {'wandb': 'Wandb', 'mlflow': 'Mlflow', 'tensorboard': 'TensorBoard'}
