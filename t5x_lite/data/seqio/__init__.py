"""Tasks and mixtures of seqio. Only these modules import TensorFlow, seqio and t5; `packages` does it for all."""
