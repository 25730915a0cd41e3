"""A network derived from a network of another package, as pix2struct derives from flaxformer's.

In T5X a binding belongs to one class: the subclass keeps the default of `shared_embedder`.
"""


class TextNetwork:
  """Stands for the network of the other package."""

  def __init__(self, shared_embedder=None):
    self.shared_embedder = shared_embedder


class ImageNetwork(TextNetwork):
  """Has no embedder for its inputs."""
