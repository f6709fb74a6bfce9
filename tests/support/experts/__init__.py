"""Checkpoints that ranks write, break and read in tests."""
