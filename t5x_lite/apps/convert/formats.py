"""Formats that `t5x_lite convert` writes, and other names of them."""

FORMATS = ('t5x_lite', 't5x', 'hugging_face')
# Names that users give to formats, in lower case.
OTHER_NAMES = {
  'hf': 'hugging_face',
  'huggingface': 'hugging_face',
  'hugging-face': 'hugging_face',
  'transformers': 'hugging_face',
  'pytorch': 'hugging_face',
  'torch': 'hugging_face',
  'pt': 'hugging_face',
  'safetensors': 'hugging_face',
  't5x-lite': 't5x_lite',
  't5xlite': 't5x_lite',
}
