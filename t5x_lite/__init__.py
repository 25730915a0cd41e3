"""t5x_lite: train T5-like models and experiment with Mixture-of-Experts on JAX, configured by gin.

Importing this package imports none of its modules but `lazy_names`. Import the one that you need, e.g.
`from t5x_lite import models`.
"""

from t5x_lite import lazy_names

__version__ = '0.1.0'

# Modules of packages that configurations and programs import from here.
__getattr__, __dir__, _ = lazy_names.lazy_names(
  globals(),
  {
    't5x_lite.command_line': ('cli',),
    't5x_lite.configuration': ('module_imports',),
    't5x_lite.storage': ('files',),
    't5x_lite.trainer': (
      'actions',
      'averaging',
      'eval_steps',
      'non_finite',
      'state_init',
      'step_params',
      'summaries',
      'train_step',
      'weight_metrics',
    ),
  },
)
