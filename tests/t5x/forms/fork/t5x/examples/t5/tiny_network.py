"""Network of a fork, in a package that T5X has too."""

from t5x.examples.t5 import network


def config(width: int = 32) -> network.T5Config:
  """Return the configuration of a small network."""
  return network.T5Config(
    vocab_size=384,
    dtype='float32',
    emb_dim=width,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=16,
    mlp_dim=64,
  )
