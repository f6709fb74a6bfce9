"""Floor 7: starting ranks, here or elsewhere. Always torchrun; no torch in this process."""
