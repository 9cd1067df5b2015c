"""Training: a rank's stages with gradients, an optimizer and checkpoints."""
