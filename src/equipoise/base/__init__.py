"""Floor 1: errors, units, digests, the legend of shapes, the registry of systems."""
