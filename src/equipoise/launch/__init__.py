"""Start ranks, here or elsewhere, always under torchrun; no torch in this process."""
