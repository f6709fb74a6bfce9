"""Optimizers, learning rates, clipping."""
