"""One training step: the passes over a batch, the losses, and the optimizer."""
