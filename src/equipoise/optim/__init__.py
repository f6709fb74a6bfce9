"""Floor 6: optimizers, learning rates, clipping."""
