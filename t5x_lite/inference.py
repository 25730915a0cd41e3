"""Names of batch inference as earlier versions had them; see `t5x_lite.apps.infer`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(globals(), {
    't5x_lite.apps.infer.jsonl': ('Inferences', 'JsonEncoder', 'write_inferences_to_file')})
