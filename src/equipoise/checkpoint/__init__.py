"""Checkpoints, each of them whole or absent."""
