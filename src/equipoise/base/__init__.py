"""Errors, units, digests, the legend of shapes, the registry of systems."""
