"""Formats that `t5x_lite convert` writes, and other names of them."""

FORMATS = ('t5x_lite', 't5x', 'hugging_face')
# Names that users give to formats, in lower case.
OTHER_NAMES: dict[str, str] = dict.fromkeys(
  ('hf', 'huggingface', 'hugging-face', 'transformers', 'pytorch', 'torch', 'pt', 'safetensors'),
  'hugging_face',
) | dict.fromkeys(('t5x-lite', 't5xlite'), 't5x_lite')
