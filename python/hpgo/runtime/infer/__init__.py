"""Inference: micro-batches stream forward through the stages of a plan."""
