"""Training: the actions of a plan, gradient reduction, optimizer steps and checkpoints."""
