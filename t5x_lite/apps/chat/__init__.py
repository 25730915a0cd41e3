"""Answers of a trained model to typed text, and the flags of `t5x_lite chat`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(), {'t5x_lite.apps.chat.run': ('Chat', 'DecodingOptions', 'chat')}
)
