"""Nano-batches of one iteration, overlapped on the cores of this machine."""
