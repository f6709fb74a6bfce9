"""Floor 7: start ranks, here or elsewhere, always under torchrun; no torch in this process."""
