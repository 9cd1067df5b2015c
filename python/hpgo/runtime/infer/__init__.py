"""Inference: micro-batches that stream through stages, in fewer bits where links are slow."""
