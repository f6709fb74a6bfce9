"""Tensor and sequence parallelism: each rank has a share of the weights."""
