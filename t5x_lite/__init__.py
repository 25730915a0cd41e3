"""t5x_lite: train T5-like models and experiment with Mixture-of-Experts on JAX, configured by gin.

Importing this package imports none of its modules. Import the one that you need, e.g. `from t5x_lite import models`.
"""

__version__ = '0.1.0'
