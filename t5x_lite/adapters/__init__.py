"""Low-rank adapters: few parameters next to the kernels of a network, which are trained instead of the kernels."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.adapters.gradients': ('WITHOUT_GRADIENT', 'metrics_of_gradients'),
    't5x_lite.adapters.kernels': ('with_adapter',),
    't5x_lite.adapters.lora': ('Lora',),
  },
)
