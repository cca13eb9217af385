"""Corpora as builders of TensorFlow Datasets that need no TensorFlow."""
